// SPDX-License-Identifier: Apache-2.0
//! What an engine reports to the access log: the data of each transfer as it begins (VPRI 5.3).
//!
//! Headers and status bytes are left out: the guest's driver touches their memory for each request,
//! so the CPU keeps it hot. A transfer that begins again (it had arrived in a bounce buffer and
//! could not be delivered) is reported again.
//!
//! The time is the clock value read when the chain was taken, so a report costs no clock read.

use super::{Device, Io};
use crate::{
    memory::{DeviceMemory, Span},
    shared::add,
};
use pagetide_addr::Access;
use pagetide_vpri::{LogRecord, Logged, Service};

impl Io {
    /// Reports the data of one transfer; adjacent pieces are reported as one.
    #[inline]
    pub fn log_accesses(
        &mut self,
        device: &Device,
        memory: &DeviceMemory,
        spans: &[Span],
        access: Access,
    ) {
        if self
            .pen
            .as_ref()
            .is_some_and(pagetide_vpri::AccessPen::is_on)
        {
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
            let follows =
                span.port == joined.port && span.offset == joined.offset + u64::from(joined.len);
            match joined.len.checked_add(span.len) {
                Some(len) if follows => joined.len = len,
                _ => self.log_span(device, memory, std::mem::replace(&mut joined, span), access),
            }
        }
        self.log_span(device, memory, joined, access);
    }

    fn log_span(&mut self, device: &Device, memory: &DeviceMemory, span: Span, access: Access) {
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
            service: Service::Block,
        };
        let counters = &device.shared.counters[self.index];
        match pen.record(&record) {
            Logged::Kept => add(&counters.logged, 1),
            Logged::Lost => add(&counters.unlogged, 1),
        }
    }
}
