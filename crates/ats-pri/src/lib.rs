// SPDX-License-Identifier: Apache-2.0
//! A model of ATS and PRI, the standard way to I/O page faults (VPRI 2.1, figure 1): a
//! second source of the I/O page fault service, and the baseline to measure against.
//!
//! ```text
//!       device                          IOMMU                           host
//!  ┌──────────────┐   2 ATS request  ┌────────────┐
//!  │ device TLB   │ ───────────────► │ 3 walk of  │
//!  │ 1 look-up    │ ◄─────────────── │ the table  │
//!  │              │   4 completion   │            │
//!  │              │                  │            │ 6 interrupt  ┌──────────────────┐
//!  │ 5 page       │ ───────────────► │ page       │ ───────────► │ interrupt thread │
//!  │ request group│                  │ request    │              │ 7 whole groups   │
//!  │              │                  │ queue      │              └────────│─────────┘
//!  │              │                  │            │              ┌────────▼─────────┐
//!  │ 10 ATS again │   9 response     │ invalidat- │ 8 descriptor │ I/O page fault   │
//!  │              │ ◄─────────────── │ ion queue  │ ◄─────────── │ service          │
//!  └──────────────┘                  └────────────┘              └──────────────────┘
//!    DeviceModel                        Iommu                  PriSource, FaultService
//! ```
//! [`Iommu`] implements [`IoSpaces`](pagetide_vpri::IoSpaces) and [`PriSpace`]
//! [`IoSpace`](pagetide_vpri::IoSpace), so the host keeps the IOMMU's page table up to date as it
//! does a PA-bitmap; [`PriSource`] implements [`FaultSource`](pagetide_vpri::FaultSource). Neither
//! gmem nor the service knows that there is no VPRI behind them.
//!
//! # What is real and what is not
//! Page table ([`table`]), device TLB ([`tlb`]), page request queue with its 32-byte descriptors,
//! its status bits and its overflow ([`prq`]), groups with 9-bit indices and a last flag, the one
//! interrupt thread ([`source`]) and the in-order invalidation queue ([`iommu`]) work as in
//! hardware and in Linux. *It is a model*: the device is a thread; a crossing of PCIe is a spin of
//! a set time, none by default; an interrupt is the wake-up of a thread; there is no IOTLB in the
//! IOMMU, no PASID, and pages are 4 KiB. Its value: the number and kind of steps and hand-overs are
//! those of the standard way.
//!
//! # Rules
//! - A page is not evicted while a DMA uses it: [`tlb`].
//! - Each group is answered exactly once, by software or, if its last message
//!   found the queue overflown, by hardware.
//! - An overflow loses messages, never a transfer: the device asks again, or it
//!   is stopped, reports it, and asks again when its driver has restarted it.

#[cfg(not(loom))]
pub mod device;
#[cfg(not(loom))]
mod interrupt;
#[cfg(not(loom))]
pub mod iommu;
#[cfg(not(loom))]
pub mod prq;
#[cfg(not(loom))]
mod requests;
#[cfg(not(loom))]
pub mod source;
#[cfg(not(loom))]
pub mod space;
mod sync;
#[cfg(not(loom))]
pub mod table;
#[cfg(all(test, not(loom)))]
mod tests;
#[cfg_attr(loom, expect(dead_code, reason = "the models use a part of it"))]
pub mod tlb;

#[cfg(not(loom))]
pub use device::{DeviceConfig, DeviceModel, DmaError, DmaReport, IdTaken, Polling};
#[cfg(not(loom))]
pub use iommu::{Iommu, IommuConfig, IommuCounts, OverflowAnswer};
#[cfg(not(loom))]
pub use prq::RequesterId;
#[cfg(not(loom))]
pub use source::{InterruptThread, PriSource, SourceCounts};
#[cfg(not(loom))]
pub use space::PriSpace;
pub use tlb::{DevTlbSize, TlbCounts};
