// SPDX-License-Identifier: Apache-2.0
//! Waiters for pages that another thread is filling.
//!
//! A vCPU waits in the kernel and needs no entry here: the install wakes it. A device's fault
//! joins: its [`Pending`] goes on the page's list, and the filler takes the list after installing
//! the page. Neither may miss the other, and the filler must not pay for a list that is nearly
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

/// The lists of all pages that have waiters.
pub(crate) struct Waiters {
    lists: Mutex<HashMap<PageNo, Vec<Arc<Pending>>>>,
}

impl Waiters {
    pub(crate) fn new() -> Self {
        Self {
            lists: Mutex::new(HashMap::new()),
        }
    }

    /// Joins the fill of `page`; false if it is over and the page must be checked again.
    pub(crate) fn join(&self, table: &PageTable, page: PageNo, pending: &Arc<Pending>) -> bool {
        let mut lists = crate::sync::lock(&self.lists);
        if !table.mark_waited(page) {
            return false;
        }
        pending.expect_one_more();
        lists.entry(page).or_default().push(Arc::clone(pending));
        true
    }

    /// Releases all waiters of `page`. Called when its word has the waiter flag.
    pub(crate) fn release(&self, page: PageNo, outcome: FaultOutcome) {
        let list = crate::sync::lock(&self.lists).remove(&page);
        for pending in list.into_iter().flatten() {
            pending.settle(outcome);
        }
    }
}
