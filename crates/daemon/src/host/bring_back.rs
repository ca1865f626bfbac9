// SPDX-License-Identifier: Apache-2.0
//! Bringing many stored pages back, whatever tier they are in.
//!
//! A fill whose content is at hand is over when [`BringBack::begin`] returns. One whose content is on a
//! disk or another machine ends later, on a thread of its tier, so several are kept under way: a tier is
//! asked for many pages at a time, and never for more than [`UNDER_WAY_MAX`] fills of them.
//!
//! ```text
//!   begin ─ too many under way? wait for one ─► fault(…, Reply) ──► channel of outcomes
//!   finish ─ wait for all                                    all present, or the first that failed
//! ```
//! If it ends early, because of a failure or on request, the fills under way go on; nobody is told of them.

use pagetide_addr::{Access, DeviceId, PageRange};
use pagetide_gmem::{AddressSpace, Cause, Fault, FaultOutcome, Wait};
use std::{
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    time::{Duration, Instant},
};

/// Most fills under way. With fills of 16 pages these are 2 MiB, enough to keep a disk busy.
pub(super) const UNDER_WAY_MAX: usize = 32;
/// Longest time without the end of any fill: far longer than any takes.
const FILL_TIMEOUT: Duration = Duration::from_secs(60);
/// How often a wait looks whether it is to go on.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Why pages did not come back.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotBack {
    /// Their fill failed.
    #[error("pages {}..{} cannot be swapped in ({outcome:?}); the log says why", pages.start, pages.end)]
    Failed {
        /// The first of them to fail.
        pages: PageRange,
        /// How.
        outcome: FaultOutcome,
    },
    /// No fill has ended for long.
    #[error(
        "pages {}..{} were not swapped in within {} s: somebody has claimed them and does not come to an end, or \
         their tier does not answer; the log may say why",
        pages.start,
        pages.end,
        FILL_TIMEOUT.as_secs()
    )]
    TooSlow {
        /// Those asked for first.
        pages: PageRange,
    },
    /// The caller does not want them any more.
    #[error("bringing pages back was stopped")]
    Stopped,
}

/// See the module.
pub(super) struct BringBack<'a> {
    space: &'a AddressSpace,
    /// Looked at before each wait, and during it.
    goes_on: &'a dyn Fn() -> bool,
    tell: Sender<(PageRange, FaultOutcome)>,
    told: Receiver<(PageRange, FaultOutcome)>,
    /// In the order in which they began.
    under_way: Vec<PageRange>,
}

impl<'a> BringBack<'a> {
    /// Nothing is under way yet. Once `goes_on` returns false, all calls end with [`NotBack::Stopped`].
    pub(super) fn new(space: &'a AddressSpace, goes_on: &'a dyn Fn() -> bool) -> Self {
        let (tell, told) = mpsc::channel();
        Self {
            space,
            goes_on,
            tell,
            told,
            under_way: Vec::new(),
        }
    }

    /// Begins to fill `pages`, which lie in one region.
    ///
    /// # Errors
    /// [`NotBack`], about these pages or earlier ones.
    pub(super) fn begin(&mut self, pages: PageRange) -> Result<(), NotBack> {
        if !(self.goes_on)() {
            return Err(NotBack::Stopped);
        }
        while self.under_way.len() >= UNDER_WAY_MAX {
            self.wait_for_one()?;
        }
        let fault = Fault {
            device: DeviceId::DAEMON,
            pages,
            access: Access::Write,
        };
        let tell = self.tell.clone();
        let reply = Box::new(move |outcome| {
            if tell.send((pages, outcome)).is_err() {
                tracing::debug!("nobody waits for these pages any more");
            }
        });
        self.under_way.push(pages);
        self.space.fault(&Cause::Fault(fault), Wait::Reply(reply));
        while let Ok(ended) = self.told.try_recv() {
            self.settle(ended)?;
        }
        Ok(())
    }

    /// Waits for all that was begun.
    ///
    /// # Errors
    /// [`NotBack`].
    pub(super) fn finish(mut self) -> Result<(), NotBack> {
        while !self.under_way.is_empty() {
            self.wait_for_one()?;
        }
        Ok(())
    }

    fn wait_for_one(&mut self) -> Result<(), NotBack> {
        let Some(first) = self.under_way.first().copied() else {
            return Ok(());
        };
        let begin = Instant::now();
        loop {
            match self.told.recv_timeout(LOOK_INTERVAL) {
                Ok(ended) => return self.settle(ended),
                Err(RecvTimeoutError::Timeout) if !(self.goes_on)() => {
                    return Err(NotBack::Stopped);
                }
                Err(RecvTimeoutError::Timeout) if begin.elapsed() < FILL_TIMEOUT => {}
                // This holds a sender itself.
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    return Err(NotBack::TooSlow { pages: first });
                }
            }
        }
    }

    fn settle(&mut self, (pages, outcome): (PageRange, FaultOutcome)) -> Result<(), NotBack> {
        self.under_way.retain(|under_way| *under_way != pages);
        match outcome {
            FaultOutcome::Present => Ok(()),
            FaultOutcome::OutOfRange | FaultOutcome::Lost | FaultOutcome::Gone => {
                Err(NotBack::Failed { pages, outcome })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::{PAGE_BYTES, PageNo, SECTION_PAGES};
    use pagetide_gmem::{
        Incidents, MemoryParts, PlaceError, RegionRequest, StoreError,
        fake::{self, FakeMmu, FakePlace, FakeStore},
    };
    use std::sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    };

    const PAGES: u64 = 4 * SECTION_PAGES;
    const RUN: u64 = 16;

    struct Rig {
        place: Arc<FakePlace>,
        store: Arc<FakeStore>,
        space: Arc<AddressSpace>,
    }

    struct Quiet;

    impl Incidents for Quiet {
        fn foreign_page(&self, page: PageNo) {
            panic!("{page}");
        }
        fn poisoned(&self, page: PageNo, why: &StoreError) {
            panic!("{page}: {why}");
        }
        fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
            panic!("{page}: {why}");
        }
        fn fill_failed(&self, _page: PageNo, _why: &dyn std::error::Error) {}
    }

    /// All pages stored; every other run of them is not at hand.
    fn rig() -> Rig {
        let place = Arc::new(FakePlace::default());
        let store = Arc::new(FakeStore::default());
        let parts = MemoryParts {
            store: Arc::clone(&store) as _,
            incidents: Arc::new(Quiet),
            ..fake::parts(PAGES, Arc::clone(&place) as _)
        };
        place.put_zeros(PageNo(0).run(PAGES));
        let space = fake::space(parts, DeviceId(1), Arc::new(FakeMmu::default()));
        let all = RegionRequest::of_bytes(PAGES * PAGE_BYTES);
        space.alloc(&all).unwrap();
        let memory = space.memory().unwrap();
        for section in PageNo(0).run(PAGES).sections() {
            let pages = memory.table().pages_of(section);
            let wanted = pagetide_addr::PageSet::of_range(section, pages);
            let mut round = memory.begin_eviction(section, &wanted).unwrap();
            let evicted: Vec<_> = pages
                .iter()
                .map(|page| (page, store.keep(&[1; 4096])))
                .collect();
            let far = evicted.iter().filter(|(page, _)| page.0 / RUN % 2 == 1);
            far.for_each(|(_, content)| store.put_far(*content));
            assert_eq!(round.commit(&evicted).evicted.len(), SECTION_PAGES);
        }
        Rig {
            place,
            store,
            space,
        }
    }

    fn runs() -> impl Iterator<Item = PageRange> {
        (0..PAGES / RUN).map(|run| PageNo(run * RUN).run(RUN))
    }

    #[test]
    fn pages_of_all_tiers_come_back_with_a_bounded_number_of_loads_under_way() {
        let rig = rig();
        let is_over = AtomicBool::new(false);
        let most = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // A tier that answers the last request first.
                while !is_over.load(Relaxed) {
                    let loading = rig.store.loading();
                    most.fetch_max(loading.len(), Relaxed);
                    match loading.last() {
                        Some(page) => rig.store.deliver(*page),
                        None => std::thread::yield_now(),
                    }
                }
            });
            let mut fills = BringBack::new(&rig.space, &|| true);
            let begun: Result<(), NotBack> = runs().try_for_each(|run| fills.begin(run));
            assert_eq!(begun, Ok(()));
            assert_eq!(fills.finish(), Ok(()));
            is_over.store(true, Relaxed);
        });
        assert_eq!(rig.place.present_pages(), PAGES);
        let bound = UNDER_WAY_MAX * usize::try_from(RUN).unwrap();
        let most = most.load(Relaxed);
        assert!(most <= bound, "{most} loads were under way");
    }

    #[test]
    fn fill_that_fails_is_named_though_others_end_later() {
        let rig = rig();
        let mut fills = BringBack::new(&rig.space, &|| true);
        let (near, far) = (PageNo(0).run(RUN), PageNo(RUN).run(RUN));
        assert_eq!(fills.begin(near), Ok(()));
        assert_eq!(fills.begin(far), Ok(()));
        for page in far.iter().skip(1) {
            rig.store.deliver(page);
        }
        let page = far.start;
        rig.store.fail(page, StoreError::GivenUp { page });
        let outcome = FaultOutcome::Lost;
        let failed = NotBack::Failed {
            pages: far,
            outcome,
        };
        assert_eq!(fills.finish(), Err(failed));
        assert_eq!(rig.place.present_pages(), 2 * RUN - 1);
    }

    #[test]
    fn wait_that_is_stopped_ends_though_its_tier_does_not_answer() {
        let rig = rig();
        let goes_on = AtomicBool::new(true);
        let look = || goes_on.load(Relaxed);
        let mut fills = BringBack::new(&rig.space, &look);
        let far = PageNo(RUN).run(RUN);
        assert_eq!(fills.begin(far), Ok(()));
        goes_on.store(false, Relaxed);
        assert_eq!(fills.begin(PageNo(0).run(RUN)), Err(NotBack::Stopped));
        assert_eq!(fills.finish(), Err(NotBack::Stopped));
        // The fill goes on.
        far.iter().for_each(|page| rig.store.deliver(page));
        assert_eq!(rig.place.present_pages(), RUN);
    }
}
