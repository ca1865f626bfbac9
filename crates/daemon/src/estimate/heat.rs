// SPDX-License-Identifier: Apache-2.0
//! How long sampled pages have been idle: pure, without a clock or a VM.
//!
//! A *look* returns, for each sampled section, which pages are resident and which of them were touched
//! since the last look. From this [`Heat`] keeps, for each page, the look that last saw it touched, and
//! for each threshold T:
//!
//! ```text
//!   looks      0    1    2    3    4    5    6        T = 3 looks
//!   page a     .    x    .    .    .    .    x        cold at 4, 5; at 6 a refault
//!   page b     .    .    .    .    .    .    .        cold at 3, 4, 5, 6
//! ```
//! - cold share: the share of resident pages not touched for T; the mean over all looks at T or later
//!   after the first.
//! - refaults: touches of pages that the previous look found cold. A policy that evicts at T would have
//!   caused a fault for each of them.
//!
//! A touch is dated at the look that sees it, so a page may look warmer than it is by up to one
//! interval, never colder. A page that becomes resident counts as touched.

use pagetide_addr::{PageNo, PageSet, SECTION_PAGES, SectionNo, to_usize};

/// Result of a look at one section; indexed by the section's position in the sample.
#[derive(Clone, Copy, Default, Debug)]
pub struct Seen {
    /// Pages that have memory.
    pub resident: PageSet,
    /// Pages touched since the last look.
    pub touched: PageSet,
}

/// Result for one threshold.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Cold {
    /// Idle time from which a page is cold, in milliseconds.
    pub threshold_ms: u64,
    /// Share of the resident pages that are cold; 0 to 1.
    pub page_share: f64,
    /// Share of the sections with a resident page whose resident pages are all cold; 0 to 1.
    pub section_share: f64,
    /// Touches of cold pages per second, in the whole sample; `None` before one was possible.
    pub refaults_per_second: Option<f64>,
}

#[derive(Clone, Copy, Default, Debug)]
struct Sums {
    threshold_ms: u64,
    looks: u32,
    page_share: f64,
    section_share: f64,
    refaults: u64,
    refault_ms: u64,
}

#[derive(Debug)]
struct SectionHeat {
    section: SectionNo,
    resident: PageSet,
    touched_at_ms: Box<[u64]>,
}

impl SectionHeat {
    fn touched_at(&mut self, page: PageNo) -> &mut u64 {
        &mut self.touched_at_ms[to_usize(page.place_in_section())]
    }

    fn cold_pages(&self, now_ms: u64, threshold_ms: u64) -> impl Iterator<Item = PageNo> + '_ {
        let pages = self.resident.pages(self.section);
        pages.filter(move |page| {
            let touched_at_ms = self.touched_at_ms[to_usize(page.place_in_section())];
            now_ms - touched_at_ms >= threshold_ms
        })
    }
}

/// Heat of the sampled sections.
#[derive(Debug)]
pub struct Heat {
    sections: Vec<SectionHeat>,
    sums: Vec<Sums>,
    first_ms: u64,
    last_ms: u64,
}

impl Heat {
    /// Starts with the first look, at `now_ms`: every page counts as touched then.
    ///
    /// # Panics
    /// If `seen` is not as long as `sections`.
    #[must_use]
    pub fn new(sections: &[SectionNo], seen: &[Seen], thresholds_ms: &[u64], now_ms: u64) -> Self {
        assert_eq!(sections.len(), seen.len(), "one for each section");
        let pages = to_usize(SECTION_PAGES);
        let sections = sections.iter().zip(seen);
        Self {
            sections: sections
                .map(|(section, seen)| SectionHeat {
                    section: *section,
                    resident: seen.resident,
                    touched_at_ms: vec![now_ms; pages].into(),
                })
                .collect(),
            sums: thresholds_ms
                .iter()
                .map(|threshold_ms| Sums {
                    threshold_ms: *threshold_ms,
                    ..Sums::default()
                })
                .collect(),
            first_ms: now_ms,
            last_ms: now_ms,
        }
    }

    /// Adds a look at `now_ms`.
    ///
    /// # Panics
    /// If `seen` is not as long as the sample.
    pub fn look(&mut self, seen: &[Seen], now_ms: u64) {
        assert_eq!(self.sections.len(), seen.len(), "one for each section");
        for (heat, seen) in self.sections.iter_mut().zip(seen) {
            for page in seen.resident.pages(heat.section) {
                let was_resident = heat.resident.contains(page);
                if was_resident && !seen.touched.contains(page) {
                    continue;
                }
                let touched_at_ms = heat.touched_at(page);
                if was_resident {
                    let idle_ms = self.last_ms - *touched_at_ms;
                    for sums in &mut self.sums {
                        sums.refaults += u64::from(idle_ms >= sums.threshold_ms);
                    }
                }
                *touched_at_ms = now_ms;
            }
            heat.resident = seen.resident;
        }
        for sums in &mut self.sums {
            if self.last_ms - self.first_ms >= sums.threshold_ms {
                sums.refault_ms += now_ms - self.last_ms;
            }
            if now_ms - self.first_ms >= sums.threshold_ms {
                let (page_share, section_share) =
                    cold_shares(&self.sections, now_ms, sums.threshold_ms);
                sums.page_share += page_share;
                sums.section_share += section_share;
                sums.looks += 1;
            }
        }
        self.last_ms = now_ms;
    }

    /// Resident pages of the sample at the last look.
    #[must_use]
    pub fn resident_pages(&self) -> u64 {
        self.sections.iter().map(|heat| heat.resident.len()).sum()
    }

    /// Results for each threshold that was reached.
    #[must_use]
    pub fn cold(&self) -> Vec<Cold> {
        let reached = self.sums.iter().filter(|sums| sums.looks > 0);
        reached
            .map(|sums| Cold {
                threshold_ms: sums.threshold_ms,
                page_share: sums.page_share / f64::from(sums.looks),
                section_share: sums.section_share / f64::from(sums.looks),
                refaults_per_second: (sums.refault_ms > 0)
                    .then(|| ratio(sums.refaults, sums.refault_ms) * 1e3),
            })
            .collect()
    }

    /// Pages idle for `threshold_ms` at the last look; all resident ones for 0.
    #[must_use]
    pub fn cold_pages(&self, threshold_ms: u64) -> Vec<PageNo> {
        let sections = self.sections.iter();
        sections
            .flat_map(|heat| heat.cold_pages(self.last_ms, threshold_ms))
            .collect()
    }
}

/// Shares of pages and of sections that are cold; 0 where nothing is resident.
fn cold_shares(sections: &[SectionHeat], now_ms: u64, threshold_ms: u64) -> (f64, f64) {
    let (mut pages, mut cold_pages, mut used_sections, mut cold_sections) = (0, 0, 0, 0);
    for heat in sections.iter().filter(|heat| !heat.resident.is_empty()) {
        let resident = heat.resident.len();
        let cold = heat.cold_pages(now_ms, threshold_ms).count() as u64;
        pages += resident;
        cold_pages += cold;
        used_sections += 1;
        cold_sections += u64::from(cold == resident);
    }
    (
        ratio(cold_pages, pages),
        ratio(cold_sections, used_sections),
    )
}

/// `part / whole`, 0 for nothing of nothing.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
pub fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECTION: SectionNo = SectionNo(7);

    fn page(position: u64) -> PageNo {
        PageNo(7 * SECTION_PAGES + position)
    }

    fn set(positions: &[u64]) -> PageSet {
        let mut set = PageSet::EMPTY;
        for position in positions {
            set.insert(page(*position));
        }
        set
    }

    fn seen(resident: &[u64], touched: &[u64]) -> Seen {
        Seen {
            resident: set(resident),
            touched: set(touched),
        }
    }

    #[test]
    fn picture_of_the_header_comes_out_as_drawn() {
        let mut heat = Heat::new(&[SECTION], &[seen(&[0, 1], &[])], &[3_000], 0);
        for look in 1..=6 {
            let touched: &[u64] = if look == 1 || look == 6 { &[0] } else { &[] };
            heat.look(&[seen(&[0, 1], touched)], look * 1_000);
        }
        let cold = heat.cold()[0];
        // Looks 3 to 6 count: 1, 2, 2 and 1 of 2 pages are cold.
        assert!((cold.page_share - 6.0 / 8.0).abs() < 1e-9);
        assert!((cold.section_share - 2.0 / 4.0).abs() < 1e-9);
        // One refault in the three seconds after look 3.
        assert!((cold.refaults_per_second.unwrap() - 1.0 / 3.0).abs() < 1e-9);
        assert_eq!(heat.cold_pages(3_000), [page(1)]);
    }

    #[test]
    fn threshold_not_reached_yet_says_nothing() {
        let mut heat = Heat::new(&[SECTION], &[seen(&[0], &[])], &[2_000, 9_000], 0);
        heat.look(&[seen(&[0], &[])], 1_000);
        assert!(heat.cold().is_empty());
        heat.look(&[seen(&[0], &[])], 2_000);
        let cold = heat.cold();
        assert_eq!(cold.len(), 1);
        assert_eq!(cold[0].refaults_per_second, None);
    }

    #[test]
    fn page_that_becomes_resident_counts_as_touched_but_not_as_refault() {
        let mut heat = Heat::new(&[SECTION], &[seen(&[], &[])], &[1_000], 0);
        heat.look(&[seen(&[], &[])], 1_000);
        heat.look(&[seen(&[5], &[5])], 2_000);
        assert_eq!(heat.cold()[0].refaults_per_second, Some(0.0));
        assert!(heat.cold_pages(1_000).is_empty());
        heat.look(&[seen(&[5], &[])], 3_000);
        assert_eq!(heat.cold_pages(1_000), [page(5)]);
    }

    #[test]
    fn page_that_is_gone_is_neither_cold_nor_resident() {
        let mut heat = Heat::new(&[SECTION], &[seen(&[1, 2], &[])], &[1_000], 0);
        heat.look(&[seen(&[2], &[])], 1_000);
        assert_eq!(heat.resident_pages(), 1);
        assert_eq!(heat.cold_pages(0), [page(2)]);
    }
}
