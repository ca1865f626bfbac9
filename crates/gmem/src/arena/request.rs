// SPDX-License-Identifier: Apache-2.0
//! A request to an arena, checked and normalized; and where it fits in one free segment.
//!
//! Lengths are stored as length less one, because an arena may hold all 2^64 integers. `place` is
//! pure arithmetic and handles every constraint, so that all ways of searching give the same kinds
//! of places.

use super::{ArenaError, Constraints};

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
