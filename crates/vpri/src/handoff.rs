// SPDX-License-Identifier: Apache-2.0
//! [`Handoff`]: a bounded queue between threads of different priorities.
//!
//! A queue without locks is not without waits: one whose producer was interrupted between claiming a slot and filling
//! it has its consumer spin until that is done. If the consumer has a real-time priority and the producer a lower one
//! on the same CPU, it spins for ever; handlers of page faults have such priorities by design (VPRI 6.1), and so have
//! all threads of a program that changes hands. Here whoever finds the other one in the middle of an operation sleeps
//! until it is done, so that it can be done. No priority is inherited: it waits as long as the other one has no CPU.
//! To find the queue empty takes no lock.

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
    use std::sync::mpsc;

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

    /// A consumer that spun would keep the other one, which is in the middle of an operation, off its only CPU.
    #[test]
    fn consumer_lets_a_thread_of_lower_real_time_priority_on_its_cpu_finish() {
        let queue = Handoff::new(2);
        queue.push(1).unwrap();
        let cpu = cpu::affinity().unwrap()[0];
        let take_place = |priority| {
            cpu::set_affinity(&[cpu]).unwrap();
            if let Err(error) = cpu::set_urgency(Urgency::Preempting(priority)) {
                eprintln!("SKIPPED: real-time priority: {error}");
            }
        };
        let (begin, begun) = mpsc::channel();
        std::thread::scope(|scope| {
            let queue = &queue;
            let consumer = scope.spawn(move || {
                take_place(priority::HURRY);
                begun.recv().unwrap();
                queue.pop()
            });
            scope.spawn(move || {
                take_place(priority::IOPF_WORKER);
                let mut values = queue.lock();
                // The consumer has the CPU at once, and cannot go on.
                begin.send(()).unwrap();
                values.push_back(2);
                queue.len.store(values.len(), Ordering::Release);
            });
            assert_eq!(consumer.join().unwrap(), Some(1));
        });
        assert_eq!(queue.pop(), Some(2));
    }
}
