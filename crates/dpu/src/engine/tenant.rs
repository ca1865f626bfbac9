// SPDX-License-Identifier: Apache-2.0
//! A tenant's turn: which of its queues begin work, and how much, until its share is spent.

use super::{
    at_once::Short,
    device::Device,
    fair::{CHAIN_COST_BYTES, QUEUE_COST_BYTES, Verdict},
    io::{Io, Progress},
    queue::{EngineQueue, PARKED_PER_QUEUE_MAX},
    request::{Origin, TakenChain},
    submit::Served,
};
use crate::{memory::DeviceMemory, slo::course::RequestTimeline};
use std::{io, rc::Rc};

impl Io {
    /// Begins work of a device until its share of this turn is spent. Its queues take turns. The
    /// caller has called `Fair::visit` for the device.
    pub fn serve_tenant(
        &mut self,
        device: &mut Device,
        slot: usize,
        progress: &mut Progress,
    ) -> io::Result<()> {
        let slow = self.start_slow(device, slot)?;
        progress.anything |= matches!(slow, Served::InPart | Served::Spent);
        let mut with_nothing = 0;
        while with_nothing < device.running.len() {
            let at = device.next_queue % device.running.len();
            device.next_queue = at + 1;
            let number = usize::from(device.running[at]);
            with_nothing += 1;
            // Most queues have nothing to do: check before taking one out.
            let queue = device.queues[number].as_deref();
            if !queue.is_some_and(EngineQueue::is_serving) {
                continue;
            }
            let Some(mut queue) = device.queues[number].take() else {
                continue;
            };
            let served = match queue.posted.is_some() {
                true => Ok(self.serve_posted(device, &mut queue)),
                false => self.serve_queue(device, &mut queue),
            };
            if queue.is_paused()
                && let Some(memory) = device.memory.clone()
            {
                self.look_ahead(device, &mut queue, &memory);
            }
            device.queues[number] = Some(queue);
            match served? {
                Served::Nothing => {}
                Served::InPart => {
                    progress.anything = true;
                    with_nothing = 0;
                }
                Served::Spent => {
                    // More work is left: do not sleep.
                    progress.anything = true;
                    return Ok(());
                }
                Served::Full => return Ok(()),
            }
        }
        if slow != Served::Spent {
            self.fair.rest(slot);
        }
        Ok(())
    }

    /// Begins work of a queue until the share of the queue or of its tenant is spent.
    fn serve_queue(&mut self, device: &mut Device, queue: &mut EngineQueue) -> io::Result<Served> {
        let slot = queue.key.device;
        let mut served = Served::Nothing;
        if let Some(memory) = &device.memory
            && let Some(reason) = queue.lost(memory)
        {
            device.shared.stop(reason);
        }
        if device.shared.is_stopped() {
            queue.tell_error();
        }
        queue.credit.refill(QUEUE_COST_BYTES);
        loop {
            let steps_wait = !queue.steps.is_empty();
            if !steps_wait && !self.may_begin_chains(device, queue) {
                return Ok(served);
            }
            let (step, chain) = (self.fair.may_step(slot), self.fair.may_take(slot));
            let verdict = if steps_wait { step } else { chain };
            if verdict != Verdict::Go || !queue.credit.is_left() {
                if !self.has_work(device, queue) {
                    return Ok(served);
                }
                return Ok(match verdict {
                    Verdict::Go => Served::InPart,
                    Verdict::NextTurn => Served::Spent,
                    Verdict::Full => Served::Full,
                });
            }
            // Steps and chains alternate: a small request does not wait until all of a large one is
            // done.
            let chains_first = queue.stepped_last && chain == Verdict::Go;
            if (!steps_wait || chains_first) && self.take_chains(device, queue)? > 0 {
                queue.stepped_last = false;
            } else if let Some(job) = queue.steps.pop_front() {
                queue.stepped_last = true;
                self.start_step(device, queue, job)?;
            } else {
                return Ok(served);
            }
            served = Served::InPart;
        }
    }

    /// True if the queue itself allows chains to begin.
    fn may_begin_chains(&self, device: &Device, queue: &EngineQueue) -> bool {
        !queue.resumed.is_empty() || (queue.may_begin() && self.may_park(&device.shared))
    }

    /// True if the queue has something that it would begin if allowed.
    fn has_work(&self, device: &Device, queue: &EngineQueue) -> bool {
        if !queue.steps.is_empty() || !queue.resumed.is_empty() {
            return true;
        }
        if device.shared.is_stopped() || !self.may_begin_chains(device, queue) {
            return false;
        }
        let memory = device.memory.as_ref();
        // A broken ring is reported when a chain is taken from it.
        !queue.resubmit.is_empty()
            || memory.is_some_and(|memory| queue.waiting(memory).is_none_or(|n| n > 0))
    }

    /// Takes some chains from a queue and returns how many: first those whose pages have arrived,
    /// then those that a predecessor left, then new ones.
    fn take_chains(&mut self, device: &mut Device, queue: &mut EngineQueue) -> io::Result<usize> {
        if let Some(resumed) = queue.resumed.pop_front() {
            self.reports.look_at_clock();
            self.charge(queue, CHAIN_COST_BYTES);
            self.serve_resumed(device, queue, &resumed)?;
            return Ok(1);
        }
        let memory = device.memory.clone();
        let Some(memory) = memory.filter(|_| !device.shared.is_stopped()) else {
            return Ok(0);
        };
        let taken = match self.resubmit_next(device, queue) {
            Some(head) => {
                self.reports.look_at_clock();
                self.charge(queue, CHAIN_COST_BYTES);
                let origin = Origin::Fresh(RequestTimeline::popped(self.reports.now_ns));
                self.serve(device, queue, TakenChain { head, origin })?;
                1
            }
            None => self.pop_batch(device, queue, &memory)?,
        };
        if taken > 0 {
            self.reports.has_news(device, queue.key.device);
        }
        Ok(taken)
    }

    /// Takes and serves one batch of chains; returns how many.
    fn pop_batch(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
    ) -> io::Result<usize> {
        if !queue.completes_at_once() {
            return self.take_batch(device, queue, memory);
        }
        queue.publish_later();
        let taken = self.take_batch(device, queue, memory);
        if let Err(reason) = queue.publish_all(memory) {
            device.shared.stop(reason);
            queue.tell_error();
        }
        taken
    }

    /// Each chain is served before the next one is taken: behind one that pauses the queue, all stay in the ring.
    fn take_batch(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &Rc<DeviceMemory>,
    ) -> io::Result<usize> {
        let room = self.room_for_chains(device, queue);
        let mut taken = 0;
        while taken < room {
            let head = match queue.next_head(memory) {
                Ok(Some(head)) => head,
                Ok(None) => break,
                Err(reason) => {
                    device.shared.stop(reason);
                    break;
                }
            };
            if taken == 0 {
                self.reports.look_at_clock();
                queue.kicks_in_vain = 0;
            }
            queue.took_head();
            taken += 1;
            self.take_chain(device, queue, memory, head)?;
            let may_go_on = queue.credit.is_left()
                && self.fair.may_take(queue.key.device) == Verdict::Go
                && !queue.is_paused()
                && !device.shared.is_stopped();
            if !may_go_on {
                break;
            }
        }
        Ok(taken)
    }

    fn take_chain(
        &mut self,
        device: &mut Device,
        queue: &mut EngineQueue,
        memory: &DeviceMemory,
        head: u16,
    ) -> io::Result<()> {
        queue.looked_ahead = queue.looked_ahead.saturating_sub(1);
        if let Some(inflight) = &mut queue.inflight {
            inflight.fetched(head);
        }
        let course = queue.course_of_next(self.reports.now_ns);
        if queue.completes_at_once() {
            match self.serve_at_once(device, queue, memory, (head, &course)) {
                Ok(Short::Served { cost_bytes }) => {
                    self.charge(queue, cost_bytes);
                    return Ok(());
                }
                Ok(Short::NotServed) => {}
                Err(reason) => {
                    device.shared.stop(reason);
                    queue.tell_error();
                    return Ok(());
                }
            }
        }
        self.charge(queue, CHAIN_COST_BYTES);
        let origin = Origin::Fresh(course);
        self.serve(device, queue, TakenChain { head, origin })
    }

    /// How many chains may be taken from the ring now. Each may be parked, so there must be room for it.
    fn room_for_chains(&self, device: &Device, queue: &EngineQueue) -> usize {
        if !queue.may_pop() || !self.may_park(&device.shared) {
            return 0;
        }
        queue
            .batch()
            .min(PARKED_PER_QUEUE_MAX - queue.parked)
            .min(usize::from(queue.table.size) - queue.in_flight - queue.parked)
    }

    fn resubmit_next(&self, device: &Device, queue: &mut EngineQueue) -> Option<u16> {
        let may = self.may_park(&device.shared)
            && !queue.is_paused()
            && queue.parked < PARKED_PER_QUEUE_MAX;
        if !may {
            return None;
        }
        queue.looked_ahead = queue.looked_ahead.saturating_sub(1);
        queue.resubmit.pop_front()
    }
}
