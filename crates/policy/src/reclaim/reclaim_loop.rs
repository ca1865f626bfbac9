// SPDX-License-Identifier: Apache-2.0
//! [`ReclaimLoop`]: what the reclaim thread of a VM does next.
//!
//! ```text
//!   wait      until the low watermark is passed, a request comes, or a second is over
//!   look      at most once a second: follow RAM, check for hazards, correct counts
//!   sample    go on with the sweep, as fast as its cost allows
//!   limit     below the low watermark: reclaim up to the high one
//!   reserve   a little above it, at most once a second: keep cold sections ready
//!   requests  each is a reclaim of its own
//!   swap in   what was in use lately, into spare memory, in turns
//!   demote    stored pages that stayed cold, a section at a time
//! ```
//! A reclaim goes through the steps of [`passes`]. A pass that leaves
//! sections to age is repeated after [`UNMAPPED_MIN`], and one that had no time for all sections at
//! once. Before each pass hazards are checked, unless that was done just now. Before the first
//! reclaim, two sweeps learn what is hot: eviction by guess takes pages that come back at once, and a
//! guest that waits for them touches so little that all of its memory seems idle.
//!
//! # A VM that leaves nothing alone
//! Only pages that nobody touched for [`UNMAPPED_MIN`] may be evicted. A VM that touches all of its memory
//! faster than that would stay above its limit for ever, by bad luck or on purpose. So if all steps
//! of a reclaim evicted next to nothing while the VM is over its limit, it is **held**: its vCPUs stand
//! still while sections are unmapped, age and are evicted, for [`HOLD_MAX`] at most, and no more often than
//! each [`HOLD_EVERY`]. Once some of its memory is absent it waits for fills, and touches the rest more
//! slowly: one hold is mostly enough.
//!
//! The owner calls [`ReclaimLoop::next`] with the [`Situation`], carries out the order, reports passes
//! by [`ReclaimLoop::passed`], and calls again. While eviction is blocked nothing but looking round
//! is ordered.
//!
//! While the store is full ([`Content`]) only pages of zeros can go. Which pages are zero is known only
//! once they are read, so a reclaim for the limit then goes through all idle sections once and never
//! through protected ones; the next one waits for [`SUSPENSION`], and for twice as long each time that
//! one has found nothing.

use super::{
    orders::{Content, EvictOrder, Eviction, Order, Situation},
    selection::PassReport,
};
use crate::{
    demotion,
    prefetch::{TURN, TURN_PAGES},
    sampling::{SWEEPS_TO_KNOW, Want},
    swap_in::Wanted,
    victims::{Need, Reach, Step, UNMAPPED_MIN, passes},
    watermarks::Headroom,
};
use pagetide_addr::SECTION_PAGES;
use std::time::Duration;

/// Longest wait for work. Hazards are checked, counts corrected and the reserve filled at most this
/// often, unless a pass needs it.
pub const ROUND: Duration = Duration::from_secs(1);
/// How long a hazard check stays valid: a pass of a reclaim takes no longer than this.
pub const HAZARDS_HOLD: Duration = Duration::from_millis(100);
/// A helper thread pays off from this many pages on: 32 MiB.
const HELPER_PAGES_MIN: u64 = 8 << 10;
/// Sweeps after which hot memory can be told from cold: a section is known once it was sampled twice.
pub const SWEEPS_TO_BEGIN: u64 = 2;
/// Pause after each of these sweeps: in this time a guest uses what it needs.
pub const LEARNING_REST: Duration = Duration::from_millis(250);
/// Longest time that eviction waits for these sweeps: fills may be waiting for room meanwhile.
pub const LEARNING_MAX: Duration = Duration::from_secs(30);
/// Longest time that a VM is held: [`UNMAPPED_MIN`], and time to evict some ten MiB.
pub const HOLD_MAX: Duration = Duration::from_millis(250);
/// Time from the beginning of a hold to that of the next: at most a tenth of a VM's time is taken.
pub const HOLD_EVERY: Duration = Duration::from_millis(2500);
/// A VM is held if a reclaim evicted less than one part in this many of what it should.
const HOLD_PARTS: u64 = 16;
/// Of a reclaim's steps, those that are done again while the VM is held: all sections that rest, then the
/// protected ones.
const HELD_STEPS: usize = 2;
const _: () =
    assert!(LEARNING_REST.as_nanos() * (SWEEPS_TO_BEGIN as u128) < LEARNING_MAX.as_nanos());
const _: () = assert!(SWEEPS_TO_BEGIN <= SWEEPS_TO_KNOW);
const _: () = assert!(TURN_PAGES >= SECTION_PAGES);
const _: () = assert!(UNMAPPED_MIN.as_nanos() < HOLD_MAX.as_nanos());
const _: () = assert!(HOLD_MAX.as_nanos() * 10 <= HOLD_EVERY.as_nanos());
/// Eviction that a full pool or a kernel error stopped is tried again after this time.
pub const SUSPENSION: Duration = Duration::from_secs(5);

/// Longest time between two searches for pages of zeros while the store is full.
const ZEROS_REST_MAX: Duration = Duration::from_secs(80);

/// Where the loop is in its round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Wait,
    Look,
    Sample,
    Limit,
    Reserve,
    Requests,
    SwapIn,
    Demote,
}

/// How far a reclaim is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Learn,
    LearnRest,
    Prepare,
    Steps,
}

/// Whether the VM is held for a reclaim.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Hold {
    NotYet,
    /// It will be, next.
    Due,
    Until(Duration),
    Over,
}

/// A reclaim under way.
#[derive(Clone, Copy, Debug)]
struct Reclaim {
    need: Need,
    phase: Phase,
    /// Steps that were begun.
    begun: usize,
    /// The pass that is repeated until it has nothing left.
    repeated: Option<Reach>,
    rest_first: bool,
    evicted_pages: u64,
    has_more: bool,
    is_stopped: bool,
    hold: Hold,
}

impl Reclaim {
    fn new(need: Need) -> Self {
        Self {
            need,
            phase: Phase::Learn,
            begun: 0,
            repeated: None,
            rest_first: false,
            evicted_pages: 0,
            has_more: false,
            is_stopped: false,
            hold: Hold::NotYet,
        }
    }

    fn wanted_pages(&self, at: &Situation) -> u64 {
        match self.need {
            Need::Limit => at.headroom.pages_to_high(),
            Need::Wish => at
                .requested_pages
                .unwrap_or(0)
                .saturating_sub(self.evicted_pages),
        }
    }

    /// True if this reclaim is over and was of no use to a VM above its limit.
    fn was_futile(&self, at: &Situation) -> bool {
        let missing = self.wanted_pages(at);
        self.need == Need::Limit
            && at.headroom.is_over()
            && !self.has_more
            && self.evicted_pages < missing.div_ceil(HOLD_PARTS)
    }

    /// Whether `step` runs when its turn comes and too little was evicted so far.
    fn is_left_out(&self, step: Step, headroom: Headroom) -> bool {
        match step {
            // Idle sections remain that were not tried yet: they come first.
            Step::TryAgain => self.has_more,
            // Protected sections are evicted only if the limit cannot be kept without them, not because
            // there is little headroom or because a pass had no time for the rest.
            Step::Take(Reach::Protected) => self.has_more || !headroom.is_below_low(),
            Step::Take(Reach::ColdOnly | Reach::AllResting) => false,
        }
    }
}

/// See the module. One per VM.
#[derive(Debug)]
pub struct ReclaimLoop {
    helpers_max: u64,
    stage: Stage,
    reclaim: Option<Reclaim>,
    /// The order before this one was [`Order::Poll`].
    is_looking: bool,
    looked_at: Option<Duration>,
    /// The order before this one was [`Order::CheckHazards`].
    has_checked: bool,
    /// When the last check began: what it found holds from then.
    checked_at: Option<Duration>,
    reserved_at: Option<Duration>,
    suspended_at: Option<Duration>,
    learning_since: Option<Duration>,
    held_at: Option<Duration>,
    content: Content,
    /// When the last search for pages of zeros ended, and how long the next one waits.
    zeros_at: Option<Duration>,
    zeros_rest: Duration,
    /// When sections were last swapped in, and the time to the next turn.
    swapped_in_at: Option<Duration>,
    swap_in_rest: Duration,
}

impl ReclaimLoop {
    /// A loop whose passes at most `helpers_max` threads take part in, beside its own.
    #[must_use]
    pub fn new(helpers_max: u64) -> Self {
        Self {
            helpers_max,
            stage: Stage::Wait,
            reclaim: None,
            is_looking: false,
            looked_at: None,
            has_checked: false,
            checked_at: None,
            reserved_at: None,
            suspended_at: None,
            learning_since: None,
            held_at: None,
            content: Content::Taken,
            zeros_at: None,
            zeros_rest: SUSPENSION,
            swapped_in_at: None,
            swap_in_rest: TURN,
        }
    }

    /// From now on content can be stored, or only pages of zeros can be evicted.
    pub fn set_content(&mut self, content: Content) {
        if content == Content::Taken {
            self.zeros_at = None;
            self.zeros_rest = SUSPENSION;
        }
        self.content = content;
    }

    /// What is to be done next.
    pub fn next(&mut self, at: &Situation) -> Order {
        if std::mem::take(&mut self.is_looking) {
            // From its end on: looking may take long.
            self.looked_at = Some(at.now);
        }
        loop {
            if let Some(mut reclaim) = self.reclaim.take() {
                let order = self.reclaim_next(&mut reclaim, at);
                if order == Order::Finish(reclaim.need) {
                    self.finished(&reclaim, at.now);
                } else {
                    self.reclaim = Some(reclaim);
                }
                return order;
            }
            if let Some(order) = self.round_next(at) {
                return order;
            }
        }
    }

    /// The check of hazards that was ordered last begins only `now`: what it finds holds from then.
    pub fn check_begins(&mut self, now: Duration) {
        self.checked_at = Some(now);
    }

    /// A pass has been made.
    pub fn passed<Stop>(&mut self, pass: &PassReport<Stop>) {
        let Some(reclaim) = &mut self.reclaim else {
            return;
        };
        reclaim.evicted_pages += pass.evicted_pages;
        reclaim.has_more = pass.has_more;
        reclaim.is_stopped |= pass.stopped.is_some();
        if !pass.rests && !pass.has_more {
            reclaim.repeated = None;
        }
        // What this pass unmapped stays untouched while others are evicted, or until its wait is over.
        reclaim.rest_first =
            reclaim.repeated.is_some() && pass.evicted_pages == 0 && !pass.has_more;
    }

    /// An [`Order::SwapIn`] was carried out, and has filled so many pages. After none the next one waits for
    /// [`ROUND`]: its reason will not go away at once.
    pub fn swapped_in(&mut self, pages: u64) {
        self.swap_in_rest = match pages {
            0 => ROUND,
            _ => TURN,
        };
    }

    /// What the reclaim under way is for.
    #[must_use]
    pub fn need(&self) -> Option<Need> {
        self.reclaim.map(|reclaim| reclaim.need)
    }

    /// Eviction is suspended at `now`: its cause will not go away for [`SUSPENSION`].
    pub fn suspended(&mut self, now: Duration) {
        self.suspended_at = Some(now);
    }

    /// The thread ends; it may begin again later. A suspension from now on is not this loop's to end.
    pub fn ended(&mut self) {
        self.suspended_at = None;
        self.reclaim = None;
        self.stage = Stage::Wait;
        self.has_checked = false;
        // A loop that goes on after this looks at once: limit and RAM may have changed meanwhile.
        self.is_looking = false;
        self.looked_at = None;
    }

    /// An order of the round, or `None` if the loop must look at its state again.
    fn round_next(&mut self, at: &Situation) -> Option<Order> {
        let is_blocked = at.eviction == Eviction::Blocked;
        match self.stage {
            Stage::Wait => {
                self.stage = Stage::Look;
                return Some(Order::Wait(self.longest_wait(at)));
            }
            Stage::Look => match self.look_round(at.now) {
                Some(order) => return Some(order),
                None => self.stage = Stage::Sample,
            },
            Stage::Sample if is_blocked => {
                self.stage = Stage::Wait;
                return Some(Order::RefuseRequests);
            }
            Stage::Sample => {
                self.stage = Stage::Limit;
                return Some(Order::Sample(want(at)));
            }
            Stage::Limit => {
                self.stage = Stage::Reserve;
                let is_due = is_due(self.zeros_at, self.zeros_rest, at.now);
                if at.headroom.is_below_low() && is_due {
                    self.reclaim = Some(Reclaim::new(Need::Limit));
                }
            }
            Stage::Reserve => {
                self.stage = Stage::Requests;
                let pages = match self.content {
                    Content::Taken => at.headroom.reserve_pages(),
                    // Nothing waits for room, so nothing needs to be ready.
                    Content::Refused => 0,
                };
                if pages > 0 && is_due(self.reserved_at, ROUND, at.now) && !is_blocked {
                    self.reserved_at = Some(at.now);
                    return Some(Order::KeepReady { pages });
                }
            }
            Stage::Requests => match at.requested_pages {
                Some(_) => self.reclaim = Some(Reclaim::new(Need::Wish)),
                None => self.stage = Stage::SwapIn,
            },
            Stage::SwapIn => {
                self.stage = Stage::Demote;
                return self.swap_in(at);
            }
            Stage::Demote => {
                self.stage = Stage::Wait;
                return (at.demotion_in == Some(Duration::ZERO)).then_some(Order::Demote);
            }
        }
        None
    }

    /// How long the round may wait for its next turn of work.
    fn longest_wait(&self, at: &Situation) -> Duration {
        let swap_in = match swap_in_pages(at) {
            0 => ROUND,
            _ => self.swap_in_rest,
        };
        match (at.eviction, at.demotion_in) {
            // While eviction is blocked the round does not get as far as that.
            (Eviction::Blocked, _) | (Eviction::Allowed, None) => swap_in,
            (Eviction::Allowed, Some(demotion)) => swap_in.min(demotion.max(demotion::TURN)),
        }
    }

    fn swap_in(&mut self, at: &Situation) -> Option<Order> {
        let (wanted, pages) = (at.wanted_back?, swap_in_pages(at));
        if pages == 0 || !is_due(self.swapped_in_at, self.swap_in_rest, at.now) {
            return None;
        }
        self.swapped_in_at = Some(at.now);
        Some(Order::SwapIn { wanted, pages })
    }

    fn look_round(&mut self, now: Duration) -> Option<Order> {
        if !is_due(self.looked_at, ROUND, now) {
            return None;
        }
        let is_over = |at: &mut Duration| now.saturating_sub(*at) >= SUSPENSION;
        if self.suspended_at.take_if(is_over).is_some() {
            return Some(Order::EndSuspension);
        }
        self.is_looking = true;
        self.checked_at = Some(now);
        Some(Order::Poll)
    }

    fn reclaim_next(&mut self, reclaim: &mut Reclaim, at: &Situation) -> Order {
        if reclaim.phase == Phase::LearnRest {
            reclaim.phase = Phase::Learn;
            return Order::Rest(LEARNING_REST);
        }
        if reclaim.phase == Phase::Learn {
            if let Some(until) = self.learn_until(at) {
                reclaim.phase = Phase::LearnRest;
                return Order::Sweep { until };
            }
            reclaim.phase = Phase::Prepare;
        }
        if reclaim.phase == Phase::Prepare {
            reclaim.phase = Phase::Steps;
            return match reclaim.need {
                Need::Limit => Order::CorrectHeadroom,
                Need::Wish => Order::TryAgain,
            };
        }
        let order = match reclaim.hold {
            Hold::Due => {
                self.held_at = Some(at.now);
                reclaim.hold = Hold::Until(at.now + HOLD_MAX);
                Order::Hold(HOLD_MAX)
            }
            Hold::Until(end) if at.now >= end => Order::Finish(reclaim.need),
            Hold::Over => Order::Finish(reclaim.need),
            Hold::NotYet | Hold::Until(_) => self.step_next(reclaim, at),
        };
        self.has_checked = order == Order::CheckHazards;
        if order == Order::Finish(reclaim.need) && matches!(reclaim.hold, Hold::Until(_)) {
            reclaim.hold = Hold::Over;
            return Order::Release;
        }
        order
    }

    /// The end of a reclaim: the VM is held and its memory tried once more, if that is needed.
    fn last_resort(&mut self, reclaim: &mut Reclaim, at: &Situation) -> Order {
        let may_hold = reclaim.hold == Hold::NotYet && is_due(self.held_at, HOLD_EVERY, at.now);
        if !may_hold || !reclaim.was_futile(at) {
            return Order::Finish(reclaim.need);
        }
        reclaim.hold = Hold::Due;
        reclaim.begun = passes(reclaim.need).count() - HELD_STEPS;
        Order::TryAgain
    }

    /// When a sweep that is needed to begin must have ended; `None` if none is needed.
    fn learn_until(&mut self, at: &Situation) -> Option<Duration> {
        if at.sweeps >= SWEEPS_TO_BEGIN || at.eviction == Eviction::Blocked {
            return None;
        }
        let until = *self.learning_since.get_or_insert(at.now) + LEARNING_MAX;
        (at.now < until).then_some(until)
    }

    fn step_next(&mut self, reclaim: &mut Reclaim, at: &Situation) -> Order {
        loop {
            // While the VM is held there is no time for that.
            if reclaim.repeated.is_some()
                && !matches!(reclaim.hold, Hold::Until(_))
                && let Some(order) = self.look_round(at.now)
            {
                return order;
            }
            let pages = reclaim.wanted_pages(at);
            if pages == 0 || reclaim.is_stopped {
                return Order::Finish(reclaim.need);
            }
            if std::mem::take(&mut reclaim.rest_first) {
                return Order::Rest(UNMAPPED_MIN);
            }
            // A check counts once, however long it took: else one that takes as long as it holds would be
            // ordered for ever.
            if !self.has_checked && is_due(self.checked_at, HAZARDS_HOLD / 2, at.now) {
                self.checked_at = Some(at.now);
                return Order::CheckHazards;
            }
            if at.eviction == Eviction::Blocked {
                return Order::Finish(reclaim.need);
            }
            if let Some(reach) = reclaim.repeated {
                return Order::Evict(self.evict_order(pages, reach, reclaim.need, at.now));
            }
            let Some(step) = passes(reclaim.need).nth(reclaim.begun) else {
                return self.last_resort(reclaim, at);
            };
            reclaim.begun += 1;
            let is_searched = step == Step::TryAgain || step == Step::Take(Reach::Protected);
            if self.content == Content::Refused && is_searched {
                return Order::Finish(reclaim.need);
            }
            match step {
                _ if reclaim.is_left_out(step, at.headroom) => {}
                Step::TryAgain => {
                    reclaim.rest_first = true;
                    return Order::TryAgain;
                }
                Step::Take(reach) => reclaim.repeated = Some(reach),
            }
        }
    }

    /// A reclaim is over.
    fn finished(&mut self, reclaim: &Reclaim, now: Duration) {
        if self.content == Content::Refused && reclaim.need == Need::Limit {
            self.zeros_at = Some(now);
            self.zeros_rest = match reclaim.evicted_pages {
                0 => (2 * self.zeros_rest).min(ZEROS_REST_MAX),
                _ => SUSPENSION,
            };
        }
    }

    fn evict_order(&self, pages: u64, reach: Reach, need: Need, now: Duration) -> EvictOrder {
        let helpers = match reach {
            // Helpers evict prepared sections, and none of those is protected.
            Reach::Protected => 0,
            Reach::ColdOnly | Reach::AllResting => self.helpers_max.min(pages / HELPER_PAGES_MIN),
        };
        EvictOrder {
            pages,
            reach,
            need,
            helpers,
            until: self.checked_at.unwrap_or(now) + HAZARDS_HOLD,
        }
    }
}

/// Pages that may be swapped in now, in whole sections: about as many as a turn takes, and no more than fit.
fn swap_in_pages(at: &Situation) -> u64 {
    let room = match at.wanted_back {
        None => 0,
        Some(Wanted::Together) => at.headroom.pages_above_low(),
        Some(Wanted::Ahead) => at.headroom.spare_pages(),
    };
    room.min(TURN_PAGES) / SECTION_PAGES * SECTION_PAGES
}

/// How urgently heat must be known.
fn want(at: &Situation) -> Want {
    match at.headroom {
        headroom if headroom.is_below_low() => Want::Pressed,
        headroom if headroom.is_limited() => Want::Much,
        _ if at.sweeps < SWEEPS_TO_KNOW => Want::First,
        _ => Want::Little,
    }
}

fn is_due(last: Option<Duration>, every: Duration, now: Duration) -> bool {
    last.is_none_or(|at| now.saturating_sub(at) >= every)
}

#[cfg(test)]
#[path = "reclaim_loop_tests.rs"]
mod tests;
