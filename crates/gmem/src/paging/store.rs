// SPDX-License-Identifier: Apache-2.0
//! [`ContentStore`] and [`Admission`]: what an address space needs from the keeper of its absent
//! pages.

use super::{place::PlaceError, word::Content};
use pagetide_addr::{DeviceId, PageNo, SectionNo, Tier};

/// Why stored content cannot be loaded.
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
}

/// Where the content of absent pages is kept.
pub trait ContentStore: Send + Sync {
    /// Loads the content of `page` into `into`, checked. Never called for [`Content::ZERO`].
    ///
    /// # Errors
    /// [`StoreError`]; `into` is then undefined.
    fn load(&self, page: PageNo, content: Content, into: &mut [u8; 4096])
    -> Result<(), StoreError>;

    /// Frees content that is no longer needed. Called exactly once for each stored content, after
    /// no word names it any more. Never called for [`Content::ZERO`].
    fn free(&self, content: Content);

    /// True if [`Self::load`] can deliver the content at once, by computing alone. If not, a caller
    /// that must not wait leaves the page to others. Never called for [`Content::ZERO`].
    fn is_at_hand(&self, content: Content) -> bool {
        let _unread = content;
        true
    }

    /// The tier that holds the content, for accounting. Never called for [`Content::ZERO`].
    fn tier(&self, content: Content) -> Tier {
        let _unread = content;
        Tier::Unknown
    }
}

/// Whether an address space may hold more pages: the limit, with watermarks as in Taiji 4.2.2.
pub trait Admission: Send + Sync {
    /// Makes room for `pages` more pages, evicting others first if the limit requires it. May wait
    /// for that, but not for ever: the guest needs its page.
    fn admit(&self, pages: u64);

    /// Takes room for `pages` more pages if that needs no eviction; else takes none.
    fn try_admit(&self, pages: u64) -> bool;

    /// Gives back room that was taken for pages which were not filled, or which are no longer part
    /// of the space.
    fn give_back(&self, pages: u64);

    /// Takes room for `pages` that were already present when they became part of the space, even if
    /// there is none.
    fn count_in(&self, pages: u64);

    /// This thread begins to serve a fault of `device`, until [`Self::fault_ends`]. Work that can wait may give
    /// way to it. Not told of what the daemon itself asks for: nobody waits for that.
    fn fault_begins(&self, device: DeviceId) {
        let _untold = device;
    }

    /// This thread has served its fault, or leaves it to another one.
    fn fault_ends(&self) {}

    /// So many pages of `section` were filled with content from the store: they had been evicted before.
    /// (Pages of zeros are not counted: most were never touched.) Called with the section's lock held,
    /// so it must neither wait nor evict.
    fn refilled(&self, section: SectionNo, pages: u64) {
        let _nothing_learnt = (section, pages);
    }
}

/// No limit.
#[derive(Debug, Clone, Copy)]
pub struct Unlimited;

impl Admission for Unlimited {
    fn admit(&self, _pages: u64) {}

    fn try_admit(&self, _pages: u64) -> bool {
        true
    }

    fn give_back(&self, _pages: u64) {}

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
