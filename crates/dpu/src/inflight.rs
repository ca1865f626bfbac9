// SPDX-License-Identifier: Apache-2.0
//! In-flight tracking: which chains a back end had popped but not completed when it died.
//!
//! The layout is that of vhost-user for split rings (docs/interop/vhost-user.rst, 'Inflight I/O
//! tracking'), native-endian, one area per queue, padded to 64 bytes:
//!
//! ```text
//!   0   u64 features                       word 0
//!   8   u16 version = 1, u16 desc_num,     word 1
//!       u16 last_batch_head, u16 used_idx
//!   16  desc_num × { u8 inflight, 5 × pad, u16 next; u64 counter }
//! ```
//! The front end keeps this memory when our process dies and passes it back. So its content is
//! *untrusted*: every index is checked, and whatever the bytes are, at worst the guest's own
//! requests are done twice or not at all.
//!
//! # Order (death may follow any step)
//! ```text
//!   fetch:    counter = c; inflight = 1
//!   complete: next = last_batch_head; last_batch_head = head;      prepare
//!             used ring entry, used index                          (the queue)
//!             inflight = 0; used_idx = the ring's used index       finish
//! ```
//! After a death between the update of the used index and `finish`, `used_idx` differs from the
//! ring's: the last batch (one head, here) was completed and is cleared. All other heads with
//! `inflight = 1` are done again in the order of their counters. Block requests may be done twice:
//! the same data to the same place, before their completion was announced. If memory is lost in between, `finish` is
//! left out, and the device stops.

use pagetide_sys::mapping::SharedMapping;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering, fence},
};

const VERSION: u64 = 1;
const HEADER_WORDS: usize = 2;
const ENTRY_WORDS: usize = 2;
const AREA_ALIGN: u64 = 64;

const _: () = assert!(
    cfg!(target_endian = "little"),
    "the words below are laid out for little-endian hosts"
);

/// Bytes that one queue of `desc_num` descriptors occupies in the region.
#[must_use]
pub(crate) const fn area_bytes(desc_num: u16) -> u64 {
    let words = HEADER_WORDS as u64 + ENTRY_WORDS as u64 * desc_num as u64;
    (words * 8).next_multiple_of(AREA_ALIGN)
}

/// The area of one queue.
#[derive(Debug)]
pub(crate) struct InflightQueue {
    region: Arc<SharedMapping>,
    offset: u64,
    desc_num: u16,
    counter: u64,
}

/// The state that a predecessor left.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Left {
    /// Heads to be done again, in order.
    pub resubmit: Vec<u16>,
    /// Where to read the avail ring next: all earlier entries were popped.
    pub next_avail: u16,
}

impl InflightQueue {
    /// True once its file has lost the memory of the region: data read there may be zeros.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.region.is_lost()
    }

    /// The area of queue number `queue` in `region`, whose areas start at `offset` and are for
    /// `desc_num` descriptors each. `None` if it does not fit.
    pub fn new(region: Arc<SharedMapping>, offset: u64, queue: u16, desc_num: u16) -> Option<Self> {
        let bytes = area_bytes(desc_num);
        let offset = offset.checked_add(u64::from(queue).checked_mul(bytes)?)?;
        let this = Self {
            region,
            offset,
            desc_num,
            counter: 0,
        };
        this.words()?;
        Some(this)
    }

    fn words(&self) -> Option<&[AtomicU64]> {
        let count = HEADER_WORDS + ENTRY_WORDS * usize::from(self.desc_num);
        self.region.atomic_u64s(self.offset, count)
    }

    fn header(&self) -> &AtomicU64 {
        // `new` has checked that all words are there, and a mapping never shrinks.
        &self
            .words()
            .unwrap_or_else(|| unreachable!("area checked in new"))[1]
    }

    fn entry(&self, head: u16) -> Option<&[AtomicU64]> {
        let first = HEADER_WORDS + ENTRY_WORDS * usize::from(head);
        self.words()?.get(first..first + ENTRY_WORDS)
    }

    /// Finds the state that a predecessor left, given the used index in the ring, and takes over
    /// the area.
    pub fn take_over(&mut self, used_idx: u16) -> Left {
        let header = Header::from(self.header().load(Ordering::Acquire));
        if header.version != VERSION || header.desc_num != self.desc_num {
            self.wipe(used_idx);
            return Left {
                resubmit: Vec::new(),
                next_avail: used_idx,
            };
        }
        if header.used_idx != used_idx {
            if let Some(entry) = self.entry(header.last_batch_head) {
                entry[0].fetch_and(!0xff, Ordering::Relaxed);
            }
            self.write_header(header.last_batch_head, used_idx);
        }
        let mut left: Vec<(u64, u16)> = (0..self.desc_num)
            .filter_map(|head| {
                let entry = self.entry(head)?;
                let inflight = entry[0].load(Ordering::Relaxed) & 0xff == 1;
                inflight.then(|| (entry[1].load(Ordering::Relaxed), head))
            })
            .collect();
        left.sort_unstable();
        self.counter = left
            .last()
            .map_or(0, |(counter, _)| counter.wrapping_add(1));
        let popped = u16::try_from(left.len()).unwrap_or(u16::MAX);
        Left {
            resubmit: left.into_iter().map(|(_, head)| head).collect(),
            next_avail: used_idx.wrapping_add(popped),
        }
    }

    fn wipe(&self, used_idx: u16) {
        for word in self.words().unwrap_or_default() {
            word.store(0, Ordering::Relaxed);
        }
        self.write_header(0, used_idx);
    }

    fn write_header(&self, last_batch_head: u16, used_idx: u16) {
        let header = Header {
            version: VERSION,
            desc_num: self.desc_num,
            last_batch_head,
            used_idx,
        };
        self.header().store(header.into(), Ordering::Release);
    }

    /// Records a popped chain.
    pub fn fetched(&mut self, head: u16) {
        let counter = self.counter;
        if let Some(entry) = self.entry(head) {
            entry[1].store(counter, Ordering::Relaxed);
            // Release: a reader that sees the flag also sees the counter.
            entry[0].store(1, Ordering::Release);
        }
        self.counter = counter.wrapping_add(1);
    }

    /// Records a chain that is about to go into the used ring.
    pub fn prepare(&self, head: u16) {
        let header = Header::from(self.header().load(Ordering::Relaxed));
        if let Some(entry) = self.entry(head) {
            entry[0].store(
                1 | u64::from(header.last_batch_head) << 48,
                Ordering::Relaxed,
            );
        }
        self.write_header(head, header.used_idx);
        // The stores above must not pass the used index, which a Release store writes next.
    }

    /// Records that a chain is in the used ring, whose index is `used_idx` now.
    pub fn finish(&self, head: u16, used_idx: u16) {
        fence(Ordering::SeqCst);
        if let Some(entry) = self.entry(head) {
            entry[0].fetch_and(!0xff, Ordering::Release);
        }
        self.write_header(head, used_idx);
    }
}

struct Header {
    version: u64,
    desc_num: u16,
    last_batch_head: u16,
    used_idx: u16,
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "each field is 16 bits of the word"
)]
impl From<u64> for Header {
    fn from(word: u64) -> Self {
        Self {
            version: word & 0xffff,
            desc_num: (word >> 16) as u16,
            last_batch_head: (word >> 32) as u16,
            used_idx: (word >> 48) as u16,
        }
    }
}

impl From<Header> for u64 {
    fn from(header: Header) -> Self {
        header.version
            | Self::from(header.desc_num) << 16
            | Self::from(header.last_batch_head) << 32
            | Self::from(header.used_idx) << 48
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;
    use pagetide_sys::memory_file::GuestFile;
    use std::os::fd::AsFd;

    const SIZE: u16 = 8;

    fn region() -> (GuestFile, Arc<SharedMapping>) {
        let file = GuestFile::new_memfd("inflight", 4096).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), 4096).unwrap();
        (file, Arc::new(mapping))
    }

    fn open(region: &Arc<SharedMapping>) -> InflightQueue {
        InflightQueue::new(region.clone(), 0, 1, SIZE).unwrap()
    }

    #[test]
    fn area_that_does_not_fit_is_refused() {
        let (_file, region) = region();
        assert!(InflightQueue::new(region.clone(), 0, 0, 256).is_none());
        assert!(InflightQueue::new(region.clone(), u64::MAX, 1, 8).is_none());
        assert!(InflightQueue::new(region, 4, 0, 8).is_none());
    }

    #[test]
    fn fresh_area_has_nothing_to_do_again() {
        let (_file, region) = region();
        let left = open(&region).take_over(7);
        assert!(left.resubmit.is_empty());
        assert_eq!(left.next_avail, 7);
    }

    /// Runs a random schedule of fetches and out-of-order completions, and dies at each of its
    /// steps in turn. The successor must get exactly the heads that were popped and are not in the
    /// used ring, in the order in which they were popped.
    #[test]
    fn death_at_any_step_leaves_exactly_the_unfinished_heads() {
        for steps in 0..120 {
            let (_file, region) = region();
            let mut area = open(&region);
            assert_eq!(area.take_over(0).next_avail, 0);
            let mut order: Vec<u16> = Vec::new();
            let mut used = 0_u16;
            let mut free: Vec<u16> = (0..SIZE).collect();
            let mut random = SplitMix64::new(7);
            let mut step = 0;
            'run: while step < steps {
                let fetch = order.is_empty() || (!free.is_empty() && random.below(3) < 2);
                if fetch {
                    let head = free.remove(0);
                    area.fetched(head);
                    order.push(head);
                    step += 1;
                    continue;
                }
                let at = random.index(order.len());
                let head = order[at];
                area.prepare(head);
                step += 1;
                if step == steps {
                    break 'run;
                }
                used = used.wrapping_add(1);
                order.remove(at);
                step += 1;
                if step == steps {
                    break 'run;
                }
                area.finish(head, used);
                free.push(head);
                step += 1;
            }
            drop(area);
            let left = open(&region).take_over(used);
            assert_eq!(left.resubmit, order, "died after {steps} steps");
            let popped = used.wrapping_add(u16::try_from(order.len()).unwrap());
            assert_eq!(left.next_avail, popped);
            assert_eq!(open(&region).take_over(used), left, "asked twice");
        }
    }

    #[test]
    fn any_bytes_in_the_region_are_survived() {
        let (file, region) = region();
        let mut random = SplitMix64::new(1);
        for _ in 0..200 {
            let mut bytes = vec![0_u8; 4096];
            for byte in &mut bytes {
                *byte = random.next_u64().to_le_bytes()[0];
            }
            // A header that is trusted.
            let at = usize::try_from(area_bytes(SIZE)).unwrap() + 8;
            bytes[at..at + 4].copy_from_slice(&[1, 0, 8, 0]);
            file.write_at(0, &bytes).unwrap();
            let mut area = open(&region);
            let left = area.take_over(3);
            assert!(left.resubmit.iter().all(|head| *head < SIZE));
            area.fetched(9999);
            area.prepare(9999);
            area.finish(9999, 4);
        }
    }
}
