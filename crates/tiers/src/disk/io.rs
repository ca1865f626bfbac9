// SPDX-License-Identifier: Apache-2.0
//! The seams between the tier and the kernel, so that tests can put faults there.

use crate::bitmap::BlockSize;
use crate::extent::SegmentNo;
use pagetide_sys::file_ring::{Completed, FileRing, NotStarted, Transfer};
use std::{io, time::Duration};

/// Which transfer of the engine it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tag {
    /// A page is read, for the request with this key.
    Read(u64),
    /// A batch is written, for the request with this key.
    Write(u64),
    /// A segment is given back to the file system.
    Punch(SegmentNo),
    /// A probe's block is written.
    ProbeWrite,
    /// A probe's block is read back.
    ProbeRead,
}

/// Transfers: the ring.
pub(super) trait Io {
    fn start(&mut self, transfer: Transfer<Tag>) -> Result<(), NotStarted<Tag>>;
    fn wait(&mut self, limit: Duration) -> io::Result<()>;
    fn next_done(&mut self) -> Option<Completed<Tag>>;
}

impl Io for FileRing<Tag> {
    fn start(&mut self, transfer: Transfer<Tag>) -> Result<(), NotStarted<Tag>> {
        self.start(transfer)
    }

    fn wait(&mut self, limit: Duration) -> io::Result<()> {
        self.wait(limit)
    }

    fn next_done(&mut self) -> Option<Completed<Tag>> {
        self.next_done()
    }
}

/// Space for segments: the file system.
pub(super) trait Ground: Send + Sync {
    /// Allocates these bytes of the file, so that writing them cannot fail for want of space.
    fn allocate(&self, offset: u64, bytes: u64) -> io::Result<()>;
    /// Free bytes of the file system above what is left to others; `None` if there is no file system.
    fn free_bytes(&self) -> io::Result<Option<u64>>;
}

/// What becomes of the space of a segment that nobody needs any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Discard {
    /// It goes back to the file system.
    Punch,
    /// Nothing: a block device is the tier's as a whole, and what lies there is ciphertext.
    Keep,
}

impl Discard {
    /// True if the file system is to be told of a segment that nobody needs.
    pub fn is_punch(self) -> bool {
        self == Self::Punch
    }
}

/// What the engine must know of its disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Geometry {
    pub block: BlockSize,
    pub segments: u32,
    pub discard: Discard,
}
