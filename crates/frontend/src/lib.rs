// SPDX-License-Identifier: Apache-2.0
//! A disk as the front end of a stand-in for a VMM uses it: one vhost-user-blk queue whose ring and buffers lie in
//! the stand-in's RAM, and whose requests outlive the back end.
//!
//! Stand-ins have no guest whose driver fills a ring, so [`Disk`] does it. A back end that dies leaves its requests in
//! the ring and in the in-flight region, which belongs to this side: [`Disk::connect`] gives both to the next back end,
//! as QEMU does, and that one does what was not done. So a request is begun once and done once, whatever becomes of the
//! processes that serve it.
//!
//! ```text
//!   base │ descriptors │ available │ used │ slot 0: header, status │ slot 1 … │ the stand-in's buffers
//!        ├──────────────────────── RINGS_BYTES ──────────────────────────────┤
//! ```
//! A *slot* is a place for one request: three descriptors, a header, a status. Nothing here makes a thread, and only
//! [`Disk::wait`] waits: the owner begins requests, asks what is done, and connects again when the back end
//! [has hung up](Disk::has_hung_up). A network interface is in [`nic`].

pub mod nic;

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
    time::Duration,
};

use pagetide_sys::{
    event::for_vhost,
    mapping::{MappingError, SharedMapping},
};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    io::Errno,
    net::{RecvFlags, recv},
};
use vhost::{
    VhostBackend, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend, VhostUserProtocolFeatures,
        message::{VhostUserHeaderFlag, VhostUserInflight},
    },
};

/// Memory of ring and slots, from the base on.
pub const RINGS_BYTES: u64 = 0x2_0000;
/// Bytes of a sector.
pub const SECTOR_BYTES: u64 = 512;
/// Requests that can be under way.
pub const SLOTS: u16 = 16;

const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
/// Each slot has a page of its own, so that headers and statuses fault like data.
const FIRST_SLOT: u64 = 0x3000;
const SLOT_BYTES: u64 = 0x1000;
const STATUS_IN_SLOT: u64 = 0x800;
const QUEUE_SIZE: u16 = 64;
const DESCRIPTORS_A_SLOT: u16 = 3;
const HEADER_BYTES: u32 = 16;
const _: () = assert!(SLOTS * DESCRIPTORS_A_SLOT <= QUEUE_SIZE);
const _: () = assert!(FIRST_SLOT + SLOTS as u64 * SLOT_BYTES <= RINGS_BYTES);

const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Status of a request that nobody has answered.
const UNANSWERED: u8 = 0xff;
/// `VHOST_USER_F_PROTOCOL_FEATURES` and `VIRTIO_F_VERSION_1`.
const FEATURES: u64 = 1 << 30 | 1 << 32;

/// Why a disk cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// Its socket, or a descriptor of its ring.
    #[error("the disk's socket or ring: {0}")]
    Io(#[from] io::Error),
    /// A message.
    #[error("the back end: {0}")]
    Message(#[from] vhost::vhost_user::Error),
    /// A message.
    #[error("the back end: {0}")]
    Vhost(#[from] vhost::Error),
    /// Its memory.
    #[error("the disk's memory: {0}")]
    Memory(#[from] MappingError),
    /// The back end cannot keep requests over its death.
    #[error("the back end has no in-flight region")]
    NoRecord,
    /// The back end does not answer messages, so nobody knows when a ring has started.
    #[error("the back end does not acknowledge messages")]
    NoReplies,
    /// A ring that cannot be.
    #[error("a ring has {0} descriptors; it must have a power of two, at most 1024")]
    RingSize(u16),
    /// A slot that has a request under way, or does not exist.
    #[error("slot {0} is not free")]
    NotFree(u16),
    /// The back end says that a request is done that is not under way.
    #[error(
        "descriptor {0} is done twice, or was never asked for, with {1} requests used up to now"
    )]
    NotAsked(u32, u16),
}

/// Which way the data go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

/// What is asked of the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Which way.
    pub direction: Direction,
    /// First sector.
    pub sector: u64,
    /// Offset of the data in the RAM.
    pub data: u64,
    /// Their length.
    pub bytes: u32,
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Well.
    Done,
    /// With this status of virtio-blk.
    Failed(u8),
}

/// See the module.
pub struct Disk {
    ram: Arc<SharedMapping>,
    file: OwnedFd,
    base: u64,
    socket: PathBuf,
    available: u16,
    used: u16,
    under_way: [bool; SLOTS as usize],
    kick: OwnedFd,
    call: OwnedFd,
    link: Option<Link>,
    inflight: Option<(VhostUserInflight, File)>,
}

/// A connection: messages go through the front end, and the end of the stream tells that the back end is gone.
struct Link {
    _frontend: Frontend,
    stream: UnixStream,
}

impl Disk {
    /// A disk at `socket` for a stand-in whose RAM is all of `file`, mapped as `ram`; [`RINGS_BYTES`] from `base` on
    /// are the disk's. It is not connected.
    ///
    /// # Errors
    /// There are no descriptors.
    pub fn new(
        ram: Arc<SharedMapping>,
        file: OwnedFd,
        base: u64,
        socket: &Path,
    ) -> Result<Self, FrontendError> {
        Ok(Self {
            ram,
            file,
            base,
            socket: socket.to_owned(),
            available: 0,
            used: 0,
            under_way: [false; SLOTS as usize],
            kick: event()?,
            call: event()?,
            link: None,
            inflight: None,
        })
    }

    /// Connects to the back end that listens now, and gives it the ring with the requests that are under way.
    ///
    /// # Errors
    /// Nobody listens, or the back end died meanwhile: try again. It may also still be busy with the end of an earlier
    /// connection, and then hangs up.
    pub fn connect(&mut self) -> Result<(), FrontendError> {
        self.link = None;
        let stream = UnixStream::connect(&self.socket)?;
        let ear = stream.try_clone()?;
        let mut front = Frontend::from_stream(stream, 1);
        front.set_owner()?;
        let offered = front.get_features()?;
        front.set_features(offered & FEATURES)?;
        let wanted =
            VhostUserProtocolFeatures::REPLY_ACK | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        if !front.get_protocol_features()?.contains(wanted) {
            return Err(FrontendError::NoRecord);
        }
        front.set_protocol_features(wanted)?;
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let address = self.ram.address() as u64;
        front.set_mem_table(&[VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: self.ram.len_bytes(),
            userspace_addr: address,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }])?;
        self.hand_over_record(&mut front)?;
        self.start_ring(&mut front, address)?;
        self.link = Some(Link {
            _frontend: front,
            stream: ear,
        });
        Ok(())
    }

    /// The first back end makes the in-flight region, and later ones get it.
    fn hand_over_record(&mut self, front: &mut Frontend) -> Result<(), FrontendError> {
        let record = match self.inflight.take() {
            Some(record) => record,
            None => front.get_inflight_fd(&VhostUserInflight::new(0, 0, 1, QUEUE_SIZE))?,
        };
        let record = self.inflight.insert(record);
        front.set_inflight_fd(&record.0, record.1.as_raw_fd())?;
        Ok(())
    }

    fn start_ring(&self, front: &mut Frontend, address: u64) -> Result<(), FrontendError> {
        front.set_vring_num(0, QUEUE_SIZE)?;
        front.set_vring_base(0, self.used)?;
        let ring = VringConfigData {
            queue_max_size: QUEUE_SIZE,
            queue_size: QUEUE_SIZE,
            flags: 0,
            desc_table_addr: address + self.base + DESCRIPTORS,
            used_ring_addr: address + self.base + USED,
            avail_ring_addr: address + self.base + AVAILABLE,
            log_addr: None,
        };
        front.set_vring_addr(0, &ring)?;
        front.set_vring_kick(0, &for_vhost(self.kick.try_clone()?))?;
        front.set_vring_call(0, &for_vhost(self.call.try_clone()?))?;
        front.set_vring_enable(0, true)?;
        Ok(())
    }

    /// True if there is no back end: none was there, or it has ended.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        let Some(link) = &self.link else {
            return true;
        };
        // Replies are read by the front end before it returns, so there is never a byte to read: only the end.
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let heard = recv(&link.stream, &mut [0_u8; 1][..], flags);
        !matches!(heard, Err(Errno::AGAIN | Errno::INTR))
    }

    /// Requests that are begun and not done.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.under_way.iter().filter(|is_busy| **is_busy).count()
    }

    /// True if a request can be begun in `slot`.
    #[must_use]
    pub fn is_free(&self, slot: u16) -> bool {
        self.under_way.get(usize::from(slot)) == Some(&false)
    }

    /// Begins a request in `slot`, whether there is a back end or not.
    ///
    /// # Errors
    /// [`FrontendError::NotFree`], or the memory is not that of a disk.
    pub fn begin(&mut self, slot: u16, request: &Request) -> Result<(), FrontendError> {
        if !self.is_free(slot) {
            return Err(FrontendError::NotFree(slot));
        }
        let at = FIRST_SLOT + u64::from(slot) * SLOT_BYTES;
        let (kind, flag) = match request.direction {
            Direction::Read => (0_u32, WRITE),
            Direction::Write => (1, 0),
        };
        let header = [
            &kind.to_le_bytes()[..],
            &[0; 4],
            &request.sector.to_le_bytes(),
        ];
        self.put(at, &header.concat())?;
        self.put(at + STATUS_IN_SLOT, &[UNANSWERED])?;
        let first = slot * DESCRIPTORS_A_SLOT;
        self.describe(first, self.base + at, HEADER_BYTES, NEXT)?;
        self.describe(first + 1, request.data, request.bytes, NEXT | flag)?;
        self.describe(first + 2, self.base + at + STATUS_IN_SLOT, 1, WRITE)?;
        let place = u64::from(self.available % QUEUE_SIZE);
        self.put(AVAILABLE + 4 + 2 * place, &first.to_le_bytes())?;
        self.available = self.available.wrapping_add(1);
        self.under_way[usize::from(slot)] = true;
        // The device reads the entry after the index: virtio 2.7.13.
        fence(Ordering::SeqCst);
        self.put(AVAILABLE + 2, &self.available.to_le_bytes())?;
        fence(Ordering::SeqCst);
        signal(self.kick.as_fd())?;
        Ok(())
    }

    /// Waits until the back end has said that requests are done, or has hung up, but no longer than `longest`. Without
    /// a back end it waits so long. A call may be lost with the back end that died before it: look at what is done
    /// in any case.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&self, longest: Duration) -> Result<(), FrontendError> {
        let Some(link) = &self.link else {
            std::thread::sleep(longest);
            return Ok(());
        };
        let wait = Timespec::try_from(longest).map_err(io::Error::other)?;
        let mut heard = [
            PollFd::new(&self.call, PollFlags::IN),
            PollFd::new(&link.stream, PollFlags::IN),
        ];
        match poll(&mut heard, Some(&wait)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        match rustix::io::read(&self.call, &mut [0; 8][..]) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }

    /// The next request that is done, if there is one: its slot, which is free again, and how it ended.
    ///
    /// # Errors
    /// [`FrontendError::NotAsked`].
    pub fn take_done(&mut self) -> Result<Option<(u16, Outcome)>, FrontendError> {
        let mut index = [0; 2];
        self.get(USED + 2, &mut index)?;
        if u16::from_le_bytes(index) == self.used {
            return Ok(None);
        }
        // Pairs with the device's: entries before the index.
        fence(Ordering::SeqCst);
        let place = u64::from(self.used % QUEUE_SIZE);
        let mut entry = [0; 4];
        self.get(USED + 4 + 8 * place, &mut entry)?;
        self.used = self.used.wrapping_add(1);
        let head = u32::from_le_bytes(entry);
        let slot = match u16::try_from(head) {
            Ok(head) if head.is_multiple_of(DESCRIPTORS_A_SLOT) => head / DESCRIPTORS_A_SLOT,
            _ => return Err(FrontendError::NotAsked(head, self.used)),
        };
        match self.under_way.get_mut(usize::from(slot)) {
            Some(is_busy @ true) => *is_busy = false,
            _ => return Err(FrontendError::NotAsked(head, self.used)),
        }
        let mut status = [0];
        let at = FIRST_SLOT + u64::from(slot) * SLOT_BYTES + STATUS_IN_SLOT;
        self.get(at, &mut status)?;
        let outcome = match status[0] {
            0 => Outcome::Done,
            status => Outcome::Failed(status),
        };
        Ok(Some((slot, outcome)))
    }

    fn describe(
        &self,
        index: u16,
        address: u64,
        bytes: u32,
        flags: u16,
    ) -> Result<(), FrontendError> {
        let fields = [
            &address.to_le_bytes()[..],
            &bytes.to_le_bytes(),
            &flags.to_le_bytes(),
            &(index + 1).to_le_bytes(),
        ];
        self.put(DESCRIPTORS + 16 * u64::from(index), &fields.concat())
    }

    fn put(&self, at: u64, bytes: &[u8]) -> Result<(), FrontendError> {
        Ok(self.ram.copy_to(self.base + at, bytes)?)
    }

    fn get(&self, at: u64, bytes: &mut [u8]) -> Result<(), FrontendError> {
        Ok(self.ram.copy_from(self.base + at, bytes)?)
    }
}

fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?)
}

fn signal(event: BorrowedFd<'_>) -> io::Result<()> {
    match rustix::io::write(event, &1_u64.to_ne_bytes()) {
        // Signalled as often as it can be, and not yet heard.
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests;
