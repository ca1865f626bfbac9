// SPDX-License-Identifier: Apache-2.0
//! The victim among several entries that are used equally little: a random one, or the one that the
//! authors' program evicts ([`program`], and packed into words for small sets in [`small_lfu`]).

mod program;
mod small_lfu;

use std::cell::RefCell;
use std::rc::Rc;

pub(crate) use program::{ProgramRand, ProgramTies};
pub(crate) use small_lfu::{SMALL_WAYS, SmallLfu};

/// How a run breaks ties.
#[derive(Clone, Debug)]
pub(crate) enum TieBreak {
    /// At random, by a seed.
    Seed(u64),
    /// As the authors' program does.
    Program(Rc<RefCell<ProgramRand>>),
}

/// How one cache breaks them.
#[derive(Debug)]
pub(crate) enum Ties {
    /// At random.
    Random(SplitMix),
    /// As the authors' program does.
    Program(ProgramTies),
}

impl Ties {
    /// Ties of a cache of `sets` sets.
    pub(crate) fn new(rule: &TieBreak, sets: usize) -> Self {
        match rule {
            TieBreak::Seed(seed) => Self::Random(SplitMix(*seed)),
            TieBreak::Program(rand) => Self::Program(ProgramTies::new(rand, sets)),
        }
    }
}

/// SplitMix64, chosen because it is a dozen operations and identical on every machine; its quality matters
/// little for a choice among a few ways.
#[derive(Debug)]
pub(crate) struct SplitMix(u64);

impl SplitMix {
    /// A number below `count`.
    #[inline]
    pub(crate) fn choose(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        #[expect(clippy::cast_possible_truncation, reason = "less than `count`")]
        let chosen = ((u128::from(z) * count as u128) >> 64) as usize;
        chosen
    }
}
