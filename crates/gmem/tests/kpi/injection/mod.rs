// SPDX-License-Identifier: Apache-2.0
//! Every operation of the hardware fails at every step of a life, and nothing is lost or leaks.
//!
//! A [`Life`](life::Life) is a fixed sequence of uses of the interface. It runs
//! once for each (operation, number of the call, way to fail, once or for ever),
//! until the number is higher than the life has calls. After each step
//! everything is walked ([`check`]). Then errors stop, and all that there is must
//! go: all frames, all tables, all addresses.

mod check;
mod life;

use crate::kit::{DRIVERS_PANIC, Failing, Fails, Op};
use life::Life;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Calls at most: far more than a life has of any operation.
const CALLS_MAX: u32 = 2_000;

/// Runs the life with call `from` failing, and those after it up to `count`. Returns false if it was over
/// before anything failed.
fn run(plan: Failing, too: Option<Failing>) -> bool {
    let mut life = Life::new();
    life.machine.world().failing_too = too;
    life.machine.world().failing = Some(plan);
    for (number, (name, step)) in life::STEPS.iter().enumerate() {
        // What a step could not do is for the next to live with.
        life.last = match catch_unwind(AssertUnwindSafe(|| step(&mut life))) {
            Ok(outcome) => outcome.err(),
            Err(panic) if panic.downcast_ref() == Some(&DRIVERS_PANIC) => None,
            Err(panic) => resume_unwind(panic),
        };
        let broken = check::broken(&life);
        assert!(
            broken.is_empty(),
            "{plan:?}: after step {number} ({name}, {:?}): {broken:#?}",
            life.last
        );
    }
    let has_failed = life.machine.world().failed > 0;
    life.machine.world().failing = None;
    life.machine.world().failing_too = None;
    life.end(&plan);
    has_failed
}

/// All numbers of one operation, until the life does not meet the failure any more.
fn run_all(op: Op, how: Fails, count: u32) {
    run_all_beside(op, how, count, None);
}

/// The same, while something else fails as well.
fn run_all_beside(op: Op, how: Fails, count: u32, too: Option<Failing>) {
    for from in 1..CALLS_MAX {
        let plan = Failing {
            op,
            from,
            count,
            how,
        };
        if !run(plan, too) {
            let is_asked = from > 1 || too.is_some();
            assert!(is_asked, "the life never asks for {op:?}");
            return;
        }
    }
    panic!("the life has more than {CALLS_MAX} calls of {op:?}");
}

#[test]
fn life_without_failures_does_all_its_steps() {
    let mut life = Life::new();
    for (name, step) in life::STEPS {
        step(&mut life).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(
            check::broken(&life).is_empty(),
            "{name}: {:#?}",
            check::broken(&life)
        );
    }
    let plan = Failing::nth(Op::Grant, u32::MAX);
    life.end(&plan);
}

#[test]
fn one_failure_without_any_effect_leaves_a_consistent_space() {
    for op in Op::FALLIBLE {
        run_all(op, Fails::Before, 1);
    }
}

#[test]
fn one_failure_half_way_leaves_a_consistent_space() {
    for op in Op::FALLIBLE {
        run_all(op, Fails::After, 1);
    }
}

#[test]
fn hardware_that_fails_from_some_call_on_leaves_a_consistent_space() {
    for op in Op::FALLIBLE {
        run_all(op, Fails::Before, u32::MAX);
        run_all(op, Fails::After, u32::MAX);
    }
}

#[test]
fn failure_that_cannot_be_undone_leaves_a_consistent_space() {
    for op in [Op::Grant, Op::Activate, Op::Copy, Op::Inherited] {
        for undone in [Op::Restrict, Op::Invalidate, Op::Deactivate] {
            run_all_beside(op, Fails::After, 1, Some(Failing::always(undone)));
        }
    }
    let activate = Some(Failing::always(Op::Activate));
    run_all_beside(Op::Deactivate, Fails::Before, 1, activate);
}

#[test]
fn driver_that_panics_leaves_a_consistent_space() {
    for op in Op::FALLIBLE {
        run_all(op, Fails::Panics, 1);
    }
}

#[test]
fn device_that_is_busy_for_a_while_only_takes_longer() {
    for from in 1..CALLS_MAX {
        let plan = Failing {
            op: Op::Restrict,
            from,
            count: 5,
            how: Fails::Busy,
        };
        let mut life = Life::new();
        life.machine.world().failing = Some(plan);
        for (name, step) in life::STEPS {
            step(&mut life).unwrap_or_else(|error| panic!("{plan:?}: {name}: {error}"));
        }
        if life.machine.world().failed == 0 {
            return;
        }
        life.end(&plan);
    }
    panic!("the life never ends");
}

#[test]
fn device_that_is_busy_too_long_leaves_a_consistent_space() {
    run_all(Op::Restrict, Fails::Busy, 1000);
    run_all(Op::Restrict, Fails::Busy, 3000);
}
