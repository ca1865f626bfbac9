// SPDX-License-Identifier: Apache-2.0
//! [`DeviceSet`]: the engines, their devices, and the list of devices that outlives them.
//!
//! The set of devices is written to `devices.json` in the state directory whenever it changes (a new
//! file renamed over the old one), so that a successor listens on the same sockets with the same images.
//! Front ends then reconnect by themselves and resubmit their requests in flight.
//!
//! A successor may find an image locked: by the remains of its predecessor, whose last descriptors the
//! kernel closes a moment after its I/O is done, or by another program that has locked it since. It
//! creates the other devices first and then retries for [`IMAGE_WAIT`]. A device that could not be
//! created stays on the list, and `dpu list` says why it is out of service.

use super::{
    disk::{coming_back, default_serial},
    list,
    make::{Again, go_on, make, wrong_or_failed},
    report::{report_of, report_of_missing},
    request::DeviceRequest,
};
use crate::{
    control::{ControlError, DeviceReport},
    settings::EngineSettings,
};
use pagetide_addr::{DeviceId, FileKey};
use pagetide_dpu::check_weight;
use pagetide_dpu::config::POLL_MAX;
use pagetide_dpu::{Dpu, DpuConfig, ParkedDevice, wait_for_dead_engines};
use pagetide_sys::pauses::Pauses;
use pagetide_vpri::{AccessLog, DomainTable, Doorbell, FaultAssist, HostEnd};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

const LIST_FILE: &str = "devices.json";
/// How long a successor waits for locked images. A predecessor releases its locks within milliseconds,
/// and front ends of other devices do not wait for this.
const IMAGE_WAIT: Duration = Duration::from_secs(5);
/// Longest time between two attempts.
const IMAGE_LOOK: Duration = Duration::from_millis(20);

/// What a start owes to what was handed over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Owed {
    /// All of it is served as before until then, or the start fails: another process can go on, and faults and
    /// requests wait meanwhile.
    AsBefore {
        /// Until then anything is waited for.
        until: Instant,
    },
    /// What cannot be served waits, as after a death: nobody else can go on.
    AsAfterDeath,
}

impl Owed {
    /// All of it, until then.
    pub(crate) const fn before(until: Instant) -> Self {
        Self::AsBefore { until }
    }

    /// How long to wait for what usually takes at most `usual`.
    pub(crate) fn wait(self, usual: Duration) -> Duration {
        self.left().map_or(usual, |left| left.min(usual))
    }

    /// How long to wait for what has no bound after a death.
    pub(crate) fn left(self) -> Option<Duration> {
        match self {
            Self::AsBefore { until } => Some(until.saturating_duration_since(Instant::now())),
            Self::AsAfterDeath => None,
        }
    }
}

/// The engines, their devices, and the list of devices.
pub(crate) struct DeviceSet {
    dpu: Dpu,
    list_path: PathBuf,
    list: Mutex<Vec<DeviceRequest>>,
    /// The list by socket, for reports: locked only for moments, while `list` is locked for as long as a
    /// device takes to be created or removed.
    kept: Mutex<BTreeMap<PathBuf, Kept>>,
    /// The predecessor's list, until its devices are restored.
    found: Mutex<Vec<DeviceRequest>>,
    /// The devices are restored. Until then no other list may overwrite the predecessor's.
    restored: AtomicBool,
}

/// A device on the list.
struct Kept {
    request: DeviceRequest,
    /// Why it is out of service.
    missing_because: Option<String>,
}

/// The engines of a set, as seen by the side that answers their page requests.
pub(crate) struct Hosts {
    /// The host's end of each queue of page requests.
    pub(crate) ends: Vec<HostEnd>,
    /// Rung when one of them has a request.
    pub(crate) bell: Arc<Doorbell>,
}

impl DeviceSet {
    /// Starts the engines. First reads the list of a predecessor: if it is of another version, nothing
    /// may be touched. Then waits until the rings of dead engines have drained: their I/O may still be
    /// writing to guests and images.
    pub(crate) fn start(
        state_dir: &Path,
        engines: &EngineSettings,
        domains: &Arc<DomainTable>,
        owed: Owed,
    ) -> Result<(Self, Hosts), ControlError> {
        let list_path = state_dir.join(LIST_FILE);
        let found = list::read(&list_path)?;
        wait_for_dead_engines(state_dir, owed.left(), |path| {
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
            list_path,
            list: Mutex::default(),
            kept: Mutex::default(),
            found: Mutex::new(found),
            restored: AtomicBool::new(false),
        };
        Ok((set, Hosts { ends, bell }))
    }

    /// Whether this program can read the list of devices in `state_dir`.
    pub(crate) fn examine(state_dir: &Path) -> Result<(), ControlError> {
        list::read(&state_dir.join(LIST_FILE)).map(drop)
    }

    /// True if there are devices on the list in `state_dir`, or if it cannot be read.
    pub(crate) fn are_left(state_dir: &Path) -> bool {
        let list = list::read(&state_dir.join(LIST_FILE));
        list.map_or(true, |list| !list.is_empty())
    }

    /// Gives engines a way to serve or send their own page requests.
    pub(crate) fn set_assist(&self, assist: &Arc<dyn FaultAssist>) -> Result<(), ControlError> {
        self.dpu.set_assist(assist).map_err(failed)
    }

    /// Lets engines record DMA accesses in `log`, while records are wanted.
    pub(crate) fn set_access_log(&self, log: &Arc<AccessLog>) -> Result<(), ControlError> {
        self.dpu.set_access_log(log).map_err(failed)
    }

    /// Names of the devices, by their numbers.
    pub(crate) fn names(&self) -> BTreeMap<DeviceId, String> {
        let name =
            |device: pagetide_dpu::DeviceReport| (device.id, device.socket.display().to_string());
        self.dpu.devices().into_iter().map(name).collect()
    }

    /// Restores the devices of a predecessor, those in `parked` with their connections. If another one cannot be
    /// created, this logs the reason and leaves it out of service, but on the list.
    ///
    /// # Errors
    /// One in `parked` cannot be created as it was, and that is owed. Otherwise its front end is hung up on, and it is
    /// created like the others.
    pub(crate) fn restore(
        &self,
        parked: Vec<ParkedDevice>,
        owed: Owed,
    ) -> Result<(), ControlError> {
        let known = std::mem::take(&mut *lock(&self.found));
        let deadline = Instant::now() + owed.wait(IMAGE_WAIT);
        for device in parked {
            match self.go_on_with(device, &known, deadline) {
                Err(error) if owed == Owed::AsAfterDeath => {
                    tracing::error!(error = error.message, "a front end has to connect again");
                }
                went_on => went_on?,
            }
        }
        let is_missing =
            |request: &&DeviceRequest| !lock(&self.kept).contains_key(request.socket());
        let mut waiting: Vec<&DeviceRequest> = known.iter().filter(is_missing).collect();
        waiting.retain(|request| self.make_again(request, deadline) == Again::Later);
        for request in &waiting {
            let socket = request.socket().display();
            tracing::info!(%socket, "waiting for what another process still has of a device");
        }
        let mut pauses = Pauses::up_to(IMAGE_LOOK);
        while !waiting.is_empty() {
            pauses.pause();
            waiting.retain(|request| self.make_again(request, deadline) == Again::Later);
        }
        *lock(&self.list) = known;
        self.restored.store(true, Ordering::Release);
        Ok(())
    }

    /// Creates a device that was handed over.
    fn go_on_with(
        &self,
        parked: ParkedDevice,
        known: &[DeviceRequest],
        deadline: Instant,
    ) -> Result<(), ControlError> {
        let kept = known.iter().find(|known| known.socket() == parked.socket);
        let kept = kept.ok_or_else(|| {
            failed(format!(
                "{} was handed over and is not in {}",
                parked.socket.display(),
                self.list_path.display()
            ))
        })?;
        let request = &coming_back(kept);
        let mut parked = Some(parked);
        let mut pauses = Pauses::up_to(IMAGE_LOOK);
        loop {
            match go_on(&self.dpu, request, &mut parked) {
                // The kernel gives a dead predecessor's locks back a moment after its end.
                Err(error) if error.again() == Again::Later && Instant::now() < deadline => {
                    pauses.pause();
                }
                Err(error) => {
                    return Err(failed(format!(
                        "the device at {}: {error}",
                        request.socket().display()
                    )));
                }
                Ok(_) => break,
            }
        }
        self.keep(kept, None);
        Ok(())
    }

    /// Restores a device of a predecessor; returns whether to retry before `deadline`.
    fn make_again(&self, request: &DeviceRequest, deadline: Instant) -> Again {
        let socket = request.socket().display();
        let missing_because = match make(&self.dpu, &coming_back(request)) {
            Ok(_) => {
                tracing::info!(%socket, "listening again");
                None
            }
            Err(error) if error.again() == Again::Later && Instant::now() < deadline => {
                return Again::Later;
            }
            Err(error) => {
                tracing::error!(%socket, %error, "the device cannot be made again");
                Some(error.to_string())
            }
        };
        self.keep(request, missing_because);
        Again::Never
    }

    fn keep(&self, request: &DeviceRequest, missing_because: Option<String>) {
        let kept = Kept {
            request: request.clone(),
            missing_because,
        };
        lock(&self.kept).insert(request.socket().to_owned(), kept);
    }

    pub(crate) fn add(
        &self,
        request: DeviceRequest,
        vms: &[(FileKey, String)],
    ) -> Result<DeviceReport, ControlError> {
        let mut request = request;
        if !self.restored.load(Ordering::Acquire) {
            return Err(ControlError::refused(format!(
                "the devices of {} were not restored, since the RAM of a VM is not known (see the log); no device is served until that is fixed and the daemon is restarted",
                self.list_path.display()
            )));
        }
        let mut list = lock(&self.list);
        if list.iter().any(|known| known.socket() == request.socket()) {
            return Err(ControlError::refused(format!(
                "a device listens on {} already: give another --socket, or remove that one by `pagetide dpu remove`",
                request.socket().display()
            )));
        }
        if let DeviceRequest::Blk(blk) = &mut request
            && blk.serial.is_none()
        {
            blk.serial = Some(default_serial(&blk.socket, &list));
        }
        let id = make(&self.dpu, &request).map_err(ControlError::from)?;
        list.push(request.clone());
        if let Err(error) = self.save(&list) {
            list.pop();
            self.dpu.remove(id).map_err(failed)?;
            return Err(error);
        }
        self.keep(&request, None);
        drop(list);
        self.report(id, Some(&request), vms)
    }

    fn report(
        &self,
        id: DeviceId,
        request: Option<&DeviceRequest>,
        vms: &[(FileKey, String)],
    ) -> Result<DeviceReport, ControlError> {
        let mut devices = self.dpu.devices().into_iter();
        let its = devices.find(|device| device.id == id);
        its.map(|device| report_of(device, request, vms))
            .ok_or_else(|| failed("the device was removed at once by another call"))
    }

    /// Changes a device's weight, in the list first: a successor must find the weight in force.
    pub(crate) fn set_weight(
        &self,
        socket: &Path,
        weight: u32,
        vms: &[(FileKey, String)],
    ) -> Result<DeviceReport, ControlError> {
        check_weight(weight).map_err(|error| wrong_or_failed(&error))?;
        let mut list = lock(&self.list);
        let known = list.iter().position(|known| known.socket() == socket);
        let (Some(at), Some(id)) = (known, self.id_of(socket)) else {
            return Err(no_such_device(socket));
        };
        let before = list[at].set_weight(weight);
        if let Err(error) = self.save(&list) {
            list[at].set_weight(before);
            return Err(error);
        }
        self.dpu.set_weight(id, weight).map_err(failed)?;
        let request = list[at].clone();
        self.keep(&request, None);
        drop(list);
        self.report(id, Some(&request), vms)
    }

    fn save(&self, list: &[DeviceRequest]) -> Result<(), ControlError> {
        list::write(&self.list_path, list)
    }

    pub(super) fn dpu(&self) -> &Dpu {
        &self.dpu
    }

    pub(crate) fn reports(&self, vms: &[(FileKey, String)]) -> Vec<DeviceReport> {
        let devices = self.dpu.devices().into_iter();
        let kept = lock(&self.kept);
        let mut reports: Vec<_> = devices
            .map(|device| {
                let request = kept.get(&device.socket).map(|kept| &kept.request);
                report_of(device, request, vms)
            })
            .collect();
        reports.extend(kept.values().filter_map(|kept| {
            let error = kept.missing_because.as_ref()?;
            Some(report_of_missing(&kept.request, error))
        }));
        reports.sort_by(|one, other| one.socket.cmp(&other.socket));
        reports
    }

    /// Removes a device; returns its number.
    pub(crate) fn remove(&self, socket: &Path) -> Result<Option<DeviceId>, ControlError> {
        let mut list = lock(&self.list);
        let Some(position) = list.iter().position(|known| known.socket() == socket) else {
            return Err(no_such_device(socket));
        };
        let id = self.id_of(socket);
        // First in the list: a device that cannot be removed from it must not come back at the next
        // start.
        let gone = list.remove(position);
        if let Err(error) = self.save(&list) {
            list.insert(position, gone);
            return Err(error);
        }
        lock(&self.kept).remove(socket);
        // Its I/O may take long, and other callers must not wait for it.
        drop(list);
        if let Some(id) = id {
            self.dpu.remove(id).map_err(failed)?;
        }
        Ok(id)
    }

    fn id_of(&self, socket: &Path) -> Option<DeviceId> {
        self.dpu
            .devices()
            .into_iter()
            .find(|device| device.socket == socket)
            .map(|device| device.id)
    }

    /// Refuses while a front end is connected whose requests in flight only this process knows.
    pub(crate) fn may_hand_over(&self) -> Result<(), ControlError> {
        match self.dpu.unrecorded() {
            None => Ok(()),
            Some((socket, queue)) => Err(ControlError::refused(format!(
                "the front end at {} keeps no record of its requests in flight (INFLIGHT_SHMFD, which QEMU has), so \
                 queue {queue} cannot be handed over: disconnect it first",
                socket.display()
            ))),
        }
    }

    /// Waits until no image has a request of ours under way, and begins none until [`Self::park`].
    ///
    /// # Errors
    /// An image does not answer in time. The devices go on then.
    pub(crate) fn hush(&self, wait: Duration) -> Result<(), ControlError> {
        self.dpu
            .hush(wait)
            .map_err(|error| ControlError::refused(error.to_string()))
    }

    /// Gives up all devices and ends the engines, for another process.
    pub(crate) fn park(&self) -> Vec<ParkedDevice> {
        self.dpu.park()
    }

    /// Front ends that were handed over may go on.
    pub(crate) fn admit(&self) {
        self.dpu.admit();
    }

    /// Ends the devices and the engines. Page requests must be answered until this is done.
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

/// The time-out setting; 0 means none.
fn iopf_timeout(millis: u32) -> Option<Duration> {
    (millis > 0).then(|| Duration::from_millis(u64::from(millis)))
}
