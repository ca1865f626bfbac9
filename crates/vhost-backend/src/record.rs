// SPDX-License-Identifier: Apache-2.0
//! [`Record`]: everything that a front end has set of its session, for another process to go on with.

use crate::{backend::RegionShape, ring::RingSettings};
use std::os::fd::OwnedFd;
use vhost::vhost_user::{Error, message::VhostUserInflight};

/// See the module. What a ring has taken and not done is in the in-flight region.
#[derive(Debug, Default)]
pub struct Record {
    /// Features of virtio that it has accepted.
    pub features: u64,
    /// Protocol features that it has accepted; `None` before it has.
    pub protocol_features: Option<u64>,
    /// Its memory, with its files.
    pub memory: Vec<(RegionShape, OwnedFd)>,
    /// Its in-flight region.
    pub inflight: Option<InflightRecord>,
    /// Its rings, all of them. None runs any more.
    pub rings: Vec<RingSettings>,
}

/// An in-flight region with its file.
#[derive(Debug)]
pub struct InflightRecord {
    /// Its length.
    pub bytes: u64,
    /// Its first byte in its file.
    pub file_offset: u64,
    /// Queues that it has room for.
    pub queues: u16,
    /// Entries of a queue that it has room for.
    pub queue_size: u16,
    /// Its file.
    pub file: OwnedFd,
}

impl InflightRecord {
    pub(crate) fn of(wire: &VhostUserInflight, file: OwnedFd) -> Self {
        Self {
            bytes: wire.mmap_size,
            file_offset: wire.mmap_offset,
            queues: wire.num_queues,
            queue_size: wire.queue_size,
            file,
        }
    }
}

/// Why a session cannot be given away.
#[derive(Debug, thiserror::Error)]
pub enum ParkError {
    /// It has ended.
    #[error("the front end has gone")]
    Over,
    /// A ring runs whose requests in flight are recorded nowhere.
    #[error(
        "the front end keeps no record of requests in flight (INFLIGHT_SHMFD), and queue {queue} runs"
    )]
    NoRecord {
        /// The queue.
        queue: usize,
    },
    /// It has more memory regions than files are kept of.
    #[error(
        "the front end has {regions} memory regions, too many for another process to go on with"
    )]
    Regions {
        /// How many.
        regions: usize,
    },
    /// A ring did not stop: the device has failed.
    #[error("a queue could not be stopped: {0}")]
    Stop(#[source] Error),
}
