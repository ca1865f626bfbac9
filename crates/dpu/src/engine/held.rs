// SPDX-License-Identifier: Apache-2.0
//! Which posted chains a successor must be told of: the record of a queue, kept with each use.
//!
//! Posted chains may be used in any order. Those that are passed over are *held*, and nothing in the
//! rings says so ([`crate::net::record`]). They are recorded just before the first chain behind them
//! is published in the used ring, and no earlier: chains that were only looked at are still the ring's.
//!
//! ```text
//!   number of the chain   0 … frontier … reach … end of what was read
//!                         │ used, or    │ passed  │ looked at
//!                         │ recorded    │ by now  │
//! ```
//! A publication is: the chains in between are recorded, the used index is stored, and what was recorded of the chains
//! that are published is erased. Chains of several packets are used before it, and to a successor they are still posted
//! or held.

use super::command::RecordSetup;
use crate::{
    memory::DeviceMemory,
    net::record::{HeldRecord, Left, Refusal, Ring, Tie, file::RecordFile},
};
use std::{path::PathBuf, sync::atomic::Ordering};
use vm_memory::{Bytes, GuestAddress};

/// The record of a queue. Chains are named by their numbers, as in [`super::posted`].
#[derive(Debug)]
pub(crate) struct Held {
    record: HeldRecord<RecordFile>,
    size: u16,
    /// Index in the avail ring of the chain with number 0, if it were there.
    origin: u16,
    /// Chains before it are used or recorded.
    frontier: u64,
    /// What the frontier becomes with the next publication.
    reach: u64,
    /// Recorded chains that are published next.
    returned: Vec<u16>,
}

impl Held {
    /// A chain is among those that are published next.
    pub fn uses(&mut self, number: u64, head: u16) {
        if number >= self.frontier {
            self.reach = self.reach.max(number + 1);
        } else if head < self.size {
            self.returned.push(head);
        }
    }

    /// Before the used index is stored: records the chains that are passed over. `unused` is the
    /// head of the chain with that number, unless it is used.
    pub fn record_passed(
        &mut self,
        unused: impl Fn(u64) -> Option<u16>,
        descriptor: impl Fn(u16) -> [u8; 16],
    ) {
        while self.frontier < self.reach {
            let number = self.frontier;
            // A head that is no descriptor stops the device once it is looked at.
            if let Some(head) = unused(number).filter(|head| *head < self.size) {
                let index = self.origin.wrapping_add(low(number));
                self.record.hold(head, index, &descriptor(head));
            }
            self.frontier += 1;
        }
    }

    /// After it was stored.
    pub fn settle(&mut self, used_index: u16) {
        self.record.settle(self.returned.drain(..), used_index);
    }

    /// Everything that was read is returned: a successor begins at the used index.
    pub fn end(self) {
        self.record.end();
    }

    /// True once its file has lost its memory.
    pub fn is_lost(&self) -> bool {
        self.record.words().is_lost()
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "an index is the low bits of the number"
)]
fn low(number: u64) -> u16 {
    number as u16
}

/// The rings of a queue, which are wired, as they are now.
struct RingNow<'a> {
    memory: &'a DeviceMemory,
    tie: Tie,
}

impl RingNow<'_> {
    fn index(&self, ring: u64) -> u16 {
        self.memory
            .load_u16(ring + 2, Ordering::Acquire)
            .unwrap_or(0)
    }

    fn slot(&self, index: u16) -> u64 {
        u64::from(index % self.tie.size.max(1))
    }
}

impl Ring for RingNow<'_> {
    fn used_index(&self) -> u16 {
        self.index(self.tie.used)
    }

    fn used_head(&self, index: u16) -> u32 {
        let at = self.tie.used + 4 + 8 * self.slot(index);
        let read: Result<u32, _> = self.memory.read_obj(GuestAddress(at));
        read.map_or(u32::MAX, u32::from_le)
    }

    fn avail_index(&self) -> u16 {
        self.index(self.tie.avail)
    }

    fn avail_head(&self, index: u16) -> u16 {
        let at = self.tie.avail + 4 + 2 * self.slot(index);
        let read: Result<u16, _> = self.memory.read_obj(GuestAddress(at));
        read.map_or(u16::MAX, u16::from_le)
    }

    fn descriptor(&self, head: u16) -> [u8; 16] {
        descriptor(self.memory, self.tie.descriptors, head)
    }
}

/// A descriptor of a table that is wired.
pub(super) fn descriptor(memory: &DeviceMemory, table: u64, head: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    let at = GuestAddress(table + 16 * u64::from(head));
    if let Err(error) = memory.read_slice(&mut bytes, at) {
        tracing::debug!(%error, "a wired descriptor cannot be read");
    }
    bytes
}

/// Without its record, a ring that is in use cannot be served.
#[derive(Debug, thiserror::Error)]
#[error(
    "the record of its held buffers, {path}, cannot be used: {refusal}; reset the interface in its guest"
)]
pub(super) struct Unusable {
    path: PathBuf,
    refusal: Refusal,
}

impl Held {
    /// Finds out what a predecessor has left of a ring, and goes on with its record. The rings are
    /// wired.
    pub(super) fn take_over(
        setup: RecordSetup,
        memory: &DeviceMemory,
    ) -> Result<(Self, Left), Unusable> {
        let RecordSetup { file, tie } = setup;
        let ring = RingNow { memory, tie };
        let (record, left) = match HeldRecord::take_over(file, &tie, &ring) {
            Ok(taken) => taken,
            Err((file, refusal)) => begin_anew(file, refusal, &ring)?,
        };
        let count = u16::try_from(left.held.len()).unwrap_or(u16::MAX);
        let held = Self {
            record,
            size: tie.size,
            origin: left.next_avail.wrapping_sub(count),
            frontier: u64::from(count),
            reach: u64::from(count),
            returned: Vec::new(),
        };
        Ok((held, left))
    }
}

fn begin_anew(
    file: RecordFile,
    refusal: Refusal,
    ring: &RingNow<'_>,
) -> Result<(HeldRecord<RecordFile>, Left), Unusable> {
    let used = ring.used_index();
    let path = file.path().to_owned();
    if !refusal.is_harmless(used) {
        return Err(Unusable { path, refusal });
    }
    match refusal {
        Refusal::Empty => {}
        _ => {
            tracing::warn!(path = %path.display(), %refusal, "a record of held receive buffers is begun anew")
        }
    }
    let left = Left {
        held: Vec::new(),
        next_avail: used,
    };
    match HeldRecord::begin(file, &ring.tie, used) {
        Ok(record) => Ok((record, left)),
        Err(_) => Err(Unusable { path, refusal }),
    }
}
