// SPDX-License-Identifier: Apache-2.0
//! The translation agent of the text: IOTLB, page-walk caches, two-dimensional walk (II-A, figure 2).
//!
//! A guest's table has levels g, …, 1; the entry of level n is found by the address above bit 12 + 9(n-1),
//! and the L*n* cache keeps such entries by that prefix and the domain. To read one, the guest-physical
//! address of its table is walked through the host's h levels first; so a level costs h + 1 accesses, and
//! the page's own address h more:
//!
//! ```text
//!   remaining guest levels r:   r (h + 1) + h        r = g = h = 4:  24     5: 35
//!
//!   level           4      3      2      1     host walk of the page
//!   full walk      4+1    4+1    4+1    4+1    4                         = 24
//!   hit in L3                    4+1    4+1    4                         = 14
//!   hit in L2                           4+1    4                         =  9
//!   hit in L1, of a 4 KiB page: the translation itself                   =  0
//! ```
//! The entry of a page's own level is its translation, so L2 answers for 2 MiB pages as an IOTLB would.
//! Whether a walk for such a page is shorter too is `large_pages_shorten`: with it, it ends at the page's
//! level; without it (table II: 24) it is as long as for a page of 4 KiB.
//!
//! A host that maps its guests with larger pages ends each of its walks earlier: h is one less with 2 MiB (19
//! accesses), two less with 1 GiB (14).
//!
//! At its end a walk puts every level's entry from the top to the page's own into its cache, and the
//! translation into the IOTLB. Demands and prefetches are treated alike. For the oracle an entry's next use
//! is that of the page it was last used for; that of a prefetched page is unknown and counts as never.

use crate::cache::Cache;
use crate::config::{Config, WalkConfig, WalkCost};
use crate::error::SimError;
use crate::flavour::{Answer, TranslationAgent, VoidSpan};
use crate::machine::give;
use crate::outcome::{AllCounts, CacheCounts};
use crate::paper::nested_tlb::NestedTlb;
use crate::policy::OwnPolicies;
use crate::request::{Page, Request, widest_page};
use crate::ties::TieBreak;

/// Address bits of a set of the IOTLB begin here, as in the DevTLB.
const IOTLB_SHIFT: u32 = 21;

/// The page-walk caches in a configuration.
const NAMES: [&str; 4] = ["l1", "l2", "l3", "l4"];

/// log2 of the span of an entry of `level`.
const fn span_shift(level: u32) -> u32 {
    12 + 9 * (level - 1)
}

/// IOTLB, L1 to L4 and the walker.
#[derive(Debug)]
pub(crate) struct NestedWalker {
    iotlb: Option<Cache>,
    /// By level, from 1.
    levels: [Option<Cache>; 4],
    nested: Option<NestedTlb>,
    walk: WalkConfig,
    hit_ns: u64,
    dram_ns: u64,
    pcie_ns: u64,
}

impl NestedWalker {
    /// The caches that apply to a walk for `page`, and their levels.
    fn levels_of(&mut self, page: &Page) -> impl Iterator<Item = (u32, &mut Cache)> {
        let lowest = page.level();
        (1..)
            .zip(&mut self.levels)
            .filter(move |(level, _)| *level >= lowest)
            .filter_map(|(level, cache)| cache.as_mut().map(|cache| (level, cache)))
    }
}

impl TranslationAgent for NestedWalker {
    fn new(config: &Config, ties: &TieBreak) -> Self {
        let cache = |level: u32, cache| {
            Cache::new(cache, span_shift(level), ties).filter(|_| level <= config.walk.guest_levels)
        };
        Self {
            iotlb: Cache::new(&config.iotlb, IOTLB_SHIFT, ties),
            levels: [
                cache(1, &config.l1),
                cache(2, &config.l2),
                cache(3, &config.l3),
                cache(4, &config.l4),
            ],
            nested: NestedTlb::new(config, ties)
                .filter(|_| config.walk.cost == WalkCost::Nested && host_levels(&config.walk) > 0),
            walk: config.walk.clone(),
            hit_ns: config.latency.walk_cache_hit_ns,
            dram_ns: config.latency.dram_ns,
            pcie_ns: config.latency.pcie_ns,
        }
    }

    #[inline]
    fn look_up(&mut self, request: &mut Request) -> Answer {
        let page = &request.page;
        let next_use = request.next_use;
        let in_iotlb = self
            .iotlb
            .as_mut()
            .is_some_and(|iotlb| iotlb.look_up(page, page.tag(), next_use));
        let mut lowest_hit = None;
        for (level, cache) in self.levels_of(page) {
            let hit = cache.look_up(page, page.tag_at(span_shift(level)), next_use);
            if hit && lowest_hit.is_none() {
                lowest_hit = Some(level);
            }
        }
        if in_iotlb || lowest_hit == Some(page.level()) {
            return Answer::Return {
                after_ns: self.hit_ns + self.pcie_ns,
            };
        }
        let mut accesses = accesses(&self.walk, page.level(), lowest_hit);
        let mut hits_ns = lowest_hit.map_or(0, |_| self.hit_ns);
        if let Some(nested) = &mut self.nested {
            let first = lowest_hit.unwrap_or(self.walk.guest_levels + 1) - 1;
            let last = last_level(&self.walk, page.level());
            let hits = nested.look_up(page, first, last);
            request.at_agent.walk_from(first);
            accesses -= hits * host_levels(&self.walk);
            hits_ns += hits * self.hit_ns;
        }
        Answer::Walk {
            after_ns: hits_ns + accesses * self.dram_ns,
            accesses,
        }
    }

    #[inline]
    fn fill(&mut self, request: &Request) {
        let page = &request.page;
        if let Some(iotlb) = &mut self.iotlb {
            iotlb.fill(page, page.tag(), request.next_use);
        }
        for (level, cache) in self.levels_of(page) {
            cache.fill(page, page.tag_at(span_shift(level)), request.next_use);
        }
        if let Some(nested) = &mut self.nested {
            let first = request.at_agent.walks_from();
            nested.fill(page, first, last_level(&self.walk, page.level()));
        }
    }

    fn invalidate(&mut self, span: &VoidSpan) {
        if let Some(iotlb) = &mut self.iotlb {
            let (tags, count) = span.tags();
            iotlb.invalidate(&tags[..count], |tag| span.meets(tag, widest_page(tag)));
        }
        for (level, cache) in (1..).zip(&mut self.levels) {
            if let Some(cache) = cache {
                let one = span.tag_at(span_shift(level));
                cache.invalidate(one.as_slice(), |tag| span.meets(tag, span_shift(level)));
            }
        }
        if let Some(nested) = &mut self.nested {
            nested.invalidate(span);
        }
    }

    fn host_unmaps(&mut self, page: Page) {
        if let Some(nested) = &mut self.nested {
            nested.host_unmaps(page);
        }
    }

    fn count(&self, counts: &mut AllCounts) {
        let of = |cache: &Option<Cache>| -> CacheCounts {
            cache.as_ref().map(Cache::counts).unwrap_or_default()
        };
        counts.iotlb = of(&self.iotlb);
        if let Some(nested) = &self.nested {
            counts.nested_tlb = nested.counts();
        }
        let [l1, l2, l3, l4] = &self.levels;
        (counts.l1, counts.l2, counts.l3, counts.l4) = (of(l1), of(l2), of(l3), of(l4));
    }

    fn take_policies(&mut self, own: &mut OwnPolicies) -> Result<(), SimError> {
        give(&mut self.iotlb, "iotlb", own.iotlb.take())?;
        for ((cache, name), policy) in self.levels.iter_mut().zip(NAMES).zip(&mut own.levels) {
            give(cache, name, policy.take())?;
        }
        Ok(())
    }

    fn failure(&mut self) -> Option<(&'static str, String)> {
        let levels = self.levels.iter_mut().zip(NAMES);
        std::iter::once((&mut self.iotlb, "iotlb"))
            .chain(levels)
            .find_map(|(cache, name)| Some((name, cache.as_mut()?.failure()?)))
    }
}

/// The lowest level of the guest's table that a walk for a page of `page_level` reads.
const fn last_level(walk: &WalkConfig, page_level: u32) -> u32 {
    if walk.large_pages_shorten {
        page_level
    } else {
        1
    }
}

/// Memory accesses of a walk of the host's table.
const fn host_levels(walk: &WalkConfig) -> u64 {
    let saved = walk.host_page.saved_levels();
    walk.host_levels.saturating_sub(saved) as u64
}

/// Memory accesses of a walk for a page of `page_level`, if the lowest cached entry was that of level
/// `lowest_hit`, which is above the page's own.
fn accesses(walk: &WalkConfig, page_level: u32, lowest_hit: Option<u32>) -> u64 {
    match walk.cost {
        WalkCost::Nested => {
            let known_level = lowest_hit.unwrap_or(walk.guest_levels + 1);
            let last_level = last_level(walk, page_level);
            let remaining = u64::from(known_level.saturating_sub(last_level));
            let host_levels = host_levels(walk);
            remaining * (host_levels + 1) + host_levels
        }
        WalkCost::Short => lowest_hit
            .map_or(page_level, |level| level.saturating_sub(page_level))
            .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::HostPage;

    fn walk(cost: WalkCost, guest_levels: u32, host_levels: u32, large: u8) -> WalkConfig {
        WalkConfig {
            cost,
            guest_levels,
            host_levels,
            host_page: HostPage::Size4K,
            walkers: 0,
            large_pages_shorten: large == 1,
        }
    }

    #[test]
    fn full_walks_cost_what_the_paper_says() {
        for page_level in 1..=3 {
            assert_eq!(
                accesses(&walk(WalkCost::Nested, 4, 4, 0), page_level, None),
                24
            );
            assert_eq!(
                accesses(&walk(WalkCost::Nested, 5, 5, 0), page_level, None),
                35
            );
        }
        assert_eq!(accesses(&walk(WalkCost::Nested, 4, 0, 0), 1, None), 4);
        for (host_page, expected) in [
            (HostPage::Size4K, 24),
            (HostPage::Size2M, 19),
            (HostPage::Size1G, 14),
        ] {
            let mut walk = walk(WalkCost::Nested, 4, 4, 0);
            walk.host_page = host_page;
            assert_eq!(accesses(&walk, 1, None), expected);
        }
    }

    /// Walks level by level and counts, as in the figure.
    fn counted(walk: &WalkConfig, page_level: u32, lowest_hit: Option<u32>) -> u64 {
        let last_level = if walk.large_pages_shorten {
            page_level
        } else {
            1
        };
        let mut count = 0;
        for level in (1..=walk.guest_levels).rev() {
            let known = lowest_hit.is_some_and(|hit| level >= hit);
            if !known && level >= last_level {
                for _host_level in 0..walk.host_levels {
                    count += 1;
                }
                count += 1;
            }
        }
        for _host_level in 0..walk.host_levels {
            count += 1;
        }
        count
    }

    #[test]
    fn nested_walk_of_any_shape_costs_what_counting_level_by_level_gives() {
        for guest_levels in 3..=5 {
            for host_levels in 0..=5 {
                for large in 0..=1 {
                    let walk = walk(WalkCost::Nested, guest_levels, host_levels, large);
                    for page_level in 1..=3 {
                        let hits = (page_level + 1..=guest_levels).map(Some);
                        for hit in hits.chain([None]) {
                            assert_eq!(
                                accesses(&walk, page_level, hit),
                                counted(&walk, page_level, hit),
                                "{walk:?}, page level {page_level}, hit {hit:?}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn short_walk_costs_what_the_authors_program_charges() {
        let walk = walk(WalkCost::Short, 4, 4, 0);
        let table = [
            // page level, lowest hit, accesses
            (1, None, 1),
            (2, None, 2),
            (3, None, 3),
            (1, Some(2), 1),
            (1, Some(3), 2),
            (2, Some(3), 1),
        ];
        for (page_level, hit, expected) in table {
            assert_eq!(accesses(&walk, page_level, hit), expected);
        }
    }
}
