// SPDX-License-Identifier: Apache-2.0
//! [`Devices`]: the software DPU within the daemon.

use super::vm::failed;
use crate::{
    control::{BlkRequest, ControlError, DeviceReport},
    figure::LatencyUs,
    settings::RunSettings,
};
use pagetide_addr::FileKey;
use pagetide_vpri::{DomainTable, Doorbell, FaultService, ServiceThread};
use std::{
    path::Path,
    sync::{Arc, Mutex},
};

/// The DPU, its fault service, and the devices that outlive the daemon.
pub(super) struct Devices {
    service: Arc<FaultService>,
    thread: Mutex<Option<ServiceThread>>,
}

impl Devices {
    pub(super) fn start(
        _settings: &RunSettings,
        _domains: &Arc<DomainTable>,
    ) -> Result<Self, ControlError> {
        let service = FaultService::new(Vec::new(), Arc::new(Doorbell::new().map_err(failed)?));
        let thread = service.start().map_err(failed)?;
        Ok(Self {
            service,
            thread: Mutex::new(Some(thread)),
        })
    }

    pub(super) fn service(&self) -> &Arc<FaultService> {
        &self.service
    }

    pub(super) fn restore(&self) -> Result<(), ControlError> {
        Ok(())
    }

    pub(super) fn add(
        &self,
        _request: BlkRequest,
        _vms: &[(FileKey, String)],
    ) -> Result<DeviceReport, ControlError> {
        Err(ControlError::failed("no devices yet"))
    }

    pub(super) fn reports(&self, _vms: &[(FileKey, String)]) -> Vec<DeviceReport> {
        Vec::new()
    }

    pub(super) fn remove(&self, _socket: &Path) -> Result<(), ControlError> {
        Err(ControlError::failed("no devices yet"))
    }

    pub(super) fn iopf_us(&self, _files: &[FileKey]) -> LatencyUs {
        LatencyUs::default()
    }

    pub(super) fn shut_down(&self) {
        if let Some(thread) = super::vm::lock(&self.thread).take() {
            thread.stop();
        }
    }
}
