// SPDX-License-Identifier: Apache-2.0
//! Few VMs whose demands do not change, in steps as short as the daemon's: how much two equal ones trade,
//! and how soon a change is over.

use super::super::{Bytes, Permille, Plan, VmId, VmShare, Weight};
use super::{days::Days, demand::Demand, guest::Guest};
use pagetide_random::SplitMix64;
use std::time::Duration;

/// As the daemon's.
const STEP: Duration = Duration::from_millis(500);
/// Until everything that was new is over.
const SETTLE: Duration = Duration::from_secs(1200);
/// Longest search for a fair state.
const FAIR_WITHIN: Duration = Duration::from_secs(3600);
/// A VM has what it should if it has so much of it, or lacks less than the watermarks leave undecided.
const FAIR: Permille = Permille(900);
const RAM: Bytes = Bytes::gib(8);

/// What equal VMs took from each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Traded {
    /// The budget of all.
    pub budget: Bytes,
    /// How much targets were lowered in the time that was asked for.
    pub lowered: Bytes,
    /// The least that one had at any moment, of the half that is its own.
    pub least: Permille,
}

/// How soon things were as they should be after a change; `None`: not within an hour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settled {
    /// What changed.
    pub change: &'static str,
    /// From then on every VM had its fair share.
    pub after: Option<Duration>,
}

/// A guest of 8 GiB that uses `permille` of it.
fn steady(seed: u64, number: u64, permille: u64) -> Guest {
    let demand = Demand::Steady {
        around: RAM.part(permille, 1000),
        random: SplitMix64::stream(seed, number),
    };
    let share = VmShare {
        floor: RAM.part(1, 20),
        ..VmShare::default()
    };
    let tenth = RAM.part(1, 10);
    Guest::new(VmId(number), share, RAM, RAM.part(9, 10), tenth, demand)
}

/// Two equal VMs that both want more than half of what there is, for `time`.
#[must_use]
pub fn equals(seed: u64, time: Duration) -> Traded {
    let guests = vec![steady(seed, 0, 700), steady(seed, 1, 700)];
    let plan = Plan::new(RAM);
    let mut days = Days::of(guests, plan, STEP);
    days.run_for(SETTLE);
    days.figures.lowered = Bytes::ZERO;
    let mut least = Permille(1000);
    let end = days.now + time;
    while days.now < end {
        days.step();
        for (guest, fair) in days.there().zip(days.fair_shares()) {
            let share = guest.resident().min(fair).part(1000, fair.0).0;
            least = least.min(Permille(u16::try_from(share).unwrap_or(1000)));
        }
    }
    Traded {
        budget: plan.budget,
        lowered: days.figures.lowered,
        least,
    }
}

/// A change to a host.
type Change = fn(&mut Days);

/// Eight VMs that want more than there is, and what happens to them.
const CHANGES: [(&str, Change); 4] = [
    ("demand", |days| {
        if let Some(guest) = &mut days.guests[0] {
            guest.demand = steady(1, 0, 700).demand;
        }
    }),
    ("weight", |days| {
        let weight = Weight::try_from(4 * Weight::DEFAULT).unwrap_or_default();
        days.reweigh(1, weight);
    }),
    ("join", |days| {
        let booted = Guest::new(
            VmId(100),
            VmShare::default(),
            RAM,
            RAM.part(1, 50),
            RAM.part(1, 50),
            steady(1, 100, 700).demand,
        );
        days.guests.push(None);
        let last = days.guests.len() - 1;
        assert!(days.come(last, booted), "there is room for its floor");
    }),
    ("leave", |days| days.leave(2)),
];

/// Time until each VM has its fair share again, after each of some changes to eight VMs of which seven
/// want more than there is.
#[must_use]
pub fn changes(seed: u64) -> Vec<Settled> {
    let settled = |(change, happens): (&'static str, Change)| {
        let of = |number| steady(seed, number, if number == 0 { 30 } else { 700 });
        let guests: Vec<Guest> = (0..8).map(of).collect();
        let mut days = Days::of(guests, Plan::new(RAM.part(8 * 45, 100)), STEP);
        days.run_for(SETTLE);
        happens(&mut days);
        let begun = days.now;
        let mut fair_since = None;
        while days.now < begun + FAIR_WITHIN
            && fair_since.is_none_or(|since| days.now < since + SETTLE / 10)
        {
            days.step();
            fair_since = if is_fair(&days) {
                fair_since.or(Some(days.now))
            } else {
                None
            };
        }
        Settled {
            change,
            after: fair_since.map(|since| since - begun),
        }
    };
    CHANGES.map(settled).into()
}

/// Whether each has what it uses, or its share of what others leave.
fn is_fair(days: &Days) -> bool {
    let enough =
        |(guest, fair): (&Guest, Bytes)| guest.resident() >= FAIR.of(guest.working_set.min(fair));
    days.there().zip(days.shares_of_users()).all(enough)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_vms_keep_what_they_have() {
        let traded = equals(3, Duration::from_secs(3600));
        assert!(
            traded.lowered < traded.budget.part(1, 10),
            "{}",
            traded.lowered
        );
        assert!(traded.least >= Permille(900), "{}", traded.least.0);
    }

    #[test]
    fn every_change_is_over_within_minutes() {
        for settled in changes(5) {
            let after = settled.after.expect(settled.change);
            assert!(after <= Duration::from_secs(120), "{settled:?}");
        }
    }
}
