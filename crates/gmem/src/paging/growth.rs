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
//!                   words Unallocated ─► stored content freed ─► out of the table
//! ```
//! # Faults against removal
//! A fault looks at its page under the section's lock, shared. So it is served
//! before the removal, or sees that the section is leaving and is refused with
//! [`FaultOutcome::OutOfRange`](crate::FaultOutcome): there is no between. A
//! fault under way holds the lock until its page is installed, so when the
//! removal has the lock nobody is filling a page of the section, and nobody is
//! on a list of waiters there. A vCPU that sleeps in the kernel over a page that
//! is refused is released by the end of its registration; one that came too
//! early, before its page was allocated, is woken by the allocation and faults
//! again.
//!
//! # DMA against removal
//! A device that is in the middle of a transfer is busy, and a removal does not
//! wait. But it goes on with the other sections, and the section stays leaving:
//! what the device has lost it is not granted again, so transfers drain and a
//! later call succeeds. Until then the words stay as they are.
//!
//! # What a death leaves
//! Each word is true at any instant: a page of the range is in the table or is
//! not. Which regions there are to be is known to whoever called; a successor
//! allocates those that stay and deallocates those that go once more, and both
//! go on where the dead one stopped. (*Leaving* is process memory: a successor's
//! devices begin without any access.)
//!
//! The memory itself may be gone when it is deallocated, for the VMM may have
//! unmapped it: nothing is read, asked or punched.

use super::{
    memory::PagedMemory,
    place::PlaceError,
    word::{Event, PageState, Presence},
    words::NoRoom,
};
use crate::{
    error::GmError,
    mmu::{Restrict, Restricted},
    sync::own,
};
use pagetide_addr::{DeviceId, PageNo, PageRange, PageSet, SECTION_PAGES, SectionNo};

/// Why memory did not become part of the space, or is part of it still.
#[derive(Debug, thiserror::Error)]
pub enum GrowthError {
    /// The range cannot be a region.
    #[error("pages {start}..{end} cannot be a region: {why}")]
    Misplaced {
        /// First page.
        start: PageNo,
        /// Page after the last.
        end: PageNo,
        /// What it must be.
        why: &'static str,
    },
    /// Another region lies there.
    #[error("section {} has a region of another length already", section.0)]
    Occupied {
        /// Where.
        section: SectionNo,
    },
    /// A removal there has not come to its end.
    #[error("section {} is being removed: end that first", section.0)]
    Leaving {
        /// Where.
        section: SectionNo,
    },
    /// A device is in the middle of a transfer there. It begins no other; call again.
    #[error(
        "device {device:?} is using section {}: {taken_pages} pages are out of the space, {left_pages} are still in it and come to rest",
        section.0
    )]
    Busy {
        /// The first such device.
        device: DeviceId,
        /// Where.
        section: SectionNo,
        /// Pages of the range that are in the space no more.
        taken_pages: u64,
        /// Pages of the range that are still in it, though no fault in them is served.
        left_pages: u64,
    },
    /// A device keeps pages there for its rings: stop it, and call again.
    #[error("device {device:?} has rings in section {}: stop it first", section.0)]
    Wired {
        /// The first such device.
        device: DeviceId,
        /// Where.
        section: SectionNo,
    },
    /// A device failed to give its access up.
    #[error("section {} stays: {source}", section.0)]
    Device {
        /// Where.
        section: SectionNo,
        /// Which, and why.
        source: GmError,
    },
    /// There is no memory for the words.
    #[error(transparent)]
    Words(#[from] NoRoom),
    /// The place cannot tell what is present.
    #[error("section {} cannot be taken in: {source}", section.0)]
    Place {
        /// Where.
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
                by: "a removal that has not come to its end",
            },
            GrowthError::Busy { device, .. } => Self::Busy { device },
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
            Self::Failed(source) => GrowthError::Device { section, source },
        }
    }
}

impl PagedMemory {
    /// Makes `pages`, which begin at a section's border, part of the space. The place must know them
    /// and their userfaultfd be registered, so that no hole fills behind our back. Pages that are
    /// part of it already stay as they are: after a failure, or after the death of the daemon that
    /// began it, the same call goes on.
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

    /// The first step of [`Self::allocate`] by itself, for a caller who has to write something down
    /// before the rest: whether `pages` can be a region, and memory for their words. No page is part
    /// of the space by it, and words that no allocation follows are given back by a successor.
    ///
    /// # Errors
    /// [`GrowthError`].
    pub fn make_room_for(&self, pages: PageRange) -> Result<(), GrowthError> {
        self.check_region(pages)?;
        for (section, part) in pages.by_section() {
            let leaving = |state: &super::table::Section| state.is_leaving();
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
            return wrong("it must begin at a section's border");
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
            // A page that is allocated already is not surprised by this event.
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

    /// Takes `pages`, whole regions, out of the space: from now on no fault in them is served, and when
    /// this succeeds no device can reach them and what was stored for them is freed. Whether their
    /// memory is still there does not matter. After a failure the same call goes on; for pages that
    /// are in no region there is nothing to do.
    ///
    /// # Errors
    /// [`GrowthError`]: of [`GrowthError::Busy`] there is an end, for no device is granted anything
    /// there any more.
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

    /// vCPUs lose their access by the VMM's own unmapping; all others lose it here.
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
