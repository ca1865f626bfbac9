// SPDX-License-Identifier: Apache-2.0
//! The stand-in's disk: reads of a vhost-user block device into its RAM, one at a time.
//!
//! Ring and buffers lie behind the pages that the stand-in's threads use:
//! ```text
//!   filled pages │ ring and slots of the front end │ buffers …
//! ```

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pagetide_frontend::{Direction, RINGS_BYTES, Request};
use pagetide_sys::mapping::SharedMapping;
use pagetide_sys::memory_file::GuestFile;

use super::guest::Wrong;

/// Memory of the disk, behind the filled pages.
pub(super) const DISK_BYTES: u64 = 1 << 20;
const BUFFER_BYTES: u32 = 4096;
const BUFFER_COUNT: u64 = 64;
const _: () = assert!(RINGS_BYTES + BUFFER_COUNT * BUFFER_BYTES as u64 <= DISK_BYTES);
/// Between two polls of the used ring.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// A connected disk.
pub(super) struct Disk {
    front: pagetide_frontend::Disk,
    /// Where its buffers begin.
    buffers: u64,
}

impl Disk {
    /// Connects to the device at `socket`; all of `file` is guest RAM, the disk's part begins at `base`.
    pub(super) fn connect(
        socket: &Path,
        file: &GuestFile,
        ram: Arc<SharedMapping>,
        base: u64,
    ) -> Result<Self, Wrong> {
        let file = file.as_fd().try_clone_to_owned()?;
        let mut front = pagetide_frontend::Disk::new(ram, file, base, socket)?;
        front.connect()?;
        let buffers = base + RINGS_BYTES;
        Ok(Self { front, buffers })
    }

    /// Reads the disk's first page into one buffer after the other, as long as the process lives. If the
    /// daemon dies, the read hangs: this stand-in does not reconnect.
    pub(super) fn read_for_ever(mut self) -> Result<(), Wrong> {
        let mut buffer = 0;
        loop {
            self.front.begin(
                0,
                &Request {
                    direction: Direction::Read,
                    sector: 0,
                    data: self.buffers + buffer * u64::from(BUFFER_BYTES),
                    bytes: BUFFER_BYTES,
                },
            )?;
            while self.front.take_done()?.is_none() {
                thread::sleep(LOOK_AGAIN);
            }
            buffer = (buffer + 1) % BUFFER_COUNT;
        }
    }
}
