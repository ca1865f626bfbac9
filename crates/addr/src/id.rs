// SPDX-License-Identifier: Apache-2.0
//! Ids of the parties to a page fault.

/// A party attached to an address space: the VM's vCPUs, a device of the software DPU.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct DeviceId(pub u32);

impl DeviceId {
    /// The vCPUs of the VM, and everything else that runs in its VMM.
    pub const VCPUS: Self = Self(0);
    /// The daemon itself, which brings pages back though no guest and no device waits for them.
    pub const DAEMON: Self = Self(u32::MAX);
}

impl std::fmt::Display for DeviceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if *self == Self::VCPUS {
            write!(f, "the CPU")
        } else if *self == Self::DAEMON {
            write!(f, "the daemon")
        } else {
            write!(f, "device {}", self.0)
        }
    }
}

/// A queue of a device, by the device's numbering.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct QueueId(pub u16);

/// A DMA domain: one backing file of guest RAM with its PA-bitmap (VPRI 5.1).
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct DomainId(pub u32);

/// Identity of a backing file on this host: the one name of guest RAM that all processes share.
#[derive(
    Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
pub struct FileKey {
    /// Device number of the file system, as `st_dev`.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
}

impl std::fmt::Display for FileKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:x}:{}", self.dev, self.ino)
    }
}
