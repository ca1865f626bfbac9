// SPDX-License-Identifier: Apache-2.0
//! The daemon's side of the golden trace of reclaim orders: the events of the trace happen to the
//! daemon's own memory, pool, limit and reclaimer, over RAM that is a map. The replay's side
//! is in `pagetide-sim`; both compare with the same file.
//!
//! Only the measurement of heat is made like the replay's: a sweep covers all sections, and sweeps are
//! as far apart as they would be if they cost nothing.

use pagetide_addr::{Access, DeviceId, PAGE_BYTES, PageNo, PageSet, SECTION_PAGES, SectionNo};
use pagetide_gmem::{
    AddressSpace, Cause, Fault, MemoryParts, RegionRequest, Wait,
    fake::{self, FakeMmu, FakePlace},
};
use pagetide_policy::{
    reclaim::{Eviction, Order, ReclaimLoop, Situation},
    sampling::{Look, SWEEP_WANTED, Sampled, Touched},
    tracker::{AccessTracker, TrackerError},
};
use pagetide_swap::{Evictor, HeatCost, Limit, Pace, Pool, PoolStore, Reclaimer, reclaim::Took};
use std::{
    collections::BTreeSet,
    fmt::Write,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

/// Events, and after each the orders that they lead to.
const GOLDEN: &str = include_str!("../../policy/tests/golden/reclaim.txt");
/// Sections of the VM in the trace.
const SECTIONS: u64 = 240;
const PAGES: u64 = SECTIONS * SECTION_PAGES;

#[derive(Default)]
struct State {
    /// Sections touched since they were unmapped.
    mapped: BTreeSet<SectionNo>,
    /// Sections touched since the last sweep.
    touched: BTreeSet<SectionNo>,
    log: Vec<String>,
}

/// What the users of the RAM have touched.
#[derive(Default)]
struct Users(Mutex<State>);

impl Users {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

fn all_pages(section: SectionNo) -> PageSet {
    PageSet::of_range(section, section.first_page().run(SECTION_PAGES))
}

impl AccessTracker for Users {
    fn sample(&self, looks: &[Look]) -> Result<Sampled, TrackerError> {
        let state = self.lock();
        let of = |look: &Look| Touched {
            cpu: match state.touched.contains(&look.section) {
                true => look.asked,
                false => PageSet::EMPTY,
            },
            dma: PageSet::EMPTY,
        };
        Ok(Sampled {
            touched: looks.iter().map(of).collect(),
            ..Sampled::default()
        })
    }

    fn take_out(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        let mut state = self.lock();
        state.log.push(format!("unmap {sections:?}"));
        state.mapped.retain(|section| !sections.contains(section));
        Ok(vec![Touched::default(); sections.len()])
    }

    fn mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError> {
        match self.lock().mapped.contains(&section) {
            true => Ok(all_pages(section)),
            false => Ok(PageSet::EMPTY),
        }
    }
}

/// One VM of the daemon in virtual time.
struct Rig {
    place: Arc<FakePlace>,
    users: Arc<Users>,
    space: Arc<AddressSpace>,
    limit: Arc<Limit>,
    reclaimer: Reclaimer,
    decisions: ReclaimLoop,
    loop_at: Duration,
    is_waiting: bool,
    swept_at: Option<Duration>,
    pace: TestPace,
}

/// What the scheduler says to the thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TestPace {
    Steady,
    /// It has to pause as soon as it can, each time.
    Halting,
}

impl Pace for TestPace {
    fn go_on(&self) -> bool {
        true
    }

    fn may_stay(&self) -> bool {
        *self == Self::Steady
    }
}

impl Rig {
    fn new(folder: &std::path::Path, pace: TestPace) -> Self {
        let place = Arc::new(FakePlace::default());
        place.put_zeros(PageNo(0).run(PAGES));
        let users = Arc::new(Users::default());
        let limit = Arc::new(Limit::new());
        // No thread waits here.
        limit.stop();
        let pool = Pool::create_empty(&folder.join("golden.pool"), PAGES, 1, b"").unwrap();
        let store = Arc::new(PoolStore::new(Arc::new(pool)));
        let parts = MemoryParts {
            store: Arc::clone(&store) as _,
            admission: Arc::clone(&limit) as _,
            ..fake::parts(PAGES, Arc::clone(&place) as _)
        };
        let space = fake::space(parts, DeviceId::VCPUS, Arc::new(FakeMmu::vcpus()));
        let all = RegionRequest::of_bytes(PAGES * PAGE_BYTES);
        space.alloc(&all).unwrap();
        let evictor = Evictor::new(Arc::clone(space.memory().unwrap()), store);
        let tracker = Arc::clone(&users);
        let cost = HeatCost::default();
        let mut reclaimer = Reclaimer::new(evictor, Arc::clone(&limit), tracker, cost);
        let told = Arc::clone(&users);
        reclaimer.tell(move |section, took| {
            assert_eq!(took, Took::Whole);
            told.lock().log.push(format!("evict {}", section.0));
        });
        Self {
            place,
            users,
            space,
            limit,
            reclaimer,
            decisions: ReclaimLoop::new(0),
            loop_at: Duration::ZERO,
            is_waiting: true,
            swept_at: None,
            pace,
        }
    }

    fn set_limit(&mut self, sections: Option<u64>, now: Duration) {
        let limit = sections.map(|sections| sections * SECTION_PAGES);
        self.limit.put_right(limit, self.place.present_pages());
        self.wake(now);
    }

    fn touch(&mut self, section: SectionNo, now: Duration) {
        let first = section.first_page();
        let is_present = self.place.has(first);
        if !is_present {
            for part in 0..SECTION_PAGES / 16 {
                let fault = Fault {
                    device: DeviceId::VCPUS,
                    pages: first.plus(part * 16).run(16),
                    access: Access::Write,
                };
                self.space.fault(&Cause::Fault(fault), Wait::Here);
            }
        }
        let mut state = self.users.lock();
        state.mapped.insert(section);
        state.touched.insert(section);
        drop(state);
        if !is_present {
            self.wake(now);
        }
    }

    fn wake(&mut self, now: Duration) {
        if self.is_waiting && self.limit.headroom().is_below_low() {
            self.run(now);
        }
    }

    /// Carries out orders until the loop waits or rests.
    fn run(&mut self, now: Duration) {
        loop {
            let order = self.decisions.next(&Situation {
                now,
                headroom: self.limit.headroom(),
                eviction: Eviction::Allowed,
                sweeps: self.reclaimer.heat().sweeps,
                requested_pages: None,
                wanted_back: self.reclaimer.wanted_back(now),
                demotion_in: self.reclaimer.demotion_in(now),
            });
            let line = format!("{} {order:?}", now.as_millis());
            self.users.lock().log.push(line);
            match order {
                Order::Wait(time) | Order::Rest(time) => {
                    self.loop_at = now + time;
                    self.is_waiting = order == Order::Wait(time);
                    return;
                }
                Order::Sample(want) => {
                    let is_due = |at: Duration| now - at >= want.sweep_min(SWEEP_WANTED);
                    if self.swept_at.is_none_or(is_due) {
                        self.sweep(now);
                    }
                }
                Order::Sweep { .. } => self.sweep(now),
                Order::TryAgain => self.reclaimer.try_again(),
                Order::Evict(order) => {
                    let (pages, reach, need) = (order.pages, order.reach, order.need);
                    let pass = (self.reclaimer).reclaim(|| now, pages, reach, need, &self.pace);
                    assert!(pass.stopped.is_none(), "{pass:?}");
                    self.decisions.passed(&pass);
                }
                Order::KeepReady { pages } => {
                    self.reclaimer
                        .keep_ready(|| now, pages, &self.pace)
                        .unwrap();
                }
                Order::SwapIn { wanted, pages } => {
                    let filled = (self.reclaimer).swap_in(|| now, wanted, pages, &self.pace);
                    self.users.lock().log.push(format!("filled {filled}"));
                    self.decisions.swapped_in(filled);
                }
                _ => {}
            }
        }
    }

    fn sweep(&mut self, now: Duration) {
        self.reclaimer.sweep(|| now, || now, &self.pace).unwrap();
        self.users.lock().touched.clear();
        self.swept_at = Some(now);
    }

    fn take_log(&self, into: &mut String) {
        for line in self.users.lock().log.drain(..) {
            writeln!(into, "  {line}").unwrap();
        }
    }
}

/// The sections of `from-to`, or of one number.
fn sections(text: &str) -> impl Iterator<Item = SectionNo> {
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.parse::<u64>().unwrap();
    (number(from)..=number(to)).map(SectionNo)
}

#[test]
fn orders_to_the_daemon_are_those_of_the_golden_trace() {
    golden(TestPace::Steady);
}

#[test]
fn orders_are_the_same_for_a_thread_that_has_to_pause_after_every_few_pages() {
    golden(TestPace::Halting);
}

fn golden(pace: TestPace) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut rig = Rig::new(folder.path(), pace);
    let mut found = String::new();
    for event in GOLDEN.lines().filter(|line| !line.starts_with(' ')) {
        let words: Vec<&str> = event.split(' ').collect();
        let at = Duration::from_millis(words[0].parse().unwrap());
        while rig.loop_at <= at {
            rig.run(rig.loop_at);
        }
        rig.take_log(&mut found);
        writeln!(found, "{event}").unwrap();
        match words[1..] {
            ["limit", limit] => rig.set_limit(limit.parse().ok(), at),
            ["touch", touched] => sections(touched).for_each(|section| rig.touch(section, at)),
            _ => panic!("{event}"),
        }
        rig.take_log(&mut found);
    }
    let pairs = GOLDEN.lines().zip(found.lines());
    for (number, (golden, found)) in pairs.enumerate() {
        assert_eq!(golden, found, "line {}", number + 1);
    }
    assert_eq!(GOLDEN.lines().count(), found.lines().count());
}
