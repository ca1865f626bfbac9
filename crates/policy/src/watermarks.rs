// SPDX-License-Identifier: Apache-2.0
//! [`Headroom`]: how far a VM is from its limit, and the watermarks under that limit (Taiji 4.2.2).
//!
//! ```text
//!   limit ────────── min watermark: a fill first has memory evicted
//!     │   ╲ 1.5 %
//!     │   ╲ a quarter of low: whoever served a fault has memory evicted, before a fill must wait for that
//!     │
//!   low watermark ── reclaim begins
//!     │   ╲ 3 %
//!   high watermark ─ reclaim ends
//!     │   ╲ 6 %
//!   ──────────────── cold sections are kept ready for eviction from here on; beyond it memory is spare,
//!                    and what was in use lately comes back into it ([`crate::swap_in`])
//! ```
//! Watermarks are named for what is *free* under the limit: free memory falls below low, and rises
//! above high. The daemon's limit and a replay both ask here.

use std::time::Duration;

/// Free pages below which reclaim begins, in thousandths of the limit.
const LOW_PERMILLE: i64 = 15;
/// Free pages above which reclaim ends, in thousandths of the limit.
const HIGH_PERMILLE: i64 = 30;
/// Part of the free pages at the low watermark below which room is made ahead of fills.
const SHORT_PART: i64 = 4;
const _: () = assert!(0 < LOW_PERMILLE && LOW_PERMILLE < HIGH_PERMILLE && HIGH_PERMILLE < 1000);

/// Longest wait of one fill for an eviction; then it goes ahead over the limit.
pub const ADMISSION_WAIT: Duration = Duration::from_millis(100);

/// The limit of a VM, and how much of it is free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Headroom {
    /// There is no limit.
    Unlimited,
    /// There is one.
    Limited {
        /// The limit.
        limit_pages: i64,
        /// The limit less what is present: negative above the limit.
        free_pages: i64,
    },
}

impl Headroom {
    /// The limit under which reclaim ends with `present` pages, or sections, of the VM.
    #[must_use]
    pub const fn limit_over(present: u64) -> u64 {
        let used = 1000 - HIGH_PERMILLE.unsigned_abs();
        present.saturating_mul(1000).div_ceil(used)
    }

    /// True while there is a limit.
    #[must_use]
    pub fn is_limited(self) -> bool {
        self != Self::Unlimited
    }

    /// True once free pages are below the low watermark.
    #[must_use]
    pub fn is_below_low(self) -> bool {
        match self {
            Self::Unlimited => false,
            Self::Limited {
                limit_pages,
                free_pages,
            } => free_pages < part(limit_pages, LOW_PERMILLE),
        }
    }

    /// Pages to evict now so that the next fills need not wait for evictions; 0 while more than a quarter of
    /// what is free at the low watermark is free. Reclaim that cannot keep pace with faults comes this far,
    /// because it stands back for faults or because they need all CPUs.
    #[must_use]
    pub fn pages_ahead(self) -> u64 {
        match self {
            Self::Unlimited => 0,
            Self::Limited {
                limit_pages,
                free_pages,
            } => {
                let short = part(limit_pages, LOW_PERMILLE) / SHORT_PART;
                u64::try_from(short.saturating_sub(free_pages)).unwrap_or(0)
            }
        }
    }

    /// True while more is present than the limit allows.
    #[must_use]
    pub fn is_over(self) -> bool {
        match self {
            Self::Unlimited => false,
            Self::Limited { free_pages, .. } => free_pages < 0,
        }
    }

    /// Pages to evict until the high watermark is reached; 0 if there is enough headroom.
    #[must_use]
    pub fn pages_to_high(self) -> u64 {
        match self {
            Self::Unlimited => 0,
            Self::Limited {
                limit_pages,
                free_pages,
            } => {
                let high = part(limit_pages, HIGH_PERMILLE);
                u64::try_from(high.saturating_sub(free_pages)).unwrap_or(0)
            }
        }
    }

    /// Pages that can come before reclaim begins; `u64::MAX` without a limit.
    #[must_use]
    pub fn pages_above_low(self) -> u64 {
        self.pages_above(LOW_PERMILLE)
    }

    /// Pages that can come unasked: with fewer than twice the high watermark free, cold sections would be made
    /// ready for eviction. `u64::MAX` without a limit.
    #[must_use]
    pub fn spare_pages(self) -> u64 {
        self.pages_above(2 * HIGH_PERMILLE)
    }

    fn pages_above(self, permille: i64) -> u64 {
        match self {
            Self::Unlimited => u64::MAX,
            Self::Limited {
                limit_pages,
                free_pages,
            } => u64::try_from(free_pages.saturating_sub(part(limit_pages, permille))).unwrap_or(0),
        }
    }

    /// Pages that should be ready for eviction, so that a fill that finds no room need not wait until
    /// they have aged: as many as the high watermark, while fewer than twice as many are free. 0 if
    /// the limit is far.
    #[must_use]
    pub fn reserve_pages(self) -> u64 {
        match self {
            Self::Unlimited => 0,
            Self::Limited {
                limit_pages,
                free_pages,
            } => {
                let high = limit_pages / 1000 * HIGH_PERMILLE;
                match free_pages > 2 * high {
                    true => 0,
                    false => u64::try_from(high).unwrap_or(0),
                }
            }
        }
    }
}

fn part(pages: i64, permille: i64) -> i64 {
    pages.saturating_mul(permille) / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(limit_pages: i64, free_pages: i64) -> Headroom {
        Headroom::Limited {
            limit_pages,
            free_pages,
        }
    }

    #[test]
    fn reclaim_begins_below_low_ends_at_high_and_nothing_is_wanted_without_a_limit() {
        for (free, below_low, to_high) in [
            (-50, true, 3050),
            (1499, true, 1501),
            (1500, false, 1500),
            (2999, false, 1),
            (3000, false, 0),
            (90_000, false, 0),
        ] {
            let headroom = of(100_000, free);
            let found = (headroom.is_below_low(), headroom.pages_to_high());
            assert_eq!(found, (below_low, to_high), "{free} free");
            assert_eq!(headroom.is_over(), free < 0, "{free} free");
        }
        let none = Headroom::Unlimited;
        assert!(!none.is_below_low() && !none.is_limited() && !none.is_over());
        assert_eq!((none.pages_to_high(), none.reserve_pages()), (0, 0));
    }

    #[test]
    fn pages_come_unasked_as_long_as_none_need_be_made_ready_for_eviction() {
        for (free, above_low, spare) in [
            (-1, 0, 0),
            (1500, 0, 0),
            (1600, 100, 0),
            (6000, 4500, 0),
            (6001, 4501, 1),
            (100_000, 98_500, 94_000),
        ] {
            let headroom = of(100_000, free);
            let found = (headroom.pages_above_low(), headroom.spare_pages());
            assert_eq!(found, (above_low, spare), "{free} free");
            assert!(spare == 0 || headroom.reserve_pages() == 0);
        }
        let none = Headroom::Unlimited;
        assert_eq!(
            (none.pages_above_low(), none.spare_pages()),
            (u64::MAX, u64::MAX)
        );
    }

    #[test]
    fn room_is_made_ahead_below_a_quarter_of_the_low_watermark() {
        for (free, ahead) in [(-50, 425), (0, 375), (374, 1), (375, 0), (90_000, 0)] {
            assert_eq!(of(100_000, free).pages_ahead(), ahead, "{free} free");
        }
        assert_eq!(Headroom::Unlimited.pages_ahead(), 0);
    }

    #[test]
    fn reserve_is_kept_from_twice_the_high_watermark_on() {
        assert_eq!(of(100_000, 6001).reserve_pages(), 0);
        assert_eq!(of(100_000, 6000).reserve_pages(), 3000);
        assert_eq!(of(100_000, -1).reserve_pages(), 3000);
    }
}
