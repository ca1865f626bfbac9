// SPDX-License-Identifier: Apache-2.0
//! The host's monotonic clock, as a number.
//!
//! `std`'s `Instant` is the same clock, but cannot leave its process. A device stamps its page requests and
//! its log's records with the time, and the host in another process compares them with its own: so both read
//! this. It stands still while the host is suspended, and no one sets it.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The time since a fixed moment, the same for all processes of the host.
#[must_use]
pub fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    // Neither part is ever negative.
    let nanos = u32::try_from(now.tv_nsec).unwrap_or(0);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), nanos)
}

/// The same in nanoseconds.
#[must_use]
pub fn now_ns() -> u64 {
    ns(now())
}

/// `time` in nanoseconds; the largest number for more than 584 years.
#[inline]
#[must_use]
pub fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_goes_as_that_of_instants_does() {
        let (instant, first) = (std::time::Instant::now(), now_ns());
        let (later, passed) = (now_ns(), instant.elapsed());
        assert!(first <= later);
        assert!(ns(passed) >= later - first, "{passed:?} {first} {later}");
        assert!(now() >= Duration::from_nanos(later));
    }

    #[test]
    fn very_long_times_are_the_largest_number() {
        assert_eq!(ns(Duration::from_micros(3)), 3000);
        assert_eq!(ns(Duration::MAX), u64::MAX);
    }
}
