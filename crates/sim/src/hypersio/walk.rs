// SPDX-License-Identifier: Apache-2.0
//! The program's translation agent: two page-walk caches and a walk of one or two memory accesses.
//!
//! | found in | 4 KiB page | 2 MiB page | 1 GiB page |
//! |---|---|---|---|
//! | L2 | 50, fill, 450 | 5 + 450 | the request is lost |
//! | L3 | 100, fill, 450 | 50, fill, 450 | 5 and no way back |
//! | neither | 50, fill, 450 | 100, fill, 450 | 150, fill, 450 |
//!
//! Every request that ends here or goes to the fill ends one nanosecond early.

use crate::cache::Cache;
use crate::config::{Config, LatencyConfig};
use crate::error::SimError;
use crate::flavour::{Answer, TranslationAgent, VoidSpan};
use crate::machine::{give, no_part};
use crate::outcome::AllCounts;
use crate::policy::OwnPolicies;
use crate::request::Request;
use crate::ties::TieBreak;

/// Address bits of an L2 entry: 2 MiB.
const L2_SHIFT: u32 = 21;
/// Address bits of an L3 entry: 1 GiB.
const L3_SHIFT: u32 = 30;

/// L2, L3 and the short walk.
#[derive(Debug)]
pub(crate) struct ShortWalk {
    l2: Option<Cache>,
    l3: Option<Cache>,
    latency: LatencyConfig,
}

impl TranslationAgent for ShortWalk {
    fn new(config: &Config, ties: &TieBreak) -> Self {
        Self {
            l2: Cache::new(&config.l2, L2_SHIFT, ties),
            l3: Cache::new(&config.l3, L3_SHIFT, ties),
            latency: config.latency.clone(),
        }
    }

    #[inline(always)]
    fn look_up(&mut self, request: &mut Request) -> Answer {
        let page = &request.page;
        let level = u64::from(page.level());
        let in_l2 = match &mut self.l2 {
            Some(l2) => l2.look_up(page, page.tag_at(L2_SHIFT), request.next_use),
            None => false,
        };
        let in_l3 = match &mut self.l3 {
            Some(l3) => l3.look_up(page, page.tag_at(L3_SHIFT), request.next_use),
            None => false,
        };
        let hit_ns = self.latency.walk_cache_hit_ns;
        let accesses = match (in_l2, in_l3, level) {
            (true, _, 2) => {
                return Answer::Return {
                    after_ns: hit_ns + self.latency.pcie_ns - 1,
                };
            }
            (true, _, 3) => return Answer::Lost,
            (false, true, 3) => {
                return Answer::Return {
                    after_ns: hit_ns - 1,
                };
            }
            (true, _, _) => 2 - level,
            (false, true, _) => 3 - level,
            (false, false, _) => level,
        };
        Answer::Walk {
            after_ns: self.latency.dram_ns * accesses - 1,
            accesses,
        }
    }

    #[inline(always)]
    fn fill(&mut self, request: &Request) {
        let page = &request.page;
        if let Some(l2) = &mut self.l2 {
            l2.fill(page, page.tag_at(L2_SHIFT), request.next_use);
        }
        if let Some(l3) = &mut self.l3 {
            l3.fill(page, page.tag_at(L3_SHIFT), request.next_use);
        }
    }

    fn invalidate(&mut self, span: &VoidSpan) {
        for (cache, shift) in [(&mut self.l2, L2_SHIFT), (&mut self.l3, L3_SHIFT)] {
            if let Some(cache) = cache {
                let one = span.tag_at(shift);
                cache.invalidate(one.as_slice(), |tag| span.meets(tag, shift));
            }
        }
    }

    fn count(&self, counts: &mut AllCounts) {
        counts.l2 = self.l2.as_ref().map(Cache::counts).unwrap_or_default();
        counts.l3 = self.l3.as_ref().map(Cache::counts).unwrap_or_default();
    }

    fn take_policies(&mut self, own: &mut OwnPolicies) -> Result<(), SimError> {
        if own.iotlb.is_some() {
            return Err(no_part("iotlb"));
        }
        let [l1, l2, l3, l4] = &mut own.levels;
        for (policy, name) in [(l1, "l1"), (l4, "l4")] {
            if policy.is_some() {
                return Err(no_part(name));
            }
        }
        give(&mut self.l2, "l2", l2.take())?;
        give(&mut self.l3, "l3", l3.take())
    }

    fn failure(&mut self) -> Option<(&'static str, String)> {
        [(&mut self.l2, "l2"), (&mut self.l3, "l3")]
            .into_iter()
            .find_map(|(cache, name)| Some((name, cache.as_mut()?.failure()?)))
    }
}
