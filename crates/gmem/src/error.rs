// SPDX-License-Identifier: Apache-2.0
//! [`GmError`]: why an operation of the interface failed.
//!
//! Each is one code of `gm_ret_t` (GMEM 4.1, Table 2) in the C interface.

use crate::mmu::MmuError;
use pagetide_addr::{Access, DeviceId, Va};

/// What went wrong. Unless stated otherwise, nothing has changed.
#[doc(alias = "gm_ret_t")]
#[derive(Debug, Clone, thiserror::Error)]
pub enum GmError {
    /// An argument is invalid.
    #[error("{argument} is wrong: {why}")]
    InvalidArgument {
        /// The argument.
        argument: &'static str,
        /// What is required.
        why: &'static str,
    },
    /// No free range of addresses satisfies the request.
    #[error("no {bytes:#x} bytes of addresses are free that satisfy the request")]
    NoAddresses {
        /// Bytes requested.
        bytes: u64,
    },
    /// No physical memory is free, or none is registered.
    #[error("no physical memory for {va}: register some with a device, or free some")]
    NoMemory {
        /// The address that needs memory.
        va: Va,
    },
    /// The address is in no region.
    #[error("{va} is in no allocated region")]
    NotAllocated {
        /// The address.
        va: Va,
    },
    /// The device is already attached to the space.
    #[error("{device} is attached to the address space already")]
    AlreadyAttached {
        /// The device.
        device: DeviceId,
    },
    /// The device is not attached to the space.
    #[error("{device} is not attached to the address space")]
    NotAttached {
        /// The device.
        device: DeviceId,
    },
    /// The device is active in another space, or in none.
    #[error("{device} is not active in the address space: switch it there first")]
    NotActive {
        /// The device.
        device: DeviceId,
    },
    /// It is still in use.
    #[error("it is still in use: {by}")]
    InUse {
        /// The user.
        by: &'static str,
    },
    /// The region is already mapped.
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
        /// The address.
        va: Va,
        /// Access wanted.
        access: Access,
    },
    /// The device cannot wait for a page: it needs wired mappings.
    #[error("{device} cannot recover from a fault at {va}: wire what it may use (gm_region_map)")]
    CannotRecover {
        /// The device.
        device: DeviceId,
        /// The faulting address.
        va: Va,
    },
    /// This space, region or device cannot do that.
    #[error("not supported: {what}")]
    Unsupported {
        /// The unsupported operation.
        what: &'static str,
    },
    /// A device's access is under way and does not end. Completed steps are not undone: call again.
    #[error("{device} is in the middle of an access that does not end: try again")]
    Busy {
        /// The device.
        device: DeviceId,
    },
    /// A device's MMU failed. The operation's description says what remains.
    #[error("{device}: {source}")]
    Device {
        /// The device.
        device: DeviceId,
        /// Its error.
        source: std::sync::Arc<MmuError>,
    },
    /// The content of the page is lost, or its owner is gone.
    #[error("the content of {va} is lost")]
    Lost {
        /// The address.
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
