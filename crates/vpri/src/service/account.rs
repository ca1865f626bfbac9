// SPDX-License-Identifier: Apache-2.0
//! The account of a tenant: how many page requests it had, how many are open, how long they took.
//!
//! ```text
//!   device sends          handling begins           answered
//!        │◄──── waited ────►│◄────── handling ──────►│
//!        │                  │
//!        │   handed to a worker that sleeps ──► it runs on its CPU      preempt
//! ```
//! Only the device knows how long it takes from the answer until it goes on.

use hdrhistogram::Histogram;
use pagetide_addr::{PageRequest, RequestKind};
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Longest time that is distinguished: a minute.
const MAX_NS: u64 = 60_000_000_000;

/// Durations recorded from several threads: a histogram in nanoseconds behind a lock that is held
/// for some tens of nanoseconds.
#[derive(Debug)]
pub struct Latencies(Mutex<Histogram<u64>>);

impl Latencies {
    /// An empty record.
    #[must_use]
    pub fn new() -> Self {
        let Ok(histogram) = Histogram::new_with_bounds(1, MAX_NS, 2) else {
            unreachable!("the bounds are constants that fit");
        };
        Self(Mutex::new(histogram))
    }

    /// Records one duration.
    pub fn record(&self, took: Duration) {
        self.record_ns(u64::try_from(took.as_nanos()).unwrap_or(MAX_NS));
    }

    /// Records one duration, in nanoseconds.
    pub fn record_ns(&self, took_ns: u64) {
        self.lock().saturating_record(took_ns);
    }

    /// The durations recorded so far, in nanoseconds.
    #[must_use]
    pub fn histogram_ns(&self) -> Histogram<u64> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Histogram<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

/// Statistics of the page requests of one tenant.
#[derive(Debug, Default)]
pub struct Account {
    requests: AtomicU64,
    prefaults: AtomicU64,
    alias_faults: AtomicU64,
    dropped_prefaults: AtomicU64,
    outstanding: AtomicU64,
    /// From when the device sends until the answer.
    pub iopf: Latencies,
    /// From when the device sends until handling begins (pre-fault).
    pub waited: Latencies,
    /// From when handling begins until the answer.
    pub handling: Latencies,
    /// From handing a request to a sleeping worker until that worker runs on its CPU: the
    /// counterpart of the forced exit of VPRI 6.1.
    pub preempt: Latencies,
}

/// How long one request took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Took {
    pub(super) waited_ns: u64,
    pub(super) handling_ns: u64,
}

impl Account {
    /// Requests taken so far, without [`Self::alias_faults`].
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    /// Those of them for which no DMA waited.
    #[must_use]
    pub fn prefaults(&self) -> u64 {
        self.prefaults.load(Relaxed)
    }

    /// Prefaults that were dropped because they would have had to wait.
    #[must_use]
    pub fn dropped_prefaults(&self) -> u64 {
        self.dropped_prefaults.load(Relaxed)
    }

    /// Alias faults of the DPU so far: it touched a page that was absent. Without a balloon or free page
    /// reporting in the guest each one is a bug.
    #[must_use]
    pub fn alias_faults(&self) -> u64 {
        self.alias_faults.load(Relaxed)
    }

    /// Requests that were taken and are not answered yet.
    #[must_use]
    pub fn outstanding(&self) -> u64 {
        self.outstanding.load(Relaxed)
    }

    pub(super) fn open(&self, request: &PageRequest) {
        match request.kind {
            RequestKind::AliasFault => self.alias_faults.fetch_add(1, Relaxed),
            RequestKind::Prefault | RequestKind::BlankAhead => {
                self.prefaults.fetch_add(1, Relaxed);
                self.requests.fetch_add(1, Relaxed)
            }
            RequestKind::Demand | RequestKind::Blank | RequestKind::Overwrite { .. } => {
                self.requests.fetch_add(1, Relaxed)
            }
        };
        self.outstanding.fetch_add(1, Relaxed);
    }

    /// The request is answered, or no longer belongs to this tenant (then it took no time).
    pub(super) fn close(&self, took: Option<Took>) {
        self.outstanding.fetch_sub(1, Relaxed);
        if let Some(took) = took {
            self.waited.record_ns(took.waited_ns);
            self.handling.record_ns(took.handling_ns);
            (self.iopf).record_ns(took.waited_ns.saturating_add(took.handling_ns));
        }
    }

    pub(super) fn drop_prefault(&self) {
        self.dropped_prefaults.fetch_add(1, Relaxed);
    }
}
