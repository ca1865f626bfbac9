// SPDX-License-Identifier: Apache-2.0
//! The memory that a driver shares with the function: one sealed memfd for each session.
//!
//! ```text
//!   event, fault, log ring │ event slots: message, reply │ page requests │ access records │ bounce area
//! ```
//! It is made anew for each connection: a device that was given up still writes
//! into the old one, which is no longer read. The seals keep either side from
//! shrinking it under the other.

use super::ring::RingPlace;
use crate::wire::{MASK_BYTES, REQUEST_BYTES, SLOT_BYTES, STATUS_BYTES};
use pagetide_sys::mapping::{MappingError, SharedMapping};
use rustix::fs::{MemfdFlags, SealFlags};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    sync::Arc,
};
use vhost::VhostUserMemoryRegionInfo;

/// Events that can be under way at a time.
pub const EVENT_SLOTS: u16 = 64;
/// Descriptors of the event queue: message and reply of each.
pub const EVENT_DESCRIPTORS: u16 = 2 * EVENT_SLOTS;
/// Buffers for page requests: as many can wait until the service takes them.
pub const FAULT_BUFFERS: u16 = 256;
/// Buffers for records of the access log.
pub const LOG_BUFFERS: u16 = 64;
/// Bytes of each: 128 records.
pub const LOG_BUFFER_BYTES: u64 = 4096;
/// Room for the message of an event: a header and the ranges of a whole section.
pub const MESSAGE_ROOM: u64 = 4160;
/// Room for its reply.
const REPLY_ROOM: u64 = 128;
/// Pages of the bounce area: 4 MiB, of which only used pages take memory.
pub const BOUNCE_BUFFERS: u64 = 1024;
/// Address of the area for the device. Any number but 0 would do.
pub const BASE: u64 = 1 << 32;

const EVENT_RING: RingPlace = RingPlace::at(0, EVENT_DESCRIPTORS);
const FAULT_RING: RingPlace = RingPlace::at(EVENT_RING.end(), FAULT_BUFFERS);
const LOG_RING: RingPlace = RingPlace::at(FAULT_RING.end(), LOG_BUFFERS);
const MESSAGES_AT: u64 = LOG_RING.end().next_multiple_of(64);
const REPLIES_AT: u64 = MESSAGES_AT + MESSAGE_ROOM * EVENT_SLOTS as u64;
const REQUESTS_AT: u64 = REPLIES_AT + REPLY_ROOM * EVENT_SLOTS as u64;
const RECORDS_AT: u64 = REQUESTS_AT + REQUEST_BYTES as u64 * FAULT_BUFFERS as u64;
const BOUNCE_AT: u64 =
    (RECORDS_AT + LOG_BUFFER_BYTES * LOG_BUFFERS as u64).next_multiple_of(SLOT_BYTES);
const AREA_BYTES: u64 = BOUNCE_AT + SLOT_BYTES * BOUNCE_BUFFERS;

const _: () = assert!(STATUS_BYTES + MASK_BYTES <= 128 && REPLY_ROOM == 128);

/// See the module.
#[derive(Debug)]
pub struct Area {
    file: OwnedFd,
    memory: Arc<SharedMapping>,
}

impl Area {
    /// A new area, all zero.
    pub fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("pagetide-vpri", flags)?;
        rustix::fs::ftruncate(&file, AREA_BYTES)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let memory = SharedMapping::new(file.as_fd(), AREA_BYTES).map_err(io::Error::other)?;
        Ok(Self {
            file,
            memory: Arc::new(memory),
        })
    }

    /// Our mapping of it.
    pub fn memory(&self) -> &Arc<SharedMapping> {
        &self.memory
    }

    /// The area as the one memory region of the function.
    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: BASE,
            memory_size: AREA_BYTES,
            userspace_addr: BASE,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    /// Where the event queue's ring lies.
    pub const fn event_ring() -> RingPlace {
        EVENT_RING
    }

    /// Where the page fault queue's ring lies.
    pub const fn fault_ring() -> RingPlace {
        FAULT_RING
    }

    /// Where the access log queue's ring lies.
    pub const fn log_ring() -> RingPlace {
        LOG_RING
    }

    /// Offset of buffer `buffer` for access records.
    pub const fn log_at(buffer: u16) -> u64 {
        RECORDS_AT + LOG_BUFFER_BYTES * buffer as u64
    }

    /// Offset of the message of event slot `slot`.
    pub const fn message_at(slot: u16) -> u64 {
        MESSAGES_AT + MESSAGE_ROOM * slot as u64
    }

    /// Offset of the reply of event slot `slot`.
    pub const fn reply_at(slot: u16) -> u64 {
        REPLIES_AT + REPLY_ROOM * slot as u64
    }

    /// Offset of page request buffer `buffer`.
    pub const fn request_at(buffer: u16) -> u64 {
        REQUESTS_AT + REQUEST_BYTES as u64 * buffer as u64
    }

    /// Address of the bounce area for the device.
    pub const fn bounce_address() -> u64 {
        BASE + BOUNCE_AT
    }

    /// Appends the content of `count` bounce buffers from `slot` on; false if there are not so
    /// many.
    pub fn read_bounced(&self, slot: u32, count: u64, into: &mut Vec<u8>) -> bool {
        let end = u64::from(slot).checked_add(count);
        if end.is_none_or(|end| end > BOUNCE_BUFFERS) {
            return false;
        }
        let before = into.len();
        let Ok(bytes) = usize::try_from(count * SLOT_BYTES) else {
            return false;
        };
        into.resize(before + bytes, 0);
        let at = BOUNCE_AT + SLOT_BYTES * u64::from(slot);
        let read: Result<(), MappingError> = self.memory.copy_from(at, &mut into[before..]);
        read.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_the_area_follow_one_another_without_overlap() {
        let last = EVENT_SLOTS - 1;
        assert!(EVENT_RING.end() <= FAULT_RING.descriptors);
        assert!(FAULT_RING.end() <= LOG_RING.descriptors);
        assert!(LOG_RING.end() <= Area::message_at(0));
        assert_eq!(Area::message_at(last) + MESSAGE_ROOM, Area::reply_at(0));
        assert_eq!(Area::reply_at(last) + REPLY_ROOM, Area::request_at(0));
        let requests_end = Area::request_at(FAULT_BUFFERS - 1) + REQUEST_BYTES as u64;
        assert!(requests_end <= Area::log_at(0));
        let records_end = Area::log_at(LOG_BUFFERS - 1) + LOG_BUFFER_BYTES;
        assert!(BASE + records_end <= Area::bounce_address());
    }

    #[test]
    fn bounce_buffers_past_the_end_are_refused_and_others_are_read() {
        let area = Area::new().unwrap();
        let last = u32::try_from(BOUNCE_BUFFERS - 1).unwrap();
        area.memory().copy_to(AREA_BYTES - 1, &[7]).unwrap();
        let mut content = vec![1];
        assert!(area.read_bounced(last, 1, &mut content));
        assert_eq!((content.len(), content[4096]), (4097, 7));
        assert!(!area.read_bounced(last, 2, &mut content));
        assert!(!area.read_bounced(u32::MAX, u64::MAX, &mut content));
        assert_eq!(content.len(), 4097);
    }
}
