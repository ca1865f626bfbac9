// SPDX-License-Identifier: Apache-2.0
//! The driver's half of a split virtqueue (virtio 1.2, 2.7) in memory that the device writes, too.
//!
//! ```text
//!   describe ─► publish ─► show ══ avail ══► device ══ used ══► take
//! ```
//! # What is not trusted
//! The device is another process and may be hostile. Only the used ring is ever read back
//! from the shared memory, and every number in it is checked against our own record: an
//! index may be no further ahead than chains are out, a head must be one that is out, and a
//! length must not exceed the room in its chain. A mismatch is a [`RingError`], after which
//! the queue cannot be used. A device that overwrites descriptors or our available ring
//! harms only itself.
//!
//! # Notifications
//! With `VIRTIO_F_EVENT_IDX` each side sets the index at which it wants to be
//! notified, without it a flag. Both are handled here: [`Ring::show`] returns
//! whether the device wants a kick; [`Ring::arm`] asks for a call and checks once
//! more, so that none is missed. Fences on both sides keep the two checks from
//! passing one another.

use pagetide_sys::mapping::SharedMapping;
use std::sync::{
    Arc,
    atomic::{Ordering, fence},
};
use vm_memory::{AtomicAccess, Bytes};

/// A descriptor is followed by another.
pub const NEXT: u16 = 1;
/// The device writes the buffer of a descriptor.
pub const WRITE: u16 = 2;
/// Bytes of a descriptor.
const DESCRIPTOR_BYTES: u64 = 16;
/// Bytes of an element of the used ring.
const USED_BYTES: u64 = 8;
/// Where the rings begin in the available and used area: after flags and index.
const RING_AT: u64 = 4;
/// In the flags of either area: do not notify me.
const QUIET: u16 = 1;

/// The device has written an impossible value into the used ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RingError {
    /// More chains used than are out.
    #[error("it used {used} chains of a queue that had {out} out")]
    Index {
        /// Chains that the device says it used.
        used: u16,
        /// Chains it had.
        out: u16,
    },
    /// A head that is not out.
    #[error("it used descriptor chain {0}, which it did not have")]
    Head(u32),
    /// More bytes than fit.
    #[error("it wrote {len} bytes into a chain with room for {room}")]
    Length {
        /// Bytes that the device says it wrote.
        len: u32,
        /// Bytes of the chain.
        room: u32,
    },
    /// The ring is not where it should be; our own bug.
    #[error("the ring lies outside its memory")]
    Outside,
}

/// A buffer, as described to the device.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    /// Its address in the device's address space.
    pub address: u64,
    /// Its length, in bytes.
    pub len: u32,
    /// [`NEXT`], [`WRITE`].
    pub flags: u16,
    /// The descriptor that follows.
    pub next: u16,
}

/// A chain that the device has finished.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Used {
    /// Its first descriptor.
    pub head: u16,
    /// Bytes that the device says it wrote.
    pub len: u32,
}

/// How notifications are suppressed in both directions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notify {
    /// By the flags of either area.
    Flags,
    /// By the index at which to notify.
    EventIndex,
}

/// Where the three parts of a ring lie, as offsets in its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingPlace {
    /// Number of descriptors: a power of two.
    pub size: u16,
    /// Descriptor table.
    pub descriptors: u64,
    /// Available ring.
    pub available: u64,
    /// Used ring.
    pub used: u64,
}

impl RingPlace {
    /// A ring of `size` descriptors from offset `at` on.
    pub const fn at(at: u64, size: u16) -> Self {
        let descriptors = at.next_multiple_of(16);
        let available = descriptors + DESCRIPTOR_BYTES * size as u64;
        let used = (available + RING_AT + 2 * size as u64 + 2).next_multiple_of(4);
        Self {
            size,
            descriptors,
            available,
            used,
        }
    }

    /// Offset behind its last byte.
    pub const fn end(&self) -> u64 {
        self.used + RING_AT + USED_BYTES * self.size as u64 + 2
    }
}

/// See the module.
#[derive(Debug)]
pub struct Ring {
    memory: Arc<SharedMapping>,
    place: RingPlace,
    notify: Notify,
    next_available: u16,
    /// The available index that the device was shown.
    shown: u16,
    next_used: u16,
    /// By head: room of a chain that is out, in bytes.
    rooms: Box<[Option<u32>]>,
    out: u16,
}

impl Ring {
    /// An empty ring in memory that is still zero.
    pub fn new(memory: Arc<SharedMapping>, place: RingPlace, notify: Notify) -> Self {
        Self {
            memory,
            place,
            notify,
            next_available: 0,
            shown: 0,
            next_used: 0,
            rooms: vec![None; usize::from(place.size)].into(),
            out: 0,
        }
    }

    /// Chains that the device has.
    #[cfg(test)]
    pub fn out(&self) -> u16 {
        self.out
    }

    /// True if the device has the chain that begins with descriptor `head`.
    pub fn is_out(&self, head: u16) -> bool {
        let room = self.rooms.get(usize::from(head));
        room.is_some_and(Option::is_some)
    }

    /// Where it lies.
    #[cfg(test)]
    pub fn place(&self) -> RingPlace {
        self.place
    }

    /// Writes descriptor number `index`, which must belong to no chain that is out.
    pub fn describe(&self, index: u16, to: Descriptor) -> Result<(), RingError> {
        let at = self.place.descriptors + DESCRIPTOR_BYTES * u64::from(index % self.place.size);
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&to.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&to.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&to.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&to.next.to_le_bytes());
        let copied = self.memory.copy_to(at, &bytes);
        copied.map_err(|_| RingError::Outside)
    }

    /// Puts a chain, with `room` bytes for the device to write, into the available ring. The device
    /// sees it after [`Self::show`].
    pub fn publish(&mut self, head: u16, room: u32) -> Result<(), RingError> {
        let Some(free @ None) = self.rooms.get_mut(usize::from(head)) else {
            return Err(RingError::Head(u32::from(head)));
        };
        *free = Some(room);
        self.out += 1;
        self.publish_raw(head)
    }

    /// Like [`Self::publish`], but does not record the head: for a head that is invalid.
    pub fn publish_raw(&mut self, head: u16) -> Result<(), RingError> {
        let slot = u64::from(self.next_available % self.place.size);
        self.store(self.place.available + RING_AT + 2 * slot, head.to_le())?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(())
    }

    /// Shows the device the published chains; true if it wants to be kicked for them.
    pub fn show(&mut self) -> Result<bool, RingError> {
        let (before, now) = (self.shown, self.next_available);
        if before == now {
            return Ok(false);
        }
        // Release: a device that sees the index sees descriptors, buffers and ring entries.
        self.store(self.place.available + 2, now.to_le())?;
        self.shown = now;
        // Pairs with the device's fence between its request for a kick and its last check.
        fence(Ordering::SeqCst);
        match self.notify {
            Notify::Flags => Ok(self.load(self.place.used)? & QUIET == 0),
            Notify::EventIndex => {
                let size = u64::from(self.place.size);
                let event = self.load(self.place.used + RING_AT + USED_BYTES * size)?;
                Ok(now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(before))
            }
        }
    }

    /// True if the device has used a chain that is not taken yet.
    pub fn has_used(&self) -> Result<bool, RingError> {
        Ok(self.load(self.place.used + 2)? != self.next_used)
    }

    /// The next chain that the device has finished.
    pub fn take(&mut self) -> Result<Option<Used>, RingError> {
        // Acquire: element and buffers were written before the index.
        let used = self.load(self.place.used + 2)?.wrapping_sub(self.next_used);
        if used == 0 {
            return Ok(None);
        }
        if used > self.out {
            return Err(RingError::Index {
                used,
                out: self.out,
            });
        }
        let slot = u64::from(self.next_used % self.place.size);
        let mut bytes = [0; 8];
        let at = self.place.used + RING_AT + USED_BYTES * slot;
        let copied = self.memory.copy_from(at, &mut bytes);
        copied.map_err(|_| RingError::Outside)?;
        let [h0, h1, h2, h3, l0, l1, l2, l3] = bytes;
        let (head, len) = (
            u32::from_le_bytes([h0, h1, h2, h3]),
            u32::from_le_bytes([l0, l1, l2, l3]),
        );
        let unknown = RingError::Head(head);
        let head = u16::try_from(head).map_err(|_| unknown)?;
        let room = self.rooms.get_mut(usize::from(head)).ok_or(unknown)?;
        let room = room.take().ok_or(unknown)?;
        self.out -= 1;
        self.next_used = self.next_used.wrapping_add(1);
        if len > room {
            return Err(RingError::Length { len, room });
        }
        Ok(Some(Used { head, len }))
    }

    /// Asks to be called for the next chain; true if one is there already.
    pub fn arm(&self) -> Result<bool, RingError> {
        match self.notify {
            Notify::Flags => self.store(self.place.available, 0)?,
            Notify::EventIndex => self.store(self.used_event(), self.next_used.to_le())?,
        }
        // Pairs with the device's fence between its used index and its check of our request.
        fence(Ordering::SeqCst);
        self.has_used()
    }

    /// Asks not to be called.
    pub fn disarm(&self) -> Result<(), RingError> {
        match self.notify {
            Notify::Flags => self.store(self.place.available, QUIET.to_le()),
            // The device calls only when the index passes here, which is as far away as possible.
            Notify::EventIndex => self.store(
                self.used_event(),
                self.next_used.wrapping_add(u16::MAX / 2).to_le(),
            ),
        }
    }

    fn used_event(&self) -> u64 {
        self.place.available + RING_AT + 2 * u64::from(self.place.size)
    }

    fn store(&self, at: u64, value: u16) -> Result<(), RingError> {
        let word = self.memory.volatile(at, 2).ok_or(RingError::Outside)?;
        store(&word, value)
    }

    fn load(&self, at: u64) -> Result<u16, RingError> {
        let word = self.memory.volatile(at, 2).ok_or(RingError::Outside)?;
        let value: u16 = load(&word)?;
        Ok(u16::from_le(value))
    }
}

fn store<T: AtomicAccess>(word: &impl Bytes<usize>, value: T) -> Result<(), RingError> {
    let stored = word.store(value, 0, Ordering::Release);
    stored.map_err(|_| RingError::Outside)
}

fn load<T: AtomicAccess>(word: &impl Bytes<usize>) -> Result<T, RingError> {
    let loaded = word.load(0, Ordering::Acquire);
    loaded.map_err(|_| RingError::Outside)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;
    use pagetide_sys::memory_file::GuestFile;
    use std::os::fd::AsFd;

    const SIZE: u16 = 4;

    struct Rig {
        ring: Ring,
        memory: Arc<SharedMapping>,
        used: u16,
    }

    impl Rig {
        fn new(notify: Notify) -> Self {
            let file = GuestFile::new_memfd("ring", 4096).unwrap();
            let memory = Arc::new(SharedMapping::new(file.as_fd(), 4096).unwrap());
            let place = RingPlace::at(8, SIZE);
            assert!(place.end() <= 4096);
            Self {
                ring: Ring::new(Arc::clone(&memory), place, notify),
                memory,
                used: 0,
            }
        }

        fn put(&self, at: u64, bytes: &[u8]) {
            self.memory.copy_to(at, bytes).unwrap();
        }

        /// The device's half: uses `head` with `len` bytes written.
        fn use_up(&mut self, head: u32, len: u32) {
            let place = self.ring.place();
            let at = place.used + 4 + 8 * u64::from(self.used % SIZE);
            self.put(at, &[head.to_le_bytes(), len.to_le_bytes()].concat());
            self.used = self.used.wrapping_add(1);
            self.put(place.used + 2, &self.used.to_le_bytes());
        }
    }

    #[test]
    fn chains_come_back_as_often_as_they_go_out_past_the_wrap_of_the_index() {
        for notify in [Notify::Flags, Notify::EventIndex] {
            let mut rig = Rig::new(notify);
            for round in 0..70_000_u32 {
                let head = u16::try_from(round % 4).unwrap();
                rig.ring.publish(head, 8).unwrap();
                rig.ring.show().unwrap();
                assert_eq!(rig.ring.take(), Ok(None));
                rig.use_up(u32::from(head), 8);
                assert_eq!(rig.ring.take(), Ok(Some(Used { head, len: 8 })));
                assert_eq!(rig.ring.out(), 0);
            }
        }
    }

    #[test]
    fn used_ring_that_cannot_be_is_an_error() {
        // Never published.
        let mut rig = Rig::new(Notify::Flags);
        rig.use_up(0, 0);
        let nothing_out = RingError::Index { used: 1, out: 0 };
        assert_eq!(rig.ring.take(), Err(nothing_out));
        // Another head than the one that is out.
        for head in [1, 4, 65_536, u32::MAX] {
            let mut rig = Rig::new(Notify::Flags);
            rig.ring.publish(0, 8).unwrap();
            rig.use_up(head, 0);
            assert_eq!(rig.ring.take(), Err(RingError::Head(head)));
        }
        // The same head twice.
        let mut rig = Rig::new(Notify::Flags);
        rig.ring.publish(0, 8).unwrap();
        rig.ring.publish(1, 8).unwrap();
        rig.use_up(0, 8);
        rig.use_up(0, 8);
        assert!(rig.ring.take().is_ok());
        assert_eq!(rig.ring.take(), Err(RingError::Head(0)));
        // More than there is room for.
        let mut rig = Rig::new(Notify::Flags);
        rig.ring.publish(3, 8).unwrap();
        rig.use_up(3, 9);
        assert_eq!(rig.ring.take(), Err(RingError::Length { len: 9, room: 8 }));
        // An index far ahead, or behind.
        for index in [2_u16, 5, 30_000, u16::MAX] {
            let mut rig = Rig::new(Notify::Flags);
            rig.ring.publish(0, 8).unwrap();
            let at = rig.ring.place().used + 2;
            rig.put(at, &index.to_le_bytes());
            let refused = rig.ring.take();
            assert!(matches!(refused, Err(RingError::Index { .. })), "{index}");
        }
    }

    #[test]
    fn head_that_is_out_is_not_published_again() {
        let mut rig = Rig::new(Notify::Flags);
        rig.ring.publish(2, 8).unwrap();
        assert_eq!(rig.ring.publish(2, 8), Err(RingError::Head(2)));
        assert_eq!(rig.ring.publish(4, 8), Err(RingError::Head(4)));
    }

    #[test]
    fn kick_is_wanted_as_the_device_says() {
        let mut rig = Rig::new(Notify::Flags);
        let place = rig.ring.place();
        rig.ring.publish(0, 0).unwrap();
        assert_eq!(rig.ring.show(), Ok(true));
        assert_eq!(rig.ring.show(), Ok(false), "nothing new");
        rig.put(place.used, &1_u16.to_le_bytes());
        rig.ring.publish(1, 0).unwrap();
        assert_eq!(rig.ring.show(), Ok(false));

        let mut rig = Rig::new(Notify::EventIndex);
        let event_at = place.used + 4 + 8 * u64::from(SIZE);
        rig.put(event_at, &1_u16.to_le_bytes());
        rig.ring.publish(0, 0).unwrap();
        assert_eq!(rig.ring.show(), Ok(false), "only the second is to be told");
        rig.ring.publish(1, 0).unwrap();
        assert_eq!(rig.ring.show(), Ok(true));
        rig.ring.publish(2, 0).unwrap();
        assert_eq!(rig.ring.show(), Ok(false));
    }

    #[test]
    fn armed_ring_tells_of_a_chain_that_is_there_already() {
        for notify in [Notify::Flags, Notify::EventIndex] {
            let mut rig = Rig::new(notify);
            assert_eq!(rig.ring.arm(), Ok(false));
            rig.ring.publish(0, 0).unwrap();
            rig.use_up(0, 0);
            assert_eq!(rig.ring.arm(), Ok(true));
            rig.ring.disarm().unwrap();
            assert!(rig.ring.take().unwrap().is_some());
            assert_eq!(rig.ring.arm(), Ok(false));
        }
    }

    #[test]
    fn any_bytes_in_the_used_ring_are_survived() {
        let mut random = SplitMix64::new(7);
        for _ in 0..2_000 {
            let mut rig = Rig::new(Notify::EventIndex);
            for head in 0..SIZE {
                rig.ring.publish(head, 64).unwrap();
            }
            rig.ring.show().unwrap();
            let place = rig.ring.place();
            let mut noise = Vec::new();
            while noise.len() < usize::try_from(place.end() - place.used).unwrap() {
                noise.extend(random.next_u64().to_le_bytes());
            }
            noise[2] &= 7;
            noise[3] = 0;
            rig.put(place.used, &noise);
            for _ in 0..=SIZE {
                if rig.ring.take().is_err() {
                    break;
                }
            }
        }
    }
}
