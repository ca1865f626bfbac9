// SPDX-License-Identifier: Apache-2.0
//! [`Handoff`]: a bounded queue between threads of different priorities.
//!
//! A queue without locks is not without waits: one whose producer was interrupted between claiming a slot and filling
//! it has its consumer spin until that is done. If the consumer has a real-time priority and the producer a lower one
//! on the same CPU, it spins for ever; handlers of page faults have such priorities by design (VPRI 6.1), and so have
//! all threads of a program that changes hands. Here whoever finds the other one in the middle of an operation sleeps
//! until it is done, so that it can be done. To find the queue empty takes no lock.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

/// See the module.
#[derive(Debug)]
pub struct Handoff<T> {
    values: Mutex<VecDeque<T>>,
    /// How many there are, written under the lock.
    len: AtomicUsize,
    capacity: usize,
}

impl<T> Handoff<T> {
    /// An empty queue for `capacity` values, for which there is room from now on.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            values: Mutex::new(VecDeque::with_capacity(capacity)),
            len: AtomicUsize::new(0),
            capacity,
        }
    }

    /// Most values that it holds.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len.load(Ordering::Acquire) == 0
    }

    /// Puts a value behind the others.
    ///
    /// # Errors
    /// There is no room: the value comes back.
    pub fn push(&self, value: T) -> Result<(), T> {
        let mut values = self.lock();
        if values.len() == self.capacity {
            return Err(value);
        }
        values.push_back(value);
        self.len.store(values.len(), Ordering::Release);
        Ok(())
    }

    /// Puts a value behind the others, in place of the first one if there is no room.
    pub fn push_over(&self, value: T) {
        let mut values = self.lock();
        if values.len() == self.capacity {
            values.pop_front();
        }
        values.push_back(value);
        self.len.store(values.len(), Ordering::Release);
    }

    /// The first value, if there is one.
    #[must_use]
    pub fn pop(&self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        let mut values = self.lock();
        let first = values.pop_front();
        self.len.store(values.len(), Ordering::Release);
        first
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<T>> {
        // Nothing panics while it is held.
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_sys::cpu::{self, Urgency, priority};
    use std::time::Duration;

    #[test]
    fn values_come_in_order_and_only_as_many_as_there_is_room_for() {
        let queue = Handoff::new(3);
        assert!(queue.is_empty() && queue.pop().is_none());
        (0..3).for_each(|value| queue.push(value).unwrap());
        assert_eq!(queue.push(3), Err(3));
        queue.push_over(4);
        let all: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(all, [1, 2, 4]);
        assert!(queue.is_empty());
    }

    /// With a queue whose consumer spins this stands still sooner or later: the producer has no other CPU.
    #[test]
    fn real_time_consumer_on_the_cpu_of_its_producer_gets_every_value() {
        const VALUES: u32 = 20_000;
        let queue = Handoff::new(16);
        let cpu = cpu::affinity().unwrap()[0];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                cpu::set_affinity(&[cpu]).unwrap();
                if let Err(error) = cpu::set_urgency(Urgency::Preempting(priority::HURRY)) {
                    eprintln!("SKIPPED: real-time priority: {error}");
                }
                let mut next = 0;
                while next < VALUES {
                    match queue.pop() {
                        Some(value) => {
                            assert_eq!(value, next);
                            next += 1;
                        }
                        // Long enough for the producer to fill the queue.
                        None => std::thread::sleep(Duration::from_micros(200)),
                    }
                }
            });
            scope.spawn(|| {
                cpu::set_affinity(&[cpu]).unwrap();
                for value in 0..VALUES {
                    while queue.push(value).is_err() {
                        std::thread::yield_now();
                    }
                }
            });
        });
        assert!(queue.is_empty());
    }
}
