// SPDX-License-Identifier: Apache-2.0
//! [`Vm`]: one VM under Pagetide, assembled from the other crates.
//!
//! ```text
//!   FaultReader ─ VmSink ─┐                          ┌─ VmPlace (memfd, userfaultfd)
//!   FaultService ─ Tenant ┴─► AddressSpace ──────────┼─ PoolStore (pool file)
//!                                  │ admission       └─ VcpuMmu, DmaMmu (who may touch what)
//!                                Limit ◄── ReclaimThread (tracker, reclaimer, hazards)
//! ```
//! An attach or a recovery from a pool creates a [`Vm`]; both end in [`Vm::start`].

use super::{
    blockers::EvictionGate,
    budget::VmSeat,
    core::{DetachNews, VmCore, VmDma, VmFaults, VmHeat},
    counters::PoolCounters,
    failure::failed,
    holds::Holds,
    hotplug::{self, Hotplug},
    identity::Identity,
    life::{Life, Stage},
    lock::lock,
    reclaim_requests::{Answer, ReclaimRequest, ReclaimRequests},
    reclaim_thread::{ReclaimParts, ReclaimThread},
    regrant::Regrant,
    shared::Shared,
    sink::{VmIncidents, VmSink},
    space::VmSpace,
    work::VmWork,
};
use crate::{
    control::{ControlError, StayedReport, VmState},
    protection::vm::VmProtection,
};
use pagetide_gmem::{Incidents, MemoryParts, PageTable, PagedMemory};
use pagetide_policy::{budget::VmShare, scheduler::TooManyTasks, tracker::AccessTracker};
use pagetide_swap::{
    ChainStore, DirectReclaim, Evictor, Limit, Pool, PoolWords, Reclaimer, Sinker, reclaim::Took,
};
use pagetide_sys::uffd::Userfaultfd;
use pagetide_vmm::{
    layout::{LiveLayout, RamLayout},
    place::{VcpuMmu, VmPlace},
    process::VmmProcess,
    reader::{FaultReader, ReaderConfig, ReaderPlacement},
};
use pagetide_vpri::{DmaMmu, Latencies, Tenant};
use std::{
    sync::{Arc, Mutex, Weak, mpsc},
    thread::JoinHandle,
    time::Instant,
};

/// What became of a wish to evict.
#[derive(Default)]
pub(super) struct WishDone {
    pub(super) evicted_pages: u64,
    pub(super) shortfall: Option<String>,
    pub(super) stayed: Option<StayedReport>,
}

/// A VM with its threads.
pub(super) struct Vm {
    pub(super) core: Arc<VmCore>,
    /// How far its end has come, and which thread owns it.
    pub(super) life: Life,
    pub(super) threads: Mutex<Threads>,
}

#[derive(Default)]
pub(super) struct Threads {
    reader: Option<FaultReader>,
    pub(super) reclaim: Option<JoinHandle<ReclaimThread>>,
    /// Until present pages are granted, after a recovery.
    regrant: Option<Regrant>,
    /// Direct reclaim by fills that need room: the limit holds it only weakly.
    direct: Option<Arc<DirectReclaim>>,
}

/// Result of an attach or a recovery, for [`Vm::start`]. Existing words are correct, all bits of the
/// domains are cleared, and their requests are held.
pub(super) struct Prepared {
    pub(super) identity: Identity,
    pub(super) vmm: VmmProcess,
    pub(super) layout: Arc<LiveLayout>,
    pub(super) pool: Arc<Pool>,
    pub(super) chain: Arc<ChainStore>,
    pub(super) table: PageTable,
    pub(super) mmu: Arc<DmaMmu>,
    pub(super) userfaultfd: Arc<Userfaultfd>,
    /// Its place under the host's budget.
    pub(super) seat: Arc<VmSeat>,
}

/// A table over the words of a pool, without any region.
pub(super) fn empty_table_of(words: PoolWords) -> PageTable {
    PageTable::growing(Box::new(words))
}

fn vcpus_of(prepared: &Prepared) -> Result<VcpuMmu, ControlError> {
    let (watch, layout) = (&prepared.userfaultfd, &prepared.layout);
    VcpuMmu::new(Arc::clone(watch), Arc::clone(layout))
        .seeing(prepared.vmm.pid())
        .map_err(failed)
}

fn take_table(prepared: &mut Prepared) -> PageTable {
    let none = empty_table_of(PoolWords::of(Arc::clone(&prepared.pool)));
    std::mem::replace(&mut prepared.table, none)
}

impl Vm {
    /// Starts a prepared VM.
    ///
    /// # Errors
    /// An error message; the caller must undo what it prepared.
    pub(super) fn start(mut prepared: Prepared, shared: &Shared) -> Result<Self, ControlError> {
        let identity = prepared.identity.clone();
        let incidents = Arc::new(VmIncidents::new(
            &identity.name,
            prepared.vmm.try_clone().map_err(failed)?,
        ));
        let limit = Arc::new(Limit::new());
        limit.share_host(Arc::clone(&prepared.seat) as _);
        let table = take_table(&mut prepared);
        let parts = space_parts(&prepared, &limit, &incidents, table, shared.neighbours_max);
        let vcpus = vcpus_of(&prepared)?;
        let dpu = Arc::clone(&prepared.mmu);
        let layout = prepared.layout.now();
        let space = VmSpace::new(PagedMemory::new(parts), [Arc::new(vcpus), dpu], &layout)?;
        for file in layout.files() {
            hotplug::fill_wired(&space.space, &prepared.mmu, file.pages());
        }
        // From now on a successor recovers the VM.
        prepared.pool.set_attached();
        let tracker = tracker_of(&prepared, shared)?;
        let tenant = shared
            .service
            .add_tenant(Arc::clone(&space.space), Arc::clone(&prepared.mmu))
            .map_err(failed)?;
        let pool = prepared.pool;
        let core = Arc::new(VmCore {
            protection: protection(shared, Arc::clone(&prepared.mmu), &layout, &tenant),
            name: identity.name.clone(),
            identity,
            vmm: prepared.vmm,
            layout: prepared.layout,
            pool: Arc::clone(&pool),
            store: Arc::clone(prepared.chain.pool()),
            slow: prepared.chain.slow().map(Arc::clone),
            holds: Holds::default(),
            counters: PoolCounters::new(&pool, &space.memory, &limit, &tenant),
            space,
            limit,
            seat: prepared.seat,
            dma: VmDma {
                mmu: prepared.mmu,
                spaces: Arc::clone(&shared.spaces),
                tenant,
            },
            faults: VmFaults {
                userfaultfd: prepared.userfaultfd,
                server_cpus: Arc::default(),
                latencies: Arc::new(Latencies::new()),
                incidents,
            },
            heat: VmHeat::new(shared.tracker),
            gate: EvictionGate::default(),
            detach: DetachNews::default(),
            requests: ReclaimRequests::default(),
        });
        let vm = Self {
            core,
            life: Life::new(),
            threads: Mutex::default(),
        };
        if let Err(error) = vm.start_threads(tracker, shared) {
            shared.service.remove_tenant(&vm.core.dma.tenant);
            vm.core.limit.stop();
            return Err(error);
        }
        shared.feed.add(&vm.core.name, &vm.core.protection);
        Ok(vm)
    }

    fn start_threads(
        &self,
        tracker: Arc<dyn AccessTracker>,
        shared: &Shared,
    ) -> Result<(), ControlError> {
        let core = &self.core;
        let sink = VmSink {
            vmm: core.identity.process(),
            space: Arc::clone(&core.space.space),
            limit: Arc::clone(&core.limit),
            pool: Arc::clone(&core.pool),
            latencies: Arc::clone(&core.faults.latencies),
            janitor: shared.janitor.clone(),
        };
        let config = ReaderConfig {
            // A polling reader would keep a vCPU off the vCPU's own CPU.
            placement: if shared.reader_poll_us > 0 {
                ReaderPlacement::Anywhere
            } else {
                ReaderPlacement::FollowFaults
            },
            poll_us: shared.reader_poll_us,
            ..ReaderConfig::default()
        };
        let userfaultfd = Arc::clone(&core.faults.userfaultfd);
        let layout = Arc::clone(&core.layout);
        let cpus = &core.faults.server_cpus;
        let sink = Arc::new(sink);
        let reader = FaultReader::start(&core.vmm, userfaultfd, layout, sink, config, cpus)
            .map_err(failed)?;
        let evictor = Evictor::new(Arc::clone(&core.space.memory), Arc::clone(&core.store));
        let limit = Arc::clone(&core.limit);
        let mut reclaimer = Reclaimer::new(evictor, limit, tracker, shared.heat_cost);
        reclaimer.set_times(shared.set_times);
        core.limit.faulted().set(shared.together);
        reclaimer.spare(Arc::clone(core.protection.protected()));
        let protection = Arc::clone(&core.protection);
        reclaimer.tell(move |section, took| {
            if took == Took::Whole {
                protection.evicted(section);
            }
        });
        let hotplug = Hotplug::new(Arc::clone(core), shared);
        let started = Instant::now();
        if shared.tiers.uses_zstd() {
            reclaimer.demote_after(shared.demote_after, started.elapsed());
        }
        if let Some(slow) = &core.slow {
            let (memory, store) = (Arc::clone(&core.space.memory), Arc::clone(&core.store));
            let sinker = Sinker::new(memory, store, Arc::clone(slow));
            reclaimer.sink_after(sinker, shared.sink_after, started.elapsed());
        }
        let direct = Arc::new(reclaimer.direct(move || started.elapsed()));
        let weak: Weak<DirectReclaim> = Arc::downgrade(&direct);
        core.limit.make_room_by(weak);
        let parts = ReclaimParts {
            reclaimer,
            direct: Arc::clone(&direct),
            helpers: shared.evict_helpers,
            work: VmWork::new(&shared.scheduler, &core.limit).map_err(too_many)?,
            started,
        };
        let reclaim = ReclaimThread::new(Arc::clone(core), hotplug, parts);
        let thread = self.start_reclaim_thread(reclaim)?;
        *lock(&self.threads) = Threads {
            reader: Some(reader),
            reclaim: Some(thread),
            regrant: None,
            direct: Some(direct),
        };
        Ok(())
    }

    pub(super) fn start_reclaim_thread(
        &self,
        reclaim: ReclaimThread,
    ) -> Result<JoinHandle<ReclaimThread>, ControlError> {
        let name = format!("pt-rounds-{}", self.core.vmm.pid());
        let thread = std::thread::Builder::new().name(name);
        thread.spawn(move || reclaim.run()).map_err(failed)
    }

    /// The state of the VM.
    pub(super) fn state(&self) -> VmState {
        if self.core.faults.incidents.stopped().is_some() {
            return VmState::Stopped;
        }
        match self.life.stage() {
            Stage::Served if self.core.may_evict() && self.core.store.full().is_none() => {
                VmState::Attached
            }
            Stage::Served => VmState::ServingOnly,
            Stage::Leaving(_) | Stage::Dropping | Stage::Over(_) => VmState::Detaching,
        }
    }

    /// Its ceiling is its limit, which is stored in the pool; by its weight it shares the cap of the pools.
    pub(super) fn set_share(&self, share: &VmShare) {
        put_into(&self.core.pool, share);
        self.core.enforce_limit();
        self.core.limit.want_reclaim();
    }

    /// Evicts up to `pages` now; tells how many were evicted, why not more, and what stayed.
    pub(super) fn reclaim(&self, pages: u64) -> WishDone {
        let (done, answer) = mpsc::channel();
        self.core.requests.push(ReclaimRequest { pages, done });
        self.core.limit.want_reclaim();
        let Ok(Answer { done, stayed }) = answer.recv() else {
            return WishDone {
                shortfall: Some("the VM is being detached".to_owned()),
                ..WishDone::default()
            };
        };
        let blocker = self.core.gate.blockers().into_iter().next();
        let mut stayed = stayed.map(|stayed| StayedReport::from(&stayed));
        if let (Some(_), Some(stayed)) = (&blocker, &mut stayed) {
            stayed.blocked_pages = std::mem::take(&mut stayed.untried_pages);
        }
        let stopped = done.stopped.map(|stop| stop.to_string());
        let full = || {
            let store = &self.core.store;
            let why = store.full().or_else(|| store.turned_away(Instant::now()));
            why.map(|why| why.to_string())
        };
        let in_use = || "the rest is in use".to_owned();
        let why = || {
            let blocker = blocker.map(|blocker| blocker.to_string());
            blocker.or(stopped).or_else(full).unwrap_or_else(in_use)
        };
        WishDone {
            evicted_pages: done.evicted_pages,
            shortfall: (done.evicted_pages < pages).then(why),
            stayed,
        }
    }

    /// Grants what is present to all devices, beside everything else: they have none of it after a recovery.
    pub(super) fn grant_present(&self) -> Result<(), ControlError> {
        let regrant = Regrant::start(&self.core)?;
        lock(&self.threads).regrant = Some(regrant);
        Ok(())
    }

    /// Stops the reclaim thread, and with it other background work; `None` if none is running.
    pub(super) fn stop_reclaim_thread(&self) -> Option<ReclaimThread> {
        let regrant = lock(&self.threads).regrant.take();
        if let Some(regrant) = regrant {
            regrant.end();
        }
        self.core.limit.stop();
        let thread = lock(&self.threads).reclaim.take()?;
        let reclaim = thread.join();
        // No thread opens it any more, and no fill makes room since the limit was stopped.
        self.core.limit.reserve().shut();
        match reclaim {
            Ok(reclaim) => Some(reclaim),
            Err(_) => {
                tracing::error!(vm = self.core.name, "the reclaim thread has panicked");
                None
            }
        }
    }

    /// Frees everything kept for the VM: threads, page requests, domains, the pool. Called once, by the
    /// owner of the VM's end (see [`Life`]).
    pub(super) fn give_back(&self, shared: &Shared) {
        let core = &self.core;
        drop(self.stop_reclaim_thread());
        shared.service.remove_tenant(&core.dma.tenant);
        shared.feed.remove(&core.protection);
        // What a slow tier still owes would keep page requests waiting, and with them this VM.
        core.space.memory.end_waiting();
        self.free_domains(shared);
        // Its thread is joined without a lock held: reports go on meanwhile.
        let (reader, direct) = {
            let mut threads = lock(&self.threads);
            (threads.reader.take(), threads.direct.take())
        };
        drop((reader, direct));
        // A holder of this VM, for a moment longer, must not keep the next daemon off the RAM.
        for file in core.layout.now().files() {
            file.file().unmap();
        }
        core.counters.sync();
        shared.budget.leave(&core.name);
        if let Err(error) = core.pool.remove() {
            tracing::warn!(vm = core.name, %error, "cannot remove the pool of a VM that has ended; the next start removes it");
        }
        // After the pool: what a pool names is there.
        if let Some(slow) = &core.slow {
            slow.end();
        }
    }

    /// Devices own the RAM again, and page requests that wait are answered.
    pub(super) fn free_domains(&self, shared: &Shared) {
        let domains = self.core.dma.mmu.domains();
        for domain in &domains {
            domain.detach();
        }
        shared.service.release(&domains);
    }

    /// Faults that other threads than the reader served.
    pub(super) fn handed_on_faults(&self) -> u64 {
        lock(&self.threads)
            .reader
            .as_ref()
            .map_or(0, FaultReader::handed_on)
    }

    /// CPU time of the fault reader so far.
    pub(super) fn reader_cpu_seconds(&self) -> f64 {
        lock(&self.threads)
            .reader
            .as_ref()
            .map_or(0.0, FaultReader::cpu_seconds)
    }
}

/// Hands a VM's share on to its pool.
pub(super) fn put_into(pool: &Pool, share: &VmShare) {
    pool.set_limit_bytes(share.ceiling.map(|bytes| bytes.0));
    pool.set_weight(share.weight.get());
}

fn too_many(error: TooManyTasks) -> ControlError {
    ControlError::refused(error.to_string())
}

/// The protection of a VM's memory, by the initial policy.
fn protection(
    shared: &Shared,
    mmu: Arc<DmaMmu>,
    layout: &RamLayout,
    tenant: &Arc<Tenant>,
) -> Arc<VmProtection> {
    let ram = layout.files().iter().map(|file| file.pages()).collect();
    let choice = &shared.protector.0;
    let protection = VmProtection::new(choice, mmu, ram, Some(Arc::clone(tenant)));
    Arc::new(protection.beside(shared.set_times))
}

fn tracker_of(
    prepared: &Prepared,
    shared: &Shared,
) -> Result<Arc<dyn AccessTracker>, ControlError> {
    let layout = Arc::clone(&prepared.layout);
    let tracker = shared.tracker.tracker(&prepared.vmm, layout, &prepared.mmu);
    tracker.map_err(failed)
}

fn space_parts(
    prepared: &Prepared,
    limit: &Arc<Limit>,
    incidents: &Arc<VmIncidents>,
    table: PageTable,
    neighbours_max: u32,
) -> MemoryParts {
    let place = VmPlace::new(
        Arc::clone(&prepared.userfaultfd),
        Arc::clone(&prepared.layout),
    );
    MemoryParts {
        table,
        place: Arc::new(place),
        store: Arc::clone(&prepared.chain) as _,
        admission: Arc::clone(limit) as _,
        incidents: Arc::clone(incidents) as Arc<dyn Incidents>,
        neighbours_max,
    }
}
