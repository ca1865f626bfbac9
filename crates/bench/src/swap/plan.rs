// SPDX-License-Identifier: Apache-2.0
//! What all parts of the bench agree on: which content, which pages, in which orders, on which CPUs.

use crate::fault::{
    content::Kind,
    touch::{Part, Pattern},
};

/// The kinds of content, each in a stand-in of its own.
pub(super) const KINDS: [Kind; 4] = [Kind::Zero, Kind::Same, Kind::Records, Kind::Paper];
/// Orders in which a working set is read again, by their names.
pub(super) const RETOUCHES: [(&str, Pattern); 3] = [
    ("sequential", Pattern::Sequential),
    ("zipf", Pattern::Zipf),
    ("random", Pattern::Random),
];
/// Which pages the vCPU reads, and which the device.
pub(super) const BY_VCPU: Part = Part::First;
pub(super) const BY_DEVICE: Part = Part::Second;
/// Pages of a stand-in of which swap-out is measured: 256 MiB.
pub(super) const OUT_PAGES: u64 = 1 << 16;

/// What CPUs the parts stay on.
#[derive(Clone, Copy)]
pub(super) struct Cpus {
    pub(super) vcpu: usize,
    pub(super) engine: usize,
}
