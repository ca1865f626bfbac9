// SPDX-License-Identifier: Apache-2.0
//! Overwriting: absent pages that a device has written whole get its bytes, not their old ones.
//!
//! # Idea
//! A transfer that covers a whole page makes the page's old content worthless, so loading that from
//! its tier is wasted work. But whether a transfer covers a page is known only when it is over, for
//! it may be short. So the device receives it in a buffer of its own, then requests an overwrite
//! for each page that was written whole:
//!
//! ```text
//!   Stored(old) ── claim ──► Filling(old) ── install the device's bytes ──► Present; old freed
//!   Present, a hole (given up by the guest) ──► Discarding ── likewise ──► Present
//!   Present         stays as it is ┐
//!   being filled    stays so       ┴ the device writes its bytes itself, under a lease
//!   Poisoned        refused: the kernel installs nothing in its place
//! ```
//! These are the steps and locks of a fill, with other bytes. So a reader sees either the old
//! content or the new, and a waiter that joins meanwhile sees the new. If the daemon dies, the page
//! is either stored, with its old content (the request is then repeated, for its device has not
//! completed it), or present, with the new. Stored content that is damaged is not even read.
//!
//! # A device that gives up
//! A device may die while its overwrite waits here for room, a lock or a CPU. Its successor repeats
//! the request; then the guest may change the page, and the page may be evicted. The stored content
//! is then newer than the device's bytes, and the only copy. So before each claim, with the
//! section's lock held shared, the caller is queried whether the bytes are still wanted. If they
//! are at that moment, no page that was used since has been evicted. None is evicted before the
//! claim either, because an eviction needs the lock exclusively: a page that is used anew is
//! present, and stays so.
//!
//! *Invariant:* nothing is installed over content that was stored after the device gave up the
//! request.

use super::{
    fault::{Fault, FaultOutcome},
    fill::FILL_PAGES_MAX,
    memory::{AT_ONCE_PAGES_MAX, PagedMemory, Resolved, STILL_MAX},
    place::{Installed, PlaceError},
    table::Section,
    word::PageState,
};
use crate::sync::{share, try_share};
use pagetide_addr::{OVERWRITE_PAGES_MAX, PAGE_BYTES, PageNo, PageRange, to_usize};
use std::sync::atomic::Ordering::Relaxed;

const _: () = assert!(OVERWRITE_PAGES_MAX <= AT_ONCE_PAGES_MAX);
const _: () = assert!(OVERWRITE_PAGES_MAX <= u64::BITS as u64);

/// Result of an overwrite.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "the device must write itself what was not installed"]
pub struct Overwritten {
    /// `Present` if every page was handled; otherwise what stopped it. `installed` is valid either
    /// way.
    pub outcome: FaultOutcome,
    /// Bit `k` set: page `k` of the fault was absent, and is now present with the given content.
    /// The other pages are unchanged: the device takes leases, faults if necessary, and writes
    /// them.
    pub installed: u64,
}

impl Overwritten {
    /// Nothing was installed.
    pub const fn nothing(outcome: FaultOutcome) -> Self {
        Self {
            outcome,
            installed: 0,
        }
    }
}

/// An overwrite under way.
struct Work<'a> {
    memory: &'a PagedMemory,
    fault: &'a Fault,
    content: &'a [u8],
    still_wanted: &'a dyn Fn() -> bool,
    /// The first page not yet handled.
    page: PageNo,
    /// How often that page was tried in vain.
    still: u32,
    done: Overwritten,
    /// How many of the installed pages were stored before.
    filled: u64,
}

impl PagedMemory {
    /// Installs `content` in those of `fault.pages` that are absent; see the module. May evict
    /// other pages first (the limit).
    ///
    /// `still_wanted` is called under a section's lock, so it must not wait. Once the device has
    /// given up the request, it must return false before any page that was used since is evicted;
    /// then no further page is installed, and the outcome is [`FaultOutcome::Gone`].
    ///
    /// Refused as [`FaultOutcome::OutOfRange`] for more than [`OVERWRITE_PAGES_MAX`] pages, or if
    /// the length of `content` does not match.
    pub fn overwrite(
        &self,
        fault: &Fault,
        content: &[u8],
        still_wanted: &dyn Fn() -> bool,
    ) -> Overwritten {
        let Some(mut work) = Work::new(self, fault, content, still_wanted) else {
            return Overwritten::nothing(FaultOutcome::OutOfRange);
        };
        let absent = self.absent_pages(fault.pages);
        if absent > 0 {
            self.admission.admit(absent);
        }
        while let Some(section) = work.next_section() {
            let _shared = share(&section.lock);
            work.advance(section);
        }
        work.finish(absent)
    }

    /// Like [`Self::overwrite`], if that needs neither an eviction nor a wait. Otherwise returns
    /// `None`, with nothing installed. If a wait becomes necessary half way, the rest is left to
    /// the device.
    #[must_use]
    pub fn overwrite_without_waiting(
        &self,
        fault: &Fault,
        content: &[u8],
        still_wanted: &dyn Fn() -> bool,
    ) -> Option<Overwritten> {
        let Some(mut work) = Work::new(self, fault, content, still_wanted) else {
            return Some(Overwritten::nothing(FaultOutcome::OutOfRange));
        };
        let absent = self.absent_pages(fault.pages);
        if absent > 0 && !self.admission.try_admit(absent) {
            return None;
        }
        while let Some(section) = work.next_section() {
            let Some(_shared) = try_share(&section.lock) else {
                break;
            };
            work.advance(section);
        }
        let is_over = work.is_over();
        let done = work.finish(absent);
        (is_over || done.installed != 0).then_some(done)
    }
}

impl<'a> Work<'a> {
    /// `None` if the request is invalid.
    fn new(
        memory: &'a PagedMemory,
        fault: &'a Fault,
        content: &'a [u8],
        still_wanted: &'a dyn Fn() -> bool,
    ) -> Option<Self> {
        let sound = fault.pages.len() <= OVERWRITE_PAGES_MAX
            && fault.pages.bytes() == content.len() as u64
            && memory.table.contains(fault.pages);
        sound.then_some(Self {
            memory,
            fault,
            content,
            still_wanted,
            page: fault.pages.start,
            still: 0,
            done: Overwritten::nothing(FaultOutcome::Present),
            filled: 0,
        })
    }

    fn is_over(&self) -> bool {
        self.page >= self.fault.pages.end || self.done.outcome != FaultOutcome::Present
    }

    /// The section of the next page, if one remains.
    fn next_section(&mut self) -> Option<&'a Section> {
        if self.is_over() {
            return None;
        }
        let section = self.memory.table.section(self.page.section());
        if section.is_none() {
            self.done.outcome = FaultOutcome::OutOfRange;
        }
        section
    }

    /// Handles the next page: installs it and those behind it that are stored like it. The
    /// section's lock is held shared.
    fn advance(&mut self, section: &Section) {
        match self.resolve(section) {
            Resolved::UpTo(next) if next > self.page => (self.page, self.still) = (next, 0),
            Resolved::UpTo(_) if self.still == STILL_MAX => {
                self.done.outcome = self.memory.without_progress(self.page);
            }
            Resolved::UpTo(_) => self.still += 1,
            // Another thread fills it with its stored content: then it is present.
            Resolved::BeingFilled => (self.page, self.still) = (self.page.next(), 0),
            Resolved::Failed(outcome) => self.done.outcome = outcome,
        }
    }

    fn resolve(&mut self, section: &Section) -> Resolved {
        if section.is_leaving() {
            return Resolved::Failed(FaultOutcome::OutOfRange);
        }
        let (memory, page) = (self.memory, self.page);
        let word = memory.table.word(page);
        match word.state() {
            PageState::Stored(_) if !(self.still_wanted)() => Resolved::Failed(FaultOutcome::Gone),
            PageState::Stored(_) => self.install_from(page),
            PageState::Present => match memory.place.is_present(page) {
                Ok(true) => memory.found_present(section, page, self.fault),
                Ok(false) if !(self.still_wanted)() => Resolved::Failed(FaultOutcome::Gone),
                Ok(false) => self.install_in_hole(section, page),
                Err(error) => memory.failed(page, &error),
            },
            PageState::Filling(_) | PageState::Discarding => Resolved::BeingFilled,
            PageState::Evicting(_) => memory.settle_evicting(page, word),
            PageState::Poisoned => {
                memory.poison_for_kernel(page);
                Resolved::Failed(FaultOutcome::Lost)
            }
            PageState::Unallocated => Resolved::Failed(FaultOutcome::OutOfRange),
        }
    }

    fn install_from(&mut self, page: PageNo) -> Resolved {
        let end = (self.fault.pages.end)
            .min(self.memory.table.pages_of(page.section()).end)
            .min(page.plus(FILL_PAGES_MAX));
        let claimed = self.memory.claim(PageRange::new(page, end));
        if claimed.is_empty() {
            // Another thread was faster: check the page again.
            return Resolved::UpTo(page);
        }
        let (installed, resolved) = self.memory.install(claimed, self.bytes_of(claimed));
        self.filled += installed.len();
        self.note(installed);
        resolved
    }

    /// The guest discarded the page, and a device has written it since: the page starts with those
    /// bytes.
    fn install_in_hole(&mut self, section: &Section, page: PageNo) -> Resolved {
        let memory = self.memory;
        let bytes = self.bytes_of(page.single());
        let install = || match memory.install_one(page, bytes)? {
            0 => Ok::<_, PlaceError>(Installed::AlreadyThere),
            _ => Ok(Installed::Installed),
        };
        let (installed, resolved) = memory.refill_discarded(section, page, install);
        if installed == Some(Installed::Installed) {
            self.note(page.single());
        }
        resolved
    }

    fn bytes_of(&self, pages: PageRange) -> &'a [u8] {
        let first = self.fault.pages.start.0;
        let at = |page: PageNo| to_usize((page.0 - first) * PAGE_BYTES);
        &self.content[at(pages.start)..at(pages.end)]
    }

    fn note(&mut self, installed: PageRange) {
        let counters = &self.memory.counters;
        (counters.overwritten_pages).fetch_add(installed.len(), Relaxed);
        for page in installed.iter() {
            self.done.installed |= 1 << (page.since(self.fault.pages.start));
        }
    }

    /// Ends the overwrite. Gives back the room taken for `admitted` pages that was not needed, and
    /// counts room needed beyond it because pages were evicted meanwhile.
    fn finish(self, admitted: u64) -> Overwritten {
        let admission = &self.memory.admission;
        if admitted > self.filled {
            admission.give_back(admitted - self.filled);
        } else if self.filled > admitted {
            admission.count_in(self.filled - admitted);
        }
        self.done
    }
}
