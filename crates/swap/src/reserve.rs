// SPDX-License-Identifier: Apache-2.0
//! [`Reserve`]: sections that stand ready to go, for whoever needs room at once; and [`DirectReclaim`],
//! which takes them.
//!
//! A fill that finds no room under the limit does not wait for the reclaimer: it evicts some pages of
//! a section that has rested (Taiji 4.2.2, below the *min* mark).
//! Several fills may do so beside each other and beside the reclaimer, each with a section of its own:
//!
//! ```text
//!   reclaimer ── offers what stands ready ──► ready ──┬─ claimed ──► evicted ──► released
//!        ▲                                            │  by a fill, or the reclaimer         │
//!        │◄─ withdrawn, to be unmapped or sampled ◄───┘                                      │
//!        └───────────────────────────────────── outcome ◄───────────────────────────────────┘
//! ```
//! # What keeps the rules
//! - *A page rests before it goes.* Only the reclaimer takes pages out of the page tables, and only of
//!   sections that nobody has claimed and that were withdrawn before; so what is listed or claimed has
//!   been left alone since its time.
//! - *Memory of another kind.* RAM that comes or goes begins a new epoch: what was claimed in an earlier one
//!   finds so after its pages are protected, and spares them all.
//! - *Hazards.* The reserve is open for as long as a look for hazards holds, and no longer
//!   ([`Reserve::open`]).
//!
//! No call here waits for another's claim to end but [`Reserve::shut`].

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
    claimed: BTreeSet<SectionNo>,
    outcomes: Vec<(SectionNo, After)>,
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
pub(crate) struct Claim<'a> {
    reserve: &'a Reserve,
    section: SectionNo,
    epoch: u64,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.reserve.lock().claimed.remove(&self.section);
        self.reserve.changed.notify_all();
    }
}

impl Claim<'_> {
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

    /// Closes it, and waits until no section is claimed.
    pub fn shut(&self) {
        let mut state = self.lock();
        state.open_until = Duration::ZERO;
        let waited = self.changed.wait_while(state, |s| !s.claimed.is_empty());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// RAM has come or gone: what is known of sections may be that of other memory.
    pub fn ram_changed(&self) {
        let mut state = self.lock();
        state.epoch += 1;
        state.ready.clear();
        state.outcomes.clear();
    }

    /// Pages that fills have evicted by themselves so far.
    #[must_use]
    pub fn direct_pages(&self) -> u64 {
        self.direct_pages.load(Relaxed)
    }

    /// Replaces what is offered. `ready` has [`OFFERED_MAX`] at most, coldest first.
    pub(crate) fn offer(&self, ready: Vec<Ready>) {
        let mut state = self.lock();
        // The reclaimer does not know yet of these outcomes, and believes that the sections stand ready.
        let has_outcome = |section| state.outcomes.iter().any(|(of, _)| *of == section);
        let is_free =
            |ready: &Ready| !state.claimed.contains(&ready.section) && !has_outcome(ready.section);
        let ready = ready.into_iter().filter(is_free).collect();
        state.ready = ready;
    }

    /// True if nobody has claimed `section`; it is offered no more then.
    pub(crate) fn withdraw(&self, section: SectionNo) -> bool {
        let mut state = self.lock();
        if state.claimed.contains(&section) {
            return false;
        }
        state.ready.retain(|ready| ready.section != section);
        true
    }

    /// Claims `section` for the reclaimer, unless somebody has claimed it.
    pub(crate) fn claim(&self, section: SectionNo) -> Option<Claim<'_>> {
        let mut state = self.lock();
        if !state.claimed.insert(section) {
            return None;
        }
        state.ready.retain(|ready| ready.section != section);
        let epoch = state.epoch;
        Some(self.claim_on(section, epoch))
    }

    /// Claims the coldest section that may go now.
    fn claim_next(&self, now: Duration) -> Option<(Claim<'_>, Ready)> {
        let mut state = self.lock();
        if now >= state.open_until {
            return None;
        }
        let place = state
            .ready
            .iter()
            .position(|ready| ready.within.contains(&now))?;
        let ready = state.ready.remove(place)?;
        state.claimed.insert(ready.section);
        let epoch = state.epoch;
        let claim = self.claim_on(ready.section, epoch);
        Some((claim, ready))
    }

    /// Outcomes of the sections that fills claimed, since this was last asked.
    pub(crate) fn outcomes(&self) -> Vec<(SectionNo, After)> {
        std::mem::take(&mut self.lock().outcomes)
    }

    /// Ends a claim with its outcome, or, without one, leaves the section ready as before.
    fn release(&self, claim: Claim<'_>, ready: Ready, after: Option<After>) {
        let mut state = self.lock();
        if state.epoch == claim.epoch {
            match after {
                Some(after) => state.outcomes.push((claim.section, after)),
                None => state.ready.push_front(ready),
            }
        }
        // In the same critical section: who claims it next must not meet a claim that is about to end.
        state.claimed.remove(&claim.section);
        drop(state);
        std::mem::forget(claim);
        self.changed.notify_all();
    }

    fn claim_on(&self, section: SectionNo, epoch: u64) -> Claim<'_> {
        Claim {
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
    /// Tries a few sections at most.
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
            let Some((claim, ready)) = self.reserve().claim_next((self.clock)()) else {
                break;
            };
            // Protected since it was offered: it goes by the reclaimer's word only.
            if self.protected.contains(ready.section) {
                continue;
            }
            let left = pages.max(DIRECT_PAGES_MIN).saturating_sub(evicted);
            evicted += self.take(&mut worker, (claim, ready), left);
            if evicted >= pages {
                break;
            }
        }
        self.workers().push(worker);
        evicted
    }

    fn take(&self, worker: &mut Memory, (claim, ready): (Claim<'_>, Ready), pages: u64) -> u64 {
        let outcome = worker.take(ready.section, pages, || claim.holds());
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
        self.reserve().release(claim, ready, outcome.after(pages));
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

    fn section_of(claimed: &Option<(Claim<'_>, Ready)>) -> Option<SectionNo> {
        claimed.as_ref().map(|(_, ready)| ready.section)
    }

    #[test]
    fn section_is_claimed_once_it_has_rested_while_a_look_for_hazards_holds() {
        let reserve = Reserve::default();
        reserve.offer([ready(A, 10..20), ready(B, 5..15)].to_vec());
        assert!(reserve.claim_next(at(12)).is_none(), "it was never opened");
        reserve.open(at(30));
        assert!(reserve.claim_next(at(4)).is_none());
        // B is the warmer one, but A has not rested.
        assert_eq!(section_of(&reserve.claim_next(at(9))), Some(B));
        // It was not put back, for its fate is not known.
        assert!(reserve.claim_next(at(9)).is_none());
        reserve.offer([ready(A, 10..20)].to_vec());
        assert!(
            reserve.claim_next(at(20)).is_none(),
            "it stood for too long"
        );
        assert!(reserve.claim_next(at(30)).is_none());
        reserve.open(at(13));
        assert_eq!(section_of(&reserve.claim_next(at(12))), Some(A));
        reserve.offer([ready(A, 10..20)].to_vec());
        reserve.close();
        assert!(reserve.claim_next(at(12)).is_none());
    }

    #[test]
    fn section_is_claimed_once_at_a_time_and_is_not_withdrawn_meanwhile() {
        let reserve = Reserve::default();
        reserve.open(at(100));
        reserve.offer([ready(A, 0..50)].to_vec());
        let (claim, taken) = reserve.claim_next(at(1)).unwrap();
        assert!(reserve.claim(A).is_none());
        assert!(!reserve.withdraw(A));
        assert!(reserve.withdraw(B));
        // The reclaimer goes by what it knew before.
        reserve.offer([ready(A, 0..50), ready(B, 0..50)].to_vec());
        let other = reserve.claim_next(at(1));
        assert_eq!(section_of(&other), Some(B));
        reserve.release(claim, taken, None);
        assert_eq!(section_of(&reserve.claim_next(at(1))), Some(A));
        drop(other);
        let own = reserve.claim(A).unwrap();
        reserve.offer([ready(A, 0..50)].to_vec());
        assert!(reserve.claim_next(at(1)).is_none());
        drop(own);
        assert!(reserve.withdraw(A));
        assert!(reserve.outcomes().is_empty());
    }

    #[test]
    fn outcome_of_a_section_is_reported_once() {
        let reserve = Reserve::default();
        reserve.open(at(100));
        for after in [After::Emptied, After::Tried, After::Warm] {
            reserve.offer([ready(A, 0..50)].to_vec());
            let (claim, taken) = reserve.claim_next(at(1)).unwrap();
            reserve.release(claim, taken, Some(after));
            // The reclaimer does not know the outcome yet.
            reserve.offer([ready(A, 0..50)].to_vec());
            assert!(reserve.claim_next(at(1)).is_none());
            assert_eq!(reserve.outcomes(), [(A, after)]);
            assert!(reserve.claim_next(at(1)).is_none() && reserve.outcomes().is_empty());
        }
    }

    #[test]
    fn claim_on_memory_that_is_another_by_now_does_not_hold_and_has_no_outcome() {
        let reserve = Reserve::default();
        reserve.open(at(100));
        reserve.offer([ready(A, 0..50), ready(B, 0..50)].to_vec());
        let (claim, taken) = reserve.claim_next(at(1)).unwrap();
        assert!(claim.holds());
        reserve.ram_changed();
        assert!(!claim.holds());
        assert!(reserve.claim_next(at(1)).is_none());
        reserve.release(claim, taken, None);
        assert!(reserve.claim_next(at(1)).is_none() && reserve.outcomes().is_empty());
        assert!(reserve.withdraw(A));
    }

    #[test]
    fn shutting_waits_for_claims() {
        let reserve = Reserve::default();
        reserve.open(at(100));
        reserve.offer([ready(A, 0..50)].to_vec());
        let (claim, taken) = reserve.claim_next(at(1)).unwrap();
        let is_shut = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                reserve.shut();
                is_shut.store(true, Relaxed);
            });
            // Closed at once, shut only when the claim has ended.
            while reserve.lock().open_until > Duration::ZERO {
                std::thread::yield_now();
            }
            assert!(!is_shut.load(Relaxed));
            reserve.release(claim, taken, None);
        });
        assert!(is_shut.load(Relaxed));
        assert!(reserve.claim_next(at(1)).is_none());
    }
}
