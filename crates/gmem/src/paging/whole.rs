// SPDX-License-Identifier: Apache-2.0
//! Sections that come and go whole: memory that the kernel keeps in huge pages and never splits
//! (hugetlbfs).
//!
//! # Idea
//! The kernel makes 512 pages present or absent by one call. Their content is stored page by page all
//! the same, by the same store and tiers, so each page keeps its word. What makes one unit of 512 words
//! is that one of them decides: the section's first page **leads**. It is claimed first and finished last,
//! and whoever wants any page of the section looks at the leader's word alone.
//!
//! ```text
//!   leader     Stored ─claim─► Filling ·································· Filling ─► Present
//!   others     Stored            └─► Filling, Filling, …   install 2 MiB  └─► Present, …
//!   asker      joins the leader  ◄─────────────────────────────────────────────►  finds it present
//! ```
//! All words are claimed before anything is installed, and no word says *present* before the install. So a
//! daemon that dies leaves words of which each, together with the presence of the section, says what is
//! true ([`super::word`]): `Filling` and `Stored` with an absent section, `Filling` and `Present` with a
//! present one. `Stored` never meets a present section, unless a foreign process made it so.
//!
//! An eviction is a round like any other ([`super::eviction`]) whose candidates are all pages of the
//! section: one access takes all of them out of it, and the commit takes all or none, by one punch.
//!
//! # What differs from pages that come one by one
//! | | here |
//! |---|---|
//! | a fault | fills 2 MiB: room for all of it is taken; a caller that must not wait never does it |
//! | an overwrite by a device | the old content is filled, the device writes its bytes itself |
//! | readahead | none: the section is the readahead. Swapping in ahead fills whole sections |
//! | a page that is lost | the section cannot be present any more: accesses fail. The other pages stay stored |
//! | content not at hand | is never made here: 512 loads would wait for a disk. The store keeps it in memory |
//! | relocation | as ever: it changes words that are `Stored`, and a claim that lost to it reads the word again |
//!
//! # No huge page free
//! A punched huge page is free for any process of the host. A fill that finds none ends as if it had not
//! begun ([`Resolved::NoPageFree`]). Its asker evicts another section of this memory or waits a moment, and
//! tries again ([`super::Admission::no_page_free`]); after a bounded time it lets the vCPU or device fault
//! again. Nothing fails, and nothing is lost: the guest waits.

use super::{
    fault::FaultOutcome,
    fill::{Asked, event_of},
    memory::{PagedMemory, Resolved},
    place::{Granule, PlaceError},
    store::StoreError,
    table::Section,
    word::{Event, PageState},
};
use pagetide_addr::{DeviceId, PAGE_BYTES, PageNo, PageRange, SectionNo, to_usize};
use std::sync::atomic::Ordering::Relaxed;

/// Calls `work` with a buffer of `bytes`, whose initial content is arbitrary. A thread that has filled one
/// section keeps the memory for the next.
#[cfg(not(loom))]
fn with_buffer<R>(bytes: usize, work: impl FnOnce(&mut [u8]) -> R) -> R {
    thread_local! {
        static SECTION: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    SECTION.with_borrow_mut(|buffer| {
        if buffer.len() < bytes {
            buffer.resize(bytes, 0);
        }
        work(&mut buffer[..bytes])
    })
}

#[cfg(loom)]
fn with_buffer<R>(bytes: usize, work: impl FnOnce(&mut [u8]) -> R) -> R {
    work(&mut vec![0; bytes])
}

/// What was found while a section was claimed.
struct Claimed {
    /// Pages that were stored, those of zeros included: for these room was taken.
    pages: u64,
    /// Of them, those that have content in the store.
    stored: u64,
    /// The guest had given the section up: nothing of it is stored.
    is_discarded: bool,
    /// A page whose content is lost.
    lost: Option<PageNo>,
}

impl PagedMemory {
    /// True if the pages of `section` become present and absent together.
    #[must_use]
    pub fn goes_whole(&self, section: SectionNo) -> bool {
        self.table.section(section).is_some_and(|state| {
            let ask = || self.place.granule(section);
            state.granule().unwrap_or_else(ask) == Granule::Section
        })
    }

    /// As [`Self::goes_whole`]. The section's lock is held, so the answer is kept.
    pub(super) fn is_whole(&self, state: &Section, section: SectionNo) -> bool {
        let granule = state.granule().unwrap_or_else(|| {
            let granule = self.place.granule(section);
            state.set_granule(granule);
            granule
        });
        granule == Granule::Section
    }

    /// `pages`, and all pages that become present with them.
    pub(super) fn reach(&self, pages: PageRange) -> PageRange {
        if pages.is_empty() {
            return pages;
        }
        let (first, last) = (pages.start.section(), PageNo(pages.end.0 - 1).section());
        let start = match self.goes_whole(first) {
            true => self.table.pages_of(first).start,
            false => pages.start,
        };
        let end = match self.goes_whole(last) {
            true => self.table.pages_of(last).end.max(pages.end),
            false => pages.end,
        };
        PageRange::new(start, end)
    }

    /// Makes all of `section` present with its content; its leader was stored, or present in a hole. The
    /// section's lock is held shared. Returns how many of its pages were stored.
    pub(super) fn fill_whole(&self, section: SectionNo, asked: Asked) -> (u64, Resolved) {
        let pages = self.table.pages_of(section);
        let Some(claimed) = self.claim_whole(pages) else {
            // Another thread was faster: look again.
            return (0, Resolved::UpTo(pages.start));
        };
        if let Some(lost) = claimed.lost {
            self.undo_whole(pages, FaultOutcome::Lost);
            self.poison_for_kernel(lost);
            return (0, Resolved::Failed(FaultOutcome::Lost));
        }
        with_buffer(to_usize(pages.bytes()), |buffer| {
            if let Err((page, error)) = self.load_whole(pages, buffer) {
                return (0, self.not_loaded(pages, page, &error));
            }
            let installed = self.place.install_run(pages, buffer);
            let is_done = match installed {
                Ok(done) => done == pages.len() || claimed.is_discarded,
                Err(_) => false,
            };
            if !is_done {
                return (0, self.not_installed(pages, installed));
            }
            self.finish_whole(pages);
            let filled = claimed.pages;
            self.counters.filled_pages.fetch_add(filled, Relaxed);
            if claimed.stored > 0 && asked == Asked::ByFault {
                self.admission.refilled(section, claimed.stored);
            }
            (filled, Resolved::UpTo(pages.end))
        })
    }

    /// Claims all words, the leader's first; `None` if another thread has that.
    fn claim_whole(&self, pages: PageRange) -> Option<Claimed> {
        let mut claimed = Claimed {
            pages: 0,
            stored: 0,
            is_discarded: false,
            lost: None,
        };
        for page in pages.iter() {
            // Besides this thread only a relocation changes words of a claimed section, once each time.
            loop {
                let word = self.table.word(page);
                let event = match word.state() {
                    PageState::Stored(_) => Event::Claim,
                    PageState::Present => Event::FoundHole,
                    PageState::Poisoned => {
                        claimed.lost = Some(page);
                        break;
                    }
                    _ if page == pages.start => return None,
                    // Left by an eviction that did not know whether it was punched. It was: the leader says so.
                    PageState::Evicting(_) => Event::Punched,
                    state => unreachable!("{page} is {state:?} in a section that was absent"),
                };
                let changed = self.table.change(page, word, event).is_some();
                match (changed, word.state()) {
                    (true, PageState::Stored(content)) => {
                        claimed.pages += 1;
                        claimed.stored += u64::from(!content.is_zero());
                        break;
                    }
                    (true, PageState::Present) => {
                        claimed.is_discarded |= page == pages.start;
                        self.counters.discarded_pages.fetch_add(1, Relaxed);
                        break;
                    }
                    (false, _) if page == pages.start => return None,
                    // The word is read again.
                    _ => {}
                }
            }
        }
        Some(claimed)
    }

    fn load_whole(&self, pages: PageRange, into: &mut [u8]) -> Result<(), (PageNo, StoreError)> {
        let parts = into.chunks_exact_mut(to_usize(PAGE_BYTES));
        for (page, part) in pages.iter().zip(parts) {
            match self.table.word(page).state() {
                PageState::Filling(content) => {
                    self.load(page, content, part)
                        .map_err(|error| (page, error))?;
                }
                // Given up by the guest.
                _ => part.fill(0),
            }
        }
        Ok(())
    }

    /// The content of `page` cannot be loaded: the section stays absent.
    fn not_loaded(&self, pages: PageRange, page: PageNo, error: &StoreError) -> Resolved {
        if page != pages.start {
            let word = self.table.word(page);
            let ended = self.table.change(page, word, event_of(error));
            assert!(ended.is_some(), "{page} left its fill while it was claimed");
            self.undo_whole(pages, FaultOutcome::Lost);
        } else {
            self.undo_others(pages);
            let word = self.table.word(page);
            self.finish(page, word, event_of(error), FaultOutcome::Lost);
        }
        self.content_unavailable(page, error)
    }

    /// The kernel did not install the section.
    fn not_installed(&self, pages: PageRange, installed: Result<u64, PlaceError>) -> Resolved {
        let outcome = match &installed {
            // They try again, and find out for themselves.
            Err(PlaceError::NoPageFree { .. }) => FaultOutcome::Present,
            Err(PlaceError::Gone) => FaultOutcome::Gone,
            Ok(_) | Err(PlaceError::Kernel { .. }) => FaultOutcome::Lost,
        };
        self.undo_whole(pages, outcome);
        match installed {
            Ok(_) => {
                self.incidents.foreign_page(pages.start);
                Resolved::Failed(FaultOutcome::Lost)
            }
            Err(PlaceError::NoPageFree { .. }) => Resolved::NoPageFree,
            Err(error) => self.failed(pages.start, &error),
        }
    }

    /// Ends the fill of a section that stays absent: the leader's last, whose waiters are told `outcome`.
    fn undo_whole(&self, pages: PageRange, outcome: FaultOutcome) {
        self.undo_others(pages);
        let word = self.table.word(pages.start);
        if let PageState::Filling(_) | PageState::Discarding = word.state() {
            self.finish(pages.start, word, Event::InstallFailed, outcome);
        }
    }

    fn undo_others(&self, pages: PageRange) {
        for page in pages.iter().skip(1) {
            let word = self.table.word(page);
            if let PageState::Filling(_) | PageState::Discarding = word.state() {
                let undone = self.table.change(page, word, Event::InstallFailed);
                assert!(
                    undone.is_some(),
                    "{page} left its fill while it was claimed"
                );
            }
        }
    }

    /// The section is there: the leader's word says so last.
    fn finish_whole(&self, pages: PageRange) {
        self.grant_to(pages, |id| id != DeviceId::VCPUS);
        for page in pages.iter().skip(1).chain([pages.start]) {
            let word = self.table.word(page);
            self.finish(page, word, Event::Installed, FaultOutcome::Present);
            if let PageState::Filling(content) = word.state()
                && !content.is_zero()
            {
                self.store.free(content);
            }
        }
    }

    /// A page of a present section was accessed: all of it leaves the round and is granted.
    pub(super) fn found_present_whole(&self, section: &Section, pages: PageRange, by: DeviceId) {
        self.counters.present_faults.fetch_add(1, Relaxed);
        let cancelled = pages.iter().filter(|page| section.cancel(*page)).count() as u64;
        let counter = &self.counters.cancelled_pages;
        counter.fetch_add(cancelled, Relaxed);
        if cancelled > 0 || by == DeviceId::VCPUS {
            self.grant_to(pages, |id| id == DeviceId::VCPUS);
        }
        self.grant_to(pages, |id| id != DeviceId::VCPUS);
    }

    /// As [`Self::settle_evicting`], for all pages of a section by one answer; the leader last.
    pub(super) fn settle_whole(&self, pages: PageRange) -> Resolved {
        let event = match self.place.is_present(pages.start) {
            Ok(true) => Event::StillPresent,
            Ok(false) => Event::Punched,
            Err(error) => return self.failed(pages.start, &error),
        };
        for page in pages.iter().skip(1).chain([pages.start]) {
            let word = self.table.word(page);
            if let PageState::Evicting(_) = word.state() {
                self.settle_as(page, word, event);
            }
        }
        Resolved::UpTo(pages.start)
    }
}
