// SPDX-License-Identifier: Apache-2.0
//! vhost-user messages as bytes, valid or not.
//!
//! The encoding is our own, so that each field can be wrong: a library for the protocol would
//! refuse to send most of what a back end has to survive. A message is a header of three words of
//! 32 bits (request, flags, size) and a body; descriptors go beside it (vhost-user specification,
//! 'Message Specification').

/// Request numbers of the front end.
pub mod request {
    /// `VHOST_USER_GET_FEATURES`
    pub const GET_FEATURES: u32 = 1;
    /// `VHOST_USER_SET_FEATURES`
    pub const SET_FEATURES: u32 = 2;
    /// `VHOST_USER_SET_OWNER`
    pub const SET_OWNER: u32 = 3;
    /// `VHOST_USER_RESET_OWNER`
    pub const RESET_OWNER: u32 = 4;
    /// `VHOST_USER_SET_MEM_TABLE`
    pub const SET_MEM_TABLE: u32 = 5;
    /// `VHOST_USER_SET_LOG_BASE`
    pub const SET_LOG_BASE: u32 = 6;
    /// `VHOST_USER_SET_LOG_FD`
    pub const SET_LOG_FD: u32 = 7;
    /// `VHOST_USER_SET_VRING_NUM`
    pub const SET_VRING_NUM: u32 = 8;
    /// `VHOST_USER_SET_VRING_ADDR`
    pub const SET_VRING_ADDR: u32 = 9;
    /// `VHOST_USER_SET_VRING_BASE`
    pub const SET_VRING_BASE: u32 = 10;
    /// `VHOST_USER_GET_VRING_BASE`
    pub const GET_VRING_BASE: u32 = 11;
    /// `VHOST_USER_SET_VRING_KICK`
    pub const SET_VRING_KICK: u32 = 12;
    /// `VHOST_USER_SET_VRING_CALL`
    pub const SET_VRING_CALL: u32 = 13;
    /// `VHOST_USER_SET_VRING_ERR`
    pub const SET_VRING_ERR: u32 = 14;
    /// `VHOST_USER_GET_PROTOCOL_FEATURES`
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    /// `VHOST_USER_SET_PROTOCOL_FEATURES`
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    /// `VHOST_USER_GET_QUEUE_NUM`
    pub const GET_QUEUE_NUM: u32 = 17;
    /// `VHOST_USER_SET_VRING_ENABLE`
    pub const SET_VRING_ENABLE: u32 = 18;
    /// `VHOST_USER_GET_CONFIG`
    pub const GET_CONFIG: u32 = 24;
    /// `VHOST_USER_SET_CONFIG`
    pub const SET_CONFIG: u32 = 25;
    /// `VHOST_USER_GET_INFLIGHT_FD`
    pub const GET_INFLIGHT_FD: u32 = 31;
    /// `VHOST_USER_SET_INFLIGHT_FD`
    pub const SET_INFLIGHT_FD: u32 = 32;
    /// `VHOST_USER_RESET_DEVICE`
    pub const RESET_DEVICE: u32 = 34;
    /// `VHOST_USER_GET_MAX_MEM_SLOTS`
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    /// `VHOST_USER_ADD_MEM_REG`
    pub const ADD_MEM_REG: u32 = 37;
    /// `VHOST_USER_REM_MEM_REG`
    pub const REM_MEM_REG: u32 = 38;
}

/// Version bits that every message has.
pub const VERSION: u32 = 1;
/// Flag of a reply.
pub const REPLY: u32 = 1 << 2;
/// Flag that asks for an acknowledgement.
pub const NEED_REPLY: u32 = 1 << 3;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 12;
/// Bit of a ring's index in the messages with descriptors: there is none.
pub const NO_DESCRIPTOR: u64 = 1 << 8;

/// `VIRTIO_RING_F_INDIRECT_DESC`
pub const F_INDIRECT: u64 = 1 << 28;
/// `VIRTIO_RING_F_EVENT_IDX`
pub const F_EVENT_IDX: u64 = 1 << 29;
/// `VHOST_USER_F_PROTOCOL_FEATURES`
pub const F_PROTOCOL: u64 = 1 << 30;
/// `VIRTIO_F_VERSION_1`
pub const F_VERSION_1: u64 = 1 << 32;

/// Protocol features: MQ, REPLY_ACK, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE, CONFIGURE_MEM_SLOTS.
pub const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15;

/// A message, of which each part may be wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Request number.
    pub request: u32,
    /// Flags, version included.
    pub flags: u32,
    /// Size field; by default the body's length.
    pub size: Option<u32>,
    /// What follows the header.
    pub body: Vec<u8>,
}

impl Message {
    /// A message without a body.
    #[must_use]
    pub fn new(request: u32) -> Self {
        Self {
            request,
            flags: VERSION,
            size: None,
            body: Vec::new(),
        }
    }

    /// With words of 32 bits for a body.
    #[must_use]
    pub fn words32(request: u32, words: &[u32]) -> Self {
        Self {
            body: words.iter().flat_map(|word| word.to_le_bytes()).collect(),
            ..Self::new(request)
        }
    }

    /// With words of 64 bits for a body.
    #[must_use]
    pub fn words64(request: u32, words: &[u64]) -> Self {
        Self {
            body: words.iter().flat_map(|word| word.to_le_bytes()).collect(),
            ..Self::new(request)
        }
    }

    /// With this body.
    #[must_use]
    pub fn with_body(self, body: Vec<u8>) -> Self {
        Self { body, ..self }
    }

    /// With this in its size field.
    #[must_use]
    pub fn with_size(self, size: u32) -> Self {
        Self {
            size: Some(size),
            ..self
        }
    }

    /// With these flags.
    #[must_use]
    pub fn with_flags(self, flags: u32) -> Self {
        Self { flags, ..self }
    }

    /// Asks for an acknowledgement.
    #[must_use]
    pub fn acked(self) -> Self {
        let flags = self.flags | NEED_REPLY;
        self.with_flags(flags)
    }

    /// Its encoding on the socket.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let of_body = u32::try_from(self.body.len()).unwrap_or(u32::MAX);
        let size = self.size.unwrap_or(of_body);
        let words = [self.request, self.flags, size];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(&self.body);
        bytes
    }
}

/// One region of guest RAM as a message names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Where the guest sees it.
    pub gpa: u64,
    /// Length.
    pub bytes: u64,
    /// Where the front end has it mapped.
    pub va: u64,
    /// Offset in its file.
    pub offset: u64,
}

impl Region {
    fn words(&self) -> [u64; 4] {
        [self.gpa, self.bytes, self.va, self.offset]
    }
}

/// `SET_MEM_TABLE`; `count` is the number in the message, whatever the number of regions.
#[must_use]
pub fn mem_table(count: u32, regions: &[Region]) -> Message {
    let mut body = Vec::from(count.to_le_bytes());
    body.extend([0; 4]);
    for region in regions {
        body.extend(region.words().iter().flat_map(|word| word.to_le_bytes()));
    }
    Message::new(request::SET_MEM_TABLE).with_body(body)
}

/// `ADD_MEM_REG` or `REM_MEM_REG`.
#[must_use]
pub fn mem_region(request: u32, region: &Region) -> Message {
    let [gpa, bytes, va, offset] = region.words();
    Message::words64(request, &[0, gpa, bytes, va, offset])
}

/// Where the parts of a ring are, as the front end has them mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingAddresses {
    /// Descriptor table.
    pub descriptors: u64,
    /// Used ring.
    pub used: u64,
    /// Avail ring.
    pub avail: u64,
}

/// `SET_VRING_ADDR`.
#[must_use]
pub fn vring_addr(queue: u32, at: RingAddresses) -> Message {
    let mut body = Message::words32(0, &[queue, 0]).body;
    let words = [at.descriptors, at.used, at.avail, 0];
    body.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    Message::new(request::SET_VRING_ADDR).with_body(body)
}

/// `GET_CONFIG` or `SET_CONFIG` with a body of `room` bytes that claims `size` of them at `offset`.
#[must_use]
pub fn config(request: u32, offset: u32, size: u32, room: usize) -> Message {
    let mut body = Message::words32(0, &[offset, size, 0]).body;
    body.extend(vec![0; room]);
    Message::new(request).with_body(body)
}

/// An in-flight region as a message names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inflight {
    /// Its length.
    pub bytes: u64,
    /// Where in the file it begins.
    pub offset: u64,
    /// Its queues.
    pub queues: u16,
    /// Descriptors of each.
    pub size: u16,
}

impl Inflight {
    /// `GET_INFLIGHT_FD` or `SET_INFLIGHT_FD`.
    #[must_use]
    pub fn message(&self, request: u32) -> Message {
        let mut body = Message::words64(0, &[self.bytes, self.offset]).body;
        body.extend(self.queues.to_le_bytes());
        body.extend(self.size.to_le_bytes());
        // The C structure's padding is part of the message.
        body.extend([0; 4]);
        Message::new(request).with_body(body)
    }

    /// From the body of a reply; `None` if that is too short.
    #[must_use]
    pub fn parse(body: &[u8]) -> Option<Self> {
        let word = |at: usize| {
            body.get(at..)?
                .first_chunk()
                .copied()
                .map(u64::from_le_bytes)
        };
        let half = |at: usize| {
            body.get(at..)?
                .first_chunk()
                .copied()
                .map(u16::from_le_bytes)
        };
        Some(Self {
            bytes: word(0)?,
            offset: word(8)?,
            queues: half(16)?,
            size: half(18)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_is_three_words_and_its_body_unless_it_lies() {
        let message = Message::words64(request::SET_FEATURES, &[7]).acked();
        let bytes = message.bytes();
        assert_eq!(bytes[..12], [2, 0, 0, 0, 9, 0, 0, 0, 8, 0, 0, 0]);
        assert_eq!(bytes[12..], 7_u64.to_le_bytes());
        let lie = message.with_size(u32::MAX).bytes();
        assert_eq!(lie[8..12], [0xff; 4]);
        assert_eq!(lie.len(), bytes.len());
    }

    #[test]
    fn inflight_region_comes_back_as_it_went() {
        let region = Inflight {
            bytes: 4096,
            offset: 8,
            queues: 3,
            size: 128,
        };
        let message = region.message(request::SET_INFLIGHT_FD);
        assert_eq!(Inflight::parse(&message.body), Some(region));
        // The last four bytes are padding.
        assert_eq!(Inflight::parse(&message.body[5..]), None);
    }
}
