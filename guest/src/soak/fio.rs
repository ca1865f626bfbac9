// SPDX-License-Identifier: Apache-2.0
//! fio in a soak: random writes past the page cache, each block with its checksum, read back.
//!
//! A run writes every block of the partition once, in random order and mixed with reads of blocks
//! written before, and then reads all. The next run has another seed.

use std::fs;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::tally::Tally;
use super::{FIO_PARTITION, PAUSE, Soak};
use crate::fio::{self, FioError, PROGRAM};

const JOB: &str = "soak";
const REPORT: &str = "/tmp/soak-fio.json";
const LOOK: Duration = Duration::from_millis(200);
const BLOCK_BYTES: u64 = 16 << 10;
/// Rate in each direction: a load that two emulated CPUs carry beside the others.
const RATE_BYTES: u64 = 3 << 20;
/// `EILSEQ`: fio's error for a block with wrong content.
const WRONG_BLOCK: u64 = 84;

/// Runs of fio until the soak ends.
pub fn run(soak: &Soak) {
    let mut seed = soak.seed;
    while soak.goes_on() {
        seed = crate::pattern::mix(seed);
        once(soak, seed);
    }
}

fn once(soak: &Soak, seed: u64) {
    let mut child = match command(seed).spawn() {
        Ok(child) => child,
        Err(error) => {
            soak.tally.failed(&format!("{PROGRAM}: {error}"));
            return soak.rest(PAUSE);
        }
    };
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if soak.goes_on() => soak.rest(LOOK),
            Ok(None) => {
                interrupt(soak, &child);
                match child.wait() {
                    Ok(status) => break status,
                    Err(error) => return soak.tally.failed(&format!("fio: {error}")),
                }
            }
            Err(error) => return soak.tally.failed(&format!("fio: {error}")),
        }
    };
    let report = fs::read_to_string(REPORT).unwrap_or_default();
    match fio::moved(JOB, &report) {
        Ok(moved) => Tally::add(
            &soak.tally.fio_bytes,
            moved.read_bytes + moved.written_bytes,
        ),
        Err(FioError::Wrong { errors, .. }) if errors.contains(&WRONG_BLOCK) => {
            // It ends at the first error, and prints the place on the console.
            soak.tally.wrong(BLOCK_BYTES, "a block of fio's");
        }
        Err(error) => {
            soak.tally
                .failed(&format!("{error}; it ended with {status}"));
            soak.rest(PAUSE);
        }
    }
}

fn interrupt(soak: &Soak, child: &Child) {
    // On this signal it ends its threads and reports.
    if let Some(pid) = child.id().try_into().ok().and_then(Pid::from_raw)
        && let Err(error) = kill_process(pid, Signal::INT)
    {
        soak.tally.failed(&format!("stopping fio: {error}"));
    }
}

fn command(seed: u64) -> Command {
    let mut fio = Command::new(PROGRAM);
    fio.args([
        "--name=soak",
        "--ioengine=libaio",
        "--direct=1",
        "--rw=randwrite",
        "--iodepth=4",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        "--verify_backlog=64",
        "--output-format=json",
        "--eta=never",
        // Threads suffice, and need no System V shared memory.
        "--thread=1",
    ])
    .arg(format!("--filename={FIO_PARTITION}"))
    .arg(format!("--output={REPORT}"))
    .arg(format!("--bs={BLOCK_BYTES}"))
    .arg(format!("--rate={RATE_BYTES},{RATE_BYTES}"))
    .arg(format!("--randseed={}", seed >> 1));
    fio
}
