// SPDX-License-Identifier: Apache-2.0
//! A network device of a real daemon, from its command to its removal: it is listed, sends, counts,
//! is made again after a crash, and is gone after its removal.

mod daemon;
#[path = "../../dpu/tests/support/mod.rs"]
mod support;

use daemon::{Daemon, command, number};
use serde_json::Value;
use std::{fs, path::Path};
use support::{Connection, Guest};

const HEADER: u32 = 12;
const PACKET: u32 = 1514;
const F_MQ: u64 = 1 << 22;

fn is_skipped() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("SKIPPED: a daemon needs root");
    }
    !is_root
}

fn start(dir: &Path) -> Daemon {
    Daemon::start(dir, command(dir, &["--engines", "2"]))
}

fn device(daemon: &Daemon) -> Option<Value> {
    let list = daemon.json(&["dpu", "list"]);
    list["devices"].as_array().unwrap().first().cloned()
}

/// A front end of our own, which sends on each of its pairs.
struct FrontEnd {
    guest: Guest,
    connection: Connection,
}

impl FrontEnd {
    fn connect(socket: &Path) -> Self {
        let mut guest = Guest::new();
        let connection = Connection::open_nic(socket, &mut guest, 2, F_MQ);
        Self { guest, connection }
    }

    fn send(&mut self, pair: usize) {
        let header = self.guest.room(u64::from(HEADER));
        let data = self.guest.room(u64::from(PACKET));
        let parts = [(header, HEADER, 0), (data, PACKET, 0)];
        let queue = &mut self.connection.queues[2 * pair + 1];
        let head = queue.submit(&self.guest, &parts);
        assert_eq!(queue.wait_used(&self.guest), (head, 0));
    }
}

#[test]
fn network_device_lives_from_its_command_over_a_crash_to_its_removal() {
    if is_skipped() {
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let socket = dir.path().join("net.sock");
    let name = socket.to_str().unwrap();
    let daemon = start(dir.path());
    let net = ["dpu", "net", "--socket", name, "--null", "--queues", "2"];
    let wanted = ["--on-receive-fault", "backup-ring", "--wire", "floor:8"];
    let added = daemon.json(&[&net[..], &wanted].concat());
    assert_eq!(added["link"], "null");
    let again = daemon.client(&net);
    assert_eq!(again.status.code(), Some(2));
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(said.contains("a device listens on"), "{said}");

    let mut front_end = FrontEnd::connect(&socket);
    for pair in [0, 1, 1] {
        front_end.send(pair);
    }
    let report = device(&daemon).unwrap();
    assert_eq!(
        (&report["kind"], &report["state"]),
        (&"net".into(), &"connected".into())
    );
    assert_eq!(report["on_receive_fault"], "backup-ring");
    assert_eq!(
        (&report["wire"], &report["queues"]),
        (&"floor:8".into(), &2.into())
    );
    assert_eq!(number(&report, "sent_packets"), 3);
    assert_eq!(number(&report, "written_bytes"), 3 * u64::from(PACKET));
    assert_eq!(report["image"], Value::Null);
    let slo = daemon.json(&["dpu", "slo", "--device", name]);
    assert_eq!(slo["devices"][0]["windows"][0]["requests"], 3);
    let inject = [
        "iopf",
        "inject",
        "--device",
        name,
        "--rate",
        "1",
        "--latency",
        "1ms",
    ];
    assert_eq!(daemon.json(&inject)["device"], name);
    let weight = daemon.json(&["dpu", "weight", "--socket", name, "300"]);
    assert_eq!(weight["weight"], 300);

    // A crash: the next daemon makes it again, as it was.
    drop(front_end);
    drop(daemon);
    let daemon = start(dir.path());
    let report = device(&daemon).unwrap();
    assert_eq!(
        (&report["kind"], &report["state"]),
        (&"net".into(), &"listening".into())
    );
    assert_eq!(
        (number(&report, "weight"), &report["wire"]),
        (300, &"floor:8".into())
    );
    let mut front_end = FrontEnd::connect(&socket);
    front_end.send(1);
    assert_eq!(number(&device(&daemon).unwrap(), "sent_packets"), 1);

    let removed = daemon.client(&["dpu", "remove", "--socket", name]);
    assert!(removed.status.success());
    assert_eq!(device(&daemon), None);
    assert!(!socket.exists());
    let list = fs::read_to_string(dir.path().join("state/devices.json")).unwrap();
    assert!(!list.contains("net.sock"), "{list}");
}

#[test]
fn link_that_is_not_there_is_refused_and_a_device_whose_link_is_gone_says_so_after_a_restart() {
    if is_skipped() {
        return;
    }
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let socket = dir.path().join("net.sock");
    let name = socket.to_str().unwrap();
    let daemon = start(dir.path());
    for (flag, link, told) in [
        ("--tap", "no-such-tap", "there is no interface no-such-tap"),
        ("--tap", "lo", "lo is no TAP"),
        ("--packet", "no-such-if", "there is no interface no-such-if"),
    ] {
        let refused = daemon.client(&["dpu", "net", "--socket", name, flag, link]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(2), "{said}");
        assert!(said.contains(told), "{said}");
    }
    assert_eq!(device(&daemon), None);
    drop(daemon);
    let request = serde_json::json!({"socket": name, "link": {"tap": "no-such-tap"}});
    let list = serde_json::json!({"blk": [], "net": [request]}).to_string();
    fs::write(dir.path().join("state/devices.json"), list).unwrap();
    let daemon = start(dir.path());
    let report = device(&daemon).unwrap();
    assert_eq!(
        (&report["state"], &report["link"]),
        (&"stopped".into(), &"tap no-such-tap".into())
    );
    let error = report["error"].as_str().unwrap();
    assert!(
        error.contains("there is no interface no-such-tap"),
        "{error}"
    );
}
