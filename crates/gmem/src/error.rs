// SPDX-License-Identifier: Apache-2.0
//! [`GmError`]: why an operation of the interface did not happen.
//!
//! Each is one code of `gm_ret_t` (GMEM 4.1, Table 2) in the C interface.

use crate::mmu::MmuError;
use pagetide_addr::{Access, DeviceId, Va};

/// What went wrong. Unless said otherwise nothing has changed then.
#[doc(alias = "gm_ret_t")]
#[derive(Debug, Clone, thiserror::Error)]
pub enum GmError {
    /// An argument makes no sense.
    #[error("{argument} is wrong: {why}")]
    InvalidArgument {
        /// Which.
        argument: &'static str,
        /// What it must be.
        why: &'static str,
    },
    /// No free range of addresses satisfies the request.
    #[error("no {bytes:#x} bytes of addresses are free that satisfy the request")]
    NoAddresses {
        /// How many were asked for.
        bytes: u64,
    },
    /// No physical memory is free, or none is registered.
    #[error("no physical memory for {va}: register some with a device, or free some")]
    NoMemory {
        /// For which address.
        va: Va,
    },
    /// The address is in no region.
    #[error("{va} is in no allocated region")]
    NotAllocated {
        /// Which.
        va: Va,
    },
    /// The device is attached to the space already.
    #[error("{device} is attached to the address space already")]
    AlreadyAttached {
        /// Which.
        device: DeviceId,
    },
    /// The device is not attached to the space.
    #[error("{device} is not attached to the address space")]
    NotAttached {
        /// Which.
        device: DeviceId,
    },
    /// The device is active in another space, or in none.
    #[error("{device} is not active in the address space: switch it there first")]
    NotActive {
        /// Which.
        device: DeviceId,
    },
    /// Something else still uses it.
    #[error("it is still in use: {by}")]
    InUse {
        /// What uses it.
        by: &'static str,
    },
    /// The region is mapped already.
    #[error("the region at {va} is mapped already: unmap it first")]
    AlreadyMapped {
        /// Start of the region.
        va: Va,
    },
    /// The region is not mapped.
    #[error("the region at {va} is not mapped")]
    NotMapped {
        /// Start of the region.
        va: Va,
    },
    /// The region does not allow the access.
    #[error("{va} does not allow {access:?}")]
    Denied {
        /// Where.
        va: Va,
        /// What was wanted.
        access: Access,
    },
    /// The device cannot wait for a page: it needs wired mappings.
    #[error("{device} cannot recover from a fault at {va}: wire what it may use (gm_region_map)")]
    CannotRecover {
        /// Which.
        device: DeviceId,
        /// Where it faulted.
        va: Va,
    },
    /// This space, region or device cannot do that.
    #[error("not supported: {what}")]
    Unsupported {
        /// What.
        what: &'static str,
    },
    /// A device's access is under way and does not end. What was begun is not undone: call again.
    #[error("{device} is in the middle of an access that does not end: try again")]
    Busy {
        /// Which.
        device: DeviceId,
    },
    /// A device's MMU failed. See the operation for what is left.
    #[error("{device}: {source}")]
    Device {
        /// Which.
        device: DeviceId,
        /// What it said.
        source: std::sync::Arc<MmuError>,
    },
    /// The content of the page is lost, or its owner is gone.
    #[error("the content of {va} is lost")]
    Lost {
        /// Where.
        va: Va,
    },
    /// The space, region or device was destroyed.
    #[error("it was destroyed")]
    Destroyed,
}

impl GmError {
    pub(crate) fn device(device: DeviceId, source: MmuError) -> Self {
        let source = std::sync::Arc::new(source);
        Self::Device { device, source }
    }
}
