// SPDX-License-Identifier: Apache-2.0
//! The parts of the engine: its requests, how they end, and whether its thread polls.

use super::io::Tag;
use super::shared::{Shared, Wrote};
use crate::{Place, ReadDone, Room, VmId, WriteDone};
use pagetide_sys::file_ring::{Buffer, Transfer};
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

/// The device does not exist any more.
pub(super) const LOST: [i32; 4] = [
    rustix::io::Errno::NODEV.raw_os_error(),
    rustix::io::Errno::NXIO.raw_os_error(),
    rustix::io::Errno::NOMEDIUM.raw_os_error(),
    rustix::io::Errno::SHUTDOWN.raw_os_error(),
];
/// The file system has no space.
pub(super) const FULL: [i32; 2] = [
    rustix::io::Errno::NOSPC.raw_os_error(),
    rustix::io::Errno::DQUOT.raw_os_error(),
];

/// How long the thread polls for an order at most.
const POLL_TIME: Duration = Duration::from_micros(30);

/// How long requests may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bounds {
    /// A read of a page, before the tier counts as slow. It is still answered when it is done.
    pub read: Duration,
    /// A read of a page, before the tier counts as gone, and the read as failed.
    pub lost: Duration,
    /// A write of a batch, and a probe.
    pub write: Duration,
}

impl Default for Bounds {
    /// Disks answer in milliseconds. One that takes a second for a page has a fault, or a queue so long
    /// that pages are better off elsewhere. The kernel gives a request up to its device after 30 s, and tries it
    /// a few times more: a disk that has not answered for a minute is not there.
    fn default() -> Self {
        Self {
            read: Duration::from_secs(1),
            lost: Duration::from_secs(60),
            write: Duration::from_secs(5),
        }
    }
}

/// Whether the thread polls before it sleeps.
#[derive(Default)]
pub(super) struct Polling {
    is_worth_it: bool,
}

impl Polling {
    /// True if an order came while it polled.
    pub fn poll(&mut self, shared: &Shared) -> bool {
        self.is_worth_it = self.is_worth_it && shared.poll_orders(POLL_TIME);
        self.is_worth_it
    }

    /// The thread has slept so long with nothing under way.
    pub fn slept(&mut self, time: Duration) {
        self.is_worth_it = time < POLL_TIME;
    }
}

/// A read that is open. Its duty is gone once it was told.
pub(super) struct OpenRead {
    pub done: Option<ReadDone>,
    pub place: Place,
    pub page: Range<usize>,
    pub began: Instant,
}

/// A write that is open.
pub(super) struct OpenWrite {
    pub done: Option<WriteDone>,
    pub vm: VmId,
    pub room: Room,
    pub wrote: Wrote,
    pub began: Instant,
}

/// What became of a transfer that was to be started.
pub(super) enum Start {
    /// The kernel has it.
    InRing,
    /// The ring is full.
    NoEntry(Transfer<Tag>),
    /// Its request was told meanwhile, and is closed.
    Abandoned,
}

/// How a transfer ended.
pub(super) enum Outcome {
    /// All of it was moved.
    Whole(Buffer),
    /// The file ends before it.
    End,
    /// It failed.
    Failed(io::Error),
    /// It goes on.
    Continued,
    /// Its request was told before it reached the kernel, or between two parts.
    Abandoned,
}

/// A request in the list of deadlines.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Tagged {
    /// A read that makes the tier slow.
    Read(u64),
    /// A read that is given up.
    Late(u64),
    Write(u64),
}

pub(super) fn is_one_of(error: &io::Error, numbers: &[i32]) -> bool {
    error
        .raw_os_error()
        .is_some_and(|number| numbers.contains(&number))
}
