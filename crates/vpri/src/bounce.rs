// SPDX-License-Identifier: Apache-2.0
//! [`BounceArea`]: bounce buffers for transfers whose target pages are absent.
//!
//! A device that writes an absent page whole does not need its old content filled first. It
//! directs the transfer into slots of this area, one page each, and sends an
//! [`Overwrite`](pagetide_addr::RequestKind::Overwrite) to the host that names which slot holds
//! which page's new content.
//!
//! ```text
//!   disk ── transfer ──► slot 17, 18, 19 ── overwrite 17, pages 5..8 ──► host reads the slots
//!                                                                        and installs the pages
//! ```
//! The device writes a slot and the host reads it, never both at once: a slot
//! belongs to the host from the request until its response, and to the device
//! otherwise. So the area may be memory of one process or shared by two. Neither
//! side has to trust the other: the host installs the slot's bytes in pages that
//! this very device could have written anyway.
//!
//! *Invariant:* a slot's number belongs to one area. A device that is given
//! another area (because its host is now another process) gets numbers that
//! were never used, so an overwrite left over from the old area names no slot
//! of the new one.

use pagetide_addr::PAGE_BYTES;
use pagetide_sys::{
    mapping::{MappingError, SharedMapping},
    memory_file::{FileError, GuestFile},
};
use std::{ops::Range, os::fd::AsFd, sync::Arc};
use vm_memory::VolatileSlice;

/// Most slots of an area: 4 GiB.
pub const BOUNCE_BUFFERS_MAX: u32 = 1 << 20;

/// Why there is no bounce area.
#[derive(Debug, thiserror::Error)]
pub enum BounceError {
    /// The slot numbers overflow, or there are none.
    #[error(
        "a bounce area of {count} slots from number {first} on: it must have from 1 to {BOUNCE_BUFFERS_MAX}, with numbers below 2^32"
    )]
    Count {
        /// Number of the first.
        first: u32,
        /// How many.
        count: u32,
    },
    /// Not at a page border, or not entirely within the memory given.
    #[error(
        "a bounce area of {count} slots at byte {offset_bytes} is not made of whole pages of a mapping of {mapped_bytes} bytes"
    )]
    Misplaced {
        /// Where it should begin.
        offset_bytes: u64,
        /// How many slots.
        count: u32,
        /// Length of the mapping.
        mapped_bytes: u64,
    },
    /// No memory for it.
    #[error("memory for bounce buffers cannot be had: {0}")]
    File(#[from] FileError),
    /// It cannot be mapped.
    #[error("memory for bounce buffers cannot be mapped: {0}")]
    Mapping(#[from] MappingError),
}

/// See the module.
#[derive(Debug)]
pub struct BounceArea {
    mapping: Arc<SharedMapping>,
    offset_bytes: u64,
    slots: Range<u32>,
}

impl BounceArea {
    /// `count` slots in memory of this process, numbered from 0. A slot uses memory only once it is
    /// first used.
    ///
    /// # Errors
    /// [`BounceError`].
    pub fn new(count: u32) -> Result<Self, BounceError> {
        numbers(0, count)?;
        let bytes = u64::from(count) * PAGE_BYTES;
        let file = GuestFile::new_memfd("pagetide-bounce", bytes)?;
        let mapping = Arc::new(SharedMapping::new(file.as_fd(), bytes)?);
        Self::over(mapping, 0, 0, count)
    }

    /// Slots in `mapping`, from byte `offset_bytes` on, which may be shared with another process.
    /// `first` is the number of the first slot, `count` how many there are.
    ///
    /// # Errors
    /// [`BounceError::Count`], [`BounceError::Misplaced`].
    pub fn over(
        mapping: Arc<SharedMapping>,
        offset_bytes: u64,
        first: u32,
        count: u32,
    ) -> Result<Self, BounceError> {
        let slots = numbers(first, count)?;
        let end = offset_bytes.checked_add(u64::from(count) * PAGE_BYTES);
        let fits = end.is_some_and(|end| end <= mapping.len_bytes());
        if !fits || !offset_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(BounceError::Misplaced {
                offset_bytes,
                count,
                mapped_bytes: mapping.len_bytes(),
            });
        }
        Ok(Self {
            mapping,
            offset_bytes,
            slots,
        })
    }

    /// Numbers of its slots.
    #[must_use]
    pub fn slots(&self) -> Range<u32> {
        self.slots.clone()
    }

    /// The bytes of `count` slots from `slot` on, or `None` if not all of them belong to this area.
    /// They begin at a page border.
    #[must_use]
    pub fn bytes(&self, slot: u32, count: u64) -> Option<VolatileSlice<'_>> {
        let nth = u64::from(slot.checked_sub(self.slots.start)?);
        let end = nth.checked_add(count)?;
        if end > u64::from(self.slots.end - self.slots.start) {
            return None;
        }
        let at = self.offset_bytes + nth * PAGE_BYTES;
        self.mapping.volatile(at, count * PAGE_BYTES)
    }

    /// Appends the content of `count` slots from `slot` on to `into`; appends nothing and returns
    /// false if not all of them belong to this area.
    pub fn read(&self, slot: u32, count: u64, into: &mut Vec<u8>) -> bool {
        let Some(bytes) = self.bytes(slot, count) else {
            return false;
        };
        let before = into.len();
        into.resize(before + bytes.len(), 0);
        bytes.copy_to(&mut into[before..]);
        true
    }
}

fn numbers(first: u32, count: u32) -> Result<Range<u32>, BounceError> {
    match first.checked_add(count) {
        Some(end) if (1..=BOUNCE_BUFFERS_MAX).contains(&count) => Ok(first..end),
        _ => Err(BounceError::Count { first, count }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_read_as_they_were_written_and_those_of_another_area_not_at_all() {
        let file = GuestFile::new_memfd("bounce", 8 * PAGE_BYTES).unwrap();
        let mapping = Arc::new(SharedMapping::new(file.as_fd(), 8 * PAGE_BYTES).unwrap());
        let area = BounceArea::over(mapping, 2 * PAGE_BYTES, 100, 4).unwrap();
        assert_eq!(area.slots(), 100..104);
        file.write_at(4 * PAGE_BYTES, &[7; 4096]).unwrap();
        let mut content = vec![1];
        assert!(area.read(101, 2, &mut content));
        assert_eq!(content.len(), 1 + 8192);
        assert_eq!((content[0], content[1], content[4097]), (1, 0, 7));
        for (slot, count) in [(99, 1), (104, 1), (103, 2), (u32::MAX, 1), (100, u64::MAX)] {
            assert!(!area.read(slot, count, &mut content), "{slot} {count}");
            assert_eq!(content.len(), 1 + 8192);
        }
    }

    #[test]
    fn area_that_does_not_lie_in_its_mapping_is_refused() {
        let file = GuestFile::new_memfd("bounce", 4 * PAGE_BYTES).unwrap();
        let mapping = Arc::new(SharedMapping::new(file.as_fd(), 4 * PAGE_BYTES).unwrap());
        let over = |offset, first, count| BounceArea::over(mapping.clone(), offset, first, count);
        assert!(over(0, 0, 4).is_ok());
        assert!(over(0, u32::MAX - 4, 4).is_ok());
        for (offset, count) in [(0, 5), (1, 1), (PAGE_BYTES, 4), (u64::MAX - 4095, 1)] {
            let refused = over(offset, 0, count);
            assert!(matches!(refused, Err(BounceError::Misplaced { .. })));
        }
        for (first, count) in [(0, 0), (u32::MAX, 4), (0, BOUNCE_BUFFERS_MAX + 1)] {
            let refused = over(0, first, count);
            assert!(matches!(refused, Err(BounceError::Count { .. })));
        }
        assert!(BounceArea::new(3).unwrap().bytes(0, 3).is_some());
    }
}
