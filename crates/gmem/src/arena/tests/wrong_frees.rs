// SPDX-License-Identifier: Apache-2.0
//! Wrong frees: either an error with nothing changed, or, in a cache that does not check, dropped
//! when the piece returns to the segments.

use super::super::{Arena, ArenaError, Constraints, Fit};
use super::arena;

fn refuses_wrong_frees(arena: &Arena, free: impl Fn(u64, u64) -> Result<(), ArenaError>) {
    let guarded = Constraints {
        guard: 16,
        ..Constraints::default()
    };
    let start = arena.alloc_with(64, &guarded).unwrap();
    let before = arena.usage();
    for unknown in [start - 16, start + 16, start + 64, 0xff0] {
        let expected = ArenaError::NotAllocated { start: unknown };
        assert_eq!(free(unknown, 64), Err(expected));
    }
    let wrong_size = ArenaError::WrongSize {
        start,
        size: 48,
        allocated: 64,
    };
    assert_eq!(free(start, 48), Err(wrong_size));
    let between = ArenaError::Unaligned {
        address: start + 8,
        quantum: 16,
    };
    assert_eq!(free(start + 8, 64), Err(between));
    assert_eq!(arena.usage(), before);
    free(start, 64).unwrap();
    assert_eq!(free(start, 64), Err(ArenaError::NotAllocated { start }));
    arena.check().unwrap();
}

#[test]
fn wrong_free_is_an_error_without_caches() {
    for fit in [Fit::Instant, Fit::First] {
        let arena = arena(fit, 16, 0, (0, 0xfff));
        refuses_wrong_frees(&arena, |start, size| arena.free(start, size));
    }
}

#[test]
fn wrong_free_past_the_caches_is_an_error() {
    let arena = arena(Fit::Instant, 16, 8, (0, 0xfff));
    refuses_wrong_frees(&arena, |start, size| arena.free_direct(start, size));
    let start = arena.alloc(16).unwrap();
    let of_the_caches = Err(ArenaError::OfTheCaches { start });
    assert_eq!(arena.free_direct(start, 16), of_the_caches);
    arena.free(start, 16).unwrap();
    assert_eq!(arena.free_direct(start, 16), of_the_caches);
    arena.check().unwrap();
}

#[test]
fn wrong_free_of_a_cached_size_is_an_error_where_frees_are_doubted() {
    let mut arena = arena(Fit::Instant, 16, 8, (0, 0xfff));
    arena.doubts_frees = true;
    refuses_wrong_frees(&arena, |start, size| arena.free(start, size));
}

#[test]
fn wrong_free_of_a_cached_size_is_dropped_and_counted_where_frees_are_trusted() {
    // In the larger arena pieces are cut from chunks, in the smaller they are segments of their own.
    for last in [0xf_ffff, 0xfff] {
        let mut arena = arena(Fit::Instant, 16, 8, (0, last));
        arena.doubts_frees = false;
        let start = arena.alloc(64).unwrap();
        let neighbour = arena.alloc(64).unwrap();
        arena.free(start, 64).unwrap();
        arena.free(start, 64).unwrap();
        arena.free(neighbour + 16, 64).unwrap();
        arena.free(start + 64, 32).unwrap();
        arena.free(last - 15, 16).unwrap();
        assert!(arena.check().is_err(), "check tells");
        arena.reap();
        assert_eq!(arena.usage().foreign_frees, 4);
        assert_eq!(arena.usage().allocated_bytes, 64);
        arena.check().unwrap();
        arena.free(neighbour, 64).unwrap();
        arena.reap();
        assert_eq!(arena.usage().free_bytes, last + 1);
        arena.check().unwrap();
    }
}

#[test]
fn guarded_piece_given_to_the_caches_comes_back_whole() {
    let arena = arena(Fit::Instant, 16, 8, (0, 0xfff));
    let guarded = Constraints {
        guard: 32,
        ..Constraints::default()
    };
    let start = arena.alloc_with(16, &guarded).unwrap();
    arena.free(start, 16).unwrap();
    assert_eq!(arena.alloc(16), Ok(start), "handed out from the magazine");
    arena.free(start, 16).unwrap();
    arena.check().unwrap();
    arena.reap();
    assert_eq!(arena.usage().free_bytes, 0x1000);
}
