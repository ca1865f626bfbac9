// SPDX-License-Identifier: Apache-2.0
//! Free segments by address. Each node records the longest segment below it, so the lowest segment
//! that is long enough is found in O(log n) expected steps.
//!
//! A treap: a search tree by address and a heap by a random priority (from a fixed seed: the
//! sequence of calls determines the shape). Nodes are in an array parallel to the segments' slab,
//! under the same indexes.

use super::request::Request;
use super::segments::{Seg, Segment};

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
