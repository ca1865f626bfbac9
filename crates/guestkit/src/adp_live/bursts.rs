// SPDX-License-Identifier: Apache-2.0
//! The guest whose interface is looked at, and what the host sends to it (VPRI 4.2, 7.3).
//!
//! # The model
//! A NIC's buffers are a small, stable part of a VM (the paper: 3% of its memory), used in bursts: a service that is
//! asked now and then. Between two bursts its pages are idle for seconds to a minute. Without a protector most bursts
//! meet absent buffers if the evictor takes sections that were idle for less.
//!
//! So the guest has more memory in slow use than fits: it goes through [`ACTIVE_BYTES`] at some 8 MiB/s, which takes
//! half a minute, while its limit leaves two thirds of that. With less in use the evictor finds memory that was idle
//! for minutes, and never takes a buffer: seen with 64 MiB in use.
//!
//! The host keeps one connection to an echo and sends [`BURST_BYTES`] at a time, with pauses at random between
//! [`REST_MIN`] and [`REST_MAX`]; each byte that comes back is compared. Some idle memory is there, too, as in the
//! scenario with a disk, and goes first.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use pagetide_guest::params::Params;
use pagetide_random::SplitMix64;

use super::AdpLiveError;
use crate::network::{self, Back, ECHO_PORT};
use crate::qemu::{GuestSpec, Version};

/// RAM of the guest.
const RAM_BYTES: u64 = 640 << 20;
/// Of it, memory filled by the guest's own work, and the part that it goes through again and again.
const MEMORY_BYTES: u64 = 304 << 20;
const ACTIVE_BYTES: u64 = 256 << 20;
/// Pause of that work after a step of 256 KiB.
const PACE_US: u64 = 30_000;
/// Of a burst, each way.
const BURST_BYTES: usize = 2 << 20;
/// Pause between two bursts.
const REST_MIN: Duration = Duration::from_secs(10);
const REST_MAX: Duration = Duration::from_secs(50);
/// Longest wait for a burst to come back.
const PATIENCE: Duration = Duration::from_secs(120);
/// Buffers of its ring: those of usual cloud guests.
const RING: u16 = 1024;

/// The guest with its interface at `socket`.
pub(super) fn guest(socket: &Path, version: Version) -> GuestSpec {
    GuestSpec {
        ram_bytes: RAM_BYTES,
        work: Params {
            mem_bytes: MEMORY_BYTES,
            active_bytes: ACTIVE_BYTES,
            seed: 1,
            pace_us: PACE_US,
            ..Params::default()
        },
        extra: network::interface(Back::Socket(socket), 1, RING, version),
        ..GuestSpec::default()
    }
}

/// The host's side, in a thread of its own.
pub(super) struct Bursts {
    over: Option<Sender<()>>,
    bytes: Arc<AtomicU64>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl Bursts {
    /// Connects to the guest and begins.
    ///
    /// # Errors
    /// The guest does not answer.
    pub fn start() -> Result<Self, AdpLiveError> {
        let mut stream = network::connect(ECHO_PORT, PATIENCE).map_err(AdpLiveError::Network)?;
        let (over, is_over) = channel();
        let bytes = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&bytes);
        let thread = std::thread::spawn(move || -> std::io::Result<()> {
            let mut random = SplitMix64::new(7);
            for seed in 0.. {
                network::echo(&mut stream, BURST_BYTES, seed, PATIENCE)?;
                counted.fetch_add(BURST_BYTES as u64, Ordering::Relaxed);
                let more = (REST_MAX - REST_MIN).as_millis().try_into().unwrap_or(0);
                let rest = REST_MIN + Duration::from_millis(random.below(more));
                match is_over.recv_timeout(rest) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
                }
            }
            Ok(())
        });
        Ok(Self {
            over: Some(over),
            bytes,
            thread: Some(thread),
        })
    }

    /// Ends them; returns the bytes that came back and were right.
    ///
    /// # Errors
    /// A byte was wrong, or the connection broke.
    pub fn end(mut self) -> Result<u64, AdpLiveError> {
        self.over = None;
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            let ended = ended.unwrap_or_else(|_| Err(std::io::Error::other("it has panicked")));
            ended.map_err(AdpLiveError::Network)?;
        }
        Ok(self.bytes.load(Ordering::Relaxed))
    }
}

impl Drop for Bursts {
    fn drop(&mut self) {
        self.over = None;
    }
}
