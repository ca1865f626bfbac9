// SPDX-License-Identifier: Apache-2.0
//! Which pages are present.
//!
//! A page is known from its first use on. A page that is known is *present* or *absent*:
//!
//! ```text
//!             first use                 page-in
//!   unknown ───────────► present ◄──────────────── absent
//!       └───────────────────│── page-out ────────────► ▲
//!          (share: drawn)   └──────────────────────────┘
//! ```
//! - *Share*: a new page is absent with that probability. When a page comes in, or a new one is present, others
//!   go, chosen at random, until the share of the known pages is absent. So the share stays the same while
//!   pages come and go, as under a host that reclaims at a steady rate.
//! - *LRU*: a new page is present, for a guest writes a buffer before it posts it. Beyond the limit the page
//!   whose last DMA is longest ago goes.
//! - *Events*: the trace says what goes.
//!
//! A page that was brought in for a request is *held* until that request has ended: it is no victim. Without
//! that, requests could take each other's pages away for ever. So the present pages may exceed the limit by
//! the requests that wait. A page-out event takes held pages, too; a trace has finitely many.

use pagetide_random::SplitMix64;
use rustc_hash::FxHashMap;

use crate::config::{Absent, FaultConfig, PPM};
use crate::request::{Page, Tag, address_of, domain_of};

/// No node.
const NONE: u32 = u32::MAX;

/// Page sizes by their shifts.
const SHIFTS: [u8; 3] = [12, 21, 30];

/// A known page.
#[derive(Clone, Copy, Debug)]
struct Node {
    tag: Tag,
    shift: u8,
    is_present: bool,
    /// Requests that need it to stay.
    held: u32,
    /// LRU: neighbour towards the most recent. Share: place in `present`.
    before: u32,
    /// LRU: neighbour towards the least recent.
    after: u32,
}

/// All known pages.
#[derive(Debug)]
pub(crate) struct Memory {
    rule: Absent,
    absent_ppm: u64,
    limit: u64,
    random: SplitMix64,
    nodes: Vec<Node>,
    by_tag: FxHashMap<Tag, u32>,
    /// Present pages in any order (share only).
    present: Vec<u32>,
    /// Present pages.
    count: u64,
    most_recent: u32,
    least_recent: u32,
    /// Pages that went and whose cached translations are still to be voided.
    pub(crate) gone: Vec<Page>,
    /// Pages that came in.
    pub(crate) page_ins: u64,
    /// Pages that went out.
    pub(crate) page_outs: u64,
    since_ns: u64,
    present_ns: u128,
    known_ns: u128,
}

impl Memory {
    /// A memory of which nothing is known.
    pub(crate) fn new(config: &FaultConfig, seed: u64) -> Self {
        Self {
            rule: config.absent,
            absent_ppm: config.absent_ppm.into(),
            limit: config.limit_pages.into(),
            random: SplitMix64::new(seed),
            nodes: Vec::new(),
            by_tag: FxHashMap::default(),
            present: Vec::new(),
            count: 0,
            most_recent: NONE,
            least_recent: NONE,
            gone: Vec::new(),
            page_ins: 0,
            page_outs: 0,
            since_ns: 0,
            present_ns: 0,
            known_ns: 0,
        }
    }

    /// A DMA uses `page`: returns whether it is present.
    pub(crate) fn touch(&mut self, page: &Page, now_ns: u64) -> bool {
        let Some(&at) = self.by_tag.get(&page.tag()) else {
            return self.first_touch(page, now_ns);
        };
        if !self.nodes[at as usize].is_present {
            return false;
        }
        if self.rule == Absent::Lru && self.most_recent != at {
            self.unlink(at);
            self.link(at);
        }
        true
    }

    fn first_touch(&mut self, page: &Page, now_ns: u64) -> bool {
        self.advance(now_ns);
        let is_present = match self.rule {
            Absent::Share => self.random.below(PPM.into()) >= self.absent_ppm,
            Absent::Lru | Absent::Events => true,
        };
        let at = self.add(page.tag(), page.shift);
        if is_present {
            self.comes(at);
            self.shrink(at);
        }
        is_present
    }

    /// True unless the page is known to be absent.
    pub(crate) fn is_present(&self, tag: Tag) -> bool {
        let at = self.by_tag.get(&tag);
        at.is_none_or(|at| self.nodes[*at as usize].is_present)
    }

    /// A page request for the page was handled: it is present, and held once.
    pub(crate) fn page_in(&mut self, tag: Tag, now_ns: u64) {
        self.advance(now_ns);
        let at = self.by_tag[&tag];
        self.nodes[at as usize].held += 1;
        if !self.nodes[at as usize].is_present {
            self.page_ins += 1;
            self.comes(at);
            self.shrink(at);
        }
    }

    /// Holds the page once more.
    pub(crate) fn hold(&mut self, tag: Tag) {
        let at = self.by_tag[&tag];
        self.nodes[at as usize].held += 1;
    }

    /// Undoes one hold.
    pub(crate) fn release(&mut self, tag: Tag) {
        let at = self.by_tag[&tag];
        self.nodes[at as usize].held -= 1;
    }

    /// A page-out event: the known pages that overlap `span` are absent; returns whether one of them was
    /// present. If none is known there, the page itself is known from now on, and absent.
    pub(crate) fn page_out(&mut self, span: &Page, now_ns: u64) -> bool {
        self.advance(now_ns);
        let meets = |node: &Node| {
            let wider = node.shift.max(span.shift);
            domain_of(node.tag) == span.domain
                && address_of(node.tag) >> wider == span.iova >> wider
        };
        let small_pages = 1_u64 << (span.shift - 12);
        let nodes: Vec<u32> = if small_pages > self.nodes.len() as u64 {
            let all = (0..).zip(&self.nodes);
            all.filter(|(_, node)| meets(node))
                .map(|(at, _)| at)
                .collect()
        } else {
            let wider = SHIFTS.iter().filter(|shift| **shift > span.shift);
            let wider = wider.map(|shift| span.tag_at((*shift).into()));
            let first = Page {
                iova: span.iova >> span.shift << span.shift,
                ..*span
            };
            let within = (0..small_pages).map(|nth| {
                let iova = first.iova + (nth << 12);
                Page { iova, ..first }.tag_at(12)
            });
            let known = wider.chain(within).filter_map(|tag| self.by_tag.get(&tag));
            let mut nodes: Vec<u32> = known
                .copied()
                .filter(|at| meets(&self.nodes[*at as usize]))
                .collect();
            nodes.sort_unstable();
            nodes.dedup();
            nodes
        };
        if nodes.is_empty() && SHIFTS.contains(&span.shift) {
            self.add(span.tag(), span.shift);
        }
        let mut some = false;
        for at in nodes {
            if self.nodes[at as usize].is_present {
                self.goes(at);
                some = true;
            }
        }
        some
    }

    /// Present pages of all known ones, in the mean over the time until `now_ns`; 1 if none is known.
    pub(crate) fn resident_share(&mut self, now_ns: u64) -> f64 {
        self.advance(now_ns);
        if self.known_ns == 0 {
            return 1.0;
        }
        #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
        let share = self.present_ns as f64 / self.known_ns as f64;
        share
    }

    fn advance(&mut self, now_ns: u64) {
        let passed_ns = u128::from(now_ns - self.since_ns);
        self.present_ns += u128::from(self.count) * passed_ns;
        self.known_ns += self.nodes.len() as u128 * passed_ns;
        self.since_ns = now_ns;
    }

    /// Adds an absent page.
    fn add(&mut self, tag: Tag, shift: u8) -> u32 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "2^32 pages do not fit into memory"
        )]
        let at = self.nodes.len() as u32;
        self.nodes.push(Node {
            tag,
            shift,
            is_present: false,
            held: 0,
            before: NONE,
            after: NONE,
        });
        self.by_tag.insert(tag, at);
        at
    }

    fn comes(&mut self, at: u32) {
        self.nodes[at as usize].is_present = true;
        self.count += 1;
        match self.rule {
            Absent::Share => {
                #[expect(clippy::cast_possible_truncation, reason = "as many as nodes")]
                let place = self.present.len() as u32;
                self.nodes[at as usize].before = place;
                self.present.push(at);
            }
            Absent::Lru => self.link(at),
            Absent::Events => {}
        }
    }

    fn goes(&mut self, at: u32) {
        self.page_outs += 1;
        self.count -= 1;
        self.nodes[at as usize].is_present = false;
        match self.rule {
            Absent::Share => {
                let place = self.nodes[at as usize].before;
                self.present.swap_remove(place as usize);
                if let Some(moved) = self.present.get(place as usize) {
                    self.nodes[*moved as usize].before = place;
                }
            }
            Absent::Lru => self.unlink(at),
            Absent::Events => {}
        }
    }

    /// Pages go until the rule holds; not the one at `keep`, and none that is held.
    fn shrink(&mut self, keep: u32) {
        loop {
            let known = self.nodes.len() as u64;
            let too_many = match self.rule {
                Absent::Share => known - self.count < known * self.absent_ppm / u64::from(PPM),
                Absent::Lru => self.count > self.limit,
                Absent::Events => false,
            };
            if !too_many {
                return;
            }
            let victim = match self.rule {
                Absent::Share => self.some_present(keep),
                Absent::Lru | Absent::Events => self.least_recent_free(keep),
            };
            let Some(at) = victim else {
                return;
            };
            self.goes(at);
            let node = &self.nodes[at as usize];
            self.gone.push(Page {
                iova: address_of(node.tag),
                domain: domain_of(node.tag),
                tenant: 0,
                source: 0,
                shift: node.shift,
            });
        }
    }

    fn is_victim(&self, at: u32, keep: u32) -> bool {
        at != keep && self.nodes[at as usize].held == 0
    }

    /// A present page by chance; if that one stays, the next one that does not.
    fn some_present(&mut self, keep: u32) -> Option<u32> {
        if self.present.is_empty() {
            return None;
        }
        let first = self.random.index(self.present.len());
        let (before, from) = self.present.split_at(first);
        let mut all = from.iter().chain(before).copied();
        all.find(|at| self.is_victim(*at, keep))
    }

    fn least_recent_free(&self, keep: u32) -> Option<u32> {
        let next = |at: &u32| Some(self.nodes[*at as usize].before).filter(|at| *at != NONE);
        let last = Some(self.least_recent).filter(|at| *at != NONE);
        std::iter::successors(last, next).find(|at| self.is_victim(*at, keep))
    }

    /// Puts a page in front, as the most recent one.
    fn link(&mut self, at: u32) {
        let old = std::mem::replace(&mut self.most_recent, at);
        let node = &mut self.nodes[at as usize];
        (node.before, node.after) = (NONE, old);
        match self.nodes.get_mut(old as usize) {
            Some(old) => old.before = at,
            None => self.least_recent = at,
        }
    }

    fn unlink(&mut self, at: u32) {
        let Node { before, after, .. } = self.nodes[at as usize];
        match self.nodes.get_mut(before as usize) {
            Some(node) => node.after = after,
            None => self.most_recent = after,
        }
        match self.nodes.get_mut(after as usize) {
            Some(node) => node.before = before,
            None => self.least_recent = before,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(number: u64) -> Page {
        Page {
            iova: number << 21,
            domain: 1,
            shift: 21,
            ..Page::default()
        }
    }

    fn memory(absent: Absent, absent_ppm: u32, limit_pages: u32) -> Memory {
        let config = FaultConfig {
            absent,
            absent_ppm,
            limit_pages,
            ..FaultConfig::default()
        };
        Memory::new(&config, 7)
    }

    #[test]
    fn page_used_least_recently_goes_unless_it_is_held() {
        let mut memory = memory(Absent::Lru, 0, 3);
        for number in [1, 2, 3, 1] {
            assert!(memory.touch(&page(number), 0));
        }
        memory.hold(page(2).tag());
        assert!(memory.touch(&page(4), 0));
        assert!(!memory.touch(&page(3), 0), "2 is held, so 3 went");
        assert_eq!(memory.gone, [page(3)]);
        memory.release(page(2).tag());
        memory.page_in(page(3).tag(), 0);
        assert!(!memory.touch(&page(2), 0));
        assert_eq!((memory.page_ins, memory.page_outs), (1, 2));
    }

    #[test]
    fn share_that_is_absent_stays_the_same_while_pages_come_in() {
        let mut memory = memory(Absent::Share, 100_000, 0);
        for number in 0..1000 {
            memory.touch(&page(number), 0);
        }
        for round in 1..2000 {
            let number = round * 7919 % 1000;
            if !memory.touch(&page(number), round) {
                memory.page_in(page(number).tag(), round);
                memory.release(page(number).tag());
            }
            let absent = (0..1000).filter(|n| !memory.is_present(page(*n).tag()));
            let absent = absent.count();
            assert!((100..150).contains(&absent), "{absent}");
        }
        let share = memory.resident_share(2000);
        assert!((0.85..0.91).contains(&share), "{share}");
    }

    #[test]
    fn event_takes_every_page_that_overlaps_its_span() {
        for small in [0, 600] {
            let mut memory = memory(Absent::Events, 0, 0);
            // With many pages known the span is searched page by page.
            for number in 0..small {
                memory.touch(&page(1000 + number), 0);
            }
            let pages = [(0x20_0000, 12), (0x3f_f000, 12), (0x40_0000, 12), (0, 30)];
            let page = |(iova, shift): (u64, u8)| Page {
                iova,
                domain: 1,
                shift,
                ..Page::default()
            };
            for one in pages {
                assert!(memory.touch(&page(one), 0));
            }
            assert!(memory.page_out(&page((0x20_0000, 21)), 0));
            let present = pages.map(|one| memory.is_present(page(one).tag()));
            assert_eq!(present, [false, false, true, false]);
            assert!(!memory.page_out(&page((0x3f_f000, 12)), 0));
        }
    }

    #[test]
    fn page_that_is_named_by_an_event_before_its_first_use_is_absent() {
        let mut memory = memory(Absent::Events, 0, 0);
        assert!(!memory.page_out(&page(5), 0));
        assert!(!memory.touch(&page(5), 0));
        assert!(memory.touch(&page(6), 0));
    }
}
