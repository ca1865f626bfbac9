// SPDX-License-Identifier: Apache-2.0
//! Magazines, depot and segments under loom, with magazines of one piece: every
//! interleaving, up to a bound of preemptions.

use super::{Arena, ArenaError, ArenaSettings, Fit};
use std::sync::Arc;

/// Two stripes over `pieces` quanta, one size cached.
fn arena(pieces: u64) -> Arc<Arena> {
    let settings = ArenaSettings {
        quantum: 1,
        fit: Fit::Instant,
        cached_quanta_max: 1,
    };
    let mut arena = Arena::striped(settings, 2);
    arena.doubts_frees = false;
    arena.add(0, pieces - 1).unwrap();
    Arc::new(arena)
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn loom_two_stripes_never_hand_out_one_piece_twice() {
    check(|| {
        let arena = arena(4);
        let other = {
            let arena = arena.clone();
            loom::thread::spawn(move || {
                let pieces = [0; 2].map(|_| arena.alloc_cached(1, 0).unwrap());
                arena.free_cached(1, 0, pieces[0]).unwrap();
                pieces[1]
            })
        };
        let pieces = [0; 2].map(|_| arena.alloc_cached(0, 0).unwrap());
        assert_ne!(pieces[0], pieces[1]);
        let others = other.join().unwrap();
        assert!(!pieces.contains(&others));
        arena.check().unwrap();
        assert_eq!(arena.usage().allocated_bytes, 3);
    });
}

#[test]
fn loom_full_magazines_pass_through_the_depot_whole() {
    check(|| {
        let arena = arena(4);
        let pieces = [0; 4].map(|_| arena.alloc_cached(0, 0).unwrap());
        let other = {
            let arena = arena.clone();
            loom::thread::spawn(move || arena.alloc_cached(1, 0))
        };
        // The third fills both magazines, so the first goes to the depot, where the other thread
        // finds it.
        for piece in &pieces[..3] {
            arena.free_cached(0, 0, *piece).unwrap();
        }
        let others = other.join().unwrap();
        arena.check().unwrap();
        let taken = match others {
            Ok(piece) => {
                assert!(pieces[..3].contains(&piece));
                2
            }
            Err(error) => {
                assert_eq!(error, ArenaError::Full { size: 1 });
                1
            }
        };
        assert_eq!(arena.usage().allocated_bytes, taken);
    });
}

#[test]
fn loom_search_for_the_last_place_finds_it_while_it_moves_between_magazines() {
    check(|| {
        // At every moment one of two pieces is free: y in stripe 1, and once y is taken, x in stripe 0.
        let arena = arena(2);
        let x = arena.alloc_cached(0, 0).unwrap();
        let y = arena.alloc_cached(1, 0).unwrap();
        arena.free_cached(1, 0, y).unwrap();
        let other = {
            let arena = arena.clone();
            loom::thread::spawn(move || {
                arena.free_cached(0, 0, x).unwrap();
                arena.alloc_cached(1, 0)
            })
        };
        arena.alloc_cached(0, 0).unwrap();
        other.join().unwrap().unwrap();
        arena.check().unwrap();
        assert_eq!(arena.usage().allocated_bytes, 2);
    });
}
