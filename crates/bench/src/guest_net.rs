// SPDX-License-Identifier: Apache-2.0
//! A stock guest whose network interface is ours, of benches: in a network namespace of the bench's own, with a daemon
//! that serves the interface on a TAP.
//!
//! ```text
//!   the bench's thread, 10.99.0.1 ── TAP ── pagetide run ── QEMU, 10.99.0.2: redis, memcached, iperf3
//! ```
//! Further guests of the same daemon are on TAPs and in networks of their own, 10.99.1 and so on. A guest comes from
//! the project's test kit: `network-guest`, of the crate `pagetide-guestkit`, lies beside this program when both were
//! built, and becomes the QEMU.

use crate::{
    daemon::{Daemon, VM, directory_in},
    harness::report::{BenchError, failed, unable},
    orders::{Ordered, daemon_program, kit_program},
};
use hyper::Method;
use pagetide_daemon::{
    api::AttachBody,
    client::{device_path, injection_path},
    injection::{InjectionReport, InjectionRequest},
};
use serde_json::{Value, json};
use std::{
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    rc::Rc,
    time::{Duration, Instant},
};

const PROGRAM: &str = "network-guest";
/// Longest wait for a boot, or for a server of a guest that is emulated.
const PATIENCE: Duration = Duration::from_secs(300);
/// Longest wait for a front end to connect again.
const CONNECT_WAIT: Duration = Duration::from_secs(60);

/// How the device receives, as the daemon has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Receives {
    /// `on_receive_fault`.
    pub on_fault: &'static str,
    /// `wire`.
    pub wire: &'static str,
}

/// A guest to be started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NetGuestOptions<'a> {
    pub ram_mib: u64,
    /// Buffers of its receiving ring.
    pub ring: u16,
    /// What it runs.
    pub servers: &'a [&'a str],
    pub pings: Pings,
    /// Ours, or QEMU's own.
    pub interface: Interface,
}

/// Whether it pings the host all the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pings {
    /// As fast as answers come: each thousand are a line of its console.
    Flood,
    None,
}

/// Who serves the interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Interface {
    Ours(Receives),
    Qemus,
}

/// As the kit names TAPs and numbers networks.
fn tap(number: u8) -> String {
    format!("pt{number}")
}

fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 99, number, 2)
}

/// Runs `act` on a thread with a network namespace of its own, in which there are so many TAPs.
///
/// # Errors
/// There can be none, or those of `act`.
pub(crate) fn in_own_network<R: Send>(
    taps: u8,
    act: impl FnOnce() -> Result<R, BenchError> + Send,
) -> Result<R, BenchError> {
    let run = || -> Result<R, BenchError> {
        pagetide_sys::net::namespace::enter_new()
            .map_err(|error| unable(format!("a network namespace needs root: {error}")))?;
        for number in 0..taps {
            let tap = tap(number);
            ip(&format!("tuntap add dev {tap} mode tap multi_queue"))?;
            ip(&format!("addr add 10.99.{number}.1/24 dev {tap}"))?;
            ip(&format!("link set {tap} up"))?;
        }
        act()
    };
    std::thread::scope(|scope| match scope.spawn(run).join() {
        Ok(ran) => ran,
        Err(_) => Err(failed("a thread of the bench has panicked")),
    })
}

fn ip(words: &str) -> Result<(), BenchError> {
    let ran = Command::new("ip").args(words.split(' ')).output();
    let output = ran.map_err(|error| unable(format!("`ip` of iproute2: {error}")))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(unable(format!(
            "`ip {words}`: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}

/// A daemon for guests, and their files.
pub(crate) struct NetHost {
    daemon: Daemon,
    dir: tempfile::TempDir,
}

impl NetHost {
    /// Starts the daemon.
    ///
    /// # Errors
    /// [`BenchError::Unable`] if programs are missing.
    pub(crate) fn start() -> Result<Rc<Self>, BenchError> {
        daemon_program().map_err(unable)?;
        let dir = directory_in(Path::new("/dev/shm")).map_err(failed)?;
        // Others may have a budget on this host, too.
        let settings = [format!(
            "--budget-lock={}",
            dir.path().join("budget.lock").display()
        )];
        let daemon = Daemon::start(&dir.path().join("state"), &settings).map_err(failed)?;
        Ok(Rc::new(Self { daemon, dir }))
    }

    /// Boots the guest with this number. Its servers open their ports a moment later.
    ///
    /// # Errors
    /// [`BenchError::Unable`] if programs are missing.
    pub(crate) fn boot(
        self: &Rc<Self>,
        number: u8,
        options: &NetGuestOptions<'_>,
    ) -> Result<NetGuest, BenchError> {
        let program = kit_program(PROGRAM).map_err(unable)?;
        let folder = self.dir.path().join(format!("guest{number}"));
        std::fs::create_dir(&folder).map_err(failed)?;
        let socket = folder.join("net.sock");
        let mut command = Command::new(program);
        command
            .args(["--ram-mib", &options.ram_mib.to_string()])
            .args(["--ring", &options.ring.to_string()])
            .args(["--number", &number.to_string()])
            .arg("--folder")
            .arg(&folder);
        for server in options.servers {
            command.args(["--server", server]);
        }
        if options.pings == Pings::Flood {
            command.arg("--pings");
        }
        if let Interface::Ours(receives) = options.interface {
            add_device(&self.daemon, number, &socket, receives).map_err(failed)?;
            command.arg("--device").arg(&socket);
        }
        let mut guest = Ordered::start(&mut command).map_err(failed)?;
        match guest.line_within(PATIENCE).map_err(failed)?.as_str() {
            "ready" => {}
            other => match other.strip_prefix("unable: ") {
                Some(reason) => return Err(unable(reason)),
                None => return Err(failed(format!("the guest said '{other}'"))),
            },
        }
        Ok(NetGuest {
            guest,
            host: Rc::clone(self),
            number,
            socket,
            folder,
        })
    }

    /// Its daemon.
    pub(crate) fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// The socket of its daemon's interface.
    pub(crate) fn api(&self) -> PathBuf {
        self.dir.path().join("state").join("api.sock")
    }
}

/// A guest. It is ended on drop, and the daemon with its last guest.
pub(crate) struct NetGuest {
    // Before the daemon, which has its memory.
    guest: Ordered,
    host: Rc<NetHost>,
    number: u8,
    socket: PathBuf,
    folder: PathBuf,
}

impl NetGuest {
    /// Starts a guest with a daemon of its own.
    ///
    /// # Errors
    /// As [`NetHost::boot`].
    pub(crate) fn start(options: &NetGuestOptions<'_>) -> Result<Self, BenchError> {
        NetHost::start()?.boot(0, options)
    }

    /// QEMU's process id.
    pub(crate) fn pid(&self) -> u32 {
        self.guest.pid()
    }

    /// Its daemon.
    pub(crate) fn daemon(&self) -> &Daemon {
        self.host.daemon()
    }

    /// Takes it over: the first guest under the name that a bench's daemon has for its VM, others under names of their
    /// own.
    ///
    /// # Errors
    /// A message.
    pub(crate) fn attach(&self) -> Result<(), String> {
        if self.number == 0 {
            return self.daemon().attach(self.pid(), None).map(|_| ());
        }
        let body = AttachBody {
            pid: self.pid(),
            name: Some(format!("{VM}{}", self.number)),
            limit_bytes: None,
            weight: None,
            floor_bytes: None,
        };
        let _attached: Value = self.daemon().send("/v1/vms", &body)?;
        Ok(())
    }

    /// CPU time of QEMU and the daemon.
    ///
    /// # Errors
    /// A process is gone.
    pub(crate) fn cpu_time(&self) -> Result<Duration, String> {
        Ok(cpu_time(self.pid())? + cpu_time(self.daemon().pid())?)
    }

    /// The address of its port, once something listens there.
    ///
    /// # Errors
    /// Nothing does for too long.
    pub(crate) fn listening(&self, port: u16) -> Result<SocketAddr, String> {
        let address = SocketAddr::from((address(self.number), port));
        let begun = Instant::now();
        while let Err(error) = TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            if begun.elapsed() > PATIENCE {
                let console = self.console().unwrap_or_default();
                let end: Vec<_> = console.lines().rev().take(5).collect();
                return Err(format!(
                    "nothing listens at port {port} of the guest ({error}); its console ends with {:?}",
                    end.into_iter().rev().collect::<Vec<_>>()
                ));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(address)
    }

    fn console(&self) -> std::io::Result<String> {
        std::fs::read_to_string(self.folder.join("console.log"))
    }

    /// The lines in which its pings have told their loss.
    ///
    /// # Errors
    /// It has no console.
    pub(crate) fn pings(&self) -> Result<Vec<String>, String> {
        let console = self
            .console()
            .map_err(|error| format!("console: {error}"))?;
        let told = |line: &&str| line.contains("packet loss");
        Ok(console.lines().filter(told).map(str::to_owned).collect())
    }

    /// What the daemon tells of the device.
    ///
    /// # Errors
    /// It is gone.
    pub(crate) fn device(&self) -> Result<Value, String> {
        let list: Value = self.daemon().ask(Method::GET, "/v1/devices")?;
        let socket = self.socket.to_string_lossy();
        let mut devices = list["devices"].as_array().into_iter().flatten();
        let device = devices.find(|device| device["socket"] == *socket);
        device
            .cloned()
            .ok_or_else(|| "the guest's device is gone".into())
    }

    /// A figure of the device.
    ///
    /// # Errors
    /// There is none of this name.
    pub(crate) fn count(&self, name: &str) -> Result<u64, String> {
        let device = self.device()?;
        let count = device[name].as_u64();
        count.ok_or_else(|| format!("the device does not tell {name}"))
    }

    /// Serves the interface by another device from now on, and waits until the guest has it.
    ///
    /// # Errors
    /// The daemon refuses, or QEMU does not come back.
    pub(crate) fn replace_device(&self, receives: Receives) -> Result<(), String> {
        let path = device_path(&self.socket.to_string_lossy());
        let _removed: Value = self.daemon().ask(Method::DELETE, &path)?;
        add_device(self.daemon(), self.number, &self.socket, receives)?;
        let begun = Instant::now();
        while self.device()?["state"] != "connected" {
            if begun.elapsed() > CONNECT_WAIT {
                return Err("QEMU does not connect to its new device".into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Runs `act`, and injects `rate` faults a second for `time` (whole seconds), each held for `hold`.
    ///
    /// No longer: the last connections of a load may be alone then. A fault that finds no packet when it is due waits
    /// for the next one, so with *drop* each packet of a sender that tries again less often than faults are due would be
    /// lost, for ever.
    ///
    /// # Errors
    /// The daemon refuses, or those of `act`.
    pub(crate) fn with_faults<R>(
        &self,
        (rate, hold): (f64, Duration),
        time: Duration,
        act: impl FnOnce() -> Result<R, String>,
    ) -> Result<(R, InjectionReport), String> {
        let device = self.socket.to_string_lossy().into_owned();
        let path = injection_path(&device);
        let request = InjectionRequest {
            device,
            rate,
            latency_us: u64::try_from(hold.as_micros()).unwrap_or(u64::MAX),
            burst: 1,
            seconds: time.as_secs().max(1),
        };
        let _begun: Value = self.daemon().send("/v1/injection", &request)?;
        let acted = act();
        let ended: InjectionReport = self.daemon().ask(Method::GET, &path)?;
        let _stopped: Value = self.daemon().ask(Method::DELETE, &path)?;
        Ok((acted?, ended))
    }
}

/// User and system time of a process, its ended threads included.
fn cpu_time(pid: u32) -> Result<Duration, String> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    ticks_in(&stat)
        // USER_HZ is 100 on Linux wherever we run.
        .map(|ticks| Duration::from_millis(ticks * 10))
        .ok_or_else(|| format!("{path} has no times"))
}

/// Fields 14 and 15; the second, the name, may have spaces.
fn ticks_in(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

fn add_device(
    daemon: &Daemon,
    number: u8,
    socket: &Path,
    receives: Receives,
) -> Result<(), String> {
    let request = json!({
        "socket": socket,
        "link": {"tap": tap(number)},
        "on_receive_fault": receives.on_fault,
        "wire": receives.wire,
    });
    let _added: Value = daemon.send("/v1/devices/net", &request)?;
    Ok(())
}

/// What iperf3 tells of a run against the first guest's.
///
/// # Errors
/// It is not installed, or failed.
pub(crate) fn iperf3(words: &[&str]) -> Result<Value, String> {
    let begun = Instant::now();
    loop {
        let mut command = Command::new("iperf3");
        command
            .args(["-J", "-c", &address(0).to_string()])
            .args(words);
        let output = command.output().map_err(|error| {
            format!("iperf3 cannot be started ({error}): install the package iperf3")
        })?;
        let told: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| format!("iperf3 did not print JSON: {error}"))?;
        match told["error"].as_str() {
            None => return Ok(told),
            // The server is at the end of its last run, or starts again.
            Some(error) if is_passing(error) && begun.elapsed() < CONNECT_WAIT => {
                std::thread::sleep(Duration::from_millis(200));
            }
            Some(error) => return Err(format!("iperf3: {error}")),
        }
    }
}

fn is_passing(error: &str) -> bool {
    let passing = ["busy", "Connection refused", "Connection reset"];
    passing.iter().any(|text| error.contains(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_process_are_found_behind_its_name() {
        let stat = "12 (a ) b) S 1 2 3 4 5 6 7 8 9 10 30 12 0 0 20 0";
        assert_eq!(ticks_in(stat), Some(42));
        assert_eq!(ticks_in("12 (a) S 1"), None);
    }
}
