// SPDX-License-Identifier: Apache-2.0
//! Filling: makes absent pages present with their content, many at a time.
//!
//! ```text
//!   claim      each page's word: Stored ─► Filling       from here on it is this thread's
//!   load       content from the store, checked, into a private buffer
//!   install    all of them in one go; devices are granted them
//!   finish     each page's word: Filling ─► Present      joiners released, stored copy freed
//! ```
//! The section's lock is held shared from the first read of a word to the last change, if the
//! content is at hand. If it is not, the lock is released for the load ([`super::slow_fill`]); the
//! last two steps are those here. So a page that is being filled while nobody holds its section's
//! lock is one whose load is under way.
//!
//! Only the middle step knows where the content comes from: a page that a device has written whole is
//! installed with the device's bytes instead of the stored ones ([`super::overwrite`]).

use super::{
    fault::FaultOutcome,
    memory::{PagedMemory, Resolved},
    place::{Installed, PlaceError},
    store::StoreError,
    table::Section,
    word::{Content, Event, PageState, PageWord},
};
use pagetide_addr::{DeviceId, PAGE_BYTES, PageNo, PageRange, to_usize};
use std::sync::atomic::Ordering::Relaxed;

const ZERO_PAGE: [u8; 4096] = [0; 4096];

/// Most pages filled in one go, under one hold of the section's lock.
pub(super) const FILL_PAGES_MAX: u64 = 16;

/// What a fill goes back to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    /// A fault, on one of the pages or near them: they were evicted too early.
    ByFault,
    /// Nothing asked for the pages yet.
    ByNobody,
}

/// What becomes of a claimed page whose content cannot be loaded.
pub(super) const fn event_of(error: &StoreError) -> Event {
    match error {
        StoreError::Damaged { .. } => Event::ContentLost,
        StoreError::Unreadable { .. } | StoreError::GivenUp { .. } => Event::InstallFailed,
    }
}

/// Calls `work` with a buffer of [`FILL_PAGES_MAX`] pages, whose initial content is arbitrary.
#[cfg(not(loom))]
fn with_buffer<R>(work: impl FnOnce(&mut [u8]) -> R) -> R {
    thread_local! {
        static PAGES: std::cell::RefCell<Box<[u8]>> =
            std::cell::RefCell::new(vec![0; to_usize(FILL_PAGES_MAX * PAGE_BYTES)].into());
    }
    PAGES.with_borrow_mut(|buffer| work(buffer))
}

/// The model checker's threads share one system thread, and so would share the buffer.
#[cfg(loom)]
fn with_buffer<R>(work: impl FnOnce(&mut [u8]) -> R) -> R {
    work(&mut vec![0; to_usize(FILL_PAGES_MAX * PAGE_BYTES)])
}

impl PagedMemory {
    /// Fills the stored pages at the start of `run` with their content. It lies in one section,
    /// whose lock is held shared. Returns as [`Self::install`] does.
    pub(super) fn fill(&self, run: PageRange, asked: Asked) -> (PageRange, Resolved) {
        with_buffer(|buffer| {
            let (claimed, problem) = self.claim_and_load(run, buffer);
            if claimed.is_empty() {
                let resolved = match problem {
                    Some(error) => self.content_unavailable(run.start, &error),
                    None => Resolved::BeingFilled,
                };
                return (claimed, resolved);
            }
            let bytes = &buffer[..to_usize(claimed.bytes())];
            let stored = self.filling_from_store(claimed);
            let (installed, resolved) = self.install(claimed, bytes);
            self.counters
                .filled_pages
                .fetch_add(installed.len(), Relaxed);
            let stored = stored.min(installed.len());
            if stored > 0 && asked == Asked::ByFault {
                self.admission.refilled(run.start.section(), stored);
            }
            (installed, resolved)
        })
    }

    /// How many of the claimed pages have content in the store; the others are zeros.
    fn filling_from_store(&self, claimed: PageRange) -> u64 {
        let has_content = |page: &PageNo| matches!(self.table.word(*page).state(), PageState::Filling(content) if !content.is_zero());
        claimed.iter().filter(has_content).count() as u64
    }

    /// Claims stored pages from the start of `run` and loads their content into `buffer`. Stops at
    /// the first page that is not stored, whose content is not at hand, or whose content cannot be
    /// loaded (and returns the reason, if that is the first page of `run`).
    fn claim_and_load(&self, run: PageRange, buffer: &mut [u8]) -> (PageRange, Option<StoreError>) {
        let mut end = run.start;
        for (page, into) in run
            .iter()
            .zip(buffer.chunks_exact_mut(to_usize(PAGE_BYTES)))
        {
            let word = self.table.word(page);
            let PageState::Stored(content) = word.state() else {
                break;
            };
            let may_claim = self.is_at_hand(content);
            if !may_claim || self.table.change(page, word, Event::Claim).is_none() {
                break;
            }
            if let Err(error) = self.load(page, content, into) {
                let first = page == run.start;
                let claimed = PageWord::new(PageState::Filling(content));
                if !first {
                    // Waiters for this page retry, and get the reason themselves.
                    self.finish(page, claimed, Event::InstallFailed, FaultOutcome::Present);
                } else {
                    self.finish(page, claimed, event_of(&error), FaultOutcome::Lost);
                }
                return (PageRange::new(run.start, end), first.then_some(error));
            }
            end = page.next();
        }
        (PageRange::new(run.start, end), None)
    }

    pub(super) fn load(
        &self,
        page: PageNo,
        content: Content,
        into: &mut [u8],
    ) -> Result<(), StoreError> {
        if content.is_zero() {
            into.fill(0);
            return Ok(());
        }
        let into = into
            .try_into()
            .unwrap_or_else(|_| unreachable!("a chunk is one page"));
        self.store.load(page, content, into)
    }

    /// Claims stored pages from the start of `run`, up to the first that is not stored.
    pub(super) fn claim(&self, run: PageRange) -> PageRange {
        let claims = |page: &PageNo| {
            let word = self.table.word(*page);
            matches!(word.state(), PageState::Stored(_))
                && self.table.change(*page, word, Event::Claim).is_some()
        };
        let claimed = run.iter().take_while(claims).count() as u64;
        run.start.run(claimed)
    }

    /// Installs claimed pages, whose content is in `bytes`. Returns which pages now hold it, and
    /// how far that takes the caller.
    pub(super) fn install(&self, claimed: PageRange, bytes: &[u8]) -> (PageRange, Resolved) {
        // Bytes of another page in this place would be silent damage.
        assert_eq!(
            bytes.len() as u64,
            claimed.bytes(),
            "content of {claimed:?}"
        );
        let installed = if claimed.len() == 1 {
            self.install_claimed(claimed.start, bytes)
        } else {
            self.place.install_run(claimed, bytes)
        };
        let (done, error) = match installed {
            Ok(pages) => {
                assert!(pages <= claimed.len(), "{pages} installed of {claimed:?}");
                (claimed.start.plus(pages), None)
            }
            Err(error) => (claimed.start, Some(error)),
        };
        let installed = PageRange::new(claimed.start, done);
        self.finish_installed(installed);
        let left = PageRange::new(done, claimed.end);
        if left.is_empty() {
            return (installed, Resolved::UpTo(claimed.end));
        }
        // Fewer than requested: the next page is already present, or the kernel stopped for another
        // reason.
        let is_there = error.map_or_else(|| self.place.is_present(done), Err);
        let outcome = match &is_there {
            Ok(false) => FaultOutcome::Present,
            Err(PlaceError::Gone) => FaultOutcome::Gone,
            Ok(true) | Err(_) => FaultOutcome::Lost,
        };
        for page in left.iter() {
            if let PageState::Filling(_) = self.table.word(page).state() {
                let word = self.table.word(page);
                self.finish(page, word, Event::InstallFailed, outcome);
            }
        }
        let resolved = match is_there {
            Ok(false) => Resolved::UpTo(done),
            Ok(true) => {
                self.incidents.foreign_page(done);
                Resolved::Failed(FaultOutcome::Lost)
            }
            Err(error) => self.failed(done, &error),
        };
        (installed, resolved)
    }

    /// Installs zeros in claimed pages, at most [`FILL_PAGES_MAX`]. Returns as [`Self::install`] does.
    pub(super) fn install_zeros(&self, claimed: PageRange) -> (PageRange, Resolved) {
        with_buffer(|buffer| {
            let zeros = &mut buffer[..to_usize(claimed.bytes())];
            zeros.fill(0);
            self.install(claimed, zeros)
        })
    }

    /// Installs the one page that was claimed. Its word shows whether it is all zeros.
    fn install_claimed(&self, page: PageNo, bytes: &[u8]) -> Result<u64, PlaceError> {
        match (self.table.word(page).state(), bytes.try_into()) {
            (PageState::Filling(content), Ok(bytes)) if !content.is_zero() => {
                let installed = self.place.install(page, bytes)?;
                Ok(u64::from(installed == Installed::Installed))
            }
            _ => self.install_one(page, bytes),
        }
    }

    pub(super) fn install_one(&self, page: PageNo, bytes: &[u8]) -> Result<u64, PlaceError> {
        let is_zero = bytes == ZERO_PAGE;
        let installed = match bytes.try_into() {
            Ok(content) if !is_zero => self.place.install(page, content)?,
            _ => self.place.install_zero(page)?,
        };
        Ok(u64::from(installed == Installed::Installed))
    }

    /// Handles a hole under a word that says present: the guest gave the page up (balloon, free
    /// page reporting) and now uses it again, from zeros or from what a device has written. The
    /// result carries what `install` returned.
    pub(super) fn refill_discarded(
        &self,
        section: &Section,
        page: PageNo,
        install: impl FnOnce() -> Result<Installed, PlaceError>,
    ) -> (Option<Installed>, Resolved) {
        let present = PageWord::new(PageState::Present);
        if self.table.change(page, present, Event::FoundHole).is_none() {
            return (None, Resolved::BeingFilled);
        }
        section.cancel(page);
        self.counters.discarded_pages.fetch_add(1, Relaxed);
        let discarding = PageWord::new(PageState::Discarding);
        match install() {
            // Already present: the guest was faster through another fault on this very page.
            Ok(installed) => {
                self.finish(page, discarding, Event::Installed, FaultOutcome::Present);
                self.wake(page.single());
                self.grant_to(page.single(), |id| id != DeviceId::VCPUS);
                (Some(installed), Resolved::UpTo(page.next()))
            }
            Err(error) => {
                self.finish(page, discarding, Event::InstallFailed, FaultOutcome::Lost);
                (None, self.failed(page, &error))
            }
        }
    }

    fn finish_installed(&self, pages: PageRange) {
        self.grant_to(pages, |id| id != DeviceId::VCPUS);
        for page in pages.iter() {
            let word = self.table.word(page);
            if let PageState::Filling(content) = word.state() {
                self.finish(page, word, Event::Installed, FaultOutcome::Present);
                if !content.is_zero() {
                    self.store.free(content);
                }
            }
        }
    }

    /// Ends a fill that this thread claimed, and releases the waiters that joined it. A vCPU that
    /// joined was woken by the install, unless the install failed or the guest discarded the page
    /// at once.
    pub(super) fn finish(
        &self,
        page: PageNo,
        claimed: PageWord,
        event: Event,
        outcome: FaultOutcome,
    ) {
        let before = self.table.change(page, claimed, event);
        // Whoever claims a page is alone in ending the fill.
        assert!(
            before.is_some(),
            "{page} left its fill while it was claimed"
        );
        if before.is_some_and(PageWord::is_waited_for) {
            self.waiters.release(page, outcome);
            self.wake(page.single());
        }
    }

    pub(super) fn content_unavailable(&self, page: PageNo, error: &StoreError) -> Resolved {
        match error {
            StoreError::Damaged { .. } => {
                self.counters.poisoned_pages.fetch_add(1, Relaxed);
                self.incidents.poisoned(page, error);
                self.poison_for_kernel(page);
            }
            StoreError::Unreadable { .. } | StoreError::GivenUp { .. } => {
                self.incidents.fill_failed(page, error);
                self.wake(page.single());
            }
        }
        Resolved::Failed(FaultOutcome::Lost)
    }
}
