// SPDX-License-Identifier: Apache-2.0
//! VPRI across processes: the device's side in its own process, behind a VPRI function, and the host's side
//! here, with the function's driver.
//!
//! ```text
//!   device process (the device's CPU)           this process (the tenant's CPU)
//!     engine ─ page fault queue ══════════════► driver's source, dispatcher, worker
//!       ▲                                             │
//!     function's thread ◄═══ event queue (RESPOND) ◄──┘
//! ```
//! Both threads of the device share its one CPU, so here the engine sleeps for its response and is woken by
//! the function's thread. Orders to the device process are lines of JSON, each answered by one; the end of
//! its input ends it.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _},
        unix::process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use pagetide_addr::PageNo;
use pagetide_sys::memory_file::GuestFile;
use pagetide_vpri::{
    DeviceEnd, DomainTable, Doorbell, EnginePort, FaultAssist, IdleEngines, IoSpaces as _, LookUp,
    fault_queue,
};
use pagetide_vpri_function::{
    driver::Driver,
    function::{FunctionParts, FunctionServer},
};
use serde::{Deserialize, Serialize};

use super::{
    DEVICE_URGENCY, PAGES,
    sides::{Engine, Served, Side, Split, sleep},
};

use crate::tenant_ram::{Filling, Tenant, failed, move_to, stand};

/// Longest wait for the device process's function.
const CONNECT_WAIT: Duration = Duration::from_secs(20);

/// An order of this process to the device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Order {
    /// Map the tenant's RAM.
    Map {
        /// The path to open.
        path: PathBuf,
    },
    /// A DMA to an absent page.
    Fault {
        /// The page.
        page: u64,
    },
}

/// Its answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Answer {
    /// It listens, or has mapped the RAM.
    Ready,
    /// The times of the fault.
    Took(Split),
    /// It failed.
    Failed {
        /// Why.
        reason: String,
    },
}

/// The device process: serves a VPRI function at `socket` on `cpu`, and executes orders.
///
/// # Errors
/// A message.
pub fn serve(socket: &Path, cpu: usize) -> Result<(), String> {
    move_to(cpu)?;
    let wrong = failed("the function");
    let domains = Arc::new(DomainTable::new(1));
    let [engine_bell, bell] = [Doorbell::new(), Doorbell::new()];
    let engine_bell = Arc::new(engine_bell.map_err(|e| wrong(&e))?);
    let bell = Arc::new(bell.map_err(|e| wrong(&e))?);
    let (end, host) = fault_queue(64, Arc::clone(&engine_bell), Arc::clone(&bell));
    let function = FunctionServer::start(FunctionParts {
        socket: socket.to_owned(),
        domains: Arc::clone(&domains),
        hosts: vec![host],
        engine_count: 1,
        bell,
    });
    let function = function.map_err(|e| wrong(&e))?;
    let (assist, mut end, mut engine) = (function.assist(), Some(end), None);
    stand(cpu, DEVICE_URGENCY)?;
    say(&Answer::Ready)?;
    for line in std::io::stdin().lock().lines() {
        let order = line.map_err(|e| failed("orders")(&e))?;
        let order = serde_json::from_str(&order).map_err(|e| failed("an order")(&e))?;
        let done = match order {
            Order::Map { path } => match end.take() {
                None => Err("the RAM is mapped already".to_owned()),
                Some(end) => map(&domains, &path, end).map(|mapped| {
                    engine = Some(mapped);
                    Answer::Ready
                }),
            },
            Order::Fault { page } => match &mut engine {
                None => Err("no RAM is mapped".to_owned()),
                Some(engine) => {
                    fault(engine, &*assist, &engine_bell, PageNo(page)).map(Answer::Took)
                }
            },
        };
        say(&done.unwrap_or_else(|reason| Answer::Failed { reason }))?;
    }
    Ok(())
}

fn map(domains: &DomainTable, path: &Path, end: DeviceEnd) -> Result<Engine, String> {
    let wrong = failed("the tenant's RAM");
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path);
    let file = GuestFile::from(std::os::fd::OwnedFd::from(file.map_err(|e| wrong(&e))?));
    let window = domains.map_whole(file.as_fd()).map_err(|e| wrong(&e))?;
    let port = EnginePort::new(window, 0, LookUp::On);
    Ok(Engine::new(port.map_err(|e| wrong(&e))?, end))
}

fn fault(
    engine: &mut Engine,
    assist: &dyn FaultAssist,
    bell: &Doorbell,
    page: PageNo,
) -> Result<Split, String> {
    let mut first = true;
    engine.fault(page, |end| {
        if std::mem::take(&mut first) {
            if !assist.assist(0) {
                end.kick();
            }
        } else {
            sleep(bell, &|| end.has_response());
        }
    })
}

fn say(answer: &Answer) -> Result<(), String> {
    let line = serde_json::to_string(answer).map_err(|e| failed("an answer")(&e))?;
    let mut out = std::io::stdout().lock();
    let said = writeln!(out, "{line}").and_then(|()| out.flush());
    said.map_err(|e| failed("an answer")(&e))
}

/// The device process, seen from this one; ended on drop.
struct Device {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Device {
    fn start(socket: &Path, cpu: usize) -> Result<Self, String> {
        let wrong = failed("the device process");
        let program = std::env::current_exe().map_err(|e| wrong(&e))?;
        let mut child = Command::new(program)
            .args(["bench-part", "iopf-rtt-device", "--socket"])
            .arg(socket)
            .args(["--cpu", &cpu.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|e| wrong(&e))?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        let answers = answers.ok_or("the device process has no output")?;
        let mut device = Self {
            child,
            orders,
            answers: BufReader::new(answers),
        };
        device.hear().map(|_ready| device)
    }

    fn obey(&mut self, order: &Order) -> Result<Answer, String> {
        let line = serde_json::to_string(order).map_err(|e| failed("an order")(&e))?;
        let orders = self.orders.as_mut().ok_or("the device process has ended")?;
        let sent = writeln!(orders, "{line}").and_then(|()| orders.flush());
        sent.map_err(|e| failed("the device process takes no orders")(&e))?;
        self.hear()
    }

    fn hear(&mut self) -> Result<Answer, String> {
        let wrong = failed("the device process");
        let mut line = String::new();
        let read = self.answers.read_line(&mut line).map_err(|e| wrong(&e))?;
        if read == 0 {
            return Err("the device process has ended; see its messages above".into());
        }
        match serde_json::from_str(&line).map_err(|e| wrong(&e))? {
            Answer::Failed { reason } => Err(format!("the device process: {reason}")),
            answer => Ok(answer),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Err(error) = self.child.wait() {
            tracing::error!(%error, "the bench's device process could not be ended");
        }
    }
}

/// See the module. Ends in this order: the device first, then its service.
pub(super) struct AcrossProcesses {
    device: Device,
    _served: Served,
    tenant: Tenant,
    _driver: Arc<Driver>,
    _dir: tempfile::TempDir,
}

impl AcrossProcesses {
    pub(super) fn new(device_cpu: usize, host_cpu: usize) -> Result<Self, String> {
        let wrong = failed("the driver");
        let dir = tempfile::tempdir().map_err(|e| wrong(&e))?;
        let socket = dir.path().join("vpri.sock");
        let mut device = Device::start(&socket, device_cpu)?;
        let bell = Arc::new(Doorbell::new().map_err(|e| wrong(&e))?);
        let driver = Driver::start(&socket, Arc::clone(&bell)).map_err(|e| wrong(&e))?;
        driver.wait_connected(CONNECT_WAIT).map_err(|e| wrong(&e))?;
        let tenant = Tenant::new(&*driver, PAGES, Filling::Programs)?;
        driver.all_known();
        let served = Served::new(
            &tenant,
            vec![],
            Some(driver.source()),
            bell,
            host_cpu,
            IdleEngines::Leave,
        )?;
        let number = tenant.file().as_fd().as_raw_fd();
        let path = PathBuf::from(format!("/proc/{}/fd/{number}", std::process::id()));
        device.obey(&Order::Map { path })?;
        Ok(Self {
            device,
            _served: served,
            tenant,
            _driver: driver,
            _dir: dir,
        })
    }
}

impl Side for AcrossProcesses {
    fn tenant(&mut self) -> &mut Tenant {
        &mut self.tenant
    }

    fn fault(&mut self, page: PageNo) -> Result<Split, String> {
        match self.device.obey(&Order::Fault { page: page.0 })? {
            Answer::Took(split) => Ok(split),
            other => Err(format!("the device process answered {other:?} to a fault")),
        }
    }
}
