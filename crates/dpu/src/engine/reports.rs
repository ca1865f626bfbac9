// SPDX-License-Identifier: Apache-2.0
//! What an engine reports: counters of its devices, their accounts, and the access log.
//!
//! An engine reads its clock once for everything that it takes together, so a report costs no clock
//! read.
//!
//! # Accounts
//! A device that has something to report is listed, and told to its account when that is due; its
//! cost is described in [`crate::slo::recorder`].
//!
//! # Access log
//! The data of each transfer is reported as it begins (VPRI 5.3). Headers and answers are left
//! out: the guest's driver touches their memory for each request, so the CPU keeps it hot. A
//! transfer that begins again (it had arrived in a bounce buffer and could not be delivered) is
//! reported again.

use super::device::Device;
use crate::{
    memory::{DeviceMemory, Span},
    parked::QueueKey,
    shared::{Counters, DeviceShared, add},
    slo::{
        course::{Injected, RequestTimeline},
        recorder::{Load, Urgency},
    },
};
use pagetide_addr::Access;
use pagetide_sys::clock::now_ns;
use pagetide_vpri::{AccessPen, LogRecord, Logged};
use std::sync::atomic::Ordering;

/// The reports of one engine.
pub(crate) struct Reports {
    engine: usize,
    /// When the current batch of events was taken; see [`crate::slo::course`].
    pub now_ns: u64,
    /// Slots of devices that have something to report to their accounts.
    news: Vec<usize>,
    /// Reports DMA accesses to the access log, if one may ever be read.
    pen: Option<AccessPen>,
}

impl Reports {
    /// Those of engine number `engine`.
    pub fn new(engine: usize) -> Self {
        Self {
            engine,
            now_ns: now_ns(),
            news: Vec::new(),
            pen: None,
        }
    }

    /// The engine's number.
    pub fn engine(&self) -> usize {
        self.engine
    }

    /// The counters of a device that this engine writes.
    #[inline]
    pub fn counters<'a>(&self, device: &'a DeviceShared) -> &'a Counters {
        &device.counters[self.engine]
    }

    /// Reads the clock, for everything that is taken together now.
    pub fn look_at_clock(&mut self) {
        self.now_ns = now_ns();
    }

    /// Accesses are reported with this pen from now on.
    pub fn set_pen(&mut self, pen: AccessPen) {
        self.pen = Some(pen);
    }

    /// Notes that the device in that slot has something to report.
    pub fn has_news(&mut self, device: &mut Device, slot: usize) {
        if device.shared.is_accounted() && !std::mem::replace(&mut device.has_news, true) {
            self.news.push(slot);
        }
    }

    /// Reports a chain that was put into the used ring, and the bytes of data that it moved.
    pub fn done(
        &mut self,
        device: &mut Device,
        queue: QueueKey,
        moved_bytes: u32,
        course: &RequestTimeline,
    ) {
        if !device.shared.is_accounted() {
            return;
        }
        device
            .recorder
            .done(self.now_ns, queue.queue, moved_bytes, course);
        self.has_news(device, queue.device);
    }

    /// Reports a chain that was parked with that many page requests.
    pub fn faults(
        &mut self,
        device: &mut Device,
        queue: QueueKey,
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
        self.has_news(device, queue.device);
    }

    /// Sends due reports to the accounts of the devices that have any.
    pub fn tell_accounts(&mut self, devices: &mut [Option<Device>], urgency: Urgency) {
        let (engine, now_ns) = (self.engine, self.now_ns);
        self.news.retain(|slot| {
            let device = devices.get_mut(*slot).and_then(Option::as_mut);
            device.is_some_and(|device| {
                tell_account(device, engine, now_ns, urgency);
                device.has_news
            })
        });
    }

    /// Closes the account of a queue that has ended with all its chains.
    pub fn close_account(&self, device: &mut Device) {
        tell_account(device, self.engine, now_ns(), Urgency::Now);
    }

    /// Reports the data of one transfer; adjacent pieces are reported as one.
    #[inline]
    pub fn log_accesses(
        &mut self,
        device: &Device,
        memory: &DeviceMemory,
        spans: &[Span],
        access: Access,
    ) {
        if self.pen.as_ref().is_some_and(AccessPen::is_on) {
            self.log_joined(device, memory, spans, access);
        }
    }

    fn log_joined(
        &mut self,
        device: &Device,
        memory: &DeviceMemory,
        spans: &[Span],
        access: Access,
    ) {
        let mut spans = spans.iter().copied();
        let Some(mut joined) = spans.next() else {
            return;
        };
        for span in spans {
            match joined.joined(span) {
                Some(both) => joined = both,
                None => self.log_span(device, memory, std::mem::replace(&mut joined, span), access),
            }
        }
        self.log_span(device, memory, joined, access);
    }

    fn log_span(&mut self, device: &Device, memory: &DeviceMemory, span: Span, access: Access) {
        let counters = self.counters(&device.shared);
        let Some(pen) = &mut self.pen else {
            return;
        };
        let record = LogRecord {
            time_ns: self.now_ns,
            device: device.shared.id,
            space: memory.port(span).domain().id(),
            address: span.offset,
            len_bytes: span.len,
            access,
            service: device.shared.kind.service(),
        };
        match pen.record(&record) {
            Logged::Kept => add(&counters.logged, 1),
            Logged::Lost => add(&counters.unlogged, 1),
        }
    }
}

fn tell_account(device: &mut Device, engine: usize, now_ns: u64, urgency: Urgency) {
    let counters = &device.shared.counters[engine];
    let in_flight = counters.in_flight.load(Ordering::Relaxed);
    let load = match in_flight + counters.parked.load(Ordering::Relaxed) {
        0 => Load::Idle,
        _ => Load::Busy,
    };
    device.recorder.load(now_ns, load);
    device.has_news = !device
        .recorder
        .tell(&device.shared.account, now_ns, urgency);
}
