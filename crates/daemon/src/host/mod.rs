// SPDX-License-Identifier: Apache-2.0
//! The composition: VMs, devices and recovery behind [`Control`].
//!
//! [`vm`] assembles one VM (its shared parts are [`core`]), [`attach`] creates it from a running VMM or
//! from the pool of a dead daemon, [`reclaim_thread`] keeps it within its limit, [`hotplug`] follows RAM
//! that is plugged and unplugged, [`detach`] releases it, [`devices`] holds the software DPU. [`budget`]
//! divides the host's memory among VMs. [`recovering`] deals with what a dead daemon left, [`waiting`] with
//! what counts of that before it is recovered. [`life`] decides which thread ends a VM, and [`janitor`]
//! notices when its VMM exits. Nothing below names the [`Host`] of this file, but for [`recovering`] and
//! [`pool_cap`], which are parts of it. Order at startup: wait for the rings of dead engines, count what is
//! there, then recover VMs, then let devices listen again. Nothing is thus replayed, evicted or completed
//! while a dead process still writes.

mod attach;
mod blockers;
mod bring_back;
mod budget;
mod claim;
mod core;
mod counters;
mod detach;
mod devices;
mod disk_tier;
#[cfg(test)]
mod earlier_tests;
mod failure;
mod handing_over;
mod holds;
mod hotplug;
mod identity;
mod janitor;
mod janitor_bell;
mod life;
mod lock;
mod needed;
mod pool_cap;
mod pools;
mod reclaim_requests;
mod reclaim_thread;
mod recovering;
mod regrant;
mod report;
mod room;
mod roster;
mod shared;
mod sink;
mod slow_tiers;
mod space;
mod tracker;
mod vm;
mod waiting;
mod work;

use self::{
    budget::Budget,
    devices::Devices,
    failure::failed,
    janitor::{Janitor, Watching},
    janitor_bell::JanitorBell,
    life::{Asked, Detaching, Stage},
    needed::Needed,
    pools::{name_of, pools, refuse_other_versions},
    roster::{Roster, Watched},
    shared::Shared,
    vm::Vm,
};
use crate::{
    budget::{BudgetBody, CeilingChange, HostReport, ShareChange},
    control::{
        AttachRequest, BlkRequest, Control, ControlError, DetachEnd, DetachReport, DeviceReport,
        NetRequest, ReclaimReport, VmReport,
    },
    dpu::{DeviceRequest, Owed},
    injection::{InjectionReport, InjectionRequest},
    pool::{KeptCap, NewCap, PoolReport},
    protection::{
        ProtectorChoice,
        feed::{Feed, FeedConfig},
        recording::{RecordingReport, RecordingRequest},
    },
    scheduler::{Schedule, ScheduleChange, ScheduleSettings, SchedulerReport},
    settings::RunSettings,
    slo::SloList,
    steps::Steps,
};
use pagetide_addr::PAGE_BYTES;
use pagetide_dpu::ParkedDevice;
use pagetide_swap::{Room, scheduled::Weakness};
use pagetide_vmm::process::VmmIdentity;
use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Most threads that evict from one VM.
const EVICT_THREADS_MAX: u64 = 16;
/// Attempts to detach a VM when the daemon ends, while clients keep starting detaches of their own.
const LAST_TRIES: u32 = 16;

/// The running system.
struct Host {
    state_dir: PathBuf,
    shared: Shared,
    pool_cap: KeptCap,
    schedule: Schedule,
    devices: Devices,
    vms: Roster,
}

/// How many threads evict from a VM beside its reclaim thread: the setting, or one for every four CPUs
/// beyond the first four.
fn evict_helpers(threads: u32) -> u64 {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let threads = match threads {
        0 => (cpus / 4).clamp(1, 4),
        given => u64::from(given).min(EVICT_THREADS_MAX),
    };
    threads - 1
}

/// Whether this program could start with these settings and recover what is there; changes nothing. What a start
/// measures of the host is measured here, while nobody waits for it.
///
/// # Errors
/// Why not.
pub(crate) fn examine(settings: &RunSettings) -> Result<(), ControlError> {
    refuse_other_versions(&settings.state_dir)?;
    slow_tiers::examine(settings)?;
    devices::examine(settings)?;
    let _known_from_now_on = (tracker::refault(), Weakness::of_this_process());
    Ok(())
}

/// What a predecessor has handed over, instead of dying.
#[derive(Default)]
pub(crate) struct HandedOver {
    /// VMs that must be served again.
    pub(crate) vms: Vec<String>,
    /// Devices with their connections.
    pub(crate) devices: Vec<ParkedDevice>,
}

/// Starts the running system and recovers what a predecessor left.
pub fn start_control(settings: &RunSettings) -> Result<Arc<dyn Control>, ControlError> {
    start_with(settings, None, Owed::AsAfterDeath)
}

/// The same with what a predecessor has handed over, if one has.
pub(crate) fn start_with(
    settings: &RunSettings,
    handed: Option<HandedOver>,
    owed: Owed,
) -> Result<Arc<dyn Control>, ControlError> {
    let mut steps = Steps::begin();
    pagetide_sys::membarrier::register().map_err(failed)?;
    let state_dir = settings.state_dir.clone();
    refuse_other_versions(&state_dir)?;
    let pool_cap = KeptCap::open(&state_dir, settings.pool_max);
    let schedule = Schedule::start(ScheduleSettings::of_run(settings), &state_dir)?;
    let found = pools(&state_dir)?;
    let needed = match &handed {
        Some(_) => Needed::BySomebody,
        None => Needed::of_what_is_left(settings, &found),
    };
    let known: Vec<_> = found.iter().map(|path| name_of(path)).collect();
    steps.done("settings");
    let budget = Budget::open(settings, &state_dir, &known, needed, owed)?;
    steps.done("budget");
    let (devices, spaces) = Devices::start(settings, owed)?;
    steps.done("engines");
    let feed = FeedConfig {
        rate: settings.access_log_rate,
    };
    let feed = Arc::new(Feed::start(Arc::clone(devices.log()), &feed)?);
    let (bell, rung) = JanitorBell::new()?;
    steps.done("feed");
    let slow = slow_tiers::open(settings, &pools(&state_dir)?, needed, owed)?;
    steps.done("slow tiers");
    let method = tracker::SampleMethod::choose(settings.tracker)?;
    let shared = Shared {
        service: Arc::clone(devices.service()),
        spaces,
        janitor: bell.clone(),
        reader_poll_us: u64::from(settings.reader_poll_us),
        neighbours_max: settings.neighbours,
        feed,
        protector: settings.dma_protector.clone(),
        room: Arc::new(Room::of_this_process()),
        pool_cap: Arc::clone(pool_cap.cap()),
        tracker: method,
        evict_helpers: evict_helpers(settings.evict_threads),
        heat_cost: tracker::heat_cost(method, settings.tracker_cost),
        set_times: settings.set_times,
        together: settings.swap_in_together.into(),
        tiers: settings.tiers.open(),
        demote_after: settings.demote_after.0,
        slow,
        sink_after: settings.sink_after.0,
        scheduler: Arc::clone(schedule.scheduler()),
        budget,
    };
    room::warn_if_smaller(&shared.room, &state_dir);
    // Before VMs are recovered, which may take a while: some are large, and some will wait.
    let expected = recovering::expect_all(&state_dir, &shared)?;
    shared.budget.start()?;
    steps.done("expected");
    let host = Arc::new(Host {
        state_dir,
        shared,
        pool_cap,
        schedule,
        devices,
        vms: Roster::new(bell),
    });
    host.take_up(expected, handed.unwrap_or_default(), owed, &mut steps)?;
    Janitor::new(rung).start(&host)?;
    steps.done("janitor");
    tracing::info!(us = %steps, "everything that was left is served");
    Ok(host)
}

impl Host {
    /// The VM is attached. Its fault reader may already have failed by now.
    fn put(&self, vm: Arc<Vm>) {
        if let Some(why) = self.vms.put(vm.core.name.clone(), Arc::clone(&vm)) {
            self.stop_unserved(&vm, &why);
        }
    }

    #[expect(clippy::unused_self, reason = "reads better where it is used")]
    fn stop_unserved(&self, vm: &Vm, why: &str) {
        if !vm.core.vmm.ends_within(Duration::ZERO) {
            vm.core.faults.incidents.stop_vm(format!(
                "its faults are not served any more ({why}); restart the daemon to recover it, then continue it (SIGCONT)"
            ));
        }
    }

    /// Detaches a VM whose end the caller owns.
    ///
    /// # Errors
    /// An error message; the VM is still served.
    fn let_go(&self, vm: &Vm, detaching: Detaching<'_>) -> Result<DetachReport, ControlError> {
        let begun = Instant::now();
        let before = vm.report();
        let name = &vm.core.name;
        let (filled_pages, end) = match vm.detach(&self.shared, &detaching) {
            Ok(filled_pages) => {
                self.vms.remove(name);
                (filled_pages, detaching.done())
            }
            Err(error) => {
                let Some(dropping) = detaching.failed() else {
                    return Err(error);
                };
                tracing::info!(vm = name, %error, "the VMM has ended during the detach; dropping the VM");
                vm.give_back(&self.shared);
                self.vms.remove(name);
                drop(dropping);
                (0, DetachEnd::VmmEnded)
            }
        };
        let after = vm.report();
        tracing::info!(vm = name, filled_pages, ?end, "detached");
        // Report what was stored before the detach: now everything is present.
        let report = VmReport {
            resident_bytes: after.resident_bytes,
            alias_faults: after.alias_faults,
            ..before
        };
        Ok(DetachReport {
            name: name.clone(),
            pid: vm.core.vmm.pid(),
            end,
            filled_pages,
            resident_bytes: report.resident_bytes,
            seconds: begun.elapsed().as_secs_f64(),
            vm: report,
        })
    }

    /// Detaches a VM when the daemon ends, even if another thread is detaching it.
    fn let_go_last(&self, vm: &Vm) -> Result<(), ControlError> {
        for _ in 0..LAST_TRIES {
            match vm.life.detach() {
                Asked::Yours(detaching) => return self.let_go(vm, detaching).map(drop),
                Asked::Over(_) => return Ok(()),
                // That detach runs to its end. If it fails, try once more from here.
                Asked::UnderWay => {
                    vm.life.wait_settled();
                }
            }
        }
        Err(failed(format!(
            "{} is being detached again and again",
            vm.core.name
        )))
    }
}

impl Watching for Host {
    fn watched(&self) -> Vec<Watched> {
        self.vms.watched()
    }

    /// A VMM has ended: drops everything kept for it, unless a detach does so.
    fn vmm_ended(&self, watched: &Watched) {
        match watched {
            Watched::Vm(vm) => {
                if let Some(dropping) = vm.life.vmm_ended() {
                    tracing::info!(
                        vm = vm.core.name,
                        pid = vm.core.vmm.pid(),
                        "the VMM has ended; dropping the VM"
                    );
                    vm.give_back(&self.shared);
                    self.vms.remove(&vm.core.name);
                    drop(dropping);
                }
            }
            Watched::Waiting(name, _) => {
                self.drop_waiting(name);
                self.vms.remove(name);
            }
        }
    }

    fn reader_failed(&self, vmm: VmmIdentity, why: &str) {
        if let Some(vm) = self.vms.reader_failed(vmm, why) {
            self.stop_unserved(&vm, why);
        }
    }
}

impl Control for Host {
    fn attach(&self, request: AttachRequest) -> Result<VmReport, ControlError> {
        crate::name::check_name(&request.name)?;
        self.vms.reserve(&request)?;
        match attach::attach(&request, &self.state_dir, &self.shared) {
            Ok(vm) => {
                let vm = Arc::new(vm);
                self.put(Arc::clone(&vm));
                Ok(vm.report())
            }
            Err(error) => {
                self.vms.remove(&request.name);
                Err(error)
            }
        }
    }

    fn vms(&self) -> Vec<VmReport> {
        self.vms.all().iter().map(|vm| vm.report()).collect()
    }

    fn vm(&self, name: &str) -> Result<VmReport, ControlError> {
        Ok(self.vms.get(name)?.report())
    }

    fn set_limit(&self, name: &str, limit_bytes: Option<u64>) -> Result<VmReport, ControlError> {
        let vm = self.vms.get(name)?;
        let change = ShareChange {
            ceiling_bytes: CeilingChange::to(limit_bytes),
            ..ShareChange::default()
        };
        self.change_share(&vm, &change)?;
        Ok(vm.report())
    }

    fn host(&self) -> Result<HostReport, ControlError> {
        Ok(self.shared.budget.report())
    }

    fn set_budget(&self, change: &BudgetBody) -> Result<HostReport, ControlError> {
        self.shared.budget.set(change)?;
        self.host()
    }

    fn lift_budget(&self) -> Result<HostReport, ControlError> {
        self.shared.budget.lift()?;
        self.host()
    }

    fn set_share(&self, name: &str, change: &ShareChange) -> Result<VmReport, ControlError> {
        let vm = self.vms.get(name)?;
        self.change_share(&vm, change)?;
        Ok(vm.report())
    }

    fn set_protector(&self, name: &str, choice: ProtectorChoice) -> Result<VmReport, ControlError> {
        let vm = self.vms.get(name)?;
        vm.core.protection.choose(&choice.0);
        self.shared.feed.look_again();
        Ok(vm.report())
    }

    fn reclaim(&self, name: &str, bytes: Option<u64>) -> Result<ReclaimReport, ControlError> {
        let vm = self.vms.get(name)?;
        let pages = bytes.map_or(u64::MAX, |bytes| bytes.div_ceil(PAGE_BYTES));
        let done = vm.reclaim(pages);
        let resident_bytes = vm.core.layout.look().allocated_bytes().map_err(failed)?;
        let mut stayed = done.stayed;
        if let Some(stayed) = &mut stayed {
            stayed.beside(resident_bytes / PAGE_BYTES);
        }
        let evicted = done.evicted_pages;
        Ok(ReclaimReport {
            name: name.to_owned(),
            asked_bytes: bytes,
            reclaimed_bytes: evicted * PAGE_BYTES,
            resident_bytes,
            shortfall: done.shortfall.filter(|_| bytes.is_some() || evicted == 0),
            stayed: stayed.filter(|stayed| stayed.pages > 0),
        })
    }

    fn pool(&self) -> Option<PoolReport> {
        Some(self.pool_report())
    }

    fn set_pool_cap(&self, cap: NewCap) -> Result<PoolReport, ControlError> {
        self.change_pool_cap(cap)
    }

    fn scheduler(&self) -> Result<SchedulerReport, ControlError> {
        Ok(self.schedule.report())
    }

    fn change_scheduler(&self, change: &ScheduleChange) -> Result<SchedulerReport, ControlError> {
        self.schedule.change(change)
    }

    fn reset_scheduler(&self) -> Result<SchedulerReport, ControlError> {
        self.schedule.reset()
    }

    fn detach(&self, name: &str) -> Result<DetachReport, ControlError> {
        let vm = self.vms.get(name)?;
        match vm.life.detach() {
            Asked::Yours(detaching) => self.let_go(&vm, detaching),
            Asked::UnderWay => Err(ControlError::refused(format!(
                "{name} is being detached already"
            ))),
            Asked::Over(DetachEnd::LetGo) => Err(ControlError::not_found(format!(
                "{name} was detached by another request just now"
            ))),
            Asked::Over(DetachEnd::VmmEnded) => {
                let report = vm.report();
                Ok(DetachReport {
                    name: name.to_owned(),
                    pid: report.pid,
                    end: DetachEnd::VmmEnded,
                    resident_bytes: report.resident_bytes,
                    vm: report,
                    ..DetachReport::default()
                })
            }
        }
    }

    fn stop_detach(&self, name: &str) -> Result<VmReport, ControlError> {
        let vm = self.vms.get(name)?;
        match vm.life.stage() {
            // A detach by the daemon's own shutdown cannot be stopped.
            Stage::Leaving(_) if !self.vms.is_closed() => {
                vm.core.detach.stop.store(true, Relaxed);
                Ok(vm.report())
            }
            Stage::Leaving(_) => Err(ControlError::refused(format!(
                "{name} is detached because the daemon ends, which is not stopped any more"
            ))),
            Stage::Served | Stage::Dropping | Stage::Over(_) => Err(ControlError::refused(
                format!("{name} is not being detached"),
            )),
        }
    }

    fn add_blk(&self, request: BlkRequest) -> Result<DeviceReport, ControlError> {
        let request = DeviceRequest::Blk(request);
        self.devices.add(request, &self.names_by_file())
    }

    fn add_net(&self, request: NetRequest) -> Result<DeviceReport, ControlError> {
        let request = DeviceRequest::Net(request);
        self.devices.add(request, &self.names_by_file())
    }

    fn devices(&self) -> Vec<DeviceReport> {
        self.devices.reports(&self.names_by_file())
    }

    fn set_weight(&self, socket: &Path, weight: u32) -> Result<DeviceReport, ControlError> {
        self.devices
            .set_weight(socket, weight, &self.names_by_file())
    }

    fn remove_device(&self, socket: &Path) -> Result<(), ControlError> {
        if let Some(device) = self.devices.remove(socket)? {
            self.shared.feed.device_left(device);
        }
        Ok(())
    }

    fn slo(&self, device: Option<&str>) -> Result<SloList, ControlError> {
        self.devices.slo(device)
    }

    fn inject(&self, request: InjectionRequest) -> Result<InjectionReport, ControlError> {
        self.devices.inject(&request)
    }

    fn injection(&self, device: &str) -> Result<InjectionReport, ControlError> {
        self.devices.injection(device)
    }

    fn stop_injection(&self, device: &str) -> Result<InjectionReport, ControlError> {
        self.devices.stop_injection(device)
    }

    fn start_recording(&self, request: RecordingRequest) -> Result<RecordingReport, ControlError> {
        let device = request.device.as_deref();
        let device = device
            .map(|name| self.devices.number_of(name))
            .transpose()?;
        let names = self.devices.names();
        self.shared.feed.start_recording(request, device, names)
    }

    fn recording(&self) -> Result<RecordingReport, ControlError> {
        self.shared.feed.recording()
    }

    fn stop_recording(&self) -> Result<RecordingReport, ControlError> {
        self.shared.feed.stop_recording()
    }

    fn may_hand_over(&self) -> Result<(), ControlError> {
        slow_tiers::may_hand_over(&self.shared.slow)?;
        self.devices.may_hand_over()
    }

    fn hand_over(&self) -> Result<Vec<ParkedDevice>, ControlError> {
        self.stop_for_successor()
    }

    fn admit(&self) {
        self.devices.admit();
    }

    fn shut_down(&self) -> Result<(), ControlError> {
        self.vms.close();
        self.shared.budget.stop();
        let mut first = None;
        for vm in self.vms.all() {
            let name = vm.core.name.clone();
            match self.let_go_last(&vm) {
                Ok(()) => {}
                Err(error) => {
                    tracing::error!(vm = name, %error, "the VM could not be detached; the next daemon recovers it");
                    first.get_or_insert(error);
                }
            }
        }
        self.shared.feed.stop();
        self.devices.shut_down();
        first.map_or(Ok(()), Err)
    }
}

impl Host {
    /// Changes what a VM may have; its ceiling is its limit.
    fn change_share(&self, vm: &Vm, change: &ShareChange) -> Result<(), ControlError> {
        if let CeilingChange::Set(limit) = change.ceiling_bytes {
            attach::check_limit(Some(limit), vm.core.layout.look().len_bytes())?;
        }
        let budget = &self.shared.budget;
        budget.change_share(&vm.core.name, change, |share| vm.set_share(&share))
    }

    /// VM names by their RAM files, for matching devices.
    fn names_by_file(&self) -> Vec<(pagetide_addr::FileKey, String)> {
        let keys = |vm: &Arc<Vm>| {
            let name = vm.core.name.clone();
            vm.core
                .layout
                .look()
                .files()
                .iter()
                .map(|file| (file.key(), name.clone()))
                .collect::<Vec<_>>()
        };
        self.vms.all().iter().flat_map(keys).collect()
    }
}
