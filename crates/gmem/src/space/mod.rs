// SPDX-License-Identifier: Apache-2.0
//! [`AddressSpace`]: addresses that mean the same to the CPU and to all attached devices (GMEM 3).
//!
//! ```text
//!                       AddressSpace
//!        ┌─────────────────┼──────────────────┬───────────────┐
//!      Arena            regions           Attachments      Operations
//!   free addresses   what is allocated   devices, each     unmaps in
//!   (vmem)           and what is behind  with a table      batches
//!                     │          │
//!              Wired, Demand   Paged ──► PagedMemory (a VM's RAM: word by word)
//!              (frames)
//! ```
//! Every page that a device faults on must lie in a region, or the fault is refused. A region's
//! pages are frames (wired by the caller, or taken from registered memory by faults), or pages of
//! the space's paged memory, which may be swapped out. Both kinds of fault enter through
//! [`AddressSpace::fault`].
//!
//! Reading order: `address_space` (what a space is), `regions`, `attach`, `fault`, `demand`, `wiring`
//! and `mapping`, `queue` and `operations`, `ending`.
//!
//! *Invariant:* a device can reach only pages behind an allocated region, and the bit of its table
//! says so. *Invariant:* a frame is freed, and an address reused, only after the invalidation that
//! removed the last translation.

mod address_space;
mod attach;
mod demand;
mod ending;
mod fault;
mod granule;
mod mapping;
#[cfg(all(test, loom))]
mod model;
mod operations;
mod queue;
mod region_map;
mod regions;
mod request;
mod wiring;

pub use crate::attachments::{Mode, TABLES_MAX};
pub use address_space::{Activation, AddressFit, AddressSpace, AllocPolicy, Caching, Guard};
pub use queue::{Callback, QUEUED_MAX};
pub use request::RegionRequest;

pub(crate) use queue::{Operation, PendingRegion};
pub(crate) use wiring::{SetCore, Wiring};
