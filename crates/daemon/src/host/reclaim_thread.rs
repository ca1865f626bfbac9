// SPDX-License-Identifier: Apache-2.0
//! [`ReclaimThread`]: the thread of one VM that follows its RAM, checks for hazards, samples and
//! reclaims.
//!
//! [`ReclaimLoop`] decides what comes next; this thread knows the VM, tells the loop of it, and does
//! what is ordered. While a hazard forbids eviction, or eviction is suspended because it has failed, the limit
//! is not enforced, and while the pool is full it is advisory: a fill would only wait for room that cannot
//! come.
//!
//! Its work asks the host's scheduler for runs ([`VmWork`]).

use super::{
    core::{Heat, VmCore},
    hotplug::Hotplug,
    lock::lock,
    reclaim_requests::{Answer, ReclaimRequest},
    work::{Paced, VmWork},
};
use pagetide_addr::SECTION_PAGES;
use pagetide_policy::{
    reclaim::{Content, EvictOrder, Eviction, HAZARDS_HOLD, Order, ReclaimLoop, Situation},
    sampling::Want,
    victims::Need,
};
use pagetide_swap::{
    Counter, DirectReclaim, Pace, Reclaimer,
    demoter::DemotionStop,
    limit::Wake,
    reclaim::{Reclaimed, Stayed},
    scheduled::turns::Turn,
    slow::{SinkStop, Sunk},
};
use pagetide_sys::{cpu, ptrace::Held};
use pagetide_vmm::{layout::RamLayout, threads};
use pagetide_vpri::{TenantCpus, VcpuPlace};
use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Instant,
};

/// Closes the requests when the thread ends, even by a panic: no caller may wait for an answer then.
struct CloseRequests(Arc<VmCore>);

impl Drop for CloseRequests {
    fn drop(&mut self) {
        self.0.requests.close();
    }
}

/// State of the reclaim thread beside the VM.
pub(super) struct ReclaimThread {
    vm: Arc<VmCore>,
    hotplug: Hotplug,
    reclaimer: Reclaimer,
    /// What helper threads evict with.
    direct: Arc<DirectReclaim>,
    work: Arc<VmWork>,
    /// The RAM that the reclaimer knows.
    layout: Arc<RamLayout>,
    started: Instant,
    decisions: ReclaimLoop,
    /// The request that is served now or next.
    request: Option<ReclaimRequest>,
    /// What the reclaim under way has done.
    done: Reclaimed,
    /// The VM's vCPUs, while they are stopped.
    held: Option<Held>,
}

/// What a [`ReclaimThread`] evicts with.
pub(super) struct ReclaimParts {
    pub(super) reclaimer: Reclaimer,
    pub(super) direct: Arc<DirectReclaim>,
    /// Most threads that evict beside this one, with `direct`.
    pub(super) helpers: u64,
    pub(super) work: VmWork,
    /// Times count from this moment.
    pub(super) started: Instant,
}

impl ReclaimThread {
    /// Of `vm`.
    pub(super) fn new(vm: Arc<VmCore>, hotplug: Hotplug, parts: ReclaimParts) -> Self {
        Self {
            layout: vm.layout.now(),
            vm,
            hotplug,
            reclaimer: parts.reclaimer,
            direct: parts.direct,
            work: Arc::new(parts.work),
            started: parts.started,
            decisions: ReclaimLoop::new(parts.helpers),
            request: None,
            done: Reclaimed::default(),
            held: None,
        }
    }

    /// Runs until the VM's limit is stopped; it may be run again then.
    pub(super) fn run(mut self) -> Self {
        let _closing = CloseRequests(Arc::clone(&self.vm));
        loop {
            let situation = self.situation();
            let order = self.decisions.next(&situation);
            if self.obey(order) == Wake::Stopped {
                break;
            }
        }
        self.vm.holds.end(self.held.take());
        self.work.end_run();
        if self.decisions.need() == Some(Need::Wish) {
            self.answer();
        }
        self.refuse_requests();
        self.vm.counters.sync();
        self.decisions.ended();
        self
    }

    fn situation(&mut self) -> Situation {
        if self.request.is_none() {
            self.request = self.vm.requests.pop();
            if self.request.is_some() {
                self.reclaimer.begin_account();
            }
        }
        self.decisions.set_content(match self.vm.store.full() {
            Some(_) => Content::Refused,
            None => Content::Taken,
        });
        Situation {
            now: self.started.elapsed(),
            headroom: self.vm.limit.headroom(),
            eviction: match self.vm.may_evict() {
                true => Eviction::Allowed,
                false => Eviction::Blocked,
            },
            sweeps: self.reclaimer.heat().sweeps,
            requested_pages: self.request.as_ref().map(|request| request.pages),
            wanted_back: self.reclaimer.wanted_back(self.started.elapsed()),
            demotion_in: self.reclaimer.demotion_in(self.started.elapsed()),
        }
    }

    /// Carries out an order; tells whether the thread has to end.
    fn obey(&mut self, order: Order) -> Wake {
        let (vm, started) = (Arc::clone(&self.vm), self.started);
        let clock = || started.elapsed();
        // A run for which a pass has waited is kept until its hazards are checked.
        let keeps_run = matches!(
            order,
            Order::Poll | Order::CheckHazards | Order::CorrectHeadroom | Order::Evict(_)
        );
        let work = Arc::clone(&self.work);
        if !keeps_run {
            work.end_run();
        }
        match order {
            Order::Wait(time) => return vm.limit.wait_for_work(time),
            Order::Rest(time) => return vm.limit.rest(time),
            Order::EndSuspension => vm.gate.resume(),
            Order::Poll => {
                // Trimming holds what fills need, so it is no work of a weak thread.
                work.reclaim.aside(|| {
                    self.check_hazards();
                    self.sync();
                    self.trim_store();
                });
            }
            Order::CheckHazards => {
                // It takes milliseconds, and is of use only if the pass after it gets a run.
                let ask = || work.reclaim.step(None);
                let turn = match self.held {
                    Some(_) => work.hurried(ask),
                    None => ask(),
                };
                tracing::trace!(?turn, "checks for hazards");
                self.decisions.check_begins(started.elapsed());
                work.reclaim.aside(|| self.check_hazards());
            }
            Order::CorrectHeadroom => vm.enforce_limit(),
            Order::Sample(want) => self.sample(want),
            Order::Sweep { until } => {
                let pace = Paced::until(started + until, &work.reclaim, &vm.limit);
                if let Err(error) = self.reclaimer.sweep(clock, cpu::thread_time, &pace) {
                    self.suspend(format!("accesses cannot be told: {error}"));
                }
            }
            Order::TryAgain => self.reclaimer.try_again(),
            Order::Hold(time) => self.held = vm.holds.begin(&vm.name, vm.vmm.fd(), time),
            Order::Release => vm.holds.end(self.held.take()),
            Order::Evict(order) => self.evict(order),
            Order::KeepReady { pages } => {
                if self.request.is_none() {
                    vm.limit.calm_if_there_is_room();
                }
                let pace = Paced::briefly(&work.background, &vm.limit);
                // If it gets no run now, it is ordered again in a second.
                if pace.go_on()
                    && let Err(error) = self.reclaimer.keep_ready(clock, pages, &pace)
                {
                    self.suspend(format!("accesses cannot be told: {error}"));
                }
                work.background.end();
            }
            Order::SwapIn { wanted, pages } => {
                let pace = Paced::briefly(&work.background, &vm.limit);
                let filled = self.reclaimer.swap_in(clock, wanted, pages, &pace);
                work.background.end();
                self.decisions.swapped_in(filled);
            }
            Order::Demote => self.demote(),
            Order::Finish(Need::Limit) => self.done = Reclaimed::default(),
            Order::Finish(Need::Wish) => self.answer(),
            Order::RefuseRequests => self.refuse_requests(),
        }
        match vm.limit.is_stopped() {
            true => Wake::Stopped,
            false => Wake::Timer,
        }
    }

    fn check_hazards(&mut self) {
        let now = Instant::now();
        let blockers = self.hotplug.follow();
        let layout = self.vm.layout.now();
        if !Arc::ptr_eq(&layout, &self.layout) {
            // New RAM may reuse the page numbers of RAM that was removed.
            self.layout = layout;
            self.reclaimer.ram_changed(self.started.elapsed());
        }
        self.vm.look_for_hazards(blockers);
        let reserve = self.vm.limit.reserve();
        match self.vm.may_evict() {
            true => reserve.open(now.duration_since(self.started) + HAZARDS_HOLD),
            false => reserve.close(),
        }
    }

    fn sync(&mut self) {
        self.vm.look_at_store();
        self.vm.enforce_limit();
        self.vm.counters.sync();
        let vcpus = threads::vcpus(self.vm.vmm.pid());
        self.vm.faults.server_cpus.set(&allowed_of(&vcpus));
        self.vm.dma.tenant.set_cpus(cpus_of(vcpus));
        let report = self.reclaimer.heat();
        *lock(&self.vm.heat.last) = Heat {
            sets: self.reclaimer.sets().counts().to_vec(),
            report,
            swept_at: report.swept_at.map(|at| self.started + at),
            reserve_sections: self.reclaimer.reserve_sections(),
            metadata_bytes: self.reclaimer.metadata_bytes(),
        };
    }

    /// Gives memory that the pool no longer needs back to the system.
    fn trim_store(&mut self) {
        if let Err(error) = self.reclaimer.trim_store() {
            tracing::warn!(vm = self.vm.name, %error, "memory of the pool could not be given back");
        }
    }

    /// Packs stored pages of a section that stayed cold anew, and begins to move those of another down.
    fn demote(&mut self) {
        let (work, started) = (Arc::clone(&self.work), self.started);
        let pace = Paced::briefly(&work.background, &self.vm.limit);
        let done = self.reclaimer.demote(|| started.elapsed(), &pace);
        // Sealing a section costs a millisecond.
        let sunk = match pace.go_on() {
            true => self.reclaimer.sink(|| started.elapsed(), &pace),
            false => Sunk::default(),
        };
        work.background.end();
        match sunk.stop {
            None | Some(SinkStop::UnderWay) => {}
            Some(why) => tracing::debug!(vm = self.vm.name, %why, "cold pages stay in memory"),
        }
        let counters = [
            (Counter::DemotedPages, done.pages),
            (Counter::DemotionSavedBytes, done.saved_bytes),
        ];
        for (counter, count) in counters {
            self.vm.pool.counter(counter).fetch_add(count, Relaxed);
        }
        match done.stop {
            None | Some(DemotionStop::Paced) => {}
            Some(why) => tracing::debug!(vm = self.vm.name, %why, "cold pages stay in lz4"),
        }
    }

    /// Suspends eviction for a while: its cause will not go away at once.
    fn suspend(&mut self, why: String) {
        self.decisions.suspended(self.started.elapsed());
        self.vm.suspend(why);
        self.vm.enforce_limit();
    }

    /// Continues the heat sampling.
    fn sample(&mut self, want: Want) {
        // If the VMM has ended, another thread handles that.
        let cpu = cpu::time_of(self.vm.vmm.pid()).unwrap_or_default();
        let started = self.started;
        let clock = || started.elapsed();
        let work = Arc::clone(&self.work);
        let turns = match want {
            Want::Pressed => &work.reclaim,
            Want::First | Want::Much | Want::Little => &work.scan,
        };
        let vm = Arc::clone(&self.vm);
        let pace = Paced::briefly(turns, &vm.limit);
        let sampled = (self.reclaimer).sample(clock, cpu::thread_time, cpu, want, &pace);
        turns.end();
        if let Err(error) = sampled {
            self.suspend(format!("accesses cannot be told: {error}"));
        }
    }

    fn evict(&mut self, order: EvictOrder) {
        let work = Arc::clone(&self.work);
        match self.held {
            // Its vCPUs wait for this, as a fault that waits for room does.
            Some(_) => work.hurried(|| self.evict_in_turn(order)),
            None => self.evict_in_turn(order),
        }
    }

    fn evict_in_turn(&mut self, order: EvictOrder) {
        let until = self.started + order.until;
        // A check that took as long as it holds leaves no time to ask in.
        let turn = match Instant::now() < until {
            true => self.work.reclaim.step(Some(until)),
            false => Turn::Granted,
        };
        if turn != Turn::Granted {
            // Not before this thread may run is the next check of use.
            let turn = self.work.reclaim.step(None);
            tracing::trace!(?turn, "a pass of reclaim was held back");
            self.decisions.passed(&held_back());
            return;
        }
        let pass = self.pass(order);
        self.decisions.passed(&pass);
        if let Some(stop) = &pass.stopped {
            self.suspend(stop.to_string());
        }
        self.vm.look_at_store();
        self.done.add(pass);
    }

    fn pass(&mut self, order: EvictOrder) -> Reclaimed {
        let (vm, started) = (Arc::clone(&self.vm), self.started);
        let clock = || started.elapsed();
        let (until, work) = (started + order.until, Arc::clone(&self.work));
        let direct = Arc::clone(&self.direct);
        let share = order.pages / (order.helpers + 1);
        std::thread::scope(|scope| {
            let help = || match work.helper() {
                Some(turns) => help(&direct, share, &Paced::until(until, &turns, &vm.limit)),
                None => 0,
            };
            let named = |number| std::thread::Builder::new().name(format!("pt-evict-{number}"));
            // A helper thread that cannot be started costs nothing but its help.
            let running: Vec<_> = (0..order.helpers)
                .filter_map(|number| named(number).spawn_scoped(scope, help).ok())
                .collect();
            let own = order.pages - share * running.len() as u64;
            let pace = Paced::until(until, &work.reclaim, &vm.limit);
            let EvictOrder { reach, need, .. } = order;
            let mut done = self.reclaimer.reclaim(clock, own, reach, need, &pace);
            // Not held while this thread waits for the others.
            work.reclaim.end();
            // Idle sections remain: those in use, or protected, must not be evicted in their place.
            done.has_more |= pace.was_held() || (pace.ran_out() && done.evicted_pages > 0);
            let has_own = done.evicted_pages >= own;
            for helper in running {
                done.evicted_pages += helper.join().unwrap_or_else(|_| {
                    tracing::error!("a thread that evicts has panicked");
                    0
                });
            }
            // A helper may have found nothing while the reclaimer still has pages beyond its own share.
            done.has_more |= has_own && done.evicted_pages < order.pages;
            done
        })
    }

    /// Answers the request at hand, if there is one, with what was done for it.
    fn answer(&mut self) {
        let done = std::mem::take(&mut self.done);
        let Some(request) = self.request.take() else {
            return;
        };
        let is_short = done.evicted_pages < request.pages;
        let stayed = is_short.then(|| self.reclaimer.stayed());
        if stayed.is_none() {
            self.reclaimer.end_account();
        }
        self.tell(&request, done, stayed);
    }

    fn tell(&self, request: &ReclaimRequest, done: Reclaimed, stayed: Option<Stayed>) {
        self.vm.counters.sync();
        if request.done.send(Answer { done, stayed }).is_err() {
            tracing::debug!(vm = self.vm.name, "the caller of a reclaim has left");
        }
    }

    fn refuse_requests(&mut self) {
        self.done = Reclaimed::default();
        while let Some(request) = self.request.take().or_else(|| self.vm.requests.pop()) {
            self.reclaimer.end_account();
            self.tell(&request, Reclaimed::default(), None);
        }
    }
}

/// The report of a pass that got no CPU time.
fn held_back() -> Reclaimed {
    Reclaimed {
        has_more: true,
        ..Reclaimed::default()
    }
}

/// Evicts up to `pages` from prepared sections, beside the reclaimer; returns how many were evicted.
fn help(direct: &DirectReclaim, pages: u64, pace: &impl Pace) -> u64 {
    let mut evicted = 0;
    while evicted < pages && pace.go_on() {
        match direct.take_some((pages - evicted).min(SECTION_PAGES), pace) {
            0 => break,
            some => evicted += some,
        }
    }
    evicted
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
