// SPDX-License-Identifier: Apache-2.0
//! The index of free segments, by length or by address.
//!
//! **Instant fit** keeps a list for each power of two: list `c` has the segments of 2^c to
//! 2^(c+1)-1 integers, and a bit says whether it is empty. A request of `n` begins with the lists
//! in which every segment fits, those from `n` rounded up: the lowest bit that is set, constant
//! time. Only if there is no certain place (or the constraints exclude the certain ones) are all
//! other lists searched that may hold one, so a failure always means that there is none.
//!
//! **First fit** keeps a treap by address that records in each node the longest segment below it
//! ([`AddressTree`]).

use super::ArenaError;
use super::address_tree::AddressTree;
use super::request::Request;
use super::segments::{Seg, Segment};
use super::{Fit, Segments};

/// Lists: the last has 2^63 and more.
const CLASSES: usize = 64;

/// The free segments of an arena.
#[expect(
    clippy::large_enum_variant,
    reason = "there is one in an arena, and a box would be one more miss"
)]
pub(super) enum FreeIndex {
    /// Lists by power of two.
    Lists(ClassLists),
    /// By address.
    Tree(AddressTree),
}

impl FreeIndex {
    pub(super) fn new(fit: Fit) -> Self {
        match fit {
            Fit::Instant => Self::Lists(ClassLists {
                heads: [Seg::NONE; CLASSES],
                filled: 0,
            }),
            Fit::First => Self::Tree(AddressTree::new()),
        }
    }

    /// A free segment with room for `request`, and the start in it.
    #[inline]
    pub(super) fn find(
        &self,
        slab: &[Segment],
        request: &Request,
        quantum: u64,
    ) -> Option<(Seg, u64)> {
        match self {
            Self::Lists(lists) => lists.find(slab, request, quantum),
            Self::Tree(tree) => tree.find(slab, request),
        }
    }

    /// The same, but only where it certainly fits: constant time, or O(log n).
    pub(super) fn find_certain(
        &self,
        slab: &[Segment],
        request: &Request,
        quantum: u64,
    ) -> Option<(Seg, u64)> {
        let length_less = request.certain_less(quantum)?;
        let seg = match self {
            Self::Lists(lists) => lists.first_from(certain_class(Some(length_less)))?,
            Self::Tree(tree) => tree.lowest_of(slab, length_less)?,
        };
        let segment = &slab[seg.at()];
        let start = request.place(segment.first, segment.last)?;
        Some((seg, start))
    }

    /// Adds a segment that became free.
    #[inline]
    pub(super) fn link(&mut self, slab: &mut [Segment], seg: Seg) {
        match self {
            Self::Lists(lists) => lists.link(slab, seg),
            Self::Tree(tree) => {
                // Any value that is not one of the marks means free.
                (slab[seg.at()].prev, slab[seg.at()].next) = (Seg::NONE, Seg::NONE);
                tree.insert(slab, seg);
            }
        }
    }

    /// Removes a segment that will no longer be free.
    #[inline]
    pub(super) fn unlink(&mut self, slab: &mut [Segment], seg: Seg) {
        match self {
            Self::Lists(lists) => lists.unlink(slab, seg),
            Self::Tree(tree) => tree.remove(slab, seg),
        }
    }

    /// Gives a free segment new ends; its order among its neighbours does not change.
    #[inline]
    pub(super) fn resize(&mut self, slab: &mut [Segment], seg: Seg, first: u64, last: u64) {
        match self {
            Self::Lists(lists) => {
                let stays = class(slab[seg.at()].length_less()) == class(last - first);
                if stays {
                    (slab[seg.at()].first, slab[seg.at()].last) = (first, last);
                } else {
                    lists.unlink(slab, seg);
                    (slab[seg.at()].first, slab[seg.at()].last) = (first, last);
                    lists.link(slab, seg);
                }
            }
            Self::Tree(tree) => {
                (slab[seg.at()].first, slab[seg.at()].last) = (first, last);
                tree.refresh(slab, seg);
            }
        }
    }

    /// Length of the longest, less one.
    pub(super) fn longest_less(&self, slab: &[Segment]) -> Option<u64> {
        match self {
            Self::Lists(lists) => {
                let top = lists.filled.checked_ilog2()?;
                let lengths = lists.list(slab, top as usize);
                lengths.map(|seg| slab[seg.at()].length_less()).max()
            }
            Self::Tree(tree) => tree.longest_less(),
        }
    }
}

/// The list for a length less one: its logarithm, rounded down.
#[inline]
fn class(length_less: u64) -> usize {
    match length_less.checked_add(1) {
        Some(length) => length.ilog2() as usize,
        None => CLASSES - 1,
    }
}

/// The first list in which every segment is at least as long.
#[inline]
fn certain_class(length_less: Option<u64>) -> usize {
    match length_less {
        None => CLASSES,
        Some(0) => 0,
        Some(less) => less.ilog2() as usize + 1,
    }
}

/// Lists of free segments by power of two.
pub(super) struct ClassLists {
    heads: [Seg; CLASSES],
    /// Bit `c`: list `c` is not empty.
    filled: u64,
}

impl ClassLists {
    #[inline]
    fn find(&self, slab: &[Segment], request: &Request, quantum: u64) -> Option<(Seg, u64)> {
        let certain = certain_class(request.certain_less(quantum));
        self.find_in(slab, request, certain, CLASSES)
            .or_else(|| self.find_in(slab, request, class(request.total_less), certain))
    }

    /// The head of the first non-empty list from `from` on.
    fn first_from(&self, from: usize) -> Option<Seg> {
        let filled = self.filled & mask_from(from);
        (filled != 0).then(|| self.heads[filled.trailing_zeros() as usize])
    }

    /// Searches lists `from..to`.
    #[inline]
    fn find_in(
        &self,
        slab: &[Segment],
        request: &Request,
        from: usize,
        to: usize,
    ) -> Option<(Seg, u64)> {
        let mut left = self.filled & mask_from(from) & !mask_from(to);
        while left != 0 {
            for seg in self.list(slab, left.trailing_zeros() as usize) {
                let segment = &slab[seg.at()];
                if let Some(start) = request.place(segment.first, segment.last) {
                    return Some((seg, start));
                }
            }
            left &= left - 1;
        }
        None
    }

    #[inline]
    fn list<'a>(&self, slab: &'a [Segment], class: usize) -> impl Iterator<Item = Seg> + use<'a> {
        let exists = |seg: Seg| (seg != Seg::NONE).then_some(seg);
        std::iter::successors(exists(self.heads[class]), move |seg| {
            exists(slab[seg.at()].next)
        })
    }

    /// Newest first: it is the one in the CPU's caches.
    #[inline]
    fn link(&mut self, slab: &mut [Segment], seg: Seg) {
        let class = class(slab[seg.at()].length_less());
        let next = self.heads[class];
        (slab[seg.at()].prev, slab[seg.at()].next) = (Seg::NONE, next);
        if next != Seg::NONE {
            slab[next.at()].prev = seg;
        }
        self.heads[class] = seg;
        self.filled |= 1 << class;
    }

    #[inline]
    fn unlink(&mut self, slab: &mut [Segment], seg: Seg) {
        let Segment { prev, next, .. } = slab[seg.at()];
        if next != Seg::NONE {
            slab[next.at()].prev = prev;
        }
        if prev != Seg::NONE {
            slab[prev.at()].next = next;
            return;
        }
        let class = class(slab[seg.at()].length_less());
        self.heads[class] = next;
        if next == Seg::NONE {
            self.filled &= !(1 << class);
        }
    }
}

/// Bits `from` and above.
#[inline]
fn mask_from(from: usize) -> u64 {
    if from < CLASSES { u64::MAX << from } else { 0 }
}

impl Segments {
    /// Compares the index with the actual free segments: `expected` of them.
    pub(super) fn check_free_index(&self, expected: usize) -> Result<(), ArenaError> {
        let wrong = |what: String| Err(ArenaError::Broken { what });
        let indexed = match &self.free {
            FreeIndex::Tree(tree) => match tree.check(&self.slab) {
                Ok(count) => count,
                Err(what) => return wrong(what),
            },
            FreeIndex::Lists(lists) => {
                let mut count = 0;
                for at in 0..CLASSES {
                    let mut before = Seg::NONE;
                    for seg in lists.list(&self.slab, at) {
                        let segment = &self.slab[seg.at()];
                        if segment.prev != before || class(segment.length_less()) != at {
                            return wrong(format!("list {at} is wrong at {segment:?}"));
                        }
                        (before, count) = (seg, count + 1);
                        if count > expected {
                            return wrong(format!("list {at} holds more than there is"));
                        }
                    }
                    if (lists.filled >> at & 1 == 1) != (before != Seg::NONE) {
                        return wrong(format!("bit {at} differs from its list"));
                    }
                }
                count
            }
        };
        if indexed != expected {
            return wrong(format!("{indexed} segments indexed, {expected} free"));
        }
        Ok(())
    }
}
