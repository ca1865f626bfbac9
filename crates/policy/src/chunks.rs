// SPDX-License-Identifier: Apache-2.0
//! [`Chunks`]: a place for each 64 consecutive sections, so that data of sections is kept in vectors.
//!
//! RAM consists of long pieces, mostly one that starts at 0; but memory plugged in later may be
//! anywhere. So a section is found in two steps:
//!
//! ```text
//!   section = 64 × number + offset          directory, by number             vector of the owner's
//!                                       ┌ low   a vector of places  ┐        ┌──────────┐
//!                                       └ far   a hash table        ┘ ──►    │ place 0  │ 64 entries,
//!                                                                            │ place 1  │ or 64 bits
//! ```
//! A directory of low numbers is 4 bytes for 64 sections up to the highest; far ones, from 2 TiB on, take some
//! 20 bytes each. Places of removed chunks are reused, the last one first.

use pagetide_addr::SectionNo;
use rustc_hash::FxHashMap;

/// Sections of a chunk.
pub(crate) const CHUNK: usize = 64;
const CHUNK_SECTIONS: u64 = CHUNK as u64;

/// Numbers below this are found in a vector, which is 64 KiB at most: 2 TiB of addresses.
const LOW_NUMBERS: u64 = 1 << 14;
/// In the vector: no such chunk.
const NOWHERE: u32 = u32::MAX;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Chunks {
    low: Vec<u32>,
    far: FxHashMap<u64, u32>,
    /// Number of the chunk at each place; at a free place, its previous one.
    numbers: Vec<u64>,
    free: Vec<u32>,
}

/// Appends to a vector that grows by an eighth instead of doubling, and so never wastes more than
/// that.
pub(crate) fn push<T>(vector: &mut Vec<T>, value: T) {
    if vector.len() == vector.capacity() {
        vector.reserve_exact(vector.len() / 8 + 8);
    }
    vector.push(value);
}

/// Number of the chunk of a section, and where in it the section is.
pub(crate) fn split(section: SectionNo) -> (u64, usize) {
    // An offset is below 64.
    let offset = usize::try_from(section.0 % CHUNK_SECTIONS).unwrap_or(0);
    (section.0 / CHUNK_SECTIONS, offset)
}

impl Chunks {
    /// Place of the chunk with this number.
    #[inline]
    pub(crate) fn find(&self, number: u64) -> Option<usize> {
        let place = match usize::try_from(number) {
            Ok(index) if number < LOW_NUMBERS => *self.low.get(index)?,
            _ => *self.far.get(&number)?,
        };
        (place != NOWHERE).then_some(place as usize)
    }

    /// Assigns a place to the chunk with this number, which has none: a free place, or one after all
    /// others.
    ///
    /// # Panics
    /// If there are more than 2^32 - 1 chunks, half a zettabyte of memory.
    pub(crate) fn add(&mut self, number: u64) -> usize {
        let place = self.free.pop().unwrap_or_else(|| {
            let fresh = u32::try_from(self.numbers.len()).unwrap_or(NOWHERE);
            assert!(fresh != NOWHERE, "too many sections to remember");
            push(&mut self.numbers, number);
            fresh
        });
        self.numbers[place as usize] = number;
        match usize::try_from(number) {
            Ok(index) if number < LOW_NUMBERS => {
                if self.low.len() <= index {
                    self.low.reserve_exact(index + 1 - self.low.len());
                    self.low.resize(index + 1, NOWHERE);
                }
                self.low[index] = place;
            }
            _ => {
                self.far.insert(number, place);
            }
        }
        place as usize
    }

    /// Removes the chunk at `place`.
    pub(crate) fn remove(&mut self, place: usize) {
        let number = self.numbers[place];
        let place = match usize::try_from(number) {
            Ok(index) if number < LOW_NUMBERS => std::mem::replace(&mut self.low[index], NOWHERE),
            _ => self.far.remove(&number).unwrap_or(NOWHERE),
        };
        debug_assert!(place != NOWHERE, "chunk {number} is not there");
        self.free.push(place);
    }

    /// The section at `offset` of the chunk at `place`.
    #[inline]
    pub(crate) fn section(&self, place: usize, offset: usize) -> SectionNo {
        SectionNo(self.numbers[place] * CHUNK_SECTIONS + offset as u64)
    }

    /// Memory it takes, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let far = self.far.capacity() * (size_of::<(u64, u32)>() + 1) * 8 / 7;
        let places = (self.low.capacity() + self.free.capacity()) * size_of::<u32>();
        (far + places + self.numbers.capacity() * size_of::<u64>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;
    use std::collections::BTreeMap;

    #[test]
    fn chunks_are_found_where_they_were_put_near_and_far_and_places_are_used_again() {
        let mut random = SplitMix64::new(5);
        let mut chunks = Chunks::default();
        let mut model: BTreeMap<u64, usize> = BTreeMap::new();
        for _ in 0..4_000 {
            let number = [0, LOW_NUMBERS - 10, 1 << 37][random.index(3)] + random.below(20);
            assert_eq!(chunks.find(number), model.get(&number).copied());
            if let Some(place) = model.remove(&number) {
                assert_eq!(chunks.section(place, 9), SectionNo(number * 64 + 9));
                chunks.remove(place);
            } else {
                let place = chunks.add(number);
                assert!(model.values().all(|other| *other != place));
                model.insert(number, place);
            }
        }
        assert!(chunks.numbers.len() <= 60, "{}", chunks.numbers.len());
        assert!(chunks.bytes() < 80 << 10, "{}", chunks.bytes());
    }

    #[test]
    fn section_is_in_the_chunk_of_its_number_at_its_offset() {
        for section in [0, 63, 64, u64::MAX].map(SectionNo) {
            let (number, offset) = split(section);
            assert_eq!(number * 64 + offset as u64, section.0);
            assert!(offset < CHUNK);
        }
    }
}
