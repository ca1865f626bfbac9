// SPDX-License-Identifier: Apache-2.0
//! One connection to a vhost-user socket, which can carry any bytes.
//!
//! No call waits for ever: a back end that does not read fills the socket, and one that does not
//! answer ends in [`Failure::Silent`].

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::wire::{HEADER_BYTES, Message};

/// Longest wait for a back end's answer, on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Most descriptors the kernel lets one message have (`SCM_MAX_FD`).
pub const DESCRIPTORS_MAX: usize = 253;
/// Most descriptors a reply is expected to have.
const REPLY_DESCRIPTORS_MAX: usize = 8;
/// Largest accepted body of a reply, in bytes.
const REPLY_BODY_MAX: usize = 64 << 10;

/// An attack step that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The back end refuses.
    #[error("{step}: the back end refuses it")]
    Refused {
        /// What was tried.
        step: String,
    },
    /// The connection ended.
    #[error("{step}: the back end hung up")]
    HungUp {
        /// What was tried.
        step: String,
    },
    /// The device has stopped, according to its error descriptor.
    #[error("{step}: the device stopped")]
    Stopped {
        /// What was tried.
        step: String,
    },
    /// Nothing came in time.
    #[error("{step}: nothing came within {waited:?}")]
    Silent {
        /// What was tried.
        step: String,
        /// How long.
        waited: Duration,
    },
    /// The answer is not valid.
    #[error("{step}: {what}")]
    Wrong {
        /// What was tried.
        step: String,
        /// What came instead.
        what: String,
    },
    /// Our own side failed.
    #[error("{step}: {source}")]
    Kernel {
        /// What was tried.
        step: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// This machine lacks what is needed.
    #[error("not possible here: {0}")]
    NotHere(String),
}

/// Turns an error of one of our own calls into a [`Failure`].
pub fn failed<E: Into<io::Error>>(step: &str) -> impl FnOnce(E) -> Failure {
    move |error| Failure::Kernel {
        step: step.to_owned(),
        source: error.into(),
    }
}

/// A message of the back end.
#[derive(Debug)]
pub struct Reply {
    /// Request it answers.
    pub request: u32,
    /// Flags.
    pub flags: u32,
    /// What followed the header.
    pub body: Vec<u8>,
    /// Descriptors that came along.
    pub descriptors: Vec<OwnedFd>,
}

impl Reply {
    /// The first word of its body.
    #[must_use]
    pub fn word(&self) -> Option<u64> {
        self.body.first_chunk().copied().map(u64::from_le_bytes)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Peer {
    stream: UnixStream,
    socket: PathBuf,
}

impl Peer {
    /// Connects to the device at `socket`.
    ///
    /// # Errors
    /// No process listens there, or the listener accepts no more.
    pub fn connect(socket: &Path) -> Result<Self, Failure> {
        let step = "connecting";
        let flags = SocketFlags::CLOEXEC;
        let stream = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(failed(step))?;
        for way in [Timeout::Send, Timeout::Recv] {
            set_socket_timeout(&stream, way, Some(PATIENCE)).map_err(failed(step))?;
        }
        let address = SocketAddrUnix::new(socket).map_err(failed(step))?;
        rustix::net::connect(&stream, &address).map_err(failed(step))?;
        Ok(Self {
            stream: stream.into(),
            socket: socket.to_owned(),
        })
    }

    /// The socket it is connected to.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// A copy of the connection's descriptor.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn descriptor(&self) -> Result<OwnedFd, Failure> {
        let copy = self.stream.as_fd().try_clone_to_owned();
        copy.map_err(failed("copying a descriptor"))
    }

    /// Sends a message with these descriptors, and requests no answer.
    ///
    /// # Errors
    /// The back end hung up, or does not read.
    pub fn send(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        self.send_bytes(&message.bytes(), fds)
    }

    /// Sends bytes with these descriptors, as many as the kernel lets one message have.
    ///
    /// # Errors
    /// As [`Peer::send`].
    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        let mut space = vec![MaybeUninit::uninit(); ancillary_bytes(fds.len())];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(wrong(
                "sending",
                format!("{} descriptors at once", fds.len()),
            ));
        }
        let mut sent = 0;
        while sent < bytes.len() {
            let part = [IoSlice::new(&bytes[sent..])];
            match rustix::net::sendmsg(&self.stream, &part, &mut beside, SendFlags::NOSIGNAL) {
                Ok(more) => sent += more,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(ended("sending", error)),
            }
            beside.clear();
        }
        Ok(())
    }

    /// Waits for a message of the back end.
    ///
    /// # Errors
    /// It hung up, or sends nothing.
    pub fn reply(&self) -> Result<Reply, Failure> {
        let mut header = [0; HEADER_BYTES];
        let descriptors = self.receive(&mut header)?;
        let word = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let size = usize::try_from(word(8)).unwrap_or(usize::MAX);
        if size > REPLY_BODY_MAX {
            return Err(wrong("a reply", format!("it has {size} bytes")));
        }
        let mut body = vec![0; size];
        if size > 0 {
            self.receive(&mut body)?;
        }
        Ok(Reply {
            request: word(0),
            flags: word(4),
            body,
            descriptors,
        })
    }

    fn receive(&self, into: &mut [u8]) -> Result<Vec<OwnedFd>, Failure> {
        let step = "waiting for a reply";
        let (mut got, mut descriptors) = (0, Vec::new());
        while got < into.len() {
            let mut space = vec![MaybeUninit::uninit(); ancillary_bytes(REPLY_DESCRIPTORS_MAX)];
            let mut beside = RecvAncillaryBuffer::new(&mut space);
            let mut part = [IoSliceMut::new(&mut into[got..])];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let came = match rustix::net::recvmsg(&self.stream, &mut part, &mut beside, flags) {
                Ok(came) => came,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(ended(step, error)),
            };
            for message in beside.drain() {
                if let RecvAncillaryMessage::ScmRights(more) = message {
                    descriptors.extend(more);
                }
            }
            if came.flags.contains(ReturnFlags::CTRUNC) {
                return Err(wrong(step, "it has more descriptors than any".to_owned()));
            }
            if came.bytes == 0 {
                return Err(hung_up(step));
            }
            got += came.bytes;
        }
        Ok(descriptors)
    }

    /// Sends a message and waits for its answer.
    ///
    /// # Errors
    /// The back end hung up, or sends nothing.
    pub fn ask(&self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<Reply, Failure> {
        let named = |error| about(error, message.request);
        self.send(message, fds).map_err(named)?;
        let reply = self.reply().map_err(named)?;
        if reply.request == message.request {
            return Ok(reply);
        }
        let step = format!("request {}", message.request);
        Err(wrong(&step, format!("answered as {}", reply.request)))
    }

    /// Sends a message and waits until it is acknowledged.
    ///
    /// # Errors
    /// [`Failure::Refused`] if the acknowledgement reports that; else as [`Peer::ask`].
    pub fn tell(&self, message: Message, fds: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        let message = message.acked();
        match self.ask(&message, fds)?.word() {
            Some(0) => Ok(()),
            _ => Err(Failure::Refused {
                step: format!("request {}", message.request),
            }),
        }
    }

    /// Waits until the back end hangs up; messages that it sends before are discarded.
    ///
    /// # Errors
    /// [`Failure::Silent`] if it does not within `patience`.
    pub fn wait_for_hang_up(&self, patience: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + patience;
        while let Some(left) = deadline.checked_duration_since(Instant::now()) {
            if !is_ready(self.stream.as_fd(), left) {
                continue;
            }
            let mut thrown = [0; 4096];
            match rustix::net::recv(&self.stream, &mut thrown[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Ok(()),
                Ok(_) | Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                Err(_) => return Ok(()),
            }
        }
        Err(Failure::Silent {
            step: "waiting for the back end to hang up".to_owned(),
            waited: patience,
        })
    }

    /// True if the back end has hung up by now.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        let mut polled = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let now = Timespec::default();
        matches!(poll(&mut polled, Some(&now)), Ok(1))
    }
}

impl AsFd for Peer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// True once `fd` can be read, or has an error; false after `patience`.
pub fn is_ready(fd: BorrowedFd<'_>, patience: Duration) -> bool {
    let mut polled = [PollFd::new(&fd, PollFlags::IN | PollFlags::RDHUP)];
    let patience = Timespec::try_from(patience).ok();
    matches!(poll(&mut polled, patience.as_ref()), Ok(1))
}

fn ancillary_bytes(descriptors: usize) -> usize {
    // A header of 16 bytes and 4 bytes a descriptor, aligned to 8.
    match descriptors {
        0 => 0,
        some => rustix::cmsg_space!(ScmRights(1)) + (4 * some).next_multiple_of(8),
    }
}

fn ended(step: &str, error: rustix::io::Errno) -> Failure {
    use rustix::io::Errno;
    match error {
        Errno::PIPE | Errno::CONNRESET => hung_up(step),
        Errno::AGAIN => Failure::Silent {
            step: step.to_owned(),
            waited: PATIENCE,
        },
        error => failed(step)(error),
    }
}

fn hung_up(step: &str) -> Failure {
    Failure::HungUp {
        step: step.to_owned(),
    }
}

pub(super) fn wrong(step: &str, what: String) -> Failure {
    Failure::Wrong {
        step: step.to_owned(),
        what,
    }
}

/// The same failure, with the request's number for its step.
fn about(failure: Failure, request: u32) -> Failure {
    let step = format!("request {request}");
    match failure {
        Failure::HungUp { .. } => Failure::HungUp { step },
        Failure::Silent { waited, .. } => Failure::Silent { step, waited },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn pair() -> (Peer, UnixStream, tempfile::TempDir) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).expect("a socket");
        let peer = Peer::connect(&path).expect("a connection");
        let (other, _) = listener.accept().expect("a front end");
        (peer, other, folder)
    }

    #[test]
    fn descriptors_and_bytes_of_a_message_arrive_together() {
        use std::io::Read as _;
        let (peer, mut other, _folder) = pair();
        let fds = vec![peer.as_fd(); DESCRIPTORS_MAX];
        let message = Message::words64(3, &[1, 2]);
        peer.send(&message, &fds).expect("sent");
        let mut came = vec![0; message.bytes().len()];
        other.read_exact(&mut came).expect("received");
        assert_eq!(came, message.bytes());
    }

    #[test]
    fn reply_is_cut_at_its_size_and_end_of_stream_is_a_hang_up() {
        use std::io::Write as _;
        let (peer, mut other, _folder) = pair();
        let reply = Message::words64(1, &[5]).bytes();
        other.write_all(&reply).expect("sent");
        let came = peer.ask(&Message::new(1), &[]).expect("a reply");
        assert_eq!(came.word(), Some(5));
        drop(other);
        assert!(matches!(peer.reply(), Err(Failure::HungUp { .. })));
        peer.wait_for_hang_up(PATIENCE).expect("hung up");
    }
}
