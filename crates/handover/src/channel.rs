// SPDX-License-Identifier: Apache-2.0
//! [`Channel`]: the socket between a daemon and its successor.

use crate::{
    HandoverError,
    message::{Fd, Message},
    packet::{
        Assembly, Follows, HEADER_BYTES, PACKET_BYTES_MAX, PACKET_DESCRIPTORS_MAX, check_size,
        encode,
    },
};
use rustix::{
    cmsg_space,
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg,
        sendmsg, socketpair, sockopt,
    },
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

/// One end of the socket.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

/// The descriptors that came with a message. Those that are not taken are closed.
#[derive(Debug, Default)]
pub struct Descriptors(Vec<Option<OwnedFd>>);

impl Descriptors {
    /// The descriptor that the message names.
    ///
    /// # Errors
    /// It did not come, or was taken before.
    pub fn take(&mut self, fd: Fd) -> Result<OwnedFd, HandoverError> {
        let place = usize::try_from(fd.0).ok();
        let place = place.and_then(|place| self.0.get_mut(place));
        let taken = place.and_then(Option::take);
        taken.ok_or(HandoverError::Descriptor { index: fd.0 })
    }

    /// How many have not been taken.
    #[must_use]
    pub fn left(&self) -> usize {
        self.0.iter().flatten().count()
    }
}

impl FromIterator<OwnedFd> for Descriptors {
    fn from_iter<I: IntoIterator<Item = OwnedFd>>(fds: I) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }
}

/// Until when something is waited for.
struct Deadline {
    wait: Duration,
    until: Instant,
}

impl Deadline {
    fn after(wait: Duration) -> Self {
        Self {
            wait,
            until: Instant::now() + wait,
        }
    }

    /// Waits for `flags` of `socket`.
    fn wait_for(&self, socket: &OwnedFd, flags: PollFlags) -> Result<(), HandoverError> {
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            let timed_out = HandoverError::TimedOut {
                waited_ms: u64::try_from(self.wait.as_millis()).unwrap_or(u64::MAX),
            };
            if left.is_zero() {
                return Err(timed_out);
            }
            let left = Timespec::try_from(left).map_err(|_| timed_out)?;
            match poll(&mut [PollFd::new(socket, flags)], Some(&left)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }
}

impl Channel {
    /// A connected pair: an end to speak with, and an end for a process that is to be started.
    ///
    /// # Errors
    /// The kernel's.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Self { socket: ours }, theirs))
    }

    /// The end that this process was started with.
    ///
    /// # Errors
    /// It is not such a socket.
    pub fn of(socket: OwnedFd) -> Result<Self, HandoverError> {
        let wrong = HandoverError::Packet {
            what: "this end is no socket of a daemon that is being upgraded; `pagetide upgrade` starts the successor",
        };
        match (
            sockopt::socket_domain(&socket),
            sockopt::socket_type(&socket),
        ) {
            (Ok(AddressFamily::UNIX), Ok(SocketType::SEQPACKET)) => Ok(Self { socket }),
            _ => Err(wrong),
        }
    }

    /// Sends `message` with the descriptors that it names by their places.
    ///
    /// # Errors
    /// [`HandoverError`]; the other side may have got part of it.
    pub fn send(
        &self,
        message: &Message,
        fds: &[BorrowedFd<'_>],
        wait: Duration,
    ) -> Result<(), HandoverError> {
        self.send_text(&serde_json::to_vec(message)?, fds, wait)
    }

    /// As [`Self::send`], with the text of a message: for the tests, which send those of other versions.
    ///
    /// # Errors
    /// As there.
    pub fn send_text(
        &self,
        text: &[u8],
        fds: &[BorrowedFd<'_>],
        wait: Duration,
    ) -> Result<(), HandoverError> {
        check_size(text.len(), fds.len())?;
        let deadline = Deadline::after(wait);
        let (mut text, mut fds) = (text, fds);
        loop {
            let (body, text_left) = text.split_at(text.len().min(PACKET_BYTES_MAX));
            let (with, fds_left) = fds.split_at(fds.len().min(PACKET_DESCRIPTORS_MAX));
            let follows = match text_left.is_empty() && fds_left.is_empty() {
                true => Follows::Nothing,
                false => Follows::More,
            };
            self.send_packet(&encode(body, with.len(), follows), with, &deadline)?;
            if follows == Follows::Nothing {
                return Ok(());
            }
            (text, fds) = (text_left, fds_left);
        }
    }

    fn send_packet(
        &self,
        packet: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: &Deadline,
    ) -> Result<(), HandoverError> {
        loop {
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(PACKET_DESCRIPTORS_MAX))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
                unreachable!("there is room for {PACKET_DESCRIPTORS_MAX} descriptors");
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.socket, &[IoSlice::new(packet)], &mut ancillary, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => deadline.wait_for(&self.socket, PollFlags::OUT)?,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(HandoverError::HungUp),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    /// Waits for the next message, at most so long.
    ///
    /// # Errors
    /// [`HandoverError`].
    pub fn receive(&self, wait: Duration) -> Result<(Message, Descriptors), HandoverError> {
        let deadline = Deadline::after(wait);
        let (mut assembly, mut fds) = (Assembly::default(), Vec::new());
        let mut packet = vec![0; HEADER_BYTES + PACKET_BYTES_MAX];
        loop {
            let before = fds.len();
            let bytes = self.receive_packet(&mut packet, &mut fds, &deadline)?;
            if let Some(text) = assembly.take(&packet[..bytes], fds.len() - before)? {
                return Ok((serde_json::from_slice(&text)?, fds.into_iter().collect()));
            }
        }
    }

    fn receive_packet(
        &self,
        packet: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        deadline: &Deadline,
    ) -> Result<usize, HandoverError> {
        loop {
            let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(PACKET_DESCRIPTORS_MAX))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let received = recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(packet)],
                &mut ancillary,
                flags,
            );
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(came) = message {
                    fds.extend(came);
                }
            }
            match received {
                Ok(received)
                    if received
                        .flags
                        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) =>
                {
                    return Err(HandoverError::Packet {
                        what: "it is longer than a packet can be",
                    });
                }
                Ok(received) if received.bytes == 0 => return Err(HandoverError::HungUp),
                Ok(received) => return Ok(received.bytes),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => deadline.wait_for(&self.socket, PollFlags::IN)?,
                Err(Errno::CONNRESET) => return Err(HandoverError::HungUp),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }
}

impl From<Channel> for OwnedFd {
    fn from(channel: Channel) -> Self {
        channel.socket
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
