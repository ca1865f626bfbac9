// SPDX-License-Identifier: Apache-2.0
//! [`lock`]: the locks of this module outlive a panic of their holder.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The lock's content, even if its last holder panicked: each value is set whole or not at all.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
