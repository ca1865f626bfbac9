// SPDX-License-Identifier: Apache-2.0
//! Look-ahead in a paused queue: the pages that its next chains will need are requested along with
//! those of the faulting chain, so that a run of cold requests costs one wait instead of one each.
//!
//! A driver makes chains available ahead of their use. While a queue is paused
//! ([`OnFault::Pause`](crate::OnFault)) the chains behind the parked one stay in the ring. Up to
//! [`AHEAD_MAX`] of them are read there, and none is taken. The result is a guess: the driver may
//! still change its descriptors, and a broken chain is reported when its turn comes. So only the
//! number of chains read is kept.
//!
//! Out of order, there is nothing to look ahead for: later chains are taken and park with requests
//! of their own.

use super::{
    device::Device,
    io::Io,
    pages::{Located, absent_of, locate, wanted_of},
    queue::EngineQueue,
};
use crate::{memory::DeviceMemory, page_demand::PageDemand};
use pagetide_addr::Access;

/// Chains behind a parked one that are read ahead. The next ones begin as soon as it is answered,
/// and pages brought much earlier than their use may be evicted again.
const AHEAD_MAX: usize = 16;

impl Io {
    /// Requests the pages of chains behind a parked one.
    pub fn look_ahead(&mut self, device: &Device, queue: &mut EngineQueue, memory: &DeviceMemory) {
        let mut found = Vec::new();
        while queue.looked_ahead < AHEAD_MAX {
            let Some(head) = queue.upcoming(memory, queue.looked_ahead) else {
                break;
            };
            self.absent_pages(queue, memory, head, &mut found);
            queue.looked_ahead += 1;
        }
        if !found.is_empty() {
            let asker = queue.asker(&device.shared, memory);
            self.parked.ask_ahead(asker, found);
        }
    }

    fn absent_pages(
        &mut self,
        queue: &EngineQueue,
        memory: &DeviceMemory,
        head: u16,
        found: &mut Vec<PageDemand>,
    ) {
        let buffers = &mut self.scratch.buffers;
        match locate(queue, memory, head, buffers) {
            Ok(Located::Frame(frame)) => found.extend(absent_of(memory, &frame, buffers)),
            // The rest of the chain becomes known when its table is present.
            Ok(Located::TableAbsent(spans)) => {
                found.extend(wanted_of(memory, &spans, Access::Read));
            }
            Ok(Located::Refused { .. }) => {}
            Err(reason) => tracing::debug!(%reason, "an invalid chain was read ahead"),
        }
    }
}
