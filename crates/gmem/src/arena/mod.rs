// SPDX-License-Identifier: Apache-2.0
//! An allocator of integers (GMEM 5.1; after vmem: Bonwick & Adams, "Magazines
//! and Vmem", 2001): virtual addresses, I/O virtual addresses, physical memory
//! of a device.
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
//! sizes from magazines of the calling thread (module `magazines`). In the common case that does
//! not touch the segments, so its cost does not depend on how much is allocated.
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
//! Stripes by number, then the depot, then the segments. To the rest of the program all are leaf
//! locks, and no callback runs under them.

mod address_tree;
mod check;
mod chunks;
mod free_index;
mod magazines;
#[cfg(all(test, loom))]
mod model;
mod request;
mod segments;
#[cfg(all(test, not(loom)))]
mod tests;

use crate::sync::{AtomicU64, Mutex, Ordering, lock};

use free_index::FreeIndex;
pub use magazines::CACHED_QUANTA_LIMIT;
use magazines::{Caches, PieceSource};
use request::{Request, size_less};
use segments::{Owner, Segments};

/// How an arena finds places.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fit {
    /// Any place that certainly fits, in constant time. [`Arena::alloc_at`] and constraints on
    /// `min` and `last` may have to examine many free segments.
    #[default]
    Instant,
    /// The lowest address that fits, in O(log n); in O(k log n) if k free segments are long enough
    /// but excluded by an alignment or a boundary. With caches, small pieces come in the order of
    /// the magazines instead.
    First,
}

/// How an arena is set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaSettings {
    /// The unit; a power of two.
    pub quantum: u64,
    /// How places are found.
    pub fit: Fit,
    /// Largest size served by the caches, in quanta; 0: no caches. Capped at [`CACHED_QUANTA_LIMIT`].
    pub cached_quanta_max: u32,
}

impl Default for ArenaSettings {
    /// Pages, instant fit, caches up to 512 pages: sizes up to a huge page.
    fn default() -> Self {
        Self {
            quantum: 4096,
            fit: Fit::Instant,
            cached_quanta_max: 512,
        }
    }
}

/// Constraints on an allocation. The default has none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Constraints {
    /// The start is `phase` above a multiple of this; a power of two. Below the quantum means the quantum.
    pub align: u64,
    /// See `align`; below it, a multiple of the quantum.
    pub phase: u64,
    /// The allocation does not include both `n * no_cross - 1` and `n * no_cross`; a power of two.
    /// 0: it may cross anything.
    pub no_cross: u64,
    /// Lowest start.
    pub min: u64,
    /// Last integer that the allocation may include.
    pub last: u64,
    /// Bytes on each side that no other allocation may use. They are taken from the arena too, so a
    /// guarded allocation does not lie at the end of a span; the constraints above do not apply to
    /// them.
    pub guard: u64,
}

impl Default for Constraints {
    fn default() -> Self {
        Self {
            align: 1,
            phase: 0,
            no_cross: 0,
            min: 0,
            last: u64::MAX,
            guard: 0,
        }
    }
}

/// Why a call failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ArenaError {
    /// No place satisfies the request.
    #[error("no free place for {size:#x} under these constraints")]
    Full {
        /// Size asked, rounded up.
        size: u64,
    },
    /// Part of the wanted range is allocated, or outside the arena.
    #[error("{size:#x} at {start:#x} are not free")]
    Taken {
        /// Start wanted.
        start: u64,
        /// Size wanted, rounded up.
        size: u64,
    },
    /// An invalid size.
    #[error(
        "a size of {size:#x} cannot be, it must be above 0 and fit 64 bits in units of {quantum:#x}"
    )]
    Size {
        /// Size given.
        size: u64,
        /// The arena's unit.
        quantum: u64,
    },
    /// A start that is not a multiple of the quantum.
    #[error("{address:#x} is not a multiple of the unit {quantum:#x}")]
    Unaligned {
        /// Start given.
        address: u64,
        /// The arena's unit.
        quantum: u64,
    },
    /// Constraints that contradict themselves.
    #[error("constraints cannot be met by any place: {what}")]
    Constraints {
        /// Which.
        what: &'static str,
    },
    /// A range that cannot be added.
    #[error("{first:#x}..={last:#x} is not a range of whole units of {quantum:#x}")]
    Span {
        /// First integer.
        first: u64,
        /// Last integer.
        last: u64,
        /// The arena's unit.
        quantum: u64,
    },
    /// Part of the range is already in the arena.
    #[error("some of {first:#x}..={last:#x} is in the arena already")]
    Overlap {
        /// First integer.
        first: u64,
        /// Last integer.
        last: u64,
    },
    /// A free of a start at which no allocation begins.
    #[error("nothing that is allocated begins at {start:#x}")]
    NotAllocated {
        /// Start given.
        start: u64,
    },
    /// A free with a size other than that of the allocation.
    #[error("{allocated:#x} are allocated at {start:#x}, not {size:#x}")]
    WrongSize {
        /// Start given.
        start: u64,
        /// Size given, rounded up.
        size: u64,
        /// Size of the allocation.
        allocated: u64,
    },
    /// Passed to `free_direct` but allocated by `alloc` in a cached size.
    #[error("{start:#x} belongs to the caches: give it to free, not to free_direct")]
    OfTheCaches {
        /// Start given.
        start: u64,
    },
    /// No more segments can be indexed.
    #[error("the arena has {max} segments already: free some")]
    Segments {
        /// Most there can be.
        max: usize,
    },
    /// Found by [`Arena::check`]: a bug in this module, or the result of wrong frees.
    #[error("the arena is inconsistent: {what}")]
    Broken {
        /// What was found.
        what: String,
    },
}

/// Usage. Byte counts saturate at `u64::MAX`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ArenaUsage {
    /// Neither allocated nor cached.
    pub free_bytes: u64,
    /// Held by callers, guards included.
    pub allocated_bytes: u64,
    /// Cached in magazines and chunks.
    pub cached_bytes: u64,
    /// Longest free segment.
    pub largest_free_bytes: u64,
    /// Allocated segments; a chunk of the caches, up to 64 pieces, is one.
    pub allocated_segments: u64,
    /// Spans; adjacent ones count as one.
    pub spans: u64,
    /// Starts returned by the caches that were not theirs: wrong frees of cached sizes.
    pub foreign_frees: u64,
}

/// An allocator of integers; see the module.
#[doc(alias = "vmem_create")]
pub struct Arena {
    quantum: u64,
    segments: Mutex<Segments>,
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
            segments: Mutex::new(Segments::new(quantum, FreeIndex::new(settings.fit))),
            caches: Caches::new(classes as usize, stripes),
            foreign_frees: AtomicU64::new(0),
            doubts_frees: cfg!(debug_assertions),
        }
    }

    /// The unit.
    #[must_use]
    pub fn quantum(&self) -> u64 {
        self.quantum
    }

    /// Adds the integers `first..=last`; `last` may be `u64::MAX`.
    ///
    /// # Errors
    /// [`ArenaError::Span`] if they are not whole quanta, [`ArenaError::Overlap`] if some are
    /// present.
    #[doc(alias = "vmem_add")]
    pub fn add(&self, first: u64, last: u64) -> Result<(), ArenaError> {
        lock(&self.segments).add(first, last)
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
        lock(&self.segments).free(start, size_less, Owner::Caller)
    }

    /// Returns all cached pieces to the segments. Runs automatically before an allocation fails.
    #[doc(alias = "vmem_qcache_reap")]
    pub fn reap(&self) {
        let dissolve = || lock(&self.segments).dissolve_chunks();
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
            let segments = lock(&self.segments);
            let cached = cached + segments.chunks.idle_bytes;
            let longest_less = segments.free.longest_less(&segments.slab);
            ArenaUsage {
                free_bytes: bytes(segments.total_bytes - segments.allocated_bytes),
                allocated_bytes: bytes(segments.allocated_bytes.saturating_sub(cached)),
                cached_bytes: bytes(cached),
                largest_free_bytes: longest_less.map_or(0, |less| less.saturating_add(1)),
                allocated_segments: (segments.chained + segments.count_chunks().0) as u64,
                spans: segments.spans.len() as u64,
                foreign_frees: self.foreign_frees.load(Ordering::Relaxed),
            }
        })
    }

    /// Walks and compares all structures: for tests, O(n) with every lock held.
    ///
    /// # Errors
    /// [`ArenaError::Broken`] with the first contradiction.
    pub fn check(&self) -> Result<(), ArenaError> {
        self.caches.look(|magazines| {
            let segments = lock(&self.segments);
            segments.check()?;
            segments.check_cached(magazines.iter().flat_map(|(class, starts)| {
                let size_less = self.piece_less(*class);
                starts.iter().map(move |&start| (start, size_less))
            }))
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
        let first = lock(&self.segments).alloc(request, owner);
        match first {
            Err(ArenaError::Full { .. }) if self.caches.classes() > 0 => {
                let again = || {
                    let mut segments = lock(&self.segments);
                    segments.dissolve_chunks();
                    segments.alloc(request, owner)
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
        lock(&self.segments).allocated_as(start, self.piece_less(class))
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
        lock(&self.0.segments).take_pieces(class, count, pieces);
    }

    fn give_back(&self, class: usize, pieces: &[u64]) {
        let mut segments = lock(&self.0.segments);
        for &start in pieces {
            if segments.give_back_piece(class, start).is_err() {
                self.0.foreign_frees.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}
