// SPDX-License-Identifier: Apache-2.0
//! A network interface as the front end of a stand-in uses it: one pair of vhost-user-net rings that lie, with
//! their buffers, in the stand-in's RAM, and outlive the back end.
//!
//! [`Nic`] does what a driver does: it posts buffers, sends packets, and takes back what the device returns. It knows
//! which buffers the device has, so a device that returns one twice, or one that it was never given, is found out
//! ([`FrontendError::NotAsked`]). To the next back end it gives what QEMU gives: the rings, and where the used rings
//! are.
//!
//! ```text
//!   base │ receive: descriptors │ available │ used │ send: descriptors │ available │ used │
//!        ├───────────── QUEUE_BYTES ───────────────┼───────────── QUEUE_BYTES ────────────┤
//! ```
//! A buffer is one descriptor: the header of 12 bytes and the packet.

use std::{
    io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{Ordering, fence},
    },
    time::Duration,
};

use pagetide_sys::{event::for_vhost, mapping::SharedMapping};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{RecvFlags, recv},
};
use vhost::{
    VhostBackend, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend, VhostUserProtocolFeatures, message::VhostUserHeaderFlag,
    },
};

use super::{FrontendError, event, signal};

/// Memory of both rings, from the base on.
pub const NIC_RINGS_BYTES: u64 = 2 * QUEUE_BYTES;
/// Longest rings.
pub const NIC_RING_MAX: u16 = 1024;
/// Bytes before each packet.
pub const NET_HEADER_BYTES: u32 = 12;

const QUEUE_BYTES: u64 = 0x8000;
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x5000;
const _: () = assert!(16 * NIC_RING_MAX as u64 <= AVAILABLE);
const _: () = assert!(USED + 6 + 8 * NIC_RING_MAX as u64 <= QUEUE_BYTES);

const WRITE: u16 = 2;
/// `VIRTQ_USED_F_NO_NOTIFY`
const NO_NOTIFY: u16 = 1;
/// `VHOST_USER_F_PROTOCOL_FEATURES` and `VIRTIO_F_VERSION_1`.
const FEATURES: u64 = 1 << 30 | 1 << 32;
/// `VIRTIO_NET_F_MRG_RXBUF`
const MERGE: u64 = 1 << 15;

/// Whether a packet may take several buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Merging {
    /// It may, if the device offers that.
    Mergeable,
    /// It takes one.
    Single,
}

/// Which of the rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// The one whose buffers the device fills.
    Receive,
    /// The one whose packets it sends.
    Send,
}

/// A buffer that the device has returned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Returned {
    /// Its offset in the RAM.
    pub at: u64,
    /// Its length.
    pub bytes: u32,
    /// Bytes of it that the device has written, the header included: 0 if it is returned empty, or was sent.
    pub written: u32,
}

/// See the module.
pub struct Nic {
    ram: Arc<SharedMapping>,
    file: OwnedFd,
    socket: PathBuf,
    merging: Merging,
    rings: [RingOfNic; 2],
    link: Option<Link>,
}

struct Link {
    _frontend: Frontend,
    stream: UnixStream,
}

/// A ring as its driver has it.
struct RingOfNic {
    base: u64,
    size: u16,
    available: u16,
    used: u16,
    /// What the device has, by descriptor.
    buffers: Vec<Option<(u64, u32)>>,
    free: Vec<u16>,
    kick: OwnedFd,
    call: OwnedFd,
}

impl Nic {
    /// An interface at `socket` for a stand-in whose RAM is all of `file`, mapped as `ram`; [`NIC_RINGS_BYTES`] from
    /// `base` on are its rings', of `size` descriptors each (a power of two, at most [`NIC_RING_MAX`]). It is not
    /// connected.
    ///
    /// # Errors
    /// There are no descriptors, or the size is none.
    pub fn new(
        (ram, file): (Arc<SharedMapping>, OwnedFd),
        base: u64,
        size: u16,
        merging: Merging,
        socket: &Path,
    ) -> Result<Self, FrontendError> {
        if !size.is_power_of_two() || size > NIC_RING_MAX {
            return Err(FrontendError::RingSize(size));
        }
        let rings = [
            RingOfNic::new(base, size)?,
            RingOfNic::new(base + QUEUE_BYTES, size)?,
        ];
        Ok(Self {
            ram,
            file,
            socket: socket.to_owned(),
            merging,
            rings,
            link: None,
        })
    }

    /// Connects to the back end that listens now, and gives it the rings with the buffers that are in them.
    ///
    /// # Errors
    /// Nobody listens, or the back end died meanwhile: try again.
    pub fn connect(&mut self) -> Result<(), FrontendError> {
        self.link = None;
        let stream = UnixStream::connect(&self.socket)?;
        let ear = stream.try_clone()?;
        let mut front = Frontend::from_stream(stream, 2);
        front.set_owner()?;
        let wanted = match self.merging {
            Merging::Mergeable => FEATURES | MERGE,
            Merging::Single => FEATURES,
        };
        let offered = front.get_features()?;
        front.set_features(offered & wanted)?;
        let replies = VhostUserProtocolFeatures::REPLY_ACK;
        if !front.get_protocol_features()?.contains(replies) {
            return Err(FrontendError::NoReplies);
        }
        front.set_protocol_features(replies)?;
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let address = self.ram.address() as u64;
        front.set_mem_table(&[VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: self.ram.len_bytes(),
            userspace_addr: address,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }])?;
        for (queue, ring) in self.rings.iter().enumerate() {
            ring.start(&mut front, queue, address, &self.ram)?;
        }
        self.link = Some(Link {
            _frontend: front,
            stream: ear,
        });
        Ok(())
    }

    /// True if there is no back end: none was there, or it has ended.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        let Some(link) = &self.link else {
            return true;
        };
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let heard = recv(&link.stream, &mut [0_u8; 1][..], flags);
        !matches!(heard, Err(Errno::AGAIN | Errno::INTR))
    }

    /// Breaks the connection off. The rings stay as they are.
    pub fn disconnect(&mut self) {
        self.link = None;
    }

    /// Buffers that the device has.
    #[must_use]
    pub fn outstanding(&self, way: Way) -> usize {
        let ring = &self.rings[way as usize];
        usize::from(ring.size) - ring.free.len()
    }

    /// Gives the device `bytes` at offset `at` of the RAM: to be filled, or a header and a packet to be sent. It is
    /// told of them by [`Self::kick`]. False if the ring is full.
    ///
    /// # Errors
    /// The memory is not that of a ring.
    pub fn give(&mut self, way: Way, at: u64, bytes: u32) -> Result<bool, FrontendError> {
        let flags = match way {
            Way::Receive => WRITE,
            Way::Send => 0,
        };
        self.rings[way as usize].give(&self.ram, (at, bytes), flags)
    }

    /// Tells the device of what it was given, unless it looks by itself.
    ///
    /// # Errors
    /// The kernel's.
    pub fn kick(&self, way: Way) -> Result<(), FrontendError> {
        let ring = &self.rings[way as usize];
        // The index is written before the flags are read: virtio 2.7.10.
        fence(Ordering::SeqCst);
        let mut flags = [0; 2];
        self.ram.copy_from(ring.base + USED, &mut flags)?;
        match u16::from_le_bytes(flags) & NO_NOTIFY {
            0 => Ok(signal(ring.kick.as_fd())?),
            _ => Ok(()),
        }
    }

    /// The next buffer that the device has returned, if there is one.
    ///
    /// # Errors
    /// [`FrontendError::NotAsked`]: it did not have it.
    pub fn take(&mut self, way: Way) -> Result<Option<Returned>, FrontendError> {
        self.rings[way as usize].take(&self.ram)
    }

    /// Waits until the device has returned a received packet, or has hung up, but no longer than `longest`; without a
    /// back end, so long.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&self, longest: Duration) -> Result<(), FrontendError> {
        let Some(link) = &self.link else {
            std::thread::sleep(longest);
            return Ok(());
        };
        let wait = Timespec::try_from(longest).map_err(io::Error::other)?;
        let call = &self.rings[Way::Receive as usize].call;
        let mut heard = [
            PollFd::new(call, PollFlags::IN),
            PollFd::new(&link.stream, PollFlags::IN),
        ];
        match poll(&mut heard, Some(&wait)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        match rustix::io::read(call, &mut [0; 8][..]) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }
}

impl RingOfNic {
    fn new(base: u64, size: u16) -> io::Result<Self> {
        Ok(Self {
            base,
            size,
            available: 0,
            used: 0,
            buffers: vec![None; usize::from(size)],
            free: (0..size).rev().collect(),
            kick: event()?,
            call: event()?,
        })
    }

    fn start(
        &self,
        front: &mut Frontend,
        queue: usize,
        address: u64,
        ram: &SharedMapping,
    ) -> Result<(), FrontendError> {
        // What QEMU tells after the death of a back end: where the used ring is.
        let mut used = [0; 2];
        ram.copy_from(self.base + USED + 2, &mut used)?;
        front.set_vring_num(queue, self.size)?;
        front.set_vring_base(queue, u16::from_le_bytes(used))?;
        let ring = VringConfigData {
            queue_max_size: self.size,
            queue_size: self.size,
            flags: 0,
            desc_table_addr: address + self.base,
            used_ring_addr: address + self.base + USED,
            avail_ring_addr: address + self.base + AVAILABLE,
            log_addr: None,
        };
        front.set_vring_addr(queue, &ring)?;
        front.set_vring_kick(queue, &for_vhost(self.kick.try_clone()?))?;
        front.set_vring_call(queue, &for_vhost(self.call.try_clone()?))?;
        front.set_vring_enable(queue, true)?;
        Ok(())
    }

    fn give(
        &mut self,
        ram: &SharedMapping,
        (at, bytes): (u64, u32),
        flags: u16,
    ) -> Result<bool, FrontendError> {
        let Some(head) = self.free.pop() else {
            return Ok(false);
        };
        let descriptor = [
            &at.to_le_bytes()[..],
            &bytes.to_le_bytes(),
            &flags.to_le_bytes(),
            &[0; 2],
        ];
        let place = self.base + 16 * u64::from(head);
        ram.copy_to(place, &descriptor.concat())?;
        let slot = u64::from(self.available % self.size);
        ram.copy_to(self.base + AVAILABLE + 4 + 2 * slot, &head.to_le_bytes())?;
        self.buffers[usize::from(head)] = Some((at, bytes));
        self.available = self.available.wrapping_add(1);
        // The device reads the entry after the index: virtio 2.7.13.
        fence(Ordering::SeqCst);
        ram.copy_to(self.base + AVAILABLE + 2, &self.available.to_le_bytes())?;
        Ok(true)
    }

    fn take(&mut self, ram: &SharedMapping) -> Result<Option<Returned>, FrontendError> {
        let mut index = [0; 2];
        ram.copy_from(self.base + USED + 2, &mut index)?;
        if u16::from_le_bytes(index) == self.used {
            return Ok(None);
        }
        // Pairs with the device's: entries before the index.
        fence(Ordering::SeqCst);
        let slot = u64::from(self.used % self.size);
        let mut entry = [0; 8];
        ram.copy_from(self.base + USED + 4 + 8 * slot, &mut entry)?;
        let [a, b, c, d, e, f, g, h] = entry;
        let (head, written) = (
            u32::from_le_bytes([a, b, c, d]),
            u32::from_le_bytes([e, f, g, h]),
        );
        self.used = self.used.wrapping_add(1);
        let buffer = u16::try_from(head).ok().and_then(|head| {
            let (at, bytes) = self.buffers.get_mut(usize::from(head))?.take()?;
            self.free.push(head);
            Some(Returned { at, bytes, written })
        });
        (buffer.ok_or(FrontendError::NotAsked(head, self.used))).map(Some)
    }
}
