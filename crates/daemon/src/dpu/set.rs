// SPDX-License-Identifier: Apache-2.0
//! [`DeviceSet`]: the engines, their devices, and the list of devices that outlives them.
//!
//! What devices there are is written to `devices.json` in the state directory
//! whenever it changes (a new file renamed over the old one), so that a
//! successor listens on the same sockets with the same images. Front ends then
//! connect again by themselves and bring their requests in flight with them.

use crate::{
    control::{BlkRequest, ControlError, DeviceReport, DeviceState, OnFault},
    settings::EngineSettings,
};
use pagetide_addr::{DeviceId, FileKey};
use pagetide_dpu::check_weight;
use pagetide_dpu::config::POLL_MAX;
use pagetide_dpu::{BlkConfig, DirectIo, Dpu, DpuConfig, DpuError, Writes, wait_for_dead_engines};
use pagetide_vpri::{AccessLog, DomainTable, Doorbell, FaultAssist, HostEnd, LookUp};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

const LIST_FILE: &str = "devices.json";
/// Serial number of a device that was given none.
const DEFAULT_SERIAL: &str = "pagetide";

/// The engines, their devices, and the list of these.
pub(crate) struct DeviceSet {
    dpu: Dpu,
    list_path: PathBuf,
    list: Mutex<Vec<BlkRequest>>,
}

/// The list as it is kept.
#[derive(Default, Serialize, Deserialize)]
struct DeviceList {
    blk: Vec<BlkRequest>,
}

/// The engines of a set, as whoever answers their page requests sees them.
pub(crate) struct Hosts {
    /// The host's end of each queue of page requests.
    pub(crate) ends: Vec<HostEnd>,
    /// Rung when one of them has a request.
    pub(crate) bell: Arc<Doorbell>,
}

impl DeviceSet {
    /// Starts the engines. First waits until the rings of dead engines have drained: their I/O may
    /// still be writing to guests and images.
    pub(crate) fn start(
        state_dir: &Path,
        engines: &EngineSettings,
        domains: &Arc<DomainTable>,
    ) -> Result<(Self, Hosts), ControlError> {
        wait_for_dead_engines(state_dir, |path| {
            tracing::info!(lock = %path.display(), "waiting for I/O of a dead engine to finish");
        })
        .map_err(failed)?;
        let poll_max = Duration::from_micros(u64::from(engines.poll_us));
        if poll_max > POLL_MAX {
            return Err(ControlError::wrong_use(format!(
                "engine-poll-us is {}; it must be at most {}",
                engines.poll_us,
                POLL_MAX.as_micros()
            )));
        }
        let config = DpuConfig {
            engine_count: engines.count.get(),
            poll_max,
            iopf_timeout: iopf_timeout(engines.iopf_timeout_ms),
            cpus: engines.cpus.numbers().to_vec(),
            ..DpuConfig::new(state_dir.to_owned())
        };
        let bell = Arc::new(Doorbell::new().map_err(failed)?);
        let (dpu, ends) = Dpu::start(&config, Arc::clone(domains), &bell).map_err(failed)?;
        let set = Self {
            dpu,
            list_path: state_dir.join(LIST_FILE),
            list: Mutex::default(),
        };
        Ok((set, Hosts { ends, bell }))
    }

    /// Gives engines a way to serve, or to send, their own page requests.
    pub(crate) fn set_assist(&self, assist: &Arc<dyn FaultAssist>) -> Result<(), ControlError> {
        self.dpu.set_assist(assist).map_err(failed)
    }

    /// Has engines tell `log` what DMA touches, while anybody wants to know.
    pub(crate) fn set_access_log(&self, log: &Arc<AccessLog>) -> Result<(), ControlError> {
        self.dpu.set_access_log(log).map_err(failed)
    }

    /// What devices are called, by their numbers.
    pub(crate) fn names(&self) -> BTreeMap<DeviceId, String> {
        let name =
            |device: pagetide_dpu::DeviceReport| (device.id, device.socket.display().to_string());
        self.dpu.devices().into_iter().map(name).collect()
    }

    /// Makes the devices of a predecessor again. One that cannot be made is said so and left out of
    /// service, but stays on the list.
    pub(crate) fn restore(&self) -> Result<(), ControlError> {
        let bytes = match fs::read(&self.list_path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => {
                return Err(failed(format!(
                    "cannot read {}: {error}",
                    self.list_path.display()
                )));
            }
        };
        let known: DeviceList = serde_json::from_slice(&bytes)
            .map_err(|error| failed(format!("{} is damaged: {error}", self.list_path.display())))?;
        for request in &known.blk {
            match self.make(request) {
                Ok(_) => tracing::info!(socket = %request.socket.display(), "listening again"),
                Err(error) => {
                    tracing::error!(socket = %request.socket.display(), %error, "the device cannot be made again");
                }
            }
        }
        *lock(&self.list) = known.blk;
        Ok(())
    }

    pub(crate) fn add(
        &self,
        request: BlkRequest,
        vms: &[(FileKey, String)],
    ) -> Result<DeviceReport, ControlError> {
        let mut list = lock(&self.list);
        if list.iter().any(|known| known.socket == request.socket) {
            return Err(ControlError::refused(format!(
                "a device listens on {} already: give another --socket, or remove that one by `pagetide dpu remove`",
                request.socket.display()
            )));
        }
        let made = self.make(&request);
        let id = made.map_err(|error| wrong_or_failed(&error))?;
        list.push(request);
        if let Err(error) = self.save(&list) {
            list.pop();
            self.dpu.remove(id).map_err(failed)?;
            return Err(error);
        }
        drop(list);
        self.report(id, vms)
    }

    /// Makes a device; one whose weight cannot be is none.
    fn make(&self, request: &BlkRequest) -> Result<DeviceId, DpuError> {
        check_weight(request.weight)?;
        let id = self.dpu.add_blk(config_of(request))?;
        self.dpu.set_weight(id, request.weight)?;
        Ok(id)
    }

    fn report(
        &self,
        id: DeviceId,
        vms: &[(FileKey, String)],
    ) -> Result<DeviceReport, ControlError> {
        let mut devices = self.dpu.devices().into_iter();
        let its = devices.find(|device| device.id == id);
        its.map(|device| report_of(device, vms))
            .ok_or_else(|| failed("the device was removed at once by another call"))
    }

    /// Changes a device's weight, in the list first: what is in force is what a successor finds.
    pub(crate) fn set_weight(
        &self,
        socket: &Path,
        weight: u32,
        vms: &[(FileKey, String)],
    ) -> Result<DeviceReport, ControlError> {
        check_weight(weight).map_err(|error| wrong_or_failed(&error))?;
        let mut list = lock(&self.list);
        let known = list.iter().position(|known| known.socket == socket);
        let (Some(at), Some(id)) = (known, self.id_of(socket)) else {
            return Err(no_such_device(socket));
        };
        let before = std::mem::replace(&mut list[at].weight, weight);
        if let Err(error) = self.save(&list) {
            list[at].weight = before;
            return Err(error);
        }
        self.dpu.set_weight(id, weight).map_err(failed)?;
        drop(list);
        self.report(id, vms)
    }

    fn save(&self, list: &[BlkRequest]) -> Result<(), ControlError> {
        let json = serde_json::to_vec_pretty(&DeviceList { blk: list.to_vec() }).map_err(failed)?;
        let unfinished = self.list_path.with_extension("json.new");
        let saved =
            fs::write(&unfinished, json).and_then(|()| fs::rename(&unfinished, &self.list_path));
        saved.map_err(|error| {
            failed(format!(
                "cannot write {}: {error}",
                self.list_path.display()
            ))
        })
    }

    pub(super) fn dpu(&self) -> &Dpu {
        &self.dpu
    }

    pub(crate) fn reports(&self, vms: &[(FileKey, String)]) -> Vec<DeviceReport> {
        let mut reports: Vec<_> = self
            .dpu
            .devices()
            .into_iter()
            .map(|device| report_of(device, vms))
            .collect();
        reports.sort_by(|one, other| one.socket.cmp(&other.socket));
        reports
    }

    /// Removes a device; the number that it had.
    pub(crate) fn remove(&self, socket: &Path) -> Result<Option<DeviceId>, ControlError> {
        let mut list = lock(&self.list);
        let Some(position) = list.iter().position(|known| known.socket == socket) else {
            return Err(no_such_device(socket));
        };
        let id = self.id_of(socket);
        if let Some(id) = id {
            self.dpu.remove(id).map_err(failed)?;
        }
        list.remove(position);
        self.save(&list)?;
        Ok(id)
    }

    fn id_of(&self, socket: &Path) -> Option<DeviceId> {
        self.dpu
            .devices()
            .into_iter()
            .find(|device| device.socket == socket)
            .map(|device| device.id)
    }

    /// Ends the devices and the engines. Whoever answers page requests goes on until this is done.
    pub(crate) fn shut_down(&self) {
        self.dpu.shut_down();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(error: impl std::fmt::Display) -> ControlError {
    ControlError::failed(error.to_string())
}

fn no_such_device(socket: &Path) -> ControlError {
    ControlError::not_found(format!(
        "no device listens on {}: see `pagetide dpu list`",
        socket.display()
    ))
}

/// The time-out as it is set; 0 is none.
fn iopf_timeout(millis: u32) -> Option<Duration> {
    (millis > 0).then(|| Duration::from_millis(u64::from(millis)))
}

fn config_of(request: &BlkRequest) -> BlkConfig {
    BlkConfig {
        socket: request.socket.clone(),
        image: request.image.clone(),
        queue_count: request.queues,
        writes: if request.read_only {
            Writes::Refused
        } else {
            Writes::Taken
        },
        look_up: if request.lookup {
            LookUp::On
        } else {
            LookUp::Off
        },
        serial: request
            .serial
            .clone()
            .unwrap_or_else(|| DEFAULT_SERIAL.to_owned()),
        direct_io: DirectIo::Auto,
        on_fault: match request.on_fault {
            OnFault::Pause => pagetide_dpu::OnFault::Pause,
            OnFault::OutOfOrder => pagetide_dpu::OnFault::OutOfOrder,
        },
    }
}

pub(super) fn wrong_or_failed(error: &DpuError) -> ControlError {
    match error {
        DpuError::Setting { .. } | DpuError::Serial(_) | DpuError::Injection(_) => {
            ControlError::wrong_use(error.to_string())
        }
        DpuError::Image(_) | DpuError::Socket(_) | DpuError::TooManyDevices => {
            ControlError::refused(error.to_string())
        }
        _ => failed(error),
    }
}

fn report_of(device: pagetide_dpu::DeviceReport, vms: &[(FileKey, String)]) -> DeviceReport {
    let vm = vms
        .iter()
        .find(|(key, _)| device.files.contains(key))
        .map(|(_, name)| name.clone());
    DeviceReport {
        id: device.id.0,
        socket: device.socket.display().to_string(),
        kind: "blk".to_owned(),
        image: Some(device.image.display().to_string()),
        state: match device.state {
            pagetide_dpu::DeviceState::Listening => DeviceState::Listening,
            pagetide_dpu::DeviceState::Connected => DeviceState::Connected,
            pagetide_dpu::DeviceState::Stopped => DeviceState::Stopped,
        },
        error: device.stopped_because,
        vm,
        queues: device.queue_count,
        read_only: device.writes == Writes::Refused,
        lookup: device.look_up == LookUp::On,
        on_fault: match device.on_fault {
            pagetide_dpu::OnFault::Pause => OnFault::Pause,
            pagetide_dpu::OnFault::OutOfOrder => OnFault::OutOfOrder,
        },
        weight: device.weight,
        serial: Some(device.serial),
        capacity_bytes: device.capacity_bytes,
        requests: device.requests,
        read_bytes: device.read_bytes,
        written_bytes: device.written_bytes,
        inflight_requests: device.inflight_requests,
        failed_requests: device.failed_requests,
        iopfs: device.iopfs,
        injected_iopfs: device.injected_iopfs,
        prefaults: device.prefaults,
        overwritten_pages: device.overwritten_pages,
        timed_out_requests: device.timed_out_requests,
        parked_chains: device.parked_chains,
        logged_accesses: device.logged_accesses,
        lost_accesses: device.lost_accesses,
        wired_bytes: device.wired_bytes,
        malformed_requests: device.malformed_requests,
        outside_requests: device.outside_requests,
    }
}
