// SPDX-License-Identifier: Apache-2.0
//! Several threads on one arena that is nearly full; a map of owners detects an integer that two
//! threads have.

use pagetide_random::SplitMix64;
use std::sync::atomic::{AtomicU32, Ordering};

use super::super::{Constraints, Fit};
use super::arena;

const QUANTA: u64 = 4096;
const BASE: u64 = 0x10_000;
const QUANTUM: u64 = 16;

/// The owner of each quantum; 0: none.
struct Owners(Vec<AtomicU32>);

impl Owners {
    fn quanta(&self, start: u64, size: u64) -> &[AtomicU32] {
        let index = |address: u64| usize::try_from((address - BASE) / QUANTUM).unwrap();
        &self.0[index(start)..index(start + size)]
    }

    fn change(&self, start: u64, size: u64, from: u32, to: u32) {
        for owner in self.quanta(start, size) {
            assert_eq!(owner.swap(to, Ordering::Relaxed), from, "at {start:#x}");
        }
    }
}

fn hammer(arena: &super::Arena, owners: &Owners, thread: u32) {
    let mut random = SplitMix64::new(u64::from(thread));
    let mut live: Vec<(u64, u64)> = Vec::new();
    for _ in 0..20_000 {
        let quanta_max = if random.below(8) == 0 { 40 } else { 6 };
        let size = (1 + random.below(quanta_max)) * QUANTUM;
        let allocated = match random.below(20) {
            0..9 => arena.alloc(size),
            9 => {
                let constraints = Constraints {
                    align: QUANTUM << random.below(4),
                    guard: QUANTUM * random.below(2),
                    last: BASE + random.below(QUANTA * QUANTUM),
                    ..Constraints::default()
                };
                arena.alloc_with(size, &constraints)
            }
            10 => {
                let start = BASE + QUANTUM * random.below(QUANTA);
                arena.alloc_at(start, size).map(|()| start)
            }
            _ => {
                if !live.is_empty() {
                    let (start, size) = live.swap_remove(random.index(live.len()));
                    owners.change(start, size, thread, 0);
                    arena.free(start, size).unwrap();
                }
                continue;
            }
        };
        if let Ok(start) = allocated {
            owners.change(start, size, 0, thread);
            live.push((start, size));
        }
    }
    // Frees the remaining pieces; those in this thread's magazines stay there.
    for (start, size) in live {
        owners.change(start, size, thread, 0);
        arena.free(start, size).unwrap();
    }
}

#[test]
fn threads_never_share_an_integer_and_leave_nothing_behind() {
    for fit in [Fit::Instant, Fit::First] {
        let mut arena = arena(fit, QUANTUM, 8, (BASE, BASE + QUANTA * QUANTUM - 1));
        arena.doubts_frees = false; // it would hold every lock at each free
        let owners = Owners((0..QUANTA).map(|_| AtomicU32::new(0)).collect());
        std::thread::scope(|scope| {
            for thread in 1..=4 {
                let (arena, owners) = (&arena, &owners);
                scope.spawn(move || hammer(arena, owners, thread));
            }
        });
        arena.check().unwrap();
        // All of it at once: only possible if the pieces left in the threads' magazines are found.
        assert_eq!(arena.alloc(QUANTA * QUANTUM), Ok(BASE));
        assert_eq!(arena.usage().foreign_frees, 0);
    }
}
