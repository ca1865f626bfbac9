// SPDX-License-Identifier: Apache-2.0
//! What follows completed I/O: another step, or an entry in the used ring.

use super::{device::Device, io::Io, request::Request};
use crate::{
    kind::work::{Next, Outcome},
    ring::Job,
};
use std::{io, sync::atomic::Ordering};

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
        let now_ns = self.reports.now_ns;
        let Job { dma, request } = &mut *job;
        let io = (dma, &mut request.step);
        match device.kind.next(now_ns, &mut request.flight, io, result) {
            Next::Again => self.go_on(device, job),
            Next::AtOnce => {
                let load = job.request.load;
                return self.give(job, load);
            }
            Next::Complete(outcome) => {
                self.fair.request_ended(slot);
                if outcome == Outcome::Failed {
                    self.tell_failure(device, &job.request, result);
                }
                let job = match job.request.bounced.is_empty() {
                    true => Some(job),
                    false => self.bounces.settle(device, job, outcome, now_ns),
                };
                if let Some(job) = job {
                    self.complete_job(device, job, outcome);
                }
            }
        }
        Ok(())
    }

    fn tell_failure(&self, device: &Device, request: &Request, result: i32) {
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
