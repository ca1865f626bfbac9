// SPDX-License-Identifier: Apache-2.0
//! The stand-in as a front end: reads of a vhost-user block device into its RAM, one at a time.
//!
//! Rings and buffers lie behind the pages that the stand-in's threads use:
//! ```text
//!   filled pages │ descriptors │ avail │ used │ header, status │ buffers …
//! ```

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pagetide_sys::mapping::SharedMapping;
use pagetide_sys::memory_file::GuestFile;
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use super::guest::{PAGE_BYTES, Wrong};

/// Memory of the disk, behind the filled pages.
pub(super) const DISK_BYTES: u64 = 1 << 20;
const DESCRIPTORS: u64 = 0;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADER: u64 = 0x3000;
const STATUS: u64 = HEADER + 16;
const BUFFERS: u64 = 0x4000;
const BUFFER_COUNT: u64 = 64;
const GPA: u64 = 0;
const QUEUE_SIZE: u16 = 64;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// `VHOST_USER_F_PROTOCOL_FEATURES` and `VIRTIO_F_VERSION_1`.
const FEATURES: u64 = 1 << 30 | 1 << 32;
/// Between two polls of the used ring.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// A connected disk.
pub(super) struct Disk {
    ram: Arc<SharedMapping>,
    /// Where its memory begins.
    base: u64,
    asked: u16,
    kick: EventFd,
    _call: EventFd,
    _frontend: Frontend,
}

impl Disk {
    /// Connects to the device at `socket`; all of `file` is guest RAM, the disk's part begins at `base`.
    pub(super) fn connect(
        socket: &Path,
        file: &GuestFile,
        ram: Arc<SharedMapping>,
        base: u64,
    ) -> Result<Self, Wrong> {
        let mut front = Frontend::connect(socket, 1)?;
        front.set_owner()?;
        front.get_features()?;
        front.set_features(FEATURES)?;
        front.get_protocol_features()?;
        front.set_protocol_features(VhostUserProtocolFeatures::REPLY_ACK)?;
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let address = ram.address() as u64;
        front.set_mem_table(&[VhostUserMemoryRegionInfo {
            guest_phys_addr: GPA,
            memory_size: ram.len_bytes(),
            userspace_addr: address,
            mmap_offset: 0,
            mmap_handle: file.as_fd().as_raw_fd(),
        }])?;
        let (kick, call) = (EventFd::new(0)?, EventFd::new(0)?);
        front.set_vring_num(0, QUEUE_SIZE)?;
        front.set_vring_base(0, 0)?;
        let ring = VringConfigData {
            queue_max_size: QUEUE_SIZE,
            queue_size: QUEUE_SIZE,
            flags: 0,
            desc_table_addr: address + base + DESCRIPTORS,
            used_ring_addr: address + base + USED,
            avail_ring_addr: address + base + AVAIL,
            log_addr: None,
        };
        front.set_vring_addr(0, &ring)?;
        front.set_vring_kick(0, &kick)?;
        front.set_vring_call(0, &call)?;
        front.set_vring_enable(0, true)?;
        Ok(Self {
            ram,
            base,
            asked: 0,
            kick,
            _call: call,
            _frontend: front,
        })
    }

    /// Reads the disk's first page into one buffer after the other, as long as the process lives. If the
    /// daemon dies, the read hangs: this front end does not reconnect.
    pub(super) fn read_for_ever(mut self) -> Result<(), Wrong> {
        let mut buffer = 0;
        loop {
            self.read_into(BUFFERS + buffer * PAGE_BYTES)?;
            buffer = (buffer + 1) % BUFFER_COUNT;
        }
    }

    fn read_into(&mut self, buffer: u64) -> Result<(), Wrong> {
        self.put(HEADER, &[0; 16])?;
        self.put(STATUS, &[0xff])?;
        self.describe(0, HEADER, 16, NEXT, 1)?;
        self.describe(1, buffer, 4096, NEXT | WRITE, 2)?;
        self.describe(2, STATUS, 1, WRITE, 0)?;
        let slot = u64::from(self.asked % QUEUE_SIZE);
        self.put(AVAIL + 4 + 2 * slot, &0_u16.to_le_bytes())?;
        self.asked = self.asked.wrapping_add(1);
        self.put(AVAIL + 2, &self.asked.to_le_bytes())?;
        self.kick.write(1)?;
        let mut used = [0; 2];
        while used != self.asked.to_le_bytes() {
            thread::sleep(LOOK_AGAIN);
            self.ram.copy_from(self.base + USED + 2, &mut used)?;
        }
        Ok(())
    }

    fn describe(&self, index: u64, at: u64, len: u32, flags: u16, next: u16) -> Result<(), Wrong> {
        let fields = [
            &(GPA + self.base + at).to_le_bytes()[..],
            &len.to_le_bytes(),
            &flags.to_le_bytes(),
            &next.to_le_bytes(),
        ];
        self.put(DESCRIPTORS + 16 * index, &fields.concat())
    }

    fn put(&self, at: u64, bytes: &[u8]) -> Result<(), Wrong> {
        Ok(self.ram.copy_to(self.base + at, bytes)?)
    }
}
