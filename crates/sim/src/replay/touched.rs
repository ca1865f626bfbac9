// SPDX-License-Identifier: Apache-2.0
//! [`TouchedSections`]: the sections touched since the last scan, iterated in order of memory.
//!
//! ```text
//!   words   a bit for each section          …0100 0000 │ 0000 0000 │ 1000 0010…
//!   heads   a bit for each word that has one      1           0           1
//! ```
//! So no sorting is necessary, and untouched sections cost next to nothing: a test of one bit for each
//! 4,096 of them.

use pagetide_addr::SectionNo;

const BITS: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct TouchedSections {
    words: Vec<u64>,
    heads: Vec<u64>,
}

impl TouchedSections {
    /// A section was touched.
    pub(super) fn insert(&mut self, section: SectionNo) {
        let index = section.index();
        let (word, head) = (index / BITS, index / BITS / BITS);
        if self.words.len() <= word {
            self.heads.resize(head + 1, 0);
            self.words.resize((head + 1) * BITS, 0);
        }
        self.words[word] |= 1 << (index % BITS);
        self.heads[head] |= 1 << (word % BITS);
    }

    /// Returns all of them, in order, and removes them.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = SectionNo> + '_ {
        // Each head has 64 words.
        let parts = self.heads.iter_mut().zip(self.words.chunks_mut(BITS));
        parts.enumerate().flat_map(|(at, (head, words))| {
            Bits(std::mem::take(head)).flat_map(move |word| {
                let first = (at * BITS + word) * BITS;
                let bits = Bits(std::mem::take(&mut words[word]));
                bits.map(move |bit| SectionNo((first + bit) as u64))
            })
        })
    }
}

/// Numbers of the bits that are set, lowest first.
struct Bits(u64);

impl Iterator for Bits {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let lowest = self.0.trailing_zeros();
        self.0 &= self.0 - 1;
        Some(lowest as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn touched_sections_come_once_each_in_order_and_then_no_more(
            rounds in proptest::collection::vec(
                proptest::collection::vec(0_u64..20_000, 0..200), 1..5),
        ) {
            let mut touched = TouchedSections::default();
            for round in rounds {
                let sections: BTreeSet<SectionNo> = round.into_iter().map(SectionNo).collect();
                sections.iter().for_each(|section| touched.insert(*section));
                prop_assert!(touched.drain().eq(sections));
            }
            prop_assert_eq!(touched.drain().count(), 0);
        }
    }
}
