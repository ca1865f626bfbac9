// SPDX-License-Identifier: Apache-2.0
//! The answer to a chain: its status byte, its entry in the used ring, and the end of its leases.

use super::{
    device::Device,
    io::Io,
    queue::EngineQueue,
    request::{Kind, Request, Sample},
};
use crate::{
    blk::request::{Status, write_status},
    memory::{DeviceMemory, LeaseSet, Span},
    ring::Job,
    shared::{StopReason, add, sub},
    slo::course::RequestTimeline,
};
use std::{rc::Rc, time::Instant};
use virtio_queue::QueueT;

/// The answer to a chain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answer {
    pub head: u16,
    /// Address of the status byte.
    pub at: Span,
    pub status: Status,
    /// Bytes the device wrote, including the status.
    pub written: u32,
    /// Bytes of data moved.
    pub moved: u32,
    pub course: RequestTimeline,
}

impl Io {
    /// Answers a chain whose I/O is done.
    pub fn complete_job(
        &mut self,
        device: &mut Device,
        mut job: Box<Job<Request>>,
        status: Status,
    ) {
        let key = job.request.key;
        let Some(mut queue) = device.take_queue(key) else {
            debug_assert!(false, "a queue went away under its I/O");
            return;
        };
        queue.in_flight -= 1;
        let counters = self.reports.counters(&device.shared);
        sub(&counters.in_flight, 1);
        let (mut moved, mut written) = (0, 1);
        if status == Status::Ok {
            match job.request.kind {
                Kind::Read => {
                    moved = job.request.data_bytes;
                    add(&counters.read_bytes, u64::from(moved));
                    written += job.request.data_bytes;
                }
                Kind::Write => {
                    moved = job.request.data_bytes;
                    add(&counters.written_bytes, u64::from(moved));
                }
                Kind::Flush | Kind::Empty { .. } => {}
            }
        }
        let memory = job.dma.memory().clone();
        let answer = Answer {
            head: job.request.head,
            at: job.request.status,
            status,
            written,
            moved,
            course: job.request.course,
        };
        let mut leases = std::mem::take(&mut job.request.leases);
        let told = self.answer(device, &mut queue, &memory, answer);
        let began = (job.request.sample == Sample::Yes).then(Instant::now);
        leases.release(&memory);
        if let Some(began) = began {
            let counters = self.reports.counters(&device.shared);
            self.scratch.record_lookup(counters, began, 0);
        }
        job.request.leases = leases;
        if let Err(reason) = told {
            device.shared.stop(reason);
            queue.tell_error();
        }
        device.put_back(queue);
        self.scratch.keep(job);
    }

    /// Answers a chain that needs no I/O.
    pub fn complete(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
        answer: Answer,
        mut leases: LeaseSet,
    ) -> Result<(), StopReason> {
        let told = self.answer(device, queue, memory, answer);
        leases.release(memory);
        told
    }

    /// Writes the status and puts the chain into the used ring.
    fn answer(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &DeviceMemory,
        answer: Answer,
    ) -> Result<(), StopReason> {
        let counters = self.reports.counters(&device.shared);
        add(&counters.requests, 1);
        if answer.status == Status::IoError {
            add(&counters.errors, 1);
        }
        // Before reporting anything that zeros in place of guest memory may have caused.
        if let Some(reason) = queue.lost(memory) {
            return Err(reason);
        }
        write_status(memory, answer.at, answer.status).map_err(|e| queue.broken(&e))?;
        if let Some(inflight) = &queue.inflight {
            inflight.prepare(answer.head);
        }
        queue
            .queue
            .add_used(memory, answer.head, answer.written)
            .map_err(|e| queue.broken(&e))?;
        if let Some(inflight) = &queue.inflight {
            inflight.finish(answer.head, queue.queue.next_used());
        }
        if let Some(reason) = queue.lost(memory) {
            return Err(reason);
        }
        queue.needs_call = true;
        self.reports
            .done(device, queue.key, answer.moved, &answer.course);
        Ok(())
    }
}
