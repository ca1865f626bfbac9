// SPDX-License-Identifier: Apache-2.0
//! The cache against a naive one: a list of entries for each set, every rule in its plainest form. Where a
//! policy allows several victims, the naive cache accepts any of them, and continues with the one evicted.

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::prelude::*;

use super::Cache;
use crate::config::{CacheConfig, Config, Flavour as Rules, PartitionBy, Replacement};
use crate::flavour::{Flavour, VoidSpan};
use crate::hypersio::{Hypersio, ProgramHeap};
use crate::outcome::CacheCounts;
use crate::request::{DOMAINS_MAX, NEVER, Page, Tag, widest_page};
use crate::ties::TieBreak;

/// Ties by `seed`; 0: as the authors' program breaks them.
fn ties(seed: u64) -> TieBreak {
    let mut config = Config::base(Rules::Hypersio);
    config.seed = seed;
    Hypersio::<ProgramHeap>::ties(&config)
}

/// Tags that the cache holds, in its own order.
fn content(cache: &mut Cache) -> Vec<Tag> {
    let tags = RefCell::new(Vec::new());
    cache.invalidate(&[], |tag| {
        tags.borrow_mut().push(tag);
        false
    });
    tags.into_inner()
}

/// How often each of `tags` is present.
fn counted(tags: impl IntoIterator<Item = Tag>) -> BTreeMap<Tag, usize> {
    let mut counted = BTreeMap::new();
    for tag in tags {
        *counted.entry(tag).or_default() += 1;
    }
    counted
}

/// One entry of a set.
#[derive(Clone, Copy, Debug)]
struct Entry {
    tag: Tag,
    mark: u64,
}

/// A cache as the headers of `cache.rs` and `config.rs` describe it.
#[derive(Debug)]
struct Naive {
    config: CacheConfig,
    shift: u32,
    sets: Vec<Vec<Entry>>,
    uses: u64,
    counts: CacheCounts,
}

fn power_of_two_at_most(number: u32) -> u32 {
    let mut power = 1;
    while power * 2 <= number {
        power *= 2;
    }
    power
}

impl Naive {
    fn new(config: &CacheConfig, shift: u32) -> Self {
        let sets = power_of_two_at_most(config.entries / config.ways);
        let mut config = config.clone();
        config.partitions = power_of_two_at_most(config.partitions).min(sets);
        Self {
            config,
            shift,
            sets: vec![Vec::new(); sets as usize],
            uses: 0,
            counts: CacheCounts::default(),
        }
    }

    fn set_of(&self, page: &Page) -> Option<usize> {
        let partitions = self.config.partitions as usize;
        let sets_each = self.sets.len() / partitions;
        let partition = match self.config.partition_by {
            PartitionBy::DomainBits => page.domain as usize % partitions,
            PartitionBy::SourceBits => {
                (page.source >> self.config.source_low_bit) as usize % partitions
            }
            PartitionBy::FullMatch => {
                let own = (page.tenant / self.config.sources_per_partition) as usize;
                if own >= partitions {
                    return None;
                }
                own
            }
        };
        let address = usize::try_from(page.iova >> self.shift).unwrap();
        Some(partition * sets_each + address % sets_each)
    }

    /// Uses the entry of `tag`; false if it is not present.
    fn touch(&mut self, page: &Page, tag: Tag, next_use: u64) -> bool {
        let Some(set) = self.set_of(page) else {
            return false;
        };
        self.uses += 1;
        let mut saturated = false;
        let Some(entry) = self.sets[set].iter_mut().find(|entry| entry.tag == tag) else {
            return false;
        };
        match self.config.replacement {
            Replacement::Lru => entry.mark = self.uses,
            Replacement::Oracle => entry.mark = next_use,
            Replacement::Lfu => {
                entry.mark += 1;
                saturated = entry.mark == 15;
            }
        }
        if saturated {
            for entry in &mut self.sets[set] {
                entry.mark /= 2;
            }
        }
        true
    }

    fn look_up(&mut self, page: &Page, tag: Tag, next_use: u64) -> bool {
        let hit = self.touch(page, tag, next_use);
        self.counts.lookups += 1;
        self.counts.hits += u64::from(hit);
        hit
    }

    /// Permitted victims of a full set.
    fn candidates(&self, set: usize) -> Vec<Tag> {
        let marks = || self.sets[set].iter().map(|entry| entry.mark);
        let worst = match self.config.replacement {
            Replacement::Lru | Replacement::Lfu => marks().min(),
            Replacement::Oracle => marks().max(),
        };
        let tied = self.sets[set]
            .iter()
            .filter(|entry| Some(entry.mark) == worst);
        tied.map(|entry| entry.tag).collect()
    }

    /// Fills both caches, and fails if `real` evicts an entry that it must not.
    fn fill(&mut self, real: &mut Cache, page: &Page, tag: Tag, next_use: u64) {
        if self.touch(page, tag, next_use) {
            real.fill(page, tag, next_use);
            return;
        }
        let Some(set) = self.set_of(page) else {
            let before = content(real);
            real.fill(page, tag, next_use);
            assert_eq!(content(real), before, "a source without a partition");
            return;
        };
        if self.sets[set].len() == self.config.ways as usize {
            let candidates = self.candidates(set);
            let before = counted(content(real));
            real.fill(page, tag, next_use);
            let after = counted(content(real));
            let gone: Vec<Tag> = before
                .iter()
                .filter(|(tag, count)| after.get(tag).unwrap_or(&0) < count)
                .map(|(tag, _)| *tag)
                .collect();
            assert!(
                gone.len() == 1 && candidates.contains(&gone[0]),
                "{gone:x?} went, one of {candidates:x?} must"
            );
            self.sets[set].retain(|entry| entry.tag != gone[0]);
            self.counts.evictions += 1;
        } else {
            real.fill(page, tag, next_use);
        }
        self.counts.insertions += 1;
        let mark = match self.config.replacement {
            Replacement::Lru => self.uses,
            Replacement::Lfu => 0,
            Replacement::Oracle => next_use,
        };
        self.sets[set].push(Entry { tag, mark });
    }

    fn invalidate(&mut self, is_void: impl Fn(Tag) -> bool) {
        for set in &mut self.sets {
            let before = set.len();
            set.retain(|entry| !is_void(entry.tag));
            self.counts.invalidated += (before - set.len()) as u64;
        }
    }

    fn content(&self) -> BTreeMap<Tag, usize> {
        counted(self.sets.iter().flatten().map(|entry| entry.tag))
    }
}

/// An operation on a cache.
#[derive(Clone, Debug)]
enum Act {
    LookUp(Page, u64),
    Fill(Page, u64),
    Invalidate(VoidSpan),
}

/// A cache and the parts of its tags.
#[derive(Clone, Debug)]
struct Shape {
    config: CacheConfig,
    shift: u32,
    /// A cache of a walk has spans of its own size, and not pages.
    spans: Spans,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Spans {
    Pages,
    Own,
}

impl Shape {
    fn tag(&self, page: &Page) -> Tag {
        match self.spans {
            Spans::Pages => page.tag(),
            Spans::Own => page.tag_at(self.shift),
        }
    }

    fn is_void(&self, span: &VoidSpan, tag: Tag) -> bool {
        match self.spans {
            Spans::Pages => span.meets(tag, widest_page(tag)),
            Spans::Own => span.meets(tag, self.shift),
        }
    }
}

fn any_page() -> impl Strategy<Value = Page> {
    let domains = prop_oneof![8 => 0..4_u32, 1 => Just(DOMAINS_MAX - 1)];
    // Few gigabytes of few pages each, some of them out of reach of 48 bits.
    let gigabytes = prop_oneof![4 => 0..3_u64, 1 => Just(1 << 18), 1 => Just((1 << 27) - 1)];
    let shift = prop_oneof![3 => Just(12_u8), 4 => Just(21), 1 => Just(30)];
    (domains, 0..8_u32, gigabytes, 0..6_u64, 0..3_u64, shift).prop_map(
        |(domain, tenant, gigabyte, page_2m, page_4k, shift)| Page {
            iova: gigabyte << 30 | page_2m << 21 | page_4k << 12 | 0x123,
            domain,
            tenant,
            source: 16 + 8 * tenant + tenant % 3,
            shift,
        },
    )
}

fn any_act() -> impl Strategy<Value = Act> {
    let next_use = || prop_oneof![4 => 0..50_u64, 1 => Just(NEVER)];
    let span = prop_oneof![
        1 => Just(VoidSpan::All),
        4 => (0..4_u32).prop_map(VoidSpan::Domain),
        8 => any_page().prop_map(VoidSpan::Pages),
    ];
    prop_oneof![
        20 => (any_page(), next_use()).prop_map(|(page, next)| Act::LookUp(page, next)),
        20 => (any_page(), next_use()).prop_map(|(page, next)| Act::Fill(page, next)),
        1 => span.prop_map(Act::Invalidate),
    ]
}

const RULES: [PartitionBy; 3] = [
    PartitionBy::SourceBits,
    PartitionBy::FullMatch,
    PartitionBy::DomainBits,
];
const POLICIES: [Replacement; 3] = [Replacement::Lru, Replacement::Lfu, Replacement::Oracle];

fn any_shape() -> impl Strategy<Value = Shape> {
    let ways = prop_oneof![6 => 1..=20_u32, 1 => 60..=70_u32];
    (
        ways,
        1..=16_u32,
        1..=16_u32,
        1..=3_u32,
        proptest::sample::select(&RULES[..]),
        proptest::sample::select(&POLICIES[..]),
        proptest::sample::select(&[12, 21, 30, 39][..]),
        proptest::sample::select(&[Spans::Pages, Spans::Own][..]),
    )
        .prop_map(
            |(ways, sets, partitions, sources, rule, policy, shift, spans)| {
                let mut config = CacheConfig::new(ways * sets, ways, policy).by(rule);
                config.partitions = partitions.min(sets);
                config.sources_per_partition = sources;
                Shape {
                    config,
                    shift,
                    spans,
                }
            },
        )
}

/// Applies `acts` to a cache and to the naive one.
fn compare(shape: &Shape, seed: u64, acts: &[Act]) -> Vec<Tag> {
    let mut real = Cache::new(&shape.config, shape.shift, &ties(seed)).unwrap();
    let mut naive = Naive::new(&shape.config, shape.shift);
    for (number, act) in acts.iter().enumerate() {
        match act {
            Act::LookUp(page, next) => {
                let tag = shape.tag(page);
                assert_eq!(
                    real.look_up(page, tag, *next),
                    naive.look_up(page, tag, *next),
                    "act {number}"
                );
            }
            Act::Fill(page, next) => naive.fill(&mut real, page, shape.tag(page), *next),
            Act::Invalidate(span) => {
                real.invalidate(&[], |tag| shape.is_void(span, tag));
                naive.invalidate(|tag| shape.is_void(span, tag));
            }
        }
        assert_eq!(real.counts(), naive.counts, "act {number}");
    }
    let content = content(&mut real);
    assert_eq!(counted(content.iter().copied()), naive.content());
    content
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn random_cache_under_random_acts_does_as_the_naive_one(
        shape in any_shape(),
        seed in 0..4_u64,
        acts in prop::collection::vec(any_act(), 0..400),
    ) {
        let content = compare(&shape, seed, &acts);
        // The same seed chooses the same victims.
        prop_assert_eq!(compare(&shape, seed, &acts), content);
    }

    /// A set of a few ways with many competitors: evictions are the rule.
    #[test]
    fn small_cache_under_many_acts_does_as_the_naive_one(
        ways in 1..=4_u32,
        policy in proptest::sample::select(&POLICIES[..]),
        seed in 0..4_u64,
        acts in prop::collection::vec(any_act(), 200..600),
    ) {
        let config = CacheConfig::new(ways, ways, policy);
        compare(&Shape { config, shift: 21, spans: Spans::Pages }, seed, &acts);
    }

    /// One page used over and over saturates its count again and again.
    #[test]
    fn counts_that_saturate_are_halved_as_the_naive_one_halves(
        seed in 0..4_u64,
        turns in prop::collection::vec((0..6_u64, 1..20_usize), 1..60),
    ) {
        let config = CacheConfig::new(4, 4, Replacement::Lfu);
        let acts: Vec<Act> = turns
            .iter()
            .flat_map(|(number, times)| {
                let page = Page { iova: number << 21, shift: 21, ..Page::default() };
                let uses = std::iter::repeat_n(Act::LookUp(page, NEVER), *times);
                std::iter::once(Act::Fill(page, NEVER)).chain(uses)
            })
            .collect();
        compare(&Shape { config, shift: 21, spans: Spans::Pages }, seed, &acts);
    }
}

/// 4 KiB pages whose tags fall into one bucket of the hints of a cache of
/// `entries` entries, which has four buckets for each.
fn pages_of_one_bucket(entries: u64, count: usize) -> Vec<Page> {
    let shift = u64::BITS - (entries * 4).next_power_of_two().ilog2();
    let bucket = |page: &Page| page.tag().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> shift;
    let page = |number: u64| Page {
        iova: number << 12,
        shift: 12,
        ..Page::default()
    };
    (0..)
        .map(page)
        .filter(|page| bucket(page) == 5)
        .take(count)
        .collect()
}

#[test]
fn tags_that_fall_into_one_bucket_are_told_apart() {
    for policy in POLICIES {
        // A long chain.
        let pages = pages_of_one_bucket(256, 300);
        let config = CacheConfig::new(256, 256, policy);
        let shape = Shape {
            config,
            shift: 12,
            spans: Spans::Pages,
        };
        let mut acts = Vec::new();
        for (number, page) in (0..).zip(&pages) {
            acts.push(Act::Fill(*page, number));
            let earlier = pages[acts.len() / 4];
            acts.push(Act::LookUp(earlier, number + 1000));
        }
        acts.push(Act::Invalidate(VoidSpan::Pages(pages[290])));
        acts.push(Act::Invalidate(VoidSpan::Pages(pages[299])));
        acts.extend(pages.iter().map(|page| Act::LookUp(*page, 5000)));
        acts.push(Act::Invalidate(VoidSpan::All));
        acts.extend(pages.iter().map(|page| Act::LookUp(*page, 5000)));
        acts.extend(pages.iter().map(|page| Act::Fill(*page, 6000)));
        acts.extend(pages.iter().map(|page| Act::LookUp(*page, 5000)));
        compare(&shape, 1, &acts);
    }
}

/// Addresses that differ only above bit 47 have the same hash in the authors' program.
#[test]
fn pages_of_one_hash_are_two_entries_to_the_program_s_ties() {
    let page = |iova| Page {
        iova,
        shift: 21,
        ..Page::default()
    };
    let (near, far, other) = (page(0), page(1 << 48), page(1 << 21));
    let shape = Shape {
        config: CacheConfig::new(2, 2, Replacement::Lfu),
        shift: 21,
        spans: Spans::Pages,
    };
    let mut acts = vec![Act::Fill(near, NEVER), Act::Fill(far, NEVER)];
    acts.extend(vec![Act::LookUp(far, NEVER); 3]);
    acts.push(Act::Fill(other, NEVER));
    acts.extend(vec![Act::LookUp(other, NEVER); 5]);
    acts.push(Act::Fill(near, NEVER));
    compare(&shape, 0, &acts);
}

#[test]
fn one_tag_in_the_partitions_of_two_sources_is_two_entries() {
    for rule in [PartitionBy::SourceBits, PartitionBy::FullMatch] {
        let config = CacheConfig::new(4, 2, Replacement::Lru)
            .partitioned(2)
            .by(rule);
        let mut cache = Cache::new(&config, 21, &ties(1)).unwrap();
        let page = |tenant| Page {
            iova: 7 << 21,
            domain: 3,
            tenant,
            source: 16 + 8 * tenant,
            shift: 21,
        };
        let (first, second) = (page(0), page(1));
        cache.fill(&first, first.tag(), NEVER);
        assert!(!cache.look_up(&second, second.tag(), NEVER));
        cache.fill(&second, second.tag(), NEVER);
        assert!(cache.look_up(&first, first.tag(), NEVER));
        assert!(cache.look_up(&second, second.tag(), NEVER));
        cache.invalidate(&[], |tag| VoidSpan::Domain(3).meets(tag, 21));
        assert_eq!(cache.counts().invalidated, 2);
        assert!(!cache.look_up(&first, first.tag(), NEVER));
    }
}

#[test]
fn cache_without_entries_or_ways_is_none() {
    for (entries, ways) in [(0, 0), (0, 8), (64, 0)] {
        let config = CacheConfig::new(entries, ways, Replacement::Lru);
        assert!(Cache::new(&config, 21, &ties(1)).is_none());
    }
}

/// Most hits of any choice of victims on `trace`, if every miss is filled.
fn most_hits(trace: &[usize], held: &[usize], capacity: usize) -> u64 {
    let Some((page, later)) = trace.split_first() else {
        return 0;
    };
    if held.contains(page) {
        return 1 + most_hits(later, held, capacity);
    }
    if held.len() < capacity {
        let mut with = held.to_vec();
        with.push(*page);
        return most_hits(later, &with, capacity);
    }
    let without = |victim: usize| {
        let mut with = held.to_vec();
        with[victim] = *page;
        most_hits(later, &with, capacity)
    };
    (0..held.len()).map(without).max().unwrap_or(0)
}

fn hits_of(policy: Replacement, capacity: u32, trace: &[usize]) -> u64 {
    let config = CacheConfig::new(capacity, capacity, policy);
    let mut cache = Cache::new(&config, 21, &ties(1)).unwrap();
    for (at, number) in trace.iter().enumerate() {
        let later = trace[at + 1..].iter().position(|other| other == number);
        let next = later.map_or(NEVER, |distance| (at + 1 + distance) as u64);
        let page = Page {
            iova: (*number as u64) << 21,
            shift: 21,
            ..Page::default()
        };
        if !cache.look_up(&page, page.tag(), next) {
            cache.fill(&page, page.tag(), next);
        }
    }
    cache.counts().hits
}

#[test]
fn oracle_has_the_most_hits_that_any_policy_can_have() {
    const PAGES: usize = 4;
    const LENGTH: u32 = 7;
    for capacity in 1..=3 {
        for number in 0..PAGES.pow(LENGTH) {
            let trace: Vec<usize> = (0..LENGTH)
                .map(|at| number / PAGES.pow(at) % PAGES)
                .collect();
            let best = most_hits(&trace, &[], capacity as usize);
            assert_eq!(
                hits_of(Replacement::Oracle, capacity, &trace),
                best,
                "{trace:?}"
            );
            assert!(hits_of(Replacement::Lru, capacity, &trace) <= best);
            assert!(hits_of(Replacement::Lfu, capacity, &trace) <= best);
        }
    }
}
