// SPDX-License-Identifier: Apache-2.0
//! `pagetide estimate` beside a process of ours that serves a disk of the VM, and of a VM that is attached.
//! The VMM is this process: a file of RAM, mapped shared.

mod vmm;

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use pagetide_sys::mapping::SharedMapping;
use pagetide_sys::memory_file::GuestFile;
use serde_json::Value;

const RAM_BYTES: u64 = 64 << 20;
const PATIENCE: Duration = Duration::from_secs(60);
/// Names the file that a process is to map which is started as [`a_process_that_maps_a_file`].
const MAP: &str = "PAGETIDE_TEST_MAP";

/// Not a test but the other process of the test below, when that starts it.
#[test]
fn a_process_that_maps_a_file() {
    let Some(path) = std::env::var_os(MAP) else {
        return;
    };
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let _mapping = SharedMapping::new(file.as_fd(), RAM_BYTES).unwrap();
    println!("mapped");
    // Until the other end is closed.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait().map(drop)) {
            eprintln!("a child: {error}");
        }
    }
}

fn maps(pid: u32, key: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains(key))
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "no {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn pagetide(api: &Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .args(words)
        .env("PAGETIDE_API", api)
        .output()
        .unwrap()
}

fn estimate() -> Output {
    let own = std::process::id().to_string();
    let words = [
        "estimate",
        "--pid",
        &own,
        "--minutes",
        "0.05",
        "--interval",
        "1",
        "--json",
    ];
    pagetide(Path::new("/nowhere"), &words)
}

#[test]
fn vm_whose_disk_we_serve_is_estimated_and_one_that_is_attached_is_not() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: looking at page tables needs root");
        return;
    }
    if !vmm::is_this("vm_whose_disk_we_serve_is_estimated_and_one_that_is_attached_is_not") {
        return;
    }
    let file = GuestFile::new_memfd("estimated", RAM_BYTES).unwrap();
    let ram = SharedMapping::new(file.as_fd(), RAM_BYTES).unwrap();
    ram.copy_to(0, &vec![1; 8 << 20]).unwrap();
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    estimates_beside_a_disk(&file, dir.path());
    let state = dir.path().join("state");
    let mut daemon = Killed(
        Command::new(env!("CARGO_BIN_EXE_pagetide"))
            .args(["run", "--state-dir"])
            .arg(&state)
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let api = state.join("api.sock");
    until("answer", || {
        assert!(daemon.0.try_wait().unwrap().is_none(), "it has ended");
        pagetide(&api, &["vm", "list"]).status.success()
    });
    let own = std::process::id();
    let attached = pagetide(&api, &["attach", "--pid", &own.to_string(), "--name", "e"]);
    assert!(
        attached.status.success(),
        "{}",
        String::from_utf8_lossy(&attached.stderr)
    );
    let refused = estimate();
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{errors}");
    assert!(errors.contains("is attached"), "{errors}");
    let detached = pagetide(&api, &["vm", "detach", "e"]);
    assert!(
        detached.status.success(),
        "{}",
        String::from_utf8_lossy(&detached.stderr)
    );
    let again = estimate();
    assert!(
        again.status.success(),
        "{}",
        String::from_utf8_lossy(&again.stderr)
    );
}

/// A process of our name that maps the RAM is a disk of ours, not an attach.
fn estimates_beside_a_disk(file: &GuestFile, dir: &Path) {
    // The command name of a process is that of the file that it was started by.
    let ours = dir.join("pagetide");
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &ours).unwrap();
    let own = std::process::id();
    let path = format!("/proc/{own}/fd/{}", file.as_fd().as_raw_fd());
    let mut server = Killed(
        Command::new(ours)
            .args(["--exact", "a_process_that_maps_a_file", "--nocapture"])
            .env(MAP, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let pid = server.0.id();
    until("mapping", || {
        assert!(server.0.try_wait().unwrap().is_none(), "it has ended");
        maps(pid, "memfd:estimated")
    });
    let told = estimate();
    let errors = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.status.success(), "{errors}");
    let report: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!(
        report["refusals"].as_array().map(Vec::len),
        Some(0),
        "{report}"
    );
    assert!(
        report["warnings"].to_string().contains(&pid.to_string()),
        "{report}"
    );
}
