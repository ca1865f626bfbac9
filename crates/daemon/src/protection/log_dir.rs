// SPDX-License-Identifier: Apache-2.0
//! [`LogDir`]: a directory that one recording at a time writes to.
//!
//! Files are numbered after the last existing one, and the oldest are removed. Two daemons, or two
//! recordings of which the second starts while the first still writes, would use the same numbers,
//! replace each other's files and count each other's among those they may remove. A recording therefore
//! holds a lock on the directory itself (`flock`): it leaves nothing behind, and the kernel releases it
//! when its holder dies.

use crate::control::ControlError;
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use std::{fs::File, path::Path};

/// The lock of a directory, until it is dropped.
#[derive(Debug)]
pub(super) struct LogDir {
    _file: File,
}

impl LogDir {
    /// Locks the directory.
    ///
    /// # Errors
    /// An error message: another recording holds the lock, or it cannot be locked.
    pub(super) fn take(dir: &Path) -> Result<Self, ControlError> {
        let file = File::open(dir).map_err(|error| {
            ControlError::refused(format!(
                "the directory '{}' cannot be opened: {error}",
                dir.display()
            ))
        })?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { _file: file }),
            Err(Errno::WOULDBLOCK) => Err(ControlError::refused(format!(
                "another daemon records accesses into '{}', and their files would have the same names: give \
                 each a directory of its own",
                dir.display()
            ))),
            Err(error) => Err(ControlError::refused(format!(
                "the directory '{}' cannot be locked against other daemons ({error}): give one on a local file \
                 system",
                dir.display()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_is_taken_once_and_free_again_when_its_holder_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir().unwrap();
        let held = LogDir::take(dir.path()).unwrap();
        let refused = LogDir::take(dir.path()).unwrap_err().message;
        assert!(refused.contains("another daemon"), "{refused}");
        LogDir::take(other.path()).unwrap();
        drop(held);
        LogDir::take(dir.path()).unwrap();
    }
}
