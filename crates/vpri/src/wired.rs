// SPDX-License-Identifier: Apache-2.0
//! Pages that are wired, and how often each is.
//!
//! Most of what is wired is a few pages: rings, posted buffers. A device may also wire all memory of
//! its guest. So whole sections are counted as such, and only the rest page by page: 16 GiB that are
//! wired take 8,192 entries.

use pagetide_addr::{FilePage, FilePageSet, FileRange, FileSection, SECTION_PAGES};
use std::collections::BTreeMap;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct WiredPages {
    /// Times that whole sections are wired.
    sections: BTreeMap<FileSection, u32>,
    /// Times that pages are, besides.
    pages: BTreeMap<FilePage, u32>,
}

/// A part of a range that is counted as one.
#[derive(Clone, Copy)]
enum Part {
    Section(FileSection),
    Pages(FileRange),
}

fn parts(range: FileRange) -> impl Iterator<Item = Part> {
    range.by_section().map(|(section, part)| match part.len() {
        SECTION_PAGES => Part::Section(section),
        _ => Part::Pages(part),
    })
}

impl WiredPages {
    /// Wires each page of `range` once more.
    pub(crate) fn wire(&mut self, range: FileRange) {
        for part in parts(range) {
            match part {
                Part::Section(section) => *self.sections.entry(section).or_insert(0) += 1,
                Part::Pages(pages) => {
                    for page in pages.iter() {
                        *self.pages.entry(page).or_insert(0) += 1;
                    }
                }
            }
        }
    }

    /// Reverts [`Self::wire`], for the same range.
    pub(crate) fn unwire(&mut self, range: FileRange) {
        for part in parts(range) {
            match part {
                Part::Section(section) => once_less(&mut self.sections, section),
                Part::Pages(pages) => pages
                    .iter()
                    .for_each(|page| once_less(&mut self.pages, page)),
            }
        }
    }

    /// Number of pages that are wired.
    pub(crate) fn len(&self) -> u64 {
        let alone = |page: &&FilePage| !self.sections.contains_key(&page.section());
        let alone = match self.sections.is_empty() {
            true => self.pages.len(),
            false => self.pages.keys().filter(alone).count(),
        };
        self.sections.len() as u64 * SECTION_PAGES + alone as u64
    }

    /// The wired pages of `section`.
    pub(crate) fn of(&self, section: FileSection) -> FilePageSet {
        let all = section.all_pages();
        if self.sections.contains_key(&section) {
            return FilePageSet::of_range(section, all);
        }
        let mut set = FilePageSet::EMPTY;
        for (page, _) in self.pages.range(all.start..all.end) {
            set.insert(*page);
        }
        set
    }

    /// The sections that have a wired page in `range`, ascending.
    pub(crate) fn sections_in(&self, range: FileRange) -> Vec<FileSection> {
        if range.is_empty() {
            return Vec::new();
        }
        let last = FilePage(range.end.0 - 1).section();
        let whole = self.sections.range(range.start.section()..=last);
        let mut sections: Vec<FileSection> = whole.map(|(section, _)| *section).collect();
        let pages = self.pages.range(range.start..range.end);
        sections.extend(pages.map(|(page, _)| page.section()));
        sections.sort_unstable();
        sections.dedup();
        sections
    }

    /// The pages below `page_count` that are not wired, as runs, ascending.
    pub(crate) fn others(&self, page_count: u64) -> Vec<FileRange> {
        let all = FilePage(0).run(page_count);
        let mut runs = Vec::new();
        let mut start = all.start;
        let mut push = |start: FilePage, end: FilePage| {
            if start < end {
                runs.push(FileRange::new(start, end));
            }
        };
        for section in self.sections_in(all) {
            let pages = section.pages(page_count);
            for wired in self.of(section).runs(section) {
                push(start, wired.start.min(pages.end));
                start = start.max(wired.end);
            }
        }
        push(start, all.end);
        runs
    }
}

fn once_less<K: Ord + std::fmt::Debug>(counts: &mut BTreeMap<K, u32>, key: K) {
    match counts.get_mut(&key) {
        Some(1) => {
            counts.remove(&key);
        }
        Some(count) => *count -= 1,
        None => debug_assert!(false, "{key:?} was not wired"),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    #[test]
    fn wired_pages_are_those_of_a_plain_list_of_counts() {
        const PAGES: u64 = 3 * SECTION_PAGES + 100;
        for seed in 0..30 {
            let mut random = SplitMix64::new(seed);
            let mut wired = WiredPages::default();
            let mut model = vec![0_u32; usize::try_from(PAGES).unwrap()];
            let mut ranges: Vec<FileRange> = Vec::new();
            for _ in 0..60 {
                if random.below(3) == 0 && !ranges.is_empty() {
                    let at = usize::try_from(random.below(ranges.len() as u64)).unwrap();
                    let range = ranges.swap_remove(at);
                    wired.unwire(range);
                    range.iter().for_each(|page| model[page.index()] -= 1);
                } else {
                    let range = match random.below(3) {
                        0 => FileSection(random.below(3)).all_pages(),
                        1 => FilePage(random.below(PAGES - 4)).run(random.below(4)),
                        _ => FilePage(random.below(600)).run(random.below(1000)),
                    };
                    wired.wire(range);
                    range.iter().for_each(|page| model[page.index()] += 1);
                    ranges.push(range);
                }
                let is_wired = |page: &FilePage| model[page.index()] > 0;
                let all = FilePage(0).run(PAGES);
                assert_eq!(wired.len(), all.iter().filter(is_wired).count() as u64);
                for section in all.sections() {
                    let pages = section.pages(PAGES);
                    let naive: Vec<_> = pages.iter().filter(is_wired).collect();
                    assert_eq!(wired.of(section).pages(section).collect::<Vec<_>>(), naive);
                }
                let range = FilePage(random.below(700)).run(random.below(1200));
                let mut naive: Vec<_> = (range.intersect(all).iter())
                    .filter(is_wired)
                    .map(FilePage::section)
                    .collect();
                naive.dedup();
                assert_eq!(wired.sections_in(range), naive);
                let others = wired.others(PAGES);
                assert!(others.windows(2).all(|two| two[0].end < two[1].start));
                let others: Vec<_> = others.into_iter().flat_map(FileRange::iter).collect();
                let naive: Vec<_> = all.iter().filter(|page| !is_wired(page)).collect();
                assert_eq!(others, naive);
            }
        }
    }
}
