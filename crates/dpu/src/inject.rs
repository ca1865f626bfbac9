// SPDX-License-Identifier: Apache-2.0
//! Fault injection on a live device (VPRI 3.3): requests are treated as if their first data page
//! were absent, as often and for as long as configured.
//!
//! ```text
//!   due ──► next request with data ──► parked, page request (hold) ──► host waits, answers ──► resumed
//!    ▲          `burst` of them                    the way of any other fault
//!    └── 1 / rate later
//! ```
//! Arrivals are *regular*: the n-th is due n / rate after the beginning, so that a run can be
//! repeated. With a burst of N, each arrival takes the next N requests instead of one: N faults
//! back to back. An arrival that has met no request when the next one is due is skipped and counted
//! as skipped: faults are not saved up for an idle device.
//!
//! The page is present all the time. The injected fault takes the complete path of a real one: the
//! page fault queue, the function of a DPU in another process, the host's service, and back, with a
//! host that takes `latency` to handle it.
//!
//! The host may hold faults of one VM one after another, and a request's time-out runs meanwhile.
//! So all held faults together, one after another, may take at most a third of the time-out (of ten
//! seconds, if there is none). An arrival that would exceed this is skipped and counted as skipped.
//! Faults held when an injection ends run to their end.
//!
//! An injection ends by itself, or when the next one replaces it. On the path of a request it costs
//! one load: the time at which a fault is due.

use crate::slo::histogram::LatencyCounts;
use std::{
    ops::RangeInclusive,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Most arrivals per second: beyond it a device does little but fault.
pub const RATE_MAX: f64 = 10_000.0;
/// Fewest arrivals per second: one per hour, the length of the longest injection.
pub const RATE_MIN: f64 = 1.0 / 3600.0;
/// Longest time that the host may hold an injected fault: well below the time-out of page requests.
pub const LATENCY_MAX: Duration = Duration::from_secs(10);
/// Faults back to back: as many as a device may have outstanding.
pub const BURST: RangeInclusive<u32> = 1..=128;
/// How long an injection lasts.
pub const SECONDS: RangeInclusive<u64> = 1..=3600;
const NEVER_NS: u64 = u64::MAX;

/// Why an injection is refused.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum InjectionError {
    /// The rate.
    #[error(
        "the rate of faults is {0} a second; it must be above 0 (one an hour at least) and at most {RATE_MAX}"
    )]
    Rate(f64),
    /// The latency.
    #[error("the latency of an injected fault is {0:?}; it must be at most {LATENCY_MAX:?}")]
    Latency(Duration),
    /// The latency, given this device's time-out.
    #[error(
        "the latency of an injected fault is {latency:?}; it must be at most {most:?}, a third of the time that requests wait for pages (iopf-timeout-ms)"
    )]
    LatencyOfTimeout {
        /// The requested latency.
        latency: Duration,
        /// The allowed maximum.
        most: Duration,
    },
    /// The burst.
    #[error("the burst is {0} faults; it must be from {min} to {max}", min = BURST.start(), max = BURST.end())]
    Burst(u32),
    /// The duration.
    #[error("the injection is to last {0} s; it must be from {min} to {max} s", min = SECONDS.start(), max = SECONDS.end())]
    Seconds(u64),
}

/// Parameters of an injection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Injection {
    /// Arrivals per second, evenly spaced; each injects [`Self::burst`] faults.
    pub rate: f64,
    /// How long the host holds each fault.
    pub latency: Duration,
    /// Faults back to back at each arrival.
    pub burst: u32,
    /// How long it lasts, in seconds.
    pub seconds: u64,
}

impl Injection {
    /// # Errors
    /// [`InjectionError`], if a number is out of its bounds.
    pub fn check(&self) -> Result<(), InjectionError> {
        if !(RATE_MIN..=RATE_MAX).contains(&self.rate) {
            return Err(InjectionError::Rate(self.rate));
        }
        if self.latency > LATENCY_MAX {
            return Err(InjectionError::Latency(self.latency));
        }
        if !BURST.contains(&self.burst) {
            return Err(InjectionError::Burst(self.burst));
        }
        if !SECONDS.contains(&self.seconds) {
            return Err(InjectionError::Seconds(self.seconds));
        }
        Ok(())
    }
}

/// Progress of an injection.
#[derive(Debug, Clone, PartialEq)]
pub struct InjectionReport {
    /// Its parameters.
    pub injection: Injection,
    /// Time left; zero when it is over.
    pub left: Duration,
    /// Requests in which a fault was injected.
    pub injected: u64,
    /// Those of them that were resumed in time.
    pub resumed: u64,
    /// Arrivals that met no request before the next one, and arrivals that were left out or cut
    /// short because too much was held already.
    pub skipped: u64,
    /// Median of the times for which resumed requests were parked.
    pub parked_p50: Duration,
    /// Their 99th percentile.
    pub parked_p99: Duration,
    /// Their maximum, exact.
    pub parked_max: Duration,
}

#[derive(Debug)]
struct Plan {
    injection: Injection,
    interval_ns: u64,
    hold_us: u32,
    due_ns: u64,
    until_ns: u64,
    /// Faults of the current arrival that are still to be injected.
    left_of_burst: u32,
    injected: u64,
    skipped: u64,
    parked: LatencyCounts,
    parked_max_ns: u64,
}

/// Injected faults under way, of any injection.
#[derive(Debug, Default)]
struct Held {
    faults: u32,
    /// The longest latency since no fault was held.
    longest: Duration,
}

#[derive(Debug, Default)]
struct State {
    plan: Option<Plan>,
    held: Held,
}

/// The injection into one device, read by all its engines.
#[derive(Debug)]
pub(crate) struct Injector {
    /// When the next fault is due; [`NEVER_NS`] without an injection.
    due_ns: AtomicU64,
    /// Most time that held faults may take, one after another.
    held_max: Duration,
    state: Mutex<State>,
}

/// A fault to be injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hold {
    /// The host must not answer earlier than this, in microseconds.
    pub hold_us: u32,
}

impl Injector {
    /// For a device with this time-out for page requests; `None` means forever.
    pub fn new(iopf_timeout: Option<Duration>) -> Self {
        Self {
            due_ns: AtomicU64::new(NEVER_NS),
            held_max: iopf_timeout.map_or(LATENCY_MAX, |timeout| timeout / 3),
            state: Mutex::default(),
        }
    }

    /// Begins an injection; it replaces one under way.
    pub fn begin(&self, injection: Injection, now_ns: u64) -> Result<(), InjectionError> {
        injection.check()?;
        let (latency, most) = (injection.latency, self.held_max);
        if latency > most {
            return Err(InjectionError::LatencyOfTimeout { latency, most });
        }
        let interval_ns = interval_ns(injection.rate);
        // Checked to be at most some seconds.
        let hold_us = u32::try_from(injection.latency.as_micros()).unwrap_or(u32::MAX);
        let plan = Plan {
            injection,
            interval_ns,
            hold_us,
            due_ns: now_ns.saturating_add(interval_ns),
            until_ns: now_ns + injection.seconds * 1_000_000_000,
            left_of_burst: 0,
            injected: 0,
            skipped: 0,
            parked: LatencyCounts::default(),
            parked_max_ns: 0,
        };
        let mut state = self.lock();
        self.publish(&plan);
        state.plan = Some(plan);
        Ok(())
    }

    /// Ends the injection; its report remains available. Faults that are held stay held.
    pub fn stop(&self, now_ns: u64) {
        if let Some(plan) = self.lock().plan.as_mut() {
            plan.until_ns = plan.until_ns.min(now_ns);
            plan.end();
            self.publish(plan);
        }
    }

    /// A hint to engines. Relaxed, because one turn earlier or later does not matter.
    fn publish(&self, plan: &Plan) {
        let due_ns = match plan.left_of_burst {
            0 if plan.due_ns > plan.until_ns => NEVER_NS,
            0 => plan.due_ns,
            _ => 0,
        };
        self.due_ns.store(due_ns, Ordering::Relaxed);
    }

    /// True if a request taken now might have to fault.
    #[inline]
    pub fn may_be_due(&self, now_ns: u64) -> bool {
        self.due_ns.load(Ordering::Relaxed) <= now_ns
    }

    /// Decides whether a request with data, which is about to begin, must fault. If so, the caller
    /// must report its outcome by [`Self::resumed`] or [`Self::given_up`].
    pub fn claim(&self, now_ns: u64) -> Option<Hold> {
        let mut state = self.lock();
        let State { plan, held } = &mut *state;
        let plan = plan.as_mut()?;
        let hold = plan.claim(now_ns, held, self.held_max);
        self.publish(plan);
        hold
    }

    /// `count` requests with an injected fault have ended without being resumed: they timed out, or
    /// their queue has stopped.
    pub fn given_up(&self, count: u32) {
        self.lock().held.release(count);
    }

    /// A request with an injected fault is resumed after `parked_ns`.
    pub fn resumed(&self, parked_ns: u64) {
        let mut state = self.lock();
        state.held.release(1);
        if let Some(plan) = state.plan.as_mut() {
            plan.parked.record(parked_ns);
            plan.parked_max_ns = plan.parked_max_ns.max(parked_ns);
        }
    }

    /// The last injection, if there was one.
    pub fn report(&self, now_ns: u64) -> Option<InjectionReport> {
        let state = self.lock();
        let plan = state.plan.as_ref()?;
        let at = |numerator, denominator| {
            let ns = plan.parked.quantile_ns(numerator, denominator);
            Duration::from_nanos(ns.unwrap_or(0).min(plan.parked_max_ns))
        };
        Some(InjectionReport {
            injection: plan.injection,
            left: Duration::from_nanos(plan.until_ns.saturating_sub(now_ns)),
            injected: plan.injected,
            resumed: plan.parked.total(),
            skipped: plan.skipped + plan.overdue(now_ns),
            parked_p50: at(1, 2),
            parked_p99: at(99, 100),
            parked_max: Duration::from_nanos(plan.parked_max_ns),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    /// Counts one more fault, if all of them, held one after another, take at most `most`.
    fn admit(&mut self, latency: Duration, most: Duration) -> bool {
        let longest = match self.faults {
            0 => latency,
            _ => self.longest.max(latency),
        };
        let faults = self.faults.saturating_add(1);
        if longest.saturating_mul(faults) > most {
            return false;
        }
        *self = Self { faults, longest };
        true
    }

    fn release(&mut self, count: u32) {
        self.faults = self.faults.saturating_sub(count);
    }
}

impl Plan {
    fn claim(&mut self, now_ns: u64, held: &mut Held, held_max: Duration) -> Option<Hold> {
        if now_ns > self.until_ns {
            self.end();
            return None;
        }
        if self.left_of_burst == 0 && self.due_ns <= now_ns {
            let behind = (now_ns - self.due_ns) / self.interval_ns;
            self.skipped += behind;
            self.due_ns += (behind + 1) * self.interval_ns;
            self.left_of_burst = self.injection.burst;
        }
        let left_of_burst = self.left_of_burst.checked_sub(1)?;
        if !held.admit(self.injection.latency, held_max) {
            self.left_of_burst = 0;
            self.skipped += 1;
            return None;
        }
        self.left_of_burst = left_of_burst;
        self.injected += 1;
        Some(Hold {
            hold_us: self.hold_us,
        })
    }

    /// Arrivals that have met no request by the end are skipped.
    fn end(&mut self) {
        self.skipped += self.overdue(self.until_ns.saturating_add(1));
        self.due_ns = NEVER_NS;
        self.left_of_burst = 0;
    }

    /// Arrivals that have met no request so far. The last of them still may, unless the injection
    /// is over.
    fn overdue(&self, now_ns: u64) -> u64 {
        let last_ns = now_ns.min(self.until_ns);
        if self.due_ns > last_ns {
            return 0;
        }
        let behind = (last_ns - self.due_ns) / self.interval_ns;
        behind + u64::from(now_ns > self.until_ns)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate within its bounds gives from 100 us to an hour"
)]
fn interval_ns(rate: f64) -> u64 {
    (1e9 / rate) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const S: u64 = 1_000 * MS;
    const BEGAN: u64 = 77 * S;

    fn injection(rate: f64, burst: u32) -> Injection {
        Injection {
            rate,
            latency: Duration::from_millis(5),
            burst,
            seconds: 10,
        }
    }

    /// The milliseconds at which faults are injected, with a request every `every_ms`.
    fn injected(injector: &Injector, every_ms: u64, until_ms: u64) -> Vec<u64> {
        let times = (0..=until_ms).step_by(usize::try_from(every_ms).unwrap());
        times
            .filter(|ms| {
                let now_ns = BEGAN + ms * MS;
                injector.may_be_due(now_ns) && injector.claim(now_ns).is_some()
            })
            .collect()
    }

    fn begun(injection: Injection) -> Injector {
        let injector = Injector::new(None);
        injector.begin(injection, BEGAN).unwrap();
        injector
    }

    #[test]
    fn arrivals_are_evenly_spaced_and_end_by_themselves() {
        let injector = begun(injection(2.0, 1));
        let at = injected(&injector, 1, 60_000);
        assert_eq!(at, (1..=20).map(|n| 500 * n).collect::<Vec<_>>());
        assert!(!injector.may_be_due(u64::MAX - 1));
        let report = injector.report(BEGAN + 60 * S).unwrap();
        assert_eq!((report.injected, report.skipped), (20, 0));
        assert_eq!(report.left, Duration::ZERO);
    }

    #[test]
    fn burst_takes_the_next_requests_back_to_back() {
        let injector = begun(injection(1.0, 3));
        let at = injected(&injector, 10, 2_500);
        assert_eq!(at, [1_000, 1_010, 1_020, 2_000, 2_010, 2_020]);
        let hold = Hold { hold_us: 5_000 };
        assert_eq!(injector.claim(BEGAN + 3 * S), Some(hold));
    }

    #[test]
    fn faults_are_not_saved_up_for_a_device_that_was_idle() {
        let injector = begun(injection(10.0, 1));
        assert_eq!(injector.report(BEGAN + 5 * S + MS).unwrap().skipped, 49);
        let at = injected(&injector, 5_050, 5_050);
        assert_eq!(at, [5_050]);
        assert_eq!(injected(&injector, 1, 5_099), [0; 0]);
        let report = injector.report(BEGAN + 20 * S).unwrap();
        assert_eq!((report.injected, report.skipped), (1, 99));
        assert_eq!(injector.claim(BEGAN + 20 * S), None);
        assert_eq!(injector.report(BEGAN + 20 * S).unwrap().skipped, 99);
    }

    #[test]
    fn arrival_is_skipped_while_what_is_held_would_take_over_a_third_of_the_time_out() {
        let slow = Injection {
            latency: Duration::from_secs(4),
            ..injection(10.0, 3)
        };
        // Without a time-out, ten seconds count.
        for timeout in [Some(Duration::from_secs(30)), None] {
            let injector = Injector::new(timeout);
            injector.begin(slow, BEGAN).unwrap();
            assert_eq!(injected(&injector, 1, 550), [100, 101]);
            let report = injector.report(BEGAN + 550 * MS).unwrap();
            assert_eq!((report.injected, report.resumed, report.skipped), (2, 0, 5));
            injector.resumed(4 * S);
            assert_eq!(injected(&injector, 1, 650), [600]);
            injector.given_up(2);
            assert_eq!(injected(&injector, 1, 750), [700, 701]);
            let report = injector.report(BEGAN + 750 * MS).unwrap();
            assert_eq!((report.injected, report.resumed), (5, 1));
            // Faults of the first injection are still held when the next one begins.
            injector.begin(injection(10.0, 1), BEGAN).unwrap();
            assert_eq!(injected(&injector, 1, 150), [0; 0]);
            injector.given_up(2);
            assert_eq!(injected(&injector, 1, 250), [200]);
        }
    }

    #[test]
    fn latency_above_a_third_of_the_time_out_is_refused_with_a_sentence() {
        let injector = Injector::new(Some(Duration::from_secs(3)));
        let of_ms = |ms| Injection {
            latency: Duration::from_millis(ms),
            ..injection(1.0, 1)
        };
        let error = injector.begin(of_ms(1_001), BEGAN).unwrap_err();
        assert!(error.to_string().contains("at most 1s, a third"), "{error}");
        assert_eq!(injector.report(BEGAN), None, "nothing was begun");
        injector.begin(of_ms(1_000), BEGAN).unwrap();
        assert_eq!(injected(&injector, 500, 1_000), [1_000]);
    }

    #[test]
    fn stop_ends_it_at_once_and_a_new_one_begins_afresh() {
        let injector = begun(injection(10.0, 5));
        assert_eq!(injected(&injector, 100, 100), [100]);
        injector.stop(BEGAN + 150 * MS);
        assert_eq!(injected(&injector, 100, 20_000), [0; 0]);
        assert_eq!(injector.report(BEGAN + S).unwrap().injected, 1);
        injector.begin(injection(1.0, 1), BEGAN).unwrap();
        assert_eq!(injector.report(BEGAN).unwrap().injected, 0);
        assert_eq!(injected(&injector, 100, 1_000), [1_000]);
    }

    #[test]
    fn latencies_of_what_was_injected_are_told() {
        let injector = Injector::new(None);
        assert_eq!(injector.report(BEGAN), None);
        injector.resumed(5);
        injector.begin(injection(1.0, 1), BEGAN).unwrap();
        for ms in [5, 6, 9] {
            injector.resumed(ms * MS);
        }
        let report = injector.report(BEGAN).unwrap();
        assert_eq!(report.resumed, 3);
        assert_eq!(report.parked_max, Duration::from_millis(9));
        assert!(report.parked_p50 >= Duration::from_millis(6));
        assert!(report.parked_p50 < Duration::from_micros(6_200));
    }

    #[test]
    fn numbers_out_of_bounds_are_refused_with_a_sentence() {
        let good = injection(1.0, 1);
        assert_eq!(good.check(), Ok(()));
        for rate in [0.0, -1.0, 10_001.0, f64::NAN, f64::INFINITY, 1e-9] {
            let error = Injection { rate, ..good }.check().unwrap_err();
            assert!(error.to_string().contains("rate"), "{error}");
        }
        let latency = Duration::from_millis(10_001);
        let error = Injection { latency, ..good }.check().unwrap_err();
        assert!(error.to_string().contains("at most 10s"), "{error}");
        for burst in [0, 129] {
            assert!(Injection { burst, ..good }.check().is_err());
        }
        for seconds in [0, 3601] {
            assert!(Injection { seconds, ..good }.check().is_err());
        }
        let injector = Injector::new(None);
        assert!(injector.begin(injection(0.0, 1), BEGAN).is_err());
        assert_eq!(injector.report(BEGAN), None, "nothing was begun");
    }
}
