// SPDX-License-Identifier: Apache-2.0
//! A chain's way from the avail ring to the kernel, or to the parked.
//!
//! ```text
//!   pop ─► walk ─► frame ─► lease every page, all or none ─► read header ─► decide ─► start I/O
//!            │                      │
//!            └── table absent ──────┴── some absent: release all, park, page requests
//! ```
//! A resumed chain starts again at *walk*: what the guest has changed meanwhile
//! is its own affair, and nothing of the first look is trusted later.

use super::{Device, Io, finish::Answer, queue::EngineQueue};
use crate::{
    blk::request::{
        EmptyHow, Frame, Header, RangeKind, Status, Work, decide, frame, range_work, read_range,
        write_serial,
    },
    chain::{Buffers, WalkError, walk},
    memory::{DeviceMemory, LeaseSet, Span},
    parked::{ParkedChain, Purpose, QueueKey, Waiter, Wanted},
    ring::{Dma, Job, Operation, Step},
    shared::{StopReason, add},
};
use pagetide_addr::{Access, PageNo, PageRange};
use std::{io, rc::Rc, time::Instant};
use virtio_queue::QueueOwnedT;

/// Chains taken from one queue in a turn, so that others have theirs.
const POP_BATCH: usize = 64;
/// Every so many requests the time of the look-up is taken; a prime, for requests come in batches of
/// powers of two and a batch's first finds cold caches.
const SAMPLE_EVERY: u32 = 61;
/// A look-up that takes so long was interrupted: even with every cache line cold it is far less.
const LOOKUP_INTERRUPTED_NS: u64 = 5_000;
/// Jobs kept for reuse.
const POOL_MAX: usize = 512;

/// What an engine must know of a request when its I/O is done.
#[derive(Debug)]
pub(crate) struct Request {
    pub key: QueueKey,
    pub head: u16,
    pub status: Span,
    pub leases: LeaseSet,
    pub step: Step,
    pub kind: Kind,
    /// Bytes of data, for the used ring and the figures.
    pub data_bytes: u32,
    pub sample: Sample,
    /// Direct I/O was refused once.
    pub retried: bool,
}

/// What kind of I/O is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
    Empty { how: EmptyHow, stage: EmptyStage },
}

/// How far the emptying of a range is; file systems differ in what they can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EmptyStage {
    /// The mode that does it at once.
    Direct,
    /// Zeroing is not to be had: punch first,
    Punch,
    /// then allocate again.
    Allocate,
}

/// Whether this request's look-up is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sample {
    No,
    Yes,
}

/// Where a chain comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Origin {
    /// From the avail ring or the in-flight region.
    Fresh,
    /// From the parked.
    Resumed {
        purpose: Purpose,
        since: Instant,
        failed: bool,
    },
}

/// Buffers used again and again.
pub(crate) struct Scratch {
    heads: Vec<u16>,
    buffers: Buffers,
    #[expect(
        clippy::vec_box,
        reason = "jobs go to the ring in their boxes: keeping the box spares the allocation"
    )]
    pool: Vec<Box<Job<Request>>>,
    until_sample: u32,
    /// What taking the time costs by itself, to be subtracted.
    pub clock_ns: u64,
}

impl Scratch {
    pub fn new() -> Self {
        let clock_ns = (0..1000)
            .map(|_| nanos(Instant::now().elapsed()))
            .min()
            .unwrap_or(0);
        Self {
            heads: Vec::with_capacity(POP_BATCH),
            buffers: Buffers::default(),
            pool: Vec::new(),
            until_sample: 0,
            clock_ns,
        }
    }

    /// Drops what keeps a device's memory mapped.
    pub fn forget_memory(&mut self) {
        self.pool.clear();
    }

    /// Keeps a finished job for the next chain.
    pub fn keep(&mut self, job: Box<Job<Request>>) {
        if self.pool.len() < POOL_MAX {
            self.pool.push(job);
        }
    }

    fn sample(&mut self) -> Sample {
        if self.until_sample == 0 {
            self.until_sample = SAMPLE_EVERY - 1;
            Sample::Yes
        } else {
            self.until_sample -= 1;
            Sample::No
        }
    }
}

/// Nanoseconds of a duration that is not years.
pub(crate) fn nanos(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A chain whose pages are all leased.
struct Ready {
    head: u16,
    frame: Frame,
    leases: LeaseSet,
    sample: Sample,
}

impl Io {
    /// Takes chains from a queue as far as limits allow; how many.
    pub fn pop_from(&mut self, device: &mut Device, queue: &mut EngineQueue) -> io::Result<usize> {
        if device.shared.is_stopped() {
            queue.tell_error();
            return Ok(0);
        }
        let Some(memory) = device.memory.clone() else {
            return Ok(0);
        };
        let mut popped = 0;
        while let Some(head) = self.resubmit_next(queue) {
            popped += 1;
            self.serve(device, queue, head, Origin::Fresh)?;
        }
        let mut heads = std::mem::take(&mut self.scratch.heads);
        heads.clear();
        if let Err(reason) = self.pop_heads(queue, &memory, &mut heads) {
            device.shared.stop(reason);
        }
        popped += heads.len();
        for head in &heads {
            if let Some(inflight) = &mut queue.inflight {
                inflight.fetched(*head);
            }
            self.serve(device, queue, *head, Origin::Fresh)?;
        }
        self.scratch.heads = heads;
        Ok(popped)
    }

    fn has_room(&self) -> bool {
        !self.parked.is_queue_full() && self.ring.in_flight() < self.in_flight_max
    }

    fn resubmit_next(&self, queue: &mut EngineQueue) -> Option<u16> {
        if self.has_room() && queue.parked < super::queue::PARKED_PER_QUEUE_MAX {
            queue.resubmit.pop_front()
        } else {
            None
        }
    }

    fn pop_heads(
        &self,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        heads: &mut Vec<u16>,
    ) -> Result<(), StopReason> {
        if !queue.may_pop() || !self.has_room() {
            return Ok(());
        }
        // Each chain may be parked, or go to the ring: there must be room for either.
        let room = POP_BATCH
            .min(self.in_flight_max - self.ring.in_flight())
            .min(super::queue::PARKED_PER_QUEUE_MAX - queue.parked)
            .min(usize::from(queue.table.size) - queue.in_flight - queue.parked);
        let chains = queue.queue.iter(&**memory);
        let chains = match chains {
            Ok(chains) => chains,
            Err(error) => return Err(queue.broken(&error)),
        };
        heads.extend(chains.take(room).map(|chain| chain.head_index()));
        Ok(())
    }

    /// Serves one chain as far as it goes now.
    pub fn serve(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        head: u16,
        origin: Origin,
    ) -> io::Result<()> {
        let Some(memory) = device.memory.clone() else {
            return Ok(());
        };
        let served = match origin {
            Origin::Resumed {
                purpose: Purpose::BadStatus,
                failed: true,
                ..
            } => Err(StopReason::ContentLost {
                queue: queue.key.queue,
            }),
            Origin::Resumed { failed: true, .. }
            | Origin::Resumed {
                purpose: Purpose::BadStatus,
                ..
            } => self.fail_chain(device, queue, &memory, head, origin),
            _ => match self.prepare(device, queue, &memory, head, origin) {
                Ok(Some(ready)) => return self.begin(device, queue, &memory, ready),
                Ok(None) => Ok(()),
                Err(reason) => Err(reason),
            },
        };
        if let Err(reason) = served {
            add(&device.shared.counters[self.index].malformed, 1);
            device.shared.stop(reason);
            queue.tell_error();
        }
        Ok(())
    }

    /// Finds the chain's buffers and leases them all; `None` if it was parked.
    fn prepare(
        &mut self,
        device: &Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        head: u16,
        origin: Origin,
    ) -> Result<Option<Ready>, StopReason> {
        let mut buffers = std::mem::take(&mut self.scratch.buffers);
        let outcome = self.prepare_with(device, queue, memory, head, &mut buffers);
        self.scratch.buffers = buffers;
        match outcome? {
            Prepared::Ready(ready) => {
                if let Origin::Resumed { since, .. } = origin {
                    self.record_latency(since);
                }
                Ok(Some(ready))
            }
            Prepared::Absent(wanted) => {
                self.park(device, queue, head, wanted, (Purpose::Dma, origin));
                Ok(None)
            }
        }
    }

    fn prepare_with(
        &mut self,
        device: &Device,
        queue: &EngineQueue,
        memory: &Rc<DeviceMemory>,
        head: u16,
        buffers: &mut Buffers,
    ) -> Result<Prepared, StopReason> {
        let frame = match locate(queue, memory, head, buffers)? {
            Located::Frame(frame) => frame,
            Located::TableAbsent(spans) => {
                return Ok(Prepared::Absent(wanted(memory, &spans, Access::Read)));
            }
        };
        let sample = self.scratch.sample();
        let began = (sample == Sample::Yes).then(Instant::now);
        let mut leases = self.scratch.leases();
        let all_there = lease_all(memory, &frame, buffers, &mut leases);
        if let Some(began) = began {
            self.record_lookup(device, began, 1);
        }
        if all_there {
            return Ok(Prepared::Ready(Ready {
                head,
                frame,
                leases,
                sample,
            }));
        }
        leases.release(memory);
        let mut absent = absent_of(memory, &frame, buffers);
        if absent.is_empty() {
            // They came back between the two looks; ask all the same, it is answered at once.
            absent = all_of(memory, &frame, buffers);
        }
        Ok(Prepared::Absent(absent))
    }

    /// Adds one sample of time spent on looking up; `requests` is 1 for the half that counts it.
    /// A sample that was interrupted says nothing of the look-up and counts as none.
    pub fn record_lookup(&self, device: &Device, began: Instant, requests: u64) {
        let counters = &device.shared.counters[self.index];
        let ns = nanos(began.elapsed()).saturating_sub(self.scratch.clock_ns);
        if ns < LOOKUP_INTERRUPTED_NS {
            add(&counters.lookup_ns, ns);
            add(&counters.lookup_samples, requests);
        }
    }

    fn record_latency(&self, since: Instant) {
        let ns = nanos(since.elapsed()).max(1);
        let mut histogram = self
            .shared
            .iopf_ns
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        histogram.saturating_record(ns);
    }

    fn park(
        &mut self,
        device: &Device,
        queue: &mut EngineQueue,
        head: u16,
        wanted: Vec<Wanted>,
        (purpose, origin): (Purpose, Origin),
    ) {
        let since = match origin {
            Origin::Fresh => Instant::now(),
            Origin::Resumed { since, .. } => since,
        };
        let requests = self.parked.park(ParkedChain {
            queue: queue.key,
            device: device.shared.id,
            waiter: Waiter::Chain(head),
            wanted,
            purpose,
            since,
        });
        queue.parked += 1;
        let counters = &device.shared.counters[self.index];
        add(&counters.iopfs, requests as u64);
        add(&counters.parked, 1);
    }

    /// Answers a chain whose DMA cannot be done, which needs only its status byte.
    fn fail_chain(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        head: u16,
        origin: Origin,
    ) -> Result<(), StopReason> {
        let mut buffers = Buffers::default();
        let frame = match locate(queue, memory, head, &mut buffers)? {
            Located::Frame(frame) => frame,
            Located::TableAbsent(_) => {
                return Err(StopReason::ContentLost {
                    queue: queue.key.queue,
                });
            }
        };
        let mut leases = self.scratch.leases();
        if leases.take(memory, frame.status, Access::Write) {
            let answer = Answer {
                head,
                at: frame.status,
                status: Status::IoError,
                written: 1,
            };
            return self.complete(device, queue, memory, answer, leases);
        }
        let wanted = wanted(memory, &[frame.status], Access::Write);
        self.park(device, queue, head, wanted, (Purpose::BadStatus, origin));
        Ok(())
    }

    /// Does what a leased chain asks for, or begins it.
    fn begin(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        ready: Ready,
    ) -> io::Result<()> {
        let buffers = std::mem::take(&mut self.scratch.buffers);
        let task = task(device, memory, &ready, &buffers);
        let status = match task {
            Ok(task) => {
                let spans = match task.kind {
                    Kind::Read => &buffers.writable[..],
                    Kind::Write => &buffers.readable[..],
                    Kind::Flush | Kind::Empty { .. } => &[],
                };
                return self
                    .start_task(device, queue, memory, (ready, task), spans)
                    .inspect(|()| self.scratch.buffers = buffers);
            }
            Err(status) => status,
        };
        self.scratch.buffers = buffers;
        let answer = Answer {
            head: ready.head,
            at: ready.frame.status,
            status,
            written: 1,
        };
        if let Err(reason) = self.complete(device, queue, memory, answer, ready.leases) {
            device.shared.stop(reason);
            queue.tell_error();
        }
        Ok(())
    }

    fn start_task(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        (ready, task): (Ready, Task),
        spans: &[Span],
    ) -> io::Result<()> {
        let request = Request {
            key: queue.key,
            head: ready.head,
            status: ready.frame.status,
            leases: ready.leases,
            step: Step {
                file: device.buffered,
                operation: task.operation,
                offset: task.offset,
            },
            kind: task.kind,
            data_bytes: 0,
            sample: ready.sample,
            retried: false,
        };
        let mut job = match self.scratch.pool.pop() {
            Some(mut job) => {
                job.request = request;
                job
            }
            None => Box::new(Job {
                dma: Dma::new(memory.clone()),
                request,
            }),
        };
        if let Err(error) = job.dma.aim(memory, spans) {
            // Spans come from this very memory: our own bug, answered as an error.
            debug_assert!(false, "{error}");
        }
        job.request.data_bytes = u32::try_from(job.dma.left()).unwrap_or(u32::MAX);
        queue.in_flight += 1;
        add(&device.shared.counters[self.index].in_flight, 1);
        self.restart(device, job)
    }

    /// Gives a job's step to the ring, by the descriptor that can take it.
    pub fn restart(&mut self, device: &Device, mut job: Box<Job<Request>>) -> io::Result<()> {
        let image = &device.shared.image;
        job.request.step.file = match (job.request.kind, device.direct) {
            (Kind::Read | Kind::Write, Some(direct))
                if job.dma.is_aligned(image.memory_align.max(512))
                    && job.dma.left().is_multiple_of(u64::from(image.block_bytes))
                    && job
                        .request
                        .step
                        .offset
                        .is_multiple_of(u64::from(image.block_bytes)) =>
            {
                direct
            }
            _ => device.buffered,
        };
        let step = job.request.step;
        self.ring.start(job, step)?;
        // A disk with nothing to do gets the first request at once, not when all of a batch are
        // ready: so never let more wait than are under way. The batches double, so a deep queue
        // costs few system calls all the same.
        let waiting = self.ring.unsubmitted();
        if 2 * waiting > self.ring.in_flight() {
            self.ring.submit()?;
        }
        Ok(())
    }
}

impl Scratch {
    fn leases(&mut self) -> LeaseSet {
        // A pooled job's set has room already; the first few have to make it.
        self.pool
            .last_mut()
            .map(|job| std::mem::take(&mut job.request.leases))
            .unwrap_or_default()
    }
}

enum Prepared {
    Ready(Ready),
    Absent(Vec<Wanted>),
}

enum Located {
    Frame(Frame),
    TableAbsent(Vec<Span>),
}

/// Walks a chain and takes it apart.
fn locate(
    queue: &EngineQueue,
    memory: &DeviceMemory,
    head: u16,
    buffers: &mut Buffers,
) -> Result<Located, StopReason> {
    let number = queue.key.queue;
    match walk(memory, queue.table, head, buffers) {
        Ok(()) => {}
        Err(WalkError::TableAbsent(spans)) => return Ok(Located::TableAbsent(spans)),
        Err(WalkError::Broken(source)) => {
            return Err(StopReason::Chain {
                queue: number,
                head,
                source,
            });
        }
    }
    frame(buffers)
        .map(Located::Frame)
        .map_err(|source| StopReason::Request {
            queue: number,
            head,
            source,
        })
}

/// Every part of a chain with the access the device needs.
fn parts<'a>(frame: &'a Frame, buffers: &'a Buffers) -> impl Iterator<Item = (Span, Access)> + 'a {
    let read = std::iter::once(&frame.header)
        .chain(&frame.header_rest)
        .chain(&buffers.readable);
    let write = buffers
        .writable
        .iter()
        .chain(std::iter::once(&frame.status));
    read.map(|span| (*span, Access::Read))
        .chain(write.map(|span| (*span, Access::Write)))
}

#[inline]
fn lease_all(
    memory: &DeviceMemory,
    frame: &Frame,
    buffers: &Buffers,
    leases: &mut LeaseSet,
) -> bool {
    // Most drivers have header and status in one structure: what may be written may be read.
    let together =
        frame.header.port == frame.status.port && frame.header.pages() == frame.status.pages();
    (together || leases.take(memory, frame.header, Access::Read))
        && parts(frame, buffers)
            .skip(1)
            .all(|(span, access)| leases.take(memory, span, access))
}

fn absent_of(memory: &DeviceMemory, frame: &Frame, buffers: &Buffers) -> Vec<Wanted> {
    parts(frame, buffers)
        .flat_map(|(span, access)| absent_runs(memory, span, access))
        .collect()
}

fn all_of(memory: &DeviceMemory, frame: &Frame, buffers: &Buffers) -> Vec<Wanted> {
    parts(frame, buffers)
        .flat_map(|(span, access)| whole(memory, span, access))
        .collect()
}

fn wanted(memory: &DeviceMemory, spans: &[Span], access: Access) -> Vec<Wanted> {
    let absent: Vec<Wanted> = spans
        .iter()
        .flat_map(|span| absent_runs(memory, *span, access))
        .collect();
    if absent.is_empty() {
        let all = spans.iter().flat_map(|span| whole(memory, *span, access));
        return all.collect();
    }
    absent
}

pub(crate) fn whole(memory: &DeviceMemory, span: Span, access: Access) -> Option<Wanted> {
    let pages = span.pages();
    (!pages.is_empty()).then(|| Wanted {
        domain: memory.port(span).domain().id(),
        pages,
        access,
    })
}

/// The runs of pages of `span` that do not allow `access` now.
pub(crate) fn absent_runs(memory: &DeviceMemory, span: Span, access: Access) -> Vec<Wanted> {
    let domain = memory.port(span).domain();
    let bitmap = domain.attributes().bitmap();
    let mut runs: Vec<Wanted> = Vec::new();
    for page in span.pages().iter() {
        if bitmap.allows(page.single(), access) {
            continue;
        }
        match runs.last_mut() {
            Some(run) if run.pages.end == page => run.pages.end = PageNo(page.0 + 1),
            _ => runs.push(Wanted {
                domain: domain.id(),
                pages: PageRange::new(page, PageNo(page.0 + 1)),
                access,
            }),
        }
    }
    runs
}

/// I/O that a request asks for.
struct Task {
    kind: Kind,
    operation: Operation,
    offset: u64,
}

/// Decides what a leased chain asks for; a status if it is answered at once.
fn task(
    device: &Device,
    memory: &DeviceMemory,
    ready: &Ready,
    buffers: &Buffers,
) -> Result<Task, Status> {
    let limits = device.shared.limits();
    let header = Header::read(memory, &ready.frame).map_err(|_| Status::IoError)?;
    let bytes = |spans: &[Span]| spans.iter().map(|s| u64::from(s.len)).sum::<u64>();
    let (readable, writable) = (bytes(&buffers.readable), bytes(&buffers.writable));
    match decide(limits, header, readable, writable) {
        Work::Read { .. } if writable == 0 => Err(Status::Ok),
        Work::Write { .. } if readable == 0 => Err(Status::Ok),
        Work::Read { offset } => Ok(Task {
            kind: Kind::Read,
            operation: Operation::Read,
            offset,
        }),
        Work::Write { offset } => Ok(Task {
            kind: Kind::Write,
            operation: Operation::Write,
            offset,
        }),
        Work::Flush => Ok(Task {
            kind: Kind::Flush,
            operation: Operation::Sync,
            offset: 0,
        }),
        Work::Serial => match write_serial(memory, &buffers.writable, &device.shared.serial) {
            Ok(()) => Err(Status::Ok),
            Err(_) => Err(Status::IoError),
        },
        Work::Range(kind) => empty_task(limits, kind, memory, &buffers.readable),
        Work::Answer(status) => Err(status),
    }
}

fn empty_task(
    limits: crate::blk::request::Limits,
    kind: RangeKind,
    memory: &DeviceMemory,
    data: &[Span],
) -> Result<Task, Status> {
    let bytes = read_range(memory, data).map_err(|_| Status::IoError)?;
    let range = range_work(limits, kind, bytes)?;
    let stage = EmptyStage::Direct;
    Ok(Task {
        kind: Kind::Empty {
            how: range.how,
            stage,
        },
        operation: Operation::Allocate {
            bytes: range.bytes,
            mode: empty_mode(range.how, stage),
        },
        offset: range.offset,
    })
}

/// Mode of `fallocate` that does a stage.
pub(crate) fn empty_mode(how: EmptyHow, stage: EmptyStage) -> i32 {
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    match (how, stage) {
        (EmptyHow::Zero, EmptyStage::Direct) => {
            libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE
        }
        (_, EmptyStage::Direct | EmptyStage::Punch) => punch,
        (_, EmptyStage::Allocate) => libc::FALLOC_FL_KEEP_SIZE,
    }
}
