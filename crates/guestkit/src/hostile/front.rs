// SPDX-License-Identifier: Apache-2.0
//! A front end with one ring written by hand, well-behaved unless changed.
//!
//! ```text
//!   0x0000  descriptor table     0x4000  request headers and status bytes
//!   0x1000  avail ring           0x8000  indirect table
//!   0x2000  used ring          0x10_0000 data
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::peer::{Failure, PATIENCE, Peer, failed, wrong};
pub use super::ram::Ram;
use super::wire::{
    self, F_PROTOCOL, F_VERSION_1, Inflight, Message, PROTOCOL, Region, RingAddresses, request,
};

/// Where the guest sees its RAM.
pub const GPA: u64 = 1 << 32;
/// Where the front end has it mapped.
pub const VA: u64 = 0x7000_0000_0000;
/// Length of the RAM.
pub const RAM_BYTES: u64 = 8 << 20;
/// Entries of the ring.
pub const RING_SIZE: u16 = 128;
/// Request headers and status bytes.
pub const HEADERS: u64 = 0x4000;
/// An indirect table of 1,024 entries.
pub const INDIRECT: u64 = 0x8000;
/// Data.
pub const DATA: u64 = 0x10_0000;
/// Bytes of data a slot has.
pub const SLOT_BYTES: u32 = 64 << 10;
/// Requests that may be out at once: each has three descriptors.
pub const SLOTS: u16 = 32;

/// The chain goes on.
pub const NEXT: u16 = 1;
/// The device writes there.
pub const WRITE: u16 = 2;
/// It is a table of descriptors.
pub const TABLE: u16 = 4;

/// `VIRTIO_BLK_T_IN`
pub const T_IN: u32 = 0;
/// `VIRTIO_BLK_T_OUT`
pub const T_OUT: u32 = 1;
/// `VIRTIO_BLK_T_FLUSH`
pub const T_FLUSH: u32 = 4;

const HEADER_BYTES: u64 = 16;
/// Distance of the headers of two slots; the status byte is behind the header.
const HEADER_STRIDE: u64 = 32;
/// Between two polls of the used ring where no descriptor signals it.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A descriptor of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest-physical address.
    pub gpa: u64,
    /// Length.
    pub len: u32,
    /// Flags.
    pub flags: u16,
    /// Next in the chain.
    pub next: u16,
}

impl Descriptor {
    /// As it is in memory.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::from(self.gpa.to_le_bytes());
        bytes.extend(self.len.to_le_bytes());
        bytes.extend(self.flags.to_le_bytes());
        bytes.extend(self.next.to_le_bytes());
        bytes
    }
}

/// How a front end begins.
#[derive(Debug)]
pub struct Setup {
    /// Guest RAM, with the ring in it.
    pub ram: Ram,
    /// Virtio features beside those of every front end.
    pub features: u64,
    /// Offsets of the ring's parts in RAM.
    pub places: RingAddresses,
    /// Entries of the ring.
    pub size: u16,
    /// Kick descriptor.
    pub kick: OwnedFd,
    /// Call descriptor.
    pub call: OwnedFd,
    /// Error descriptor.
    pub error: OwnedFd,
    /// In-flight region to hand over.
    pub inflight: Option<(Inflight, OwnedFd)>,
    /// Where avail and used ring begin.
    pub base: u16,
}

/// A non-blocking eventfd.
///
/// # Errors
/// No descriptor is left.
pub fn event() -> Result<OwnedFd, Failure> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    eventfd(0, flags).map_err(failed("eventfd"))
}

impl Setup {
    /// As any guest does it.
    ///
    /// # Errors
    /// No memory or descriptor is left.
    pub fn new() -> Result<Self, Failure> {
        Self::with(Ram::new(RAM_BYTES)?)
    }

    /// As any guest does it, with this RAM.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn with(ram: Ram) -> Result<Self, Failure> {
        Ok(Self {
            ram,
            features: 0,
            places: RingAddresses {
                descriptors: 0,
                avail: 0x1000,
                used: 0x2000,
            },
            size: RING_SIZE,
            kick: event()?,
            call: event()?,
            error: event()?,
            inflight: None,
            base: 0,
        })
    }

    /// The region that is all of its RAM.
    #[must_use]
    pub fn region(&self) -> Region {
        Region {
            gpa: GPA,
            bytes: self.ram.bytes(),
            va: VA,
            offset: 0,
        }
    }

    /// The ring's addresses as the front end sees them.
    #[must_use]
    pub fn addresses(&self) -> RingAddresses {
        RingAddresses {
            descriptors: VA.wrapping_add(self.places.descriptors),
            used: VA.wrapping_add(self.places.used),
            avail: VA.wrapping_add(self.places.avail),
        }
    }

    /// Connects, and sends all messages until the ring runs.
    ///
    /// # Errors
    /// The failure of the step.
    pub fn start(self, socket: &Path) -> Result<Front, Failure> {
        let peer = Peer::connect(socket)?;
        greet(&peer, self.features)?;
        self.start_on(peer)
    }

    /// As [`Setup::start`], on a connection whose features are negotiated.
    ///
    /// # Errors
    /// As there.
    pub fn start_on(self, peer: Peer) -> Result<Front, Failure> {
        if let Some((region, file)) = &self.inflight {
            let message = region.message(request::SET_INFLIGHT_FD);
            peer.tell(message, &[file.as_fd()])?;
        }
        let table = wire::mem_table(1, &[self.region()]);
        peer.tell(table, &[self.ram.file().as_fd()])?;
        self.start_ring(peer)
    }

    /// Sets up the ring alone.
    ///
    /// # Errors
    /// As there.
    pub fn start_ring(self, peer: Peer) -> Result<Front, Failure> {
        let size = u32::from(self.size);
        peer.tell(Message::words32(request::SET_VRING_NUM, &[0, size]), &[])?;
        let base = [0, u32::from(self.base)];
        peer.tell(Message::words32(request::SET_VRING_BASE, &base), &[])?;
        peer.tell(wire::vring_addr(0, self.addresses()), &[])?;
        for (request, fd) in [
            (request::SET_VRING_ERR, &self.error),
            (request::SET_VRING_CALL, &self.call),
            (request::SET_VRING_KICK, &self.kick),
        ] {
            peer.tell(Message::words64(request, &[0]), &[fd.as_fd()])?;
        }
        peer.tell(Message::words32(request::SET_VRING_ENABLE, &[0, 1]), &[])?;
        Ok(Front {
            peer,
            ram: self.ram,
            places: self.places,
            size: self.size,
            kick: self.kick,
            call: self.call,
            error: self.error,
            offered: self.base,
        })
    }
}

/// Negotiates features as a front end does at its start.
///
/// # Errors
/// The failure of the step.
pub fn greet(peer: &Peer, features: u64) -> Result<(), Failure> {
    peer.send(&Message::new(request::SET_OWNER), &[])?;
    peer.ask(&Message::new(request::GET_FEATURES), &[])?;
    let wanted = features | F_PROTOCOL | F_VERSION_1;
    peer.send(&Message::words64(request::SET_FEATURES, &[wanted]), &[])?;
    peer.ask(&Message::new(request::GET_PROTOCOL_FEATURES), &[])?;
    peer.send(
        &Message::words64(request::SET_PROTOCOL_FEATURES, &[PROTOCOL]),
        &[],
    )?;
    peer.ask(&Message::new(request::GET_QUEUE_NUM), &[])?;
    Ok(())
}

/// A front end whose ring runs.
#[derive(Debug)]
pub struct Front {
    /// Its connection.
    pub peer: Peer,
    /// Its RAM.
    pub ram: Ram,
    /// Offsets of the ring's parts in RAM.
    pub places: RingAddresses,
    /// Kick descriptor.
    pub kick: OwnedFd,
    /// Call descriptor.
    pub call: OwnedFd,
    /// Error descriptor.
    pub error: OwnedFd,
    size: u16,
    /// Avail index.
    offered: u16,
}

/// A request with one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Io {
    /// Its type.
    pub kind: u32,
    /// First sector.
    pub sector: u64,
    /// Guest-physical address of its data.
    pub gpa: u64,
    /// Bytes of data.
    pub len: u32,
}

impl Io {
    /// A request on the data of slot `slot`.
    #[must_use]
    pub fn of_slot(slot: u16, kind: u32, sector: u64, len: u32) -> Self {
        Self {
            kind,
            sector,
            gpa: GPA + data_of(slot),
            len,
        }
    }
}

/// Where the data of a slot lies in RAM.
#[must_use]
pub fn data_of(slot: u16) -> u64 {
    DATA + u64::from(slot) * u64::from(SLOT_BYTES)
}

/// Where the header of a slot lies in RAM.
#[must_use]
pub fn header_of(slot: u16) -> u64 {
    HEADERS + u64::from(slot) * HEADER_STRIDE
}

impl Front {
    /// A well-behaved front end on the device at `socket`.
    ///
    /// # Errors
    /// The failure of the step.
    pub fn start(socket: &Path) -> Result<Self, Failure> {
        Setup::new()?.start(socket)
    }

    /// Writes a descriptor of the ring's table.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn describe(&self, index: u16, descriptor: Descriptor) -> Result<(), Failure> {
        let at = self.places.descriptors + 16 * u64::from(index);
        self.ram.put(at, &descriptor.bytes())
    }

    /// Writes a chain from descriptor 0 on; `NEXT` and the index of the next are filled in.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn describe_chain(&self, parts: &[(u64, u32, u16)]) -> Result<(), Failure> {
        let bytes = chain_bytes(parts);
        self.ram.put(self.places.descriptors, &bytes)
    }

    /// Writes the header of a slot.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn head(&self, slot: u16, kind: u32, sector: u64) -> Result<(), Failure> {
        let mut bytes = Vec::from(kind.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(sector.to_le_bytes());
        bytes.push(0xff);
        self.ram.put(header_of(slot), &bytes)
    }

    /// Makes `head` available without a kick.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn offer(&mut self, head: u16) -> Result<(), Failure> {
        let entry = self.places.avail + 4 + 2 * u64::from(self.offered % self.size);
        self.ram.put(entry, &head.to_le_bytes())?;
        self.offered = self.offered.wrapping_add(1);
        self.set_avail(self.offered)
    }

    /// Writes the avail index.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_avail(&self, index: u16) -> Result<(), Failure> {
        self.ram.put(self.places.avail + 2, &index.to_le_bytes())
    }

    /// The avail index as last written.
    #[must_use]
    pub fn offered(&self) -> u16 {
        self.offered
    }

    /// Kicks.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn kick(&self) -> Result<(), Failure> {
        match rustix::io::write(&self.kick, &1_u64.to_ne_bytes()) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(failed("a kick")(error)),
        }
    }

    /// Puts a request of three descriptors into slot `slot`, without a kick.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn post(&mut self, slot: u16, io: Io) -> Result<(), Failure> {
        self.head(slot, io.kind, io.sector)?;
        let (first, header) = (3 * slot, GPA + header_of(slot));
        let data = if io.kind == T_IN { WRITE } else { 0 };
        for (index, (gpa, len, flags)) in (first..).zip([
            (header, 16, NEXT),
            (io.gpa, io.len, data | NEXT),
            (header + HEADER_BYTES, 1, WRITE),
        ]) {
            let next = index + 1;
            self.describe(
                index,
                Descriptor {
                    gpa,
                    len,
                    flags,
                    next,
                },
            )?;
        }
        self.offer(first)
    }

    /// The status byte of a slot.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn status(&self, slot: u16) -> Result<u8, Failure> {
        let [status] = self.ram.get(header_of(slot) + HEADER_BYTES)?;
        Ok(status)
    }

    /// The used index.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn used(&self) -> Result<u16, Failure> {
        Ok(u16::from_le_bytes(self.ram.get(self.places.used + 2)?))
    }

    /// Waits until everything made available is used.
    ///
    /// # Errors
    /// [`Failure::Stopped`], [`Failure::HungUp`], [`Failure::Silent`].
    pub fn wait(&self) -> Result<(), Failure> {
        self.wait_within(PATIENCE)
    }

    /// As [`Front::wait`], for at most `patience`.
    ///
    /// # Errors
    /// As there.
    pub fn wait_within(&self, patience: Duration) -> Result<(), Failure> {
        let step = || "waiting for requests".to_owned();
        let deadline = Instant::now() + patience;
        loop {
            if self.used()? == self.offered {
                return Ok(());
            }
            if self.has_stopped() {
                return Err(Failure::Stopped { step: step() });
            }
            if self.peer.has_hung_up() {
                return Err(Failure::HungUp { step: step() });
            }
            if Instant::now() > deadline {
                return Err(Failure::Silent {
                    step: step(),
                    waited: patience,
                });
            }
            self.doze();
        }
    }

    /// Waits for a call, or a moment.
    fn doze(&self) {
        let mut polled = [PollFd::new(&self.call, PollFlags::IN)];
        let moment = Timespec::try_from(LOOK_EVERY).ok();
        // Whatever the result, the caller reads the ring again.
        if let Err(error) = poll(&mut polled, moment.as_ref()) {
            eprintln!("guestkit: waiting for a call: {error}");
        }
        if polled[0].revents() == PollFlags::IN
            && rustix::io::read(&self.call, &mut [0; 8]).is_err()
        {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// True if the device reported by the error descriptor that it has stopped.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        super::peer::is_ready(self.error.as_fd(), Duration::ZERO)
    }

    /// Does one request and returns its status.
    ///
    /// # Errors
    /// As [`Front::wait`].
    pub fn request(&mut self, slot: u16, io: Io) -> Result<u8, Failure> {
        self.post(slot, io)?;
        self.kick()?;
        self.wait()?;
        self.status(slot)
    }

    /// Does one request that must succeed.
    ///
    /// # Errors
    /// As [`Front::wait`], and a status other than 0.
    pub fn do_io(&mut self, slot: u16, io: Io) -> Result<(), Failure> {
        match self.request(slot, io)? {
            0 => Ok(()),
            status => Err(wrong("a request", format!("its status is {status}"))),
        }
    }

    /// Writes `bytes` at `sector` and reads them back through other memory.
    ///
    /// # Errors
    /// As [`Front::wait`], and content that differs from what was written.
    pub fn check(&mut self, sector: u64, bytes: &[u8]) -> Result<(), Failure> {
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.ram.put(data_of(0), bytes)?;
        self.do_io(0, Io::of_slot(0, T_OUT, sector, len))?;
        self.do_io(1, Io::of_slot(1, T_IN, sector, len))?;
        let mut back = vec![0; bytes.len()];
        self.ram.read(data_of(1), &mut back)?;
        if back == bytes {
            return Ok(());
        }
        Err(wrong("reading back", format!("sector {sector} is another")))
    }

    /// Lends `file` as further memory, `at` bytes past [`GPA`] and [`VA`].
    ///
    /// # Errors
    /// The failure of the message.
    pub fn lend(&self, file: BorrowedFd<'_>, at: u64, bytes: u64) -> Result<(), Failure> {
        let region = Region {
            gpa: GPA + at,
            bytes,
            va: VA + at,
            offset: 0,
        };
        let message = wire::mem_region(request::ADD_MEM_REG, &region);
        self.peer.tell(message, &[file])
    }
}

/// Descriptors of a chain, with `NEXT` and the index of the next filled in.
#[must_use]
pub fn chain_bytes(parts: &[(u64, u32, u16)]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(16 * parts.len());
    for (next, (gpa, len, flags)) in (1_u16..).zip(parts) {
        let more = usize::from(next) < parts.len();
        let flags = if more { flags | NEXT } else { *flags };
        let descriptor = Descriptor {
            gpa: *gpa,
            len: *len,
            flags,
            next,
        };
        bytes.extend(descriptor.bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_ends_with_its_last_part() {
        let bytes = chain_bytes(&[(1, 2, 0), (3, 4, WRITE)]);
        assert_eq!(bytes.len(), 32);
        assert_eq!(bytes[12..16], [1, 0, 1, 0]);
        assert_eq!(bytes[28..30], [2, 0]);
    }

    #[test]
    fn parts_of_the_ram_do_not_overlap() {
        let parts = [
            (0, 16 * u64::from(RING_SIZE)),
            (0x1000, 6 + 2 * u64::from(RING_SIZE)),
            (0x2000, 6 + 8 * u64::from(RING_SIZE)),
            (HEADERS, u64::from(SLOTS) * HEADER_STRIDE),
            (INDIRECT, 16 * 1024),
            (DATA, u64::from(SLOTS) * u64::from(SLOT_BYTES)),
        ];
        for pair in parts.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
        }
        assert!(DATA + u64::from(SLOTS) * u64::from(SLOT_BYTES) <= RAM_BYTES);
        const { assert!(3 * SLOTS <= RING_SIZE) };
    }
}
