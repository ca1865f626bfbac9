// SPDX-License-Identifier: Apache-2.0
//! [`FaultReader`]: the one thread that reads a VM's faults.
//!
//! One per VM: several readers of one userfaultfd wake one another. It hands
//! each fault to a [`FaultSink`], which serves it on this thread. A fault is
//! cheapest when its reader runs where the faulting thread runs, because that
//! thread has just gone to sleep there: so the reader follows, looking at the
//! CPU of the last fault's thread every so many faults. That look costs a file
//! in `/proc` (some 20 µs), hence not at every fault.

use crate::layout::RamLayout;
use crate::process::VmmProcess;
use crate::threads::last_cpu;
use pagetide_addr::{Access, PAGE_BYTES, PageNo};
use pagetide_sys::cpu;
use pagetide_sys::process::{ProcessError, ProcessFd};
use pagetide_sys::uffd::{FaultEvent, FaultKind as RawKind, UffdError, Userfaultfd, page_of};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::any::Any;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Faults between two looks at where the faulting threads run.
pub const FAULTS_PER_LOOK: u64 = 64;
/// Reads in a row before it looks whether it is to stop or the VMM has ended.
const BATCHES_PER_POLL: u32 = 64;

/// Why a thread waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// The page is absent.
    Missing,
    /// The page is write-protected.
    WriteProtected,
}

/// A fault of a VM, as the reader hands it on. Only a hint: things may have changed since.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VcpuFault {
    /// The page.
    pub page: PageNo,
    /// Why the thread waits.
    pub kind: FaultKind,
    /// What it wants to do.
    pub access: Access,
    /// The thread, of the VMM.
    pub thread: u32,
}

/// Who serves faults.
pub trait FaultSink: Send + Sync {
    /// A thread of the VMM waits. Called on the reader's thread, one at a time.
    fn fault(&self, fault: VcpuFault);

    /// The VMM has ended; no fault comes any more. Called once, last.
    fn vmm_gone(&self);

    /// The reader had to give up; faults are not served any more. Called once, last.
    fn reader_failed(&self, error: &ReaderError);
}

/// Where the reader runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// On the CPU of the threads that fault.
    FollowFaults,
    /// Where the scheduler puts it.
    Anywhere,
}

/// How the reader works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReaderConfig {
    /// Where it runs.
    pub placement: Placement,
    /// After a fault: how long it looks for the next one before it sleeps, in microseconds. It
    /// uses its CPU fully meanwhile.
    pub poll_us: u64,
}

impl Default for ReaderConfig {
    fn default() -> Self {
        Self {
            placement: Placement::FollowFaults,
            poll_us: 0,
        }
    }
}

/// Why a reader could not be started, or had to give up.
#[derive(Debug, thiserror::Error)]
pub enum ReaderError {
    /// The kernel refused something.
    #[error("{operation} failed: {source}")]
    Kernel {
        /// What was tried.
        operation: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The userfaultfd failed.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// The VMM could not be held.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// Serving a fault panicked, which is a bug of ours.
    #[error("serving a fault panicked ({what}): a bug; the VM waits until it is served again")]
    Panicked {
        /// What the panic said.
        what: String,
    },
}

/// What a reader has done so far.
#[derive(Debug, Default)]
pub struct ReaderCounters {
    /// Faults handed to the sink.
    pub faults: AtomicU64,
    /// Reads that brought at least one.
    pub batches: AtomicU64,
    /// Moves to another CPU.
    pub moves: AtomicU64,
    /// Id of the reader's thread, once it runs.
    pub thread: AtomicU64,
    /// Faults at addresses that are no RAM, or of a kind that was not asked for.
    pub strays: AtomicU64,
}

/// The running reader; dropping it stops it.
#[derive(Debug)]
pub struct FaultReader {
    counters: Arc<ReaderCounters>,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl FaultReader {
    /// Starts reading the faults of `vmm`.
    ///
    /// # Errors
    /// [`ReaderError`].
    pub fn start(
        vmm: &VmmProcess,
        userfaultfd: Arc<Userfaultfd>,
        layout: Arc<RamLayout>,
        sink: Arc<dyn FaultSink>,
        config: ReaderConfig,
    ) -> Result<Self, ReaderError> {
        let kernel = |operation| move |source| ReaderError::Kernel { operation, source };
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| kernel("eventfd")(e.into()))?;
        let counters = Arc::new(ReaderCounters::default());
        let mut reading = Reading {
            userfaultfd,
            layout,
            vmm: vmm.fd().try_clone()?,
            stop: stop
                .try_clone()
                .map_err(kernel("duplicating a descriptor"))?,
            counters: Arc::clone(&counters),
            config,
            here: None,
            next_look: 0,
        };
        let thread = std::thread::Builder::new()
            .name(format!("faults-{}", vmm.pid()))
            .spawn(move || match reading.run_to_the_end(sink.as_ref()) {
                Ok(End::Stopped) => {}
                Ok(End::VmmGone) => sink.vmm_gone(),
                Err(error) => sink.reader_failed(&error),
            })
            .map_err(kernel("starting a thread"))?;
        Ok(Self {
            counters,
            stop,
            thread: Some(thread),
        })
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> &ReaderCounters {
        &self.counters
    }

    /// CPU time its thread has used, in seconds; 0 if the kernel does not tell.
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
        // An eventfd's counter cannot be full after one write.
        let told = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        debug_assert!(told.is_ok(), "{told:?}");
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("a fault reader has panicked");
        }
    }
}

fn words_of(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "without words".to_owned()
    }
}

enum End {
    Stopped,
    VmmGone,
}

struct Reading {
    userfaultfd: Arc<Userfaultfd>,
    layout: Arc<RamLayout>,
    vmm: ProcessFd,
    stop: OwnedFd,
    counters: Arc<ReaderCounters>,
    config: ReaderConfig,
    here: Option<usize>,
    next_look: u64,
}

impl Reading {
    /// A thread that ended by panic would leave a VM that hangs with nobody told.
    fn run_to_the_end(&mut self, sink: &dyn FaultSink) -> Result<End, ReaderError> {
        // Neither is used after a panic but to say that there was one.
        let run = AssertUnwindSafe(|| self.run(sink));
        catch_unwind(run).unwrap_or_else(|panic| {
            let what = words_of(panic.as_ref());
            Err(ReaderError::Panicked { what })
        })
    }

    fn run(&mut self, sink: &dyn FaultSink) -> Result<End, ReaderError> {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.counters
            .thread
            .store(u64::from(thread.unsigned_abs()), Ordering::Relaxed);
        let mut faults = Vec::new();
        loop {
            if let Some(end) = self.sleep()? {
                return Ok(end);
            }
            let mut last = Instant::now();
            let mut batches = 0;
            while batches < BATCHES_PER_POLL {
                if self.userfaultfd.read_faults(&mut faults)? > 0 {
                    self.serve(&faults, sink)?;
                    batches += 1;
                    last = Instant::now();
                } else if last.elapsed() >= Duration::from_micros(self.config.poll_us) {
                    break;
                } else {
                    std::hint::spin_loop();
                }
            }
        }
    }

    /// Sleeps until a fault can be read, or it is over.
    fn sleep(&self) -> Result<Option<End>, ReaderError> {
        let mut polled = [
            PollFd::from_borrowed_fd(self.userfaultfd.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.vmm.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN),
        ];
        match poll(&mut polled, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                return Err(ReaderError::Kernel {
                    operation: "poll of a userfaultfd",
                    source: e.into(),
                });
            }
        }
        let [faults, vmm, stop] = polled.map(|p| p.revents());
        if !vmm.is_empty() {
            return Ok(Some(End::VmmGone));
        }
        // Faults not read yet stay in the kernel for the next reader.
        if !stop.is_empty() {
            return Ok(Some(End::Stopped));
        }
        if faults.contains(PollFlags::ERR) {
            return Err(ReaderError::Kernel {
                operation: "poll of a userfaultfd",
                source: io::Error::from(io::ErrorKind::BrokenPipe),
            });
        }
        Ok(None)
    }

    fn serve(&mut self, faults: &[FaultEvent], sink: &dyn FaultSink) -> Result<(), ReaderError> {
        self.counters.batches.fetch_add(1, Ordering::Relaxed);
        for event in faults {
            let kind = match event.kind {
                RawKind::Missing => Some(FaultKind::Missing),
                RawKind::WriteProtected => Some(FaultKind::WriteProtected),
                RawKind::Minor => None,
            };
            if let (Some(kind), Some(page)) = (kind, self.layout.page_at(event.address)) {
                self.counters.faults.fetch_add(1, Ordering::Relaxed);
                sink.fault(VcpuFault {
                    page,
                    kind,
                    access: event.access,
                    thread: event.thread,
                });
            } else {
                // Nothing of ours, but somebody waits: let it look again.
                self.counters.strays.fetch_add(1, Ordering::Relaxed);
                self.userfaultfd.wake(page_of(event.address), PAGE_BYTES)?;
            }
        }
        if let Some(last) = faults.last() {
            self.follow(last.thread);
        }
        Ok(())
    }

    /// Every [`FAULTS_PER_LOOK`] faults: goes where `thread` runs.
    fn follow(&mut self, thread: u32) {
        let count = self.counters.faults.load(Ordering::Relaxed);
        if self.config.placement == Placement::Anywhere || count < self.next_look {
            return;
        }
        self.next_look = count + FAULTS_PER_LOOK;
        let Some(there) = last_cpu(self.vmm.pid(), thread) else {
            return;
        };
        if self.here == Some(there) {
            return;
        }
        match cpu::set_affinity(&[there]) {
            Ok(()) => {
                self.here = Some(there);
                self.counters.moves.fetch_add(1, Ordering::Relaxed);
            }
            Err(e) => {
                // A cpuset that keeps us from there: stay, and do not try again.
                tracing::warn!(cpu = there, error = %e, "the fault reader cannot follow the vCPUs");
                self.config.placement = Placement::Anywhere;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::RamMapping;
    use pagetide_addr::Hva;
    use pagetide_sys::mapping::SharedMapping;
    use pagetide_sys::memory_file::GuestFile;
    use pagetide_sys::uffd::{Features, Watch};
    use std::sync::mpsc::{Sender, channel};

    struct Panics(Sender<String>);

    impl FaultSink for Panics {
        fn fault(&self, fault: VcpuFault) {
            panic!("{} was not expected", fault.page);
        }

        fn vmm_gone(&self) {
            self.0.send("gone".to_owned()).unwrap();
        }

        fn reader_failed(&self, error: &ReaderError) {
            self.0.send(error.to_string()).unwrap();
        }
    }

    #[test]
    fn a_panic_while_a_fault_is_served_is_reported_with_its_words() {
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
            .register(hva, PAGE_BYTES, Watch::Missing)
            .unwrap();
        let mapped = RamMapping {
            hva,
            len_bytes: PAGE_BYTES,
            file: 0,
            file_offset: 0,
        };
        let layout = Arc::new(RamLayout::from_mappings(vec![file], &[mapped]).unwrap());
        let (told, said) = channel();
        let reader = FaultReader::start(
            &VmmProcess::open(std::process::id()).unwrap(),
            Arc::clone(&userfaultfd),
            layout,
            Arc::new(Panics(told)),
            ReaderConfig::default(),
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
}
