// SPDX-License-Identifier: Apache-2.0
//! Tenants of the kernel's own drivers: each NIC in a network namespace of its own, with a server.
//!
//! A namespace lives as long as a process in it. So the process that will be the server is started in a new one,
//! waits until it has been given its NIC, brings it up, and becomes the server:
//!
//! ```text
//!   unshare -n sh: read ─── ip link set NIC netns PID ───► "go" ─► addresses ─► exec server
//! ```
//! All have the same address: they are in networks of their own.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::error::{LOOK, RecordError};
use super::workload::ServedWorkload;

const BUSYBOX: &str = "/bin/busybox";
/// Address of a guest behind QEMU's network in user mode.
const ADDRESS: &str = "10.0.2.15/24";
const ROUTER: &str = "10.0.2.2";
const MEDIA: &str = "/tmp/media";
/// Pieces of videos: their name, and the bytes of two seconds in that quality.
const PIECES: [(&str, u64); 4] = [
    ("240", 75_000),
    ("360", 187_500),
    ("480", 375_000),
    ("720", 750_000),
];
/// Longest wait for a server to listen. On a busy machine an emulated guest is slow.
const PATIENCE: Duration = Duration::from_secs(120);

/// What the process in the namespace does: `$1` is its NIC, the rest its server.
const SCRIPT: &str = "read go && nic=$1 && shift && /bin/busybox ip link set lo up && \
                      /bin/busybox ip addr add $1 dev $nic && router=$2 && shift 2 && \
                      /bin/busybox ip link set $nic up && \
                      /bin/busybox ip route add default via $router && exec \"$@\"";

/// A server in a namespace. Dropped, it is killed, and its NIC returns to the machine.
#[derive(Debug)]
pub(super) struct Tenant {
    child: Child,
    nic: String,
}

impl Drop for Tenant {
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("guest-work: ending the server of {}: {error}", self.nic);
        }
    }
}

/// Starts a tenant for each NIC, and returns when all servers listen.
pub(super) fn serve(workload: ServedWorkload) -> Result<Vec<Tenant>, RecordError> {
    if workload == ServedWorkload::Media {
        make_pieces()?;
    }
    let tenants: Vec<Tenant> = nics()?
        .into_iter()
        .map(|nic| Tenant::start(nic, workload))
        .collect::<Result<_, _>>()?;
    if tenants.is_empty() {
        return Err(RecordError::NoDevice("network interface"));
    }
    let deadline = Instant::now() + PATIENCE;
    for tenant in &tenants {
        while !tenant.listens_on(workload.port()) {
            if Instant::now() > deadline {
                return Err(RecordError::Late {
                    what: format!("a server of {} on {}", workload.name(), tenant.nic),
                    seconds: PATIENCE.as_secs(),
                });
            }
            thread::sleep(LOOK);
        }
    }
    Ok(tenants)
}

/// Network interfaces with a device, in order of their places on the bus.
fn nics() -> Result<Vec<String>, RecordError> {
    const CLASS: &str = "/sys/class/net";
    let mut found: Vec<(PathBuf, String)> = Vec::new();
    for entry in fs::read_dir(CLASS).map_err(RecordError::io(CLASS))? {
        let entry = entry.map_err(RecordError::io(CLASS))?;
        // The loopback interface has no device.
        if let Ok(device) = fs::canonicalize(entry.path().join("device")) {
            found.push((device, entry.file_name().to_string_lossy().into_owned()));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, nic)| nic).collect())
}

impl Tenant {
    fn start(nic: String, workload: ServedWorkload) -> Result<Self, RecordError> {
        let mut child = Command::new(BUSYBOX)
            .args(["unshare", "-n", BUSYBOX, "sh", "-c", SCRIPT, "tenant"])
            .args([&nic, ADDRESS, ROUTER])
            .args(server(workload))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .map_err(RecordError::io("unshare"))?;
        let stdin = child.stdin.take();
        let tenant = Self { child, nic };
        tenant.wait_for_namespace()?;
        let pid = tenant.child.id().to_string();
        run(&["ip", "link", "set", &tenant.nic, "netns", &pid])?;
        if let Some(mut stdin) = stdin {
            stdin
                .write_all(b"go\n")
                .map_err(RecordError::io("a tenant"))?;
        }
        Ok(tenant)
    }

    /// Waits until the process has left our namespace.
    fn wait_for_namespace(&self) -> Result<(), RecordError> {
        let of = |who: &str| {
            let path = format!("/proc/{who}/ns/net");
            fs::read_link(&path).map_err(RecordError::io(path))
        };
        let ours = of("self")?;
        let deadline = Instant::now() + PATIENCE;
        while of(&self.child.id().to_string())? == ours {
            if Instant::now() > deadline {
                return Err(RecordError::Late {
                    what: "a new network namespace".to_owned(),
                    seconds: PATIENCE.as_secs(),
                });
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Whether a process of its namespace listens on `port`.
    fn listens_on(&self, port: u16) -> bool {
        ["tcp", "tcp6"].iter().any(|table| {
            let path = format!("/proc/{}/net/{table}", self.child.id());
            fs::read_to_string(path).is_ok_and(|text| is_listening(&text, port))
        })
    }
}

/// Whether a socket listens on `port` in a table of the kernel: state 0A.
fn is_listening(table: &str, port: u16) -> bool {
    let port = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        let local = words.next().is_some_and(|local| local.ends_with(&port));
        local && words.nth(1) == Some("0A")
    })
}

fn server(workload: ServedWorkload) -> Vec<String> {
    let port = workload.port().to_string();
    let words: &[&str] = match workload {
        ServedWorkload::Iperf3 => &["/bin/iperf3", "-s", "-p", &port],
        ServedWorkload::Media => &[BUSYBOX, "httpd", "-f", "-p", &port, "-h", MEDIA],
        ServedWorkload::Search => &["/bin/guest-work", "search", &port],
    };
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn make_pieces() -> Result<(), RecordError> {
    fs::create_dir_all(MEDIA).map_err(RecordError::io(MEDIA))?;
    for (name, bytes) in PIECES {
        let path = Path::new(MEDIA).join(name);
        let content: Vec<u8> = (0..bytes).map(|at| (at % 251).to_le_bytes()[0]).collect();
        fs::write(&path, content).map_err(RecordError::io(path.to_string_lossy()))?;
    }
    Ok(())
}

/// Runs a program of busybox.
pub(super) fn run(words: &[&str]) -> Result<(), RecordError> {
    let output = Command::new(BUSYBOX)
        .args(words)
        .output()
        .map_err(RecordError::io(words.join(" ")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(RecordError::Program {
        program: words.join(" "),
        said: format!("{}: {said}", output.status),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listening_socket_is_found_by_its_port_and_state() {
        let table = "  sl  local_address rem_address   st\n\
                     \x20  0: 00000000:1451 00000000:0000 0A 0:0\n\
                     \x20  1: 0F02000A:1F90 0202000A:1451 01 0:0\n";
        assert!(is_listening(table, 5201));
        assert!(!is_listening(table, 8080));
        assert!(!is_listening(table, 520));
    }
}
