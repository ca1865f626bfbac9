// SPDX-License-Identifier: Apache-2.0
//! The account of a device as it is told.

use super::slow::{SlowCause, SlowRequest};
use std::time::Duration;

/// Whether a device's account is kept. It always is, but where what it costs is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accounting {
    /// As ever.
    On,
    /// Nothing is told: windows stay as they are and age.
    Off,
}

/// A window that reaches back from now.
///
/// Latencies count from the moment a chain is taken from its ring until it is in the used ring; they
/// are right to 3.2% (told too long rather than too short), and 0 where there was no request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SloWindow {
    /// How far it reaches back.
    pub covers: Duration,
    /// Requests completed.
    pub requests: u64,
    /// Data moved by them.
    pub bytes: u64,
    /// Half of the requests were as fast as this.
    pub p50: Duration,
    /// All but one in a hundred.
    pub p99: Duration,
    /// All but one in a thousand.
    pub p999: Duration,
    /// All but one in ten thousand.
    pub p9999: Duration,
    /// The slowest, exactly.
    pub worst: Duration,
    /// How long there was demand: bins of 100 ms of which requests were in flight for nine tenths.
    pub demand: Duration,
    /// Requests a second in the slowest of those bins; `None` without demand.
    pub least_iops: Option<u64>,
    /// Bytes a second in the slowest of those bins; `None` without demand.
    pub least_bytes_per_second: Option<u64>,
    /// I/O page faults: page requests that something waited for.
    pub iopfs: u64,
    /// Requests whose fault was injected.
    pub injected_iopfs: u64,
    /// Most I/O page faults within a second.
    pub iopf_peak_per_second: u32,
    /// Times that more than 5 came within a second (VPRI 3.4).
    pub iopf_bursts: u32,
    /// Slow requests by what held them; causes of none are left out.
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
    /// What takes longer is slow: ten times the last minute's median, a millisecond at least.
    pub slow_threshold: Duration,
    /// Slow requests since the device was made.
    pub slow_requests: u64,
    /// The last of them, newest first; 64 at most.
    pub slow: Vec<SlowRequest>,
    /// Memory that the account takes.
    pub memory_bytes: u64,
}
