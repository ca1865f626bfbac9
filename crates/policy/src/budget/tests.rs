// SPDX-License-Identifier: Apache-2.0
//! The budget with VMs that obey it; each test is one rule.

use super::*;
use crate::sets::{LEVELS, Level};
use pagetide_random::SplitMix64;
use std::{collections::BTreeMap, time::Duration};

const HOST: HostMemory = HostMemory {
    ram: Bytes::gib(1024),
    cgroup_limit: None,
};
const SECOND: Duration = Duration::from_secs(1);

/// A VM that uses its working set and obeys its target within a step.
#[derive(Clone, Copy, Debug)]
struct Tame {
    ram: Bytes,
    working_set: Bytes,
    resident: Bytes,
    stored: Bytes,
    pressure: Option<Permille>,
    eviction: Eviction,
    /// Bytes refaulted in a step while something is missing.
    refaulted: Bytes,
}

fn tame(ram: u64, working_set: u64, resident: u64) -> Tame {
    Tame {
        ram: Bytes::mib(ram),
        working_set: Bytes::mib(working_set),
        resident: Bytes::mib(resident),
        stored: Bytes::ZERO,
        pressure: None,
        eviction: Eviction::Possible,
        refaulted: Bytes::mib(200),
    }
}

impl Tame {
    fn report(&self) -> VmReport {
        let hot = self.working_set.min(self.resident);
        VmReport {
            ram: self.ram,
            resident: self.resident,
            swapped: self.ram.less(self.resident),
            content: self.stored,
            stored: self.stored,
            heat: Heat::default()
                .with(Level::Hot, hot)
                .with(Level::Cold, self.resident.less(hot)),
            pressure: self.pressure,
            eviction: self.eviction,
        }
    }

    fn refaults(&self) -> Refaults {
        let mut refaults = Refaults::default();
        let missing = self.working_set.less(self.resident);
        if missing > Bytes::ZERO {
            for parts in [8, 4, 2, 1] {
                refaults.add(missing.part(1, parts), self.refaulted.part(1, 4));
            }
        }
        refaults
    }

    fn obey(&mut self, target: Bytes) {
        if self.eviction == Eviction::Possible {
            self.resident = self.resident.min(target);
        }
        let wanted = self.working_set.min(target);
        self.resident = self.resident.max(wanted);
    }
}

/// A budget of 10,000 MiB: 100 are min, 200 low, 400 high, so 9,600 can be promised.
struct Host {
    budget: HostBudget,
    vms: BTreeMap<u64, Tame>,
    now: Duration,
    lowered: Bytes,
    changes: usize,
}

fn plan() -> Plan {
    Plan::new(Bytes::mib(10_000))
}

fn share(weight: u32, floor: u64) -> VmShare {
    VmShare {
        weight: Weight::try_from(weight).unwrap(),
        floor: Bytes::mib(floor),
        ceiling: None,
    }
}

impl Host {
    fn new(plan: Plan) -> Self {
        Self {
            budget: HostBudget::new(plan, HOST).unwrap(),
            vms: BTreeMap::new(),
            now: Duration::ZERO,
            lowered: Bytes::ZERO,
            changes: 0,
        }
    }

    fn with(mut self, id: u64, share: VmShare, vm: Tame) -> Self {
        self.budget.join(VmId(id), share, vm.report()).unwrap();
        self.vms.insert(id, vm);
        self
    }

    fn decide(&mut self) -> Decision {
        for (id, vm) in &self.vms {
            let (report, refaults) = (vm.report(), vm.refaults());
            self.budget.observe(VmId(*id), report, &refaults).unwrap();
        }
        let decision = self.budget.step(self.now);
        self.now += SECOND;
        for change in &decision.changes {
            self.lowered += change.from.unwrap_or_default().less(change.to);
        }
        self.changes += decision.changes.len();
        decision
    }

    fn step(&mut self) -> Decision {
        let decision = self.decide();
        for change in &decision.changes {
            self.vms.get_mut(&change.vm.0).unwrap().obey(change.to);
        }
        for (id, vm) in &mut self.vms {
            let target = self.budget.vm(VmId(*id)).unwrap().target.unwrap();
            vm.obey(target);
        }
        decision
    }

    fn steps(&mut self, count: u32) {
        for _ in 0..count {
            self.step();
        }
    }

    fn vm(&mut self, id: u64) -> &mut Tame {
        self.vms.get_mut(&id).unwrap()
    }

    fn target(&self, id: u64) -> u64 {
        self.budget.vm(VmId(id)).unwrap().target.unwrap().0 >> 20
    }
}

fn reason_for(decision: &Decision, id: u64) -> Option<Reason> {
    let mut changes = decision.changes.iter();
    changes
        .find(|change| change.vm == VmId(id))
        .map(|change| change.reason)
}

fn is_near(got: u64, wanted: u64) -> bool {
    got.abs_diff(wanted) <= wanted * 2 / 100
}

#[test]
fn cold_memory_goes_to_the_vm_that_refaults_whatever_the_weights() {
    let mut host = Host::new(plan())
        .with(1, share(1000, 100), tame(9000, 3000, 8600))
        .with(2, share(1, 100), tame(9000, 1000, 1000));
    // So it keeps what is cold until it must give it.
    host.vm(1).pressure = Some(Permille(1));
    host.steps(200);
    host.vm(2).working_set = Bytes::mib(6000);
    let decision = host.step();
    assert_eq!(reason_for(&decision, 1), Some(Reason::Taken(Level::Cold)));
    host.steps(60);
    assert!(is_near(host.target(2), 6000), "{}", host.target(2));
    assert!(host.target(1) >= 3000);
}

#[test]
fn refaults_that_are_too_rare_to_pay_get_nothing() {
    let gets = |refaulted| {
        let mut host = Host::new(plan())
            .with(1, share(100, 100), tame(9000, 8000, 8600))
            .with(2, share(100, 100), tame(9000, 1000, 1000));
        host.steps(200);
        host.vm(2).working_set = Bytes::mib(4000);
        host.vm(2).refaulted = Bytes::mib(refaulted);
        host.steps(60);
        host.target(2)
    };
    assert!(is_near(gets(200), 4000), "{}", gets(200));
    // What nobody needs it may have: what the first VM does not use.
    assert!((1500..=1620).contains(&gets(2)), "{}", gets(2));
}

#[test]
fn vm_that_no_memory_would_help_gets_its_share_but_not_the_cold_memory_of_others() {
    let gets = |working_set| {
        let mut host = Host::new(plan())
            .with(1, share(100, 100), tame(9000, 2000, 7600))
            .with(2, share(100, 100), tame(90_000, 1000, 2000));
        host.vm(1).pressure = Some(Permille(1));
        host.steps(200);
        host.vm(2).working_set = Bytes::mib(working_set);
        host.vm(2).refaulted = Bytes::gib(8);
        host.steps(60);
        host.target(2)
    };
    assert!(is_near(gets(7000), 7000), "{}", gets(7000));
    assert!(gets(80_000) <= 4900, "{}", gets(80_000));
}

#[test]
fn memory_is_given_only_after_it_was_evicted() {
    let mut host = Host::new(plan())
        .with(1, share(100, 100), tame(9000, 2000, 8600))
        .with(2, share(100, 100), tame(9000, 1000, 1000));
    host.steps(150);
    host.vm(1).resident = Bytes::mib(8600);
    host.vm(2).working_set = Bytes::mib(6000);
    host.vm(2).resident = Bytes::mib(1000);
    // The first VM does not evict yet: the second gets no more than what low leaves.
    for _ in 0..20 {
        host.decide();
        assert!(host.target(2) <= 1200, "{}", host.target(2));
    }
    assert!(host.target(1) < 8200);
    host.vm(1).resident = Bytes::mib(7600);
    host.decide();
    assert!(
        (1900..=2200).contains(&host.target(2)),
        "{}",
        host.target(2)
    );
}

#[test]
fn floor_is_kept_however_much_another_wants() {
    let mut host = Host::new(plan())
        .with(1, share(1, 2000), tame(9000, 10, 2000))
        .with(2, share(10_000, 16), tame(20_000, 15_000, 7600));
    for _ in 0..600 {
        host.step();
        assert!(host.target(1) >= 2000);
    }
    assert!(is_near(host.target(1), 2000));
    assert!(is_near(host.target(2), 7600));
}

#[test]
fn ceiling_is_kept_and_follows_a_change_at_once() {
    let ceiling = |ceiling| VmShare {
        ceiling: Some(Bytes::mib(ceiling)),
        ..share(100, 100)
    };
    let mut host = Host::new(plan()).with(1, ceiling(3000), tame(9000, 9000, 3000));
    host.steps(30);
    assert_eq!(host.target(1), 3000);
    host.budget.set_share(VmId(1), ceiling(2990)).unwrap();
    let decision = host.step();
    assert_eq!(reason_for(&decision, 1), Some(Reason::Ceiling));
    assert_eq!(host.target(1), 2990);
    // RAM that was unplugged bounds both ceiling and floor.
    host.vm(1).ram = Bytes::mib(50);
    host.vm(1).working_set = Bytes::mib(50);
    host.vm(1).resident = Bytes::mib(50);
    host.step();
    assert_eq!(host.target(1), 50);
}

#[test]
fn weights_decide_when_all_want_more() {
    let mut host = Host::new(plan())
        .with(1, share(100, 100), tame(9000, 9000, 3200))
        .with(2, share(200, 100), tame(9000, 9000, 3200))
        .with(3, share(100, 100), tame(9000, 9000, 3200));
    host.steps(60);
    assert!(is_near(host.target(1), 2400) && is_near(host.target(2), 4800));
    host.budget.set_share(VmId(1), share(500, 100)).unwrap();
    let decision = host.step();
    assert_eq!(reason_for(&decision, 2), Some(Reason::Share));
    host.steps(60);
    assert!(is_near(host.target(1), 6000), "{}", host.target(1));
    assert!(is_near(host.target(2), 2400) && is_near(host.target(3), 1200));
}

/// Two equal VMs that are busy in turns, three seconds each; bytes taken from either after they have
/// settled.
fn traded(tuning: Tuning) -> Bytes {
    let mut host = Host::new(Plan { tuning, ..plan() })
        .with(1, share(100, 100), tame(9000, 6000, 4800))
        .with(2, share(100, 100), tame(9000, 6000, 4800));
    let mut random = SplitMix64::new(5);
    for second in 0..20_000 {
        if second == 600 {
            host.lowered = Bytes::ZERO;
        }
        let turn = second / 3 % 2;
        host.vm(1).working_set = Bytes::mib(3600 + 2400 * turn + random.below(60));
        host.vm(2).working_set = Bytes::mib(6000 - 2400 * turn + random.below(60));
        host.step();
    }
    host.lowered
}

#[test]
fn equal_vms_do_not_trade_pages() {
    assert_eq!(traded(Tuning::default()), Bytes::ZERO);
    // Without the hold each turn moves a gigabyte there and back.
    let restless = Tuning {
        hold: Duration::from_millis(1),
        ..Tuning::default()
    };
    assert!(traded(restless) > Bytes::gib(100));
}

#[test]
fn small_changes_of_need_leave_targets_alone() {
    let changes = |deadband| {
        let tuning = Tuning {
            deadband: Permille(deadband),
            hold: Duration::from_millis(1),
            ..Tuning::default()
        };
        let mut host = Host::new(Plan { tuning, ..plan() })
            .with(1, share(100, 100), tame(9000, 4000, 4000))
            .with(2, share(100, 100), tame(9000, 9000, 5600));
        let mut random = SplitMix64::new(5);
        for second in 0..2000 {
            if second == 100 {
                host.changes = 0;
            }
            host.vm(1).working_set = Bytes::mib(4000 + random.below(40));
            host.step();
        }
        host.changes
    };
    assert!(changes(0) > 100, "{}", changes(0));
    assert!(changes(16) < 20, "{}", changes(16));
}

#[test]
fn idle_vm_shrinks_to_its_floor_over_minutes_and_wakes_quickly() {
    let mut host = Host::new(plan()).with(1, share(100, 500), tame(8000, 7000, 7000));
    host.steps(10);
    host.vm(1).working_set = Bytes::mib(200);
    host.steps(45);
    assert!(host.target(1) >= 7000);
    let mut reasons = Vec::new();
    for _ in 0..180 {
        reasons.extend(reason_for(&host.step(), 1));
    }
    assert!(host.target(1) > 1000, "{}", host.target(1));
    assert!(reasons.iter().all(|reason| *reason == Reason::Idle));
    host.steps(180);
    assert_eq!(host.target(1), 500);
    host.vm(1).working_set = Bytes::mib(4500);
    let decision = host.step();
    assert_eq!(reason_for(&decision, 1), Some(Reason::Refaults));
    host.steps(20);
    assert_eq!(host.vm(1).resident, Bytes::mib(4500));
}

#[test]
fn vm_that_uses_its_memory_without_faults_is_not_shrunk() {
    let mut host = Host::new(plan()).with(1, share(100, 500), tame(8000, 7000, 7000));
    host.steps(2000);
    assert!(host.target(1) >= 7000);
}

#[test]
fn waking_vm_gains_at_the_rate_that_is_set() {
    let gained = |rate| {
        let tuning = Tuning {
            gain: Rate(Bytes::mib(rate)),
            ..Tuning::default()
        };
        let mut host = Host::new(Plan { tuning, ..plan() })
            .with(1, share(100, 100), tame(9000, 1000, 8600))
            .with(2, share(100, 100), tame(9000, 900, 1000));
        // So it keeps what is cold until it must give it.
        host.vm(1).pressure = Some(Permille(1));
        host.steps(300);
        let before = host.vm(2).resident;
        host.vm(2).working_set = Bytes::mib(7000);
        host.steps(10);
        (host.vm(2).resident.less(before).0 >> 20) / 10
    };
    assert!((64..130).contains(&gained(64)), "{}", gained(64));
    assert!(gained(512) >= 300, "{}", gained(512));
}

#[test]
fn working_sets_that_change_places_are_followed_at_64_mib_a_second() {
    let mut small = plan();
    small.budget = Bytes::mib(1100);
    let mut host = Host::new(small)
        .with(1, share(100, 16), tame(1000, 900, 900))
        .with(2, share(100, 16), tame(1000, 100, 100));
    host.steps(100);
    for (grows, shrinks) in [(2, 1), (1, 2), (2, 1)] {
        host.vm(shrinks).working_set = Bytes::mib(100);
        host.vm(grows).working_set = Bytes::mib(900);
        host.steps(800 / 64);
        let moved = host.vm(grows).resident;
        assert!(moved >= Bytes::mib(880), "{moved} for VM {grows}");
        host.steps(20);
    }
}

#[test]
fn below_low_memory_is_reclaimed_until_high_and_then_left_alone() {
    let mut host = Host::new(plan()).with(1, share(100, 100), tame(20_000, 20_000, 9600));
    host.steps(5);
    assert_eq!(host.target(1), 9600);
    // Between low and high nothing happens without cold memory.
    host.vm(1).stored = Bytes::mib(150);
    let decision = host.step();
    assert_eq!(
        (decision.water, decision.reclaim),
        (Water::Between, Reclaim::Rest)
    );
    assert_eq!(decision.free, Bytes::mib(250));
    assert_eq!(host.target(1), 9600);
    host.vm(1).stored = Bytes::mib(250);
    let decision = host.step();
    assert_eq!(decision.water, Water::BelowLow);
    assert_eq!(decision.reclaim, Reclaim::UntilHigh(Bytes::mib(250)));
    assert_eq!(host.target(1), 9350);
    // Not there yet: it goes on, though low is passed.
    host.vm(1).resident = Bytes::mib(9400);
    let decision = host.decide();
    assert_eq!(decision.reclaim, Reclaim::UntilHigh(Bytes::mib(50)));
    host.vm(1).resident = Bytes::mib(9350);
    let decision = host.step();
    assert_eq!(
        (decision.water, decision.reclaim),
        (Water::AboveHigh, Reclaim::Rest)
    );
    host.vm(1).stored = Bytes::mib(400);
    let decision = host.step();
    assert_eq!((decision.water, host.target(1)), (Water::Between, 9350));
    host.vm(1).stored = Bytes::mib(800);
    let decision = host.step();
    assert_eq!(decision.water, Water::BelowMin);
    assert_eq!(decision.over, Bytes::mib(150));
}

#[test]
fn between_low_and_high_cold_memory_goes_at_the_pace() {
    let paced = |pace| {
        let mut plan = plan();
        plan.tuning.idle_after = Duration::MAX;
        plan.tuning.pace = Rate(Bytes::mib(pace));
        plan
    };
    let mut host = Host::new(paced(64))
        .with(1, share(100, 100), tame(9000, 4000, 5900))
        .with(2, share(100, 100), tame(9000, 3700, 3700));
    // Needs begin at what is resident.
    host.steps(200);
    host.vm(1).resident = Bytes::mib(6000);
    host.vm(2).resident = Bytes::mib(3700);
    for _ in 0..5 {
        let decision = host.decide();
        assert_eq!(decision.water, Water::Between);
        assert_eq!(decision.reclaim, Reclaim::Paced(Rate(Bytes::mib(64))));
    }
    let taken = 6000_u64.saturating_sub(host.target(1));
    assert!((5 * 64 - 100..=5 * 64 + 1).contains(&taken), "{taken}");
    assert!(host.target(2) >= 3700);
    host.budget.set_plan(paced(0)).unwrap();
    assert_eq!(host.decide().reclaim, Reclaim::Rest);
}

#[test]
fn vm_under_pressure_is_not_shrunk_unasked_and_its_refaults_count_for_more() {
    let mut host = Host::new(plan()).with(1, share(100, 500), tame(8000, 200, 7000));
    host.vm(1).pressure = Some(Permille(1));
    host.steps(600);
    assert!(host.target(1) >= 7000);
    host.vm(1).pressure = Some(Permille(0));
    host.steps(600);
    assert_eq!(host.target(1), 500);

    let gets = |pressure| {
        let mut host = Host::new(plan())
            .with(1, share(100, 100), tame(9000, 5000, 8600))
            .with(2, share(100, 100), tame(9000, 1000, 1000));
        host.steps(300);
        host.vm(1).working_set = Bytes::mib(8600);
        host.vm(1).resident = Bytes::mib(8600);
        host.vm(2).working_set = Bytes::mib(4000);
        host.vm(2).resident = Bytes::mib(1000);
        host.vm(2).refaulted = Bytes::mib(20);
        host.vm(2).pressure = pressure;
        host.steps(60);
        host.target(2)
    };
    assert!(gets(None) < 2000, "{}", gets(None));
    assert!(
        is_near(gets(Some(Permille(2))), 4000),
        "{}",
        gets(Some(Permille(2)))
    );
}

#[test]
fn others_pay_for_memory_that_cannot_be_evicted() {
    let mut host = Host::new(plan())
        .with(1, share(100, 100), tame(9000, 100, 5000))
        .with(2, share(100, 100), tame(9000, 9000, 4600));
    host.vm(1).eviction = Eviction::Blocked;
    host.vm(2).stored = Bytes::mib(500);
    host.steps(600);
    assert_eq!(host.target(1), 5000);
    assert_eq!(host.target(2), 4100);
}

#[test]
fn what_evicting_frees_is_judged_by_content_whatever_the_words_of_a_large_vm_take() {
    let mut budget = HostBudget::new(plan(), HOST).unwrap();
    let report = VmReport {
        ram: Bytes::gib(64),
        resident: Bytes::gib(1),
        swapped: Bytes::mib(64),
        content: Bytes::mib(16),
        stored: Bytes::mib(16 + 128),
        ..VmReport::default()
    };
    budget.join(VmId(1), share(100, 100), report).unwrap();
    assert_eq!(budget.gate(VmId(1)).unwrap().saving, Permille(750));
}

#[test]
fn floors_give_way_only_to_what_is_stored_and_come_back() {
    let mut host = Host::new(plan())
        .with(1, share(100, 4000), tame(9000, 4000, 4000))
        .with(2, share(100, 4000), tame(9000, 9000, 5600));
    host.vm(1).stored = Bytes::mib(1900);
    host.steps(2);
    // Low and high give way before a floor does.
    assert_eq!((host.target(1), host.target(2)), (4000, 4000));
    host.vm(1).stored = Bytes::mib(3000);
    let decision = host.step();
    assert_eq!((host.target(1), host.target(2)), (3450, 3450));
    assert_eq!(reason_for(&decision, 1), Some(Reason::BelowFloor));
    host.vm(1).stored = Bytes::mib(1000);
    let decision = host.step();
    assert_eq!(host.target(1), 4000);
    assert_eq!(reason_for(&decision, 1), Some(Reason::Floor));
    assert!(host.target(2) >= 4000);
}

#[test]
fn vm_that_leaves_makes_room_and_one_that_joins_is_within_the_budget_at_once() {
    let mut host = Host::new(plan())
        .with(1, share(100, 100), tame(9000, 9000, 4800))
        .with(2, share(100, 100), tame(9000, 9000, 4800));
    host.steps(5);
    host.budget.leave(VmId(2)).unwrap();
    host.vms.remove(&2);
    host.steps(60);
    assert_eq!(host.target(1), 9000);
    let mut host = host.with(3, share(100, 1000), tame(9000, 9000, 5000));
    let decision = host.step();
    assert_eq!(reason_for(&decision, 3), Some(Reason::Joined));
    assert!(host.target(1) + host.target(3) <= 9600);
}

#[test]
fn what_was_set_survives_a_restart_and_nothing_is_evicted_for_it() {
    let mut host = Host::new(plan())
        .with(1, share(300, 1000), tame(9000, 3000, 3000))
        .with(2, share(100, 16), tame(9000, 6000, 6000));
    host.steps(10);
    let mut changed = plan();
    changed.budget = Bytes::mib(12_000);
    changed.watermarks.high = Mark::Bytes(Bytes::mib(500));
    host.budget.set_plan(changed).unwrap();
    let saved = host.budget.saved();
    let mut again = Host::new(saved.plan);
    for (id, share) in saved.vms.clone() {
        let vm = host.vms[&id.0];
        again = again.with(id.0, share, vm);
    }
    assert_eq!(again.budget.saved(), saved);
    again.step();
    assert_eq!(again.lowered, Bytes::ZERO);
    assert!(again.target(1) >= 3000 && again.target(2) >= 6000);
}

/// A plan with one thing changed.
fn but(change: impl FnOnce(&mut Plan)) -> Plan {
    let mut plan = plan();
    change(&mut plan);
    plan
}

#[test]
fn contradictory_plan_is_refused_in_one_sentence_and_changes_nothing() {
    let mut host = Host::new(plan())
        .with(1, share(100, 4000), tame(9000, 1000, 1000))
        .with(2, share(100, 4000), tame(9000, 1000, 1000));
    let cases = [
        (
            but(|plan| plan.budget = Bytes::gib(1025)),
            "more than the host's memory of 1024 GiB",
        ),
        (
            but(|plan| plan.budget = Bytes::mib(8000)),
            "the floors of its 2 VMs add up to 7.8 GiB",
        ),
        (
            but(|plan| plan.watermarks.low = plan.watermarks.min),
            "out of order",
        ),
        (
            but(|plan| plan.watermarks.high = plan.watermarks.low),
            "out of order",
        ),
        (
            but(|plan| plan.watermarks.min = Mark::Bytes(Bytes::ZERO)),
            "out of order",
        ),
        (
            but(|plan| plan.watermarks.high = Mark::Permille(Permille(501))),
            "more than half",
        ),
        (
            but(|plan| plan.tuning.gain = Rate(Bytes::ZERO)),
            "the gain must be more than 0",
        ),
        (but(|plan| plan.tuning.hold = Duration::ZERO), "more than 0"),
        (
            but(|plan| plan.tuning.payback = Duration::ZERO),
            "more than 0",
        ),
        (
            but(|plan| plan.tuning.idle_shrink = Duration::ZERO),
            "more than 0",
        ),
        (
            but(|plan| plan.tuning.pressure_max = Permille(0)),
            "more than 0",
        ),
        (but(|plan| plan.budget = Bytes::ZERO), "out of order"),
    ];
    let before = host.budget.saved();
    for (plan, why) in cases {
        let error = host.budget.set_plan(plan).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(host.budget.saved(), before);
    }
    let small = HostMemory {
        ram: Bytes::gib(64),
        cgroup_limit: Some(Bytes::mib(9999)),
    };
    let error = HostBudget::new(plan(), small).unwrap_err().to_string();
    assert!(
        error.contains("limit of 9.7 GiB of a memory cgroup"),
        "{error}"
    );
    host.step();
}

#[test]
fn contradictory_share_is_refused_in_one_sentence_and_changes_nothing() {
    let mut host = Host::new(plan())
        .with(1, share(100, 4000), tame(9000, 1000, 1000))
        .with(2, share(100, 4000), tame(9000, 1000, 1000));
    let before = host.budget.saved();
    let below_floor = VmShare {
        ceiling: Some(Bytes::mib(3999)),
        ..share(100, 4000)
    };
    let cases = [
        (
            share(100, 9001),
            "the floor of VM 2, 8.7 GiB, is more than its RAM",
        ),
        (share(100, 15), "the least a VM can run with"),
        (share(100, 5901), "add up to 9.6 GiB"),
        (
            below_floor,
            "the ceiling of VM 2, 3.9 GiB, is less than its floor",
        ),
    ];
    for (share, why) in cases {
        let error = host
            .budget
            .set_share(VmId(2), share)
            .unwrap_err()
            .to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(host.budget.saved(), before);
    }
    let vm = tame(9000, 1, 1).report();
    let third = host.budget.join(VmId(3), share(100, 1901), vm);
    assert!(matches!(
        third,
        Err(BudgetError::BudgetBelowFloors { vms: 3, .. })
    ));
    let twice = host.budget.join(VmId(2), share(100, 16), vm);
    assert_eq!(twice, Err(BudgetError::VmTwice { vm: VmId(2) }));
    let gone = BudgetError::NoSuchVm { vm: VmId(9) };
    assert_eq!(host.budget.leave(VmId(9)), Err(gone));
    assert_eq!(host.budget.set_share(VmId(9), share(1, 16)), Err(gone));
    assert_eq!(
        host.budget.observe(VmId(9), vm, &Refaults::default()),
        Err(gone)
    );
    assert_eq!(host.budget.saved(), before);
    // Floors up to min are possible, also when one of them is set anew.
    host.budget.set_share(VmId(2), share(100, 5900)).unwrap();
    host.budget.set_share(VmId(2), share(1, 5900)).unwrap();
}

#[test]
fn heat_of_sections_that_are_partly_resident_counts_in_proportion() {
    let heat =
        Heat::of_sections(LEVELS.map(|level| (level, u64::from(level == Level::Cold) * 100)));
    assert_eq!(heat.at(Level::Cold), Bytes::mib(200));
    let mut budget = HostBudget::new(plan(), HOST).unwrap();
    let report = VmReport {
        ram: Bytes::mib(900),
        resident: Bytes::mib(100),
        heat: heat.with(Level::Hot, Bytes::mib(200)),
        ..VmReport::default()
    };
    budget.join(VmId(1), share(1, 16), report).unwrap();
    for second in 0..600 {
        budget
            .observe(VmId(1), report, &Refaults::default())
            .unwrap();
        budget.step(SECOND * second);
    }
    assert_eq!(budget.vm(VmId(1)).unwrap().need, Bytes::mib(50));
}

#[test]
fn step_without_vms_and_time_that_stands_still_or_runs_backwards_do_no_harm() {
    let mut host = Host::new(plan());
    let decision = host.step();
    assert_eq!(
        (decision.changes.len(), decision.water),
        (0, Water::AboveHigh)
    );
    let mut host = host.with(1, share(100, 500), tame(8000, 200, 7000));
    host.steps(3);
    for now in [5, 5, 0, 1] {
        host.now = SECOND * now;
        host.step();
    }
    // A host that was suspended for a day has not seen an idle VM for a day.
    host.now = SECOND * 86_400;
    host.step();
    host.step();
    assert!(host.target(1) >= 5000, "{}", host.target(1));
}

/// The settings as a naive model keeps them, checked from scratch each time.
#[derive(Clone, Default)]
struct Naive {
    vms: BTreeMap<u64, (VmShare, u64)>,
    budget: u64,
}

impl Naive {
    fn is_sound(&self) -> bool {
        let mib = |bytes: Bytes| bytes.0 >> 20;
        let vms = self.vms.values();
        let floors: u64 = vms.clone().map(|(share, _)| mib(share.floor)).sum();
        let each = vms.clone().all(|(share, ram)| {
            let floor = mib(share.floor);
            let ceiling = share.ceiling.map_or(*ram, mib);
            (16..=*ram).contains(&floor) && ceiling >= floor
        });
        // Budgets here are whole gigabytes in decimal, so that a hundredth is whole.
        each && floors <= self.budget - self.budget / 100 && self.budget <= 30_000
    }
}

struct Chaos {
    random: SplitMix64,
    budget: HostBudget,
    model: Naive,
    vms: BTreeMap<u64, VmReport>,
    now: Duration,
}

impl Chaos {
    fn new(seed: u64) -> Self {
        let host = HostMemory {
            ram: Bytes::mib(30_000),
            cgroup_limit: None,
        };
        Self {
            random: SplitMix64::new(seed),
            budget: HostBudget::new(plan(), host).unwrap(),
            model: Naive {
                vms: BTreeMap::new(),
                budget: 10_000,
            },
            vms: BTreeMap::new(),
            now: Duration::ZERO,
        }
    }

    fn amount(&mut self, below: u64) -> Bytes {
        Bytes::mib(self.random.below(below))
    }

    fn share(&mut self) -> VmShare {
        VmShare {
            weight: Weight::try_from(1 + u32::try_from(self.random.below(300)).unwrap()).unwrap(),
            floor: self.amount(2000),
            ceiling: (self.random.below(2) == 0).then(|| self.amount(6000)),
        }
    }

    fn report(&mut self, ram: Bytes) -> VmReport {
        let resident = self.amount(1 + (ram.0 >> 20));
        let mut heat = Heat::default();
        for level in LEVELS {
            heat = heat.with(level, self.amount(1 + (resident.0 >> 21)));
        }
        VmReport {
            ram,
            resident,
            swapped: ram.less(resident),
            content: Bytes::ZERO,
            stored: self.amount(600),
            heat,
            pressure: (self.random.below(2) == 0)
                .then(|| Permille(u16::try_from(self.random.below(5)).unwrap())),
            eviction: Eviction::Possible,
        }
    }

    /// Changes a setting in both, and compares what became of it.
    fn set(&mut self) {
        let id = self.random.below(12);
        let mut model = self.model.clone();
        let accepted = match self.random.below(5) {
            0 => {
                let ram = self.amount(8000) + Bytes::mib(20);
                let (share, report) = (self.share(), self.report(ram));
                let fresh = model.vms.insert(id, (share, ram.0 >> 20)).is_none();
                let joined = self.budget.join(VmId(id), share, report).is_ok();
                assert_eq!(joined, fresh && model.is_sound());
                if joined {
                    self.vms.insert(id, report);
                }
                joined
            }
            1 => {
                self.vms.remove(&id);
                let there = model.vms.remove(&id).is_some();
                assert_eq!(self.budget.leave(VmId(id)).is_ok(), there);
                there
            }
            2 => {
                let share = self.share();
                let there = model.vms.get_mut(&id).map(|(old, _)| *old = share);
                let set = self.budget.set_share(VmId(id), share).is_ok();
                assert_eq!(set, there.is_some() && model.is_sound());
                set
            }
            _ => {
                model.budget = 1000 * (1 + self.random.below(32));
                let budget = Bytes::mib(model.budget);
                let plan = Plan {
                    budget,
                    ..*self.budget.plan()
                };
                let set = self.budget.set_plan(plan).is_ok();
                assert_eq!(set, model.is_sound());
                set
            }
        };
        if accepted {
            self.model = model;
        }
        let saved = self.budget.saved();
        assert_eq!(saved.plan.budget, Bytes::mib(self.model.budget));
        let shares = self
            .model
            .vms
            .iter()
            .map(|(id, (share, _))| (VmId(*id), *share));
        assert_eq!(saved.vms, shares.collect());
    }

    fn observe(&mut self) {
        let ids: Vec<u64> = self.vms.keys().copied().collect();
        for id in ids {
            let ram = self.vms[&id].ram;
            let mut report = self.report(ram);
            if self.random.below(3) > 0 {
                // It obeys.
                let target = self.budget.vm(VmId(id)).unwrap().target;
                report.resident = report.resident.min(target.unwrap_or(report.resident));
            }
            let mut refaults = Refaults::default();
            for _ in 0..self.random.below(3) {
                refaults.add(self.amount(9000), self.amount(300));
            }
            self.vms.insert(id, report);
            self.budget.observe(VmId(id), report, &refaults).unwrap();
        }
    }

    fn targets(&self) -> BTreeMap<u64, Option<Bytes>> {
        let target = |id: &u64| (*id, self.budget.vm(VmId(*id)).unwrap().target);
        self.vms.keys().map(target).collect()
    }

    fn charged(&self, targets: &BTreeMap<u64, Option<Bytes>>) -> Bytes {
        let charge = |(id, target): (&u64, &Option<Bytes>)| {
            let report = &self.vms[id];
            target.unwrap_or_default().max(report.resident) + report.stored
        };
        targets.iter().map(charge).sum()
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(self.random.below(70_000));
        let before = self.targets();
        let decision = self.budget.step(self.now);
        let after = self.targets();
        self.check_changes(&before, &after, &decision);
        self.check_sums(&before, &after, &decision);
    }

    fn check_changes(
        &self,
        before: &BTreeMap<u64, Option<Bytes>>,
        after: &BTreeMap<u64, Option<Bytes>>,
        decision: &Decision,
    ) {
        let mut told = before.clone();
        for change in &decision.changes {
            let old = told.insert(change.vm.0, Some(change.to));
            assert_eq!(old, Some(change.from));
            let (vm, report) = (self.budget.vm(change.vm).unwrap(), self.vms[&change.vm.0]);
            let is_higher = Some(change.to) > change.from;
            match change.reason {
                Reason::Joined => assert_eq!(change.from, None),
                Reason::Floor | Reason::Refaults | Reason::Room => assert!(is_higher),
                Reason::Unused => assert!(!is_higher && change.to >= report.resident),
                Reason::Share => assert!(!is_higher && change.to < vm.need),
                Reason::BelowFloor => assert!(change.to < vm.share.floor),
                Reason::Taken(_) | Reason::Idle | Reason::Paced => {
                    assert!(!is_higher && change.to >= vm.need.min(report.resident));
                }
                Reason::Ceiling => assert_eq!(vm.share.ceiling, Some(change.to)),
            }
        }
        assert_eq!(&told, after);
    }

    fn check_sums(
        &self,
        before: &BTreeMap<u64, Option<Bytes>>,
        after: &BTreeMap<u64, Option<Bytes>>,
        decision: &Decision,
    ) {
        let marks = self.budget.plan().marks();
        let reports = self.vms.values();
        let stored: Bytes = reports.clone().map(|report| report.stored).sum();
        let resident: Bytes = reports.map(|report| report.resident).sum();
        assert_eq!(decision.free, marks.budget.less(resident + stored));
        assert_eq!(decision.over, (resident + stored).less(marks.budget));
        let floors: Bytes = self.model.vms.values().map(|(share, _)| share.floor).sum();
        let promised: Bytes = after.values().flatten().copied().sum();
        let floors_fit = floors + stored <= marks.budget.less(marks.min);
        // Sums hold.
        let bound = marks
            .budget
            .less(marks.low)
            .max((floors + stored).min(marks.budget.less(marks.min)));
        assert!(
            promised == Bytes::ZERO || promised + stored <= bound,
            "{promised} {stored}"
        );
        for (id, target) in after {
            let share = self.model.vms[id].0;
            let target = target.unwrap();
            // No floor is broken for another's ceiling, and no ceiling exceeded.
            assert!(target <= share.ceiling.unwrap_or(self.vms[id].ram));
            let had = before[id].is_some_and(|before| before >= share.floor);
            assert!(
                target >= share.floor || !floors_fit || !had,
                "VM {id}: {target}"
            );
        }
        // What is given is free.
        let is_floor = |change: &Change| change.to <= self.model.vms[&change.vm.0].0.floor;
        let mark = if decision.changes.iter().any(is_floor) {
            marks.min
        } else {
            marks.low
        };
        let free = marks.budget.less(mark);
        assert!(self.charged(after) <= self.charged(before).max(free));
    }
}

#[test]
fn sums_floors_ceilings_and_refusals_hold_under_random_events() {
    for seed in 0..60 {
        let mut chaos = Chaos::new(seed);
        for _ in 0..200 {
            match chaos.random.below(3) {
                0 => chaos.set(),
                1 => chaos.observe(),
                _ => chaos.step(),
            }
        }
    }
}

/// What `HostBudget` should arrive at if nothing changes any more, worked out a megabyte at a time:
/// floors first, then what is used to the VM that has least for its weight.
fn naive_split(all: u64, vms: &[(VmShare, Tame)]) -> Vec<u64> {
    let mut got: Vec<u64> = vms.iter().map(|(share, _)| share.floor.0 >> 20).collect();
    for _ in got.iter().sum::<u64>()..all {
        let poorest = (0..vms.len())
            .filter(|index| got[*index] < vms[*index].1.working_set.0 >> 20)
            .min_by_key(|index| got[*index] * 1_000_000 / u64::from(vms[*index].0.weight.get()));
        let Some(poorest) = poorest else { break };
        got[poorest] += 1;
    }
    got
}

#[test]
fn budget_arrives_at_the_naive_split_from_any_state() {
    let mut random = SplitMix64::new(17);
    for _ in 0..40 {
        let vms: Vec<(VmShare, Tame)> = (0..5)
            .map(|_| {
                let share = share(
                    100 * (1 + u32::try_from(random.below(4)).unwrap()),
                    100 + random.below(1000),
                );
                let mut vm = tame(9000, 1000 + random.below(4000), random.below(1900));
                vm.refaulted = Bytes::mib(500);
                (share, vm)
            })
            .collect();
        let mut host = Host::new(plan());
        for (id, (share, vm)) in (0..).zip(&vms) {
            host = host.with(id, *share, *vm);
        }
        host.steps(400);
        for (id, wanted) in (0..).zip(naive_split(9600, &vms)) {
            let got = host.target(id);
            let (deadband, resident) = (wanted * 17 / 1000 + 60, host.vms[&id].resident.0 >> 20);
            let total: u64 = vms.iter().map(|(_, vm)| vm.working_set.0 >> 20).sum();
            if total > 9600 {
                assert!(
                    got.abs_diff(wanted) <= deadband,
                    "VM {id}: {got} for {wanted} of {vms:?}"
                );
            } else {
                assert!(
                    resident + deadband >= wanted,
                    "VM {id}: {resident} for {wanted}"
                );
            }
        }
        let settled = host.lowered;
        host.steps(100);
        assert!(host.lowered.less(settled) <= Bytes::mib(1), "still moving");
    }
}
