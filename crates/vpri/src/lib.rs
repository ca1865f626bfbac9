// SPDX-License-Identifier: Apache-2.0
//! I/O page faults for devices that do DMA into guest memory which may be absent (VPRI 5, 6).
//!
//! [`bitmap`] holds what devices may access, and [`lease`] keeps those pages in place
//! while a DMA is under way. [`domain`] ties both to a file of guest RAM. [`queue`]
//! carries page requests to the host and responses back. [`access_log`] reports to the
//! host what devices have touched.
//!
//! ```
//! use pagetide_addr::{Access, FilePage};
//! use pagetide_vpri::{Attribute, PageAttributes};
//!
//! let pages = PageAttributes::new(1024, 1, Attribute::ReadWrite);
//! let page = FilePage(3).single();
//! let lease = pages.lease(0, page, Access::Write).expect("it is mapped");
//! // The host may not evict the page yet: a DMA is under way.
//! assert!(!pages.unmap_ranges(&[page]).is_empty());
//! pages.release(0, lease);
//! assert!(pages.unmap_ranges(&[page]).is_empty());
//! // Now the device must send a page request.
//! assert!(pages.lease(0, page, Access::Read).is_none());
//! ```
//! A device with its host: `examples/rust/src/faulting_device.rs`.

#[cfg(not(loom))]
pub mod access_log;
pub mod bitmap;
#[cfg(not(loom))]
pub mod bounce;
#[cfg(not(loom))]
pub mod delay;
#[cfg(not(loom))]
pub mod domain;
#[cfg(not(loom))]
pub mod handoff;
pub mod lease;
#[cfg(not(loom))]
pub mod mmu;
#[cfg(not(loom))]
pub mod queue;
#[cfg(not(loom))]
pub mod record;
#[cfg(not(loom))]
pub mod service;
#[cfg(not(loom))]
pub mod source;
#[cfg(not(loom))]
pub mod space;
mod sparse;
mod sync;
mod wired;

#[cfg(not(loom))]
pub use access_log::{AccessLog, AccessPen, AccessSource, Logged, Logging};
pub use bitmap::{Attribute, PaBitmap};
#[cfg(not(loom))]
pub use bounce::{BounceArea, BounceError};
#[cfg(not(loom))]
pub use delay::Delay;
#[cfg(not(loom))]
pub use domain::{
    DmaDomain, DomainError, DomainTable, EnginePort, LookUp, MappingWatch, RamWindow,
};
pub use lease::{Busy, Lease, PageAttributes, Restriction};
#[cfg(not(loom))]
pub use mmu::DmaMmu;
#[cfg(not(loom))]
pub use queue::{DeviceEnd, Doorbell, FaultAssist, HostEnd, HostPresence, QueueFull, fault_queue};
#[cfg(not(loom))]
pub use record::{LogRecord, Service};
#[cfg(not(loom))]
pub use service::{
    Account, DPU, FaultService, FaultSourceId, Handling, IdleEngines, Latencies, Preempt,
    ServiceConfig, ServiceThread, Tenant, TenantCpus, VcpuPlace,
};
#[cfg(not(loom))]
pub use source::FaultSource;
#[cfg(not(loom))]
pub use space::{IoSpace, IoSpaces, LookError};
