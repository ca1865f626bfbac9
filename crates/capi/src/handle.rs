// SPDX-License-Identifier: Apache-2.0
//! [`Handles`]: numbers for objects, with detection of stale ones.
//!
//! To C a handle looks like a pointer, but it is none: it names a slot of a table, and which of the
//! slot's successive objects is meant.
//!
//! ```text
//!    63   60 59            32 31            4 3   0
//!   ┌───────┬────────────────┬───────────────┬─────┐
//!   │ kind  │   generation   │     slot      │shard│
//!   └───────┴────────────────┴───────────────┴─────┘
//! ```
//! The kind, from 1 to 7, makes it an address that user memory never has, so following it by
//! mistake ends the program at once. A slot whose generations are used up is not reused: a stale
//! handle never becomes valid.
//!
//! A look-up takes one shard's lock, shared, and counts a reference; objects live as long as a
//! caller that looked them up uses them. No callback runs with a shard locked.

use crate::failure::Failure;
use std::{
    marker::PhantomData,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

const SHARD_BITS: u32 = 4;
const SHARDS: usize = 1 << SHARD_BITS;
const SLOT_BITS: u32 = 28;
const GENERATION_BITS: u32 = 28;
const GENERATION_SHIFT: u32 = SHARD_BITS + SLOT_BITS;
const KIND_SHIFT: u32 = GENERATION_SHIFT + GENERATION_BITS;
const GENERATION_LAST: u64 = (1 << GENERATION_BITS) - 1;

const _: () = assert!(KIND_SHIFT + 4 == u64::BITS);

/// A kind of object.
pub(crate) struct Kind {
    /// From 1 to 7.
    pub(crate) number: u8,
    /// For messages.
    pub(crate) name: &'static str,
}

/// A handle of a `T`.
pub(crate) struct Handle<T> {
    bits: u64,
    of: PhantomData<fn() -> T>,
}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.bits == other.bits
    }
}

impl<T> Handle<T> {
    /// The handle as C holds it.
    pub(crate) fn to_c<C>(self) -> *mut C {
        std::ptr::without_provenance_mut(index(self.bits))
    }

    /// A handle as C passed it.
    pub(crate) fn of_c<C>(given: *const C) -> Self {
        Self::of_bits(given.addr() as u64)
    }

    fn of_bits(bits: u64) -> Self {
        let of = PhantomData;
        Self { bits, of }
    }

    fn shard(self) -> usize {
        index(self.bits) % SHARDS
    }

    fn slot(self) -> usize {
        index(self.bits >> SHARD_BITS) & ((1 << SLOT_BITS) - 1)
    }

    fn generation(self) -> u64 {
        (self.bits >> GENERATION_SHIFT) & GENERATION_LAST
    }

    fn kind(self) -> u64 {
        self.bits >> KIND_SHIFT
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "64-bit targets only: pagetide-sys refuses others, and so does the assertion below"
)]
const fn index(bits: u64) -> usize {
    bits as usize
}

const _: () = assert!(size_of::<usize>() == size_of::<u64>());

struct Slot<T> {
    /// Of the current object, or of the next one.
    generation: u64,
    object: Option<Arc<T>>,
}

struct Shard<T> {
    slots: Vec<Slot<T>>,
    free: Vec<usize>,
}

/// The objects of one kind.
pub(crate) struct Handles<T> {
    kind: Kind,
    shards: [RwLock<Shard<T>>; SHARDS],
    next_shard: AtomicUsize,
}

// A panic with a shard locked leaves it unchanged or with the change complete: poison is ignored.
fn share<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn own<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Handles<T> {
    /// An empty table.
    pub(crate) const fn new(kind: Kind) -> Self {
        assert!(
            0 < kind.number && kind.number < 8,
            "such handles could be addresses"
        );
        let shards = [const {
            RwLock::new(Shard {
                slots: Vec::new(),
                free: Vec::new(),
            })
        }; SHARDS];
        Self {
            kind,
            shards,
            next_shard: AtomicUsize::new(0),
        }
    }

    /// Makes a new object, which gets its own handle.
    ///
    /// # Errors
    /// [`Failure::TooMany`] with 2^28 objects in the shard: more than memory could hold.
    pub(crate) fn insert_with(
        &self,
        make: impl FnOnce(Handle<T>) -> T,
    ) -> Result<(Handle<T>, Arc<T>), Failure> {
        let number = self.next_shard.fetch_add(1, Relaxed) % SHARDS;
        let mut shard = own(&self.shards[number]);
        let at = match shard.free.pop() {
            Some(at) => at,
            None if shard.slots.len() < 1 << SLOT_BITS => {
                shard.slots.push(Slot {
                    generation: 0,
                    object: None,
                });
                shard.slots.len() - 1
            }
            None => {
                let kind = self.kind.name;
                return Err(Failure::TooMany { kind });
            }
        };
        let slot = &mut shard.slots[at];
        let bits = (u64::from(self.kind.number) << KIND_SHIFT)
            | (slot.generation << GENERATION_SHIFT)
            | ((at << SHARD_BITS) | number) as u64;
        let handle = Handle::of_bits(bits);
        let object = Arc::new(make(handle));
        slot.object = Some(Arc::clone(&object));
        Ok((handle, object))
    }

    /// The object of a handle.
    ///
    /// # Errors
    /// [`Failure::InvalidHandle`], [`Failure::Destroyed`].
    pub(crate) fn get(&self, handle: Handle<T>) -> Result<Arc<T>, Failure> {
        let kind = self.kind.name;
        if handle.kind() != u64::from(self.kind.number) {
            return Err(Failure::InvalidHandle { kind });
        }
        let shard = share(&self.shards[handle.shard()]);
        let Some(slot) = shard.slots.get(handle.slot()) else {
            return Err(Failure::InvalidHandle { kind });
        };
        match &slot.object {
            Some(object) if handle.generation() == slot.generation => Ok(Arc::clone(object)),
            _ if handle.generation() < slot.generation => Err(Failure::Destroyed { kind }),
            _ => Err(Failure::InvalidHandle { kind }),
        }
    }

    /// Invalidates the handle. Does nothing if it is not valid.
    pub(crate) fn remove(&self, handle: Handle<T>) {
        let mut shard = own(&self.shards[handle.shard()]);
        let Some(slot) = shard.slots.get_mut(handle.slot()) else {
            return;
        };
        if slot.generation != handle.generation() || slot.object.is_none() {
            return;
        }
        let gone = slot.object.take();
        slot.generation += 1;
        if slot.generation <= GENERATION_LAST {
            shard.free.push(handle.slot());
        }
        drop(shard);
        // The object's own resources are dropped without the lock.
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind {
        number: 5,
        name: "a number",
    };

    fn insert(handles: &Handles<u64>, value: u64) -> Handle<u64> {
        handles.insert_with(|_| value).unwrap().0
    }

    fn get(handles: &Handles<u64>, handle: Handle<u64>) -> Result<u64, Failure> {
        handles.get(handle).map(|object| *object)
    }

    #[test]
    fn removed_handle_is_destroyed_for_good_and_its_slot_serves_another() {
        let handles = Handles::new(KIND);
        let mut gone = Vec::new();
        for value in 0..1000 {
            let handle = insert(&handles, value);
            assert_eq!(get(&handles, handle).unwrap(), value);
            assert!(gone.iter().all(|old| *old != handle), "{value}");
            handles.remove(handle);
            handles.remove(handle);
            gone.push(handle);
        }
        for old in gone {
            assert!(matches!(get(&handles, old), Err(Failure::Destroyed { .. })));
        }
        let slots: usize = handles
            .shards
            .iter()
            .map(|shard| share(shard).slots.len())
            .sum();
        assert_eq!(slots, SHARDS);
    }

    #[test]
    fn value_that_was_never_a_handle_is_told_from_one_that_is_stale() {
        let handles = Handles::new(KIND);
        let good = insert(&handles, 1);
        let far = Handle::of_bits(good.bits + (1000 << SHARD_BITS));
        let other_kind = Handle::of_bits(good.bits ^ (3 << KIND_SHIFT));
        let not_yet = Handle::of_bits(good.bits + (1 << GENERATION_SHIFT));
        let next_shard = Handle::of_bits(good.bits ^ 1);
        let mut strange = vec![far, other_kind, not_yet, next_shard];
        strange.extend([0, 1, u64::MAX, 1 << 47].map(Handle::of_bits));
        let on_stack = 0_u64;
        strange.push(Handle::of_c(&raw const on_stack));
        for (number, handle) in strange.into_iter().enumerate() {
            let got = get(&handles, handle);
            assert!(
                matches!(got, Err(Failure::InvalidHandle { .. })),
                "{number}"
            );
        }
        handles.remove(good);
        let got = get(&handles, not_yet);
        assert!(matches!(got, Err(Failure::InvalidHandle { .. })));
    }

    #[test]
    fn slot_whose_generations_are_used_up_is_not_used_again() {
        let handles = Handles::new(KIND);
        let first = insert(&handles, 1);
        own(&handles.shards[first.shard()]).slots[0].generation = GENERATION_LAST;
        let last = Handle::of_bits(first.bits | (GENERATION_LAST << GENERATION_SHIFT));
        assert_eq!(get(&handles, last).unwrap(), 1);
        handles.remove(last);
        assert!(matches!(
            get(&handles, last),
            Err(Failure::Destroyed { .. })
        ));
        for value in 0..64 {
            let handle = insert(&handles, value);
            assert!((handle.shard(), handle.slot()) != (last.shard(), last.slot()));
        }
    }

    #[test]
    fn threads_that_insert_and_remove_see_their_own_objects_only() {
        let handles = Handles::new(KIND);
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let handles = &handles;
                scope.spawn(move || {
                    let mut live = Vec::new();
                    for round in 0..5_000 {
                        let value = (thread << 32) | round;
                        live.push((insert(handles, value), value));
                        if round % 3 != 0 {
                            let at = usize::try_from(round * 7).unwrap() % live.len();
                            let (handle, value) = live.swap_remove(at);
                            assert_eq!(get(handles, handle).unwrap(), value);
                            handles.remove(handle);
                            assert!(get(handles, handle).is_err());
                        }
                    }
                    for (handle, value) in live {
                        assert_eq!(get(handles, handle).unwrap(), value);
                    }
                });
            }
        });
    }
}
