// SPDX-License-Identifier: Apache-2.0
//! The arena against a naive model, at its boundaries, and under many threads.

mod boundaries;
mod fit;
mod naive;
mod random;
mod threads;
mod wrong_frees;

use super::{Arena, ArenaSettings, Fit};

/// An arena over `first..=last`.
fn arena(fit: Fit, quantum: u64, cached_quanta_max: u32, span: (u64, u64)) -> Arena {
    let arena = Arena::new(ArenaSettings {
        quantum,
        fit,
        cached_quanta_max,
    });
    arena.add(span.0, span.1).unwrap();
    arena.check().unwrap();
    arena
}

/// Pseudo-random numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `limit`.
    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn below_usize(&mut self, limit: usize) -> usize {
        usize::try_from(self.below(limit as u64)).unwrap()
    }
}
