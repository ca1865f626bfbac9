// SPDX-License-Identifier: Apache-2.0
//! How control threads send commands to an engine: a list behind a lock, a count that an engine can
//! read at no cost, and its doorbell.

use pagetide_vpri::Doorbell;
use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The engine has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the DPU engine has ended")]
pub(crate) struct Ended;

#[derive(Debug)]
pub(crate) struct Mailbox<T> {
    /// `None` once the engine has ended.
    letters: Mutex<Option<VecDeque<T>>>,
    count: AtomicUsize,
    bell: Arc<Doorbell>,
}

impl<T> Mailbox<T> {
    pub fn new(bell: Arc<Doorbell>) -> Self {
        Self {
            letters: Mutex::new(Some(VecDeque::new())),
            count: AtomicUsize::new(0),
            bell,
        }
    }

    /// Posts a letter and wakes the engine.
    pub fn post(&self, letter: T) -> Result<(), Ended> {
        {
            let mut letters = self.lock();
            let letters = letters.as_mut().ok_or(Ended)?;
            letters.push_back(letter);
            // Pairs with the Acquire in `is_empty`; the doorbell's fences order it against sleep.
            self.count.store(letters.len(), Ordering::Release);
        }
        self.bell.ring();
        Ok(())
    }

    /// True if there is no letter.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Takes the next letter; only reads the count if there is none.
    pub fn take_if_any(&self) -> Option<T> {
        if self.is_empty() { None } else { self.take() }
    }

    fn take(&self) -> Option<T> {
        let mut letters = self.lock();
        let letters = letters.as_mut()?;
        let letter = letters.pop_front();
        self.count.store(letters.len(), Ordering::Release);
        letter
    }

    /// Accepts no more letters and drops the remaining ones.
    pub fn close(&self) {
        let left = self.lock().take();
        self.count.store(0, Ordering::Release);
        drop(left);
    }

    fn lock(&self) -> MutexGuard<'_, Option<VecDeque<T>>> {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
