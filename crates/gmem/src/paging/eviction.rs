// SPDX-License-Identifier: Apache-2.0
//! [`EvictionRound`]: taking pages of one section out of their place.
//!
//! ```text
//!   begin   lock exclusive   candidates := wanted, present, not wired
//!                            devices: no access (busy: give up), vCPUs: read-only
//!           unlock
//!   read    (no lock)        content of candidates is stable as long as they are candidates:
//!                            a writer first takes its page out of the set
//!   commit  lock exclusive   for those still in the set: word := Evicting(content),
//!                            punch, word := Stored(content)
//!           unlock
//!   end     lock exclusive   remaining candidates get their write access back
//! ```
//! A fault on a candidate before its commit cancels it: the page simply stays (Taiji 4.2.2: the
//! active task gives way to the passive one). The lock is held for some tens of microseconds at a
//! time, so a fault in the same section never waits for compression or for the rest of the round.
//!
//! A device's bitmap is cleared before the vCPU side is protected and before anything is reclaimed:
//! VPRI 5.1's order.

use super::{
    memory::PagedMemory,
    place::PlaceError,
    table::Section,
    word::{Content, Event, PageState, PageWord},
};
use crate::{
    error::GmError,
    mmu::{Restrict, Restricted},
    sync::own,
};
use pagetide_addr::{DeviceId, PageNo, PageRange, PageSet, SectionNo, to_usize};
use std::sync::atomic::Ordering::Relaxed;

/// Why a section cannot be evicted from now.
#[derive(Debug, thiserror::Error)]
pub enum EvictionError {
    /// None of the wanted pages is present and evictable.
    #[error("no page of the section can be evicted")]
    Nothing,
    /// A device's DMA is under way there.
    #[error("a device is using the section")]
    Busy,
    /// A round is already under way in the section.
    #[error("an eviction round is under way in the section")]
    RoundUnderWay,
    /// The place failed.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// A device failed.
    #[error(transparent)]
    Device(#[from] GmError),
}

/// What became of a batch of pages.
#[derive(Debug, Default)]
#[must_use]
pub struct Committed {
    /// Pages that are stored and absent now.
    pub evicted: PageSet,
    /// Content stored in vain, because its page was needed meanwhile: free it.
    pub unused: Vec<Content>,
    /// The kernel would not punch some of the pages, so they stayed.
    pub problem: Option<PlaceError>,
}

/// An eviction under way. Dropping it ends it: uncommitted pages stay.
#[derive(Debug)]
pub struct EvictionRound<'space> {
    space: &'space PagedMemory,
    section: SectionNo,
    number: u64,
}

impl PagedMemory {
    /// Begins to evict the `wanted` pages of `section`.
    ///
    /// # Errors
    /// [`EvictionError`]; the section is then unchanged.
    pub fn begin_eviction(
        &self,
        section: SectionNo,
        wanted: &PageSet,
    ) -> Result<EvictionRound<'_>, EvictionError> {
        let state = (self.table.section(section)).ok_or(EvictionError::Nothing)?;
        let _owned = own(&state.lock);
        if state.is_leaving() {
            return Err(EvictionError::Nothing);
        }
        if state.has_candidates() {
            return Err(EvictionError::RoundUnderWay);
        }
        let candidates = self.choose(section, wanted)?;
        if candidates.is_empty() {
            return Err(EvictionError::Nothing);
        }
        let number = state.next_round();
        for page in candidates.pages(section) {
            state.set_candidate(page);
        }
        // From here on, dropping the round undoes it, but that needs the lock.
        match self.restrict_all(section, &candidates) {
            Ok(()) => Ok(EvictionRound {
                space: self,
                section,
                number,
            }),
            Err(error) => {
                self.give_back(section);
                Err(error)
            }
        }
    }

    /// The pages of `section` that are in their place, whatever their words say.
    ///
    /// # Errors
    /// The place's.
    pub fn in_place(&self, section: SectionNo) -> Result<PageSet, PlaceError> {
        let mut present = PageSet::EMPTY;
        for run in self.place.present_runs(self.table.pages_of(section))? {
            present.unite(&PageSet::of_range(section, run));
        }
        Ok(present)
    }

    /// The pages of `section` that some device uses for as long as it likes: they are never evicted.
    #[must_use]
    pub fn wired(&self, section: SectionNo) -> PageSet {
        let mut wired = PageSet::EMPTY;
        for known in self.devices().share().iter() {
            wired.unite(&known.device.mmu().wired(section));
        }
        wired
    }

    /// The wanted pages that are present and not wired; holes among them are written off.
    fn choose(&self, section: SectionNo, wanted: &PageSet) -> Result<PageSet, EvictionError> {
        let pages = self.table.pages_of(section);
        let present = self.in_place(section)?;
        let mut chosen = PageSet::EMPTY;
        for page in wanted.pages(section).filter(|page| pages.contains(*page)) {
            match (self.table.word(page).state(), present.contains(page)) {
                (PageState::Present, true) => chosen.insert(page),
                (PageState::Present, false) => self.write_off(page),
                _ => {}
            }
        }
        chosen.subtract(&self.wired(section));
        let state = self.table.made_section(section);
        // One page that stays keeps all of them.
        let stays = chosen.len() < pages.len() && self.is_whole(state, section);
        Ok(if stays { PageSet::EMPTY } else { chosen })
    }

    /// The guest left a hole: from now on the page is a stored page of zeros like any other.
    fn write_off(&self, page: PageNo) {
        let discarding =
            self.table
                .change(page, PageWord::new(PageState::Present), Event::FoundHole);
        if discarding.is_some() {
            let left_out =
                self.table
                    .change(page, PageWord::new(PageState::Discarding), Event::LeftOut);
            debug_assert!(left_out.is_some(), "{page} changed under an exclusive lock");
            self.counters.discarded_pages.fetch_add(1, Relaxed);
            let mut one = PageSet::EMPTY;
            one.insert(page);
            let list = self.devices().share();
            for known in list
                .firsts()
                .filter(|known| known.device.id() != DeviceId::VCPUS)
            {
                match known.try_restrict(page.section(), &one, Restrict::NoAccess) {
                    Ok(Restricted::Done | Restricted::Busy) => {}
                    Err(error) => self.incidents.fill_failed(page, &error),
                }
            }
            if let Err(error) = list.invalidate(&[page.single()]) {
                self.incidents.fill_failed(page, &error);
            }
        }
    }

    fn restrict_all(&self, section: SectionNo, pages: &PageSet) -> Result<(), EvictionError> {
        let list = self.devices().share();
        let by_strength = [Restrict::NoAccess, Restrict::ReadOnly];
        for strength in by_strength {
            for known in list
                .firsts()
                .filter(|known| known.device.limits().strongest == strength)
            {
                if known.try_restrict(section, pages, strength)? == Restricted::Busy {
                    return Err(EvictionError::Busy);
                }
            }
        }
        list.invalidate(&pages.runs(section))?;
        Ok(())
    }

    /// Gives full access back to all remaining candidates. The lock is held exclusively.
    fn give_back(&self, section: SectionNo) {
        let state = self.table.made_section(section);
        let mut left = PageSet::EMPTY;
        for page in self
            .table
            .pages_of(section)
            .iter()
            .filter(|page| state.cancel(*page))
        {
            left.insert(page);
        }
        for run in left.runs(section) {
            self.grant_to(run, |_| true);
        }
    }
}

impl EvictionRound<'_> {
    /// The section.
    #[must_use]
    pub fn section(&self) -> SectionNo {
        self.section
    }

    /// False once the section's pages were removed from the space, or another round began there.
    fn is_under_way(&self) -> bool {
        self.space.table.made_section(self.section).round() == self.number
    }

    /// The pages that may still be evicted.
    #[must_use]
    pub fn candidates(&self) -> PageSet {
        let state = self.space.table.made_section(self.section);
        let mut set = PageSet::EMPTY;
        if !self.is_under_way() {
            return set;
        }
        for page in self
            .space
            .table
            .pages_of(self.section)
            .iter()
            .filter(|page| state.is_candidate(*page))
        {
            set.insert(page);
        }
        set
    }

    /// Takes `pages` out of the round: they stay present.
    pub fn spare(&mut self, pages: &PageSet) {
        let state = self.space.table.made_section(self.section);
        let _owned = own(&state.lock);
        if !self.is_under_way() {
            return;
        }
        let mut pages = *pages;
        if !pages.is_empty() && self.space.is_whole(state, self.section) {
            let all = self.space.table.pages_of(self.section);
            pages = PageSet::of_range(self.section, all);
        }
        let mut spared = PageSet::EMPTY;
        for page in pages.pages(self.section).filter(|page| state.cancel(*page)) {
            spared.insert(page);
        }
        for run in spared.runs(self.section) {
            self.space.grant_to(run, |_| true);
        }
    }

    /// Reads pages of the section. The bytes read of a page are valid only if its commit succeeds.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn read(&self, pages: PageRange, into: &mut [u8]) -> Result<(), PlaceError> {
        assert_eq!(into.len() as u64, pages.bytes(), "room for {pages:?}");
        self.space.place.read(pages, into)
    }

    /// True if the pages of the section can be evicted only together: then a batch has all of them.
    #[must_use]
    pub fn goes_whole(&self) -> bool {
        self.space.goes_whole(self.section)
    }

    /// Evicts the pages of `batch` that were not needed meanwhile; of a section that goes whole, all or
    /// none. Their content must be stored
    /// already, so that a successor can read it. Keep batches small: faults in the section wait for
    /// them.
    pub fn commit(&mut self, batch: &[(PageNo, Content)]) -> Committed {
        let space = self.space;
        let state = space.table.made_section(self.section);
        let _owned = own(&state.lock);
        let mut committed = Committed::default();
        let mut going = PageSet::EMPTY;
        let under_way = self.is_under_way() && self.is_complete(state, batch);
        for (page, content) in batch {
            // A candidate is known by its place in the section alone.
            assert_eq!(page.section(), self.section, "{page} is not of the round");
            let present = PageWord::new(PageState::Present);
            let still = under_way
                && state.cancel(*page)
                && space
                    .table
                    .change(*page, present, Event::Commit(*content))
                    .is_some();
            if still {
                going.insert(*page);
            } else if !content.is_zero() {
                committed.unused.push(*content);
            }
        }
        for run in going.runs(self.section) {
            match space.place.discard(run) {
                Ok(()) => self.punched(run, &mut committed.evicted),
                Err(error) => {
                    self.look_what_stayed(run, &mut committed);
                    committed.problem = Some(error);
                }
            }
        }
        if !going.is_empty() {
            // Now that nobody can read them any more.
            space.note_eviction(state);
        }
        space
            .counters
            .evicted_pages
            .fetch_add(committed.evicted.len(), Relaxed);
        committed
    }

    /// False if the section goes whole, and a page of it is not in `batch` or was needed meanwhile.
    fn is_complete(&self, state: &Section, batch: &[(PageNo, Content)]) -> bool {
        if !self.space.is_whole(state, self.section) {
            return true;
        }
        let may_go = |(page, _): &&(PageNo, Content)| {
            state.is_candidate(*page) && self.space.table.word(*page).state() == PageState::Present
        };
        let going = batch.iter().filter(may_go).count() as u64;
        going == self.space.table.pages_of(self.section).len()
    }

    fn punched(&self, run: PageRange, evicted: &mut PageSet) {
        for page in run.iter() {
            let word = self.space.table.word(page);
            let done = self.space.table.change(page, word, Event::Punched);
            // Its content is only in the store now: a word that does not say so loses it.
            assert!(done.is_some(), "{page} changed under an exclusive lock");
            evicted.insert(page);
        }
    }

    /// After a failed punch each page is either gone or still present. A page that cannot even be
    /// queried keeps both copies, as after a crash. Pages that go together are queried together, so that their
    /// words agree; the one that leads changes last.
    fn look_what_stayed(&self, run: PageRange, committed: &mut Committed) {
        let step = match self.goes_whole() {
            true => to_usize(run.len()),
            false => 1,
        };
        for first in run.iter().step_by(step) {
            let pages = PageRange::new(first, run.end.min(first.plus(step as u64)));
            let leader_last = || pages.iter().skip(1).chain([first]);
            match self.space.place.is_present(first) {
                Ok(true) => leader_last().for_each(|page| self.stayed(page)),
                Ok(false) => leader_last()
                    .for_each(|page| self.punched(page.single(), &mut committed.evicted)),
                Err(error) => self.space.incidents.fill_failed(first, &error),
            }
        }
    }

    fn stayed(&self, page: PageNo) {
        let word = self.space.table.word(page);
        if let PageState::Evicting(content) = word.state() {
            let done = self.space.table.change(page, word, Event::StillPresent);
            debug_assert!(done.is_some(), "{page} changed under an exclusive lock");
            if !content.is_zero() {
                self.space.store.free(content);
            }
            self.space.grant_to(page.single(), |_| true);
        }
    }
}

impl Drop for EvictionRound<'_> {
    fn drop(&mut self) {
        let _owned = own(&self.space.table.made_section(self.section).lock);
        if !self.is_under_way() {
            return;
        }
        self.space.give_back(self.section);
    }
}
