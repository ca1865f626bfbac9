// SPDX-License-Identifier: Apache-2.0
//! The rings of a queue, which are wired: chains are taken from the avail ring and put into the used ring.
//!
//! virtio-queue keeps the addresses and indices of the rings and tells drivers whether to kick. Their entries are read
//! and written here, for two reasons. The entries of a packet must become visible together, because the driver looks for
//! all of them when it has found the first (virtio 1.2, 5.1.6.4). And the index of a ring is what driver and device both
//! look at all the time: read or written for each packet, its cache line travels between two CPUs for each.
//!
//! ```text
//!   avail ring:  … taken │ next_avail ─────── avail_end │ perhaps more: looked for once these are taken
//!   used ring:   … published │ entries written ── next_used │
//!                            └ unpublished: the driver does not see them yet
//! ```
//! Entries are published at once, unless the queue [publishes later](EngineQueue::publish_later): then at the end of its
//! turn, or before that once so many wait that its driver may be short of them.

use super::{
    held::descriptor,
    queue::{AVAIL_NO_INTERRUPT, EngineQueue},
};
use crate::{memory::DeviceMemory, shared::StopReason};
use std::sync::atomic::{Ordering, fence};
use virtio_queue::QueueT;

/// Bytes before the entries of a ring: flags and index.
const HEADER_BYTES: u64 = 4;
/// Where the index of a ring is.
const INDEX_AT: u64 = 2;
/// Bytes of an entry of the avail ring.
const AVAIL_BYTES: u64 = 2;
/// Bytes of an entry of the used ring.
const USED_BYTES: u64 = 8;
/// Once so many entries wait, they are published: the driver needs them to go on.
const UNPUBLISHED_ENOUGH: u16 = 32;

impl EngineQueue {
    /// Chains are taken from index `next` on.
    pub(super) fn take_from(&mut self, next: u16) {
        self.queue.set_next_avail(next);
        self.avail_end = next;
    }

    /// The head of the next chain, if the driver has made one available. [`Self::took_head`] takes it.
    ///
    /// # Errors
    /// The ring is broken.
    pub(super) fn next_head(&mut self, memory: &DeviceMemory) -> Result<Option<u16>, StopReason> {
        let next = self.queue.next_avail();
        if self.avail_end == next {
            if !self.queue.ready() {
                return Err(self.broken(&"it is not ready"));
            }
            // Acquire: the entries before it, and the chains that they name, are visible.
            let end = memory.load_u16(self.queue.avail_ring() + INDEX_AT, Ordering::Acquire);
            let end = end.map_err(|e| self.broken(&e))?;
            if end.wrapping_sub(next) > self.table.size {
                return Err(self.broken(&"more chains are available than it has places"));
            }
            self.avail_end = end;
            if end == next {
                return Ok(None);
            }
        }
        let slot = u64::from(next % self.table.size.max(1));
        let at = self.queue.avail_ring() + HEADER_BYTES + AVAIL_BYTES * slot;
        let head = memory.load_u16(at, Ordering::Relaxed);
        head.map(Some).map_err(|e| self.broken(&e))
    }

    /// Takes the chain that [`Self::next_head`] has told.
    pub(super) fn took_head(&mut self) {
        self.queue
            .set_next_avail(self.queue.next_avail().wrapping_add(1));
    }

    /// Entries of the used ring are published by [`Self::publish_all`] from now on, or once there are enough.
    pub(super) fn publish_later(&mut self) {
        self.publishes_later = true;
    }

    /// Publishes all entries of the used ring; those that follow are published at once.
    ///
    /// # Errors
    /// As of [`Self::publish`].
    pub(super) fn publish_all(&mut self, memory: &DeviceMemory) -> Result<(), StopReason> {
        self.publishes_later = false;
        self.publish(memory)
    }

    /// The index of the used ring, as the driver sees it.
    pub(super) fn published(&self) -> u16 {
        self.queue.next_used().wrapping_sub(self.unpublished)
    }

    /// Puts chains with so many written bytes into the used ring, all at once.
    ///
    /// # Errors
    /// The ring is broken, or memory was lost.
    pub(super) fn put_used(
        &mut self,
        memory: &DeviceMemory,
        entries: &[(u16, u32)],
    ) -> Result<(), StopReason> {
        // All or none: what is written is published, sooner or later.
        if let Some((head, _)) = entries.iter().find(|(head, _)| *head >= self.table.size) {
            return Err(self.broken(&format_args!("descriptor {head} is not in its table")));
        }
        for (head, bytes) in entries {
            let next = self.queue.next_used();
            let slot = u64::from(next % self.table.size);
            let at = self.queue.used_ring() + HEADER_BYTES + USED_BYTES * slot;
            let entry = u64::from(*head) | u64::from(*bytes) << 32;
            let written = memory.store_u64(at, entry);
            written.map_err(|e| self.broken(&e))?;
            self.queue.set_next_used(next.wrapping_add(1));
            self.unpublished = self.unpublished.saturating_add(1);
        }
        match self.publishes_later && self.unpublished < UNPUBLISHED_ENOUGH {
            true => Ok(()),
            false => self.publish(memory),
        }
    }

    /// Shows the driver all entries of the used ring. Nothing is published that zeros in place of guest memory may have
    /// caused.
    fn publish(&mut self, memory: &DeviceMemory) -> Result<(), StopReason> {
        if self.unpublished == 0 {
            return Ok(());
        }
        if let Some(reason) = self.lost(memory) {
            return Err(reason);
        }
        let table = self.queue.desc_table();
        if let Some(posted) = self.posted.as_mut() {
            posted.record_passed(|head| descriptor(memory, table, head));
        }
        let next = self.queue.next_used();
        let index = self.queue.used_ring() + INDEX_AT;
        // Release: the driver reads the entries after the index.
        let stored = memory.store_u16(index, next, Ordering::Release);
        stored.map_err(|e| self.broken(&e))?;
        let added = std::mem::take(&mut self.unpublished);
        self.added = self.added.saturating_add(added);
        if let Some(posted) = self.posted.as_mut()
            && let Some(record) = posted.record.as_mut()
        {
            record.settle(next);
        }
        self.needs_call = true;
        match self.lost(memory) {
            Some(reason) => Err(reason),
            None => Ok(()),
        }
    }

    /// Whether the driver wants to be called for what was published since this was asked last.
    ///
    /// # Errors
    /// The ring is broken.
    pub(super) fn wants_call(&mut self, memory: &DeviceMemory) -> Result<bool, StopReason> {
        let added = std::mem::take(&mut self.added);
        // Pairs with the driver's, between its event index or flag and its look at the used index.
        fence(Ordering::SeqCst);
        let avail = self.queue.avail_ring();
        let is_by_index = self.queue.event_idx_enabled();
        let at = match is_by_index {
            true => avail + HEADER_BYTES + AVAIL_BYTES * u64::from(self.table.size),
            false => avail,
        };
        let loaded = memory.load_u16(at, Ordering::Relaxed);
        let word = loaded.map_err(|e| self.broken(&e))?;
        Ok(match is_by_index {
            // virtio 1.2, 2.7.7.2
            true => self.published().wrapping_sub(word).wrapping_sub(1) < added,
            false => word & AVAIL_NO_INTERRUPT == 0,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{
        chain::{AnswerPlace, Indirect, Layout},
        engine::command::QueueSetup,
        kind::work::{Chains, Completes, Keeping, QueueRole},
        memory::tests::Ram,
        regions::RegionTable,
        shared::OnFault,
    };
    use pagetide_random::SplitMix64;
    use pagetide_vpri::LookUp;
    use virtio_queue::Queue;

    const SIZE: u16 = 64;
    pub(in crate::engine) const BASE: u64 = 0x10_0000;
    pub(in crate::engine) const AVAIL: u64 = BASE + 0x1000;
    const USED: u64 = BASE + 0x2000;

    /// Rings in a memory file.
    pub(in crate::engine) struct Fixture {
        pub memory: DeviceMemory,
        pub queue: EngineQueue,
        ram: Ram,
    }

    /// How a driver says whether it is to be called.
    #[derive(PartialEq, Eq)]
    pub(in crate::engine) enum Says {
        ByIndex,
        ByFlag,
    }

    fn memory_of(ram: &Ram) -> DeviceMemory {
        let mut table = RegionTable::default();
        table.add(ram.region(BASE, 3, 0)).unwrap();
        table.for_engine(0, LookUp::On).unwrap()
    }

    /// Rings of requests whose indices all begin at `index`.
    fn fixture(index: u16, says: &Says) -> Fixture {
        fixture_of(Chains::Requests, index, says)
    }

    /// Rings of such chains.
    pub(in crate::engine) fn fixture_of(chains: Chains, index: u16, says: &Says) -> Fixture {
        let ram = Ram::new(3);
        let memory = memory_of(&ram);
        let mut queue = Queue::new(SIZE).unwrap();
        let low = |at: u64| Some(u32::try_from(at).unwrap());
        queue.set_desc_table_address(low(BASE), Some(0));
        queue.set_avail_ring_address(low(AVAIL), Some(0));
        queue.set_used_ring_address(low(USED), Some(0));
        queue.set_event_idx(*says == Says::ByIndex);
        queue.set_ready(true);
        queue.set_next_used(index);
        let role = QueueRole {
            layout: Layout {
                header_bytes: 12,
                answer: AnswerPlace::Nowhere,
                data_bytes_max: 4096,
            },
            chains,
            vector: 0,
            keeping: Keeping::ToUse,
            completes: Completes::InRingOrder,
        };
        let mut queue = EngineQueue::new(
            0,
            0,
            QueueSetup {
                number: 1,
                queue,
                next_avail: index,
                indirect: Indirect::Absent,
                role,
                features: 0,
                kick: None,
                call: None,
                error: None,
                inflight: None,
                record: None,
                on_fault: OnFault::Pause,
            },
        );
        queue.take_from(index);
        let fixture = Fixture { memory, queue, ram };
        fixture.put(AVAIL + 2, index);
        fixture.put(USED + 2, index);
        fixture
    }

    impl Fixture {
        /// The same bytes as another memory.
        pub(in crate::engine) fn other_memory(&self) -> DeviceMemory {
            memory_of(&self.ram)
        }

        pub(in crate::engine) fn put(&self, at: u64, word: u16) {
            self.memory.store_u16(at, word, Ordering::SeqCst).unwrap();
        }

        fn get(&self, at: u64) -> u16 {
            self.memory.load_u16(at, Ordering::SeqCst).unwrap()
        }

        fn take(&mut self) -> Option<u16> {
            let head = self.queue.next_head(&self.memory).unwrap();
            if head.is_some() {
                self.queue.took_head();
            }
            head
        }
    }

    /// virtio 1.2, 2.7.7.2, as every driver has it.
    fn needs_event(event: u16, new: u16, old: u16) -> bool {
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }

    #[test]
    fn driver_is_called_if_it_waits_for_an_entry_that_was_published_since() {
        for seed in 0..200 {
            let mut random = SplitMix64::new(seed);
            let below = |random: &mut SplitMix64, n| u16::try_from(random.below(n)).unwrap();
            let mut f = fixture(65_500, &Says::ByIndex);
            let (mut asked, mut shown) = (65_500_u16, 65_500_u16);
            for _ in 0..60 {
                let entries: Vec<_> = (0..below(&mut random, 41)).map(|n| (n, 0)).collect();
                f.queue.publish_later();
                f.queue.put_used(&f.memory, &entries).unwrap();
                // So many are published without being asked for.
                if entries.len() < usize::from(UNPUBLISHED_ENOUGH) {
                    assert_eq!((f.get(USED + 2), f.queue.published()), (shown, shown));
                }
                f.queue.publish_all(&f.memory).unwrap();
                shown = shown.wrapping_add(u16::try_from(entries.len()).unwrap());
                assert_eq!((f.get(USED + 2), f.queue.published()), (shown, shown));
                if random.below(3) == 0 {
                    continue;
                }
                let event = shown.wrapping_sub(below(&mut random, 60)).wrapping_add(5);
                f.put(AVAIL + 4 + 2 * u64::from(SIZE), event);
                let wants = f.queue.wants_call(&f.memory).unwrap();
                assert_eq!(wants, needs_event(event, shown, asked), "seed {seed}");
                asked = shown;
            }
        }
    }

    #[test]
    fn driver_without_the_event_index_is_called_unless_its_flag_says_no() {
        let mut f = fixture(0, &Says::ByFlag);
        for (flag, wants) in [(0, true), (AVAIL_NO_INTERRUPT, false)] {
            f.put(AVAIL, flag);
            f.queue.put_used(&f.memory, &[(3, 7)]).unwrap();
            assert!(f.queue.needs_call);
            assert_eq!(f.queue.wants_call(&f.memory).unwrap(), wants);
        }
    }

    #[test]
    fn chains_are_taken_once_whatever_the_driver_does_to_its_index() {
        let mut f = fixture(65_530, &Says::ByFlag);
        let at = |index: u16| AVAIL + 4 + 2 * u64::from(index % SIZE);
        for number in 0..3_u16 {
            f.put(at(65_530 + number), number + 40);
        }
        assert_eq!(f.take(), None);
        f.put(AVAIL + 2, 65_533);
        assert_eq!(f.take(), Some(40));
        // What was made available stays so.
        f.put(AVAIL + 2, 65_530);
        assert_eq!((f.take(), f.take()), (Some(41), Some(42)));
        // An index that went back is one that went on, by more than the ring holds.
        assert!(f.queue.next_head(&f.memory).is_err());
        f.put(AVAIL + 2, 65_533_u16.wrapping_add(SIZE + 1));
        assert!(f.queue.next_head(&f.memory).is_err());
        f.put(AVAIL + 2, 65_533_u16.wrapping_add(SIZE));
        let taken = std::iter::from_fn(|| f.take()).count();
        assert_eq!(taken, usize::from(SIZE));
    }

    #[test]
    fn entries_of_which_one_names_no_descriptor_are_not_written_at_all() {
        let mut f = fixture(9, &Says::ByFlag);
        let refused = f.queue.put_used(&f.memory, &[(1, 0), (SIZE, 0)]);
        assert!(matches!(refused, Err(StopReason::Ring { queue: 1, .. })));
        assert_eq!((f.queue.unpublished, f.get(USED + 2)), (0, 9));
        f.queue.put_used(&f.memory, &[(5, 70_000)]).unwrap();
        assert_eq!(f.get(USED + 2), 10);
        let entry = USED + 4 + 8 * 9;
        let words = [0, 2, 4, 6].map(|part| f.get(entry + part));
        assert_eq!(words, [5, 0, 4464, 1]);
    }
}
