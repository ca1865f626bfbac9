// SPDX-License-Identifier: Apache-2.0
//! The front end as a separate process: the crate virtio-driver, with one thread for all queues.
//!
//! It reads a [`Run`] as a line of JSON, runs it, and prints a [`RunResult`] as a line. Between completions
//! it sleeps on the call descriptor, like a guest that uses interrupts.

use pagetide_addr::SECTION_BYTES;
use pagetide_random::SplitMix64;
use pagetide_sys::clock;
use pagetide_sys::lent::{LentError, LentMemory};
use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};
use std::{
    io::{BufRead as _, Write as _},
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use virtio_driver::{
    EventFd, VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport,
    VirtioFeatureFlags,
};

/// Bytes of an I/O.
const IO_BYTES: u64 = 4096;
/// Entries of the queue: the deepest run fits with three descriptors a request.
const QUEUE_SIZE: u16 = 256;
/// Deepest run.
const DEPTH_MAX: u16 = 64;
/// Queues that are used, if the device has so many.
const QUEUES_MAX: u16 = 4;
/// Memory over which buffers are [`Buffers::Spread`]: sparse, of each section the first pages.
pub const SPREAD_BYTES: u64 = 4 << 30;
/// Used pages of a section: together they are far beyond the caches of a CPU.
const SPREAD_PAGES: u64 = 16;
/// Blocks of the disk that a run of spread buffers uses: it measures the cost of requests, not the medium's
/// seeks.
const SPREAD_BLOCKS: u64 = 1024;

/// The direction of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Direction {
    /// From the image.
    Read,
    /// To the image.
    Write,
}

impl Direction {
    /// Its name in names of figures.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// Where the buffers of a run lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Buffers {
    /// One page for each request in flight, side by side.
    Packed,
    /// Each request's in a page chosen anew, anywhere in [`SPREAD_BYTES`] of memory.
    Spread,
}

/// A run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The direction.
    pub direction: Direction,
    /// Requests in flight, in all queues together.
    pub depth: u16,
    /// Queues that they are in.
    pub queues: u16,
    /// Where the guest has its buffers.
    pub buffers: Buffers,
    /// Its length.
    pub time: Duration,
    /// Seed of the random offsets.
    pub seed: u64,
}

/// The result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunResult {
    /// Requests completed within the time.
    pub ios: u64,
    /// Time they took.
    pub nanos: u64,
    /// Requests that failed.
    pub errors: u64,
}

/// Why the front end ended.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// The device or its queue.
    #[error("the device: {0}")]
    Device(#[from] std::io::Error),
    /// Memory for buffers.
    #[error(transparent)]
    Memory(#[from] LentError),
    /// A line.
    #[error("the bench's lines: {0}")]
    Line(#[from] serde_json::Error),
    /// The path of the socket.
    #[error("the path of the socket is not UTF-8")]
    Path,
    /// More in flight than there are buffers.
    #[error("a depth of {0} is more than {DEPTH_MAX}")]
    TooDeep(u16),
    /// More queues than exist, or none.
    #[error("{asked} queues are asked for; there are {present}")]
    Queues {
        /// Requested queues.
        asked: u16,
        /// Existing queues.
        present: usize,
    },
    /// The device is smaller than an I/O.
    #[error("the device has {0} sectors, fewer than one I/O")]
    TooSmall(u64),
}

/// Serves runs until the end of input.
///
/// # Errors
/// [`FrontendError`].
pub fn serve(socket: &Path) -> Result<(), FrontendError> {
    let features = VirtioFeatureFlags::VERSION_1.bits()
        | VirtioFeatureFlags::RING_EVENT_IDX.bits()
        | VirtioBlkFeatureFlags::MQ.bits()
        | VirtioBlkFeatureFlags::FLUSH.bits();
    let path = socket.to_str().ok_or(FrontendError::Path)?;
    let mut transport: Box<VirtioBlkTransport> = Box::new(VhostUser::new(path, features)?);
    let config = transport.get_config()?;
    let sectors = u64::from(config.capacity);
    let blocks = sectors * 512 / IO_BYTES;
    if blocks == 0 {
        return Err(FrontendError::TooSmall(sectors));
    }
    let memory = LentMemory::sparse("bench-frontend", SPREAD_BYTES)?;
    let queue_count = u16::from(config.num_queues).clamp(1, QUEUES_MAX);
    let queues = VirtioBlkQueue::setup_queues(transport.as_mut(), queue_count.into(), QUEUE_SIZE)?;
    transport.map_mem_region(
        memory.address(),
        usize::try_from(SPREAD_BYTES).unwrap_or(usize::MAX),
        memory.as_fd().as_raw_fd(),
        0,
    )?;
    let mut driver = Driver {
        transport: transport.as_ref(),
        queues,
        memory,
        blocks,
        random: SplitMix64::new(0),
    };
    println_line("ready")?;
    for line in std::io::stdin().lock().lines() {
        let run: Run = serde_json::from_str(&line?)?;
        let result = driver.run(run)?;
        println_line(&serde_json::to_string(&result)?)?;
    }
    Ok(())
}

fn println_line(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Some back ends make the descriptor non-blocking, which affects ours, too: so wait, then read.
fn sleep_until_called(calls: &[Arc<EventFd>]) -> std::io::Result<()> {
    let polled = calls.iter().map(|call| PollFd::new(&**call, PollFlags::IN));
    let mut polled: Vec<_> = polled.collect();
    poll(&mut polled, None)?;
    for (call, polled) in calls.iter().zip(polled) {
        if polled.revents().is_empty() {
            continue;
        }
        match call.read() {
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

struct Driver<'a> {
    transport: &'a VirtioBlkTransport,
    queues: Vec<VirtioBlkQueue<'a, u16>>,
    memory: LentMemory,
    blocks: u64,
    random: SplitMix64,
}

impl Driver<'_> {
    fn run(&mut self, run: Run) -> Result<RunResult, FrontendError> {
        let used = usize::from(run.queues);
        if run.depth > DEPTH_MAX {
            return Err(FrontendError::TooDeep(run.depth));
        }
        if !(1..=self.queues.len()).contains(&used) {
            return Err(FrontendError::Queues {
                asked: run.queues,
                present: self.queues.len(),
            });
        }
        self.random = SplitMix64::new(run.seed);
        let kicks = (0..used).map(|queue| self.transport.get_submission_notifier(queue));
        let kicks: Vec<_> = kicks.collect();
        let calls = (0..used).map(|queue| self.transport.get_completion_fd(queue));
        let calls: Vec<_> = calls.collect();
        for queue in &mut self.queues[..used] {
            queue.set_used_notif_enabled(true);
        }
        let began = Instant::now();
        for buffer in 0..run.depth {
            self.submit(run, buffer)?;
        }
        for kick in &kicks {
            kick.notify()?;
        }
        let (mut ios, mut errors, mut in_flight) = (0, 0, run.depth);
        let mut nanos = 0;
        let mut done = Vec::with_capacity(usize::from(DEPTH_MAX));
        while in_flight > 0 {
            for queue in &mut self.queues[..used] {
                done.extend(queue.completions().map(|c| (c.context, c.ret)));
            }
            if done.is_empty() {
                sleep_until_called(&calls)?;
                continue;
            }
            let over = began.elapsed() >= run.time;
            for (buffer, ret) in done.drain(..) {
                ios += 1;
                errors += u64::from(ret != 0);
                if over {
                    in_flight -= 1;
                } else {
                    self.submit(run, buffer)?;
                }
            }
            nanos = clock::ns(began.elapsed());
            for (queue, kick) in self.queues.iter_mut().zip(&kicks) {
                if queue.avail_notif_needed() {
                    kick.notify()?;
                }
            }
        }
        Ok(RunResult { ios, nanos, errors })
    }

    fn submit(&mut self, run: Run, buffer: u16) -> Result<(), FrontendError> {
        // The same offsets for both back ends.
        let drawn = self.random.next_u64();
        let (block, at) = match run.buffers {
            Buffers::Packed => (drawn % self.blocks, u64::from(buffer) * IO_BYTES),
            Buffers::Spread => (drawn % self.blocks.min(SPREAD_BLOCKS), spread(drawn >> 32)),
        };
        let offset = block * IO_BYTES;
        let bytes = self
            .memory
            .bytes_mut(at, IO_BYTES)
            .ok_or(FrontendError::TooDeep(buffer))?;
        let queue = &mut self.queues[usize::from(buffer % run.queues)];
        match run.direction {
            Direction::Read => queue.read(offset, bytes, buffer)?,
            Direction::Write => queue.write(offset, bytes, buffer)?,
        }
        Ok(())
    }
}

/// The page of one of the sections, selected by 32 random bits; returns its first byte.
fn spread(random: u64) -> u64 {
    let section = random % (SPREAD_BYTES / SECTION_BYTES);
    let page = (random >> 16) % SPREAD_PAGES;
    section * SECTION_BYTES + page * IO_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn spread_buffers_are_pages_in_all_sections_of_the_memory() {
        let places: BTreeSet<u64> = (0..1 << 20).map(|at| spread(at * 4099)).collect();
        let last = places.last().copied().unwrap();
        assert!(last + IO_BYTES <= SPREAD_BYTES);
        assert!(places.iter().all(|place| place % IO_BYTES == 0));
        let sections: BTreeSet<u64> = places.iter().map(|place| place / SECTION_BYTES).collect();
        assert_eq!(sections.len() as u64, SPREAD_BYTES / SECTION_BYTES);
        assert_eq!(places.len() as u64, sections.len() as u64 * SPREAD_PAGES);
    }
}
