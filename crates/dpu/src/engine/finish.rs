// SPDX-License-Identifier: Apache-2.0
//! What follows completed I/O: another step, or an entry in the used ring.

use super::{
    device::Device,
    io::Io,
    request::{EmptyStage, Kind, Request, empty_mode},
};
use crate::{
    blk::request::{EmptyHow, Status},
    ring::{Job, Operation},
};
use std::{io, sync::atomic::Ordering};

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
            Next::Again | Next::AgainBuffered
                if !rest_is_within(device, self.reports.now_ns, &job) =>
            {
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
                    false => self
                        .bounces
                        .settle(device, job, status, self.reports.now_ns),
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
        let counters = self.reports.counters(&device.shared);
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
}

/// True if the rest of a job ends within the image, as it is in the batch of `now_ns`.
fn rest_is_within(device: &mut Device, now_ns: u64, job: &Job<Request>) -> bool {
    let step = &job.request.step;
    let end = match (job.request.kind, step.operation) {
        (Kind::Write, _) => step.offset + job.dma.left(),
        (Kind::Empty { .. }, Operation::Allocate { bytes, .. }) => step.offset + bytes,
        _ => return true,
    };
    device.reaches(now_ns, end)
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
