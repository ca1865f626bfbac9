// SPDX-License-Identifier: Apache-2.0
//! [`Vm`]: one VM under Pagetide, assembled from the other crates.
//!
//! ```text
//!   FaultReader ─ VmSink ─┐                          ┌─ VmPlace (memfd, userfaultfd)
//!   FaultService ─ Tenant ┴─► AddressSpace ──────────┼─ PoolStore (pool file)
//!                                  │ admission       └─ VcpuMmu, DmaMmu (who may touch what)
//!                                Limit ◄── Rounds (tracker, reclaimer, hazards)
//! ```
//! An attach or a recovery from a pool creates a [`Vm`]; both end in [`Vm::start`].

use super::{
    core::{DetachNews, Orders, ReclaimOrder, VmCore, lock},
    hotplug::{self, Hotplug},
    identity::Identity,
    janitor::JanitorBell,
    life::{Detaching, Life, Stage},
    rounds::Rounds,
    sink::{VmIncidents, VmSink},
    space::VmSpace,
    tracker::{TrackerAdapter, Way},
};
use crate::{
    control::{ControlError, ErrorKind, VmState},
    protection::{
        ProtectorChoice,
        feed::Feed,
        vm::{VmHandles, VmProtection},
    },
};
use pagetide_gmem::{Incidents, MemoryParts, PageTable, PagedMemory};
use pagetide_swap::{
    DirectReclaim, Evictor, HeatCost, Limit, Pool, PoolStore, PoolWords, Reclaimer, Room,
    reclaim::Took,
};
use pagetide_sys::uffd::Userfaultfd;
use pagetide_vmm::{
    layout::{LiveLayout, RamLayout},
    place::{VcpuMmu, VmPlace},
    process::VmmProcess,
    reader::{FaultReader, ReaderConfig, ReaderPlacement},
    takeover,
};
use pagetide_vpri::{DmaMmu, FaultService, IoSpaces, Latencies};
use std::{
    sync::{Arc, Mutex, Weak, atomic::Ordering::Relaxed, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// How long a process may take to end after the first sign of its end: its memory is freed first, which
/// takes a while for a large VMM.
pub(super) const ENDING_WAIT: Duration = Duration::from_secs(2);

/// What all VMs of the daemon share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) service: Arc<FaultService>,
    pub(super) spaces: Arc<dyn IoSpaces>,
    pub(super) janitor: JanitorBell,
    pub(super) reader_poll_us: u64,
    /// Most pages that are read ahead with a vCPU's fault (see `pagetide bench fault`).
    pub(super) neighbours_max: u32,
    /// Feeds policies with records of DMA accesses.
    pub(super) feed: Arc<Feed>,
    /// The initial policy of a VM.
    pub(super) protector: ProtectorChoice,
    /// What the memory cgroup leaves for pools.
    pub(super) room: Arc<Room>,
    /// How a VM's heat is measured.
    pub(super) tracker: Way,
    /// Most threads that evict from a VM beside its reclaim thread.
    pub(super) evict_helpers: u64,
    /// How much heat tracking may cost.
    pub(super) heat_cost: HeatCost,
}

/// A VM with its threads.
pub(super) struct Vm {
    pub(super) core: Arc<VmCore>,
    /// How far its end has come, and which thread owns it.
    pub(super) life: Life,
    threads: Mutex<Threads>,
}

#[derive(Default)]
struct Threads {
    reader: Option<FaultReader>,
    rounds: Option<JoinHandle<Rounds>>,
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
    pub(super) store: Arc<PoolStore>,
    pub(super) table: PageTable,
    pub(super) mmu: Arc<DmaMmu>,
    pub(super) userfaultfd: Arc<Userfaultfd>,
}

pub(super) fn failed(error: impl std::fmt::Display) -> ControlError {
    ControlError::failed(error.to_string())
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
        let table = take_table(&mut prepared);
        let parts = space_parts(&prepared, &limit, &incidents, table, shared.neighbours_max);
        let vcpus = vcpus_of(&prepared)?;
        let dpu = Arc::clone(&prepared.mmu);
        let layout = prepared.layout.now();
        let whole = VmSpace::new(PagedMemory::new(parts), [Arc::new(vcpus), dpu], &layout)?;
        for file in layout.files() {
            hotplug::fill_wired(&whole.space, &prepared.mmu, file.pages());
        }
        // From now on a successor recovers the VM.
        prepared.pool.set_attached();
        let (space, memory) = (Arc::clone(&whole.space), Arc::clone(&whole.memory));
        let tracker = tracker_of(&prepared, shared)?;
        let tenant = shared
            .service
            .add_tenant(Arc::clone(&space), Arc::clone(&prepared.mmu))
            .map_err(failed)?;
        let limbs = VmHandles {
            space: Arc::clone(&space),
            limit: Arc::clone(&limit),
            tenant: Arc::clone(&tenant),
        };
        let core = Arc::new(VmCore {
            protection: protection(shared, Arc::clone(&prepared.mmu), &layout, limbs),
            tracker: shared.tracker,
            name: identity.name.clone(),
            identity,
            vmm: prepared.vmm,
            layout: prepared.layout,
            pool: prepared.pool,
            store: prepared.store,
            space,
            memory,
            whole,
            limit,
            mmu: prepared.mmu,
            spaces: Arc::clone(&shared.spaces),
            tenant,
            latencies: Arc::new(Latencies::new()),
            incidents,
            heat: Mutex::default(),
            suspended: Mutex::default(),
            detach: DetachNews::default(),
            synced: Mutex::default(),
            bars: Mutex::default(),
            warnings: Mutex::default(),
            orders: Orders::default(),
            userfaultfd: prepared.userfaultfd,
            server_cpus: Arc::default(),
        });
        let vm = Self {
            core,
            life: Life::new(),
            threads: Mutex::default(),
        };
        if let Err(error) = vm.start_threads(tracker, shared) {
            shared.service.remove_tenant(&vm.core.tenant);
            vm.core.limit.stop();
            return Err(error);
        }
        shared.feed.add(&vm.core.name, &vm.core.protection);
        Ok(vm)
    }

    fn start_threads(&self, tracker: TrackerAdapter, shared: &Shared) -> Result<(), ControlError> {
        let core = &self.core;
        let sink = VmSink {
            vmm: core.identity.process(),
            space: Arc::clone(&core.space),
            pool: Arc::clone(&core.pool),
            latencies: Arc::clone(&core.latencies),
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
        let (userfaultfd, layout) = (Arc::clone(&core.userfaultfd), Arc::clone(&core.layout));
        let (sink, cpus) = (Arc::new(sink), &core.server_cpus);
        let reader = FaultReader::start(&core.vmm, userfaultfd, layout, sink, config, cpus)
            .map_err(failed)?;
        let evictor = Evictor::new(Arc::clone(&core.memory), Arc::clone(&core.store));
        let looks = Arc::new(tracker);
        let limit = Arc::clone(&core.limit);
        let mut reclaimer = Reclaimer::new(evictor, limit, looks, shared.heat_cost);
        reclaimer.spare(Arc::clone(core.protection.protected()));
        let protection = Arc::clone(&core.protection);
        reclaimer.tell(move |section, took| {
            if took == Took::Whole {
                protection.evicted(section);
            }
        });
        let hotplug = Hotplug::new(Arc::clone(core), shared);
        let started = Instant::now();
        let direct = Arc::new(reclaimer.direct(move || started.elapsed()));
        let weak: Weak<DirectReclaim> = Arc::downgrade(&direct);
        core.limit.make_room_by(weak);
        let helping = (Arc::clone(&direct), shared.evict_helpers);
        let rounds = Rounds::new(Arc::clone(core), reclaimer, helping, hotplug, started);
        let thread = self.start_rounds(rounds)?;
        *lock(&self.threads) = Threads {
            reader: Some(reader),
            rounds: Some(thread),
            direct: Some(direct),
        };
        Ok(())
    }

    fn start_rounds(&self, rounds: Rounds) -> Result<JoinHandle<Rounds>, ControlError> {
        let name = format!("pt-rounds-{}", self.core.vmm.pid());
        let thread = std::thread::Builder::new().name(name);
        thread.spawn(move || rounds.run()).map_err(failed)
    }

    /// The state of the VM.
    pub(super) fn state(&self) -> VmState {
        if self.core.incidents.stopped().is_some() {
            return VmState::Stopped;
        }
        match self.life.stage() {
            Stage::Served if self.core.may_evict() => VmState::Attached,
            Stage::Served => VmState::ServingOnly,
            Stage::Leaving(_) | Stage::Dropping | Stage::Over(_) => VmState::Detaching,
        }
    }

    /// Sets the limit and stores it in the pool.
    pub(super) fn set_limit(&self, limit_bytes: Option<u64>) {
        self.core.pool.set_limit_bytes(limit_bytes);
        self.core.enforce_limit();
        self.core.limit.want_reclaim();
    }

    /// Evicts up to `pages` now; returns how many were evicted, and why not more.
    pub(super) fn reclaim(&self, pages: u64) -> (u64, Option<String>) {
        let (done, answer) = mpsc::channel();
        self.core.orders.push(ReclaimOrder { pages, done });
        self.core.limit.want_reclaim();
        match answer.recv() {
            Ok(reclaimed) => {
                let bars = self.core.bars().into_iter().next();
                let stopped = reclaimed.stopped.map(|stop| stop.to_string());
                let in_use = || "the rest is in use".to_owned();
                let short = reclaimed.evicted_pages < pages;
                (
                    reclaimed.evicted_pages,
                    short.then(|| bars.or(stopped).unwrap_or_else(in_use)),
                )
            }
            Err(_) => (0, Some("the VM is being detached".to_owned())),
        }
    }

    /// Stops the reclaim thread; `None` if none is running.
    fn stop_rounds(&self) -> Option<Rounds> {
        self.core.limit.stop();
        let thread = lock(&self.threads).rounds.take()?;
        let rounds = thread.join();
        // No thread opens it any more, and no fill makes room since the limit was stopped.
        self.core.limit.reserve().shut();
        match rounds {
            Ok(rounds) => Some(rounds),
            Err(_) => {
                tracing::error!(vm = self.core.name, "the rounds ended by a panic");
                None
            }
        }
    }

    /// The VM stays attached, without eviction unless the detach was stopped; its RAM must still be
    /// followed.
    fn stay(&self, rounds: Option<Rounds>, why: &ControlError) {
        // A detach that was stopped is no sign of trouble: the state is as before.
        if !self.core.detach.stop.swap(false, Relaxed) {
            self.core.detach.failed.store(true, Relaxed);
            self.core.suspend(why.message.clone());
        }
        if let Some(rounds) = rounds {
            self.core.limit.go_on();
            self.core.orders.open();
            match self.start_rounds(rounds) {
                Ok(thread) => lock(&self.threads).rounds = Some(thread),
                Err(error) => {
                    self.core.orders.close();
                    tracing::error!(vm = self.core.name, %error, "no thread follows the VM's RAM any more");
                }
            }
        }
    }

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
        let rounds = self.stop_rounds();
        self.core.limit.put_right(None, 0);
        let filled = self.fill_all(shared);
        let (filled, ram) = filled.map_err(|error| self.failed_detach(rounds, error, detaching))?;
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
        shared.service.remove_tenant(&core.tenant);
        shared.feed.remove(&core.protection);
        let gone = takeover::let_go(&core.vmm, ram, &core.userfaultfd, number);
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
        rounds: Option<Rounds>,
        error: ControlError,
        detaching: &Detaching<'_>,
    ) -> ControlError {
        // A refusal by a rule has nothing to do with the process.
        if error.kind == ErrorKind::Failed && self.core.vmm.ends_within(ENDING_WAIT) {
            detaching.vmm_ended();
        } else {
            // Done before another thread may end the VM: after that nothing is started for it.
            self.stay(rounds, &error);
        }
        error
    }

    /// Frees everything kept for the VM: threads, page requests, domains, the pool. Called once, by the
    /// owner of the VM's end (see [`Life`]).
    pub(super) fn give_back(&self, shared: &Shared) {
        let core = &self.core;
        drop(self.stop_rounds());
        shared.service.remove_tenant(&core.tenant);
        shared.feed.remove(&core.protection);
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
        core.sync_counters();
        if let Err(error) = core.pool.remove() {
            tracing::warn!(vm = core.name, %error, "cannot remove the pool of a VM that has ended; the next start removes it");
        }
    }

    /// Devices own the RAM again, and page requests that wait are answered.
    fn free_domains(&self, shared: &Shared) {
        let domains = self.core.mmu.domains();
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

/// The protection of a VM's memory, by the initial policy.
fn protection(
    shared: &Shared,
    mmu: Arc<DmaMmu>,
    layout: &RamLayout,
    limbs: VmHandles,
) -> Arc<VmProtection> {
    let ram = layout.files().iter().map(|file| file.pages()).collect();
    let choice = &shared.protector.0;
    Arc::new(VmProtection::new(choice, mmu, ram, Some(limbs)))
}

fn tracker_of(prepared: &Prepared, shared: &Shared) -> Result<TrackerAdapter, ControlError> {
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
        store: Arc::clone(&prepared.store) as _,
        admission: Arc::clone(limit) as _,
        incidents: Arc::clone(incidents) as Arc<dyn Incidents>,
        neighbours_max,
    }
}
