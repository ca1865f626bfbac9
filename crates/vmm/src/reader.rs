// SPDX-License-Identifier: Apache-2.0
//! [`FaultReader`]: the one thread that reads a VM's faults.
//!
//! One per VM: several readers of one userfaultfd wake one another. The reader hands each fault to
//! a [`FaultSink`], which serves it on this thread if that needs no wait; if it does, or if many
//! faults arrive together, other threads help ([`crate::servers`]).
//!
//! # Where
//! A fault is cheapest when its reader runs on the CPU of the faulting thread, because that thread
//! has just gone to sleep there. So the reader follows: now and then it checks the CPU of the last
//! fault's thread. That means reading a file in `/proc` (some 20 µs), so it is not done at every
//! fault, and ever less often as long as the answer stays the same.
//!
//! # Priority
//! The CPU that a faulting thread leaves goes to whoever the kernel's scheduler finds most deserving, and a
//! background thread that has waited long for a CPU may be that. So the reader has niceness -20, where that is
//! allowed: it works for some microseconds, for a thread that waits for it.
//!
//! # Waiting
//! The reader waits in `read` itself. The kernel mostly runs a thread that the fill has woken at
//! once; if it faults again, the reader finds the next message without having slept. If not, the
//! `read` that checks for a message also yields the shared CPU to the woken thread: polling there
//! would keep it from running. (Measured: `poll` before each `read` costs 0.5 to 1 µs a fault,
//! polling for 50 µs up to 50.) A reader configured to poll therefore stays
//! [`ReaderPlacement::Anywhere`].
//!
//! ```text
//!   reader:  read ──► serve ──► read ──► …       EINTR: is it over?
//!   watcher: poll(VMM's pidfd, stop) ──► say what, interrupt until the reader has ended
//! ```

use crate::layout::LiveLayout;
use crate::process::VmmProcess;
use crate::servers::{FaultServers, ServerCpus, words_of};
use crate::threads::last_cpu;
use pagetide_addr::{Access, Hva, PAGE_BYTES, PageNo, PageRange};
use pagetide_sys::cpu::{self, Urgency};
use pagetide_sys::interrupt;
use pagetide_sys::process::ProcessError;
use pagetide_sys::uffd::{
    FaultEvent, FaultKind as RawKind, UffdError, Userfaultfd, Watch as WatchFor, page_of,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

mod watch;

use watch::{End, Watch, WatchState, signal};

/// Faults between two checks of where the faulting threads run, at first.
pub const FAULTS_PER_LOOK: u64 = 64;
/// The same once they have stayed on their CPU for many checks: ten milliseconds of faults.
const FAULTS_PER_LOOK_MAX: u64 = 1024;
const _: () = assert!(FAULTS_PER_LOOK <= FAULTS_PER_LOOK_MAX);

/// Why a thread waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// The page is absent.
    Missing,
    /// The page is write-protected.
    WriteProtected,
}

/// A fault of a VM, as passed on by the reader. Only a hint: the state may have changed since.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VcpuFault {
    /// The page.
    pub page: PageNo,
    /// Why the thread waits.
    pub kind: FaultKind,
    /// The access it attempted.
    pub access: Access,
    /// The thread, of the VMM.
    pub thread: u32,
    /// When it was read.
    pub read_at: Instant,
}

/// Result of trying to serve a fault without waiting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Served {
    /// Its thread runs again, or will without further action.
    Yes,
    /// That would need a wait: call [`FaultSink::fault`].
    WouldWait,
}

/// Serves faults.
pub trait FaultSink: Send + Sync {
    /// A thread of the VMM waits: serves its fault if that needs no wait for room, for a lock that is
    /// held long, or for a device. Called on the reader's thread.
    fn fault_at_once(&self, fault: VcpuFault) -> Served;

    /// A thread of the VMM waits: serves its fault. Called on any of several threads, several at a
    /// time.
    fn fault(&self, fault: VcpuFault);

    /// A fault was served, and so were the others read with it. Called where it was served; returns
    /// the pages around it that are worth reading ahead.
    fn served(&self, fault: VcpuFault) -> Option<PageRange>;

    /// Reads such pages ahead. Called where that disturbs least.
    fn bring_along(&self, pages: PageRange);

    /// True if little room is left for further faults: a server should make some now, while no fault waits
    /// for it. Asked after faults were served, where they were.
    fn is_short_of_room(&self) -> bool {
        false
    }

    /// Makes room for further faults. Called on a server's thread only; it may take time.
    fn make_room(&self) {}

    /// The VMM has ended; no more faults are read. Called once, as the reader's last call.
    fn vmm_gone(&self);

    /// The reader had to give up; faults are no longer served. Called once, as the reader's last
    /// call.
    fn reader_failed(&self, error: &ReaderError);
}

/// Where the reader runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReaderPlacement {
    /// On the CPU of the faulting threads.
    FollowFaults,
    /// Where the scheduler puts it.
    Anywhere,
}

/// How the reader works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReaderConfig {
    /// Where it runs.
    pub placement: ReaderPlacement,
    /// After a fault: how long the reader polls for the next one before it sleeps, in microseconds.
    /// It keeps its CPU fully busy meanwhile, so that must not be a vCPU's.
    pub poll_us: u64,
    /// Threads that serve faults beside the reader.
    pub servers: usize,
}

/// Fewest and most threads that serve beside a reader.
const SERVERS: std::ops::RangeInclusive<usize> = 2..=8;

impl Default for ReaderConfig {
    /// With as many servers as there are CPUs, within reason.
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            placement: ReaderPlacement::FollowFaults,
            poll_us: 0,
            servers: cpus.clamp(*SERVERS.start(), *SERVERS.end()),
        }
    }
}

/// Why a reader could not be started, or had to give up.
#[derive(Debug, thiserror::Error)]
pub enum ReaderError {
    /// The kernel refused something.
    #[error("{operation} failed: {source}")]
    Kernel {
        /// The operation.
        operation: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The userfaultfd failed.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// The VMM's pidfd could not be duplicated.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Serving a fault panicked, which is a bug in this program.
    #[error("serving a fault panicked ({what}): a bug; the VM waits until it is served again")]
    Panicked {
        /// The panic message.
        what: String,
    },
}

/// Counters of a reader.
#[derive(Debug, Default)]
pub struct ReaderCounters {
    /// Faults handed to the sink.
    pub faults: AtomicU64,
    /// Reads that returned at least one.
    pub batches: AtomicU64,
    /// Moves to another CPU.
    pub moves: AtomicU64,
    /// Id of the reader's thread, once it runs.
    pub thread: AtomicU64,
    /// Faults at addresses that are not RAM, or of a kind that was not requested.
    pub strays: AtomicU64,
}

/// The running reader, with its servers; dropping it stops them.
#[derive(Debug)]
pub struct FaultReader {
    counters: Arc<ReaderCounters>,
    stop: Arc<OwnedFd>,
    watcher: Option<JoinHandle<()>>,
    thread: Option<JoinHandle<()>>,
    servers: Arc<FaultServers>,
}

impl FaultReader {
    /// Starts reading the faults of `vmm`. The servers run on `cpus`.
    ///
    /// # Errors
    /// [`ReaderError`].
    pub fn start(
        vmm: &VmmProcess,
        userfaultfd: Arc<Userfaultfd>,
        layout: Arc<LiveLayout>,
        sink: Arc<dyn FaultSink>,
        config: ReaderConfig,
        cpus: &Arc<ServerCpus>,
    ) -> Result<Self, ReaderError> {
        let kernel = |operation| move |source| ReaderError::Kernel { operation, source };
        interrupt::allow().map_err(kernel("sigaction"))?;
        set_reads(&userfaultfd, Reads::of(config.poll_us)).map_err(kernel("fcntl"))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| kernel("eventfd")(e.into()))?;
        let stop = Arc::new(stop);
        let servers = Self::start_servers(vmm.pid(), &sink, config, cpus, &stop)
            .map_err(kernel("starting a thread"))?;
        let counters = Arc::new(ReaderCounters::default());
        let told = Arc::new(WatchState::default());
        let watch = Watch {
            vmm: vmm.fd().try_clone()?,
            stop: Arc::clone(&stop),
            told: Arc::clone(&told),
            counters: Arc::clone(&counters),
        };
        let mut reading = Reading {
            userfaultfd,
            layout,
            pid: vmm.pid(),
            told,
            counters: Arc::clone(&counters),
            config,
            servers: Arc::clone(&servers),
            faults: Vec::new(),
            done: Vec::new(),
            here: None,
            next_look: 0,
            look_every: FAULTS_PER_LOOK,
        };
        let watcher = std::thread::Builder::new()
            .name(format!("watch-{}", vmm.pid()))
            .spawn(move || watch.run())
            .map_err(kernel("starting a thread"))?;
        let mut reader = Self {
            counters,
            stop,
            watcher: Some(watcher),
            thread: None,
            servers,
        };
        let ended = Arc::clone(&reading.told);
        let spawned = std::thread::Builder::new()
            .name(format!("faults-{}", vmm.pid()))
            .spawn(move || {
                let outcome = reading.run_to_the_end(sink.as_ref());
                reading.told.say_ended();
                match outcome {
                    Ok(End::Stopped) => {}
                    Ok(End::VmmGone) => sink.vmm_gone(),
                    Err(error) => sink.reader_failed(&error),
                }
            });
        match spawned {
            Ok(thread) => {
                reader.thread = Some(thread);
                Ok(reader)
            }
            Err(source) => {
                // There is no thread for the watcher to interrupt.
                ended.say_ended();
                Err(kernel("starting a thread")(source))
            }
        }
    }

    fn start_servers(
        pid: u32,
        sink: &Arc<dyn FaultSink>,
        config: ReaderConfig,
        cpus: &Arc<ServerCpus>,
        stop: &Arc<OwnedFd>,
    ) -> io::Result<Arc<FaultServers>> {
        let stop = Arc::clone(stop);
        // The reader then reports why, as for a panic of its own.
        let failed = move || signal(&stop);
        let servers = FaultServers::start(config.servers, pid, sink, cpus, failed)?;
        Ok(Arc::new(servers))
    }

    /// Faults served by threads other than the reader so far.
    #[must_use]
    pub fn handed_on(&self) -> u64 {
        self.servers.taken()
    }

    /// Its counters.
    #[must_use]
    pub fn counters(&self) -> &ReaderCounters {
        &self.counters
    }

    /// CPU time its thread has used, in seconds; 0 if the kernel does not report it.
    #[must_use]
    pub fn cpu_seconds(&self) -> f64 {
        let thread = self.counters.thread.load(Ordering::Relaxed);
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat"));
        let first = stat
            .ok()
            .and_then(|s| s.split_whitespace().next().map(str::to_owned));
        let ns: u64 = first.and_then(|ns| ns.parse().ok()).unwrap_or(0);
        Duration::from_nanos(ns).as_secs_f64()
    }

    /// Stops it and waits until its last fault is served.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for FaultReader {
    fn drop(&mut self) {
        signal(&self.stop);
        let own = std::thread::current().id();
        if self.thread.as_ref().is_some_and(|t| t.thread().id() == own) {
            return;
        }
        for thread in [self.watcher.take(), self.thread.take()] {
            if thread.is_some_and(|thread| thread.join().is_err()) {
                tracing::error!("a fault reader or its watcher has panicked");
            }
        }
    }
}

/// What `read` does while there is no fault.
#[derive(Clone, Copy)]
enum Reads {
    Block,
    Poll,
}

impl Reads {
    /// A reader that polls for `poll_us` before it sleeps must not sleep in `read`.
    fn of(poll_us: u64) -> Self {
        if poll_us == 0 {
            Self::Block
        } else {
            Self::Poll
        }
    }
}

/// Makes `read` blocking or non-blocking. The flag belongs to the userfaultfd, not to our
/// descriptor, so a predecessor may have left it either way.
fn set_reads(userfaultfd: &Userfaultfd, reads: Reads) -> io::Result<()> {
    let flags = fcntl_getfl(userfaultfd.as_fd())? & !OFlags::NONBLOCK;
    let nonblock = match reads {
        Reads::Block => OFlags::empty(),
        Reads::Poll => OFlags::NONBLOCK,
    };
    fcntl_setfl(userfaultfd.as_fd(), flags | nonblock)?;
    Ok(())
}

struct Reading {
    userfaultfd: Arc<Userfaultfd>,
    layout: Arc<LiveLayout>,
    pid: u32,
    told: Arc<WatchState>,
    counters: Arc<ReaderCounters>,
    config: ReaderConfig,
    servers: Arc<FaultServers>,
    /// The faults read last.
    faults: Vec<VcpuFault>,
    /// Those of them that were served here.
    done: Vec<VcpuFault>,
    here: Option<usize>,
    next_look: u64,
    look_every: u64,
}

impl Reading {
    /// A thread that ended by a panic would leave the VM hanging without any report.
    fn run_to_the_end(&mut self, sink: &dyn FaultSink) -> Result<End, ReaderError> {
        // After a panic, both are used only to report it.
        let run = AssertUnwindSafe(|| self.run(sink));
        catch_unwind(run).unwrap_or_else(|panic| {
            let what = words_of(panic.as_ref());
            Err(ReaderError::Panicked { what })
        })
    }

    fn run(&mut self, sink: &dyn FaultSink) -> Result<End, ReaderError> {
        if let Err(error) = cpu::set_urgency(Urgency::Eager) {
            tracing::debug!(%error, "the reader of faults stays an ordinary thread");
        }
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.counters
            .thread
            .store(u64::from(thread.unsigned_abs()), Ordering::Relaxed);
        let mut faults = Vec::new();
        let mut last = Instant::now();
        loop {
            // Unread faults stay in the kernel for the next reader.
            if let Some(end) = self.told.end() {
                return match self.servers.failure() {
                    Some(what) => Err(ReaderError::Panicked { what }),
                    None => Ok(end),
                };
            }
            if self.userfaultfd.read_faults(&mut faults)? > 0 {
                self.serve(&faults, sink)?;
                if self.config.poll_us > 0 {
                    last = Instant::now();
                }
            } else if self.config.poll_us > 0 {
                if last.elapsed() < Duration::from_micros(self.config.poll_us) {
                    std::hint::spin_loop();
                } else {
                    self.sleep()?;
                    last = Instant::now();
                }
            }
        }
    }

    /// Sleeps until a fault can be read, or until interrupted: for a reader that polls.
    fn sleep(&self) -> Result<(), ReaderError> {
        let failed = |source| ReaderError::Kernel {
            operation: "poll of a userfaultfd",
            source,
        };
        let mut polled = [PollFd::from_borrowed_fd(
            self.userfaultfd.as_fd(),
            PollFlags::IN,
        )];
        match poll(&mut polled, None) {
            Ok(_) if polled[0].revents().contains(PollFlags::ERR) => {
                Err(failed(io::Error::from(io::ErrorKind::BrokenPipe)))
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(failed(e.into())),
        }
    }

    fn serve(&mut self, events: &[FaultEvent], sink: &dyn FaultSink) -> Result<(), ReaderError> {
        self.counters.batches.fetch_add(1, Ordering::Relaxed);
        let read_at = Instant::now();
        self.faults.clear();
        let mut strays = Vec::new();
        for event in events {
            let kind = match event.kind {
                RawKind::Missing => Some(FaultKind::Missing),
                RawKind::WriteProtected => Some(FaultKind::WriteProtected),
                RawKind::Minor => None,
            };
            if let (Some(kind), Some(page)) = (kind, self.layout.look().page_at(event.address)) {
                self.faults.push(VcpuFault {
                    page,
                    kind,
                    access: event.access,
                    thread: event.thread,
                    read_at,
                });
            } else {
                strays.push(event.address);
            }
        }
        let count = self.faults.len() as u64;
        self.counters.faults.fetch_add(count, Ordering::Relaxed);
        self.serve_together(sink);
        if let Some(last) = events.last() {
            self.follow(last.thread);
        }
        strays
            .into_iter()
            .try_for_each(|address| self.stray(address))
    }

    /// Serves the faults read, together with the servers if there are several.
    fn serve_together(&mut self, sink: &dyn FaultSink) {
        let Some((first, others)) = self.faults.split_first() else {
            return;
        };
        if !others.is_empty() {
            self.servers.share(others);
        }
        let mut next = Some(*first);
        while let Some(fault) = next {
            if self.serve_one(fault, sink) == Served::Yes {
                self.done.push(fault);
            }
            // All faults shared before were taken: those there now arrived with these.
            next = match others {
                [] => None,
                [_, ..] => self.servers.take_back(),
            };
        }
        for fault in self.done.drain(..) {
            // A thread that was served most likely runs on this CPU again.
            if let Some(pages) = sink.served(fault)
                && let Some(pages) = self.servers.bring_along(pages)
            {
                sink.bring_along(pages);
            }
        }
        if sink.is_short_of_room() {
            self.servers.make_room();
        }
    }

    fn serve_one(&self, fault: VcpuFault, sink: &dyn FaultSink) -> Served {
        let served = sink.fault_at_once(fault);
        if served == Served::WouldWait
            && let Some(fault) = self.servers.hand_on(fault)
        {
            sink.fault(fault);
        }
        served
    }

    /// A thread waits at an address that is watched but not in the layout (RAM that a predecessor
    /// had begun to take over). If woken, the thread would only fault again, for ever: so its
    /// mapping is no longer watched, and the thread reads the file's content, or zeros.
    fn stray(&self, address: Hva) -> Result<(), ReaderError> {
        self.counters.strays.fetch_add(1, Ordering::Relaxed);
        let page = page_of(address);
        if self.layout.look().page_at(address).is_none() {
            let (start, len_bytes) = self.layout.now().stray_part(self.pid, page);
            if let Err(error) = self.userfaultfd.unregister(start, len_bytes) {
                tracing::debug!(%address, %error, "a stray fault's mapping was not watched, or is gone");
            }
            // It may have become RAM meanwhile, and must then be watched.
            if let Some(page) = self.layout.look().page_at(address) {
                tracing::debug!(%address, %page, "a stray fault's mapping has become RAM");
                let both = WatchFor::MissingAndWriteProtected;
                self.userfaultfd.register(start, len_bytes, both)?;
            }
        }
        Ok(self.userfaultfd.wake(page, PAGE_BYTES)?)
    }

    /// Every `look_every` faults: moves to the CPU where `thread` runs.
    fn follow(&mut self, thread: u32) {
        let count = self.counters.faults.load(Ordering::Relaxed);
        if self.config.placement == ReaderPlacement::Anywhere || count < self.next_look {
            return;
        }
        let there = last_cpu(self.pid, thread);
        self.look_every = if there == self.here {
            (2 * self.look_every).min(FAULTS_PER_LOOK_MAX)
        } else {
            FAULTS_PER_LOOK
        };
        self.next_look = count + self.look_every;
        let Some(there) = there.filter(|there| Some(*there) != self.here) else {
            return;
        };
        match cpu::set_affinity(&[there]) {
            Ok(()) => {
                self.here = Some(there);
                self.counters.moves.fetch_add(1, Ordering::Relaxed);
            }
            Err(e) => {
                // A cpuset excludes us from there: stay, and do not try again.
                tracing::warn!(cpu = there, error = %e, "the fault reader cannot follow the vCPUs");
                self.config.placement = ReaderPlacement::Anywhere;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{RamLayout, RamMapping};
    use pagetide_sys::mapping::SharedMapping;
    use pagetide_sys::memory_file::GuestFile;
    use pagetide_sys::uffd::Features;
    use std::sync::mpsc::{Sender, channel};

    #[derive(Clone, Copy)]
    enum Where {
        Reader,
        Server,
    }

    struct Panics(Sender<String>, Where);

    impl FaultSink for Panics {
        fn fault_at_once(&self, fault: VcpuFault) -> Served {
            match self.1 {
                Where::Reader => panic!("{} was not expected", fault.page),
                Where::Server => Served::WouldWait,
            }
        }

        fn fault(&self, fault: VcpuFault) {
            panic!("{} was not expected", fault.page);
        }

        fn served(&self, _fault: VcpuFault) -> Option<PageRange> {
            None
        }

        fn bring_along(&self, _pages: PageRange) {}

        fn vmm_gone(&self) {
            self.0.send("gone".to_owned()).unwrap();
        }

        fn reader_failed(&self, error: &ReaderError) {
            self.0.send(error.to_string()).unwrap();
        }
    }

    #[test]
    fn a_panic_while_a_fault_is_served_is_reported_with_its_words() {
        for place in [Where::Reader, Where::Server] {
            panics_in(place);
        }
    }

    fn panics_in(place: Where) {
        let userfaultfd = match Userfaultfd::create_here() {
            Ok(userfaultfd) => Arc::new(userfaultfd),
            Err(e) => {
                eprintln!("SKIPPED: {e}");
                return;
            }
        };
        userfaultfd.api(Features::WANTED).unwrap();
        let file = GuestFile::new_memfd("panic", PAGE_BYTES).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), PAGE_BYTES).unwrap();
        let hva = Hva(mapping.address() as u64);
        userfaultfd
            .register(hva, PAGE_BYTES, WatchFor::Missing)
            .unwrap();
        let mapped = RamMapping {
            hva,
            len_bytes: PAGE_BYTES,
            file: 0,
            file_offset: 0,
        };
        let layout = RamLayout::from_mappings(vec![file], &[mapped]).unwrap();
        let layout = Arc::new(LiveLayout::new(layout));
        let (told, said) = channel();
        let reader = FaultReader::start(
            &VmmProcess::open(std::process::id()).unwrap(),
            Arc::clone(&userfaultfd),
            layout,
            Arc::new(Panics(told, place)),
            ReaderConfig::default(),
            &Arc::default(),
        )
        .unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| mapping.copy_to(0, &[1]).unwrap());
            let said = said.recv().unwrap();
            assert!(said.contains("was not expected"), "{said}");
            userfaultfd.unregister(hva, PAGE_BYTES).unwrap();
        });
        reader.stop();
    }

    struct NoFaults;

    impl FaultSink for NoFaults {
        fn fault_at_once(&self, fault: VcpuFault) -> Served {
            panic!("{} was not expected", fault.page);
        }

        fn fault(&self, fault: VcpuFault) {
            panic!("{} was not expected", fault.page);
        }

        fn served(&self, _fault: VcpuFault) -> Option<PageRange> {
            None
        }

        fn bring_along(&self, _pages: PageRange) {}

        fn vmm_gone(&self) {}

        fn reader_failed(&self, error: &ReaderError) {
            eprintln!("{error}");
        }
    }

    #[test]
    fn a_fault_where_no_ram_is_goes_on_and_its_mapping_is_watched_no_more() {
        let userfaultfd = match Userfaultfd::create_here() {
            Ok(userfaultfd) => Arc::new(userfaultfd),
            Err(e) => {
                eprintln!("SKIPPED: {e}");
                return;
            }
        };
        userfaultfd.api(Features::WANTED).unwrap();
        let bytes = 64 * PAGE_BYTES;
        let file = GuestFile::new_memfd("stray", bytes).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), bytes).unwrap();
        let hva = Hva(mapping.address() as u64);
        let both = WatchFor::MissingAndWriteProtected;
        userfaultfd.register(hva, bytes, both).unwrap();
        let reader = FaultReader::start(
            &VmmProcess::open(std::process::id()).unwrap(),
            Arc::clone(&userfaultfd),
            Arc::new(LiveLayout::new(RamLayout::default())),
            Arc::new(NoFaults),
            ReaderConfig::default(),
            &Arc::default(),
        )
        .unwrap();
        // If it were only woken, it would fault for ever.
        mapping.copy_to(7 * PAGE_BYTES, &[1]).unwrap();
        mapping.copy_to(40 * PAGE_BYTES, &[2]).unwrap();
        let mut found = [0; 1];
        file.read_at(40 * PAGE_BYTES, &mut found).unwrap();
        assert_eq!(found, [2]);
        assert_eq!(reader.counters().strays.load(Ordering::Relaxed), 1);
        assert!(!userfaultfd.is_watched(hva).unwrap());
        reader.stop();
    }
}
