// SPDX-License-Identifier: Apache-2.0
//! Locks of dead engines: when a successor may begin.
//!
//! I/O submitted by a killed process goes on: seconds later it still lands in guest RAM or in an
//! image. A successor that completed such a request again, or evicted its page, would lose data. So
//! each engine's ring holds a lock file (`engine-N.lock`) in its file table and nowhere else. The
//! kernel frees the table when the ring's last request is done, and only this releases the `flock`.
//!
//! The lock does not cover requests that never entered the ring (they are in the in-flight region),
//! nor I/O of other programs on the image.

use pagetide_sys::memory_file::{FileError, GuestFile, LockWait, Locked};
use rustix::fs::{Mode, OFlags};
use std::{
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How long [`take`] waits: the kernel tears down a ring that this process has closed in the
/// background, within milliseconds.
const TAKE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a lock cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// The directory or file cannot be used.
    #[error("lock file {path}: {source}")]
    File {
        /// The file or directory.
        path: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Locking failed.
    #[error("lock file {path}: {source}")]
    Lock {
        /// The file.
        path: PathBuf,
        /// Why.
        source: FileError,
    },
    /// Another process, or its I/O, holds it.
    #[error(
        "lock file {0} is held: another daemon uses this state directory, or the I/O of a killed one is still under way"
    )]
    Held(PathBuf),
}

fn open(path: &Path) -> Result<OwnedFd, LockError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|source| LockError::File {
        path: path.to_owned(),
        source: source.into(),
    })
}

/// Takes the lock of engine `engine`. It is released when the last copy of the descriptor is
/// closed.
pub(crate) fn take(state_dir: &Path, engine: usize) -> Result<OwnedFd, LockError> {
    let path = state_dir.join(format!("engine-{engine}.lock"));
    let file = open(&path)?;
    let copy = file.try_clone().map_err(|source| LockError::File {
        path: path.clone(),
        source,
    })?;
    let locked = GuestFile::from(copy)
        .lock_exclusive_within(TAKE_TIMEOUT)
        .map_err(|source| LockError::Lock {
            path: path.clone(),
            source,
        })?;
    match locked {
        Locked::Ours => Ok(file),
        Locked::HeldByAnother => Err(LockError::Held(path)),
    }
}

/// Waits until all I/O of engines that died with this state directory is done. Until this has
/// returned, nothing may be recovered, evicted or completed. `progress` is called for each lock
/// that is still held, before the wait for it; `wait` bounds all of them together, if it is given.
///
/// # Errors
/// [`LockError`], if a lock cannot be examined, or is held for longer.
pub fn wait_for_dead_engines(
    state_dir: &Path,
    wait: Option<Duration>,
    mut progress: impl FnMut(&Path),
) -> Result<(), LockError> {
    let until = wait.map(|wait| Instant::now() + wait);
    let failed = |source| LockError::File {
        path: state_dir.to_owned(),
        source,
    };
    for entry in std::fs::read_dir(state_dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if !(name.starts_with("engine-") && name.ends_with(".lock")) {
            continue;
        }
        let path = entry.path();
        let lock = GuestFile::from(open(&path)?);
        let locking = |source| LockError::Lock {
            path: path.clone(),
            source,
        };
        if lock.lock_exclusive(LockWait::Try).map_err(locking)? == Locked::HeldByAnother {
            progress(&path);
            let locked = match until {
                None => lock.lock_exclusive(LockWait::Wait),
                Some(until) => {
                    lock.lock_exclusive_within(until.saturating_duration_since(Instant::now()))
                }
            };
            match locked.map_err(locking)? {
                Locked::Ours => {}
                Locked::HeldByAnother => return Err(LockError::Held(path)),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::IoRing;

    #[test]
    fn lock_is_held_by_the_ring_alone_and_falls_with_it() {
        let dir = tempfile::tempdir().unwrap();
        // The ring closes the descriptor it gets, so from here on only its table holds the file.
        let ring: IoRing<()> = IoRing::new(8, take(dir.path(), 0).unwrap()).unwrap();
        let other = GuestFile::from(open(&dir.path().join("engine-0.lock")).unwrap());
        assert_eq!(
            other.lock_exclusive(LockWait::Try).unwrap(),
            Locked::HeldByAnother
        );
        let held = wait_for_dead_engines(dir.path(), Some(Duration::ZERO), |_| {});
        assert!(matches!(held, Err(LockError::Held(_))), "{held:?}");
        drop(ring);
        assert_eq!(
            other.lock_exclusive(LockWait::Try).unwrap(),
            Locked::Ours,
            "it is given up before the kernel has taken the ring apart"
        );
        drop(other);
        wait_for_dead_engines(dir.path(), None, |_| {}).unwrap();
        assert!(take(dir.path(), 0).is_ok());
    }

    #[test]
    fn files_that_are_no_locks_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("pool-1"), b"x").unwrap();
        wait_for_dead_engines(dir.path(), None, |_| panic!("nobody holds a lock")).unwrap();
        assert!(wait_for_dead_engines(&dir.path().join("nowhere"), None, |_| {}).is_err());
    }
}
