// SPDX-License-Identifier: Apache-2.0
//! Byte locks of an open file description (`F_OFD_SETLK`, fcntl_locking(2)).
//!
//! A lock belongs to the open file *description*, not to the process: it lasts
//! until the last descriptor of that description is closed, wherever that is
//! (another process, the file table of an io_uring). Two descriptions of one
//! process exclude each other like those of two processes.
#![expect(unsafe_code, reason = "rustix has no locks of open file descriptions")]

use rustix::io::Errno;
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// Why a byte could not be locked or examined.
#[derive(Debug, thiserror::Error)]
pub enum ByteLockError {
    /// Its file system does not support such locks.
    #[error("the file system has no byte locks ({0})")]
    Unsupported(io::Error),
    /// The kernel refused.
    #[error("fcntl failed: {0}")]
    Kernel(io::Error),
}

/// Result of an attempt to lock a byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ByteLocked {
    /// It is locked.
    Ours,
    /// Another open file has locked it exclusively.
    HeldByAnother,
}

/// Takes a shared lock on the byte at `offset`, without blocking. `file` must be open for reading.
///
/// # Errors
/// [`ByteLockError`].
pub fn lock_shared(file: BorrowedFd<'_>, offset: u32) -> Result<ByteLocked, ByteLockError> {
    let mut lock = description(libc::F_RDLCK, offset, 1);
    match fcntl(file, libc::F_OFD_SETLK, &mut lock) {
        Ok(()) => Ok(ByteLocked::Ours),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(ByteLocked::HeldByAnother),
        Err(error) => Err(failed(error)),
    }
}

/// True if another open file has any lock on the byte at `offset`.
///
/// # Errors
/// [`ByteLockError`].
pub fn is_locked_by_another(file: BorrowedFd<'_>, offset: u32) -> Result<bool, ByteLockError> {
    let mut lock = description(libc::F_WRLCK, offset, 1);
    fcntl(file, libc::F_OFD_GETLK, &mut lock).map_err(failed)?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Releases all locks that `file` has.
///
/// # Errors
/// [`ByteLockError`].
pub fn unlock_all(file: BorrowedFd<'_>) -> Result<(), ByteLockError> {
    // A length of 0 reaches to the end of any file.
    let mut lock = description(libc::F_UNLCK, 0, 0);
    fcntl(file, libc::F_OFD_SETLK, &mut lock).map_err(failed)
}

fn description(kind: i32, offset: u32, bytes: i64) -> libc::flock {
    // SAFETY: a plain structure of integers, for which zero is valid; `l_pid` must be 0 here.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = i16::try_from(kind).unwrap_or_default();
    lock.l_whence = i16::try_from(libc::SEEK_SET).unwrap_or_default();
    lock.l_start = i64::from(offset);
    lock.l_len = bytes;
    lock
}

fn fcntl(file: BorrowedFd<'_>, command: i32, lock: &mut libc::flock) -> Result<(), Errno> {
    // SAFETY: the descriptor is open; these commands read and write one `flock`, which is ours.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(lock)) };
    if result < 0 {
        let error = io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    Ok(())
}

fn failed(error: Errno) -> ByteLockError {
    match error {
        Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL => {
            ByteLockError::Unsupported(error.into())
        }
        _ => ByteLockError::Kernel(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::File, os::fd::AsFd};

    fn file(name: &str) -> (std::path::PathBuf, File) {
        let path = std::env::temp_dir().join(format!("pagetide-{name}-{}", std::process::id()));
        std::fs::write(&path, "").unwrap();
        let file = File::open(&path).unwrap();
        (path, file)
    }

    #[test]
    fn lock_is_seen_by_other_open_files_only_and_lasts_until_the_last_descriptor() {
        let (path, first) = file("byte-lock");
        let second = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(lock_shared(first.as_fd(), 201).unwrap(), ByteLocked::Ours);
        assert!(!is_locked_by_another(first.as_fd(), 201).unwrap());
        assert!(is_locked_by_another(second.as_fd(), 201).unwrap());
        assert!(!is_locked_by_another(second.as_fd(), 200).unwrap());
        // Shared locks do not exclude one another.
        assert_eq!(lock_shared(second.as_fd(), 201).unwrap(), ByteLocked::Ours);
        unlock_all(second.as_fd()).unwrap();
        let copy = first.try_clone().unwrap();
        drop(first);
        assert!(is_locked_by_another(second.as_fd(), 201).unwrap());
        drop(copy);
        assert!(!is_locked_by_another(second.as_fd(), 201).unwrap());
    }

    #[test]
    fn unlocking_gives_up_every_byte() {
        let (path, first) = file("byte-unlock");
        let second = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        for byte in [100, 203] {
            lock_shared(first.as_fd(), byte).unwrap();
        }
        unlock_all(first.as_fd()).unwrap();
        for byte in [100, 203] {
            assert!(!is_locked_by_another(second.as_fd(), byte).unwrap());
        }
    }
}
