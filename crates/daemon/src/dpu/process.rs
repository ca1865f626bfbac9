// SPDX-License-Identifier: Apache-2.0
//! `pagetide dpu`: the software DPU as a separate process beside `pagetide run`.
//!
//! ```text
//!   VMM ──────vhost-user──► engines, devices ─┐
//!                                PA-bitmaps    ├ this process
//!   pagetide run ◄──VPRI──► FunctionServer ────┘
//! ```
//! It is a back end twice: of the devices, whose front end is the VMM, and of the VPRI function, whose
//! driver is in the daemon. Order at startup: wait for the rings of dead engines, then the function
//! listens, then the devices. A daemon that finds the function listening can thus be sure that no write of
//! an earlier DPU process is still under way. No device touches memory before the daemon has announced
//! which memory it knows.

use super::{DeviceRequest, DeviceSet, Owed};
use crate::{
    budget::{BudgetBody, HostReport, ShareChange},
    control::{
        AttachRequest, BlkRequest, Control, ControlError, DetachReport, DeviceReport, NetRequest,
        ReclaimReport, VmReport,
    },
    injection::{InjectionReport, InjectionRequest},
    protection::{
        ProtectorChoice,
        recording::{RecordingReport, RecordingRequest},
    },
    settings::DpuSettings,
    slo::SloList,
};
use pagetide_vpri::{DomainTable, FaultAssist};
use pagetide_vpri_function::function::{FunctionParts, FunctionServer};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// A DPU process behind its API.
struct DpuProcess {
    devices: DeviceSet,
    /// `None` after shutdown.
    function: Mutex<Option<FunctionServer>>,
    vpri: PathBuf,
}

/// Starts the DPU and restores the devices of a predecessor.
pub fn start_dpu(settings: &DpuSettings) -> Result<Arc<dyn Control>, ControlError> {
    let failed = |error: &dyn std::fmt::Display| ControlError::failed(error.to_string());
    pagetide_sys::membarrier::register().map_err(|error| failed(&error))?;
    let engines = settings.engines();
    let engine_count = engines.count.get();
    let domains = Arc::new(DomainTable::new(engine_count));
    let (devices, hosts) =
        DeviceSet::start(&settings.state_dir, &engines, &domains, Owed::AsAfterDeath)?;
    let vpri = settings.vpri_path();
    let parts = FunctionParts {
        socket: vpri.clone(),
        domains,
        hosts: hosts.ends,
        engine_count,
        bell: hosts.bell,
    };
    let function =
        FunctionServer::start(parts).map_err(|error| ControlError::refused(error.to_string()))?;
    let assist: Arc<dyn FaultAssist> = function.assist();
    devices.set_assist(&assist)?;
    devices.set_access_log(function.access_log())?;
    devices.restore(Vec::new(), Owed::AsAfterDeath)?;
    Ok(Arc::new(DpuProcess {
        devices,
        function: Mutex::new(Some(function)),
        vpri,
    }))
}

impl DpuProcess {
    fn no_vms_here<T>(&self) -> Result<T, ControlError> {
        Err(ControlError::refused(format!(
            "this is a DPU process; VMs are attached by the daemon that was started with --dpu {}",
            self.vpri.display()
        )))
    }
}

impl DpuProcess {
    fn no_log_here<T>(&self) -> Result<T, ControlError> {
        Err(ControlError::refused(format!(
            "this is a DPU process; what it logs goes to the daemon that was started with --dpu {}: ask that one",
            self.vpri.display()
        )))
    }
}

impl Control for DpuProcess {
    fn attach(&self, _request: AttachRequest) -> Result<VmReport, ControlError> {
        self.no_vms_here()
    }

    fn vms(&self) -> Vec<VmReport> {
        Vec::new()
    }

    fn vm(&self, _name: &str) -> Result<VmReport, ControlError> {
        self.no_vms_here()
    }

    fn set_limit(&self, _name: &str, _limit_bytes: Option<u64>) -> Result<VmReport, ControlError> {
        self.no_vms_here()
    }

    fn host(&self) -> Result<HostReport, ControlError> {
        self.no_vms_here()
    }

    fn set_budget(&self, _change: &BudgetBody) -> Result<HostReport, ControlError> {
        self.no_vms_here()
    }

    fn lift_budget(&self) -> Result<HostReport, ControlError> {
        self.no_vms_here()
    }

    fn set_share(&self, _name: &str, _change: &ShareChange) -> Result<VmReport, ControlError> {
        self.no_vms_here()
    }

    fn set_protector(
        &self,
        _name: &str,
        _choice: ProtectorChoice,
    ) -> Result<VmReport, ControlError> {
        self.no_vms_here()
    }

    fn reclaim(&self, _name: &str, _bytes: Option<u64>) -> Result<ReclaimReport, ControlError> {
        self.no_vms_here()
    }

    fn detach(&self, _name: &str) -> Result<DetachReport, ControlError> {
        self.no_vms_here()
    }

    fn stop_detach(&self, _name: &str) -> Result<VmReport, ControlError> {
        self.no_vms_here()
    }

    fn add_blk(&self, request: BlkRequest) -> Result<DeviceReport, ControlError> {
        self.devices.add(DeviceRequest::Blk(request), &[])
    }

    fn add_net(&self, request: NetRequest) -> Result<DeviceReport, ControlError> {
        self.devices.add(DeviceRequest::Net(request), &[])
    }

    fn devices(&self) -> Vec<DeviceReport> {
        self.devices.reports(&[])
    }

    fn set_weight(&self, socket: &Path, weight: u32) -> Result<DeviceReport, ControlError> {
        self.devices.set_weight(socket, weight, &[])
    }

    fn remove_device(&self, socket: &Path) -> Result<(), ControlError> {
        self.devices.remove(socket).map(|_| ())
    }

    fn slo(&self, device: Option<&str>) -> Result<SloList, ControlError> {
        let devices = self.devices.slo(device)?;
        Ok(SloList { devices })
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

    fn start_recording(&self, _request: RecordingRequest) -> Result<RecordingReport, ControlError> {
        self.no_log_here()
    }

    fn recording(&self) -> Result<RecordingReport, ControlError> {
        self.no_log_here()
    }

    fn stop_recording(&self) -> Result<RecordingReport, ControlError> {
        self.no_log_here()
    }

    fn shut_down(&self) -> Result<(), ControlError> {
        self.devices.shut_down();
        let mut function = self.function.lock().unwrap_or_else(PoisonError::into_inner);
        drop(function.take());
        Ok(())
    }
}
