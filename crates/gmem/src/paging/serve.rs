// SPDX-License-Identifier: Apache-2.0
//! [`PagedMemory::fault`]: the one function that makes absent pages present.
//!
//! # Idea
//! A vCPU fault and a device fault are the same event with a different waiter (GMEM 3; VPRI 5.2).
//! The first fault on a page fills it, later ones join. How a waiter is released depends on where
//! it sleeps: a vCPU sleeps in the kernel and is woken by the install itself; a device gets a
//! callback. A request says *why* pages are to be present ([`Cause`]) and *how* its caller waits for
//! what takes time ([`Wait`]); one loop serves all of them:
//!
//! ```text
//!   room      for the pages that are absent now: taken, made by evictions, or (Never) not had
//!   page by page, its section's lock held shared:
//!     Stored      claimed and installed, with the pages behind it (see `fill`)
//!       not at hand: claimed and joined; its load begins, and the loop goes on (see `slow_fill`)
//!     Filling     another thread's: joined
//!     Present     there: out of the round, granted.   A hole: filled anew
//!   room      what was not needed is given back (see `settle_room`)
//! ```
//!
//! | cause | bytes | a page that is not stored | another thread fills it |
//! |---|---|---|---|
//! | fault | stored | granted | joined, or (a device, `Never`) the caller must come again |
//! | blank | zeros, if stored before the device had the page ([`super::blank`]); else stored | granted | as for a fault |
//! | overwrite | the device's ([`super::overwrite`]) | granted, left to the device | left to the device |
//! | readahead | stored ([`super::readahead`]) | left alone | left alone |
//!
//! # What waits
//! Three things may take time: room (an eviction), content that is not at hand (a disk, another
//! machine), and the section's lock, which an eviction holds exclusively for some tens of
//! microseconds. A caller that passes [`Wait::Never`] meets none of them: it gets `None` instead,
//! and may have made some of the pages present. [`Wait::Begin`] is the same, but begins loads: it is
//! for a vCPU's reader. Readahead never waits, whatever it passes, for
//! nothing waits for it: it passes over pages that are not at hand.
//!
//! Any other caller waits in the call for room and for the lock, but not for content that is not at
//! hand: it begins the load, and what waits is the vCPU, in the kernel, or the reply, on the page's
//! list.

mod room;
mod sections;

use super::{
    blank::Blank,
    fault::FaultOutcome,
    fill::{Asked, FILL_PAGES_MAX},
    memory::{PagedMemory, Resolved},
    overwrite::Overwrite,
    place::{Installed, PlaceError},
    readahead::Readahead,
    request::{Cause, Served, TOLD_PAGES_MAX, Wait},
    slow_fill::Load,
    store::Corrections,
    table::Section,
    waiters::{Joined, Pending},
    word::{Event, PageState, PageWord},
};
use crate::sync::{Arc, share, try_share};
use pagetide_addr::{DeviceId, OVERWRITE_PAGES_MAX, PageNo, PageRange};
use std::sync::atomic::Ordering::Relaxed;

/// Most absent pages that a call which must not wait fills: at some microseconds each, more would
/// delay others behind this one.
const AT_ONCE_PAGES_MAX: u64 = 64;
/// How often one request may retry the same page without progress.
const STILL_MAX: u32 = 64;

const _: () = assert!(OVERWRITE_PAGES_MAX <= AT_ONCE_PAGES_MAX);
const _: () = assert!(OVERWRITE_PAGES_MAX <= TOLD_PAGES_MAX);

/// What a request does about a page that another thread is filling, and about a lock that is held.
#[derive(Clone, Copy)]
enum Joining<'a> {
    /// Neither is waited for.
    Never,
    /// The lock is not waited for; a vCPU is woken by the kernel.
    Begin,
    /// A vCPU is woken by the kernel.
    InKernel,
    /// The reply waits for the page.
    Reply(&'a Arc<Pending>),
}

/// A fault that the admission was told of; its end is told on drop.
struct Told<'a>(&'a PagedMemory);

impl<'a> Told<'a> {
    fn begin(memory: &'a PagedMemory, device: DeviceId) -> Self {
        memory.admission.fault_begins(device);
        Self(memory)
    }
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        self.0.admission.fault_ends();
    }
}

impl PagedMemory {
    /// Makes the pages of `cause` present and grants them, or reports why it cannot. This wakes a
    /// vCPU that waits in the kernel. May evict other pages first (the limit).
    ///
    /// Returns `None` if the request is not over: with [`Wait::Never`] and [`Wait::Begin`], ask again with another way
    /// to wait; with [`Wait::Reply`], always, for the reply is told. An overwrite tells what it
    /// installed by the returned value alone, so it is best not given a reply; without waiting, it
    /// is over as soon as it has installed a page, and the rest is left to the device.
    ///
    /// An overwrite of more than [`OVERWRITE_PAGES_MAX`] pages, or whose content does not have
    /// their length, is refused as [`FaultOutcome::OutOfRange`].
    #[doc(alias = "gm_dev_fault")]
    pub fn fault(&self, cause: &Cause<'_>, wait: Wait) -> Option<Served> {
        match wait {
            Wait::Never => self.serve(cause, Joining::Never),
            Wait::Begin => self.serve(cause, Joining::Begin),
            Wait::Here => self.serve(cause, Joining::InKernel),
            Wait::Reply(reply) => {
                let pending = Pending::new(reply);
                let served = self.serve(cause, Joining::Reply(&pending));
                pending.settle(served.map_or(FaultOutcome::Present, |served| served.outcome));
                None
            }
        }
    }

    fn serve(&self, cause: &Cause<'_>, joining: Joining<'_>) -> Option<Served> {
        let joining = match cause {
            Cause::Readahead(_) => Joining::Never,
            Cause::Fault(_) | Cause::Blank(_) | Cause::Overwrite(_) => joining,
        };
        let is_sound = match cause {
            Cause::Overwrite(overwrite) => overwrite.is_sound(),
            Cause::Fault(_) | Cause::Blank(_) | Cause::Readahead(_) => true,
        };
        if !is_sound || !self.table.contains(cause.pages()) {
            return Some(Served::nothing(FaultOutcome::OutOfRange));
        }
        let _told = match cause {
            Cause::Readahead(_) => None,
            Cause::Fault(fault)
            | Cause::Blank(Blank { fault, .. })
            | Cause::Overwrite(Overwrite { fault, .. }) => {
                let is_awaited = fault.device != DeviceId::DAEMON;
                is_awaited.then(|| Told::begin(self, fault.device))
            }
        };
        let admitted = self.take_room(cause, joining)?;
        let mut work = Work {
            memory: self,
            cause,
            joining,
            page: cause.pages().start,
            still: 0,
            waits: 0,
            admitted,
            filled: 0,
            filled_whole: 0,
            end: End::Open,
            installed: 0,
            loads: Vec::new(),
        };
        while let Some(section) = work.next_section() {
            let lock = match joining {
                Joining::Never | Joining::Begin => try_share(&section.lock),
                Joining::InKernel | Joining::Reply(_) => Some(share(&section.lock)),
            };
            let Some(shared) = lock else {
                work.end = End::WouldWait;
                break;
            };
            let resolved = work.resolve(section);
            drop(shared);
            for load in work.loads.drain(..) {
                self.begin_load(load);
            }
            work.advance(resolved);
        }
        work.finish()
    }

    /// `Evicting` lasts only while the lock is held exclusively, except for a page that the kernel
    /// would neither punch nor let us query.
    pub(super) fn settle_evicting(&self, page: PageNo, word: PageWord) -> Resolved {
        let event = match self.place.is_present(page) {
            Ok(true) => Event::StillPresent,
            Ok(false) => Event::Punched,
            Err(error) => return self.failed(page, &error),
        };
        self.settle_as(page, word, event);
        // The next turn of the loop handles the new state.
        Resolved::UpTo(page)
    }

    /// What became of a page whose word is `Evicting` is known now.
    pub(super) fn settle_as(&self, page: PageNo, word: PageWord, event: Event) {
        let changed = self.table.change(page, word, event);
        if let (Some(_), Event::StillPresent, PageState::Evicting(content)) =
            (changed, event, word.state())
            && !content.is_zero()
        {
            self.store.free(content);
        }
    }

    /// The faulting page is present: takes it out of the round and grants it.
    fn found_present(&self, section: &Section, page: PageNo, device: DeviceId) -> Resolved {
        self.counters.present_faults.fetch_add(1, Relaxed);
        let cancelled = section.cancel(page);
        if cancelled {
            self.counters.cancelled_pages.fetch_add(1, Relaxed);
        }
        // Out of the round: the page has its write access back.
        if cancelled || device == DeviceId::VCPUS {
            self.grant_to(page.single(), |id| id == DeviceId::VCPUS);
        }
        self.grant_to(page.single(), |id| id != DeviceId::VCPUS);
        Resolved::UpTo(page.next())
    }
}

/// Room that a request took.
#[derive(Clone, Copy)]
struct Admitted {
    /// For so many pages.
    pages: u64,
    /// Of them, those in sections that go whole, if the request may fill such.
    whole: u64,
    since: Corrections,
}

impl Admitted {
    const fn pages(pages: u64) -> Self {
        Self {
            pages,
            whole: 0,
            since: Corrections(0),
        }
    }
}

/// Whether a request goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    /// It would have to wait, and may not.
    WouldWait,
    Stopped(FaultOutcome),
}

/// A request under way.
struct Work<'a> {
    memory: &'a PagedMemory,
    cause: &'a Cause<'a>,
    joining: Joining<'a>,
    /// The first page not yet handled.
    page: PageNo,
    /// How often that page was tried in vain.
    still: u32,
    /// How often no huge page was free.
    waits: u32,
    /// Pages that room was taken for.
    admitted: Admitted,
    /// How many of the installed pages were stored before: these need room.
    filled: u64,
    /// Of them, those in sections that go whole.
    filled_whole: u64,
    end: End,
    /// See [`Served`].
    installed: u64,
    /// To begin once the section's lock is released.
    loads: Vec<Load>,
}

impl<'a> Work<'a> {
    /// The section of the next page, if one remains.
    fn next_section(&mut self) -> Option<&'a Section> {
        let is_over = self.page >= self.cause.pages().end
            || self.end != End::Open
            || (matches!(self.cause, Cause::Readahead(_)) && self.filled >= self.admitted.pages);
        if is_over {
            return None;
        }
        let section = self.memory.table.section(self.page.section());
        if section.is_none() {
            self.end = End::Stopped(FaultOutcome::OutOfRange);
        }
        section
    }

    fn advance(&mut self, resolved: Resolved) {
        match resolved {
            Resolved::UpTo(next) if next > self.page => (self.page, self.still) = (next, 0),
            // Nobody waits for it, so its next fault sees to it.
            Resolved::UpTo(_) if matches!(self.cause, Cause::Readahead(_)) => {
                self.page = self.page.next();
            }
            Resolved::UpTo(_) if self.still == STILL_MAX => {
                let outcome = self.memory.without_progress(self.page);
                self.end = End::Stopped(outcome);
            }
            Resolved::UpTo(_) => self.still += 1,
            Resolved::BeingFilled => self.join(),
            Resolved::NotAtHand => self.end = End::WouldWait,
            Resolved::NoPageFree => self.wait_for_huge_page(),
            Resolved::Failed(outcome) => self.end = End::Stopped(outcome),
        }
    }

    /// Another thread is filling the page.
    fn join(&mut self) {
        let memory = self.memory;
        let (awaited, next) = match memory.goes_whole(self.page.section()) {
            true => self.unit(),
            false => (self.page, self.page.next()),
        };
        let joined = match (self.cause, self.joining) {
            // It will be present with its stored content; the device then writes its bytes itself.
            (Cause::Overwrite(_) | Cause::Readahead(_), _) => {
                (self.page, self.still) = (next, 0);
                return;
            }
            (Cause::Fault(fault) | Cause::Blank(Blank { fault, .. }), Joining::Never)
                if fault.device != DeviceId::VCPUS =>
            {
                self.end = End::WouldWait;
                return;
            }
            (Cause::Fault(_) | Cause::Blank(_), _) => self.wait_for(awaited),
        };
        match joined {
            Joined::Waits => {
                memory.counters.joined_faults.fetch_add(1, Relaxed);
                (self.page, self.still) = (next, 0);
            }
            // The page is checked again.
            Joined::Over => {}
            Joined::Closed => self.end = End::Stopped(FaultOutcome::Gone),
        }
    }

    /// Becomes a waiter of `page`, if that is being filled.
    fn wait_for(&self, page: PageNo) -> Joined {
        let memory = self.memory;
        match self.joining {
            Joining::Reply(pending) => memory.waiters.join(&memory.table, page, pending),
            Joining::Never | Joining::Begin | Joining::InKernel => {
                match memory.table.mark_waited(page) {
                    true => Joined::Waits,
                    false => Joined::Over,
                }
            }
        }
    }

    /// Checks the next page. If it is absent, fills it and the pages that follow. The section's
    /// lock is held shared.
    fn resolve(&mut self, section: &Section) -> Resolved {
        if section.is_leaving() {
            return Resolved::Failed(FaultOutcome::OutOfRange);
        }
        let (memory, page) = (self.memory, self.page);
        if memory.is_whole(section, page.section()) {
            return self.resolve_whole(section);
        }
        let word = memory.table.word(page);
        match word.state() {
            PageState::Stored(_) if self.is_given_up() => Resolved::Failed(FaultOutcome::Gone),
            PageState::Stored(_) => self.fill_from(section, page),
            _ if matches!(self.cause, Cause::Readahead(_)) => Resolved::UpTo(page.next()),
            PageState::Present => match memory.place.is_present(page) {
                Ok(true) => memory.found_present(section, page, self.cause.device()),
                Ok(false) if self.is_given_up() => Resolved::Failed(FaultOutcome::Gone),
                Ok(false) => self.fill_hole(section, page),
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

    fn is_given_up(&self) -> bool {
        match self.cause {
            Cause::Overwrite(overwrite) => overwrite.is_given_up(),
            Cause::Fault(_) | Cause::Blank(_) | Cause::Readahead(_) => false,
        }
    }

    /// Most pages that are claimed together.
    fn step_pages(&self) -> u64 {
        match self.cause {
            Cause::Fault(_) | Cause::Blank(_) | Cause::Overwrite(_) => FILL_PAGES_MAX,
            Cause::Readahead(readahead) => readahead
                .step_pages()
                .min(self.admitted.pages - self.filled),
        }
    }

    /// Claims the page, whose content is not at hand, and those behind it that are like it.
    fn fill_slowly(&mut self, run: PageRange) -> Resolved {
        match (self.cause, self.joining) {
            // Nobody waits for it.
            (Cause::Readahead(_), _) => return Resolved::UpTo(run.start.next()),
            (_, Joining::Never) => return Resolved::NotAtHand,
            (_, Joining::Begin | Joining::InKernel | Joining::Reply(_)) => {}
        }
        let memory = self.memory;
        memory.claim_far(run, Asked::ByFault, &mut self.loads);
        let claimed = run.start.run(self.loads.len() as u64);
        // This request waits before the load can end.
        for page in claimed.iter() {
            match self.wait_for(page) {
                Joined::Waits => {}
                Joined::Over => unreachable!("{page} left its fill before its load"),
                Joined::Closed => self.end = End::Stopped(FaultOutcome::Gone),
            }
        }
        Resolved::UpTo(claimed.end)
    }

    /// Fills the page, which is stored, and those behind it that are.
    fn fill_from(&mut self, section: &Section, page: PageNo) -> Resolved {
        let memory = self.memory;
        let end = (self.cause.pages().end)
            .min(memory.table.pages_of(page.section()).end)
            .min(page.plus(self.step_pages()));
        let run = PageRange::new(page, end);
        if let Cause::Blank(blank) = self.cause
            && memory.was_stored_before(section, blank.posted_ns)
        {
            return self.blank(run);
        }
        // What a device writes over need not be loaded.
        if !matches!(self.cause, Cause::Overwrite(_)) && memory.is_far(page) {
            return self.fill_slowly(run);
        }
        let (installed, resolved) = match self.cause {
            Cause::Readahead(Readahead::SwapIn(_)) => memory.fill(run, Asked::ByNobody),
            Cause::Fault(_) | Cause::Blank(_) | Cause::Readahead(_) => {
                memory.fill(run, Asked::ByFault)
            }
            Cause::Overwrite(overwrite) => {
                let claimed = memory.claim(run);
                if claimed.is_empty() {
                    // Another thread was faster: check the page again.
                    return Resolved::UpTo(page);
                }
                memory.install(claimed, overwrite.bytes_of(claimed))
            }
        };
        self.filled += installed.len();
        self.note(installed);
        resolved
    }

    /// Makes the page, which is stored, and those behind it that are, present as zeros.
    fn blank(&mut self, run: PageRange) -> Resolved {
        let memory = self.memory;
        let claimed = memory.claim(run);
        if claimed.is_empty() {
            // Another thread was faster: check the page again.
            return Resolved::UpTo(run.start);
        }
        let (installed, resolved) = memory.install_zeros(claimed);
        self.filled += installed.len();
        let counter = &memory.counters.blanked_pages;
        counter.fetch_add(installed.len(), Relaxed);
        self.tell(installed);
        resolved
    }

    /// The guest discarded the page: it starts with zeros, or with what a device has written since.
    fn fill_hole(&mut self, section: &Section, page: PageNo) -> Resolved {
        let memory = self.memory;
        let Cause::Overwrite(overwrite) = self.cause else {
            let zeros = || memory.place.install_zero(page);
            return memory.refill_discarded(section, page, zeros).1;
        };
        let bytes = overwrite.bytes_of(page.single());
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

    /// Counts pages that this request made present.
    fn note(&mut self, installed: PageRange) {
        let counters = &self.memory.counters;
        match self.cause {
            Cause::Fault(_) | Cause::Blank(_) => {}
            Cause::Overwrite(_) => {
                (counters.overwritten_pages).fetch_add(installed.len(), Relaxed);
            }
            Cause::Readahead(Readahead::SwapIn(_)) => {
                (counters.swapped_in_ahead_pages).fetch_add(installed.len(), Relaxed);
            }
            Cause::Readahead(_) => {
                (counters.readahead_pages).fetch_add(installed.len(), Relaxed);
            }
        }
        self.tell(installed);
    }

    /// Notes that this request made `installed` present.
    fn tell(&mut self, installed: PageRange) {
        for page in installed.iter() {
            let number = page.since(self.cause.pages().start);
            if number < TOLD_PAGES_MAX {
                self.installed |= 1 << number;
            }
        }
    }

    /// Ends the request.
    fn finish(self) -> Option<Served> {
        debug_assert!(self.page <= self.cause.pages().end, "{:?}", self.cause);
        self.settle_room();
        let served = |outcome| Served {
            outcome,
            installed: self.installed,
        };
        match (self.end, self.cause) {
            (End::Open, _) => Some(served(FaultOutcome::Present)),
            (End::Stopped(outcome), _) => Some(served(outcome)),
            (End::WouldWait, Cause::Fault(_) | Cause::Blank(_)) => None,
            (End::WouldWait, Cause::Overwrite(_)) => {
                (self.installed != 0).then(|| served(FaultOutcome::Present))
            }
            (End::WouldWait, Cause::Readahead(_)) => Some(served(FaultOutcome::Present)),
        }
    }
}
