// SPDX-License-Identifier: Apache-2.0
//! What queueing theory says about one worker that serves faults in the order of arrival, each for the same
//! time.
//!
//! With Poisson arrivals that is the queue M/D/1. At load ρ and service time *s* a fault takes on average
//!
//! ```text
//!   W = s + ρ s / (2 (1 - ρ))        so, with 16 tenants of load 0.05 each:
//!   W(0.8) / W(0.05) = (1 + 2) / (1 + 0.026) = 2.92
//! ```
//! It is the mean over all time. A run of seconds has its own arrivals: [`mean_of`] follows Lindley's
//! recursion through these, and leaves only what the machine adds. With aligned arrivals, the k-th of n
//! faults waits for k - 1 others: (1 + n) / 2 times the service time, whatever serves them.

use super::load::Fault;
use std::time::Duration;

/// Mean time in the queue M/D/1 at this load, of service times; infinite from load 1 on.
pub(super) fn md1(load: f64) -> f64 {
    if load >= 1.0 {
        return f64::INFINITY;
    }
    1.0 + load / (2.0 * (1.0 - load))
}

/// The same of 16 tenants over one, each of which has `per_second` faults that take `service`.
pub(super) fn poisson_ratio(tenants: usize, per_second: u32, service: Duration) -> f64 {
    let load = |tenants: f64| tenants * f64::from(per_second) * service.as_secs_f64();
    md1(load(tenants as f64)) / md1(load(1.0))
}

/// Mean time of these faults, in the order of time, with one worker.
pub(super) fn mean_of(faults: &[Fault], service: Duration) -> Duration {
    let (mut free_at, mut total) = (Duration::ZERO, Duration::ZERO);
    for fault in faults {
        free_at = free_at.max(fault.at) + service;
        total += free_at - fault.at;
    }
    let count = u32::try_from(faults.len()).unwrap_or(u32::MAX).max(1);
    total / count
}

#[cfg(test)]
mod tests {
    use super::super::load::{Arrivals, faults};
    use super::*;

    const SERVICE: Duration = Duration::from_millis(5);

    #[test]
    fn ratio_of_the_paper_s_tenants_is_2_9() {
        let ratio = poisson_ratio(16, 10, SERVICE);
        assert!((ratio - 2.924).abs() < 1e-3, "{ratio}");
        assert!(poisson_ratio(20, 10, SERVICE).is_infinite());
    }

    #[test]
    fn aligned_faults_wait_for_half_of_the_others() {
        let faults = faults(Arrivals::Aligned, 16, 10, Duration::from_secs(1));
        let mean = mean_of(&faults, SERVICE);
        assert_eq!(mean, SERVICE.mul_f64(8.5));
        assert_eq!(mean_of(&[], SERVICE), Duration::ZERO);
    }

    #[test]
    fn many_poisson_arrivals_come_close_to_the_formula() {
        let faults = faults(Arrivals::Poisson, 16, 10, Duration::from_secs(2_000));
        let ratio = mean_of(&faults, SERVICE).as_secs_f64() / SERVICE.as_secs_f64();
        assert!((ratio / md1(0.8) - 1.0).abs() < 0.1, "{ratio}");
    }
}
