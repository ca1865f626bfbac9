// SPDX-License-Identifier: Apache-2.0
//! stress-ng in a soak: memory under all its patterns, verified, with less RAM than it uses.
//!
//! Its workers are in a memory cgroup that holds less than they touch, so that a part of their memory is in
//! swap, on our disk, all the time. On a slow machine a run passes over its memory once or twice so, which is before
//! stress-ng counts anything; then the next one has half the memory and twice the time.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::Ordering::Relaxed;

use super::tally::Tally;
use super::{BUSYBOX, PAUSE, Soak};

/// Mount point of the cgroups.
pub const GROUPS: &str = "/cgroups";
const PROGRAM: &str = "/bin/stress-ng";
const REPORT: &str = "/tmp/stress-ng.yaml";
/// Most and least memory of a run.
const MEMORY_BYTES: (u64, u64) = (20 << 20, 5 << 20);
/// Limit of its memory in RAM.
const RESIDENT_BYTES: u64 = 18 << 20;
/// Shortest and longest run.
const SECONDS: (u32, u32) = (10, 80);
/// Exit status of a worker that found wrong memory.
const NOT_VERIFIED: i32 = 2;

/// Runs of stress-ng until the soak ends.
pub fn run(soak: &Soak) {
    if let Err(error) = make_group() {
        return soak
            .tally
            .failed(&format!("the cgroup of stress-ng: {error}"));
    }
    let mut seed = soak.seed;
    let (mut bytes, mut seconds) = (MEMORY_BYTES.0, SECONDS.0);
    while soak.goes_on() {
        seed = crate::pattern::mix(seed);
        match once(seed, bytes, seconds) {
            Ok(output) => {
                count(soak, &output);
                if soak.tally.stress_ng_bogo_ops.load(Relaxed) == 0 {
                    bytes = MEMORY_BYTES.1.max(bytes / 2);
                    seconds = SECONDS.1.min(2 * seconds);
                }
            }
            Err(error) => {
                soak.tally.failed(&format!("stress-ng: {error}"));
                soak.rest(PAUSE);
            }
        }
    }
}

fn group() -> String {
    format!("{GROUPS}/stress")
}

fn make_group() -> io::Result<()> {
    fs::write(format!("{GROUPS}/cgroup.subtree_control"), "+memory")?;
    fs::create_dir_all(group())?;
    fs::write(
        format!("{}/memory.high", group()),
        RESIDENT_BYTES.to_string(),
    )
}

fn once(seed: u64, bytes: u64, seconds: u32) -> io::Result<Output> {
    // The shell puts itself into the cgroup, and so all its children.
    let script = format!(
        "echo $$ > {}/cgroup.procs && exec {PROGRAM} --vm 1 --vm-bytes {bytes} --vm-method all \
         --verify --timeout {seconds}s --seed {seed} --metrics-brief --temp-path /tmp --yaml {REPORT}",
        group()
    );
    Command::new(BUSYBOX).args(["sh", "-c", &script]).output()
}

fn count(soak: &Soak, output: &Output) {
    let text = fs::read_to_string(Path::new(REPORT)).unwrap_or_default();
    Tally::add(&soak.tally.stress_ng_bogo_ops, bogo_ops(&text));
    if output.status.success() {
        return;
    }
    let said = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    let said = said.join("\n");
    let failures = said.lines().filter(|line| is_failure(line)).count() as u64;
    if failures > 0 || output.status.code() == Some(NOT_VERIFIED) {
        soak.tally
            .wrong(failures, &format!("stress-ng says: {said}"));
    } else {
        soak.tally
            .failed(&format!("stress-ng ended with {}: {said}", output.status));
        soak.rest(PAUSE);
    }
}

/// Whether a line of stress-ng reports wrong content: `stress-ng: fail: [PID] vm: …`.
fn is_failure(line: &str) -> bool {
    line.contains("fail:") && line.contains(" vm")
}

/// The sum of all operations in a report.
fn bogo_ops(report: &str) -> u64 {
    let value = |line: &str| {
        let value = line.trim().strip_prefix("bogo-ops:")?;
        value.trim().parse::<u64>().ok()
    };
    report.lines().filter_map(value).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_read_from_the_report() {
        let report = "metrics:\n    - stressor: vm\n      bogo-ops: 1234\n      \
                      bogo-ops-per-second-usr-sys-time: 17.2\n";
        assert_eq!(bogo_ops(report), 1234);
        assert_eq!(bogo_ops(""), 0);
    }

    #[test]
    fn failures_are_told_from_other_lines() {
        assert!(is_failure(
            "stress-ng: fail:  [12] vm: detected 3 bit errors while stressing memory"
        ));
        assert!(!is_failure("stress-ng: info:  [12] dispatching hogs: 1 vm"));
    }
}
