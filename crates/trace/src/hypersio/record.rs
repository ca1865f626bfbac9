// SPDX-License-Identifier: Apache-2.0
//! One record of the authors' binary format.

use crate::event::{Event, EventKind, IOVA_BITS, IommuDomain, PageSize, SourceId, TraceAccess};
use pagetide_addr::Iova;

/// Bytes of a record of `…iotlb_trace.bin`.
pub(super) const RECORD_BYTES: usize = 48;

/// Where `next` is in a record.
pub(super) const NEXT_AT: usize = 40;

/// `type` of a translation request, the only one there is.
pub(super) const TYPE_TRANSLATE: u32 = 1;

/// `next` of a page that is never requested again.
pub(super) const NEVER: u64 = u64::MAX;

/// The mask for a page size: ones where the page number is.
pub(super) const fn mask_of(size: PageSize) -> u64 {
    !(size.bytes() - 1)
}

/// The page size for a mask, if it is one of three.
pub(super) fn size_of_mask(mask: u64) -> Option<PageSize> {
    [PageSize::SIZE_4K, PageSize::SIZE_2M, PageSize::SIZE_1G]
        .into_iter()
        .find(|size| mask_of(*size) == mask)
}

/// `N` bytes of a record at `at`.
pub(super) fn field<const N: usize>(record: &[u8; RECORD_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|i| record[at + i])
}

/// Whether a record is a consistent request.
#[inline]
pub(super) fn is_sound(record: &[u8; RECORD_BYTES]) -> bool {
    let kind = u32::from_le_bytes(field(record, 0));
    let iova = u64::from_le_bytes(field(record, 8));
    let mask = u64::from_le_bytes(field(record, 16));
    let level = u64::from_le_bytes(field(record, 24));
    kind == TYPE_TRANSLATE
        && iova >> IOVA_BITS == 0
        && PageSize::from_level(level).is_some_and(|size| mask == mask_of(size))
}

/// The event of a valid record.
#[inline]
pub(super) fn event_of(record: &[u8; RECORD_BYTES]) -> Event {
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

/// Describes the error in an invalid record.
#[cold]
pub(super) fn complaint(record: &[u8; RECORD_BYTES]) -> String {
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

/// Whether `bytes` begin with a record that [`super::HypersioReader`] accepts.
pub(crate) fn is_record(bytes: &[u8]) -> bool {
    bytes.first_chunk().is_some_and(is_sound)
}
