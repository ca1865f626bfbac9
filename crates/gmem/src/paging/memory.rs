// SPDX-License-Identifier: Apache-2.0
//! [`PagedMemory`]: the memory that CPU and devices share, and the one door into it.
//!
//! A vCPU fault and a device fault are the same event with a different waiter
//! (GMEM 3; VPRI 5.2). [`PagedMemory::fault`] is the only code that makes an
//! absent page present. The first asker of a page fills it, later ones join.
//! Where the waiter sleeps decides how it is released: a vCPU in the kernel is
//! woken by the install itself, a device is called back.
//!
//! Outside an eviction round every attached device may use every present page:
//! an install grants to all of them, so a device faults only on pages that are
//! really absent.

use super::{
    neighbours,
    place::{Installed, Place, PlaceError},
    store::{Admission, ContentStore, Incidents, StoreError},
    table::{PageTable, Section},
    waiters::{Pending, Reply, Waiters},
    word::{Content, Event, PageWord, State},
};
use crate::{
    error::GmError,
    mmu::Backing,
    paging::fault::{Fault, FaultOutcome, MemoryCounters},
    space::attachments::Attachments,
    sync::{Arc, share},
};
use pagetide_addr::{Access, DeviceId, PAGE_BYTES, PageNo, PageRange, SectionNo, Va};
use std::sync::atomic::Ordering::Relaxed;

const ZERO_PAGE: [u8; 4096] = [0; 4096];

/// Most pages that are filled in one go, and under one hold of the section's lock.
pub(crate) const FILL_PAGES_MAX: u64 = 16;

/// Most absent pages that are filled by whoever asks not to wait: at some microseconds each, more
/// would make others wait for this one.
const AT_ONCE_PAGES_MAX: u64 = 64;
/// How often the same page may be looked at in one fault without any progress.
const STILL_MAX: u32 = 64;

/// What an address space is made of.
pub struct MemoryParts {
    /// Words and sections.
    pub table: PageTable,
    /// Where pages are present.
    pub place: Arc<dyn Place>,
    /// Where the content of absent pages is.
    pub store: Arc<dyn ContentStore>,
    /// The limit.
    pub admission: Arc<dyn Admission>,
    /// Who is told of trouble.
    pub incidents: Arc<dyn Incidents>,
    /// Most neighbours a fault brings along; 0 for none.
    pub neighbours_max: u32,
}

/// See the module.
pub struct PagedMemory {
    pub(crate) table: PageTable,
    pub(crate) place: Arc<dyn Place>,
    pub(crate) store: Arc<dyn ContentStore>,
    pub(crate) incidents: Arc<dyn Incidents>,
    pub(crate) admission: Arc<dyn Admission>,
    waiters: Waiters,
    devices: Arc<Attachments>,
    pub(crate) counters: MemoryCounters,
    pub(crate) neighbours_max: u32,
}

/// How looking at one page under its section's lock ended.
enum Resolved {
    /// Pages up to here (not included) are present.
    UpTo(PageNo),
    /// Somebody else is filling the page.
    BeingFilled,
    /// It cannot be had.
    Failed(FaultOutcome),
}

/// Calls `work` with a buffer of [`FILL_PAGES_MAX`] pages, which holds anything.
#[cfg(not(loom))]
fn with_buffer<R>(work: impl FnOnce(&mut [u8]) -> R) -> R {
    thread_local! {
        static PAGES: std::cell::RefCell<Box<[u8]>> =
            std::cell::RefCell::new(vec![0; PageNo(FILL_PAGES_MAX * PAGE_BYTES).index()].into());
    }
    PAGES.with_borrow_mut(|buffer| work(buffer))
}

/// The checker's threads share one system thread, and so would share the buffer.
#[cfg(loom)]
fn with_buffer<R>(work: impl FnOnce(&mut [u8]) -> R) -> R {
    work(&mut vec![0; PageNo(FILL_PAGES_MAX * PAGE_BYTES).index()])
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

    /// Makes `fault.pages` present and grants them, or says why not. The vCPU that waits in the
    /// kernel is woken by that; `reply`, if there is one, is called exactly once, perhaps by
    /// another thread, perhaps before this returns. May evict other pages first (the limit).
    #[doc(alias = "gm_dev_fault")]
    pub fn fault(&self, fault: &Fault, reply: Option<Reply>) {
        let pending = reply.map(Pending::new);
        let outcome = self.serve(fault, pending.as_ref());
        if let Some(pending) = pending {
            pending.settle(outcome);
        }
    }

    /// After a vCPU's fault on `page` was served: brings neighbours along if that pays (see
    /// [`super::neighbours`]). The vCPU runs again by then.
    pub fn bring_neighbours(&self, page: PageNo) {
        neighbours::bring_along(self, page);
    }

    /// Serves a fault if that needs neither an eviction nor another thread: `None` if it does, and
    /// then [`Self::fault`] must be called.
    #[must_use]
    pub fn fault_without_waiting(&self, fault: &Fault) -> Option<FaultOutcome> {
        if !self.table.contains(fault.pages) {
            return Some(FaultOutcome::OutOfRange);
        }
        let absent = self.absent_pages(fault.pages);
        if absent > AT_ONCE_PAGES_MAX || (absent > 0 && !self.admission.try_admit(absent)) {
            return None;
        }
        let outcome = self.serve_at_once(fault);
        if outcome.is_none() {
            // The caller's next try takes room anew for what is absent still.
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
            let shared = match section.lock.try_read() {
                Ok(shared) => shared,
                Err(_busy) => return None,
            };
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
                Resolved::BeingFilled => return None,
                Resolved::Failed(outcome) => return Some(outcome),
            }
        }
        Some(FaultOutcome::Present)
    }

    /// Grants all present pages to a device that has just been attached.
    ///
    /// # Errors
    /// What the place says; some pages are granted then.
    pub(crate) fn grant_present(&self, device: DeviceId) -> Result<(), GmError> {
        for number in self.table.sections() {
            let section = self.table.made_section(number);
            let _shared = share(&section.lock);
            if section.is_leaving() {
                continue;
            }
            let runs = self.place.present_runs(self.table.pages_of(number));
            for run in runs.map_err(|error| self.unknown_presence(number, &error))? {
                for page in run.iter() {
                    if self.table.word(page).state() == State::Present
                        && !section.is_candidate(page)
                    {
                        self.grant_to(page.single(), |id| id == device);
                    }
                }
            }
        }
        Ok(())
    }

    fn unknown_presence(&self, section: SectionNo, error: &PlaceError) -> GmError {
        let first = self.table.pages_of(section).start;
        self.incidents.fill_failed(first, error);
        let va = Va(first.byte_offset());
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
                        PageNo(page.0 + 1)
                    } else {
                        page
                    }
                }
                Resolved::Failed(outcome) => return outcome,
            };
        }
        FaultOutcome::Present
    }

    fn absent_pages(&self, pages: PageRange) -> u64 {
        let is_stored = |page: &PageNo| matches!(self.table.word(*page).state(), State::Stored(_));
        pages.iter().filter(is_stored).count() as u64
    }

    /// Looks at `page`, and fills it and what follows in the fault's range if it is absent. The
    /// section's lock is held shared.
    fn resolve(&self, section: &Section, page: PageNo, fault: &Fault) -> Resolved {
        if section.is_leaving() {
            return Resolved::Failed(FaultOutcome::OutOfRange);
        }
        let word = self.table.word(page);
        match word.state() {
            State::Present => self.resolve_present(section, page, fault),
            State::Stored(_) => {
                let end = fault
                    .pages
                    .end
                    .min(self.table.pages_of(page.section()).end)
                    .min(PageNo(page.0 + FILL_PAGES_MAX));
                self.fill(PageRange::new(page, end))
            }
            State::Filling(_) | State::Discarding => Resolved::BeingFilled,
            State::Evicting(_) => self.settle_evicting(page, word),
            State::Poisoned => {
                self.poison_for_kernel(page);
                Resolved::Failed(FaultOutcome::Lost)
            }
            State::Unallocated => Resolved::Failed(FaultOutcome::OutOfRange),
        }
    }

    /// `Evicting` lasts only while the lock is held exclusively, but for a page that the kernel would
    /// neither punch nor let us look at.
    fn settle_evicting(&self, page: PageNo, word: PageWord) -> Resolved {
        let event = match self.place.is_present(page) {
            Ok(true) => Event::StillPresent,
            Ok(false) => Event::Punched,
            Err(error) => return self.failed(page, &error),
        };
        let changed = self.table.change(page, word, event);
        if let (Some(_), Event::StillPresent, State::Evicting(content)) =
            (changed, event, word.state())
            && !content.is_zero()
        {
            self.store.free(content);
        }
        // Its new state is looked at by the next turn of the caller's loop.
        Resolved::UpTo(page)
    }

    fn resolve_present(&self, section: &Section, page: PageNo, fault: &Fault) -> Resolved {
        match self.place.is_present(page) {
            Ok(true) => {
                self.counters.present_faults.fetch_add(1, Relaxed);
                let cancelled = section.cancel(page);
                if cancelled {
                    self.counters.cancelled_pages.fetch_add(1, Relaxed);
                }
                // Out of the round: it has its write access back.
                if cancelled || fault.device == DeviceId::VCPUS {
                    self.grant_to(page.single(), |id| id == DeviceId::VCPUS);
                }
                self.grant_to(page.single(), |id| id != DeviceId::VCPUS);
                Resolved::UpTo(PageNo(page.0 + 1))
            }
            Ok(false) => self.refill_discarded(section, page),
            Err(error) => self.failed(page, &error),
        }
    }

    /// A hole where the word says present: the guest gave the page up (balloon, free page
    /// reporting) and now uses it again, from zeros.
    fn refill_discarded(&self, section: &Section, page: PageNo) -> Resolved {
        let present = PageWord::new(State::Present);
        if self.table.change(page, present, Event::FoundHole).is_none() {
            return Resolved::BeingFilled;
        }
        section.cancel(page);
        self.counters.discarded_pages.fetch_add(1, Relaxed);
        let discarding = PageWord::new(State::Discarding);
        match self.place.install_zero(page) {
            // There already: the guest was quicker through another fault of this very page.
            Ok(Installed::Installed | Installed::AlreadyThere) => {
                self.finish(page, discarding, Event::Installed, FaultOutcome::Present);
                self.wake(page.single());
                self.grant_to(page.single(), |id| id != DeviceId::VCPUS);
                Resolved::UpTo(PageNo(page.0 + 1))
            }
            Err(error) => {
                self.finish(page, discarding, Event::InstallFailed, FaultOutcome::Lost);
                self.failed(page, &error)
            }
        }
    }

    /// Fills the stored pages at the start of `run`, which lies in one section whose lock is held
    /// shared.
    fn fill(&self, run: PageRange) -> Resolved {
        with_buffer(|buffer| {
            let (claimed, problem) = self.claim_and_load(run, buffer);
            if claimed.is_empty() {
                return match problem {
                    Some(error) => self.content_unavailable(run.start, &error),
                    None => Resolved::BeingFilled,
                };
            }
            self.install(claimed, &buffer[..PageNo(claimed.bytes()).index()])
        })
    }

    /// Fills up to `FILL_PAGES_MAX` neighbours that are stored; returns how many.
    pub(crate) fn fill_neighbours(&self, run: PageRange) -> u64 {
        let Some(section) = self.table.section(run.start.section()) else {
            return 0;
        };
        let _shared = share(&section.lock);
        if section.is_leaving() {
            return 0;
        }
        match self.fill(run) {
            Resolved::UpTo(end) => end.0 - run.start.0,
            Resolved::BeingFilled | Resolved::Failed(_) => 0,
        }
    }

    /// Claims stored pages from the start of `run` on and loads their content into `buffer`. Stops
    /// at the first page that is not stored, or whose content cannot be had (with the reason, if it
    /// is the first one).
    fn claim_and_load(&self, run: PageRange, buffer: &mut [u8]) -> (PageRange, Option<StoreError>) {
        let mut end = run.start;
        for (page, into) in run
            .iter()
            .zip(buffer.chunks_exact_mut(PageNo(PAGE_BYTES).index()))
        {
            let word = self.table.word(page);
            let State::Stored(content) = word.state() else {
                break;
            };
            if self.table.change(page, word, Event::Claim).is_none() {
                break;
            }
            if let Err(error) = self.load(page, content, into) {
                let first = page == run.start;
                let claimed = PageWord::new(State::Filling(content));
                if !first {
                    // Whoever waits for it tries again, and gets to know the reason himself.
                    self.finish(page, claimed, Event::InstallFailed, FaultOutcome::Present);
                } else if matches!(error, StoreError::Damaged { .. }) {
                    self.finish(page, claimed, Event::ContentLost, FaultOutcome::Lost);
                } else {
                    self.finish(page, claimed, Event::InstallFailed, FaultOutcome::Lost);
                }
                return (PageRange::new(run.start, end), first.then_some(error));
            }
            end = PageNo(page.0 + 1);
        }
        (PageRange::new(run.start, end), None)
    }

    fn load(&self, page: PageNo, content: Content, into: &mut [u8]) -> Result<(), StoreError> {
        if content.is_zero() {
            into.fill(0);
            return Ok(());
        }
        let into = into
            .try_into()
            .unwrap_or_else(|_| unreachable!("a chunk is one page"));
        self.store.load(page, content, into)
    }

    /// Installs claimed pages, whose content is in `bytes`.
    fn install(&self, claimed: PageRange, bytes: &[u8]) -> Resolved {
        let installed = if claimed.len() == 1 {
            self.install_one(claimed.start, bytes)
        } else {
            self.place.install_run(claimed, bytes)
        };
        let (done, error) = match installed {
            Ok(pages) => (PageNo(claimed.start.0 + pages), None),
            Err(error) => (claimed.start, Some(error)),
        };
        self.finish_installed(PageRange::new(claimed.start, done));
        let left = PageRange::new(done, claimed.end);
        if left.is_empty() {
            return Resolved::UpTo(claimed.end);
        }
        // Fewer than asked: the next is there already, or the kernel stopped for a reason of its own.
        let is_there = error.map_or_else(|| self.place.is_present(done), Err);
        let outcome = match &is_there {
            Ok(false) => FaultOutcome::Present,
            Err(PlaceError::Gone) => FaultOutcome::Gone,
            Ok(true) | Err(_) => FaultOutcome::Lost,
        };
        for page in left.iter() {
            if let State::Filling(_) = self.table.word(page).state() {
                let word = self.table.word(page);
                self.finish(page, word, Event::InstallFailed, outcome);
            }
        }
        match is_there {
            Ok(false) => Resolved::UpTo(done),
            Ok(true) => {
                self.incidents.intruder(done);
                Resolved::Failed(FaultOutcome::Lost)
            }
            Err(error) => self.failed(done, &error),
        }
    }

    fn install_one(&self, page: PageNo, bytes: &[u8]) -> Result<u64, PlaceError> {
        let is_zero = bytes == ZERO_PAGE;
        let installed = match bytes.try_into() {
            Ok(content) if !is_zero => self.place.install(page, content)?,
            _ => self.place.install_zero(page)?,
        };
        Ok(u64::from(installed == Installed::Installed))
    }

    fn finish_installed(&self, pages: PageRange) {
        self.grant_to(pages, |id| id != DeviceId::VCPUS);
        for page in pages.iter() {
            let word = self.table.word(page);
            if let State::Filling(content) = word.state() {
                self.finish(page, word, Event::Installed, FaultOutcome::Present);
                if !content.is_zero() {
                    self.store.free(content);
                }
            }
        }
        self.counters.filled_pages.fetch_add(pages.len(), Relaxed);
    }

    /// Ends a fill that this thread has claimed, and releases who joined it. A vCPU that joined was
    /// woken by the install, unless that failed, or the guest gave the page up again at once.
    fn finish(&self, page: PageNo, claimed: PageWord, event: Event, outcome: FaultOutcome) {
        let before = self.table.change(page, claimed, event);
        debug_assert!(
            before.is_some(),
            "{page} left its fill while it was claimed"
        );
        if before.is_some_and(PageWord::is_waited_for) {
            self.waiters.release(page, outcome);
            self.wake(page.single());
        }
    }

    fn content_unavailable(&self, page: PageNo, error: &StoreError) -> Resolved {
        match error {
            StoreError::Damaged { .. } => {
                self.counters.poisoned_pages.fetch_add(1, Relaxed);
                self.incidents.poisoned(page, error);
                self.poison_for_kernel(page);
            }
            StoreError::Unreadable { .. } => {
                self.incidents.fill_failed(page, error);
                self.wake(page.single());
            }
        }
        Resolved::Failed(FaultOutcome::Lost)
    }

    fn poison_for_kernel(&self, page: PageNo) {
        match self.place.poison(page) {
            Ok(()) | Err(PlaceError::Gone) => {}
            Err(error) => self.incidents.cannot_poison(page, &error),
        }
    }

    /// The kernel neither installs the page nor says that it is there: a page that was allocated
    /// without ever being written, or a kernel out of memory.
    fn without_progress(&self, page: PageNo) -> FaultOutcome {
        let source = std::io::Error::from(std::io::ErrorKind::TimedOut);
        let (start, end) = (page, PageNo(page.0 + 1));
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

    /// A fault that the kernel would not let us serve: whoever waits tries again.
    fn failed(&self, page: PageNo, error: &PlaceError) -> Resolved {
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
            // A grant that fails leaves a device that faults again: nothing is lost.
            if let Err(error) = table.grant(pages, Access::Write, Backing::Home) {
                self.incidents.fill_failed(pages.start, &error);
                // Nor does a vCPU sleep on over the protection: it looks again, and faults again.
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
