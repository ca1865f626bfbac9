// SPDX-License-Identifier: Apache-2.0
//! The end of a daemon. The process sends itself a signal, and all its threads must block that: so there is no
//! harness, which would have one of its own.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::Method;
use pagetide_daemon::api::{ApiSocket, Health};
use pagetide_daemon::budget::{BudgetBody, HostReport, ShareChange};
use pagetide_daemon::client::Client;
use pagetide_daemon::control::{
    AttachRequest, BlkRequest, Control, ControlError, DetachReport, DeviceReport, NetRequest,
    ReclaimReport, VmReport,
};
use pagetide_daemon::injection::{InjectionReport, InjectionRequest};
use pagetide_daemon::protection::ProtectorChoice;
use pagetide_daemon::protection::recording::{RecordingReport, RecordingRequest};
use pagetide_daemon::run::serve;
use pagetide_daemon::slo::SloList;

/// A system of which only the end matters.
#[derive(Default)]
struct Ending {
    shut_down: AtomicBool,
}

fn never<T>() -> Result<T, ControlError> {
    Err(ControlError::failed("not in this test"))
}

impl Control for Ending {
    fn attach(&self, _: AttachRequest) -> Result<VmReport, ControlError> {
        never()
    }
    fn vms(&self) -> Vec<VmReport> {
        vec![]
    }
    fn vm(&self, _: &str) -> Result<VmReport, ControlError> {
        never()
    }
    fn set_limit(&self, _: &str, _: Option<u64>) -> Result<VmReport, ControlError> {
        never()
    }
    fn host(&self) -> Result<HostReport, ControlError> {
        never()
    }
    fn set_budget(&self, _: &BudgetBody) -> Result<HostReport, ControlError> {
        never()
    }
    fn lift_budget(&self) -> Result<HostReport, ControlError> {
        never()
    }
    fn set_share(&self, _: &str, _: &ShareChange) -> Result<VmReport, ControlError> {
        never()
    }
    fn set_protector(&self, _: &str, _: ProtectorChoice) -> Result<VmReport, ControlError> {
        never()
    }
    fn start_recording(&self, _: RecordingRequest) -> Result<RecordingReport, ControlError> {
        never()
    }
    fn recording(&self) -> Result<RecordingReport, ControlError> {
        never()
    }
    fn stop_recording(&self) -> Result<RecordingReport, ControlError> {
        never()
    }
    fn reclaim(&self, _: &str, _: Option<u64>) -> Result<ReclaimReport, ControlError> {
        never()
    }
    fn detach(&self, _: &str) -> Result<DetachReport, ControlError> {
        never()
    }
    fn stop_detach(&self, _: &str) -> Result<VmReport, ControlError> {
        never()
    }
    fn add_blk(&self, _: BlkRequest) -> Result<DeviceReport, ControlError> {
        never()
    }
    fn add_net(&self, _: NetRequest) -> Result<DeviceReport, ControlError> {
        never()
    }
    fn devices(&self) -> Vec<DeviceReport> {
        vec![]
    }
    fn set_weight(&self, _: &Path, _: u32) -> Result<DeviceReport, ControlError> {
        never()
    }
    fn remove_device(&self, _: &Path) -> Result<(), ControlError> {
        never()
    }
    fn slo(&self, _: Option<&str>) -> Result<SloList, ControlError> {
        never()
    }
    fn inject(&self, _: InjectionRequest) -> Result<InjectionReport, ControlError> {
        never()
    }
    fn injection(&self, _: &str) -> Result<InjectionReport, ControlError> {
        never()
    }
    fn stop_injection(&self, _: &str) -> Result<InjectionReport, ControlError> {
        never()
    }
    fn shut_down(&self) -> Result<(), ControlError> {
        self.shut_down.store(true, Ordering::SeqCst);
        Err(ControlError::failed("one VM stays attached"))
    }
}

fn main() {
    eprintln!("\nrunning 1 test");
    signal_shuts_the_system_down_and_its_error_is_told();
    eprintln!("test signal_shuts_the_system_down_and_its_error_is_told ... ok");
}

fn signal_shuts_the_system_down_and_its_error_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api.sock");
    let socket = ApiSocket::bind(&path).unwrap();
    let control = Arc::new(Ending::default());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let ended = runtime.block_on(async {
        let end = async {
            // Once it answers, its signal handlers are in place.
            let client = Client::new(&path);
            let health: Health = client.ask(Method::GET, "/v1/health").await.unwrap();
            assert_eq!(health.pid, std::process::id());
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::TERM).unwrap();
        };
        let both = async { tokio::join!(serve(&socket, control.clone()), end).0 };
        tokio::time::timeout(Duration::from_secs(60), both)
            .await
            .unwrap()
    });
    assert!(control.shut_down.load(Ordering::SeqCst));
    assert_eq!(ended.unwrap_err().to_string(), "one VM stays attached");
}
