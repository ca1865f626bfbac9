// SPDX-License-Identifier: Apache-2.0
//! Checks the invariants of all segments.

use std::collections::BTreeSet;

use super::ArenaError;
use super::segments::{Kind, Seg, Segments};

fn broken<T>(what: String) -> Result<T, ArenaError> {
    Err(ArenaError::Broken { what })
}

/// Counts of a walk over all spans.
#[derive(Default)]
struct Tally {
    free: usize,
    allocated: usize,
    chunks: usize,
    guarded: usize,
    total_bytes: u128,
    allocated_bytes: u128,
}

impl Segments {
    /// Checks rings, coalescing, hash, guards, counts and the index of free segments.
    pub(super) fn check(&self) -> Result<(), ArenaError> {
        let mut tally = Tally::default();
        let mut end_before: Option<u64> = None;
        for (&first, &border) in &self.spans {
            let span = &self.slab[border.at()];
            if span.first != first || span.kind() != Kind::Border {
                return broken(format!("the span at {first:#x} has the border {span:?}"));
            }
            if end_before.is_some_and(|end| end.checked_add(1).is_none_or(|next| next >= first)) {
                return broken(format!("the span at {first:#x} touches the one below it"));
            }
            end_before = Some(span.last);
            self.check_span(border, &mut tally)?;
        }
        if tally.allocated != self.chained || tally.guarded != self.guards.len() {
            return broken(format!(
                "{} allocated, {} guarded, but {} hashed and {} guards",
                tally.allocated,
                tally.guarded,
                self.chained,
                self.guards.len()
            ));
        }
        if (tally.total_bytes, tally.allocated_bytes) != (self.total_bytes, self.allocated_bytes) {
            return broken(format!(
                "{} bytes, {} allocated, but counted as {} and {}",
                tally.total_bytes, tally.allocated_bytes, self.total_bytes, self.allocated_bytes
            ));
        }
        let counted = (tally.chunks, self.chunks.idle_bytes);
        if self.count_chunks() != counted {
            return broken(format!("chunks and idle bytes should be {counted:?}"));
        }
        self.check_free_index(tally.free)
    }

    fn check_span(&self, border: Seg, tally: &mut Tally) -> Result<(), ArenaError> {
        let span = &self.slab[border.at()];
        let (mut before, mut seg) = (border, span.after);
        let mut expected = Some(span.first);
        while seg != border {
            let segment = &self.slab[seg.at()];
            let in_order = expected == Some(segment.first) && segment.first <= segment.last;
            if !in_order || segment.before != before {
                return broken(format!("{segment:?} does not follow {before:?}"));
            }
            let bytes = u128::from(segment.length_less()) + 1;
            tally.total_bytes += bytes;
            match segment.kind() {
                Kind::Free if self.slab[before.at()].kind() == Kind::Free => {
                    return broken(format!("{segment:?} and the one before it are both free"));
                }
                Kind::Free => tally.free += 1,
                Kind::Chunk => {
                    tally.chunks += 1;
                    tally.allocated_bytes += bytes;
                    if !self.is_chunk(seg) {
                        return broken(format!("{segment:?} contradicts its chunk"));
                    }
                }
                Kind::Allocated | Kind::Guarded | Kind::Cached => {
                    tally.allocated += 1;
                    tally.allocated_bytes += bytes;
                    tally.guarded += usize::from(segment.kind() == Kind::Guarded);
                    if self.find(segment.first + self.guard(seg)) != Some(seg) {
                        return broken(format!("{segment:?} is not hashed by its start"));
                    }
                }
                Kind::Border | Kind::Vacant => {
                    return broken(format!("{segment:?} is within a span"));
                }
            }
            expected = segment.last.checked_add(1);
            (before, seg) = (seg, segment.after);
        }
        if span.before != before || self.slab[before.at()].last != span.last {
            return broken(format!("the span {span:?} ends with {before:?}"));
        }
        Ok(())
    }

    /// Each cached piece is allocated with its size, and is in one magazine.
    pub(super) fn check_cached(
        &self,
        pieces: impl Iterator<Item = (u64, u64)>,
    ) -> Result<(), ArenaError> {
        let mut seen = BTreeSet::new();
        for (start, size_less) in pieces {
            if !seen.insert(start) {
                return broken(format!("{start:#x} is in two magazines"));
            }
            self.allocated_as(start, size_less)
                .or_else(|error| broken(format!("in a magazine: {error}")))?;
        }
        Ok(())
    }

    /// Whether `start` is allocated with this size.
    pub(super) fn allocated_as(&self, start: u64, size_less: u64) -> Result<(), ArenaError> {
        let single = || {
            let seg = self.find(start)?;
            Some(self.slab[seg.at()].length_less() - 2 * self.guard(seg))
        };
        let length_less = self
            .piece_in_use(start)
            .or_else(single)
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
}
