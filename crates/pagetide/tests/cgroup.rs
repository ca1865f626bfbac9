// SPDX-License-Identifier: Apache-2.0
//! A daemon in a memory cgroup that is smaller than its pool would become: it stops evicting in time, says so,
//! and goes on when there is room again. The VMM is this process: a file of RAM, mapped shared.

mod daemon;
mod ram;
mod refusal;
mod vmm;

use daemon::{Daemon, command, number};
use pagetide_random::SplitMix64;
use ram::Ram;
use refusal::refuses_both;
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

const MIB: u64 = 1 << 20;
const RAM_BYTES: u64 = 192 * MIB;
/// What is evicted to keep this does not compress, and has no room in the group.
const VM_LIMIT: &str = "32M";
const GROUP_BYTES: u64 = 96 * MIB;
/// What the daemon leaves free of such a group (`docs/operations.md`).
const MARGIN_BYTES: u64 = 16 * MIB;
/// Of that, what the daemon itself may come to take.
const OWN_BYTES: u64 = 8 * MIB;

/// A memory cgroup of our own, of whatever version there is.
struct Group {
    path: PathBuf,
    limit: &'static str,
    charged: &'static str,
    events: &'static str,
}

impl Group {
    fn make(bytes: u64) -> Result<Self, String> {
        let name = format!("pagetide-test-{}", std::process::id());
        let one = |path| Self {
            path,
            limit: "memory.limit_in_bytes",
            charged: "memory.usage_in_bytes",
            events: "memory.oom_control",
        };
        let two = |path| Self {
            path,
            limit: "memory.max",
            charged: "memory.current",
            events: "memory.events",
        };
        let first = one(Path::new("/sys/fs/cgroup/memory").join(&name));
        let second = two(Path::new("/sys/fs/cgroup").join(&name));
        let mut why = Vec::new();
        for group in [first, second] {
            match group.begin(bytes) {
                Ok(()) => return Ok(group),
                Err(error) => why.push(format!("{}: {error}", group.path.display())),
            }
        }
        Err(format!("no memory cgroup can be made: {}", why.join(", ")))
    }

    fn begin(&self, bytes: u64) -> std::io::Result<()> {
        // Only where the controller is: any directory could be made in a tmpfs.
        let parent = self.path.parent().unwrap();
        fs::metadata(parent.join("cgroup.procs"))?;
        fs::create_dir(&self.path)?;
        self.set_limit(bytes)
    }

    fn set_limit(&self, bytes: u64) -> std::io::Result<()> {
        // Not `fs::write`: that would create the file where the controller is off.
        let mut file = fs::File::options()
            .write(true)
            .open(self.path.join(self.limit))?;
        std::io::Write::write_all(&mut file, bytes.to_string().as_bytes())
    }

    fn charged_bytes(&self) -> u64 {
        let text = fs::read_to_string(self.path.join(self.charged)).unwrap();
        text.trim().parse().unwrap()
    }

    fn oom_kills(&self) -> u64 {
        let text = fs::read_to_string(self.path.join(self.events)).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        line.expect("a count of kills").trim().parse().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What a killed daemon held may be given back a moment later.
        let begun = Instant::now();
        while self.path.exists() && fs::remove_dir(&self.path).is_err() {
            if begun.elapsed() > Duration::from_secs(10) {
                eprintln!("{} stays", self.path.display());
                return;
            }
            std::thread::yield_now();
        }
    }
}

/// A daemon in `dir` and in `group`.
fn start(dir: &Path, group: &Group) -> Daemon {
    let daemon = command(dir, &[]);
    let mut within = Command::new("sh");
    within
        .args(["-c", "echo $$ > \"$1\" && shift && exec \"$@\"", "sh"])
        .arg(group.path.join("cgroup.procs"))
        .arg(daemon.get_program())
        .args(daemon.get_args())
        .stdin(Stdio::null());
    Daemon::start(dir, within)
}

fn show(daemon: &Daemon) -> Value {
    daemon.json(&["vm", "show", "a"])
}

/// Bytes that do not compress, and follow from their page's number.
fn content(page: u64) -> Vec<u8> {
    let mut random = SplitMix64::new(page);
    (0..512)
        .flat_map(|_| random.next_u64().to_le_bytes())
        .collect()
}

#[test]
fn daemon_in_a_small_memory_cgroup_stops_evicting_in_time_and_goes_on_when_there_is_room() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over and cgroups need root");
        return;
    }
    if !vmm::is_this(
        "daemon_in_a_small_memory_cgroup_stops_evicting_in_time_and_goes_on_when_there_is_room",
    ) {
        return;
    }
    let group = match Group::make(GROUP_BYTES) {
        Ok(group) => group,
        Err(why) => {
            eprintln!("SKIPPED: {why}");
            return;
        }
    };
    let ram = Ram::filled(RAM_BYTES, content);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut daemon = start(dir.path(), &group);
    assert!(daemon.log().contains("memory cgroup"), "{}", daemon.log());
    // A budget that the group does not allow.
    let request = (
        "PUT",
        "/v1/host/budget",
        json!({"budget_bytes": 2 * GROUP_BYTES}),
    );
    let part = "limit of 96 MiB of a memory cgroup";
    refuses_both(&daemon, &["host", "budget", "192M"], &request, part);
    let own = std::process::id().to_string();
    daemon.json(&["attach", "--pid", &own, "--name", "a", "--limit", VM_LIMIT]);
    let blockers = |daemon: &Daemon| show(daemon)["eviction_blockers"].to_string();
    daemon.until("word of the cgroup", |daemon| {
        blockers(daemon).contains("memory cgroup")
    });
    let vm = show(&daemon);
    assert_eq!(vm["state"], "serving-only", "{vm}");
    assert!(number(&vm, "evicted_pages") > 0, "{vm}");
    assert!(number(&vm, "resident_bytes") > 32 * MIB, "{vm}");
    // The kernel sees to it that no more than the limit is charged; the margin is our own affair.
    let stored = number(&vm, "pool_bytes");
    assert!(
        (GROUP_BYTES / 4..=GROUP_BYTES - MARGIN_BYTES).contains(&stored),
        "{vm}"
    );
    let charged = group.charged_bytes();
    assert!(
        charged <= GROUP_BYTES - MARGIN_BYTES + OWN_BYTES,
        "{charged}"
    );
    // All of it is served, with the group as full as it gets.
    ram.verify();
    assert_eq!(group.oom_kills(), 0);
    let said = daemon.log().matches("not evicting").count();
    assert!((1..=20).contains(&said), "{said} times: {}", daemon.log());
    group.set_limit(GROUP_BYTES * 4).unwrap();
    daemon.until("eviction to the limit", |daemon| {
        blockers(daemon) == "[]" && number(&show(daemon), "resident_bytes") <= 34 * MIB
    });
    daemon.json(&["vm", "detach", "a"]);
    ram.verify();
    assert_eq!(group.oom_kills(), 0);
}
