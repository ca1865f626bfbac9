// SPDX-License-Identifier: Apache-2.0
//! Detaching a VM: every absent page is filled, then the VM is released.
//!
//! ```text
//!   reclaim thread stopped, limit lifted ─► fill all pages ─► RAM unregistered ─► all is freed
//!                                                └─ fails ─► the VM stays, served without eviction
//! ```
//! Pages come back from every tier, from slow ones many at a time ([`super::bring_back`]).
//! A detach may be stopped while it fills; after that it runs to its end.

use super::{
    bring_back::{BringBack, NotBack},
    failure::failed,
    hotplug::Hotplug,
    life::Detaching,
    lock::lock,
    reclaim_thread::ReclaimThread,
    shared::{ENDING_WAIT, Shared},
    vm::Vm,
};
use crate::control::{ControlError, ErrorKind};
use pagetide_addr::{PageNo, PageRange, PageSet};
use pagetide_gmem::{FaultOutcome, PageState};
use pagetide_vmm::{layout::RamLayout, takeover};
use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Passes over all pages before a detach gives up; the second finds nothing, unless a fill failed.
const DETACH_PASSES: u32 = 8;
/// Pages per fault of a detach.
const DETACH_PAGES: u64 = 16;

impl Vm {
    /// Fills every absent page, releases the VM and frees everything kept for it. Returns the number of
    /// pages filled.
    ///
    /// # Errors
    /// An error message. The VM is then still served, without eviction; or its VMM has ended,
    /// `detaching` has recorded that, and the VM is to be [given back](Self::give_back).
    pub(super) fn detach(
        &self,
        shared: &Shared,
        detaching: &Detaching<'_>,
    ) -> Result<u64, ControlError> {
        self.core.detach.stop.store(false, Relaxed);
        let reclaim = self.stop_reclaim_thread();
        // There is none while it is stopped.
        self.core.enforce_limit();
        let filled = self.fill_all(shared);
        let (filled, ram) =
            filled.map_err(|error| self.failed_detach(reclaim, error, detaching))?;
        // From here on the detach can no longer be stopped.
        self.core.detach.stop.store(false, Relaxed);
        let gone = self.let_go(&ram, shared);
        gone.map_err(|error| self.failed_detach(None, error, detaching))?;
        self.give_back(shared);
        Ok(filled)
    }

    /// Unregisters the RAM.
    fn let_go(&self, ram: &RamLayout, shared: &Shared) -> Result<(), ControlError> {
        let core = &self.core;
        core.pool.set_letting_go();
        let Some(number) = core.pool.userfaultfd_number() else {
            return Err(failed(
                "the pool has lost the number of the userfaultfd in the VMM",
            ));
        };
        // From here on page requests wait; once the RAM is unregistered, all of them can be granted.
        shared.service.remove_tenant(&core.dma.tenant);
        shared.feed.remove(&core.protection);
        let gone = takeover::let_go(&core.vmm, ram, &core.faults.userfaultfd, number);
        self.free_domains(shared);
        // RAM that is still registered must still be served with zeros.
        gone.map_err(|error| {
            failed(format!(
                "all pages of {} are present, but the VMM still has our userfaultfd: {error}",
                core.name
            ))
        })
    }

    /// A detach has failed: either its VMM has ended, or the VM stays.
    fn failed_detach(
        &self,
        reclaim: Option<ReclaimThread>,
        error: ControlError,
        detaching: &Detaching<'_>,
    ) -> ControlError {
        // A refusal by a rule has nothing to do with the process.
        if error.kind == ErrorKind::Failed && self.core.vmm.ends_within(ENDING_WAIT) {
            detaching.vmm_ended();
        } else {
            // Done before another thread may end the VM: after that nothing is started for it.
            self.stay(reclaim, &error);
        }
        error
    }

    /// The VM stays attached, without eviction unless the detach was stopped; its RAM must still be
    /// followed.
    fn stay(&self, reclaim: Option<ReclaimThread>, why: &ControlError) {
        // A detach that was stopped is no sign of trouble: the state is as before.
        if !self.core.detach.stop.swap(false, Relaxed) {
            self.core.detach.failed.store(true, Relaxed);
            self.core.suspend(why.message.clone());
        }
        if let Some(reclaim) = reclaim {
            self.core.limit.go_on();
            self.core.requests.open();
            match self.start_reclaim_thread(reclaim) {
                Ok(thread) => lock(&self.threads).reclaim = Some(thread),
                Err(error) => {
                    self.core.requests.close();
                    tracing::error!(vm = self.core.name, %error, "no thread follows the VM's RAM any more");
                }
            }
        }
    }

    /// Makes every page present that has stored content. Zero pages may stay holes: an unwatched hole
    /// reads as zeros. Returns the number of pages, and the RAM that the VM still has.
    fn fill_all(&self, shared: &Shared) -> Result<(u64, RamLayout), ControlError> {
        let mut hotplug = Hotplug::new(Arc::clone(&self.core), shared);
        let mut ram = hotplug.let_go_of_unplugged();
        let mut filled = 0;
        for _ in 0..DETACH_PASSES {
            match self.fill_pass(&ram) {
                // A pass that found nothing has seen every page present.
                Ok(0) => {
                    self.refuse_if_poisoned(&ram)?;
                    return Ok((filled, ram));
                }
                Ok(pass) => filled += pass,
                Err(error) => {
                    // The RAM may have been unplugged meanwhile.
                    let left = hotplug.let_go_of_unplugged();
                    if left.files().len() == ram.files().len() {
                        return Err(error);
                    }
                    ram = left;
                }
            }
        }
        Err(failed(format!(
            "pages of {} do not stay present after they are filled",
            self.core.name
        )))
    }

    fn fill_pass(&self, ram: &RamLayout) -> Result<u64, ControlError> {
        let table = self.core.space.memory.table();
        self.refuse_if_poisoned(ram)?;
        let goes_on = || !self.core.detach.stop.load(Relaxed);
        let mut fills = BringBack::new(&self.core.space.space, &goes_on);
        let mut filled = 0;
        let mut said = Instant::now();
        for (_, pages) in ram
            .files()
            .iter()
            .flat_map(|file| file.pages().by_section())
        {
            let mut page = pages.start;
            while page < pages.end {
                let run = self.stored_run(page, pages.end);
                if run.is_empty() {
                    page = page.next();
                    continue;
                }
                fills.begin(run).map_err(|error| self.not_back(error))?;
                filled += run.len();
                page = run.end;
            }
            if said.elapsed() >= Duration::from_secs(1) {
                tracing::info!(
                    vm = self.core.name,
                    page = pages.end.0,
                    of = table.page_count(),
                    "filling absent pages"
                );
                said = Instant::now();
            }
        }
        fills.finish().map_err(|error| self.not_back(error))?;
        Ok(filled)
    }

    fn not_back(&self, error: NotBack) -> ControlError {
        match error {
            NotBack::Stopped => ControlError::refused(format!(
                "the detach of {} was stopped; it is served as before",
                self.core.name
            )),
            NotBack::Failed {
                outcome: FaultOutcome::Gone,
                ..
            } => failed("the VM has ended"),
            NotBack::Failed { .. } | NotBack::TooSlow { .. } => failed(format!(
                "{error}. {} is still served, without eviction",
                self.core.name
            )),
        }
    }

    /// A lost page must not read as zeros: accesses to it fail as long as the VM lives.
    fn refuse_if_poisoned(&self, ram: &RamLayout) -> Result<(), ControlError> {
        let table = self.core.space.memory.table();
        let poisoned = |(section, pages)| {
            let lost = table.pages_in_state(section, |state| state == PageState::Poisoned);
            let mut elsewhere = lost;
            elsewhere.subtract(&PageSet::of_range(section, pages));
            lost.len() - elsewhere.len()
        };
        let of_files = ram.files().iter();
        let parts = of_files.flat_map(|file| file.pages().by_section());
        let lost: u64 = parts.map(poisoned).sum();
        if lost == 0 {
            return Ok(());
        }
        Err(ControlError::refused(format!(
            "{lost} pages of {} are lost, and would read as zeros if the VM were detached: save what you can inside \
             the guest and power it off; until then it is served, without eviction",
            self.core.name
        )))
    }

    /// The stored pages from `start` on, a few at most and none from `end` on. (A fault must lie in one
    /// region; a run within one section always does.)
    fn stored_run(&self, start: PageNo, end: PageNo) -> PageRange {
        let table = self.core.space.memory.table();
        let is_stored = |page: &PageNo| {
            matches!(table.word(*page).state(), PageState::Stored(content) | PageState::Filling(content) | PageState::Evicting(content)
                    if !content.is_zero())
        };
        let most = start.plus(DETACH_PAGES).min(end);
        let count = PageRange::new(start, most)
            .iter()
            .take_while(is_stored)
            .count();
        start.run(count as u64)
    }
}
