// SPDX-License-Identifier: Apache-2.0
//! The answer to a chain: its status, its entry in the used ring, and the end of its leases.

use super::{
    device::Device,
    io::Io,
    queue::EngineQueue,
    request::{Request, Sample},
};
use crate::{
    kind::work::{Data, Outcome},
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
    /// Where it is written, if anywhere.
    pub at: Option<Span>,
    pub outcome: Outcome,
    pub moved: Moved,
    pub course: RequestTimeline,
}

/// Bytes of data that a chain has moved.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Moved {
    to_guest: u32,
    from_guest: u32,
}

impl Moved {
    /// So many from the guest.
    pub fn from_guest(bytes: u32) -> Self {
        Self {
            to_guest: 0,
            from_guest: bytes,
        }
    }

    fn of(request: &Request, outcome: Outcome) -> Self {
        match (outcome, request.data) {
            (Outcome::Done, Data::ToGuest) => Self {
                to_guest: request.data_bytes,
                from_guest: 0,
            },
            (Outcome::Done, Data::FromGuest) => Self::from_guest(request.data_bytes),
            _ => Self::default(),
        }
    }
}

impl Io {
    /// Answers a chain whose I/O is done.
    pub fn complete_job(
        &mut self,
        device: &mut Device,
        mut job: Box<Job<Request>>,
        outcome: Outcome,
    ) {
        let key = job.request.key;
        let Some(mut queue) = device.take_queue(key) else {
            debug_assert!(false, "a queue went away under its I/O");
            return;
        };
        queue.in_flight -= 1;
        let counters = self.reports.counters(&device.shared);
        sub(&counters.in_flight, 1);
        let memory = job.dma.memory().clone();
        let answer = Answer {
            head: job.request.head,
            at: job.request.answer,
            outcome,
            moved: Moved::of(&job.request, outcome),
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
        self.scratch.keep_leases(leases);
        told
    }

    /// Writes the answer and puts the chain into the used ring.
    pub(super) fn answer(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &DeviceMemory,
        answer: Answer,
    ) -> Result<(), StopReason> {
        let counters = self.reports.counters(&device.shared);
        add(&counters.requests, 1);
        let Moved {
            to_guest,
            from_guest,
        } = answer.moved;
        add(&counters.read_bytes, u64::from(to_guest));
        add(&counters.written_bytes, u64::from(from_guest));
        if answer.outcome == Outcome::Failed {
            add(&counters.errors, 1);
        }
        // Before reporting anything that zeros in place of guest memory may have caused.
        if let Some(reason) = queue.lost(memory) {
            return Err(reason);
        }
        if let Some(at) = answer.at {
            let told = device.kind.answer(memory, at, answer.outcome);
            told.map_err(|e| queue.broken(&e))?;
        }
        let written = to_guest + answer.at.map_or(0, |at| at.len);
        if let Some(inflight) = &queue.inflight {
            inflight.prepare(answer.head);
        }
        queue.put_used(memory, &[(answer.head, written)])?;
        if let Some(inflight) = &queue.inflight {
            inflight.finish(answer.head, queue.queue.next_used());
        }
        self.reports
            .done(device, queue.key, to_guest + from_guest, &answer.course);
        Ok(())
    }
}
