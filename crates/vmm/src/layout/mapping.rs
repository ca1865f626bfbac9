// SPDX-License-Identifier: Apache-2.0
//! Mappings of RAM files: in a layout, in a record, and as `/proc/PID/maps` lists them.

use pagetide_addr::{FileKey, Hva};

/// A mapping of a RAM file in the VMM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RamMapping {
    /// Its address in the VMM.
    pub hva: Hva,
    /// Its length, in bytes.
    pub len_bytes: u64,
    /// Its file: index among the layout's files.
    pub file: usize,
    /// Its first byte in the file.
    pub file_offset: u64,
}

/// A mapping of a RAM file in the VMM, with all that distinguishes it from others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordedMapping {
    /// Its address in the VMM.
    pub hva: Hva,
    /// Its length, in bytes.
    pub len_bytes: u64,
    /// Its file.
    pub key: FileKey,
    /// Its first byte in the file.
    pub file_offset: u64,
}

impl std::fmt::Display for RecordedMapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:#x} bytes at {:#x}, from byte {:#x} of file {} on",
            self.len_bytes, self.hva.0, self.file_offset, self.key
        )
    }
}

/// Part of an address space, as `/proc/PID/maps` lists it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listed {
    pub(super) mapping: RecordedMapping,
    pub(super) shared_writable: bool,
}

impl RecordedMapping {
    /// The byte of the file that is mapped at `address`, which lies in the mapping.
    const fn offset_at(&self, address: u64) -> Option<u64> {
        let Some(within) = address.checked_sub(self.hva.0) else {
            return None;
        };
        if within < self.len_bytes {
            self.file_offset.checked_add(within)
        } else {
            None
        }
    }

    const fn end(&self) -> Option<u64> {
        self.hva.0.checked_add(self.len_bytes)
    }

    /// True if every byte of it is listed as before.
    pub(super) fn is_among(&self, listed: &[Listed]) -> bool {
        let Some(end) = self.end() else {
            return false;
        };
        let mut at = self.hva.0;
        while at < end {
            let same = listed.iter().find(|part| {
                part.shared_writable
                    && part.mapping.key == self.key
                    && part.mapping.offset_at(at).is_some()
                    && part.mapping.offset_at(at) == self.offset_at(at)
            });
            match same.and_then(|part| part.mapping.end()) {
                Some(next) => at = next,
                None => return false,
            }
        }
        true
    }

    /// True if some byte lies in both.
    pub(super) const fn overlaps(&self, other: &Self) -> bool {
        let (start, end) = (self.hva.0, self.hva.0.saturating_add(self.len_bytes));
        let other_end = other.hva.0.saturating_add(other.len_bytes);
        start < other_end && other.hva.0 < end
    }

    /// True if it contains all of `part`, at the same bytes of the file.
    pub(super) fn has(&self, part: &Self) -> bool {
        let fits = part.end().zip(self.end()).is_some_and(|(a, b)| a <= b);
        fits && part.key == self.key && self.offset_at(part.hva.0) == Some(part.file_offset)
    }
}
