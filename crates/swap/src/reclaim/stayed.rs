// SPDX-License-Identifier: Apache-2.0
//! [`Stayed`]: which pages a reclaim has left in memory, and why.
//!
//! Most reasons can be seen afterwards: which pages are wired, protected, mapped again. Two cannot, and are noted
//! while a reclaim that will be asked is under way ([`Trials`](super::trials::Trials)): that a device was using a
//! section, and which pages the store had no room for.

use super::{Reclaimer, taking::Memory, trials::Trial};
use pagetide_addr::{PageSet, SectionNo};
use pagetide_gmem::PageState;

/// Pages in memory, by why they were not evicted: the first reason that holds.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stayed {
    /// Being filled or evicted at this moment.
    pub moving: u64,
    /// Used by a device for as long as it likes, such as its rings.
    pub wired: u64,
    /// Spared by a DMA protector.
    pub protected: u64,
    /// In a huge page that is in use or cannot be split.
    pub in_huge: u64,
    /// The store had no room for them.
    pub refused: u64,
    /// Touched since they were unmapped, or mapped again by the kernel.
    pub touched: u64,
    /// Transfers of a device were under way in their section.
    pub leased: u64,
    /// None of that: it was not their turn before the reclaim ended.
    pub untried: u64,
}

impl Stayed {
    /// All of them.
    #[must_use]
    pub fn pages(&self) -> u64 {
        let with_devices = self.wired + self.leased + self.protected;
        self.moving + with_devices + self.in_huge + self.refused + self.touched + self.untried
    }
}

impl Reclaimer {
    /// A reclaim begins after which [`Self::stayed`] will be asked.
    pub fn begin_account(&self) {
        self.memory.trials.begin();
    }

    /// The reclaim since [`Self::begin_account`] has done all that it was to do.
    pub fn end_account(&self) {
        self.memory.trials.end();
    }

    /// What is in memory, and why it was not evicted by the reclaim since [`Self::begin_account`].
    #[must_use]
    pub fn stayed(&self) -> Stayed {
        let protected = self.selection.protected();
        self.memory.stayed(|section| protected.contains(section))
    }
}

impl Memory {
    /// What is in memory now, and why, after the tries that were noted. A section costs what a scan of it costs.
    pub(super) fn stayed(&self, protected: impl Fn(SectionNo) -> bool) -> Stayed {
        let trials = self.trials.end();
        let mut stayed = Stayed::default();
        for section in self.evictor.space().table().sections() {
            let trial = trials.get(&section).copied().unwrap_or_default();
            self.add_stayed(section, trial, &protected, &mut stayed);
        }
        stayed
    }

    fn add_stayed(
        &self,
        section: SectionNo,
        trial: Trial,
        protected: &impl Fn(SectionNo) -> bool,
        stayed: &mut Stayed,
    ) {
        let space = self.evictor.space();
        let is_moving = |state| {
            matches!(
                state,
                PageState::Filling(_) | PageState::Evicting(_) | PageState::Discarding
            )
        };
        let mut present = self.present(section);
        let moving = space.table().pages_in_state(section, is_moving);
        if present.is_empty() && moving.is_empty() {
            return;
        }
        // Holes that the guest left are no pages in memory.
        if let Ok(in_place) = space.in_place(section) {
            present = present.intersection(&in_place);
        }
        stayed.moving += moving.len();
        let mut take = |why: &PageSet| {
            let these = present.intersection(why);
            present.subtract(&these);
            these.len()
        };
        let all = PageSet::of_range(section, section.all_pages());
        let of_section = |is_so: bool| if is_so { all } else { PageSet::EMPTY };
        stayed.wired += take(&space.wired(section));
        stayed.protected += take(&of_section(protected(section)));
        stayed.in_huge += take(&of_section(self.tracker.is_held(section)));
        stayed.refused += take(&trial.refused);
        // If it cannot be told what is mapped, they were not tried either.
        stayed.touched += take(&self.tracker.mapped(section).unwrap_or(PageSet::EMPTY));
        stayed.leased += take(&of_section(trial.was_busy));
        stayed.untried += take(&all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Evictor, Limit, Pool, PoolCap, PoolStore};
    use pagetide_addr::{DeviceId, PAGE_BYTES, PageNo, SECTION_PAGES};
    use pagetide_gmem::{
        AddressSpace, MemoryParts, RegionRequest,
        fake::{self, FakeMmu, FakePlace},
    };
    use pagetide_policy::{
        sampling::{Look, Sampled, Touched},
        tracker::{AccessTracker, TrackerError},
    };
    use std::sync::Arc;

    const SECTIONS: u64 = 6;
    const PAGES: u64 = SECTIONS * SECTION_PAGES;
    /// A page in use, in the first section.
    const IN_USE: PageNo = PageNo(7);
    /// A section in a huge page.
    const HELD: SectionNo = SectionNo(1);
    /// A section that a device spares, and one that it is using.
    const SPARED: SectionNo = SectionNo(2);
    const BUSY: SectionNo = SectionNo(3);

    struct InUse;

    impl AccessTracker for InUse {
        fn sample(&self, _: &[Look]) -> Result<Sampled, TrackerError> {
            Ok(Sampled::default())
        }

        fn take_out(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
            Ok(vec![Touched::default(); sections.len()])
        }

        fn mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError> {
            let mut mapped = PageSet::EMPTY;
            if section == IN_USE.section() {
                mapped.insert(IN_USE);
            }
            if self.is_held(section) {
                mapped = PageSet::of_range(section, section.all_pages());
            }
            Ok(mapped)
        }

        fn is_held(&self, section: SectionNo) -> bool {
            section == HELD
        }
    }

    struct Rig {
        memory: Memory,
        mmu: Arc<FakeMmu>,
        _space: Arc<AddressSpace>,
        _folder: tempfile::TempDir,
    }

    fn rig() -> Rig {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let pool = Pool::create_empty(&folder.path().join("a.pool"), PAGES, 1, b"").unwrap();
        let pool = pool.within(&PoolCap::new(None)).unwrap();
        let store = Arc::new(PoolStore::new(Arc::new(pool)));
        let place = Arc::new(FakePlace::default());
        place.put_zeros(PageNo(0).run(PAGES));
        let parts = MemoryParts {
            store: Arc::clone(&store) as _,
            ..fake::parts(PAGES, place as _)
        };
        let mmu = Arc::new(FakeMmu::default());
        let space = fake::space(parts, DeviceId(1), Arc::clone(&mmu) as _);
        let all = RegionRequest::of_bytes(PAGES * PAGE_BYTES);
        space.alloc(&all).unwrap();
        let memory = Memory {
            evictor: Evictor::new(Arc::clone(space.memory().unwrap()), store),
            limit: Arc::new(Limit::new()),
            tracker: Arc::new(InUse),
            trials: Arc::default(),
        };
        Rig {
            memory,
            mmu,
            _space: space,
            _folder: folder,
        }
    }

    fn take(memory: &mut Memory, section: SectionNo) {
        let _evicted = memory.take(section, u64::MAX, || true, &|| true);
    }

    #[test]
    fn each_page_that_stays_is_told_by_why_it_does() {
        let mut rig = rig();
        rig.mmu.wire([PageNo(0), PageNo(1)]);
        rig.memory.trials.begin();
        take(&mut rig.memory, IN_USE.section());
        take(&mut rig.memory, HELD);
        rig.mmu.be_busy();
        take(&mut rig.memory, BUSY);
        rig.mmu.be_idle();
        let stayed = rig.memory.stayed(|section| section == SPARED);
        let expected = Stayed {
            wired: 2,
            touched: 1,
            in_huge: SECTION_PAGES,
            protected: SECTION_PAGES,
            leased: SECTION_PAGES,
            untried: 2 * SECTION_PAGES,
            ..Stayed::default()
        };
        assert_eq!(stayed, expected);
        assert_eq!(stayed.pages(), PAGES - (SECTION_PAGES - 3));
    }

    #[test]
    fn what_was_in_the_way_once_counts_no_more_after_the_next_try() {
        let mut rig = rig();
        rig.memory.trials.begin();
        rig.mmu.be_busy();
        take(&mut rig.memory, BUSY);
        rig.mmu.be_idle();
        take(&mut rig.memory, BUSY);
        let stayed = rig.memory.stayed(|_| false);
        assert_eq!((stayed.leased, stayed.pages()), (0, PAGES - SECTION_PAGES));
        // And nothing is noted while nobody will ask.
        rig.mmu.be_busy();
        take(&mut rig.memory, SPARED);
        let stayed = rig.memory.stayed(|_| false);
        assert_eq!(stayed.leased, 0);
    }
}
