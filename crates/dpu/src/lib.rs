// SPDX-License-Identifier: Apache-2.0
//! The software DPU: devices in user space whose DMA may fault (VPRI 5).
//!
//! Engine threads serve the queues of many devices and many VMs. A front end (a VMM) sets up a
//! device over vhost-user. From then on, the engine alone moves requests between the guest's ring
//! and what is behind the device (here, the image of a disk):
//!
//! ```text
//!   guest ──► avail ring ──► engine: lease all pages ──► io_uring, straight to guest memory
//!     ▲                         │ absent: park                       │
//!     │                         ▼                                    ▼
//!   call ◄── used ring ◄── page request ─► host fills ─► resume    release, complete
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`dpu`], [`config`] | the whole DPU: starting it, adding devices, reports; its configuration |
//! | `engine` | the loop of an engine, and the path of a chain through it |
//! | `parked` | chains that wait for pages, and why nothing else waits |
//! | `ring` | io_uring, and why giving it guest memory is sound |
//! | `alias` | our own mapping of guest RAM, watched for alias faults |
//! | `memory`, `chain`, `frame` | guest addresses, leases; descriptor chains, and what is around their data |
//! | `inflight` | what survives the death of this process, so that no request is lost |
//! | [`inject`] | fault injection |
//! | `slo` | service-level accounting |
//! | [`lock`] | how a successor knows that a dead engine's I/O is done |
//! | `device` | the socket and the vhost-user messages |
//! | `kind` | what a kind of device says about its chains; the engine knows no more of it |
//! | [`blk`] | virtio-blk: image, configuration, requests |
//! | [`net`] | virtio-net: headers, links, what becomes of packets whose buffers are out |
//!
//! *Invariant:* an engine and its I/O touch a guest page only under a lease or while the page is
//! wired.
//! *Invariant:* whatever a guest writes into its rings, or a front end into its messages, at worst
//! its own device stops.
//!
//! ```no_run
//! use pagetide_dpu::{BlkConfig, Dpu, DpuConfig};
//! use pagetide_vpri::{DomainTable, Doorbell, FaultService};
//! use std::{error::Error, sync::Arc};
//!
//! fn serve(disk: BlkConfig) -> Result<(), Box<dyn Error>> {
//!     let domains = Arc::new(DomainTable::new(1));
//!     let bell = Arc::new(Doorbell::new()?);
//!     let (dpu, queues) = Dpu::start(&DpuConfig::new("/run/dpu".into()), domains, &bell)?;
//!     // Whoever owns the VMs' memory answers the page requests.
//!     let service = FaultService::new(queues, bell);
//!     let serving = service.start()?;
//!     let device = dpu.add_blk(disk)?;
//!     // Front ends connect to the disk's socket, until:
//!     dpu.remove(device)?;
//!     dpu.shut_down();
//!     serving.stop();
//!     Ok(())
//! }
//! ```

mod alias;
pub mod blk;
mod chain;
pub mod config;
mod device;
mod devices;
pub mod dpu;
mod engine;
mod frame;
#[cfg(any(test, fuzzing))]
pub mod hostile;
mod inflight;
pub mod inject;
mod kind;
pub mod lock;
mod mailbox;
mod memory;
pub mod net;
mod page_demand;
mod parked;
mod ram;
mod regions;
mod ring;
mod shared;
mod slo;

pub use blk::claim::Sharing;
pub use blk::disk::DiskReport;
pub use blk::format::Content;
pub use blk::image::{DirectIo, ImageError, ImageUse, Writes};
pub use chain::ChainError;
pub use config::check_weight;
pub use config::{BlkConfig, DpuConfig, DpuError, NicConfig};
pub use device::{
    DeviceState, EngineGone, ParkedDevice, ParkedFrontEnd, SocketAccess, SocketError,
};
pub use devices::DeviceReport;
pub use dpu::Dpu;
pub use frame::FrameError;
pub use kind::Backing;
pub use lock::{LockError, wait_for_dead_engines};
pub use memory::OutsideMemory;
pub use net::account::PairReport;
pub use net::config::{
    COARSE_BYTES_RANGE, OnReceiveFault, Prefault, ReceiveConfig, STORE_BYTES, STORE_BYTES_RANGE,
    Wiring,
};
pub use net::device::NicReport;
pub use net::handed::ParkedNic;
pub use net::link::{LinkConfig, LinkError};
pub use net::nic::PAIRS_MAX;
pub use pagetide_vhost_backend::{
    Enabled, InflightRecord, Record, RegionShape, ReplayError, RingAddresses, RingSettings, Runs,
};
pub use ram::{RAM_BYTES_MAX, RamAllowed, RamPolicy, Sealing};
pub use regions::MemoryError;
pub use shared::{OnFault, StopReason, WEIGHT_DEFAULT, WEIGHTS};
pub use slo::{
    report::{Accounting, SloReport, SloWindow},
    slow::{SlowCause, SlowRequest},
};
