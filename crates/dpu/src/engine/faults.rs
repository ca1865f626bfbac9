// SPDX-License-Identifier: Apache-2.0
//! Page requests out, page responses in, and time-outs for a silent host.
//!
//! Requests go to the host's service, but an engine that has no I/O under way serves them itself
//! ([`FaultAssist`](pagetide_vpri::FaultAssist)), which saves two wake-ups.
//!
//! A chain that times out is answered with an I/O error if the page of that answer is present.
//! If not, it waits for that page alone, which pauses no queue. None of its DMA has begun.
//!
//! Below: chains that begin again, after their page requests were answered, or after their data had arrived
//! in a bounce buffer.

use super::{
    bounce::{Answered, Delivered, Settled},
    device::Device,
    io::{Io, Progress},
    queue::EngineQueue,
    request::{Origin, TakenChain},
    thread::{EVENTS_PER_TURN, Engine},
};
use crate::{
    parked::{Ended, Resumed, Waiter},
    shared::{add, sub},
};
use pagetide_addr::DeviceId;
use pagetide_vpri::queue::HostPresence;
use std::{
    io,
    time::{Duration, Instant},
};

impl Engine {
    /// Takes page responses and resumes chains whose last response has come.
    pub(super) fn take_responses(&mut self, progress: &mut Progress) -> io::Result<()> {
        if self.device_end.has_response() {
            self.io.reports.look_at_clock();
        }
        for _ in 0..EVENTS_PER_TURN {
            let Some(response) = self.device_end.next() else {
                break;
            };
            progress.anything = true;
            match self.io.bounces.answer(&response) {
                Answered::Foreign => {
                    if let Some(resumed) = self.io.parked.answer(response) {
                        self.resume(resumed)?;
                    }
                }
                Answered::More => {}
                Answered::Last(settled) => {
                    let device = self.devices.get_mut(settled.device());
                    if let Some(device) = device.and_then(Option::as_mut) {
                        self.io.settled(device, settled)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Fails chains whose page requests have not been answered in time.
    pub(super) fn give_up(&mut self, progress: &mut Progress) -> io::Result<()> {
        if !self.io.parked.has_deadline() {
            return Ok(());
        }
        let host = self.device_end.host();
        self.io.parked.tick(Instant::now(), host);
        while let Some(resumed) = self.io.parked.give_up() {
            progress.anything = true;
            self.io.reports.look_at_clock();
            let device = self.devices.get(resumed.queue.device);
            if let Some(device) = device.and_then(Option::as_ref) {
                tracing::warn!(
                    device = device.shared.id.0,
                    queue = resumed.queue.queue,
                    "a page request was not answered in time: its request fails"
                );
                add(&self.io.reports.counters(&device.shared).timed_out, 1);
            }
            self.resume(resumed)?;
        }
        Ok(())
    }

    /// How long the engine may sleep before it must check the time-outs.
    pub(super) fn next_look(&self) -> Option<Duration> {
        match self.device_end.host() {
            HostPresence::Here => self.io.parked.next_look(),
            HostPresence::Away => None,
        }
    }

    /// Queues an answered chain for its tenant's turn.
    pub(super) fn resume(&mut self, resumed: Resumed) -> io::Result<()> {
        let key = resumed.queue;
        let Some(device) = self.devices.get_mut(key.device).and_then(Option::as_mut) else {
            return Ok(());
        };
        match resumed.waiter {
            Waiter::Rings => self.io.rings_answered(device, &resumed),
            Waiter::Posted(chain, need) => {
                self.io.posted_answered(device, &resumed, (chain, need));
                Ok(())
            }
            Waiter::Part(part) => {
                self.io.part_answered(device, &resumed, part);
                Ok(())
            }
            Waiter::Chain(_) => {
                let slot = device.queues.get_mut(usize::from(key.queue));
                if let Some(queue) = slot.and_then(Option::as_mut).filter(|q| q.key == key) {
                    queue.resumed.push_back(resumed);
                }
                Ok(())
            }
        }
    }

    /// Sends page requests, and makes sure that they are served.
    pub(super) fn ask_for_pages(&mut self, progress: &mut Progress) {
        if !self.io.parked.has_unsent() && !self.io.bounces.has_unsent() {
            return;
        }
        let (end, devices, reports) = (&self.device_end, &self.devices, &self.io.reports);
        let count_prefault = |id: DeviceId| {
            let mut devices = devices.iter().flatten();
            if let Some(device) = devices.find(|device| device.shared.id == id) {
                add(&reports.counters(&device.shared).prefaults, 1);
            }
        };
        let overwrites = self.io.bounces.send(|request| end.submit(request));
        let sent = self.io.parked.send(|request| {
            end.submit(request)?;
            if request.kind.is_ahead() {
                count_prefault(request.device);
            }
            Ok(())
        });
        if sent + overwrites == 0 {
            return;
        }
        self.io.bounces.slots.set_area(self.device_end.bounce());
        progress.anything = true;
        // Completions of this turn have been signalled already; only I/O under way would have to
        // wait.
        let alone = self.io.ring.in_flight() == 0;
        let served = match &self.assist {
            Some(assist) if alone => assist.assist(self.io.reports.engine()),
            _ => false,
        };
        if !served {
            self.device_end.kick();
        }
    }
}

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
            Delivered::Entirely(job, outcome) => {
                self.complete_job(device, job, outcome);
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
