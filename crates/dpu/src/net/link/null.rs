// SPDX-License-Identifier: Apache-2.0
//! A sink of packets, and a source of any number of them.
//!
//! The packets of a source are numbered: whoever receives them can tell whether one is lost or late.
//!
//! ```text
//!   0        6        12     14         22        24
//!   │ to     │ from   │ type │ number   │ pair    │ zeros …
//! ```

use super::state::{LinkError, LinkState, Received, Sent, count};
use crate::net::packet::{Outgoing, PacketBuffer};
use std::sync::Arc;

/// Shortest packet of a source, as on a wire.
const SOURCE_BYTES_MIN: u16 = 60;
/// Longest: a payload of 9000 bytes.
const SOURCE_BYTES_MAX: u16 = 9014;
/// Its EtherType: one for experiments (IEEE 802, local experimental 1).
const EXPERIMENT: [u8; 2] = [0x88, 0xb5];

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Null {
    state: Arc<LinkState>,
    source: Option<Source>,
}

#[derive(Debug)]
struct Source {
    bytes: u16,
    pair: u16,
    next: u64,
}

impl Null {
    /// Only a sink.
    pub fn sink() -> Self {
        Self {
            state: Arc::default(),
            source: None,
        }
    }

    /// Also a source of packets of `bytes`, for that pair.
    ///
    /// # Errors
    /// [`LinkError::SourceBytes`].
    pub fn source(bytes: u16, pair: u16) -> Result<Self, LinkError> {
        if !(SOURCE_BYTES_MIN..=SOURCE_BYTES_MAX).contains(&bytes) {
            return Err(LinkError::SourceBytes(bytes));
        }
        let next = 0;
        Ok(Self {
            state: Arc::default(),
            source: Some(Source { bytes, pair, next }),
        })
    }

    pub fn state(&self) -> &Arc<LinkState> {
        &self.state
    }

    pub fn send(&mut self, _packet: &Outgoing<'_>) -> Sent {
        count(&self.state.sent, 1);
        Sent::Gone
    }

    pub fn receive(&mut self, into: &mut PacketBuffer) -> Received {
        let Some(source) = &mut self.source else {
            return Received::Nothing;
        };
        into.header_mut().fill(0);
        let bytes = usize::from(source.bytes);
        let packet = &mut into.room_mut()[..bytes];
        packet[24..].fill(0);
        // To everybody, from an address that is administered locally.
        packet[..6].fill(0xff);
        packet[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
        packet[12..14].copy_from_slice(&EXPERIMENT);
        packet[14..22].copy_from_slice(&source.next.to_le_bytes());
        packet[22..24].copy_from_slice(&source.pair.to_le_bytes());
        into.set_packet_bytes(bytes);
        source.next += 1;
        count(&self.state.received, 1);
        Received::Packet
    }

    pub fn is_ready(&self) -> bool {
        self.source.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_a_source_are_numbered_and_those_of_a_sink_do_not_exist() {
        let mut buffer = PacketBuffer::new();
        assert_eq!(Null::sink().receive(&mut buffer), Received::Nothing);
        let mut source = Null::source(64, 3).unwrap();
        for number in 0..3_u64 {
            assert_eq!(source.receive(&mut buffer), Received::Packet);
            assert_eq!(buffer.packet().len(), 64);
            assert_eq!(buffer.packet()[14..22], number.to_le_bytes());
            assert_eq!(buffer.packet()[22..24], [3, 0]);
        }
        for bytes in [0, 59, 9015] {
            assert!(Null::source(bytes, 0).is_err());
        }
    }
}
