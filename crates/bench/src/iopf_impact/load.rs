// SPDX-License-Identifier: Apache-2.0
//! The load: random reads of one size in a closed loop, each timed from its submission to the moment its
//! completion is seen.
//!
//! The client polls: the cost of an interrupt is the same with and without faults, and the wake-ups of a
//! busy host would add their own tail.

use hdrhistogram::Histogram;
use pagetide_random::SplitMix64;
use pagetide_sys::clock;
use pagetide_sys::lent::{LentError, LentMemory};
use std::{
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
    time::{Duration, Instant},
};
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

/// Most bytes in flight, so that the largest requests do not wait behind one another for longer
/// than a fault takes.
const IN_FLIGHT_BYTES: u64 = 8 << 20;
/// Deepest queue.
const DEPTH_MAX: u64 = 32;
/// Entries of the queue: three descriptors a request.
const QUEUE_SIZE: u16 = 128;
/// Largest latency recorded: a minute.
const LATENCY_MAX_NS: u64 = 60_000_000_000;

/// Why there is no load.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The device or its queue.
    #[error("the device: {0}")]
    Device(#[from] std::io::Error),
    /// Memory for buffers.
    #[error(transparent)]
    Memory(#[from] LentError),
    /// The path of the socket.
    #[error("the path of the socket is not UTF-8")]
    Path,
    /// A request failed.
    #[error("{0} requests failed")]
    Failed(u64),
    /// The device is smaller than a request, or a buffer outside the memory: a bug of the bench.
    #[error("requests of {0} bytes do not fit")]
    Fit(u64),
}

/// Requests in flight at a block size.
#[must_use]
pub fn depth(block_bytes: u64) -> u64 {
    (IN_FLIGHT_BYTES / block_bytes.max(1)).clamp(1, DEPTH_MAX)
}

/// The result of a slice of the load.
#[derive(Debug, Clone)]
pub struct Slice {
    /// Latencies in nanoseconds.
    pub latency_ns: Histogram<u64>,
    /// Time it took.
    pub took: Duration,
}

impl Slice {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, LATENCY_MAX_NS, 3);
        Self {
            // The bounds are constants that the crate accepts.
            latency_ns: histogram.unwrap_or_else(|_| unreachable!("fixed bounds")),
            took: Duration::ZERO,
        }
    }

    /// Adds another slice of the same load.
    pub fn add(&mut self, other: &Self) {
        if let Err(error) = self.latency_ns.add(&other.latency_ns) {
            debug_assert!(false, "histograms of one shape do not add: {error}");
        }
        self.took += other.took;
    }

    /// Requests a second.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub fn iops(&self) -> f64 {
        self.latency_ns.len() as f64 / self.took.as_secs_f64().max(1e-9)
    }

    /// A quantile in microseconds.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "latencies far below 2^53 ns")]
    pub fn quantile_us(&self, quantile: f64) -> f64 {
        self.latency_ns.value_at_quantile(quantile) as f64 / 1e3
    }
}

impl Default for Slice {
    fn default() -> Self {
        Self::new()
    }
}

/// A connected device, which is dropped last.
pub struct Disk {
    transport: Box<VirtioBlkTransport>,
    bytes: u64,
}

impl Disk {
    /// Connects.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn connect(socket: &Path) -> Result<Self, LoadError> {
        let features = VirtioFeatureFlags::VERSION_1.bits()
            | VirtioFeatureFlags::RING_EVENT_IDX.bits()
            | VirtioBlkFeatureFlags::MQ.bits()
            | VirtioBlkFeatureFlags::FLUSH.bits();
        let path = socket.to_str().ok_or(LoadError::Path)?;
        let transport: Box<VirtioBlkTransport> = Box::new(VhostUser::new(path, features)?);
        let bytes = u64::from(transport.get_config()?.capacity) * 512;
        Ok(Self { transport, bytes })
    }

    /// Its queue and buffers, ready to work.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn client(&mut self) -> Result<Client<'_>, LoadError> {
        let memory = LentMemory::new("bench-iopf-impact", IN_FLIGHT_BYTES)?;
        let mut queues = VirtioBlkQueue::setup_queues(self.transport.as_mut(), 1, QUEUE_SIZE)?;
        self.transport.map_mem_region(
            memory.address(),
            usize::try_from(IN_FLIGHT_BYTES).unwrap_or(usize::MAX),
            memory.as_fd().as_raw_fd(),
            0,
        )?;
        let queue = queues.swap_remove(0);
        Ok(Client {
            transport: self.transport.as_ref(),
            queue,
            memory,
            disk_bytes: self.bytes,
            random: SplitMix64::new(0),
        })
    }
}

/// The client that makes the load.
pub struct Client<'a> {
    transport: &'a VirtioBlkTransport,
    queue: VirtioBlkQueue<'a, u64>,
    memory: LentMemory,
    disk_bytes: u64,
    random: SplitMix64,
}

impl Client<'_> {
    /// Reads blocks of `block_bytes` for `time`.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn run(&mut self, block_bytes: u64, time: Duration) -> Result<Slice, LoadError> {
        let kick = self.transport.get_submission_notifier(0);
        let mut slice = Slice::new();
        let mut begun_at = Vec::new();
        let began = Instant::now();
        for buffer in 0..depth(block_bytes) {
            self.submit(block_bytes, buffer)?;
            begun_at.push(Instant::now());
        }
        kick.notify()?;
        let (mut in_flight, mut failed) = (depth(block_bytes), 0_u64);
        let mut done = Vec::new();
        while in_flight > 0 {
            done.extend(self.queue.completions().map(|c| (c.context, c.ret)));
            if done.is_empty() {
                std::hint::spin_loop();
                continue;
            }
            let now = Instant::now();
            let over = now - began >= time;
            for (buffer, ret) in done.drain(..) {
                failed += u64::from(ret != 0);
                let slot = usize::try_from(buffer).unwrap_or(usize::MAX);
                if let Some(begun_at) = begun_at.get_mut(slot) {
                    let took_ns = clock::ns(now - *begun_at);
                    slice.latency_ns.saturating_record(took_ns.max(1));
                    *begun_at = now;
                }
                if over {
                    in_flight -= 1;
                } else {
                    self.submit(block_bytes, buffer)?;
                }
            }
            if self.queue.avail_notif_needed() {
                kick.notify()?;
            }
        }
        slice.took = began.elapsed();
        match failed {
            0 => Ok(slice),
            failed => Err(LoadError::Failed(failed)),
        }
    }

    fn submit(&mut self, block_bytes: u64, buffer: u64) -> Result<(), LoadError> {
        let blocks = (self.disk_bytes / block_bytes).max(1);
        let offset = self.random.below(blocks) * block_bytes;
        let bytes = self.memory.bytes_mut(buffer * block_bytes, block_bytes);
        let bytes = bytes.ok_or(LoadError::Fit(block_bytes))?;
        self.queue.read(offset, bytes, buffer)?;
        Ok(())
    }
}
