// SPDX-License-Identifier: Apache-2.0
//! What a successor must know of a receive ring: which posted buffers are still held.
//!
//! # Why
//! A receive ring is served *out of order*: a buffer whose page is absent is passed over, held, and
//! filled later. When this process dies, the front end gives its successor one number, the used
//! index of the ring (QEMU has no in-flight region for network devices). With some buffers held that
//! number does not say where the avail ring is to be read next:
//!
//! ```text
//!   avail ring   │ 0 │ 1 │ 2 │ 3 │ 4 │ 5 │ …        used index = 3
//!                  ✓   H   ✓   ✓   H   ▲            a successor would begin at 3, which it would
//!                                      next = 5     fill again, and never find 1
//! ```
//! So each receive ring has a record: the buffers that are held. Nothing else is needed, since
//! every buffer taken is either in the used ring or held, and thus
//!
//! > *next* = used index + number of buffers held.
//!
//! # Terms
//! A buffer is *posted* (in the avail ring from *next* on), *held*, or *returned* (in the used
//! ring: the driver's again). Its *sequence number* counts the entries of the avail ring from the
//! beginning of the ring, in 64 bits; the low 16 are its index there. `returned` counts the entries
//! of the used ring likewise.
//!
//! # Steps, and death between any two of them
//! ```text
//!   hold     entry of the buffer := sequence number, fingerprint
//!   return   used ring entries; used index                        (the queue)
//!            entries of those that were held := free              settle
//!            returned := used index                               settle
//! ```
//! Each is one aligned store of 8 bytes, so none is ever half done, and all are ordered (Release).
//! A buffer that is returned without having been held needs no step of the record's but the last.
//!
//! * Death before or after *hold*: the buffer is posted, or held. Both are true.
//! * Death after the used index and before *returned*: the window between the two in the used ring
//!   names the buffers whose entries may be left. A successor frees them.
//! * An engine takes several buffers, for one packet or for several, held ones among them, and may hold
//!   some between those. It publishes all it has taken by one store of the used index; until
//!   then the first unpublished one is where *next* is, and a buffer held behind it is found again
//!   in the avail ring ([`next_of`]).
//!
//! *Invariant:* `returned` is up to date before a buffer is held. Otherwise a window could name a
//! buffer that the driver has posted anew since and that is held again.
//!
//! # What it is tied to
//! A record is used only for the ring that it was written for: the same RAM file, addresses and size
//! ([`Tie`]). A driver may have reset its device while nobody served it. Then the used index begins
//! at 0, the addresses may be as before, and other buffers are posted. So the record is not used if
//! the used index is beyond one ring's length of `returned`; if the avail ring still has the place
//! of a held buffer and names another there; if the descriptor of a held buffer has changed; or if
//! there are more held than the driver has posted. A driver changes nothing of a buffer that it has
//! posted (virtio 1.2, 2.7.13).
//!
//! # Hostile bytes
//! The file is ours, but other programs may have written to it, and it may be that of another
//! device. Everything in it carries a CRC that begins with that of the tie. Descriptors and rings
//! are the guest's: whatever it writes there, the worst is that its own buffers are filled twice or
//! never. [`Refusal`] tells a record of another ring, which is begun anew, from one that is
//! damaged, without which a ring in use cannot be served.

pub(crate) mod file;
mod format;
#[cfg(test)]
mod model;

pub use format::{RECORD_WORDS_MAX, record_words};

use format::{Entry, HEADER_WORDS, RETURNED_WORD, entry_at};
use std::sync::atomic::{Ordering, fence};

/// Words of 8 bytes, read and written whole. All loads are Acquire and all stores Release.
pub trait Words {
    /// How many there are.
    fn count(&self) -> usize;
    /// The word at `at`, which is less than [`Self::count`].
    fn load(&self, at: usize) -> u64;
    /// Writes it.
    fn store(&self, at: usize, word: u64);
}

/// A ring as the driver has left it. Indices of descriptors are less than its size.
pub trait Ring {
    /// Index of the used ring.
    fn used_index(&self) -> u16;
    /// Head of the entry of the used ring at that index.
    fn used_head(&self, index: u16) -> u32;
    /// Index of the avail ring.
    fn avail_index(&self) -> u16;
    /// Head of the entry of the avail ring at that index.
    fn avail_head(&self, index: u16) -> u16;
    /// The descriptor with which a chain begins.
    fn descriptor(&self, head: u16) -> [u8; 16];
}

/// The ring that a record is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tie {
    /// Device number of the RAM file that has the ring.
    pub dev: u64,
    /// Its inode.
    pub ino: u64,
    /// Guest-physical address of the descriptors.
    pub descriptors: u64,
    /// Of the avail ring.
    pub avail: u64,
    /// Of the used ring.
    pub used: u64,
    /// Number of the queue.
    pub queue: u16,
    /// Descriptors: a power of two, no more than 32,768.
    pub size: u16,
}

/// Why a record is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Nothing was ever recorded in it, or what was recorded is over.
    #[error("it is empty")]
    Empty,
    /// It is for another ring: one that the driver has set up anew, or another device's.
    #[error("it is for another ring: {0} differs")]
    Another(&'static str),
    /// It is neither.
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
    /// A later version of this program has written it.
    #[error("it has version {0}, which this program does not know")]
    Version(u16),
}

impl Refusal {
    /// True if a ring whose used index is `used` can be served without the record: nothing of that
    /// ring is held, or it has just been set up.
    #[must_use]
    pub fn is_harmless(self, used: u16) -> bool {
        match self {
            Self::Empty | Self::Another(_) => true,
            // Whatever is held was taken from the beginning of the avail ring, and is posted again
            // if that is read from the beginning.
            Self::Damaged(_) | Self::Version(_) => used == 0,
        }
    }
}

/// What a predecessor has left of a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// Heads of the buffers that are held, oldest first.
    pub held: Vec<u16>,
    /// Where the avail ring is to be read next.
    pub next_avail: u16,
}

/// See the module documentation.
#[derive(Debug)]
pub struct HeldRecord<W> {
    words: W,
    /// CRC of the header.
    tie_crc: u32,
    size: u16,
    /// Entries of the used ring, from its beginning.
    returned: u64,
}

impl<W: Words> HeldRecord<W> {
    /// Begins a record for a ring that is served in order up to now.
    ///
    /// # Errors
    /// The words, if they are too few or the size of the ring is not one.
    pub fn begin(words: W, tie: &Tie, used_index: u16) -> Result<Self, W> {
        if !tie.size.is_power_of_two() || words.count() < record_words(tie.size) {
            return Err(words);
        }
        let header = format::header(tie);
        let this = Self {
            words,
            tie_crc: format::header_crc(&header),
            size: tie.size,
            returned: u64::from(used_index),
        };
        // Until its first word is there again, it is empty.
        this.words.store(0, 0);
        for head in 0..tie.size {
            this.free(head);
        }
        this.store_returned();
        for (at, word) in header.iter().enumerate().rev() {
            this.words.store(at, *word);
        }
        Ok(this)
    }

    /// Takes over what a predecessor has left of the ring that `tie` names.
    ///
    /// # Errors
    /// The words, unchanged, and why their record is not used.
    pub fn take_over(words: W, tie: &Tie, ring: &impl Ring) -> Result<(Self, Left), (W, Refusal)> {
        let read = match Reading::of(&words, tie, ring) {
            Ok(read) => read,
            Err(refusal) => return Err((words, refusal)),
        };
        let this = Self {
            words,
            tie_crc: read.tie_crc,
            size: tie.size,
            returned: read.returned,
        };
        for head in read.over {
            this.free(head);
        }
        this.store_returned();
        Ok((this, read.left))
    }

    /// Records that a buffer is held which the engine has come upon at `index` of the avail ring.
    /// All that was returned is settled.
    pub fn hold(&mut self, head: u16, index: u16, descriptor: &[u8; 16]) {
        debug_assert!(head < self.size, "the engine has checked the head");
        let ahead = index.wrapping_sub(low(self.returned));
        let entry = Entry::new(self.returned + u64::from(ahead), descriptor);
        let [first, second] = entry.words(self.tie_crc, head);
        let at = entry_at(head);
        // The second tells nothing without the first.
        self.words.store(at + 1, second);
        self.words.store(at, first);
    }

    /// Records that the used index is `used_index` now, and that the buffers of `held` are among
    /// those that are returned; no other buffer that is held is.
    pub fn settle(&mut self, held: impl IntoIterator<Item = u16>, used_index: u16) {
        for head in held {
            debug_assert!(head < self.size, "the engine has checked the head");
            self.free(head);
        }
        self.returned += u64::from(used_index.wrapping_sub(low(self.returned)));
        self.store_returned();
    }

    /// Empties it: nothing of the ring is held, and its next user is told the avail index.
    pub fn end(self) {
        self.words.store(0, 0);
    }

    /// The record's words.
    pub fn words(&self) -> &W {
        &self.words
    }

    fn free(&self, head: u16) {
        self.words.store(entry_at(head), 0);
    }

    fn store_returned(&self) {
        let word = format::seal_returned(self.tie_crc, self.returned);
        self.words.store(RETURNED_WORD, word);
    }
}

/// A record that has been read and found right, before anything is written.
struct Reading {
    tie_crc: u32,
    returned: u64,
    left: Left,
    /// Heads that have an entry and are not held: they are returned, or posted.
    over: Vec<u16>,
}

impl Reading {
    fn of(words: &impl Words, tie: &Tie, ring: &impl Ring) -> Result<Self, Refusal> {
        let tie_crc = format::check_header(words, tie)?;
        let before = format::open_returned(tie_crc, words.load(RETURNED_WORD))
            .ok_or(Refusal::Damaged("the count of returned buffers"))?;
        let since = ring.used_index().wrapping_sub(low(before));
        if since > tie.size {
            return Err(Refusal::Another("the used index"));
        }
        let returned = before + u64::from(since);
        let window = (0..since).map(|n| ring.used_head(low(before).wrapping_add(n)));
        let mut is_over = vec![false; usize::from(tie.size)];
        for head in window {
            // A guest may write there what it likes.
            if let Some(is_over) = usize::try_from(head).ok().and_then(|h| is_over.get_mut(h)) {
                *is_over = true;
            }
        }
        let mut over = Vec::new();
        let mut held = Vec::new();
        for head in 0..tie.size {
            let at = entry_at(head);
            let first = words.load(at);
            if first == 0 {
                continue;
            }
            if is_over[usize::from(head)] {
                over.push(head);
                continue;
            }
            let entry = Entry::open(tie_crc, head, [first, words.load(at + 1)])
                .ok_or(Refusal::Damaged("an entry"))?;
            held.push((entry, head));
        }
        held.sort_unstable_by_key(|(entry, _)| entry.sequence);
        let next = next_of(returned, held.iter().map(|(entry, _)| entry.sequence));
        let posted = held.split_off(held.partition_point(|(entry, _)| entry.sequence < next));
        over.extend(posted.into_iter().map(|(_, head)| head));
        check_held(&held, returned, ring, tie.size)?;
        Ok(Self {
            tie_crc,
            returned,
            left: Left {
                held: held.into_iter().map(|(_, head)| head).collect(),
                next_avail: low(next),
            },
            over,
        })
    }
}

/// The sequence number of the first buffer that is still posted, given how many are returned and
/// the sequence numbers of those held, in order. Every buffer before it is returned or held, and none
/// behind it is returned. A buffer held behind one that was taken and not returned does not count: it
/// is posted still.
fn next_of(returned: u64, held: impl Iterator<Item = u64>) -> u64 {
    held.fold(returned, |next, sequence| {
        next + u64::from(sequence <= next)
    })
}

/// Checks that what is held is of this ring.
fn check_held(
    held: &[(Entry, u16)],
    returned: u64,
    ring: &impl Ring,
    size: u16,
) -> Result<(), Refusal> {
    let posted = ring.avail_index().wrapping_sub(low(returned));
    if usize::from(posted) < held.len() || posted > size {
        return Err(Refusal::Another("the avail index"));
    }
    for (entry, head) in held {
        if ring.avail_head(low(entry.sequence)) != *head
            && is_unreplaced(entry.sequence, returned, ring, size)
        {
            return Err(Refusal::Another("the avail ring"));
        }
        if !entry.is_for(&ring.descriptor(*head)) {
            return Err(Refusal::Another("a held buffer"));
        }
    }
    Ok(())
}

/// Whether the avail ring's entry with that number, which was read before, is sure to have been read as the driver wrote
/// it. Later entries replace that of a buffer held for long; the driver posts meanwhile, and writes an entry before
/// the index that counts it.
fn is_unreplaced(sequence: u64, returned: u64, ring: &impl Ring, size: u16) -> bool {
    // The index is read after the entry.
    fence(Ordering::Acquire);
    let posted = ring.avail_index().wrapping_sub(low(returned));
    // An index that runs backwards is a driver's that does anything.
    let ahead = (returned + u64::from(posted)).checked_sub(sequence);
    ahead.is_some_and(|ahead| ahead < u64::from(size))
}

/// The index of a ring at which the entry with that number is.
#[expect(
    clippy::cast_possible_truncation,
    reason = "an index is the low bits of the number"
)]
fn low(sequence: u64) -> u16 {
    sequence as u16
}

const _: () = assert!(RETURNED_WORD >= HEADER_WORDS);
