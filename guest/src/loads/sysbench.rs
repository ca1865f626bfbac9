// SPDX-License-Identifier: Apache-2.0
//! sysbench on all CPUs: prime numbers, or long writes to memory.

use std::process::Command;

use super::{LoadError, Ran, output_of};

const PROGRAM: &str = "sysbench";
const PATH: &str = "/bin/sysbench";
/// One for each CPU of the guests that run it.
const THREADS: u32 = 2;
/// Block that each thread writes again and again: far more than caches and translations reach.
const BLOCK: &str = "64M";
/// More than any run writes.
const NO_END: &str = "1000T";

/// A test of sysbench.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Test {
    /// Primes up to ten thousand; an event is one search.
    Cpu,
    /// Writes in order; an event is a block.
    Memory,
}

/// Runs a test for this time.
pub(super) fn run(test: Test, seconds: u64) -> Result<Ran, LoadError> {
    let mut command = Command::new(PATH);
    match test {
        Test::Cpu => command.arg("cpu"),
        Test::Memory => command.arg("memory").args([
            &format!("--memory-block-size={BLOCK}"),
            &format!("--memory-total-size={NO_END}"),
            "--memory-scope=local",
            "--memory-oper=write",
        ]),
    };
    command
        .arg(format!("--threads={THREADS}"))
        .arg(format!("--time={seconds}"))
        .arg("run");
    let report = output_of(PROGRAM, &mut command)?;
    ran_by(&report).ok_or_else(|| LoadError::Ended {
        program: PROGRAM,
        said: format!("a report without events: {report}"),
    })
}

/// The figures in a report of sysbench.
fn ran_by(report: &str) -> Option<Ran> {
    let value = |name: &str| {
        report
            .lines()
            .find_map(|line| line.trim().strip_prefix(name))
    };
    let operations = value("total number of events:")?.trim();
    Ran::of(operations, value("total time:")?.trim().strip_suffix('s')?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_and_time_are_read_from_the_report_of_sysbench() {
        let report = "CPU speed:\n    events per second:   412.77\n\nGeneral statistics:\n    \
                      total time:                          5.0042s\n    \
                      total number of events:              2066\n";
        let ran = ran_by(report).expect("it has all");
        assert_eq!((ran.operations, ran.took.as_micros()), (2066, 5_004_200));
        let none = report.replace("2066", "0");
        for wrong in ["", "total time: 5s", &none, &report.replace("5.0042s", "x")] {
            assert_eq!(ran_by(wrong), None, "{wrong}");
        }
    }
}
