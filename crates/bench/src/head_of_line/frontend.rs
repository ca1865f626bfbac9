// SPDX-License-Identifier: Apache-2.0
//! The client of `bench head-of-line`: drives the disks of A and B from one thread.
//!
//! It polls from shortly before a request is due until B has no request left, and sleeps in between, when
//! the other thread of its CPU (the tier) can run.
//!
//! Both loads are open loops: a request is due at its time, independent of earlier ones, and its latency
//! counts from then. B's requests come at a fixed period. A's gaps are drawn at random, from half of their
//! mean to one and a half, so that its faults begin and end anywhere in B's period, and each is over before
//! the next. They follow from the seed: both sides, and pages absent and present, get the same ones. A
//! always reads into a page not used before in this run, so that each read is a fault if pages are absent.
//!
//! Lines: it prints where A's pages are ([`MemoryName`]); then a [`Run`] makes it empty or fill A's pages
//! and print `true`; `"go"` makes it run and print a [`RunResult`].

use super::tier::MemoryName;
use crate::harness::{figures::to_f64, latencies::Latencies};
use pagetide_addr::PAGE_BYTES;
use pagetide_random::SplitMix64;
use pagetide_sys::clock;
use pagetide_sys::lent::{LentError, LentMemory};
use rustix::{
    fs::{FallocateFlags, fallocate, fstat},
    thread::set_current_timer_slack,
};
use serde::{Deserialize, Serialize};
use std::{
    io::{BufRead as _, Write as _},
    num::NonZeroU64,
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
    time::{Duration, Instant},
};
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

/// Bytes of an I/O.
const IO_BYTES: u64 = 4096;
/// Entries of each queue.
const QUEUE_SIZE: u16 = 256;
/// Requests of B that may wait: three descriptors each, and 5 ms at 4,000 a second are 20.
const B_BUFFERS: u16 = 80;
/// A's pages, each for one request of a run.
const A_PAGES: u16 = 1024;
/// Requests of A that may wait.
const A_DEPTH_MAX: u16 = 80;
/// The client wakes this long before a request is due.
const WAKE_BEFORE: Duration = Duration::from_micros(30);
/// Shortest sleep: less is not worth the timer.
const SLEEP_MIN: Duration = Duration::from_micros(40);
/// Longest wait for the last requests of a run.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of A's pages before a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pages {
    /// Present.
    Present,
    /// Absent.
    Absent,
}

impl Pages {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Present => "present",
            Self::Absent => "absent",
        }
    }
}

/// A run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The state of A's pages.
    pub pages: Pages,
    /// How long requests become due.
    pub time: Duration,
    /// B's requests a second.
    pub requests_per_s: u32,
    /// A's requests a second, on average.
    pub faults_per_s: u32,
    /// Seed of A's gaps.
    pub seed: u64,
}

/// Latencies of one tenant, from when each request was due.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Requests.
    pub count: u64,
    /// Median, in microseconds.
    pub p50_us: f64,
    /// 99 in 100 took no longer.
    pub p99_us: f64,
    /// 999 in 1000 took no longer.
    pub p999_us: f64,
    /// The longest.
    pub max_us: f64,
}

/// The result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Of the tenant whose pages may be absent.
    pub a: Latency,
    /// Of the other.
    pub b: Latency,
    /// Requests that failed, of both.
    pub errors: u64,
}

/// Why the client ended.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// A device or its queue.
    #[error("the device: {0}")]
    Device(#[from] std::io::Error),
    /// Memory for buffers.
    #[error(transparent)]
    Memory(#[from] LentError),
    /// Emptying it, or a timer.
    #[error("A's pages or the timer: {0}")]
    Kernel(#[from] rustix::io::Errno),
    /// A line.
    #[error("the bench's lines: {0}")]
    Line(#[from] serde_json::Error),
    /// The path of a socket.
    #[error("the path of the socket is not UTF-8")]
    Path,
    /// A buffer that does not exist: a bug of ours.
    #[error("there is no buffer {0}")]
    Buffer(u16),
    /// More than there are pages for.
    #[error("a run may have {0} requests of A, and there are {A_PAGES} pages for them")]
    TooMany(u64),
    /// A request was not answered.
    #[error("requests were not answered within {DRAIN_TIMEOUT:?}")]
    Lost,
}

/// Serves runs until the end of input.
///
/// # Errors
/// [`FrontendError`].
pub fn serve(socket_a: &Path, socket_b: &Path) -> Result<(), FrontendError> {
    let (transport_a, queue_a, memory_a) = connect(socket_a, A_PAGES)?;
    let (transport_b, queue_b, memory_b) = connect(socket_b, B_BUFFERS)?;
    let stat = fstat(memory_a.as_fd())?;
    say(&MemoryName {
        dev: stat.st_dev,
        ino: stat.st_ino,
        pid: std::process::id(),
        descriptor: memory_a.as_fd().as_raw_fd(),
    })?;
    // Timers of ordinary threads are delayed by 50 us otherwise.
    set_current_timer_slack(NonZeroU64::new(1))?;
    let mut a = Tenant::new(transport_a.as_ref(), queue_a, memory_a);
    let mut b = Tenant::new(transport_b.as_ref(), queue_b, memory_b);
    let mut lines = std::io::stdin().lock().lines();
    while let Some(line) = lines.next() {
        let run: Run = serde_json::from_str(&line?)?;
        a.prepare(run.pages)?;
        say(&true)?;
        if let Some(go) = lines.next() {
            go?;
            say(&both(&mut a, &mut b, run)?)?;
        }
    }
    Ok(())
}

pub(super) fn say<T: Serialize>(answer: &T) -> Result<(), FrontendError> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, answer)?;
    writeln!(out)?;
    out.flush()?;
    Ok(())
}

type Connected<'a> = (Box<VirtioBlkTransport>, VirtioBlkQueue<'a, u16>, LentMemory);

fn connect<'a>(socket: &Path, pages: u16) -> Result<Connected<'a>, FrontendError> {
    let features = VirtioFeatureFlags::VERSION_1.bits()
        | VirtioFeatureFlags::RING_EVENT_IDX.bits()
        | VirtioBlkFeatureFlags::MQ.bits();
    let path = socket.to_str().ok_or(FrontendError::Path)?;
    let mut transport: Box<VirtioBlkTransport> = Box::new(VhostUser::new(path, features)?);
    let bytes = u64::from(pages) * PAGE_BYTES;
    let memory = LentMemory::new("bench-tenant", bytes)?;
    let mut queues = VirtioBlkQueue::setup_queues(transport.as_mut(), 1, QUEUE_SIZE)?;
    transport.map_mem_region(
        memory.address(),
        usize::try_from(bytes).unwrap_or(usize::MAX),
        memory.as_fd().as_raw_fd(),
        0,
    )?;
    let mut queue = queues.swap_remove(0);
    // The client polls for it.
    queue.set_used_notif_enabled(false);
    Ok((transport, queue, memory))
}

/// Time from one of a tenant's requests to the next.
#[derive(Debug, Clone)]
enum Gaps {
    /// Always the same.
    Even(Duration),
    /// Evenly distributed from half of `mean` to one and a half.
    Drawn { mean: Duration, random: SplitMix64 },
}

impl Gaps {
    /// From the start of a run to its first request.
    fn first(&mut self) -> Duration {
        match self {
            Self::Even(_) => Duration::ZERO,
            Self::Drawn { mean, random } => mean.mul_f64(random.unit()),
        }
    }

    fn next(&mut self) -> Duration {
        match self {
            Self::Even(gap) => *gap,
            Self::Drawn { mean, random } => mean.mul_f64(0.5 + random.unit()),
        }
    }

    /// Requests that are due within `time`, at most.
    fn requests_max(&self, time: Duration) -> u64 {
        let shortest = match self {
            Self::Even(gap) => *gap,
            Self::Drawn { mean, .. } => *mean / 2,
        };
        let gaps = time.as_nanos() / shortest.as_nanos().max(1);
        u64::try_from(gaps).unwrap_or(u64::MAX).saturating_add(1)
    }
}

/// A load of one tenant and its results.
struct Tenant<'a> {
    transport: &'a VirtioBlkTransport,
    queue: VirtioBlkQueue<'a, u16>,
    memory: LentMemory,
    /// Buffers to be used next, the last one first.
    free: Vec<u16>,
    /// When each buffer's request was due.
    due: Vec<Duration>,
    next_due: Duration,
    gaps: Gaps,
    in_flight: u16,
    latencies_ns: Vec<u64>,
    errors: u64,
}

/// When a buffer can be reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Again,
    /// Not in this run.
    Never,
}

impl<'a> Tenant<'a> {
    fn new(
        transport: &'a VirtioBlkTransport,
        queue: VirtioBlkQueue<'a, u16>,
        memory: LentMemory,
    ) -> Self {
        Self {
            transport,
            queue,
            memory,
            free: Vec::new(),
            due: Vec::new(),
            next_due: Duration::ZERO,
            gaps: Gaps::Even(Duration::ZERO),
            in_flight: 0,
            latencies_ns: Vec::new(),
            errors: 0,
        }
    }

    /// Empties or fills its pages.
    fn prepare(&mut self, pages: Pages) -> Result<(), FrontendError> {
        let bytes = u64::from(A_PAGES) * PAGE_BYTES;
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(self.memory.as_fd(), punch, 0, bytes)?;
        if pages == Pages::Present {
            let buffer = self.memory.bytes_mut(0, bytes);
            buffer.ok_or(FrontendError::Buffer(0))?.fill(0x11);
        }
        Ok(())
    }

    fn begin(&mut self, buffers: u16, mut gaps: Gaps) {
        self.free = (0..buffers).rev().collect();
        self.due = vec![Duration::ZERO; usize::from(buffers)];
        self.next_due = gaps.first();
        self.gaps = gaps;
        self.latencies_ns.clear();
        self.errors = 0;
    }

    /// Submits the requests due by `now`.
    fn submit_due(
        &mut self,
        now: Duration,
        end: Duration,
        depth_max: u16,
    ) -> Result<(), FrontendError> {
        let mut submitted = false;
        while self.next_due <= now && self.next_due < end && self.in_flight < depth_max {
            let Some(buffer) = self.free.pop() else {
                break;
            };
            let at = u64::from(buffer) * PAGE_BYTES;
            let bytes = self.memory.bytes_mut(at, IO_BYTES);
            let bytes = bytes.ok_or(FrontendError::Buffer(buffer))?;
            let offset = u64::from(buffer) * IO_BYTES;
            self.queue.read(offset, bytes, buffer)?;
            self.due[usize::from(buffer)] = self.next_due;
            self.next_due += self.gaps.next();
            self.in_flight += 1;
            submitted = true;
        }
        if submitted && self.queue.avail_notif_needed() {
            self.transport.get_submission_notifier(0).notify()?;
        }
        Ok(())
    }

    fn take_done(&mut self, began: Instant, after: After) {
        for done in self.queue.completions() {
            let due = self.due[usize::from(done.context)];
            let took = began.elapsed().saturating_sub(due);
            let ns = clock::ns(took);
            self.latencies_ns.push(ns);
            self.errors += u64::from(done.ret != 0);
            self.in_flight -= 1;
            if after == After::Again {
                self.free.push(done.context);
            }
        }
    }

    fn is_over(&self, end: Duration) -> bool {
        self.next_due >= end && self.in_flight == 0
    }
}

/// Runs both loads at once.
fn both(a: &mut Tenant<'_>, b: &mut Tenant<'_>, run: Run) -> Result<RunResult, FrontendError> {
    let beat = |per_s: u32| Duration::from_secs(1) / per_s.max(1);
    let gaps_a = Gaps::Drawn {
        mean: beat(run.faults_per_s),
        random: SplitMix64::new(run.seed),
    };
    let a_requests = gaps_a.requests_max(run.time);
    if a_requests > u64::from(A_PAGES) {
        return Err(FrontendError::TooMany(a_requests));
    }
    a.begin(A_PAGES, gaps_a);
    b.begin(B_BUFFERS, Gaps::Even(beat(run.requests_per_s)));
    let began = Instant::now();
    while !(a.is_over(run.time) && b.is_over(run.time)) {
        let now = began.elapsed();
        if now > run.time + DRAIN_TIMEOUT {
            return Err(FrontendError::Lost);
        }
        b.submit_due(now, run.time, B_BUFFERS)?;
        a.submit_due(now, run.time, A_DEPTH_MAX)?;
        b.take_done(began, After::Again);
        a.take_done(began, After::Never);
        if b.in_flight == 0 {
            // A's latency may be noticed late by the gap: it is not evaluated.
            let next = a.next_due.min(b.next_due).saturating_sub(WAKE_BEFORE);
            sleep(next.saturating_sub(began.elapsed()));
        }
    }
    Ok(RunResult {
        a: latency(std::mem::take(&mut a.latencies_ns)),
        b: latency(std::mem::take(&mut b.latencies_ns)),
        errors: a.errors + b.errors,
    })
}

fn sleep(time: Duration) {
    if time < SLEEP_MIN {
        std::hint::spin_loop();
    } else {
        std::thread::sleep(time);
    }
}

pub(super) fn latency(ns: Vec<u64>) -> Latency {
    let times: Latencies = ns.into_iter().collect();
    let at = |permille| to_f64(times.ns(permille)) / 1e3;
    Latency {
        count: times.count() as u64,
        p50_us: at(500),
        p99_us: at(990),
        p999_us: at(999),
        max_us: at(1000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_the_least_that_enough_do_not_exceed() {
        let ns: Vec<u64> = (1..=10_000).rev().map(|i| i * 1000).collect();
        let found = latency(ns);
        assert_eq!(found.count, 10_000);
        assert!((found.p50_us - 5000.0).abs() < 1e-6);
        assert!((found.p999_us - 9990.0).abs() < 1e-6);
        assert!((found.max_us - 10_000.0).abs() < 1e-6);
        assert_eq!(latency(Vec::new()).count, 0);
    }

    #[test]
    fn faults_begin_and_end_in_every_part_of_bs_beat_and_are_the_same_of_the_same_seed() {
        const BEAT_NS: u128 = 250_000;
        let (mean, time) = (Duration::from_millis(100), Duration::from_secs(4));
        let dues = |seed| {
            let random = SplitMix64::new(seed);
            let mut gaps = Gaps::Drawn { mean, random };
            let most = gaps.requests_max(time);
            let mut dues = vec![gaps.first()];
            while dues[dues.len() - 1] < time {
                dues.push(dues[dues.len() - 1] + gaps.next());
            }
            dues.pop();
            assert!(dues.len() as u64 <= most);
            dues
        };
        let runs: Vec<_> = (0..5).map(dues).collect();
        let count: usize = runs.iter().map(Vec::len).sum();
        assert!((180..=220).contains(&count), "{count} of 200");
        for run in &runs {
            // Each is over before the next, also where a page takes 5 ms.
            let shortest = run.windows(2).map(|two| two[1] - two[0]).min();
            assert!(shortest >= Some(mean / 2), "{shortest:?}");
        }
        for hold in [Duration::ZERO, Duration::from_millis(5)] {
            let mut tenths = [0; 10];
            for due in runs.iter().flatten() {
                let phase_ns = (*due + hold).as_nanos() % BEAT_NS;
                tenths[usize::try_from(phase_ns * 10 / BEAT_NS).unwrap()] += 1;
            }
            assert!(tenths.iter().all(|count| *count >= 5), "{tenths:?}");
        }
        assert_eq!(runs[1], dues(1));
        assert_ne!(runs[1], runs[2]);
    }

    #[test]
    fn run_and_result_survive_the_line() {
        let run = Run {
            pages: Pages::Absent,
            time: Duration::from_millis(1500),
            requests_per_s: 4000,
            faults_per_s: 10,
            seed: 3,
        };
        let line = serde_json::to_string(&run).unwrap();
        assert_eq!(serde_json::from_str::<Run>(&line).unwrap(), run);
    }
}
