// SPDX-License-Identifier: Apache-2.0
//! The stand-in's process: vCPUs that never pause, and orders.
//!
//! A vCPU takes one hot page after the other: it checks three of four, and writes the fourth. It reads the
//! clock once in [`BATCH`] pages: the longest time between two such reads is an upper bound of the guest's
//! stalls.
//!
//! The first wrong page ends the work: each answer from then on is that failure.

use super::{
    content::Mix,
    disk::{DISK_BYTES, DiskCounted, DiskWork},
    pattern::{HotPages, Pattern},
    ram::{HugePages, Ram, WrongPage},
};
use crate::{memory::fitting, orders::say};
use pagetide_addr::{PageNo, SECTION_BYTES, SECTION_PAGES, to_usize};
use pagetide_random::SplitMix64;
use pagetide_sys::clock;
use pagetide_sys::cpu;
use serde::{Deserialize, Serialize};
use std::{
    io::BufRead as _,
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Pages between two reads of the clock, unless told otherwise: some ten microseconds.
pub const BATCH: u64 = 64;
/// Faults that are faster were not served by a daemon, but by the kernel alone.
const FAULT_MIN: Duration = Duration::from_micros(4);
/// Touches that are faster were no faults at all.
const TOUCH_MAX: Duration = Duration::from_nanos(400);
/// Faults of a vCPU that are kept: some minutes' worth. Later ones are not.
const FAULTS_KEPT_MAX: usize = 1 << 20;
/// Longest wait for a vCPU to pause: it may wait for a page.
const REST_WAIT: Duration = Duration::from_secs(60);

/// The stand-in to be started.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct BusyGuestOptions {
    /// RAM in MiB; a multiple of 2
    #[arg(long)]
    pub ram_mib: u64,
    /// vCPUs
    #[arg(long, default_value_t = 1)]
    pub vcpus: u32,
    /// CPU of the first vCPU, from the last one backwards
    #[arg(long, default_value_t = 0)]
    pub first_cpu: usize,
    /// Time each touch, and keep the times of those that faulted
    #[arg(long)]
    pub time_faults: bool,
    /// Pages that a vCPU touches between two reads of the clock
    #[arg(long, default_value_t = BATCH)]
    pub batch: u64,
    /// Pause of a vCPU between two such batches, in microseconds
    #[arg(long, default_value_t = 0)]
    pub rest_us: u64,
    /// What to do where there is no memory for that much
    #[arg(long, value_enum, default_value_t = RamSize::Exact)]
    pub size: RamSize,
    /// What they touch: part:N, moving:N:M, sections:N, pages:N or one-page, N in thousandths
    #[arg(long, default_value = "part:125")]
    pub pattern: Pattern,
    /// Whether to ask for huge pages
    #[arg(long, value_enum, default_value_t = HugePages::NotAdvised)]
    pub huge_pages: HugePages,
    /// Socket of a vhost-user disk that it writes, reads and compares, too
    #[arg(long)]
    pub disk: Option<PathBuf>,
}

/// What a size of RAM means.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum RamSize {
    /// That much, or none.
    Exact,
    /// Half of it, and half again, until there is memory for it.
    AtMost,
}

/// An order of the bench to the stand-in.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Report the vCPUs' work since the last such order.
    Count,
    /// Pause the vCPUs.
    Pause,
    /// Resume them.
    Resume,
    /// Move a hot piece.
    Move {
        /// By this many sections.
        sections: u64,
    },
    /// Make a hot piece larger or smaller.
    Resize {
        /// To so much of the RAM, in thousandths.
        hot_permille: u32,
    },
    /// Pause each vCPU between two batches for so long from now on.
    Rest {
        /// In microseconds.
        us: u64,
    },
    /// Read one word of each page from the first to the last, on one thread.
    TouchAll,
    /// Check some pages at random, all their bytes.
    VerifySome {
        /// How many.
        pages: u64,
        /// Of the choice.
        seed: u64,
    },
    /// Check all bytes of all pages.
    VerifyAll,
    /// Report how many vCPUs have touched no page since this time.
    Laggards {
        /// By the monotonic clock.
        since_ns: u64,
    },
    /// Report the work on the disk since the last such order.
    Disk,
    /// Check all blocks of the disk; the work on it has ended then.
    VerifyDisk,
    /// Report which pages are in memory.
    Presence,
    /// Report the times of the faults since the last such order.
    Faults,
}

/// An answer of the stand-in.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The RAM is filled and the vCPUs run.
    Ready {
        /// How long filling took.
        fill_ns: u64,
        /// The RAM.
        ram_bytes: u64,
        /// Why that is less than it should be.
        smaller: Option<String>,
    },
    /// See [`Counted`].
    Counted(Counted),
    /// See [`Presence`].
    Presence(Presence),
    /// See [`Order::Laggards`].
    Laggards {
        /// How many.
        vcpus: u64,
    },
    /// See [`DiskCounted`].
    Disk(DiskCounted),
    /// Times of faults.
    Faults {
        /// In nanoseconds.
        ns: Vec<u32>,
    },
    /// Done, with the time; all content read was right.
    Done {
        /// In nanoseconds.
        ns: u64,
    },
    /// A page was found wrong, now or before.
    Wrong {
        /// Which, and how.
        reason: String,
    },
    /// It failed.
    Failed {
        /// Why.
        reason: String,
    },
}

/// The work of the vCPUs in an interval.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Counted {
    /// Pages read or written.
    pub operations: u64,
    /// Length of the interval in nanoseconds.
    pub ns: u64,
    /// Longest time that one of them needed for a few dozen pages, in nanoseconds.
    pub longest_gap_ns: u64,
    /// Page faults that the kernel counted for the process.
    pub faults: u64,
}

/// Which pages are in memory.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct Presence {
    /// Hot pages.
    pub hot_pages: u64,
    /// Hot pages that are in memory.
    pub hot_present_pages: u64,
    /// Cold pages.
    pub cold_pages: u64,
    /// Cold pages that are in memory.
    pub cold_present_pages: u64,
    /// Sections without hot pages.
    pub cold_sections: u64,
}

impl BusyGuestOptions {
    /// The RAM asked for.
    ///
    /// # Errors
    /// A message if there are none, or if the numbers are not valid.
    fn ram_bytes(&self) -> Result<u64, String> {
        let bytes = self.ram_mib.checked_mul(1 << 20);
        match bytes {
            Some(bytes) if bytes > 0 && bytes % SECTION_BYTES == 0 && bytes < 1 << 44 => Ok(bytes),
            _ => Err(format!(
                "{} MiB is no RAM: give a multiple of 2 below 16 TiB",
                self.ram_mib
            )),
        }
    }
}

/// Runs the stand-in until the end of input.
///
/// # Errors
/// A message.
pub fn run(options: &BusyGuestOptions) -> Result<(), String> {
    let wanted_bytes = options.ram_bytes()?;
    let (ram_bytes, smaller) = match options.size {
        RamSize::Exact => (wanted_bytes, None),
        RamSize::AtMost => fitting(wanted_bytes)?,
    };
    let sections = ram_bytes / SECTION_BYTES;
    let tail_bytes = options.disk.as_ref().map_or(0, |_| DISK_BYTES);
    let pages = sections * SECTION_PAGES;
    let ram = Ram::with_tail(pages, tail_bytes, options.huge_pages, Mix::Halves)
        .map_err(|error| error.to_string())?;
    let begun = Instant::now();
    let cpus = cpu::affinity().map_err(|error| error.to_string())?;
    ram.fill(cpus.len());
    let fill_ns = clock::ns(begun.elapsed());
    let disk = match &options.disk {
        Some(socket) => Some(DiskWork::start(&ram, socket).map_err(|error| error.to_string())?),
        None => None,
    };
    let guest = Arc::new(Guest {
        hot: HotPages::new(options.pattern, sections),
        ram,
        disk,
        batch: options.batch.max(1),
        nap_us: AtomicU64::new(options.rest_us),
        vcpus: (0..options.vcpus).map(|_| Vcpu::default()).collect(),
        pausing: AtomicBool::new(false),
        rest: Mutex::new(Rest::default()),
        changed: Condvar::new(),
        wrong: OnceLock::new(),
        threads: cpus.len(),
        time_faults: options.time_faults,
    });
    for number in 0..guest.vcpus.len() {
        let guest = Arc::clone(&guest);
        // Neighbours in number are on different CPUs, the first on the last: a host's own work prefers the
        // lowest numbers.
        let cpu = cpus[cpus.len() - 1 - (options.first_cpu + number) % cpus.len()];
        std::thread::Builder::new()
            .name(format!("CPU {number}/KVM"))
            .spawn(move || guest.run_vcpu(number, cpu))
            .map_err(|error| format!("no thread for a vCPU: {error}"))?;
    }
    if let Some(time) = options.pattern.stays_for() {
        let guest = Arc::clone(&guest);
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(time);
                guest.hot.advance(1);
            }
        });
    }
    say(&Answer::Ready {
        fill_ns,
        ram_bytes,
        smaller,
    })?;
    guest.serve()
}

/// One vCPU's counters, in their own cache line.
#[derive(Default)]
#[repr(align(128))]
struct Vcpu {
    operations: AtomicU64,
    longest_gap_ns: AtomicU64,
    /// When it last read the clock, by the monotonic clock.
    looked_ns: AtomicU64,
    fault_ns: Mutex<Vec<u32>>,
}

impl Vcpu {
    /// Keeps the time of a fault, unless there are too many already.
    fn keep(&self, time: Duration) {
        let mut kept = self.fault_ns.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < FAULTS_KEPT_MAX {
            kept.push(u32::try_from(time.as_nanos()).unwrap_or(u32::MAX));
        }
    }

    fn take_faults(&self) -> Vec<u32> {
        let mut kept = self.fault_ns.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut kept)
    }
}

#[derive(Default)]
struct Rest {
    wanted: bool,
    resting: usize,
}

/// Tells faults from touches that were slow for another reason.
#[derive(Default)]
struct Timed {
    faults: u64,
}

impl Timed {
    fn touched(&mut self, time: Duration, account: &Vcpu) {
        if time < TOUCH_MAX {
            return;
        }
        // Fast ones are counted, too: a later touch that is only slow is then not taken for a fault.
        let faults = cpu::thread_faults();
        if faults > self.faults && time >= FAULT_MIN {
            account.keep(time);
        }
        self.faults = faults;
    }
}

struct Guest {
    ram: Ram,
    hot: HotPages,
    disk: Option<DiskWork>,
    batch: u64,
    /// Between two batches.
    nap_us: AtomicU64,
    vcpus: Vec<Vcpu>,
    /// A copy of `rest.wanted` that can be read without the lock.
    pausing: AtomicBool,
    rest: Mutex<Rest>,
    changed: Condvar,
    wrong: OnceLock<WrongPage>,
    threads: usize,
    time_faults: bool,
}

fn faults() -> Result<u64, String> {
    faults_of("/proc/self/stat")
}

/// Page faults so far of the process whose `stat` file is `path`.
pub(super) fn faults_of(path: &str) -> Result<u64, String> {
    let stat = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    // Fields after the name, which is in parentheses: state is the third, minor faults are the
    // tenth, major ones the twelfth.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let field = |number: usize| -> Option<u64> { fields.split(' ').nth(number - 3)?.parse().ok() };
    field(10)
        .zip(field(12))
        .map(|(minor, major)| minor + major)
        .ok_or_else(|| format!("{path} is not understood: {stat}"))
}

impl Guest {
    fn lock(&self) -> MutexGuard<'_, Rest> {
        // Its content is set completely or not at all.
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_vcpu(&self, number: usize, cpu: usize) {
        if let Err(error) = cpu::set_affinity(&[cpu]) {
            eprintln!("stand-in: vCPU {number} goes where the kernel likes: {error}");
        }
        let account = &self.vcpus[number];
        let mut random = SplitMix64::new(number as u64 + 1);
        let mut looked = Instant::now();
        let mut timed = Timed::default();
        while self.wrong.get().is_none() {
            for _ in 0..self.batch {
                let begun = self.time_faults.then(Instant::now);
                let bits = random.next_u64();
                let page = self.hot.pick(bits);
                // Bits that do not choose the page.
                if bits >> 16 & 3 == 0 {
                    self.ram.write(page);
                } else if let Err(wrong) = self.ram.check_stamps(page) {
                    self.found(wrong);
                    return;
                }
                if let Some(begun) = begun {
                    timed.touched(begun.elapsed(), account);
                }
            }
            account.operations.fetch_add(self.batch, Relaxed);
            let now = Instant::now();
            account.looked_ns.store(clock::now_ns(), Relaxed);
            account
                .longest_gap_ns
                .fetch_max(clock::ns(now - looked), Relaxed);
            looked = now;
            let nap = Duration::from_micros(self.nap_us.load(Relaxed));
            if !nap.is_zero() {
                std::thread::sleep(nap);
                looked = Instant::now();
            }
            if self.pausing.load(Relaxed) {
                self.rest();
                looked = Instant::now();
            }
        }
    }

    fn found(&self, wrong: WrongPage) {
        eprintln!("stand-in {}: {wrong}", std::process::id());
        // Another one may have been found first.
        if self.wrong.set(wrong).is_err() {
            eprintln!(
                "stand-in {}: more than one page is wrong",
                std::process::id()
            );
        }
    }

    fn rest(&self) {
        let mut rest = self.lock();
        rest.resting += 1;
        self.changed.notify_all();
        while rest.wanted {
            rest = self
                .changed
                .wait(rest)
                .unwrap_or_else(PoisonError::into_inner);
        }
        rest.resting -= 1;
    }

    fn pause(&self) -> Result<(), String> {
        let mut rest = self.lock();
        rest.wanted = true;
        self.pausing.store(true, Relaxed);
        let all = self.vcpus.len();
        let outcome = self
            .changed
            .wait_timeout_while(rest, REST_WAIT, |rest| rest.resting < all);
        let (rest, waited) = outcome.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(format!(
                "{} of {all} vCPUs rest after {} s; the others wait for a page",
                rest.resting,
                REST_WAIT.as_secs()
            ));
        }
        Ok(())
    }

    fn resume(&self) {
        self.lock().wanted = false;
        self.pausing.store(false, Relaxed);
        self.changed.notify_all();
    }

    fn serve(&self) -> Result<(), String> {
        let mut before = (Instant::now(), 0, faults()?);
        for line in std::io::stdin().lock().lines() {
            let line = line.map_err(|error| error.to_string())?;
            let order: Order = serde_json::from_str(&line).map_err(|error| error.to_string())?;
            let answer = match order {
                Order::Count => self.count(&mut before).map(Answer::Counted),
                other => self.obey(&other),
            };
            let answer = match (self.wrong.get(), answer) {
                (None, Ok(answer)) => answer,
                (None, Err(reason)) => Answer::Failed { reason },
                (Some(wrong), _) => Answer::Wrong {
                    reason: wrong.to_string(),
                },
            };
            say(&answer)?;
        }
        Ok(())
    }

    fn count(&self, before: &mut (Instant, u64, u64)) -> Result<Counted, String> {
        let operations = |vcpu: &Vcpu| vcpu.operations.load(Relaxed);
        let now = (
            Instant::now(),
            self.vcpus.iter().map(operations).sum(),
            faults()?,
        );
        let gaps = self.vcpus.iter().map(|v| v.longest_gap_ns.swap(0, Relaxed));
        let counted = Counted {
            operations: now.1 - before.1,
            ns: clock::ns(now.0 - before.0),
            longest_gap_ns: gaps.max().unwrap_or(0),
            faults: now.2 - before.2,
        };
        *before = now;
        Ok(counted)
    }

    fn obey(&self, order: &Order) -> Result<Answer, String> {
        let begun = Instant::now();
        let wrong = |wrong: WrongPage| {
            let reason = wrong.to_string();
            self.found(wrong);
            reason
        };
        match order {
            Order::Count => return Err("counting is done by its own function".into()),
            Order::Laggards { since_ns } => {
                let lags = |vcpu: &&Vcpu| vcpu.looked_ns.load(Relaxed) < *since_ns;
                let vcpus = self.vcpus.iter().filter(lags).count() as u64;
                return Ok(Answer::Laggards { vcpus });
            }
            Order::Disk => return Ok(Answer::Disk(self.disk()?.count())),
            Order::VerifyDisk => return Ok(Answer::Disk(self.disk()?.verify()?)),
            Order::Presence => return self.presence().map(Answer::Presence),
            Order::Faults => {
                let ns = self.vcpus.iter().flat_map(Vcpu::take_faults).collect();
                return Ok(Answer::Faults { ns });
            }
            Order::Pause => self.pause()?,
            Order::Resume => self.resume(),
            Order::Move { sections } => self.hot.advance(*sections),
            Order::Resize { hot_permille } => self.hot.resize(*hot_permille),
            Order::Rest { us } => self.nap_us.store(*us, Relaxed),
            Order::TouchAll => (0..self.ram.pages())
                .try_for_each(|page| self.ram.check_stamps(PageNo(page)))
                .map_err(wrong)?,
            Order::VerifySome { pages, seed } => {
                let mut random = SplitMix64::new(*seed);
                (0..*pages)
                    .try_for_each(|_| self.ram.check(PageNo(random.below(self.ram.pages()))))
                    .map_err(wrong)?;
            }
            Order::VerifyAll => self.ram.check_all(self.threads).map_err(wrong)?,
        }
        Ok(Answer::Done {
            ns: clock::ns(begun.elapsed()),
        })
    }

    fn disk(&self) -> Result<&DiskWork, String> {
        self.disk.as_ref().ok_or_else(|| "there is no disk".into())
    }

    fn presence(&self) -> Result<Presence, String> {
        let runs = self.ram.present().map_err(|error| error.to_string())?;
        let mut runs = runs.into_iter().peekable();
        let mut found = Presence::default();
        for first in (0..self.ram.pages()).step_by(to_usize(SECTION_PAGES)) {
            let mut hot_here = 0;
            for page in first..first + SECTION_PAGES {
                while runs.peek().is_some_and(|run| run.end <= page) {
                    runs.next();
                }
                let is_present = runs.peek().is_some_and(|run| run.contains(&page));
                if self.hot.is_hot(PageNo(page)) {
                    hot_here += 1;
                    found.hot_present_pages += u64::from(is_present);
                } else {
                    found.cold_present_pages += u64::from(is_present);
                }
            }
            found.hot_pages += hot_here;
            found.cold_pages += SECTION_PAGES - hot_here;
            found.cold_sections += u64::from(hot_here == 0);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(pattern: &str) -> Arc<Guest> {
        let sections = 4;
        let ram = Ram::new(sections * SECTION_PAGES, HugePages::NotAdvised, Mix::Halves).unwrap();
        ram.fill(2);
        Arc::new(Guest {
            disk: None,
            batch: BATCH,
            nap_us: AtomicU64::new(0),
            hot: HotPages::new(pattern.parse().unwrap(), sections),
            ram,
            vcpus: vec![Vcpu::default(), Vcpu::default()],
            pausing: AtomicBool::new(false),
            rest: Mutex::default(),
            changed: Condvar::new(),
            wrong: OnceLock::new(),
            time_faults: false,
            threads: 2,
        })
    }

    #[test]
    fn vcpus_that_rest_count_nothing_and_all_they_wrote_is_right() {
        let guest = guest("part:500");
        for number in 0..2 {
            let guest = Arc::clone(&guest);
            std::thread::spawn(move || guest.run_vcpu(number, 0));
        }
        let operations = |vcpu: &Vcpu| vcpu.operations.load(Relaxed);
        while guest.vcpus.iter().any(|vcpu| operations(vcpu) == 0) {
            std::thread::yield_now();
        }
        guest.pause().unwrap();
        let mut before = (Instant::now(), 0, 0);
        assert!(guest.count(&mut before).unwrap().operations >= 2 * BATCH);
        guest.obey(&Order::VerifyAll).unwrap();
        assert_eq!(guest.count(&mut before).unwrap().operations, 0);
        guest.resume();
        while guest.count(&mut before).unwrap().operations == 0 {
            std::thread::yield_now();
        }
        guest.pause().unwrap();
        guest.obey(&Order::TouchAll).unwrap();
        guest
            .obey(&Order::VerifySome { pages: 9, seed: 1 })
            .unwrap();
    }

    #[test]
    fn presence_tells_hot_from_cold() {
        let guest = guest("part:500");
        let found = guest.presence().unwrap();
        let half = 2 * SECTION_PAGES;
        let all = Presence {
            hot_pages: half,
            hot_present_pages: half,
            cold_pages: half,
            cold_present_pages: half,
            cold_sections: 2,
        };
        assert_eq!(found, all);
        assert_eq!(
            super::Guest::presence(&self::guest("one-page"))
                .unwrap()
                .cold_sections,
            0
        );
    }

    #[test]
    fn ram_that_is_none_is_refused() {
        let options = |ram_mib| BusyGuestOptions {
            ram_mib,
            size: RamSize::Exact,
            vcpus: 1,
            first_cpu: 0,
            batch: BATCH,
            rest_us: 0,
            time_faults: false,
            pattern: Pattern::OnePage,
            huge_pages: HugePages::NotAdvised,
            disk: None,
        };
        assert_eq!(options(64).ram_bytes(), Ok(64 << 20));
        for mib in [0, 3, u64::MAX, 1 << 30] {
            options(mib).ram_bytes().unwrap_err();
        }
    }
}
