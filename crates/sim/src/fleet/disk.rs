// SPDX-License-Identifier: Apache-2.0
//! The guest's disk, seen from its page cache, where the DMA goes (O2 of VPRI 4.2.1).
//!
//! The paper describes a disk by how its footprint grows and how often sections are touched, and says nothing
//! of files. So the model is of sections and not of files: each is *visited* again and again, at intervals of
//! its own.
//! ```text
//!   section   ▮▮▮                      ▮                 ▮▮▮            a visit: one to three accesses,
//!             └──────── interval ──────┘──── interval ───┘             seconds apart
//!
//!   popular sections   intervals without memory (Poisson), of means from MEAN_S.0 to MEAN_S.1;
//!                      few have short ones and many have long ones: the number of those with a mean of `t`
//!                      is as `t^POPULARITY`
//!   a periodic part    sections that come again after about PERIOD_S, as jobs do that go over their data
//! ```
//! A device reads into the page cache, and a CPU reads what it brought in the same second: "the memory
//! subsystem will also be aware of this access" (6.2). A visit of another kind is a write: a CPU makes the page
//! dirty, and it is written back `DIRTY_S` later.
//!
//! # What was fitted
//! The five numbers below were chosen so that [`statistics`](super::statistics()) gives what the paper states of a
//! typical block device (Fig 10) and of cold memory (1): see there. That leaves room; within it they were
//! chosen so that the paper's `lru` comes out by arithmetic, and its protector gains: `docs/protector.md`. The
//! footprint says how many sections a window of `t` holds, and its slope how many touches come after more than `t`
//! without one. That decides what any policy can gain.

use super::{
    aged::LastUse,
    random::{LoadRandom, number, whole},
    sink::{Sink, Who},
};
use pagetide_addr::{Access, SECTION_BYTES};

/// Shortest and longest mean interval of popular sections, in seconds.
const MEAN_S: (f64, f64) = (120.0, 7_000.0);
/// How the number of popular sections grows with their mean interval.
const POPULARITY: f64 = 0.65;
/// Mean interval of the periodic part, in seconds.
const PERIOD_S: f64 = 230.0;
/// Its intervals are the sum of so many without memory: they deviate from the mean by 27 %.
const PERIOD_STAGES: u64 = 14;
/// A dirty page is written back this long after it became so (Linux' default).
const DIRTY_S: u64 = 30;
/// Seconds between two accesses of a visit.
const ACCESS_GAP_S: u64 = 3;
/// Most accesses of a visit to a section that is seldom visited, and to another.
const ACCESSES_MAX: (u64, u64) = (3, 1);
/// Most accesses of a visit to a periodic section.
const PERIODIC_ACCESSES_MAX: u64 = 1;
/// A section with a longer mean interval is seldom visited.
const SELDOM_S: f64 = 600.0;
/// Bytes of an access.
const ACCESS_BYTES: u64 = SECTION_BYTES / 8;
/// Seconds that the calendar holds. What comes later waits in its last place.
const CALENDAR_S: usize = 8_192;

/// Sections of one guest's disk, as shares of its memory.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct DiskLoad {
    /// Sections that are visited at intervals without memory.
    pub(super) popular: f64,
    /// Sections that come again after about [`PERIOD_S`].
    pub(super) periodic: f64,
    /// Share of the visits that are writes.
    pub(super) written: f64,
}

/// One section of the page cache.
#[derive(Clone, Copy, Debug)]
struct CacheSection {
    section: u64,
    /// Mean interval of visits, in seconds.
    mean_s: f64,
    stages: u64,
    accesses_max: u64,
}

impl CacheSection {
    /// The section at the share `unit` of the popular ones, shortest interval first.
    fn popular(section: u64, unit: f64) -> Self {
        let mean_s = popular_mean_s(unit);
        let accesses_max = match mean_s > SELDOM_S {
            true => ACCESSES_MAX.0,
            false => ACCESSES_MAX.1,
        };
        Self {
            section,
            mean_s,
            stages: 1,
            accesses_max,
        }
    }
}

/// What is to be done to a section in some second.
#[derive(Clone, Copy, Debug)]
enum Due {
    /// A new visit.
    Visit,
    /// The rest of a visit: accesses left.
    Read(u64),
    /// The same of writes by a CPU.
    Write(u64),
    WriteBack,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Disk {
    random: LoadRandom,
    written: f64,
    sections: Vec<CacheSection>,
    /// By second, modulo [`CALENDAR_S`]: place of the section, what is due, and in which second.
    calendar: Vec<Vec<(u32, Due, u64)>>,
}

impl Disk {
    /// A disk whose page cache may use `memory`, in this order, of a guest of `vm_sections`.
    pub(super) fn new(
        mut random: LoadRandom,
        memory: &[u64],
        vm_sections: u64,
        load: &DiskLoad,
    ) -> Self {
        let count = |share: f64| whole(number(vm_sections) * share);
        let (popular, periodic) = (count(load.popular), count(load.periodic));
        let sections = (0..).zip(memory).take(index_of(popular + periodic));
        let sections: Vec<CacheSection> = sections
            .map(|(place, section)| match place < periodic {
                true => CacheSection {
                    section: *section,
                    mean_s: PERIOD_S,
                    stages: PERIOD_STAGES,
                    accesses_max: PERIODIC_ACCESSES_MAX,
                },
                false => CacheSection::popular(*section, random.unit()),
            })
            .collect();
        let mut disk = Self {
            random,
            written: load.written,
            sections,
            calendar: vec![Vec::new(); CALENDAR_S],
        };
        for place in 0..disk.sections.len() {
            // The guest has been running: a section is in the midst of an interval.
            let stages = 1 + disk.random.below(disk.sections[place].stages);
            let wait_s = disk.interval_s(place, stages);
            disk.put(0, wait_s, place, Due::Visit);
        }
        disk
    }

    /// When each section was visited last before the first second, in seconds of the disk's own work. Of a
    /// periodic one as much of an interval has passed as has at a random moment.
    pub(super) fn used_before(&self, mut random: LoadRandom) -> Vec<LastUse> {
        let last = |cache: &CacheSection| {
            let stages = 1 + random.below(cache.stages);
            let sum: f64 = (0..stages).map(|_| random.exponential()).sum();
            LastUse {
                who: Who::Disk,
                section: cache.section,
                age_s: sum * cache.mean_s / number(cache.stages),
            }
        };
        self.sections.iter().map(last).collect()
    }

    /// One second of the guest's work. Seconds come in order, from 0.
    pub(super) fn second(&mut self, second: u64, sink: &mut Sink) {
        let today = index_of(second) % CALENDAR_S;
        let due = std::mem::take(&mut self.calendar[today]);
        for (place, due, at) in due {
            let place = place as usize;
            if at > second {
                self.put(second, at - second, place, due);
            } else {
                self.carry_out(second, place, due, sink);
            }
        }
    }

    fn carry_out(&mut self, second: u64, place: usize, due: Due, sink: &mut Sink) {
        let section = self.sections[place].section;
        match due {
            Due::Visit => {
                let wait_s = self.interval_s(place, self.sections[place].stages);
                // An interval is from the end of a visit.
                let accesses = 1 + self.random.below(self.sections[place].accesses_max);
                let visit_s = (accesses - 1) * ACCESS_GAP_S;
                self.put(second, wait_s + visit_s, place, Due::Visit);
                let kind = match self.random.unit() < self.written {
                    true => Due::Write(accesses),
                    false => Due::Read(accesses),
                };
                self.carry_out(second, place, kind, sink);
            }
            Due::Read(accesses) => {
                sink.touch(Who::Disk, section, Access::Write, ACCESS_BYTES);
                sink.touch(Who::Cpu, section, Access::Read, ACCESS_BYTES);
                if accesses > 1 {
                    self.put(second, ACCESS_GAP_S, place, Due::Read(accesses - 1));
                }
            }
            Due::Write(accesses) => {
                sink.touch(Who::Cpu, section, Access::Write, ACCESS_BYTES);
                self.put(second, DIRTY_S, place, Due::WriteBack);
                if accesses > 1 {
                    self.put(second, ACCESS_GAP_S, place, Due::Write(accesses - 1));
                }
            }
            Due::WriteBack => sink.touch(Who::Disk, section, Access::Read, ACCESS_BYTES),
        }
    }

    fn interval_s(&mut self, place: usize, stages: u64) -> u64 {
        let CacheSection {
            mean_s,
            stages: all,
            ..
        } = self.sections[place];
        let stage_s = mean_s / number(all);
        let sum: f64 = (0..stages).map(|_| self.random.exponential()).sum();
        whole(sum * stage_s + self.random.unit()).max(1)
    }

    fn put(&mut self, second: u64, wait_s: u64, place: usize, due: Due) {
        let wait = index_of(wait_s.max(1)).min(CALENDAR_S - 1);
        let day = (index_of(second) + wait) % CALENDAR_S;
        let place = u32::try_from(place).unwrap_or(u32::MAX);
        self.calendar[day].push((place, due, second + wait_s.max(1)));
    }
}

/// The mean interval at the share `unit` of the popular sections, shortest first.
fn popular_mean_s(unit: f64) -> f64 {
    let (least, most) = (MEAN_S.0.powf(POPULARITY), MEAN_S.1.powf(POPULARITY));
    (least + unit * (most - least)).powf(1.0 / POPULARITY)
}

/// The index for a number; one too large for this machine becomes a number past every index.
fn index_of(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn section_is_visited_at_its_interval_and_a_cpu_touches_what_a_device_did() {
        let memory: Vec<u64> = (0..400).collect();
        let load = DiskLoad {
            popular: 0.0,
            periodic: 1.0,
            written: 0.0,
        };
        let mut disk = Disk::new(LoadRandom::new(1, 1), &memory, 400, &load);
        let mut sink = Sink::new(400);
        let (mut by_disk, mut by_cpu) = (0, 0);
        const SECONDS: u64 = 20_000;
        for second in 0..SECONDS {
            sink.second = second;
            sink.touches.clear();
            disk.second(second, &mut sink);
            by_disk += sink.touches.iter().filter(|it| it.who == Who::Disk).count();
            by_cpu += sink.touches.iter().filter(|it| it.who == Who::Cpu).count();
        }
        assert_eq!(by_disk, by_cpu);
        let expected = 400.0 * number(SECONDS) / PERIOD_S;
        let share = number(by_disk as u64) / expected;
        assert!((0.95..1.05).contains(&share), "{share}");
    }

    #[test]
    fn ages_before_the_start_are_those_of_a_disk_that_has_run_for_long() {
        let memory: Vec<u64> = (0..4_000).collect();
        let load = DiskLoad {
            popular: 0.5,
            periodic: 0.5,
            written: 0.0,
        };
        let disk = Disk::new(LoadRandom::new(1, 1), &memory, 4_000, &load);
        let uses = disk.used_before(LoadRandom::new(1, 2));
        let mean = |uses: &[LastUse]| {
            uses.iter().map(|last| last.age_s).sum::<f64>() / number(uses.len() as u64)
        };
        // At a random moment half of an interval and a half stage more has passed, on average.
        let periodic = PERIOD_S * (0.5 + 0.5 / number(PERIOD_STAGES));
        let share = mean(&uses[..2_000]) / periodic;
        assert!((0.95..1.05).contains(&share), "{share}");
        // And of an interval without memory as much as one is long.
        let means = disk.sections[2_000..].iter().map(|cache| cache.mean_s);
        let popular = means.sum::<f64>() / 2_000.0;
        let share = mean(&uses[2_000..]) / popular;
        assert!((0.93..1.07).contains(&share), "{share}");
    }

    #[test]
    fn popular_sections_have_all_means_and_most_of_them_long_ones() {
        assert!((popular_mean_s(0.0) - MEAN_S.0).abs() < 1e-6);
        assert!((popular_mean_s(1.0) - MEAN_S.1).abs() < 1e-6);
        assert!(popular_mean_s(0.5) > MEAN_S.1 / 5.0);
    }
}
