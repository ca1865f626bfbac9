// SPDX-License-Identifier: Apache-2.0
//! Beginning a leased chain: the last step before the kernel.

use super::{
    answer::Answer,
    bounce::plan::Plan,
    device::Device,
    fair::Load,
    io::Io,
    land::Bounce,
    queue::EngineQueue,
    request::{EmptyStage, Kind, Request, Sample, empty_mode},
};
use crate::{
    blk::request::{
        Frame, Header, Limits, RangeKind, Status, Work, decide, range_work, read_range,
        write_serial,
    },
    chain::Buffers,
    memory::{DeviceMemory, LeaseSet, Span},
    ring::{Dma, Job, Operation, Step},
    shared::add,
    slo::course::RequestTimeline,
};
use pagetide_addr::Access;
use std::{io, rc::Rc};

/// A chain whose pages are all leased.
pub(crate) struct Ready {
    pub head: u16,
    pub frame: Frame,
    pub leases: LeaseSet,
    pub sample: Sample,
    pub course: RequestTimeline,
    /// Set if it is a read of which part goes to bounce buffers.
    pub bounce: Option<Box<Bounce>>,
}

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
            self.reports
                .log_accesses(device, memory, &buffers.writable, Access::Write);
            self.scratch.buffers = buffers;
            let task = Task {
                kind: Kind::Read,
                operation: Operation::Read,
                offset,
            };
            let transfer = Transfer {
                task,
                onto: Onto::Bounce(plan),
            };
            return self.start_task(device, queue, memory, ready, transfer);
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
                self.reports.log_accesses(device, memory, spans, access);
                let transfer = Transfer {
                    task,
                    onto: Onto::Guest(spans),
                };
                let started = self.start_task(device, queue, memory, ready, transfer);
                self.scratch.buffers = buffers;
                return started;
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
            self.bounces.slots.give_up(bounce.plan.runs);
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
        match device.reaches(self.reports.now_ns, task.offset + bytes) {
            true => Ok(task),
            false => Err(Status::IoError),
        }
    }

    fn start_task(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        ready: Ready,
        transfer: Transfer<'_>,
    ) -> io::Result<()> {
        let Transfer { task, onto } = transfer;
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
        job.request.course.submit(self.reports.now_ns);
        add(&self.reports.counters(&device.shared).in_flight, 1);
        self.start(device, queue, job)
    }
}

/// The memory of a transfer.
enum Onto<'a> {
    /// Guest memory only.
    Guest(&'a [Span]),
    /// Guest memory and bounce buffers.
    Bounce(Plan),
}

/// A request's I/O, and the memory that it uses.
struct Transfer<'a> {
    task: Task,
    onto: Onto<'a>,
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
