// SPDX-License-Identifier: Apache-2.0
//! Several VMs on one host: the same answer on any number of threads, and limits that keep the budget.

use pagetide_addr::{Access, DeviceId, SectionNo};
use pagetide_policy::set_times::SetTimes;
use pagetide_sim::replay::{
    AccessStream, Actor, DmaTouches, FleetParams, FleetReplay, ReplayAccess, ReplayError, Service,
    Start, VmAccount, VmParams,
};
use std::{num::NonZeroUsize, time::Duration};

const SECTIONS: u64 = 200;

/// A guest whose CPUs use the first `hot` sections, and whose disk goes everywhere by chance.
fn guest(seed: u64, hot: u64) -> (VmParams, Box<dyn AccessStream>) {
    let mut state = seed;
    let mut chance = move |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let seconds = (0..1800).flat_map(move |second| {
        let at = Duration::from_secs(second);
        let access = |actor, section| ReplayAccess {
            at,
            actor,
            section: SectionNo(section),
            access: Access::Read,
            bytes: 4096,
        };
        let disk = Actor::Device(DeviceId(1), Service::Block);
        let mut all = vec![
            access(disk, chance(SECTIONS)),
            access(disk, chance(SECTIONS)),
        ];
        if second % 4 == 0 {
            all.extend((0..hot).map(|section| access(Actor::Cpu, section)));
        }
        all
    });
    let params = VmParams {
        sections: SECTIONS,
        section_bytes: 2 << 20,
        start: Start::AllPresent,
        policy: "adp".parse().unwrap(),
        dma: DmaTouches::Seen,
        set_times: SetTimes::QUICK,
        busy_sections: 0,
        capacity_every: None,
        oldest_first: Vec::new(),
    };
    (params, Box::new(seconds))
}

fn fleet(threads: usize, overcommit: f64) -> Result<FleetReplay, ReplayError> {
    let params = FleetParams {
        overcommit,
        threads: NonZeroUsize::new(threads).unwrap(),
        ..FleetParams::default()
    };
    let guests = (0..5).map(|i| guest(i + 1, 20 + 30 * i)).collect();
    FleetReplay::new(params, guests)
}

fn accounts(threads: usize) -> Vec<VmAccount> {
    let mut fleet = fleet(threads, 0.3).unwrap();
    fleet.run_until(Duration::from_secs(1830)).unwrap();
    assert!(fleet.is_ended());
    fleet.accounts()
}

#[test]
fn fleet_gives_the_same_accounts_on_any_number_of_threads() {
    let one = accounts(1);
    assert!(one.iter().map(|vm| vm.faults(Service::Block)).sum::<u64>() > 100);
    assert_eq!(one, accounts(2));
    assert_eq!(one, accounts(7));
}

#[test]
fn limits_sum_up_to_the_budget_at_all_times_and_the_colder_vm_gives_more() {
    let accounts = accounts(2);
    let limits: u128 = accounts.iter().map(|vm| vm.limit.section_ns).sum();
    let budget = 5 * (SECTIONS - 46);
    assert_eq!(limits, u128::from(budget) * accounts[0].time.as_nanos());
    let mean = |vm: &VmAccount| vm.limit.mean_sections(vm.time);
    assert!(
        mean(&accounts[0]) < mean(&accounts[4]) - 10.0,
        "{} {}",
        mean(&accounts[0]),
        mean(&accounts[4])
    );
}

#[test]
fn overcommit_that_takes_more_than_may_be_taken_is_refused() {
    for overcommit in [1.01, -0.1, f64::NAN, f64::INFINITY] {
        let error = fleet(1, overcommit).err().unwrap();
        assert!(error.to_string().contains("overcommit"), "{error}");
    }
    assert!(fleet(1, 1.0).is_ok());
}

#[test]
fn fleet_without_overcommit_evicts_nothing() {
    let mut fleet = fleet(1, 0.0).unwrap();
    fleet.run_until(Duration::from_secs(600)).unwrap();
    let evicted = fleet
        .accounts()
        .iter()
        .map(|vm| vm.evicted_sections)
        .sum::<u64>();
    assert_eq!(evicted, 0);
}

#[test]
fn error_of_the_first_vm_is_told_whichever_thread_meets_one_first() {
    let outside = |section: u64| {
        let (params, _) = guest(1, 1);
        let access = ReplayAccess {
            at: Duration::ZERO,
            actor: Actor::Cpu,
            section: SectionNo(section),
            access: Access::Read,
            bytes: 1,
        };
        let stream: Box<dyn AccessStream> = Box::new(std::iter::once(access));
        (params, stream)
    };
    let params = FleetParams {
        threads: NonZeroUsize::new(2).unwrap(),
        ..FleetParams::default()
    };
    let vms = vec![guest(1, 1), outside(1000), outside(2000)];
    let mut fleet = FleetReplay::new(params, vms).unwrap();
    let error = fleet.run_until(Duration::from_secs(60)).unwrap_err();
    assert!(matches!(error, ReplayError::Outside { section: 1000, .. }));
}
