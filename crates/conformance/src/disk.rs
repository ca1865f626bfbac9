// SPDX-License-Identifier: Apache-2.0
//! A vhost-user-blk device of the DPU under test, made to do DMA into the tester's memory.
//!
//! ```text
//!   page 0 …   ring (standing)    64 header    65 status    512 … content
//! ```
//! Every item that a request touches lies in pages of its own, so each page
//! shows whether it was requested.

use super::{Ended, ensure, probe::PATIENCE};
use pagetide_addr::{FileKey, FilePage, FileRange, PAGE_BYTES, SECTION_PAGES};
use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
use pagetide_vpri_function::frontend::{
    area::BASE,
    connect::{ConnectError, bounded, start_queue},
    event::{event, ring_event},
    ring::{Descriptor, NEXT, Notify, Ring, RingError, RingPlace, WRITE},
};
use std::{
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::Arc,
    time::Instant,
};
use vhost::{
    VhostBackend, VhostUserMemoryRegionInfo,
    vhost_user::{
        Frontend, VhostUserFrontend, VhostUserProtocolFeatures, message::VhostUserHeaderFlag,
    },
};

/// Pages of the memory: four sections.
pub(super) const PAGES: u64 = 4 * SECTION_PAGES;
/// Page of the request's header.
pub(super) const HEADER: FilePage = FilePage(64);
/// Page of its status.
const STATUS: FilePage = FilePage(65);
/// First page of the content.
pub(super) const CONTENT: FilePage = FilePage(SECTION_PAGES);
/// A status that no device writes.
const BLANK: u8 = 0xff;
/// The request type of a read in the header.
const READ: u32 = 0;
const RING: RingPlace = RingPlace::at(0, 64);
/// virtio 1 and vhost-user's protocol features.
const FEATURES: u64 = 1 << 32 | 1 << 30;

/// See the module.
pub(super) struct Disk {
    file: GuestFile,
    memory: Arc<SharedMapping>,
    ring: Ring,
    kick: OwnedFd,
    _call: OwnedFd,
    _frontend: Frontend,
}

impl Disk {
    /// Connects, with all memory still a hole except for the ring.
    pub(super) fn connect(socket: &Path) -> Result<Self, Ended> {
        let connected = Self::try_connect(socket);
        connected.map_err(|error| {
            let socket = socket.display();
            Ended::Failed(format!("the disk at {socket} cannot be used: {error}"))
        })
    }

    fn try_connect(socket: &Path) -> Result<Self, ConnectError> {
        let stream = UnixStream::connect(socket).map_err(|source| ConnectError::Socket {
            path: socket.to_owned(),
            source,
        })?;
        let closing = stream.try_clone()?;
        bounded(&closing, || false, || Self::agreed(stream))
    }

    fn agreed(stream: UnixStream) -> Result<Self, ConnectError> {
        let failed = |message| move |source| ConnectError::Message { message, source };
        let other = std::io::Error::other::<pagetide_sys::memory_file::FileError>;
        let bytes = PAGES * PAGE_BYTES;
        let file = GuestFile::new_memfd("pagetide-check", bytes).map_err(other)?;
        let memory = SharedMapping::new(file.as_fd(), bytes).map_err(std::io::Error::other)?;
        let memory = Arc::new(memory);
        let mut frontend = Frontend::from_stream(stream, 1);
        frontend.set_owner().map_err(failed("SET_OWNER"))?;
        let offered = frontend.get_features().map_err(failed("GET_FEATURES"))?;
        let missing = FEATURES & !offered;
        if missing != 0 {
            return Err(ConnectError::Features { offered, missing });
        }
        frontend
            .set_features(FEATURES)
            .map_err(failed("SET_FEATURES"))?;
        let protocol = frontend
            .get_protocol_features()
            .map_err(failed("GET_PROTOCOL_FEATURES"))?;
        let agreed = protocol & VhostUserProtocolFeatures::REPLY_ACK;
        frontend
            .set_protocol_features(agreed)
            .map_err(failed("SET_PROTOCOL_FEATURES"))?;
        if !agreed.is_empty() {
            frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: BASE,
            memory_size: bytes,
            userspace_addr: BASE,
            mmap_offset: 0,
            mmap_handle: file.as_fd().as_raw_fd(),
        };
        frontend
            .set_mem_table(&[region])
            .map_err(failed("SET_MEM_TABLE"))?;
        let ring = Ring::new(Arc::clone(&memory), RING, Notify::Flags);
        let (kick, call) = (event()?, event()?);
        let fds = [call.as_fd(), call.as_fd(), kick.as_fd()];
        start_queue(&mut frontend, 0, RING, fds)?;
        Ok(Self {
            file,
            memory,
            ring,
            kick,
            _call: call,
            _frontend: frontend,
        })
    }

    /// The name of its memory.
    pub(super) fn name(&self) -> Result<FileKey, Ended> {
        let key = self.file.key();
        key.map_err(|error| Ended::Failed(error.to_string()))
    }

    /// Has the device read the disk's first `pages` pages into the same number of content pages.
    pub(super) fn read(&mut self, pages: u64) -> Result<(), Ended> {
        let header = [READ.to_le_bytes(), [0; 4], [0; 4], [0; 4]].concat();
        self.put(HEADER, &header)?;
        self.put(STATUS, &[BLANK])?;
        let len = u32::try_from(pages * PAGE_BYTES).unwrap_or(u32::MAX);
        let parts = [
            (HEADER, 16, NEXT, 1),
            (CONTENT, len, NEXT | WRITE, 2),
            (STATUS, 1, WRITE, 0),
        ];
        for (index, (page, len, flags, next)) in (0..).zip(parts) {
            let descriptor = Descriptor {
                address: BASE + page.byte_offset(),
                len,
                flags,
                next,
            };
            self.ring.describe(index, descriptor).map_err(broken)?;
        }
        self.ring.publish(0, len + 1).map_err(broken)?;
        self.ring.show().map_err(broken)?;
        ring_event(&self.kick);
        Ok(())
    }

    /// The status of the read, if it is done.
    pub(super) fn done(&mut self) -> Result<Option<u8>, Ended> {
        let Some(used) = self.ring.take().map_err(broken)? else {
            return Ok(None);
        };
        ensure(
            || used.head == 0,
            || "the disk used another chain".to_owned(),
        )?;
        let mut status = [BLANK];
        self.get(STATUS, &mut status)?;
        let [status] = status;
        Ok(Some(status))
    }

    /// Waits for the status of the read.
    pub(super) fn wait_done(&mut self) -> Result<u8, Ended> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.done()? {
                return Ok(status);
            }
            ensure(
                || began.elapsed() < PATIENCE,
                || "the disk does not finish a read".to_owned(),
            )?;
            std::thread::yield_now();
        }
    }

    /// True if `page` was never touched.
    pub(super) fn is_hole(&self, page: FilePage) -> Result<bool, Ended> {
        let is_data = self.file.is_data(page.byte_offset());
        let is_data = is_data.map_err(|error| Ended::Failed(error.to_string()))?;
        Ok(!is_data)
    }

    /// Punches holes at `pages`.
    pub(super) fn punch(&self, pages: FileRange) -> Result<(), Ended> {
        let punched = self.file.punch(pages.start.byte_offset(), pages.bytes());
        punched.map_err(|error| Ended::Failed(error.to_string()))
    }

    /// Writes to the beginning of `page`.
    pub(super) fn put(&self, page: FilePage, bytes: &[u8]) -> Result<(), Ended> {
        let copied = self.memory.copy_to(page.byte_offset(), bytes);
        copied.map_err(|error| Ended::Failed(error.to_string()))
    }

    /// Reads the beginning of `page`.
    pub(super) fn get(&self, page: FilePage, into: &mut [u8]) -> Result<(), Ended> {
        let copied = self.memory.copy_from(page.byte_offset(), into);
        copied.map_err(|error| Ended::Failed(error.to_string()))
    }
}

fn broken(error: RingError) -> Ended {
    Ended::Failed(format!("the disk: {error}"))
}
