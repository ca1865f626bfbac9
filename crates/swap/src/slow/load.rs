// SPDX-License-Identifier: Apache-2.0
//! Loads from slow tiers.
//!
//! ```text
//!   entry of the extent ─► read ─► opened with the version of the entry ─► unpacked ─► done
//!                           │        └ not this page as it was stored: read again; at last damaged
//!                           ├ another host works and does not have it: read again; at last it waits, or is
//!                           │ damaged, as the operator chose
//!                           ├ busy, slow: tried again ([`super::retries`])
//!                           ├ gone: tried again, or damaged, as the operator chose
//!                           └ this one read failed: tried again; damaged after [`TRIES_MAX`], if so chosen
//! ```
//! The bytes that a tier returns are believed in nothing: version, place and page come from the pool. A bit that
//! flips on the way spoils an answer, or makes the tier look for another page; what it has may be sound. So an
//! answer counts as the page's loss when a load got [`WRONG_MAX`] of them.

use super::{form::form_of, retries::Again, store::SlowStore, tiers::WhenGone};
use crate::tier::{InSlow, PAGE, unpack};
use pagetide_addr::PageNo;
use pagetide_gmem::{LoadDone, StoreError};
use pagetide_tiers::{Place, ReadDone, TierError, TierKind};
use std::sync::{Arc, Weak, atomic::Ordering::Relaxed};

/// Reads of a page that fail by themselves before it counts as lost.
const TRIES_MAX: u32 = 5;
/// Answers to the reads of a page that are not this page, before it counts as lost.
pub const WRONG_MAX: u32 = 5;

/// A load that has not ended.
struct Load {
    /// Not kept: the VM may end meanwhile.
    store: Weak<SlowStore>,
    place: InSlow,
    done: LoadDone,
    tries: u32,
    wrong: u32,
}

/// What is wrong with an answer.
enum Wrong {
    /// The tier says that it does not have the page.
    NotThere,
    /// The bytes are not the page, and why not.
    OtherBytes(&'static str),
}

impl Again for Load {
    fn again(self: Box<Self>) {
        // Without its store the VM has ended, and nobody waits.
        if let Some(store) = self.store.upgrade() {
            store.begin(*self);
        }
    }
}

impl Load {
    fn page(&self) -> PageNo {
        self.done.page()
    }

    fn damaged(self, why: &'static str) {
        let page = self.page();
        self.done.complete(Err(StoreError::Damaged { page, why }));
    }
}

impl SlowStore {
    /// Begins to load the content of `page`.
    pub(super) fn load_later(self: &Arc<Self>, page: PageNo, place: InSlow, done: LoadDone) {
        debug_assert_eq!(done.page(), page);
        self.begin(Load {
            store: Arc::downgrade(self),
            place,
            done,
            tries: 0,
            wrong: 0,
        });
    }

    fn begin(self: &Arc<Self>, load: Load) {
        let kind = load.place.kind;
        let Some(seat) = self.tiers().seat(kind) else {
            return load.damaged("this daemon does not have its tier");
        };
        let Some(place) = self.place_of(load.place) else {
            return load.damaged("its extent is not in the pool's table");
        };
        let me = Arc::clone(self);
        let told = move |read| me.read(place, load, read);
        seat.tier.read(place, ReadDone::new(kind, told));
    }

    fn read(&self, place: Place, load: Load, read: Result<Vec<u8>, TierError>) {
        match read {
            Ok(mut sealed) => {
                let mut bytes = [0; PAGE];
                match self.open(&load, &place, &mut sealed, &mut bytes) {
                    Ok(()) => {
                        self.counts.loaded_pages.fetch_add(1, Relaxed);
                        load.done.complete(Ok(&bytes));
                    }
                    Err(why) => self.wrong(load, Wrong::OtherBytes(why)),
                }
            }
            Err(TierError::NotThere(_)) => self.wrong(load, Wrong::NotThere),
            Err(error) => self.failed(load, &error),
        }
    }

    fn open(
        &self,
        load: &Load,
        place: &Place,
        sealed: &mut [u8],
        into: &mut [u8; PAGE],
    ) -> Result<(), &'static str> {
        let (kind, page) = (load.place.kind, load.page());
        let opened = self.sealer.open(kind, page, place, sealed);
        let opened = opened.map_err(|_| "what its tier returned is not what was stored")?;
        let (form, stored) = opened.split_first().ok_or("it is empty")?;
        let form = form_of(*form).ok_or("its form is unknown")?;
        unpack(self.seed, page, form, stored, into)
    }

    /// The answer is not the page.
    fn wrong(&self, mut load: Load, wrong: Wrong) {
        self.counts.wrong_answers.fetch_add(1, Relaxed);
        load.wrong = load.wrong.saturating_add(1);
        let retries = &self.tiers().retries;
        if load.wrong < WRONG_MAX {
            return retries.put(load, retries.pauses.busy);
        }
        match wrong {
            // It may get it back, from a copy of its log; a disk cannot be without a place.
            Wrong::NotThere if self.waits_for(load.place.kind) => {
                if load.wrong == WRONG_MAX && self.counts.missing_pages.fetch_add(1, Relaxed) == 0 {
                    let (page, kind) = (load.page(), load.place.kind);
                    tracing::error!(
                        %page,
                        "the {kind} tier works and does not have a page; what needs it waits, as is set, as will \
                         what needs others that are missing (missing_pages)"
                    );
                }
                retries.put(load, retries.pauses.failed);
            }
            Wrong::NotThere => load.damaged("its tier does not have it"),
            Wrong::OtherBytes(why) => load.damaged(why),
        }
    }

    /// True if what is missing there is waited for.
    fn waits_for(&self, kind: TierKind) -> bool {
        let seat = self.tiers().seat(kind);
        kind == TierKind::Remote && seat.is_some_and(|seat| seat.when_gone == WhenGone::Wait)
    }

    fn failed(&self, mut load: Load, error: &TierError) {
        let tiers = self.tiers();
        let when_gone = tiers.seat(load.place.kind).map(|seat| seat.when_gone);
        load.tries = load.tries.saturating_add(1);
        let is_lost = match error {
            TierError::Gone { .. } => true,
            TierError::Io { .. } => load.tries >= TRIES_MAX,
            TierError::Full(_)
            | TierError::Slow { .. }
            | TierError::Busy(_)
            | TierError::NotThere(_) => false,
        };
        if is_lost && when_gone == Some(WhenGone::Lost) {
            return load.damaged("its tier cannot deliver it, and such pages are to be lost");
        }
        let page = load.page();
        let pauses = tiers.retries.pauses;
        let pause = match error {
            TierError::Busy(_) => pauses.busy,
            _ => pauses.failed,
        };
        if load.tries == 1 && !matches!(error, TierError::Busy(_)) {
            tracing::debug!(%page, %error, "a load waits for its tier");
        }
        self.counts.retried_loads.fetch_add(1, Relaxed);
        tiers.retries.put(load, pause);
    }
}
