// SPDX-License-Identifier: Apache-2.0
//! [`PagedMemory`]: the memory that CPU and devices share, and what all that acts on it needs.
//!
//! Outside an eviction round every attached device may use every present page. An install grants
//! the page to all of them, so a device faults only on pages that are really absent.
//!
//! Pages become present in [`super::serve`] and absent in [`super::eviction`]; they join and leave
//! the memory in [`super::growth`]. Here are the parts that those act on, and the small steps that
//! several of them take.

use super::{
    fault::{FaultOutcome, MemoryCounters},
    place::{Place, PlaceError},
    store::{Admission, ContentStore, Incidents},
    table::{PageTable, Section},
    waiters::Waiters,
    word::{Content, PageState},
};
use crate::{
    attachments::Attachments,
    error::GmError,
    mmu::Backing,
    sync::{Arc, share},
};
use pagetide_addr::{Access, DeviceId, PageNo, PageRange, SectionNo, Tier};
use std::sync::{
    Weak,
    atomic::{AtomicU64, Ordering::Relaxed},
};

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
    pub(super) table: PageTable,
    pub(super) place: Arc<dyn Place>,
    pub(super) store: Arc<dyn ContentStore>,
    pub(super) incidents: Arc<dyn Incidents>,
    pub(super) admission: Arc<dyn Admission>,
    pub(super) waiters: Waiters,
    devices: Arc<Attachments>,
    pub(super) counters: MemoryCounters,
    pub(super) neighbours_max: u32,
    /// When it was made, by the clock of the admission.
    pub(super) began_ns: u64,
    /// How a load that ends later finds the memory, without keeping it.
    pub(super) me: Weak<Self>,
    /// Pages claimed whose content is on its way.
    pub(super) loading: AtomicU64,
}

/// Result of handling one page under its section's lock.
pub(super) enum Resolved {
    /// Pages up to here (not included) are present.
    UpTo(PageNo),
    /// Another thread is filling the page, or its load is under way.
    BeingFilled,
    /// The content of the page is not at hand, and this request does not begin to load it.
    NotAtHand,
    /// The kernel has no huge page free for the section.
    NoPageFree,
    /// The page cannot be made present.
    Failed(FaultOutcome),
}

impl PagedMemory {
    /// A space whose words are as [`super::recovery`] left them.
    #[must_use]
    pub fn new(parts: MemoryParts) -> Arc<Self> {
        // Whatever is stored now was stored before.
        let began_ns = parts.admission.clock_ns();
        Arc::new_cyclic(|me| Self {
            table: parts.table,
            place: parts.place,
            store: parts.store,
            incidents: parts.incidents,
            admission: parts.admission,
            waiters: Waiters::new(),
            devices: Arc::default(),
            counters: MemoryCounters::default(),
            neighbours_max: parts.neighbours_max,
            began_ns,
            me: Weak::clone(me),
            loading: AtomicU64::new(0),
        })
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

    /// Pages whose content is being loaded from a slow tier now: they are not present yet, but room
    /// was taken for them.
    #[must_use]
    pub fn loading_pages(&self) -> u64 {
        self.loading.load(Relaxed)
    }

    /// The VM has ended: all faults that wait for a page are answered with [`FaultOutcome::Gone`],
    /// and so is any that would wait from now on. Loads under way change nothing that matters any
    /// more. Without this, waiters whose content does not come could keep the memory for ever.
    pub fn end_waiting(&self) {
        self.waiters.close();
    }

    /// True if `content` can be delivered without waiting.
    pub(super) fn is_at_hand(&self, content: Content) -> bool {
        content.is_zero() || self.store.is_at_hand(content)
    }

    /// The tier that `pages` would be filled from if they faulted now: the slowest of them counts.
    /// A page that the guest discarded counts as present.
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

    /// Grants all present pages to a device that has just been attached.
    ///
    /// # Errors
    /// The place's errors; some pages are granted then.
    pub(crate) fn grant_present(&self, device: DeviceId) -> Result<(), GmError> {
        for section in self.table.sections() {
            self.grant_present_in(section, |id| id == device)?;
        }
        Ok(())
    }

    /// Grants the present pages of `section` to all devices: to those that were attached without any page
    /// ([`AddressSpace::attach_ungranted`](crate::AddressSpace::attach_ungranted)), and to vCPUs, whose
    /// protection by an eviction round of a dead daemon ends with it. Pages of a round that is under way
    /// stay as they are.
    ///
    /// # Errors
    /// The place's errors; some pages are granted then.
    pub fn grant_section(&self, section: SectionNo) -> Result<(), GmError> {
        self.grant_present_in(section, |_| true)
    }

    fn grant_present_in(
        &self,
        number: SectionNo,
        chosen: impl Fn(DeviceId) -> bool + Copy,
    ) -> Result<(), GmError> {
        let section = self.table.made_section(number);
        let _shared = share(&section.lock);
        let pages = self.table.pages_of(number);
        let is_present = |page: PageNo| self.table.word(page).state() == PageState::Present;
        if section.is_leaving() || !pages.iter().any(is_present) {
            return Ok(());
        }
        let runs = self.place.present_runs(pages);
        for run in runs.map_err(|error| self.unknown_presence(number, &error))? {
            // A grant may cost a flush of the VMM's translations, whatever its length.
            for run in self.grantable(section, run) {
                self.grant_to(run, chosen);
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
            Resolved::UpTo(_)
            | Resolved::BeingFilled
            | Resolved::NotAtHand
            | Resolved::NoPageFree => FaultOutcome::Lost,
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

    pub(super) fn wake(&self, pages: PageRange) {
        match self.place.wake(pages) {
            Ok(()) | Err(PlaceError::Gone) => {}
            Err(error) => self.incidents.fill_failed(pages.start, &error),
        }
    }

    /// Grants present pages in the tables of the devices that `chosen` picks.
    pub(super) fn grant_to(&self, pages: PageRange, chosen: impl Fn(DeviceId) -> bool) {
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
