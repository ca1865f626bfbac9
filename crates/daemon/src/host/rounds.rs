// SPDX-License-Identifier: Apache-2.0
//! The reclaim thread of one VM: it checks for hazards, scans and reclaims.
//!
//! ```text
//!   wait: below the low watermark, a reclaim order, or one second has passed
//!     at most once a second       follow RAM hotplug; check for hazards; correct counts and
//!                                 write them to the pool
//!     each time                   part of a sweep: hot and cold, as fast as its cost allows
//!     below the low watermark     reclaim to the high one, by `pagetide_policy::victims::passes`
//!     a little above it           keep some cold sections unmapped, ready to evict at once
//! ```
//! While a hazard forbids eviction, or eviction is suspended because the pool is full, the limit is not
//! enforced: a fill would only wait for room that cannot come.

use super::{
    core::{Heat, ReclaimOrder, VmCore, lock},
    hotplug::Hotplug,
};
use pagetide_addr::SECTION_PAGES;
use pagetide_policy::{
    sampling::{SWEEPS_TO_KNOW, Want},
    victims::{Need, Reach, Step, UNMAPPED_MIN, passes},
};
use pagetide_swap::{
    DirectReclaim, Limit, Reclaimer,
    limit::Wake,
    reclaim::{ReclaimStop, Reclaimed},
    store::PutError,
};
use pagetide_sys::cpu;
use pagetide_vmm::{layout::RamLayout, threads};
use pagetide_vpri::{TenantCpus, VcpuPlace};
use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

/// Hazards are checked, and counts corrected, at most this often.
const LOOK_ROUND: Duration = Duration::from_secs(1);
/// How long a hazard check stays valid: a pass of a reclaim takes no longer than this.
const HAZARDS_HOLD: Duration = Duration::from_millis(100);
/// A helper thread pays off from this many pages on: 32 MiB.
const HELPER_PAGES_MIN: u64 = 8 << 10;
/// Pause between the two initial sweeps: in this time a guest uses what it needs.
const LEARNING_REST: Duration = Duration::from_millis(250);
/// Longest time that eviction waits for these sweeps: fills may be waiting for room meanwhile.
const LEARNING_MAX: Duration = Duration::from_secs(30);
/// Eviction that a full pool or a kernel error stopped is tried again after this time.
const SUSPENSION: Duration = Duration::from_secs(5);

/// Closes the orders when the thread ends, even by a panic: no caller may wait for an answer then.
struct CloseOrders(Arc<VmCore>);

impl Drop for CloseOrders {
    fn drop(&mut self) {
        self.0.orders.close();
    }
}

/// State of the reclaim thread beside the VM.
pub(super) struct Rounds {
    vm: Arc<VmCore>,
    hotplug: Hotplug,
    reclaimer: Reclaimer,
    /// What helper threads evict with.
    direct: Arc<DirectReclaim>,
    /// Most threads that evict beside this one.
    helpers: u64,
    /// The RAM that the reclaimer knows.
    layout: Arc<RamLayout>,
    started: Instant,
    looked_at: Option<Instant>,
    synced_at: Option<Instant>,
    reserved_at: Option<Instant>,
    suspended_at: Option<Instant>,
    learning_since: Option<Instant>,
}

impl Rounds {
    /// Times count from `started`. At most `helpers` threads evict beside this one, with `direct`.
    pub(super) fn new(
        vm: Arc<VmCore>,
        reclaimer: Reclaimer,
        (direct, helpers): (Arc<DirectReclaim>, u64),
        hotplug: Hotplug,
        started: Instant,
    ) -> Self {
        Self {
            layout: vm.layout.now(),
            vm,
            hotplug,
            reclaimer,
            direct,
            helpers,
            started,
            looked_at: None,
            synced_at: None,
            reserved_at: None,
            suspended_at: None,
            learning_since: None,
        }
    }

    /// Runs until the VM's limit is stopped; it may be run again then.
    pub(super) fn run(mut self) -> Self {
        let _closing = CloseOrders(Arc::clone(&self.vm));
        loop {
            let wake = self.vm.limit.wait_for_work(LOOK_ROUND);
            if wake == Wake::Stopped {
                break;
            }
            if is_due(self.synced_at, LOOK_ROUND) {
                self.look_round();
            }
            if !self.vm.may_evict() {
                self.refuse_orders();
                continue;
            }
            self.sample();
            if self.vm.limit.is_below_low_mark() {
                self.reclaim_to_high_mark();
            }
            self.keep_reserve();
            self.obey_orders();
        }
        self.refuse_orders();
        self.vm.sync_counters();
        // A suspension from now on is not this thread's to end.
        self.suspended_at = None;
        self
    }

    fn look_round(&mut self) {
        self.end_suspension();
        self.look_for_hazards();
        self.sync();
    }

    fn look_for_hazards(&mut self) {
        let now = Instant::now();
        self.looked_at = Some(now);
        let bars = self.hotplug.follow();
        let layout = self.vm.layout.now();
        if !Arc::ptr_eq(&layout, &self.layout) {
            // New RAM may reuse the page numbers of RAM that was removed.
            self.layout = layout;
            self.reclaimer.ram_changed();
        }
        self.vm.look_for_hazards(bars);
        let reserve = self.vm.limit.reserve();
        match self.vm.may_evict() {
            true => reserve.open(now.duration_since(self.started) + HAZARDS_HOLD),
            false => reserve.close(),
        }
    }

    fn sync(&mut self) {
        self.synced_at = Some(Instant::now());
        self.vm.enforce_limit();
        self.vm.sync_counters();
        let vcpus = threads::vcpus(self.vm.vmm.pid());
        self.vm.server_cpus.set(&allowed_of(&vcpus));
        self.vm.tenant.set_cpus(cpus_of(vcpus));
        if let Err(error) = self.reclaimer.trim_store() {
            tracing::warn!(vm = self.vm.name, %error, "memory of the pool could not be given back");
        }
        let report = self.reclaimer.heat();
        *lock(&self.vm.heat) = Heat {
            sets: self.reclaimer.sets().counts().to_vec(),
            report,
            swept_at: report.swept_at.map(|at| self.started + at),
            reserve_sections: self.reclaimer.reserve_sections(),
        };
    }

    /// Suspends eviction for [`SUSPENSION`]: its cause will not go away sooner.
    fn suspend(&mut self, why: String) {
        self.suspended_at = Some(Instant::now());
        self.vm.suspend(why);
        self.vm.enforce_limit();
    }

    /// Checks for hazards again unless the last check is recent: before each pass of a reclaim.
    fn may_evict_now(&mut self) -> bool {
        if is_due(self.looked_at, HAZARDS_HOLD / 2) {
            self.look_for_hazards();
        }
        self.vm.may_evict()
    }

    fn end_suspension(&mut self) {
        if self
            .suspended_at
            .is_some_and(|at| at.elapsed() >= SUSPENSION)
        {
            self.suspended_at = None;
            *lock(&self.vm.suspended) = None;
        }
    }

    /// Continues the heat sampling.
    fn sample(&mut self) {
        let want = match () {
            () if self.vm.limit.is_below_low_mark() => Want::Pressed,
            () if self.vm.limit.is_set() => Want::Much,
            () if self.reclaimer.heat().sweeps < SWEEPS_TO_KNOW => Want::First,
            () => Want::Little,
        };
        // If the VMM has ended, another thread handles that.
        let cpu = cpu::time_of(self.vm.vmm.pid()).unwrap_or_default();
        let started = self.started;
        if let Err(error) = self.reclaimer.sample(|| started.elapsed(), cpu, want) {
            self.suspend(format!("accesses cannot be told: {error}"));
        }
    }

    /// Near the limit, keeps some cold memory unmapped and ready to evict at once.
    fn keep_reserve(&mut self) {
        let pages = self.vm.limit.reserve_pages();
        if pages == 0 || !is_due(self.reserved_at, LOOK_ROUND) || !self.vm.may_evict() {
            return;
        }
        self.reserved_at = Some(Instant::now());
        let started = self.started;
        if let Err(error) = self.reclaimer.keep_ready(|| started.elapsed(), pages) {
            self.suspend(format!("accesses cannot be told: {error}"));
        }
    }

    /// Makes two sweeps at once if nothing is known yet about heat. Evicting by guess takes pages that
    /// come back at once, and a guest that waits for them touches so little that all of its memory seems
    /// idle.
    fn learn(&mut self) {
        if !self.reclaimer.knows_nothing() {
            return;
        }
        let (vm, started) = (Arc::clone(&self.vm), self.started);
        let clock = || started.elapsed();
        let began = *self.learning_since.get_or_insert_with(Instant::now);
        let go_on = || !vm.limit.is_stopped() && began.elapsed() < LEARNING_MAX;
        while self.reclaimer.knows_nothing() && go_on() {
            if let Err(error) = self.reclaimer.sweep(clock, go_on) {
                return self.suspend(format!("accesses cannot be told: {error}"));
            }
            if vm.limit.rest(LEARNING_REST) == Wake::Stopped {
                return;
            }
        }
    }

    fn reclaim_to_high_mark(&mut self) {
        self.learn();
        self.vm.enforce_limit();
        let limit = Arc::clone(&self.vm.limit);
        self.reclaim(Need::Limit, |_| limit.pages_to_high_mark());
    }

    /// Evicts until `wanted`, called with the pages evicted so far, returns 0, or nothing more can go.
    fn reclaim(&mut self, need: Need, wanted: impl Fn(u64) -> u64) -> Reclaimed {
        let mut total = Reclaimed::default();
        for step in passes(need) {
            let pages = wanted(total.evicted_pages);
            if pages == 0 || !self.may_evict_now() {
                break;
            }
            if turn_of(step, &total, &self.vm.limit) == Turn::LeftOut {
                continue;
            }
            match step {
                Step::Scan => {
                    self.reclaimer.try_again();
                    if self.vm.limit.rest(UNMAPPED_MIN) == Wake::Stopped {
                        break;
                    }
                }
                Step::Take(reach) => {
                    self.take_all(reach, &wanted, &mut total);
                    match &total.stopped {
                        // This has an eviction blocker of its own, which is lifted when there is room
                        // again.
                        Some(ReclaimStop::Store(PutError::Group(_))) => {
                            self.look_for_hazards();
                            self.vm.enforce_limit();
                            break;
                        }
                        Some(stop) => {
                            self.suspend(stop.to_string());
                            break;
                        }
                        None => {}
                    }
                }
            }
        }
        total
    }

    /// Makes passes within `reach` until enough was evicted or nothing is left within reach.
    fn take_all(&mut self, reach: Reach, wanted: &impl Fn(u64) -> u64, total: &mut Reclaimed) {
        loop {
            if is_due(self.synced_at, LOOK_ROUND) {
                self.look_round();
            }
            let pages = wanted(total.evicted_pages);
            if pages == 0 || !self.may_evict_now() {
                return;
            }
            let pass = self.take(pages, reach);
            let (evicted, rests, has_more) = (pass.evicted_pages, pass.rests, pass.has_more);
            total.add(pass);
            let is_over = total.stopped.is_some() || self.vm.limit.is_stopped();
            if is_over || !(rests || has_more) {
                return;
            }
            // What this pass unmapped stays untouched while others are evicted, or until its wait is
            // over.
            if evicted == 0 && !has_more && self.vm.limit.rest(UNMAPPED_MIN) == Wake::Stopped {
                return;
            }
        }
    }

    fn take(&mut self, pages: u64, reach: Reach) -> Reclaimed {
        let (vm, looked_at) = (Arc::clone(&self.vm), self.looked_at);
        let go_on = || !vm.limit.is_stopped() && !is_due(looked_at, HAZARDS_HOLD);
        let started = self.started;
        let direct = Arc::clone(&self.direct);
        let helpers = match reach {
            // Helpers evict prepared sections, and none of those is protected.
            Reach::Protected => 0,
            Reach::ColdOnly | Reach::AllResting => self.helpers.min(pages / HELPER_PAGES_MIN),
        };
        let share = pages / (helpers + 1);
        std::thread::scope(|scope| {
            let help = || help(&direct, share, &go_on);
            let named = |number| std::thread::Builder::new().name(format!("pt-evict-{number}"));
            // A helper thread that cannot be started costs nothing but its help.
            let running: Vec<_> = (0..helpers)
                .filter_map(|number| named(number).spawn_scoped(scope, help).ok())
                .collect();
            let own = pages - share * running.len() as u64;
            let clock = || started.elapsed();
            let mut done = self.reclaimer.reclaim(clock, own, reach, go_on);
            let has_own = done.evicted_pages >= own;
            for helper in running {
                done.evicted_pages += helper.join().unwrap_or_else(|_| {
                    tracing::error!("a thread that evicts has panicked");
                    0
                });
            }
            // A helper may have found nothing while the reclaimer still has pages beyond its own share.
            done.has_more |= has_own && done.evicted_pages < pages;
            done
        })
    }

    fn obey_orders(&mut self) {
        while let Some(order) = self.vm.next_order() {
            let pages = order.pages;
            self.learn();
            self.reclaimer.try_again();
            let done = self.reclaim(Need::Wish, |evicted| pages.saturating_sub(evicted));
            self.answer(&order, done);
        }
    }

    fn refuse_orders(&self) {
        while let Some(order) = self.vm.next_order() {
            self.answer(&order, Reclaimed::default());
        }
    }

    fn answer(&self, order: &ReclaimOrder, done: Reclaimed) {
        self.vm.sync_counters();
        if order.done.send(done).is_err() {
            tracing::debug!(vm = self.vm.name, "the caller of a reclaim has left");
        }
    }
}

/// Evicts up to `pages` from prepared sections, beside the reclaimer; returns how many were evicted.
fn help(direct: &DirectReclaim, pages: u64, go_on: &impl Fn() -> bool) -> u64 {
    let mut evicted = 0;
    while evicted < pages && go_on() {
        match direct.take_some((pages - evicted).min(SECTION_PAGES)) {
            0 => break,
            some => evicted += some,
        }
    }
    evicted
}

/// Whether a step of a reclaim runs when its turn comes and too little was evicted so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    Done,
    LeftOut,
}

/// The decision for `step` of a reclaim that has evicted `so_far`.
fn turn_of(step: Step, so_far: &Reclaimed, limit: &Limit) -> Turn {
    let leave_out = match step {
        // Idle sections remain that were not tried yet: they come before the cost of a scan.
        Step::Scan => so_far.has_more,
        // Protected sections are evicted only if the limit cannot be kept without them, not because
        // there is little headroom or because a pass had no time for the rest.
        Step::Take(Reach::Protected) => so_far.has_more || !limit.is_below_low_mark(),
        Step::Take(Reach::ColdOnly | Reach::AllResting) => false,
    };
    match leave_out {
        true => Turn::LeftOut,
        false => Turn::Done,
    }
}

/// CPUs on which vCPUs may run, ascending.
fn allowed_of(vcpus: &[threads::VcpuThread]) -> Vec<usize> {
    let all: BTreeSet<usize> = vcpus
        .iter()
        .flat_map(|vcpu| vcpu.allowed.iter().copied())
        .collect();
    all.into_iter().collect()
}

/// The CPUs of the VM's vCPUs.
fn cpus_of(vcpus: Vec<threads::VcpuThread>) -> TenantCpus {
    let place = |vcpu: threads::VcpuThread| VcpuPlace {
        allowed: vcpu.allowed,
        last: vcpu.last,
    };
    let vcpus: Vec<_> = vcpus.into_iter().map(place).collect();
    match cpu::online_count() {
        Ok(host_cpus) => TenantCpus::of_vcpus(&vcpus, host_cpus),
        Err(error) => {
            tracing::debug!(%error, "cannot determine the CPUs of the vCPUs");
            TenantCpus::default()
        }
    }
}

fn is_due(last: Option<Instant>, every: Duration) -> bool {
    last.is_none_or(|at| at.elapsed() >= every)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Free memory under the limit, as the watermarks see it.
    #[derive(Clone, Copy, Debug)]
    enum Free {
        Little,
        Enough,
    }

    /// The steps of a reclaim that run when each pass leaves some sections untried, or none.
    fn done(free: Free, has_more: &Reclaimed) -> Vec<Step> {
        let limit = Limit::new();
        match free {
            Free::Little => limit.set(Some(100_000), 100_000),
            Free::Enough => limit.set(Some(100_000), 0),
        }
        let is_done = |step: &Step| turn_of(*step, has_more, &limit) == Turn::Done;
        passes(Need::Limit).filter(is_done).collect()
    }

    #[test]
    fn scan_and_what_is_protected_wait_while_there_is_more_of_what_rests() {
        let more = Reclaimed {
            has_more: true,
            ..Reclaimed::default()
        };
        for free in [Free::Little, Free::Enough] {
            let steps = done(free, &more);
            let resting = [Step::Take(Reach::ColdOnly), Step::Take(Reach::AllResting)];
            assert!(
                steps.iter().all(|step| resting.contains(step)),
                "{free:?}: {steps:?}"
            );
            assert_eq!(&steps[..2], resting);
        }
    }

    #[test]
    fn without_more_that_rests_there_are_scans_and_what_is_protected_goes_below_the_low_mark_only()
    {
        let none = Reclaimed::default();
        let all: Vec<_> = passes(Need::Limit).collect();
        assert_eq!(done(Free::Little, &none), all);
        let protected = Step::Take(Reach::Protected);
        let others: Vec<_> = all
            .iter()
            .copied()
            .filter(|step| *step != protected)
            .collect();
        assert!(others.len() < all.len() && others.contains(&Step::Scan));
        assert_eq!(done(Free::Enough, &none), others);
    }
}
