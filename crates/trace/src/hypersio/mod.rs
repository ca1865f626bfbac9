// SPDX-License-Identifier: Apache-2.0
//! Files of the authors' simulator (HyperSIO 1.0), read and written.
//!
//! # The binary trace
//! Three files share a prefix. Each is records back to back, packed, little-endian,
//! without header or trailer:
//!
//! ```text
//! …iotlb_trace.bin   48 bytes a translation request
//!    0        4     6     8        16       24        32        40        48
//!    │ type=1 │ sid │ did │  iova  │  mask  │  level  │  slpte  │  next   │
//! …cc_data.bin       20 bytes a context entry:  sid u16, high u64, low u64, generation u16
//! …slpt_data.bin     42 bytes a page-table entry
//! ```
//!
//! `level` is 1, 2 or 3 for pages of 4 KiB, 2 MiB or 1 GiB, and `mask` must say
//! the same: all ones above the page. `next` is the number of the next request
//! for the same page of the same domain, all ones if there is none; their oracle
//! uses it. A packet is three consecutive records.
//!
//! Their simulator loads the second and third file and uses neither, so we do not
//! read them; they must exist, so [`HypersioWriter`] writes them. `next` is not
//! read either: who needs it computes it from the requests, and then it is true.
//!
//! # The text log
//! What the authors' trace builder reads: the `-trace` output of their patched
//! QEMU. See [`HypersioLogReader`].

mod binary;
mod log;
mod writer;

pub use binary::HypersioReader;
pub use log::{HypersioLogReader, LogSources};
pub use writer::HypersioWriter;

use pagetide_addr::Iova;

use crate::event::{Event, EventKind, IOVA_BITS, IommuDomain, PageSize, SourceId, TraceAccess};

/// Bytes of a record of `…iotlb_trace.bin`.
const RECORD_BYTES: usize = 48;

/// Where `next` is in a record.
const NEXT_AT: usize = 40;

/// `type` of a translation request, the only one there is.
const TYPE_TRANSLATE: u32 = 1;

/// `next` of a page that is never asked for again.
const NEVER: u64 = u64::MAX;

/// The mask that goes with a page size: ones where the page number is.
const fn mask_of(size: PageSize) -> u64 {
    !(size.bytes() - 1)
}

/// The page size that a mask stands for, if it is one of three.
fn size_of_mask(mask: u64) -> Option<PageSize> {
    [PageSize::SIZE_4K, PageSize::SIZE_2M, PageSize::SIZE_1G]
        .into_iter()
        .find(|size| mask_of(*size) == mask)
}

/// `N` bytes of a record at `at`.
fn field<const N: usize>(record: &[u8; RECORD_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|i| record[at + i])
}

/// Whether a record is a request that agrees with itself.
#[inline]
fn is_sound(record: &[u8; RECORD_BYTES]) -> bool {
    let kind = u32::from_le_bytes(field(record, 0));
    let iova = u64::from_le_bytes(field(record, 8));
    let mask = u64::from_le_bytes(field(record, 16));
    let level = u64::from_le_bytes(field(record, 24));
    kind == TYPE_TRANSLATE
        && iova >> IOVA_BITS == 0
        && PageSize::from_level(level).is_some_and(|size| mask == mask_of(size))
}

/// The event that a sound record holds.
#[inline]
fn event_of(record: &[u8; RECORD_BYTES]) -> Event {
    Event {
        time_ns: None,
        source: SourceId(u32::from(u16::from_le_bytes(field(record, 4)))),
        domain: IommuDomain(u32::from(u16::from_le_bytes(field(record, 6)))),
        iova: Iova(u64::from_le_bytes(field(record, 8))),
        page_size: PageSize::from_level(u64::from_le_bytes(field(record, 24))),
        access: TraceAccess::Unknown,
        kind: EventKind::Translate,
    }
}

/// Says what is wrong with a record that is not sound.
#[cold]
fn complaint(record: &[u8; RECORD_BYTES]) -> String {
    let kind = u32::from_le_bytes(field(record, 0));
    let iova = u64::from_le_bytes(field(record, 8));
    let mask = u64::from_le_bytes(field(record, 16));
    let level = u64::from_le_bytes(field(record, 24));
    if kind != TYPE_TRANSLATE {
        return format!("type is {kind}, where a translation request has {TYPE_TRANSLATE}");
    }
    match PageSize::from_level(level) {
        None => format!("level is {level}; pages are mapped at level 1, 2 or 3"),
        Some(size) if mask != mask_of(size) => format!(
            "mask {mask:#x} does not agree with level {level}, whose mask is {:#x}",
            mask_of(size)
        ),
        Some(_) => format!("I/O virtual address {iova:#x} has more than {IOVA_BITS} bits"),
    }
}

/// Whether `bytes` begin with a record that [`HypersioReader`] takes.
pub(crate) fn is_record(bytes: &[u8]) -> bool {
    bytes.first_chunk().is_some_and(is_sound)
}
