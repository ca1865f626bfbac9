// SPDX-License-Identifier: Apache-2.0
//! Cached pieces of small sizes, so that most calls touch neither the segments nor data of another
//! thread (Bonwick & Adams, section 3).
//!
//! Threads are spread over *stripes*, each with a lock that is rarely contended. For each size (1,
//! 2, … quanta) a stripe has two *magazines* of up to 63 starts (fewer for large pieces), loaded
//! and previous, as in the paper: with two of them, a thread that alternates between free and alloc
//! at the edge of a magazine does not exchange one each time. Full magazines are exchanged with the
//! *depot*, under one lock for all stripes. A depot that has enough returns a magazine's pieces to
//! the segments.
//!
//! ```text
//!  stripe (lock)            depot (lock)               segments (lock)
//!   size 1: loaded prev ─────► full, full, …  ──over──►
//!   size 2: loaded prev ◄─────                ◄─empty── a few at a time
//! ```
//!
//! Locks are taken in this order: stripes by number, depot, segments. A thread takes one stripe, or
//! all of them: a thread that finds no place must examine every magazine at one moment, else it
//! would miss pieces freed meanwhile into a magazine already examined ([`Caches::drain`]).
//!
//! A thread that ends leaves its pieces in its stripe, where its successor or `drain` finds them.

use std::cell::Cell;
use std::sync::atomic::AtomicUsize;

use crate::sync::{Mutex, MutexGuard, lock};

/// Starts in a magazine of small pieces: 63 and their count fill eight cache lines.
const ROUNDS_MAX: usize = if cfg!(loom) { 1 } else { 63 };

/// Starts in a magazine of the largest pieces: enough for some exchanges.
const ROUNDS_MIN: usize = if cfg!(loom) { 1 } else { 4 };

/// Quanta that one magazine may hold, between the two limits above: no more is cached of large
/// pieces than of small ones.
const MAGAZINE_QUANTA: usize = 1024;

/// Most sizes that are cached, in quanta.
///
/// That many would fill, in a stripe, 1,024 magazines of 74 KiB together, which hold 1.2 Mi quanta,
/// and in the depot 590 KiB of magazines with 10 Mi quanta: the most that is ever cached.
pub const CACHED_QUANTA_LIMIT: u32 = 512;

/// Full magazines of one size that the depot keeps.
///
/// With N live pieces, a share p of them of one size, and sizes drawn at random, the number of that
/// size fluctuates by about the root of N p (1-p): 500 for a million. 16 times 63 is twice that.
const DEPOT_MAGAZINES_MAX: usize = 16;

/// Quanta that are taken from the segments at once when caches are empty. Half
/// of a magazine of the smallest pieces, one piece of the largest.
const REFILL_QUANTA: usize = if cfg!(loom) { 1 } else { 32 };

/// Least number of stripes; more threads than stripes share some.
const STRIPES_MIN: usize = 8;
const STRIPES_MAX: usize = 256;

/// Where pieces come from and return to: the segments.
pub(super) trait PieceSource {
    /// Appends up to `count` pieces of `class + 1` quanta to `pieces`.
    fn take(&self, class: usize, count: usize, pieces: &mut Vec<u64>);
    /// Takes pieces back.
    fn give_back(&self, class: usize, pieces: &[u64]);
}

/// A stack of starts.
type Magazine = Vec<u64>;

/// The magazines of one size in one stripe.
#[repr(align(64))]
struct Pair {
    loaded: Magazine,
    previous: Magazine,
    /// Starts in a full magazine of this size.
    rounds: usize,
}

impl Pair {
    fn new(class: usize) -> Self {
        Self {
            loaded: Magazine::new(),
            previous: Magazine::new(),
            rounds: (MAGAZINE_QUANTA / (class + 1)).clamp(ROUNDS_MIN, ROUNDS_MAX),
        }
    }

    #[inline]
    fn take(&mut self) -> Option<u64> {
        if self.loaded.is_empty() {
            std::mem::swap(&mut self.loaded, &mut self.previous);
        }
        self.loaded.pop()
    }

    /// Keeps `start` unless both are full.
    #[inline]
    fn put(&mut self, start: u64) -> Put {
        if self.loaded.len() == self.rounds {
            if self.previous.len() == self.rounds {
                return Put::Full;
            }
            std::mem::swap(&mut self.loaded, &mut self.previous);
        }
        if self.loaded.capacity() == 0 {
            self.loaded.reserve_exact(self.rounds);
        }
        self.loaded.push(start);
        Put::Done
    }
}

/// Whether a magazine had room.
enum Put {
    Done,
    Full,
}

/// The lock of some threads. It has a pair of cache lines to itself, as CPUs fetch two at once.
#[repr(align(128))]
struct Stripe(Mutex<Vec<Pair>>);

#[derive(Default)]
struct Depot {
    /// Full magazines of each size.
    full: Vec<Vec<Magazine>>,
    /// Empty ones, of any size.
    empty: Vec<Magazine>,
}

/// The caches of one arena.
pub(super) struct Caches {
    classes: usize,
    stripes: Box<[Stripe]>,
    depot: Mutex<Depot>,
}

impl Caches {
    /// Caches for pieces of 1 to `classes` quanta; `stripes` at least 1.
    pub(super) fn new(classes: usize, stripes: usize) -> Self {
        let stripes = if classes == 0 { 0 } else { stripes };
        Self {
            classes,
            stripes: (0..stripes)
                .map(|_| Stripe(Mutex::new(Vec::new())))
                .collect(),
            depot: Mutex::new(Depot::default()),
        }
    }

    /// Four times the CPUs: threads are spread by a number unrelated to where they run.
    pub(super) fn stripes_of_this_machine() -> usize {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        (4 * cpus)
            .next_power_of_two()
            .clamp(STRIPES_MIN, STRIPES_MAX)
    }

    pub(super) fn classes(&self) -> usize {
        self.classes
    }

    /// The stripe of the calling thread.
    #[inline]
    pub(super) fn own_stripe(&self) -> usize {
        thread_number() & (self.stripes.len() - 1)
    }

    /// A piece of `class + 1` quanta, if there is one here or `source` has one.
    #[inline]
    pub(super) fn take(
        &self,
        stripe: usize,
        class: usize,
        source: &impl PieceSource,
    ) -> Option<u64> {
        let mut pairs = lock(&self.stripes[stripe].0);
        let ready = pairs.get_mut(class).and_then(Pair::take);
        ready.or_else(|| self.reload(&mut pairs, class, source))
    }

    /// Caches a piece of `class + 1` quanta.
    #[inline]
    pub(super) fn put(&self, stripe: usize, class: usize, start: u64, source: &impl PieceSource) {
        let mut pairs = lock(&self.stripes[stripe].0);
        let put = pairs
            .get_mut(class)
            .map_or(Put::Full, |pair| pair.put(start));
        if matches!(put, Put::Full) {
            self.unload(&mut pairs, class, start, source);
        }
    }

    /// Empties all caches and calls `then` with everything locked, so that it sees all free space.
    pub(super) fn drain<R>(&self, source: &impl PieceSource, then: impl FnOnce() -> R) -> R {
        let mut all = self.lock_all();
        for pairs in &mut all.stripes {
            for (class, pair) in pairs.iter_mut().enumerate() {
                for magazine in [&mut pair.loaded, &mut pair.previous] {
                    if !magazine.is_empty() {
                        source.give_back(class, magazine);
                    }
                }
            }
            **pairs = Vec::new();
        }
        for (class, magazines) in all.depot.full.iter().enumerate() {
            for magazine in magazines {
                source.give_back(class, magazine);
            }
        }
        *all.depot = Depot::default();
        then()
    }

    /// Whether a magazine holds this piece of `class + 1` quanta.
    pub(super) fn holds(&self, class: usize, start: u64) -> bool {
        let all = self.lock_all();
        let pairs = all.stripes.iter().filter_map(|pairs| pairs.get(class));
        let mut own = pairs.flat_map(|pair| [&pair.loaded, &pair.previous]);
        let mut shared = all.depot.full.get(class).into_iter().flatten();
        own.any(|magazine| magazine.contains(&start))
            || shared.any(|magazine| magazine.contains(&start))
    }

    /// Calls `then` with the class and starts of every magazine, with all of them locked.
    pub(super) fn look<R>(&self, then: impl FnOnce(&[(usize, Vec<u64>)]) -> R) -> R {
        let all = self.lock_all();
        let mut found = Vec::new();
        for pairs in &all.stripes {
            for (class, pair) in pairs.iter().enumerate() {
                found.push((class, pair.loaded.clone()));
                found.push((class, pair.previous.clone()));
            }
        }
        for (class, magazines) in all.depot.full.iter().enumerate() {
            found.extend(magazines.iter().map(|magazine| (class, magazine.clone())));
        }
        then(&found)
    }

    fn lock_all(&self) -> AllLocked<'_> {
        AllLocked {
            stripes: self.stripes.iter().map(|stripe| lock(&stripe.0)).collect(),
            depot: lock(&self.depot),
        }
    }

    /// Both magazines are empty: takes a full one from the depot, else some pieces from `source`.
    #[cold]
    #[inline(never)]
    fn reload(
        &self,
        pairs: &mut Vec<Pair>,
        class: usize,
        source: &impl PieceSource,
    ) -> Option<u64> {
        let pair = self.pair(pairs, class);
        if let Some(full) = self.full_magazine(class, &mut pair.loaded) {
            pair.loaded = full;
        } else {
            if pair.loaded.capacity() == 0 {
                pair.loaded.reserve_exact(pair.rounds);
            }
            let count = (REFILL_QUANTA / (class + 1)).max(1);
            source.take(class, count, &mut pair.loaded);
            pair.loaded.reverse(); // the lowest is handed out first
        }
        pair.loaded.pop()
    }

    /// Both magazines are full, or do not exist yet.
    #[cold]
    #[inline(never)]
    fn unload(&self, pairs: &mut Vec<Pair>, class: usize, start: u64, source: &impl PieceSource) {
        let pair = self.pair(pairs, class);
        if matches!(pair.put(start), Put::Done) {
            return;
        }
        let full = std::mem::take(&mut pair.previous);
        match self.keep_full(class, full) {
            Kept::Kept { empty } => pair.previous = empty,
            Kept::Enough(mut over) => {
                source.give_back(class, &over);
                over.clear();
                pair.previous = over;
            }
        }
        pair.put(start);
    }

    fn pair<'a>(&self, pairs: &'a mut Vec<Pair>, class: usize) -> &'a mut Pair {
        if pairs.is_empty() {
            pairs.extend((0..self.classes).map(Pair::new));
        }
        &mut pairs[class]
    }

    /// Exchanges the empty magazine for a full one.
    fn full_magazine(&self, class: usize, empty: &mut Magazine) -> Option<Magazine> {
        let mut depot = lock(&self.depot);
        let full = depot.full.get_mut(class)?.pop()?;
        if empty.capacity() > 0 && depot.empty.len() < DEPOT_MAGAZINES_MAX {
            depot.empty.push(std::mem::take(empty));
        }
        Some(full)
    }

    fn keep_full(&self, class: usize, full: Magazine) -> Kept {
        let mut depot = lock(&self.depot);
        if depot.full.is_empty() {
            depot.full.resize_with(self.classes, Vec::new);
        }
        if depot.full[class].len() >= DEPOT_MAGAZINES_MAX {
            return Kept::Enough(full);
        }
        depot.full[class].push(full);
        let empty = depot.empty.pop().unwrap_or_default();
        Kept::Kept { empty }
    }
}

/// What the depot did with a full magazine.
enum Kept {
    Kept { empty: Magazine },
    Enough(Magazine),
}

/// Every lock of the caches.
struct AllLocked<'a> {
    stripes: Vec<MutexGuard<'a, Vec<Pair>>>,
    depot: MutexGuard<'a, Depot>,
}

/// A number of this thread. Sequential, so threads that were started together differ in stripe.
#[inline]
fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    const NOT_YET: usize = usize::MAX;
    thread_local! {
        static OWN: Cell<usize> = const { Cell::new(NOT_YET) };
    }
    OWN.with(|own| {
        if own.get() == NOT_YET {
            // Relaxed: only a number, it orders nothing.
            own.set(NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) & (NOT_YET >> 1));
        }
        own.get()
    })
}
