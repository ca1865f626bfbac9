// SPDX-License-Identifier: Apache-2.0
//! The loop of an engine: its turns, and its sleep between them.

use super::{
    call,
    command::answer,
    fair::Verdict,
    io::Progress,
    kicks::{ARRIVALS, BELL_TOKEN, Poll},
    patience::{Idle, WaitsFor},
    thread::{EVENTS_PER_TURN, Engine, Hush},
};
use crate::{ring::Event, shared::StopReason, slo::recorder::Urgency};
use std::{io, os::fd::AsFd, sync::atomic::Ordering};

/// Commands obeyed per turn. Most of their senders block until they get an answer.
const COMMANDS_PER_TURN: usize = 8;

impl Engine {
    /// Works until it is shut down, then until the last I/O is done.
    pub fn run(mut self) {
        if let Err(error) = self.work() {
            tracing::error!(engine = self.io.reports.engine(), %error, "engine ends: its io_uring failed");
            for device in self.devices.iter().flatten() {
                device.shared.stop(StopReason::Engine(error.to_string()));
            }
        }
        self.shared.mailbox.close();
    }

    fn work(&mut self) -> io::Result<()> {
        let mut idle: Option<Idle> = None;
        loop {
            let progress = self.turn()?;
            if self.ending && self.active.is_empty() && self.io.ring.in_flight() == 0 {
                return Ok(());
            }
            if progress.anything {
                if let Some(idle) = idle.take() {
                    self.patience.rewarded(idle);
                }
                continue;
            }
            let waits_for = match self.io.ring.in_flight() {
                0 => WaitsFor::Guest,
                _ => WaitsFor::Disk,
            };
            let begun = idle.get_or_insert_with(|| self.patience.begin(waits_for));
            if begun.is_over() {
                self.patience.disappointed(*begun);
                self.sleep()?;
                idle = None;
            } else {
                std::hint::spin_loop();
            }
        }
    }

    fn turn(&mut self) -> io::Result<Progress> {
        let mut progress = Progress::default();
        for _ in 0..COMMANDS_PER_TURN {
            let Some(command) = self.shared.mailbox.take_if_any() else {
                break;
            };
            self.obey(command)?;
            progress.anything = true;
        }
        self.kicks
            .listen_again(&mut self.io.ring, &mut self.devices)?;
        self.take_completions(&mut progress)?;
        self.take_responses(&mut progress)?;
        self.give_up(&mut progress)?;
        self.stop_without_host(&mut progress)?;
        // Announce completions before beginning more work: a driver waits for them.
        self.call();
        self.serve_tenants(&mut progress)?;
        self.ask_for_pages(&mut progress);
        self.call();
        if self.io.ring.wants_submit() {
            self.io.ring.submit()?;
        }
        self.finish_stops()?;
        self.tell_hushed();
        self.io
            .reports
            .tell_accounts(&mut self.devices, Urgency::Routine);
        Ok(progress)
    }

    /// Tells who has asked for it that the kernel has nothing of this engine any more.
    fn tell_hushed(&mut self) {
        if self.io.ring.in_flight() == 0
            && let Some(Hush::Asked(asked)) = &self.hush
        {
            answer(asked, ());
            self.hush = Some(Hush::Told);
        }
    }

    fn take_completions(&mut self, progress: &mut Progress) -> io::Result<()> {
        let mut first = true;
        for _ in 0..EVENTS_PER_TURN {
            let Some(event) = self.io.ring.next() else {
                break;
            };
            if std::mem::take(&mut first) {
                self.io.reports.look_at_clock();
            }
            progress.anything = true;
            match event {
                Event::Done(job, result) => {
                    let key = job.request.key;
                    let Some(device) = self.devices.get_mut(key.device).and_then(Option::as_mut)
                    else {
                        debug_assert!(false, "a device went away under its I/O");
                        continue;
                    };
                    self.io.finish(device, job, result)?;
                }
                Event::Readable { token, over: true } => self.readable(token, Poll::HasEnded)?,
                Event::Readable { token, .. } => self.readable(token, Poll::GoesOn)?,
            }
        }
        Ok(())
    }

    /// A polled descriptor is readable.
    fn readable(&mut self, token: u32, poll: Poll) -> io::Result<()> {
        let ring = &mut self.io.ring;
        match (token, poll) {
            (BELL_TOKEN, Poll::HasEnded) => ring.poll(self.bell.as_fd(), token),
            (BELL_TOKEN, Poll::GoesOn) => Ok(()),
            (token, poll) if token & ARRIVALS != 0 => self.has_arrived(token, poll),
            _ => self.kicks.readable(ring, &mut self.devices, token, poll),
        }
    }

    /// Something has arrived for a queue, or that poll has ended.
    fn has_arrived(&mut self, token: u32, poll: Poll) -> io::Result<()> {
        let Some((slot, number)) = self.kicks.arrived(token) else {
            return Ok(());
        };
        let Some(device) = self.devices.get_mut(slot).and_then(Option::as_mut) else {
            return Ok(());
        };
        device.kind.arrived(number);
        let queue = device.queues[usize::from(number)].as_ref();
        if queue.is_some_and(|queue| queue.arrivals == Some(token))
            && poll == Poll::HasEnded
            && let Some(arrivals) = device.kind.readiness(number)
        {
            self.io.ring.poll(arrivals, token)?;
        }
        Ok(())
    }

    /// Begins work of each device by its share. Each device in turn goes first.
    fn serve_tenants(&mut self, progress: &mut Progress) -> io::Result<()> {
        self.io.fair.begin_turn(self.io.reports.now_ns);
        let count = self.devices.len();
        for at in 0..count {
            let slot = (self.first + at) % count;
            let Some(device) = &self.devices[slot] else {
                continue;
            };
            if device.running.is_empty() && device.waiting.is_empty() {
                continue;
            }
            self.io.fair.visit(slot, device.shared.weight());
            // Before its requests, which would always use up its credit.
            progress.anything |= self.obey_waiting(slot)?;
            if self.hush.is_none()
                && let Some(device) = self.devices[slot].as_mut()
                && !device.running.is_empty()
            {
                self.io.serve_tenant(device, slot, progress)?;
            }
        }
        self.first = (self.first + 1).checked_rem(count).unwrap_or(0);
        Ok(())
    }

    /// Signals completions to front ends.
    fn call(&mut self) {
        for (device, number) in &self.active {
            let Some(device) = self.devices[*device].as_mut() else {
                continue;
            };
            let Some(queue) = device.queues[usize::from(*number)].as_mut() else {
                continue;
            };
            if queue.needs_call
                && let Some(memory) = &device.memory
                && let Err(reason) = queue.call_if_wanted(memory)
            {
                device.shared.stop(reason);
            }
        }
    }

    /// True if a call is still due that could not be made.
    fn owes_a_call(&self) -> bool {
        self.active.iter().any(|(device, number)| {
            let device = self.devices[*device].as_ref();
            let queue = device.and_then(|device| device.queues[usize::from(*number)].as_ref());
            queue.is_some_and(|queue| queue.owes_call())
        })
    }

    fn sleep(&mut self) -> io::Result<()> {
        self.bell.arm();
        let awake = self.arm_queues()
            || !self.shared.mailbox.is_empty()
            || self.device_end.has_response()
            || self.device_end.host() != self.host_seen;
        if awake {
            self.disarm_queues();
            return self.bell.disarm();
        }
        self.io
            .reports
            .tell_accounts(&mut self.devices, Urgency::Now);
        self.shared.sleeps.fetch_add(1, Ordering::Relaxed);
        let owed = self.owes_a_call().then_some(call::OWED_RETRY);
        let looks = [self.next_look(), self.kicks.next_look(), owed];
        match looks.into_iter().flatten().min() {
            Some(limit) => self.io.ring.submit_and_doze(limit)?,
            None => self.io.ring.submit_and_sleep()?,
        }
        self.disarm_queues();
        self.bell.disarm()
    }

    /// Enables kicks; true if a queue has chains already.
    fn arm_queues(&mut self) -> bool {
        if self.hush.is_some() {
            return false;
        }
        let mut more = false;
        for (device, number) in &self.active {
            let Some(device) = self.devices[*device].as_mut() else {
                continue;
            };
            let Some(queue) = device.queues[usize::from(*number)].as_mut() else {
                continue;
            };
            // A queue that is held back waits for a completion or response, which wakes the engine
            // anyway.
            let room = self.io.may_park(&device.shared)
                && self.io.fair.may_take(queue.key.device) != Verdict::Full;
            if device.shared.is_stopped() {
                continue;
            }
            let wants = match &queue.posted {
                Some(posted) if queue.is_running() => {
                    more |= !posted.saw_end && device.kind.has_arrivals(*number);
                    posted.saw_end
                }
                Some(_) => false,
                None => room && queue.may_pop(),
            };
            if !wants {
                continue;
            }
            if let Some(memory) = &device.memory {
                match queue.ask_for_kicks(memory) {
                    Ok(waiting) => more |= waiting,
                    Err(reason) => device.shared.stop(reason),
                }
            }
        }
        more
    }

    fn disarm_queues(&mut self) {
        for (device, number) in &self.active {
            let Some(device) = self.devices[*device].as_mut() else {
                continue;
            };
            if let (Some(queue), Some(memory)) =
                (device.queues[usize::from(*number)].as_mut(), &device.memory)
                && let Err(reason) = queue.ask_for_no_kicks(memory)
            {
                device.shared.stop(reason);
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Only after the ring failed. Jobs may still be with the kernel, so their leases are never
        // released and their pages are never evicted.
        for device in self.devices.iter_mut().flatten() {
            for slot in &mut device.queues {
                if let Some(mut queue) = slot.take() {
                    queue.end(self.io.reports.counters(&device.shared));
                }
            }
        }
    }
}
