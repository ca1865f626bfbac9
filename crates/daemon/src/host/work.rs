// SPDX-License-Identifier: Apache-2.0
//! [`VmWork`]: the background work of one VM, as the host's scheduler sees it.
//!
//! | class | what |
//! |---|---|
//! | reclaim | passes below the low watermark, those that a client asked for, and the heat that these need |
//! | scan | samples above the low watermark |
//! | background | keeping sections ready for eviction, swapping in what was in use lately, demoting what stayed cold |
//!
//! One thread does all of it, in turns. The hazard check of each second belongs to no class: it must not be held
//! back. What the thread does beside that (waiting, corrections of counts) takes microseconds.
//!
//! # Passes and hazards
//! A pass may evict only for as long as a hazard check holds. So the thread waits for its run *before* that check,
//! which takes milliseconds and would itself disturb the faults for which the pass would be held back; it keeps
//! the run through the check, which is not charged to it. If a pass gets no run in time, it is over without
//! having begun. So checks are not repeated while the thread is held back, and none is out of date when it may
//! evict.

use pagetide_policy::scheduler::{TooManyTasks, WorkClass};
use pagetide_swap::{
    Limit, Pace,
    scheduled::{
        HostScheduler,
        group::WorkGroup,
        turns::{Turn, Turns},
    },
};
use std::{
    cell::Cell,
    sync::Arc,
    time::{Duration, Instant},
};

/// Longest wait for a turn of a scan or of background work: meanwhile the thread does nothing else.
const TURN_WAIT_MAX: Duration = Duration::from_secs(1);
/// Sections unmapped in one step: some hundred microseconds. Fewer would cost the guest more TLB flushes.
const UNMAPPED_SECTIONS_MAX: usize = 8;

/// See the module.
pub(super) struct VmWork {
    group: WorkGroup,
    pub(super) reclaim: Turns,
    pub(super) scan: Turns,
    pub(super) background: Turns,
}

impl VmWork {
    /// Tasks for a VM; the VM's `limit` tells the scheduler of faults and of the need for reclaim from now on.
    ///
    /// # Errors
    /// There are too many tasks already.
    pub(super) fn new(scheduler: &Arc<HostScheduler>, limit: &Limit) -> Result<Self, TooManyTasks> {
        let group = WorkGroup::new(scheduler);
        let work = Self {
            reclaim: group.turns(WorkClass::Reclaim)?,
            scan: group.turns(WorkClass::Scan)?,
            background: group.turns(WorkClass::Background)?,
            group,
        };
        limit.tell_work(work.group.clone());
        Ok(work)
    }

    /// Reclaim by another thread beside the VM's own; `None` if there are too many tasks already.
    pub(super) fn helper(&self) -> Option<Turns> {
        match self.group.turns(WorkClass::Reclaim) {
            Ok(turns) => Some(turns),
            Err(error) => {
                tracing::debug!(%error, "no further thread evicts");
                None
            }
        }
    }

    /// Does `work`, for which vCPUs wait: reclaim has the priority of faults meanwhile.
    pub(super) fn hurried<T>(&self, work: impl FnOnce() -> T) -> T {
        self.group.wait_for_room(work)
    }

    /// Ends the run of the VM's thread, if there is one: to be called before it waits.
    pub(super) fn end_run(&self) {
        for turns in [&self.reclaim, &self.scan, &self.background] {
            turns.end();
        }
    }
}

/// Work at the pace of `turns`, until `until` or the stop of the VM's limit.
pub(super) struct Paced<'a> {
    turns: &'a Turns,
    limit: &'a Limit,
    until: Instant,
    was_held: Cell<bool>,
    ran_out: Cell<bool>,
}

impl<'a> Paced<'a> {
    /// Until `until`.
    pub(super) fn until(until: Instant, turns: &'a Turns, limit: &'a Limit) -> Self {
        Self {
            turns,
            limit,
            until,
            was_held: Cell::new(false),
            ran_out: Cell::new(false),
        }
    }

    /// Work that can be left for another time.
    pub(super) fn briefly(turns: &'a Turns, limit: &'a Limit) -> Self {
        Self::until(Instant::now() + TURN_WAIT_MAX, turns, limit)
    }

    /// Whether the work ended because it got no run in time, or one when the time was over.
    pub(super) fn was_held(&self) -> bool {
        self.was_held.get()
    }

    /// Whether the work ended because its time was over.
    pub(super) fn ran_out(&self) -> bool {
        self.ran_out.get()
    }

    fn is_over(&self) -> bool {
        let is_over = Instant::now() >= self.until;
        self.ran_out.set(self.ran_out.get() || is_over);
        is_over
    }
}

impl Pace for Paced<'_> {
    fn go_on(&self) -> bool {
        if self.limit.is_stopped() || self.is_over() {
            return false;
        }
        let turn = self.turns.step(Some(self.until));
        // The wait for it, and for a CPU, may have taken all the time.
        let goes_on = turn == Turn::Granted && !self.is_over();
        self.was_held.set(!goes_on);
        goes_on
    }

    fn may_stay(&self) -> bool {
        !self.is_over() && self.turns.may_stay()
    }

    /// Whether the thread gets a run or the VM is about to leave, what was begun is completed; after the time
    /// is over without further waits.
    fn pause(&self) {
        if self.is_over() {
            return;
        }
        let turn = self.turns.step(Some(self.until));
        if turn != Turn::Granted {
            tracing::trace!(?turn, "goes on without a run");
        }
    }

    fn unmapped_sections_max(&self) -> usize {
        UNMAPPED_SECTIONS_MAX
    }

    fn firmly<T>(&self, work: impl FnOnce() -> T) -> T {
        self.turns.firmly(work)
    }
}
