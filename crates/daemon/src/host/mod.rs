// SPDX-License-Identifier: Apache-2.0
//! The composition: VMs, devices and recovery behind [`Control`].
//!
//! [`vm`] puts one VM together (its shared parts are [`core`]), [`attach`] makes it from a running VMM or from
//! the pool of a dead daemon, [`rounds`] keeps it within its limit, [`hotplug`]
//! follows RAM that comes and goes, [`devices`] holds the software DPU. [`life`] says who
//! ends a VM, and [`janitor`] notices when its VMM does. Order at the start: the rings of dead engines are
//! waited for, then VMs are taken up again, then devices listen again; so
//! nothing is replayed, evicted or completed while the dead still write.

mod attach;
mod bring_back;
mod core;
mod devices;
#[cfg(test)]
mod earlier_tests;
mod hotplug;
mod identity;
mod janitor;
mod life;
mod report;
mod room;
mod roster;
mod rounds;
mod sink;
mod space;
mod tracker;
mod vm;

use self::{
    devices::Devices,
    janitor::Janitor,
    life::{Asked, Detaching, Stage},
    roster::{Roster, Watched},
    vm::{Shared, Vm, failed},
};
use crate::{
    control::{
        AttachRequest, BlkRequest, Control, ControlError, DetachEnd, DetachReport, DeviceReport,
        ReclaimReport, VmReport,
    },
    injection::{InjectionReport, InjectionRequest},
    protection::{
        ProtectorChoice,
        feed::{Feed, FeedConfig},
        recording::{RecordingReport, RecordingRequest},
    },
    settings::RunSettings,
    slo::SloList,
};
use pagetide_addr::PAGE_BYTES;
use pagetide_swap::Room;
use pagetide_vmm::{
    Refusal,
    process::{VmmIdentity, VmmProcess},
};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Most threads that evict from one VM.
const EVICT_THREADS_MAX: u64 = 16;
/// Tries to let a VM go at the daemon's end, while clients go on detaching it.
const LAST_TRIES: u32 = 16;

/// The running system.
struct Host {
    state_dir: PathBuf,
    shared: Shared,
    devices: Devices,
    vms: Roster,
}

/// How many threads evict from a VM beside its rounds: by the setting, or one for each four CPUs but the
/// first four.
fn evict_helpers(threads: u32) -> u64 {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let threads = match threads {
        0 => (cpus / 4).clamp(1, 4),
        given => u64::from(given).min(EVICT_THREADS_MAX),
    };
    threads - 1
}

/// Starts the running system and takes up again what a predecessor left.
pub fn start_control(settings: &RunSettings) -> Result<Arc<dyn Control>, ControlError> {
    pagetide_sys::membarrier::register().map_err(failed)?;
    let state_dir = settings.state_dir.clone();
    refuse_other_versions(&state_dir)?;
    let (devices, spaces) = Devices::start(settings)?;
    let feed = FeedConfig {
        rate: settings.access_log_rate,
    };
    let feed = Arc::new(Feed::start(Arc::clone(devices.log()), &feed)?);
    let (janitor, bell) = Janitor::new()?;
    let way = tracker::Way::choose(settings.tracker)?;
    let shared = Shared {
        service: Arc::clone(devices.service()),
        spaces,
        janitor: bell.clone(),
        reader_poll_us: u64::from(settings.reader_poll_us),
        neighbours_max: settings.neighbours,
        feed,
        protector: settings.dma_protector.clone(),
        room: Arc::new(Room::of_this_process()),
        tracker: way,
        evict_helpers: evict_helpers(settings.evict_threads),
        heat_cost: tracker::heat_cost(way, settings.tracker_cost),
    };
    room::warn_if_smaller(&shared.room, &state_dir);
    let host = Arc::new(Host {
        state_dir,
        shared,
        devices,
        vms: Roster::new(bell),
    });
    if host.recover_all()? == Taken::AllKnown {
        host.devices.restore();
    }
    janitor.start(&host)?;
    Ok(host)
}

fn pools(state_dir: &Path) -> Result<Vec<PathBuf>, ControlError> {
    let listing = std::fs::read_dir(state_dir)
        .map_err(|error| failed(format!("cannot list {}: {error}", state_dir.display())))?;
    let mut pools = Vec::new();
    for entry in listing {
        let path = entry.map_err(failed)?.path();
        let is_pool = |suffix| suffix == pagetide_swap::pool::POOL_SUFFIX;
        if path.extension().is_some_and(is_pool) {
            pools.push(path);
        }
    }
    Ok(pools)
}

/// Sees that every pool is one that this version reads, before any VM is taken up: that another
/// version is needed is best known while nothing has been touched.
fn refuse_other_versions(state_dir: &Path) -> Result<(), ControlError> {
    let own = pagetide_swap::pool::VERSION;
    for path in pools(state_dir)? {
        // One that is no pool, or damaged, is that VM's own trouble, told when its turn comes.
        if let Ok(Some(found)) = pagetide_swap::pool::version_at(&path)
            && found != own
        {
            return Err(ControlError::refused(format!(
                "pool {} was made by another version of pagetide (it has format {found}, this program reads format \
                 {own}): no VM was taken up; start that version, or remove the pool when its VM is gone",
                path.display(),
            )));
        }
    }
    Ok(())
}

impl Host {
    /// Takes up every VM whose pool is there. One that cannot be taken up is said so and left: its
    /// pool is its memory.
    fn recover_all(&self) -> Result<Taken, ControlError> {
        let mut taken = Taken::AllKnown;
        for path in pools(&self.state_dir)? {
            match attach::recover(&path, &self.shared) {
                Ok(attach::Found::Recovered(vm)) => self.put(Arc::new(*vm)),
                Ok(attach::Found::Removed) => {}
                Err(error) => {
                    tracing::error!(
                        pool = %path.display(),
                        %error,
                        "a VM could not be taken up again; it waits, and its pool is kept"
                    );
                    if self.leave_waiting(&path, &error) == Taken::SomeUnknown {
                        taken = Taken::SomeUnknown;
                    }
                }
            }
        }
        Ok(taken)
    }

    /// Keeps the name of a VM that could not be taken up, and all devices away from its RAM: their
    /// DMA would fill holes whose content is in the pool.
    fn leave_waiting(&self, path: &Path, why: &ControlError) -> Taken {
        let name = path
            .file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
            .unwrap_or_default();
        match attach::identity_of(path) {
            Ok(identity) => {
                let vmm = match VmmProcess::reopen(identity.process()) {
                    Ok(vmm) => Some(vmm),
                    Err(Refusal::NoSuchProcess { .. } | Refusal::PidUsedAgain { .. }) => {
                        self.drop_waiting(&name);
                        return Taken::AllKnown;
                    }
                    Err(error) => {
                        tracing::warn!(vm = name, %error, "its VMM cannot be watched");
                        None
                    }
                };
                identity.files().for_each(|key| self.shared.spaces.bar(key));
                self.vms.put_waiting(name, vmm, why.message.clone());
                Taken::AllKnown
            }
            Err(error) => {
                tracing::error!(
                    pool = %path.display(),
                    %error,
                    "nor can it be told whose RAM it is; no device is served until that pool is gone"
                );
                self.vms.put_waiting(name, None, why.message.clone());
                Taken::SomeUnknown
            }
        }
    }

    /// The VMM of a VM that could not be taken up has ended: then nobody needs its pool.
    fn drop_waiting(&self, name: &str) {
        tracing::info!(
            vm = name,
            "the VMM of a VM that could not be taken up has ended; its pool is removed"
        );
        if let Err(error) = attach::remove_pool(&self.state_dir, name) {
            tracing::warn!(vm = name, %error, "its pool stays behind");
        }
    }

    /// A VMM has ended: nothing is kept for it any more, unless a detach sees to that.
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

    /// The VM is there. Its faults may be served no more by now.
    fn put(&self, vm: Arc<Vm>) {
        if let Some(why) = self.vms.put(vm.core.name.clone(), Arc::clone(&vm)) {
            self.stop_unserved(&vm, &why);
        }
    }

    fn reader_failed(&self, vmm: VmmIdentity, why: &str) {
        if let Some(vm) = self.vms.reader_failed(vmm, why) {
            self.stop_unserved(&vm, why);
        }
    }

    #[expect(clippy::unused_self, reason = "reads better where it is used")]
    fn stop_unserved(&self, vm: &Vm, why: &str) {
        if !vm.core.vmm.ends_within(Duration::ZERO) {
            vm.core.incidents.stop_vm(format!(
                "its faults are not served any more ({why}); restart the daemon to take it up again, then continue it (SIGCONT)"
            ));
        }
    }

    /// Lets a VM go, whose end is the caller's.
    ///
    /// # Errors
    /// A sentence: it is still served.
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
                tracing::info!(vm = name, %error, "the VMM has ended while it was let go; dropping the VM");
                vm.give_back(&self.shared);
                self.vms.remove(name);
                drop(dropping);
                (0, DetachEnd::VmmEnded)
            }
        };
        let after = vm.report();
        tracing::info!(vm = name, filled_pages, ?end, "let go");
        // What was stored is told as it last was, not as it is now that everything is back.
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

    /// Lets a VM go at the end of the daemon, whoever else may be at it.
    fn let_go_last(&self, vm: &Vm) -> Result<(), ControlError> {
        for _ in 0..LAST_TRIES {
            match vm.life.detach() {
                Asked::Yours(detaching) => return self.let_go(vm, detaching).map(drop),
                Asked::Over(_) => return Ok(()),
                // It ends as any detach does. If it fails, it is tried once more from here.
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

/// What is known of the VMs whose pools were found.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taken {
    /// Each was taken up, or at least its RAM is known and kept from devices.
    AllKnown,
    /// The RAM of one is not known.
    SomeUnknown,
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
        attach::check_limit(limit_bytes, vm.core.layout.look().len_bytes())?;
        vm.set_limit(limit_bytes);
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
        let (evicted, shortfall) = vm.reclaim(pages);
        Ok(ReclaimReport {
            name: name.to_owned(),
            asked_bytes: bytes,
            reclaimed_bytes: evicted * PAGE_BYTES,
            resident_bytes: vm.core.layout.look().allocated_bytes().map_err(failed)?,
            shortfall: shortfall.filter(|_| bytes.is_some() || evicted == 0),
        })
    }

    fn detach(&self, name: &str) -> Result<DetachReport, ControlError> {
        let vm = self.vms.get(name)?;
        match vm.life.detach() {
            Asked::Yours(detaching) => self.let_go(&vm, detaching),
            Asked::UnderWay => Err(ControlError::refused(format!(
                "{name} is being detached already"
            ))),
            Asked::Over(DetachEnd::LetGo) => Err(ControlError::not_found(format!(
                "{name} was let go by another detach just now"
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
            // The daemon's own end lets every VM go.
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

    fn shut_down(&self) -> Result<(), ControlError> {
        self.vms.close();
        let mut first = None;
        for vm in self.vms.all() {
            let name = vm.core.name.clone();
            match self.let_go_last(&vm) {
                Ok(()) => {}
                Err(error) => {
                    tracing::error!(vm = name, %error, "the VM could not be let go; a next daemon takes it up again");
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
