// SPDX-License-Identifier: Apache-2.0
//! Samples of the tenants and of what the daemon says, as they come, and the [`Slice`] that they make.

use super::{
    outside::Used,
    served::Served,
    slice::{BURSTING, Rates, STEADY, Slice, Told},
};
use crate::harness::{figures::to_f64, latencies::Latencies};
use pagetide_daemon::{control::VmReport, scheduler::SchedulerClassReport};
use std::time::Instant;

/// Sets on the warm side.
const WARM: [&str; 3] = ["hot", "warm", "active"];

/// What the daemon said.
pub(super) struct Asked {
    pub at: Instant,
    pub vms: [VmReport; 2],
    pub classes: Vec<SchedulerClassReport>,
}

/// Samples as they come.
#[derive(Default)]
pub(super) struct Seen {
    pub rates: Vec<(Instant, Instant, [f64; 2])>,
    pub told: Vec<Asked>,
}

impl Seen {
    /// All of it, by the time since `burst`.
    pub(super) fn slice(
        self,
        burst: Instant,
        used: Used,
        faults: Latencies,
        served: Served,
    ) -> Slice {
        let since = |at: Instant| match at.checked_duration_since(burst) {
            Some(after) => after.as_secs_f64(),
            None => -burst.duration_since(at).as_secs_f64(),
        };
        let rates = self
            .rates
            .into_iter()
            .map(|(from, to, [steady, bursting])| Rates {
                from_s: since(from),
                to_s: since(to),
                steady,
                bursting,
            });
        let told = self
            .told
            .windows(2)
            .map(|pair| told(&pair[0], &pair[1], since(pair[1].at)));
        Slice {
            rates: rates.collect(),
            told: told.collect(),
            used: used
                .into_iter()
                .map(|(at, bytes)| (since(at), bytes))
                .collect(),
            faults,
            served,
        }
    }
}

fn told(before: &Asked, now: &Asked, at_s: f64) -> Told {
    let sections = |vm: &VmReport, is_counted: fn(&str) -> bool| -> u64 {
        let counted = vm.sections.iter().filter(|set| is_counted(&set.set));
        counted.map(|set| set.sections).sum()
    };
    let hot = |vm: &VmReport| sections(vm, |set| WARM.contains(&set));
    let all: u64 = now
        .vms
        .iter()
        .map(|vm| vm.ram_bytes / pagetide_addr::SECTION_BYTES)
        .sum();
    let warm: u64 = now.vms.iter().map(hot).sum();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let available = (now.at - before.at).as_secs_f64() * to_f64(cpus as u64);
    let used = |class: &SchedulerClassReport| {
        class.own_seconds + class.passed_down_seconds + class.idle_seconds + class.inherited_seconds
    };
    let classes = before.classes.iter().zip(&now.classes);
    Told {
        at_s,
        hot_sections: [hot(&now.vms[STEADY]), hot(&now.vms[BURSTING])],
        cold_share: 1.0 - to_f64(warm) / to_f64(all.max(1)),
        shares: classes
            .map(|(before, now)| (now.class.clone(), (used(now) - used(before)) / available))
            .collect(),
    }
}
