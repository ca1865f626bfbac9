// SPDX-License-Identifier: Apache-2.0
//! A socket that is connected to an interface of the host (packet(7)).
//!
//! What is sent goes out at the interface, as if the host had sent it; what comes in there is
//! received, whatever its address, and the host gets it, too. Between the host itself and the socket
//! nothing passes. Before each packet there is a `virtio_net_hdr` ([`HEADER_BYTES`]), so checksums
//! are not computed for a packet that never leaves the host.
//!
//! # VLAN
//! The kernel takes the tag off a packet before we see it, and tells it beside. It is put back:
//!
//! ```text
//!   header │ to │ from │ type … │   +  tag    =   header' │ to │ from │ tag │ type … │
//! ```
#![expect(unsafe_code, reason = "socket options and messages of packet sockets")]

use super::{interface, parts::Vectors};
use libc::{c_int, c_void, iovec, msghdr, sockaddr_ll, tpacket_auxdata};
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, socket_with},
};
use std::{
    io::{self, IoSlice},
    mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    ptr,
};
use vm_memory::VolatileSlice;

/// Bytes of the header before each packet that is sent.
pub const HEADER_BYTES: usize = 10;
/// Bytes before each packet that is received: two more, for `num_buffers`.
pub const ROOM_BYTES: usize = 12;
/// What the kernel may keep for us until we read it: a few milliseconds of 10 Gbit/s.
const RECEIVE_BYTES: c_int = 4 << 20;
const VLAN_BYTES: usize = 4;
/// The two addresses before a tag.
const ADDRESSES: usize = 12;
/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`
const NEEDS_CSUM: u8 = 1;
const STATUS_VLAN: u32 = 1 << 4;
const STATUS_VLAN_KIND: u32 = 1 << 6;
const VLAN_KIND: u16 = 0x8100;

/// Why an interface cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum PacketError {
    /// No interface has the name.
    #[error("there is no interface {0} in the network namespace of this process; see `ip link`")]
    Missing(String),
    /// This process may not have it.
    #[error("packets of the interface {0} may not be taken: this process needs CAP_NET_RAW")]
    NotAllowed(String),
    /// The kernel refuses.
    #[error("packets of the interface {name} cannot be taken: {source}")]
    Kernel {
        /// Its name.
        name: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// See the module documentation. Nothing waits.
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
    index: u32,
}

impl PacketSocket {
    /// Connects to an interface.
    ///
    /// # Errors
    /// [`PacketError`].
    pub fn open(name: &str) -> Result<Self, PacketError> {
        let kernel = |source: io::Error| match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => PacketError::NotAllowed(name.to_owned()),
            Some(libc::ENODEV | libc::ENXIO) => PacketError::Missing(name.to_owned()),
            _ => PacketError::Kernel {
                name: name.to_owned(),
                source,
            },
        };
        let found = interface::look_up(name).map_err(kernel)?;
        let found = found.ok_or_else(|| PacketError::Missing(name.to_owned()))?;
        Self::of(found.index).map_err(kernel)
    }

    fn of(index: u32) -> io::Result<Self> {
        // Of no protocol yet: nothing is received before it is bound.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
        let socket = Self { fd, index };
        socket.set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, &1_i32)?;
        socket.set(libc::SOL_PACKET, libc::PACKET_AUXDATA, &1_i32)?;
        socket.set(libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, &1_i32)?;
        // The first is only for the privileged, the second is cut to a limit.
        if socket
            .set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &RECEIVE_BYTES)
            .is_err()
        {
            socket.set(libc::SOL_SOCKET, libc::SO_RCVBUF, &RECEIVE_BYTES)?;
        }
        let number = c_int::try_from(index).unwrap_or(0);
        let all = libc::packet_mreq {
            mr_ifindex: number,
            mr_type: u16::try_from(libc::PACKET_MR_PROMISC).unwrap_or(0),
            mr_alen: 0,
            mr_address: [0; 8],
        };
        socket.set(libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &all)?;
        socket.bind(number)?;
        Ok(socket)
    }

    fn bind(&self, index: c_int) -> io::Result<()> {
        let address = sockaddr_ll {
            sll_family: u16::try_from(libc::AF_PACKET).unwrap_or(0),
            sll_protocol: u16::try_from(libc::ETH_P_ALL).unwrap_or(0).to_be(),
            sll_ifindex: index,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        let bytes = socket_bytes::<sockaddr_ll>();
        // SAFETY: the kernel reads `bytes` of `address`, which lives during the call.
        let answer =
            unsafe { libc::bind(self.fd.as_raw_fd(), ptr::from_ref(&address).cast(), bytes) };
        checked(answer)
    }

    fn set<T>(&self, level: c_int, option: c_int, value: &T) -> io::Result<()> {
        // SAFETY: the kernel reads the bytes of `value`, whose size it is told.
        let answer = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                option,
                ptr::from_ref(value).cast(),
                socket_bytes::<T>(),
            )
        };
        checked(answer)
    }

    /// A socket that another process has opened, of the interface with that number.
    #[must_use]
    pub fn handed(fd: OwnedFd, index: u32) -> Self {
        Self { fd, index }
    }

    /// Number of the interface.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Sends a packet: its header, and its parts, which are guest memory.
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
        super::parts::write(self.fd.as_fd(), &vectors).map(drop)
    }

    /// Sends a packet from one buffer of ours.
    ///
    /// # Errors
    /// The kernel's.
    pub fn send_whole(&self, header: &[u8; HEADER_BYTES], packet: &[u8]) -> io::Result<()> {
        let vectors = [IoSlice::new(header), IoSlice::new(packet)];
        rustix::io::writev(&self.fd, &vectors).map_err(io::Error::from)?;
        Ok(())
    }

    /// Receives a packet into `into`, behind [`ROOM_BYTES`] of which the first are its header;
    /// returns the length of the packet, or `None` if there is none now. Packets that do not fit are
    /// skipped.
    ///
    /// # Errors
    /// The kernel's; `ENETDOWN` once if the interface goes down or away.
    pub fn receive(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match self.receive_one(into) {
                Ok(Some(bytes)) => return Ok(Some(bytes)),
                // It did not fit.
                Ok(None) => {}
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::AGAIN) => return Ok(None),
                    Some(Errno::INTR) => {}
                    _ => return Err(error),
                },
            }
        }
    }

    fn receive_one(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        let Some((room, packet)) = into.split_at_mut_checked(ROOM_BYTES) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        room.fill(0);
        let mut vectors = [
            iovec {
                iov_base: room.as_mut_ptr().cast::<c_void>(),
                iov_len: HEADER_BYTES,
            },
            iovec {
                iov_base: packet.as_mut_ptr().cast::<c_void>(),
                // Room for a tag to be put back.
                iov_len: packet.len().saturating_sub(VLAN_BYTES),
            },
        ];
        let mut control = Control([0; CONTROL_BYTES]);
        // SAFETY: all fields of a `msghdr` may be zero.
        let mut message: msghdr = unsafe { mem::zeroed() };
        message.msg_iov = vectors.as_mut_ptr();
        message.msg_iovlen = vectors.len();
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES;
        // SAFETY: `message` names two vectors inside `into`, which is borrowed exclusively, and
        // `control`, each with its length; the kernel writes no more, and only during the call.
        let got = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, 0) };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        let Some(bytes) = got.checked_sub(HEADER_BYTES) else {
            return Ok(None);
        };
        if message.msg_flags & libc::MSG_TRUNC != 0 {
            return Ok(None);
        }
        Ok(Some(match tag_of(&message) {
            Some(tag) => put_tag_back(into, bytes, tag),
            None => bytes,
        }))
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

const CONTROL_BYTES: usize = 64;

/// Room for control messages, aligned as they must be.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// The tag that was taken off a packet: its kind and its content.
fn tag_of(message: &msghdr) -> Option<(u16, u16)> {
    // SAFETY: `message` was filled by `recvmsg`, and its control buffer lives and is aligned; the
    // macro functions stay inside it by its length. A message of this type has an auxdata behind
    // its header, which is read unaligned.
    let told = unsafe {
        let mut at = libc::CMSG_FIRSTHDR(message);
        loop {
            if at.is_null() {
                break None;
            }
            if (*at).cmsg_level == libc::SOL_PACKET && (*at).cmsg_type == libc::PACKET_AUXDATA {
                break Some(ptr::read_unaligned(
                    libc::CMSG_DATA(at).cast::<tpacket_auxdata>(),
                ));
            }
            at = libc::CMSG_NXTHDR(message, at);
        }
    }?;
    let kind = match told.tp_status & STATUS_VLAN_KIND {
        0 => VLAN_KIND,
        _ => told.tp_vlan_tpid,
    };
    (told.tp_status & STATUS_VLAN != 0).then_some((kind, told.tp_vlan_tci))
}

/// Returns the new length of the packet, whose `bytes` lie behind [`ROOM_BYTES`].
fn put_tag_back(into: &mut [u8], bytes: usize, (kind, content): (u16, u16)) -> usize {
    let at = ROOM_BYTES + ADDRESSES;
    let end = ROOM_BYTES + bytes;
    if bytes < ADDRESSES || into.len() < end + VLAN_BYTES {
        return bytes;
    }
    into.copy_within(at..end, at + VLAN_BYTES);
    into[at..at + 2].copy_from_slice(&kind.to_be_bytes());
    into[at + 2..at + 4].copy_from_slice(&content.to_be_bytes());
    let mut move_on = |at: usize| {
        let old = u16::from_le_bytes([into[at], into[at + 1]]);
        let new = old.saturating_add(4);
        into[at..at + 2].copy_from_slice(&new.to_le_bytes());
    };
    // Length of the headers, which is known for packets to be segmented.
    move_on(2);
    if into[0] & NEEDS_CSUM != 0 {
        let old = u16::from_le_bytes([into[6], into[7]]);
        into[6..8].copy_from_slice(&old.saturating_add(4).to_le_bytes());
    }
    bytes + VLAN_BYTES
}

fn socket_bytes<T>() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0)
}

fn checked(answer: c_int) -> io::Result<()> {
    match answer {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_is_put_back_between_addresses_and_type_and_the_header_follows() {
        let mut buffer = vec![0; 64];
        buffer[0] = NEEDS_CSUM;
        buffer[2..4].copy_from_slice(&54_u16.to_le_bytes());
        buffer[6..8].copy_from_slice(&34_u16.to_le_bytes());
        for (number, byte) in (0..20).zip(&mut buffer[ROOM_BYTES..]) {
            *byte = number;
        }
        assert_eq!(put_tag_back(&mut buffer, 20, (0x8100, 0x2007)), 24);
        let packet = &buffer[ROOM_BYTES..ROOM_BYTES + 24];
        assert_eq!(packet[..12], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(packet[12..16], [0x81, 0, 0x20, 7]);
        assert_eq!(packet[16..], [12, 13, 14, 15, 16, 17, 18, 19]);
        assert_eq!((buffer[2], buffer[6]), (58, 38));
        // Too short to have a type, or no room.
        assert_eq!(put_tag_back(&mut buffer, 11, (0x8100, 1)), 11);
        assert_eq!(put_tag_back(&mut buffer, 52, (0x8100, 1)), 52);
    }
}
