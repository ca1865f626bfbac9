// SPDX-License-Identifier: Apache-2.0
//! The one source of chance: everything a run does follows from its seed.

/// A splitmix64 generator.
#[derive(Clone, Debug)]
pub struct Random(u64);

/// How often something happens: once in so many chances; 0 for never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OneIn(pub u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x7061_6765_7469_6465)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("below a length")
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    pub fn happens(&mut self, how_often: OneIn) -> bool {
        how_often.0 != 0 && self.below(how_often.0) == 0
    }

    pub fn coin(&mut self) -> bool {
        self.next() & 1 == 1
    }
}
