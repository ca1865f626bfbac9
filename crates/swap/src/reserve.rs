// SPDX-License-Identifier: Apache-2.0
//! [`Reserve`]: sections ready for eviction when a fill needs room at once; and [`DirectReclaim`](crate::direct::DirectReclaim),
//! which takes them.
//!
//! A fill that finds no room under the limit does not wait for the reclaimer: it evicts some pages of
//! a section that is ready (Taiji 4.2.2, below the *min* watermark). Several fills may do so
//! concurrently with each other and with the reclaimer, each with a section of its own:
//!
//! ```text
//!   reclaimer ── offers ready sections ─────► ready ──┬─ claimed ──► evicted ──► released
//!        ▲                                            │  by a fill, or the reclaimer         │
//!        │◄─ withdrawn, to be unmapped or sampled ◄───┘                                      │
//!        └───────────────────────────────────── outcome ◄───────────────────────────────────┘
//! ```
//! # How the rules are kept
//! - *A page ages before it is evicted.* Only the reclaimer unmaps pages, and only those of sections
//!   that are not claimed and were withdrawn before; so a section that is listed or claimed has been
//!   left alone since the time it is listed with.
//! - *Changed memory.* RAM that is added or removed begins a new epoch: a claim of an earlier epoch detects
//!   this after its pages are protected, and spares them all.
//! - *Hazards.* The reserve is open for as long as a scan for hazards is valid, and no longer
//!   ([`Reserve::open`]).
//!
//! Only [`Reserve::shut`] waits for other claims to end.

use pagetide_addr::SectionNo;
use pagetide_policy::candidates::{After, Ready};
use std::{
    collections::{BTreeSet, VecDeque},
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

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
    pub(crate) direct_pages: AtomicU64,
}

/// A section that no other thread takes meanwhile.
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
    pub(crate) fn holds(&self) -> bool {
        self.reserve.lock().epoch == self.epoch
    }
}

impl Reserve {
    /// Sections may be taken until `until`, by the clock of the reclaimer.
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

    /// RAM was added or removed: what is known of sections may belong to other memory.
    pub fn ram_changed(&self) {
        let mut state = self.lock();
        state.epoch += 1;
        state.ready.clear();
        state.outcomes.clear();
    }

    /// Pages that fills have evicted by direct reclaim so far.
    #[must_use]
    pub fn direct_pages(&self) -> u64 {
        self.direct_pages.load(Relaxed)
    }

    /// Replaces the sections offered. `ready` has at most [`OFFERED_MAX`](pagetide_policy::reclaim::OFFERED_MAX), coldest first.
    pub(crate) fn offer(&self, ready: Vec<Ready>) {
        let mut state = self.lock();
        // The reclaimer does not know these outcomes yet, and assumes that the sections are ready.
        let has_outcome = |section| state.outcomes.iter().any(|(of, _)| *of == section);
        let is_free =
            |ready: &Ready| !state.claimed.contains(&ready.section) && !has_outcome(ready.section);
        let ready = ready.into_iter().filter(is_free).collect();
        state.ready = ready;
    }

    /// True if `section` is not claimed; it is then no longer offered.
    pub(crate) fn withdraw(&self, section: SectionNo) -> bool {
        let mut state = self.lock();
        if state.claimed.contains(&section) {
            return false;
        }
        state.ready.retain(|ready| ready.section != section);
        true
    }

    /// Claims `section` for the reclaimer, unless it is claimed already.
    pub(crate) fn claim(&self, section: SectionNo) -> Option<Claim<'_>> {
        let mut state = self.lock();
        if !state.claimed.insert(section) {
            return None;
        }
        state.ready.retain(|ready| ready.section != section);
        let epoch = state.epoch;
        Some(self.claim_on(section, epoch))
    }

    /// True if a section is offered.
    pub(crate) fn has_ready(&self) -> bool {
        !self.lock().ready.is_empty()
    }

    /// Claims the coldest of the `wanted` sections that may be evicted now.
    pub(crate) fn claim_next(
        &self,
        now: Duration,
        wanted: impl Fn(SectionNo) -> bool,
    ) -> Option<(Claim<'_>, Ready)> {
        let mut state = self.lock();
        if now >= state.open_until {
            return None;
        }
        let place = state
            .ready
            .iter()
            .position(|ready| ready.within.contains(&now) && wanted(ready.section))?;
        let ready = state.ready.remove(place)?;
        state.claimed.insert(ready.section);
        let epoch = state.epoch;
        let claim = self.claim_on(ready.section, epoch);
        Some((claim, ready))
    }

    /// Outcomes of the sections that fills claimed since the last call.
    pub(crate) fn outcomes(&self) -> Vec<(SectionNo, After)> {
        std::mem::take(&mut self.lock().outcomes)
    }

    /// Ends a claim with its outcome, or, without one, leaves the section ready as before.
    pub(crate) fn release(&self, claim: Claim<'_>, ready: Ready, after: Option<After>) {
        let mut state = self.lock();
        if state.epoch == claim.epoch {
            match after {
                Some(after) => state.outcomes.push((claim.section, after)),
                None => state.ready.push_front(ready),
            }
        }
        // In the same critical section: the next thread to claim it must not find a claim that is
        // about to end.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

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
        assert!(
            reserve.claim_next(at(12), |_| true).is_none(),
            "it was never opened"
        );
        reserve.open(at(30));
        assert!(reserve.claim_next(at(4), |_| true).is_none());
        // B is warmer, but A has not aged enough.
        assert_eq!(section_of(&reserve.claim_next(at(9), |_| true)), Some(B));
        // It was not put back, since its outcome is not known.
        assert!(reserve.claim_next(at(9), |_| true).is_none());
        reserve.offer([ready(A, 10..20)].to_vec());
        assert!(
            reserve.claim_next(at(20), |_| true).is_none(),
            "it stood for too long"
        );
        assert!(reserve.claim_next(at(30), |_| true).is_none());
        reserve.open(at(13));
        assert_eq!(section_of(&reserve.claim_next(at(12), |_| true)), Some(A));
        reserve.offer([ready(A, 10..20)].to_vec());
        reserve.close();
        assert!(reserve.claim_next(at(12), |_| true).is_none());
    }

    #[test]
    fn section_is_claimed_once_at_a_time_and_is_not_withdrawn_meanwhile() {
        let reserve = Reserve::default();
        reserve.open(at(100));
        reserve.offer([ready(A, 0..50)].to_vec());
        let (claim, taken) = reserve.claim_next(at(1), |_| true).unwrap();
        assert!(reserve.claim(A).is_none());
        assert!(!reserve.withdraw(A));
        assert!(reserve.withdraw(B));
        // The reclaimer acts on what it knew before.
        reserve.offer([ready(A, 0..50), ready(B, 0..50)].to_vec());
        let other = reserve.claim_next(at(1), |_| true);
        assert_eq!(section_of(&other), Some(B));
        reserve.release(claim, taken, None);
        assert_eq!(section_of(&reserve.claim_next(at(1), |_| true)), Some(A));
        drop(other);
        let own = reserve.claim(A).unwrap();
        reserve.offer([ready(A, 0..50)].to_vec());
        assert!(reserve.claim_next(at(1), |_| true).is_none());
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
            let (claim, taken) = reserve.claim_next(at(1), |_| true).unwrap();
            reserve.release(claim, taken, Some(after));
            // The reclaimer does not know the outcome yet.
            reserve.offer([ready(A, 0..50)].to_vec());
            assert!(reserve.claim_next(at(1), |_| true).is_none());
            assert_eq!(reserve.outcomes(), [(A, after)]);
            assert!(reserve.claim_next(at(1), |_| true).is_none() && reserve.outcomes().is_empty());
        }
    }

    #[test]
    fn claim_on_memory_that_is_another_by_now_does_not_hold_and_has_no_outcome() {
        let reserve = Reserve::default();
        reserve.open(at(100));
        reserve.offer([ready(A, 0..50), ready(B, 0..50)].to_vec());
        let (claim, taken) = reserve.claim_next(at(1), |_| true).unwrap();
        assert!(claim.holds());
        reserve.ram_changed();
        assert!(!claim.holds());
        assert!(reserve.claim_next(at(1), |_| true).is_none());
        reserve.release(claim, taken, None);
        assert!(reserve.claim_next(at(1), |_| true).is_none() && reserve.outcomes().is_empty());
        assert!(reserve.withdraw(A));
    }

    #[test]
    fn shutting_waits_for_claims() {
        let reserve = Reserve::default();
        reserve.open(at(100));
        reserve.offer([ready(A, 0..50)].to_vec());
        let (claim, taken) = reserve.claim_next(at(1), |_| true).unwrap();
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
        assert!(reserve.claim_next(at(1), |_| true).is_none());
    }

    #[test]
    fn only_wanted_sections_are_claimed_and_the_others_stay_ready() {
        let reserve = Reserve::default();
        reserve.open(at(10));
        reserve.offer(vec![ready(A, 0..10), ready(B, 0..10)]);
        assert!(reserve.claim_next(at(1), |_| false).is_none());
        let claimed = reserve.claim_next(at(1), |section| section == B).unwrap();
        assert_eq!(claimed.1.section, B);
        assert!(reserve.claim_next(at(1), |section| section == B).is_none());
        assert_eq!(reserve.claim_next(at(1), |_| true).unwrap().1.section, A);
    }
}
