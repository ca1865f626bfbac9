// SPDX-License-Identifier: Apache-2.0
//! How a queue starts and begins to stop: see the diagram in [`super::queue`].

use super::{
    command::StopHow,
    device::Device,
    io::Io,
    kicks::ARRIVALS,
    pages::{absent_runs, whole},
    queue::{EngineQueue, QueueState},
};
use crate::{
    memory::{DeviceMemory, Span},
    parked::{Ended, ParkedChain, Purpose, Resumed, Waiter},
    shared::{DeviceShared, StopReason, add, sub},
    slo::course::RequestTimeline,
};
use pagetide_addr::Access;
use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    sync::mpsc::Sender,
    time::Instant,
};

impl Io {
    /// Wires the rings of a starting queue, or requests their pages.
    pub fn start_rings(&mut self, device: &mut Device, number: u16) -> io::Result<()> {
        let Some(memory) = device.memory.clone() else {
            return Ok(());
        };
        let Some(queue) = device.queues[usize::from(number)].as_mut() else {
            return Ok(());
        };
        match self.try_rings(&device.shared, queue, &memory) {
            Ok(Some(kick)) => {
                self.ring.poll(kick.as_fd(), queue.token)?;
                // Submit while the descriptor is certainly open.
                self.ring.submit()?;
                queue.polled = true;
                queue.kick = Some(kick);
                device.kind.started(number, queue.features);
                if let Some(arrivals) = device.kind.readiness(number) {
                    let token = queue.key.epoch | ARRIVALS;
                    self.ring.poll(arrivals, token)?;
                    queue.arrivals = Some(token);
                }
            }
            Ok(None) => {}
            Err(reason) => {
                device.shared.stop(reason);
                queue.tell_error();
            }
        }
        Ok(())
    }

    /// Returns the kick descriptor to be polled once the queue runs.
    fn try_rings(
        &mut self,
        device: &DeviceShared,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
    ) -> Result<Option<OwnedFd>, StopReason> {
        let counters = self.reports.counters(device);
        let absent = queue.wire(memory, counters)?;
        if absent.is_empty() {
            queue.open_rings(memory)?;
            return Ok(queue.kick.take());
        }
        let runs = |span: &Span| absent_runs(memory, *span, Access::Write);
        let mut wanted: Vec<_> = absent.iter().flat_map(runs).collect();
        if wanted.is_empty() {
            // They came back after wiring failed. Request them all the same: the answer triggers
            // the retry.
            let all = |span: &Span| whole(memory, *span, Access::Write);
            wanted.extend(absent.iter().filter_map(all));
        }
        let parked = ParkedChain {
            asker: queue.asker(device, memory),
            waiter: Waiter::Rings,
            wanted,
            purpose: Purpose::Dma,
            since: Instant::now(),
            course: RequestTimeline::default(),
        };
        let requests = self.parked.park(parked);
        add(&counters.iopfs, requests as u64);
        Ok(None)
    }

    /// Handles the answer to the page requests for a queue's rings.
    pub fn rings_answered(&mut self, device: &mut Device, resumed: &Resumed) -> io::Result<()> {
        let key = resumed.queue;
        let slot = device.queues.get_mut(usize::from(key.queue));
        let Some(Some(queue)) = slot else {
            return Ok(());
        };
        if queue.key != key || !matches!(queue.state, QueueState::Starting) {
            return Ok(());
        }
        if resumed.ended != Ended::Present {
            device
                .shared
                .stop(StopReason::ContentLost { queue: key.queue });
            queue.tell_error();
            return Ok(());
        }
        self.start_rings(device, key.queue)
    }

    /// Begins to stop a queue.
    pub fn begin_stop(
        &mut self,
        device: &DeviceShared,
        queue: &mut EngineQueue,
        how: StopHow,
        reply: Sender<u16>,
    ) {
        let how = match queue.state {
            // Its rings have not been read: there is nothing to drain.
            QueueState::Starting => StopHow::Abandon,
            _ if device.drops_its_work() => StopHow::Abandon,
            _ => how,
        };
        queue.state = QueueState::Stopping { how, reply };
        if how == StopHow::Abandon {
            self.abandon_parked(device, queue);
        }
    }

    /// Drops chains that a queue has taken but not given to the kernel. As after a death, they stay
    /// in the in-flight region.
    pub fn drop_waiting(&mut self, device: &mut Device, number: u16) {
        let Some(mut queue) = device.queues[usize::from(number)].take() else {
            return;
        };
        let mut dropped: Vec<_> = queue.steps.drain(..).collect();
        for job in std::mem::take(&mut device.slow) {
            match job.request.key == queue.key {
                true => dropped.push(job),
                false => device.slow.push_back(job),
            }
        }
        for mut job in dropped {
            self.fair.request_ended(queue.key.device);
            queue.in_flight -= 1;
            sub(&self.reports.counters(&device.shared).in_flight, 1);
            let memory = job.dma.memory().clone();
            job.request.leases.release(&memory);
            self.bounces.slots.give_up(job.request.bounced.drain(..));
            self.scratch.keep(job);
        }
        device.put_back(queue);
    }

    /// Drops the parked chains of a queue; they stay in the in-flight region.
    pub fn abandon_parked(&mut self, device: &DeviceShared, queue: &mut EngineQueue) {
        device.injector.given_up(self.parked.held_of(queue.key));
        let held = queue.resumed.iter().filter(|r| r.course.is_held()).count();
        device
            .injector
            .given_up(u32::try_from(held).unwrap_or(u32::MAX));
        let gone = self.parked.abandon(queue.key) + queue.resumed.len();
        queue.resumed.clear();
        queue.parked -= gone;
        queue.faulting = 0;
        queue.resubmit.clear();
        sub(&self.reports.counters(device).parked, gone as u64);
    }
}
