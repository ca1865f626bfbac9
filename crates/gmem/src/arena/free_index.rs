// SPDX-License-Identifier: Apache-2.0
//! Segments, and the index of those that are free: lists by length, or a treap by address. See
//! 'Segments' and 'Free segments' in [`super`].

use super::request::{Fit, Request};

/// Index of a segment in the slab, or one of the marks below.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Seg(pub(super) u32);

impl Seg {
    pub(super) const NONE: Self = Self(u32::MAX);
    pub(super) const ALLOCATED: Self = Self(u32::MAX - 1);
    pub(super) const CACHED: Self = Self(u32::MAX - 2);
    pub(super) const GUARDED: Self = Self(u32::MAX - 3);
    pub(super) const BORDER: Self = Self(u32::MAX - 4);
    pub(super) const VACANT: Self = Self(u32::MAX - 5);
    pub(super) const CHUNK: Self = Self(u32::MAX - 6);

    #[inline]
    pub(super) fn at(self) -> usize {
        self.0 as usize
    }
}

/// A run of integers. 32 bytes, aligned to 32: a segment never lies in two cache lines.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub(super) struct Segment {
    pub first: u64,
    /// The last integer, inclusive: a span may end at the top of `u64`.
    pub last: u64,
    pub before: Seg,
    pub after: Seg,
    /// In a free segment the previous of its list; else a mark for the kind.
    pub prev: Seg,
    /// In a free segment the next of its list, in an allocated one of its hash chain.
    pub next: Seg,
}

const _: () = assert!(size_of::<Segment>() == 32);

/// What a segment is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Free,
    /// Given to a caller.
    Allocated,
    /// Given to a caller, with guards inside.
    Guarded,
    /// A single piece given to the caches, wherever it is now.
    Cached,
    /// Many pieces given to the caches.
    Chunk,
    Border,
    Vacant,
}

impl Segment {
    #[inline]
    pub(super) fn kind(&self) -> Kind {
        match self.prev {
            Seg::ALLOCATED => Kind::Allocated,
            Seg::CACHED => Kind::Cached,
            Seg::CHUNK => Kind::Chunk,
            Seg::GUARDED => Kind::Guarded,
            Seg::BORDER => Kind::Border,
            Seg::VACANT => Kind::Vacant,
            _ => Kind::Free,
        }
    }

    #[inline]
    pub(super) fn length_less(&self) -> u64 {
        self.last - self.first
    }
}

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

#[derive(Clone, Copy)]
struct Node {
    left: Seg,
    right: Seg,
    priority: u32,
    /// Longest of the segments at and below this node, less one.
    longest_less: u64,
}

/// The tree.
pub(super) struct AddressTree {
    root: Seg,
    nodes: Vec<Node>,
    random: u32,
}

const LEAF: Node = Node {
    left: Seg::NONE,
    right: Seg::NONE,
    priority: 0,
    longest_less: 0,
};

impl AddressTree {
    pub(super) fn new() -> Self {
        Self {
            root: Seg::NONE,
            nodes: Vec::new(),
            random: 0x9E37_79B9,
        }
    }

    /// The lowest place for `request`.
    pub(super) fn find(&self, slab: &[Segment], request: &Request) -> Option<(Seg, u64)> {
        let mut from = request.min.saturating_sub(request.guard);
        loop {
            let seg = self.lowest(slab, self.root, request.total_less, from)?;
            let segment = &slab[seg.at()];
            if segment.first > request.last {
                return None;
            }
            if let Some(start) = request.place(segment.first, segment.last) {
                return Some((seg, start));
            }
            from = segment.last.checked_add(1)?;
        }
    }

    /// The lowest segment of this length or more.
    pub(super) fn lowest_of(&self, slab: &[Segment], length_less: u64) -> Option<Seg> {
        self.lowest(slab, self.root, length_less, 0)
    }

    pub(super) fn longest_less(&self) -> Option<u64> {
        (self.root != Seg::NONE).then(|| self.nodes[self.root.at()].longest_less)
    }

    pub(super) fn insert(&mut self, slab: &[Segment], seg: Seg) {
        if self.nodes.len() < slab.len() {
            self.nodes.resize(slab.len(), LEAF);
        }
        self.nodes[seg.at()] = Node {
            priority: self.draw(),
            longest_less: slab[seg.at()].length_less(),
            ..LEAF
        };
        let (below, above) = self.split(slab, self.root, slab[seg.at()].first);
        let below = self.merge(slab, below, seg);
        self.root = self.merge(slab, below, above);
    }

    pub(super) fn remove(&mut self, slab: &[Segment], seg: Seg) {
        self.root = self.removed(slab, self.root, seg);
    }

    /// Updates the tree after the ends of `seg` changed.
    pub(super) fn refresh(&mut self, slab: &[Segment], seg: Seg) {
        self.refreshed(slab, self.root, seg);
    }

    /// Counts the nodes, or reports what is wrong.
    #[cfg(test)]
    pub(super) fn check(&self, slab: &[Segment]) -> Result<usize, String> {
        let mut stack = vec![(self.root, 0, u64::MAX)];
        let mut count = 0;
        while let Some((seg, low, high)) = stack.pop() {
            if seg == Seg::NONE {
                continue;
            }
            let (node, segment) = (self.nodes[seg.at()], &slab[seg.at()]);
            let children = [node.left, node.right].into_iter();
            let below = children.filter(|&child| child != Seg::NONE);
            let longest = below.clone().map(|c| self.nodes[c.at()].longest_less).max();
            let longest = longest.unwrap_or(0).max(segment.length_less());
            if longest != node.longest_less {
                return Err(format!("longest below {segment:?} is {longest} less one"));
            }
            if segment.first < low || segment.last > high {
                return Err(format!("{segment:?} is out of the tree's order"));
            }
            if below
                .clone()
                .any(|c| self.nodes[c.at()].priority > node.priority)
            {
                return Err(format!("{segment:?} is above a higher priority"));
            }
            stack.push((node.left, low, segment.first));
            stack.push((node.right, segment.last, high));
            count += 1;
            if count > slab.len() {
                return Err("the tree has a circle".to_owned());
            }
        }
        Ok(count)
    }

    /// The lowest segment at or below `at` that is long enough and does not end before `from`.
    fn lowest(&self, slab: &[Segment], at: Seg, length_less: u64, from: u64) -> Option<Seg> {
        if at == Seg::NONE || self.nodes[at.at()].longest_less < length_less {
            return None;
        }
        let (node, segment) = (self.nodes[at.at()], &slab[at.at()]);
        if segment.last < from {
            return self.lowest(slab, node.right, length_less, from);
        }
        if let Some(found) = self.lowest(slab, node.left, length_less, from) {
            return Some(found);
        }
        if segment.length_less() >= length_less {
            return Some(at);
        }
        self.lowest(slab, node.right, length_less, from)
    }

    /// Splits into the nodes before the address and the rest.
    fn split(&mut self, slab: &[Segment], at: Seg, address: u64) -> (Seg, Seg) {
        if at == Seg::NONE {
            return (Seg::NONE, Seg::NONE);
        }
        let Node { left, right, .. } = self.nodes[at.at()];
        if slab[at.at()].first < address {
            let (below, above) = self.split(slab, right, address);
            self.nodes[at.at()].right = below;
            self.update(slab, at);
            (at, above)
        } else {
            let (below, above) = self.split(slab, left, address);
            self.nodes[at.at()].left = above;
            self.update(slab, at);
            (below, at)
        }
    }

    /// Joins two trees; all of `below` lies before all of `above`.
    fn merge(&mut self, slab: &[Segment], below: Seg, above: Seg) -> Seg {
        if below == Seg::NONE {
            return above;
        }
        if above == Seg::NONE {
            return below;
        }
        let (lower, upper) = (self.nodes[below.at()], self.nodes[above.at()]);
        if lower.priority > upper.priority {
            self.nodes[below.at()].right = self.merge(slab, lower.right, above);
            self.update(slab, below);
            below
        } else {
            self.nodes[above.at()].left = self.merge(slab, below, upper.left);
            self.update(slab, above);
            above
        }
    }

    fn removed(&mut self, slab: &[Segment], at: Seg, seg: Seg) -> Seg {
        if at == Seg::NONE {
            return at;
        }
        let Node { left, right, .. } = self.nodes[at.at()];
        if at == seg {
            return self.merge(slab, left, right);
        }
        if slab[seg.at()].first < slab[at.at()].first {
            self.nodes[at.at()].left = self.removed(slab, left, seg);
        } else {
            self.nodes[at.at()].right = self.removed(slab, right, seg);
        }
        self.update(slab, at);
        at
    }

    fn refreshed(&mut self, slab: &[Segment], at: Seg, seg: Seg) {
        if at == Seg::NONE {
            return;
        }
        let Node { left, right, .. } = self.nodes[at.at()];
        if at != seg {
            let lower = slab[seg.at()].first < slab[at.at()].first;
            self.refreshed(slab, if lower { left } else { right }, seg);
        }
        self.update(slab, at);
    }

    fn update(&mut self, slab: &[Segment], at: Seg) {
        let Node { left, right, .. } = self.nodes[at.at()];
        let mut longest = slab[at.at()].length_less();
        for child in [left, right] {
            if child != Seg::NONE {
                longest = longest.max(self.nodes[child.at()].longest_less);
            }
        }
        self.nodes[at.at()].longest_less = longest;
    }

    /// Xorshift (Marsaglia).
    fn draw(&mut self) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        self.random
    }
}

#[cfg(test)]
impl FreeIndex {
    /// Compares the index with the actual free segments: `expected` of them.
    pub(super) fn check(&self, slab: &[Segment], expected: usize) -> Result<(), String> {
        let indexed = match self {
            Self::Tree(tree) => tree.check(slab)?,
            Self::Lists(lists) => {
                let mut count = 0;
                for at in 0..CLASSES {
                    let mut before = Seg::NONE;
                    for seg in lists.list(slab, at) {
                        let segment = &slab[seg.at()];
                        if segment.prev != before || class(segment.length_less()) != at {
                            return Err(format!("list {at} is wrong at {segment:?}"));
                        }
                        (before, count) = (seg, count + 1);
                        if count > expected {
                            return Err(format!("list {at} holds more than there is"));
                        }
                    }
                    if (lists.filled >> at & 1 == 1) != (before != Seg::NONE) {
                        return Err(format!("bit {at} differs from its list"));
                    }
                }
                count
            }
        };
        if indexed != expected {
            return Err(format!("{indexed} segments indexed, {expected} free"));
        }
        Ok(())
    }
}
