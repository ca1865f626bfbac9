// SPDX-License-Identifier: Apache-2.0
//! All segments of an arena: taken, freed and coalesced. See 'Segments' in [`super`].

use super::{
    free_index::{FreeIndex, Kind, Seg, Segment},
    request::{ArenaError, Request},
};
use std::collections::BTreeMap;

/// Most segments of an arena that indexes can name. An allocation that would exceed it fails.
pub(super) const SEGMENTS_MAX: usize = (u32::MAX - 7) as usize;

/// For whom a piece is taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Owner {
    Caller,
    Caches,
}

/// The segments of one arena. Not synchronized: the arena has a lock around it.
pub(super) struct Segments {
    pub(super) quantum: u64,
    pub(super) slab: Vec<Segment>,
    vacant: Seg,
    pub(super) free: FreeIndex,
    /// Heads of hash chains; their number is a power of two.
    buckets: Vec<Seg>,
    pub(super) chained: usize,
    pub(super) guards: BTreeMap<Seg, u64>,
    /// Borders by the first integer of their span.
    pub(super) spans: BTreeMap<u64, Seg>,
    pub(super) total_bytes: u128,
    /// Guards and whole chunks included.
    pub(super) allocated_bytes: u128,
}

const BUCKETS_MIN: usize = 64;

impl Segments {
    pub(super) fn new(quantum: u64, free: FreeIndex) -> Self {
        Self {
            quantum,
            slab: Vec::new(),
            vacant: Seg::NONE,
            free,
            buckets: vec![Seg::NONE; BUCKETS_MIN],
            chained: 0,
            guards: BTreeMap::new(),
            spans: BTreeMap::new(),
            total_bytes: 0,
            allocated_bytes: 0,
        }
    }

    /// Takes what `request` asks for; on an error nothing has changed.
    pub(super) fn alloc(&mut self, request: &Request, owner: Owner) -> Result<u64, ArenaError> {
        if self.slab.len() >= SEGMENTS_MAX - 2 {
            return Err(ArenaError::Segments { max: SEGMENTS_MAX });
        }
        let found = self.free.find(&self.slab, request, self.quantum);
        let size = request.size_less + 1;
        let (seg, start) = found.ok_or(ArenaError::Full { size })?;
        let taken = self.carve(
            seg,
            start - request.guard,
            start + (request.total_less - request.guard),
        );
        self.slab[taken.at()].prev = match owner {
            Owner::Caches => Seg::CACHED,
            Owner::Caller if request.guard > 0 => Seg::GUARDED,
            Owner::Caller => Seg::ALLOCATED,
        };
        if request.guard > 0 {
            self.guards.insert(taken, request.guard);
        }
        self.chain(taken, start);
        self.allocated_bytes += u128::from(request.total_less) + 1;
        Ok(start)
    }

    /// Frees the segment that begins at `start`; `by` must be the owner that took it.
    pub(super) fn free(&mut self, start: u64, size_less: u64, by: Owner) -> Result<(), ArenaError> {
        let Some(seg) = self.find(start) else {
            return Err(ArenaError::NotAllocated { start });
        };
        let segment = self.slab[seg.at()];
        let guard = self.guard(seg);
        let length_less = segment.length_less() - 2 * guard;
        if length_less != size_less {
            return Err(ArenaError::WrongSize {
                start,
                size: size_less + 1,
                allocated: length_less + 1,
            });
        }
        if by == Owner::Caller && segment.kind() == Kind::Cached {
            return Err(ArenaError::OfTheCaches { start });
        }
        self.unchain(seg, start);
        self.guards.remove(&seg);
        self.allocated_bytes -= u128::from(segment.length_less()) + 1;
        self.release(seg);
        Ok(())
    }

    /// A segment for a chunk, if one certainly fits: a search would cost more than it saves.
    pub(super) fn alloc_chunk(&mut self, request: &Request) -> Option<(u64, Seg)> {
        if self.slab.len() >= SEGMENTS_MAX - 2 {
            return None;
        }
        let (seg, start) = self.free.find_certain(&self.slab, request, self.quantum)?;
        let taken = self.carve(seg, start, start + request.size_less);
        self.slab[taken.at()].prev = Seg::CHUNK;
        self.allocated_bytes += u128::from(request.size_less) + 1;
        Some((start, taken))
    }

    /// Frees the segment of a chunk.
    pub(super) fn free_chunk(&mut self, seg: Seg) {
        self.allocated_bytes -= u128::from(self.slab[seg.at()].length_less()) + 1;
        self.release(seg);
    }

    /// Splits the chunk `seg` into a segment for each of `pieces` (ascending) and free ones in
    /// between.
    pub(super) fn split_chunk(&mut self, seg: Seg, pieces: &[u64], piece_bytes: u64) {
        let Segment {
            first,
            last,
            mut before,
            ..
        } = self.slab[seg.at()];
        self.allocated_bytes -= u128::from(last - first) + 1;
        self.allocated_bytes += u128::from(piece_bytes) * pieces.len() as u128;
        self.remove(seg);
        let mut free = Vec::new();
        let mut next = Some(first);
        for &piece in pieces {
            if let Some(next) = next.filter(|&next| next < piece) {
                before = self.insert_after(before, next, piece - 1);
                free.push(before);
            }
            let end = piece + (piece_bytes - 1);
            before = self.insert_after(before, piece, end);
            self.slab[before.at()].prev = Seg::CACHED;
            self.chain(before, piece);
            next = end.checked_add(1);
        }
        if let Some(next) = next.filter(|&next| next <= last) {
            free.push(self.insert_after(before, next, last));
        }
        for seg in free {
            self.release(seg);
        }
    }

    /// Adds the integers `first..=last`, joined to adjacent spans.
    pub(super) fn add(&mut self, first: u64, last: u64) -> Result<(), ArenaError> {
        let quantum = self.quantum;
        if first > last || !first.is_multiple_of(quantum) || last & (quantum - 1) != quantum - 1 {
            return Err(ArenaError::Span {
                first,
                last,
                quantum,
            });
        }
        let below = self.spans.range(..=last).next_back().map(|(_, &seg)| seg);
        if below.is_some_and(|seg| self.slab[seg.at()].last >= first) {
            return Err(ArenaError::Overlap { first, last });
        }
        if self.slab.len() >= SEGMENTS_MAX - 2 {
            return Err(ArenaError::Segments { max: SEGMENTS_MAX });
        }
        self.total_bytes += u128::from(last - first) + 1;
        let border = match below {
            Some(seg) if self.slab[seg.at()].last.checked_add(1) == Some(first) => {
                self.slab[seg.at()].last = last;
                seg
            }
            _ => self.open_span(first, last),
        };
        let tail = self.slab[border.at()].before;
        let seg = self.insert_after(tail, first, last);
        let above = last
            .checked_add(1)
            .and_then(|next| self.spans.remove(&next));
        if let Some(above) = above {
            self.join(border, above);
        }
        self.release(seg);
        Ok(())
    }

    /// Width of each guard within `seg`.
    #[inline]
    pub(super) fn guard(&self, seg: Seg) -> u64 {
        if self.slab[seg.at()].kind() == Kind::Guarded {
            self.guards.get(&seg).copied().unwrap_or(0)
        } else {
            0
        }
    }

    /// Size less one of what is allocated at `start` as a segment, guards left out.
    pub(super) fn allocated_less(&self, start: u64) -> Option<u64> {
        let seg = self.find(start)?;
        Some(self.slab[seg.at()].length_less() - 2 * self.guard(seg))
    }

    /// The allocated segment that begins (behind its guard) at `start`.
    #[inline]
    pub(super) fn find(&self, start: u64) -> Option<Seg> {
        let mut seg = self.buckets[self.bucket(start)];
        while seg != Seg::NONE {
            let segment = &self.slab[seg.at()];
            if segment.first + self.guard(seg) == start {
                return Some(seg);
            }
            seg = segment.next;
        }
        None
    }

    /// A new span without segments.
    fn open_span(&mut self, first: u64, last: u64) -> Seg {
        let border = self.segment(first, last);
        let segment = &mut self.slab[border.at()];
        (segment.before, segment.after, segment.prev) = (border, border, Seg::BORDER);
        self.spans.insert(first, border);
        border
    }

    /// Appends the ring of `above` to that of `below`.
    fn join(&mut self, below: Seg, above: Seg) {
        let upper = self.slab[above.at()];
        let tail = self.slab[below.at()].before;
        self.slab[tail.at()].after = upper.after;
        self.slab[upper.after.at()].before = tail;
        self.slab[upper.before.at()].after = below;
        self.slab[below.at()].before = upper.before;
        self.slab[below.at()].last = upper.last;
        self.vacate(above);
    }

    /// Cuts `first..=last` out of the free segment `seg`; the result is linked by address only.
    fn carve(&mut self, seg: Seg, first: u64, last: u64) -> Seg {
        let whole = self.slab[seg.at()];
        match (whole.first < first, last < whole.last) {
            (false, false) => {
                self.free.unlink(&mut self.slab, seg);
                seg
            }
            (true, false) => {
                self.free
                    .resize(&mut self.slab, seg, whole.first, first - 1);
                self.insert_after(seg, first, last)
            }
            (false, true) => {
                // The rest keeps the segment: a large one stays in its list.
                self.free.resize(&mut self.slab, seg, last + 1, whole.last);
                self.insert_after(whole.before, first, last)
            }
            (true, true) => {
                self.free
                    .resize(&mut self.slab, seg, whole.first, first - 1);
                let taken = self.insert_after(seg, first, last);
                let rest = self.insert_after(taken, last + 1, whole.last);
                self.free.link(&mut self.slab, rest);
                taken
            }
        }
    }

    /// Makes `seg` free, together with free neighbours.
    fn release(&mut self, seg: Seg) {
        let Segment {
            first,
            last,
            before,
            after,
            ..
        } = self.slab[seg.at()];
        let lower = self.slab[before.at()];
        let upper = self.slab[after.at()];
        match (lower.kind() == Kind::Free, upper.kind() == Kind::Free) {
            (false, false) => self.free.link(&mut self.slab, seg),
            (true, false) => {
                self.free.resize(&mut self.slab, before, lower.first, last);
                self.remove(seg);
            }
            (false, true) => {
                self.free.resize(&mut self.slab, after, first, upper.last);
                self.remove(seg);
            }
            (true, true) => {
                self.free.unlink(&mut self.slab, after);
                self.free
                    .resize(&mut self.slab, before, lower.first, upper.last);
                self.remove(seg);
                self.remove(after);
            }
        }
    }

    /// A new segment behind `before`, linked by address only.
    fn insert_after(&mut self, before: Seg, first: u64, last: u64) -> Seg {
        let seg = self.segment(first, last);
        let after = self.slab[before.at()].after;
        self.slab[seg.at()].before = before;
        self.slab[seg.at()].after = after;
        self.slab[before.at()].after = seg;
        self.slab[after.at()].before = seg;
        seg
    }

    /// Unlinks `seg` from the order of addresses.
    fn remove(&mut self, seg: Seg) {
        let Segment { before, after, .. } = self.slab[seg.at()];
        self.slab[before.at()].after = after;
        self.slab[after.at()].before = before;
        self.vacate(seg);
    }

    fn segment(&mut self, first: u64, last: u64) -> Seg {
        let segment = Segment {
            first,
            last,
            before: Seg::NONE,
            after: Seg::NONE,
            prev: Seg::VACANT,
            next: Seg::NONE,
        };
        let seg = self.vacant;
        if seg != Seg::NONE {
            self.vacant = self.slab[seg.at()].next;
            self.slab[seg.at()] = segment;
            return seg;
        }
        // Callers have checked that the slab is below SEGMENTS_MAX.
        let seg = Seg(u32::try_from(self.slab.len()).unwrap_or(u32::MAX));
        self.slab.push(segment);
        seg
    }

    fn vacate(&mut self, seg: Seg) {
        let segment = &mut self.slab[seg.at()];
        (segment.prev, segment.next) = (Seg::VACANT, self.vacant);
        self.vacant = seg;
    }

    /// Fibonacci hashing: starts are multiples of the quantum and often of more.
    #[inline]
    fn bucket(&self, start: u64) -> usize {
        let hash = (start / self.quantum).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let shift = u64::BITS - self.buckets.len().trailing_zeros();
        usize::try_from(hash >> shift).unwrap_or(0)
    }

    fn chain(&mut self, seg: Seg, start: u64) {
        if self.chained >= self.buckets.len() {
            self.widen();
        }
        self.chained += 1;
        let bucket = self.bucket(start);
        self.slab[seg.at()].next = self.buckets[bucket];
        self.buckets[bucket] = seg;
    }

    fn unchain(&mut self, seg: Seg, start: u64) {
        let next = self.slab[seg.at()].next;
        let bucket = self.bucket(start);
        self.chained -= 1;
        if self.buckets[bucket] == seg {
            self.buckets[bucket] = next;
            return;
        }
        let mut at = self.buckets[bucket];
        while at != Seg::NONE {
            let segment = &mut self.slab[at.at()];
            if segment.next == seg {
                segment.next = next;
                return;
            }
            at = segment.next;
        }
    }

    /// Doubles the buckets. The pause is paid once for each doubling of the allocated segments.
    fn widen(&mut self) {
        let mut buckets = std::mem::take(&mut self.buckets);
        let old = buckets.clone();
        buckets.clear();
        buckets.resize(old.len() * 2, Seg::NONE);
        self.buckets = buckets;
        for mut seg in old {
            while seg != Seg::NONE {
                let Segment { first, next, .. } = self.slab[seg.at()];
                let bucket = self.bucket(first + self.guard(seg));
                self.slab[seg.at()].next = self.buckets[bucket];
                self.buckets[bucket] = seg;
                seg = next;
            }
        }
    }
}
