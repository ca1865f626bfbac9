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
