// SPDX-License-Identifier: Apache-2.0
//! Beginning a leased chain: the last step before the kernel.

use super::{
    answer::{Answer, Moved},
    bounce::plan::Plan,
    device::Device,
    fair::Load,
    io::Io,
    land::Bounce,
    queue::EngineQueue,
    request::{Request, Sample},
};
use crate::{
    chain::Buffers,
    frame::Frame,
    kind::{
        Flight,
        work::{Acted, Chain, Data, Decided, Task},
    },
    memory::{DeviceMemory, LeaseSet, Span},
    ring::{Dma, Job},
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
    /// Set if part of its data goes to bounce buffers.
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
        let buffers = std::mem::take(&mut self.scratch.buffers);
        let begun = self.begin_with(device, queue, memory, ready, &buffers);
        self.scratch.buffers = buffers;
        begun
    }

    fn begin_with(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        mut ready: Ready,
        buffers: &Buffers,
    ) -> io::Result<()> {
        // The descriptors have been read. Zeros in their place would request nothing.
        if queue.lost(memory).is_some() {
            self.forgo(device, queue, memory, ready);
            return Ok(());
        }
        if let Some(bounce) = ready.bounce.take() {
            let Bounce { plan, task } = *bounce;
            let spans = &buffers.writable;
            self.reports
                .log_accesses(device, memory, spans, Access::Write);
            let onto = Onto::Bounce(plan);
            return self.start_task(device, queue, memory, ready, Transfer { task, onto });
        }
        let chain = Chain {
            queue: queue.key.queue,
            memory,
            frame: &ready.frame,
            buffers,
        };
        let decided = device.kind.decide(self.reports.now_ns, chain);
        // The header has been read, too.
        if queue.lost(memory).is_some() {
            self.forgo(device, queue, memory, ready);
            return Ok(());
        }
        let acted = match decided {
            Decided::Io(task) => {
                let (spans, access) = match task.data {
                    Data::ToGuest => (&buffers.writable[..], Access::Write),
                    Data::FromGuest => (&buffers.readable[..], Access::Read),
                    Data::Unmoved => (&[][..], Access::Read),
                };
                self.reports.log_accesses(device, memory, spans, access);
                let onto = Onto::Guest(spans);
                return self.start_task(device, queue, memory, ready, Transfer { task, onto });
            }
            Decided::Act => {
                let acted = self.act(device, chain);
                self.charge(queue, u64::from(acted.from_guest_bytes));
                acted
            }
            Decided::Answer(outcome) => Acted {
                outcome,
                from_guest_bytes: 0,
            },
        };
        let answer = Answer {
            head: ready.head,
            at: ready.frame.answer,
            outcome: acted.outcome,
            moved: Moved::from_guest(acted.from_guest_bytes),
            course: ready.course,
        };
        if let Err(reason) = self.complete(device, queue, memory, answer, ready.leases) {
            device.shared.stop(reason);
            queue.tell_error();
        }
        Ok(())
    }

    /// Lets the kind do what needs no I/O.
    pub(super) fn act(&mut self, device: &mut Device, chain: Chain<'_>) -> Acted {
        let acted = device.kind.act(chain);
        if acted.from_guest_bytes > 0 {
            let spans = &chain.buffers.readable;
            self.reports
                .log_accesses(device, chain.memory, spans, Access::Read);
        }
        acted
    }

    /// Stops a device whose memory is lost, and releases what a chain of it holds.
    #[cold]
    fn forgo(
        &mut self,
        device: &Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        mut ready: Ready,
    ) {
        if let Some(bounce) = ready.bounce.take() {
            self.bounces.slots.give_up(bounce.plan.runs);
        }
        ready.leases.release(memory);
        if let Some(reason) = queue.lost(memory) {
            device.shared.stop(reason);
        }
        queue.tell_error();
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
            answer: ready.frame.answer,
            leases: ready.leases,
            step: task.step,
            load: Load::Data(0),
            lane: task.lane,
            data: task.data,
            flight: task.flight,
            data_bytes: 0,
            sample: ready.sample,
            course: ready.course,
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
    task: Task<Flight>,
    onto: Onto<'a>,
}
