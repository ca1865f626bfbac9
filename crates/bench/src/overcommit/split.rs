// SPDX-License-Identifier: Apache-2.0
//! Two VMs whose working sets change (NPF 6.1, Fig. 7): one from 100 to 900 of 1,000 units, the other from 900
//! to 100, and back. There is memory for both at any moment, but not in equal parts.
//!
//! ```text
//!            units in use            split: 500 │ 500       shared: one budget
//!   before   vm-1 100   vm-2 900     vm-2 lacks 400         as they need it
//!   after    vm-1 900   vm-2 100     vm-1 lacks 400         800 move
//! ```
//! Each VM has a thousand units of RAM, all of it filled, and each touch is of a page drawn evenly from its
//! working set. A *hit* is a touch that needed no fault: the page was present. Both arms have the same memory:
//! the budget is what the split took at its end, two limits and what was stored beside them; and the budget
//! must keep its high watermark free of that.

use super::{
    arms::{mib, per_second, sections_of},
    guest::{RequestGuestOptions, TOUCHES},
    host::{Host, resident_bytes, stored_bytes},
    process::Guests,
    vms::Vms as _,
    working_set::Choice,
};
use crate::{
    daemon::directory_in,
    harness::figures::to_f64,
    options::{SizeOptions, flags},
};
use pagetide_daemon::budget::HostReport;
use std::{
    path::Path,
    time::{Duration, Instant},
};
use tempfile::TempDir;

const SMALL_PERMILLE: u32 = 100;
const LARGE_PERMILLE: u32 = 900;
/// Requests a second of each VM: 121 thousand touches, as many as an instance of memcached serves with three
/// others beside it (Table 5).
const RATE: u32 = 7560;
/// Time for an arm to come to rest before the sets change.
const SETTLE: Duration = Duration::from_secs(3);
/// The memory has moved when this much of it has, in tenths: the rest waits until its pages are drawn.
const MOVED_TENTHS: u64 = 9;

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Arm {
    Split,
    Shared,
}

impl Arm {
    /// The split comes first in the first round: what it takes is the budget.
    pub(super) const ALL: [Self; 2] = [Self::Split, Self::Shared];
}

/// What came of one change of the sets.
pub(super) struct Slice {
    /// Hits a second of both VMs.
    pub hits_per_s: f64,
    /// Of all touches.
    pub hit_share: f64,
    /// Speed at which memory moved; `None` if none did.
    pub move_mib_s: Option<f64>,
    /// Other figures, by name: the same in each slice.
    pub figures: Vec<(&'static str, f64)>,
}

/// The resources of a run, dropped in this order.
pub(super) struct Bench {
    host: Host,
    guests: Guests,
    limit_bytes: u64,
    /// What the split took.
    budget_bytes: u64,
    slice: Duration,
    _dirs: [TempDir; 2],
}

impl Bench {
    /// VMs of `ram_bytes` each.
    pub(super) fn prepare(
        ram_bytes: u64,
        slice: Duration,
        options: &SizeOptions,
    ) -> Result<Self, String> {
        let in_memory = directory_in(Path::new("/dev/shm"))?;
        let on_disk = directory_in(&std::env::temp_dir())?;
        let sections = sections_of(ram_bytes)?;
        let vms = (0..).zip([SMALL_PERMILLE, LARGE_PERMILLE]);
        let vms = vms.map(|(number, used_permille)| RequestGuestOptions {
            sections,
            cpu: number,
            used_permille,
            choice: Choice::Even,
            moves_permille: 0,
            rate: Some(RATE),
            seed: number as u64 + 1,
            group: None,
        });
        let guests = Guests::start(on_disk.path(), vms)?;
        let state_dir = in_memory.path().join("daemon");
        Ok(Self {
            host: Host::start(&state_dir, &flags(&options.settings), 2 * ram_bytes)?,
            guests,
            limit_bytes: ram_bytes / 2,
            budget_bytes: ram_bytes,
            slice,
            _dirs: [in_memory, on_disk],
        })
    }

    /// The budget of the last shared slice.
    pub(super) fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }

    /// Two changes under `arm`, there and back.
    pub(super) fn slices(&mut self, arm: Arm) -> Result<[Slice; 2], String> {
        let limit = self.limit_bytes;
        match arm {
            Arm::Split => {
                self.host
                    .attach(self.guests.pids().into_iter(), Some(limit))?;
                let kept = |host: &HostReport| host.vms.iter().all(|vm| vm.resident_bytes <= limit);
                self.host.wait_until(kept)?;
            }
            Arm::Shared => {
                self.host.attach(self.guests.pids().into_iter(), None)?;
                self.host.set_budget(self.budget_bytes)?;
                let budget = self.budget_bytes;
                self.host.wait_until(|host| host.used_bytes <= budget)?;
            }
        }
        std::thread::sleep(SETTLE);
        let slices = [
            self.change([LARGE_PERMILLE, SMALL_PERMILLE], 0)?,
            self.change([SMALL_PERMILLE, LARGE_PERMILLE], 1)?,
        ];
        match arm {
            Arm::Split => {
                let now = self.host.now()?;
                self.budget_bytes = 2 * limit + stored_bytes(&now);
            }
            Arm::Shared => self.host.lift_budget()?,
        }
        self.host.detach()?;
        self.guests.touch_all()?;
        Ok(slices)
    }

    /// Changes the sets to `permille`, so that `growing` needs more.
    fn change(&mut self, permille: [u32; 2], growing: usize) -> Result<Slice, String> {
        let before = self.host.counts()?;
        let mut seen = vec![(Duration::ZERO, self.resident_of(growing)?)];
        for (vm, permille) in permille.into_iter().enumerate() {
            self.guests.resize(vm, permille)?;
        }
        let begun = Instant::now();
        let host = &self.host;
        let served = self.guests.measure(self.slice, &mut || {
            seen.push((begun.elapsed(), resident_in(&host.now()?, growing)));
            Ok(())
        })?;
        let counts = self.host.counts()?.since(before);
        let now = self.host.now()?;
        let touches = served.iter().map(|served| served.requests).sum::<u64>() * TOUCHES;
        let hits = touches.saturating_sub(counts.faults);
        let mut figures = vec![
            ("touches_per_s", to_f64(touches) / self.slice.as_secs_f64()),
            ("resident_mib", mib(resident_bytes(&now))),
            ("stored_mib", mib(stored_bytes(&now))),
            ("growing_mib", mib(resident_in(&now, growing))),
        ];
        figures.extend(per_second(&counts, self.slice));
        Ok(Slice {
            hits_per_s: to_f64(hits) / self.slice.as_secs_f64(),
            hit_share: to_f64(hits) / to_f64(touches.max(1)),
            move_mib_s: speed_mib_s(&seen),
            figures,
        })
    }

    fn resident_of(&self, vm: usize) -> Result<u64, String> {
        Ok(resident_in(&self.host.now()?, vm))
    }

    /// Compares every byte.
    pub(super) fn end(mut self) -> Result<(), String> {
        self.guests.verify_all()
    }
}

/// What is present of a VM; the report has them by name, as they were attached.
fn resident_in(host: &HostReport, vm: usize) -> u64 {
    host.vms.get(vm).map_or(0, |vm| vm.resident_bytes)
}

/// How fast a VM has grown from the first of `seen` to what it had at the end, until nine tenths of that were
/// there.
fn speed_mib_s(seen: &[(Duration, u64)]) -> Option<f64> {
    let (begun, least) = seen.first().copied()?;
    let (_, most) = seen.last().copied()?;
    let moved = most.saturating_sub(least) / 10 * MOVED_TENTHS;
    if moved == 0 {
        return None;
    }
    let (there, _) = seen.iter().find(|(_, bytes)| *bytes >= least + moved)?;
    Some(mib(moved) / (*there - begun).as_secs_f64().max(1e-3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_that_of_nine_tenths_of_what_moved() {
        let seen = |bytes: &[u64]| -> Vec<(Duration, u64)> {
            let times = (0..).map(Duration::from_secs);
            times.zip(bytes.iter().map(|mib| mib << 20)).collect()
        };
        let speed = |bytes: &[u64]| speed_mib_s(&seen(bytes));
        // 180 MiB of 200 were there after two seconds.
        assert!(speed(&[100, 200, 280, 300, 300]).is_some_and(|speed| (speed - 90.0).abs() < 1e-6));
        assert_eq!(speed(&[100, 90, 100]), None);
        assert_eq!(speed(&[]), None);
    }
}
