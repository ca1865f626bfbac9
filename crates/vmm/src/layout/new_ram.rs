// SPDX-License-Identifier: Apache-2.0
//! [`NewRam`]: a RAM file with all its mappings, checked, that has no page numbers yet.

use super::{error::LayoutError, mapping::RamMapping};
use pagetide_addr::{FileKey, PAGE_SHIFT};
use pagetide_sys::memory_file::GuestFile;
use std::sync::Arc;

/// A RAM file to be given page numbers: every byte of it is mapped once.
#[derive(Clone, Debug)]
pub struct NewRam {
    file: Arc<GuestFile>,
    key: FileKey,
    len_bytes: u64,
    page_bytes: u64,
    /// Ordered by their offsets in the file.
    mappings: Vec<RamMapping>,
}

impl NewRam {
    /// The first `len_bytes` of `file`, and all mappings of it.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn new(
        file: GuestFile,
        len_bytes: u64,
        mappings: Vec<RamMapping>,
    ) -> Result<Self, LayoutError> {
        let key = file.key()?;
        let has_bytes = file.len_bytes()?;
        if has_bytes < len_bytes {
            return Err(LayoutError::Short {
                key,
                len_bytes: has_bytes,
                recorded_bytes: len_bytes,
            });
        }
        let page_bytes = file.page_bytes()?;
        if !len_bytes.is_multiple_of(page_bytes) {
            return Err(LayoutError::Unaligned {
                key,
                offset: len_bytes,
            });
        }
        Ok(Self {
            file: Arc::new(file),
            key,
            len_bytes,
            page_bytes,
            mappings: in_order(key, len_bytes, page_bytes, mappings)?,
        })
    }

    /// Its identity.
    #[must_use]
    pub const fn key(&self) -> FileKey {
        self.key
    }

    /// Number of its pages.
    #[must_use]
    pub const fn page_count(&self) -> u64 {
        self.len_bytes >> PAGE_SHIFT
    }

    /// Bytes of the file's pages.
    pub(super) const fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    pub(super) const fn file(&self) -> &Arc<GuestFile> {
        &self.file
    }

    pub(super) fn mappings(&self) -> &[RamMapping] {
        &self.mappings
    }
}

/// The mappings of one file, by offset: every byte of it exactly once.
fn in_order(
    key: FileKey,
    len_bytes: u64,
    page_bytes: u64,
    mut of_file: Vec<RamMapping>,
) -> Result<Vec<RamMapping>, LayoutError> {
    of_file.sort_unstable_by_key(|m| m.file_offset);
    let mut covered = 0_u64;
    for mapping in &of_file {
        let offset = mapping.file_offset;
        let unaligned = LayoutError::Unaligned { key, offset };
        if !(offset | mapping.len_bytes | mapping.hva.0).is_multiple_of(page_bytes) {
            return Err(unaligned);
        }
        if offset > covered {
            return Err(LayoutError::Hole {
                key,
                offset: covered,
            });
        }
        if offset < covered {
            return Err(LayoutError::Twice { key, offset });
        }
        covered = covered.checked_add(mapping.len_bytes).ok_or(unaligned)?;
    }
    if covered < len_bytes {
        return Err(LayoutError::Hole {
            key,
            offset: covered,
        });
    }
    Ok(of_file)
}
