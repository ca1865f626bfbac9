// SPDX-License-Identifier: Apache-2.0
//! How the guest touches its pages: order, number of touches, number of threads.

use super::{
    content::{Kind, PAGE, random_order},
    guest::ns_since,
};
use pagetide_addr::{PageNo, PageRange};
use pagetide_random::SplitMix64;
use pagetide_sys::clock;
use pagetide_sys::cpu;
use serde::{Deserialize, Serialize};
use std::{sync::Barrier, time::Instant};

/// Exponent of a skewed order: that of YCSB, a little below the harmonic one.
const ZIPF_EXPONENT: f64 = 0.99;

/// An order in which all of a working set is touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Pattern {
    /// Each page once, from the first to the last.
    Sequential,
    /// Each page once, in random order.
    Random,
    /// As many touches as there are pages, few pages most often (Zipf); then those not touched yet.
    Zipf,
}

impl Pattern {
    /// The pages in their order.
    pub(super) fn order(self, pages: u64, seed: u64) -> Vec<PageNo> {
        match self {
            Self::Sequential => (0..pages).map(PageNo).collect(),
            Self::Random => random_order(pages, seed),
            Self::Zipf => zipf_order(pages, seed),
        }
    }
}

fn zipf_order(pages: u64, seed: u64) -> Vec<PageNo> {
    // The rank of each page is random, too.
    let ranked = random_order(pages, seed);
    let mut below = Vec::with_capacity(ranked.len());
    let mut sum = 0.0;
    for rank in 1..=ranked.len() {
        #[expect(clippy::cast_precision_loss, reason = "ranks far below 2^53")]
        let weight = (rank as f64).powf(-ZIPF_EXPONENT);
        sum += weight;
        below.push(sum);
    }
    let mut random = SplitMix64::new(seed);
    let mut is_met = vec![false; ranked.len()];
    let mut order = Vec::with_capacity(2 * ranked.len());
    for _ in 0..ranked.len() {
        let at = random.unit() * sum;
        let rank = below.partition_point(|weight| *weight <= at);
        let rank = rank.min(ranked.len() - 1);
        is_met[rank] = true;
        order.push(ranked[rank]);
    }
    let never = ranked.iter().zip(is_met).filter(|(_, is_met)| !is_met);
    order.extend(never.map(|(page, _)| *page));
    order
}

/// Part of a guest's pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Part {
    /// All of them.
    All,
    /// The first half.
    First,
    /// The others.
    Second,
}

impl Part {
    /// The same of a guest of `pages` pages.
    pub(crate) const fn of(self, pages: u64) -> PageRange {
        let half = PageNo(pages / 2);
        match self {
            Self::All => PageRange::new(PageNo(0), PageNo(pages)),
            Self::First => PageRange::new(PageNo(0), half),
            Self::Second => PageRange::new(half, PageNo(pages)),
        }
    }
}

/// Reads the first word of a page of `kind`, which must be its own; returns the time in nanoseconds.
pub(super) fn touch(kind: Kind, page: PageNo, bytes: &[u8]) -> Result<u32, String> {
    let begun = Instant::now();
    let first = std::hint::black_box(bytes.first_chunk::<8>().copied());
    let taken = ns_since(begun);
    match first.map(u64::from_ne_bytes) {
        Some(word) if word == kind.first_word(page) => Ok(taken),
        _ => Err(format!("{page} came back with wrong content")),
    }
}

/// Touches the pages of `bytes`, whose first is `first`, in this order of their positions.
fn touch_all(
    kind: Kind,
    bytes: &[u8],
    first: PageNo,
    order: &[PageNo],
) -> Result<Vec<u32>, String> {
    let one = |position: &PageNo| {
        let page = first.plus(position.0);
        touch(kind, page, &bytes[position.index() * PAGE..][..PAGE])
    };
    order.iter().map(one).collect()
}

/// The times of several threads.
pub(super) struct Together {
    /// Of each page.
    pub(super) ns: Vec<u32>,
    /// From the start of all until the end of the last.
    pub(super) wall_ns: u64,
}

/// Touches each page of `memory` once, in parts of equal size by `threads` threads at a time, each in
/// random order; they are pinned to the available CPUs in turn. The first page of the memory is `first`.
pub(super) fn together(
    kind: Kind,
    memory: &[u8],
    first: PageNo,
    threads: u64,
    seed: u64,
) -> Result<Together, String> {
    let pages = (memory.len() / PAGE) as u64;
    let part = PageNo(pages.div_ceil(threads.max(1)));
    let cpus = cpu::affinity().map_err(|error| error.to_string())?;
    let parts: Vec<&[u8]> = memory.chunks(part.index() * PAGE).collect();
    let start = Barrier::new(parts.len() + 1);
    let (cpus, start) = (&cpus, &start);
    std::thread::scope(|scope| {
        let mut running = Vec::new();
        for (number, bytes) in parts.iter().enumerate() {
            let first = first.plus(part.0 * number as u64);
            let cpu = cpus.get(number % cpus.len().max(1)).copied();
            running.push(scope.spawn(move || {
                let placed = cpu.map_or(Ok(()), |cpu| cpu::set_affinity(&[cpu]));
                let order = random_order((bytes.len() / PAGE) as u64, seed + first.0);
                start.wait();
                placed.map_err(|error| error.to_string())?;
                touch_all(kind, bytes, first, &order)
            }));
        }
        start.wait();
        let begun = Instant::now();
        let mut ns = Vec::new();
        for thread in running {
            ns.extend(
                thread
                    .join()
                    .map_err(|_| "a vCPU has panicked".to_owned())??,
            );
        }
        let wall_ns = clock::ns(begun.elapsed());
        Ok(Together { ns, wall_ns })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_touches_every_page_and_a_skewed_one_some_often() {
        for pattern in [Pattern::Sequential, Pattern::Random, Pattern::Zipf] {
            let order = pattern.order(1000, 3);
            let mut all = order.clone();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), 1000, "{pattern:?}");
            assert_eq!(order, pattern.order(1000, 3));
        }
        let order = Pattern::Zipf.order(1000, 3);
        let most = order
            .iter()
            .map(|page| order.iter().filter(|it| *it == page).count());
        assert!(most.max().unwrap() > 50);
    }

    #[test]
    fn halves_are_all() {
        let [all, first, second] = [Part::All, Part::First, Part::Second].map(|it| it.of(9));
        assert_eq!((first.start, second.end), (all.start, all.end));
        assert_eq!((first.end, first.len()), (second.start, 4));
    }

    #[test]
    fn threads_together_touch_each_page_once_and_meet_wrong_content() {
        let first = PageNo(5);
        let mut memory = vec![0; 7 * PAGE];
        for (page, bytes) in (first.0..).map(PageNo).zip(memory.chunks_exact_mut(PAGE)) {
            bytes[..8].copy_from_slice(&Kind::Program.first_word(page).to_ne_bytes());
        }
        let done = together(Kind::Program, &memory, first, 3, 1).unwrap();
        assert_eq!(done.ns.len(), 7);
        memory[3 * PAGE] ^= 1;
        let wrong = together(Kind::Program, &memory, first, 3, 1);
        assert!(wrong.is_err_and(|error| error.contains("wrong content")));
    }
}
