// SPDX-License-Identifier: Apache-2.0
//! The space of segments: allocated by a thread of its own, `pt-tier-space`.
//!
//! A file system may take as long as it likes for `fallocate` and `statvfs`. Whoever makes room for a batch is a
//! VM's reclaim thread, which faults may wait for; so it orders a segment and comes again. One segment is
//! allocated at a time, for the VM that has waited longest. A segment that takes longer than a write may makes the
//! tier slow, until it is there or refused: what probes find meanwhile, which need no space, does not count.
//!
//! The lock of the orders is held while a segment is given to its VM, and while the tier is told that one is late;
//! no other time together with another lock. So a VM that ends meanwhile either takes the order back or finds the
//! segment among its own.

use super::io::Ground;
use super::panics::panic_text;
use super::shared::Shared;
use crate::extent::{SEGMENT_BYTES, SegmentNo};
use crate::health::Symptom;
use crate::{TierError, TierKind, VmId};
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// For how long no segment is ordered after one could not be allocated.
const FAILED_REST: Duration = Duration::from_secs(5);

/// A segment that is being allocated.
#[derive(Debug, Clone, Copy)]
struct UnderWay {
    vm: VmId,
    began: Instant,
    is_wanted: bool,
    /// It has made the tier slow.
    is_late: bool,
}

#[derive(Debug, Default)]
struct Orders {
    /// At most one of a VM.
    waiting: VecDeque<VmId>,
    under_way: Option<UnderWay>,
    failed: Option<(Instant, TierError)>,
    is_over: bool,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Space {
    orders: Mutex<Orders>,
    changed: Condvar,
}

impl Space {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if a segment is on its way to `vm`.
    pub fn is_ordered(&self, vm: VmId) -> bool {
        let orders = self.orders();
        let under_way = orders.under_way.is_some_and(|it| it.vm == vm);
        under_way || orders.waiting.contains(&vm)
    }

    /// Orders a segment for `vm`, if none is on its way. Returns why there is no room now.
    pub fn order(&self, vm: VmId, bound: Duration, shared: &Shared, now: Instant) -> TierError {
        let mut orders = self.orders();
        let rest =
            |(at, _): &(Instant, TierError)| now.saturating_duration_since(*at) < FAILED_REST;
        if let Some((_, why)) = orders.failed.as_ref().filter(|failed| rest(failed)) {
            return why.clone();
        }
        let is_under_way = orders.under_way.is_some_and(|it| it.vm == vm);
        if !is_under_way && !orders.waiting.contains(&vm) {
            orders.waiting.push_back(vm);
            self.changed.notify_one();
        }
        let overdue = |it: &&mut UnderWay| now.saturating_duration_since(it.began) >= bound;
        let Some(under_way) = orders.under_way.as_mut().filter(overdue) else {
            return TierError::Busy(TierKind::Disk);
        };
        let bound_ms = u64::try_from(bound.as_millis()).unwrap_or(u64::MAX);
        if !std::mem::replace(&mut under_way.is_late, true) {
            shared.space_is_late(bound_ms, now);
        }
        TierError::Slow {
            kind: TierKind::Disk,
            bound_ms,
        }
    }

    /// A VM ends: it wants no segment.
    pub fn cancel(&self, vm: VmId) {
        let mut orders = self.orders();
        orders.waiting.retain(|waiting| *waiting != vm);
        if let Some(under_way) = orders.under_way.as_mut().filter(|it| it.vm == vm) {
            under_way.is_wanted = false;
        }
    }

    /// The thread ends after the segment that it is at.
    pub fn end(&self) {
        self.orders().is_over = true;
        self.changed.notify_one();
    }

    /// Serves until the tier ends.
    pub fn run(&self, shared: &Shared, ground: &dyn Ground) {
        let served = catch_unwind(AssertUnwindSafe(|| {
            while self.wait() {
                self.allocate_next(shared, ground, Instant::now);
            }
        }));
        if let Err(panic) = served {
            let why = panic_text(&*panic);
            tracing::error!(
                why,
                "the thread that allocates space for the disk tier panicked"
            );
            let lost = Symptom::Lost(format!("a thread of it panicked: {why}"));
            shared.note(lost, Instant::now());
            shared.end_orders();
        }
    }

    /// Waits for an order; false at the end.
    fn wait(&self) -> bool {
        let nothing = |orders: &mut Orders| !orders.is_over && orders.waiting.is_empty();
        let waited = self.changed.wait_while(self.orders(), nothing);
        let orders = waited.unwrap_or_else(PoisonError::into_inner);
        !orders.is_over
    }

    /// Allocates a segment for the VM that has waited longest, if one does.
    pub fn allocate_next(&self, shared: &Shared, ground: &dyn Ground, clock: impl Fn() -> Instant) {
        let mut orders = self.orders();
        let Some(vm) = orders.waiting.pop_front() else {
            return;
        };
        orders.under_way = Some(UnderWay {
            vm,
            began: clock(),
            is_wanted: true,
            is_late: false,
        });
        drop(orders);
        let begun = shared.sectors().begin_segment();
        let allocated = match begun {
            None => Err(io::ErrorKind::StorageFull.into()),
            Some(segment) => allocate(ground, segment).map(|()| segment),
        };
        match (allocated, begun) {
            (Ok(segment), _) => self.allocated(segment, shared),
            (Err(error), begun) => {
                if let Some(segment) = begun {
                    shared.sectors().end_transit(segment);
                }
                self.failed(&error, shared, clock());
            }
        }
    }

    fn allocated(&self, segment: SegmentNo, shared: &Shared) {
        let mut orders = self.orders();
        orders.failed = None;
        shared.space_is_not_late();
        match orders.under_way.take() {
            Some(UnderWay {
                vm,
                is_wanted: true,
                ..
            }) => shared.sectors().add_segment(vm, segment),
            _ => {
                drop(orders);
                shared.give_back_segments(vec![segment]);
            }
        }
    }

    fn failed(&self, error: &io::Error, shared: &Shared, now: Instant) {
        let is_full = matches!(
            error.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        );
        let mut orders = self.orders();
        orders.under_way = None;
        shared.space_is_not_late();
        if is_full {
            // The tier says so itself, and knows when it is over.
            drop(orders);
            return shared.note_full(now);
        }
        let why = TierError::Io {
            kind: TierKind::Disk,
            operation: "fallocate",
            reason: error.to_string(),
        };
        tracing::warn!(%why, "the disk tier gets no more space for now");
        orders.failed = Some((now, why));
    }
}

fn allocate(ground: &dyn Ground, segment: SegmentNo) -> io::Result<()> {
    match ground.free_bytes() {
        Ok(Some(free_bytes)) if free_bytes < SEGMENT_BYTES => {
            Err(io::ErrorKind::StorageFull.into())
        }
        _ => ground.allocate(segment.start().byte_offset(), SEGMENT_BYTES),
    }
}

/// The thread's part of a tier.
pub(super) fn start(
    space: &Arc<Space>,
    shared: &Arc<Shared>,
    ground: Box<dyn Ground>,
    ends: super::attend::Ends,
) -> io::Result<()> {
    let (space, shared) = (Arc::clone(space), Arc::clone(shared));
    let thread = std::thread::Builder::new().name("pt-tier-space".to_owned());
    let run = move || {
        space.run(&shared, &*ground);
        // The disk is let go of before the end is told.
        drop(ground);
        drop(ends);
    };
    thread.spawn(run).map(drop)
}
