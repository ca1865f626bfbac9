// SPDX-License-Identifier: Apache-2.0
//! [`Round`]: the guests of one host at work for some time under one policy (VPRI 7.3).

use super::{
    guest::GuestRecipe,
    stream::{GuestStream, PROLOGUE},
};
use crate::replay::{
    AccessStream, DeviceAccount, Division, DmaTouches, FleetParams, FleetReplay, ReplayError,
    Share, Start, VmAccount, VmParams,
};
use pagetide_addr::SECTION_BYTES;
use pagetide_policy::{
    protect::PolicyChoice,
    set_times::{SetTimes, TIME_MIN},
};
use std::{num::NonZeroUsize, time::Duration};

/// When guests begin to give memory, in the prologue: cold sections are known by then.
pub(super) const SQUEEZE_FROM: Duration = Duration::from_secs(480);
/// How often it is decided how much each gives.
const BALANCE_EVERY: Duration = Duration::from_secs(2);

/// Sets whose coldest has what was left alone for `time` and a few scans more. A section that was Cold and is touched
/// once is Cool, so it stays there for the whole time; the other sets are passed as fast as scans allow.
pub(super) fn cold_after(time: Duration, scan: Duration) -> SetTimes {
    SetTimes {
        scan,
        cool: time.max(TIME_MIN),
        ..SetTimes::QUICK
    }
}

/// A round to be run.
#[derive(Clone, PartialEq, Debug)]
pub struct Round {
    /// The guests.
    pub guests: Vec<GuestRecipe>,
    /// How their DMA is protected.
    pub policy: PolicyChoice,
    /// Memory promised beyond the existing memory, as a share of it.
    pub overcommit: f64,
    /// Which guests give that memory.
    pub division: Division,
    /// A section left alone for so long is cold; it is what a guest gives.
    pub cold_after: Duration,
    /// Whether the evictor hears of DMA.
    pub dma: DmaTouches,
    /// Its length, in virtual seconds, without the prologue.
    pub seconds: u64,
    /// How often to record what policies hold, if at all.
    pub capacity_every: Option<Duration>,
    /// Threads; they affect only the speed.
    pub threads: NonZeroUsize,
}

impl Round {
    /// The counters of each guest, without the prologue.
    ///
    /// # Errors
    /// [`ReplayError::Asked`] if the overcommit cannot be met.
    pub fn run(&self) -> Result<Vec<VmAccount>, ReplayError> {
        let params = FleetParams {
            overcommit: self.overcommit,
            division: self.division,
            squeeze_from: SQUEEZE_FROM,
            balance_every: BALANCE_EVERY,
            threads: self.threads,
            ..FleetParams::default()
        };
        let vms = self.guests.iter().map(|guest| self.vm(guest)).collect();
        let mut fleet = FleetReplay::new(params, vms)?;
        fleet.run_until(PROLOGUE)?;
        let before = fleet.accounts();
        fleet.run_until(PROLOGUE + Duration::from_secs(self.seconds))?;
        let after = fleet.accounts();
        Ok(before.iter().zip(after).map(|(b, a)| since(b, a)).collect())
    }

    fn vm(&self, guest: &GuestRecipe) -> (VmParams, Box<dyn AccessStream>) {
        let params = VmParams {
            sections: guest.sections,
            section_bytes: SECTION_BYTES,
            start: Start::AllPresent,
            policy: self.policy.clone(),
            dma: self.dma,
            set_times: cold_after(self.cold_after, SetTimes::QUICK.scan),
            busy_sections: guest.busy_sections(),
            capacity_every: self.capacity_every,
            oldest_first: Vec::new(),
        };
        let stream = GuestStream::new(guest, self.seconds);
        (params, Box::new(stream))
    }
}

/// `after` less `before`. The most in any sample, and the holdings at each time, stay those of both.
fn less(after: Share, before: Share) -> Share {
    Share {
        section_ns: after.section_ns - before.section_ns,
        max_sections: after.max_sections,
    }
}

/// The counters of one device after `before`. Its footprint stays that of both.
fn device_since(before: &DeviceAccount, after: DeviceAccount) -> DeviceAccount {
    let mut fault_ages = after.fault_ages;
    for (count, before) in fault_ages.counts.iter_mut().zip(before.fault_ages.counts) {
        *count -= before;
    }
    DeviceAccount {
        touches: after.touches - before.touches,
        bytes: after.bytes - before.bytes,
        faults: after.faults - before.faults,
        first_faults: after.first_faults - before.first_faults,
        fault_ages,
        long_reuses: after.long_reuses - before.long_reuses,
        minute_sections: after.minute_sections - before.minute_sections,
        protected: less(after.protected, before.protected),
        dropped_sections: after.dropped_sections - before.dropped_sections,
        ..after
    }
}

/// The counters after `before`. The most in any sample stays that of both.
pub(super) fn since(before: &VmAccount, after: VmAccount) -> VmAccount {
    let devices = after.devices.into_iter().map(|device| {
        let same = |before: &&DeviceAccount| before.device == device.device;
        match before.devices.iter().find(same) {
            Some(before) => device_since(before, device),
            None => device,
        }
    });
    VmAccount {
        time: after.time - before.time,
        limit: less(after.limit, before.limit),
        resident: less(after.resident, before.resident),
        cpu_touches: after.cpu_touches - before.cpu_touches,
        cpu_faults: after.cpu_faults - before.cpu_faults,
        evicted_sections: after.evicted_sections - before.evicted_sections,
        evicted_protected: after.evicted_protected - before.evicted_protected,
        scans: after.scans - before.scans,
        over_limit_fills: after.over_limit_fills - before.over_limit_fills,
        swapped_in_ahead: after.swapped_in_ahead - before.swapped_in_ahead,
        absent: less(after.absent, before.absent),
        eviction_ages: after.eviction_ages.since(&before.eviction_ages),
        protected: less(after.protected, before.protected),
        bursts: after.bursts.since(before.bursts),
        devices: devices.collect(),
        sections: after.sections,
        section_bytes: after.section_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Load, paper_fleet};
    use super::*;
    use crate::replay::Service;

    fn round(policy: &str, threads: usize) -> Round {
        let guests = paper_fleet(3).into_iter().take(6);
        Round {
            guests: guests
                .map(|guest| GuestRecipe {
                    sections: 400,
                    ..guest
                })
                .collect(),
            policy: policy.parse().unwrap(),
            overcommit: 0.2,
            division: Division::InTurn,
            cold_after: Duration::from_secs(180),
            dma: DmaTouches::Unseen,
            seconds: 1_200,
            capacity_every: None,
            threads: NonZeroUsize::new(threads).unwrap(),
        }
    }

    #[test]
    fn round_is_the_same_on_any_number_of_threads() {
        for policy in ["adp", "lru"] {
            let alone = round(policy, 1).run().unwrap();
            assert_eq!(alone, round(policy, 3).run().unwrap(), "{policy}");
        }
    }

    #[test]
    fn round_counts_its_own_time_and_devices_fault_in_it() {
        let accounts = round("none", 1).run().unwrap();
        assert!(accounts.iter().all(|vm| vm.time.as_secs() == 1_200));
        let storage = accounts.iter().zip(paper_fleet(3));
        let faults: u64 = storage
            .filter(|(_, guest)| guest.load == Load::Storage)
            .map(|(vm, _)| vm.faults(Service::Block))
            .sum();
        assert!(faults > 0);
    }

    #[test]
    fn overcommit_that_takes_more_than_half_is_refused() {
        let mut impossible = round("none", 1);
        impossible.overcommit = 1.5;
        assert!(matches!(impossible.run(), Err(ReplayError::Asked(_))));
    }
}
