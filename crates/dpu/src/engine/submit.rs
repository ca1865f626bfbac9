// SPDX-License-Identifier: Apache-2.0
//! Steps to the kernel: when the next step of a job goes to the ring.

use super::{
    device::Device,
    fair::{Load, Verdict},
    io::Io,
    queue::EngineQueue,
    request::Request,
};
use crate::{
    kind::work::{Aim, Lane},
    ring::Job,
};
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
        match job.request.lane {
            Lane::Transfers => {
                if queue.steps.is_empty() && self.fair.may_step(slot) == Verdict::Go {
                    return self.start_step(device, queue, job);
                }
                queue.steps.push_back(job);
            }
            Lane::Slow => device.slow.push_back(job),
        }
        Ok(())
    }

    /// Queues a job for its next step.
    pub fn go_on(&self, device: &mut Device, job: Box<Job<Request>>) {
        let key = job.request.key;
        match job.request.lane {
            Lane::Slow => device.slow.push_back(job),
            Lane::Transfers => match device.queues.get_mut(usize::from(key.queue)) {
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
            if let Some(job) = device.slow.pop_front() {
                self.give(job, Load::Slow)?;
                served = Served::InPart;
            }
        }
        Ok(served)
    }

    /// Gives the next step of a transfer to the ring, with the file that supports it.
    pub fn start_step(
        &mut self,
        device: &Device,
        queue: &mut EngineQueue,
        mut job: Box<Job<Request>>,
    ) -> io::Result<()> {
        let Job { dma, request } = &mut *job;
        let Aim { file, unit_bytes } = device.kind.aim(&request.flight, dma, &request.step);
        request.step.file = file;
        let step_bytes = self.fair.step_bytes_max(queue.key.device);
        let bytes = dma.cut(step_bytes.max(unit_bytes));
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
