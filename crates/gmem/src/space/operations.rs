// SPDX-License-Identifier: Apache-2.0
//! [`Operations`]: the queue of asynchronous operations of a space (GMEM 5.3).
//!
//! An unmap needs an invalidation of the IOTLB, which costs microseconds and takes any number of
//! ranges. So unmaps that need not be waited for are queued, dequeued in batches, restricted one by
//! one and invalidated with one command per device. Their callbacks run only after that command:
//! until then the pages count as mapped, and nothing of them is freed or reused.
//!
//! ```text
//!   enqueue ──► queue ──► batch (changes) ──► calling (callbacks) ──► gone
//!                          one at a time       several at a time
//! ```
//! The thread that drains the queue does the work: either a thread that serves it
//! ([`AddressSpace::serve_operations`]), or one that waits for it ([`AddressSpace::synchronize`]),
//! which needs no wake-up. Operations take effect in queue order.
//!
//! A sleeping server thread is woken when an empty queue gets its first operation, since more may
//! or may not follow. That costs a system call and possibly a context switch, some microseconds for
//! each burst. A caller that would wait for its single unmap at once should use the synchronous
//! call.

#[cfg(all(test, loom))]
mod model;

use super::{AddressSpace, attachments::coalesce};
use crate::{
    device::Device,
    error::GmError,
    region::{RegionCore, Wiring},
    set::SetCore,
    sync::{Arc, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock, wait},
};
use pagetide_addr::{Pa, PageRange};
use std::{
    cell::Cell,
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

/// Called with the result when an asynchronous operation is complete.
pub type Callback = Box<dyn FnOnce(Result<(), GmError>) + Send>;

/// Most operations that wait; a thread that queues one more first carries out waiting ones.
pub const QUEUED_MAX: usize = 4096;
/// Most operations of one batch: bounds how long one waits for the others.
const BATCH_MAX: usize = 256;

crate::sync::thread_local! {
    /// Number of nested operation callbacks on this thread.
    static IN_CALLBACK: Cell<u32> = const { Cell::new(0) };
}

/// The operation.
pub(crate) enum Operation {
    /// Wire a region.
    Map {
        region: PendingRegion,
        frames: Vec<Pa>,
        wiring: Wiring,
    },
    /// Unmap a region.
    Unmap { region: PendingRegion },
    /// Unmap all regions of a mapping set.
    UnmapSet { set: PendingSet },
    /// Prefetch pages for a device; nothing waits for it.
    Prefetch {
        region: PendingRegion,
        device: Arc<Device>,
        pages: PageRange,
    },
}

/// A region with an operation queued, which is over when this is dropped, even by a panic.
pub(crate) struct PendingRegion(Arc<RegionCore>);

impl PendingRegion {
    pub(crate) fn new(region: &Arc<RegionCore>) -> Self {
        region.operation_queued();
        Self(Arc::clone(region))
    }
}

impl Drop for PendingRegion {
    fn drop(&mut self) {
        self.0.operation_done();
    }
}

/// A mapping set with an operation queued, likewise.
pub(crate) struct PendingSet {
    set: Arc<SetCore>,
    queued_sets: Arc<AtomicU64>,
}

impl Drop for PendingSet {
    fn drop(&mut self) {
        // Release pairs with Acquire in `has_queued_sets`.
        self.queued_sets.fetch_sub(1, Ordering::Release);
    }
}

/// Where the result of an operation goes.
pub(crate) enum Answer {
    /// To [`AddressSpace::synchronize`], if it failed.
    Nobody,
    /// To a callback, and to [`AddressSpace::synchronize`].
    Callback(Callback),
    /// To a thread that waits for it.
    Waiter(Arc<Mutex<Option<Result<(), GmError>>>>),
}

impl From<Option<Callback>> for Answer {
    fn from(callback: Option<Callback>) -> Self {
        callback.map_or(Self::Nobody, Self::Callback)
    }
}

struct Queued {
    serial: u64,
    operation: Operation,
    answer: Answer,
}

/// A region to be unmapped; if a mapping is named, only while it has that mapping.
pub(crate) struct Leaver {
    pub(crate) region: Arc<RegionCore>,
    pub(crate) mapping: Option<u64>,
}

/// Consecutive unmaps, carried out together.
#[derive(Default)]
struct Gathered {
    /// The regions to unmap, grouped by operation.
    leavers: Vec<Leaver>,
    operations: Vec<Unmap>,
}

/// The target of an unmap, kept until the unmap is over.
enum Asked {
    Region { _pending: PendingRegion },
    Set(PendingSet),
}

/// One unmap operation.
struct Unmap {
    /// How many of the regions belong to it.
    region_count: usize,
    asked: Asked,
    answer: Answer,
}

impl Gathered {
    fn add_region(&mut self, pending: PendingRegion, answer: Answer) {
        self.leavers.push(Leaver {
            region: Arc::clone(&pending.0),
            mapping: None,
        });
        self.operations.push(Unmap {
            region_count: 1,
            asked: Asked::Region { _pending: pending },
            answer,
        });
    }

    fn add_set(&mut self, pending: PendingSet, answer: Answer) {
        let mut mapped = pending.set.take();
        self.operations.push(Unmap {
            region_count: mapped.len(),
            asked: Asked::Set(pending),
            answer,
        });
        self.leavers.append(&mut mapped);
    }

    /// Gives each operation the result of its regions; of several failures the first counts.
    fn finish(mut self, results: Vec<Result<(), GmError>>, due: &mut Vec<Due>) {
        let leavers = std::mem::take(&mut self.leavers);
        let mut parts = leavers.iter().zip(results);
        for unmap in std::mem::take(&mut self.operations) {
            let mut outcome = Ok(());
            for (leaver, result) in parts.by_ref().take(unmap.region_count) {
                outcome = outcome.and(match &unmap.asked {
                    Asked::Region { .. } => result,
                    Asked::Set(pending) => pending.set.settle(leaver, result),
                });
            }
            due.push((unmap.answer, outcome));
        }
    }
}

/// If a driver panicked: puts the remaining mappings of a set back into the set.
impl Drop for Gathered {
    fn drop(&mut self) {
        let mut leavers = self.leavers.iter();
        for unmap in &self.operations {
            for leaver in leavers.by_ref().take(unmap.region_count) {
                if let (Asked::Set(pending), Some(mapping)) = (&unmap.asked, leaver.mapping) {
                    pending.set.keep(&leaver.region, mapping);
                }
            }
        }
    }
}

/// An answer to deliver.
type Due = (Answer, Result<(), GmError>);

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Queued>,
    next_serial: u64,
    /// First serials of the batches whose changes are under way, and of those whose callbacks are.
    changing: Vec<u64>,
    calling: Vec<u64>,
    stopped: Stopped,
    /// Server threads that sleep and have not been woken yet. The count may be too high, as a
    /// thread may wake spuriously, but is never too low.
    idle: u32,
    /// Threads that wait for callbacks to return.
    watching: u32,
    /// The first failure that [`AddressSpace::synchronize`] has not yet reported.
    failure: Option<GmError>,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum Stopped {
    #[default]
    No,
    Yes,
}

impl Queue {
    /// True if the changes of all operations before `serial` are done.
    fn are_changed(&self, serial: u64) -> bool {
        let first_waiting = self.waiting.front().map(|queued| queued.serial);
        first_waiting.is_none_or(|first| first >= serial)
            && self.changing.iter().all(|first| *first >= serial)
    }

    /// True if their callbacks have returned, too.
    fn are_called(&self, serial: u64) -> bool {
        self.are_changed(serial) && self.calling.iter().all(|first| *first >= serial)
    }
}

/// The queue of a space.
pub(crate) struct Operations {
    queue: Mutex<Queue>,
    /// Signalled when there is work for one more thread, or when the queue is stopped.
    queued: Condvar,
    /// Signalled when callbacks have returned.
    returned: Condvar,
    /// Held while a batch is carried out: batches take effect in order.
    draining: Mutex<()>,
    /// Number of queued unmaps of mapping sets.
    queued_sets: Arc<AtomicU64>,
}

impl Operations {
    pub(crate) fn new() -> Self {
        Self {
            queue: Mutex::new(Queue::default()),
            queued: Condvar::new(),
            returned: Condvar::new(),
            draining: Mutex::new(()),
            queued_sets: Arc::new(AtomicU64::new(0)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Wakes a sleeping server thread, if there is one. This is a system call, so threads that are
    /// already busy are not signalled.
    fn call_server(&self, mut queue: MutexGuard<'_, Queue>) {
        if queue.idle > 0 {
            queue.idle -= 1;
            drop(queue);
            self.queued.notify_one();
        }
    }
}

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
        let in_callback = IN_CALLBACK.with(Cell::get) > 0;
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
                    due.push((answer, self.map_now(&region.0, &frames, &wiring)));
                }
                Operation::Prefetch {
                    region,
                    device,
                    pages,
                } => {
                    self.unmap_gathered(&mut unmaps, &mut due);
                    self.prefetch_now(&region.0, &device, pages);
                }
            }
        }
        self.unmap_gathered(&mut unmaps, &mut due);
        due
    }

    fn unmap_gathered(&self, unmaps: &mut Gathered, due: &mut Vec<Due>) {
        let unmaps = std::mem::take(unmaps);
        if !unmaps.operations.is_empty() {
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
        let queued_sets = Arc::clone(&self.operations.queued_sets);
        queued_sets.fetch_add(1, Ordering::Relaxed);
        let set = PendingSet {
            set: Arc::clone(set),
            queued_sets,
        };
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
        let mut tables = super::attachments::TableMask::NONE;
        for leaving in begun.iter().flatten() {
            leaving.content().add_ranges(&mut ranges);
            tables.unite(leaving.content().tables());
        }
        let taken = list.take_away(&coalesce(ranges), tables, crate::mmu::Restrict::NoAccess);
        let failed = match taken {
            Ok(()) => None,
            Err(failed) => Some((failed.tables, failed.error())),
        };
        let finish =
            |begun: Result<crate::region::Leaving, GmError>| begun?.finish(failed.as_ref());
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

/// Changes of a batch under way; over when dropped, even by a driver's panic.
struct Changing<'a> {
    operations: &'a Operations,
    first: u64,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let mut queue = self.operations.lock();
        queue.changing.retain(|known| *known != self.first);
    }
}

/// Callbacks of a batch under way; over when dropped, even by a panic of one of them.
struct Calling<'a> {
    operations: &'a Operations,
    first: u64,
}

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        let mut queue = self.operations.lock();
        queue.calling.retain(|known| *known != self.first);
        let watched = queue.watching > 0;
        drop(queue);
        if watched {
            self.operations.returned.notify_all();
        }
    }
}

/// Runs callbacks without any lock held, so that they may use the whole interface. If one panics,
/// the others still run, and then the first panic is resumed.
fn call_back(due: Vec<Due>) {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            IN_CALLBACK.with(|depth| depth.set(depth.get() - 1));
        }
    }
    let mut panicked = None;
    for (answer, result) in due {
        if let Answer::Callback(callback) = answer {
            IN_CALLBACK.with(|depth| depth.set(depth.get() + 1));
            let _leave = Leave;
            // The closure holds nothing of ours but the result, which it consumes.
            let called = catch_unwind(AssertUnwindSafe(|| callback(result)));
            panicked = panicked.or(called.err());
        }
    }
    if let Some(panic) = panicked {
        resume_unwind(panic);
    }
}
