// SPDX-License-Identifier: Apache-2.0
//! An allocator of integers (GMEM 5.1; after vmem: Bonwick & Adams, "Magazines and Vmem", 2001):
//! virtual addresses, I/O virtual addresses, physical memory of a device.
//!
//! Addresses are plain `u64` here, since an arena hands out integers of any kind and has no address
//! space of its own; the owner of an arena gives the numbers their type.
//!
//! # Terms
//! A *span* is a run of integers that was added; adjacent spans are merged. A *segment* is a part
//! of a span that is free or allocated as a whole. The *quantum* is the unit: spans begin and end
//! at multiples of it, and sizes and guards are rounded up to it.
//!
//! # Idea
//! [`Arena::alloc_with`] supports every constraint of vmem and takes from the segments under one
//! lock: *instant fit* in constant time, or *first fit* in O(log n). [`Arena::alloc`] serves small
//! sizes from magazines of the calling thread. In the common case that does not touch the segments,
//! so its cost does not depend on how much is allocated.
//!
//! ```text
//!   Arena            mod.rs         the interface, and when the caches are emptied
//!   Caches, Stock    caches.rs      magazines, depot; chunks, cut into small pieces
//!   Segments         segments.rs    taken, freed, coalesced
//!   FreeIndex        free_index.rs  one segment; lists by length, or a treap by address
//!   Request          request.rs     constraints; where a request fits in one free segment
//! ```
//!
//! # Requests
//! Lengths are stored as length less one, because an arena may hold all 2^64 integers. Where a
//! request fits in one free segment is pure arithmetic that handles every constraint, so all ways of
//! searching give the same kinds of places.
//!
//! # Segments
//! A segment is 32 bytes in a slab and refers to others by index. It is in up to two orders:
//!
//! - **By address**, `before` and `after`, for coalescing. The segments of one span form a ring that
//!   is closed by a *border*, a segment that is neither free nor allocated. So the ends of a span
//!   need no special case, and no free segment has a free neighbour.
//! - **By kind**: a free one is in the index of free segments, an allocated one in a hash chain by
//!   its start. Both use `prev` and `next`; `prev` also tells the two apart.
//!
//! A guarded allocation keeps its guards inside its own segment, so that nothing else can lie
//! there. Their width is in a separate map, since few allocations have guards.
//!
//! The slab, the hash table and the map do not shrink: their size follows the most segments ever in
//! use, 32 bytes a segment and 4 to 8 a bucket.
//!
//! # Free segments
//! **Instant fit** keeps a list for each power of two: list `c` has the segments of 2^c to
//! 2^(c+1)-1 integers, and a bit says whether it is empty. A request of `n` begins with the lists in
//! which every segment fits, those from `n` rounded up: the lowest bit that is set, constant time.
//! Only if there is no certain place (or the constraints exclude the certain ones) are all other
//! lists searched that may hold one, so a failure always means that there is none.
//!
//! **First fit** keeps a treap: a search tree by address and a heap by a random priority (from a
//! fixed seed: the sequence of calls determines the shape). Each node records the longest segment
//! below it, so the lowest segment that is long enough is found in O(log n) expected steps. Nodes
//! are in an array parallel to the slab, under the same indexes.
//!
//! # Magazines
//! Most calls touch neither the segments nor data of another thread (Bonwick & Adams, section 3).
//! Threads are spread over *stripes*, each with a lock that is rarely contended. For each size (1,
//! 2, … quanta) a stripe has two *magazines* of up to 63 starts (fewer for large pieces), loaded and
//! previous, as in the paper: with two of them, a thread that alternates between free and alloc at
//! the edge of a magazine does not exchange one each time. Full magazines are exchanged with the
//! *depot*, under one lock for all stripes. A depot that has enough returns a magazine's pieces to
//! the segments.
//!
//! ```text
//!  stripe (lock)            depot (lock)               chunks and segments (lock)
//!   size 1: loaded prev ─────► full, full, …  ──over──►
//!   size 2: loaded prev ◄─────                ◄─empty── a few at a time
//! ```
//! A thread takes one stripe, or all of them: a thread that finds no place must examine every
//! magazine at one moment, else it would miss pieces freed meanwhile into a magazine already
//! examined. A thread that ends leaves its pieces in its stripe, where its successor, or a thread
//! that empties the caches, finds them.
//!
//! # Chunks
//! With a segment for each small piece there would be as many segments as allocations. With a
//! million of them every access to a segment misses the CPU's caches and its TLB, for large
//! allocations too. So small pieces are cut from *chunks*, one segment for up to 64 pieces of one
//! size (vmem's quantum caches import slabs in the same way). Chunks are powers of two in size and
//! aligned to it: a piece and its size determine its chunk. A bit for each piece tells whether it is
//! idle, that is, neither with a caller nor in a magazine.
//!
//! Chunks must not hide free space. Before an allocation would fail, and at `reap`, each chunk is
//! *dissolved*: idle pieces become free segments, the others segments of their own, which are freed
//! one by one. If no chunk certainly fits, single pieces are taken to begin with.
//!
//! # Guarantees
//! - Every call is atomic: on an error nothing has changed.
//! - [`ArenaError::Full`] means that at one moment within the call no place existed, in the
//!   segments or in any magazine. If instant fit finds no certain place, it searches every list
//!   that may hold one; before failing, all magazines are emptied and the search is repeated, with
//!   everything locked. This is expensive in an arena that is nearly full: each failure empties its
//!   caches.
//! - Allocations of two callers never overlap, if every caller frees only its own.
//!
//! # Wrong frees
//! | error | `free`, size given is cached | `free`, larger | [`free_direct`](Arena::free_direct) |
//! |---|---|---|---|
//! | size 0, start not at a quantum | error | error | error |
//! | unknown start, wrong size, double free | **undetected** in a release build | error | error |
//! | taken by `alloc`, a cached size | right | error | error |
//! | taken by `alloc_with` or `alloc_at` | allowed: it goes into the caches, guards and all | right | right |
//!
//! A magazine holds only starts, so detecting a wrong one would require the look-up in the segments
//! that magazines exist to avoid (vmem's caches do not detect it either). A build with debug
//! assertions does check. In a release build a wrong start is handed out again, so two callers may
//! have the same integers. When it returns to the segments and no piece of its size begins there,
//! it is dropped and counted ([`ArenaUsage::foreign_frees`]). The segments themselves stay sound.
//! If frees cannot be trusted, set `cached_quanta_max` to 0: then every wrong free is an error.
//!
//! # Locks
//! Stripes by number, then the depot, then the chunks and segments. To the rest of the program all are leaf
//! locks, and no callback runs under them.

mod caches;
#[cfg(test)]
mod check;
mod free_index;
#[cfg(all(test, loom))]
mod model;
mod request;
mod segments;
#[cfg(all(test, not(loom)))]
mod tests;

pub use caches::CACHED_QUANTA_LIMIT;
pub use request::{ArenaError, ArenaSettings, ArenaUsage, Constraints, Fit};

use crate::sync::{AtomicU64, Mutex, Ordering, lock};
use caches::{Caches, PieceSource, Stock};
use free_index::FreeIndex;
use request::{Request, size_less};
use segments::{Owner, Segments};

/// An allocator of integers; see the module.
#[doc(alias = "vmem_create")]
pub struct Arena {
    quantum: u64,
    stock: Mutex<Stock>,
    caches: Caches,
    foreign_frees: AtomicU64,
    /// Whether each free of a cached size is checked against the segments.
    doubts_frees: bool,
}

impl Arena {
    /// An arena without any integers.
    ///
    /// # Panics
    /// If `quantum` is not a power of two.
    #[must_use]
    pub fn new(settings: ArenaSettings) -> Self {
        Self::striped(settings, Caches::stripes_of_this_machine())
    }

    fn striped(settings: ArenaSettings, stripes: usize) -> Self {
        let quantum = settings.quantum;
        assert!(quantum.is_power_of_two(), "quantum {quantum:#x}");
        let classes = settings.cached_quanta_max.min(CACHED_QUANTA_LIMIT);
        Self {
            quantum,
            stock: Mutex::new(Stock::new(Segments::new(
                quantum,
                FreeIndex::new(settings.fit),
            ))),
            caches: Caches::new(classes as usize, stripes),
            foreign_frees: AtomicU64::new(0),
            doubts_frees: cfg!(debug_assertions),
        }
    }

    /// Adds the integers `first..=last`; `last` may be `u64::MAX`.
    ///
    /// # Errors
    /// [`ArenaError::Span`] if they are not whole quanta, [`ArenaError::Overlap`] if some are
    /// present.
    #[doc(alias = "vmem_add")]
    pub fn add(&self, first: u64, last: u64) -> Result<(), ArenaError> {
        lock(&self.stock).segments.add(first, last)
    }

    /// Allocates `size` anywhere, from the caches if it is small.
    ///
    /// # Errors
    /// [`ArenaError::Full`], or [`ArenaError::Size`].
    #[doc(alias = "vmem_alloc")]
    #[inline]
    pub fn alloc(&self, size: u64) -> Result<u64, ArenaError> {
        match self.cached_class(size) {
            Some(class) => self.alloc_cached(self.caches.own_stripe(), class),
            None => self.alloc_with(size, &Constraints::default()),
        }
    }

    /// Allocates `size` under `constraints`, never from the caches.
    ///
    /// # Errors
    /// [`ArenaError::Full`], [`ArenaError::Size`], [`ArenaError::Constraints`].
    #[doc(alias = "vmem_xalloc")]
    pub fn alloc_with(&self, size: u64, constraints: &Constraints) -> Result<u64, ArenaError> {
        let size_less = size_less(size, self.quantum)?;
        let request = Request::constrained(size_less, constraints, self.quantum)?;
        self.alloc_from_segments(&request, Owner::Caller)
    }

    /// Allocates `size` at exactly `start`.
    ///
    /// # Errors
    /// [`ArenaError::Taken`] if any of it is allocated or outside, [`ArenaError::Size`],
    /// [`ArenaError::Unaligned`].
    pub fn alloc_at(&self, start: u64, size: u64) -> Result<(), ArenaError> {
        let size_less = size_less(size, self.quantum)?;
        let request = Request::at(start, size_less, self.quantum)?;
        match self.alloc_from_segments(&request, Owner::Caller) {
            Ok(_) => Ok(()),
            Err(ArenaError::Full { size }) => Err(ArenaError::Taken { start, size }),
            Err(other) => Err(other),
        }
    }

    /// Frees `size` at `start`, as allocated. A small piece goes into the caches.
    ///
    /// # Errors
    /// [`ArenaError::NotAllocated`], [`ArenaError::WrongSize`] where the module's table says so;
    /// [`ArenaError::Size`], [`ArenaError::Unaligned`].
    #[doc(alias = "vmem_free")]
    #[inline]
    pub fn free(&self, start: u64, size: u64) -> Result<(), ArenaError> {
        match self.cached_class(size) {
            Some(class) => self.free_cached(self.caches.own_stripe(), class, start),
            None => self.free_direct(start, size),
        }
    }

    /// Frees what [`alloc_with`](Self::alloc_with) or [`alloc_at`](Self::alloc_at) returned,
    /// bypassing the caches: it coalesces at once, and every wrong free is detected.
    ///
    /// # Errors
    /// [`ArenaError::NotAllocated`], [`ArenaError::WrongSize`], [`ArenaError::OfTheCaches`],
    /// [`ArenaError::Size`], [`ArenaError::Unaligned`].
    #[doc(alias = "vmem_xfree")]
    pub fn free_direct(&self, start: u64, size: u64) -> Result<(), ArenaError> {
        let size_less = size_less(size, self.quantum)?;
        self.aligned(start)?;
        lock(&self.stock).free(start, size_less)
    }

    /// Returns all cached pieces to the segments. Runs automatically before an allocation fails.
    #[doc(alias = "vmem_qcache_reap")]
    pub fn reap(&self) {
        let dissolve = || lock(&self.stock).dissolve_chunks();
        self.caches.drain(&self.source(), dissolve);
    }

    /// A consistent snapshot of the usage.
    #[must_use]
    pub fn usage(&self) -> ArenaUsage {
        self.caches.look(|magazines| {
            let bytes = |bytes: u128| u64::try_from(bytes).unwrap_or(u64::MAX);
            let cached: u128 = magazines
                .iter()
                .map(|(class, starts)| {
                    u128::from(self.piece_less(*class) + 1) * starts.len() as u128
                })
                .sum();
            let stock = lock(&self.stock);
            let segments = &stock.segments;
            let cached = cached + stock.idle_bytes;
            let longest_less = segments.free.longest_less(&segments.slab);
            ArenaUsage {
                free_bytes: bytes(segments.total_bytes - segments.allocated_bytes),
                allocated_bytes: bytes(segments.allocated_bytes.saturating_sub(cached)),
                cached_bytes: bytes(cached),
                largest_free_bytes: longest_less.map_or(0, |less| less.saturating_add(1)),
                allocated_segments: (segments.chained + stock.chunk_count()) as u64,
                spans: segments.spans.len() as u64,
                foreign_frees: self.foreign_frees.load(Ordering::Relaxed),
            }
        })
    }

    #[inline]
    fn alloc_cached(&self, stripe: usize, class: usize) -> Result<u64, ArenaError> {
        match self.caches.take(stripe, class, &self.source()) {
            Some(start) => Ok(start),
            None => self.alloc_single(class),
        }
    }

    /// The caches are empty and could not be refilled: takes the last place, wherever it is.
    #[cold]
    #[inline(never)]
    fn alloc_single(&self, class: usize) -> Result<u64, ArenaError> {
        let request = Request::plain(self.piece_less(class), self.quantum);
        self.alloc_from_segments(&request, Owner::Caches)
    }

    #[inline]
    fn free_cached(&self, stripe: usize, class: usize, start: u64) -> Result<(), ArenaError> {
        self.aligned(start)?;
        if self.doubts_frees {
            self.check_free(start, class)?;
        }
        self.caches.put(stripe, class, start, &self.source());
        Ok(())
    }

    /// Takes from the segments; if there is no place, retries with all caches emptied and locked.
    fn alloc_from_segments(&self, request: &Request, owner: Owner) -> Result<u64, ArenaError> {
        let first = lock(&self.stock).segments.alloc(request, owner);
        match first {
            Err(ArenaError::Full { .. }) if self.caches.classes() > 0 => {
                let again = || {
                    let mut stock = lock(&self.stock);
                    stock.dissolve_chunks();
                    stock.segments.alloc(request, owner)
                };
                self.caches.drain(&self.source(), again)
            }
            other => other,
        }
    }

    /// Check of a debug build at each free of a cached size.
    #[cold]
    #[inline(never)]
    fn check_free(&self, start: u64, class: usize) -> Result<(), ArenaError> {
        // It could be in a magazine of another size only after a wrong free, which is refused.
        if self.caches.holds(class, start) {
            return Err(ArenaError::NotAllocated { start });
        }
        lock(&self.stock).allocated_as(start, self.piece_less(class))
    }

    #[inline]
    fn aligned(&self, start: u64) -> Result<(), ArenaError> {
        let quantum = self.quantum;
        if start & (quantum - 1) == 0 {
            return Ok(());
        }
        Err(ArenaError::Unaligned {
            address: start,
            quantum,
        })
    }

    /// Index of the cache that serves `size`: its quanta less one.
    #[inline]
    fn cached_class(&self, size: u64) -> Option<usize> {
        let class = size.checked_sub(1)? >> self.quantum.trailing_zeros();
        // A value too large for an index is too large for a cache.
        let class = usize::try_from(class).unwrap_or(usize::MAX);
        (class < self.caches.classes()).then_some(class)
    }

    /// Size of the pieces of a cache, less one.
    fn piece_less(&self, class: usize) -> u64 {
        class as u64 * self.quantum + (self.quantum - 1)
    }

    fn source(&self) -> SegmentSource<'_> {
        SegmentSource(self)
    }
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arena")
            .field("quantum", &self.quantum)
            .field("usage", &self.usage())
            .finish_non_exhaustive()
    }
}

/// The segments as the caches see them.
struct SegmentSource<'a>(&'a Arena);

impl PieceSource for SegmentSource<'_> {
    fn take(&self, class: usize, count: usize, pieces: &mut Vec<u64>) {
        lock(&self.0.stock).take_pieces(class, count, pieces);
    }

    fn give_back(&self, class: usize, pieces: &[u64]) {
        let mut stock = lock(&self.0.stock);
        for &start in pieces {
            if stock.give_back_piece(class, start).is_err() {
                self.0.foreign_frees.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}
