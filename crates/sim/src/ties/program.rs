// SPDX-License-Identifier: Apache-2.0
//! How the program breaks ties among the least used: `rand()`, never seeded, over the order in which a C++
//! hash map happens to hold the keys of a set.
//!
//! Both are the same on every machine of its kind, so its choices can be reproduced exactly: the additive
//! feedback generator behind `rand()`, and the map's list, where a key goes to the front of its bucket, and
//! a bucket that was empty to the front of the list. The map grows to the next of a series of primes and
//! puts its keys into the new buckets in the old order.

use std::cell::RefCell;
use std::rc::Rc;

/// Bucket counts of a growing map.
pub(super) const BUCKETS: [u64; 14] = [
    13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10_273, 20_753, 42_043, 85_229, 172_933,
];

/// Words of the generator's state.
const WORDS: usize = 31;
/// Distance of the second word that is added.
const SECOND_WORD: usize = 28;
/// Numbers that are discarded at the start.
const THROWN_AWAY: usize = 310;

/// `rand()` of the GNU C library, in a program that never calls `srand`.
#[derive(Debug)]
pub(crate) struct ProgramRand {
    words: [u32; WORDS],
    at: usize,
}

impl ProgramRand {
    /// The generator at the start of the program.
    pub(crate) fn new() -> Self {
        let mut words = [1_u32; WORDS];
        for n in 1..WORDS {
            let next = u64::from(words[n - 1]) * 16_807 % 0x7fff_ffff;
            let next = next as u32;
            words[n] = next;
        }
        // Word n is the sum of words n - 31 and n - 3; the first three repeat.
        let mut rand = Self { words, at: 3 };
        for _ in 0..THROWN_AWAY {
            rand.next();
        }
        rand
    }

    pub(super) fn next(&mut self) -> u32 {
        let other = (self.at + SECOND_WORD) % WORDS;
        let sum = self.words[self.at].wrapping_add(self.words[other]);
        self.words[self.at] = sum;
        self.at = (self.at + 1) % WORDS;
        sum >> 1
    }
}

/// A key of the map.
#[derive(Clone, Copy, Debug)]
struct Key {
    hash: u64,
    /// Bucket that the hash falls into; stored, because a division for each key of a large set would
    /// dominate a run.
    bucket: u32,
    /// Place in the cache.
    place: u32,
}

/// Keys of one set in the order of the program's map, each with its place in the cache.
#[derive(Clone, Debug, Default)]
struct MapOrder {
    keys: Vec<Key>,
    growths: usize,
}

impl MapOrder {
    fn insert(&mut self, hash: u64, place: u32) {
        // The map grows before it would hold more keys than buckets.
        let full = |growths: usize, len: usize| {
            growths == 0 || len as u64 >= BUCKETS[(growths - 1).min(BUCKETS.len() - 1)]
        };
        if full(self.growths, self.keys.len()) && self.growths < BUCKETS.len() {
            self.growths += 1;
            for key in std::mem::take(&mut self.keys) {
                self.put(key.hash, key.place);
            }
        }
        self.put(hash, place);
    }

    fn put(&mut self, hash: u64, place: u32) {
        let buckets = BUCKETS[self.growths.max(1) - 1];
        #[expect(clippy::cast_possible_truncation, reason = "fewer than 2^32 buckets")]
        let bucket = (hash % buckets) as u32;
        let same = |other: &Key| other.bucket == bucket;
        let at = self.keys.iter().position(same).unwrap_or(0);
        let key = Key {
            hash,
            bucket,
            place,
        };
        self.keys.insert(at, key);
    }

    fn remove(&mut self, place: u32) {
        if let Some(at) = self.position(place) {
            self.keys.remove(at);
        }
    }

    /// Keys are identified by their places: two of them may have the same hash.
    fn position(&self, place: u32) -> Option<usize> {
        self.keys.iter().position(|key| key.place == place)
    }
}

/// The program's choices for one cache.
#[derive(Debug)]
pub(crate) struct ProgramTies {
    rand: Rc<RefCell<ProgramRand>>,
    sets: Vec<MapOrder>,
}

impl ProgramTies {
    /// Ties of a cache of `sets` sets; the program has one `rand()` for all its caches.
    pub(crate) fn new(rand: &Rc<RefCell<ProgramRand>>, sets: usize) -> Self {
        Self {
            rand: Rc::clone(rand),
            sets: vec![MapOrder::default(); sets],
        }
    }

    /// The key with `hash` has come into `set`, at `place`.
    pub(crate) fn enters(&mut self, set: usize, hash: u64, place: u32) {
        self.sets[set].insert(hash, place);
    }

    /// The key at `place` of `set` has gone.
    pub(crate) fn leaves(&mut self, set: usize, place: u32) {
        self.sets[set].remove(place);
    }

    /// The key at `from` is at `to` now.
    pub(crate) fn moves(&mut self, set: usize, from: u32, to: u32) {
        let order = &mut self.sets[set];
        if let Some(at) = order.position(from) {
            order.keys[at].place = to;
        }
    }

    /// The first place in the map's order for which `is_victim` holds.
    pub(crate) fn first(&self, set: usize, is_victim: impl Fn(u32) -> bool) -> Option<u32> {
        let mut places = self.sets[set].keys.iter().map(|key| key.place);
        places.find(|place| is_victim(*place))
    }

    /// The place of the victim among those for which `is_least` holds.
    pub(crate) fn choose(&self, set: usize, is_least: impl Fn(u32) -> bool) -> Option<u32> {
        let least = || {
            let places = self.sets[set].keys.iter().map(|key| key.place);
            places.filter(|place| is_least(*place))
        };
        let count = least().count();
        let chosen = self.rand.borrow_mut().next() as usize % count.max(1);
        least().nth(chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rand_begins_as_an_unseeded_c_program_does() {
        let mut rand = ProgramRand::new();
        let first: Vec<u32> = (0..5).map(|_| rand.next()).collect();
        assert_eq!(
            first,
            [
                1_804_289_383,
                846_930_886,
                1_681_692_777,
                1_714_636_915,
                1_957_747_793
            ]
        );
    }

    #[test]
    fn keys_of_a_map_are_listed_as_the_library_lists_them() {
        // Printed by C++ programs: 0, 13, 1, 14, 26, 5 go into an unordered_map and
        // 13 is erased; then 16 keys, for which the map grows from 13 to 29 buckets.
        let mut order = MapOrder::default();
        for (place, key) in (0..).zip([0, 13, 1, 14, 26, 5]) {
            order.insert(key, place);
        }
        order.remove(1);
        let keys: Vec<u64> = order.keys.iter().map(|key| key.hash).collect();
        assert_eq!(keys, [5, 14, 1, 26, 0]);

        let mut grown = MapOrder::default();
        for n in 0..16 {
            grown.insert(n * n * 37 % 101, 0);
        }
        let keys: Vec<u64> = grown.keys.iter().map(|key| key.hash).collect();
        assert_eq!(
            keys,
            [
                43, 81, 92, 37, 76, 47, 30, 0, 87, 68, 19, 16, 45, 96, 64, 33
            ]
        );
    }
}
