// SPDX-License-Identifier: Apache-2.0
//! The device TLB: translations that a device has received by ATS and keeps (VPRI 2.1,
//! step 1).
//!
//! ```text
//!   set = page mod sets         way 0        way 1       …   way n-1
//!     0  generation 7        [page 0  W 1] [ —       ]
//!     1  generation 3        [page 5  R 0] [page 9 W 2 dead]
//!                              └ number ┘ │ └ DMAs that use it now
//!                                         └ strongest access
//! ```
//! Set associative and bounded: if a set is full, the least recently used way is
//! evicted. A way that a DMA uses cannot be evicted; if all are used, the caller
//! tries again.
//!
//! # Races with invalidations
//! The host clears the page table's entry, then invalidates. After that, neither
//! of two things may happen:
//!
//! > *A DMA goes on with the old translation.* A look-up takes its set's lock, finds
//! > the way and counts itself as a user. An invalidation takes the same lock, makes
//! > the way *dead*, so that no look-up finds it any more, and is complete only when
//! > it has no users.
//!
//! > *A translation that was in flight is kept.* The device has asked; the IOMMU has
//! > walked and found the page; the host clears and invalidates; now the answer
//! > arrives. So the caller notes the set's generation before it asks, an
//! > invalidation raises it, and an answer that finds another generation is thrown
//! > away: the device asks again.
//!
//! Real TLBs have a comparator for each way instead of the lock. Checked under loom
//! below.

use crate::sync::Mutex;
use pagetide_addr::{Access, FilePage, FileRange, to_usize};
use std::sync::PoisonError;

/// How large a device TLB is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DevTlbSize {
    /// Sets; rounded up to a power of two, at least 1.
    pub sets: usize,
    /// Translations a set holds, at least 1.
    pub ways: usize,
}

/// Counters of the look-ups so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct TlbCounts {
    /// Found.
    pub hits: u64,
    /// Not found, or without the access wanted.
    pub misses: u64,
    /// Evicted for want of room.
    pub evictions: u64,
    /// Invalidated by the host.
    pub invalidations: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct DevTlb {
    sets: Box<[Mutex<Set>]>,
}

#[derive(Debug)]
struct Set {
    generation: u64,
    ways: Box<[Way]>,
    clock: u64,
    counts: TlbCounts,
}

#[derive(Clone, Copy, Debug)]
struct Way {
    page: FilePage,
    access: Access,
    state: State,
    /// DMAs under way by it.
    users: u32,
    used_at: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Live,
    /// Invalidated; free when its last user leaves.
    Dead,
}

/// A DMA under way that uses a translation; returned by [`DevTlb::release`].
#[must_use = "a translation in use that is not released keeps its page from eviction for ever"]
#[derive(Debug)]
pub(super) struct InUse {
    set: usize,
    way: usize,
}

/// The generation of a set before the IOMMU was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ticket(u64);

/// The result of a look-up.
#[derive(Debug)]
pub(super) enum Found {
    /// A translation that allows the access.
    Hit(InUse),
    /// None: ask the IOMMU, and return the ticket with its answer.
    Miss(Ticket),
}

/// What happened to a translation from the IOMMU.
#[derive(Debug)]
pub(super) enum Kept {
    /// The caller uses it from now on.
    Used(InUse),
    /// An invalidation overtook it, or there is no room: ask again.
    Again,
}

impl DevTlb {
    pub fn new(size: DevTlbSize) -> Self {
        let way = Way {
            page: FilePage(0),
            access: Access::Read,
            state: State::Free,
            users: 0,
            used_at: 0,
        };
        let set = || Set {
            generation: 0,
            ways: vec![way; size.ways.max(1)].into_boxed_slice(),
            clock: 0,
            counts: TlbCounts::default(),
        };
        let sets = 0..size.sets.max(1).next_power_of_two();
        Self {
            sets: sets.map(|_| Mutex::new(set())).collect(),
        }
    }

    /// Looks `page` up for `access`. A translation that allows less is dropped: the page may have
    /// been granted more meanwhile.
    pub fn look_up(&self, page: FilePage, access: Access) -> Found {
        let number = self.set_of(page);
        self.in_set(number, |set| {
            set.clock += 1;
            let Some(way) = set.find(page) else {
                set.counts.misses += 1;
                return Found::Miss(Ticket(set.generation));
            };
            if access == Access::Write && set.ways[way].access == Access::Read {
                set.ways[way].kill();
                set.counts.misses += 1;
                return Found::Miss(Ticket(set.generation));
            }
            set.counts.hits += 1;
            Found::Hit(set.take_up(number, way))
        })
    }

    /// The generation of the set of `page`, to be noted before asking the IOMMU for it.
    pub fn ticket(&self, page: FilePage) -> Ticket {
        self.in_set(self.set_of(page), |set| Ticket(set.generation))
    }

    /// Keeps a translation that the IOMMU gave, and uses it.
    pub fn keep_and_use(&self, page: FilePage, access: Access, asked: Ticket) -> Kept {
        let number = self.set_of(page);
        self.in_set(number, |set| match set.put(page, access, asked) {
            Some(way) => Kept::Used(set.take_up(number, way)),
            None => Kept::Again,
        })
    }

    /// Keeps a translation that came along with another one, if there is room.
    pub fn keep(&self, page: FilePage, access: Access, asked: Ticket) {
        // If it is not kept, a later access costs another request.
        self.in_set(self.set_of(page), |set| {
            set.put(page, access, asked).is_some()
        });
    }

    /// Ends a use.
    pub fn release(&self, used: InUse) {
        self.in_set(used.set, |set| {
            let way = &mut set.ways[used.way];
            way.users -= 1;
            if way.users == 0 && way.state == State::Dead {
                way.state = State::Free;
            }
        });
    }

    /// Drops translations of `range`, including those in flight. DMA that has begun may go on: see
    /// [`Self::is_used`].
    pub fn invalidate(&self, range: FileRange) {
        let in_each = range.len() >= self.sets.len() as u64;
        let numbers = if in_each {
            0..self.sets.len()
        } else {
            0..to_usize(range.len())
        };
        for number in numbers {
            let number = if in_each {
                number
            } else {
                self.set_of(range.start.plus(number as u64))
            };
            self.in_set(number, |set| {
                set.generation += 1;
                for way in set.ways.iter_mut() {
                    if way.state == State::Live && range.contains(way.page) {
                        way.kill();
                        set.counts.invalidations += 1;
                    }
                }
            });
        }
    }

    /// True while a DMA under way uses an invalidated translation of `range`.
    pub fn is_used(&self, range: FileRange) -> bool {
        let dead = |way: &Way| way.state == State::Dead && range.contains(way.page);
        if range.len() >= self.sets.len() as u64 {
            return self.any_way(dead);
        }
        let mut pages = range.iter();
        pages.any(|page| self.in_set(self.set_of(page), |set| set.ways.iter().any(dead)))
    }

    /// True while any DMA is under way.
    pub fn is_any_used(&self) -> bool {
        self.any_way(|way| way.users > 0)
    }

    /// Counters of the look-ups so far.
    #[cfg(not(loom))]
    pub fn counts(&self) -> TlbCounts {
        let mut sum = TlbCounts::default();
        for number in 0..self.sets.len() {
            let of_set = self.in_set(number, |set| set.counts);
            sum.hits += of_set.hits;
            sum.misses += of_set.misses;
            sum.evictions += of_set.evictions;
            sum.invalidations += of_set.invalidations;
        }
        sum
    }

    fn any_way(&self, is_it: impl Fn(&Way) -> bool) -> bool {
        (0..self.sets.len()).any(|number| self.in_set(number, |set| set.ways.iter().any(&is_it)))
    }

    fn set_of(&self, page: FilePage) -> usize {
        page.index() & (self.sets.len() - 1)
    }

    fn in_set<T>(&self, number: usize, act: impl FnOnce(&mut Set) -> T) -> T {
        // A panic elsewhere cannot leave a set inconsistent: nothing in here can panic.
        act(&mut self.sets[number]
            .lock()
            .unwrap_or_else(PoisonError::into_inner))
    }
}

impl Set {
    fn find(&self, page: FilePage) -> Option<usize> {
        let is_it = |way: &Way| way.state == State::Live && way.page == page;
        self.ways.iter().position(is_it)
    }

    fn take_up(&mut self, set: usize, way: usize) -> InUse {
        self.ways[way].users += 1;
        self.ways[way].used_at = self.clock;
        InUse { set, way }
    }

    /// Stores a translation, in place of the existing one, of a free way, or of the least recently
    /// used one; `None` if it is out of date, or if all ways are used.
    fn put(&mut self, page: FilePage, access: Access, asked: Ticket) -> Option<usize> {
        if asked.0 != self.generation {
            return None;
        }
        if let Some(way) = self.find(page) {
            // Another engine was faster. There was no invalidation since either of them asked.
            if access == Access::Write {
                self.ways[way].access = Access::Write;
            }
            return Some(way);
        }
        let idle = self
            .ways
            .iter()
            .enumerate()
            .filter(|(_, way)| way.users == 0);
        let (way, _) = idle.min_by_key(|(_, way)| match way.state {
            State::Free => (0, 0),
            State::Live | State::Dead => (1, way.used_at),
        })?;
        if self.ways[way].state == State::Live {
            self.counts.evictions += 1;
        }
        self.ways[way] = Way {
            page,
            access,
            state: State::Live,
            users: 0,
            used_at: self.clock,
        };
        Some(way)
    }
}

impl Way {
    fn kill(&mut self) {
        self.state = if self.users == 0 {
            State::Free
        } else {
            State::Dead
        };
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::{AtomicU64, Ordering};
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    const PAGE: FilePage = FilePage(0);

    struct Rig {
        tlb: DevTlb,
        /// The page table's entry: 1 present.
        entry: AtomicU64,
        page: UnsafeCell<u64>,
    }

    impl Rig {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                tlb: DevTlb::new(DevTlbSize { sets: 1, ways: 1 }),
                entry: AtomicU64::new(1),
                page: UnsafeCell::new(0),
            })
        }

        /// One DMA, which gives up where a real one would ask again.
        fn dma(&self) {
            let used = match self.tlb.look_up(PAGE, Access::Write) {
                Found::Hit(used) => used,
                Found::Miss(ticket) => {
                    if self.entry.load(Ordering::Acquire) == 0 {
                        return;
                    }
                    match self.tlb.keep_and_use(PAGE, Access::Write, ticket) {
                        Kept::Used(used) => used,
                        Kept::Again => return,
                    }
                }
            };
            self.page.with_mut(|_| ());
            self.tlb.release(used);
        }

        /// The host evicts the page if it can.
        fn take(&self) {
            self.entry.store(0, Ordering::Release);
            self.tlb.invalidate(PAGE.single());
            if !self.tlb.is_used(PAGE.single()) {
                self.page.with_mut(|_| ());
            }
        }
    }

    #[test]
    fn loom_translation_under_way_is_never_used_after_an_invalidation() {
        loom::model(|| {
            let rig = Rig::new();
            let device = {
                let rig = Arc::clone(&rig);
                thread::spawn(move || rig.dma())
            };
            rig.take();
            device.join().unwrap();
        });
    }

    #[test]
    fn loom_translation_at_hand_is_never_used_after_an_invalidation() {
        loom::model(|| {
            let rig = Rig::new();
            rig.dma();
            let device = {
                let rig = Arc::clone(&rig);
                thread::spawn(move || rig.dma())
            };
            rig.take();
            device.join().unwrap();
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn tlb(sets: usize, ways: usize) -> DevTlb {
        DevTlb::new(DevTlbSize { sets, ways })
    }

    fn miss(tlb: &DevTlb, page: u64, access: Access) -> Ticket {
        match tlb.look_up(FilePage(page), access) {
            Found::Miss(ticket) => ticket,
            Found::Hit(_) => panic!("page {page} is known"),
        }
    }

    fn learn(tlb: &DevTlb, page: u64, access: Access) -> InUse {
        let asked = miss(tlb, page, access);
        match tlb.keep_and_use(FilePage(page), access, asked) {
            Kept::Used(used) => used,
            Kept::Again => panic!("page {page} was not kept"),
        }
    }

    fn is_known(tlb: &DevTlb, page: u64, access: Access) -> bool {
        match tlb.look_up(FilePage(page), access) {
            Found::Hit(used) => {
                tlb.release(used);
                true
            }
            Found::Miss(_) => false,
        }
    }

    #[test]
    fn full_set_gives_up_the_way_used_longest_ago_and_never_one_in_use() {
        let tlb = tlb(2, 2);
        let held = learn(&tlb, 0, Access::Read);
        tlb.release(learn(&tlb, 2, Access::Read));
        tlb.release(learn(&tlb, 4, Access::Read));
        assert!(is_known(&tlb, 0, Access::Read) && is_known(&tlb, 4, Access::Read));
        let other = learn(&tlb, 6, Access::Read);
        let asked = miss(&tlb, 8, Access::Read);
        let kept = tlb.keep_and_use(FilePage(8), Access::Read, asked);
        assert!(matches!(kept, Kept::Again), "both ways are in use");
        tlb.release(held);
        tlb.release(other);
        assert!(!is_known(&tlb, 1, Access::Read));
        let counts = tlb.counts();
        assert_eq!((counts.evictions, counts.invalidations), (2, 0));
    }

    #[test]
    fn translation_to_read_is_asked_for_anew_when_a_write_comes() {
        let tlb = tlb(1, 4);
        tlb.release(learn(&tlb, 3, Access::Read));
        tlb.release(learn(&tlb, 3, Access::Write));
        assert!(is_known(&tlb, 3, Access::Read));
        assert!(is_known(&tlb, 3, Access::Write));
    }

    #[test]
    fn invalidation_is_complete_when_the_last_dma_of_the_range_has_ended() {
        for sets in [1, 4, 64] {
            let tlb = tlb(sets, 4);
            let used = [learn(&tlb, 5, Access::Write), learn(&tlb, 9, Access::Write)];
            let range = FileRange::new(FilePage(4), FilePage(8));
            assert!(!tlb.is_used(range), "nothing of it was invalidated");
            tlb.invalidate(range);
            assert!(tlb.is_used(range));
            assert!(!is_known(&tlb, 5, Access::Read));
            assert!(is_known(&tlb, 9, Access::Write));
            let [five, nine] = used;
            tlb.release(five);
            assert!(!tlb.is_used(range));
            assert!(tlb.is_any_used());
            tlb.release(nine);
            assert!(!tlb.is_any_used());
        }
    }

    #[test]
    fn answer_that_an_invalidation_has_overtaken_is_thrown_away() {
        let tlb = tlb(8, 2);
        let asked = miss(&tlb, 17, Access::Read);
        tlb.invalidate(FilePage(17).single());
        let kept = tlb.keep_and_use(FilePage(17), Access::Read, asked);
        assert!(matches!(kept, Kept::Again));
        tlb.keep(FilePage(17), Access::Read, asked);
        assert!(!is_known(&tlb, 17, Access::Read));
        tlb.keep(FilePage(17), Access::Read, tlb.ticket(FilePage(17)));
        assert!(is_known(&tlb, 17, Access::Read));
    }
}
