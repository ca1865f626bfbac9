// SPDX-License-Identifier: Apache-2.0
//! What is asked of an arena: settings, constraints, errors; and a request, checked and normalized,
//! with the place that it finds in one free segment. See 'Requests' in [`super`].

/// How an arena finds places.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fit {
    /// Any place that certainly fits, in constant time. [`Arena::alloc_at`](super::Arena::alloc_at) and constraints on
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
    /// Largest size served by the caches, in quanta; 0: no caches. Capped at
    /// [`CACHED_QUANTA_LIMIT`](super::CACHED_QUANTA_LIMIT).
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

/// A checked request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Request {
    /// Size less one, rounded to quanta.
    pub size_less: u64,
    /// Size with both guards, less one.
    pub total_less: u64,
    /// Guard of each side, rounded to quanta.
    pub guard: u64,
    /// Power of two, at least the quantum.
    align: u64,
    phase: u64,
    /// Power of two, or 0.
    no_cross: u64,
    /// Lowest start.
    pub min: u64,
    /// Highest address that the allocation may include.
    pub last: u64,
}

/// `size` in whole quanta, less one.
pub(super) fn size_less(size: u64, quantum: u64) -> Result<u64, ArenaError> {
    let less = size.checked_sub(1).map(|less| less | (quantum - 1));
    // A size of 2^64 bytes is not representable, so a size that rounds up to it is refused.
    less.filter(|&less| less != u64::MAX)
        .ok_or(ArenaError::Size { size, quantum })
}

impl Request {
    /// `size_less` anywhere.
    pub(super) fn plain(size_less: u64, quantum: u64) -> Self {
        Self {
            size_less,
            total_less: size_less,
            guard: 0,
            align: quantum,
            phase: 0,
            no_cross: 0,
            min: 0,
            last: u64::MAX,
        }
    }

    /// `bytes`, a power of two, aligned to their size.
    pub(super) fn aligned_chunk(bytes: u64, quantum: u64) -> Self {
        Self {
            align: bytes,
            ..Self::plain(bytes - 1, quantum)
        }
    }

    /// `size_less` at exactly `start`.
    pub(super) fn at(start: u64, size_less: u64, quantum: u64) -> Result<Self, ArenaError> {
        if !start.is_multiple_of(quantum) {
            return Err(ArenaError::Unaligned {
                address: start,
                quantum,
            });
        }
        let size = size_less + 1;
        let last = start
            .checked_add(size_less)
            .ok_or(ArenaError::Taken { start, size })?;
        Ok(Self {
            min: start,
            last,
            ..Self::plain(size_less, quantum)
        })
    }

    /// `size_less` under `constraints`.
    pub(super) fn constrained(
        size_less: u64,
        constraints: &Constraints,
        quantum: u64,
    ) -> Result<Self, ArenaError> {
        let c = constraints;
        let align = c.align.max(quantum);
        let power_or_zero = |n: u64| n == 0 || n.is_power_of_two();
        let wrong = |what| Err(ArenaError::Constraints { what });
        if !power_or_zero(c.align) || !power_or_zero(c.no_cross) {
            return wrong("align and no_cross must be powers of two");
        }
        if c.phase >= align || !c.phase.is_multiple_of(quantum) {
            return wrong("phase must be below align and a multiple of the quantum");
        }
        if c.no_cross != 0 && size_less > c.no_cross - 1 {
            return wrong("size must not exceed no_cross");
        }
        let guard = c.guard.checked_next_multiple_of(quantum);
        let guarded = guard.and_then(|g| Some((g, size_less.checked_add(g.checked_mul(2)?)?)));
        let Some((guard, total_less)) = guarded else {
            return wrong("size and guards together exceed 2^64");
        };
        Ok(Self {
            size_less,
            total_less,
            guard,
            align,
            phase: c.phase,
            no_cross: c.no_cross,
            min: c.min,
            last: c.last,
        })
    }

    /// Lowest start in the free segment `first..=last` that satisfies all constraints.
    #[inline]
    pub(super) fn place(&self, first: u64, last: u64) -> Option<u64> {
        let low = first.checked_add(self.guard)?.max(self.min);
        let high = last.checked_sub(self.guard)?.min(self.last);
        let start = self.aligned(low)?;
        let end = start.checked_add(self.size_less)?;
        if end > high {
            return None;
        }
        if !self.crosses(start, end) {
            return Some(start);
        }
        // All aligned starts lie at the same offset after a boundary (or, when align exceeds
        // no_cross, at one offset within each window), so one step behind the boundary decides it.
        let start = self.aligned(end & !(self.no_cross - 1))?;
        let end = start.checked_add(self.size_less)?;
        (end <= high && !self.crosses(start, end)).then_some(start)
    }

    /// Length less one in which a plain or aligned request always finds a place.
    #[inline]
    pub(super) fn certain_less(&self, quantum: u64) -> Option<u64> {
        self.total_less.checked_add(self.align - quantum)
    }

    #[inline]
    fn aligned(&self, low: u64) -> Option<u64> {
        low.checked_add(self.phase.wrapping_sub(low) & (self.align - 1))
    }

    #[inline]
    fn crosses(&self, start: u64, end: u64) -> bool {
        self.no_cross != 0 && (start ^ end) & !(self.no_cross - 1) != 0
    }
}
