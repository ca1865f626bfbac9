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
//! ([`AddressSpace::serve_operations`](crate::AddressSpace::serve_operations)), or one that waits for it ([`AddressSpace::synchronize`](crate::AddressSpace::synchronize)),
//! which needs no wake-up. Operations take effect in queue order.
//!
//! A sleeping server thread is woken when an empty queue gets its first operation, since more may
//! or may not follow. That costs a system call and possibly a context switch, some microseconds for
//! each burst. A caller that would wait for its single unmap at once should use the synchronous
//! call.

use super::wiring::{SetCore, Wiring};
use crate::{
    device::Device,
    error::GmError,
    region::{Leaver, RegionCore},
    sync::{Arc, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock},
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
pub(super) const BATCH_MAX: usize = 256;

crate::sync::thread_local! {
    /// Number of nested operation callbacks on this thread.
    static IN_CALLBACK: Cell<u32> = const { Cell::new(0) };
}

/// True on a thread that is running a callback of an operation.
pub(super) fn is_in_callback() -> bool {
    IN_CALLBACK.with(Cell::get) > 0
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

    pub(super) fn core(&self) -> &Arc<RegionCore> {
        &self.0
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

impl PendingSet {
    pub(super) fn new(set: &Arc<SetCore>, queued_sets: &Arc<AtomicU64>) -> Self {
        queued_sets.fetch_add(1, Ordering::Relaxed);
        Self {
            set: Arc::clone(set),
            queued_sets: Arc::clone(queued_sets),
        }
    }
}

impl Drop for PendingSet {
    fn drop(&mut self) {
        // Release pairs with Acquire in `has_queued_sets`.
        self.queued_sets.fetch_sub(1, Ordering::Release);
    }
}

/// Where the result of an operation goes.
pub(crate) enum Answer {
    /// To [`AddressSpace::synchronize`](crate::AddressSpace::synchronize), if it failed.
    Nobody,
    /// To a callback, and to [`AddressSpace::synchronize`](crate::AddressSpace::synchronize).
    Callback(Callback),
    /// To a thread that waits for it.
    Waiter(Arc<Mutex<Option<Result<(), GmError>>>>),
}

impl From<Option<Callback>> for Answer {
    fn from(callback: Option<Callback>) -> Self {
        callback.map_or(Self::Nobody, Self::Callback)
    }
}

pub(super) struct Queued {
    pub(super) serial: u64,
    pub(super) operation: Operation,
    pub(super) answer: Answer,
}

/// Consecutive unmaps, carried out together.
#[derive(Default)]
pub(super) struct Gathered {
    /// The regions to unmap, grouped by operation.
    pub(super) leavers: Vec<Leaver>,
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
    pub(super) fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    pub(super) fn add_region(&mut self, pending: PendingRegion, answer: Answer) {
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

    pub(super) fn add_set(&mut self, pending: PendingSet, answer: Answer) {
        let mut mapped = pending.set.take();
        self.operations.push(Unmap {
            region_count: mapped.len(),
            asked: Asked::Set(pending),
            answer,
        });
        self.leavers.append(&mut mapped);
    }

    /// Gives each operation the result of its regions; of several failures the first counts.
    pub(super) fn finish(mut self, results: Vec<Result<(), GmError>>, due: &mut Vec<Due>) {
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
pub(super) type Due = (Answer, Result<(), GmError>);

#[derive(Default)]
pub(super) struct Queue {
    pub(super) waiting: VecDeque<Queued>,
    pub(super) next_serial: u64,
    /// First serials of the batches whose changes are under way, and of those whose callbacks are.
    pub(super) changing: Vec<u64>,
    pub(super) calling: Vec<u64>,
    pub(super) stopped: Stopped,
    /// Server threads that sleep and have not been woken yet. The count may be too high, as a
    /// thread may wake spuriously, but is never too low.
    pub(super) idle: u32,
    /// Threads that wait for callbacks to return.
    pub(super) watching: u32,
    /// The first failure that [`AddressSpace::synchronize`](crate::AddressSpace::synchronize) has not yet reported.
    pub(super) failure: Option<GmError>,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stopped {
    #[default]
    No,
    Yes,
}

impl Queue {
    /// True if the changes of all operations before `serial` are done.
    pub(super) fn are_changed(&self, serial: u64) -> bool {
        let first_waiting = self.waiting.front().map(|queued| queued.serial);
        first_waiting.is_none_or(|first| first >= serial)
            && self.changing.iter().all(|first| *first >= serial)
    }

    /// True if their callbacks have returned, too.
    pub(super) fn are_called(&self, serial: u64) -> bool {
        self.are_changed(serial) && self.calling.iter().all(|first| *first >= serial)
    }
}

/// The queue of a space.
pub(crate) struct Operations {
    pub(super) queue: Mutex<Queue>,
    /// Signalled when there is work for one more thread, or when the queue is stopped.
    pub(super) queued: Condvar,
    /// Signalled when callbacks have returned.
    pub(super) returned: Condvar,
    /// Held while a batch is carried out: batches take effect in order.
    pub(super) draining: Mutex<()>,
    /// Number of queued unmaps of mapping sets.
    pub(super) queued_sets: Arc<AtomicU64>,
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

    pub(super) fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Wakes a sleeping server thread, if there is one. This is a system call, so threads that are
    /// already busy are not signalled.
    pub(super) fn call_server(&self, mut queue: MutexGuard<'_, Queue>) {
        if queue.idle > 0 {
            queue.idle -= 1;
            drop(queue);
            self.queued.notify_one();
        }
    }
}

/// Changes of a batch under way; over when dropped, even by a driver's panic.
pub(super) struct Changing<'a> {
    pub(super) operations: &'a Operations,
    pub(super) first: u64,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let mut queue = self.operations.lock();
        queue.changing.retain(|known| *known != self.first);
    }
}

/// Callbacks of a batch under way; over when dropped, even by a panic of one of them.
pub(super) struct Calling<'a> {
    pub(super) operations: &'a Operations,
    pub(super) first: u64,
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
pub(super) fn call_back(due: Vec<Due>) {
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
