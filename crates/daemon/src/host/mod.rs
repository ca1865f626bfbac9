// SPDX-License-Identifier: Apache-2.0
//! The composition: VMs, devices and recovery behind [`Control`].
//!
//! [`vm`] puts one VM together (its shared parts are [`core`]), [`attach`] makes it from a running VMM or from
//! the pool of a dead daemon, [`rounds`] keeps it within its limit, [`devices`]
//! holds the software DPU. Order at the start: the rings of dead engines are
//! waited for, then VMs are taken up again, then devices listen again; so
//! nothing is replayed, evicted or completed while the dead still write.

mod alias;
mod attach;
mod core;
mod devices;
mod identity;
mod latency;
mod report;
mod rounds;
mod sink;
mod tracker;
mod vm;

use self::{
    core::lock,
    devices::Devices,
    sink::VmEvent,
    vm::{Shared, Vm, failed},
};
use crate::{
    control::{
        AttachRequest, BlkRequest, Control, ControlError, DetachReport, DeviceReport,
        ReclaimReport, VmReport,
    },
    settings::RunSettings,
};
use pagetide_addr::PAGE_BYTES;
use pagetide_vpri::DomainTable;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, mpsc},
    time::Instant,
};

/// The running system.
struct Host {
    state_dir: PathBuf,
    domains: Arc<DomainTable>,
    shared: Shared,
    devices: Devices,
    vms: Mutex<BTreeMap<String, Slot>>,
}

/// A name in use.
enum Slot {
    /// Its attach is under way.
    Attaching(u32),
    /// The VM.
    There(Arc<Vm>),
}

/// Starts the running system and takes up again what a predecessor left.
pub fn start_control(settings: &RunSettings) -> Result<Arc<dyn Control>, ControlError> {
    pagetide_sys::membarrier::register().map_err(failed)?;
    let state_dir = settings.state_dir.clone();
    let domains = Arc::new(DomainTable::new(settings.engines.get()));
    let devices = Devices::start(settings, &domains)?;
    let (events, heard) = mpsc::channel();
    let shared = Shared {
        service: Arc::clone(devices.service()),
        events,
        reader_poll_us: u64::from(settings.reader_poll_us),
        neighbours_max: settings.neighbours,
    };
    let host = Arc::new(Host {
        state_dir,
        domains,
        shared,
        devices,
        vms: Mutex::default(),
    });
    host.recover_all()?;
    host.devices.restore()?;
    let janitor = Arc::downgrade(&host);
    let spawned = std::thread::Builder::new()
        .name("pt-janitor".into())
        .spawn(move || {
            while let Ok(event) = heard.recv() {
                match janitor.upgrade() {
                    Some(host) => host.hear(event),
                    None => return,
                }
            }
        });
    spawned.map_err(|error| failed(format!("no thread for the janitor: {error}")))?;
    Ok(host)
}

impl Host {
    /// Takes up every VM whose pool is there. One that cannot be taken up is said so and left: its
    /// pool is its memory.
    fn recover_all(&self) -> Result<(), ControlError> {
        let listing = std::fs::read_dir(&self.state_dir).map_err(|error| {
            failed(format!("cannot list {}: {error}", self.state_dir.display()))
        })?;
        for entry in listing {
            let path = entry.map_err(failed)?.path();
            if path
                .extension()
                .is_none_or(|suffix| suffix != pagetide_swap::pool::POOL_SUFFIX)
            {
                continue;
            }
            match attach::recover(&path, &self.domains, &self.shared) {
                Ok(attach::Found::Recovered(vm)) => {
                    let name = vm.core.name.clone();
                    lock(&self.vms).insert(name, Slot::There(Arc::new(*vm)));
                }
                Ok(attach::Found::Removed) => {}
                Err(error) => tracing::error!(
                    pool = %path.display(),
                    %error,
                    "a VM could not be taken up again; it waits, and its pool is kept"
                ),
            }
        }
        Ok(())
    }

    fn hear(&self, event: VmEvent) {
        match event {
            VmEvent::Gone(name) => {
                let vm = match lock(&self.vms).get(&name) {
                    Some(Slot::There(vm)) => Arc::clone(vm),
                    _ => return,
                };
                tracing::info!(
                    vm = name,
                    pid = vm.core.vmm.pid(),
                    "the VMM has ended; dropping the VM"
                );
                vm.forget(&self.shared);
                lock(&self.vms).remove(&name);
            }
            VmEvent::ReaderFailed(name, why) => {
                tracing::error!(
                    vm = name,
                    why,
                    "faults of the VM are not served any more; restart the daemon to take it up again"
                );
            }
        }
    }

    fn get(&self, name: &str) -> Result<Arc<Vm>, ControlError> {
        match lock(&self.vms).get(name) {
            Some(Slot::There(vm)) => Ok(Arc::clone(vm)),
            Some(Slot::Attaching(_)) => Err(ControlError::refused(format!(
                "VM '{name}' is just being attached"
            ))),
            None => Err(ControlError::not_found(format!(
                "there is no VM '{name}' here: see `pagetide vm list`, or attach it by `pagetide attach --pid N --name {name}`"
            ))),
        }
    }

    /// Keeps the name and the pid for an attach.
    fn reserve(&self, request: &AttachRequest) -> Result<(), ControlError> {
        let mut vms = lock(&self.vms);
        for (name, slot) in vms.iter() {
            let pid = match slot {
                Slot::Attaching(pid) => *pid,
                Slot::There(vm) => vm.core.vmm.pid(),
            };
            if pid == request.pid {
                return Err(ControlError::refused(format!(
                    "process {pid} is attached already, as VM '{name}'"
                )));
            }
            if *name == request.name {
                return Err(ControlError::refused(format!(
                    "there is a VM '{name}' already (process {pid}): give another name by --name"
                )));
            }
        }
        vms.insert(request.name.clone(), Slot::Attaching(request.pid));
        Ok(())
    }

    fn all(&self) -> Vec<Arc<Vm>> {
        let there = |slot: &Slot| match slot {
            Slot::There(vm) => Some(Arc::clone(vm)),
            Slot::Attaching(_) => None,
        };
        lock(&self.vms).values().filter_map(there).collect()
    }
}

impl Control for Host {
    fn attach(&self, request: AttachRequest) -> Result<VmReport, ControlError> {
        crate::name::check_name(&request.name)?;
        self.reserve(&request)?;
        match attach::attach(&request, &self.state_dir, &self.domains, &self.shared) {
            Ok(vm) => {
                let vm = Arc::new(vm);
                let report = vm.report(&self.devices);
                lock(&self.vms).insert(request.name, Slot::There(vm));
                Ok(report)
            }
            Err(error) => {
                lock(&self.vms).remove(&request.name);
                Err(error)
            }
        }
    }

    fn vms(&self) -> Vec<VmReport> {
        self.all()
            .iter()
            .map(|vm| vm.report(&self.devices))
            .collect()
    }

    fn vm(&self, name: &str) -> Result<VmReport, ControlError> {
        Ok(self.get(name)?.report(&self.devices))
    }

    fn set_limit(&self, name: &str, limit_bytes: Option<u64>) -> Result<VmReport, ControlError> {
        let vm = self.get(name)?;
        attach::check_limit(limit_bytes, vm.core.layout.len_bytes())?;
        vm.set_limit(limit_bytes);
        Ok(vm.report(&self.devices))
    }

    fn reclaim(&self, name: &str, bytes: Option<u64>) -> Result<ReclaimReport, ControlError> {
        let vm = self.get(name)?;
        let pages = bytes.map_or(u64::MAX, |bytes| bytes.div_ceil(PAGE_BYTES));
        let (evicted, shortfall) = vm.reclaim(pages);
        Ok(ReclaimReport {
            name: name.to_owned(),
            asked_bytes: bytes,
            reclaimed_bytes: evicted * PAGE_BYTES,
            resident_bytes: vm.core.layout.allocated_bytes().map_err(failed)?,
            shortfall: shortfall.filter(|_| bytes.is_some() || evicted == 0),
        })
    }

    fn detach(&self, name: &str) -> Result<DetachReport, ControlError> {
        let vm = self.get(name)?;
        let begun = Instant::now();
        let before = vm.report(&self.devices);
        let filled_pages = vm.detach(&self.shared)?;
        let after = vm.report(&self.devices);
        // What was stored is told as it last was, not as it is now that everything is back.
        let report = VmReport {
            resident_bytes: after.resident_bytes,
            alias_faults: after.alias_faults,
            ..before
        };
        lock(&self.vms).remove(name);
        tracing::info!(vm = name, filled_pages, "let go");
        Ok(DetachReport {
            name: name.to_owned(),
            pid: vm.core.vmm.pid(),
            filled_pages,
            resident_bytes: report.resident_bytes,
            seconds: begun.elapsed().as_secs_f64(),
            vm: report,
        })
    }

    fn add_blk(&self, request: BlkRequest) -> Result<DeviceReport, ControlError> {
        self.devices.add(request, &self.names_by_file())
    }

    fn devices(&self) -> Vec<DeviceReport> {
        self.devices.reports(&self.names_by_file())
    }

    fn remove_device(&self, socket: &Path) -> Result<(), ControlError> {
        self.devices.remove(socket)
    }

    fn shut_down(&self) -> Result<(), ControlError> {
        let mut first = None;
        for vm in self.all() {
            let name = vm.core.name.clone();
            match self.detach(&name) {
                Ok(_) => {}
                Err(error) => {
                    tracing::error!(vm = name, %error, "the VM could not be let go; a next daemon takes it up again");
                    first.get_or_insert(error);
                }
            }
        }
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
                .files()
                .iter()
                .map(|file| (file.key(), name.clone()))
                .collect::<Vec<_>>()
        };
        self.all().iter().flat_map(keys).collect()
    }
}
