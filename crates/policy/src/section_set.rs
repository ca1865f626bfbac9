// SPDX-License-Identifier: Apache-2.0
//! [`SectionSet`]: a set of sections, one bit each.
//!
//! For a VM whose memory begins at 0 that is 1.5 KiB per 16 GiB, whatever its content; sections far apart cost
//! some 30 bytes for each 64 of which at least one is in the set. See `chunks.rs`.

use crate::chunks::{Chunks, push, split};
use pagetide_addr::SectionNo;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct SectionSet {
    chunks: Chunks,
    /// By place of the chunk.
    bits: Vec<u64>,
    len: u64,
}

impl SectionSet {
    /// Sections in the set.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Memory it takes, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        (self.bits.capacity() * size_of::<u64>()) as u64 + self.chunks.bytes()
    }

    #[inline]
    pub(crate) fn contains(&self, section: SectionNo) -> bool {
        let (number, offset) = split(section);
        self.len > 0
            && self
                .chunks
                .find(number)
                .is_some_and(|place| self.bits[place] >> offset & 1 == 1)
    }

    /// True if it was not in the set.
    pub(crate) fn insert(&mut self, section: SectionNo) -> bool {
        let (number, offset) = split(section);
        let place = self.chunks.find(number).unwrap_or_else(|| {
            let place = self.chunks.add(number);
            if place == self.bits.len() {
                push(&mut self.bits, 0);
            }
            place
        });
        let is_new = self.bits[place] >> offset & 1 == 0;
        self.bits[place] |= 1 << offset;
        self.len += u64::from(is_new);
        is_new
    }

    /// True if it was in the set.
    pub(crate) fn remove(&mut self, section: SectionNo) -> bool {
        let (number, offset) = split(section);
        if self.len == 0 {
            return false;
        }
        let Some(place) = self.chunks.find(number) else {
            return false;
        };
        let bits = &mut self.bits[place];
        if *bits >> offset & 1 == 0 {
            return false;
        }
        *bits &= !(1 << offset);
        if *bits == 0 {
            self.chunks.remove(place);
        }
        self.len -= 1;
        true
    }

    /// All of them, unordered.
    pub(crate) fn iter(&self) -> impl Iterator<Item = SectionNo> + '_ {
        // A free place has no bits.
        self.bits.iter().enumerate().flat_map(move |(place, bits)| {
            let is_in = move |offset: &usize| *bits >> offset & 1 == 1;
            (0..crate::chunks::CHUNK)
                .filter(is_in)
                .map(move |offset| self.chunks.section(place, offset))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;
    use std::collections::BTreeSet;

    #[test]
    fn set_equals_a_tree_over_random_changes_near_and_far() {
        let mut random = SplitMix64::new(11);
        let (mut set, mut model) = (SectionSet::default(), BTreeSet::new());
        for _ in 0..20_000 {
            let section = SectionNo([0, 1 << 40][random.index(2)] + random.below(300));
            if random.below(2) == 0 {
                assert_eq!(set.insert(section), model.insert(section));
            } else {
                assert_eq!(set.remove(section), model.remove(&section));
            }
            assert_eq!(set.len(), model.len() as u64);
            let other = SectionNo(random.below(300));
            assert_eq!(set.contains(other), model.contains(&other));
        }
        let all: BTreeSet<SectionNo> = set.iter().collect();
        assert_eq!(all, model);
        assert_eq!(set.iter().count(), model.len());
    }

    #[test]
    fn set_of_a_vm_of_16_gib_takes_less_than_4_kib() {
        let mut set = SectionSet::default();
        (0..8_192).step_by(40).map(SectionNo).for_each(|section| {
            set.insert(section);
        });
        assert!(set.bytes() < 4 << 10, "{}", set.bytes());
    }
}
