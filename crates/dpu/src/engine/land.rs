// SPDX-License-Identifier: Apache-2.0
//! Which chains may begin although pages of them are absent: see [`super::bounce`].

use super::{
    bounce::plan::{Plan, Planned, plan},
    device::Device,
    io::Io,
};
use crate::{
    chain::Buffers,
    frame::Frame,
    kind::{
        Flight,
        work::{Chain, Data, Decided, Task},
    },
    memory::{DeviceMemory, LeaseSet},
    page_demand::PageDemand,
};
use pagetide_addr::Access;

/// A transfer to the guest that may begin although some of its pages are absent.
pub(crate) struct Bounce {
    pub plan: Plan,
    pub task: Task<Flight>,
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
    pub fn may_land(&mut self, device: &mut Device, chain: Chain<'_>) -> MayLand {
        let Chain {
            memory,
            frame,
            buffers,
            ..
        } = chain;
        let id = device.shared.id;
        let plan = match plan(&mut self.bounces.slots, id, memory, frame, buffers) {
            Planned::Nothing => return MayLand::No,
            Planned::First(wanted) => return MayLand::Later(wanted),
            Planned::Begin(plan) => plan,
        };
        let mut leases = LeaseSet::default();
        if lease_around(memory, frame, buffers, &plan, &mut leases) {
            let decided = device.kind.decide(self.reports.now_ns, chain);
            if let Decided::Io(task) = decided
                && task.data == Data::ToGuest
            {
                return MayLand::Now(leases, Box::new(Bounce { plan, task }));
            }
        }
        leases.release(memory);
        self.bounces.slots.give_up(plan.runs);
        MayLand::No
    }
}

/// Leases the guest memory of a transfer that uses bounce buffers.
fn lease_around(
    memory: &DeviceMemory,
    frame: &Frame,
    buffers: &Buffers,
    plan: &Plan,
    leases: &mut LeaseSet,
) -> bool {
    let mut answer = frame.answer.iter();
    answer.all(|span| leases.take(memory, *span, Access::Write))
        && std::iter::once(&frame.header)
            .chain(&frame.header_rest)
            .chain(&buffers.readable)
            .all(|span| leases.take(memory, *span, Access::Read))
        && plan
            .guest_spans()
            .all(|span| leases.take(memory, span, Access::Write))
}
