// SPDX-License-Identifier: Apache-2.0
//! [`LayoutError`]: why files and mappings do not make a layout.

use pagetide_addr::{FileKey, PageRange};
use pagetide_sys::memory_file::FileError;

/// Why mappings do not make a layout.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// Part of a file is not mapped.
    #[error("byte {offset:#x} of RAM file {key} is mapped nowhere")]
    Hole {
        /// The file.
        key: FileKey,
        /// First byte of the part.
        offset: u64,
    },
    /// Part of a file is mapped twice.
    #[error("byte {offset:#x} of RAM file {key} is mapped more than once")]
    Twice {
        /// The file.
        key: FileKey,
        /// First byte of the part.
        offset: u64,
    },
    /// Not whole pages.
    #[error("RAM file {key} is not made of whole 4 KiB pages at byte {offset:#x}")]
    Unaligned {
        /// The file.
        key: FileKey,
        /// Where.
        offset: u64,
    },
    /// The file has become shorter.
    #[error("RAM file {key} has {len_bytes:#x} bytes, of which {recorded_bytes:#x} were mapped")]
    Short {
        /// The file.
        key: FileKey,
        /// Its length now.
        len_bytes: u64,
        /// Its recorded length.
        recorded_bytes: u64,
    },
    /// No mapping at all.
    #[error("no mapping of RAM is recorded")]
    Nothing,
    /// The page numbers belong to another file, or the file is in the layout already.
    #[error("pages {} to {} cannot be given to RAM file {key}: another file has some of them, or it has others", pages.start, pages.end)]
    Taken {
        /// The file.
        key: FileKey,
        /// The pages it was to have.
        pages: PageRange,
    },
    /// A query of a file failed.
    #[error(transparent)]
    File(#[from] FileError),
}
