// SPDX-License-Identifier: Apache-2.0
//! [`Latencies`]: how long something took, recorded from several threads.

use crate::figure::LatencyUs;
use hdrhistogram::Histogram;
use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

/// Longest latency told apart: a minute.
const MAX_NS: u64 = 60_000_000_000;

/// A histogram behind a lock that is held for some tens of nanoseconds.
pub(super) struct Latencies(Mutex<Histogram<u64>>);

impl Latencies {
    pub(super) fn new() -> Self {
        let Ok(histogram) = Histogram::new_with_bounds(1, MAX_NS, 2) else {
            unreachable!("the bounds are constants that fit");
        };
        Self(Mutex::new(histogram))
    }

    pub(super) fn record(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(MAX_NS);
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .saturating_record(ns);
    }

    pub(super) fn report(&self) -> LatencyUs {
        LatencyUs::from_ns(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
