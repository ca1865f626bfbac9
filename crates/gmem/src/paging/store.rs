// SPDX-License-Identifier: Apache-2.0
//! [`ContentStore`] and [`Admission`]: what an address space needs from the keeper of its absent
//! pages.
//!
//! Content is *at hand* if computing alone delivers it ([`ContentStore::load`]): it is in memory.
//! All other content comes from a disk or another machine. Its load is begun with
//! [`ContentStore::load_later`] and ends on any thread, when the store completes the [`LoadDone`]
//! that it was given. A store whose tier has failed for a while may simply complete later.

use super::{place::PlaceError, word::Content};
use pagetide_addr::{DeviceId, PageNo, SectionNo, Tier};

/// Why stored content cannot be loaded. Damaged content is lost for good; after any other error the
/// page stays stored, and the next fault on it tries again.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The content differs from what was stored.
    #[error("stored content of {page} is damaged: {why}")]
    Damaged {
        /// Page whose content it was.
        page: PageNo,
        /// What does not match.
        why: &'static str,
    },
    /// The store cannot be read now; a retry may help.
    #[error("stored content of {page} cannot be read: {source}")]
    Unreadable {
        /// Page whose content it is.
        page: PageNo,
        /// Why.
        source: std::io::Error,
    },
    /// The store has dropped the load.
    #[error("the load of stored content of {page} was given up")]
    GivenUp {
        /// Page whose content it is.
        page: PageNo,
    },
}

/// Result of a load.
pub type Loaded<'a> = Result<&'a [u8; 4096], StoreError>;

type Tell = Box<dyn for<'a> FnOnce(Loaded<'a>) + Send>;

/// The duty to end one load, exactly once. A load that is dropped unanswered ends as
/// [`StoreError::GivenUp`].
///
/// The page is installed by the thread that ends the load, under the lock of its section. So a load
/// must not be ended by a call that itself may be made under such a lock: [`ContentStore::load`],
/// [`ContentStore::free`], [`ContentStore::is_at_hand`] and [`ContentStore::tier`].
#[must_use = "faults wait for the load until it is completed or dropped"]
pub struct LoadDone {
    page: PageNo,
    tell: Option<Tell>,
}

impl LoadDone {
    /// The duty to call `tell` with the content of `page`.
    pub fn new(page: PageNo, tell: impl for<'a> FnOnce(Loaded<'a>) + Send + 'static) -> Self {
        let tell: Tell = Box::new(tell);
        let tell = Some(tell);
        Self { page, tell }
    }

    /// The page whose content is wanted.
    #[must_use]
    pub fn page(&self) -> PageNo {
        self.page
    }

    /// Ends the load: with the content, checked, or with the reason why there is none.
    pub fn complete(mut self, loaded: Loaded<'_>) {
        if let Some(tell) = self.tell.take() {
            tell(loaded);
        }
    }
}

impl Drop for LoadDone {
    fn drop(&mut self) {
        if let Some(tell) = self.tell.take() {
            tell(Err(StoreError::GivenUp { page: self.page }));
        }
    }
}

impl std::fmt::Debug for LoadDone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LoadDone({})", self.page)
    }
}

/// Where the content of absent pages is kept.
pub trait ContentStore: Send + Sync {
    /// Loads the content of `page` into `into`, checked. Never called for [`Content::ZERO`].
    ///
    /// # Errors
    /// [`StoreError`]; `into` is then undefined.
    fn load(&self, page: PageNo, content: Content, into: &mut [u8; 4096])
    -> Result<(), StoreError>;

    /// Begins to load content that is not at hand, and returns without waiting for it. `done` is
    /// completed once, by any thread, also before this returns. Called without a lock. Until then
    /// the content is neither freed nor moved. Never called for [`Content::ZERO`].
    ///
    /// The thread that completes `done` may be the one that drops the memory, and with it the store.
    ///
    /// A store whose content is always at hand needs none of its own: this one loads in the call.
    fn load_later(&self, page: PageNo, content: Content, done: LoadDone) {
        let mut bytes = [0; 4096];
        let loaded = self.load(page, content, &mut bytes);
        done.complete(loaded.map(|()| &bytes));
    }

    /// Frees content that is no longer needed. Called exactly once for each stored content, after
    /// no word names it any more. Never called for [`Content::ZERO`].
    fn free(&self, content: Content);

    /// True if [`Self::load`] can deliver the content at once, by computing alone. If not, it is
    /// loaded by [`Self::load_later`], and a caller that must not wait leaves the page to others.
    /// It tells by `content` alone, which may have been freed meanwhile. Never called for
    /// [`Content::ZERO`].
    fn is_at_hand(&self, content: Content) -> bool {
        let _unread = content;
        true
    }

    /// The tier that holds the content, for accounting. It tells by `content` alone, as
    /// [`Self::is_at_hand`] does. Never called for [`Content::ZERO`].
    fn tier(&self, content: Content) -> Tier {
        let _unread = content;
        Tier::Unknown
    }
}

/// See [`Admission::clock_ns`].
pub(super) const NO_CLOCK: u64 = u64::MAX;

/// Whether an address space may hold more pages: the limit, with watermarks as in Taiji 4.2.2.
pub trait Admission: Send + Sync {
    /// Makes room for `pages` more pages, evicting others first if the limit requires it. May wait
    /// for that, but not for ever: the guest needs its page. Returns how often the count was corrected before this
    /// room was taken.
    fn admit(&self, pages: u64) -> Corrections;

    /// Takes room for `pages` more pages if that needs no eviction; else takes none.
    fn try_admit(&self, pages: u64) -> bool;

    /// Gives back room that was taken for pages which were not filled, or which are no longer part
    /// of the space.
    fn give_back(&self, pages: u64);

    /// Gives back room that was taken after so many corrections, unless there was one since: it has looked at what is
    /// present, and so has given the room back itself.
    fn give_back_unless_corrected(&self, pages: u64, since: Corrections);

    /// Takes room for `pages` that were already present when they became part of the space, even if
    /// there is none.
    fn count_in(&self, pages: u64);

    /// The time, by the clock by which devices say since when they have pages: nanoseconds, never backwards. Without
    /// one, no content is given up as old ([`Blank`](super::Blank)). Called with a section's lock held, so it must not
    /// wait.
    fn clock_ns(&self) -> u64 {
        NO_CLOCK
    }

    /// This thread begins to serve a fault of `device`, until [`Self::fault_ends`]. Work that can wait may give
    /// way to it. Not told of what the daemon itself asks for: nobody waits for that.
    fn fault_begins(&self, device: DeviceId) {
        let _untold = device;
    }

    /// This thread has served its fault, or leaves it to another one.
    fn fault_ends(&self) {}

    /// The kernel had no huge page for `pages` pages that are to be filled: evicts others of this space if any
    /// are ready, or waits a moment, a hundredth of a second at most. It was called `in_vain` times for this fill
    /// before. Called without a lock.
    fn no_page_free(&self, pages: u64, in_vain: u32) {
        let _unmet = (pages, in_vain);
        std::thread::yield_now();
    }

    /// So many pages of `section` were filled with content from the store: they had been evicted before.
    /// (Pages of zeros are not counted: most were never touched.) Called with the section's lock held,
    /// so it must neither wait nor evict.
    fn refilled(&self, section: SectionNo, pages: u64) {
        let _nothing_learnt = (section, pages);
    }
}

/// How often an [`Admission`] has set what it knows of free room by what is present.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Corrections(pub u64);

/// No limit.
#[derive(Debug, Clone, Copy)]
pub struct Unlimited;

impl Admission for Unlimited {
    fn admit(&self, _pages: u64) -> Corrections {
        Corrections::default()
    }

    fn try_admit(&self, _pages: u64) -> bool {
        true
    }

    fn give_back(&self, _pages: u64) {}

    fn give_back_unless_corrected(&self, _pages: u64, _since: Corrections) {}

    fn count_in(&self, _pages: u64) {}
}

/// Receives reports of problems that only stopping the VM or an operator can fix.
pub trait Incidents: Send + Sync {
    /// `page` is present though its content is stored: another process made it so. The stored copy
    /// is kept; the VM must stop before it sees the foreign page.
    fn foreign_page(&self, page: PageNo);

    /// The content of `page` is lost; accesses to it fail from now on.
    fn poisoned(&self, page: PageNo, why: &StoreError);

    /// The kernel cannot make accesses to `page`, whose content is lost, fail. The VM must stop
    /// before it waits for ever, or reads something else.
    fn cannot_poison(&self, page: PageNo, why: &PlaceError);

    /// A fill of `page` failed; its waiters were told to retry, or given up.
    fn fill_failed(&self, page: PageNo, why: &dyn std::error::Error);
}
