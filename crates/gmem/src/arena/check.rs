// SPDX-License-Identifier: Apache-2.0
//! For tests: walks and compares all structures of an arena, with every lock held.

use super::{
    Arena,
    caches::{Shape, Stock},
    free_index::{Kind, Seg},
    segments::Segments,
};
use crate::sync::lock;
use std::collections::BTreeSet;

fn broken<T>(what: String) -> Result<T, String> {
    Err(what)
}

impl Arena {
    /// The first contradiction, if there is one: a bug in the arena, or the result of wrong frees.
    pub(super) fn check(&self) -> Result<(), String> {
        self.caches.look(|magazines| {
            let stock = lock(&self.stock);
            stock.check()?;
            stock.check_cached(magazines.iter().flat_map(|(class, starts)| {
                let size_less = self.piece_less(*class);
                starts.iter().map(move |&start| (start, size_less))
            }))
        })
    }
}

impl Stock {
    fn check(&self) -> Result<(), String> {
        let chunks = self.segments.check(&|seg| self.is_chunk(seg))?;
        let counted = (chunks, self.idle_bytes);
        if self.count_chunks() != counted {
            return broken(format!("chunks and idle bytes should be {counted:?}"));
        }
        Ok(())
    }

    /// Whether `seg` is a valid chunk.
    fn is_chunk(&self, seg: Seg) -> bool {
        let segment = &self.segments.slab[seg.at()];
        let Some(chunk) = self.chunks.get(&segment.first) else {
            return false;
        };
        let shape = Shape::new(chunk.class, self.segments.quantum);
        let partial = self.partial.get(&chunk.class);
        let listed = partial.is_some_and(|partial| partial.contains(&segment.first));
        chunk.seg == seg
            && segment.length_less() == shape.chunk_bytes - 1
            && listed == (chunk.idle != 0)
            && chunk.idle & !shape.all() == 0
            && chunk.idle != shape.all()
    }

    /// Number of chunks and their idle bytes, counted.
    fn count_chunks(&self) -> (usize, u128) {
        let idle = self.chunks.values().map(|chunk| {
            let shape = Shape::new(chunk.class, self.segments.quantum);
            let in_use = u64::from((shape.all() & !chunk.idle).count_ones());
            u128::from(shape.chunk_bytes - in_use * shape.piece_bytes)
        });
        (self.chunks.len(), idle.sum())
    }

    /// Each cached piece is allocated with its size, and is in one magazine.
    fn check_cached(&self, pieces: impl Iterator<Item = (u64, u64)>) -> Result<(), String> {
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
    /// Checks rings, coalescing, hash, guards, counts and the index of free segments; returns how
    /// many chunks there are.
    fn check(&self, is_chunk: &dyn Fn(Seg) -> bool) -> Result<usize, String> {
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
            self.check_span(border, &mut tally, is_chunk)?;
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
        self.free.check(&self.slab, tally.free)?;
        Ok(tally.chunks)
    }

    fn check_span(
        &self,
        border: Seg,
        tally: &mut Tally,
        is_chunk: &dyn Fn(Seg) -> bool,
    ) -> Result<(), String> {
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
                    if !is_chunk(seg) {
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
}
