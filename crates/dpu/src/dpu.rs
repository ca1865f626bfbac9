// SPDX-License-Identifier: Apache-2.0
//! The software DPU: its engines and its devices.

mod hand_over;

use crate::{
    alias::{ALIAS_FAULTS_MAX, Alias},
    blk::open::UnclaimedDisk,
    config::{BlkConfig, DeviceConfig, DpuConfig, DpuError, NicConfig, check_queues, check_weight},
    device::{Control, Endpoint, EngineGone, ParkedDevice, Parts, SocketError},
    devices::{Device, DeviceReport, Devices, Place},
    engine::{
        Engine, Seed,
        command::{Command, EngineShared},
    },
    inject::{Injection, InjectionReport},
    kind::Kind,
    lock,
    net::{
        config::STORE_BYTES_RANGE, device::Nic, handed::ParkedNic, link::pair::Pairs,
        nic::PAIRS_MAX, record::file::RecordFile,
    },
    ring::DEVICES_MAX,
    shared::{DeviceSetup, DeviceShared},
    slo::report::{Accounting, SloReport},
};
use pagetide_addr::DeviceId;
use pagetide_sys::clock::now_ns;
use pagetide_vpri::{
    AccessLog, BounceArea, DomainTable, Doorbell, FaultAssist, HostEnd, fault_queue,
};
use std::{
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::Ordering,
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

struct EngineHandle {
    shared: Arc<EngineShared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The software DPU.
pub struct Dpu {
    engines: Vec<EngineHandle>,
    domains: Arc<DomainTable>,
    iopf_timeout: Option<Duration>,
    state_dir: PathBuf,
    devices: Mutex<Devices>,
    /// Network devices that are linked to each other.
    pairs: Pairs,
}

impl Dpu {
    /// Starts the engines. Returns the host's end of each engine's page fault queue, and one more
    /// for alias faults of our own mapping; `host_bell` is rung when there are page requests.
    ///
    /// After a crash, [`wait_for_dead_engines`](lock::wait_for_dead_engines) comes first.
    ///
    /// # Errors
    /// [`DpuError`].
    pub fn start(
        config: &DpuConfig,
        domains: Arc<DomainTable>,
        host_bell: &Arc<Doorbell>,
    ) -> Result<(Self, Vec<HostEnd>), DpuError> {
        config.check(&domains)?;
        let mut dpu = Self {
            engines: Vec::new(),
            domains,
            iopf_timeout: config.iopf_timeout,
            state_dir: config.state_dir.clone(),
            devices: Mutex::default(),
            pairs: Pairs::default(),
        };
        let mut host_ends = Vec::new();
        for engine in 0..config.engine_count {
            let host_end = dpu.start_engine(config, engine, host_bell)?;
            host_ends.push(host_end);
        }
        host_ends.push(dpu.watch_mappings(host_bell)?);
        Ok((dpu, host_ends))
    }

    /// Returns the queue for page requests of alias faults.
    fn watch_mappings(&self, host_bell: &Arc<Doorbell>) -> Result<HostEnd, DpuError> {
        let index = self.engines.len();
        let failed = |source| DpuError::Engine {
            engine: index,
            source,
        };
        let bell = Arc::new(Doorbell::new().map_err(failed)?);
        let (device_end, host_end) = fault_queue(ALIAS_FAULTS_MAX, bell.clone(), host_bell.clone());
        let alias = Alias::new(device_end, index, bell);
        self.domains.set_watch(Arc::new(alias));
        Ok(host_end)
    }

    fn start_engine(
        &mut self,
        config: &DpuConfig,
        engine: usize,
        host_bell: &Arc<Doorbell>,
    ) -> Result<HostEnd, DpuError> {
        let failed = |source| DpuError::Engine { engine, source };
        let lock = lock::take(&config.state_dir, engine)?;
        let bell = Arc::new(Doorbell::new().map_err(failed)?);
        let (device_end, host_end) =
            fault_queue(config.fault_queue_entries, bell.clone(), host_bell.clone());
        if config.bounce_buffers > 0 {
            let area = BounceArea::new(config.bounce_buffers)?;
            host_end.set_bounce(Some(Arc::new(area)));
        }
        let shared = Arc::new(EngineShared::new(bell.clone()));
        let seed = Seed {
            index: engine,
            ring_entries: config.ring_entries,
            fault_queue_entries: config.fault_queue_entries,
            poll: config.poll_max,
            iopf_timeout: config.iopf_timeout,
            lock,
            shared: shared.clone(),
            device_end,
            bell,
        };
        let cpu = config.cpus.get(engine % config.cpus.len().max(1)).copied();
        let (ready, is_ready) = channel();
        let thread = std::thread::Builder::new()
            .name(format!("engine-{engine}"))
            .spawn(move || run_engine(seed, cpu, &ready))
            .map_err(failed)?;
        self.engines.push(EngineHandle {
            shared,
            thread: Mutex::new(Some(thread)),
        });
        is_ready.recv().map_err(|_| EngineGone)?.map_err(failed)?;
        Ok(host_end)
    }

    /// Lets engines serve their own page requests.
    ///
    /// # Errors
    /// [`DpuError::Gone`].
    pub fn set_assist(&self, assist: &Arc<dyn FaultAssist>) -> Result<(), DpuError> {
        for engine in &self.engines {
            let command = Command::SetAssist(assist.clone());
            engine
                .shared
                .mailbox
                .post(command)
                .map_err(EngineGone::from)?;
        }
        Ok(())
    }

    /// Makes each engine report DMA accesses with its pen of `log`, while anything reads it. Call
    /// it once.
    ///
    /// # Errors
    /// [`DpuError::Gone`].
    pub fn set_access_log(&self, log: &Arc<AccessLog>) -> Result<(), DpuError> {
        for (index, engine) in self.engines.iter().enumerate() {
            if let Some(pen) = log.pen(index) {
                let posted = engine.shared.mailbox.post(Command::SetPen(pen));
                posted.map_err(EngineGone::from)?;
            }
        }
        Ok(())
    }

    /// Adds a block device, which starts listening.
    ///
    /// # Errors
    /// [`DpuError`].
    pub fn add_blk(&self, config: BlkConfig) -> Result<DeviceId, DpuError> {
        let access = config.access;
        self.add_disk(&config, |control| Ok(Endpoint::open(control, access)?))
    }

    /// Adds a block device that another process has parked. Its rings run, and its front end's messages wait until
    /// [`Self::admit`]. It is taken out of `parked` only once its image is ours: if that is still locked, try again.
    ///
    /// # Errors
    /// [`DpuError`].
    pub fn add_parked_blk(
        &self,
        config: BlkConfig,
        parked: &mut Option<ParkedDevice>,
    ) -> Result<DeviceId, DpuError> {
        let socket = config.socket.clone();
        self.add_disk(&config, |control| {
            let parked = parked.take();
            let ParkedDevice {
                listener,
                front_end,
                ..
            } = parked.ok_or(SocketError::NotASocket(socket))?;
            Ok(Endpoint::hold(control, listener, front_end)?)
        })
    }

    /// Adds a network device, which starts listening.
    ///
    /// # Errors
    /// [`DpuError`].
    pub fn add_nic(&self, config: &NicConfig) -> Result<DeviceId, DpuError> {
        let access = config.access;
        self.add_link(config, None, |control| Ok(Endpoint::open(control, access)?))
    }

    /// Adds a network device that another process has parked. Its rings run and send, and it receives nothing until
    /// [`Self::admit`]. It is taken out of `parked` only once its link is ours: if that is still in use, try again.
    ///
    /// # Errors
    /// [`DpuError`].
    pub fn add_parked_nic(
        &self,
        config: &NicConfig,
        parked: &mut Option<ParkedDevice>,
    ) -> Result<DeviceId, DpuError> {
        let socket = config.socket.clone();
        let nic = parked.as_ref().and_then(|parked| parked.nic.as_ref());
        let nic = nic.map(|nic| nic.copy_for(&config.link)).transpose()?;
        self.add_link(config, nic.as_ref(), |control| {
            let parked = parked.take();
            let ParkedDevice {
                listener,
                front_end,
                ..
            } = parked.ok_or(SocketError::NotASocket(socket))?;
            Ok(Endpoint::hold(control, listener, front_end)?)
        })
    }

    fn add_link(
        &self,
        config: &NicConfig,
        handed: Option<&ParkedNic>,
        open: impl FnOnce(Arc<Control>) -> Result<Endpoint, DpuError>,
    ) -> Result<DeviceId, DpuError> {
        if !(1..=PAIRS_MAX).contains(&config.pairs) {
            return Err(DpuError::Setting {
                setting: "pairs",
                value: u64::from(config.pairs),
                must: "from 1 to 32",
            });
        }
        if !STORE_BYTES_RANGE.contains(&config.receive.store_bytes) {
            return Err(DpuError::Setting {
                setting: "store_bytes",
                value: config.receive.store_bytes,
                must: "from 131072 to 1073741824",
            });
        }
        let claim = |_: DeviceId, _: &Devices| -> Result<Kind, DpuError> {
            let (link, known) = (&config.link, &self.pairs);
            let nic = Nic::open(config.pairs, link, config.receive, known, handed)?;
            Ok(Kind::Net(Arc::new(nic)))
        };
        self.add_device(config.device(), claim, open)
    }

    fn add_disk(
        &self,
        config: &BlkConfig,
        open: impl FnOnce(Arc<Control>) -> Result<Endpoint, DpuError>,
    ) -> Result<DeviceId, DpuError> {
        let device = config.device();
        check_queues(device.queue_count)?;
        let disk = UnclaimedDisk::open(config)?;
        let claim = |id, devices: &Devices| {
            let disk = disk.claim(id, devices.disks())?;
            Ok(Kind::Blk(Arc::new(disk)))
        };
        self.add_device(device, claim, open)
    }

    /// Adds a device. `claim` takes for it what it needs of the host and no other device may have.
    fn add_device(
        &self,
        config: DeviceConfig,
        claim: impl FnOnce(DeviceId, &Devices) -> Result<Kind, DpuError>,
        open: impl FnOnce(Arc<Control>) -> Result<Endpoint, DpuError>,
    ) -> Result<DeviceId, DpuError> {
        let mut devices = self.lock();
        let id = DeviceId(devices.next_id + 1);
        let kind = claim(id, &devices)?;
        let is_free = |place: &Place| matches!(place, Place::Free);
        let slot = match devices.slots.iter().position(is_free) {
            Some(slot) => slot,
            None if devices.slots.len() == DEVICES_MAX as usize => {
                return Err(DpuError::TooManyDevices);
            }
            None => {
                devices.slots.push(Place::Free);
                devices.slots.len() - 1
            }
        };
        devices.next_id = id.0;
        let shared = Arc::new(DeviceShared::new(DeviceSetup {
            id,
            kind,
            on_fault: config.on_fault,
            engine_count: self.engines.len(),
            iopf_timeout: self.iopf_timeout,
        }));
        let control = Arc::new(Control::new(Parts {
            slot,
            shared,
            engines: self.engines.iter().map(|e| e.shared.clone()).collect(),
            domains: self.domains.clone(),
            look_up: config.look_up,
            queue_count: config.queue_count,
            ram: config.ram,
            socket: config.socket.clone(),
            state_dir: self.state_dir.clone(),
        }));
        control.add_to_engines()?.map_err(DpuError::Table)?;
        let endpoint = match open(control.clone()) {
            Ok(endpoint) => endpoint,
            Err(error) => {
                control.remove_from_engines()?.map_err(DpuError::Table)?;
                control.shared.kind.release();
                return Err(error);
            }
        };
        devices.slots[slot] = Place::Here(Device { config, endpoint });
        Ok(id)
    }

    /// Hangs up on a device's front end, waits for its I/O, and removes it.
    ///
    /// # Errors
    /// [`DpuError::NoSuchDevice`], [`DpuError::Gone`].
    pub fn remove(&self, id: DeviceId) -> Result<(), DpuError> {
        let taken = self.lock().take(id);
        let (slot, mut device) = taken.ok_or(DpuError::NoSuchDevice(id))?;
        // Not under the lock: a slow disk takes its time, and the other devices must go on.
        device.endpoint.close();
        let control = device.endpoint.control();
        let removed = control.remove_from_engines()?;
        // Its I/O is done: what is behind it is free now, even if some ring still refers to it.
        control.shared.kind.release();
        RecordFile::remove_all(&control.state_dir, &control.socket, control.queue_count);
        self.lock().slots[slot] = Place::Free;
        removed.map_err(DpuError::Table)
    }

    /// Every device, by id.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceReport> {
        let devices = self.lock();
        let mut reports: Vec<DeviceReport> = devices.here().map(Device::report).collect();
        reports.sort_by_key(|report| report.id);
        reports
    }

    /// The service-level account of a device.
    ///
    /// # Errors
    /// [`DpuError::NoSuchDevice`].
    pub fn slo(&self, id: DeviceId) -> Result<SloReport, DpuError> {
        let device = self.shared(id)?;
        let account = device.account.lock();
        let mut account = account.unwrap_or_else(PoisonError::into_inner);
        Ok(account.report(now_ns()))
    }

    /// Turns a device's account on or off, to measure its cost.
    ///
    /// # Errors
    /// [`DpuError::NoSuchDevice`].
    pub fn set_accounting(&self, id: DeviceId, accounting: Accounting) -> Result<(), DpuError> {
        self.shared(id)?.set_accounting(accounting);
        Ok(())
    }

    /// Changes a device's share of its engines, from their next turn on. Devices that all have work
    /// get shares in proportion to their weights.
    ///
    /// # Errors
    /// [`DpuError::NoSuchDevice`], [`DpuError::Setting`].
    pub fn set_weight(&self, id: DeviceId, weight: u32) -> Result<(), DpuError> {
        check_weight(weight)?;
        self.shared(id)?.set_weight(weight);
        Ok(())
    }

    /// Injects faults into a device; this replaces an injection under way.
    ///
    /// # Errors
    /// [`DpuError::NoSuchDevice`], [`DpuError::Injection`].
    pub fn inject(&self, id: DeviceId, injection: Injection) -> Result<(), DpuError> {
        Ok(self.shared(id)?.injector.begin(injection, now_ns())?)
    }

    /// The last injection into a device; `None` if there was none.
    ///
    /// # Errors
    /// [`DpuError::NoSuchDevice`].
    pub fn injection(&self, id: DeviceId) -> Result<Option<InjectionReport>, DpuError> {
        Ok(self.shared(id)?.injector.report(now_ns()))
    }

    /// Ends the injection into a device, if one is under way.
    ///
    /// # Errors
    /// [`DpuError::NoSuchDevice`].
    pub fn stop_injection(&self, id: DeviceId) -> Result<(), DpuError> {
        self.shared(id)?.injector.stop(now_ns());
        Ok(())
    }

    fn shared(&self, id: DeviceId) -> Result<Arc<DeviceShared>, DpuError> {
        let devices = self.lock();
        let mut known = devices.here();
        let found = known.find(|device| device.id() == id);
        let device = found.ok_or(DpuError::NoSuchDevice(id))?;
        Ok(Arc::clone(&device.endpoint.control().shared))
    }

    /// How often engines have slept.
    #[must_use]
    pub fn engine_sleeps(&self) -> u64 {
        self.engines
            .iter()
            .map(|e| e.shared.sleeps.load(Ordering::Relaxed))
            .sum()
    }

    /// Hangs up on all front ends, waits for I/O under way, and ends the engines. Parked chains
    /// stay in their front ends' in-flight regions. A second call does nothing.
    pub fn shut_down(&self) {
        let ids: Vec<DeviceId> = self.devices().iter().map(|d| d.id).collect();
        for id in ids {
            if let Err(error) = self.remove(id) {
                tracing::error!(device = id.0, %error, "removing a device at shutdown");
            }
        }
        self.end_engines();
    }

    fn end_engines(&self) {
        for engine in &self.engines {
            if engine.shared.mailbox.post(Command::ShutDown).is_err() {
                tracing::debug!("an engine had ended already");
            }
            let thread = engine
                .thread
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            if thread.is_some_and(|thread| thread.join().is_err()) {
                tracing::error!("an engine panicked");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Devices> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Dpu {
    fn drop(&mut self) {
        self.shut_down();
    }
}

fn run_engine(seed: Seed, cpu: Option<usize>, ready: &Sender<io::Result<()>>) {
    let index = seed.index;
    let shared = seed.shared.clone();
    if let Some(cpu) = cpu
        && let Err(error) = pagetide_sys::cpu::set_affinity(&[cpu])
    {
        tracing::warn!(engine = index, %error, "the engine runs where the kernel puts it");
    }
    let (engine, outcome) = match Engine::new(seed) {
        Ok(engine) => (Some(engine), Ok(())),
        Err(error) => (None, Err(error)),
    };
    if ready.send(outcome).is_err() {
        tracing::debug!(
            engine = index,
            "the caller no longer waits for the engine to start"
        );
    }
    match engine {
        Some(engine) => engine.run(),
        None => shared.mailbox.close(),
    }
}
