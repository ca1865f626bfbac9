// SPDX-License-Identifier: Apache-2.0
//! The victim among several entries that are used equally little: a random one, or the one that the
//! authors' program evicts ([`program`]; for one large set [`block_order`]). For small sets both are packed into words, together with the counts
//! ([`packed_lfu`], [`small_lfu`]).

mod block_order;
mod packed_lfu;
mod program;
mod small_lfu;

use std::cell::RefCell;
use std::rc::Rc;

use pagetide_random::SplitMix64;

pub(crate) use block_order::BlockOrder;
pub(crate) use packed_lfu::{PACKED_WAYS, PackedLfu};
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
    Random(SplitMix64),
    /// As the authors' program does.
    Program(ProgramTies),
}

impl Ties {
    /// Ties of a cache of `sets` sets.
    pub(crate) fn new(rule: &TieBreak, sets: usize) -> Self {
        match rule {
            TieBreak::Seed(seed) => Self::Random(SplitMix64::new(*seed)),
            TieBreak::Program(rand) => Self::Program(ProgramTies::new(rand, sets)),
        }
    }
}
