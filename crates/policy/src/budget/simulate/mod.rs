// SPDX-License-Identifier: Apache-2.0
//! Days of a host under a budget, in virtual time.
//!
//! # What is modelled
//! VMs of 4 to 32 GiB. At any moment a guest uses its *working set*, all parts of it equally often. It
//! is large by day in one half of the VMs and by night in the other; it doubles in bursts of minutes;
//! and a guest may do nothing for hours. The first VMs have long touched nine tenths of their RAM.
//! VMs leave, and others come that have just booted; one in four has a ceiling; an operator changes
//! weights; and now and then the daemon is started anew, with what was set and nothing else: it serves
//! no fault for a step, and knows neither what is hot nor when something was evicted.
//!
//! ```text
//!   RAM   ├─ working set, resident ─┼─ working set, absent ─┼─ resident, unused ─┼─ absent, unused ─┤
//!                                      touched: refaulted        inactive, cool, cold by age
//! ```
//! A touch takes [`TOUCH`], one of an absent page [`FAULT`] more; so a guest that lacks memory does
//! less. What leaves the working set ages by one set a step. A guest within its target fills what it
//! touches, fault by fault ([`FILL`]), each admitted by its [`Gate`](super::Gate); at its target it
//! first evicts what is coldest, and finally what it will touch again. A guest above its target evicts
//! at [`EVICTION`]. Evicted memory is stored at a ratio that is the VM's own, and metadata takes 0.4 %
//! of RAM. Amounts are whole numbers that flow, not pages: of what is refaulted in a step, quarters are
//! counted at an eighth, a quarter, a half and all of the missing part as distance.
//!
//! # What is not
//! CPUs and their scheduling, devices, pinned memory, the cost of eviction, watermarks under each
//! VM's own target, content that changes its ratio, changes of the budget itself.
//!
//! [`recipe`] says which days, [`guest`] is a guest's memory, [`demand`] what it wants, [`life`] which VM is there when, [`days`] the
//! host; [`settling`] has few VMs in small steps: how much equal ones trade, and how soon a change is
//! over.

mod days;
mod demand;
mod guest;
mod life;
mod recipe;
mod settling;

pub use guest::{EVICTION, FAULT, FILL, TOUCH};
pub use recipe::{Events, Figures, Recipe, STARVED_AFTER};
pub use settling::{Settled, Traded, changes, equals};

use super::{Bytes, Permille, Refaults};
use days::{Days, PARTS};
use guest::{Guest, share_of};
use life::{Turn, first_guests};
use std::time::Duration;

/// Runs the days under a budget, and again under a fixed split.
///
/// # Panics
/// If the recipe has no VM, no step, or a budget of less than a quarter or more than all of the RAM.
#[must_use]
pub fn run(recipe: &Recipe) -> Figures {
    let mut figures = run_budget(recipe);
    figures.done_split = split(recipe);
    figures
}

/// The same without the fixed split, whose share of work stays 0.
///
/// # Panics
/// As [`run`].
#[must_use]
pub fn run_budget(recipe: &Recipe) -> Figures {
    assert!(recipe.vms > 0 && !recipe.step.is_zero(), "an empty recipe");
    assert!(
        (250..=1000).contains(&recipe.budget.0),
        "a budget out of range"
    );
    let mut days = Days::new(recipe);
    days.run_for(recipe.time);
    days.end()
}

/// The same days with fixed targets: each VM and what is stored of it use its share of the budget by
/// weight.
fn split(recipe: &Recipe) -> Permille {
    let (mut places, guests) = first_guests(recipe);
    let budget = recipe.budget.of(guests.iter().map(|guest| guest.ram).sum());
    let mut guests: Vec<Option<Guest>> = guests.into_iter().map(Some).collect();
    share_by_weight(budget, &mut guests);
    let (mut now, mut done, mut wanted) = (Duration::ZERO, 0, 0);
    while now < recipe.time {
        let mut has_changed = false;
        for (place, guest) in places.iter_mut().zip(&mut guests) {
            match place.turn(now) {
                Turn::Stays => continue,
                Turn::Leaves => *guest = None,
                Turn::Comes(new) => *guest = Some(*new),
            }
            has_changed = true;
        }
        if has_changed {
            share_by_weight(budget, &mut guests);
        }
        for guest in guests.iter_mut().flatten() {
            guest.live(now, recipe.step);
            for _ in 0..PARTS {
                guest.obey(recipe.step / PARTS);
                guest.touch(recipe.step / PARTS, Bytes::ZERO, None);
            }
            guest.refaults = Refaults::default();
            done += std::mem::take(&mut guest.account.done);
            wanted += std::mem::take(&mut guest.account.wanted);
        }
        now += recipe.step;
    }
    share_of(done, wanted)
}

fn share_by_weight(budget: Bytes, guests: &mut [Option<Guest>]) {
    let weight = |guest: &Guest| u64::from(guest.share.weight.get());
    let weights = guests.iter().flatten().map(weight).sum();
    for guest in guests.iter_mut().flatten() {
        guest.target = guest.target_of_split(budget.part(weight(guest), weights));
    }
}

#[cfg(test)]
mod tests {
    use super::{recipe::DAY, *};

    fn keeps_budget_and_floors(figures: &Figures) {
        assert_eq!(figures.over_beyond_fill_max, Bytes::ZERO);
        assert!(figures.promised_max <= figures.budget);
        assert_eq!((figures.floors_short, figures.floors_broken), (0, 0));
    }

    #[test]
    fn weeks_of_fifty_vms_that_come_and_go_keep_the_budget_and_starve_nobody() {
        let figures = run(&Recipe {
            time: DAY * 20,
            step: Duration::from_secs(60),
            ..Recipe::default()
        });
        assert_eq!(figures.steps, 28_800);
        assert!(figures.came > 20 && figures.restarts > 2);
        keeps_budget_and_floors(&figures);
        assert_eq!(figures.starved, 0, "{:?}", figures.starved_longest);
        assert!(figures.done >= Permille(970), "{}", figures.done.0);
        assert!(figures.done > figures.done_split);
        assert!(
            figures.done_worst >= Permille(850),
            "{}",
            figures.done_worst.0
        );
    }

    #[test]
    fn days_are_determined_by_their_seed() {
        let recipe = Recipe {
            vms: 8,
            time: DAY,
            ..Recipe::default()
        };
        let figures = run(&recipe);
        assert_eq!(figures, run(&recipe));
        assert_ne!(figures, run(&Recipe { seed: 2, ..recipe }));
    }

    #[test]
    fn fine_steps_and_many_events_keep_the_budget_too() {
        let often = Events {
            stay: Some(DAY / 6),
            restart: Some(DAY / 24),
            reweigh: Some(DAY / 48),
        };
        for seed in 1..=3 {
            let figures = run_budget(&Recipe {
                seed,
                vms: 12,
                time: DAY,
                step: Duration::from_secs(5),
                budget: Permille(500),
                events: often,
            });
            assert!(figures.came > 10 && figures.restarts > 5);
            keeps_budget_and_floors(&figures);
        }
    }
}
