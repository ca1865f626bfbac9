// SPDX-License-Identifier: Apache-2.0
//! What an engine reports to the accounts of its devices, and when; its cost is described in
//! [`crate::slo::recorder`].

use super::{Device, Engine, Io, finish::Answer, queue::EngineQueue};
use crate::slo::{
    course::{Injected, RequestTimeline, now_ns},
    recorder::{Load, Urgency},
};
use std::sync::atomic::Ordering;

impl Io {
    /// Reads the clock, for everything that is taken together now.
    pub fn look_at_clock(&mut self) {
        self.now_ns = now_ns();
    }

    /// Notes that the device in that slot has something to report.
    pub fn has_news(&mut self, device: &mut Device, slot: usize) {
        if device.shared.is_accounted() && !std::mem::replace(&mut device.has_news, true) {
            self.news.push(slot);
        }
    }

    /// Reports a chain that was put into the used ring.
    pub fn tell_done(&mut self, device: &mut Device, queue: &EngineQueue, answer: &Answer) {
        if !device.shared.is_accounted() {
            return;
        }
        let number = queue.key.queue;
        device
            .recorder
            .done(self.now_ns, number, answer.moved, &answer.course);
        self.has_news(device, queue.key.device);
    }

    /// Reports a chain that was parked with that many page requests.
    pub fn tell_faults(
        &mut self,
        device: &mut Device,
        queue: &EngineQueue,
        requests: usize,
        course: &RequestTimeline,
    ) {
        if !device.shared.is_accounted() {
            return;
        }
        let count = u32::try_from(requests).unwrap_or(u32::MAX);
        // A chain that parks again is not injected again.
        let injected = match course.is_first_parking() {
            true => course.injected,
            false => Injected::No,
        };
        device.recorder.faults(self.now_ns, count, injected);
        self.has_news(device, queue.key.device);
    }
}

impl Engine {
    /// Sends due reports to the accounts of the devices that have any.
    pub(super) fn tell_accounts(&mut self, urgency: Urgency) {
        let mut news = std::mem::take(&mut self.io.news);
        news.retain(|slot| {
            let device = self.devices.get_mut(*slot).and_then(Option::as_mut);
            device.is_some_and(|device| {
                device.tell_account(self.io.index, self.io.now_ns, urgency);
                device.has_news
            })
        });
        self.io.news = news;
    }
}

impl Device {
    fn tell_account(&mut self, engine: usize, now_ns: u64, urgency: Urgency) {
        let counters = &self.shared.counters[engine];
        let in_flight = counters.in_flight.load(Ordering::Relaxed);
        let load = match in_flight + counters.parked.load(Ordering::Relaxed) {
            0 => Load::Idle,
            _ => Load::Busy,
        };
        self.recorder.load(now_ns, load);
        self.has_news = !self.recorder.tell(&self.shared.account, now_ns, urgency);
    }

    /// Closes the account of a queue that has ended with all its chains.
    pub(super) fn close_account(&mut self, engine: usize) {
        self.tell_account(engine, now_ns(), Urgency::Now);
    }
}
