// SPDX-License-Identifier: Apache-2.0
//! A trace that somebody made in memory: it has no file and no recipe, so its events identify it.

use std::sync::Arc;

use pagetide_trace::{Event, Events, TraceMeta};
use sha2::{Digest, Sha256};

use super::identity::hex;

/// Events in memory, with what a file of them would say. Clones share them.
#[derive(Clone)]
pub struct MemoryTrace {
    events: Arc<[Event]>,
    meta: TraceMeta,
    sha256: String,
}

impl MemoryTrace {
    /// These events.
    #[must_use]
    pub fn new(events: Vec<Event>, meta: TraceMeta) -> Self {
        let sha256 = hash(&events, &meta);
        Self {
            events: events.into(),
            meta,
            sha256,
        }
    }

    /// The events, from the first.
    #[must_use]
    pub fn events(&self) -> Events<'_> {
        Events(&self.events)
    }

    /// What is known about them.
    #[must_use]
    pub const fn meta(&self) -> &TraceMeta {
        &self.meta
    }

    /// SHA-256 of events and packet size, in hexadecimal: what identifies the trace.
    #[must_use]
    pub fn sha256(&self) -> &str {
        &self.sha256
    }
}

/// Each event as 40 bytes, little-endian, after the requests of a packet.
fn hash(events: &[Event], meta: &TraceMeta) -> String {
    let mut hash = Sha256::new();
    hash.update(meta.requests_per_packet.get().to_le_bytes());
    for event in events {
        let mut bytes = [0_u8; 40];
        // No time and no size have values that neither can have.
        let time_ns = event.time_ns.unwrap_or(u64::MAX);
        let shift = event.page_size.map_or(0, |size| size.shift());
        bytes[..8].copy_from_slice(&time_ns.to_le_bytes());
        bytes[8..12].copy_from_slice(&event.source.0.to_le_bytes());
        bytes[12..16].copy_from_slice(&event.domain.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&event.iova.0.to_le_bytes());
        bytes[24..28].copy_from_slice(&shift.to_le_bytes());
        bytes[28] = event.access as u8;
        bytes[29] = event.kind as u8;
        hash.update(bytes);
    }
    hex(&hash.finalize())
}

impl PartialEq for MemoryTrace {
    fn eq(&self, other: &Self) -> bool {
        self.sha256 == other.sha256
    }
}

impl std::fmt::Debug for MemoryTrace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryTrace")
            .field("events", &self.events.len())
            .field("meta", &self.meta)
            .field("sha256", &self.sha256)
            .finish()
    }
}
