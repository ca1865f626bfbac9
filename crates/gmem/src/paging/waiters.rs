// SPDX-License-Identifier: Apache-2.0
//! Waiters for pages that another thread is filling.
//!
//! A vCPU waits in the kernel and needs no entry here: the install wakes it. A device's fault
//! joins: its [`Pending`] goes on the page's list, and the filler takes the list after installing
//! the page. A fault that begins a slow fill ([`super::slow_fill`]) joins it like any other. Neither may miss the other, and the filler must not pay for a list that is nearly
//! always empty:
//!
//! ```text
//!   joiner (list locked)               filler
//!     word: set W if still being         word: installed (one swap; returns W)
//!     installed, else go back            W was set: lock the list, take it
//!     put entry
//! ```
//! The joiner sets W and adds its entry in one hold of the list's lock, so a filler that saw W
//! finds the entry. A joiner that comes after the swap sees that the page is no longer being
//! installed, and checks it again.
//!
//! Between the filler's two steps the page may already be claimed and joined anew, if the fill has
//! failed, say. The filler then takes that joiner's entry, too, and tells it the outcome of the fill
//! before its own. That is what it would have been told a moment earlier: *present*, and it finds
//! the page absent and faults again, or the failure of a fill that was not over when it came. Every
//! entry is still taken once.
//!
//! # The end
//! A reply may own what the memory belongs to, so waiters whose content does not come would keep a
//! VM for ever that has ended. [`Waiters::close`] tells all of them that the memory is gone, and
//! every later joiner, too.

use super::{fault::FaultOutcome, table::PageTable};
use crate::sync::{Arc, Mutex};
use pagetide_addr::PageNo;
use std::collections::HashMap;

/// Called when a fault is over.
pub type Reply = Box<dyn FnOnce(FaultOutcome) + Send>;

/// A fault that waits for one or more pages.
pub(crate) struct Pending {
    state: Mutex<PendingState>,
}

struct PendingState {
    remaining: u64,
    outcome: FaultOutcome,
    reply: Option<Reply>,
}

impl Pending {
    /// A fault that waits only for its own issuer so far (see [`Self::settle`]).
    pub(crate) fn new(reply: Reply) -> Arc<Self> {
        let state = PendingState {
            remaining: 1,
            outcome: FaultOutcome::Present,
            reply: Some(reply),
        };
        Arc::new(Self {
            state: Mutex::new(state),
        })
    }

    fn expect_one_more(&self) {
        crate::sync::lock(&self.state).remaining += 1;
    }

    /// One of its waits is over. The last one replies.
    pub(crate) fn settle(&self, outcome: FaultOutcome) {
        let finished = {
            let mut state = crate::sync::lock(&self.state);
            // A reply given twice would resume a device that still waits.
            assert!(state.remaining > 0, "a fault was settled more than once");
            state.remaining -= 1;
            if outcome != FaultOutcome::Present {
                state.outcome = outcome;
            }
            if state.remaining == 0 {
                state.reply.take().map(|reply| (reply, state.outcome))
            } else {
                None
            }
        };
        if let Some((reply, outcome)) = finished {
            reply(outcome);
        }
    }
}

/// Result of an attempt to join a fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum Joined {
    /// The fault waits for it.
    Waits,
    /// The fill is over: the page must be checked again.
    Over,
    /// Nobody waits for this memory any more.
    Closed,
}

/// The lists of all pages that have waiters.
pub(crate) struct Waiters {
    lists: Mutex<Lists>,
}

#[derive(Default)]
struct Lists {
    by_page: HashMap<PageNo, Vec<Arc<Pending>>>,
    is_closed: bool,
}

impl Waiters {
    pub(crate) fn new() -> Self {
        Self {
            lists: Mutex::new(Lists::default()),
        }
    }

    /// Joins the fill of `page`.
    pub(crate) fn join(&self, table: &PageTable, page: PageNo, pending: &Arc<Pending>) -> Joined {
        let mut lists = crate::sync::lock(&self.lists);
        if lists.is_closed {
            return Joined::Closed;
        }
        if !table.mark_waited(page) {
            return Joined::Over;
        }
        pending.expect_one_more();
        let list = lists.by_page.entry(page).or_default();
        list.push(Arc::clone(pending));
        Joined::Waits
    }

    /// Releases all waiters of `page`. Called when its word has the waiter flag.
    pub(crate) fn release(&self, page: PageNo, outcome: FaultOutcome) {
        let list = crate::sync::lock(&self.lists).by_page.remove(&page);
        for pending in list.into_iter().flatten() {
            pending.settle(outcome);
        }
    }

    /// Releases the waiters of all pages: the memory is gone. From now on nobody can join.
    pub(crate) fn close(&self) {
        let left = {
            let mut lists = crate::sync::lock(&self.lists);
            lists.is_closed = true;
            std::mem::take(&mut lists.by_page)
        };
        tell_gone(left);
    }
}

impl Drop for Waiters {
    /// A load that ends later finds no memory, and so tells nobody.
    fn drop(&mut self) {
        let lists = self.lists.get_mut();
        let lists = lists.unwrap_or_else(std::sync::PoisonError::into_inner);
        tell_gone(std::mem::take(&mut lists.by_page));
    }
}

fn tell_gone(lists: HashMap<PageNo, Vec<Arc<Pending>>>) {
    for pending in lists.into_values().flatten() {
        pending.settle(FaultOutcome::Gone);
    }
}
