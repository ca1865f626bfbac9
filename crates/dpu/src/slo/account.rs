// SPDX-License-Identifier: Apache-2.0
//! The account of one device: rolling windows of a minute, an hour and a day.
//!
//! ```text
//!   running slice ──10 s──► slices (6) ─┐
//!        running minute ────60 s──► minutes (60) ─┐
//!              running hour ──────────1 h──► hours (24)
//!
//!   minute = slices + running slice                       60 to  70 s
//!   hour   = minutes + running minute + running slice     60 to  61 min
//!   day    = hours + running hour + … + running slice     24 to  25 h
//! ```
//! So a new event is in every window at once, and a window reaches back at least its length. All
//! engines of a device report to one account ([`super::recorder`]), since promises to a tenant are
//! about the device and not about a queue. Time is passed in: nothing here reads a clock.
//!
//! # Memory
//! A tally is 200 bytes plus its histogram, whose size depends on the spread of the latencies: 100
//! to 500 bytes for most disks, 3.5 KiB at most. At most 93 of them are kept: about 50 KiB for a
//! device that has worked for a day, 350 KiB for one whose latencies spread from a microsecond to
//! minutes in each of its minutes; nothing for an idle device ([`Account::heap_bytes`]).
//!
//! # Slow requests
//! A request is slow if it takes longer than ten times the median of the last minute, and longer
//! than a millisecond. The last [`SLOW_KEPT`] are kept with the stage that held them; the others
//! are only counted by stage.

use super::{
    bins::{BINS_PER_SECOND, Bins},
    bursts::FaultMeter,
    course::Injected,
    report::{SloReport, SloWindow},
    slow::{Done, SlowCause},
    tally::Tally,
};
use std::{collections::VecDeque, time::Duration};

const SLICE_NS: u64 = 10_000_000_000;
const SLICES: usize = 6;
const MINUTES: usize = 60;
const HOURS: usize = 24;
/// After a silence longer than a day, no window contains anything older.
const SILENCE_NS: u64 = 25 * 3600 * 1_000_000_000;
/// Slow requests that are kept with all details.
pub(crate) const SLOW_KEPT: usize = 64;
/// No faster request is slow, whatever the median.
pub(crate) const SLOW_FLOOR_NS: u64 = 1_000_000;
/// A slow request takes more than this many times the median.
const SLOW_TIMES_MEDIAN: u64 = 10;
/// Least number of requests for a meaningful median.
const MEDIAN_OF_MIN: u64 = 64;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Account {
    began_ns: u64,
    /// Number of the running slice, counted from `began_ns`.
    slice: u64,
    running: Tally,
    running_minute: Tally,
    running_hour: Tally,
    slices: VecDeque<Tally>,
    minutes: VecDeque<Tally>,
    hours: VecDeque<Tally>,
    bins: Bins,
    meter: FaultMeter,
    threshold_ns: u64,
    slow: VecDeque<Done>,
    slow_total: u64,
}

impl Account {
    /// Empty, for a device with `engine_count` engines, starting at `now_ns`.
    pub fn new(engine_count: usize, now_ns: u64) -> Self {
        Self {
            began_ns: now_ns,
            slice: 0,
            running: Tally::default(),
            running_minute: Tally::default(),
            running_hour: Tally::default(),
            slices: VecDeque::new(),
            minutes: VecDeque::new(),
            hours: VecDeque::new(),
            bins: Bins::new(engine_count, now_ns),
            meter: FaultMeter::default(),
            threshold_ns: SLOW_FLOOR_NS,
            slow: VecDeque::new(),
            slow_total: 0,
        }
    }

    /// Records a request that is faster than any slow one.
    pub fn quick(&mut self, at_ns: u64, latency_ns: u64, bytes: u32) {
        let tally = &mut self.running;
        tally.latency.record(latency_ns);
        tally.worst_ns = tally.worst_ns.max(latency_ns);
        tally.bytes = tally.bytes.saturating_add(u64::from(bytes));
        self.bins.done(at_ns, u64::from(bytes));
        let total = self.running.latency.total();
        if total.is_power_of_two() && total >= MEDIAN_OF_MIN {
            self.set_threshold();
        }
    }

    /// Records a request that may be slow.
    pub fn done(&mut self, done: Done) {
        let latency_ns = done.latency_ns();
        self.quick(done.at_ns, latency_ns, done.bytes);
        if latency_ns <= self.threshold_ns {
            return;
        }
        let slow = &mut self.running.slow[done.cause().index()];
        *slow = slow.saturating_add(1);
        self.slow_total += 1;
        if self.slow.len() == SLOW_KEPT {
            self.slow.pop_front();
        }
        self.slow.push_back(done);
    }

    /// Records page requests that were sent.
    pub fn faults(&mut self, at_ns: u64, count: u32, injected: Injected) {
        let rate = self.meter.record(at_ns, count);
        let tally = &mut self.running;
        tally.faults += u64::from(count);
        tally.injected += u64::from(injected == Injected::Yes);
        tally.fault_peak = tally.fault_peak.max(rate.per_second);
        tally.bursts = tally.bursts.saturating_add(rate.bursts);
    }

    /// The engine has requests in flight from now on.
    pub fn busy(&mut self, engine: usize, at_ns: u64) {
        self.bins.busy(engine, at_ns);
    }

    /// The engine has no request in flight any more.
    pub fn idle(&mut self, engine: usize, at_ns: u64) {
        self.bins.idle(engine, at_ns);
    }

    /// Advances the windows. Call this before reporting anything that happens later.
    pub fn advance(&mut self, now_ns: u64) {
        let slice = now_ns.saturating_sub(self.began_ns) / SLICE_NS;
        if (slice - slice.min(self.slice)) * SLICE_NS > SILENCE_NS {
            self.forget(slice);
        }
        while self.slice < slice {
            let end_ns = self.began_ns + (self.slice + 1) * SLICE_NS;
            let tally = &mut self.running;
            self.bins.settle(end_ns, |done| tally.bin(done));
            self.seal_slice();
        }
        let tally = &mut self.running;
        self.bins.settle(now_ns, |done| tally.bin(done));
    }

    fn forget(&mut self, slice: u64) {
        self.slices.clear();
        self.minutes.clear();
        self.hours.clear();
        for tally in [
            &mut self.running,
            &mut self.running_minute,
            &mut self.running_hour,
        ] {
            *tally = Tally::default();
        }
        // What stood still all the time is still told, from a minute ago.
        self.slice = slice.saturating_sub(SLICES as u64);
    }

    fn seal_slice(&mut self) {
        self.slice += 1;
        self.running_minute.add(&self.running);
        seal(&mut self.running, &mut self.slices, SLICES);
        if self.slice.is_multiple_of(SLICES as u64) {
            self.running_hour.add(&self.running_minute);
            seal(&mut self.running_minute, &mut self.minutes, MINUTES);
        }
        if self.slice.is_multiple_of((SLICES * MINUTES) as u64) {
            seal(&mut self.running_hour, &mut self.hours, HOURS);
        }
        self.set_threshold();
    }

    fn set_threshold(&mut self) {
        let window = self.minute();
        if window.latency.total() >= MEDIAN_OF_MIN {
            let median_ns = window.latency.quantile_ns(1, 2).unwrap_or(0);
            self.threshold_ns = median_ns
                .saturating_mul(SLOW_TIMES_MEDIAN)
                .max(SLOW_FLOOR_NS);
        }
    }

    fn minute(&self) -> Tally {
        sum(self.slices.iter().chain([&self.running]))
    }

    fn hour(&self) -> Tally {
        let running = [&self.running_minute, &self.running];
        sum(self.minutes.iter().chain(running))
    }

    fn day(&self) -> Tally {
        let running = [&self.running_hour, &self.running_minute, &self.running];
        sum(self.hours.iter().chain(running))
    }

    /// The whole account, at `now_ns`.
    pub fn report(&mut self, now_ns: u64) -> SloReport {
        self.advance(now_ns);
        let age_ns = now_ns.saturating_sub(self.began_ns);
        // At most so many sealed stretches, plus the time since the running one began.
        let covers = |unit_slices: u64, kept: usize| {
            let unit_ns = unit_slices * SLICE_NS;
            let sealed = (age_ns / unit_ns).min(kept as u64);
            Duration::from_nanos(sealed * unit_ns + age_ns % unit_ns)
        };
        let (minute, hour) = (SLICES as u64, (SLICES * MINUTES) as u64);
        SloReport {
            minute: window(&self.minute(), covers(1, SLICES)),
            hour: window(&self.hour(), covers(minute, MINUTES)),
            day: window(&self.day(), covers(hour, HOURS)),
            slow_threshold: Duration::from_nanos(self.threshold_ns),
            slow_requests: self.slow_total,
            slow: self.slow.iter().rev().map(|d| d.told(now_ns)).collect(),
            memory_bytes: (size_of::<Self>() + self.heap_bytes()) as u64,
        }
    }

    /// Heap memory it uses.
    pub fn heap_bytes(&self) -> usize {
        let kept = [&self.slices, &self.minutes, &self.hours];
        let rows = kept.iter().map(|k| k.capacity() * size_of::<Tally>());
        let sealed = kept.iter().copied().flatten();
        let running = [&self.running, &self.running_minute, &self.running_hour];
        let counts = sealed.chain(running).map(|t| t.latency.heap_bytes());
        let slow = self.slow.capacity() * size_of::<Done>();
        rows.chain(counts).sum::<usize>() + slow + self.bins.heap_bytes()
    }
}

/// Moves a running tally to the kept ones, of which the oldest may be dropped.
fn seal(running: &mut Tally, kept: &mut VecDeque<Tally>, most: usize) {
    let mut sealed = std::mem::take(running);
    sealed.latency.trim();
    if kept.len() == most {
        kept.pop_front();
    }
    kept.push_back(sealed);
}

fn sum<'a>(tallies: impl Iterator<Item = &'a Tally>) -> Tally {
    tallies.fold(Tally::default(), |mut sum, tally| {
        sum.add(tally);
        sum
    })
}

fn window(tally: &Tally, covers: Duration) -> SloWindow {
    let at = |numerator, denominator| {
        let ns = tally.latency.quantile_ns(numerator, denominator);
        // A bucket's upper end may exceed the worst latency that occurred.
        Duration::from_nanos(ns.unwrap_or(0).min(tally.worst_ns))
    };
    let slow = SlowCause::ALL.into_iter().zip(tally.slow);
    SloWindow {
        covers,
        requests: tally.latency.total(),
        bytes: tally.bytes,
        p50: at(1, 2),
        p99: at(99, 100),
        p999: at(999, 1000),
        p9999: at(9999, 10_000),
        worst: Duration::from_nanos(tally.worst_ns),
        demand: Duration::from_millis(1000 / BINS_PER_SECOND) * tally.demand_bins,
        least_iops: tally.least_requests.map(|n| u64::from(n) * BINS_PER_SECOND),
        least_bytes_per_second: tally.least_bytes.map(|n| n * BINS_PER_SECOND),
        iopfs: tally.faults,
        injected_iopfs: tally.injected,
        iopf_peak_per_second: tally.fault_peak,
        iopf_bursts: tally.bursts,
        slow: slow.filter(|(_, count)| *count > 0).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::course::RequestTimeline;
    use super::*;
    use pagetide_addr::{PageResponse, QueueId, RequestId, ResponseCode, Tier};
    use pagetide_random::SplitMix64;

    const US: u64 = 1_000;
    const MS: u64 = 1_000_000;
    const S: u64 = 1_000_000_000;
    const BEGAN: u64 = 123 * S + 7;

    fn account() -> Account {
        Account::new(1, BEGAN)
    }

    /// `count` requests of equal latency, one each millisecond from `from_ns` on.
    fn work(account: &mut Account, from_ns: u64, count: u64, latency_ns: u64) {
        for i in 0..count {
            let at_ns = BEGAN + from_ns + i * MS;
            account.advance(at_ns);
            account.quick(at_ns, latency_ns, 4096);
        }
    }

    fn report(account: &mut Account, at_ns: u64) -> SloReport {
        account.report(BEGAN + at_ns)
    }

    /// A request that was parked for `waited_ns` and `handled_ns`, then spent a millisecond at the
    /// disk.
    fn faulted(at_ns: u64, waited_ns: u64, handled_ns: u64) -> Done {
        let popped_ns = BEGAN + at_ns - waited_ns - handled_ns - MS;
        let mut course = RequestTimeline::popped(popped_ns);
        course.park(popped_ns);
        course.answered(&PageResponse {
            id: RequestId(1),
            queue: QueueId(0),
            code: ResponseCode::Success,
            tier: Tier::Compressed,
            installed: 0,
            waited_ns,
            handling_ns: handled_ns,
        });
        course.resume(BEGAN + at_ns - MS);
        course.submit(BEGAN + at_ns - MS);
        Done {
            at_ns: BEGAN + at_ns,
            queue: 3,
            bytes: 4096,
            course,
        }
    }

    #[test]
    fn what_just_happened_is_in_every_window_and_leaves_each_after_its_length() {
        let mut account = account();
        work(&mut account, 0, 1000, 100 * US);
        let told = report(&mut account, S);
        for window in [&told.minute, &told.hour, &told.day] {
            assert_eq!((window.requests, window.bytes), (1000, 4_096_000));
            assert_eq!(window.covers, Duration::from_secs(1));
            assert_eq!(window.worst, Duration::from_micros(100));
            assert_eq!(window.p9999, window.worst);
        }
        // (seconds, in the minute, in the hour, in the day)
        for (seconds, minute, hour, day) in [
            (69, 1000, 1000, 1000),
            (70, 0, 1000, 1000),
            (3600, 0, 1000, 1000),
            (3660, 0, 0, 1000),
            (24 * 3600, 0, 0, 1000),
            (25 * 3600 - 1, 0, 0, 1000),
            (25 * 3600, 0, 0, 0),
        ] {
            let told = report(&mut account, seconds * S);
            let requests = [&told.minute, &told.hour, &told.day].map(|w| w.requests);
            assert_eq!(requests, [minute, hour, day], "after {seconds} s");
        }
    }

    #[test]
    fn windows_reach_back_for_their_length_and_at_most_a_step_more() {
        let mut account = account();
        for seconds in [5, 65, 3_605, 90_000, 200_015] {
            let told = report(&mut account, seconds * S);
            let covers = [&told.minute, &told.hour, &told.day].map(|w| w.covers.as_secs());
            let expect = |length: u64, step: u64| {
                let most = length + seconds % step;
                seconds.min(most)
            };
            assert_eq!(
                covers,
                [expect(60, 10), expect(3_600, 60), expect(86_400, 3_600)],
                "after {seconds} s"
            );
        }
    }

    #[test]
    fn windows_hold_what_a_naive_list_of_all_requests_says() {
        let mut account = account();
        let mut list: Vec<(u64, u64)> = Vec::new();
        let mut random = SplitMix64::new(5);
        let mut at_ns = 0;
        for _ in 0..4000 {
            // Zero to four minutes between two requests.
            let gap_ns = MS << random.below(32);
            at_ns += gap_ns.min(240 * S);
            let latency_ns = random.below(900 * US);
            account.advance(BEGAN + at_ns);
            account.quick(BEGAN + at_ns, latency_ns, 1);
            list.push((at_ns, latency_ns));
            if random.below(32) == 0 {
                let told = report(&mut account, at_ns);
                for window in [&told.minute, &told.hour, &told.day] {
                    let from_ns = at_ns - u64::try_from(window.covers.as_nanos()).unwrap();
                    let within = list.iter().filter(|(at, _)| *at >= from_ns);
                    let worst = within.clone().map(|(_, ns)| *ns).max().unwrap_or(0);
                    assert_eq!(window.requests, within.count() as u64);
                    assert_eq!(window.worst, Duration::from_nanos(worst));
                }
            }
        }
        assert!(at_ns > 2 * 24 * 3600 * S, "several days: {at_ns}");
    }

    #[test]
    fn slow_requests_are_those_above_ten_medians_and_name_what_held_them() {
        let mut account = account();
        work(&mut account, 0, 128, 300 * US);
        account.done(faulted(200 * MS, 200 * US, 800 * US));
        assert_eq!(report(&mut account, 200 * MS).slow_requests, 0, "2 ms");
        account.done(faulted(300 * MS, 5 * MS, 800 * US));
        account.done(faulted(300 * MS, 200 * US, 6 * MS));
        let told = report(&mut account, 400 * MS);
        assert!(told.slow_threshold >= Duration::from_millis(3));
        assert!(told.slow_threshold < Duration::from_micros(3_200));
        let tier = SlowCause::Handling(Tier::Compressed);
        assert_eq!(
            told.minute.slow,
            [(SlowCause::WaitingForHost, 1), (tier, 1)]
        );
        let newest = told.slow[0];
        assert_eq!((newest.cause, newest.queue), (tier, 3));
        assert_eq!(newest.held, Duration::from_millis(6));
        assert_eq!(newest.latency, Duration::from_micros(7_200));
        assert_eq!(newest.ago, Duration::from_millis(100));
        assert_eq!(told.slow.len(), 2);
    }

    #[test]
    fn of_very_many_slow_requests_the_last_are_kept_and_all_are_counted() {
        let mut account = account();
        for i in 1..=100 {
            work(&mut account, i * 100 * MS, 20, 100 * US);
            account.done(faulted(i * 100 * MS + 20 * MS, 5 * MS, 0));
        }
        let told = report(&mut account, 11 * S);
        assert_eq!(told.slow.len(), SLOW_KEPT);
        assert_eq!(told.slow_requests, 100);
        assert_eq!(told.hour.slow, [(SlowCause::WaitingForHost, 100)]);
    }

    #[test]
    fn what_all_requests_take_is_not_slow() {
        let mut account = account();
        for i in 1..=1000 {
            account.advance(BEGAN + i * 20 * MS);
            account.done(faulted(i * 20 * MS, 5 * MS, 0));
        }
        // Until the median was known.
        assert_eq!(report(&mut account, 20 * S).slow_requests, 63);
    }

    #[test]
    fn least_throughput_is_that_of_the_slowest_bin_with_demand() {
        let mut account = account();
        account.busy(0, BEGAN);
        work(&mut account, 0, 1000, 100 * US);
        // A stall of 300 ms, then one more second of work, then a long idle time.
        work(&mut account, 1_300 * MS, 1000, 100 * US);
        account.idle(0, BEGAN + 2_300 * MS);
        let told = report(&mut account, 50 * S);
        assert_eq!(told.minute.least_iops, Some(0));
        assert_eq!(told.minute.least_bytes_per_second, Some(0));
        let demand_ms = told.minute.demand.as_millis();
        assert!((2_200..=2_400).contains(&demand_ms), "{demand_ms}");
        let told = report(&mut account, 200 * S);
        assert_eq!(told.minute.least_iops, None, "no demand, no figure");
        assert_eq!(told.hour.least_iops, Some(0));
    }

    #[test]
    fn steady_load_has_a_least_throughput_near_its_mean() {
        let mut account = account();
        account.busy(0, BEGAN);
        work(&mut account, 0, 3000, 100 * US);
        let told = report(&mut account, 3 * S);
        let least = told.minute.least_iops.unwrap();
        assert!((990..=1000).contains(&least), "{least}");
    }

    #[test]
    fn faults_and_their_bursts_are_counted() {
        let mut account = account();
        for i in 0..8 {
            account.faults(BEGAN + i * 10 * MS, 1, Injected::Yes);
        }
        account.advance(BEGAN + 30 * S);
        account.faults(BEGAN + 30 * S, 64, Injected::No);
        let told = report(&mut account, 31 * S).minute;
        assert_eq!((told.iopfs, told.injected_iopfs), (72, 8));
        assert_eq!((told.iopf_peak_per_second, told.iopf_bursts), (64, 2));
    }

    #[test]
    fn account_of_a_day_of_work_stays_small_and_one_of_a_year_of_silence_is_quickly_told() {
        let mut account = account();
        for minute in 0..(26 * 60) {
            for i in 0..64 {
                let at_ns = BEGAN + minute * 60 * S + i * MS;
                account.advance(at_ns);
                account.quick(at_ns, (50 << (i % 5)) * US, 512);
            }
        }
        let told = report(&mut account, 26 * 3600 * S);
        assert!(told.memory_bytes < 150_000, "{}", told.memory_bytes);
        let year_later = report(&mut account, 366 * 24 * 3600 * S);
        assert_eq!(year_later.day.requests, 0);
    }
}
