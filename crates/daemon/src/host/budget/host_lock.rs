// SPDX-License-Identifier: Apache-2.0
//! [`HostLock`]: held by the one daemon of a host that has a budget.
//!
//! Two budgets on one host would each promise the same memory. So a daemon with a budget holds a lock on a
//! file in a fixed place (`budget-lock`), as long as it lives or until the budget is lifted; the kernel drops
//! it with the process. The file says who holds it. Daemons without a budget do not ask.

use crate::control::ControlError;
use pagetide_sys::pauses::Pauses;
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use std::{
    fs::{DirBuilder, File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::Path,
    time::{Duration, Instant},
};

/// How long a successor waits for a predecessor that is exiting.
pub(super) const LOCK_WAIT: Duration = Duration::from_secs(15);
/// The same with VMs that are to be served: of a predecessor that was killed only the end of its exit is left, since
/// it has given up the lock of the state directory.
pub(super) const SERVED_LOCK_WAIT: Duration = Duration::from_millis(500);
const LOCK_RETRY: Duration = Duration::from_millis(10);
/// Longest note of a holder that is read.
const NOTE_BYTES_MAX: u64 = 4096;

/// See the module.
#[derive(Debug)]
pub(super) struct HostLock {
    _file: File,
}

impl HostLock {
    /// Takes the lock at `path` for the daemon of `state_dir`; waits up to `wait` for another to leave it.
    ///
    /// # Errors
    /// Another daemon has it, or the file cannot be used.
    pub(super) fn take(
        path: &Path,
        state_dir: &Path,
        wait: Duration,
    ) -> Result<Self, ControlError> {
        let unusable = |error: &dyn std::fmt::Display| {
            ControlError::refused(format!(
                "no budget without the lock {}, which keeps two daemons from dividing the same memory, and it cannot be \
                 had: {error}; make its directory, or give another path by --budget-lock",
                path.display()
            ))
        };
        let mut file = open(path).map_err(|error| unusable(&error))?;
        let until = Instant::now() + wait;
        let mut pauses = Pauses::up_to(LOCK_RETRY);
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK) if Instant::now() < until => pauses.pause(),
                Err(Errno::WOULDBLOCK) => return Err(taken(path, &mut file)),
                Err(Errno::INTR) => {}
                Err(error) => return Err(unusable(&error)),
            }
        }
        let note = format!(
            "process {}, state directory {}\n",
            std::process::id(),
            state_dir.display()
        );
        let written = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(note.as_bytes()));
        written.map_err(|error| unusable(&error))?;
        Ok(Self { _file: file })
    }
}

/// Opens the file, which is made if it is missing, and refuses one that others could have put there.
fn open(path: &Path) -> io::Result<File> {
    if let Some(folder) = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
    {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(folder)?;
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)?;
    let there = file.metadata()?;
    let own = rustix::process::geteuid().as_raw();
    if there.is_file() && there.uid() == own {
        Ok(file)
    } else {
        Err(io::Error::other(format!("it is not a file of user {own}")))
    }
}

fn taken(path: &Path, file: &mut File) -> ControlError {
    let mut note = String::new();
    let who = match file.take(NOTE_BYTES_MAX).read_to_string(&mut note) {
        Ok(_) if !note.trim().is_empty() => format!(" ({})", note.trim()),
        Ok(_) | Err(_) => String::new(),
    };
    ControlError::refused(format!(
        "another pagetide{who} has a budget for this host, and holds {}: two would promise the same memory twice; lift \
         that one first (`pagetide host budget off`), or run this daemon without a budget (--host-budget off)",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_holder_is_refused_by_name_until_the_first_has_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/pagetide/budget.lock");
        let take = || HostLock::take(&path, Path::new("/dev/shm/one"), Duration::ZERO);
        let first = take().unwrap();
        let error = take().unwrap_err();
        assert_eq!(error.kind, crate::control::ErrorKind::Refused);
        let who = format!(
            "process {}, state directory /dev/shm/one",
            std::process::id()
        );
        assert!(error.message.contains(&who), "{error}");
        drop(first);
        take().unwrap();
    }

    #[test]
    fn link_and_directory_in_its_place_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&file, "theirs").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [link.as_path(), dir.path()] {
            let error = HostLock::take(path, Path::new("/s"), Duration::ZERO).unwrap_err();
            assert!(error.message.contains("--budget-lock"), "{error}");
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "theirs");
    }
}
