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
//! Lower chunks are filled first, so that a shrinking store leaves whole chunks empty at its end. But a new
//! chunk is an empty one that still holds memory, if there is any: that is charged already, and costs neither a
//! system call nor room.
//!
//! # What it costs
//! A chunk in use takes 24 bytes of this process, as long as it has at most 64 slots: then one word has
//! a bit for each. A chunk of smaller slots has its bits in a box of 128 bytes. So a store of pages that
//! do not compress at all costs 0.04 % of their size ([`Slots::metadata_bytes`]).

use crate::tier::crc::STORED_BYTES_MAX;
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

/// A bit for each slot of a chunk.
#[derive(Clone, Debug)]
enum Taken {
    /// There are at most 64 slots, as of pages that compress to a quarter or less well.
    Few(u64),
    Many(Box<[u64; BITMAP_WORDS]>),
}

impl Taken {
    const NONE: Self = Self::Few(0);

    fn of(capacity: u32) -> Self {
        if capacity <= u64::BITS {
            Self::NONE
        } else {
            Self::Many(Box::new([0; BITMAP_WORDS]))
        }
    }

    fn words(&mut self) -> &mut [u64] {
        match self {
            Self::Few(word) => std::slice::from_mut(word),
            Self::Many(words) => &mut words[..],
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Few(_) => 0,
            Self::Many(words) => size_of_val(&**words) as u64,
        }
    }
}

#[derive(Clone, Debug)]
struct Chunk {
    taken: Taken,
    used: u16,
    /// Units of each slot; 0 while the chunk is not in use.
    units: u8,
    has_memory: bool,
}

const UNUSED: Chunk = Chunk {
    taken: Taken::NONE,
    used: 0,
    units: 0,
    has_memory: false,
};
const _: () = assert!(size_of::<Chunk>() <= 24);
const _: () = assert!(SLOT_UNITS_MAX <= u8::MAX as u32);

impl Chunk {
    fn units(&self) -> u32 {
        u32::from(self.units)
    }

    fn capacity(&self) -> u32 {
        UNITS_PER_CHUNK / self.units()
    }

    /// Bytes of all its slots.
    fn slot_bytes(&self) -> u64 {
        u64::from(self.capacity() * self.units()) * SLOT_UNIT_BYTES
    }

    fn is_full(&self) -> bool {
        u32::from(self.used) == self.capacity()
    }

    fn begin(&mut self, units: u32) {
        self.units = u8::try_from(units).unwrap_or(u8::MAX);
        self.taken = Taken::of(self.capacity());
    }

    fn end(&mut self) {
        self.units = 0;
        self.taken = Taken::NONE;
    }

    fn take_first_free(&mut self) -> Option<u32> {
        let capacity = self.capacity();
        for (number, word) in (0_u32..).zip(self.taken.words()) {
            let free = (!*word).trailing_zeros();
            let index = number * 64 + free;
            if free < 64 && index < capacity {
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
    /// Chunks not in use that hold memory.
    empty: BTreeSet<u32>,
    /// Chunks not in use that hold none.
    unused: BTreeSet<u32>,
    chunks_with_memory: u64,
    /// Bytes of slots that are taken.
    used_bytes: u64,
    /// Bytes of slots that are free, in chunks in use.
    free_bytes: u64,
    /// Bytes of boxes with bits.
    box_bytes: u64,
}

/// Memory that an entry of a set takes, about: nodes of a `BTreeSet` are two thirds full.
const SET_ENTRY_BYTES: u64 = 8;

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
            empty: BTreeSet::new(),
            unused: BTreeSet::new(),
            chunks_with_memory: 0,
            used_bytes: 0,
            free_bytes: 0,
            box_bytes: 0,
        }
    }

    /// Units that content of `bytes` needs.
    #[must_use]
    pub fn units_for(bytes: u32) -> u32 {
        bytes.div_ceil(64).max(1)
    }

    /// Bytes of a slot of `units`.
    #[must_use]
    pub const fn bytes_in(units: u32) -> u64 {
        units as u64 * SLOT_UNIT_BYTES
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
        let new_chunk = self.give_memory(number).then_some(number);
        Ok(Allocated {
            slot: self.take_in(number),
            new_chunk,
        })
    }

    /// Undoes the opening of a chunk for which no memory could be allocated. It holds no content
    /// yet.
    pub fn chunk_without_memory(&mut self, allocated: &Allocated, bytes: u32) {
        self.free(allocated.slot, bytes);
        if let Some(number) = allocated.new_chunk
            && self.empty.remove(&number)
        {
            self.take_memory(number);
            self.unused.insert(number);
        }
    }

    /// True if the chunk had no memory.
    fn give_memory(&mut self, number: u32) -> bool {
        let had = std::mem::replace(&mut self.chunks[number as usize].has_memory, true);
        self.chunks_with_memory += u64::from(!had);
        !had
    }

    fn take_memory(&mut self, number: u32) {
        let had = std::mem::replace(&mut self.chunks[number as usize].has_memory, false);
        self.chunks_with_memory -= u64::from(had);
    }

    fn open_chunk(&mut self, units: u32) -> Result<u32, SlotError> {
        let unused = || self.unused.pop_first();
        let number = match self.empty.pop_first().or_else(unused) {
            Some(number) => number,
            None => self.append_chunk()?,
        };
        self.begin_chunk(number, units);
        Ok(number)
    }

    fn begin_chunk(&mut self, number: u32, units: u32) {
        let chunk = &mut self.chunks[number as usize];
        chunk.begin(units);
        self.free_bytes += chunk.slot_bytes();
        self.box_bytes += chunk.taken.bytes();
        self.partial[units as usize].insert(number);
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
        let bytes = u64::from(chunk.units) * SLOT_UNIT_BYTES;
        self.used_bytes += bytes;
        self.free_bytes -= bytes;
        if chunk.is_full() {
            self.partial[chunk.units as usize].remove(&number);
        }
        SlotNo(u64::from(number) * u64::from(UNITS_PER_CHUNK) + u64::from(index * chunk.units()))
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
            chunk.units(),
            units,
            "slot {slot:?} freed with another size than it has"
        );
        let (word, bit) = position(slot, units);
        let taken = &mut chunk.taken.words()[word];
        assert!(*taken & bit != 0, "slot {slot:?} freed twice");
        *taken &= !bit;
        chunk.used -= 1;
        let bytes = u64::from(units) * SLOT_UNIT_BYTES;
        self.used_bytes -= bytes;
        self.free_bytes += bytes;
        if chunk.used == 0 {
            self.free_bytes -= chunk.slot_bytes();
            self.box_bytes -= chunk.taken.bytes();
            chunk.end();
            self.partial[units as usize].remove(&number);
            self.empty.insert(number);
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
            self.begin_chunk(number, units);
            self.give_memory(number);
        }
        let chunk = &mut self.chunks[number as usize];
        let last = u64::from((chunk.capacity() - 1) * chunk.units());
        if chunk.units() != units || !within.is_multiple_of(u64::from(units)) || within > last {
            return Err(impossible);
        }
        let (word, bit) = position(slot, units);
        let taken = &mut chunk.taken.words()[word];
        if *taken & bit != 0 {
            return Err(impossible);
        }
        *taken |= bit;
        chunk.used += 1;
        let bytes = u64::from(units) * SLOT_UNIT_BYTES;
        self.used_bytes += bytes;
        self.free_bytes -= bytes;
        if chunk.is_full() {
            self.partial[units as usize].remove(&number);
        }
        Ok(())
    }

    /// Returns all but the lowest `keep` of the empty chunks that still hold memory; the caller must release
    /// their memory before anything else is allocated.
    pub fn take_empty_chunks(&mut self, keep: usize) -> Vec<u32> {
        let mut taken = Vec::with_capacity(self.empty.len().saturating_sub(keep));
        while self.empty.len() > keep
            && let Some(number) = self.empty.pop_last()
        {
            self.take_memory(number);
            self.unused.insert(number);
            taken.push(number);
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

    /// Bytes in slots that are free, in chunks in use: room for content of their sizes.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.free_bytes
    }

    /// Bytes of chunks that hold memory and no content.
    #[must_use]
    pub fn spare_bytes(&self) -> u64 {
        self.empty.len() as u64 * CHUNK_BYTES
    }

    /// Bytes of chunks that are not in use and hold no memory.
    #[must_use]
    pub fn unused_bytes(&self) -> u64 {
        let beyond = u64::from(self.chunk_limit).saturating_sub(self.chunks.len() as u64);
        (self.unused.len() as u64 + beyond) * CHUNK_BYTES
    }

    /// Bytes of chunks that hold memory.
    #[must_use]
    pub fn chunk_bytes(&self) -> u64 {
        self.chunks_with_memory * CHUNK_BYTES
    }

    /// Memory of this process that the record of slots takes, in bytes; what sets take is an estimate.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        let partial = self.partial.iter().map(BTreeSet::len).sum::<usize>();
        let entries = (partial + self.empty.len() + self.unused.len()) as u64;
        let chunks = (self.chunks.capacity() * size_of::<Chunk>()) as u64;
        let sets = (self.partial.len() * size_of::<BTreeSet<u32>>()) as u64;
        chunks + self.box_bytes + sets + entries * SET_ENTRY_BYTES
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
                assert!(slots.chunk_bytes() >= slots.used_bytes() + slots.free_bytes());
            }
        }
        let mut rebuilt = Slots::new(40);
        for (at, bytes) in &live {
            rebuilt.adopt(SlotNo(at / SLOT_UNIT_BYTES), *bytes).unwrap();
        }
        assert_eq!(rebuilt.used_bytes(), slots.used_bytes());
        assert_eq!(rebuilt.free_bytes(), slots.free_bytes());
        assert_eq!(rebuilt.box_bytes, slots.box_bytes);
        for (at, bytes) in live {
            rebuilt.free(SlotNo(at / SLOT_UNIT_BYTES), bytes);
        }
        assert_eq!(rebuilt.used_bytes(), 0);
        assert_eq!((rebuilt.free_bytes(), rebuilt.box_bytes), (0, 0));
    }

    #[test]
    fn record_of_slots_takes_a_small_part_of_what_they_hold_whatever_their_size() {
        // Pages that compress well have small slots, and chunks of them have boxes.
        for (bytes, share_max) in [(4_100, 0.001), (1_955, 0.001), (300, 0.005), (64, 0.005)] {
            let mut slots = Slots::new(4_000);
            while slots.allocate(bytes).is_ok() {}
            #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
            let share = slots.metadata_bytes() as f64 / slots.chunk_bytes() as f64;
            assert!(share < share_max, "{bytes}: {share}");
        }
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

    #[test]
    fn new_chunk_is_one_that_holds_memory_already_if_there_is_any() {
        let mut slots = Slots::new(8);
        // A chunk each.
        let taken: Vec<_> = (1..=4)
            .map(|k| slots.allocate(k * 1_000).unwrap())
            .collect();
        slots.free(taken[0].slot, 1_000);
        assert_eq!(slots.take_empty_chunks(0), [0]);
        slots.free(taken[2].slot, 3_000);
        assert_eq!(slots.spare_bytes(), CHUNK_BYTES);
        assert_eq!(slots.unused_bytes(), 5 * CHUNK_BYTES);
        let next = slots.allocate(4_100).unwrap();
        assert_eq!(
            (next.slot.chunk(), next.new_chunk),
            (2, None),
            "it is charged already"
        );
        assert_eq!(slots.spare_bytes(), 0);
        // Only now one that needs memory, which is not to be had.
        let refused = slots.allocate(500).unwrap();
        assert_eq!(refused.new_chunk, Some(0));
        slots.chunk_without_memory(&refused, 500);
        assert_eq!(
            (slots.spare_bytes(), slots.unused_bytes()),
            (0, 5 * CHUNK_BYTES)
        );
        assert_eq!(slots.chunk_bytes(), 3 * CHUNK_BYTES);
    }
}
