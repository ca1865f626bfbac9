// SPDX-License-Identifier: Apache-2.0
//! Compares the log of an emulated IOMMU with what the guest's own kernel says it mapped and unmapped.
//!
//! Two witnesses of the same tables that know nothing of one another: QEMU, which walks them, and Linux, which
//! writes them and tells by its tracepoints. If the log is read rightly, then
//!
//! - each **request** is for an address that Linux mapped to the very physical address that QEMU found;
//! - each **invalidation of pages**, in strict mode, has an unmap of its own: Linux voids the smallest naturally
//!   aligned power-of-two block of pages that contains what it unmapped (`iommu_flush_iotlb_psi`).
//!
//! Linux' records do not say which device or domain they are about. So a pair of address and physical address is
//! compared, and not a point in time: that Linux had mapped the pair *at some time* is checked, which a request
//! of the wrong device or for the wrong address fails, as tenants have different pages behind the same addresses.
//!
//! # Look-up of pairs
//! All addresses of a mapping have the same distance to their physical addresses. So mappings are kept by that
//! distance, as merged ranges of addresses:
//!
//! ```text
//!   distance 0x…1  ├──────┤   ├─┤          a pair is mapped if a range at its
//!   distance 0x…2       ├────────────┤     distance contains its address
//! ```

mod tracepoints;

use std::collections::HashMap;
use std::path::Path;

use pagetide_access_log::TraceError;
use pagetide_addr::Iova;

use crate::event::PageSize;
use crate::qemu::{DmaRecord, QemuDmaReader};

pub use tracepoints::{MapChange, TracepointReader};

/// All that a guest's kernel mapped and unmapped.
#[derive(Debug, Default)]
pub struct GuestMaps {
    /// Ranges of addresses, first and past the last, by their distance to the physical addresses.
    ranges: HashMap<u64, Vec<(u64, u64)>>,
    /// How often the block around an unmapped range had to be voided, by first address and bytes.
    voided: HashMap<(u64, u64), u64>,
    maps: u64,
    unmaps: u64,
}

impl GuestMaps {
    /// Reads the tracepoints' records in the file at `path`.
    ///
    /// # Errors
    /// If it cannot be read, has a broken record or a gap, or has no `iommu:map`.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let maps = Self::collect(TracepointReader::open(path)?)?;
        if maps.maps == 0 {
            return Err(TraceError::File {
                path: path.to_owned(),
                reason: "it has no record of the tracepoint `iommu:map`".to_owned(),
            });
        }
        Ok(maps)
    }

    /// All of `changes`.
    ///
    /// # Errors
    /// The first error among them.
    pub fn collect(
        changes: impl Iterator<Item = Result<MapChange, TraceError>>,
    ) -> Result<Self, TraceError> {
        let mut maps = Self::default();
        for change in changes {
            match change? {
                MapChange::Map {
                    iova,
                    physical,
                    bytes,
                } => {
                    maps.maps += 1;
                    let ranges = maps.ranges.entry(iova.0.wrapping_sub(physical));
                    ranges
                        .or_default()
                        .push((iova.0, iova.0.saturating_add(bytes)));
                }
                MapChange::Unmap { iova, bytes } => {
                    maps.unmaps += 1;
                    *maps.voided.entry(block_around(iova.0, bytes)).or_default() += 1;
                }
            }
        }
        maps.ranges.values_mut().for_each(merge);
        Ok(maps)
    }

    /// Mappings that were made.
    #[must_use]
    pub fn maps(&self) -> u64 {
        self.maps
    }

    /// Ranges that were unmapped.
    #[must_use]
    pub fn unmaps(&self) -> u64 {
        self.unmaps
    }

    /// Whether `iova` led to `physical` at some time.
    #[must_use]
    pub fn led_to(&self, iova: Iova, physical: u64) -> bool {
        let Some(ranges) = self.ranges.get(&iova.0.wrapping_sub(physical)) else {
            return false;
        };
        let after = ranges.partition_point(|(first, _)| *first <= iova.0);
        let before = after.checked_sub(1).and_then(|at| ranges.get(at));
        before.is_some_and(|(_, end)| iova.0 < *end)
    }
}

/// The smallest naturally aligned power-of-two block with a range of pages, as first address and bytes.
fn block_around(iova: u64, bytes: u64) -> (u64, u64) {
    let last = iova.saturating_add(bytes.saturating_sub(1));
    let bits = u64::BITS - (iova ^ last).leading_zeros();
    // A range of pages below 2^57 has fewer than 64 bits in common places.
    let size = 1u64.checked_shl(bits).unwrap_or(u64::MAX);
    (iova & !(size - 1), size)
}

/// Sorts ranges, and makes one of those that meet.
fn merge(ranges: &mut Vec<(u64, u64)>) {
    ranges.sort_unstable();
    ranges.dedup_by(|next, kept| {
        let meet = next.0 <= kept.1;
        if meet {
            kept.1 = kept.1.max(next.1);
        }
        meet
    });
}

/// How a log and the guest's own records agree.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MapCheck {
    /// Requests of the log.
    pub requests: u64,
    /// Of them, those for an address that the guest mapped to the physical address in the log.
    pub requests_mapped: u64,
    /// Invalidations of pages in the log.
    pub invalidations: u64,
    /// Of them, those that have an unmap of their own.
    pub invalidations_unmapped: u64,
    /// Line and content of the first request that the guest did not map.
    pub first_unmapped: Option<String>,
    /// The same for the first invalidation without an unmap.
    pub first_without_unmap: Option<String>,
}

impl MapCheck {
    /// Compares the log of QEMU at `log` with `maps`.
    ///
    /// # Errors
    /// If the log cannot be read or has a broken line.
    pub fn of(log: &Path, maps: &GuestMaps) -> Result<Self, TraceError> {
        Self::compare(QemuDmaReader::open(log)?, maps)
    }

    /// Compares `records` with `maps`.
    ///
    /// # Errors
    /// The first error among them.
    pub fn compare(
        records: impl Iterator<Item = Result<DmaRecord, TraceError>>,
        maps: &GuestMaps,
    ) -> Result<Self, TraceError> {
        let mut check = Self::default();
        let mut voided = maps.voided.clone();
        for record in records {
            match record? {
                DmaRecord::Request {
                    source,
                    iova,
                    entry,
                    ..
                } => {
                    check.requests += 1;
                    if leads_to(iova, entry).any(|physical| maps.led_to(iova, physical)) {
                        check.requests_mapped += 1;
                    } else if check.first_unmapped.is_none() {
                        check.first_unmapped = Some(format!(
                            "source {:#x}, address {:#x}, page-table entry {entry:#x}",
                            source.0, iova.0
                        ));
                    }
                }
                DmaRecord::InvalidatePages { domain, iova, span } => {
                    check.invalidations += 1;
                    let size = span.bytes();
                    let own = voided.get_mut(&(iova.0 & !(size - 1), size));
                    match own.filter(|left| **left > 0) {
                        Some(left) => {
                            *left -= 1;
                            check.invalidations_unmapped += 1;
                        }
                        None if check.first_without_unmap.is_none() => {
                            check.first_without_unmap = Some(format!(
                                "domain {:#x}, address {:#x}, {size} bytes",
                                domain.0, iova.0
                            ));
                        }
                        None => {}
                    }
                }
            }
        }
        Ok(check)
    }
}

/// Physical addresses that `iova` may lead to by a last page-table entry whose level the log does not have.
fn leads_to(iova: Iova, entry: u64) -> impl Iterator<Item = u64> {
    const ADDRESS: u64 = (1 << 52) - 1;
    const PAGE_SIZE_BIT: u64 = 1 << 7;
    let sizes = match entry & PAGE_SIZE_BIT {
        0 => &[PageSize::SIZE_4K][..],
        _ => &[PageSize::SIZE_2M, PageSize::SIZE_1G, PageSize::SIZE_4K],
    };
    sizes.iter().filter_map(move |size| {
        let offset = size.bytes() - 1;
        let base = entry & ADDRESS & !0xfff;
        (base & offset == 0).then_some(base | iova.0 & offset)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{IommuDomain, SourceId};

    fn maps(changes: &[MapChange]) -> GuestMaps {
        GuestMaps::collect(changes.iter().copied().map(Ok)).unwrap()
    }

    fn map(iova: u64, physical: u64, bytes: u64) -> MapChange {
        MapChange::Map {
            iova: Iova(iova),
            physical,
            bytes,
        }
    }

    fn unmap(iova: u64, bytes: u64) -> MapChange {
        MapChange::Unmap {
            iova: Iova(iova),
            bytes,
        }
    }

    fn request(iova: u64, entry: u64) -> DmaRecord {
        DmaRecord::Request {
            source: SourceId(8),
            domain: IommuDomain(3),
            iova: Iova(iova),
            entry,
        }
    }

    fn invalidate(iova: u64, bytes: u64) -> DmaRecord {
        DmaRecord::InvalidatePages {
            domain: IommuDomain(3),
            iova: Iova(iova),
            span: PageSize::from_bytes(bytes).unwrap(),
        }
    }

    fn check(records: &[DmaRecord], maps: &GuestMaps) -> MapCheck {
        MapCheck::compare(records.iter().copied().map(Ok), maps).unwrap()
    }

    #[test]
    fn address_leads_where_a_mapping_with_its_distance_contains_it() {
        let maps = maps(&[
            map(0x8000, 0x1000, 0x2000),
            map(0xa000, 0x3000, 0x1000),
            map(0x8000, 0x9000, 0x1000),
        ]);
        for (iova, physical, led) in [
            (0x8000, 0x1000, true),
            (0xaffe, 0x3ffe, true),
            (0xb000, 0x4000, false),
            (0x8010, 0x9010, true),
            (0x9010, 0xa010, false),
            (0x7fff, 0x0fff, false),
        ] {
            assert_eq!(maps.led_to(Iova(iova), physical), led, "{iova:#x}");
        }
    }

    #[test]
    fn look_up_agrees_with_a_list_of_pages() {
        // Every map of up to three pages among eight, to one of four physical places.
        let mut changes = Vec::new();
        for seed in 0..64u64 {
            let (iova, pages, physical) = (seed * 7 % 8, 1 + seed * 5 % 3, seed * 11 % 4);
            changes.push(map(iova << 12, physical << 12, pages << 12));
            let maps = maps(&changes);
            for iova in 0..12u64 {
                for physical in 0..8u64 {
                    let naive = changes.iter().any(|change| match change {
                        MapChange::Map {
                            iova: first,
                            physical: place,
                            bytes,
                        } => (0..bytes >> 12).any(|page| {
                            (first.0 >> 12) + page == iova && (place >> 12) + page == physical
                        }),
                        MapChange::Unmap { .. } => false,
                    });
                    assert_eq!(maps.led_to(Iova(iova << 12), physical << 12), naive);
                }
            }
        }
    }

    #[test]
    fn request_must_lead_to_the_physical_address_of_a_mapping() {
        let maps = maps(&[map(0xff00_0000, 0x5000, 0x1000)]);
        let found = check(
            &[
                request(0xff00_0123, 0x5003),
                request(0xff00_0123, 0x6003),
                request(0xff00_1000, 0x6003),
            ],
            &maps,
        );
        assert_eq!((found.requests, found.requests_mapped), (3, 1));
        let first = found.first_unmapped.unwrap();
        assert!(first.contains("0x6003") && first.contains("0xff000123"));
    }

    #[test]
    fn entry_of_a_large_page_leads_into_it() {
        let maps = maps(&[map(0, 0x4000_0000, 4 << 30)]);
        let found = check(
            &[
                request(0x20_1234, 0x4020_0083),
                request(0x4000_0000, 0x8000_0083),
                request(0x20_1234, 0x4040_0083),
            ],
            &maps,
        );
        assert_eq!((found.requests, found.requests_mapped), (3, 2));
    }

    #[test]
    fn invalidation_needs_an_unmap_of_its_own_in_the_block_around_it() {
        let maps = maps(&[unmap(0x3000, 0x2000), unmap(0x8000, 0x1000)]);
        // Pages 3 and 4 have no common block below eight pages.
        let found = check(
            &[
                invalidate(0x0, 0x8000),
                invalidate(0x8000, 0x1000),
                invalidate(0x8000, 0x1000),
                invalidate(0x3000, 0x1000),
            ],
            &maps,
        );
        assert_eq!((found.invalidations, found.invalidations_unmapped), (4, 2));
        assert!(found.first_without_unmap.unwrap().contains("0x8000"));
    }
}
