// SPDX-License-Identifier: Apache-2.0
//! Beginning a leased chain: the last step before the kernel.

use super::{
    Device, Io,
    bounce::{Bounce, Plan},
    chain::{EmptyStage, Kind, Ready, Request, Served},
    fair::{Load, Verdict},
    finish::Answer,
    queue::EngineQueue,
};
use crate::{
    blk::request::{
        EmptyHow, Header, Limits, RangeKind, Status, Work, decide, range_work, read_range,
        write_serial,
    },
    chain::Buffers,
    memory::{DeviceMemory, Span},
    ring::{Dma, Job, Operation, Step},
    shared::add,
};
use pagetide_addr::Access;
use std::{io, rc::Rc};

impl Io {
    /// Executes a leased chain's request, or begins it.
    pub fn begin(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        ready: Ready,
    ) -> io::Result<()> {
        let mut ready = ready;
        // The descriptors have been read. Zeros in their place would request nothing.
        if let Some(reason) = queue.lost(memory) {
            self.forgo(memory, ready);
            device.shared.stop(reason);
            queue.tell_error();
            return Ok(());
        }
        if let Some(bounce) = ready.bounce.take() {
            let Bounce { plan, offset } = *bounce;
            let buffers = std::mem::take(&mut self.scratch.buffers);
            self.log_accesses(device, memory, &buffers.writable, Access::Write);
            self.scratch.buffers = buffers;
            let task = Task {
                kind: Kind::Read,
                operation: Operation::Read,
                offset,
            };
            return self.start_task(device, queue, memory, (ready, task), Onto::Bounce(plan));
        }
        let buffers = std::mem::take(&mut self.scratch.buffers);
        let task = task(device, memory, &ready, &buffers)
            .and_then(|task| self.within_image(device, task, &buffers));
        // The header has been read, too.
        if let Some(reason) = queue.lost(memory) {
            self.scratch.buffers = buffers;
            self.forgo(memory, ready);
            device.shared.stop(reason);
            queue.tell_error();
            return Ok(());
        }
        let status = match task {
            Ok(task) => {
                let (spans, access) = match task.kind {
                    Kind::Read => (&buffers.writable[..], Access::Write),
                    Kind::Write => (&buffers.readable[..], Access::Read),
                    Kind::Flush | Kind::Empty { .. } => (&[][..], Access::Read),
                };
                self.log_accesses(device, memory, spans, access);
                return self
                    .start_task(device, queue, memory, (ready, task), Onto::Guest(spans))
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
            moved: 0,
            course: ready.course,
        };
        if let Err(reason) = self.complete(device, queue, memory, answer, ready.leases) {
            device.shared.stop(reason);
            queue.tell_error();
        }
        Ok(())
    }

    /// Releases what a chain holds whose request will not be done.
    fn forgo(&mut self, memory: &DeviceMemory, mut ready: Ready) {
        if let Some(bounce) = ready.bounce.take() {
            self.bounces.abandon(&bounce.plan);
        }
        ready.leases.release(memory);
    }

    /// Refuses a write that ends beyond the image's current size.
    fn within_image(
        &self,
        device: &mut Device,
        task: Task,
        buffers: &Buffers,
    ) -> Result<Task, Status> {
        let bytes = match task.operation {
            Operation::Read | Operation::Sync => return Ok(task),
            Operation::Write => buffers.readable.iter().map(|s| u64::from(s.len)).sum(),
            Operation::Allocate { bytes, .. } => bytes,
        };
        match self.reaches(device, task.offset + bytes) {
            true => Ok(task),
            false => Err(Status::IoError),
        }
    }

    fn start_task(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        (ready, task): (Ready, Task),
        onto: Onto<'_>,
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
            load: Load::Data(0),
            kind: task.kind,
            data_bytes: 0,
            sample: ready.sample,
            course: ready.course,
            retried: false,
            bounced: Vec::new(),
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
        let aimed = match onto {
            Onto::Guest(spans) => job.dma.aim(memory, spans),
            Onto::Bounce(plan) => {
                let aimed = job.dma.aim_apart(memory, &plan.pieces);
                job.request.bounced = plan.runs;
                aimed
            }
        };
        if let Err(error) = aimed {
            // Spans come from this very memory, so this is a bug of ours, answered as an error.
            debug_assert!(false, "{error}");
        }
        job.request.data_bytes = u32::try_from(job.dma.left()).unwrap_or(u32::MAX);
        queue.in_flight += 1;
        self.fair.request_began(queue.key.device);
        job.request.course.submit(self.now_ns);
        add(&device.shared.counters[self.index].in_flight, 1);
        self.start(device, queue, job)
    }

    /// Gives a job's first step to the ring, or queues it for the tenant's turn.
    fn start(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        job: Box<Job<Request>>,
    ) -> io::Result<()> {
        let slot = queue.key.device;
        match job.request.kind {
            Kind::Read | Kind::Write => {
                if queue.steps.is_empty() && self.fair.may_step(slot) == Verdict::Go {
                    return self.start_step(device, queue, job);
                }
                queue.steps.push_back(job);
            }
            Kind::Flush | Kind::Empty { .. } => device.slow.push_back(job),
        }
        Ok(())
    }

    /// Queues a job for its next step.
    pub fn go_on(&self, device: &mut Device, job: Box<Job<Request>>) {
        let key = job.request.key;
        match job.request.kind {
            Kind::Flush | Kind::Empty { .. } => device.slow.push_back(job),
            Kind::Read | Kind::Write => match device.queues.get_mut(usize::from(key.queue)) {
                Some(Some(queue)) if queue.key == key => queue.steps.push_back(job),
                _ => debug_assert!(false, "a queue went away under its I/O"),
            },
        }
    }

    /// Begins waiting slow operations, as far as the tenant may; returns what stopped it.
    pub fn start_slow(&mut self, device: &mut Device, slot: usize) -> io::Result<Served> {
        let mut served = Served::Nothing;
        while !device.slow.is_empty() {
            match self.fair.may_begin_slow(slot) {
                Verdict::Go => {}
                Verdict::NextTurn => return Ok(Served::Spent),
                Verdict::Full => return Ok(Served::Full),
            }
            if let Some(mut job) = device.slow.pop_front() {
                job.request.step.file = device.buffered;
                self.give(job, Load::Slow)?;
                served = Served::InPart;
            }
        }
        Ok(served)
    }

    /// Gives the next step of a transfer to the ring, with the descriptor that supports it.
    pub fn start_step(
        &mut self,
        device: &Device,
        queue: &mut EngineQueue,
        mut job: Box<Job<Request>>,
    ) -> io::Result<()> {
        let image = &device.shared.image;
        let block_bytes = u64::from(image.block_bytes);
        job.request.step.file = match device.direct {
            Some(direct)
                if !job.request.retried
                    && job.dma.is_aligned(image.memory_align.max(512))
                    && job.dma.left().is_multiple_of(block_bytes)
                    && job.request.step.offset.is_multiple_of(block_bytes) =>
            {
                direct
            }
            _ => device.buffered,
        };
        // Steps end at block boundaries of the disk, so that the next one can bypass the page
        // cache, too.
        let step_bytes = self.fair.step_bytes_max(queue.key.device);
        let bytes = job.dma.cut(step_bytes.max(block_bytes));
        queue.credit.spend(bytes);
        self.give(job, Load::Data(bytes))
    }

    /// Gives a job's step to the ring.
    pub fn give(&mut self, mut job: Box<Job<Request>>, load: Load) -> io::Result<()> {
        job.request.load = load;
        self.fair.step_began(job.request.key.device, load);
        let step = job.request.step;
        self.ring.start(job, step)?;
        // An idle disk gets the first request at once, not when a whole batch is ready: so never
        // let more wait than are under way. The batches double, so a deep queue still costs few
        // system calls.
        let waiting = self.ring.unsubmitted();
        if 2 * waiting > self.ring.in_flight() {
            self.ring.submit()?;
        }
        Ok(())
    }
}

/// The memory of a transfer.
enum Onto<'a> {
    /// Guest memory only.
    Guest(&'a [Span]),
    /// Guest memory and bounce buffers.
    Bounce(Plan),
}

/// The I/O of a request.
struct Task {
    kind: Kind,
    operation: Operation,
    offset: u64,
}

/// Decides what a leased chain requests; returns a status if it is answered at once.
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
    limits: Limits,
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

/// The mode of `fallocate` for a stage.
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
