// SPDX-License-Identifier: Apache-2.0
//! Asynchronous operations: who queues them, and who carries them out (GMEM 5.3). [`super::queue`]
//! has the queue and the idea.

#[cfg(all(test, loom))]
mod model;

use super::{
    address_space::AddressSpace,
    queue::{
        Answer, BATCH_MAX, Calling, Changing, Due, Gathered, Operation, PendingSet, QUEUED_MAX,
        Queued, Stopped, call_back, is_in_callback,
    },
    wiring::SetCore,
};
use crate::{
    attachments::{TableMask, coalesce},
    error::GmError,
    mmu::Restrict,
    region::{Leaver, Leaving},
    sync::{Arc, Mutex, Ordering, lock, wait},
};

impl AddressSpace {
    /// Queues an operation; returns a serial number above those of all operations queued by now.
    pub(crate) fn enqueue(&self, operation: Operation, answer: Answer) -> u64 {
        loop {
            let mut queue = self.operations.lock();
            if queue.waiting.len() < QUEUED_MAX {
                let serial = queue.next_serial;
                queue.next_serial += 1;
                let was_empty = queue.waiting.is_empty();
                queue.waiting.push_back(Queued {
                    serial,
                    operation,
                    answer,
                });
                // A thread woken for the first operation takes the others as well.
                if was_empty {
                    self.operations.call_server(queue);
                }
                return serial + 1;
            }
            drop(queue);
            self.drain();
        }
    }

    /// Waits until all operations queued before are complete and their callbacks have returned.
    /// Within a callback it waits for the changes only.
    ///
    /// # Errors
    /// The first failure of an asynchronous operation since the last call, once.
    #[doc(alias = "gm_as_synchronize")]
    pub fn synchronize(&self) -> Result<(), GmError> {
        let in_callback = is_in_callback();
        let mut queue = self.operations.lock();
        let serial = queue.next_serial;
        loop {
            if !queue.are_changed(serial) {
                drop(queue);
                self.drain();
                queue = self.operations.lock();
            } else if in_callback || queue.are_called(serial) {
                break;
            } else {
                queue.watching += 1;
                queue = wait(&self.operations.returned, queue);
                queue.watching -= 1;
            }
        }
        queue.failure.take().map_or(Ok(()), Err)
    }

    /// Carries out, or waits for, all operations queued before.
    pub(crate) fn wait_for_changes(&self) {
        let serial = self.operations.lock().next_serial;
        self.wait_for_changes_before(serial);
    }

    fn wait_for_changes_before(&self, serial: u64) {
        let mut queue = self.operations.lock();
        while !queue.are_changed(serial) {
            drop(queue);
            self.drain();
            queue = self.operations.lock();
        }
    }

    /// Carries out operations until [`Self::stop_operations`]: for a thread of the caller.
    pub fn serve_operations(&self) {
        loop {
            let mut queue = self.operations.lock();
            while queue.waiting.is_empty() {
                if queue.stopped == Stopped::Yes {
                    return;
                }
                queue.idle += 1;
                queue = wait(&self.operations.queued, queue);
            }
            drop(queue);
            self.drain();
        }
    }

    /// Makes [`Self::serve_operations`] return once the queue is empty.
    pub fn stop_operations(&self) {
        self.operations.lock().stopped = Stopped::Yes;
        self.operations.queued.notify_all();
    }

    /// Carries out one batch.
    fn drain(&self) {
        let draining = lock(&self.operations.draining);
        let (batch, first) = {
            let mut queue = self.operations.lock();
            let count = queue.waiting.len().min(BATCH_MAX);
            let batch: Vec<Queued> = queue.waiting.drain(..count).collect();
            let Some(first) = batch.first().map(|queued| queued.serial) else {
                return;
            };
            queue.changing.push(first);
            if !queue.waiting.is_empty() {
                self.operations.call_server(queue);
            }
            (batch, first)
        };
        let changing = Changing {
            operations: &self.operations,
            first,
        };
        let mut due = self.carry_out(batch);
        for (answer, result) in &mut due {
            if let Answer::Waiter(slot) = answer {
                *lock(slot) = Some(result.clone());
            }
        }
        {
            let mut queue = self.operations.lock();
            queue.calling.push(first);
            let failed = due.iter().find_map(|(answer, result)| match answer {
                Answer::Waiter(_) => None,
                Answer::Nobody | Answer::Callback(_) => result.as_ref().err(),
            });
            if let (None, Some(error)) = (&queue.failure, failed) {
                queue.failure = Some(error.clone());
            }
        }
        let _called = Calling {
            operations: &self.operations,
            first,
        };
        drop(changing);
        drop(draining);
        call_back(due);
    }

    /// Carries out a batch, consecutive unmaps together.
    fn carry_out(&self, batch: Vec<Queued>) -> Vec<Due> {
        let mut due: Vec<Due> = Vec::with_capacity(batch.len());
        let mut unmaps = Gathered::default();
        for queued in batch {
            let answer = queued.answer;
            match queued.operation {
                Operation::Unmap { region } => unmaps.add_region(region, answer),
                Operation::UnmapSet { set } => {
                    // The gathered unmaps may belong to the set.
                    self.unmap_gathered(&mut unmaps, &mut due);
                    unmaps.add_set(set, answer);
                }
                Operation::Map {
                    region,
                    frames,
                    wiring,
                } => {
                    self.unmap_gathered(&mut unmaps, &mut due);
                    due.push((answer, self.map_now(region.core(), &frames, &wiring)));
                }
                Operation::Prefetch {
                    region,
                    device,
                    pages,
                } => {
                    self.unmap_gathered(&mut unmaps, &mut due);
                    self.prefetch_now(region.core(), &device, pages);
                }
            }
        }
        self.unmap_gathered(&mut unmaps, &mut due);
        due
    }

    fn unmap_gathered(&self, unmaps: &mut Gathered, due: &mut Vec<Due>) {
        let unmaps = std::mem::take(unmaps);
        if !unmaps.is_empty() {
            let results = self.unmap_together(&unmaps.leavers);
            unmaps.finish(results, due);
        }
    }

    /// Queues the unmap of a whole set and waits for it.
    pub(crate) fn unmap_set(&self, set: &Arc<SetCore>) -> Result<(), GmError> {
        let slot = Arc::new(Mutex::new(None));
        let serial = self.enqueue_set(set, Answer::Waiter(Arc::clone(&slot)));
        self.wait_for_changes_before(serial);
        // Empty: a driver's panic ended the operation.
        lock(&slot).take().unwrap_or(Err(GmError::InUse {
            by: "a driver that panicked in the middle of it",
        }))
    }

    /// Queues the unmap of a set.
    pub(crate) fn enqueue_set(&self, set: &Arc<SetCore>, answer: Answer) -> u64 {
        let set = PendingSet::new(set, &self.operations.queued_sets);
        self.enqueue(Operation::UnmapSet { set }, answer)
    }

    pub(crate) fn has_queued_sets(&self) -> bool {
        self.operations.queued_sets.load(Ordering::Acquire) > 0
    }

    /// Unmaps regions with one invalidation per device; returns a result for each region.
    pub(crate) fn unmap_together(&self, leavers: &[Leaver]) -> Vec<Result<(), GmError>> {
        let list = self.devices.share();
        let begun: Vec<_> = leavers
            .iter()
            .map(|leaver| leaver.region.begin_unmap(leaver.mapping))
            .collect();
        let mut ranges = Vec::new();
        let mut tables = TableMask::NONE;
        for leaving in begun.iter().flatten() {
            leaving.content().add_ranges(&mut ranges);
            tables.unite(leaving.content().tables());
        }
        let taken = list.take_away(&coalesce(ranges), tables, Restrict::NoAccess);
        let failed = match taken {
            Ok(()) => None,
            Err(failed) => Some((failed.tables, failed.error())),
        };
        let finish = |begun: Result<Leaving, GmError>| begun?.finish(failed.as_ref());
        begun.into_iter().map(finish).collect()
    }

    /// The queue will not be served again: waiters and callbacks get an error.
    pub(super) fn abandon_operations(&self) {
        let waiting = std::mem::take(&mut self.operations.lock().waiting);
        let due = waiting
            .into_iter()
            .map(|queued| (queued.answer, Err(GmError::Destroyed)));
        call_back(due.collect());
    }
}
