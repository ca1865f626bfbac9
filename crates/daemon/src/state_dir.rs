// SPDX-License-Identifier: Apache-2.0
//! The state directory: pools, locks, the API socket.
//!
//! It holds guest memory, so it belongs to one user and no other user may read it. It must be on tmpfs:
//! pools are mapped and written at every fault, and their content must not outlive the host, just as the
//! VMs do not.
//!
//! Only one daemon at a time works in it; it holds a lock on `lock`. A predecessor that was just killed
//! may still be exiting, so a successor waits up to [`LOCK_WAIT`] for the lock.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pagetide_sys::pauses::Pauses;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// How long to wait for a predecessor that is exiting: its exit tears down mappings and rings of every
/// VM, which takes a few seconds on a large host.
const LOCK_WAIT: Duration = Duration::from_secs(15);
/// Longest interval between attempts to take the lock.
const LOCK_RETRY: Duration = Duration::from_millis(50);
/// `f_type` of tmpfs (statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Why the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateDirError {
    /// It cannot be created, opened or locked.
    #[error(
        "cannot use the state directory {path}: {source}; give --state-dir one on tmpfs that you own"
    )]
    Failed {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// It is not a directory, or belongs to another user.
    #[error("{path} is not a directory of user {uid}: remove it, or give --state-dir another path")]
    NotOurs {
        /// The directory.
        path: PathBuf,
        /// Our user.
        uid: u32,
    },
    /// It is on a disk.
    #[error("the state directory {0} is not on tmpfs: give --state-dir one below /dev/shm or /run")]
    NotTmpfs(PathBuf),
    /// Another daemon is running in it.
    #[error("another pagetide works in {0}: stop it, or give --state-dir another path")]
    Taken(PathBuf),
}

/// The directory, locked for this process.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    lock: File,
}

impl StateDir {
    /// The directory at `path`, of which `lock` is the lock file, locked by a predecessor: the lock belongs to the
    /// open file, and so has never fallen.
    ///
    /// # Errors
    /// It is another file.
    pub fn adopt(path: &Path, lock: OwnedFd) -> Result<Self, StateDirError> {
        let failed = |source: io::Error| StateDirError::Failed {
            path: path.to_owned(),
            source,
        };
        let lock = File::from(lock);
        let there = std::fs::symlink_metadata(path.join("lock")).map_err(failed)?;
        let held = lock.metadata().map_err(failed)?;
        if (there.dev(), there.ino()) != (held.dev(), held.ino()) {
            return Err(failed(io::Error::other(
                "the lock that was handed over is that of another directory",
            )));
        }
        Ok(Self {
            path: path.to_owned(),
            lock,
        })
    }

    /// A copy of the lock, which lasts as long as any of its copies.
    ///
    /// # Errors
    /// The kernel's.
    pub fn lock(&self) -> io::Result<OwnedFd> {
        Ok(self.lock.try_clone()?.into())
    }

    /// Creates the directory if it is missing, checks it and locks it.
    pub fn open(path: &Path) -> Result<Self, StateDirError> {
        Self::open_within(path, LOCK_WAIT)
    }

    fn open_within(path: &Path, wait: Duration) -> Result<Self, StateDirError> {
        let failed = |source: io::Error| StateDirError::Failed {
            path: path.to_owned(),
            source,
        };
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed(error));
            }
            _ => {}
        }
        let there = std::fs::symlink_metadata(path).map_err(failed)?;
        let uid = rustix::process::geteuid().as_raw();
        if !there.is_dir() || there.uid() != uid {
            return Err(StateDirError::NotOurs {
                path: path.to_owned(),
                uid,
            });
        }
        if rustix::fs::statfs(path)
            .map_err(|e| failed(e.into()))?
            .f_type
            != TMPFS_MAGIC
        {
            return Err(StateDirError::NotTmpfs(path.to_owned()));
        }
        let private = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(path, private).map_err(failed)?;
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path.join("lock"))
            .map_err(failed)?;
        let until = Instant::now() + wait;
        let mut pauses = Pauses::up_to(LOCK_RETRY);
        loop {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK) if Instant::now() < until => pauses.pause(),
                Err(Errno::WOULDBLOCK) => return Err(StateDirError::Taken(path.to_owned())),
                Err(Errno::INTR) => {}
                Err(error) => return Err(failed(error.into())),
            }
        }
        Ok(Self {
            path: path.to_owned(),
            lock,
        })
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_tmpfs() -> Option<tempfile::TempDir> {
        let dir = tempfile::tempdir_in("/dev/shm");
        if dir.is_err() {
            eprintln!("SKIPPED: /dev/shm cannot be written here");
        }
        dir.ok()
    }

    #[test]
    fn missing_directory_is_made_for_its_owner_only() {
        let Some(dir) = on_tmpfs() else { return };
        let path = dir.path().join("state");
        let state = StateDir::open(&path).unwrap();
        assert_eq!(state.path(), path);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn directory_open_to_others_is_closed_to_them() {
        let Some(dir) = on_tmpfs() else { return };
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let _state = StateDir::open(dir.path()).unwrap();
        let mode = std::fs::metadata(dir.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn directory_of_a_living_daemon_is_refused() {
        let Some(dir) = on_tmpfs() else { return };
        let _first = StateDir::open(dir.path()).unwrap();
        let second = StateDir::open_within(dir.path(), Duration::ZERO);
        assert!(matches!(second, Err(StateDirError::Taken(_))));
    }

    #[test]
    fn lock_that_is_handed_over_is_adopted_and_that_of_another_directory_is_not() {
        let Some(dir) = on_tmpfs() else { return };
        let first = StateDir::open(dir.path()).unwrap();
        let second = StateDir::adopt(dir.path(), first.lock().unwrap()).unwrap();
        drop(first);
        let third = StateDir::open_within(dir.path(), Duration::ZERO);
        assert!(matches!(third, Err(StateDirError::Taken(_))), "{third:?}");
        let Some(other) = on_tmpfs() else { return };
        let _other = StateDir::open(other.path()).unwrap();
        let wrong = StateDir::adopt(other.path(), second.lock().unwrap());
        assert!(matches!(wrong, Err(StateDirError::Failed { .. })));
    }

    #[test]
    fn directory_off_tmpfs_and_symbolic_link_are_refused() {
        let off = StateDir::open(Path::new("/proc/self/task"));
        assert!(matches!(off, Err(StateDirError::NotTmpfs(_))), "{off:?}");
        let Some(dir) = on_tmpfs() else { return };
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(matches!(
            StateDir::open(&link),
            Err(StateDirError::NotOurs { .. })
        ));
    }
}
