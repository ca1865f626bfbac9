// SPDX-License-Identifier: Apache-2.0
//! The messages that lead a new session to where a [`Record`] says that an earlier one was.
//!
//! They are sent through a socket of our own and obeyed by the ordinary back end, so there is one way in which a
//! session comes to be, and what the record says is checked as a front end's messages are. The numbers and layouts
//! are those of the vhost-user specification.

use crate::{
    backend::Offer,
    record::Record,
    ring::{Enabled, RingSettings},
    session::F_PROTOCOL_FEATURES,
};
use rustix::{
    cmsg_space,
    io::Errno,
    net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg},
};
use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
};

/// Descriptors of a message, those of a memory table: as many as the reader of messages takes.
const FDS_MAX: usize = 32;
/// Regions of a memory table.
const TABLE_REGIONS_MAX: usize = FDS_MAX;
/// `VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS`: memory comes region by region.
const F_CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
/// Version 1, no answer wanted.
const FLAGS: u32 = 1;

/// Why a session cannot be led to where it was.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// This program lacks what the front end has negotiated with another one. No front end can bring this about.
    #[error("the device does not offer {what}, which the front end has accepted")]
    NotOffered {
        /// What it lacks.
        what: String,
    },
    /// The device refuses. A front end can bring this about: it can cut its memory short, for example.
    #[error("the device does not obey {message}, which it did before: {reason}")]
    Refused {
        /// The message.
        message: &'static str,
        /// What the device says.
        reason: String,
    },
    /// A socket failed.
    #[error("a connection cannot be resumed: {0}")]
    Socket(#[from] io::Error),
}

/// A message as a front end sends it.
pub(crate) struct Message<'a> {
    pub(crate) name: &'static str,
    number: u32,
    body: Vec<u8>,
    fds: Vec<BorrowedFd<'a>>,
}

impl<'a> Message<'a> {
    fn new(name: &'static str, number: u32) -> Self {
        Self {
            name,
            number,
            body: Vec::new(),
            fds: Vec::new(),
        }
    }

    fn long(mut self, value: u64) -> Self {
        self.body.extend(value.to_ne_bytes());
        self
    }

    fn word(mut self, value: u32) -> Self {
        self.body.extend(value.to_ne_bytes());
        self
    }

    fn half(mut self, value: u16) -> Self {
        self.body.extend(value.to_ne_bytes());
        self
    }

    fn with(mut self, fd: &'a impl AsFd) -> Self {
        self.fds.push(fd.as_fd());
        self
    }

    fn region(self, region: &'a (crate::RegionShape, std::os::fd::OwnedFd)) -> Self {
        let (shape, file) = region;
        self.long(shape.gpa.0)
            .long(shape.bytes)
            .long(shape.frontend.0)
            .long(shape.file_offset)
            .with(file)
    }

    /// Sends it, with its descriptors.
    pub(crate) fn send(&self, to: &UnixStream) -> io::Result<()> {
        let bytes = u32::try_from(self.body.len()).map_err(io::Error::other)?;
        let mut whole = Vec::with_capacity(12 + self.body.len());
        for word in [self.number, FLAGS, bytes] {
            whole.extend(word.to_ne_bytes());
        }
        whole.extend(&self.body);
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !self.fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&self.fds)) {
            return Err(io::Error::other("too many descriptors for a message"));
        }
        let sent = sendmsg(
            to,
            &[IoSlice::new(&whole)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )?;
        match sent == whole.len() {
            true => Ok(()),
            false => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

/// Reads what the back end has answered, if it has.
pub(crate) fn forget_answer(front: &UnixStream) -> io::Result<()> {
    let mut answer = [0_u8; 256];
    match recv(front, &mut answer[..], RecvFlags::DONTWAIT) {
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether a device that offers this can go on with the session at all.
pub(crate) fn check(record: &Record, offer: &Offer) -> Result<(), ReplayError> {
    let lacks = |what: String| Err(ReplayError::NotOffered { what });
    let features = record.features & !offer.features;
    if features != 0 {
        return lacks(format!("features {features:#x}"));
    }
    let protocol = record.protocol_features.unwrap_or(0) & !offer.protocol_features.bits();
    if protocol != 0 {
        return lacks(format!("protocol features {protocol:#x}"));
    }
    if record.rings.len() > usize::from(offer.queue_count) {
        return lacks(format!("{} queues", record.rings.len()));
    }
    let largest = record.rings.iter().map(|ring| ring.size).max().unwrap_or(0);
    match largest > offer.queue_size_max {
        true => lacks(format!("queues of {largest} entries")),
        false => Ok(()),
    }
}

/// Sets no feature but the one that each front end has negotiated which asks for the rest of the protocol.
pub(crate) fn prelude() -> Message<'static> {
    Message::new("SET_FEATURES", 2).long(F_PROTOCOL_FEATURES)
}

/// The messages, in the order in which a front end sends them.
pub(crate) fn messages(record: &Record) -> Vec<Message<'_>> {
    let mut all = vec![
        Message::new("SET_OWNER", 3),
        Message::new("GET_FEATURES", 1),
    ];
    if record.features != 0 {
        all.push(Message::new("SET_FEATURES", 2).long(record.features));
    }
    if let Some(features) = record.protocol_features {
        all.push(Message::new("GET_PROTOCOL_FEATURES", 15));
        all.push(Message::new("SET_PROTOCOL_FEATURES", 16).long(features));
    }
    if let Some(inflight) = &record.inflight {
        let message = Message::new("SET_INFLIGHT_FD", 32)
            .long(inflight.bytes)
            .long(inflight.file_offset)
            .half(inflight.queues)
            .half(inflight.queue_size)
            .word(0);
        all.push(message.with(&inflight.file));
    }
    memory(record, &mut all);
    for (queue, ring) in (0..).zip(&record.rings) {
        ring_messages(queue, ring, &mut all);
        // Without that feature all rings are enabled, and nobody may say so.
        if ring.enabled == Enabled::Yes && record.features & F_PROTOCOL_FEATURES != 0 {
            all.push(ring_state("SET_VRING_ENABLE", 18, queue, 1));
        }
    }
    all
}

fn memory<'a>(record: &'a Record, all: &mut Vec<Message<'a>>) {
    let regions = &record.memory;
    let one_by_one = record.protocol_features.unwrap_or(0) & F_CONFIGURE_MEM_SLOTS != 0;
    if one_by_one || regions.len() > TABLE_REGIONS_MAX {
        let added = |region| Message::new("ADD_MEM_REG", 37).long(0).region(region);
        all.extend(regions.iter().map(added));
    } else if let Ok(count) = u32::try_from(regions.len())
        && count > 0
    {
        let table = Message::new("SET_MEM_TABLE", 5).word(count).word(0);
        all.push(regions.iter().fold(table, Message::region));
    }
}

fn ring_state<'a>(name: &'static str, number: u32, queue: u32, value: u32) -> Message<'a> {
    Message::new(name, number).word(queue).word(value)
}

fn ring_messages<'a>(queue: u32, ring: &'a RingSettings, all: &mut Vec<Message<'a>>) {
    let state = |name, number, value| ring_state(name, number, queue, value);
    if ring.size > 0 {
        all.push(state("SET_VRING_NUM", 8, ring.size.into()));
    }
    all.push(state("SET_VRING_BASE", 10, ring.base.into()));
    if let Some(at) = ring.addresses {
        let message = state("SET_VRING_ADDR", 9, 0)
            .long(at.descriptors.0)
            .long(at.used.0)
            .long(at.avail.0);
        all.push(message.long(0));
    }
    if let Some(call) = &ring.call {
        all.push(
            Message::new("SET_VRING_CALL", 13)
                .long(queue.into())
                .with(call),
        );
    }
    if let Some(error) = &ring.error {
        all.push(
            Message::new("SET_VRING_ERR", 14)
                .long(queue.into())
                .with(error),
        );
    }
    if let Some(kick) = &ring.kick {
        all.push(
            Message::new("SET_VRING_KICK", 12)
                .long(queue.into())
                .with(&**kick),
        );
    }
}
