// SPDX-License-Identifier: Apache-2.0
//! Which pages are watched, and how fast: heat learned from samples.
//!
//! # Idea
//! To detect whether memory is in use it is unmapped, and its next user takes a small fault. Done to
//! all memory at once, that costs a busy VM two thirds of its speed. But it is enough to know which
//! *sections* are in use, and for that a few pages of each suffice: [`SAMPLE_PAGES`], chosen anew each
//! time. A *sweep* visits every section once:
//!
//! ```text
//!   section   0        1        2        3       …
//!   sweep 4   look,    look,    look,    look,        at the pages chosen in sweep 3,
//!             choose   choose   choose   choose       and others are unmapped
//!             └── as fast as the cost allows ──┘
//! ```
//! What a sample misses: in a section where one page in `n` is used between two sweeps, it finds a
//! use with probability `1 - (1 - 1/n)^8`: 0.66 for every eighth page, 0.02 for one page of
//! 512. Such a section sinks to the cold sets. It is then unmapped as a whole and checked once more
//! before any of it is evicted ([`crate::candidates`]); pages mapped again stay.
//!
//! # What it costs
//! Two accounts, both in CPU time, each filled by a share of a time ([`Pace`]):
//!
//! | account | filled by | pays for |
//! |---|---|---|
//! | the guest's | the VMM's CPU time | the faults of pages that came back; the unmapping |
//! | ours | wall-clock time | looking |
//!
//! A sweep continues while both have credit. It never takes longer than [`SWEEP_MAX`], whatever the
//! accounts hold, so that each section is sampled once in ten minutes and the first limit finds the
//! cold ones; and while there is no limit it takes [`SWEEP_IDLE`], after a few faster ones at the start.
//!
//! Hot sections cost most and reveal least, so they are sampled only in every [`HOT_SWEEPS`]th
//! sweep, and count as touched in the others.
//!
//! Times are durations since any fixed moment; nothing here is a clock or does I/O.

use crate::sets::{HotColdSets, Level};
use pagetide_addr::{PageNo, PageSet, SECTION_PAGES, SectionNo, to_usize};
use pagetide_random::SplitMix64;
use std::{collections::HashMap, time::Duration};

/// Pages of a section that are watched from one sweep to the next.
pub const SAMPLE_PAGES: usize = 8;
/// A sweep takes at least this long while cold sections are wanted, unless another time is set.
pub const SWEEP_WANTED: Duration = Duration::from_secs(5);
/// The same after an attach, until [`SWEEPS_TO_KNOW`] sweeps have been made: cold memory is known within a
/// minute where the cost allows it. The cost bounds sweeps of large or busy VMs to a slower pace.
pub const SWEEP_FIRST: Duration = Duration::from_secs(10);
/// After so many sweeps a section that was not touched is in the coldest set, with the times of
/// [`SetTimes::QUICK`](crate::set_times::SetTimes::QUICK).
pub const SWEEPS_TO_KNOW: u64 = 5;
/// The same as long as cold sections are not wanted.
pub const SWEEP_IDLE: Duration = Duration::from_secs(240);
/// No sweep takes longer, except for the time between two calls.
pub const SWEEP_MAX: Duration = Duration::from_secs(400);
/// A hot section is sampled once in this many sweeps.
pub const HOT_SWEEPS: u64 = 4;
/// Default share of time that fills an account, in millionths: half a percent.
pub const COST_PPM: u32 = 5_000;
/// An account holds at most this: a burst that does not slow a guest down.
const BURST_NS: i64 = 20_000_000;
/// A longer time between two calls counts as this much: the missed samples are not made up for at once.
const PASSED_MAX: Duration = Duration::from_secs(2);
/// Cost of a section to either account, until it is measured: 8 pages of 3 microseconds.
const SECTION_NS_GUESSED: u64 = 24_000;
/// A sleeping VMM counts as one that uses one part in this many of a CPU.
const ASLEEP_PARTS: u64 = 10;
/// Factor on our own time while memory is short.
const PRESSED_FACTOR: u64 = 4;

/// Pages of one section that were unmapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sample {
    count: u8,
    at: [u16; SAMPLE_PAGES],
}

impl Sample {
    /// Up to [`SAMPLE_PAGES`] of the pages of `section` that are `present`.
    fn choose(section: SectionNo, present: &PageSet, random: &mut SplitMix64) -> Self {
        let mut sample = Self::default();
        let wanted = present.len().min(SAMPLE_PAGES as u64);
        while u64::from(sample.count) < wanted {
            // Few pages are found faster by counting than by random draws.
            let page = if present.len() < SECTION_PAGES / 16 {
                let nth = random.index(to_usize(present.len()));
                present.pages(section).nth(nth)
            } else {
                let at = section.0 * SECTION_PAGES + random.below(SECTION_PAGES);
                Some(PageNo(at)).filter(|page| present.contains(*page))
            };
            if let Some(page) = page {
                sample.add((page.0 % SECTION_PAGES) as u16);
            }
        }
        sample
    }

    fn add(&mut self, at: u16) {
        let count = usize::from(self.count);
        if !self.at[..count].contains(&at) {
            self.at[count] = at;
            self.count += 1;
        }
    }

    fn pages(&self, section: SectionNo) -> PageSet {
        let mut pages = PageSet::EMPTY;
        for at in &self.at[..usize::from(self.count)] {
            pages.insert(section.first_page().plus(u64::from(*at)));
        }
        pages
    }
}

/// The sample to take of one section.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// The section.
    pub section: SectionNo,
    /// Its pages that are queried: unmapped in the last sweep.
    pub asked: PageSet,
    /// The pages to be unmapped after that.
    pub next: PageSet,
}

/// Pages of one section that were touched.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Touched {
    /// By the VMM: vCPUs and its own threads.
    pub cpu: PageSet,
    /// By devices' DMA.
    pub dma: PageSet,
}

impl Touched {
    /// By either.
    #[must_use]
    pub fn by_anybody(&self) -> PageSet {
        let mut all = self.cpu;
        all.unite(&self.dma);
        all
    }
}

/// Result of a sample.
#[derive(Clone, Default, Debug)]
pub struct Sampled {
    /// For each section: accesses by CPUs, of the pages queried; accesses by devices, of all pages.
    pub touched: Vec<Touched>,
    /// Pages unmapped.
    pub unmapped_pages: u64,
    /// CPU time of that, which the VMM's other CPUs lose by flushes of their TLBs, at most; and the time for
    /// which one of its threads stood still.
    pub unmapping: Duration,
}

/// One sweep after another over the sections of a VM.
#[derive(Debug)]
pub struct Sampler {
    random: SplitMix64,
    chosen: HashMap<SectionNo, Sample>,
    /// The sections still to be sampled in this sweep, the next one last.
    left: Vec<SectionNo>,
    touched: Vec<SectionNo>,
    sweeps: u64,
}

/// How a step of a sweep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SweepStep {
    /// There are more sections.
    GoesOn,
    /// All sections were sampled.
    Ended,
}

impl Sampler {
    /// A sampler whose choices follow from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            random: SplitMix64::new(seed),
            chosen: HashMap::new(),
            left: Vec::new(),
            touched: Vec::new(),
            sweeps: 0,
        }
    }

    /// True if a sweep is under way.
    #[must_use]
    pub fn is_sweeping(&self) -> bool {
        !self.left.is_empty()
    }

    /// Begins a sweep of these sections.
    pub fn begin(&mut self, sections: impl IntoIterator<Item = SectionNo>) {
        self.left.clear();
        self.left.extend(sections);
        self.left.reverse();
        self.touched.clear();
        self.sweeps += 1;
    }

    /// The next section of the sweep; hot ones out of turn count as touched and are skipped.
    pub fn next(&mut self, sets: &HotColdSets) -> Option<SectionNo> {
        loop {
            let section = self.left.pop()?;
            let is_turn = (section.0 + self.sweeps).is_multiple_of(HOT_SWEEPS);
            if is_turn || sets.level(section) != Some(Level::Hot) {
                return Some(section);
            }
            self.touched.push(section);
        }
    }

    /// The sample to take of `section`, whose `present` pages are given; none if there are none. At
    /// the first sample of a section, the pages queried are those to be unmapped: whether they were
    /// used at all.
    pub fn look(&mut self, section: SectionNo, present: &PageSet) -> Option<Look> {
        if present.is_empty() {
            self.chosen.remove(&section);
            return None;
        }
        let next = Sample::choose(section, present, &mut self.random);
        let asked = self.chosen.insert(section, next).unwrap_or(next);
        Some(Look {
            section,
            asked: asked.pages(section),
            next: next.pages(section),
        })
    }

    /// `section` was seen to be in use.
    pub fn touched(&mut self, section: SectionNo) {
        self.touched.push(section);
    }

    /// The sections that the sweep found in use, once it is over.
    pub fn end(&mut self) -> Option<Vec<SectionNo>> {
        (self.left.is_empty()).then(|| std::mem::take(&mut self.touched))
    }

    /// A sample failed: its pages may not be unmapped.
    pub fn failed(&mut self, look: &Look) {
        self.chosen.remove(&look.section);
    }

    /// Memory it takes, in bytes, about.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let entry = size_of::<(SectionNo, Sample)>() + 1;
        let sections = self.left.capacity() + self.touched.capacity();
        (self.chosen.capacity() * entry + sections * size_of::<SectionNo>()) as u64
    }

    /// Forgets sections that no longer exist.
    pub fn keep(&mut self, there: impl Fn(SectionNo) -> bool) {
        self.chosen.retain(|section, _| there(*section));
    }
}

/// How urgently heat must be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// It is not needed yet.
    Little,
    /// It is not needed yet, and little is known.
    First,
    /// There is a limit.
    Much,
    /// Memory is short.
    Pressed,
}

impl Want {
    /// A sweep takes at least this long, if it is to take at least `scan` while cold sections are wanted.
    #[must_use]
    pub const fn sweep_min(self, scan: Duration) -> Duration {
        match self {
            Self::Little => SWEEP_IDLE,
            Self::First => SWEEP_FIRST,
            Self::Much | Self::Pressed => scan,
        }
    }
}

/// The cost of a part of a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Time of the guest: faults, and a locked address space.
    pub guest: Duration,
    /// Our own time.
    pub own: Duration,
}

#[derive(Debug, Default)]
struct Account {
    credit_ns: i64,
    /// Cost of a section, a moving average.
    section_ns: u64,
}

impl Account {
    fn earn(&mut self, ns: u64) {
        let ns = i64::try_from(ns).unwrap_or(i64::MAX);
        self.credit_ns = self.credit_ns.saturating_add(ns).min(BURST_NS);
    }

    fn spend(&mut self, sections: u64, spent: Duration) {
        let ns = u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX);
        let debt = i64::try_from(ns).unwrap_or(i64::MAX);
        // Work that had to be done without credit does not count against later time.
        self.credit_ns = self.credit_ns.saturating_sub(debt).max(-BURST_NS);
        // Nor does one stall of the host count as the cost of sections.
        let each = (ns / sections.max(1)).min(8 * self.section_ns.max(1));
        self.section_ns = (7 * self.section_ns + each) / 8;
    }

    fn sections(&self) -> u64 {
        let credit = u64::try_from(self.credit_ns).unwrap_or(0);
        credit / self.section_ns.max(1)
    }
}

/// How many sections a sweep may advance by. See the module.
#[derive(Debug)]
pub struct Pace {
    share_ppm: u64,
    scan: Duration,
    guest: Account,
    own: Account,
    seen: Option<(Duration, Duration)>,
    /// Sections times nanoseconds left over, less than a whole section's.
    wanted_left: u128,
    owed_left: u128,
}

impl Pace {
    /// A pace whose accounts are filled by `share_ppm` millionths of the time.
    #[must_use]
    pub fn new(share_ppm: u32) -> Self {
        let full = || Account {
            credit_ns: BURST_NS,
            section_ns: SECTION_NS_GUESSED,
        };
        Self {
            share_ppm: share_ppm.into(),
            scan: SWEEP_WANTED,
            guest: full(),
            own: full(),
            seen: None,
            wanted_left: 0,
            owed_left: 0,
        }
    }

    /// From now on a sweep takes at least `scan` while cold sections are wanted.
    pub fn set_scan(&mut self, scan: Duration) {
        self.scan = scan;
    }

    /// Number of sections, out of `of`, that may be sampled now. `cpu` is the CPU time of the VMM
    /// since any fixed moment.
    pub fn sections(&mut self, now: Duration, cpu: Duration, of: u64, want: Want) -> u64 {
        let (then, cpu_then) = self.seen.replace((now, cpu)).unwrap_or((now, cpu));
        let passed = nanos(now.saturating_sub(then).min(PASSED_MAX));
        let used = nanos(cpu.saturating_sub(cpu_then));
        let factor = match want {
            Want::Pressed => PRESSED_FACTOR,
            Want::Little | Want::First | Want::Much => 1,
        };
        self.guest
            .earn(self.share_of(used.max(passed / ASLEEP_PARTS)));
        self.own.earn(self.share_of(passed) * factor);
        let wanted = portion(&mut self.wanted_left, of, passed, want.sweep_min(self.scan));
        let owed = portion(&mut self.owed_left, of, passed, SWEEP_MAX);
        // At the first call nothing is known and both accounts are full.
        let wanted = if passed == 0 { of } else { wanted };
        let affordable = self.guest.sections().min(self.own.sections());
        wanted.min(affordable).max(owed)
    }

    /// Accounts for `sections` samples.
    pub fn spend(&mut self, sections: u64, cost: Cost) {
        self.guest.spend(sections, cost.guest);
        self.own.spend(sections, cost.own);
    }

    fn share_of(&self, ns: u64) -> u64 {
        u64::try_from(u128::from(ns) * u128::from(self.share_ppm) / 1_000_000).unwrap_or(u64::MAX)
    }
}

/// The part of `of` sections that is due after `passed_ns` if all are due after `period`.
fn portion(left: &mut u128, of: u64, passed_ns: u64, period: Duration) -> u64 {
    let period = period.as_nanos().max(1);
    let whole = u128::from(of) * period;
    let due = (*left + u128::from(of) * u128::from(passed_ns)).min(whole);
    *left = due % period;
    u64::try_from(due / period).unwrap_or(of)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::to_usize;

    const SECOND: Duration = Duration::from_secs(1);

    fn set(section: SectionNo, at: impl IntoIterator<Item = u64>) -> PageSet {
        let mut set = PageSet::EMPTY;
        for at in at {
            set.insert(section.first_page().plus(at));
        }
        set
    }

    #[test]
    fn sample_is_of_pages_that_are_there_each_as_often_as_any_other() {
        let section = SectionNo(3);
        let mut random = SplitMix64::new(1);
        for present in [
            set(section, 0..512),
            set(section, (0..512).step_by(3)),
            set(section, (0..512).step_by(50)),
            set(section, [7, 511]),
        ] {
            let mut seen = [0_u32; 512];
            for _ in 0..4000 {
                let pages = Sample::choose(section, &present, &mut random).pages(section);
                assert_eq!(pages.len(), present.len().min(8));
                for page in pages.pages(section) {
                    assert!(present.contains(page));
                    seen[to_usize(page.0 % 512)] += 1;
                }
            }
            let expected = 4000.0 * 8.0_f64.min(present.len() as f64) / present.len() as f64;
            for page in present.pages(section) {
                let seen = f64::from(seen[to_usize(page.0 % 512)]);
                assert!(
                    (0.4..1.8).contains(&(seen / expected)),
                    "{page} {seen} {expected}"
                );
            }
        }
    }

    #[test]
    fn section_is_asked_about_the_pages_that_were_unmapped_a_sweep_before() {
        let section = SectionNo(5);
        let present = set(section, 0..512);
        let mut sampler = Sampler::new(9);
        let first = sampler.look(section, &present).unwrap();
        assert_eq!(first.asked, first.next);
        let second = sampler.look(section, &present).unwrap();
        assert_eq!(second.asked, first.next);
        assert_ne!(second.next, second.asked);
        assert!(sampler.look(section, &PageSet::EMPTY).is_none());
        let anew = sampler.look(section, &present).unwrap();
        assert_eq!(anew.asked, anew.next);
    }

    #[test]
    fn sweep_comes_by_each_section_and_by_hot_ones_seldom() {
        let mut sets = HotColdSets::default();
        sets.follow((0..8).map(SectionNo));
        for scan in 1..=4 {
            sets.scanned(scan * SECOND, [SectionNo(6), SectionNo(7)]);
        }
        assert_eq!(sets.level(SectionNo(7)), Some(Level::Hot));
        let mut sampler = Sampler::new(1);
        let mut looked = [0; 8];
        for _ in 0..8 {
            sampler.begin((0..8).map(SectionNo));
            let mut assumed = 0;
            while let Some(section) = sampler.next(&sets) {
                looked[to_usize(section.0)] += 1;
            }
            for section in sampler.end().unwrap() {
                assert!(section.0 >= 6);
                assumed += 1;
            }
            assert!(assumed >= 1);
        }
        assert_eq!(looked, [8, 8, 8, 8, 8, 8, 2, 2]);
    }

    /// Advances time in steps of a second, with a VMM that uses `cpus` CPUs and sections that cost
    /// `guest` and `own` each; returns the sections sampled.
    fn run(pace: &mut Pace, seconds: u32, cpus: u32, (guest, own): (u64, u64), want: Want) -> u64 {
        let (from, cpu_from) = pace.seen.unwrap_or_default();
        let mut sections = 0;
        for second in 1..=seconds {
            let now = from + second * SECOND;
            let cpu = cpu_from + cpus * second * SECOND;
            let some = pace.sections(now, cpu, 8192, want);
            let many = u32::try_from(some).unwrap();
            pace.spend(
                some,
                Cost {
                    guest: many * Duration::from_nanos(guest),
                    own: many * Duration::from_nanos(own),
                },
            );
            sections += some;
        }
        sections
    }

    #[test]
    fn cost_stays_within_its_share_and_every_section_gets_its_turn() {
        // 16 GiB, all hot: 8 faults of 1.8 microseconds a section, as much again for the lock.
        let mut pace = Pace::new(COST_PPM);
        run(&mut pace, 10, 1, (30_000, 15_000), Want::Much);
        let looked = run(&mut pace, 600, 1, (30_000, 15_000), Want::Much);
        let guest_ns = looked * 30_000;
        assert!(
            (2_800_000_000..=3_050_000_000).contains(&guest_ns),
            "{guest_ns}"
        );
        // No page is used again: then our account is the limiting one.
        let looked = run(&mut pace, 600, 1, (100, 15_000), Want::Much);
        assert!(
            (190_000..=202_000).contains(&looked),
            "{looked} of 600 s at 0.5 % and 15 us"
        );
        // So expensive that not even one section per second is affordable: each still has its turn in
        // ten minutes.
        let looked = run(&mut pace, 600, 1, (900_000_000, 15_000), Want::Much);
        assert!((8192..=13_000).contains(&looked), "{looked}");
    }

    #[test]
    fn nobody_is_in_a_hurry_where_nothing_is_wanted() {
        let mut pace = Pace::new(COST_PPM);
        run(&mut pace, 1, 1, (1, 1), Want::Little);
        let looked = run(&mut pace, 240, 1, (1, 1), Want::Little);
        assert!((8191..=8193).contains(&looked), "{looked}");
        let looked = run(&mut pace, 10, 1, (1, 1), Want::First);
        assert!((8191..=8193).contains(&looked), "{looked}");
        let looked = run(&mut pace, 50, 1, (1, 1), Want::Much);
        assert!((81_000..=82_000).contains(&looked), "{looked}");
        pace.set_scan(10 * SECOND);
        let looked = run(&mut pace, 50, 1, (1, 1), Want::Much);
        assert!((40_900..=41_000).contains(&looked), "{looked}");
        pace.set_scan(SWEEP_WANTED);
        let calm = run(&mut pace, 100, 1, (1, 15_000), Want::Much);
        let pressed = run(&mut pace, 100, 1, (1, 15_000), Want::Pressed);
        assert!(pressed > 3 * calm, "{calm} {pressed}");
    }
}
