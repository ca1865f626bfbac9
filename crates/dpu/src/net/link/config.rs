// SPDX-License-Identifier: Apache-2.0
//! [`LinkConfig`]: what a device is to be linked to.

use std::fmt;

/// What a network device is linked to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LinkConfig {
    /// A sink of packets.
    #[default]
    Null,
    /// A source of packets of `bytes` each, as many as are received, and a sink.
    Source {
        /// Bytes of a packet.
        bytes: u16,
    },
    /// The device's own packets come back, each on the pair that has sent it.
    Loop,
    /// A TAP of the host, which exists: what the device sends, the host receives there.
    Tap {
        /// Its name.
        name: String,
    },
    /// An interface of the host: what the device sends, goes out there.
    Packet {
        /// Its name.
        name: String,
    },
    /// Another device of this DPU that names the same pair.
    Pair {
        /// The name that both give.
        name: String,
    },
}

impl fmt::Display for LinkConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Source { bytes } => write!(f, "source of {bytes} bytes"),
            Self::Loop => f.write_str("loop"),
            Self::Pair { name } => write!(f, "pair {name}"),
            Self::Tap { name } => write!(f, "tap {name}"),
            Self::Packet { name } => write!(f, "packet {name}"),
        }
    }
}
