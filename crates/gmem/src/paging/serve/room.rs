// SPDX-License-Identifier: Apache-2.0
//! Room for the pages of a request: taken before the first of them, settled behind the last.

use super::{AT_ONCE_PAGES_MAX, Admitted, End, Joining, Work};
use crate::paging::{
    blank::Blank, memory::PagedMemory, readahead::Readahead, request::Cause, word::PageState,
};
use pagetide_addr::{PageNo, PageRange, SECTION_PAGES, SectionNo};

impl PagedMemory {
    /// Takes room for the pages of `cause` that are absent. `None` if that would take time that the caller does not
    /// have.
    pub(super) fn take_room(&self, cause: &Cause<'_>, joining: Joining<'_>) -> Option<Admitted> {
        let pages = cause.pages();
        let absent = match (cause, joining) {
            (Cause::Readahead(readahead), _) => {
                let far = pages.iter().filter(|page| self.is_far(*page)).count() as u64;
                let absent = self.absent_pages(pages).saturating_sub(far);
                let wanted = match readahead {
                    Readahead::Next(_) | Readahead::Around(_) => {
                        absent.min(self.neighbours_max.into())
                    }
                    Readahead::SwapIn(_) => absent,
                };
                let has_room = wanted > 0 && self.admission.try_admit(wanted);
                return Some(Admitted::pages(if has_room { wanted } else { 0 }));
            }
            // The device's bytes are at hand, and so are zeros.
            (Cause::Fault(_), Joining::Never) => self.absent_at_hand(pages)?,
            (Cause::Fault(_) | Cause::Blank(_) | Cause::Overwrite(_), _) => {
                self.absent_pages(pages)
            }
        };
        match joining {
            _ if absent == 0 => Some(Admitted::pages(0)),
            Joining::Never | Joining::Begin => {
                let few = absent <= AT_ONCE_PAGES_MAX;
                let has_room = few && self.admission.try_admit(absent);
                has_room.then_some(Admitted::pages(absent))
            }
            Joining::InKernel | Joining::Reply(_) => {
                let whole = self.absent_whole(pages);
                let since = self.admission.admit(absent);
                Some(Admitted {
                    pages: absent,
                    whole,
                    since,
                })
            }
        }
    }

    /// How many pages will be filled if `pages` are.
    pub(super) fn absent_pages(&self, pages: PageRange) -> u64 {
        let pages = self.reach(pages);
        let is_stored =
            |page: &PageNo| matches!(self.table.word(*page).state(), PageState::Stored(_));
        pages.iter().filter(is_stored).count() as u64
    }

    /// Of those, how many lie in sections that go whole.
    fn absent_whole(&self, pages: PageRange) -> u64 {
        let (first, end) = (pages.start.section().0, pages.end.0.div_ceil(SECTION_PAGES));
        let whole = (first..end)
            .map(SectionNo)
            .filter(|it| self.goes_whole(*it));
        whole
            .map(|section| self.absent_pages(self.table.pages_of(section)))
            .sum()
    }

    /// How many of `pages` are absent; `None` if the content of one is not at hand.
    fn absent_at_hand(&self, pages: PageRange) -> Option<u64> {
        let mut absent = 0;
        for page in self.reach(pages).iter() {
            if let PageState::Stored(content) = self.table.word(page).state() {
                if !content.is_zero() && !self.store.is_at_hand(content) {
                    return None;
                }
                absent += 1;
            }
        }
        Some(absent)
    }
}

impl Work<'_> {
    /// Gives back room that was taken and is not needed, and counts what is needed beyond it
    /// because pages were evicted meanwhile.
    ///
    /// A fault that is over keeps the room of pages that others made present meanwhile. If a
    /// correction of the limit, which looks at what is present, came in between, room given back
    /// would be room twice, and the limit must never believe in more than is free. One that comes
    /// again takes its room again.
    ///
    /// Of sections that go whole, a keeping fault would keep too much: each of the vCPUs that wait for one of them has
    /// taken room for 512 pages, and so has one for which no huge page was free. They give back what they did not
    /// fill, if no correction came in between.
    pub(super) fn settle_room(&self) {
        let memory = self.memory;
        let (admitted, whole) = (self.admitted.pages, self.admitted.whole);
        match self.cause {
            Cause::Fault(fault) | Cause::Blank(Blank { fault, .. })
                if self.end == End::WouldWait =>
            {
                if admitted > 0 {
                    let absent = memory.absent_pages(fault.pages);
                    memory.admission.give_back(admitted.min(absent));
                }
            }
            Cause::Fault(_) | Cause::Blank(_) => {
                if whole > self.filled_whole {
                    let (surplus, since) = (whole - self.filled_whole, self.admitted.since);
                    (memory.admission).give_back_unless_corrected(surplus, since);
                }
            }
            Cause::Overwrite(_) | Cause::Readahead(_) => {
                if admitted > self.filled {
                    memory.admission.give_back(admitted - self.filled);
                } else if self.filled > admitted {
                    memory.admission.count_in(self.filled - admitted);
                }
            }
        }
    }
}
