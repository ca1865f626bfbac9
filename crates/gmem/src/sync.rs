// SPDX-License-Identifier: Apache-2.0
//! Synchronisation primitives that a model checker can replace.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicU64, Ordering},
};
#[cfg(loom)]
pub(crate) use loom::thread::yield_now;
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicU64, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::{thread::yield_now, thread_local};

/// The checker's macro does not support constant initialisers.
#[cfg(loom)]
macro_rules! checked_thread_local {
    ($(#[$attribute:meta])* static $name:ident: $type:ty = const { $initial:expr };) => {
        loom::thread_local! {
            $(#[$attribute])*
            static $name: $type = $initial;
        }
    };
}
#[cfg(loom)]
pub(crate) use checked_thread_local as thread_local;

// The checker has an `Arc` as well, but it cannot hold a `dyn Trait`, and reference counting is not
// checked here.
pub(crate) use std::sync::Arc;

use std::sync::{PoisonError, TryLockError};

// A panic while one of these locks is held leaves nothing half done that its next holder could not
// see: words change in single steps and lists by single inserts. So poison is not propagated.

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the lock, unless another thread has it.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

pub(crate) fn share<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Takes the lock shared, unless another thread holds it exclusively or waits for that.
pub(crate) fn try_share<T>(lock: &RwLock<T>) -> Option<RwLockReadGuard<'_, T>> {
    match lock.try_read() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

pub(crate) fn own<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition
        .wait(guard)
        .unwrap_or_else(PoisonError::into_inner)
}
