// SPDX-License-Identifier: Apache-2.0
//! [`Devices`]: where the devices of this host are, and the service that answers their page faults.
//!
//! ```text
//!   dpu = in-process     engines ──queues──► FaultService       devices of this daemon
//!   dpu = SOCKET         dpu process ──VPRI──► Driver ──► FaultService
//! ```
//! The service knows sources of page requests, VMs know I/O address spaces; only this module knows which
//! of the two placements is in use.

use super::{failure::failed, lock::lock};
use crate::{
    control::{ControlError, DeviceReport},
    dpu::{DeviceRequest, DeviceSet, Owed, no_devices_here},
    injection::{InjectionReport, InjectionRequest},
    settings::{DpuPlace, IopfHandling, IopfPayer, IopfPreempt, RunSettings},
    slo::SloList,
};
use pagetide_addr::{DeviceId, FileKey};
use pagetide_dpu::ParkedDevice;
use pagetide_vpri::{
    AccessLog, AccessSource, BounceArea, DomainTable, Doorbell, FaultAssist, FaultService,
    Handling, HostEnd, IdleEngines, IoSpaces, Preempt, ServiceConfig, ServiceThread,
};
use pagetide_vpri_function::Driver;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

/// How long a starting daemon waits for the DPU process, so that recovered VMs are not without their
/// devices longer than necessary.
const DPU_WAIT: Duration = Duration::from_secs(2);

/// Bounce buffers of an engine of this process: this many pages (4 MiB) of reads into absent memory may
/// be under way on it. A read that finds no buffer has its pages filled first. A DPU process gets its
/// buffers from its driver.
const BOUNCE_BUFFERS: u32 = 1024;

/// The devices of this host and the service of their page faults.
pub(super) struct Devices {
    place: Place,
    service: Arc<FaultService>,
    log: Arc<dyn AccessSource>,
    thread: Mutex<Option<ServiceThread>>,
}

enum Place {
    /// In this process.
    Here(Box<DeviceSet>),
    /// In the DPU process whose VPRI function listens on this socket.
    Elsewhere(Arc<Driver>, PathBuf),
}

impl Devices {
    /// Starts engines and service, or connects to the DPU process.
    pub(super) fn start(
        settings: &RunSettings,
        owed: Owed,
    ) -> Result<(Self, Arc<dyn IoSpaces>), ControlError> {
        match &settings.dpu {
            DpuPlace::InProcess => Self::here(settings, owed),
            DpuPlace::Socket(socket) => Self::elsewhere(settings, socket, owed),
        }
    }

    fn here(settings: &RunSettings, owed: Owed) -> Result<(Self, Arc<dyn IoSpaces>), ControlError> {
        let engines = settings.engines();
        let domains = Arc::new(DomainTable::new(engines.count.get()));
        let (set, hosts) = DeviceSet::start(&settings.state_dir, &engines, &domains, owed)?;
        give_bounce(hosts.ends.iter().take(engines.count.get()))?;
        let service = FaultService::with(service_config(settings), hosts.ends, hosts.bell);
        let assist: Arc<dyn FaultAssist> = Arc::clone(&service) as _;
        set.set_assist(&assist)?;
        let log = Arc::new(AccessLog::new(engines.count.get()));
        set.set_access_log(&log)?;
        let devices = Self {
            log,
            place: Place::Here(Box::new(set)),
            thread: Mutex::new(Some(service.start().map_err(failed)?)),
            service,
        };
        Ok((devices, domains))
    }

    fn elsewhere(
        settings: &RunSettings,
        socket: &Path,
        owed: Owed,
    ) -> Result<(Self, Arc<dyn IoSpaces>), ControlError> {
        let bell = Arc::new(Doorbell::new().map_err(failed)?);
        let driver = Driver::start(socket, Arc::clone(&bell)).map_err(failed)?;
        if let Err(error) = driver.wait_connected(owed.wait(DPU_WAIT)) {
            tracing::warn!(%error, "VMs are served, and evicted once the DPU is there");
        }
        let service = FaultService::with(service_config(settings), Vec::new(), bell);
        service.add_source(driver.source());
        let devices = Self {
            log: driver.access_log(),
            place: Place::Elsewhere(Arc::clone(&driver), socket.to_owned()),
            thread: Mutex::new(Some(service.start().map_err(failed)?)),
            service,
        };
        Ok((devices, driver))
    }

    pub(super) fn service(&self) -> &Arc<FaultService> {
        &self.service
    }

    /// The source of records of DMA accesses.
    pub(super) fn log(&self) -> &Arc<dyn AccessSource> {
        &self.log
    }

    /// The number of the device with this name. Of devices elsewhere only the number is known here.
    pub(super) fn number_of(&self, name: &str) -> Result<DeviceId, ControlError> {
        match (&self.place, name.parse()) {
            (Place::Here(set), _) => set.number_of(name),
            (Place::Elsewhere(..), Ok(number)) => Ok(DeviceId(number)),
            (Place::Elsewhere(_, socket), Err(_)) => Err(ControlError::refused(format!(
                "'{name}' is no number of a device; the devices are in the process that listens on {}, and here only \
                 their numbers are known: `pagetide dpu list --json` there tells them as id",
                socket.display()
            ))),
        }
    }

    /// Names of the devices, by their numbers, as far as they are known here.
    pub(super) fn names(&self) -> BTreeMap<DeviceId, String> {
        match &self.place {
            Place::Here(set) => set.names(),
            Place::Elsewhere(..) => BTreeMap::new(),
        }
    }

    /// Creates the devices of a predecessor again, some with the connections that it has handed over, or notifies the
    /// DPU process that all memory with swapped-out content is known.
    ///
    /// # Errors
    /// A connection cannot be gone on with.
    pub(super) fn restore(
        &self,
        parked: Vec<ParkedDevice>,
        owed: Owed,
    ) -> Result<(), ControlError> {
        match &self.place {
            Place::Here(set) => set.restore(parked, owed),
            Place::Elsewhere(driver, _) => {
                driver.all_known();
                Ok(())
            }
        }
    }

    /// Waits until no image has a request of ours under way, and begins none until [`Self::park`].
    ///
    /// # Errors
    /// An image does not answer. Nothing has changed.
    pub(super) fn hush(&self, wait: Duration) -> Result<(), ControlError> {
        match &self.place {
            Place::Here(set) => set.hush(wait),
            Place::Elsewhere(..) => Ok(()),
        }
    }

    /// Gives up the devices of this process, for another one.
    pub(super) fn park(&self) -> Vec<ParkedDevice> {
        match &self.place {
            Place::Here(set) => set.park(),
            Place::Elsewhere(..) => Vec::new(),
        }
    }

    /// Front ends that were handed over may go on.
    pub(super) fn admit(&self) {
        if let Place::Here(set) = &self.place {
            set.admit();
        }
    }

    pub(super) fn add(
        &self,
        request: DeviceRequest,
        vms: &[(FileKey, String)],
    ) -> Result<DeviceReport, ControlError> {
        self.set()?.add(request, vms)
    }

    pub(super) fn reports(&self, vms: &[(FileKey, String)]) -> Vec<DeviceReport> {
        match &self.place {
            Place::Here(set) => set.reports(vms),
            Place::Elsewhere(..) => Vec::new(),
        }
    }

    pub(super) fn set_weight(
        &self,
        socket: &Path,
        weight: u32,
        vms: &[(FileKey, String)],
    ) -> Result<DeviceReport, ControlError> {
        self.set()?.set_weight(socket, weight, vms)
    }

    pub(super) fn remove(&self, socket: &Path) -> Result<Option<DeviceId>, ControlError> {
        self.set()?.remove(socket)
    }

    pub(super) fn slo(&self, device: Option<&str>) -> Result<SloList, ControlError> {
        let devices = self.set()?.slo(device)?;
        Ok(SloList { devices })
    }

    pub(super) fn inject(
        &self,
        request: &InjectionRequest,
    ) -> Result<InjectionReport, ControlError> {
        self.set()?.inject(request)
    }

    pub(super) fn injection(&self, device: &str) -> Result<InjectionReport, ControlError> {
        self.set()?.injection(device)
    }

    pub(super) fn stop_injection(&self, device: &str) -> Result<InjectionReport, ControlError> {
        self.set()?.stop_injection(device)
    }

    /// Whether the devices could be handed over now.
    pub(super) fn may_hand_over(&self) -> Result<(), ControlError> {
        match &self.place {
            Place::Here(set) => set.may_hand_over(),
            // They stay where they are.
            Place::Elsewhere(..) => Ok(()),
        }
    }

    /// The devices, if they are in this process.
    fn set(&self) -> Result<&DeviceSet, ControlError> {
        match &self.place {
            Place::Here(set) => Ok(set),
            Place::Elsewhere(_, socket) => Err(no_devices_here(socket)),
        }
    }

    /// Ends the engines, then the service. In this order every request gets its response.
    pub(super) fn shut_down(&self) {
        if let Place::Here(set) = &self.place {
            set.shut_down();
        }
        if let Some(thread) = lock(&self.thread).take() {
            thread.stop();
        }
        if let Place::Elsewhere(driver, _) = &self.place {
            driver.stop();
        }
    }
}

/// Whether the devices of a predecessor could be created by this program; changes nothing.
pub(super) fn examine(settings: &RunSettings) -> Result<(), ControlError> {
    match &settings.dpu {
        DpuPlace::InProcess => DeviceSet::examine(&settings.state_dir),
        DpuPlace::Socket(_) => Ok(()),
    }
}

/// True if a predecessor has left devices that this process is to serve, or may have.
pub(super) fn are_left(settings: &RunSettings) -> bool {
    match &settings.dpu {
        DpuPlace::InProcess => DeviceSet::are_left(&settings.state_dir),
        DpuPlace::Socket(_) => false,
    }
}

/// Gives engines of this process bounce buffers for reads into absent pages.
fn give_bounce<'a>(engines: impl Iterator<Item = &'a HostEnd>) -> Result<(), ControlError> {
    for engine in engines {
        let area = BounceArea::new(BOUNCE_BUFFERS).map_err(failed)?;
        engine.set_bounce(Some(Arc::new(area)));
    }
    Ok(())
}

fn service_config(settings: &RunSettings) -> ServiceConfig {
    ServiceConfig {
        handling: match settings.iopf_handling {
            IopfHandling::Affined => Handling::Affined,
            IopfHandling::Serialized => Handling::Serialized,
        },
        idle_engines: match settings.iopf_payer {
            IopfPayer::Engine => IdleEngines::Serve,
            IopfPayer::Vm => IdleEngines::Leave,
        },
        preempt: match settings.iopf_preempt {
            IopfPreempt::Fifo => Preempt::Fifo,
            IopfPreempt::Nice => Preempt::Nice,
            IopfPreempt::Off => Preempt::Off,
        },
    }
}
