// SPDX-License-Identifier: Apache-2.0
//! Slow fills: the content of an absent page is on a disk or another machine.
//!
//! ```text
//!   lock shared   claim     the page's word: Stored(c) ─► Filling(c)
//!                 join      the asker becomes a waiter of the page, as any later fault does
//!   no lock       load      begun in the store; the asker goes on and waits for nothing
//!                  ⋮        later faults join; evictions of other pages of the section go on
//!   lock shared   install   by the thread that ends the load, after rereading the word
//!                 finish    Filling(c) ─► Present, stored copy freed, waiters released
//! ```
//! A vCPU sleeps in the kernel until the install wakes it. A device's reply is a waiter like any
//! other. So no thread of ours waits for a slow tier, and the number of loads under way is bounded
//! by the faults under way and the pages of each.
//!
//! # Who may do what to the page meanwhile
//! The claim belongs to the load, not to a thread. Nobody else ends the fill: eviction chooses
//! present pages only, an overwrite leaves the page to its device, a relocation moves content of
//! stored pages only, and a removal answers that it must come again ([`super::growth`]). So the
//! content `c` is neither freed nor moved before the load has ended.
//!
//! # How a load ends
//! | | word | waiters are told |
//! |---|---|---|
//! | loaded and installed | `Present` | present |
//! | loaded; the kernel refused the install | `Stored(c)` | as after any fill that fails |
//! | loaded or not, the section is leaving | `Stored(c)`: its memory may be unmapped | out of range |
//! | damaged | `Poisoned` | lost |
//! | unreadable, or the store dropped the load | `Stored(c)` | lost; a vCPU faults again |
//! | the memory is gone | not touched | gone, by the end of the list of waiters |
//!
//! A load finds the memory by a weak reference: it does not keep a VM that has ended (but for the
//! moment of the install, so the thread that ends a load may be the one that drops the memory). If the daemon
//! dies between the claim and the install, its successor finds the page filling and absent, which
//! means stored ([`super::word`]).

use super::{
    fault::FaultOutcome,
    fill::{Asked, event_of},
    memory::PagedMemory,
    store::{LoadDone, Loaded},
    waiters::{Joined, Pending, Reply},
    word::{Content, Event, PageState, PageWord},
};
use crate::sync::share;
use pagetide_addr::{PageNo, PageRange};
use std::sync::atomic::Ordering::Relaxed;

/// A load that is to begin once the section's lock is released. Its page is claimed.
pub(super) struct Load {
    content: Content,
    done: LoadDone,
}

impl PagedMemory {
    /// True if `page` is stored and its content is not at hand.
    pub(super) fn is_far(&self, page: PageNo) -> bool {
        match self.table.word(page).state() {
            PageState::Stored(content) => !self.is_at_hand(content),
            _ => false,
        }
    }

    /// Whether a load of `page` is under way.
    pub fn is_being_loaded(&self, page: PageNo) -> bool {
        let is_known = self.table.contains(page.single());
        match is_known.then(|| self.table.word(page).state()) {
            Some(PageState::Filling(content)) => !self.is_at_hand(content),
            _ => false,
        }
    }

    /// Tells `reply` once the fill of `page` that is under way has ended, or at once if none is. Waits for nothing.
    pub fn tell_filled(&self, page: PageNo, reply: Reply) {
        let pending = Pending::new(reply);
        let outcome = match self.table.contains(page.single()) {
            true => match self.waiters.join(&self.table, page, &pending) {
                Joined::Waits | Joined::Over => FaultOutcome::Present,
                Joined::Closed => FaultOutcome::Gone,
            },
            false => FaultOutcome::OutOfRange,
        };
        pending.settle(outcome);
    }

    /// Claims pages from the start of `run`, up to the first that is not stored or whose content is
    /// at hand, and appends them to `loads`. The section's lock is held shared, and `loads` must not
    /// be dropped before it is released.
    pub(super) fn claim_far(&self, run: PageRange, asked: Asked, loads: &mut Vec<Load>) {
        let claim = |page: PageNo| {
            let word = self.table.word(page);
            let PageState::Stored(content) = word.state() else {
                return None;
            };
            let may_claim = !self.is_at_hand(content);
            if !may_claim || self.table.change(page, word, Event::Claim).is_none() {
                return None;
            }
            self.loading.fetch_add(1, Relaxed);
            let memory = self.me.clone();
            let done = LoadDone::new(page, move |loaded| {
                if let Some(memory) = memory.upgrade() {
                    memory.end_load(page, content, asked, loaded);
                }
            });
            Some(Load { content, done })
        };
        loads.extend(run.iter().map_while(claim));
    }

    /// Begins to load. No lock is held: a store may end the load at once.
    pub(super) fn begin_load(&self, load: Load) {
        let Load { content, done } = load;
        self.store.load_later(done.page(), content, done);
    }

    /// A load has ended: makes its page present, or ends its fill as failed.
    fn end_load(&self, page: PageNo, content: Content, asked: Asked, loaded: Loaded<'_>) {
        self.finish_load(page, content, asked, loaded);
        self.loading.fetch_sub(1, Relaxed);
    }

    fn finish_load(&self, page: PageNo, content: Content, asked: Asked, loaded: Loaded<'_>) {
        let Some(section) = self.table.section(page.section()) else {
            return;
        };
        let _shared = share(&section.lock);
        let claimed = PageWord::new(PageState::Filling(content));
        // Bytes of this load must not get into a page that is not claimed for it.
        if self.table.word(page).state() != claimed.state() {
            return;
        }
        if section.is_leaving() {
            self.refuse_waiters(page, claimed);
            return;
        }
        match loaded {
            Ok(bytes) => {
                let (installed, _) = self.install(page.single(), bytes);
                let counters = &self.counters;
                (counters.filled_pages).fetch_add(installed.len(), Relaxed);
                (counters.slowly_filled_pages).fetch_add(installed.len(), Relaxed);
                if !installed.is_empty() && asked == Asked::ByFault {
                    self.admission.refilled(page.section(), installed.len());
                }
            }
            Err(error) => {
                self.counters.failed_loads.fetch_add(1, Relaxed);
                self.finish(page, claimed, event_of(&error), FaultOutcome::Lost);
                self.content_unavailable(page, &error);
            }
        }
    }

    /// The page is leaving the space: nothing is installed, queried or woken, for its memory may be
    /// gone. A vCPU is released when its registration ends.
    fn refuse_waiters(&self, page: PageNo, claimed: PageWord) {
        let before = self.table.change(page, claimed, Event::InstallFailed);
        assert!(before.is_some(), "{page} left its fill while it was loaded");
        if before.is_some_and(PageWord::is_waited_for) {
            self.waiters.release(page, FaultOutcome::OutOfRange);
        }
    }
}
