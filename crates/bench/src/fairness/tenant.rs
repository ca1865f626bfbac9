// SPDX-License-Identifier: Apache-2.0
//! A tenant's front end, on its own thread: the steady one's, or a hostile one's.
//!
//! While enabled, a client keeps its queues full, and between completions sleeps on their call descriptors,
//! like a guest that uses interrupts.

use super::{
    load::Load,
    rig::{HOSTILE_QUEUES, IMAGE_BYTES, Rig},
};
use crate::harness::rounds::progress;
use pagetide_addr::{FileKey, FilePage, PAGE_BYTES};
use pagetide_random::SplitMix64;
use pagetide_sys::clock;
use pagetide_sys::{
    cpu::{Urgency, set_urgency},
    lent::{LentError, LentMemory},
};
use pagetide_vpri::{DmaDomain, DomainTable};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::fstat,
};
use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, RecvError, SendError, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport,
    VirtioFeatureFlags,
};

/// Requests that the steady tenant has in flight.
pub(super) const STEADY_DEPTH: u16 = 2;
/// Entries of a queue.
const QUEUE_SIZE: u16 = 256;
/// Requests that a queue holds: three descriptors each.
pub(super) const DEPTH_MAX: u16 = 80;
/// Real-time priority of the steady client.
const PRIORITY: u8 = 10;
/// Longest sleep before a client checks whether it must end.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};
/// Longest time without an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Kicks between two checks whether the client must end.
const KICKS: u64 = 64;

/// Why a client ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClientError {
    #[error("the device: {0}")]
    Device(#[from] io::Error),
    #[error(transparent)]
    Memory(#[from] LentError),
    #[error("the kernel: {0}")]
    Kernel(#[from] rustix::io::Errno),
    #[error("the path of the socket is not UTF-8")]
    Path,
    #[error("no disk has the client's memory")]
    Domain,
    #[error("{0} requests failed")]
    Requests(u64),
    #[error("{0} requests are not answered: does the device say why it stopped?")]
    Lost(usize),
    #[error("the client's thread has ended; see its message above")]
    Gone,
}

impl<T> From<SendError<T>> for ClientError {
    fn from(_: SendError<T>) -> Self {
        Self::Gone
    }
}

impl From<RecvError> for ClientError {
    fn from(_: RecvError) -> Self {
        Self::Gone
    }
}

/// State shared by a client and its thread.
#[derive(Debug, Default)]
struct Shared {
    works: AtomicBool,
    done: AtomicU64,
}

type Latencies = Result<Vec<u64>, ClientError>;

/// A client, idle until [`Self::begin`].
pub(super) struct Client {
    shared: Arc<Shared>,
    go: Option<Sender<()>>,
    results: Receiver<Latencies>,
    thread: Option<JoinHandle<()>>,
}

/// The parameters of a client.
struct Plan {
    socket: PathBuf,
    queues: u16,
    load: Option<Load>,
    domains: Arc<DomainTable>,
    faulting: Arc<Mutex<Option<Arc<DmaDomain>>>>,
}

impl Client {
    /// The steady tenant at one of its disks.
    pub fn steady(rig: &Rig, socket: PathBuf) -> Result<Self, ClientError> {
        Self::start(Plan {
            socket,
            queues: 1,
            load: None,
            domains: rig.domains.clone(),
            faulting: rig.faulting.clone(),
        })
    }

    /// The hostile tenant with its load.
    pub fn hostile(rig: &Rig, load: Load) -> Result<Self, ClientError> {
        Self::start(Plan {
            socket: rig.hostile(),
            queues: HOSTILE_QUEUES,
            load: Some(load),
            domains: rig.domains.clone(),
            faulting: rig.faulting.clone(),
        })
    }

    fn start(plan: Plan) -> Result<Self, ClientError> {
        let shared = Arc::new(Shared::default());
        let (go, gone) = channel();
        let (tell, results) = channel();
        let its = shared.clone();
        let thread = std::thread::Builder::new().name("client".into());
        let thread = thread.spawn(move || {
            if let Err(error) = work(&plan, &its, &gone, &tell)
                && tell.send(Err(error)).is_err()
            {
                progress("fairness", "a client's error comes too late");
            }
        })?;
        // It reports once that it is ready.
        results.recv()??;
        Ok(Self {
            shared,
            go: Some(go),
            results,
            thread: Some(thread),
        })
    }

    /// Starts its work.
    pub fn begin(&self) {
        self.shared.works.store(true, Ordering::Release);
        if let Some(go) = &self.go
            && go.send(()).is_err()
        {
            progress("fairness", "a client has ended");
        }
    }

    /// Its work so far, in the unit of its load.
    pub fn done(&self) -> u64 {
        self.shared.done.load(Ordering::Relaxed)
    }

    /// Ends its work; returns how long each request took.
    pub fn end(&self) -> Latencies {
        self.shared.works.store(false, Ordering::Release);
        self.results.recv()?
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.shared.works.store(false, Ordering::Release);
        drop(self.go.take());
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            progress("fairness", "a client panicked");
        }
    }
}

fn work(
    plan: &Plan,
    shared: &Shared,
    go: &Receiver<()>,
    tell: &Sender<Latencies>,
) -> Result<(), ClientError> {
    if plan.load.is_none()
        && let Err(error) = set_urgency(Urgency::Preempting(PRIORITY))
    {
        progress(
            "fairness",
            format_args!("the steady client has no priority: {error}"),
        );
    }
    if plan.load == Some(Load::Connections) {
        tell.send(Ok(Vec::new()))?;
        while go.recv().is_ok() {
            while shared.works.load(Ordering::Acquire) {
                match come_and_go(plan) {
                    Ok(()) => drop(shared.done.fetch_add(1, Ordering::Relaxed)),
                    // The device was not done with the connection before: the next comes at once.
                    Err(ClientError::Device(error)) if is_turned_away(&error) => {}
                    Err(error) => return Err(error),
                }
            }
            tell.send(Ok(Vec::new()))?;
        }
        return Ok(());
    }
    let mut transport = connect(&plan.socket)?;
    let mut disk = Disk::open(transport.as_mut(), plan)?;
    if plan.load == Some(Load::Faults) {
        disk.domain = Some(disk.lend(plan)?);
    }
    tell.send(Ok(Vec::new()))?;
    while go.recv().is_ok() {
        let latencies = match plan.load {
            Some(Load::Kicks) => disk.kick(shared),
            load => disk.flood(load, shared),
        };
        tell.send(latencies)?;
    }
    Ok(())
}

/// One of the hostile connections.
fn come_and_go(plan: &Plan) -> Result<(), ClientError> {
    let mut transport = connect(&plan.socket)?;
    Disk::open(transport.as_mut(), plan)?.read_one()
}

fn is_turned_away(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::UnexpectedEof
    )
}

fn connect(socket: &Path) -> Result<Box<VirtioBlkTransport>, ClientError> {
    let features = VirtioFeatureFlags::VERSION_1.bits()
        | VirtioFeatureFlags::RING_EVENT_IDX.bits()
        | VirtioBlkFeatureFlags::MQ.bits()
        | VirtioBlkFeatureFlags::FLUSH.bits();
    let path = socket.to_str().ok_or(ClientError::Path)?;
    Ok(Box::new(VhostUser::new(path, features)?))
}

/// A connected disk.
struct Disk<'a> {
    queues: Vec<VirtioBlkQueue<'a, u16>>,
    calls: Vec<Arc<EventFd>>,
    kicks: Vec<Box<dyn QueueNotifier>>,
    memory: LentMemory,
    random: SplitMix64,
    /// Memory whose pages are evicted before each request.
    domain: Option<Arc<DmaDomain>>,
}

impl<'a> Disk<'a> {
    fn open(transport: &mut VirtioBlkTransport, plan: &Plan) -> Result<Self, ClientError> {
        let queues = VirtioBlkQueue::setup_queues(transport, usize::from(plan.queues), QUEUE_SIZE)?;
        let bytes = match plan.load {
            Some(load) => {
                let buffers = u64::from(load.depth()) * u64::from(plan.queues);
                // Large reads of a queue share their buffer: its content does not matter.
                match load {
                    Load::LargeReads => load.request_bytes() * u64::from(plan.queues),
                    _ => load.request_bytes() * buffers,
                }
            }
            None => u64::from(STEADY_DEPTH) * PAGE_BYTES,
        };
        let memory = LentMemory::new("bench-fairness", bytes)?;
        transport.map_mem_region(
            memory.address(),
            usize::try_from(bytes).unwrap_or(usize::MAX),
            memory.as_fd().as_raw_fd(),
            0,
        )?;
        let numbers = 0..queues.len();
        let calls = numbers.clone().map(|at| transport.get_completion_fd(at));
        let calls = calls.collect();
        let kicks = numbers.map(|at| transport.get_submission_notifier(at));
        Ok(Self {
            queues,
            calls,
            kicks: kicks.collect(),
            memory,
            random: SplitMix64::new(7),
            domain: None,
        })
    }

    /// Announces the memory whose pages come and go to the host.
    fn lend(&self, plan: &Plan) -> Result<Arc<DmaDomain>, ClientError> {
        let stat = fstat(self.memory.as_fd())?;
        let domain = plan.domains.find(FileKey {
            dev: stat.st_dev,
            ino: stat.st_ino,
        });
        let domain = domain.ok_or(ClientError::Domain)?;
        let mut faulting = plan.faulting.lock().unwrap_or_else(PoisonError::into_inner);
        *faulting = Some(domain.clone());
        Ok(domain)
    }

    fn submit(&mut self, load: Option<Load>, at: usize, buffer: u16) -> Result<(), ClientError> {
        let queue = &mut self.queues[at];
        let blocks = IMAGE_BYTES / PAGE_BYTES;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a part of a number that is small"
        )]
        let block = (self.random.unit() * blocks as f64) as u64;
        let (offset, from, bytes) = match load {
            Some(Load::Flushes) => return Ok(queue.flush(buffer)?),
            Some(Load::LargeReads) => {
                let bytes = Load::LargeReads.request_bytes();
                (0, bytes * at as u64, bytes)
            }
            _ => {
                let place = at as u64 * u64::from(DEPTH_MAX) + u64::from(buffer);
                (block * PAGE_BYTES, place * PAGE_BYTES, PAGE_BYTES)
            }
        };
        if let Some(domain) = &self.domain {
            // A page that is still leased stays: its request does not fault.
            let page = FilePage(from / PAGE_BYTES).single();
            let busy = domain.attributes().unmap_ranges(&[page]);
            debug_assert!(busy.len() <= 1);
        }
        let buffer_bytes = self.memory.bytes_mut(from, bytes);
        let buffer_bytes = buffer_bytes.ok_or(ClientError::Domain)?;
        Ok(queue.read(offset, buffer_bytes, buffer)?)
    }

    /// Keeps the queues full while enabled.
    fn flood(&mut self, load: Option<Load>, shared: &Shared) -> Latencies {
        let depth = load.map_or(STEADY_DEPTH, Load::depth);
        let unit = match load {
            Some(Load::LargeReads) => Load::LargeReads.request_bytes().div_ceil(1 << 20),
            _ => 1,
        };
        let mut begun = vec![vec![Instant::now(); usize::from(depth)]; self.queues.len()];
        let (mut latencies_ns, mut errors, mut in_flight) = (Vec::new(), 0, 0_usize);
        for (at, begun) in begun.iter_mut().enumerate() {
            self.queues[at].set_used_notif_enabled(true);
            for buffer in 0..depth {
                begun[usize::from(buffer)] = Instant::now();
                self.submit(load, at, buffer)?;
                in_flight += 1;
            }
            self.kicks[at].notify()?;
        }
        let mut done = Vec::new();
        let mut last = Instant::now();
        while in_flight > 0 {
            let mut idle = true;
            for (at, begun) in begun.iter_mut().enumerate() {
                done.extend(self.queues[at].completions().map(|c| (c.context, c.ret)));
                idle &= done.is_empty();
                let goes_on = shared.works.load(Ordering::Acquire);
                for (buffer, ret) in done.drain(..) {
                    last = Instant::now();
                    let since = &mut begun[usize::from(buffer)];
                    let took = last.saturating_duration_since(*since);
                    if load.is_none() {
                        latencies_ns.push(clock::ns(took));
                    }
                    errors += u64::from(ret != 0);
                    shared.done.fetch_add(unit, Ordering::Relaxed);
                    if goes_on {
                        *since = last;
                        self.submit(load, at, buffer)?;
                    } else {
                        in_flight -= 1;
                    }
                }
                if self.queues[at].avail_notif_needed() {
                    self.kicks[at].notify()?;
                }
            }
            if idle && in_flight > 0 {
                self.sleep_until_called()?;
                if last.elapsed() > ANSWER_TIMEOUT {
                    return Err(ClientError::Lost(in_flight));
                }
            }
        }
        match errors {
            0 => Ok(latencies_ns),
            errors => Err(ClientError::Requests(errors)),
        }
    }

    fn sleep_until_called(&self) -> Result<(), ClientError> {
        let polled = self
            .calls
            .iter()
            .map(|call| PollFd::new(&**call, PollFlags::IN));
        let mut polled: Vec<_> = polled.collect();
        poll(&mut polled, Some(&LOOK))?;
        for (call, polled) in self.calls.iter().zip(polled) {
            if !polled.revents().is_empty() {
                call.read()?;
            }
        }
        Ok(())
    }

    /// Kicks as fast as it can while enabled.
    fn kick(&self, shared: &Shared) -> Latencies {
        while shared.works.load(Ordering::Acquire) {
            for _ in 0..KICKS {
                self.kicks[0].notify()?;
            }
            shared.done.fetch_add(KICKS, Ordering::Relaxed);
        }
        Ok(Vec::new())
    }

    /// Reads one block, and waits for it.
    fn read_one(&mut self) -> Result<(), ClientError> {
        self.queues[0].set_used_notif_enabled(true);
        self.submit(Some(Load::Connections), 0, 0)?;
        self.kicks[0].notify()?;
        loop {
            let done = self.queues[0].completions().next().map(|c| c.ret);
            match done {
                Some(0) => return Ok(()),
                Some(_) => return Err(ClientError::Requests(1)),
                None => self.sleep_until_called()?,
            }
        }
    }
}
