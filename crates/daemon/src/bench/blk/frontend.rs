// SPDX-License-Identifier: Apache-2.0
//! The front end as a process of its own: the crate virtio-driver on one queue.
//!
//! It takes a [`Run`] as a line of JSON, does it, and prints a [`RunResult`] as
//! a line. Between completions it sleeps on the call descriptor, as a guest
//! that is interrupted does.

use pagetide_sys::lent::{LentError, LentMemory};
use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};
use std::{
    io::{BufRead as _, Write as _},
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
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

/// Which way data goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Direction {
    /// From the image.
    Read,
    /// To the image.
    Write,
}

impl Direction {
    /// As it is written in names of figures.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Which way.
    pub direction: Direction,
    /// Requests in flight.
    pub depth: u16,
    /// For how long.
    pub time: Duration,
    /// Of the random offsets.
    pub seed: u64,
}

/// What was done.
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
    let sectors = u64::from(transport.get_config()?.capacity);
    let blocks = sectors * 512 / IO_BYTES;
    if blocks == 0 {
        return Err(FrontendError::TooSmall(sectors));
    }
    let bytes = u64::from(DEPTH_MAX) * IO_BYTES;
    let memory = LentMemory::new("bench-frontend", bytes)?;
    let mut queues = VirtioBlkQueue::setup_queues(transport.as_mut(), 1, QUEUE_SIZE)?;
    transport.map_mem_region(
        memory.address(),
        usize::try_from(bytes).unwrap_or(usize::MAX),
        memory.as_fd().as_raw_fd(),
        0,
    )?;
    let queue = queues.swap_remove(0);
    let mut driver = Driver {
        transport: transport.as_ref(),
        queue,
        memory,
        blocks,
        random: 0,
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

/// Some back ends make the descriptor non-blocking, which ours then is, too: so wait, then read.
fn sleep_until_called(call: &EventFd) -> std::io::Result<()> {
    let mut polled = [PollFd::new(call, PollFlags::IN)];
    poll(&mut polled, None)?;
    match call.read() {
        Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}

struct Driver<'a> {
    transport: &'a VirtioBlkTransport,
    queue: VirtioBlkQueue<'a, u16>,
    memory: LentMemory,
    blocks: u64,
    random: u64,
}

impl Driver<'_> {
    fn run(&mut self, run: Run) -> Result<RunResult, FrontendError> {
        if run.depth > DEPTH_MAX {
            return Err(FrontendError::TooDeep(run.depth));
        }
        self.random = run.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let kick = self.transport.get_submission_notifier(0);
        let call = self.transport.get_completion_fd(0);
        self.queue.set_used_notif_enabled(true);
        let began = Instant::now();
        for buffer in 0..run.depth {
            self.submit(run.direction, buffer)?;
        }
        kick.notify()?;
        let (mut ios, mut errors, mut in_flight) = (0, 0, run.depth);
        let mut nanos = 0;
        let mut done = Vec::with_capacity(usize::from(DEPTH_MAX));
        while in_flight > 0 {
            done.extend(self.queue.completions().map(|c| (c.context, c.ret)));
            if done.is_empty() {
                sleep_until_called(&call)?;
                continue;
            }
            let over = began.elapsed() >= run.time;
            for (buffer, ret) in done.drain(..) {
                ios += 1;
                errors += u64::from(ret != 0);
                if over {
                    in_flight -= 1;
                } else {
                    self.submit(run.direction, buffer)?;
                }
            }
            nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            if self.queue.avail_notif_needed() {
                kick.notify()?;
            }
        }
        Ok(RunResult { ios, nanos, errors })
    }

    fn submit(&mut self, direction: Direction, buffer: u16) -> Result<(), FrontendError> {
        // xorshift64: cheap, and the same offsets for both back ends.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let offset = self.random % self.blocks * IO_BYTES;
        let at = u64::from(buffer) * IO_BYTES;
        let bytes = self
            .memory
            .bytes_mut(at, IO_BYTES)
            .ok_or(FrontendError::TooDeep(buffer))?;
        match direction {
            Direction::Read => self.queue.read(offset, bytes, buffer)?,
            Direction::Write => self.queue.write(offset, bytes, buffer)?,
        }
        Ok(())
    }
}
