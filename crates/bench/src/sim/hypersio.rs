// SPDX-License-Identifier: Apache-2.0
//! The authors' program beside ours: `bench sim --hypersio PROGRAM`, a build of HyperSIO's `hypersio-perf`.
//!
//! It reads the same traces in its own format, below a directory that it is told by the environment, and
//! needs the state of context cache and page tables as files, of which it uses nothing. It ends with status 0
//! after most errors, so a run counts only if it says how many requests it has translated, and all of them.

use super::{PACKETS, part};
use crate::harness::report::{BenchError, failed, unable};
use pagetide_sys::cpu::children_time;
use std::{
    fs::{File, create_dir_all, write},
    path::{Path, PathBuf},
    process::Command,
};

/// Requests of a packet.
const REQUESTS_PER_PACKET: u64 = 3;
/// A stride that no trace reaches: that is how its prefetching is switched off.
const NO_STRIDE: u64 = 1_000_000_000;

/// The authors' program, and the directory that it is told is its home.
#[derive(Clone, Debug)]
pub(super) struct Program {
    path: PathBuf,
    home: PathBuf,
}

/// What one run of it cost and found.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct PeerRun {
    pub cpu_seconds: f64,
    pub elapsed_ns: u64,
}

/// Where the program looks for traces.
pub(super) fn traces_of(home: &Path) -> PathBuf {
    home.join("build/hypersio_traces")
}

impl Program {
    /// The program at `path`, which must be one that can be run; `home` gets its traces.
    pub fn new(path: &Path, home: &Path) -> Result<Self, BenchError> {
        let path = path
            .canonicalize()
            .map_err(|error| unable(format!("{}: {error}", path.display())))?;
        create_dir_all(traces_of(home)).map_err(failed)?;
        Ok(Self {
            path,
            home: home.to_owned(),
        })
    }

    /// Makes the files beside the trace of `tenants` that it opens and does not use.
    pub fn complete_trace(&self, tenants: u32) -> Result<(), BenchError> {
        for part in ["cc_data", "slpt_data"] {
            let name = format!("{}_{part}.bin", part::trace_prefix(tenants));
            File::create(traces_of(&self.home).join(name)).map_err(failed)?;
        }
        Ok(())
    }

    /// Runs configuration `config` of table IV over the trace of `tenants`.
    pub fn run(&self, config: &str, tenants: u32) -> Result<PeerRun, BenchError> {
        let settings = self.home.join(format!("{config}.cfg"));
        let (text, queue) = configuration(config);
        write(&settings, text).map_err(failed)?;
        let before = children_time();
        let output = Command::new(&self.path)
            .env("HYPERSIO_HOME", &self.home)
            .arg("--run")
            .arg("--config")
            .arg(&settings)
            .args(["--prefix", &part::trace_prefix(tenants)])
            .args(["--tqueue", &queue.to_string()])
            .args(["--tenantnum", &tenants.to_string()])
            .args(["--iotlbrepl", "lfu", "--linkbwgbps", "200"])
            .output()
            .map_err(|error| unable(format!("{}: {error}", self.path.display())))?;
        let cpu = children_time().saturating_sub(before);
        let text = String::from_utf8_lossy(&output.stdout);
        let elapsed_ns = answer_in(&text).ok_or_else(|| {
            let last = text.lines().next_back().unwrap_or("nothing");
            failed(format!(
                "{} does not say that it has translated {} requests; its last words: {last}",
                self.path.display(),
                PACKETS * REQUESTS_PER_PACKET
            ))
        })?;
        Ok(PeerRun {
            cpu_seconds: cpu.as_secs_f64(),
            elapsed_ns,
        })
    }
}

/// Its configuration file, and the entries of its pending translation buffer.
fn configuration(config: &str) -> (String, u32) {
    // Partitions of DevTLB, L2 and L3; entries and stride of the prefetch unit.
    let (parts, prefetch, queue) = match config {
        "base" => ([1, 1, 1], (0, NO_STRIDE), 1),
        _ => ([8, 32, 64], (8, 48), 32),
    };
    let cache = |name: &str, size: u32, ways: u32, groups: u32| {
        format!("{name}\nsize:{size}\nassoc:{ways}\ngroups:{groups}\n")
    };
    let text = [
        cache("CC", 1536, 1536, 1),
        cache("IOTLB", 64, 8, parts[0]),
        cache("L2PAGE", 512, 16, parts[1]),
        cache("L3PAGE", 1024, 16, parts[2]),
        format!(
            "PREFETCH\nsize:{}\nassoc:{}\nhistlen:2\n",
            prefetch.0, prefetch.1
        ),
    ];
    (text.concat(), queue)
}

/// Simulated time, if all requests were translated.
fn answer_in(output: &str) -> Option<u64> {
    let after = |label: &str| {
        let line = output.lines().find_map(|line| line.strip_prefix(label))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    let requests = after("Requests translated:")?;
    (requests == PACKETS * REQUESTS_PER_PACKET).then(|| after("Time elapsed :"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_counts_only_if_all_requests_were_translated() {
        let of = |requests: u64| {
            format!(
                "Waiting\nTime elapsed :        6105490 ns\nRequests translated:  {requests}\nPkts dropped: 9\n"
            )
        };
        assert_eq!(answer_in(&of(1_200_000)), Some(6_105_490));
        for wrong in [
            of(1_199_997),
            String::new(),
            "Time elapsed : 3 ns".to_owned(),
        ] {
            assert_eq!(answer_in(&wrong), None, "{wrong}");
        }
    }

    #[test]
    fn program_that_says_nothing_is_no_measurement() {
        let home = tempfile::tempdir().unwrap();
        let program = Program::new(Path::new("/bin/true"), home.path()).unwrap();
        program.complete_trace(4).unwrap();
        let error = program.run("base", 4).unwrap_err().to_string();
        assert!(error.contains("does not say"), "{error}");
        Program::new(Path::new("/nowhere"), home.path()).unwrap_err();
    }
}
