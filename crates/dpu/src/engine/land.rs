// SPDX-License-Identifier: Apache-2.0
//! Which chains may begin although pages of them are absent: see [`super::bounce`].

use super::{
    bounce::plan::{Plan, Planned, plan},
    device::Device,
    io::Io,
};
use crate::{
    blk::request::{Frame, Header, Work, decide},
    chain::Buffers,
    memory::{DeviceMemory, LeaseSet, Span},
    parked::PageDemand,
};
use pagetide_addr::Access;

/// A read that may begin although some of its pages are absent.
pub(crate) struct Bounce {
    pub plan: Plan,
    /// Its offset on the image.
    pub offset: u64,
}

/// Whether a chain that cannot be leased as it is may use bounce buffers.
pub(crate) enum MayLand {
    /// No: request all its pages.
    No,
    /// Once these pages are present; their content is needed.
    Later(Vec<PageDemand>),
    /// Now. All pages that the device itself writes are leased.
    Now(LeaseSet, Box<Bounce>),
}

impl Io {
    /// Decides whether a chain that cannot be leased as it is may use bounce buffers.
    pub fn may_land(
        &mut self,
        device: &Device,
        memory: &DeviceMemory,
        frame: &Frame,
        buffers: &Buffers,
    ) -> MayLand {
        let id = device.shared.id;
        let plan = match plan(&mut self.bounces.slots, id, memory, frame, buffers) {
            Planned::Nothing => return MayLand::No,
            Planned::First(wanted) => return MayLand::Later(wanted),
            Planned::Begin(plan) => plan,
        };
        let mut leases = LeaseSet::default();
        if lease_around(memory, frame, &plan, &mut leases)
            && let Ok(header) = Header::read(memory, frame)
        {
            let bytes = |spans: &[Span]| spans.iter().map(|s| u64::from(s.len)).sum::<u64>();
            let (readable, writable) = (bytes(&buffers.readable), bytes(&buffers.writable));
            let work = decide(device.shared.limits(), header, readable, writable);
            if let Work::Read { offset } = work {
                return MayLand::Now(leases, Box::new(Bounce { plan, offset }));
            }
        }
        leases.release(memory);
        self.bounces.slots.give_up(plan.runs);
        MayLand::No
    }
}

/// Leases the guest memory of a read that uses bounce buffers.
fn lease_around(memory: &DeviceMemory, frame: &Frame, plan: &Plan, leases: &mut LeaseSet) -> bool {
    leases.take(memory, frame.status, Access::Write)
        && std::iter::once(&frame.header)
            .chain(&frame.header_rest)
            .all(|span| leases.take(memory, *span, Access::Read))
        && plan
            .guest_spans()
            .all(|span| leases.take(memory, span, Access::Write))
}
