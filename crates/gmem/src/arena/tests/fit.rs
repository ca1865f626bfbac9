// SPDX-License-Identifier: Apache-2.0
//! Which of several places is taken, and how many segments it costs.

use super::super::{Constraints, Fit};
use super::arena;

#[test]
fn instant_fit_takes_what_certainly_fits_before_what_would_have_to_be_looked_at() {
    let arena = arena(Fit::Instant, 1, 0, (0, 0xfff));
    arena.alloc_at(5, 1).unwrap();
    // Five are free at 0, in the list of 4 to 7, where not everything has room for five.
    assert_eq!(arena.alloc(5), Ok(6));
    assert_eq!(arena.alloc(4), Ok(0));
    arena.check().unwrap();
}

#[test]
fn instant_fit_finds_the_last_place_where_nothing_is_certain() {
    let arena = arena(Fit::Instant, 1, 0, (0, 0xff));
    arena.alloc_at(5, 0xfb).unwrap();
    assert_eq!(arena.alloc(5), Ok(0));
}

#[test]
fn first_fit_takes_the_lowest_place_under_constraints() {
    let arena = arena(Fit::First, 1, 0, (0, 0xfff));
    for start in [0x10, 0x40, 0x80] {
        arena.alloc_at(start, 8).unwrap();
    }
    let from = |min| Constraints {
        min,
        align: 16,
        ..Constraints::default()
    };
    assert_eq!(arena.alloc(0x11), Ok(0x18));
    assert_eq!(arena.alloc_with(0x20, &from(1)), Ok(0x50));
    assert_eq!(arena.alloc_with(0x20, &from(0x81)), Ok(0x90));
    assert_eq!(arena.alloc(0x10), Ok(0));
}

#[test]
fn many_small_pieces_take_few_segments_and_reap_makes_those_in_use_segments() {
    let arena = arena(Fit::Instant, 1, 4, (0, 0xffff));
    let pieces: Vec<u64> = (0..1000).map(|_| arena.alloc(2).unwrap()).collect();
    let few = arena.usage().allocated_segments;
    assert!(few <= 1000 / 64 + 1, "{few}");
    arena.reap();
    assert_eq!(arena.usage().allocated_segments, 1000);
    assert_eq!(arena.usage().cached_bytes, 0);
    arena.check().unwrap();
    for piece in pieces {
        arena.free(piece, 2).unwrap();
    }
    assert_eq!(arena.alloc(0x1_0000), Ok(0), "all of it");
}
