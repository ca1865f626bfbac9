// SPDX-License-Identifier: Apache-2.0
//! Boundaries: the cases of NetBSD's test program for vmem, at the top of 32 and of 64 bits, and
//! refused arguments.

use super::super::{Arena, ArenaError, ArenaSettings, Constraints, Fit};
use super::arena;

const FITS: [Fit; 2] = [Fit::Instant, Fit::First];

fn within(min: u64, last: u64) -> Constraints {
    Constraints {
        min,
        last,
        ..Constraints::default()
    }
}

#[test]
fn top_of_the_integers_is_allocated_whole_and_not_beyond() {
    for fit in FITS {
        for top in [u64::from(u32::MAX), u64::MAX] {
            let begin = top - 0xff;
            let arena = arena(fit, 1, 0, (begin, top));
            let full = Err(ArenaError::Full { size: 0x101 });
            assert_eq!(arena.alloc_with(0x101, &within(begin, top)), full);
            assert_eq!(arena.alloc_with(0x101, &within(0, u64::MAX)), full);
            let full = Err(ArenaError::Full { size: 0x100 });
            assert_eq!(arena.alloc_with(0x100, &within(begin - 1, top - 1)), full);
            assert_eq!(arena.alloc_with(0x100, &within(begin + 1, top)), full);
            assert_eq!(arena.alloc_with(0x100, &within(begin + 1, u64::MAX)), full);
            assert_eq!(arena.alloc_with(0x100, &within(0, top - 1)), full);
            assert_eq!(arena.alloc_with(0x100, &within(begin, top)), Ok(begin));
            assert_eq!(arena.alloc(1), Err(ArenaError::Full { size: 1 }));
            arena.free(begin, 0x100).unwrap();
            assert_eq!(arena.alloc_with(0x100, &within(0, u64::MAX)), Ok(begin));
            arena.check().unwrap();
        }
    }
}

#[test]
fn bottom_of_the_integers_is_allocated_whole_and_not_beyond() {
    for fit in FITS {
        let arena = arena(fit, 1, 0, (0, 49));
        let full = Err(ArenaError::Full { size: 50 });
        assert_eq!(arena.alloc_with(50, &within(1, 50)), full);
        assert_eq!(arena.alloc_with(50, &within(0, 48)), full);
        assert_eq!(
            arena.alloc_with(51, &within(0, 50)),
            Err(ArenaError::Full { size: 51 })
        );
        assert_eq!(arena.alloc_with(50, &within(0, 49)), Ok(0));
        arena.free(0, 50).unwrap();
        assert_eq!(arena.alloc(50), Ok(0));
    }
}

#[test]
fn all_integers_are_one_arena() {
    for fit in FITS {
        let arena = arena(fit, 1, 0, (0, u64::MAX));
        assert_eq!(arena.usage().free_bytes, u64::MAX, "stops at the top");
        let start = arena.alloc(u64::MAX).unwrap();
        arena.check().unwrap();
        assert_eq!(arena.usage().largest_free_bytes, 1);
        let rest = arena.alloc(1).unwrap();
        assert_eq!(arena.alloc(1), Err(ArenaError::Full { size: 1 }));
        arena.free(start, u64::MAX).unwrap();
        arena.free(rest, 1).unwrap();
        arena.check().unwrap();
        let guarded = Constraints {
            guard: (1 << 63) - 1,
            ..Constraints::default()
        };
        assert_eq!(arena.alloc_with(2, &guarded), Ok((1 << 63) - 1));
        assert_eq!(arena.usage().free_bytes, 0);
        arena.check().unwrap();
    }
}

#[test]
fn spans_that_touch_are_one_and_an_overlap_is_refused() {
    let arena = arena(Fit::Instant, 16, 0, (0x100, 0x1ff));
    arena.add(0x300, 0x3ff).unwrap();
    assert_eq!(arena.usage().spans, 2);
    for (first, last) in [(0x1f0, 0x20f), (0, 0xfff), (0x2f0, 0x30f), (0x110, 0x11f)] {
        let overlap = ArenaError::Overlap { first, last };
        assert_eq!(arena.add(first, last), Err(overlap));
    }
    for (first, last) in [(0x200, 0x208), (0x208, 0x2ff), (0x2ff, 0x200)] {
        let refused = arena.add(first, last);
        assert!(
            matches!(refused, Err(ArenaError::Span { .. })),
            "{refused:?}"
        );
    }
    assert!(arena.alloc(0x200).is_err());
    arena.add(0x200, 0x2ff).unwrap();
    arena.check().unwrap();
    assert_eq!(arena.usage().spans, 1);
    assert_eq!(arena.alloc(0x300), Ok(0x100));
    arena.add(0, 0xff).unwrap();
    arena.add(u64::MAX - 0xf, u64::MAX).unwrap();
    arena.check().unwrap();
    assert_eq!(arena.usage().spans, 2);
}

#[test]
fn contradictory_constraints_are_refused() {
    let arena = arena(Fit::Instant, 16, 0, (0, 0xffff));
    let free = Constraints::default();
    let refused = [
        Constraints { align: 48, ..free },
        Constraints {
            no_cross: 48,
            ..free
        },
        Constraints {
            align: 64,
            phase: 64,
            ..free
        },
        Constraints {
            align: 64,
            phase: 8,
            ..free
        },
        Constraints {
            no_cross: 16,
            ..free
        },
        Constraints {
            guard: u64::MAX,
            ..free
        },
        Constraints {
            guard: u64::MAX / 2,
            ..free
        },
    ];
    for constraints in refused {
        let result = arena.alloc_with(32, &constraints);
        let named = matches!(result, Err(ArenaError::Constraints { .. }));
        assert!(named, "{constraints:?}: {result:?}");
    }
    let late = Constraints {
        align: 64,
        phase: 48,
        no_cross: 64,
        ..free
    };
    assert!(matches!(
        arena.alloc_with(32, &late),
        Err(ArenaError::Full { .. })
    ));
    assert_eq!(arena.alloc_with(16, &late), Ok(48));
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    for cached_quanta_max in [0, 4] {
        let arena = arena(Fit::Instant, 16, cached_quanta_max, (0, u64::MAX));
        for size in [0, u64::MAX, u64::MAX - 14] {
            let refused = ArenaError::Size { size, quantum: 16 };
            assert_eq!(arena.alloc(size), Err(refused.clone()));
            assert_eq!(arena.free(0, size), Err(refused.clone()));
            assert_eq!(arena.alloc_at(0, size), Err(refused));
        }
        assert!(arena.alloc(u64::MAX - 15).is_ok());
        arena.check().unwrap();
    }
}

#[test]
fn empty_arena_gives_nothing() {
    for fit in FITS {
        let arena = Arena::new(ArenaSettings {
            fit,
            ..ArenaSettings::default()
        });
        assert_eq!(arena.alloc(1), Err(ArenaError::Full { size: 4096 }));
        assert_eq!(
            arena.alloc_at(0, 1),
            Err(ArenaError::Taken {
                start: 0,
                size: 4096
            })
        );
        arena.reap();
        arena.check().unwrap();
        assert_eq!(arena.usage(), super::super::ArenaUsage::default());
    }
}
