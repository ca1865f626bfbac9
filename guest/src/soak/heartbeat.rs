// SPDX-License-Identifier: Apache-2.0
//! The heartbeat of a soak: the guest's longest stall.
//!
//! Two threads of the highest priority, one with a direct, synchronous write to the disk and the other with
//! touches of memory that is too large to stay hot, each 100 ms. The time between two beats, by the guest's
//! monotonic clock, is a gap. Both check what they wrote before.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use super::tally::Heart;
use super::{BEAT_PARTITION, Soak, different_bytes};
use crate::disk::Buffer;
use crate::pattern::{self, PAGE_BYTES, PAGE_WORDS};

const BEAT: Duration = Duration::from_millis(100);
/// Blocks that the disk's beats use in turn.
const BLOCKS: u64 = 128;
/// Pages that the beats in memory choose from: 16 MiB.
const PAGES: usize = 4096;
const PAGES_A_BEAT: usize = 16;

/// Beats on the disk.
pub fn on_disk(soak: &Soak) {
    first_of_all(soak);
    let disk = match open() {
        Ok(disk) => disk,
        Err(error) => return soak.tally.failed(&format!("{BEAT_PARTITION}: {error}")),
    };
    let (mut wanted, mut buffer) = (Buffer::new(PAGE_BYTES), Buffer::new(PAGE_BYTES));
    let mut last = Instant::now();
    for beat in 0_u64.. {
        if !soak.goes_on() {
            return soak.tally.rest(Heart::Disk);
        }
        if let Err(error) = write_and_look_back(soak, &disk, beat, (&mut wanted, &mut buffer)) {
            let place = beat % BLOCKS;
            soak.tally
                .failed(&format!("heartbeat at block {place}: {error}"));
        }
        let now = Instant::now();
        soak.tally.beat(Heart::Disk, now - last);
        last = now;
        thread::sleep(BEAT);
    }
}

/// Beats in memory.
pub fn in_memory(soak: &Soak) {
    first_of_all(soak);
    let mut words = vec![0_u64; PAGES * PAGE_WORDS];
    let mut random = pattern::mix(soak.seed ^ 0x6265_6174) | 1;
    let mut counts = vec![0_u64; PAGES];
    let mut last = Instant::now();
    while soak.goes_on() {
        for _ in 0..PAGES_A_BEAT {
            random = pattern::mix(random);
            let page = usize::try_from(random % PAGES as u64).unwrap_or(0);
            let cell = &mut words[page * PAGE_WORDS];
            if *cell != counts[page] {
                soak.tally.wrong(8, "a count in the heartbeat's memory");
            }
            counts[page] += 1;
            *cell = counts[page];
        }
        let now = Instant::now();
        soak.tally.beat(Heart::Memory, now - last);
        last = now;
        thread::sleep(BEAT);
    }
    soak.tally.rest(Heart::Memory);
}

fn first_of_all(soak: &Soak) {
    // 0 means the calling thread.
    if let Err(error) = rustix::process::setpriority_process(None, -20) {
        soak.tally
            .failed(&format!("priority of the heartbeat: {error}"));
    }
}

fn open() -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags((OFlags::DIRECT | OFlags::DSYNC).bits().cast_signed())
        .open(BEAT_PARTITION)
}

fn write_and_look_back(
    soak: &Soak,
    disk: &File,
    beat: u64,
    (wanted, buffer): (&mut Buffer, &mut Buffer),
) -> io::Result<()> {
    fill(wanted.get(), soak.seed, beat);
    disk.write_all_at(wanted.get(), offset(beat))?;
    // Half a cycle back: written some seconds ago, perhaps under an earlier daemon.
    let Some(earlier) = beat.checked_sub(BLOCKS / 2) else {
        return Ok(());
    };
    disk.read_exact_at(buffer.get(), offset(earlier))?;
    fill(wanted.get(), soak.seed, earlier);
    let wrong = different_bytes(wanted.get(), buffer.get());
    if wrong > 0 {
        let place = earlier % BLOCKS;
        soak.tally.wrong(
            wrong,
            &format!("block {place} of the heartbeat's partition"),
        );
    }
    Ok(())
}

fn offset(beat: u64) -> u64 {
    beat % BLOCKS * PAGE_BYTES as u64
}

fn fill(block: &mut [u8], seed: u64, beat: u64) {
    let content = super::content(pattern::key(seed, beat, 0), block.len());
    block.copy_from_slice(&content);
}
