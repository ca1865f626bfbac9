// SPDX-License-Identifier: Apache-2.0
//! A request's steps in sections that go whole: the leader's word decides, see [`crate::paging`]'s `whole`.

use super::{End, Joining, Work};
use crate::paging::{
    fault::FaultOutcome, fill::Asked, memory::Resolved, place::PlaceError, readahead::Readahead,
    request::Cause, table::Section, word::PageState,
};
use pagetide_addr::{DeviceId, PageNo, PageRange, SECTION_PAGES};
use std::sync::atomic::Ordering::Relaxed;

/// How often one request waits for a free huge page, a hundredth of a second each, before its vCPU or device
/// faults again.
const HUGE_PAGE_WAITS_MAX: u32 = 100;

impl Work<'_> {
    /// Of the next page, whose section goes whole: the page that leads, and where this request goes on
    /// after the section.
    pub(super) fn unit(&self) -> (PageNo, PageNo) {
        let pages = self.memory.table.pages_of(self.page.section());
        let next = pages.end.min(self.cause.pages().end);
        // Memory removed since may end before the page.
        (pages.start, next.max(self.page.next()))
    }

    /// No huge page is free: another section goes, or one comes free elsewhere. After some time the vCPU, or
    /// the device, faults again.
    pub(super) fn wait_for_huge_page(&mut self) {
        let memory = self.memory;
        let may_wait = match (self.cause, self.joining) {
            (Cause::Readahead(_), _) | (_, Joining::Never | Joining::Begin) => false,
            (_, Joining::InKernel | Joining::Reply(_)) => true,
        };
        if !may_wait {
            self.end = End::WouldWait;
            return;
        }
        (memory.counters.waits_for_huge_page).fetch_add(1, Relaxed);
        if self.waits == HUGE_PAGE_WAITS_MAX {
            self.end = End::Stopped(self.without_huge_page());
            return;
        }
        memory.admission.no_page_free(SECTION_PAGES, self.waits);
        self.waits += 1;
    }

    /// Whoever waits comes again; but what the daemon asks for itself is not there.
    fn without_huge_page(&self) -> FaultOutcome {
        let memory = self.memory;
        let pages = memory.table.pages_of(self.page.section());
        memory.wake(pages);
        if self.cause.device() != DeviceId::DAEMON {
            return FaultOutcome::Present;
        }
        let (start, end) = (pages.start, pages.end);
        let why = PlaceError::NoPageFree { start, end };
        memory.incidents.fill_failed(start, &why);
        FaultOutcome::Lost
    }

    /// As [`Self::resolve`], in a section that goes whole ([`crate::paging::whole`]).
    pub(super) fn resolve_whole(&mut self, section: &Section) -> Resolved {
        let memory = self.memory;
        let pages = memory.table.pages_of(self.page.section());
        let (lead, next) = self.unit();
        match memory.table.word(lead).state() {
            PageState::Stored(_) if self.is_given_up() => Resolved::Failed(FaultOutcome::Gone),
            PageState::Stored(_) => self.fill_whole(pages, next),
            _ if matches!(self.cause, Cause::Readahead(_)) => Resolved::UpTo(next),
            PageState::Present => match memory.place.is_present(lead) {
                Ok(true) => {
                    memory.found_present_whole(section, pages, self.cause.device());
                    Resolved::UpTo(next)
                }
                Ok(false) if self.is_given_up() => Resolved::Failed(FaultOutcome::Gone),
                Ok(false) => self.fill_whole(pages, next),
                Err(error) => memory.failed(lead, &error),
            },
            PageState::Filling(_) | PageState::Discarding => Resolved::BeingFilled,
            PageState::Evicting(_) => match memory.settle_whole(pages) {
                Resolved::Failed(outcome) => Resolved::Failed(outcome),
                _ => Resolved::UpTo(self.page),
            },
            PageState::Poisoned => {
                memory.poison_for_kernel(lead);
                Resolved::Failed(FaultOutcome::Lost)
            }
            PageState::Unallocated => Resolved::Failed(FaultOutcome::OutOfRange),
        }
    }

    /// Fills the section of `pages`; the request goes on at `next`.
    fn fill_whole(&mut self, pages: PageRange, next: PageNo) -> Resolved {
        let memory = self.memory;
        let asked = match self.cause {
            Cause::Readahead(Readahead::SwapIn(_))
                if self.admitted.pages >= self.filled + memory.absent_pages(pages) =>
            {
                Asked::ByNobody
            }
            Cause::Readahead(_) => return Resolved::UpTo(next),
            Cause::Fault(_) | Cause::Blank(_) | Cause::Overwrite(_) => Asked::ByFault,
        };
        let (filled, resolved) = memory.fill_whole(pages.start.section(), asked);
        self.filled += filled;
        self.filled_whole += filled;
        if asked == Asked::ByNobody && filled > 0 {
            let counter = &memory.counters.swapped_in_ahead_pages;
            counter.fetch_add(filled, Relaxed);
            self.tell(PageRange::new(self.page, next));
        }
        match resolved {
            Resolved::UpTo(end) if end == pages.end => Resolved::UpTo(next),
            Resolved::UpTo(_) => Resolved::UpTo(self.page),
            other => other,
        }
    }
}
