// SPDX-License-Identifier: Apache-2.0
//! Queues of a TAP (`Documentation/networking/tuntap.rst`).
//!
//! A TAP is an interface of the host whose other end is this process: what is written to a queue,
//! the host receives, and what the host sends through the interface is read from one of its queues.
//! The kernel gives a flow to the queue that has written packets of it last, else to one by its
//! hash.
//!
//! Before each packet there is a `virtio_net_hdr` with `num_buffers` ([`HEADER_BYTES`]), so
//! checksums and segmentation can be left to either side.
#![expect(unsafe_code, reason = "ioctls of a TAP")]

use super::{
    interface::{self, Interface, Tun},
    parts::{self, Vectors},
};
use rustix::{
    fs::{Mode, OFlags, open},
    io::Errno,
};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};
use vm_memory::VolatileSlice;

/// Bytes of the header before each packet.
pub const HEADER_BYTES: usize = 12;

const DEVICE: &str = "/dev/net/tun";
const TUNSETIFF: u64 = 0x4004_54ca;
const TUNSETOFFLOAD: u64 = 0x4004_54d0;
const TUNSETVNETHDRSZ: u64 = 0x4004_54d8;
const TUNSETQUEUE: u64 = 0x4004_54d9;
const IFF_TAP: i16 = 0x0002;
const IFF_MULTI_QUEUE: i16 = 0x0100;
const IFF_ATTACH_QUEUE: i16 = 0x0200;
const IFF_DETACH_QUEUE: i16 = 0x0400;
const IFF_NO_PI: i16 = 0x1000;
const IFF_VNET_HDR: i16 = 0x4000;

/// Why a TAP cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// No interface has the name.
    #[error(
        "there is no interface {0} in the network namespace of this process; make it by `ip tuntap add dev {0} mode tap multi_queue`"
    )]
    Missing(String),
    /// The interface is something else.
    #[error(
        "{name} is no TAP but {kind}; make one by `ip tuntap add dev NAME mode tap multi_queue`"
    )]
    NotATap {
        /// Its name.
        name: String,
        /// What it is.
        kind: String,
    },
    /// Somebody has it.
    #[error("the TAP {0} is in use by another process; stop that one, or give another TAP")]
    Busy(String),
    /// It has one queue.
    #[error(
        "the TAP {name} has one queue and {queues} are wanted; give one queue, or make it with `multi_queue`"
    )]
    OneQueue {
        /// Its name.
        name: String,
        /// Queues wanted.
        queues: u16,
    },
    /// This process may not have it.
    #[error(
        "the TAP {0} may not be opened: this process needs CAP_NET_ADMIN, or the TAP must be its user's (`ip tuntap add … user NAME`), and /dev/net/tun must be open to it"
    )]
    NotAllowed(String),
    /// The kernel refuses.
    #[error("the TAP {name} cannot be opened: {source}")]
    Kernel {
        /// Its name.
        name: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// What the other side of a TAP may leave undone in packets for us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TapOffloads {
    /// Checksums.
    pub checksum: bool,
    /// Segmentation of TCP over IPv4; only with checksums.
    pub tso4: bool,
    /// The same over IPv6.
    pub tso6: bool,
    /// The same with congestion marks.
    pub ecn: bool,
}

impl TapOffloads {
    fn bits(self) -> u64 {
        match self.checksum {
            true => {
                1 | u64::from(self.tso4) << 1 | u64::from(self.tso6) << 2 | u64::from(self.ecn) << 3
            }
            false => 0,
        }
    }
}

/// `struct ifreq`, as far as it is used for a TAP.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: i16,
    unused: [u8; 22],
}

impl Request {
    fn new(name: &str, flags: i16) -> Self {
        let mut bytes = [0; 16];
        for (to, from) in bytes.iter_mut().zip(name.bytes().take(15)) {
            *to = from;
        }
        Self {
            name: bytes,
            flags,
            unused: [0; 22],
        }
    }
}

/// One queue of a TAP; reads and writes do not wait.
#[derive(Debug)]
pub struct TapQueue(OwnedFd);

/// Opens `queues` queues of a TAP that exists; returns its number, too.
///
/// # Errors
/// [`TapError`].
pub fn open_queues(name: &str, queues: u16) -> Result<(Vec<TapQueue>, u32), TapError> {
    let before = look_up(name)?;
    let tun = examine(name, queues, &before)?;
    let flags = IFF_TAP
        | IFF_NO_PI
        | IFF_VNET_HDR
        | if tun.is_multi_queue {
            IFF_MULTI_QUEUE
        } else {
            0
        };
    let opened = (0..queues).map(|_| TapQueue::open(name, flags));
    let opened = opened.collect::<Result<Vec<_>, _>>()?;
    // The kernel makes an interface that is not there. One that was deleted meanwhile is not to be
    // replaced by one of ours, which ends with its descriptors.
    if look_up(name)?.index != before.index {
        return Err(TapError::Missing(name.to_owned()));
    }
    Ok((opened, before.index))
}

fn look_up(name: &str) -> Result<Interface, TapError> {
    let found = interface::look_up(name).map_err(|source| kernel(name, source))?;
    found.ok_or_else(|| TapError::Missing(name.to_owned()))
}

fn examine(name: &str, queues: u16, interface: &Interface) -> Result<Tun, TapError> {
    let tun = interface.tun.filter(|tun| tun.is_tap);
    let tun = tun.ok_or_else(|| TapError::NotATap {
        name: name.to_owned(),
        kind: match (&interface.tun, &interface.kind) {
            (Some(_), _) => "a TUN".to_owned(),
            (None, Some(kind)) => format!("of kind {kind}"),
            (None, None) => "another interface".to_owned(),
        },
    })?;
    if tun.queues > 0 {
        return Err(TapError::Busy(name.to_owned()));
    }
    if queues > 1 && !tun.is_multi_queue {
        let name = name.to_owned();
        return Err(TapError::OneQueue { name, queues });
    }
    Ok(tun)
}

fn kernel(name: &str, source: io::Error) -> TapError {
    let name = name.to_owned();
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => TapError::NotAllowed(name),
        Some(libc::EBUSY) => TapError::Busy(name),
        _ => TapError::Kernel { name, source },
    }
}

impl TapQueue {
    fn open(name: &str, flags: i16) -> Result<Self, TapError> {
        let mode = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = open(DEVICE, mode, Mode::empty()).map_err(|error| kernel(name, error.into()))?;
        let queue = Self(fd);
        let mut request = Request::new(name, flags);
        let asked = queue.ioctl(TUNSETIFF, &mut request);
        asked.map_err(|source| kernel(name, source))?;
        let mut bytes = 12_i32;
        let asked = queue.ioctl(TUNSETVNETHDRSZ, &mut bytes);
        asked.map_err(|source| kernel(name, source))?;
        Ok(queue)
    }

    /// Sets what the other side may leave undone, for all queues of the TAP.
    ///
    /// # Errors
    /// The kernel's; `EBADFD` if the TAP was deleted.
    pub fn set_offloads(&self, offloads: TapOffloads) -> io::Result<()> {
        // SAFETY: the argument of this ioctl is a number.
        let answer = unsafe { libc::ioctl(self.0.as_raw_fd(), TUNSETOFFLOAD, offloads.bits()) };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// The TAP gives packets to this queue, too, or to others only. Of a TAP that was made for one
    /// queue, that has it always.
    ///
    /// # Errors
    /// The kernel's; `EBADFD` if the TAP was deleted.
    pub fn set_receiving(&self, receiving: Receiving) -> io::Result<()> {
        let flags = match receiving {
            Receiving::Yes => IFF_ATTACH_QUEUE,
            Receiving::No => IFF_DETACH_QUEUE,
        };
        match self.ioctl(TUNSETQUEUE, &mut Request::new("", flags)) {
            // It is so already, or has one queue.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            other => other,
        }
    }

    fn ioctl<T>(&self, request: u64, argument: &mut T) -> io::Result<()> {
        // SAFETY: `argument` is the structure that this request takes, a whole `ifreq` or an int;
        // the kernel reads and writes no more of it.
        let answer =
            unsafe { libc::ioctl(self.0.as_raw_fd(), request, std::ptr::from_mut(argument)) };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Writes a packet: its header, and its parts, which are guest memory.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` if there are more than [`PARTS_MAX`](super::PARTS_MAX) parts.
    pub fn send<'a>(
        &self,
        header: &'a [u8; HEADER_BYTES],
        parts: impl Iterator<Item = VolatileSlice<'a>>,
    ) -> io::Result<()> {
        let vectors = Vectors::new(header, parts);
        let vectors = vectors.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        parts::write(self.0.as_fd(), &vectors).map(drop)
    }

    /// Writes a packet that lies behind its header.
    ///
    /// # Errors
    /// The kernel's.
    pub fn send_whole(&self, packet: &[u8]) -> io::Result<()> {
        rustix::io::write(&self.0, packet).map_err(io::Error::from)?;
        Ok(())
    }

    /// Reads a packet, with its header before it; `None` if there is none now.
    ///
    /// # Errors
    /// The kernel's; `EBADFD` if the TAP was deleted.
    pub fn receive(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match rustix::io::read(&self.0, &mut *into) {
                Ok(bytes) => return Ok(Some(bytes)),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Whether a queue gets packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Receiving {
    /// It does.
    Yes,
    /// It does not.
    No,
}

impl AsFd for TapQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for TapQueue {
    /// A queue that another process has opened.
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}
