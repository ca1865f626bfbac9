// SPDX-License-Identifier: Apache-2.0
//! An arena beside an exhaustively searched list of allocations: after each call both must agree.

use super::super::{Arena, ArenaError, Constraints, Fit};

/// An allocation of one caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Live {
    pub start: u64,
    pub size: u64,
    pub guard: u64,
    pub constrained: bool,
}

/// Arithmetic that cannot overflow.
fn wide(n: u64) -> i128 {
    i128::from(n)
}

/// The naive model.
pub(super) struct Naive {
    quantum: u64,
    spans: Vec<(u64, u64)>,
    pub live: Vec<Live>,
}

impl Naive {
    fn round(&self, n: u64) -> u64 {
        n.next_multiple_of(self.quantum)
    }

    /// Whether all of it is in the arena (even across adjacent spans) and unallocated.
    fn is_free(&self, first: i128, last: i128) -> bool {
        let inside: i128 = self
            .spans
            .iter()
            .map(|&(from, to)| (last.min(wide(to)) - first.max(wide(from)) + 1).max(0))
            .sum();
        let apart = |live: &Live| {
            let from = wide(live.start) - wide(live.guard);
            let to = wide(live.start) + wide(self.round(live.size)) - 1 + wide(live.guard);
            last < from || to < first
        };
        inside == last - first + 1 && self.live.iter().all(apart)
    }

    /// Whether `start` satisfies everything.
    fn allows(&self, start: u64, size: u64, c: &Constraints) -> bool {
        let (size, guard) = (self.round(size), self.round(c.guard));
        let (first, last) = (wide(start), wide(start) + wide(size) - 1);
        let align = c.align.max(self.quantum);
        start.is_multiple_of(self.quantum)
            && start % align == c.phase % align
            && (c.no_cross == 0 || first / wide(c.no_cross) == last / wide(c.no_cross))
            && first >= wide(c.min)
            && last <= wide(c.last)
            && self.is_free(first - wide(guard), last + wide(guard))
    }

    /// The lowest possible start.
    fn lowest(&self, size: u64, c: &Constraints) -> Option<u64> {
        let mut spans = self.spans.clone();
        spans.sort_unstable();
        let step = usize::try_from(self.quantum).unwrap();
        spans
            .iter()
            .flat_map(|&(first, last)| (first..=last).step_by(step))
            .find(|&start| self.allows(start, size, c))
    }
}

/// An arena and its naive twin.
pub(super) struct Twins {
    pub arena: Arena,
    pub naive: Naive,
    fit: Fit,
    cached_size_max: u64,
}

impl Twins {
    pub(super) fn new(fit: Fit, quantum: u64, cached: u32, spans: &[(u64, u64)]) -> Self {
        let arena = super::arena(fit, quantum, cached, spans[0]);
        for &(first, last) in &spans[1..] {
            arena.add(first, last).unwrap();
        }
        let naive = Naive {
            quantum,
            spans: spans.to_vec(),
            live: Vec::new(),
        };
        Self {
            arena,
            naive,
            fit,
            cached_size_max: u64::from(cached) * quantum,
        }
    }

    /// `alloc`, or `alloc_with` if there are constraints.
    pub(super) fn alloc(&mut self, size: u64, constraints: Option<&Constraints>) {
        let free = Constraints::default();
        let asked = constraints.unwrap_or(&free);
        let result = match constraints {
            Some(constraints) => self.arena.alloc_with(size, constraints),
            None => self.arena.alloc(size),
        };
        let lowest = self.naive.lowest(size, asked);
        match result {
            Ok(start) => {
                assert!(
                    self.naive.allows(start, size, asked),
                    "{size} at {start:#x} for {asked:?} among {:?}",
                    self.naive.live
                );
                if self.fit == Fit::First && self.cached_size_max == 0 {
                    assert_eq!(Some(start), lowest, "first fit is the lowest");
                }
                self.naive.live.push(Live {
                    start,
                    size,
                    guard: self.naive.round(asked.guard),
                    constrained: constraints.is_some(),
                });
            }
            Err(ArenaError::Full { .. }) => assert_eq!(lowest, None, "{size} for {asked:?}"),
            Err(other) => panic!("{other}"),
        }
        self.check();
    }

    pub(super) fn alloc_at(&mut self, start: u64, size: u64) {
        let at = Constraints {
            min: start,
            last: start.saturating_add(self.naive.round(size) - 1),
            ..Constraints::default()
        };
        let possible = self.naive.allows(start, size, &at);
        match self.arena.alloc_at(start, size) {
            Ok(()) => {
                assert!(possible, "{size} at {start:#x} among {:?}", self.naive.live);
                self.naive.live.push(Live {
                    start,
                    size,
                    guard: 0,
                    constrained: true,
                });
            }
            Err(ArenaError::Taken { .. }) => assert!(!possible, "{size} at {start:#x} is free"),
            Err(other) => panic!("{other}"),
        }
        self.check();
    }

    /// Frees allocation number `index`.
    pub(super) fn free(&mut self, index: usize) {
        let live = self.naive.live.swap_remove(index);
        if live.constrained {
            self.arena.free_direct(live.start, live.size).unwrap();
        } else {
            self.arena.free(live.start, live.size).unwrap();
        }
        self.check();
    }

    /// Frees all: the arena must then be as in the beginning.
    pub(super) fn finish(mut self) {
        while !self.naive.live.is_empty() {
            self.free(0);
        }
        self.arena.reap();
        self.check();
        let usage = self.arena.usage();
        assert_eq!((usage.allocated_bytes, usage.cached_bytes), (0, 0));
        assert_eq!(usage.allocated_segments, 0);
    }

    fn check(&self) {
        self.arena.check().unwrap();
        let usage = self.arena.usage();
        let live = self.naive.live.iter();
        let bytes = live.map(|live| self.naive.round(live.size) + 2 * live.guard);
        assert_eq!(usage.allocated_bytes, bytes.sum::<u64>());
        assert_eq!(usage.foreign_frees, 0);
        let all: u64 = self.naive.spans.iter().map(|(a, z)| z - a + 1).sum();
        assert_eq!(
            usage.free_bytes + usage.allocated_bytes + usage.cached_bytes,
            all
        );
        assert!(usage.largest_free_bytes <= usage.free_bytes);
    }
}

const KINDS: [(Fit, u32); 4] = [
    (Fit::Instant, 0),
    (Fit::First, 0),
    (Fit::Instant, 2),
    (Fit::First, 2),
];

#[test]
fn arena_of_six_gives_what_the_model_gives_over_all_sequences_of_five() {
    const CALLS: usize = 7;
    const LENGTH: u32 = 5;
    for (fit, cached) in KINDS {
        for sequence in 0..CALLS.pow(LENGTH) {
            let mut twins = Twins::new(fit, 1, cached, &[(3, 8)]);
            let mut rest = sequence;
            for _ in 0..LENGTH {
                let call = rest % CALLS;
                rest /= CALLS;
                match call {
                    0..3 => twins.alloc(call as u64 + 1, None),
                    3 => twins.alloc_at(5, 2),
                    4 => {
                        let pair = Constraints {
                            align: 2,
                            guard: 1,
                            ..Constraints::default()
                        };
                        twins.alloc(1, Some(&pair));
                    }
                    oldest_or_newest => {
                        let count = twins.naive.live.len();
                        if count > 0 {
                            twins.free(if oldest_or_newest == 5 { 0 } else { count - 1 });
                        }
                    }
                }
            }
            twins.finish();
        }
    }
}
