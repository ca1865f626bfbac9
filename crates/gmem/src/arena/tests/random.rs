// SPDX-License-Identifier: Apache-2.0
//! Random calls with every constraint, each checked against the naive twin.

use super::super::{Constraints, Fit};
use super::naive::Twins;
use pagetide_random::SplitMix64;

/// Integers of the arenas: few, so that they are full most of the time, but enough for chunks of three
/// sizes.
const INTEGERS: u64 = 576;

fn constraints(random: &mut SplitMix64, base: u64, quantum: u64) -> Constraints {
    let mut c = Constraints::default();
    if random.below(2) == 0 {
        c.align = quantum << random.below(5);
        c.phase = random.below(c.align / quantum) * quantum;
    }
    if random.below(3) == 0 {
        c.no_cross = quantum << random.below(6);
    }
    if random.below(3) == 0 {
        c.min = base + random.below(INTEGERS);
    }
    if random.below(3) == 0 {
        c.last = base + random.below(INTEGERS);
    }
    if random.below(3) == 0 {
        c.guard = random.below(3 * quantum);
    }
    c
}

/// 55 of 100 calls allocate (a quarter of them unconstrained), the rest free: the loop of NetBSD's
/// test.
fn run(seed: u64, fit: Fit, cached: u32, base: u64, quantum: u64) {
    let mut random = SplitMix64::new(seed);
    let last = base + (INTEGERS - 1);
    let middle = base + INTEGERS / 2;
    // Two spans with a hole, two adjacent ones, or one.
    let spans = match random.below(3) {
        0 => vec![(base, middle - quantum - 1), (middle, last)],
        1 => vec![(middle, last), (base, middle - 1)],
        _ => vec![(base, last)],
    };
    let mut twins = Twins::new(fit, quantum, cached, &spans);
    for _ in 0..150 {
        let quanta_max = if random.below(4) == 0 { 60 } else { 4 };
        let size = 1 + random.below(quantum * quanta_max);
        match random.below(100) {
            0..14 => twins.alloc(size, None),
            14..44 => {
                let mut c = constraints(&mut random, base, quantum);
                if c.no_cross > 0 {
                    c.no_cross = c.no_cross.max(size.next_power_of_two().max(quantum));
                }
                twins.alloc(size, Some(&c));
            }
            44..55 => {
                let start = base + random.below(INTEGERS / quantum) * quantum;
                twins.alloc_at(start, size);
            }
            55..57 => twins.arena.reap(),
            _ => {
                if !twins.naive.live.is_empty() {
                    let index = random.index(twins.naive.live.len());
                    twins.free(index);
                }
            }
        }
    }
    twins.finish();
}

#[test]
fn random_calls_give_what_the_model_gives() {
    let places = [
        (0, 1),
        (0x1000, 4),
        (u64::MAX - (INTEGERS - 1), 1),
        (u64::MAX - (INTEGERS - 1), 4),
        (u64::from(u32::MAX) - (INTEGERS - 1), 1),
    ];
    for seed in 0..30 {
        for fit in [Fit::Instant, Fit::First] {
            for cached in [0, 3] {
                for (base, quantum) in places {
                    run(seed, fit, cached, base, quantum);
                }
            }
        }
    }
}
