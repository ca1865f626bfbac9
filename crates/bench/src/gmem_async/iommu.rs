// SPDX-License-Identifier: Apache-2.0
//! An IOMMU: a page table, an IOTLB that caches everything until it is invalidated, and invalidation
//! commands with a set cost.
//!
//! A command works as in a driver with queued invalidation: it writes descriptors for the ranges and one
//! *wait* descriptor after them, then spins until the hardware has reported its completion. So a command
//! costs the set time once and [`RANGE_NS`] a range, on the CPU of the issuing thread. Commands of several
//! threads are served at the same time ([`Serving::AtOnce`]), or one after the other as by hardware with one
//! queue ([`Serving::InTurn`]). The former favours unmaps that each wait for their own: with as many CPUs as
//! flows they scale, which no IOMMU with one queue lets them do.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use pagetide_addr::{Access, PageRange, PageSet, SectionNo};
use pagetide_gmem::{Backing, Mmu, MmuError, MmuLimits, OnAbsent, Restrict, Restricted, TableId};

/// Additional cost of each range of a command: an assumption, as no source gives it.
pub(super) const RANGE_NS: u64 = 100;

/// How commands of several threads are served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Serving {
    /// At the same time.
    AtOnce,
    /// One after the other, in order of arrival.
    InTurn,
}

/// Not in the table, not in the IOTLB.
const ABSENT: u64 = 0;
/// In the table.
const GRANTED: u64 = 1;
/// No longer in the table, but perhaps in the IOTLB.
const CACHED: u64 = 2;

/// See the module.
pub(super) struct Iommu {
    pages: Vec<AtomicU64>,
    /// Cost of a command, without its ranges.
    command_ns: u64,
    serving: Serving,
    /// Since when times are counted, and until when the hardware is busy: [`Serving::InTurn`].
    begun: Instant,
    busy_until_ns: AtomicU64,
    commands: AtomicU64,
    /// A page was granted while it was still in the table or the IOTLB.
    granted_too_early: AtomicBool,
}

impl Iommu {
    /// For the pages from 0 to before `count`; a command takes `command_ns`, and more for its ranges.
    pub(super) fn new(count: u64, command_ns: u64, serving: Serving) -> Self {
        Self {
            pages: (0..count).map(|_| AtomicU64::new(ABSENT)).collect(),
            command_ns,
            serving,
            begun: Instant::now(),
            busy_until_ns: AtomicU64::new(0),
            commands: AtomicU64::new(0),
            granted_too_early: AtomicBool::new(false),
        }
    }

    /// Invalidation commands so far.
    pub(super) fn commands(&self) -> u64 {
        self.commands.load(Ordering::Relaxed)
    }

    /// True if a page was mapped anew before the device's translation was invalidated.
    pub(super) fn was_granted_too_early(&self) -> bool {
        self.granted_too_early.load(Ordering::Relaxed)
    }

    /// True if the device can reach a page of `range`, by its table or by its IOTLB.
    pub(super) fn can_reach(&self, range: PageRange) -> bool {
        let reached = |page: &AtomicU64| page.load(Ordering::Acquire) != ABSENT;
        self.range(range).iter().any(reached)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// When a command that takes `takes_ns`, and is issued now, is complete.
    fn complete_at(&self, takes_ns: u64) -> u64 {
        let now = self.now();
        if self.serving == Serving::AtOnce {
            return now + takes_ns;
        }
        // Only the time is exchanged; what the command does to the IOTLB is published by the pages themselves.
        let end = |busy_until: u64| busy_until.max(now) + takes_ns;
        let busy = &self.busy_until_ns;
        let ended = |busy_until| Some(end(busy_until));
        let (Ok(before) | Err(before)) =
            busy.fetch_update(Ordering::Relaxed, Ordering::Relaxed, ended);
        end(before)
    }

    fn range(&self, range: PageRange) -> &[AtomicU64] {
        let within = range.start.index()..range.end.index();
        self.pages.get(within).unwrap_or_default()
    }
}

impl Mmu for Iommu {
    fn limits(&self) -> MmuLimits {
        MmuLimits {
            on_absent: OnAbsent::Fails,
            ..MmuLimits::PAGED
        }
    }

    fn restrict(
        &self,
        _table: TableId,
        section: SectionNo,
        pages: &PageSet,
        _to: Restrict,
    ) -> Result<Restricted, MmuError> {
        for page in pages.pages(section) {
            if let Some(entry) = self.pages.get(page.index()) {
                entry.store(CACHED, Ordering::Release);
            }
        }
        Ok(Restricted::Done)
    }

    fn grant(
        &self,
        _table: TableId,
        pages: PageRange,
        _access: Access,
        _backing: Backing,
    ) -> Result<(), MmuError> {
        for page in self.range(pages) {
            if page.swap(GRANTED, Ordering::AcqRel) != ABSENT {
                self.granted_too_early.store(true, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn invalidate(&self, _table: TableId, ranges: &[PageRange]) -> Result<(), MmuError> {
        let complete_at = self.complete_at(self.command_ns + RANGE_NS * ranges.len() as u64);
        while self.now() < complete_at {
            std::hint::spin_loop();
        }
        for range in ranges {
            for page in self.range(*range) {
                page.store(ABSENT, Ordering::Release);
            }
        }
        self.commands.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::{Pa, PageNo};

    #[test]
    fn a_page_is_reached_until_it_is_restricted_and_invalidated() {
        let iommu = Iommu::new(16, 500, Serving::AtOnce);
        let (table, range) = (TableId(0), PageRange::new(PageNo(3), PageNo(5)));
        let frames = Backing::Frames {
            first: Pa(0),
            page_bytes: 4096,
        };
        iommu.grant(table, range, Access::Write, frames).unwrap();
        let set = PageSet::of_range(SectionNo(0), range);
        let restricted = iommu.restrict(table, SectionNo(0), &set, Restrict::NoAccess);
        assert_eq!(restricted.unwrap(), Restricted::Done);
        assert!(iommu.can_reach(range));
        iommu
            .grant(table, PageNo(4).single(), Access::Write, frames)
            .unwrap();
        assert!(iommu.was_granted_too_early());
        iommu.invalidate(table, &[range]).unwrap();
        assert!(!iommu.can_reach(range));
        assert_eq!(iommu.commands(), 1);
    }

    #[test]
    fn commands_in_turn_end_one_after_the_other_and_others_do_not() {
        let ends = |serving| {
            let iommu = Iommu::new(1, 0, serving);
            [(); 8].map(|()| iommu.complete_at(1_000_000_000))
        };
        let in_turn = ends(Serving::InTurn);
        assert!(
            in_turn
                .windows(2)
                .all(|two| two[1] == two[0] + 1_000_000_000),
            "{in_turn:?}"
        );
        let at_once = ends(Serving::AtOnce);
        assert!(at_once[7] - at_once[0] < 7_000_000_000, "{at_once:?}");
    }
}
