// SPDX-License-Identifier: Apache-2.0
//! The replay of one VM against one that goes millisecond by millisecond, and small runs whose outcome
//! can be told by hand.

use pagetide_addr::{Access, DeviceId, SectionNo};
use pagetide_policy::{
    protect::{Fate, Protector, Touch},
    victims::{Need, Reach, Step, Taken, Then, UNMAPPED_MIN, Victims, passes},
};
use pagetide_sim::replay::{
    Actor, ReplayAccess, ReplayError, Service, Start, VmAccount, VmParams, VmReplay,
};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

const SECTION: u64 = 64 << 10;
const SECTION_PAGES: i64 = 16;
/// One whose times suit runs of a few minutes.
const QUICK_ADP: &str = "adp:promote-after=10s,scan-every=5s,demote-after=5s";

fn params(sections: u64, policy: &str) -> VmParams {
    VmParams {
        sections,
        section_bytes: SECTION,
        start: Start::AllPresent,
        policy: policy.parse().unwrap(),
        capacity_every: None,
    }
}

fn run(params: VmParams, limit: u64, accesses: &[ReplayAccess], end: Duration) -> VmAccount {
    let accesses = accesses.to_vec();
    let mut vm = VmReplay::new(params, Box::new(accesses.into_iter())).unwrap();
    vm.set_limit(Some(limit));
    vm.run_until(end).unwrap();
    vm.account()
}

fn dma(device: u32, service: Service) -> Actor {
    Actor::Device(DeviceId(device), service)
}

fn access(at: Duration, actor: Actor, section: u64) -> ReplayAccess {
    ReplayAccess {
        at,
        actor,
        section: SectionNo(section),
        access: Access::Write,
        bytes: 4096,
    }
}

/// What the naive machine counts.
#[derive(PartialEq, Eq, Default, Debug)]
struct Counts {
    faults: BTreeMap<DeviceId, u64>,
    cpu_faults: u64,
    evicted: u64,
    scans: u64,
    over_limit: u64,
    bring_backs: u64,
    refused: u64,
    wasted: u64,
    protected_section_ms: u64,
    brought_back_section_ms: u64,
    first_faults: u64,
}

impl Counts {
    fn of(account: &VmAccount) -> Self {
        let faults = account.devices.iter().map(|d| (d.device, d.faults));
        let protected_ms = account.protected.section_ns / 1_000_000;
        Self {
            faults: faults.collect(),
            cpu_faults: account.cpu_faults,
            evicted: account.evicted_sections,
            scans: account.scans,
            over_limit: account.over_limit_fills,
            bring_backs: account.bring_backs,
            refused: account.refused_bring_backs,
            wasted: account.wasted_bring_backs,
            protected_section_ms: u64::try_from(protected_ms).unwrap(),
            brought_back_section_ms: u64::try_from(account.brought_back.section_ns / 1_000_000)
                .unwrap(),
            first_faults: account.devices.iter().map(|d| d.first_faults).sum(),
        }
    }
}

/// A VM that does everything when a millisecond says so.
struct Naive {
    now_ms: u64,
    limit: i64,
    present: BTreeSet<SectionNo>,
    touched: BTreeSet<SectionNo>,
    brought: BTreeSet<SectionNo>,
    gone: Vec<SectionNo>,
    victims: Victims,
    protector: Protector,
    scan_ms: u64,
    steps: Option<(u64, VecDeque<Step>)>,
    wishes: VecDeque<SectionNo>,
    turn_ms: Option<u64>,
    has_looked_at_empty: bool,
    seen_by_devices: BTreeSet<SectionNo>,
    counts: Counts,
}

impl Naive {
    fn new(params: &VmParams, limit: u64) -> Self {
        let all = (0..params.sections).map(SectionNo);
        let mut victims = Victims::default();
        victims.follow(all.clone());
        Self {
            now_ms: 0,
            limit: i64::try_from(limit).unwrap() * SECTION_PAGES,
            present: all.collect(),
            touched: BTreeSet::new(),
            brought: BTreeSet::new(),
            gone: Vec::new(),
            victims,
            protector: Protector::new(&params.policy, params.sections),
            scan_ms: 0,
            steps: None,
            wishes: VecDeque::new(),
            turn_ms: None,
            has_looked_at_empty: false,
            seen_by_devices: BTreeSet::new(),
            counts: Counts::default(),
        }
    }

    fn now(&self) -> Duration {
        Duration::from_millis(self.now_ms)
    }

    fn run(mut self, accesses: &[ReplayAccess], end_ms: u64) -> Counts {
        self.keep();
        self.tell();
        for ms in 0..=end_ms {
            self.now_ms = ms;
            self.pass();
            let now = self.now();
            let is_now = |access: &&ReplayAccess| access.at == now && ms < end_ms;
            for access in accesses.iter().filter(is_now) {
                self.touch(access);
            }
        }
        self.counts
    }

    fn pass(&mut self) {
        if self.now_ms.is_multiple_of(1000) {
            // What is held at a look was held since the last one.
            let since = if self.now_ms == 0 { 0 } else { 1000 };
            self.counts.protected_section_ms += since * self.protector.protected().len();
            self.counts.brought_back_section_ms += since * self.brought.len() as u64;
            self.protector.passed(self.now());
            self.wishes.extend(self.protector.take_bring_backs());
            assert!(self.wishes.len() <= 2048, "there are but 100 sections");
            if !self.wishes.is_empty() && self.turn_ms.is_none() {
                self.turn_ms = Some(self.now_ms);
            }
            self.keep();
        }
        if self.now_ms >= self.scan_ms {
            self.scan();
        }
        if self
            .steps
            .as_ref()
            .is_some_and(|(at, _)| self.now_ms >= *at)
        {
            let (_, steps) = self.steps.take().unwrap();
            self.reclaim(steps);
        }
        self.tell();
        if self.turn_ms == Some(self.now_ms) {
            self.serve_wishes();
            self.turn_ms = (!self.wishes.is_empty()).then_some(self.now_ms + 50);
            self.keep();
            self.tell();
        }
    }

    fn serve_wishes(&mut self) {
        let mut pages = 0;
        while pages < 1024 {
            let low = self.is_low();
            let Some(section) = self.wishes.pop_front() else {
                return;
            };
            if low {
                // All that are left come to nothing: no page of them counts.
                self.counts.refused += 1;
                let now = self.now();
                self.protector.fate(section, Fate::NotBroughtBack, now);
            } else if self.present.contains(&section) || self.free() < SECTION_PAGES {
                self.counts.refused += 1;
                let now = self.now();
                self.protector.fate(section, Fate::NotBroughtBack, now);
                pages += 1;
            } else {
                self.present.insert(section);
                self.brought.insert(section);
                self.counts.bring_backs += 1;
                pages += SECTION_PAGES;
            }
        }
    }

    fn is_low(&self) -> bool {
        self.free() < self.limit * 15 / 1000
    }

    fn touch(&mut self, access: &ReplayAccess) {
        let section = access.section;
        let is_away = !self.present.contains(&section);
        match access.actor {
            Actor::Cpu => self.counts.cpu_faults += u64::from(is_away),
            Actor::Device(device, _) => {
                *self.counts.faults.entry(device).or_default() += u64::from(is_away);
                let is_first = self.seen_by_devices.insert(section);
                self.counts.first_faults += u64::from(is_away && is_first);
                if is_away {
                    self.protector.fate(section, Fate::Faulted, self.now());
                }
            }
        }
        if is_away {
            self.fill(section);
            self.tell();
        }
        self.touched.insert(section);
        self.brought.remove(&section);
        if let Actor::Device(device, _) = access.actor {
            let touch = Touch {
                section,
                at: access.at,
                access: access.access,
                bytes: access.bytes,
            };
            self.protector.touched(device, touch);
        }
    }

    fn free(&self) -> i64 {
        self.limit - i64::try_from(self.present.len()).unwrap() * SECTION_PAGES
    }

    fn fill(&mut self, section: SectionNo) {
        if self.free() < SECTION_PAGES {
            self.press();
            self.counts.over_limit += u64::from(self.free() < SECTION_PAGES);
        }
        self.present.insert(section);
        self.touched.insert(section);
        self.keep();
    }

    fn keep(&mut self) {
        if self.is_low() {
            self.press();
        }
    }

    fn press(&mut self) {
        if self.steps.is_none() {
            self.reclaim(passes(Need::Limit).collect());
        }
    }

    fn reclaim(&mut self, mut steps: VecDeque<Step>) {
        while self.free() < self.limit * 30 / 1000 {
            match steps.pop_front() {
                None => return,
                Some(Step::Scan) => {
                    self.scan();
                    self.steps = Some((self.now_ms + 50, steps));
                    assert_eq!(UNMAPPED_MIN.as_millis(), 50);
                    return;
                }
                Some(Step::Take(Reach::Protected)) if !self.is_low() => {}
                Some(Step::Take(reach)) => {
                    self.take(reach);
                    let is_short = self.free() < self.limit * 30 / 1000;
                    if reach == Reach::AllResting && is_short && !self.has_looked_at_empty {
                        self.has_looked_at_empty = true;
                        let present = &self.present;
                        let has_pages = |section| present.contains(&section);
                        self.victims.look_at_empty(u64::MAX, has_pages);
                        self.take(reach);
                    }
                }
            }
        }
    }

    fn take(&mut self, reach: Reach) {
        let wanted = u64::try_from(self.limit * 30 / 1000 - self.free()).unwrap();
        let mut gone = Vec::new();
        let now = self.now();
        let protected = self.protector.protected().clone();
        let (present, touched) = (&mut self.present, &self.touched);
        self.victims.reclaim(
            now,
            wanted,
            reach,
            |section| protected.contains(section),
            |section, _| {
                if touched.contains(&section) || !present.remove(&section) {
                    return Taken {
                        pages: 0,
                        then: Then::Next,
                    };
                }
                gone.push(section);
                Taken {
                    pages: 16,
                    then: Then::Emptied,
                }
            },
        );
        for section in gone {
            self.counts.evicted += 1;
            self.counts.wasted += u64::from(self.brought.remove(&section));
            self.gone.push(section);
        }
    }

    /// Policies hear of evictions when they are over.
    fn tell(&mut self) {
        for section in std::mem::take(&mut self.gone) {
            self.protector.fate(section, Fate::Evicted, self.now());
        }
    }

    fn scan(&mut self) {
        self.counts.scans += 1;
        let touched = std::mem::take(&mut self.touched);
        self.victims.scanned(self.now(), touched);
        let present = &self.present;
        let has_pages = |section| present.contains(&section);
        self.victims.look_at_empty(256, has_pages);
        self.has_looked_at_empty = false;
        self.scan_ms = self.now_ms + 5000;
    }
}

/// Accesses in order of time: mostly short pauses, now and then a long one, some sections liked more.
fn accesses() -> impl Strategy<Value = Vec<ReplayAccess>> {
    let pause = prop_oneof![8 => 0_u64..200, 3 => 500_u64..4000, 1 => 30_000_u64..70_000];
    let section = prop_oneof![3 => 0_u64..10, 2 => 10_u64..100];
    let one = (pause, 0_u32..4, section);
    proptest::collection::vec(one, 1..250).prop_map(|steps| {
        let mut at = Duration::ZERO;
        let step = |(pause_ms, actor, section)| {
            at += Duration::from_millis(pause_ms);
            let actor = match actor {
                0 => Actor::Cpu,
                3 => dma(3, Service::Network),
                disk => dma(disk, Service::Block),
            };
            access(at, actor, section)
        };
        steps.into_iter().map(step).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn machine_counts_what_one_that_goes_by_milliseconds_counts(
        accesses in accesses(),
        limit in 5_u64..100,
        policy in prop_oneof![
            Just("none"),
            Just("lru:share=0.1"),
            Just(QUICK_ADP),
            Just("adaptive"),
        ],
    ) {
        let params = params(100, policy);
        let end_ms = accesses.last().map_or(0, |a| u64::try_from(a.at.as_millis()).unwrap()) / 1000 * 1000 + 3000;
        let account = run(params.clone(), limit, &accesses, Duration::from_millis(end_ms));
        let mut expected = Naive::new(&params, limit).run(&accesses, end_ms);
        let counts = Counts::of(&account);
        // Devices that never faulted are there, too.
        for device in counts.faults.keys() {
            expected.faults.entry(*device).or_default();
        }
        prop_assert_eq!(counts, expected);
        prop_assert_eq!(account.resident.max_sections, 100);
    }
}

/// A disk touches section 7 every four minutes. CPUs use 90 others all the time, and one of six more
/// every 20 s, for which something must go.
fn lonely_section() -> Vec<ReplayAccess> {
    let mut all = Vec::new();
    for second in 0..1000 {
        let at = Duration::from_secs(second);
        if second % 240 == 0 {
            all.push(access(at, dma(1, Service::Block), 7));
        }
        if second % 3 == 0 {
            all.extend((10..100).map(|section| access(at, Actor::Cpu, section)));
        }
        if second % 20 == 18 {
            all.push(access(at, Actor::Cpu, second / 20 % 6));
        }
    }
    all
}

#[test]
fn section_that_is_touched_now_and_then_faults_each_time_unless_it_is_protected() {
    let accesses = lonely_section();
    let end = Duration::from_secs(1000);
    let faults = |policy| {
        let account = run(params(100, policy), 94, &accesses, end);
        let device = &account.devices[0];
        let seen = (device.touches, device.footprint_sections);
        assert_eq!((seen, device.long_reuses), ((5, 1), 0));
        (device.faults, device.protected.max_sections)
    };
    assert_eq!(faults("none"), (4, 0));
    assert_eq!(faults("lru"), (0, 1));
    assert_eq!(faults(QUICK_ADP), (0, 1));
}

#[test]
fn pair_of_touches_is_a_long_reuse_from_just_over_300_seconds() {
    let touch = |at_ms, device| {
        access(
            Duration::from_millis(at_ms),
            dma(device, Service::Network),
            3,
        )
    };
    let accesses = [
        touch(0, 1),
        touch(1000, 2),
        touch(300_000, 1),
        touch(301_001, 2),
        touch(700_000, 1),
    ];
    let account = run(params(10, "none"), 10, &accesses, Duration::from_secs(800));
    let reuses: Vec<u64> = account.devices.iter().map(|d| d.long_reuses).collect();
    assert_eq!(reuses, [1, 1]);
    assert_eq!(account.faults(Service::Network), 0);
}

#[test]
fn memory_that_never_held_anything_is_no_fault_when_it_is_touched_first() {
    let accesses: Vec<_> = (0..10)
        .map(|section| {
            access(
                Duration::from_secs(section),
                dma(1, Service::Block),
                section,
            )
        })
        .collect();
    let mut fresh = params(10, "none");
    fresh.start = Start::Untouched;
    let account = run(fresh, 20, &accesses, Duration::from_secs(20));
    assert_eq!(account.faults(Service::Block), 0);
    assert_eq!(account.resident.max_sections, 10);
}

#[test]
fn access_outside_the_vm_or_back_in_time_is_an_error_with_its_number() {
    let at = Duration::from_secs;
    let run = |accesses: Vec<ReplayAccess>| {
        let mut vm = VmReplay::new(params(10, "none"), Box::new(accesses.into_iter())).unwrap();
        vm.run_until(at(100)).unwrap_err()
    };
    let outside = run(vec![
        access(at(1), Actor::Cpu, 9),
        access(at(2), Actor::Cpu, 10),
    ]);
    assert!(matches!(
        outside,
        ReplayError::Outside {
            access: 1,
            section: 10,
            sections: 10,
            ..
        }
    ));
    let back = run(vec![
        access(at(2), Actor::Cpu, 1),
        access(at(1), Actor::Cpu, 1),
    ]);
    assert!(matches!(back, ReplayError::Backwards { access: 1, .. }));
    assert!(VmReplay::new(params(0, "none"), Box::new(std::iter::empty())).is_err());
}

#[test]
fn more_devices_than_a_vm_may_have_are_an_error() {
    let touch = |device: u32| {
        access(
            Duration::from_millis(device.into()),
            dma(device, Service::Block),
            1,
        )
    };
    let accesses: Vec<_> = (0..5000).map(touch).collect();
    let mut vm = VmReplay::new(params(10, "none"), Box::new(accesses.into_iter())).unwrap();
    let error = vm.run_until(Duration::from_secs(10)).unwrap_err();
    let ReplayError::Devices { device, max, .. } = error else {
        panic!("{error}");
    };
    assert_eq!((device, max), (4096, 4096));
}

#[test]
fn fault_is_a_first_one_only_if_no_device_touched_the_section_before() {
    let mut accesses = lonely_section();
    let late = Duration::from_secs(999);
    accesses.push(access(late, dma(2, Service::Block), 8));
    let account = run(
        params(100, "none"),
        94,
        &accesses,
        Duration::from_secs(1000),
    );
    let seen = |index: usize| {
        let device: &pagetide_sim::replay::DeviceAccount = &account.devices[index];
        (device.faults, device.first_faults)
    };
    // 8 was never touched at all, so it went first.
    assert_eq!((seen(0), seen(1)), ((4, 0), (1, 1)));
}
