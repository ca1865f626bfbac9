// SPDX-License-Identifier: Apache-2.0
//! Memory of ours that a device process uses: what a *driver* lends, in benches and tests.
//!
//! The other crates implement the device side. Driving a device also requires the other side:
//! buffers that the device's process maps by descriptor, and whose slices are passed to a driver
//! crate's safe calls.
#![expect(
    unsafe_code,
    reason = "a slice of shared memory is made from the mapping's pointer"
)]

use crate::{
    mapping::{MappingError, SharedMapping},
    memory_file::{FileError, GuestFile},
    to_usize,
};
use std::os::fd::{AsFd, BorrowedFd};

/// Why memory to lend could not be created.
#[derive(Debug, thiserror::Error)]
pub enum LentError {
    /// The file.
    #[error(transparent)]
    File(#[from] FileError),
    /// Its mapping.
    #[error(transparent)]
    Mapping(#[from] MappingError),
}

/// A memfd of our own, mapped here and meant to be mapped by a device.
#[derive(Debug)]
pub struct LentMemory {
    file: GuestFile,
    mapping: SharedMapping,
}

impl LentMemory {
    /// `bytes` of zeros.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn new(name: &str, bytes: u64) -> Result<Self, LentError> {
        let memory = Self::sparse(name, bytes)?;
        memory.file.allocate(0, bytes)?;
        Ok(memory)
    }

    /// The same, but a page is allocated only when it is touched.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn sparse(name: &str, bytes: u64) -> Result<Self, LentError> {
        let file = GuestFile::new_memfd(name, bytes)?;
        let mapping = SharedMapping::new(file.as_fd(), bytes)?;
        Ok(Self { file, mapping })
    }

    /// Address of the first byte in this process.
    #[must_use]
    pub fn address(&self) -> usize {
        self.mapping.address()
    }

    /// The `len` bytes at `offset`, to be passed to a driver, or `None` if not all are there.
    ///
    /// Call this while the device does not use them: bytes it writes concurrently may be any
    /// mixture.
    pub fn bytes_mut(&mut self, offset: u64, len: u64) -> Option<&mut [u8]> {
        let start = self.mapping.ptr_at(offset, len)?;
        // SAFETY: in bounds by `ptr_at`, initialized (zeros at first), any byte is a valid u8; the
        // slice borrows `self` exclusively, and nothing else in this process refers to the memory.
        // A device that writes concurrently is another process; the documentation tells the caller
        // not to read then.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), to_usize(len)) })
    }
}

impl AsFd for LentMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_are_in_the_file_and_those_beyond_are_none() {
        let mut memory = LentMemory::new("lent", 8192).unwrap();
        memory.bytes_mut(5000, 4).unwrap().copy_from_slice(b"tide");
        let mut back = [0; 4];
        memory.file.read_at(5000, &mut back).unwrap();
        assert_eq!(&back, b"tide");
        assert!(memory.bytes_mut(8190, 3).is_none());
    }

    #[test]
    fn sparse_memory_takes_what_was_touched() {
        if crate::emulated::skip() {
            return;
        }
        let mut memory = LentMemory::sparse("lent", 1 << 40).unwrap();
        memory.bytes_mut(1 << 39, 1).unwrap().fill(7);
        let mut back = [0; 2];
        memory.file.read_at(1 << 39, &mut back).unwrap();
        assert_eq!(back, [7, 0]);
        let held = memory.file.allocated_bytes().unwrap();
        assert!((1..1 << 30).contains(&held), "{held}");
    }
}
