// SPDX-License-Identifier: Apache-2.0
//! The one source of chance: everything a run does follows from its seed.

use pagetide_random::SplitMix64;

/// The workspace's generator, with what a simulation draws. Seeds of runs that failed once are recorded, so
/// numbers are drawn as they were then: by remainder.
#[derive(Clone, Debug)]
pub struct Random(SplitMix64);

/// How often something happens: once in so many chances; 0 for never.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OneIn(pub u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed ^ 0x7061_6765_7469_6465))
    }

    pub fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0.remainder(end)
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
