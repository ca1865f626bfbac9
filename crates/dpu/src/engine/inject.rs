// SPDX-License-Identifier: Apache-2.0
//! Where an injected fault enters the path of a chain; [`crate::inject`] decides when one is due.

use super::{device::Device, io::Io, request::Origin};
use crate::{
    chain::Buffers,
    memory::{DeviceMemory, Span},
    page_demand::PageDemand,
    shared::add,
};
use pagetide_addr::Access;

impl Io {
    /// The first data page of a chain, if it is to be treated as absent. Only for a chain that was
    /// just popped: a resumed one has had its fault.
    #[inline]
    pub fn injected(
        &self,
        device: &Device,
        memory: &DeviceMemory,
        buffers: &Buffers,
        origin: &Origin,
    ) -> Option<PageDemand> {
        let is_due = device.shared.injector.may_be_due(self.reports.now_ns);
        if !is_due || !matches!(origin, Origin::Fresh(_)) {
            return None;
        }
        self.inject(device, memory, buffers)
    }

    #[cold]
    fn inject(
        &self,
        device: &Device,
        memory: &DeviceMemory,
        buffers: &Buffers,
    ) -> Option<PageDemand> {
        let first = |spans: &[Span], access| spans.first().map(|span| (*span, access));
        let (span, access) = first(&buffers.writable, Access::Write)
            .or_else(|| first(&buffers.readable, Access::Read))?;
        let page = span.pages().start;
        let hold = device.shared.injector.claim(self.reports.now_ns)?;
        add(&self.reports.counters(&device.shared).injected_iopfs, 1);
        Some(PageDemand {
            domain: memory.port(span).domain().id(),
            pages: page.single(),
            access,
            hold_us: hold.hold_us,
            posted_ns: 0,
        })
    }
}
