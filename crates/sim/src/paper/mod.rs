// SPDX-License-Identifier: Apache-2.0
//! Flavour *paper*: the model as HyperTRIO II-A, III and IV-C describe it.
//!
//! | topic | here |
//! |---|---|
//! | service | a stage serves every ready request, at its time; equal times in order of arrival ([`queue`]) |
//! | link | a slot is 61.68 ns at 200 Gb/s, exact in the long run |
//! | walk | two-dimensional, 24 accesses for 4 and 4 levels ([`walk`]) |
//! | walk caches | L1 to L4 and an optional IOTLB, all looked up together |
//! | prefetch | on a miss in the device; the predictor follows the traffic ([`predictor`]) |
//! | partition | by the source |
//! | not in the paper | a nested TLB ([`nested_tlb`]), several devices |
//!
//! Where the text leaves a choice:
//! - *Cost of a look-up.* A hit behind PCIe costs `walk_cache_hit_ns`, also when it only shortens the walk.
//!   A miss costs nothing of its own: the walk starts meanwhile.
//! - *Filter.* No prefetch is suppressed because its translation is present or under way already. The
//!   device sends a source id and not addresses (III), so it has nothing to compare; the history reader is
//!   a state machine without a memory of its requests.
//! - *Merging.* Each miss walks for itself, as the text has no structure in which a second miss of a page
//!   could wait for the first.

mod nested_tlb;
mod predictor;
mod queue;
mod walk;

use crate::config::Config;
use crate::flavour::Flavour;
use crate::link::Link;
use crate::machine::{ManyDevices, OneDevice};

pub(crate) use nested_tlb::TABLES;

/// The paper's text, for one device.
#[derive(Debug)]
pub(crate) struct Paper;

/// The same for several devices.
#[derive(Debug)]
pub(crate) struct PaperOfMany;

impl Flavour for Paper {
    type Queue = queue::TimedQueue;
    type Agent = walk::NestedWalker;
    type Predictor = predictor::Successors;
    type Devices = OneDevice<Self>;
    const ONE_A_NANOSECOND: bool = false;
    const HAS_FAULTS: bool = true;
    const HIT_ENDS_EARLY_NS: u64 = 0;

    fn link(config: &Config) -> Link {
        Link::new(config.link.packet_bytes * 8, config.link.gbps)
    }
}

impl Flavour for PaperOfMany {
    type Queue = <Paper as Flavour>::Queue;
    type Agent = <Paper as Flavour>::Agent;
    type Predictor = <Paper as Flavour>::Predictor;
    type Devices = ManyDevices<Self>;
    const ONE_A_NANOSECOND: bool = Paper::ONE_A_NANOSECOND;
    const HAS_FAULTS: bool = Paper::HAS_FAULTS;
    const HIT_ENDS_EARLY_NS: u64 = Paper::HIT_ENDS_EARLY_NS;

    fn link(config: &Config) -> Link {
        Paper::link(config)
    }
}
