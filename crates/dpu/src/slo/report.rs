// SPDX-License-Identifier: Apache-2.0
//! The account of a device as reported.

use super::slow::{SlowCause, SlowRequest};
use std::time::Duration;

/// Whether a device's account is kept. It is turned off only to measure its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accounting {
    /// Events are reported.
    On,
    /// Nothing is reported: windows stay as they are and age.
    Off,
}

/// A window that reaches back from now.
///
/// Latencies count from the moment a chain is taken from its ring until it is in the used ring.
/// They are accurate to 3.2% (too long rather than too short), and 0 if there was no request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SloWindow {
    /// How far it reaches back.
    pub covers: Duration,
    /// Requests completed.
    pub requests: u64,
    /// Data moved by them.
    pub bytes: u64,
    /// Median latency.
    pub p50: Duration,
    /// 99th percentile.
    pub p99: Duration,
    /// 99.9th percentile.
    pub p999: Duration,
    /// 99.99th percentile.
    pub p9999: Duration,
    /// The slowest request, exact.
    pub worst: Duration,
    /// Time with demand: bins of 100 ms with requests in flight for nine tenths of the time.
    pub demand: Duration,
    /// Requests per second in the slowest of those bins; `None` without demand.
    pub least_iops: Option<u64>,
    /// Bytes per second in the slowest of those bins; `None` without demand.
    pub least_bytes_per_second: Option<u64>,
    /// I/O page faults: page requests with a waiter.
    pub iopfs: u64,
    /// Requests whose fault was injected.
    pub injected_iopfs: u64,
    /// Most I/O page faults within a second.
    pub iopf_peak_per_second: u32,
    /// How often more than 5 came within a second (VPRI 3.4).
    pub iopf_bursts: u32,
    /// Slow requests by cause; causes without requests are left out.
    pub slow: Vec<(SlowCause, u32)>,
}

/// The account of a device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SloReport {
    /// The last minute: 60 to 70 s.
    pub minute: SloWindow,
    /// The last hour: 60 to 61 minutes.
    pub hour: SloWindow,
    /// The last day: 24 to 25 hours.
    pub day: SloWindow,
    /// Slower requests are slow: ten times the last minute's median, at least a millisecond.
    pub slow_threshold: Duration,
    /// Slow requests since the device was created.
    pub slow_requests: u64,
    /// The last of them, newest first; 64 at most.
    pub slow: Vec<SlowRequest>,
    /// Memory that the account uses.
    pub memory_bytes: u64,
}
