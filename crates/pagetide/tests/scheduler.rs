// SPDX-License-Identifier: Apache-2.0
//! The scheduler of background work in a real daemon: a VM is squeezed whatever is set, what is set while it
//! runs holds after a crash, and what makes no sense changes nothing. The VMM is this process.

mod bounded;
mod daemon;
mod ram;
mod refusal;
mod vmm;

use bounded::{Said, run_until};
use daemon::{Daemon, command, number};
use ram::Ram;
use refusal::{refuses, refuses_both};
use serde_json::{Value, json};
use std::{path::Path, process::Command};

const MIB: u64 = 1 << 20;
const RAM_BYTES: u64 = 96 * MIB;
const LIMIT_BYTES: u64 = 32 * MIB;

fn start(dir: &Path) -> Daemon {
    Daemon::start(dir, command(dir, &["--scheduler-cycle-us", "10000"]))
}

fn scheduler_of(daemon: &Daemon) -> Value {
    daemon.json(&["host", "scheduler"])
}

fn wait_until_squeezed(daemon: &mut Daemon) {
    daemon.until("eviction to the limit", |daemon| {
        number(&daemon.json(&["vm", "show", "a"]), "resident_bytes") <= LIMIT_BYTES
    });
}

/// A page's number in each of its words, so that it compresses.
fn content(page: u64) -> Vec<u8> {
    (page + 1).to_le_bytes().repeat(512)
}

fn class<'a>(scheduler: &'a Value, name: &str) -> &'a Value {
    let classes = scheduler["classes"].as_array().unwrap();
    let found = classes.iter().find(|class| class["class"] == name);
    found.unwrap_or_else(|| panic!("no class {name} in {scheduler}"))
}

fn squeeze_by_small_shares(daemon: &mut Daemon, ram: &Ram) {
    // Little for reclaim, and nothing lent: each run has to be waited for.
    let set = [
        "host",
        "scheduler",
        "--cycle-us",
        "20000",
        "--longest-run-us",
        "500",
        "--vcpu-faults",
        "5%",
        "--reclaim",
        "10%",
        "--idle-time",
        "unused",
    ];
    let changed = daemon.json(&set);
    assert_eq!(
        (&changed["cycle_us"], &changed["is_kept"]),
        (&20_000.into(), &true.into())
    );
    assert_eq!(class(&changed, "reclaim")["share_permille"], 100);
    // All of it comes back, and a third may stay.
    ram.verify();
    wait_until_squeezed(daemon);
    let scheduler = scheduler_of(daemon);
    assert!(
        class(&scheduler, "vcpu-faults")["runs"].as_u64() > Some(0),
        "{scheduler}"
    );
    assert!(
        class(&scheduler, "reclaim")["held_runs"].as_u64() > Some(0),
        "{scheduler}"
    );
}

fn detach_with_next_to_no_run(daemon: &Daemon, ram: &Ram) {
    // With next to nothing for any work it still ends in order: a detach asks for no run.
    let none = [
        "host",
        "scheduler",
        "--vcpu-faults",
        "0%",
        "--io-faults",
        "0%",
        "--reclaim",
        "0.1%",
        "--scan",
        "0%",
        "--background",
        "0%",
        "--idle-time",
        "unused",
    ];
    daemon.json(&none);
    daemon.json(&["vm", "detach", "a"]);
    ram.verify();
}

#[test]
fn vm_is_squeezed_whatever_is_set_and_what_was_set_holds_after_a_crash() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return;
    }
    if !vmm::is_this("vm_is_squeezed_whatever_is_set_and_what_was_set_holds_after_a_crash") {
        return;
    }
    let ram = Ram::filled(RAM_BYTES, content);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut daemon = start(dir.path());
    let own = std::process::id().to_string();
    daemon.json(&["attach", "--pid", &own, "--name", "a", "--limit", "32M"]);
    wait_until_squeezed(&mut daemon);
    let scheduler = scheduler_of(&daemon);
    assert_eq!(
        (&scheduler["cycle_us"], &scheduler["is_kept"]),
        (&10_000.into(), &false.into())
    );
    assert!(
        class(&scheduler, "reclaim")["runs"].as_u64() > Some(0),
        "{scheduler}"
    );

    squeeze_by_small_shares(&mut daemon, &ram);
    drop(daemon);
    let mut daemon = start(dir.path());
    let after = scheduler_of(&daemon);
    assert_eq!(
        (&after["cycle_us"], &after["is_kept"]),
        (&20_000.into(), &true.into())
    );
    assert_eq!(
        (&after["longest_run_us"], &after["idle_time"]),
        (&500.into(), &"unused".into())
    );
    ram.verify();
    wait_until_squeezed(&mut daemon);
    let reset = daemon.json(&["host", "scheduler", "--reset"]);
    assert_eq!(
        (&reset["cycle_us"], &reset["is_kept"]),
        (&10_000.into(), &false.into())
    );

    detach_with_next_to_no_run(&daemon, &ram);
}

#[test]
fn what_makes_no_sense_is_refused_with_status_2_and_changes_nothing() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let state = dir.path().join("state");
    let run = |flags: &[&str]| -> Said {
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_pagetide"));
        daemon.arg("run").arg("--state-dir").arg(&state).args(flags);
        run_until(&mut daemon, &[" ready"])
    };
    for (flags, part) in [
        (["--scheduler-shares", "reclaim=60%"], "above 100 %"),
        (["--scheduler-shares", "swap=1%"], "'swap' is no class"),
        (
            ["--scheduler-shares", "reclaim=0%"],
            "a share of 0 for reclaim",
        ),
        (["--scheduler-cycle-us", "0"], "a cycle of 0 us"),
        (["--background-cpus", "1023"], "CPU 1023 is not among"),
        (
            ["--scheduler-penalty-percent", "1001"],
            "a penalty of 1001 %",
        ),
        (
            ["--scheduler-longest-run-us", "99"],
            "a longest run of 99 us",
        ),
    ] {
        let said = run(&flags);
        let code = said.ended.and_then(|ended| ended.code());
        assert_eq!(code, Some(2), "{flags:?}: {}", said.log);
        assert!(said.log.contains(part), "{flags:?}: {}", said.log);
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: a daemon needs root");
        return;
    }
    let daemon = start(dir.path());
    let before = scheduler_of(&daemon);
    let no_cycle = ("PATCH", "/v1/host/scheduler", json!({"cycle_us": 0}));
    let words = ["host", "scheduler", "--cycle-us", "0"];
    refuses_both(&daemon, &words, &no_cycle, "a cycle of 0 us");
    for (words, part) in [
        (vec!["--reclaim", "90%"], "above 100 %"),
        (vec!["--reclaim", "101%"], "'101%' is no share"),
        (vec!["--reclaim", "0%"], "a share of 0 for reclaim"),
        (vec!["--background-cpus", "1023"], "CPU 1023 is not among"),
        (vec!["--background-cpus", ""], "is no list of CPUs"),
        (vec!["--penalty-percent", "1001"], "a penalty of 1001 %"),
        (vec!["--longest-run-us", "20000"], "does not fit"),
        (vec!["--reset", "--cycle-us", "20000"], "give it alone"),
    ] {
        refuses(
            &daemon,
            &[&["host", "scheduler"], &words[..]].concat(),
            part,
        );
        let after = scheduler_of(&daemon);
        for setting in [
            "cycle_us",
            "longest_run_us",
            "penalty_percent",
            "background_cpus",
            "is_kept",
        ] {
            assert_eq!(after[setting], before[setting], "{words:?}");
        }
    }
    assert!(!state.join("scheduler.json").exists());
}
