// SPDX-License-Identifier: Apache-2.0
//! [`Pause`]: a wait that an end cuts short.

use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// How a wait ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Waited {
    /// The time has passed.
    Enough,
    /// The wait was ended early.
    CutShort,
}

/// A wait that can be ended early, for good.
#[derive(Default)]
pub(super) struct Pause {
    is_over: Mutex<bool>,
    ended: Condvar,
}

impl Pause {
    /// Waits for `time`, or until [`Self::end`].
    pub(super) fn wait(&self, time: Duration) -> Waited {
        if time.is_zero() {
            return Waited::Enough;
        }
        let is_over = self.lock();
        let waited = (self.ended).wait_timeout_while(is_over, time, |is_over| !*is_over);
        if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
            Waited::Enough
        } else {
            Waited::CutShort
        }
    }

    /// Ends this wait and all later ones.
    pub(super) fn end(&self) {
        *self.lock() = true;
        self.ended.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
