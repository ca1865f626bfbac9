// SPDX-License-Identifier: Apache-2.0
//! Looking ahead in a paused queue: pages that its next chains will need are asked for with those
//! of the chain that faulted, so that a run of cold requests costs one wait and not one each.
//!
//! A driver makes chains available ahead of their use. While a queue is paused
//! ([`OnFault::Pause`](crate::OnFault)) the chains behind the parked one stay in the ring; they
//! are looked at there, up to [`AHEAD_MAX`] of them, and taken by nobody. What is found is a
//! guess: the driver may yet change its descriptors, and a chain that makes no sense is told when its
//! turn has come. So nothing of a look is kept but how far it went.
//!
//! Out of order there is nothing to look ahead for: later chains are taken, and
//! park with requests of their own.

use super::{
    Device, Io,
    pages::{Located, absent_of, locate, wanted_of},
    queue::EngineQueue,
};
use crate::{memory::DeviceMemory, parked::PageDemand};
use pagetide_addr::Access;

/// Chains behind a parked one that are looked at. The next ones begin as soon as it is answered, and
/// what is brought much earlier than it is used may be evicted again.
const AHEAD_MAX: usize = 16;

impl Io {
    /// Asks for the pages of chains that stand behind a parked one.
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
            // The rest of the chain shows when its table is there.
            Ok(Located::TableAbsent(spans)) => {
                found.extend(wanted_of(memory, &spans, Access::Read));
            }
            Ok(Located::Refused { .. }) => {}
            Err(reason) => tracing::debug!(%reason, "looked ahead at a chain that makes no sense"),
        }
    }
}
