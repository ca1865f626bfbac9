// SPDX-License-Identifier: Apache-2.0
//! [`DirectReclaim`]: takes from the reserve, on the thread that needs room.

use crate::{
    limit::MakeRoom,
    pace::Pace,
    reclaim::taking::Memory,
    reserve::{Claim, Reserve},
    taken::Took,
};
use pagetide_addr::{SECTION_PAGES, SectionNo};
use pagetide_policy::{
    candidates::Ready, protect::ProtectedSections, reclaim::DIRECT_SECTIONS_MAX,
};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering::Relaxed},
    time::Duration,
};

/// Fewest pages taken at a time, as far as a section has them: an eviction has a fixed cost, and the
/// next fill needs room too.
pub(super) const DIRECT_PAGES_MIN: u64 = 32;

/// Called for each section that pages were evicted from.
pub(crate) type TellTaken = Arc<dyn Fn(SectionNo, Took) + Send + Sync>;

/// Takes from the [`Reserve`], on the thread that needs room.
pub struct DirectReclaim {
    pub(crate) protected: Arc<ProtectedSections>,
    pub(crate) taken: TellTaken,
    pub(crate) clock: Box<dyn Fn() -> Duration + Send + Sync>,
    /// One for each concurrent user.
    pub(crate) workers: Mutex<Vec<Memory>>,
    /// Further workers are cloned from this one.
    pub(crate) pattern: Memory,
}

impl MakeRoom for DirectReclaim {
    /// Tries a few sections at most.
    fn make_room(&self, pages: u64) -> u64 {
        let evicted = self.take_some(pages, &|| true);
        self.reserve().direct_pages.fetch_add(evicted, Relaxed);
        evicted
    }

    /// Tries a few sections at most.
    fn make_huge_page(&self) -> bool {
        let space = self.pattern.evictor.space();
        let goes_whole = |section| space.goes_whole(section);
        let evicted = self.take_of(SECTION_PAGES, goes_whole, &|| true);
        self.reserve().direct_pages.fetch_add(evicted, Relaxed);
        evicted > 0
    }
}

impl DirectReclaim {
    /// Evicts some pages of ready sections, as [`MakeRoom::make_room`] does, but on behalf of a
    /// reclaimer: they are not counted as a fill's. Between two sections and within one it keeps to `pace`.
    pub fn take_some(&self, pages: u64, pace: &impl Pace) -> u64 {
        self.take_of(pages, |_| true, pace)
    }

    /// The same, of sections that are `wanted`.
    fn take_of(&self, pages: u64, wanted: impl Fn(SectionNo) -> bool, pace: &impl Pace) -> u64 {
        let mut worker = self.worker();
        let mut evicted = 0;
        for _ in 0..DIRECT_SECTIONS_MAX {
            if !pace.go_on() {
                break;
            }
            let Some((claim, ready)) = self.reserve().claim_next((self.clock)(), &wanted) else {
                break;
            };
            // It was protected after it was offered: only the reclaimer may evict it.
            if self.protected.contains(ready.section) {
                continue;
            }
            let left = pages.max(DIRECT_PAGES_MIN).saturating_sub(evicted);
            evicted += self.take(&mut worker, claim, ready, left, pace);
            if evicted >= pages {
                break;
            }
        }
        self.workers().push(worker);
        evicted
    }

    pub(super) fn take(
        &self,
        worker: &mut Memory,
        claim: Claim<'_>,
        ready: Ready,
        pages: u64,
        pace: &impl Pace,
    ) -> u64 {
        let outcome = worker.take(ready.section, pages, || claim.holds(), pace);
        let taken = outcome.taken.pages;
        if taken > 0 {
            let took = Took::of(taken, outcome.present_pages);
            (self.taken)(ready.section, took);
        }
        if let Some(stop) = &outcome.stop {
            // The reclaimer meets the same error, and logs it.
            tracing::debug!(%stop, "nothing more can be evicted for now");
            self.reserve().close();
        }
        self.reserve().release(claim, ready, outcome.after(pages));
        taken
    }

    pub(super) fn reserve(&self) -> &Reserve {
        self.pattern.limit.reserve()
    }

    pub(super) fn worker(&self) -> Memory {
        self.workers()
            .pop()
            .unwrap_or_else(|| self.pattern.another())
    }

    pub(super) fn workers(&self) -> MutexGuard<'_, Vec<Memory>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for DirectReclaim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DirectReclaim({:?})", self.reserve())
    }
}
