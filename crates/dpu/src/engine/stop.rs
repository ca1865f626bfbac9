// SPDX-License-Identifier: Apache-2.0
//! How queues end, and what happens to their chains without a host.
//!
//! A queue that is *drained* completes all chains it has taken before its stop is answered. The
//! front end requests a stop when it pauses its guest, changes the memory or disables a ring, and
//! waits in its main loop. A chain that waits for pages waits for the host. A host that is gone may
//! stay away for long, and the whole VMM would stand still meanwhile. So a stop waits for I/O,
//! but never for a host that is gone, whether it went before the stop or during it:
//!
//! | | with an in-flight region | without |
//! |---|---|---|
//! | chains that are parked, and reads that have arrived in a bounce buffer and are being settled | stay in the region, and are done again when the ring is started with it | fail with an I/O error |
//! | the same, if the page of the answer is absent, or that of the table that holds its address | likewise | are lost and logged: there is no place to write the answer |
//! | chains that a predecessor left and that have not begun again | stay in the region | do not exist |
//!
//! A queue that is *abandoned* finishes only what the kernel has: chains it has taken but not
//! begun, or not finished, are dropped ([`Io::drop_waiting`]). The same applies to a draining queue
//! when its device stops or its front end goes: nothing waits for it any more.
//!
//! The ring base reported to the front end counts the chains that stay in the region as taken, as
//! after a crash; the region says which they are.
//!
//! The overwrites of a forsaken read, and their slots, stay outstanding until they are answered.
//! None of their data is installed, see [`super::bounce`].

use super::{
    device::Device,
    io::{Io, Progress},
    kicks::ARRIVALS,
    thread::Engine,
};
use crate::{kind::work::Outcome, parked::QueueKey, shared::sub};
use pagetide_addr::Access;
use pagetide_vpri::HostPresence;
use std::io;

/// Whether the driver gets an answer for unfinished requests of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Undone {
    /// Yes, an I/O error: no other record of them exists.
    Fails,
    /// No: they are in the in-flight region, or the device has stopped.
    Stays,
}

impl Engine {
    /// Keeps stopping queues from waiting for a host that is gone.
    pub(super) fn stop_without_host(&mut self, progress: &mut Progress) -> io::Result<()> {
        self.host_seen = self.device_end.host();
        if self.host_seen == HostPresence::Here {
            return Ok(());
        }
        for at in 0..self.active.len() {
            let (index, number) = self.active[at];
            let Some(device) = self.devices[index].as_ref() else {
                continue;
            };
            let queue = device.queues[usize::from(number)].as_ref();
            let Some(queue) = queue.filter(|queue| queue.is_stopping()) else {
                continue;
            };
            let undone = match queue.inflight {
                None if !device.shared.is_stopped() => Undone::Fails,
                _ => Undone::Stays,
            };
            let key = queue.key;
            let lost = self.forsake_parked(key, undone, progress)?
                + self.forsake_bounced(key, undone, progress);
            if lost > 0 && undone == Undone::Fails {
                tracing::warn!(
                    queue = number,
                    lost,
                    "a queue without in-flight tracking was stopped while no daemon is there: requests whose status cannot be written are lost"
                );
            }
        }
        Ok(())
    }

    /// Ends the wait of a queue's parked chains; returns how many were not answered.
    fn forsake_parked(
        &mut self,
        key: QueueKey,
        undone: Undone,
        progress: &mut Progress,
    ) -> io::Result<usize> {
        if undone == Undone::Fails {
            self.resume_at_once(key, progress)?;
            for resumed in self.io.parked.give_up_all_of(key) {
                self.resume(resumed)?;
            }
            self.resume_at_once(key, progress)?;
        }
        let device = self.devices.get_mut(key.device).and_then(Option::as_mut);
        let Some(device) = device else {
            return Ok(0);
        };
        let Some(queue) = device.queues[usize::from(key.queue)].as_mut() else {
            return Ok(0);
        };
        let lost = queue.parked;
        queue.give_up_draining();
        self.io.abandon_parked(&device.shared, queue);
        Ok(lost)
    }

    /// Resumes the answered chains of a queue at once, even outside its turn.
    fn resume_at_once(&mut self, key: QueueKey, progress: &mut Progress) -> io::Result<()> {
        let device = self.devices.get_mut(key.device).and_then(Option::as_mut);
        let Some(device) = device else {
            return Ok(());
        };
        let Some(mut queue) = device.take_queue(key) else {
            return Ok(());
        };
        for _ in 0..queue.resumed.len() {
            if let Some(resumed) = queue.resumed.pop_front() {
                progress.anything = true;
                self.io.reports.look_at_clock();
                self.io.serve_resumed(device, &mut queue, &resumed)?;
            }
        }
        device.put_back(queue);
        Ok(())
    }

    /// Drops the bounced reads of a queue that are being settled; returns how many were not
    /// answered.
    fn forsake_bounced(&mut self, key: QueueKey, undone: Undone, progress: &mut Progress) -> usize {
        let device = self.devices.get_mut(key.device).and_then(Option::as_mut);
        let Some(device) = device else {
            return 0;
        };
        let mut lost = 0;
        while let Some(mut job) = self.io.bounces.forsake_next(key) {
            progress.anything = true;
            let memory = job.dma.memory().clone();
            let request = &mut job.request;
            let take = |at| request.leases.take(&memory, at, Access::Write);
            if undone == Undone::Fails && request.answer.is_none_or(take) {
                self.io.complete_job(device, job, Outcome::Failed);
                continue;
            }
            lost += 1;
            if let Some(queue) = device.queues[usize::from(key.queue)].as_mut() {
                queue.in_flight -= 1;
                sub(&self.io.reports.counters(&device.shared).in_flight, 1);
            }
        }
        lost
    }

    /// Answers the stop requests of queues that have nothing under way any more.
    pub(super) fn finish_stops(&mut self) -> io::Result<()> {
        let mut at = 0;
        while at < self.active.len() {
            let (index, number) = self.active[at];
            let done = self.devices[index]
                .as_mut()
                .is_some_and(|device| self.io.has_ended(device, number));
            if done {
                self.active.swap_remove(at);
                self.end_queue(index, number)?;
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    fn end_queue(&mut self, index: usize, number: u16) -> io::Result<()> {
        let Some(device) = self.devices[index].as_mut() else {
            return Ok(());
        };
        let Some(mut queue) = device.queues[usize::from(number)].take() else {
            return Ok(());
        };
        self.kicks.forget(queue.token, index, number);
        if queue.polled {
            self.io.ring.stop_poll(queue.token)?;
            // The poll must be gone before its descriptor can be closed and reused.
            self.io.ring.submit()?;
        }
        // The token that it had when it started.
        self.kicks.forget(queue.key.epoch | ARRIVALS, index, number);
        if let Some(token) = queue.arrivals {
            self.io.ring.stop_poll(token)?;
            self.io.ring.submit()?;
        }
        self.io.end_posted(device, &mut queue);
        device.running.retain(|running| *running != number);
        self.io.scratch.forget_memory(index);
        queue.end(self.io.reports.counters(&device.shared));
        self.io.reports.close_account(device);
        Ok(())
    }
}

impl Io {
    /// True once a stopping queue has nothing under way.
    fn has_ended(&mut self, device: &mut Device, number: u16) -> bool {
        let drops = device.shared.drops_its_work();
        let Some(queue) = device.queues[usize::from(number)].as_mut() else {
            return false;
        };
        if !queue.is_stopping() {
            return false;
        }
        if drops {
            queue.give_up_draining();
            self.abandon_parked(&device.shared, queue);
            self.drop_waiting(device, number);
        }
        let queue = device.queues[usize::from(number)].as_ref();
        queue.is_some_and(|queue| queue.is_idle())
    }
}
