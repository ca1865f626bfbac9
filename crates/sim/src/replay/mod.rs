// SPDX-License-Identifier: Apache-2.0
//! Replay of DMA in virtual time: how often devices would fault under a policy (VPRI 4.2, 7.3).
//!
//! # What is real and what is modelled
//! The reclaim loop, the choice of sections and the protection of DMA are the code that runs in the daemon (`pagetide_policy`), with all its constants. Everything around it is modelled:
//! ```text
//!   access log ───────────────────────┐
//!   generator ────────────────────────┤ ReplayAccess   ┌──────────── VmReplay ────────────┐
//!   block trace ─► GuestPageCache ────┼───────────────►│ present sections, limit          │
//!             or ─► DirectPool ───────┘                │ Selection ◄ sweeps ▲ spared      │
//!                                                      │ Protector ◄ touches┘             │
//!                                                      └──────────────────────────────────┘
//!   several of them: FleetReplay, which moves the limits among VMs once a minute
//! ```
//! - Memory is filled and evicted by whole sections. (The daemon fills single pages; an evicted section
//!   counts as one fault here, as in the paper.)
//! - A fill takes no time. If there is no room for it within 100 ms, it is counted as one that went over the
//!   limit: in the daemon such a fill waits that long.
//! - An **I/O page fault** is a DMA to a section that was evicted. The first touch of memory that never had
//!   content is none. CPU faults are counted separately.
//! - The paper's own estimate is also reported, which needs no evictor: a *long reuse* is a pair of
//!   consecutive DMAs of one device to one section more than 300 s apart (4.2.2).
//!
//! Time is a whole number and nothing depends on the machine: the same accesses give the same account,
//! whatever the number of threads. No policy sees an access before its time.

mod stream;

pub use stream::{AccessStream, Actor, ReplayAccess};

mod account;
mod balance;
mod bursts;
mod direct_pool;
mod error;
mod fleet;
mod footprint;
mod log_stream;
mod machine;
mod memory;
mod nic_ring;
mod page_cache;
mod source;
mod steady_load;
mod summary;
mod touched;
mod traces;

pub use account::{Capacity, DeviceAccount, EvictionAges, FaultAges, Share, VmAccount};
pub use balance::{Division, Need, balance};
pub use bursts::Bursts;
pub use direct_pool::DirectPool;
pub use error::ReplayError;
pub use fleet::{FleetParams, FleetReplay};
pub use machine::{DmaTouches, VmParams, VmReplay};
pub use memory::Start;
pub use nic_ring::NicRing;
pub use page_cache::{CachedReads, DiskRequest, GuestPageCache, PageCacheCounts, PageCacheParams};
pub use source::{Beside, DiskPath, DiskStream, TimedRequest, spread, working_set};
pub use steady_load::SteadyLoad;
pub use summary::{DeviceSummary, ServiceSummary, Summary};
pub use traces::{Guest, OriginKind, Through, TraceOptions, TracedVm, VmOrigin, survey};

pub use pagetide_access_log::Service;

/// Accesses in memory.
impl<I: Iterator<Item = ReplayAccess> + Send> AccessStream for I {
    fn next(&mut self) -> Result<Option<ReplayAccess>, ReplayError> {
        Ok(Iterator::next(self))
    }
}
