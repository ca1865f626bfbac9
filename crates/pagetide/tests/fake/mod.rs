// SPDX-License-Identifier: Apache-2.0
//! A system that does nothing but remember, and a server of the API over it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use pagetide_daemon::api::{ApiSocket, router, serve};
use pagetide_daemon::budget::{BudgetBody, HostReport, HostVmReport, ShareChange};
use pagetide_daemon::control::{
    AttachRequest, BlkRequest, Control, ControlError, DetachReport, DeviceReport, NetRequest,
    ReclaimReport, SetReport, VmReport,
};

use pagetide_daemon::injection::{InjectionReport, InjectionRequest};
use pagetide_daemon::pool::{NewCap, PoolReport};
use pagetide_daemon::protection::ProtectorChoice;
use pagetide_daemon::protection::recording::{RecordingReport, RecordingRequest};
use pagetide_daemon::scheduler::{ScheduleChange, SchedulerReport};
use pagetide_daemon::slo::{SloList, SloReport, SloWindowReport, SlowRequestReport};

/// Pid of which the fake says that it is no VMM.
pub const NO_VMM_PID: u32 = 1;
/// Pid at which the fake breaks.
pub const BROKEN_PID: u32 = 2;
/// Pid at which the fake panics.
pub const PANIC_PID: u32 = 3;

#[derive(Default)]
pub struct FakeControl {
    vms: Mutex<BTreeMap<String, VmReport>>,
    devices: Mutex<BTreeMap<PathBuf, DeviceReport>>,
    injections: Mutex<BTreeMap<String, InjectionReport>>,
    recording: Mutex<Option<RecordingReport>>,
    budget: Mutex<Option<u64>>,
    cap: Mutex<Option<u64>>,
    cycle_us: Mutex<u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

fn no_vm(name: &str) -> ControlError {
    ControlError::not_found(format!("there is no VM '{name}': see `pagetide vm list`"))
}

fn no_device(name: &str) -> ControlError {
    ControlError::not_found(format!(
        "no device has the socket or serial number '{name}'"
    ))
}

impl Control for FakeControl {
    fn attach(&self, request: AttachRequest) -> Result<VmReport, ControlError> {
        match request.pid {
            NO_VMM_PID => return Err(ControlError::refused("process 1 is no VMM")),
            BROKEN_PID => return Err(ControlError::failed("ptrace broke")),
            PANIC_PID => panic!("as the test wants"),
            _ => {}
        }
        let vm = VmReport {
            name: request.name.clone(),
            pid: request.pid,
            vmm: "qemu-system-x86_64".into(),
            ram_bytes: 1 << 30,
            resident_bytes: 300 << 20,
            limit_bytes: request.limit_bytes,
            sections: vec![SetReport {
                set: "cold".into(),
                sections: 3,
            }],
            ..VmReport::default()
        };
        lock(&self.vms).insert(request.name, vm.clone());
        Ok(vm)
    }

    fn vms(&self) -> Vec<VmReport> {
        lock(&self.vms).values().cloned().collect()
    }

    fn vm(&self, name: &str) -> Result<VmReport, ControlError> {
        lock(&self.vms)
            .get(name)
            .cloned()
            .ok_or_else(|| no_vm(name))
    }

    fn set_limit(&self, name: &str, limit_bytes: Option<u64>) -> Result<VmReport, ControlError> {
        let mut vms = lock(&self.vms);
        let vm = vms.get_mut(name).ok_or_else(|| no_vm(name))?;
        if limit_bytes.is_some_and(|limit| limit < 1 << 20) {
            return Err(ControlError::wrong_use("no VM can work within that limit"));
        }
        vm.limit_bytes = limit_bytes;
        Ok(vm.clone())
    }

    fn host(&self) -> Result<HostReport, ControlError> {
        let budget_bytes = *lock(&self.budget);
        let vm = |vm: &VmReport| HostVmReport {
            name: vm.name.clone(),
            floor_bytes: vm.floor_bytes,
            ..HostVmReport::default()
        };
        Ok(HostReport {
            ram_bytes: 4 << 30,
            budget_bytes,
            free_bytes: budget_bytes,
            vms: lock(&self.vms).values().map(vm).collect(),
            ..HostReport::default()
        })
    }

    fn set_budget(&self, change: &BudgetBody) -> Result<HostReport, ControlError> {
        let Some(bytes) = change.budget_bytes.or(*lock(&self.budget)) else {
            return Err(ControlError::refused("there is no budget to change"));
        };
        if bytes > 4 << 30 {
            return Err(ControlError::wrong_use(
                "the budget is more than the host's memory",
            ));
        }
        *lock(&self.budget) = Some(bytes);
        self.host()
    }

    fn lift_budget(&self) -> Result<HostReport, ControlError> {
        *lock(&self.budget) = None;
        self.host()
    }

    fn set_share(&self, name: &str, change: &ShareChange) -> Result<VmReport, ControlError> {
        let mut vms = lock(&self.vms);
        let vm = vms.get_mut(name).ok_or_else(|| no_vm(name))?;
        if change.weight == Some(0) {
            return Err(ControlError::wrong_use("weight 0 is not possible"));
        }
        vm.weight = change.weight.map_or(vm.weight, u64::from);
        vm.floor_bytes = change.floor_bytes.unwrap_or(vm.floor_bytes);
        vm.limit_bytes = change.ceiling_bytes.of(vm.limit_bytes);
        Ok(vm.clone())
    }

    fn pool(&self) -> Option<PoolReport> {
        Some(PoolReport {
            cap_bytes: *lock(&self.cap),
            ..PoolReport::default()
        })
    }

    fn set_pool_cap(&self, cap: NewCap) -> Result<PoolReport, ControlError> {
        *lock(&self.cap) = match cap {
            NewCap::Bytes(0) => return Err(ControlError::wrong_use("a cap of 0 cannot work")),
            NewCap::Bytes(bytes) => Some(bytes),
            NewCap::None | NewCap::Default => None,
        };
        Ok(self.pool().unwrap_or_default())
    }

    fn scheduler(&self) -> Result<SchedulerReport, ControlError> {
        Ok(SchedulerReport {
            cycle_us: *lock(&self.cycle_us),
            ..SchedulerReport::default()
        })
    }

    fn change_scheduler(&self, change: &ScheduleChange) -> Result<SchedulerReport, ControlError> {
        match change.cycle_us {
            Some(0) => return Err(ControlError::wrong_use("a cycle of 0 cannot work")),
            Some(cycle_us) => *lock(&self.cycle_us) = cycle_us,
            None => {}
        }
        self.scheduler()
    }

    fn reset_scheduler(&self) -> Result<SchedulerReport, ControlError> {
        *lock(&self.cycle_us) = 0;
        self.scheduler()
    }

    fn reclaim(&self, name: &str, bytes: Option<u64>) -> Result<ReclaimReport, ControlError> {
        let vm = self.vm(name)?;
        Ok(ReclaimReport {
            name: vm.name,
            asked_bytes: bytes,
            reclaimed_bytes: bytes.unwrap_or(0),
            ..ReclaimReport::default()
        })
    }

    fn detach(&self, name: &str) -> Result<DetachReport, ControlError> {
        let vm = lock(&self.vms).remove(name).ok_or_else(|| no_vm(name))?;
        Ok(DetachReport {
            name: vm.name.clone(),
            pid: vm.pid,
            vm,
            ..DetachReport::default()
        })
    }

    fn stop_detach(&self, name: &str) -> Result<VmReport, ControlError> {
        self.vm(name)?;
        Err(ControlError::refused(format!(
            "{name} is not being detached"
        )))
    }

    fn add_blk(&self, request: BlkRequest) -> Result<DeviceReport, ControlError> {
        let device = DeviceReport {
            socket: request.socket.display().to_string(),
            kind: "blk".into(),
            image: Some(request.image.display().to_string()),
            queues: request.queues,
            read_only: request.read_only,
            lookup: request.lookup,
            weight: request.weight,
            serial: request.serial,
            ..DeviceReport::default()
        };
        lock(&self.devices).insert(request.socket, device.clone());
        Ok(device)
    }

    fn add_net(&self, request: NetRequest) -> Result<DeviceReport, ControlError> {
        let device = DeviceReport {
            socket: request.socket.display().to_string(),
            kind: "net".into(),
            link: Some(request.link.to_string()),
            queues: request.queues,
            lookup: request.lookup,
            weight: request.weight,
            ..DeviceReport::default()
        };
        lock(&self.devices).insert(request.socket, device.clone());
        Ok(device)
    }

    fn devices(&self) -> Vec<DeviceReport> {
        lock(&self.devices).values().cloned().collect()
    }

    fn set_weight(&self, socket: &Path, weight: u32) -> Result<DeviceReport, ControlError> {
        let mut devices = lock(&self.devices);
        let device = devices.get_mut(socket);
        let device = device.ok_or_else(|| ControlError::not_found("no such device"))?;
        device.weight = weight;
        Ok(device.clone())
    }

    fn remove_device(&self, socket: &Path) -> Result<(), ControlError> {
        match lock(&self.devices).remove(socket) {
            Some(_) => Ok(()),
            None => Err(ControlError::not_found(format!(
                "no device listens on {}",
                socket.display()
            ))),
        }
    }

    fn slo(&self, device: Option<&str>) -> Result<SloList, ControlError> {
        let devices = lock(&self.devices);
        let of = |d: &DeviceReport| device.is_none_or(|name| name == d.socket);
        let devices: Vec<SloReport> = devices
            .values()
            .filter(|d| of(d))
            .map(|d| SloReport {
                device: d.socket.clone(),
                windows: vec![SloWindowReport {
                    window: "minute".into(),
                    p999_us: Some(88.5),
                    ..SloWindowReport::default()
                }],
                slow: vec![SlowRequestReport::default()],
                ..SloReport::default()
            })
            .collect();
        match device {
            Some(name) if devices.is_empty() => Err(no_device(name)),
            _ => Ok(SloList { devices }),
        }
    }

    fn inject(&self, request: InjectionRequest) -> Result<InjectionReport, ControlError> {
        if !lock(&self.devices).contains_key(Path::new(&request.device)) {
            return Err(no_device(&request.device));
        }
        if request.rate <= 0.0 {
            return Err(ControlError::wrong_use("the rate of faults is not above 0"));
        }
        let report = InjectionReport {
            device: request.device.clone(),
            rate: request.rate,
            latency_us: 5_000.0,
            burst: request.burst,
            seconds: request.seconds,
            injected_iopfs: 7,
            resumed: 7,
            ..InjectionReport::default()
        };
        lock(&self.injections).insert(request.device, report.clone());
        Ok(report)
    }

    fn injection(&self, device: &str) -> Result<InjectionReport, ControlError> {
        let report = lock(&self.injections).get(device).cloned();
        report.ok_or_else(|| no_device(device))
    }

    fn stop_injection(&self, device: &str) -> Result<InjectionReport, ControlError> {
        self.injection(device)
    }

    fn set_protector(&self, name: &str, choice: ProtectorChoice) -> Result<VmReport, ControlError> {
        let mut vms = lock(&self.vms);
        let vm = vms.get_mut(name).ok_or_else(|| no_vm(name))?;
        vm.dma_protector = choice.to_string();
        Ok(vm.clone())
    }

    fn start_recording(&self, request: RecordingRequest) -> Result<RecordingReport, ControlError> {
        request.check()?;
        let mut recording = lock(&self.recording);
        if recording.as_ref().is_some_and(|it| it.active) {
            return Err(ControlError::refused("accesses are being recorded already"));
        }
        let report = RecordingReport {
            dir: request.dir.display().to_string(),
            active: true,
            ..RecordingReport::default()
        };
        *recording = Some(report.clone());
        Ok(report)
    }

    fn recording(&self) -> Result<RecordingReport, ControlError> {
        let nothing = || ControlError::not_found("nothing was ever recorded");
        lock(&self.recording).clone().ok_or_else(nothing)
    }

    fn stop_recording(&self) -> Result<RecordingReport, ControlError> {
        if let Some(recording) = lock(&self.recording).as_mut() {
            recording.active = false;
        }
        self.recording()
    }

    fn shut_down(&self) -> Result<(), ControlError> {
        lock(&self.vms).clear();
        Ok(())
    }
}

/// The API over a [`FakeControl`], until dropped.
pub struct Server {
    pub socket: PathBuf,
    _runtime: tokio::runtime::Runtime,
    _dir: tempfile::TempDir,
}

impl Server {
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api.sock");
        let bound = ApiSocket::bind(&socket).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let router = router(Arc::new(FakeControl::default()));
        runtime.spawn(async move {
            let listener = bound.listener().unwrap();
            serve(listener, router, std::future::pending()).await;
        });
        Self {
            socket,
            _runtime: runtime,
            _dir: dir,
        }
    }
}
