// SPDX-License-Identifier: Apache-2.0
//! State of a device that engines and control threads share: its counters, and why it stopped.
//!
//! Each engine writes its own counters, so a count is a plain load and store; a report adds them
//! up.

use crate::{
    chain::ChainError,
    frame::FrameError,
    inject::Injector,
    kind::Kind,
    slo::{account::Account, report::Accounting},
};
use pagetide_addr::DeviceId;
use pagetide_sys::clock::now_ns;
use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

/// Weights that an operator may give.
pub const WEIGHTS: std::ops::RangeInclusive<u32> = 1..=1000;
/// Default weight of a device.
pub const WEIGHT_DEFAULT: u32 = 100;

/// What a queue does while one of its chains waits for pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnFault {
    /// It begins no later chain (VPRI 5.2): chains begin in ring order. Needed by a NIC's receive
    /// ring, and by drivers that rely on their disk taking requests in order.
    Pause,
    /// It goes on with later chains, so that only the faulting chain is late.
    #[default]
    OutOfOrder,
}

/// Why a device stopped. It stays stopped until its front end connects again.
#[derive(Debug, thiserror::Error)]
pub enum StopReason {
    /// A descriptor chain is invalid.
    #[error("queue {queue}, chain {head}: {source}")]
    Chain {
        /// Queue number.
        queue: u16,
        /// Head of the chain.
        head: u16,
        /// What is wrong with it.
        source: ChainError,
    },
    /// A chain is no request of a device of this kind.
    #[error("queue {queue}, chain {head}: {source}")]
    Request {
        /// Queue number.
        queue: u16,
        /// Head of the chain.
        head: u16,
        /// What is wrong with it.
        source: FrameError,
    },
    /// The rings cannot be used.
    #[error("queue {queue}: {error}")]
    Ring {
        /// Queue number.
        queue: u16,
        /// What is wrong with them.
        error: String,
    },
    /// Guest memory needed even for an answer is lost.
    #[error(
        "queue {queue}: the content of guest pages that hold the ring or a request's status is lost"
    )]
    ContentLost {
        /// Queue number.
        queue: u16,
    },
    /// A file of its memory, or of what is recorded of it, has shrunk, or has no memory for its holes.
    #[error(
        "guest memory was lost: its file was made shorter, or its file system has no room for a hole of it"
    )]
    MemoryLost,
    /// The engine's io_uring failed.
    #[error("the engine's io_uring failed: {0}")]
    Engine(String),
}

/// Counters of a device on one engine.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub requests: AtomicU64,
    /// Moved to the guest.
    pub read_bytes: AtomicU64,
    /// Moved from the guest.
    pub written_bytes: AtomicU64,
    pub errors: AtomicU64,
    pub malformed: AtomicU64,
    pub outside: AtomicU64,
    pub iopfs: AtomicU64,
    pub injected_iopfs: AtomicU64,
    pub prefaults: AtomicU64,
    pub overwritten_pages: AtomicU64,
    pub timed_out: AtomicU64,
    pub parked: AtomicU64,
    pub in_flight: AtomicU64,
    pub wired_bytes: AtomicU64,
    pub logged: AtomicU64,
    pub unlogged: AtomicU64,
    pub lookup_ns: AtomicU64,
    pub lookup_samples: AtomicU64,
}

/// Adds to a counter that only this thread writes.
#[inline]
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    let now = counter.load(Ordering::Relaxed).wrapping_add(amount);
    counter.store(now, Ordering::Relaxed);
}

/// Subtracts from a counter that only this thread writes.
#[inline]
pub(crate) fn sub(counter: &AtomicU64, amount: u64) {
    add(counter, amount.wrapping_neg());
}

/// Whether a front end is about to go, or is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaving {
    Yes,
    No,
}

/// What a device is made of and does not change.
#[derive(Debug)]
pub(crate) struct DeviceSetup {
    pub id: DeviceId,
    pub kind: Kind,
    pub on_fault: OnFault,
    /// Engines of the DPU; each has counters of its own.
    pub engine_count: usize,
    /// How long a chain waits for its pages before it fails; `None` means forever.
    pub iopf_timeout: Option<Duration>,
}

/// A device as all its threads see it.
#[derive(Debug)]
pub(crate) struct DeviceShared {
    pub id: DeviceId,
    pub kind: Kind,
    pub on_fault: OnFault,
    weight: AtomicU32,
    pub counters: Box<[Counters]>,
    /// The account that all its engines report to.
    pub account: Mutex<Account>,
    accounted: AtomicBool,
    pub injector: Injector,
    stopped: AtomicBool,
    leaving: AtomicBool,
    reason: Mutex<Option<StopReason>>,
}

impl DeviceShared {
    pub fn new(setup: DeviceSetup) -> Self {
        let engine_count = setup.engine_count;
        Self {
            id: setup.id,
            kind: setup.kind,
            on_fault: setup.on_fault,
            weight: AtomicU32::new(WEIGHT_DEFAULT),
            counters: (0..engine_count).map(|_| Counters::default()).collect(),
            account: Mutex::new(Account::new(engine_count, now_ns())),
            accounted: AtomicBool::new(true),
            injector: Injector::new(setup.iopf_timeout),
            stopped: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            reason: Mutex::new(None),
        }
    }

    /// Its share of its engines relative to the weights of others.
    pub fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
    }

    /// Engines use it from their next turn on.
    pub fn set_weight(&self, weight: u32) {
        self.weight.store(weight, Ordering::Relaxed);
    }

    /// True while engines report to its account.
    #[inline]
    pub fn is_accounted(&self) -> bool {
        self.accounted.load(Ordering::Relaxed)
    }

    /// Sets whether engines report to its account.
    pub fn set_accounting(&self, accounting: Accounting) {
        let accounted = accounting == Accounting::On;
        self.accounted.store(accounted, Ordering::Relaxed);
    }

    /// True once [`Self::stop`] was called.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Stops the device; only the first reason counts, and is logged.
    pub fn stop(&self, reason: StopReason) {
        let mut slot = self.lock();
        self.stopped.store(true, Ordering::Relaxed);
        if slot.is_none() {
            tracing::error!(device = self.id.0, %reason, "device stopped");
            *slot = Some(reason);
        }
    }

    /// Clears the stop for a new front end.
    pub fn forget_stop(&self) {
        let mut slot = self.lock();
        *slot = None;
        self.stopped.store(false, Ordering::Relaxed);
    }

    /// Sets whether the front end is leaving. If so, nothing waits for its requests any more, and a
    /// queue that stops finishes only what the kernel has.
    pub fn set_leaving(&self, leaving: Leaving) {
        let leaving = leaving == Leaving::Yes;
        self.leaving.store(leaving, Ordering::Release);
    }

    /// True while a stopping queue need not do what it has not begun: the device has stopped, or
    /// its front end is leaving.
    #[inline]
    pub fn drops_its_work(&self) -> bool {
        self.is_stopped() || self.leaving.load(Ordering::Acquire)
    }

    /// Why the device stopped, as a sentence.
    pub fn stopped_because(&self) -> Option<String> {
        self.lock().as_ref().map(ToString::to_string)
    }

    /// The sum of a counter over all engines.
    pub fn total(&self, counter: impl Fn(&Counters) -> &AtomicU64) -> u64 {
        self.counters
            .iter()
            .map(|c| counter(c).load(Ordering::Relaxed))
            .fold(0, u64::wrapping_add)
    }

    fn lock(&self) -> MutexGuard<'_, Option<StopReason>> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
