// SPDX-License-Identifier: Apache-2.0
//! Small pieces: magazines and depot ([`Caches`]), and the chunks that they come from ([`Stock`]).
//! See 'Magazines' and 'Chunks' in [`super`].

use super::{
    free_index::Seg,
    request::{ArenaError, Request},
    segments::{Owner, SEGMENTS_MAX, Segments},
};
use crate::sync::{Mutex, MutexGuard, lock};
use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    sync::atomic::AtomicUsize,
};

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

/// Pieces of a chunk: the bits of a word.
const PIECES_MAX: u64 = 64;

/// Largest chunk in quanta.
const CHUNK_QUANTA_MAX: u64 = 1024;

/// Fewest pieces for which a chunk pays. Larger pieces are taken one by one: they are rarely many,
/// and much space would be left at the end of a chunk.
const PIECES_MIN: u64 = 8;

/// One chunk.
#[derive(Debug)]
pub(super) struct Chunk {
    pub seg: Seg,
    pub class: usize,
    /// Bit `i`: piece `i` is idle.
    pub idle: u64,
}

/// The segments of an arena, and the chunks that the caches have of them. Not synchronized: the
/// arena has a lock around it.
pub(super) struct Stock {
    pub segments: Segments,
    /// By their first integer.
    pub chunks: BTreeMap<u64, Chunk>,
    /// For each class, the chunks with idle pieces; lower ones are used first, so that higher ones
    /// empty.
    pub partial: BTreeMap<usize, BTreeSet<u64>>,
    /// Bytes of chunks that are in no piece in use.
    pub idle_bytes: u128,
}

/// Geometry of the chunks of one class.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    class: usize,
    pub piece_bytes: u64,
    pub chunk_bytes: u64,
}

impl Shape {
    pub(super) fn new(class: usize, quantum: u64) -> Self {
        let quanta = class as u64 + 1;
        let most = (quanta * PIECES_MAX).min(CHUNK_QUANTA_MAX);
        Self {
            class,
            piece_bytes: quanta * quantum,
            chunk_bytes: quantum << most.ilog2(),
        }
    }

    /// 0 if a piece is larger than the largest chunk.
    fn pieces(&self) -> u64 {
        self.chunk_bytes / self.piece_bytes
    }

    /// Bits of all pieces.
    pub(super) fn all(&self) -> u64 {
        u64::MAX >> (PIECES_MAX - self.pieces())
    }

    fn base(&self, start: u64) -> u64 {
        start & !(self.chunk_bytes - 1)
    }
}

impl Chunk {
    /// The bit of the piece that begins at `start`, if one does; `start` is within the chunk.
    fn bit(&self, base: u64, start: u64, shape: &Shape) -> Option<u64> {
        let offset = start - base;
        let bit = 1_u64 << (offset / shape.piece_bytes);
        offset
            .is_multiple_of(shape.piece_bytes)
            .then_some(bit & shape.all())
            .filter(|&bit| bit != 0)
    }
}

impl Stock {
    pub(super) fn new(segments: Segments) -> Self {
        Self {
            segments,
            chunks: BTreeMap::new(),
            partial: BTreeMap::new(),
            idle_bytes: 0,
        }
    }

    /// Frees what a caller took from the segments.
    pub(super) fn free(&mut self, start: u64, size_less: u64) -> Result<(), ArenaError> {
        match self.segments.free(start, size_less, Owner::Caller) {
            Err(ArenaError::NotAllocated { .. }) if self.piece_in_use(start).is_some() => {
                Err(ArenaError::OfTheCaches { start })
            }
            other => other,
        }
    }

    /// Whether `start` is allocated with this size.
    pub(super) fn allocated_as(&self, start: u64, size_less: u64) -> Result<(), ArenaError> {
        let length_less = self
            .piece_in_use(start)
            .or_else(|| self.segments.allocated_less(start))
            .ok_or(ArenaError::NotAllocated { start })?;
        if length_less == size_less {
            return Ok(());
        }
        Err(ArenaError::WrongSize {
            start,
            size: size_less + 1,
            allocated: length_less + 1,
        })
    }

    /// Up to `count` pieces for the caches.
    pub(super) fn take_pieces(&mut self, class: usize, count: usize, pieces: &mut Vec<u64>) {
        let shape = Shape::new(class, self.segments.quantum);
        let wanted = pieces.len() + count;
        while pieces.len() < wanted {
            let partial = self.partial.get(&class);
            let Some(&base) = partial.and_then(BTreeSet::first) else {
                if shape.pieces() >= PIECES_MIN && self.open_chunk(&shape) {
                    continue;
                }
                let request = Request::plain(shape.piece_bytes - 1, self.segments.quantum);
                match self.segments.alloc(&request, Owner::Caches) {
                    Ok(start) => pieces.push(start),
                    Err(_) => return, // the caller sees that there are fewer
                }
                continue;
            };
            self.take_from(base, &shape, wanted, pieces);
        }
    }

    /// Takes back a piece from the caches.
    pub(super) fn give_back_piece(&mut self, class: usize, start: u64) -> Result<(), ArenaError> {
        let shape = Shape::new(class, self.segments.quantum);
        let base = shape.base(start);
        let chunk = self.chunks.get_mut(&base);
        // A chunk of another class that begins there may be smaller and end before this piece.
        let Some(chunk) = chunk.filter(|chunk| chunk.class == class) else {
            return (self.segments).free(start, shape.piece_bytes - 1, Owner::Caches);
        };
        let bit = chunk.bit(base, start, &shape);
        let bit = bit.filter(|bit| chunk.idle & bit == 0);
        chunk.idle |= bit.ok_or(ArenaError::NotAllocated { start })?;
        self.idle_bytes += u128::from(shape.piece_bytes);
        let (seg, idle) = (chunk.seg, chunk.idle);
        let partial = self.partial.entry(class).or_default();
        if idle == shape.all() {
            partial.remove(&base);
            self.chunks.remove(&base);
            self.idle_bytes -= u128::from(shape.chunk_bytes);
            self.segments.free_chunk(seg);
        } else {
            partial.insert(base);
        }
        Ok(())
    }

    /// Turns every chunk into segments: then no free space is hidden.
    pub(super) fn dissolve_chunks(&mut self) {
        (self.partial, self.idle_bytes) = (BTreeMap::new(), 0);
        for (base, chunk) in std::mem::take(&mut self.chunks) {
            let shape = Shape::new(chunk.class, self.segments.quantum);
            self.dissolve(base, &chunk, &shape);
        }
    }

    /// Size less one of the piece in use that begins at `start`, if a chunk has one there.
    pub(super) fn piece_in_use(&self, start: u64) -> Option<u64> {
        let (&base, chunk) = self.chunks.range(..=start).next_back()?;
        let shape = Shape::new(chunk.class, self.segments.quantum);
        if start - base >= shape.chunk_bytes {
            return None;
        }
        let bit = chunk.bit(base, start, &shape)?;
        (chunk.idle & bit == 0).then_some(shape.piece_bytes - 1)
    }

    /// Number of chunks.
    pub(super) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// Makes a new chunk of idle pieces, if there certainly is a place for one.
    fn open_chunk(&mut self, shape: &Shape) -> bool {
        let request = Request::aligned_chunk(shape.chunk_bytes, self.segments.quantum);
        let Some((base, seg)) = self.segments.alloc_chunk(&request) else {
            return false;
        };
        let chunk = Chunk {
            seg,
            class: shape.class,
            idle: shape.all(),
        };
        self.chunks.insert(base, chunk);
        let partial = self.partial.entry(shape.class).or_default();
        partial.insert(base);
        self.idle_bytes += u128::from(shape.chunk_bytes);
        true
    }

    /// Takes idle pieces of one chunk, until `pieces` has `wanted`.
    fn take_from(&mut self, base: u64, shape: &Shape, wanted: usize, pieces: &mut Vec<u64>) {
        let Some(chunk) = self.chunks.get_mut(&base) else {
            return;
        };
        while chunk.idle != 0 && pieces.len() < wanted {
            let index = u64::from(chunk.idle.trailing_zeros());
            chunk.idle &= chunk.idle - 1;
            self.idle_bytes -= u128::from(shape.piece_bytes);
            pieces.push(base + index * shape.piece_bytes);
        }
        if chunk.idle == 0
            && let Some(partial) = self.partial.get_mut(&shape.class)
        {
            partial.remove(&base);
        }
    }

    fn dissolve(&mut self, base: u64, chunk: &Chunk, shape: &Shape) {
        let mut in_use = shape.all() & !chunk.idle;
        let mut pieces = Vec::new();
        while in_use != 0 {
            let index = u64::from(in_use.trailing_zeros());
            in_use &= in_use - 1;
            pieces.push(base + index * shape.piece_bytes);
        }
        // A piece in use and the free run behind it, and one run before.
        if self.segments.slab.len() + 2 * pieces.len() + 1 > SEGMENTS_MAX {
            self.chunks.insert(
                base,
                Chunk {
                    seg: chunk.seg,
                    ..*chunk
                },
            );
            if chunk.idle != 0 {
                let partial = self.partial.entry(shape.class).or_default();
                partial.insert(base);
            }
            let in_use = pieces.len() as u64 * shape.piece_bytes;
            self.idle_bytes += u128::from(shape.chunk_bytes - in_use);
            return;
        }
        self.segments
            .split_chunk(chunk.seg, &pieces, shape.piece_bytes);
    }
}
