// SPDX-License-Identifier: Apache-2.0
//! Which pages a VM uses now.
//!
//! ```text
//!   all sections, in random order:   … 17  4 │ 9  30  2  11  25 │ 8  1 …
//!                                            └─ working set ────┘
//!                                    first ──► moves on by one: 9 leaves, 8 comes
//! ```
//! Whole sections belong to it, scattered over the RAM. Of a section all pages are used alike; the sections
//! alike or by Zipf's law, as the VM's [`Choice`] says.

use pagetide_addr::{PageNo, SECTION_PAGES, to_usize};
use pagetide_random::SplitMix64;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Exponent of Zipf's law, that of the YCSB benchmark.
const ZIPF: f64 = 0.99;
/// Entries of the table that a section is drawn from. The rarest of a thousand sections has five of them.
const DRAWS: u64 = 1 << 15;

/// How often the sections of a working set are used.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// One as often as the other.
    Even,
    /// By Zipf's law.
    Zipf,
}

/// See the module.
#[derive(Debug)]
pub(super) struct WorkingSet {
    /// All sections.
    order: Vec<u32>,
    /// Where it begins in `order`; counts on beyond its end.
    first: AtomicU64,
    /// Sections in it.
    count: AtomicU64,
    /// Places in it, each as often as it is to be drawn; empty if all are drawn alike.
    draws: Vec<u32>,
}

impl WorkingSet {
    /// One of `permille` thousandths of `sections` sections, at least one section, scattered by `seed`.
    pub(super) fn new(sections: u32, permille: u32, choice: Choice, seed: u64) -> Self {
        let mut order: Vec<u32> = (0..sections).collect();
        SplitMix64::new(seed).shuffle(&mut order);
        let count = share(u64::from(sections), permille);
        let draws = match choice {
            Choice::Even => Vec::new(),
            Choice::Zipf => zipf_draws(count),
        };
        Self {
            order,
            first: AtomicU64::new(0),
            count: AtomicU64::new(count),
            draws,
        }
    }

    /// A page of it, selected by 64 random bits.
    #[inline]
    pub(super) fn pick(&self, random: u64) -> PageNo {
        let count = self.count.load(Relaxed);
        let (high, low) = (random >> 32, random & 0xffff_ffff);
        // Multiplication is cheaper than division.
        let within = |count: u64| (count * high) >> 32;
        let place = match self.draws.len() as u64 {
            0 => within(count),
            draws => u64::from(self.draws[to_usize(within(draws))]),
        };
        let first = self.first.load(Relaxed);
        // A section keeps its place, and so its share, until it leaves.
        let at = first + (place + count - first % count) % count;
        let section = self.order[to_usize(at % self.order.len() as u64)];
        PageNo(u64::from(section) * SECTION_PAGES + low % SECTION_PAGES)
    }

    /// One section leaves, and another comes in its place.
    pub(super) fn move_on(&self) {
        self.first.fetch_add(1, Relaxed);
    }

    /// Changes its size, which only an even one has a meaning for.
    pub(super) fn resize(&self, permille: u32) {
        let sections = self.order.len() as u64;
        self.count.store(share(sections, permille), Relaxed);
    }
}

fn share(of: u64, permille: u32) -> u64 {
    (of * u64::from(permille) / 1000).clamp(1, of)
}

/// The places of `count` sections, the first most often.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "numbers of sections and shares between 0 and 1"
)]
fn zipf_draws(count: u64) -> Vec<u32> {
    let weight = |place: u64| ((place + 1) as f64).powf(-ZIPF);
    let whole: f64 = (0..count).map(weight).sum();
    let mut draws = Vec::new();
    let mut until = 0.0;
    for place in 0..count {
        until += weight(place) / whole;
        let end = (until * DRAWS as f64) as usize;
        // The rarest has a place even where rounding would leave it none.
        let end = end.max(draws.len() + 1);
        draws.resize(end, place as u32);
    }
    draws
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const SECTIONS: u32 = 40;

    fn picked(set: &WorkingSet) -> BTreeMap<u64, u64> {
        let mut random = SplitMix64::new(3);
        let mut sections = BTreeMap::new();
        for _ in 0..200_000 {
            let page = set.pick(random.next_u64());
            *sections.entry(page.0 / SECTION_PAGES).or_default() += 1;
        }
        sections
    }

    #[test]
    fn even_set_uses_its_sections_alike_and_grows_around_those_it_has() {
        let set = WorkingSet::new(SECTIONS, 250, Choice::Even, 7);
        let few = picked(&set);
        assert_eq!(few.len(), 10);
        assert!(few.values().all(|count| (18_000..22_000).contains(count)));
        set.resize(900);
        let many = picked(&set);
        assert_eq!(many.len(), 36);
        assert!(few.keys().all(|section| many.contains_key(section)));
        set.resize(250);
        assert!(picked(&set).keys().eq(few.keys()));
    }

    #[test]
    fn zipf_set_uses_the_first_of_its_sections_most_often() {
        let set = WorkingSet::new(SECTIONS, 500, Choice::Zipf, 7);
        let sections = picked(&set);
        assert_eq!(sections.len(), 20);
        let (most, least) = (sections.values().max(), sections.values().min());
        let ratio = most.zip(least).map(|(most, least)| most / least);
        // 20 to the 0.99.
        assert!(
            ratio.is_some_and(|ratio| (16..24).contains(&ratio)),
            "{ratio:?}"
        );
    }

    #[test]
    fn set_moves_on_by_one_section_and_others_keep_their_shares() {
        let set = WorkingSet::new(SECTIONS, 500, Choice::Zipf, 7);
        let before = picked(&set);
        set.move_on();
        let after = picked(&set);
        let left: Vec<_> = before.keys().filter(|s| !after.contains_key(*s)).collect();
        let came: Vec<_> = after.keys().filter(|s| !before.contains_key(*s)).collect();
        assert_eq!((left.len(), came.len()), (1, 1));
        assert_eq!(before[left[0]], after[came[0]]);
        assert!(
            after
                .iter()
                .all(|(s, count)| before.get(s).is_none_or(|was| was == count))
        );
        for _ in 0..SECTIONS - 1 {
            set.move_on();
        }
        assert_eq!(picked(&set), before);
    }
}
