// SPDX-License-Identifier: Apache-2.0
//! What faults have cost the packets of a queue pair: those that were lost, and how long others
//! waited.
//!
//! Both are rare, and one engine writes them for a pair, so a lock that is taken for each costs
//! nothing that matters.

use crate::slo::histogram::LatencyCounts;
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Packets received on a queue pair that met a fault, since the device was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PairReport {
    /// Lost, because their buffers were absent and the store had no room, or by policy.
    pub fault_drops: u64,
    /// They waited in the store, and got buffers.
    pub parked_packets: u64,
    /// How long half of these waited at most.
    pub parked_p50: Duration,
    /// How long all but one in a hundred waited at most.
    pub parked_p99: Duration,
    /// The longest wait.
    pub parked_max: Duration,
    /// All waits together.
    pub parked_total: Duration,
}

#[derive(Debug, Clone, Default)]
struct Waits {
    fault_drops: u64,
    times: LatencyCounts,
    max_ns: u64,
    total_ns: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct PairAccount(Mutex<Waits>);

impl PairAccount {
    /// A packet was lost to a fault.
    pub fn lost(&self) {
        self.lock().fault_drops += 1;
    }

    /// A packet has waited so long.
    pub fn waited(&self, ns: u64) {
        let mut waits = self.lock();
        waits.times.record(ns);
        waits.max_ns = waits.max_ns.max(ns);
        waits.total_ns = waits.total_ns.saturating_add(ns);
    }

    /// What it has come to.
    pub fn report(&self) -> PairReport {
        // Computed from a copy: an engine may wait for the lock.
        let waits = self.lock().clone();
        let at = |of, in_all| {
            let ns = waits.times.quantile_ns(of, in_all).unwrap_or(0);
            // A bucket's upper end may exceed the longest wait that occurred.
            Duration::from_nanos(ns.min(waits.max_ns))
        };
        PairReport {
            fault_drops: waits.fault_drops,
            parked_packets: waits.times.total(),
            parked_p50: at(1, 2),
            parked_p99: at(99, 100),
            parked_max: Duration::from_nanos(waits.max_ns),
            parked_total: Duration::from_nanos(waits.total_ns),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_told_as_they_were() {
        let account = PairAccount::default();
        assert_eq!(account.report(), PairReport::default());
        for ms in 1..=100 {
            account.waited(ms * 1_000_000);
        }
        account.lost();
        let report = account.report();
        assert_eq!((report.fault_drops, report.parked_packets), (1, 100));
        assert_eq!(report.parked_max, Duration::from_millis(100));
        assert_eq!(report.parked_total, Duration::from_millis(5050));
        let near = |found: Duration, ms: u64| {
            let wanted = Duration::from_millis(ms);
            wanted <= found && found <= wanted.mul_f64(1.04)
        };
        assert!(near(report.parked_p50, 50), "{report:?}");
        assert!(near(report.parked_p99, 99), "{report:?}");
    }
}
