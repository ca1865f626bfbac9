// SPDX-License-Identifier: Apache-2.0
//! Why a domain is refused.

use pagetide_addr::FileKey;
use pagetide_sys::guest_ram::RamFileError;

/// Why a domain cannot be opened or changed.
#[derive(Debug, thiserror::Error)]
pub enum DomainError {
    /// The file is larger than [`super::DOMAIN_BYTES_MAX`].
    #[error("a file of {0} bytes is too large for a DMA domain")]
    TooLarge(u64),
    /// The file cannot be guest RAM.
    #[error(transparent)]
    File(#[from] RamFileError),
    /// Part of the file cannot be mapped.
    #[error("{bytes} bytes of guest RAM file {key} cannot be mapped: {source}")]
    Map {
        /// The file.
        key: FileKey,
        /// Length of the part.
        bytes: u64,
        /// The kernel's answer.
        source: pagetide_sys::mapping::MappingError,
    },
    /// A device without look-up would touch memory of an attached VM.
    #[error(
        "look-up cannot be off for RAM file {0}: its VM is attached; detach the VM first, or start the device with look-up on"
    )]
    LookUpNeeded(FileKey),
    /// A device without look-up would touch memory that the host has not yet declared present or
    /// absent.
    #[error(
        "look-up cannot be off for RAM file {0}: the host has not declared yet which memory has pages elsewhere; connect the device again once 'pagetide run' is connected, or start the device with look-up on"
    )]
    NotKnown(FileKey),
    /// A VM cannot be attached while a device serves it without look-up.
    #[error(
        "{devices} device queue(s) work on RAM file {key} with look-up off; restart those devices with look-up on, then attach"
    )]
    LookUpOff {
        /// The file.
        key: FileKey,
        /// Number of such ports.
        devices: u32,
    },
    /// A VM cannot be attached while the DPU has something of its own in its RAM.
    #[error(
        "a driver of the DPU's VPRI function has its rings in RAM file {0}, which the function uses without look-up: end that driver, then attach"
    )]
    OwnMemory(FileKey),
    /// The DPU cannot have something of its own in RAM of an attached VM.
    #[error(
        "rings and messages of the VPRI function cannot lie in RAM file {0}: it belongs to a VM whose pages may be away, and the function looks none of its own pages up; give it memory that is not paged, or detach the VM first"
    )]
    OwnInPaged(FileKey),
    /// The file is not as long as its domain was declared.
    #[error(
        "RAM file {key} has {bytes} bytes, but the host has declared {declared_bytes}: the VM changed its RAM in between; connect the device again"
    )]
    Length {
        /// The file.
        key: FileKey,
        /// Its length.
        bytes: u64,
        /// The length that the host declared.
        declared_bytes: u64,
    },
    /// The device is not there, or does not do what it was sent.
    #[error("the DPU {0}")]
    Device(String),
    /// The file belongs to a VM that could not be recovered.
    #[error(
        "RAM file {0} belongs to a VM whose evicted pages wait in a pool that could not be recovered: no device may touch it until then"
    )]
    Barred(FileKey),
    /// Two VMs cannot own one file.
    #[error("RAM file {0} belongs to a VM that is attached already")]
    AttachedAlready(FileKey),
}
