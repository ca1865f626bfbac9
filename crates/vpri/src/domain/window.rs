// SPDX-License-Identifier: Apache-2.0
//! [`RamWindow`]: part of a file of guest RAM, mapped in this process for DMA.
//!
//! Bytes are named by their offset in the *file*, as everywhere in a domain.
//! The mapping is guarded: if a file loses its memory, only the devices that
//! use it fail ([`RamWindow::is_lost`]).

use super::DmaDomain;
use crate::space::LookError;
use pagetide_addr::{FilePage, FileRange, Hva, Marks};
use pagetide_sys::{
    mapping::{FilePart, MappingError, SharedMapping},
    pagemap::Pagemap,
};
use std::sync::Arc;
use vm_memory::VolatileSlice;

/// Part of a file of guest RAM that devices of this process work on.
#[derive(Debug)]
pub struct RamWindow {
    domain: Arc<DmaDomain>,
    first_byte: u64,
    /// Bytes of the file's pages.
    page_bytes: u64,
    mapping: SharedMapping,
}

impl RamWindow {
    pub(super) fn new(domain: &Arc<DmaDomain>, part: FilePart, mapping: SharedMapping) -> Self {
        Self {
            domain: Arc::clone(domain),
            first_byte: part.offset,
            page_bytes: part.page_bytes,
            mapping,
        }
    }

    /// The domain it is part of.
    #[must_use]
    pub fn domain(&self) -> &Arc<DmaDomain> {
        &self.domain
    }

    /// Offset in the file of its first byte.
    #[must_use]
    pub fn first_byte(&self) -> u64 {
        self.first_byte
    }

    /// Bytes of the file's pages: those of a huge page on hugetlbfs.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Number of bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.mapping.len_bytes()
    }

    /// Address of its first byte in this process.
    #[must_use]
    pub fn address(&self) -> Hva {
        Hva(self.mapping.address() as u64)
    }

    /// True if all of these bytes of the file are in it.
    #[must_use]
    pub fn covers(&self, offset: u64, bytes: u64) -> bool {
        offset
            .checked_sub(self.first_byte)
            .and_then(|into| into.checked_add(bytes))
            .is_some_and(|end| end <= self.len_bytes())
    }

    /// True once part of it could not be backed by its file. Bytes read since then may be zeros.
    #[inline]
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// `len` bytes at `offset` of the file, or `None` if not all are in the window. They must be
    /// leased or wired.
    #[inline]
    #[must_use]
    pub fn volatile(&self, offset: u64, len: u64) -> Option<VolatileSlice<'_>> {
        let into = offset.checked_sub(self.first_byte)?;
        self.mapping.volatile(into, len)
    }

    /// Copies bytes at `offset` of the file into `into`.
    ///
    /// # Errors
    /// [`MappingError::OutOfBounds`].
    pub fn copy_from(&self, offset: u64, into: &mut [u8]) -> Result<(), MappingError> {
        // An offset before the window wraps to one far behind it.
        self.mapping
            .copy_from(offset.wrapping_sub(self.first_byte), into)
    }

    /// Copies `from` to `offset` of the file.
    ///
    /// # Errors
    /// [`MappingError::OutOfBounds`].
    pub fn copy_to(&self, offset: u64, from: &[u8]) -> Result<(), MappingError> {
        self.mapping
            .copy_to(offset.wrapping_sub(self.first_byte), from)
    }

    pub(super) fn unwatch(&self) {
        if let Some(watch) = self.domain.watch.get() {
            watch.unwatch(self);
        }
    }

    /// Calls `visit` for each of `pages` that DMA through this window has touched.
    pub(super) fn touched(
        &self,
        pages: FileRange,
        marks: Marks,
        visit: &mut dyn FnMut(FilePage),
    ) -> Result<(), LookError> {
        let failed = |error: &dyn std::fmt::Display| LookError(error.to_string());
        let window = FileRange::covering(self.first_byte, self.len_bytes()).unwrap_or_default();
        let start = pages.start.max(window.start);
        let end = pages.end.min(window.end);
        if start >= end {
            return Ok(());
        }
        let part = FileRange::new(start, end);
        // The window begins at a page border, as its part of the file does.
        let into = start.byte_offset() - self.first_byte;
        let map = Pagemap::of_self().map_err(|error| failed(&error))?;
        let mut any = false;
        map.visit(
            Hva(self.address().0 + into),
            part.len(),
            |position, entry| {
                if entry.is_present() {
                    any = true;
                    visit(start.plus(position));
                }
            },
        )
        .map_err(|error| failed(&error))?;
        if any && marks == Marks::Forget {
            // A huge page has one translation. The window begins at a border of such a page, if it has any.
            let first = into - into % self.page_bytes;
            let end = (into + part.bytes()).next_multiple_of(self.page_bytes);
            let end = end.min(self.len_bytes());
            let dropped = self.mapping.drop_translations(first, end - first);
            dropped.map_err(|error| failed(&error))?;
        }
        Ok(())
    }
}

impl Drop for RamWindow {
    fn drop(&mut self) {
        self.unwatch();
    }
}
