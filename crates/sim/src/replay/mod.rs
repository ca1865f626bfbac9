// SPDX-License-Identifier: Apache-2.0
//! Replay of DMA in virtual time: how often would devices fault under a policy (VPRI 4.2, 7.3)?
//!
//! # What is real and what is modelled
//! The choice of victims and the protection of DMA are the code that runs in the daemon
//! (`pagetide_policy`), with its pass order, scan period and marks. What stands around it is modelled:
//! ```text
//!   access log ───────────────────────┐
//!   generator ────────────────────────┤ ReplayAccess   ┌──────────── VmReplay ────────────┐
//!   block trace ─► GuestPageCache ────┼───────────────►│ present sections, limit          │
//!             or ─► DirectPool ───────┘                │ Victims ◄ scans    ▲ spared      │
//!                                                      │ Protector ◄ touches┘ bring-backs │
//!                                                      └──────────────────────────────────┘
//!   several of them: FleetReplay, which moves the limits among VMs once a minute
//! ```
//! - Memory comes and goes by whole sections. (The daemon fills single pages; a section that was evicted
//!   counts as one fault here, as in the paper.)
//! - A fill takes no time. If nothing can be evicted for it, it goes over the limit, which is counted: in
//!   the daemon such a fill waits, at most 100 ms.
//! - Bring-backs are as rare as there: wishes are taken once a second, at most 2,048 wait, two sections of
//!   2 MiB come back every 50 ms, none while free memory is below the low mark, and one for which there is
//!   no room, or nothing to bring, is refused for good. What is not modelled: they come back at once, also
//!   where the daemon's store or its cache is busy and it gives up. What they take is
//!   [`VmAccount::brought_back`]; no pinned share has it.
//! - An **I/O page fault** is a DMA to a section that was evicted. The first touch of memory that never
//!   held anything is none. CPU faults are counted apart.
//! - Beside it stands the paper's own estimate, which needs no evictor: a *long reuse* is a pair of
//!   consecutive DMAs of one device to one section more than 300 s apart (4.2.2).
//!
//! Time is a whole number and nothing depends on the machine: the same accesses give the same account,
//! whatever the number of threads. No policy sees an access before its time.

mod account;
mod balance;
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

pub use account::{Capacity, DeviceAccount, FaultAges, Share, VmAccount};
pub use balance::{Need, balance};
pub use direct_pool::DirectPool;
pub use error::ReplayError;
pub use fleet::{FleetParams, FleetReplay};
pub use machine::{VmParams, VmReplay};
pub use memory::Start;
pub use nic_ring::NicRing;
pub use page_cache::{CachedReads, DiskRequest, GuestPageCache, PageCacheCounts, PageCacheParams};
pub use source::{Beside, DiskPath, DiskStream, TimedRequest, spread, working_set};
pub use steady_load::SteadyLoad;
pub use summary::{DeviceSummary, ServiceSummary, Summary};
pub use traces::{Guest, OriginKind, Through, TraceOptions, TracedVm, VmOrigin, survey};

pub use pagetide_trace::Service;

use pagetide_addr::{Access, DeviceId, SectionNo};
use std::time::Duration;

/// Who touches memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Actor {
    /// The guest's CPUs.
    Cpu,
    /// A device, by DMA.
    Device(DeviceId, Service),
}

/// One access to one section; one that spans sections is several.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplayAccess {
    /// When, since the start of the replay.
    pub at: Duration,
    /// By whom.
    pub actor: Actor,
    /// Where, in the VM.
    pub section: SectionNo,
    /// What it does to memory: a device that reads a disk writes memory.
    pub access: Access,
    /// How much of the section, in bytes.
    pub bytes: u64,
}

/// The accesses of one VM, in order of time.
pub trait AccessStream: Send {
    /// The next one; `None` at the end.
    ///
    /// # Errors
    /// The source's: a broken record, a file that cannot be read.
    fn next(&mut self) -> Result<Option<ReplayAccess>, ReplayError>;

    /// Where the access comes from that was given last, for messages: a file and a record, if there are.
    fn whence(&self) -> String {
        "accesses that no trace tells of".to_owned()
    }
}

/// Accesses that are there already.
impl<I: Iterator<Item = ReplayAccess> + Send> AccessStream for I {
    fn next(&mut self) -> Result<Option<ReplayAccess>, ReplayError> {
        Ok(Iterator::next(self))
    }
}
