// SPDX-License-Identifier: Apache-2.0
//! What follows completed I/O: another step, or an entry in the used ring.

use super::{
    Device, Io,
    begin::empty_mode,
    chain::{EmptyStage, Kind, Request, Sample},
    queue::EngineQueue,
};
use crate::{
    blk::request::{EmptyHow, Status, write_status},
    memory::{DeviceMemory, LeaseSet, Span},
    ring::{Job, Operation},
    shared::{StopReason, add, sub},
    slo::course::RequestTimeline,
};
use std::{io, rc::Rc, sync::atomic::Ordering, time::Instant};
use virtio_queue::QueueT;

/// What to do with a job after a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Do the rest, or the next stage.
    Again,
    /// Repeat it through the page cache.
    AgainBuffered,
    /// The job is done.
    Complete(Status),
}

impl Io {
    /// Handles the result of a job's step.
    pub fn finish(
        &mut self,
        device: &mut Device,
        mut job: Box<Job<Request>>,
        result: i32,
    ) -> io::Result<()> {
        let slot = job.request.key.device;
        self.fair.step_ended(slot, job.request.load);
        let next = match next(&mut job, result) {
            Next::Again | Next::AgainBuffered if !self.rest_is_within(device, &job) => {
                Next::Complete(Status::IoError)
            }
            next => next,
        };
        match next {
            Next::Again => self.go_on(device, job),
            Next::AgainBuffered => {
                job.request.step.file = device.buffered;
                let load = job.request.load;
                return self.give(job, load);
            }
            Next::Complete(status) => {
                self.fair.request_ended(slot);
                if status == Status::IoError {
                    self.tell_failure(device, &job.request, result);
                }
                let job = match job.request.bounced.is_empty() {
                    true => Some(job),
                    false => self.settle(device, job, status),
                };
                if let Some(job) = job {
                    self.complete_job(device, job, status);
                }
            }
        }
        Ok(())
    }

    fn tell_failure(&self, device: &Device, request: &Request, result: i32) {
        if result >= 0 {
            // The image ends before the request does, which is reported where its size is checked.
            device.shared.look_at_size();
        }
        let counters = &device.shared.counters[self.index];
        let errors = counters.errors.load(Ordering::Relaxed) + 1;
        // A failing disk fails often: log the 1st, 2nd, 4th, 8th ... error.
        if errors.is_power_of_two() {
            tracing::warn!(
                device = device.shared.id.0,
                operation = ?request.step.operation,
                offset = request.step.offset,
                error = %match result {
                    0.. => io::Error::from(io::ErrorKind::UnexpectedEof),
                    _ => io::Error::from_raw_os_error(-result),
                },
                errors,
                "I/O on the image failed"
            );
        }
    }

    pub(super) fn complete_job(
        &mut self,
        device: &mut Device,
        mut job: Box<Job<Request>>,
        status: Status,
    ) {
        let key = job.request.key;
        let Some(mut queue) = super::take_queue(device, key) else {
            debug_assert!(false, "a queue went away under its I/O");
            return;
        };
        queue.in_flight -= 1;
        let counters = &device.shared.counters[self.index];
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
            self.record_lookup(device, began, 0);
        }
        job.request.leases = leases;
        if let Err(reason) = told {
            device.shared.stop(reason);
            queue.tell_error();
        }
        device.queues[usize::from(key.queue)] = Some(queue);
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
        let counters = &device.shared.counters[self.index];
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
        self.tell_done(device, queue, &answer);
        Ok(())
    }
}

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

/// Decides what follows a result.
fn next(job: &mut Job<Request>, result: i32) -> Next {
    let request = &mut job.request;
    let error = match u64::try_from(result) {
        Ok(count) => return after_success(job, count),
        Err(_) => -result,
    };
    match (request.kind, error) {
        (_, libc::EINTR | libc::EAGAIN) => Next::Again,
        // The file system knows better than statx what direct I/O can take here.
        (Kind::Read | Kind::Write, libc::EINVAL) if !request.retried => {
            request.retried = true;
            Next::AgainBuffered
        }
        (
            Kind::Empty {
                how: EmptyHow::Zero,
                stage: EmptyStage::Direct,
            },
            libc::EOPNOTSUPP,
        ) => {
            stage(request, EmptyStage::Punch);
            Next::Again
        }
        (Kind::Empty { .. }, libc::EOPNOTSUPP) => Next::Complete(Status::Unsupported),
        _ => Next::Complete(Status::IoError),
    }
}

fn after_success(job: &mut Job<Request>, count: u64) -> Next {
    let request = &mut job.request;
    match request.kind {
        Kind::Read | Kind::Write if count == 0 => Next::Complete(Status::IoError),
        Kind::Read | Kind::Write => {
            job.dma.advance(count);
            request.step.offset += count;
            if job.dma.left() > 0 {
                Next::Again
            } else {
                Next::Complete(Status::Ok)
            }
        }
        Kind::Empty {
            stage: EmptyStage::Punch,
            ..
        } => {
            stage(request, EmptyStage::Allocate);
            Next::Again
        }
        Kind::Flush | Kind::Empty { .. } => Next::Complete(Status::Ok),
    }
}

fn stage(request: &mut Request, stage: EmptyStage) {
    if let (Kind::Empty { how, .. }, Operation::Allocate { bytes, .. }) =
        (request.kind, request.step.operation)
    {
        request.kind = Kind::Empty { how, stage };
        request.step.operation = Operation::Allocate {
            bytes,
            mode: empty_mode(how, stage),
        };
    }
}
