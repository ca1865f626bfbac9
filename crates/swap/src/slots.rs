// SPDX-License-Identifier: Apache-2.0
//! Slots: room for stored content in the pool's content area.
//!
//! The area is cut into chunks of 64 KiB. A chunk in use holds slots of one
//! size, a multiple of 64 bytes; content goes into the smallest that holds it,
//! so at most 63 bytes a page are lost inside a slot. A chunk whose last slot
//! is freed becomes *empty*; its memory goes back to the system by
//! [`Slots::take_empty_chunks`], outside the fault path.
//!
//! ```text
//!   content area   ┌ chunk 0 ────────┬ chunk 1 ────────┬ chunk 2 ──── …
//!   slot size        1216 × 53         448 × 146         (empty)
//!   slot number      counted in units of 64 bytes from the start of the area
//! ```
//! None of this is stored: a successor rebuilds it from the page words, each of which names its
//! slot and length ([`Slots::adopt`]). So there is no second record that a crash could make
//! disagree with the first.
//!
//! Lower chunks are filled first, so that a shrinking store leaves whole chunks empty at its end.

use crate::tier::STORED_BYTES_MAX;
use std::collections::BTreeSet;

/// Unit in which slots are placed and sized, in bytes.
pub const SLOT_UNIT_BYTES: u64 = 64;
/// Bytes in a chunk.
pub const CHUNK_BYTES: u64 = 64 << 10;
const UNITS_PER_CHUNK: u32 = 1024;
const _: () = assert!(CHUNK_BYTES == SLOT_UNIT_BYTES * UNITS_PER_CHUNK as u64);
/// Most units a slot can have: a page stored uncompressed with its CRC.
pub const SLOT_UNITS_MAX: u32 = 65;
const BITMAP_WORDS: usize = 16;
const _: () = assert!(BITMAP_WORDS == UNITS_PER_CHUNK.div_ceil(u64::BITS) as usize);
const _: () = assert!(SLOT_UNITS_MAX as u64 == (STORED_BYTES_MAX as u64).div_ceil(SLOT_UNIT_BYTES));

/// Place of a slot: units of 64 bytes from the start of the content area.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct SlotNo(pub u64);

impl SlotNo {
    /// Offset in the content area, in bytes.
    #[must_use]
    pub const fn byte_offset(self) -> u64 {
        self.0 * SLOT_UNIT_BYTES
    }

    fn chunk(self) -> u32 {
        // A content area has at most 2^32 chunks: `Slots::new` checks.
        u32::try_from(self.0 / u64::from(UNITS_PER_CHUNK)).unwrap_or(u32::MAX)
    }
}

/// Why content cannot be placed, or adopted from a dead predecessor.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SlotError {
    /// All chunks are in use.
    #[error("the store of {chunks} chunks is full")]
    Full {
        /// Number of chunks.
        chunks: u32,
    },
    /// A word names an impossible place.
    #[error("stored content at unit {0} cannot be there: the metadata pool is damaged")]
    Impossible(u64),
}

#[derive(Clone, Debug)]
struct Chunk {
    /// Units of each slot; 0 while the chunk is not in use.
    units: u32,
    used: u32,
    taken: [u64; BITMAP_WORDS],
}

const UNUSED: Chunk = Chunk {
    units: 0,
    used: 0,
    taken: [0; BITMAP_WORDS],
};

impl Chunk {
    fn capacity(&self) -> u32 {
        UNITS_PER_CHUNK / self.units
    }

    fn take_first_free(&mut self) -> Option<u32> {
        for (number, word) in (0_u32..).zip(&mut self.taken) {
            let free = (!*word).trailing_zeros();
            let index = number * 64 + free;
            if free < 64 && index < UNITS_PER_CHUNK / self.units {
                *word |= 1 << free;
                self.used += 1;
                return Some(index);
            }
        }
        None
    }
}

/// See the module.
#[derive(Debug)]
pub struct Slots {
    chunks: Vec<Chunk>,
    chunk_limit: u32,
    /// Chunks with a free slot, by slot units.
    partial: Vec<BTreeSet<u32>>,
    /// Chunks not in use; `released` ones have no memory.
    unused: BTreeSet<u32>,
    holding_memory: BTreeSet<u32>,
    used_bytes: u64,
}

/// A slot that was allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allocated {
    /// Where.
    pub slot: SlotNo,
    /// Number of a chunk that needs memory before the slot is written.
    pub new_chunk: Option<u32>,
}

impl Slots {
    /// An empty area of at most `chunk_limit` chunks.
    #[must_use]
    pub fn new(chunk_limit: u32) -> Self {
        Self {
            chunks: Vec::new(),
            chunk_limit,
            partial: vec![BTreeSet::new(); SLOT_UNITS_MAX as usize + 1],
            unused: BTreeSet::new(),
            holding_memory: BTreeSet::new(),
            used_bytes: 0,
        }
    }

    /// Units that content of `bytes` needs.
    #[must_use]
    pub fn units_for(bytes: u32) -> u32 {
        bytes.div_ceil(64).max(1)
    }

    /// Allocates a slot for `bytes` of content (at most [`SLOT_UNITS_MAX`] units).
    ///
    /// # Errors
    /// [`SlotError::Full`].
    pub fn allocate(&mut self, bytes: u32) -> Result<Allocated, SlotError> {
        let units = Self::units_for(bytes);
        debug_assert!(
            units <= SLOT_UNITS_MAX,
            "{bytes} bytes are more than a page with its CRC"
        );
        if let Some(&number) = self.partial[units as usize].first() {
            return Ok(Allocated {
                slot: self.take_in(number),
                new_chunk: None,
            });
        }
        let number = self.open_chunk(units)?;
        let new_chunk = self.holding_memory.insert(number).then_some(number);
        Ok(Allocated {
            slot: self.take_in(number),
            new_chunk,
        })
    }

    /// Undoes the opening of a chunk for which no memory could be allocated. It holds no content
    /// yet.
    pub fn chunk_without_memory(&mut self, allocated: &Allocated, bytes: u32) {
        self.free(allocated.slot, bytes);
        if let Some(number) = allocated.new_chunk {
            self.holding_memory.remove(&number);
        }
    }

    fn open_chunk(&mut self, units: u32) -> Result<u32, SlotError> {
        let number = match self.unused.pop_first() {
            Some(number) => number,
            None => self.append_chunk()?,
        };
        self.chunks[number as usize].units = units;
        self.partial[units as usize].insert(number);
        Ok(number)
    }

    fn append_chunk(&mut self) -> Result<u32, SlotError> {
        let number = u32::try_from(self.chunks.len()).unwrap_or(u32::MAX);
        if number >= self.chunk_limit {
            return Err(SlotError::Full {
                chunks: self.chunk_limit,
            });
        }
        self.chunks.push(UNUSED);
        Ok(number)
    }

    fn take_in(&mut self, number: u32) -> SlotNo {
        let chunk = &mut self.chunks[number as usize];
        let Some(index) = chunk.take_first_free() else {
            unreachable!("a chunk with a free slot has one");
        };
        self.used_bytes += u64::from(chunk.units) * SLOT_UNIT_BYTES;
        if chunk.used == chunk.capacity() {
            self.partial[chunk.units as usize].remove(&number);
        }
        SlotNo(u64::from(number) * u64::from(UNITS_PER_CHUNK) + u64::from(index * chunk.units))
    }

    /// Frees the slot of content of `bytes`.
    ///
    /// # Panics
    /// If the slot is not taken: the caller frees each content once.
    pub fn free(&mut self, slot: SlotNo, bytes: u32) {
        let units = Self::units_for(bytes);
        let number = slot.chunk();
        let chunk = &mut self.chunks[number as usize];
        assert_eq!(
            chunk.units, units,
            "slot {slot:?} freed with another size than it has"
        );
        let (word, bit) = position(slot, units);
        assert!(chunk.taken[word] & bit != 0, "slot {slot:?} freed twice");
        chunk.taken[word] &= !bit;
        chunk.used -= 1;
        self.used_bytes -= u64::from(units) * SLOT_UNIT_BYTES;
        if chunk.used == 0 {
            chunk.units = 0;
            self.partial[units as usize].remove(&number);
            self.unused.insert(number);
        } else {
            self.partial[units as usize].insert(number);
        }
    }

    /// Records content that a dead predecessor stored.
    ///
    /// # Errors
    /// [`SlotError::Impossible`] if it overlaps other content or lies outside.
    pub fn adopt(&mut self, slot: SlotNo, bytes: u32) -> Result<(), SlotError> {
        let impossible = SlotError::Impossible(slot.0);
        let units = Self::units_for(bytes);
        let chunk_number = slot.0 / u64::from(UNITS_PER_CHUNK);
        if units > SLOT_UNITS_MAX || chunk_number >= u64::from(self.chunk_limit) {
            return Err(impossible);
        }
        let number = slot.chunk();
        while self.chunks.len() <= number as usize {
            let new = self.append_chunk()?;
            self.unused.insert(new);
        }
        let within = slot.0 % u64::from(UNITS_PER_CHUNK);
        if self.unused.remove(&number) {
            self.chunks[number as usize].units = units;
            self.partial[units as usize].insert(number);
            self.holding_memory.insert(number);
        }
        let chunk = &mut self.chunks[number as usize];
        let last = u64::from((chunk.capacity() - 1) * chunk.units);
        let (word, bit) = position(slot, units);
        if chunk.units != units
            || !within.is_multiple_of(u64::from(units))
            || within > last
            || chunk.taken[word] & bit != 0
        {
            return Err(impossible);
        }
        chunk.taken[word] |= bit;
        chunk.used += 1;
        self.used_bytes += u64::from(units) * SLOT_UNIT_BYTES;
        if chunk.used == chunk.capacity() {
            self.partial[units as usize].remove(&number);
        }
        Ok(())
    }

    /// Returns all but `keep` of the empty chunks that still hold memory; the caller must release
    /// their memory before anything else is allocated.
    pub fn take_empty_chunks(&mut self, keep: usize) -> Vec<u32> {
        let empty: Vec<u32> = self
            .unused
            .iter()
            .copied()
            .filter(|n| self.holding_memory.contains(n))
            .collect();
        let taken: Vec<u32> = empty.into_iter().skip(keep).collect();
        for number in &taken {
            self.holding_memory.remove(number);
        }
        taken
    }

    /// Chunks with at least one slot taken, ascending.
    pub fn chunks_in_use(&self) -> impl Iterator<Item = u32> + '_ {
        (0_u32..)
            .zip(&self.chunks)
            .filter(|(_, chunk)| chunk.used > 0)
            .map(|(number, _)| number)
    }

    /// Bytes in slots that are taken.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Bytes of chunks that hold memory.
    #[must_use]
    pub fn chunk_bytes(&self) -> u64 {
        self.holding_memory.len() as u64 * CHUNK_BYTES
    }
}

fn position(slot: SlotNo, units: u32) -> (usize, u64) {
    let within = u32::try_from(slot.0 % u64::from(UNITS_PER_CHUNK)).unwrap_or(0);
    let index = within / units;
    ((index / 64) as usize, 1 << (index % 64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;
    use std::collections::BTreeMap;

    /// Naive model: every byte of every slot belongs to at most one content.
    #[test]
    fn slots_never_overlap_and_are_rebuilt_alike_under_random_operations() {
        let mut slots = Slots::new(40);
        let mut live: BTreeMap<u64, u32> = BTreeMap::new();
        let mut random = SplitMix64::new(4_711);
        for step in 0..20_000 {
            if random.below(5) < 3 {
                let bytes = u32::try_from(1 + random.below(4_100)).unwrap();
                match slots.allocate(bytes) {
                    Ok(Allocated { slot, .. }) => {
                        let end = slot.byte_offset() + u64::from(bytes);
                        assert!(slot.byte_offset() / CHUNK_BYTES == (end - 1) / CHUNK_BYTES);
                        let before = live.range(..=slot.byte_offset()).next_back();
                        assert!(
                            before
                                .is_none_or(|(at, len)| at + u64::from(*len) <= slot.byte_offset())
                        );
                        let after = live.range(slot.byte_offset()..).next();
                        assert!(after.is_none_or(|(at, _)| end <= *at));
                        live.insert(slot.byte_offset(), bytes);
                    }
                    Err(error) => assert_eq!(error, SlotError::Full { chunks: 40 }),
                }
            } else if let Some((at, bytes)) = live
                .iter()
                .nth(random.index(live.len()))
                .map(|(a, b)| (*a, *b))
            {
                slots.free(SlotNo(at / SLOT_UNIT_BYTES), bytes);
                live.remove(&at);
            }
            if step % 1_000 == 0 {
                slots.take_empty_chunks(1);
                assert!(slots.chunk_bytes() >= slots.used_bytes());
            }
        }
        let mut rebuilt = Slots::new(40);
        for (at, bytes) in &live {
            rebuilt.adopt(SlotNo(at / SLOT_UNIT_BYTES), *bytes).unwrap();
        }
        assert_eq!(rebuilt.used_bytes(), slots.used_bytes());
        for (at, bytes) in live {
            rebuilt.free(SlotNo(at / SLOT_UNIT_BYTES), bytes);
        }
        assert_eq!(rebuilt.used_bytes(), 0);
    }

    #[test]
    fn content_that_overlaps_or_lies_outside_is_not_adopted() {
        let mut slots = Slots::new(2);
        slots.adopt(SlotNo(0), 640).unwrap();
        for (slot, bytes) in [
            (0, 640),
            (5, 640),
            (10, 64),
            (1020, 640),
            (5_000, 64),
            (0, 9_999),
        ] {
            assert_eq!(
                slots.adopt(SlotNo(slot), bytes),
                Err(SlotError::Impossible(slot)),
                "unit {slot}"
            );
        }
    }

    #[test]
    fn empty_chunks_are_given_back_and_get_memory_anew() {
        let mut slots = Slots::new(2);
        let first = slots.allocate(100).unwrap();
        assert_eq!(first.new_chunk, Some(0));
        slots.free(first.slot, 100);
        assert!(slots.take_empty_chunks(1).is_empty(), "one is kept");
        assert_eq!(slots.take_empty_chunks(0), [0]);
        assert_eq!(slots.allocate(4_100).unwrap().new_chunk, Some(0));
    }
}
