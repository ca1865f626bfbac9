// SPDX-License-Identifier: Apache-2.0
//! How a thread that fills pages makes room for them: under the VM's limit, under the budget of the host, and ahead
//! of fills to come.

use super::Limit;
use crate::host_share::HostShare;
use pagetide_policy::watermarks::{ADMISSION_WAIT, Headroom};
use std::{
    sync::{Weak, atomic::Ordering::Relaxed},
    time::Duration,
};

/// Most pages that a fill makes room for at a time beyond its own.
const ROOM_PAGES_MAX: i64 = 64;
/// How long a fill waits for a huge page before it tries again: somebody else may free one.
pub(super) const NO_PAGE_WAIT: Duration = Duration::from_millis(10);
/// Sections that a fill evicts for a huge page before it only waits for one: what comes free may go to others.
pub(super) const HUGE_PAGE_TRIES: u32 = 2;
/// Times that a fill makes room before it waits: other fills may take the room it made.
const ROOM_TRIES: u32 = 4;

impl Limit {
    /// Makes room for `pages`, as far as sections are ready.
    pub(super) fn make_headroom(&self, pages: i64) {
        let Some(direct) = self.direct.get().and_then(Weak::upgrade) else {
            return;
        };
        for _ in 0..ROOM_TRIES {
            let short = pages - self.headroom.load(Relaxed);
            // Reaching a limit that was lowered by much is up to the reclaimer.
            let short = short.min(pages.max(ROOM_PAGES_MAX));
            let short = u64::try_from(short).unwrap_or(0);
            if short == 0 || self.is_stopped() || direct.make_room(short) == 0 {
                return;
            }
        }
    }

    /// Evicts a section that is ready and goes whole, whatever room there is under the limit: the kernel has no huge
    /// page for a fill. False if none went. A VM without a limit is not evicted from.
    pub(super) fn make_huge_page(&self) -> bool {
        let has_limit = matches!(self.headroom(), Headroom::Limited { .. });
        let direct = self.direct.get().and_then(Weak::upgrade);
        direct.is_some_and(|direct| has_limit && !self.is_stopped() && direct.make_huge_page())
    }

    /// True if so little headroom is left that room should be made before a fill needs it.
    #[must_use]
    pub fn is_short_of_room(&self) -> bool {
        self.headroom().pages_ahead() > 0
            && !self.is_advisory()
            && !self.is_stopped()
            && self.reserve.has_ready()
    }

    /// Makes room for fills to come, as far as sections are ready. Call it where no fault waits for this thread.
    pub fn make_room_ahead(&self) {
        let short = self.headroom().pages_ahead();
        let direct = self.direct.get().and_then(Weak::upgrade);
        if let Some(direct) = direct
            && short > 0
            && !self.is_stopped()
        {
            let pages = short.min(ROOM_PAGES_MAX.cast_unsigned());
            match self.work.get() {
                Some(work) => work.run_whole(|| direct.make_room(pages)),
                None => direct.make_room(pages),
            };
        }
    }

    /// The host's budget and the VM's resident pages. `None` also if the VM has no limit: then nothing of it may
    /// be evicted.
    fn under_budget(&self) -> Option<(&dyn HostShare, u64)> {
        match (self.host.get(), self.headroom()) {
            (
                Some(host),
                Headroom::Limited {
                    limit_pages,
                    free_pages,
                },
            ) => {
                let resident = u64::try_from(limit_pages - free_pages).unwrap_or(0);
                Some((host.as_ref(), resident))
            }
            _ => None,
        }
    }

    /// Pages to be evicted before `pages` are filled, for the sake of the host.
    pub(super) fn pages_first(&self, pages: u64) -> u64 {
        self.under_budget()
            .map_or(0, |(host, resident)| host.pages_first(pages, resident))
    }

    /// Evicts of this VM first if the host is short, and waits if nothing is left of its budget. One try each:
    /// the fill goes ahead whatever came of it.
    pub(super) fn make_room_on_host(&self, pages: u64) {
        let first = self.pages_first(pages);
        if first == 0 || self.is_stopped() {
            return;
        }
        let direct = self.direct.get().and_then(Weak::upgrade);
        if direct.is_none_or(|direct| direct.make_room(first) < first) {
            self.want_reclaim();
        }
        // What was evicted counts.
        if let Some((host, resident)) = self.under_budget()
            && host.is_spent(pages, resident)
        {
            self.sleep(|| host.wait_for_room(pages, resident, ADMISSION_WAIT));
        }
    }
}
