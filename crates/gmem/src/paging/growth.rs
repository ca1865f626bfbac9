// SPDX-License-Identifier: Apache-2.0
//! Growing and shrinking: memory that is plugged into a VM and taken out of it while it runs.
//!
//! ```text
//!   allocate      room for words · for each section, its lock held exclusively:
//!                   present? ─► words Present or Stored(zero) ─► in the table
//!                   present pages granted to the devices, sleepers woken
//!   deallocate    for each section, its lock held exclusively:
//!                   leaving: no fault is served, no device is granted anything,
//!                            a round under way finds its candidates gone
//!                   every device loses all access ── busy? ─► tell, and come again
//!                   a page is being filled? ─► its load is under way: tell, and come again
//!                   words Unallocated ─► stored content freed ─► out of the table
//! ```
//! # Faults against removal
//! A fault checks its page under the section's lock, shared. So it is either served before the
//! removal, or sees that the section is leaving and is refused with
//! [`FaultOutcome::OutOfRange`](crate::FaultOutcome). A fault under way holds the lock until its
//! page is installed, unless the content is not at hand: then the page is being filled while nobody
//! holds the lock ([`super::slow_fill`]). So once the removal has the lock, each page that is being
//! filled is one whose load is under way, and no other page has waiters. The removal does not wait
//! for such loads, because a slow tier may take as long as it likes: it changes no word, and a later
//! call succeeds. No new load begins in a leaving section. One that ends there installs nothing: the
//! page is stored again, and its waiters are refused. So no page of the section is being filled when
//! its words become unallocated. A vCPU that sleeps in the kernel on a refused page is released when its
//! registration ends. One that came too early, before its page was allocated, is woken by the
//! allocation and faults again.
//!
//! # DMA against removal
//! A device in the middle of a transfer is busy, and a removal does not wait for it. It goes on
//! with the other sections, and the busy section stays leaving: access that the device has lost is
//! not granted again, so transfers drain and a later call succeeds. Until then the words do not
//! change.
//!
//! # What a death leaves
//! Each word is true at any instant: a page of the range is either in the table or not. The caller
//! knows which regions there are to be. A successor repeats the allocation of those that stay and
//! the deallocation of those that go, and both continue where the dead daemon stopped. (*Leaving*
//! is process memory: a successor's devices begin without any access.)
//!
//! The memory itself may be gone at deallocation, for the VMM may have unmapped it: nothing is
//! read, queried or punched.

use super::{
    memory::PagedMemory,
    place::PlaceError,
    table::Section,
    word::{Event, PageState, Presence},
    words::NoRoom,
};
use crate::{
    error::GmError,
    mmu::{Restrict, Restricted},
    sync::own,
};
use pagetide_addr::{DeviceId, PageNo, PageRange, PageSet, SECTION_PAGES, SectionNo};

/// Why memory did not become part of the space, or is still part of it.
#[derive(Debug, thiserror::Error)]
pub enum GrowthError {
    /// The range cannot be a region.
    #[error("pages {start}..{end} cannot be a region: {why}")]
    Misplaced {
        /// First page.
        start: PageNo,
        /// Page after the last.
        end: PageNo,
        /// What is required.
        why: &'static str,
    },
    /// Another region lies there.
    #[error("section {} has a region of another length already", section.0)]
    Occupied {
        /// The section.
        section: SectionNo,
    },
    /// A removal there is not complete.
    #[error("section {} is being removed: complete that first", section.0)]
    Leaving {
        /// The section.
        section: SectionNo,
    },
    /// A device is in the middle of a transfer there. It starts no new one; call again.
    #[error(
        "device {device:?} is using section {}: {taken_pages} pages are out of the space, {left_pages} are still in it and draining",
        section.0
    )]
    Busy {
        /// The first such device.
        device: DeviceId,
        /// The section.
        section: SectionNo,
        /// Pages of the range that are no longer in the space.
        taken_pages: u64,
        /// Pages of the range that are still in it, though faults in them are no longer served.
        left_pages: u64,
    },
    /// Content of pages there is on its way from a slow tier. No new load begins; call again.
    #[error(
        "stored content of section {} is being loaded: {taken_pages} pages are out of the space, {left_pages} are still in it",
        section.0
    )]
    Loading {
        /// The section.
        section: SectionNo,
        /// Pages of the range that are no longer in the space.
        taken_pages: u64,
        /// Pages of the range that are still in it, though faults in them are no longer served.
        left_pages: u64,
    },
    /// A device keeps pages there for its rings: stop it, and call again.
    #[error("device {device:?} has rings in section {}: stop it first", section.0)]
    Wired {
        /// The first such device.
        device: DeviceId,
        /// The section.
        section: SectionNo,
    },
    /// A device failed to give up its access.
    #[error("section {} stays: {source}", section.0)]
    Device {
        /// The section.
        section: SectionNo,
        /// Which device, and why.
        source: GmError,
    },
    /// There is no memory for the words.
    #[error(transparent)]
    Words(#[from] NoRoom),
    /// The place cannot report what is present.
    #[error("section {} cannot be added: {source}", section.0)]
    Place {
        /// The section.
        section: SectionNo,
        /// Why.
        source: PlaceError,
    },
}

impl From<GrowthError> for GmError {
    fn from(error: GrowthError) -> Self {
        match error {
            GrowthError::Misplaced { why, .. } => Self::InvalidArgument {
                argument: "pages",
                why,
            },
            GrowthError::Occupied { .. } => Self::InUse {
                by: "a region of another length",
            },
            GrowthError::Leaving { .. } => Self::InUse {
                by: "a removal that is not complete",
            },
            GrowthError::Busy { device, .. } => Self::Busy { device },
            GrowthError::Loading { .. } => Self::InUse {
                by: "stored content that is being loaded: try again",
            },
            GrowthError::Wired { .. } => Self::InUse {
                by: "the rings of a device: stop it first",
            },
            GrowthError::Device { source, .. } => source,
            GrowthError::Words(NoRoom { start, .. }) => Self::NoMemory { va: start.va() },
            GrowthError::Place { section, .. } => Self::Lost {
                va: section.first_page().va(),
            },
        }
    }
}

/// What keeps one section from leaving.
enum Held {
    Busy(DeviceId),
    Wired(DeviceId),
    Loading,
    Failed(GmError),
}

impl Held {
    fn tell(self, section: SectionNo, taken_pages: u64, left_pages: u64) -> GrowthError {
        match self {
            Self::Busy(device) => GrowthError::Busy {
                device,
                section,
                taken_pages,
                left_pages,
            },
            Self::Wired(device) => GrowthError::Wired { device, section },
            Self::Loading => GrowthError::Loading {
                section,
                taken_pages,
                left_pages,
            },
            Self::Failed(source) => GrowthError::Device { section, source },
        }
    }
}

impl PagedMemory {
    /// Makes `pages`, which begin at a section border, part of the space. The place must know them
    /// and their userfaultfd must be registered, so that no hole is filled without our notice.
    /// Pages that are already part of it stay as they are: after a failure, or the death of the
    /// daemon that began it, repeating the call continues it.
    ///
    /// # Errors
    /// [`GrowthError`]; some of the pages may be part of the space then.
    #[doc(alias = "gm_as_alloc")]
    pub fn allocate(&self, pages: PageRange) -> Result<(), GrowthError> {
        self.make_room_for(pages)?;
        for (section, part) in pages.by_section() {
            self.allocate_section(section, part)?;
        }
        Ok(())
    }

    /// The first step of [`Self::allocate`] alone, for a caller that must record something before
    /// the rest: checks that `pages` can be a region, and gives their words memory. No page becomes
    /// part of the space. A successor frees words that no allocation followed.
    ///
    /// # Errors
    /// [`GrowthError`].
    pub fn make_room_for(&self, pages: PageRange) -> Result<(), GrowthError> {
        self.check_region(pages)?;
        for (section, part) in pages.by_section() {
            let leaving = |state: &Section| state.is_leaving();
            if self.table.section(section).is_some_and(leaving) {
                return Err(GrowthError::Leaving { section });
            }
            if self.table.pages_of(section).len() > part.len() {
                return Err(GrowthError::Occupied { section });
            }
        }
        Ok(self.table.make_room(pages)?)
    }

    fn check_region(&self, pages: PageRange) -> Result<(), GrowthError> {
        let wrong = |why| {
            Err(GrowthError::Misplaced {
                start: pages.start,
                end: pages.end,
                why,
            })
        };
        if pages.is_empty() {
            return wrong("it must have a page");
        }
        if !pages.start.0.is_multiple_of(SECTION_PAGES) {
            return wrong("it must begin at a section border");
        }
        if pages.end.0 > self.table.capacity_pages() {
            return wrong("it must end within the capacity of the table");
        }
        Ok(())
    }

    fn allocate_section(&self, section: SectionNo, pages: PageRange) -> Result<(), GrowthError> {
        let state = self.table.made_section(section);
        let _owned = own(&state.lock);
        if state.is_leaving() {
            return Err(GrowthError::Leaving { section });
        }
        if self.is_allocated(section, pages) {
            return Ok(());
        }
        let mut present = PageSet::EMPTY;
        let runs = self.place.present_runs(pages);
        for run in runs.map_err(|source| GrowthError::Place { section, source })? {
            present.unite(&PageSet::of_range(section, run));
        }
        let mut found = PageSet::EMPTY;
        for page in pages.iter() {
            let presence = if present.contains(page) {
                Presence::Present
            } else {
                Presence::Absent
            };
            // The event does not apply to a page that is already allocated.
            let word = self.table.word_with_room(page);
            let event = Event::Allocate(presence);
            if self.table.change(page, word, event).is_some() && presence == Presence::Present {
                found.insert(page);
            }
        }
        self.table.set_pages(section, pages.len());
        self.admission.count_in(found.len());
        for run in found.runs(section) {
            self.grant_to(run, |id| id != DeviceId::VCPUS);
        }
        self.wake(pages);
        Ok(())
    }

    /// Whether all of `pages` are in the space already, as after a restart: then there is nothing to be
    /// queried, counted or granted. The section's lock is held exclusively.
    fn is_allocated(&self, section: SectionNo, pages: PageRange) -> bool {
        let is_in = |page| self.table.word(page).state() != PageState::Unallocated;
        self.table.pages_of(section) == pages && pages.iter().all(is_in)
    }

    /// Removes `pages`, whole regions, from the space. From now on no fault in them is served. On
    /// success no device can reach them, and their stored content is freed. Their memory need not
    /// exist any more. After a failure, repeating the call continues it. Pages in no region are
    /// ignored.
    ///
    /// # Errors
    /// [`GrowthError`]. [`GrowthError::Busy`] and [`GrowthError::Loading`] are temporary: no device
    /// is granted anything there any more, and no load begins.
    #[doc(alias = "gm_region_dealloc")]
    pub fn deallocate(&self, pages: PageRange) -> Result<(), GrowthError> {
        self.check_region(pages)?;
        if let Some((section, part)) = pages.by_section().last()
            && self.table.pages_of(section).end > part.end
        {
            return Err(GrowthError::Occupied { section });
        }
        let mut held = None;
        let mut left_pages = 0;
        for section in pages.sections() {
            if let Err(reason) = self.deallocate_section(section) {
                left_pages += self.table.pages_of(section).len();
                held.get_or_insert((section, reason));
            }
        }
        match held {
            None => Ok(()),
            Some((section, reason)) => {
                Err(reason.tell(section, pages.len() - left_pages, left_pages))
            }
        }
    }

    fn deallocate_section(&self, section: SectionNo) -> Result<(), Held> {
        let Some(state) = self.table.section(section) else {
            return Ok(());
        };
        let _owned = own(&state.lock);
        let pages = self.table.pages_of(section);
        if pages.is_empty() {
            return Ok(());
        }
        state.set_leaving();
        state.next_round();
        for page in pages.iter() {
            state.cancel(page);
        }
        self.take_from_devices(section, &PageSet::of_range(section, pages))?;
        let is_filling = |state| matches!(state, PageState::Filling(_));
        if !self.table.pages_in_state(section, is_filling).is_empty() {
            return Err(Held::Loading);
        }
        let mut present_pages = 0;
        for page in pages.iter() {
            let word = self.table.word(page);
            if self.table.change(page, word, Event::Deallocate).is_none() {
                debug_assert_eq!(
                    word.state(),
                    PageState::Unallocated,
                    "{page} is being filled"
                );
                continue;
            }
            match word.state() {
                PageState::Stored(content) if !content.is_zero() => self.store.free(content),
                PageState::Evicting(content) => {
                    present_pages += 1;
                    if !content.is_zero() {
                        self.store.free(content);
                    }
                }
                PageState::Present => present_pages += 1,
                _ => {}
            }
        }
        self.table.set_pages(section, 0);
        self.admission.give_back(present_pages);
        Ok(())
    }

    /// vCPUs lose their access when the VMM unmaps the memory; all others lose it here.
    fn take_from_devices(&self, section: SectionNo, pages: &PageSet) -> Result<(), Held> {
        let list = self.devices().share();
        let mut held = None;
        let mut wired = PageSet::EMPTY;
        for known in list.iter() {
            let its_wired = known.device.mmu().wired(section);
            if its_wired.intersects(pages) {
                held.get_or_insert(Held::Wired(known.device.id()));
                wired.unite(&its_wired);
            }
        }
        let mut rest = *pages;
        rest.subtract(&wired);
        for known in list
            .firsts()
            .filter(|known| known.device.id() != DeviceId::VCPUS)
        {
            match known.try_restrict(section, &rest, Restrict::NoAccess) {
                Ok(Restricted::Done) => {}
                Ok(Restricted::Busy) => {
                    held.get_or_insert(Held::Busy(known.device.id()));
                }
                Err(error) => {
                    held.get_or_insert(Held::Failed(error));
                }
            }
        }
        if let Err(error) = list.invalidate(&pages.runs(section)) {
            held.get_or_insert(Held::Failed(error));
        }
        held.map_or(Ok(()), Err)
    }
}
