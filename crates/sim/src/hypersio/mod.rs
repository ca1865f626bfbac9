// SPDX-License-Identifier: Apache-2.0
//! Flavour *hypersio*: what the authors' public program does where it differs from the paper, oddities
//! included, so that results can be compared to the nanosecond.
//!
//! | topic | here |
//! |---|---|
//! | service | each stage takes one request a nanosecond; equal times in the order of a C++ heap ([`heap`]) |
//! | link | a slot is a whole number of nanoseconds, rounded down: 61 at 200 Gb/s |
//! | walk | 50 ns times the *level*, so a 4 KiB page costs less than a 2 MiB one ([`walk`]) |
//! | walk caches | L2 and L3 by guest address, always LRU, looked up together, both always filled |
//! | prefetch | on each request, hit or miss, even without a buffer; a successor once learnt stays ([`predictor`]) |
//! | LFU ties | by `rand()` over the order of a hash map ([`crate::ties`]), if the seed is 0 |
//! | partition | by the low bits of the domain, not of the source |
//!
//! A 1 GiB page is an error here: the program loses the request and then waits for it for ever.

mod heap;
mod predictor;
mod walk;

use std::cell::RefCell;
use std::marker::PhantomData;
use std::rc::Rc;

use crate::config::Config;
use crate::flavour::{Flavour, StageQueue};
use crate::link::Link;
use crate::machine::OneDevice;
use crate::ties::{ProgramRand, TieBreak};

pub(crate) use heap::{ProgramFifo, ProgramHeap};

/// The authors' program, with queues `Q`.
#[derive(Debug)]
pub(crate) struct Hypersio<Q>(PhantomData<Q>);

impl<Q: StageQueue> Flavour for Hypersio<Q> {
    type Queue = Q;
    type Agent = walk::ShortWalk;
    type Predictor = predictor::FirstSeen;
    type Devices = OneDevice<Self>;
    const ONE_A_NANOSECOND: bool = true;
    const HAS_FAULTS: bool = false;
    const HIT_ENDS_EARLY_NS: u64 = 1;

    /// Seed 0 selects the program's own rule.
    fn ties(config: &Config) -> TieBreak {
        match config.seed {
            0 => TieBreak::Program(Rc::new(RefCell::new(ProgramRand::new()))),
            seed => TieBreak::Seed(seed),
        }
    }

    fn link(config: &Config) -> Link {
        Link::new(config.link.packet_bytes * 8 / config.link.gbps, 1)
    }
}
