// SPDX-License-Identifier: Apache-2.0
//! What a tier has done since it was opened.

/// How long requests took, in microseconds; all 0 before the first one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Latency {
    /// Requests measured.
    pub count: u64,
    /// Half of them took no longer.
    pub p50_us: u64,
    /// 99 of 100 took no longer.
    pub p99_us: u64,
    /// The longest one.
    pub max_us: u64,
}

/// The figures of a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierFigures {
    /// Most bytes that it may take.
    pub limit_bytes: u64,
    /// Bytes that stored pages take.
    pub stored_bytes: u64,
    /// Pages read.
    pub pages_read: u64,
    /// Bytes read for them.
    pub read_bytes: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Batches that they were in.
    pub batches_written: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Batches whose write failed.
    pub write_errors: u64,
    /// Requests that took longer than their time bound; also counted as failed.
    pub overdue: u64,
    /// Requests refused because the queue was full or the tier was not working.
    pub refused: u64,
    /// How long reads took, from the call to the answer.
    pub read_latency: Latency,
    /// How long writes took, from the call to the answer.
    pub write_latency: Latency,
}
