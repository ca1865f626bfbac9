// SPDX-License-Identifier: Apache-2.0
//! [`ContentStore`] and [`Admission`]: what an address space needs of whoever keeps its absent pages.

use super::{
    memory::PagedMemory,
    word::{Content, PageState},
};
use pagetide_addr::{PageNo, PageRange, Tier};

/// Why stored content cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The content is not what was stored.
    #[error("stored content of {page} is damaged: {why}")]
    Damaged {
        /// Page whose content it was.
        page: PageNo,
        /// What does not fit.
        why: &'static str,
    },
    /// The store cannot be read now; trying again may help.
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
    /// Puts the content of `page` into `into`, checked. Never called for [`Content::ZERO`].
    ///
    /// # Errors
    /// [`StoreError`]; `into` then holds nothing of meaning.
    fn load(&self, page: PageNo, content: Content, into: &mut [u8; 4096])
    -> Result<(), StoreError>;

    /// The content is not needed any more. Called exactly once for each stored content, after no
    /// word names it. Never called for [`Content::ZERO`].
    fn free(&self, content: Content);

    /// True if [`Self::load`] has the content at once, by computing alone. If not, whoever must not
    /// wait leaves the page to others. Never called for [`Content::ZERO`].
    fn is_at_hand(&self, content: Content) -> bool {
        let _unread = content;
        true
    }

    /// In which tier the content is, for accounts. Never called for [`Content::ZERO`].
    fn tier(&self, content: Content) -> Tier {
        let _unread = content;
        Tier::Unknown
    }
}

impl PagedMemory {
    /// From where `pages` would come if they faulted now: the slowest of them counts. A page that
    /// the guest gave up counts as present.
    #[must_use]
    pub fn tier_of(&self, pages: PageRange) -> Tier {
        if !self.table.contains(pages) {
            return Tier::Unknown;
        }
        let tier = |page| match self.table.word(page).state() {
            PageState::Present | PageState::Unallocated => Tier::Present,
            PageState::Discarding => Tier::Zero,
            PageState::Stored(content)
            | PageState::Filling(content)
            | PageState::Evicting(content) => {
                if content.is_zero() {
                    Tier::Zero
                } else {
                    self.store.tier(content)
                }
            }
            PageState::Poisoned => Tier::Unknown,
        };
        pages.iter().map(tier).max().unwrap_or_default()
    }
}

/// Whether an address space may hold more pages: the limit of Taiji's watermarks (4.2.2).
pub trait Admission: Send + Sync {
    /// Makes room for `pages` more pages, evicting others first where the limit demands it. May
    /// wait for that, but not for ever: the guest needs its page.
    fn admit(&self, pages: u64);

    /// Takes room for `pages` more if it is there without evicting; else takes none.
    fn try_admit(&self, pages: u64) -> bool;

    /// Gives back room that was taken for pages which were not filled, or are part of the space no
    /// more.
    fn give_back(&self, pages: u64);

    /// Takes room for `pages` that were present when they became part of the space, whether there
    /// is any or not.
    fn count_in(&self, pages: u64);
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

/// Who is told when something is wrong that only stopping the VM or a person can mend.
pub trait Incidents: Send + Sync {
    /// `page` is present though its content is stored: another process made it so. The stored copy
    /// is kept; the VM must stop before it sees the foreign page's page.
    fn foreign_page(&self, page: PageNo);

    /// The content of `page` is lost; accesses to it fail from now on.
    fn poisoned(&self, page: PageNo, why: &StoreError);

    /// The kernel cannot make accesses to `page`, whose content is lost, fail: the VM must stop before
    /// it waits for ever, or reads something else.
    fn cannot_poison(&self, page: PageNo, why: &crate::PlaceError);

    /// A fill of `page` failed and its waiters were told to try again or given up.
    fn fill_failed(&self, page: PageNo, why: &dyn std::error::Error);
}
