// SPDX-License-Identifier: Apache-2.0
//! The context cache against a naive one, a list of entries. Where several may be evicted, the naive cache
//! accepts any of them, and continues with the one evicted.

use std::cell::RefCell;

use proptest::prelude::*;

use super::ContextCache;
use crate::config::{CacheConfig, Config, Flavour as Rules, Replacement};
use crate::flavour::Flavour;
use crate::hypersio::{Hypersio, ProgramHeap};
use crate::outcome::CacheCounts;
use crate::ties::TieBreak;

/// Ties by `seed`; 0: as the authors' program breaks them.
fn ties(seed: u64) -> TieBreak {
    let mut config = Config::base(Rules::Hypersio);
    config.seed = seed;
    Hypersio::<ProgramHeap>::ties(&config)
}

/// Tenants whose entries are present, in ascending order.
fn content(cache: &mut ContextCache) -> Vec<u32> {
    let tenants = RefCell::new(Vec::new());
    cache.invalidate(|tenant| {
        tenants.borrow_mut().push(tenant);
        false
    });
    let mut tenants = tenants.into_inner();
    tenants.sort_unstable();
    tenants
}

#[derive(Debug, Default)]
struct Naive {
    capacity: usize,
    replacement: Replacement,
    /// Tenant and mark of each entry.
    entries: Vec<(u32, u64)>,
    uses: u64,
    counts: CacheCounts,
}

impl Naive {
    fn touch(&mut self, tenant: u32) -> bool {
        self.uses += 1;
        let Some((_, mark)) = self.entries.iter_mut().find(|(other, _)| *other == tenant) else {
            return false;
        };
        if self.replacement == Replacement::Lru {
            *mark = self.uses;
            return true;
        }
        *mark += 1;
        if *mark == 15 {
            for (_, mark) in &mut self.entries {
                *mark /= 2;
            }
        }
        true
    }

    fn look_up(&mut self, tenant: u32) -> bool {
        let hit = self.touch(tenant);
        self.counts.lookups += 1;
        self.counts.hits += u64::from(hit);
        hit
    }

    /// Fills both caches, and fails if `real` evicts an entry that it must not.
    fn fill(&mut self, real: &mut ContextCache, tenant: u32) {
        let source = 16 + 8 * tenant;
        if self.capacity == 0 || self.touch(tenant) {
            real.fill(tenant, source);
            return;
        }
        if self.entries.len() == self.capacity {
            let least = self.entries.iter().map(|(_, mark)| *mark).min();
            let before = content(real);
            real.fill(tenant, source);
            let after = content(real);
            let gone: Vec<u32> = before
                .into_iter()
                .filter(|tenant| !after.contains(tenant))
                .collect();
            let may_go = |(tenant, mark): &(u32, u64)| gone == [*tenant] && Some(*mark) == least;
            assert!(self.entries.iter().any(may_go), "{gone:?} went: {self:?}");
            self.entries.retain(|(tenant, _)| gone != [*tenant]);
            self.counts.evictions += 1;
        } else {
            real.fill(tenant, source);
        }
        self.counts.insertions += 1;
        let mark = match self.replacement {
            Replacement::Lru => self.uses,
            _ => 0,
        };
        self.entries.push((tenant, mark));
    }

    fn invalidate(&mut self, is_void: impl Fn(u32) -> bool) {
        let before = self.entries.len();
        self.entries.retain(|(tenant, _)| !is_void(*tenant));
        self.counts.invalidated += (before - self.entries.len()) as u64;
    }
}

#[derive(Clone, Debug)]
enum Act {
    LookUp(u32),
    Fill(u32),
    /// Every tenant that leaves this rest by 3.
    Invalidate(u32),
    InvalidateAll,
}

fn any_act() -> impl Strategy<Value = Act> {
    // A few are requested often: their counts saturate.
    let tenant = || prop_oneof![0..4_u32, 0..24_u32];
    prop_oneof![
        30 => tenant().prop_map(Act::LookUp),
        20 => tenant().prop_map(Act::Fill),
        1 => (0..3_u32).prop_map(Act::Invalidate),
        1 => Just(Act::InvalidateAll),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn random_context_cache_under_random_acts_does_as_the_naive_one(
        capacity in 0..24_u32,
        replacement in proptest::sample::select(&[Replacement::Lru, Replacement::Lfu][..]),
        seed in 0..4_u64,
        acts in prop::collection::vec(any_act(), 0..500),
    ) {
        let config = CacheConfig::new(capacity, capacity, replacement);
        let mut real = ContextCache::new(&config, &ties(seed));
        let mut naive = Naive { capacity: capacity as usize, replacement, ..Naive::default() };
        for act in &acts {
            match act {
                Act::LookUp(tenant) => {
                    prop_assert_eq!(real.look_up(*tenant), naive.look_up(*tenant));
                }
                Act::Fill(tenant) => naive.fill(&mut real, *tenant),
                Act::Invalidate(rest) => {
                    real.invalidate(|tenant| tenant % 3 == *rest);
                    naive.invalidate(|tenant| tenant % 3 == *rest);
                }
                Act::InvalidateAll => {
                    real.invalidate(|_| true);
                    naive.invalidate(|_| true);
                }
            }
            prop_assert_eq!(real.counts(), naive.counts);
        }
        let mut left: Vec<u32> = naive.entries.iter().map(|(tenant, _)| *tenant).collect();
        left.sort_unstable();
        prop_assert_eq!(content(&mut real), left);
    }
}
