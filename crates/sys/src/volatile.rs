// SPDX-License-Identifier: Apache-2.0
//! A [`SharedMapping`] as the virtio crates see memory: bounded volatile slices.
//!
//! Rings, descriptor tables and request headers are in guest RAM and change concurrently.
//! vm-memory's `VolatileSlice` reads and writes such bytes without ever creating a reference to
//! them, so it is the only view of guest RAM that device code gets.
#![expect(
    unsafe_code,
    reason = "a volatile slice is made from a pointer, whose bounds are known here"
)]

use crate::{mapping::SharedMapping, to_usize};
use vm_memory::VolatileSlice;

impl SharedMapping {
    /// The `len` bytes at `offset`, or `None` if not all of them are mapped.
    ///
    /// The notes on holes and shrunken files at [`SharedMapping`] apply here, too.
    #[inline]
    #[must_use]
    pub fn volatile(&self, offset: u64, len: u64) -> Option<VolatileSlice<'_>> {
        let start = self.ptr_at(offset, len)?;
        // SAFETY: `ptr_at` checked that all `len` bytes are mapped, readable and writable; the
        // slice borrows `self`, which unmaps only in `drop`; all access through it is volatile, and
        // the only references to these bytes in this process are to atomics.
        Some(unsafe { VolatileSlice::new(start.as_ptr(), to_usize(len)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_file::GuestFile;
    use std::os::fd::AsFd;
    use vm_memory::Bytes;

    #[test]
    fn slice_within_the_mapping_writes_the_file_and_one_beyond_is_none() {
        let file = GuestFile::new_memfd("volatile", 8192).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), 8192).unwrap();
        let slice = mapping.volatile(4096, 8).unwrap();
        slice.write_obj(0x1122_3344_u32, 2).unwrap();
        let mut back = [0; 4];
        file.read_at(4098, &mut back).unwrap();
        assert_eq!(u32::from_ne_bytes(back), 0x1122_3344);
        assert!(slice.write_obj(0_u64, 1).is_err());
        assert!(mapping.volatile(8190, 3).is_none());
    }
}
