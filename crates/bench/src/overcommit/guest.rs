// SPDX-License-Identifier: Apache-2.0
//! A VM that serves requests: a stand-in as in [`crate::busy`], whose vCPU times each request.
//!
//! A request touches [`TOUCHES`] pages of the VM's [working set](super::working_set), checks three of four,
//! and writes the others. The vCPU serves one after the other without a pause, or at a given rate. The first
//! wrong page ends the work: each answer from then on is that failure.

use super::working_set::{Choice, WorkingSet};
use crate::{
    busy::{
        content::Mix,
        ram::{HugePages, Ram, WrongPage},
    },
    orders::say,
};
use pagetide_addr::{PageNo, SECTION_PAGES};
use pagetide_random::SplitMix64;
use pagetide_sys::{clock, cpu};
use serde::{Deserialize, Serialize};
use std::{
    io::BufRead as _,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Pages touched by a request.
pub(super) const TOUCHES: u64 = 16;
/// Requests of one measurement that are timed; later ones are not served better or worse.
const TIMES_MAX: usize = 1 << 20;
/// A vCPU that is later than this forgets the requests that it has not served: their senders have given up.
const LATE_MAX: Duration = Duration::from_millis(10);
/// The working set moves on through its share in this time; what was not used for as long is cold (Taiji
/// 2.1.3).
const COLD_AFTER: Duration = Duration::from_secs(600);

/// The VM to be started.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct RequestGuestOptions {
    /// RAM in sections of 2 MiB
    #[arg(long)]
    pub sections: u32,
    /// CPU of the vCPU, in the order of those available
    #[arg(long)]
    pub cpu: usize,
    /// Thousandths of the RAM in use at any moment
    #[arg(long)]
    pub used_permille: u32,
    /// How often the sections in use are used
    #[arg(long, value_enum)]
    pub choice: Choice,
    /// Thousandths of the RAM through which the working set moves on in ten minutes
    #[arg(long, default_value_t = 0)]
    pub moves_permille: u32,
    /// Requests a second; without it one follows the other
    #[arg(long)]
    pub rate: Option<u32>,
    /// What the choices of pages begin with
    #[arg(long)]
    pub seed: u64,
    /// Memory cgroup to join before there is any RAM
    #[arg(long)]
    pub group: Option<PathBuf>,
}

/// An order of the bench to the VM.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Time the requests from now on.
    Measure {
        /// For so long.
        ms: u64,
    },
    /// Use another part of the RAM.
    Resize {
        /// In thousandths.
        used_permille: u32,
    },
    /// Touch all pages, so that all are present: those of zeros are not brought back by a detach.
    TouchAll,
    /// Check all bytes of all pages.
    VerifyAll,
}

/// An answer of the VM.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The RAM is filled and requests are served.
    Ready,
    /// See [`Served`].
    Served(Served),
    /// Done; all content read was right.
    Done,
    /// It failed.
    Failed {
        /// Why.
        reason: String,
    },
}

/// The requests of an interval.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Served {
    /// How many.
    pub requests: u64,
    /// The length of the interval in nanoseconds.
    pub wall_ns: u64,
    /// The time of each in nanoseconds, as far as they are kept.
    pub ns: Vec<u32>,
}

/// What is measured now.
struct Record {
    requests: u64,
    ns: Vec<u32>,
}

struct Guest {
    ram: Ram,
    set: WorkingSet,
    record: Mutex<Record>,
    measures: AtomicBool,
    wrong: OnceLock<WrongPage>,
    options: RequestGuestOptions,
}

/// Runs the VM until the end of input.
///
/// # Errors
/// A message.
pub fn run(options: &RequestGuestOptions) -> Result<(), String> {
    if let Some(group) = &options.group {
        join(group)?;
    }
    let cpus = cpu::affinity().map_err(|error| error.to_string())?;
    let guest = Arc::new(Guest::new(options)?);
    guest.ram.fill(cpus.len());
    let cpu = cpus[options.cpu % cpus.len()];
    let vcpu = Arc::clone(&guest);
    std::thread::Builder::new()
        .name("CPU 0/KVM".to_owned())
        .spawn(move || vcpu.run_vcpu(cpu))
        .map_err(|error| format!("no thread for a vCPU: {error}"))?;
    if let Some(stays) = guest.stays_for() {
        let guest = Arc::clone(&guest);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(stays);
                guest.set.move_on();
            }
        });
    }
    say(&Answer::Ready)?;
    guest.serve()
}

/// Makes this process one of `group`.
pub(super) fn join(group: &Path) -> Result<(), String> {
    let processes = group.join("cgroup.procs");
    let pid = std::process::id().to_string();
    std::fs::write(&processes, pid).map_err(|error| format!("{}: {error}", processes.display()))
}

impl Guest {
    fn new(options: &RequestGuestOptions) -> Result<Self, String> {
        let pages = u64::from(options.sections) * SECTION_PAGES;
        let ram = Ram::new(pages, HugePages::NotAdvised, Mix::Fleet);
        Ok(Self {
            ram: ram.map_err(|error| error.to_string())?,
            set: WorkingSet::new(
                options.sections,
                options.used_permille,
                options.choice,
                options.seed,
            ),
            // Written, so that the memory is there before any of it is counted.
            record: Mutex::new(Record {
                requests: 0,
                ns: vec![u32::MAX; TIMES_MAX],
            }),
            measures: AtomicBool::new(false),
            wrong: OnceLock::new(),
            options: options.clone(),
        })
    }

    /// How long a section stays in the working set's first place.
    fn stays_for(&self) -> Option<Duration> {
        let moves = u64::from(self.options.sections) * u64::from(self.options.moves_permille);
        let moves = u32::try_from(moves / 1000).unwrap_or(u32::MAX);
        (moves > 0).then(|| COLD_AFTER / moves)
    }

    fn run_vcpu(&self, cpu: usize) {
        if let Err(error) = cpu::set_affinity(&[cpu]) {
            eprintln!("stand-in: the vCPU goes where the kernel likes: {error}");
        }
        let mut random = SplitMix64::new(self.options.seed);
        let between = self
            .options
            .rate
            .map(|rate| Duration::from_secs(1) / rate.max(1));
        let mut due = Instant::now();
        loop {
            let begun = Instant::now();
            if let Err(wrong) = self.request(&mut random) {
                eprintln!("stand-in {}: {wrong}", std::process::id());
                if self.wrong.set(wrong).is_err() {
                    eprintln!("stand-in: the verification found another one first");
                }
                return;
            }
            if self.measures.load(Relaxed) {
                self.lock().add(begun.elapsed());
            }
            if let Some(between) = between {
                due = wait_until(due + between);
            }
        }
    }

    #[inline]
    fn request(&self, random: &mut SplitMix64) -> Result<(), WrongPage> {
        for touch in 0..TOUCHES {
            let page = self.set.pick(random.next_u64());
            if touch % 4 == 0 {
                self.ram.write(page);
            } else {
                self.ram.check_stamps(page)?;
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        // A time more or less is all that a panic could leave behind.
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) -> Result<(), String> {
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|error| error.to_string())?;
            let order: Order = serde_json::from_str(&line).map_err(|error| error.to_string())?;
            let answer = self.obey(&order);
            let failed = self.wrong.get().map(|wrong| Answer::Failed {
                reason: wrong.to_string(),
            });
            say(&failed.unwrap_or(answer))?;
        }
        Ok(())
    }

    fn obey(&self, order: &Order) -> Answer {
        match order {
            Order::Measure { ms } => Answer::Served(self.measure(Duration::from_millis(*ms))),
            Order::Resize { used_permille } => {
                self.set.resize(*used_permille);
                Answer::Done
            }
            Order::TouchAll => {
                let mut pages = (0..self.ram.pages()).map(PageNo);
                done(pages.try_for_each(|page| self.ram.check_stamps(page)))
            }
            Order::VerifyAll => done(self.ram.check_all(1)),
        }
    }

    fn measure(&self, time: Duration) -> Served {
        self.lock().requests = 0;
        let begun = Instant::now();
        self.measures.store(true, Relaxed);
        std::thread::sleep(time);
        self.measures.store(false, Relaxed);
        let wall_ns = clock::ns(begun.elapsed());
        let record = self.lock();
        let kept = usize::try_from(record.requests)
            .unwrap_or(TIMES_MAX)
            .min(TIMES_MAX);
        Served {
            requests: record.requests,
            wall_ns,
            ns: record.ns[..kept].to_vec(),
        }
    }
}

fn done(checked: Result<(), WrongPage>) -> Answer {
    match checked {
        Ok(()) => Answer::Done,
        Err(wrong) => Answer::Failed {
            reason: wrong.to_string(),
        },
    }
}

impl Record {
    fn add(&mut self, time: Duration) {
        let at = usize::try_from(self.requests).unwrap_or(TIMES_MAX);
        if let Some(place) = self.ns.get_mut(at) {
            *place = u32::try_from(time.as_nanos()).unwrap_or(u32::MAX);
        }
        self.requests += 1;
    }
}

/// Sleeps until `due`; returns when that was, or now if it was too long ago.
fn wait_until(due: Instant) -> Instant {
    let now = Instant::now();
    match due.checked_duration_since(now) {
        Some(early) => std::thread::sleep(early),
        None if now - due > LATE_MAX => return now,
        None => {}
    }
    due
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(rate: Option<u32>) -> Arc<Guest> {
        let options = RequestGuestOptions {
            sections: 4,
            cpu: 0,
            used_permille: 500,
            choice: Choice::Zipf,
            moves_permille: 0,
            rate,
            seed: 1,
            group: None,
        };
        let guest = Guest::new(&options).unwrap();
        guest.ram.fill(1);
        Arc::new(guest)
    }

    #[test]
    fn requests_are_timed_while_they_are_measured_and_leave_every_page_right() {
        let guest = guest(None);
        let vcpu = Arc::clone(&guest);
        std::thread::spawn(move || vcpu.run_vcpu(0));
        let mut served = Served::default();
        while served.requests == 0 {
            served = guest.measure(Duration::from_millis(20));
        }
        assert_eq!(served.ns.len() as u64, served.requests);
        assert!(served.ns.iter().all(|ns| (1..u32::MAX).contains(ns)));
        assert_eq!(guest.obey(&Order::TouchAll), Answer::Done);
        assert_eq!(guest.obey(&Order::VerifyAll), Answer::Done);
    }

    #[test]
    fn times_beyond_the_room_for_them_are_counted() {
        let guest = guest(None);
        let mut record = guest.lock();
        record.requests = TIMES_MAX as u64;
        record.add(Duration::from_micros(1));
        assert_eq!(
            (record.requests, record.ns.len()),
            (TIMES_MAX as u64 + 1, TIMES_MAX)
        );
    }

    #[test]
    fn late_vcpu_forgets_what_it_missed_and_one_in_time_keeps_its_rhythm() {
        let now = Instant::now();
        let soon = now + Duration::from_millis(2);
        assert_eq!(wait_until(soon), soon);
        assert!(Instant::now() >= soon);
        let long_ago = now.checked_sub(Duration::from_secs(1));
        assert!(long_ago.is_none_or(|due| wait_until(due) >= now));
    }

    #[test]
    fn working_set_moves_on_through_its_share_in_ten_minutes() {
        let guest = guest(Some(10));
        assert_eq!(guest.stays_for(), None);
        let mut moving = Guest::new(&guest.options).unwrap();
        moving.options.moves_permille = 500;
        assert_eq!(moving.stays_for(), Some(Duration::from_secs(300)));
    }
}
