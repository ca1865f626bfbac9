// SPDX-License-Identifier: Apache-2.0
//! A start in a state directory of another version: nothing is recovered, nothing is changed.
//!
//! Whether VMs were recovered is seen by a pool whose VMM has ended: that is what is done with it first, it is
//! removed.

mod bounded;

use bounded::{Said, run_until};
use pagetide_swap::Pool;
use std::fs;
use std::io::Read as _;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Cell 1 of a pool's header.
const VERSION_AT: u64 = 8;

struct Directory {
    path: PathBuf,
    _whole: tempfile::TempDir,
}

impl Directory {
    /// With the pool of a VM whose VMM has ended.
    fn new() -> Self {
        let whole = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = whole.path().join("state");
        fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        let this = Self {
            path,
            _whole: whole,
        };
        this.make_pool("gone");
        this
    }

    fn pool(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.pool"))
    }

    fn make_pool(&self, name: &str) {
        // This process, but begun at another time.
        let identity = serde_json::json!({
            "name": name, "pid": std::process::id(), "start_time": 1, "vmm": "qemu", "mappings": [],
        });
        let identity = identity.to_string();
        drop(Pool::create(&self.pool(name), 512, 7, identity.as_bytes()).unwrap());
    }

    fn start(&self) -> Said {
        run_until(
            Command::new(env!("CARGO_BIN_EXE_pagetide"))
                .args(["run", "--engines", "1", "--state-dir"])
                .arg(&self.path),
            &[" ready"],
        )
    }
}

/// False, with the reason, where no daemon starts at all.
fn can_start() -> bool {
    let directory = Directory::new();
    let said = directory.start();
    if said.ended.is_some() && said.log.contains("io_uring") {
        eprintln!("SKIPPED: {}", said.log);
        return false;
    }
    assert!(said.log.contains(" ready"), "{}", said.log);
    assert!(!directory.pool("gone").exists(), "{}", said.log);
    true
}

/// The first bytes of a file, or all: a pool is 1.1 TiB, most of it a hole.
fn beginning(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    let file = fs::File::open(path).unwrap();
    file.take(64 << 10).read_to_end(&mut bytes).unwrap();
    bytes
}

/// The start fails because of `file`, and has changed nothing.
fn refuses(directory: &Directory, file: &Path) {
    let before = beginning(file);
    let said = directory.start();
    let code = said.ended.and_then(|ended| ended.code());
    assert_eq!(code, Some(2), "{}", said.log);
    let name = file.display().to_string();
    assert!(said.log.contains(&name), "{}", said.log);
    assert!(said.log.contains("another version"), "{}", said.log);
    assert!(directory.pool("gone").exists(), "{}", said.log);
    assert!(beginning(file) == before, "it was changed");
}

#[test]
fn list_of_devices_or_pool_of_another_version_is_found_before_any_vm_is_taken_up() {
    if !can_start() {
        return;
    }
    let list = Directory::new();
    let devices = list.path.join("devices.json");
    fs::write(&devices, r#"{"blk": [], "rdma": [{"socket": "/n"}]}"#).unwrap();
    refuses(&list, &devices);
    let newer = Directory::new();
    newer.make_pool("newer");
    let pool = newer.pool("newer");
    let file = fs::File::options().write(true).open(&pool).unwrap();
    file.write_all_at(&2_u64.to_ne_bytes(), VERSION_AT).unwrap();
    refuses(&newer, &pool);
}
