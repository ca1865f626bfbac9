// SPDX-License-Identifier: Apache-2.0
//! One access of a device to memory, as a log has it.

use pagetide_addr::{Access, DeviceId, DomainId};

/// What kind of device made an access.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Service {
    /// A disk.
    Block,
    /// A network interface.
    Network,
}

impl Service {
    /// All kinds, in the order of their codes in files.
    pub const ALL: [Self; 2] = [Self::Block, Self::Network];

    /// Name in files and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Network => "network",
        }
    }
}

impl std::fmt::Display for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// One DMA access, as a device logs it (VPRI 5.2, 5.3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AccessRecord {
    /// Time, in nanoseconds of the host's monotonic clock.
    pub time_ns: u64,
    /// The device.
    pub device: DeviceId,
    /// The space.
    pub space: DomainId,
    /// First byte, as an offset in the space.
    pub address: u64,
    /// Length, in bytes.
    pub len_bytes: u32,
    /// Read or write.
    pub access: Access,
    /// The kind of device.
    pub service: Service,
}
