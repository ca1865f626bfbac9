// SPDX-License-Identifier: Apache-2.0
//! The page request queue of an IOMMU: a ring in memory into which the hardware
//! writes page request messages, and from which its driver reads them (VPRI 2.1,
//! step 6).
//!
//! Descriptors have the layout of VT-d's, of 32 bytes:
//! ```text
//!   word 0    63 … 54 │ 53  52 │ 51 … 32 │ 31 … 16 │ 15 … 10 │    9    │   8   │ 7 … 0
//!             0       │ pm exe │ PASID   │ device  │ 0       │ private │ PASID │ type 1
//!   word 1    63 ………………………………… 12 │ 11 ……… 3 │ 2 │ 1 │ 0
//!             page number           │ PRG index │ L │ W │ R        L: last of its group
//!   word 2, 3   private data, if bit 9 says so: here the time of sending, and 0
//! ```
//! The hardware owns the tail, software the head, each counting descriptors. The
//! status register has two bits. *Pending* (PPR) is set by the hardware when it
//! stores a descriptor; if the bit was clear, it raises an interrupt. Software
//! clears the bit *before* it reads the tail, so later messages interrupt again.
//! *Overflow* (PRO) is set when there is no room. Until software clears it, all
//! messages are dropped; for the last message of a group the hardware itself sends
//! the answer.

use super::interrupt::Interrupt;
use pagetide_addr::{Access, FilePage, PAGE_BYTES, PAGE_SHIFT, to_usize};
use std::{
    io,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: u64 = 32;
/// Page request groups that a device can distinguish: the index has 9 bits.
pub const GROUPS_MAX: u16 = 1 << 9;
/// Largest order of a queue: VT-d's register field has 4 bits, of which Linux uses 4 (64 KiB).
pub const ORDER_MAX: u32 = 8;

const TYPE_PAGE_REQUEST: u64 = 1;
const TYPE_MASK: u64 = 0xff;
const HAS_PASID: u64 = 1 << 8;
const HAS_PRIVATE: u64 = 1 << 9;
const DEVICE_SHIFT: u32 = 16;
const EXECUTE: u64 = 1 << 52;
const PRIVILEGED: u64 = 1 << 53;
const READ: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const LAST: u64 = 1 << 2;
const GROUP_SHIFT: u32 = 3;

const PENDING: u32 = 1 << 0;
const OVERFLOW: u32 = 1 << 1;

/// Id of a device on its bus (bus, device, function).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RequesterId(pub u16);

/// Position of a message in its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Position {
    /// More messages of the group follow.
    More,
    /// It is the last: the group may be handled.
    Last,
}

/// A page request message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageMessage {
    /// The sender.
    pub device: RequesterId,
    /// Its group, below [`GROUPS_MAX`].
    pub group: u16,
    /// Whether it ends the group.
    pub position: Position,
    /// The page wanted, below 2^52.
    pub page: FilePage,
    /// The access wanted.
    pub access: Access,
    /// When it was sent, in nanoseconds of the host's monotonic clock, as private data.
    pub sent_ns: u64,
}

/// A message of the queue, as software reads it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Message {
    /// A page request.
    Page(PageMessage),
    /// The device declares that it sends no more messages of its earlier address space. Needs no
    /// answer.
    StopMarker(RequesterId),
    /// A message that this software does not serve: an execute or privileged request, one with a
    /// PASID, or of an unknown type.
    Unsupported {
        /// The sender.
        device: RequesterId,
        /// Its group.
        group: u16,
        /// An answer is due if it is the last.
        position: Position,
    },
}

/// A message as 32 bytes.
pub type Descriptor = [u64; 4];

impl PageMessage {
    /// The message as the device sends it.
    #[must_use]
    pub fn encode(&self) -> Descriptor {
        let access = match self.access {
            Access::Read => READ,
            Access::Write => READ | WRITE,
        };
        let last = match self.position {
            Position::More => 0,
            Position::Last => LAST,
        };
        [
            TYPE_PAGE_REQUEST | HAS_PRIVATE | u64::from(self.device.0) << DEVICE_SHIFT,
            self.page.0 << PAGE_SHIFT
                | u64::from(self.group % GROUPS_MAX) << GROUP_SHIFT
                | last
                | access,
            self.sent_ns,
            0,
        ]
    }
}

impl Message {
    /// Decodes any 32 bytes; invalid contents become [`Message::Unsupported`].
    #[must_use]
    pub fn decode(words: Descriptor) -> Self {
        let device = RequesterId(low_u16(words[0] >> DEVICE_SHIFT));
        let group = low_u16(words[1] >> GROUP_SHIFT) % GROUPS_MAX;
        let position = if words[1] & LAST == 0 {
            Position::More
        } else {
            Position::Last
        };
        let asks = words[1] & (READ | WRITE) != 0;
        if words[0] & TYPE_MASK != TYPE_PAGE_REQUEST
            || words[0] & (HAS_PASID | EXECUTE | PRIVILEGED) != 0
            || (!asks && position == Position::More)
        {
            return Self::Unsupported {
                device,
                group,
                position,
            };
        }
        if !asks {
            return Self::StopMarker(device);
        }
        Self::Page(PageMessage {
            device,
            group,
            position,
            page: FilePage(words[1] >> PAGE_SHIFT),
            access: if words[1] & WRITE == 0 {
                Access::Read
            } else {
                Access::Write
            },
            sent_ns: if words[0] & HAS_PRIVATE == 0 {
                0
            } else {
                words[2]
            },
        })
    }
}

const fn low_u16(word: u64) -> u16 {
    let [low, high, ..] = word.to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// What happened to a message that reached the IOMMU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Stored {
    /// Software will find it.
    Stored,
    /// There was no room, or an overflow is pending: it is lost.
    Dropped,
}

/// Counters of the queue.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct QueueCounts {
    /// Messages put into the ring.
    pub stored: u64,
    /// Messages lost.
    pub dropped: u64,
    /// Number of overflows.
    pub overflows: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct PageRequestQueue {
    ring: Box<[[AtomicU64; 4]]>,
    head: AtomicU64,
    tail: AtomicU64,
    status: AtomicU32,
    /// Held by the hardware while it stores a message, as the IOMMU takes one at a time from its bus.
    bus: Mutex<QueueCounts>,
    interrupt: Interrupt,
}

impl PageRequestQueue {
    /// An empty queue of 2^`order` pages of 4 KiB, at most [`ORDER_MAX`].
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub fn new(order: u32) -> io::Result<Self> {
        let entries = (PAGE_BYTES << order.min(ORDER_MAX)) / DESCRIPTOR_BYTES;
        Ok(Self {
            ring: (0..entries).map(|_| Default::default()).collect(),
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            status: AtomicU32::new(0),
            bus: Mutex::default(),
            interrupt: Interrupt::new()?,
        })
    }

    /// The interrupt by which the hardware calls its driver.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    pub fn counts(&self) -> QueueCounts {
        *self.bus.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hardware: a message has arrived.
    pub fn put(&self, words: Descriptor) -> Stored {
        let mut counts = self.bus.lock().unwrap_or_else(PoisonError::into_inner);
        let entries = self.ring.len() as u64;
        let tail = self.tail.load(Ordering::Relaxed);
        // Acquire: software is done with the entries before its head (pairs with `done`).
        let used = tail - self.head.load(Ordering::Acquire);
        let stands = self.status.load(Ordering::Acquire) & OVERFLOW != 0;
        // One entry stays empty, as in every ring whose registers wrap.
        if stands || used + 1 >= entries {
            counts.dropped += 1;
            if !stands {
                counts.overflows += 1;
                self.raise(OVERFLOW);
            }
            return Stored::Dropped;
        }
        for (cell, word) in self.entry(tail).iter().zip(words) {
            cell.store(word, Ordering::Relaxed);
        }
        counts.stored += 1;
        // Release: a thread that reads this tail can read the entry (pairs with `take`).
        self.tail.store(tail + 1, Ordering::Release);
        self.raise(PENDING);
        Stored::Stored
    }

    fn raise(&self, bit: u32) {
        // Either bit makes a page request event; while one is pending, there is no further event.
        if self.status.fetch_or(bit | PENDING, Ordering::AcqRel) & PENDING == 0 {
            self.interrupt.raise();
        }
    }

    /// Software: clears the pending bit. Later messages interrupt again.
    pub fn acknowledge(&self) {
        self.status.fetch_and(!PENDING, Ordering::AcqRel);
    }

    /// Software: appends the current messages to `into`. The head does not move until
    /// [`Self::done`].
    pub fn read(&self, into: &mut Vec<Message>) -> u64 {
        let tail = self.tail.load(Ordering::Acquire);
        for position in self.head.load(Ordering::Relaxed)..tail {
            let words = self.entry(position).each_ref();
            into.push(Message::decode(words.map(|w| w.load(Ordering::Relaxed))));
        }
        tail
    }

    /// Software: all messages before `tail` are handled.
    pub fn done(&self, tail: u64) {
        self.head.store(tail, Ordering::Release);
    }

    /// Software: true if messages were lost and the queue takes none until the overflow is cleared.
    pub fn has_overflown(&self) -> bool {
        self.status.load(Ordering::Acquire) & OVERFLOW != 0
    }

    /// Software: accepts messages again, if all stored ones are handled. `forget` is called before
    /// the first new one can come.
    pub fn clear_overflow(&self, forget: impl FnOnce()) -> bool {
        // Nothing is stored while the overflow is pending, so the tail cannot move.
        let all = self.tail.load(Ordering::Acquire) == self.head.load(Ordering::Relaxed);
        if all {
            forget();
            self.status.fetch_and(!OVERFLOW, Ordering::AcqRel);
        }
        all
    }

    fn entry(&self, position: u64) -> &[AtomicU64; 4] {
        &self.ring[to_usize(position % self.ring.len() as u64)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(page: u64, position: Position) -> PageMessage {
        PageMessage {
            device: RequesterId(0xbeef),
            group: 0x1a5,
            position,
            page: FilePage(page),
            access: Access::Write,
            sent_ns: 77,
        }
    }

    #[test]
    fn message_comes_out_of_its_words_as_it_went_in() {
        for position in [Position::More, Position::Last] {
            for access in [Access::Read, Access::Write] {
                let sent = PageMessage {
                    access,
                    ..message((1 << 52) - 1, position)
                };
                assert_eq!(Message::decode(sent.encode()), Message::Page(sent));
            }
        }
        let words = message(0x1234, Position::Last).encode();
        assert_eq!(words[0], 0xbeef_0201);
        assert_eq!(words[1], 0x1234 << 12 | 0x1a5 << 3 | 0b111);
    }

    #[test]
    fn any_words_are_taken_for_something_and_what_is_not_served_says_so() {
        let device = RequesterId(0xbeef);
        let [first, second, ..] = message(5, Position::Last).encode();
        for bad in [
            first ^ 3,
            first | HAS_PASID,
            first | EXECUTE,
            first | PRIVILEGED,
        ] {
            let decoded = Message::decode([bad, second, 0, 0]);
            let group = 0x1a5;
            let position = Position::Last;
            assert_eq!(
                decoded,
                Message::Unsupported {
                    device,
                    group,
                    position
                }
            );
        }
        let marker = Message::decode([first, LAST, 0, 0]);
        assert_eq!(marker, Message::StopMarker(device));
        assert!(matches!(
            Message::decode([first, 0, 0, 0]),
            Message::Unsupported { .. }
        ));
        for shift in 0..64 {
            for word in [1_u64 << shift, u64::MAX << shift, u64::MAX >> shift] {
                for words in [[word; 4], [first, word, word, word]] {
                    if let Message::Page(page) = Message::decode(words) {
                        assert!(page.group < GROUPS_MAX && page.page.0 < 1 << 52);
                    }
                }
            }
        }
    }

    #[test]
    fn full_queue_drops_everything_until_software_has_caught_up_and_cleared_it() {
        let queue = PageRequestQueue::new(0).unwrap();
        let put = |page| queue.put(message(page, Position::More).encode());
        for page in 0..127 {
            assert_eq!(put(page), Stored::Stored);
        }
        assert!(!queue.has_overflown());
        assert_eq!(put(127), Stored::Dropped);
        assert!(queue.has_overflown());
        let mut taken = Vec::new();
        queue.acknowledge();
        let tail = queue.read(&mut taken);
        assert_eq!(taken.len(), 127);
        assert!(!queue.clear_overflow(|| panic!("not handled yet")));
        queue.done(tail);
        assert_eq!(
            put(128),
            Stored::Dropped,
            "there is room, but nobody cleared it"
        );
        let mut forgotten = 0;
        assert!(queue.clear_overflow(|| forgotten += 1));
        assert_eq!(forgotten, 1);
        assert_eq!(put(129), Stored::Stored);
        taken.clear();
        queue.read(&mut taken);
        assert_eq!(taken, [Message::Page(message(129, Position::More))]);
        let counts = queue.counts();
        assert_eq!(
            (counts.stored, counts.dropped, counts.overflows),
            (128, 2, 1)
        );
    }

    #[test]
    fn messages_interrupt_once_until_acknowledged_and_an_overflow_interrupts_too() {
        let queue = PageRequestQueue::new(0).unwrap();
        let put = || queue.put(message(1, Position::Last).encode());
        assert_eq!((put(), put()), (Stored::Stored, Stored::Stored));
        assert_eq!(queue.interrupt().take(), 1);
        queue.acknowledge();
        assert_eq!(put(), Stored::Stored);
        assert_eq!(queue.interrupt().take(), 1);
        queue.acknowledge();
        while put() == Stored::Stored {
            queue.acknowledge();
        }
        assert!(queue.interrupt().take() > 1);
        assert_eq!(put(), Stored::Dropped);
        assert_eq!(
            queue.interrupt().take(),
            0,
            "no second event for what is lost"
        );
    }
}
