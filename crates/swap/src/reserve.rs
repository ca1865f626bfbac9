// SPDX-License-Identifier: Apache-2.0
//! [`Reserve`]: sections that stand ready to go, for whoever needs room at once; and [`DirectReclaim`],
//! which takes them.
//!
//! A fill that finds no room under the limit does not wait for the reclaimer: it evicts some pages of
//! a section that has rested, which takes some hundred microseconds (Taiji 4.2.2, below the *min* mark).
//! Several fills may do so beside each other and beside the reclaimer, each with a section of its own:
//!
//! ```text
//!   reclaimer ── offers what stands ready ──► ready ──┬─ claim ─► in hand ─► evicted ─► told
//!        ▲                                            │   of a fill, or of the reclaimer     │
//!        │◄─ withdrawn, to be unmapped or sampled ◄───┘                                      │
//!        └──────────────────────────────── what became of it ◄──────────────────────────────┘
//! ```
//! # What keeps the rules
//! - *A page rests before it goes.* Only the reclaimer takes pages out of the page tables, and only of
//!   sections that are in nobody's hand and were withdrawn before; so what is in the list or in a hand
//!   has been left alone since its time.
//! - *Memory of another kind.* RAM that comes or goes begins a new epoch: what was claimed in an earlier one
//!   finds so after its pages are protected, and spares them all.
//! - *Hazards.* The reserve is open for as long as a look for hazards holds, and no longer
//!   ([`Reserve::open`]).
//!
//! No call here waits for a section in another's hand but [`Reserve::shut`].

use crate::{
    limit::MakeRoom,
    reclaim::{Took, taking::Memory},
};
use pagetide_addr::SectionNo;
use pagetide_policy::protect::ProtectedSections;
use std::{
    collections::{BTreeSet, VecDeque},
    ops::Range,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Most sections that are offered at a time.
pub const OFFERED_MAX: usize = 256;
/// Fewest pages that are taken at a time, as far as a section has them: an eviction has costs of its
/// own, and the next fill needs room too.
const DIRECT_PAGES_MIN: u64 = 32;
/// Most sections that one fill tries.
const DIRECT_SECTIONS_MAX: usize = 4;

/// A section that may go for a while.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ready {
    /// The section.
    pub section: SectionNo,
    /// From when it has rested until it must be looked at anew, by the clock of the reclaimer.
    pub within: Range<Duration>,
}

/// What became of a section that a fill took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum After {
    /// It has no page any more.
    Emptied,
    /// What is left of it is in use.
    Tried,
    /// A good part of it was in use.
    Warm,
}

#[derive(Debug, Default)]
struct State {
    /// Coldest first.
    ready: VecDeque<Ready>,
    in_hand: BTreeSet<SectionNo>,
    told: Vec<(SectionNo, After)>,
    open_until: Duration,
    epoch: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Reserve {
    state: Mutex<State>,
    changed: Condvar,
    direct_pages: AtomicU64,
}

/// A section that nobody else takes meanwhile.
#[derive(Debug)]
pub(crate) struct Hand<'a> {
    reserve: &'a Reserve,
    section: SectionNo,
    epoch: u64,
}

impl Drop for Hand<'_> {
    fn drop(&mut self) {
        self.reserve.lock().in_hand.remove(&self.section);
        self.reserve.changed.notify_all();
    }
}

impl Hand<'_> {
    /// False once RAM has come or gone since it was claimed.
    fn holds(&self) -> bool {
        self.reserve.lock().epoch == self.epoch
    }
}

impl Reserve {
    /// Sections may be taken until then, by the clock of the reclaimer.
    pub fn open(&self, until: Duration) {
        self.lock().open_until = until;
    }

    /// Nothing may be taken from now on.
    pub fn close(&self) {
        self.lock().open_until = Duration::ZERO;
    }

    /// Closes it, and waits until nothing of it is in anybody's hand.
    pub fn shut(&self) {
        let mut state = self.lock();
        state.open_until = Duration::ZERO;
        let waited = self.changed.wait_while(state, |s| !s.in_hand.is_empty());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// RAM has come or gone: what is known of sections may be that of other memory.
    pub fn ram_changed(&self) {
        let mut state = self.lock();
        state.epoch += 1;
        state.ready.clear();
        state.told.clear();
    }

    /// Pages that fills have evicted by themselves so far.
    #[must_use]
    pub fn direct_pages(&self) -> u64 {
        self.direct_pages.load(Relaxed)
    }

    /// Replaces what is offered.
    pub(crate) fn offer(&self, ready: impl Iterator<Item = Ready>) {
        let mut state = self.lock();
        // What a fill has put down since the reclaimer last heard stands no longer, though it believes so.
        let is_told = |section| state.told.iter().any(|(told, _)| *told == section);
        let is_free =
            |ready: &Ready| !state.in_hand.contains(&ready.section) && !is_told(ready.section);
        let free = ready.filter(is_free);
        let ready = free.take(OFFERED_MAX).collect();
        state.ready = ready;
    }

    /// True if `section` is in nobody's hand; it is offered no more then.
    pub(crate) fn withdraw(&self, section: SectionNo) -> bool {
        let mut state = self.lock();
        if state.in_hand.contains(&section) {
            return false;
        }
        state.ready.retain(|ready| ready.section != section);
        true
    }

    /// Claims `section` for the reclaimer, unless it is in a hand.
    pub(crate) fn claim(&self, section: SectionNo) -> Option<Hand<'_>> {
        let mut state = self.lock();
        if !state.in_hand.insert(section) {
            return None;
        }
        state.ready.retain(|ready| ready.section != section);
        let epoch = state.epoch;
        Some(self.hand(section, epoch))
    }

    /// Claims the coldest section that may go now.
    fn claim_next(&self, now: Duration) -> Option<(Hand<'_>, Ready)> {
        let mut state = self.lock();
        if now >= state.open_until {
            return None;
        }
        let place = state
            .ready
            .iter()
            .position(|ready| ready.within.contains(&now))?;
        let ready = state.ready.remove(place)?;
        state.in_hand.insert(ready.section);
        let epoch = state.epoch;
        let hand = self.hand(ready.section, epoch);
        Some((hand, ready))
    }

    /// What became of the sections that fills took, since this was last asked.
    pub(crate) fn told(&self) -> Vec<(SectionNo, After)> {
        std::mem::take(&mut self.lock().told)
    }

    /// Puts a section down: says what became of it, or that it stands ready as before.
    fn put_down(&self, hand: Hand<'_>, ready: Ready, after: Option<After>) {
        let mut state = self.lock();
        if state.epoch == hand.epoch {
            match after {
                Some(after) => state.told.push((hand.section, after)),
                None => state.ready.push_front(ready),
            }
        }
        // In one hold: whoever claims it next must not find it in a hand that is about to go.
        state.in_hand.remove(&hand.section);
        drop(state);
        std::mem::forget(hand);
        self.changed.notify_all();
    }

    fn hand(&self, section: SectionNo, epoch: u64) -> Hand<'_> {
        Hand {
            reserve: self,
            section,
            epoch,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who is told of each section that pages were taken of.
pub(crate) type TellTaken = Arc<dyn Fn(SectionNo, Took) + Send + Sync>;

/// Takes from the [`Reserve`], on the thread of whoever needs room.
pub struct DirectReclaim {
    pub(crate) protected: Arc<ProtectedSections>,
    pub(crate) taken: TellTaken,
    pub(crate) clock: Box<dyn Fn() -> Duration + Send + Sync>,
    /// One for each that takes at the same time.
    pub(crate) workers: Mutex<Vec<Memory>>,
    /// From which more are made.
    pub(crate) pattern: Memory,
}

impl MakeRoom for DirectReclaim {
    /// Takes some hundred microseconds for each section, of which it tries a few.
    fn make_room(&self, pages: u64) -> u64 {
        let evicted = self.take_some(pages);
        self.reserve().direct_pages.fetch_add(evicted, Relaxed);
        evicted
    }
}

impl DirectReclaim {
    /// Evicts some pages of what stands ready, as [`MakeRoom::make_room`] does, but on behalf of a
    /// reclaimer: it is not counted as a fill's.
    pub fn take_some(&self, pages: u64) -> u64 {
        let mut worker = self.worker();
        let mut evicted = 0;
        for _ in 0..DIRECT_SECTIONS_MAX {
            let Some((hand, ready)) = self.reserve().claim_next((self.clock)()) else {
                break;
            };
            // Protected since it was offered: it goes by the reclaimer's word only.
            if self.protected.contains(ready.section) {
                continue;
            }
            let left = pages.max(DIRECT_PAGES_MIN).saturating_sub(evicted);
            evicted += self.take(&mut worker, (hand, ready), left);
            if evicted >= pages {
                break;
            }
        }
        self.workers().push(worker);
        evicted
    }

    fn take(&self, worker: &mut Memory, (hand, ready): (Hand<'_>, Ready), pages: u64) -> u64 {
        let outcome = worker.take(ready.section, pages, || hand.holds());
        let taken = outcome.taken.pages;
        if taken > 0 {
            let took = Took::of(taken, outcome.present.len());
            (self.taken)(ready.section, took);
        }
        if let Some(stop) = &outcome.stop {
            // The reclaimer meets it too, and says so.
            tracing::debug!(%stop, "nothing more can be evicted for now");
            self.reserve().close();
        }
        self.reserve().put_down(hand, ready, outcome.after(pages));
        taken
    }

    fn reserve(&self) -> &Reserve {
        self.pattern.limit.reserve()
    }

    fn worker(&self) -> Memory {
        self.workers()
            .pop()
            .unwrap_or_else(|| self.pattern.another())
    }

    fn workers(&self) -> MutexGuard<'_, Vec<Memory>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for DirectReclaim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DirectReclaim({:?})", self.reserve())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: SectionNo = SectionNo(1);
    const B: SectionNo = SectionNo(2);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn ready(section: SectionNo, within: Range<u64>) -> Ready {
        let within = at(within.start)..at(within.end);
        Ready { section, within }
    }

    fn section_of(claimed: &Option<(Hand<'_>, Ready)>) -> Option<SectionNo> {
        claimed.as_ref().map(|(_, ready)| ready.section)
    }

    #[test]
    fn section_is_claimed_once_it_has_rested_while_a_look_for_hazards_holds() {
        let reserve = Reserve::default();
        reserve.offer([ready(A, 10..20), ready(B, 5..15)].into_iter());
        assert!(reserve.claim_next(at(12)).is_none(), "it was never opened");
        reserve.open(at(30));
        assert!(reserve.claim_next(at(4)).is_none());
        // B is the warmer one, but A has not rested.
        assert_eq!(section_of(&reserve.claim_next(at(9))), Some(B));
        // It was not put back, for its fate is not known.
        assert!(reserve.claim_next(at(9)).is_none());
        reserve.offer([ready(A, 10..20)].into_iter());
        assert!(
            reserve.claim_next(at(20)).is_none(),
            "it stood for too long"
        );
        assert!(reserve.claim_next(at(30)).is_none());
        reserve.open(at(13));
        assert_eq!(section_of(&reserve.claim_next(at(12))), Some(A));
        reserve.offer([ready(A, 10..20)].into_iter());
        reserve.close();
        assert!(reserve.claim_next(at(12)).is_none());
    }

    #[test]
    fn section_is_in_one_hand_at_a_time_and_is_not_withdrawn_from_it() {
        let reserve = Reserve::default();
        reserve.open(at(100));
        reserve.offer([ready(A, 0..50)].into_iter());
        let (hand, taken) = reserve.claim_next(at(1)).unwrap();
        assert!(reserve.claim(A).is_none());
        assert!(!reserve.withdraw(A));
        assert!(reserve.withdraw(B));
        // The reclaimer goes by what it knew before.
        reserve.offer([ready(A, 0..50), ready(B, 0..50)].into_iter());
        let other = reserve.claim_next(at(1));
        assert_eq!(section_of(&other), Some(B));
        reserve.put_down(hand, taken, None);
        assert_eq!(section_of(&reserve.claim_next(at(1))), Some(A));
        drop(other);
        let own = reserve.claim(A).unwrap();
        reserve.offer([ready(A, 0..50)].into_iter());
        assert!(reserve.claim_next(at(1)).is_none());
        drop(own);
        assert!(reserve.withdraw(A));
        assert!(reserve.told().is_empty());
    }

    #[test]
    fn what_became_of_a_section_is_told_once() {
        let reserve = Reserve::default();
        reserve.open(at(100));
        for after in [After::Emptied, After::Tried, After::Warm] {
            reserve.offer([ready(A, 0..50)].into_iter());
            let (hand, taken) = reserve.claim_next(at(1)).unwrap();
            reserve.put_down(hand, taken, Some(after));
            // The reclaimer has not heard yet.
            reserve.offer([ready(A, 0..50)].into_iter());
            assert!(reserve.claim_next(at(1)).is_none());
            assert_eq!(reserve.told(), [(A, after)]);
            assert!(reserve.claim_next(at(1)).is_none() && reserve.told().is_empty());
        }
    }

    #[test]
    fn hand_on_memory_that_is_another_by_now_does_not_hold_and_tells_nothing() {
        let reserve = Reserve::default();
        reserve.open(at(100));
        reserve.offer([ready(A, 0..50), ready(B, 0..50)].into_iter());
        let (hand, taken) = reserve.claim_next(at(1)).unwrap();
        assert!(hand.holds());
        reserve.ram_changed();
        assert!(!hand.holds());
        assert!(reserve.claim_next(at(1)).is_none());
        reserve.put_down(hand, taken, None);
        assert!(reserve.claim_next(at(1)).is_none() && reserve.told().is_empty());
        assert!(reserve.withdraw(A));
    }

    #[test]
    fn shutting_waits_for_what_is_in_a_hand() {
        let reserve = Reserve::default();
        reserve.open(at(100));
        reserve.offer([ready(A, 0..50)].into_iter());
        let (hand, taken) = reserve.claim_next(at(1)).unwrap();
        let is_shut = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                reserve.shut();
                is_shut.store(true, Relaxed);
            });
            // Closed at once, shut only when the hand is empty.
            while reserve.lock().open_until > Duration::ZERO {
                std::thread::yield_now();
            }
            assert!(!is_shut.load(Relaxed));
            reserve.put_down(hand, taken, None);
        });
        assert!(is_shut.load(Relaxed));
        assert!(reserve.claim_next(at(1)).is_none());
    }
}
