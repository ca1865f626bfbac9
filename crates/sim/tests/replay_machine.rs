// SPDX-License-Identifier: Apache-2.0
//! The replay of one VM against one that goes millisecond by millisecond, and small runs whose outcome
//! can be told by hand.

use pagetide_addr::{Access, DeviceId, SectionNo};
use pagetide_policy::{
    candidates::Ready,
    prefetch::{Prefetched, Rest},
    protect::{Fate, Protector, Touch},
    reclaim::{
        Attempt, Evicted, Eviction, Order, ReclaimLoop, Sections, Selection, Situation, Unmapped,
    },
    set_times::SetTimes,
    victims::{Taken, Then},
    watermarks::Headroom,
};
use pagetide_sim::replay::{
    Actor, DmaTouches, ReplayAccess, ReplayError, Service, Start, VmAccount, VmParams, VmReplay,
};
use proptest::prelude::*;
use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
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
        dma: DmaTouches::Seen,
        set_times: SetTimes::QUICK,
        busy_sections: 0,
        capacity_every: None,
        oldest_first: Vec::new(),
    }
}

fn run(params: VmParams, limit: u64, accesses: &[ReplayAccess], end: Duration) -> VmAccount {
    let accesses = accesses.to_vec();
    let mut vm = VmReplay::new(params, Box::new(accesses.into_iter())).unwrap();
    vm.set_limit(Some(limit));
    vm.run_until(end).unwrap();
    vm.account()
}

/// [`run`], with the limit from 20 s on: by then heat is known.
fn run_limited_later(
    params: VmParams,
    limit: u64,
    accesses: &[ReplayAccess],
    end: Duration,
) -> VmAccount {
    let accesses = accesses.to_vec();
    let mut vm = VmReplay::new(params, Box::new(accesses.into_iter())).unwrap();
    vm.run_until(Duration::from_secs(20)).unwrap();
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
    protected_section_ms: u64,
    ahead: u64,
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
            protected_section_ms: u64::try_from(protected_ms).unwrap(),
            ahead: account.swapped_in_ahead,
            first_faults: account.devices.iter().map(|d| d.first_faults).sum(),
        }
    }
}

/// The memory of a VM, as sets of sections.
#[derive(Default)]
struct Pages {
    now_ms: u64,
    limit: i64,
    present: BTreeSet<SectionNo>,
    /// Touched since they were unmapped.
    mapped: BTreeSet<SectionNo>,
    /// Touched since the last sweep.
    touched: BTreeSet<SectionNo>,
    reserve: Vec<Ready>,
    gone: Vec<SectionNo>,
    /// When fills without room have waited long enough, in milliseconds.
    waiting: Vec<u64>,
    counts: Counts,
}

impl Pages {
    fn now(&self) -> Duration {
        Duration::from_millis(self.now_ms)
    }

    fn free(&self) -> i64 {
        self.limit - i64::try_from(self.present.len()).unwrap() * SECTION_PAGES
    }
}

impl Sections for Pages {
    type Stop = Infallible;

    /// It hears of no fill: every section without pages is examined.
    fn present_pages(&self, section: SectionNo) -> u64 {
        u64::from(self.present.contains(&section)) * 16
    }

    fn evict(&mut self, section: SectionNo, _: u64) -> Attempt<Infallible> {
        let present_pages = self.present_pages(section);
        let is_mapped = self.mapped.contains(&section);
        let mut taken = Taken {
            pages: 0,
            then: if is_mapped { Then::Next } else { Then::Emptied },
        };
        if !is_mapped && self.present.remove(&section) {
            taken.pages = present_pages;
            self.touched.remove(&section);
            self.counts.evicted += 1;
            self.gone.push(section);
            if self.free() >= 0 {
                self.waiting.clear();
            }
        }
        Attempt::Done(Evicted {
            taken,
            present_pages,
            mapped_pages: u64::from(is_mapped) * present_pages,
            stop: None,
        })
    }

    fn unmap(&mut self, sections: &[SectionNo]) -> Result<Unmapped, Infallible> {
        self.mapped.retain(|section| !sections.contains(section));
        Ok(Unmapped {
            sections: sections.to_vec(),
            at: self.now(),
        })
    }

    fn offer(&mut self, ready: Vec<Ready>) {
        self.reserve = ready;
    }

    fn swap_in(&mut self, section: SectionNo, _: u64) -> Option<Prefetched> {
        let is_absent = !self.present.contains(&section);
        let has_room = self.free() >= SECTION_PAGES;
        let (pages, rest) = match (is_absent, has_room) {
            (true, true) => (16, Rest::None),
            (true, false) => (0, Rest::Some),
            (false, _) => (0, Rest::None),
        };
        if pages > 0 {
            self.present.insert(section);
            self.counts.ahead += 1;
        }
        Some(Prefetched { pages, rest })
    }
}

/// A VM that does everything when a millisecond says so.
struct Naive {
    pages: Pages,
    selection: Selection,
    decisions: ReclaimLoop,
    /// When the loop goes on, and whether it may be woken before.
    loop_ms: (u64, bool),
    protector: Protector,
    dma: DmaTouches,
    swept_ms: Option<u64>,
    seen_by_devices: BTreeSet<SectionNo>,
}

impl Naive {
    fn new(params: &VmParams, limit: u64) -> Self {
        let all = (0..params.sections).map(SectionNo);
        let mut protector = Protector::new(&params.policy, params.sections);
        protector.set_times(params.set_times);
        let mut selection = Selection::default();
        selection.spare(protector.protected().clone());
        selection.follow(all.clone());
        Self {
            pages: Pages {
                limit: i64::try_from(limit).unwrap() * SECTION_PAGES,
                present: all.collect(),
                ..Pages::default()
            },
            selection,
            decisions: ReclaimLoop::new(0),
            loop_ms: (0, true),
            protector,
            dma: params.dma,
            swept_ms: None,
            seen_by_devices: BTreeSet::new(),
        }
    }

    fn run(mut self, accesses: &[ReplayAccess], end_ms: u64) -> Counts {
        self.wake();
        self.tell();
        for ms in 0..=end_ms {
            self.pages.now_ms = ms;
            self.pass();
            let now = self.pages.now();
            let is_now = |access: &&ReplayAccess| access.at == now && ms < end_ms;
            for access in accesses.iter().filter(is_now) {
                self.touch(access);
            }
        }
        self.pages.counts
    }

    fn pass(&mut self) {
        let (ms, now) = (self.pages.now_ms, self.pages.now());
        if ms.is_multiple_of(1000) {
            // What is held at a look was held since the last one.
            let since = if ms == 0 { 0 } else { 1000 };
            let protected = self.protector.protected().len();
            self.pages.counts.protected_section_ms += since * protected;
            self.protector.passed(now);
        }
        if ms.is_multiple_of(1000) {
            self.wake();
        }
        let late = self.pages.waiting.iter().filter(|at| **at <= ms).count();
        self.pages.waiting.drain(..late);
        self.pages.counts.over_limit += late as u64;
        if ms >= self.loop_ms.0 {
            self.go_on();
        }
        self.tell();
    }

    fn is_low(&self) -> bool {
        self.pages.free() < self.pages.limit * 15 / 1000
    }

    fn touch(&mut self, access: &ReplayAccess) {
        let section = access.section;
        let is_away = !self.pages.present.contains(&section);
        match access.actor {
            Actor::Cpu => self.pages.counts.cpu_faults += u64::from(is_away),
            Actor::Device(device, _) => {
                let counts = &mut self.pages.counts;
                *counts.faults.entry(device).or_default() += u64::from(is_away);
                let is_first = self.seen_by_devices.insert(section);
                counts.first_faults += u64::from(is_away && is_first);
                if is_away {
                    let now = self.pages.now();
                    self.protector.fate(section, Fate::Faulted, now);
                }
            }
        }
        let trace = match access.actor {
            Actor::Cpu => DmaTouches::Seen,
            Actor::Device(..) => self.dma,
        };
        if is_away {
            self.fill(section, trace);
            self.tell();
        }
        if trace == DmaTouches::Seen {
            self.pages.touched.insert(section);
            self.pages.mapped.insert(section);
        }
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

    fn fill(&mut self, section: SectionNo, trace: DmaTouches) {
        let now = self.pages.now();
        for _ in 0..4 {
            if self.pages.free() >= SECTION_PAGES {
                break;
            }
            let ready = self.pages.reserve.iter();
            let Some(at) = ready.clone().position(|one| one.within.contains(&now)) else {
                break;
            };
            let ready = self.pages.reserve.remove(at).section;
            if self.protector.protected().contains(ready) {
                continue;
            }
            let Attempt::Done(evicted) = self.pages.evict(ready, 16) else {
                panic!("nobody else evicts");
            };
            if let Some(after) = evicted.after(u64::MAX) {
                self.selection.evicted_elsewhere(ready, after);
            }
        }
        if self.pages.free() < SECTION_PAGES {
            let at = self.pages.now_ms + 100;
            self.pages.waiting.push(at);
        }
        self.pages.present.insert(section);
        self.pages.mapped.insert(section);
        if trace == DmaTouches::Seen {
            self.pages.touched.insert(section);
        }
        self.wake();
    }

    fn wake(&mut self) {
        if self.loop_ms.1 && self.is_low() {
            self.go_on();
        }
    }

    fn go_on(&mut self) {
        let now = self.pages.now();
        loop {
            let order = self.decisions.next(&Situation {
                now,
                headroom: Headroom::Limited {
                    limit_pages: self.pages.limit,
                    free_pages: self.pages.free(),
                },
                eviction: Eviction::Allowed,
                sweeps: self.pages.counts.scans,
                requested_pages: None,
                wanted_back: self.selection.wanted_back(),
                demotion_in: None,
            });
            let until = |time: Duration| {
                self.pages.now_ms + u64::try_from(time.as_millis()).expect("not for ever")
            };
            match order {
                Order::Wait(time) => {
                    self.loop_ms = (until(time), true);
                    return;
                }
                Order::Rest(time) => {
                    self.loop_ms = (until(time), false);
                    return;
                }
                // There is a limit: then sweeps are 5 s apart.
                Order::Sample(_) => {
                    let is_due = |at| self.pages.now_ms >= at + 5000;
                    if self.swept_ms.is_none_or(is_due) {
                        self.sweep();
                    }
                }
                Order::Sweep { .. } => self.sweep(),
                Order::TryAgain => self.selection.try_again(&mut self.pages),
                Order::Evict(order) => {
                    let (pages, reach, need) = (order.pages, order.reach, order.need);
                    let pass = (self.selection).reclaim(now, pages, reach, need, &mut self.pages);
                    self.decisions.passed(&pass);
                }
                Order::KeepReady { pages } => {
                    let Ok(()) = self.selection.keep_ready(now, pages, &mut self.pages);
                }
                Order::SwapIn { wanted, pages } => {
                    let filled = (self.selection).swap_in(now, wanted, pages, &mut self.pages);
                    self.decisions.swapped_in(filled);
                }
                _ => {}
            }
        }
    }

    /// Policies hear of evictions when they are over.
    fn tell(&mut self) {
        for section in std::mem::take(&mut self.pages.gone) {
            let now = self.pages.now();
            self.protector.fate(section, Fate::Evicted, now);
        }
    }

    fn sweep(&mut self) {
        self.pages.counts.scans += 1;
        let mut touched = std::mem::take(&mut self.pages.touched);
        // One that is kept unmapped is in use if it is mapped again.
        touched.retain(|s| self.pages.mapped.contains(s) || !self.selection.stands(*s));
        for section in &touched {
            if self.selection.stands(*section) {
                self.selection.in_use(*section);
            }
        }
        let now = self.pages.now();
        self.selection.swept(now, touched, &mut self.pages);
        self.swept_ms = Some(self.pages.now_ms);
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
        ],
        dma in prop_oneof![Just(DmaTouches::Seen), Just(DmaTouches::Unseen)],
    ) {
        let params = VmParams { dma, ..params(100, policy) };
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
        let account = run_limited_later(params(100, policy), 94, &accesses, end);
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
