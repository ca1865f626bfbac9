// SPDX-License-Identifier: Apache-2.0
//! [`LogRecord`]: one access of a device to memory, as the access log has it (VPRI 5.2).

use pagetide_addr::{Access, DeviceId, DomainId};

/// Words of a record in memory.
pub(crate) const WORDS: usize = 4;

/// What kind of device made an access.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Service {
    /// A disk.
    Block,
    /// A network interface.
    Network,
}

/// One DMA access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogRecord {
    /// The time, in nanoseconds of the host's monotonic clock; 0 if the device has no such clock.
    pub time_ns: u64,
    /// The device.
    pub device: DeviceId,
    /// The space.
    pub space: DomainId,
    /// First byte, relative to the space.
    pub address: u64,
    /// Length, in bytes.
    pub len_bytes: u32,
    /// Read or write.
    pub access: Access,
    /// The kind of device.
    pub service: Service,
}

impl LogRecord {
    /// The record as words, for a ring of atomic ones.
    pub(crate) fn to_words(self) -> [u64; WORDS] {
        let service = match self.service {
            Service::Block => 0,
            Service::Network => 1,
        };
        let access = match self.access {
            Access::Read => 0,
            Access::Write => 1,
        };
        [
            self.time_ns,
            u64::from(self.device.0) | u64::from(self.space.0) << 32,
            self.address,
            u64::from(self.len_bytes) | access << 32 | service << 33,
        ]
    }

    /// The record that became these words.
    pub(crate) fn from_words([time_ns, ids, address, rest]: [u64; WORDS]) -> Self {
        let low = |word: u64| u32::try_from(word & u64::from(u32::MAX)).unwrap_or(0);
        let bit = |at: u32| rest >> at & 1 == 1;
        Self {
            time_ns,
            device: DeviceId(low(ids)),
            space: DomainId(low(ids >> 32)),
            address,
            len_bytes: low(rest),
            access: if bit(32) { Access::Write } else { Access::Read },
            service: if bit(33) {
                Service::Network
            } else {
                Service::Block
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn words_become_the_record_they_were(
            numbers in any::<(u64, u32, u32, u64, u32)>(),
            is_write in any::<bool>(),
            is_network in any::<bool>(),
        ) {
            let (time_ns, device, space, address, len_bytes) = numbers;
            let record = LogRecord {
                time_ns,
                device: DeviceId(device),
                space: DomainId(space),
                address,
                len_bytes,
                access: if is_write { Access::Write } else { Access::Read },
                service: if is_network { Service::Network } else { Service::Block },
            };
            prop_assert_eq!(LogRecord::from_words(record.to_words()), record);
        }
    }
}
