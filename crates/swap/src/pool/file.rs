// SPDX-License-Identifier: Apache-2.0
//! The file of a pool: locked by its one user, created under another name, mapped whole.

use super::{error::PoolError, format::MAGIC};
use pagetide_sys::{
    mapping::SharedMapping,
    memory_file::{GuestFile, LockWait, Locked},
};
use rustix::fs::{Mode, OFlags};
use std::{io::Read as _, os::fd::AsFd, path::Path};

pub(super) fn open_locked(path: &Path, flags: OFlags) -> Result<GuestFile, PoolError> {
    let flags = flags | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)
        .map_err(|source| at(path, "open", source))?;
    let file = GuestFile::from(fd);
    match file.lock_exclusive(LockWait::Try) {
        Ok(Locked::Ours) => Ok(file),
        Ok(Locked::HeldByAnother) => Err(PoolError::InUse(path.to_owned())),
        Err(source) => Err(PoolError::File {
            path: path.to_owned(),
            source,
        }),
    }
}

/// The version of the pool at `path`, in use or not; `None` if it does not begin like a pool.
///
/// # Errors
/// [`PoolError`]: it cannot be read.
pub fn version_at(path: &Path) -> Result<Option<u64>, PoolError> {
    let failed = |operation| {
        move |source| PoolError::Path {
            path: path.to_owned(),
            operation,
            source,
        }
    };
    let mut file = std::fs::File::open(path).map_err(failed("open"))?;
    let mut cells = [0; 16];
    match file.read_exact(&mut cells) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(failed("read")(error)),
    }
    let [magic, version] = [0, 8].map(|at| {
        let mut cell = [0; 8];
        cell.copy_from_slice(&cells[at..at + 8]);
        u64::from_ne_bytes(cell)
    });
    Ok((magic == MAGIC).then_some(version))
}

/// Gives a finished pool its name, unless a pool of that name exists: that may be a VM's only
/// memory.
pub(super) fn keep_as(unfinished: &Path, path: &Path) -> Result<(), PoolError> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    match renameat_with(CWD, unfinished, CWD, path, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::EXIST) => Err(PoolError::Exists(path.to_owned())),
        Err(source) => Err(at(path, "rename", source)),
    }
}

pub(super) fn map(path: &Path, file: &GuestFile, length: u64) -> Result<SharedMapping, PoolError> {
    let mapping = SharedMapping::new(file.as_fd(), length).map_err(|source| PoolError::Map {
        path: path.to_owned(),
        source,
    })?;
    // A pool in swap is slow, not wrong.
    if let Err(error) = mapping.keep_out_of_swap() {
        tracing::warn!(pool = %path.display(), %error, "the kernel may swap this pool out; give the daemon CAP_IPC_LOCK");
    }
    Ok(mapping)
}

pub(super) fn at(path: &Path, operation: &'static str, source: rustix::io::Errno) -> PoolError {
    PoolError::Path {
        path: path.to_owned(),
        operation,
        source: source.into(),
    }
}

/// Removes an unfinished pool. A missing file is no error, and any other failure shows when the
/// name is used next.
pub(super) fn remove_quietly(path: &Path) {
    if let Err(error) = rustix::fs::unlink(path)
        && error != rustix::io::Errno::NOENT
    {
        tracing::warn!(path = %path.display(), %error, "an unfinished pool could not be removed");
    }
}
