// SPDX-License-Identifier: Apache-2.0
//! The order of the program's map ([`super::program`]) for a cache of one large set, the context cache: a list in
//! blocks, so that no operation looks at all keys.
//!
//! ```text
//!   first ─► [7 3 9 …]  ◄─► [4 1 …]  ◄─► [8 2 0 …]      up to 64 keys a block, each with the block it is in
//!             counts 0: 3    0: 1         0: 7          keys of a block by use count
//!             counts 1: 9    …
//!   heads     bucket ─► its first key
//! ```
//! A key goes in front of the first key of its bucket, or to the front of all. The victim is the n-th of the keys
//! with the least count: blocks before it are passed by their counts. These are kept up to date only from the first
//! victim on ([`BlockOrder::count`]), as a cache that is large enough needs none.

use std::cell::RefCell;
use std::rc::Rc;

use super::program::{BUCKETS, ProgramRand};

/// Most keys of a block.
const BLOCK_KEYS: usize = 64;
/// Use counts are below this.
const COUNTS: usize = 16;
/// No key, or no block.
const NONE: u32 = u32::MAX;

/// Consecutive keys.
#[derive(Clone, Debug)]
struct Block {
    keys: [u32; BLOCK_KEYS],
    len: usize,
    counts: [u8; COUNTS],
    before: u32,
    after: u32,
}

impl Block {
    const EMPTY: Self = Self {
        keys: [NONE; BLOCK_KEYS],
        len: 0,
        counts: [0; COUNTS],
        before: NONE,
        after: NONE,
    };

    fn keys(&self) -> &[u32] {
        &self.keys[..self.len]
    }

    /// Where `key` is, which is in the block.
    fn position(&self, key: u32) -> usize {
        let at = self.keys().iter().position(|other| *other == key);
        at.unwrap_or(self.len)
    }

    fn insert(&mut self, at: usize, key: u32) {
        self.keys.copy_within(at..self.len, at + 1);
        self.keys[at] = key;
        self.len += 1;
    }

    fn remove(&mut self, at: usize) {
        self.keys.copy_within(at + 1..self.len, at);
        self.len -= 1;
    }

    // Before keys are counted the numbers mean nothing and may wrap.

    fn add(&mut self, count: usize) {
        self.counts[count] = self.counts[count].wrapping_add(1);
    }

    fn subtract(&mut self, count: usize) {
        self.counts[count] = self.counts[count].wrapping_sub(1);
    }

    fn count(&mut self, count_of: &impl Fn(u32) -> usize) {
        self.counts = [0; COUNTS];
        for key in &self.keys[..self.len] {
            self.counts[count_of(*key)] += 1;
        }
    }
}

/// What is known of a key.
#[derive(Clone, Copy, Debug, Default)]
struct Key {
    hash: u32,
    bucket: u32,
    block: u32,
}

/// Keys, which are small numbers, in the order of the program's map.
#[derive(Debug)]
pub(crate) struct BlockOrder {
    rand: Rc<RefCell<ProgramRand>>,
    growths: usize,
    len: usize,
    first: u32,
    blocks: Vec<Block>,
    free: Vec<u32>,
    /// The first key of each bucket.
    heads: Vec<u32>,
    keys: Vec<Key>,
}

impl BlockOrder {
    /// No key; the program has one `rand()` for all its caches.
    pub(crate) fn new(rand: &Rc<RefCell<ProgramRand>>) -> Self {
        Self {
            rand: Rc::clone(rand),
            growths: 0,
            len: 0,
            first: NONE,
            blocks: Vec::new(),
            free: Vec::new(),
            heads: Vec::new(),
            keys: Vec::new(),
        }
    }

    /// `key` with `hash` comes in, with a use count of 0. `count_of` says the counts of the others.
    pub(crate) fn enters(&mut self, hash: u32, key: u32, count_of: &impl Fn(u32) -> usize) {
        // The map grows before it would hold more keys than buckets.
        let is_full = self.len as u64 >= self.heads.len() as u64;
        if is_full && self.growths < BUCKETS.len() {
            self.grow(count_of);
        }
        let at = key as usize;
        if self.keys.len() <= at {
            self.keys.resize(at + 1, Key::default());
        }
        self.keys[at].hash = hash;
        let block = self.put(key, count_of);
        self.blocks[block as usize].add(0);
    }

    /// Gives the map more buckets: its keys are put into them in their order.
    #[cold]
    fn grow(&mut self, count_of: &impl Fn(u32) -> usize) {
        let mut all = Vec::with_capacity(self.len);
        let mut block = self.first;
        while let Some(of_block) = self.blocks.get(block as usize) {
            all.extend_from_slice(of_block.keys());
            block = of_block.after;
        }
        #[expect(clippy::cast_possible_truncation, reason = "a table of small numbers")]
        let buckets = BUCKETS[self.growths] as usize;
        self.growths += 1;
        self.heads.clear();
        self.heads.resize(buckets, NONE);
        self.blocks.clear();
        self.free.clear();
        self.first = NONE;
        self.len = 0;
        for key in all {
            let block = self.put(key, count_of);
            self.blocks[block as usize].add(count_of(key));
        }
    }

    /// Puts `key`, whose hash is known, in its place, and returns its block, which has not counted it yet.
    fn put(&mut self, key: u32, count_of: &impl Fn(u32) -> usize) -> u32 {
        #[expect(clippy::cast_possible_truncation, reason = "fewer than 2^32 buckets")]
        let bucket = self.keys[key as usize].hash % self.heads.len() as u32;
        let head = std::mem::replace(&mut self.heads[bucket as usize], key);
        let (block, at) = if head == NONE {
            (self.front(), 0)
        } else {
            let block = self.keys[head as usize].block;
            (block, self.blocks[block as usize].position(head))
        };
        let (block, at) = self.with_room(block, at, count_of);
        self.blocks[block as usize].insert(at, key);
        let of_key = &mut self.keys[key as usize];
        (of_key.bucket, of_key.block) = (bucket, block);
        self.len += 1;
        block
    }

    /// The first block.
    fn front(&mut self) -> u32 {
        if self.first == NONE {
            self.first = self.take();
        }
        self.first
    }

    fn take(&mut self) -> u32 {
        if let Some(block) = self.free.pop() {
            self.blocks[block as usize] = Block::EMPTY;
            return block;
        }
        self.blocks.push(Block::EMPTY);
        #[expect(clippy::cast_possible_truncation, reason = "no more than keys")]
        let block = (self.blocks.len() - 1) as u32;
        block
    }

    /// The same place after a full block was split.
    fn with_room(
        &mut self,
        block: u32,
        at: usize,
        count_of: &impl Fn(u32) -> usize,
    ) -> (u32, usize) {
        const HALF: usize = BLOCK_KEYS / 2;
        if self.blocks[block as usize].len < BLOCK_KEYS {
            return (block, at);
        }
        let new = self.take();
        let old = &mut self.blocks[block as usize];
        let mut upper = Block::EMPTY;
        upper.keys[..HALF].copy_from_slice(&old.keys[HALF..]);
        upper.len = HALF;
        (upper.before, upper.after) = (block, old.after);
        upper.count(count_of);
        old.len = HALF;
        old.count(count_of);
        let after = std::mem::replace(&mut old.after, new);
        if let Some(after) = self.blocks.get_mut(after as usize) {
            after.before = new;
        }
        for key in upper.keys() {
            self.keys[*key as usize].block = new;
        }
        self.blocks[new as usize] = upper;
        match at {
            0..=HALF => (block, at),
            _ => (new, at - HALF),
        }
    }

    /// `key`, whose use count is `count`, goes.
    pub(crate) fn leaves(&mut self, key: u32, count: usize) {
        let Key { bucket, block, .. } = self.keys[key as usize];
        let of_block = &mut self.blocks[block as usize];
        let at = of_block.position(key);
        of_block.remove(at);
        of_block.subtract(count);
        let (next, after) = (of_block.keys().get(at).copied(), of_block.after);
        let next = next.unwrap_or_else(|| {
            let after = self.blocks.get(after as usize);
            after.map_or(NONE, |after| after.keys[0])
        });
        if self.heads[bucket as usize] == key {
            let is_same = |next: u32| self.keys[next as usize].bucket == bucket;
            let is_head = next != NONE && is_same(next);
            self.heads[bucket as usize] = if is_head { next } else { NONE };
        }
        if self.blocks[block as usize].len == 0 {
            self.drop_block(block);
        }
        self.len -= 1;
    }

    fn drop_block(&mut self, block: u32) {
        let Block { before, after, .. } = self.blocks[block as usize];
        match self.blocks.get_mut(before as usize) {
            Some(before) => before.after = after,
            None => self.first = after,
        }
        if let Some(after) = self.blocks.get_mut(after as usize) {
            after.before = before;
        }
        self.free.push(block);
    }

    /// The use count of `key` was `count` and is one more.
    #[inline]
    pub(crate) fn used(&mut self, key: u32, count: usize) {
        let block = self.keys[key as usize].block;
        let of_block = &mut self.blocks[block as usize];
        of_block.subtract(count);
        of_block.add(count + 1);
    }

    /// Counts all keys again: uses were not told, or counts were halved.
    pub(crate) fn count(&mut self, count_of: &impl Fn(u32) -> usize) {
        for block in &mut self.blocks {
            block.count(count_of);
        }
    }

    /// The victim among the `tied` keys with the count `least`.
    pub(crate) fn choose(
        &self,
        tied: usize,
        least: usize,
        count_of: &impl Fn(u32) -> usize,
    ) -> Option<u32> {
        let mut left = self.draw(tied);
        let mut block = self.first;
        loop {
            let of_block = self.blocks.get(block as usize)?;
            let of_least = usize::from(of_block.counts[least]);
            if left < of_least {
                let keys = of_block.keys().iter().copied();
                return keys.filter(|key| count_of(*key) == least).nth(left);
            }
            left -= of_least;
            block = of_block.after;
        }
    }

    /// What the program's `rand()` chooses among `tied` keys.
    pub(crate) fn draw(&self, tied: usize) -> usize {
        self.rand.borrow_mut().next() as usize % tied.max(1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ties::ProgramTies;

    proptest! {
        #[test]
        fn blocks_are_in_the_order_of_a_plain_list(
            hashes in proptest::collection::vec(any::<u32>(), 400),
            steps in proptest::collection::vec((0..6_u8, 0..400_u32), 1..2500),
        ) {
            let rand = || Rc::new(RefCell::new(ProgramRand::new()));
            let mut blocks = BlockOrder::new(&rand());
            let mut lists = ProgramTies::new(&rand(), 1);
            // The use count of each key that is there.
            let mut counts: Vec<Option<usize>> = vec![None; 400];
            let mut is_counted = false;
            for (step, key) in steps {
                let at = key as usize;
                let old = counts.clone();
                let count_of = |key: u32| old[key as usize].unwrap();
                match (step, counts[at]) {
                    (0..3, None) => {
                        // Few hashes, so that buckets have several keys.
                        let hash = hashes[at] % 900;
                        blocks.enters(hash, key, &count_of);
                        lists.enters(0, hash.into(), key);
                        counts[at] = Some(0);
                    }
                    (3, Some(count)) => {
                        blocks.leaves(key, count);
                        lists.leaves(0, key);
                        counts[at] = None;
                    }
                    (4, _) => {
                        let Some(least) = counts.iter().flatten().min().copied() else {
                            continue;
                        };
                        if !is_counted {
                            blocks.count(&count_of);
                            is_counted = true;
                        }
                        let is_least = |key: u32| count_of(key) == least;
                        let tied = counts.iter().filter(|c| **c == Some(least)).count();
                        prop_assert_eq!(
                            blocks.choose(tied, least, &count_of),
                            lists.choose(0, is_least)
                        );
                    }
                    (_, Some(count)) if count == COUNTS - 2 => {
                        counts.iter_mut().flatten().for_each(|count| *count /= 2);
                        is_counted = false;
                    }
                    (_, Some(count)) => {
                        if is_counted {
                            blocks.used(key, count);
                        }
                        counts[at] = Some(count + 1);
                    }
                    _ => (),
                }
            }
        }
    }
}
