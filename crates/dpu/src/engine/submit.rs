// SPDX-License-Identifier: Apache-2.0
//! Steps to the kernel: when the next step of a job goes to the ring, and which descriptor of the
//! image it uses.

use super::{
    device::Device,
    fair::{Load, Verdict},
    io::Io,
    queue::EngineQueue,
    request::{Kind, Request},
};
use crate::ring::Job;
use std::io;

/// How far the serving of a queue got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Served {
    /// Nothing to begin.
    Nothing,
    /// All work was begun, or the queue's share was spent.
    InPart,
    /// More work is left, and the tenant's credit of this turn is spent.
    Spent,
    /// More work is left, and the tenant's in-flight bound is reached.
    Full,
}

impl Io {
    /// Gives a job's first step to the ring, or queues it for the tenant's turn.
    pub fn start(
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
