// SPDX-License-Identifier: Apache-2.0
//! The hostile tenant's load.

/// A flood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Load {
    /// Reads of 64 MiB, less a block: with header and status a request has at most 64 MiB.
    LargeReads,
    /// Reads of 4 KiB, as many as all its queues hold.
    Small,
    /// Reads of 4 KiB into pages that are evicted again and again.
    Faults,
    /// Flushes, as many as all its queues hold.
    Flushes,
    /// Kicks, with nothing in the rings.
    Kicks,
    /// Connections that start all rings, read a block and go.
    Connections,
}

impl Load {
    pub const ALL: [Self; 6] = [
        Self::LargeReads,
        Self::Small,
        Self::Faults,
        Self::Flushes,
        Self::Kicks,
        Self::Connections,
    ];

    /// Its name in names of figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::LargeReads => "large_reads",
            Self::Small => "small",
            Self::Faults => "faults",
            Self::Flushes => "flushes",
            Self::Kicks => "kicks",
            Self::Connections => "connections",
        }
    }

    /// The unit in which it is counted.
    pub fn unit(self) -> &'static str {
        match self {
            Self::LargeReads => "mib_per_s",
            Self::Kicks => "kicks_per_s",
            Self::Connections => "connections_per_s",
            Self::Small | Self::Faults | Self::Flushes => "requests_per_s",
        }
    }

    /// Requests in flight in each queue.
    pub fn depth(self) -> u16 {
        match self {
            Self::LargeReads => 4,
            Self::Small | Self::Faults | Self::Flushes => super::tenant::DEPTH_MAX,
            Self::Kicks | Self::Connections => 1,
        }
    }

    /// Bytes of each request.
    pub fn request_bytes(self) -> u64 {
        match self {
            Self::LargeReads => (64 << 20) - 4096,
            _ => 4096,
        }
    }
}
