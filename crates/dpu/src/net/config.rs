// SPDX-License-Identifier: Apache-2.0
//! How a network device receives, as an operator chooses it.

/// What becomes of a packet whose buffers are absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnReceiveFault {
    /// It is lost, as in a NIC that knows no page faults. The pages are requested for later ones.
    Drop,
    /// It waits in the store, and so do all later ones of its queue, until its pages are there
    /// (VPRI 3.2).
    Pause,
    /// It waits in the store. Later ones go into their buffers if those are present, and are
    /// reported to the driver after it ('Page Fault Support for Network Controllers', 5).
    BackupRing,
    /// It goes into the next posted buffers that are present, and waits in the store only if there
    /// are none (VPRI 8).
    #[default]
    OutOfOrder,
}

/// Whether the pages of posted buffers are requested before there is a packet for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Prefault {
    /// As soon as the device sees them, a limited number of buffers ahead.
    #[default]
    Posted,
    /// No.
    Off,
}

/// Which pages of posted buffers stay present on behalf of a device ('Page Fault Support for Network
/// Controllers', table 3). Its rings always do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wiring {
    /// None.
    #[default]
    None,
    /// Those of the next posted buffers of each ring, so many of them: a burst that is not longer
    /// waits for nothing.
    Floor {
        /// Buffers of each receiving queue.
        buffers: u16,
    },
    /// Those of each buffer from its post to its use.
    Fine,
    /// As *fine*, but they stay beyond that, as long as no more than so many bytes do: what was used
    /// least recently goes first (a pin-down cache). Each receiving queue has an equal share.
    Coarse {
        /// Of the device.
        bytes: u64,
    },
    /// All memory of the guest, as long as the driver uses the device.
    Static,
}

/// Bounds of [`Wiring::Coarse`]: the buffers of a short ring, and more than any guest has.
pub const COARSE_BYTES_RANGE: std::ops::RangeInclusive<u64> = (64 << 10)..=(1 << 40);

/// How a network device receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveConfig {
    /// What becomes of a packet whose buffers are absent.
    pub on_fault: OnReceiveFault,
    /// Whether pages of posted buffers are requested ahead.
    pub prefault: Prefault,
    /// Which buffers stay present.
    pub wiring: Wiring,
    /// Most bytes of packets that wait for their buffers, all queues of the device together.
    pub store_bytes: u64,
}

/// Default of [`ReceiveConfig::store_bytes`]: 10 Gbit/s for about 3 ms, which is a page from a disk.
pub const STORE_BYTES: u64 = 4 << 20;
/// Bounds of [`ReceiveConfig::store_bytes`]: at least one packet of any length.
pub const STORE_BYTES_RANGE: std::ops::RangeInclusive<u64> = (128 << 10)..=(1 << 30);

impl Default for ReceiveConfig {
    fn default() -> Self {
        Self {
            on_fault: OnReceiveFault::default(),
            prefault: Prefault::default(),
            wiring: Wiring::default(),
            store_bytes: STORE_BYTES,
        }
    }
}
