// SPDX-License-Identifier: Apache-2.0
//! The stand-in's disk: a front end of vhost-user-blk in its process, that compares all that it reads.
//!
//! Rings and buffers lie in a file of RAM of their own, which the daemon takes over and evicts like the rest. Each of
//! [`SLOTS`] parts of the disk is written and read by turns, a request at a time, so that several are under way:
//!
//! ```text
//!   ring │ header, data, status of part 0 │ of part 1 │ …        every one on pages of its own
//! ```
//! What is written follows from the part and its version. Requests in flight are recorded in an in-flight region, so
//! the front end can be handed over; it does not connect again, and a request that is lost shows by its age.

use pagetide_addr::{PAGE_BYTES, to_usize};
use pagetide_random::SplitMix64;
use pagetide_sys::{clock, event::for_vhost, mapping::SharedMapping, memory_file::GuestFile};
use pagetide_vpri_function::frontend::{
    event::{event, ring_event},
    ring::{Descriptor, NEXT, Notify, Ring, RingPlace, WRITE},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::{
    error::Error,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};
use vhost::{
    VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend as _, VhostUserProtocolFeatures,
        message::{VhostUserHeaderFlag, VhostUserInflight},
    },
};

/// RAM of rings and buffers.
const RAM_BYTES: u64 = 32 << 20;
const QUEUE_SIZE: u16 = 64;
/// Parts of the disk, each with at most one request under way.
const SLOTS: u16 = 8;
const _: () = assert!(SLOTS * 3 <= QUEUE_SIZE, "each has three descriptors");
/// Bytes of a part, and of a request.
const DATA_BYTES: u64 = 16 << 10;
/// Bytes of a disk that has all parts.
pub(crate) const IMAGE_BYTES: u64 = SLOTS as u64 * DATA_BYTES;
/// Where guest memory begins for the device.
const GPA: u64 = 0x4000_0000;
/// `VHOST_USER_F_PROTOCOL_FEATURES` and `VIRTIO_F_VERSION_1`.
const FEATURES: u64 = 1 << 30 | 1 << 32;
const READ: u32 = 0;
const OUT: u32 = 1;
const SECTOR_BYTES: u64 = 512;
/// Longest sleep without a look at the ring.
const LOOK: Duration = Duration::from_millis(20);

/// What the disk has done since it was last asked.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct DiskCounted {
    /// Requests that were done.
    pub requests: u64,
    /// Those that failed.
    pub failed: u64,
    /// Bytes that were read and are not those that were written.
    pub wrong_bytes: u64,
    /// The longest that one took, in nanoseconds; one that is under way counts as far as it has come.
    pub longest_ns: u64,
}

/// Counters that the disk's thread writes and orders read.
#[derive(Default, Debug)]
pub(super) struct DiskAccount {
    requests: AtomicU64,
    failed: AtomicU64,
    wrong_bytes: AtomicU64,
    longest_ns: AtomicU64,
}

impl DiskAccount {
    /// Since the last call.
    pub(super) fn take(&self) -> DiskCounted {
        DiskCounted {
            requests: self.requests.swap(0, Relaxed),
            failed: self.failed.swap(0, Relaxed),
            wrong_bytes: self.wrong_bytes.swap(0, Relaxed),
            longest_ns: self.longest_ns.swap(0, Relaxed),
        }
    }
}

/// What the next request of a part is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    Write,
    Read,
}

/// A part of the disk.
struct Slot {
    number: u16,
    /// Of what was written last.
    version: u64,
    turn: Turn,
    begun: Instant,
}

impl Slot {
    /// Where its header lies.
    fn header(&self) -> u64 {
        let each = DATA_BYTES + 2 * PAGE_BYTES;
        2 * PAGE_BYTES + u64::from(self.number) * each
    }

    fn data(&self) -> u64 {
        self.header() + PAGE_BYTES
    }

    fn status(&self) -> u64 {
        self.data() + DATA_BYTES
    }

    fn first_descriptor(&self) -> u16 {
        self.number * 3
    }

    fn content(&self) -> Vec<u8> {
        let mut random = SplitMix64::new(u64::from(self.number) << 48 | self.version);
        let words = 0..DATA_BYTES / 8;
        words
            .flat_map(|_| random.next_u64().to_le_bytes())
            .collect()
    }
}

/// A connected disk.
pub(super) struct Disk {
    ram: Arc<SharedMapping>,
    ring: Ring,
    kick: OwnedFd,
    call: OwnedFd,
    slots: Vec<Slot>,
    account: Arc<DiskAccount>,
    _frontend: Frontend,
    _file: GuestFile,
}

impl Disk {
    /// Connects to the device at `socket`.
    ///
    /// # Errors
    /// A message.
    pub(super) fn connect(socket: &Path) -> Result<Self, String> {
        let failed = |error: &dyn std::fmt::Display| format!("the disk: {error}");
        let file = GuestFile::new_memfd("disk-ram", RAM_BYTES).map_err(|error| failed(&error))?;
        let ram = SharedMapping::new(file.as_fd(), RAM_BYTES).map_err(|error| failed(&error))?;
        let ram = Arc::new(ram);
        let place = RingPlace::at(0, QUEUE_SIZE);
        let (kick, call) = event()
            .and_then(|kick| Ok((kick, event()?)))
            .map_err(|error| failed(&error))?;
        let frontend = agreed(socket, &file, &ram)
            .and_then(|front| started(front, &ram, place, [&kick, &call]))
            .map_err(|error| failed(&error))?;
        let slot = |number| Slot {
            number,
            version: 0,
            turn: Turn::Write,
            begun: Instant::now(),
        };
        Ok(Self {
            ring: Ring::new(Arc::clone(&ram), place, Notify::Flags),
            ram,
            kick,
            call,
            slots: (0..SLOTS).map(slot).collect(),
            account: Arc::default(),
            _frontend: frontend,
            _file: file,
        })
    }

    /// Its counters.
    pub(super) fn account(&self) -> Arc<DiskAccount> {
        Arc::clone(&self.account)
    }

    /// Writes and reads as long as the process lives.
    ///
    /// # Errors
    /// A message: the device has broken the ring.
    pub(super) fn work(mut self) -> Result<(), String> {
        let broken = |error: &dyn std::fmt::Display| format!("the disk's ring: {error}");
        for number in 0..self.slots.len() {
            self.begin(number).map_err(|error| broken(&error))?;
        }
        loop {
            let mut ended = Vec::new();
            while let Some(used) = self.ring.take().map_err(|error| broken(&error))? {
                ended.push(usize::from(used.head / 3));
            }
            for number in &ended {
                self.end(*number);
                self.begin(*number).map_err(|error| broken(&error))?;
            }
            if ended.is_empty() {
                self.look_at_ages();
                if !self.ring.arm().map_err(|error| broken(&error))? {
                    self.sleep();
                }
            }
        }
    }

    fn begin(&mut self, number: usize) -> Result<(), Box<dyn Error>> {
        let slot = &mut self.slots[number];
        let (kind, flag) = match slot.turn {
            Turn::Write => (OUT, 0),
            Turn::Read => (READ, WRITE),
        };
        match slot.turn {
            Turn::Write => {
                slot.version += 1;
                self.ram.copy_to(slot.data(), &slot.content())?;
            }
            // What is left as it was would show.
            Turn::Read => self
                .ram
                .copy_to(slot.data(), &vec![0; to_usize(DATA_BYTES)])?,
        }
        let sector = u64::from(slot.number) * DATA_BYTES / SECTOR_BYTES;
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.ram.copy_to(slot.header(), &header)?;
        self.ram.copy_to(slot.status(), &[0xff])?;
        let first = slot.first_descriptor();
        let data_bytes = u32::try_from(DATA_BYTES)?;
        let parts = [
            (slot.header(), 16, NEXT),
            (slot.data(), data_bytes, NEXT | flag),
            (slot.status(), 1, WRITE),
        ];
        for (index, (at, len, flags)) in (first..).zip(parts) {
            let descriptor = Descriptor {
                address: GPA + at,
                len,
                flags,
                next: index + 1,
            };
            self.ring.describe(index, descriptor)?;
        }
        slot.begun = Instant::now();
        self.ring.publish(first, 1 + data_bytes)?;
        if self.ring.show()? {
            ring_event(&self.kick);
        }
        Ok(())
    }

    fn end(&mut self, number: usize) {
        let slot = &mut self.slots[number];
        self.account.requests.fetch_add(1, Relaxed);
        let took = clock::ns(slot.begun.elapsed());
        self.account.longest_ns.fetch_max(took, Relaxed);
        let (mut status, mut found) = ([0xff], vec![0; to_usize(DATA_BYTES)]);
        let read = self.ram.copy_from(slot.status(), &mut status);
        let read = read.and_then(|()| self.ram.copy_from(slot.data(), &mut found));
        if status != [0] || read.is_err() {
            self.account.failed.fetch_add(1, Relaxed);
        } else if slot.turn == Turn::Read {
            let wanted = slot.content();
            let differs = found
                .iter()
                .zip(&wanted)
                .filter(|(one, other)| one != other);
            let wrong = differs.count() as u64;
            self.account.wrong_bytes.fetch_add(wrong, Relaxed);
        }
        slot.turn = match slot.turn {
            Turn::Write => Turn::Read,
            Turn::Read => Turn::Write,
        };
    }

    fn look_at_ages(&self) {
        let ages = self
            .slots
            .iter()
            .map(|slot| clock::ns(slot.begun.elapsed()));
        self.account
            .longest_ns
            .fetch_max(ages.max().unwrap_or(0), Relaxed);
    }

    fn sleep(&self) {
        let wait = Timespec::try_from(LOOK).ok();
        let mut called = [PollFd::new(&self.call, PollFlags::IN)];
        // Whatever comes of it, the ring is looked at next.
        if poll(&mut called, wait.as_ref()) == Ok(1) {
            let mut count = [0; 8];
            if let Err(error) = rustix::io::read(&self.call, &mut count) {
                tracing::debug!(%error, "a call descriptor had nothing to read");
            }
        }
    }
}

/// A front end that has agreed on features and shares its memory.
fn agreed(
    socket: &Path,
    file: &GuestFile,
    ram: &SharedMapping,
) -> Result<Frontend, Box<dyn Error>> {
    let mut front = Frontend::connect(socket, 1)?;
    front.set_owner()?;
    front.get_features()?;
    front.set_features(FEATURES)?;
    front.get_protocol_features()?;
    front.set_protocol_features(
        VhostUserProtocolFeatures::REPLY_ACK | VhostUserProtocolFeatures::INFLIGHT_SHMFD,
    )?;
    front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    let (inflight, region) = front.get_inflight_fd(&VhostUserInflight::new(0, 0, 1, QUEUE_SIZE))?;
    front.set_inflight_fd(&inflight, region.as_raw_fd())?;
    let memory = VhostUserMemoryRegionInfo {
        guest_phys_addr: GPA,
        memory_size: RAM_BYTES,
        userspace_addr: ram.address() as u64,
        mmap_offset: 0,
        mmap_handle: file.as_fd().as_raw_fd(),
    };
    front.set_mem_table(&[memory])?;
    Ok(front)
}

/// The same with its ring running.
fn started(
    mut front: Frontend,
    ram: &SharedMapping,
    place: RingPlace,
    [kick, call]: [&OwnedFd; 2],
) -> Result<Frontend, Box<dyn Error>> {
    let at = ram.address() as u64;
    front.set_vring_num(0, QUEUE_SIZE)?;
    front.set_vring_base(0, 0)?;
    let ring = VringConfigData {
        queue_max_size: QUEUE_SIZE,
        queue_size: QUEUE_SIZE,
        flags: 0,
        desc_table_addr: at + place.descriptors,
        used_ring_addr: at + place.used,
        avail_ring_addr: at + place.available,
        log_addr: None,
    };
    front.set_vring_addr(0, &ring)?;
    let kick = for_vhost(kick.try_clone()?);
    let call = for_vhost(call.try_clone()?);
    front.set_vring_kick(0, &kick)?;
    front.set_vring_call(0, &call)?;
    front.set_vring_enable(0, true)?;
    Ok(front)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(number: u16, version: u64) -> Slot {
        Slot {
            number,
            version,
            turn: Turn::Read,
            begun: Instant::now(),
        }
    }

    #[test]
    fn parts_lie_behind_the_ring_and_behind_one_another() {
        assert!(RingPlace::at(0, QUEUE_SIZE).end() <= slot(0, 0).header());
        for number in 1..SLOTS {
            assert_eq!(
                slot(number - 1, 0).status() + PAGE_BYTES,
                slot(number, 0).header()
            );
        }
        assert!(slot(SLOTS, 0).header() <= RAM_BYTES);
    }

    #[test]
    fn content_tells_parts_and_versions_apart() {
        let one = slot(1, 1).content();
        assert_eq!(one.len() as u64, DATA_BYTES);
        assert_ne!(one, slot(1, 2).content());
        assert_ne!(one, slot(2, 1).content());
    }

    #[test]
    fn counters_begin_anew_when_they_are_taken() {
        let account = DiskAccount::default();
        account.requests.store(3, Relaxed);
        account.longest_ns.store(9, Relaxed);
        let taken = account.take();
        assert_eq!((taken.requests, taken.longest_ns), (3, 9));
        assert_eq!(account.take(), DiskCounted::default());
    }
}
