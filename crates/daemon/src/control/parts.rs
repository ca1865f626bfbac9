// SPDX-License-Identifier: Apache-2.0
//! Small reports without figures.

use pagetide_swap::reclaim::Stayed;
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;

/// A RAM file of a VM: a region of its address space.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct RegionReport {
    /// The file, by device and inode number.
    pub file: String,
    /// Its first page in the address space.
    pub first_page: u64,
    /// Number of its pages.
    pub pages: u64,
    /// Memory it takes up now.
    pub resident_bytes: u64,
    /// Pages of it that are away.
    pub stored_pages: u64,
}

/// What a reclaim did.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct ReclaimReport {
    /// Name of the VM.
    pub name: String,
    /// Bytes asked for; absent when all was asked for.
    pub asked_bytes: Option<u64>,
    /// Bytes evicted by this call.
    pub reclaimed_bytes: u64,
    /// RAM of the VM that is present afterwards.
    pub resident_bytes: u64,
    /// Why less than asked for was evicted, as a sentence.
    pub shortfall: Option<String>,
    /// The pages that are in memory afterwards, by why they stayed; absent if as much was evicted as was asked
    /// for, or nothing is left.
    pub stayed: Option<StayedReport>,
}

impl ReclaimReport {
    /// The pages that stayed, to be put behind a sentence: `: 1 page: 1 touched again`, or nothing.
    #[must_use]
    pub fn stayed_text(&self) -> String {
        let text = |stayed: &StayedReport| format!(": {stayed}");
        self.stayed.as_ref().map_or_else(String::new, text)
    }
}

/// Pages that a reclaim has left in memory, each by the first reason that holds.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct StayedReport {
    /// All of them.
    pub pages: u64,
    /// Being filled or evicted at that moment.
    pub moving_pages: u64,
    /// Used by a device for as long as it likes, such as its rings.
    pub wired_pages: u64,
    /// Spared by a DMA protector.
    pub protected_pages: u64,
    /// In a huge page that is in use or cannot be split.
    pub in_huge_pages: u64,
    /// The pool had no room for them.
    pub refused_pages: u64,
    /// Touched again since they were unmapped.
    pub touched_pages: u64,
    /// Transfers of a device were under way in their 2 MiB.
    pub leased_pages: u64,
    /// Eviction is blocked or suspended.
    pub blocked_pages: u64,
    /// It was not their turn before the reclaim ended.
    pub untried_pages: u64,
    /// In the RAM files although they are stored: somebody else has put them there, or is about to.
    pub foreign_pages: u64,
}

impl StayedReport {
    /// As many pages are in memory; those beyond what is known of are foreign.
    pub(crate) fn beside(&mut self, resident_pages: u64) {
        self.foreign_pages = resident_pages.saturating_sub(self.pages);
        self.pages += self.foreign_pages;
    }

    fn reasons(&self) -> impl Iterator<Item = (u64, &'static str)> {
        let all = [
            (self.moving_pages, "being filled or evicted"),
            (self.wired_pages, "wired by a device"),
            (self.protected_pages, "spared by a DMA protector"),
            (self.in_huge_pages, "in a huge page in use"),
            (self.refused_pages, "without room in the pool"),
            (self.touched_pages, "touched again"),
            (self.leased_pages, "beside DMA under way"),
            (self.blocked_pages, "not to be evicted now"),
            (self.untried_pages, "not tried"),
            (self.foreign_pages, "in memory though stored"),
        ];
        all.into_iter().filter(|(pages, _)| *pages > 0)
    }
}

impl From<&Stayed> for StayedReport {
    fn from(stayed: &Stayed) -> Self {
        Self {
            pages: stayed.pages(),
            moving_pages: stayed.moving,
            wired_pages: stayed.wired,
            protected_pages: stayed.protected,
            in_huge_pages: stayed.in_huge,
            refused_pages: stayed.refused,
            touched_pages: stayed.touched,
            leased_pages: stayed.leased,
            blocked_pages: 0,
            untried_pages: stayed.untried,
            foreign_pages: 0,
        }
    }
}

/// For example `3 pages: 2 touched again, 1 wired by a device`.
impl fmt::Display for StayedReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = if self.pages == 1 { "page" } else { "pages" };
        write!(f, "{} {unit}", self.pages)?;
        for (number, (pages, why)) in self.reasons().enumerate() {
            let before = if number == 0 { ":" } else { "," };
            write!(f, "{before} {pages} {why}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stayed_is_told_by_reason_and_the_rest_is_foreign() {
        let stayed = Stayed {
            touched: 2,
            wired: 1,
            ..Stayed::default()
        };
        let mut report = StayedReport::from(&stayed);
        report.beside(3);
        assert_eq!(
            report.to_string(),
            "3 pages: 1 wired by a device, 2 touched again"
        );
        report.beside(4);
        assert_eq!((report.pages, report.foreign_pages), (4, 1));
        let mut none = StayedReport::default();
        none.beside(1);
        assert_eq!(none.to_string(), "1 page: 1 in memory though stored");
    }
}
