// SPDX-License-Identifier: Apache-2.0
//! [`Operations`]: the queue of asynchronous operations of a space (GMEM 5.3).
//!
//! An unmap costs an invalidation of the IOTLB, which costs microseconds and
//! takes any number of ranges. So unmaps that need not be waited for are queued,
//! taken off in batches, restricted one after the other and invalidated with one
//! command a device. Their callbacks come after it and never before: until then
//! the pages count as mapped, and nothing of them is freed or reused.
//!
//! ```text
//!   enqueue ──► queue ──► batch (changes) ──► calling (callbacks) ──► gone
//!                          one at a time       several at a time
//! ```
//! Whoever drains does the work: a thread that serves the queue
//! ([`AddressSpace::serve_operations`]), or one that waits for it
//! ([`AddressSpace::synchronize`]) and so needs no wake-up. Operations take
//! effect in the order they were queued in.
//!
//! A thread that serves and sleeps is called when an empty queue gets its first
//! operation, since nobody knows whether more will come. That is a system call
//! and perhaps a change of threads, some microseconds for each burst: a flow that
//! would wait for its one unmap at once does better to call the one that waits.

#[cfg(all(test, loom))]
mod model;

use super::{AddressSpace, attachments::coalesce};
use crate::{
    device::Device,
    error::GmError,
    region::{MapOptions, RegionCore},
    set::SetCore,
    sync::{Arc, Condvar, Mutex, MutexGuard, lock, wait},
};
use pagetide_addr::{Pa, PageRange};
use std::{
    cell::Cell,
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

/// Called when an asynchronous operation is complete, with what became of it.
pub type Callback = Box<dyn FnOnce(Result<(), GmError>) + Send>;

/// Operations that wait at most; whoever queues one more does the waiting ones first.
pub const QUEUED_MAX: usize = 4096;
/// Operations of one batch at most: what one waits for the others stays bounded.
const BATCH_MAX: usize = 256;

crate::sync::thread_local! {
    /// How many callbacks of operations this thread is in the middle of.
    static IN_CALLBACK: Cell<u32> = const { Cell::new(0) };
}

/// What is to be done.
pub(crate) enum Operation {
    /// Wire a region.
    Map {
        region: Arc<RegionCore>,
        frames: Vec<Pa>,
        options: MapOptions,
    },
    /// Unmap a region.
    Unmap { region: Arc<RegionCore> },
    /// Unmap all of a mapping set.
    UnmapSet { set: Arc<SetCore> },
    /// Bring pages to a device before it asks; nobody waits for it.
    Prefetch {
        region: Arc<RegionCore>,
        device: Arc<Device>,
        pages: PageRange,
    },
}

struct Queued {
    serial: u64,
    operation: Operation,
    callback: Option<Callback>,
}

/// Unmaps that follow one another and are carried out together.
#[derive(Default)]
struct Gathered {
    /// What is unmapped, operation after operation.
    regions: Vec<Arc<RegionCore>>,
    operations: Vec<Unmap>,
}

/// One of them.
struct Unmap {
    /// How many of the regions are its.
    region_count: usize,
    set: Option<Arc<SetCore>>,
    callback: Option<Callback>,
}

impl Gathered {
    fn add_region(&mut self, region: Arc<RegionCore>, callback: Option<Callback>) {
        self.regions.push(region);
        self.operations.push(Unmap {
            region_count: 1,
            set: None,
            callback,
        });
    }

    fn add_set(&mut self, set: Arc<SetCore>, callback: Option<Callback>) {
        let mut mapped = set.take_mapped();
        self.operations.push(Unmap {
            region_count: mapped.len(),
            set: Some(set),
            callback,
        });
        self.regions.append(&mut mapped);
    }

    /// Tells each operation what became of its regions; of several failures the first counts.
    fn finish(self, results: Vec<Result<(), GmError>>, due: &mut Vec<Due>) {
        let mut parts = self.regions.iter().zip(results);
        for Unmap {
            region_count,
            set,
            callback,
        } in self.operations
        {
            let mut outcome = Ok(());
            for (region, mut result) in parts.by_ref().take(region_count) {
                if let (Err(error), Some(set)) = (&result, &set) {
                    set.put_back(region);
                    // One that went on its own before its turn is not missed.
                    if matches!(error, GmError::NotMapped { .. }) && region.is_at_rest() {
                        result = Ok(());
                    }
                }
                outcome = outcome.and(result);
                region.operation_done();
            }
            due.push((callback, outcome));
        }
    }
}

/// A callback that is due.
type Due = (Option<Callback>, Result<(), GmError>);

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Queued>,
    next_serial: u64,
    /// First serials of batches whose changes are under way, and of those whose callbacks are.
    changing: Vec<u64>,
    calling: Vec<u64>,
    stopped: Stopped,
    /// Threads that serve the queue and sleep, and that nobody has called yet. It may be more than
    /// there are, as a thread may wake for no reason, and is never less.
    idle: u32,
    /// Threads that wait for callbacks to return.
    watching: u32,
    /// What failed since the last [`AddressSpace::synchronize`] that told of it.
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
    /// Signalled when there is work for one more thread, or no more ever.
    queued: Condvar,
    /// Signalled when callbacks have returned.
    returned: Condvar,
    /// Held by whoever carries a batch out: batches take effect in order.
    draining: Mutex<()>,
}

impl Operations {
    pub(crate) fn new() -> Self {
        Self {
            queue: Mutex::new(Queue::default()),
            queued: Condvar::new(),
            returned: Condvar::new(),
            draining: Mutex::new(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Calls a thread that serves the queue, if one sleeps: a system call, so nobody else is called
    /// who has something to do already.
    fn call_server(&self, mut queue: MutexGuard<'_, Queue>) {
        if queue.idle > 0 {
            queue.idle -= 1;
            drop(queue);
            self.queued.notify_one();
        }
    }
}

impl AddressSpace {
    /// Queues an operation.
    pub(crate) fn enqueue(&self, operation: Operation, callback: Option<Callback>) {
        loop {
            let mut queue = self.operations.lock();
            if queue.waiting.len() < QUEUED_MAX {
                let serial = queue.next_serial;
                queue.next_serial += 1;
                let was_empty = queue.waiting.is_empty();
                queue.waiting.push_back(Queued {
                    serial,
                    operation,
                    callback,
                });
                // Whoever was called for the first takes the others along.
                if was_empty {
                    self.operations.call_server(queue);
                }
                return;
            }
            drop(queue);
            self.drain();
        }
    }

    /// Waits until all operations queued before are complete and their callbacks have returned.
    /// From within a callback it waits for the changes alone.
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

    /// Carries out, or waits for, everything queued before.
    pub(crate) fn wait_for_changes(&self) {
        let mut queue = self.operations.lock();
        let serial = queue.next_serial;
        while !queue.are_changed(serial) {
            drop(queue);
            self.drain();
            queue = self.operations.lock();
        }
    }

    /// Carries operations out until [`Self::stop_operations`]: for a thread of the caller's.
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

    /// Lets [`Self::serve_operations`] return once nothing is queued any more.
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
        let due = self.carry_out(batch);
        {
            let mut queue = self.operations.lock();
            queue.changing.retain(|known| *known != first);
            queue.calling.push(first);
            let failed = due.iter().find_map(|(_, result)| result.as_ref().err());
            if let (None, Some(error)) = (&queue.failure, failed) {
                queue.failure = Some(error.clone());
            }
        }
        drop(draining);
        let _called = Calling {
            operations: &self.operations,
            first,
        };
        call_back(due);
    }

    /// Makes the changes of a batch, unmaps that follow one another together.
    fn carry_out(&self, batch: Vec<Queued>) -> Vec<Due> {
        let mut due: Vec<Due> = Vec::with_capacity(batch.len());
        let mut unmaps = Gathered::default();
        for queued in batch {
            let callback = queued.callback;
            match queued.operation {
                Operation::Unmap { region } => unmaps.add_region(region, callback),
                Operation::UnmapSet { set } => unmaps.add_set(set, callback),
                Operation::Map {
                    region,
                    frames,
                    options,
                } => {
                    self.unmap_gathered(&mut unmaps, &mut due);
                    due.push((callback, self.map_now(&region, &frames, &options)));
                    region.operation_done();
                }
                Operation::Prefetch {
                    region,
                    device,
                    pages,
                } => {
                    self.unmap_gathered(&mut unmaps, &mut due);
                    self.prefetch_now(&region, &device, pages);
                    region.operation_done();
                }
            }
        }
        self.unmap_gathered(&mut unmaps, &mut due);
        due
    }

    fn unmap_gathered(&self, unmaps: &mut Gathered, due: &mut Vec<Due>) {
        let unmaps = std::mem::take(unmaps);
        if !unmaps.operations.is_empty() {
            let results = self.unmap_together(&unmaps.regions);
            unmaps.finish(results, due);
        }
    }

    /// Unmaps all of a set now.
    pub(crate) fn unmap_set(&self, set: &Arc<SetCore>) -> Result<(), GmError> {
        let (mut unmaps, mut due) = (Gathered::default(), Vec::new());
        unmaps.add_set(Arc::clone(set), None);
        self.unmap_gathered(&mut unmaps, &mut due);
        due.pop().map_or(Ok(()), |(_, outcome)| outcome)
    }

    /// Unmaps regions with one invalidation a device; a result for each.
    pub(crate) fn unmap_together(&self, regions: &[Arc<RegionCore>]) -> Vec<Result<(), GmError>> {
        let list = self.devices.share();
        let begun: Vec<_> = regions.iter().map(|region| region.begin_unmap()).collect();
        let mut ranges = Vec::new();
        let mut tables = super::attachments::TableMask::NONE;
        for leaving in begun.iter().flatten() {
            leaving.add_ranges(&mut ranges);
            tables.unite(leaving.tables());
        }
        let taken = list.take_away(&coalesce(ranges), tables, crate::mmu::Restrict::NoAccess);
        let failed = match taken {
            Ok(()) => None,
            Err(failed) => Some((failed.tables, failed.error())),
        };
        let finish = |(region, begun): (&Arc<RegionCore>, Result<_, GmError>)| {
            region.finish_unmap(begun?, failed.as_ref())
        };
        regions.iter().zip(begun).map(finish).collect()
    }
}

/// Callbacks of a batch under way; over when dropped, be it by a panic of one of them.
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

/// Calls back without any lock held, so that a callback may use the whole interface. If some panic
/// the others are called none the less, and the first panic goes on from here.
fn call_back(due: Vec<Due>) {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            IN_CALLBACK.with(|depth| depth.set(depth.get() - 1));
        }
    }
    let mut panicked = None;
    for (callback, result) in due {
        if let Some(callback) = callback {
            IN_CALLBACK.with(|depth| depth.set(depth.get() + 1));
            let _leave = Leave;
            // Nothing of ours is in the closure but the result, which it takes.
            let called = catch_unwind(AssertUnwindSafe(|| callback(result)));
            panicked = panicked.or(called.err());
        }
    }
    if let Some(panic) = panicked {
        resume_unwind(panic);
    }
}
