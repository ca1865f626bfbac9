// SPDX-License-Identifier: Apache-2.0
//! How late this machine wakes a thread that has its CPU to itself: no tail below that can be measured
//! here. A thread of the same class as the bench's parts sleeps until the next point of a fixed period,
//! that of B's requests, and reports how late it woke.

use super::frontend::{FrontendError, Latency, latency, say};
use pagetide_sys::clock;
use rustix::thread::set_current_timer_slack;
use std::{
    io::BufRead as _,
    num::NonZeroU64,
    time::{Duration, Instant},
};

/// From one point to the next.
const BEAT: Duration = Duration::from_micros(250);
/// Points of a measurement: two seconds.
const POINTS: u32 = 8000;

/// For each line of input, prints a [`Latency`].
///
/// # Errors
/// [`FrontendError`].
pub fn serve() -> Result<(), FrontendError> {
    // Timers of ordinary threads are delayed by 50 us otherwise.
    set_current_timer_slack(NonZeroU64::new(1))?;
    for line in std::io::stdin().lock().lines() {
        line?;
        say(&look(POINTS, BEAT))?;
    }
    Ok(())
}

fn look(points: u32, beat: Duration) -> Latency {
    let began = Instant::now();
    let mut late_ns = Vec::new();
    let mut next = beat;
    for _ in 0..points {
        std::thread::sleep(next.saturating_sub(began.elapsed()));
        let late = began.elapsed().saturating_sub(next);
        late_ns.push(clock::ns(late));
        // Points that passed while it overslept do not count as wake-ups.
        while next <= began.elapsed() {
            next += beat;
        }
    }
    latency(late_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_point_is_counted_once() {
        let found = look(20, Duration::from_micros(10));
        assert_eq!(found.count, 20);
        assert!(found.p50_us <= found.max_us);
    }
}
