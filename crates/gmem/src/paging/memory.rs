// SPDX-License-Identifier: Apache-2.0
//! [`PagedMemory`]: the memory that CPU and devices share, and its single fault entry point.
//!
//! A vCPU fault and a device fault are the same event with a different waiter (GMEM 3; VPRI 5.2).
//! [`PagedMemory::fault`] is the only code that makes an absent page present. The first fault on a
//! page fills it, later ones join. How a waiter is released depends on where it sleeps: a vCPU
//! sleeps in the kernel and is woken by the install itself; a device gets a callback.
//!
//! Outside an eviction round every attached device may use every present page. An install grants
//! the page to all of them, so a device faults only on pages that are really absent.

use super::{
    fill::FILL_PAGES_MAX,
    neighbours::{self, Neighbours},
    place::{Installed, Place, PlaceError},
    store::{Admission, ContentStore, Incidents},
    table::{PageTable, Section},
    waiters::{Pending, Reply, Waiters},
    word::{Event, PageState, PageWord},
};
use crate::{
    error::GmError,
    mmu::Backing,
    paging::fault::{Fault, FaultOutcome, MemoryCounters},
    space::attachments::Attachments,
    sync::{Arc, share, try_share},
};
use pagetide_addr::{Access, DeviceId, PageNo, PageRange, SectionNo};
use std::sync::atomic::Ordering::Relaxed;

/// Most absent pages that a call which must not wait fills: at some microseconds each, more would
/// delay others behind this one.
pub(super) const AT_ONCE_PAGES_MAX: u64 = 64;
/// How often one fault may retry the same page without progress.
pub(super) const STILL_MAX: u32 = 64;

/// What an address space is made of.
pub struct MemoryParts {
    /// Words and sections.
    pub table: PageTable,
    /// Where pages are present.
    pub place: Arc<dyn Place>,
    /// Where the content of absent pages is kept.
    pub store: Arc<dyn ContentStore>,
    /// The limit.
    pub admission: Arc<dyn Admission>,
    /// Receives reports of trouble.
    pub incidents: Arc<dyn Incidents>,
    /// Most pages that a fault reads ahead; 0 for none.
    pub neighbours_max: u32,
}

/// See the module.
pub struct PagedMemory {
    pub(crate) table: PageTable,
    pub(crate) place: Arc<dyn Place>,
    pub(crate) store: Arc<dyn ContentStore>,
    pub(crate) incidents: Arc<dyn Incidents>,
    pub(crate) admission: Arc<dyn Admission>,
    pub(super) waiters: Waiters,
    devices: Arc<Attachments>,
    pub(crate) counters: MemoryCounters,
    pub(crate) neighbours_max: u32,
}

/// Result of handling one page under its section's lock.
pub(super) enum Resolved {
    /// Pages up to here (not included) are present.
    UpTo(PageNo),
    /// Another thread is filling the page.
    BeingFilled,
    /// The page cannot be made present.
    Failed(FaultOutcome),
}

impl PagedMemory {
    /// A space whose words are as [`super::recovery`] left them.
    #[must_use]
    pub fn new(parts: MemoryParts) -> Self {
        Self {
            table: parts.table,
            place: parts.place,
            store: parts.store,
            incidents: parts.incidents,
            admission: parts.admission,
            waiters: Waiters::new(),
            devices: Arc::default(),
            counters: MemoryCounters::default(),
            neighbours_max: parts.neighbours_max,
        }
    }

    /// The devices of the space that the memory belongs to.
    pub(crate) fn devices(&self) -> &Arc<Attachments> {
        &self.devices
    }

    /// The table of words.
    #[must_use]
    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// What has happened so far.
    #[must_use]
    pub fn counters(&self) -> &MemoryCounters {
        &self.counters
    }

    /// Makes `fault.pages` present and grants them, or reports why it cannot. This wakes a vCPU
    /// that waits in the kernel. `reply`, if given, is called exactly once, possibly by another
    /// thread, possibly before this returns. May evict other pages first (the limit).
    #[doc(alias = "gm_dev_fault")]
    pub fn fault(&self, fault: &Fault, reply: Option<Reply>) {
        let pending = reply.map(Pending::new);
        let outcome = self.serve(fault, pending.as_ref());
        if let Some(pending) = pending {
            pending.settle(outcome);
        }
    }

    /// Returns the pages around `page` worth reading ahead after a vCPU's fault on it was served
    /// (see [`super::neighbours`]). Call it once per fault.
    #[must_use]
    pub fn neighbours_of(&self, page: PageNo) -> Option<Neighbours> {
        neighbours::of(self, page)
    }

    /// Fills those of `neighbours` that are stored, at hand and have room; returns how many.
    pub fn bring_along(&self, neighbours: Neighbours) -> u64 {
        neighbours::bring(self, neighbours)
    }

    /// Serves a fault if that needs neither an eviction, nor content that is not at hand, nor
    /// another thread. Otherwise returns `None`, and the caller must call [`Self::fault`]. If a
    /// vCPU's page is already being filled, that counts as served: the kernel wakes the vCPU with
    /// the fill.
    #[must_use]
    pub fn fault_without_waiting(&self, fault: &Fault) -> Option<FaultOutcome> {
        if !self.table.contains(fault.pages) {
            return Some(FaultOutcome::OutOfRange);
        }
        let absent = self.absent_at_hand(fault.pages)?;
        if absent > AT_ONCE_PAGES_MAX || (absent > 0 && !self.admission.try_admit(absent)) {
            return None;
        }
        let outcome = self.serve_at_once(fault);
        if outcome.is_none() {
            // The caller's next attempt takes room again for what is still absent.
            self.admission
                .give_back(absent.min(self.absent_pages(fault.pages)));
        }
        outcome
    }

    fn serve_at_once(&self, fault: &Fault) -> Option<FaultOutcome> {
        let mut page = fault.pages.start;
        let mut still = 0;
        while page < fault.pages.end {
            let Some(section) = self.table.section(page.section()) else {
                return Some(FaultOutcome::OutOfRange);
            };
            let shared = try_share(&section.lock)?;
            let resolved = self.resolve(section, page, fault);
            drop(shared);
            match resolved {
                Resolved::UpTo(next) if next > page => (page, still) = (next, 0),
                Resolved::UpTo(_) => {
                    still += 1;
                    if still > STILL_MAX {
                        return Some(self.without_progress(page));
                    }
                }
                Resolved::BeingFilled if fault.device == DeviceId::VCPUS => {
                    if self.table.mark_waited(page) {
                        self.counters.joined_faults.fetch_add(1, Relaxed);
                        (page, still) = (page.next(), 0);
                    }
                }
                Resolved::BeingFilled => return None,
                Resolved::Failed(outcome) => return Some(outcome),
            }
        }
        Some(FaultOutcome::Present)
    }

    /// Grants all present pages to a device that has just been attached.
    ///
    /// # Errors
    /// The place's errors; some pages are granted then.
    pub(crate) fn grant_present(&self, device: DeviceId) -> Result<(), GmError> {
        for number in self.table.sections() {
            let section = self.table.made_section(number);
            let _shared = share(&section.lock);
            if section.is_leaving() {
                continue;
            }
            let runs = self.place.present_runs(self.table.pages_of(number));
            for run in runs.map_err(|error| self.unknown_presence(number, &error))? {
                // A grant may cost a flush of the VMM's translations, whatever its length.
                for run in self.grantable(section, run) {
                    self.grant_to(run, |id| id == device);
                }
            }
        }
        Ok(())
    }

    /// The runs of pages in `run` that devices may have: present by their words, and in no round.
    fn grantable(&self, section: &Section, run: PageRange) -> Vec<PageRange> {
        let may = |page: PageNo| {
            self.table.word(page).state() == PageState::Present && !section.is_candidate(page)
        };
        let mut runs = Vec::new();
        let mut start = run.start;
        for page in run.iter() {
            let next = page.next();
            if !may(page) {
                runs.push(PageRange::new(start, page));
                start = next;
            }
        }
        runs.push(PageRange::new(start, run.end));
        runs.retain(|run| !run.is_empty());
        runs
    }

    fn unknown_presence(&self, section: SectionNo, error: &PlaceError) -> GmError {
        let first = self.table.pages_of(section).start;
        self.incidents.fill_failed(first, error);
        let va = first.va();
        GmError::Lost { va }
    }

    fn serve(&self, fault: &Fault, pending: Option<&Arc<Pending>>) -> FaultOutcome {
        if !self.table.contains(fault.pages) {
            return FaultOutcome::OutOfRange;
        }
        let absent = self.absent_pages(fault.pages);
        if absent > 0 {
            self.admission.admit(absent);
        }
        let mut page = fault.pages.start;
        let mut still = 0;
        while page < fault.pages.end {
            let Some(section) = self.table.section(page.section()) else {
                return FaultOutcome::OutOfRange;
            };
            let resolved = {
                let _shared = share(&section.lock);
                self.resolve(section, page, fault)
            };
            page = match resolved {
                Resolved::UpTo(next) if next > page => {
                    still = 0;
                    next
                }
                Resolved::UpTo(_) if still == STILL_MAX => return self.without_progress(page),
                Resolved::UpTo(_) => {
                    still += 1;
                    page
                }
                Resolved::BeingFilled => {
                    let joined = match pending {
                        Some(pending) => self.waiters.join(&self.table, page, pending),
                        None => self.table.mark_waited(page),
                    };
                    if joined {
                        self.counters.joined_faults.fetch_add(1, Relaxed);
                        page.next()
                    } else {
                        page
                    }
                }
                Resolved::Failed(outcome) => return outcome,
            };
        }
        FaultOutcome::Present
    }

    pub(super) fn absent_pages(&self, pages: PageRange) -> u64 {
        let is_stored =
            |page: &PageNo| matches!(self.table.word(*page).state(), PageState::Stored(_));
        pages.iter().filter(is_stored).count() as u64
    }

    /// How many of `pages` are absent; `None` if the content of one is not at hand.
    pub(super) fn absent_at_hand(&self, pages: PageRange) -> Option<u64> {
        let mut absent = 0;
        for page in pages.iter() {
            if let PageState::Stored(content) = self.table.word(page).state() {
                if !content.is_zero() && !self.store.is_at_hand(content) {
                    return None;
                }
                absent += 1;
            }
        }
        Some(absent)
    }

    /// Checks `page`. If it is absent, fills it and the pages that follow in the fault's range. The
    /// section's lock is held shared.
    fn resolve(&self, section: &Section, page: PageNo, fault: &Fault) -> Resolved {
        if section.is_leaving() {
            return Resolved::Failed(FaultOutcome::OutOfRange);
        }
        let word = self.table.word(page);
        match word.state() {
            PageState::Present => self.resolve_present(section, page, fault),
            PageState::Stored(_) => {
                let end = fault
                    .pages
                    .end
                    .min(self.table.pages_of(page.section()).end)
                    .min(page.plus(FILL_PAGES_MAX));
                self.fill(PageRange::new(page, end))
            }
            PageState::Filling(_) | PageState::Discarding => Resolved::BeingFilled,
            PageState::Evicting(_) => self.settle_evicting(page, word),
            PageState::Poisoned => {
                self.poison_for_kernel(page);
                Resolved::Failed(FaultOutcome::Lost)
            }
            PageState::Unallocated => Resolved::Failed(FaultOutcome::OutOfRange),
        }
    }

    /// `Evicting` lasts only while the lock is held exclusively, except for a page that the kernel
    /// would neither punch nor let us query.
    pub(super) fn settle_evicting(&self, page: PageNo, word: PageWord) -> Resolved {
        let event = match self.place.is_present(page) {
            Ok(true) => Event::StillPresent,
            Ok(false) => Event::Punched,
            Err(error) => return self.failed(page, &error),
        };
        let changed = self.table.change(page, word, event);
        if let (Some(_), Event::StillPresent, PageState::Evicting(content)) =
            (changed, event, word.state())
            && !content.is_zero()
        {
            self.store.free(content);
        }
        // The next turn of the caller's loop handles the new state.
        Resolved::UpTo(page)
    }

    fn resolve_present(&self, section: &Section, page: PageNo, fault: &Fault) -> Resolved {
        match self.place.is_present(page) {
            Ok(true) => self.found_present(section, page, fault),
            Ok(false) => {
                let zeros = || self.place.install_zero(page);
                self.refill_discarded(section, page, zeros).1
            }
            Err(error) => self.failed(page, &error),
        }
    }

    /// The faulting page is present: takes it out of the round and grants it.
    pub(super) fn found_present(&self, section: &Section, page: PageNo, fault: &Fault) -> Resolved {
        self.counters.present_faults.fetch_add(1, Relaxed);
        let cancelled = section.cancel(page);
        if cancelled {
            self.counters.cancelled_pages.fetch_add(1, Relaxed);
        }
        // Out of the round: the page has its write access back.
        if cancelled || fault.device == DeviceId::VCPUS {
            self.grant_to(page.single(), |id| id == DeviceId::VCPUS);
        }
        self.grant_to(page.single(), |id| id != DeviceId::VCPUS);
        Resolved::UpTo(page.next())
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

    pub(super) fn poison_for_kernel(&self, page: PageNo) {
        match self.place.poison(page) {
            Ok(()) | Err(PlaceError::Gone) => {}
            Err(error) => self.incidents.cannot_poison(page, &error),
        }
    }

    /// The kernel neither installs the page nor reports it as present: either a page that was
    /// allocated but never written, or a kernel out of memory.
    pub(super) fn without_progress(&self, page: PageNo) -> FaultOutcome {
        let source = std::io::Error::from(std::io::ErrorKind::TimedOut);
        let (start, end) = (page, page.next());
        let error = PlaceError::Kernel {
            operation: "installing",
            start,
            end,
            source,
        };
        match self.failed(page, &error) {
            Resolved::Failed(outcome) => outcome,
            Resolved::UpTo(_) | Resolved::BeingFilled => FaultOutcome::Lost,
        }
    }

    /// A fault that the kernel would not let us serve: its waiters try again.
    pub(super) fn failed(&self, page: PageNo, error: &PlaceError) -> Resolved {
        if matches!(error, PlaceError::Gone) {
            return Resolved::Failed(FaultOutcome::Gone);
        }
        self.incidents.fill_failed(page, error);
        self.wake(page.single());
        Resolved::Failed(FaultOutcome::Lost)
    }

    pub(crate) fn wake(&self, pages: PageRange) {
        match self.place.wake(pages) {
            Ok(()) | Err(PlaceError::Gone) => {}
            Err(error) => self.incidents.fill_failed(pages.start, &error),
        }
    }

    /// Grants present pages in the tables of the devices that `chosen` picks.
    pub(crate) fn grant_to(&self, pages: PageRange, chosen: impl Fn(DeviceId) -> bool) {
        if pages.is_empty() {
            return;
        }
        let list = self.devices.share();
        for table in list.tables_of(chosen) {
            // If a grant fails, the device faults again: nothing is lost.
            if let Err(error) = table.grant(pages, Access::Write, Backing::Home) {
                self.incidents.fill_failed(pages.start, &error);
                // A vCPU does not sleep on over the protection either: it retries, and faults again.
                self.wake(pages);
            }
        }
    }
}

impl std::fmt::Debug for PagedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PagedMemory({} pages)", self.table.page_count())
    }
}
