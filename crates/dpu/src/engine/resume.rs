// SPDX-License-Identifier: Apache-2.0
//! Chains that begin again: after their page requests were answered, or after their data had
//! arrived in a bounce buffer.

use super::{
    bounce::{Delivered, Settled},
    device::Device,
    io::Io,
    queue::EngineQueue,
    request::{Origin, TakenChain},
};
use crate::{
    parked::{Ended, Resumed, Waiter},
    shared::{add, sub},
};
use std::io;

impl Io {
    /// Serves a chain that was parked.
    pub fn serve_resumed(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        resumed: &Resumed,
    ) -> io::Result<()> {
        let Waiter::Chain(head) = resumed.waiter else {
            return Ok(());
        };
        queue.count_resumed(resumed.purpose);
        sub(&self.reports.counters(&device.shared).parked, 1);
        let mut course = resumed.course;
        let was_held = course.is_held();
        let parked_ns = course.resume(self.reports.now_ns);
        if was_held {
            let injector = &device.shared.injector;
            match resumed.ended {
                Ended::Present | Ended::Lost => injector.resumed(parked_ns),
                Ended::TimedOut => injector.given_up(1),
            }
        }
        let origin = Origin::Resumed {
            purpose: resumed.purpose,
            since: resumed.since,
            course,
            ended: resumed.ended,
        };
        self.serve(device, queue, TakenChain { head, origin })
    }

    /// Completes a transfer whose pages are installed, or restarts its chain.
    pub fn settled(&mut self, device: &mut Device, settled: Settled) -> io::Result<()> {
        let counters = self.reports.counters(&device.shared);
        add(&counters.overwritten_pages, settled.installed_pages());
        let job = match self.bounces.deliver(settled) {
            Delivered::Entirely(job, status) => {
                self.complete_job(device, job, status);
                return Ok(());
            }
            Delivered::NotYet(job) => job,
        };
        let key = job.request.key;
        let chain = TakenChain {
            head: job.request.head,
            origin: Origin::Again(job.request.course),
        };
        self.scratch.keep(job);
        let Some(mut queue) = device.take_queue(key) else {
            debug_assert!(false, "a queue went away under its I/O");
            return Ok(());
        };
        queue.in_flight -= 1;
        sub(&self.reports.counters(&device.shared).in_flight, 1);
        // A chain of an abandoned queue stays in the in-flight region.
        if !queue.is_abandoned() {
            self.serve(device, &mut queue, chain)?;
        }
        device.put_back(queue);
        Ok(())
    }
}
