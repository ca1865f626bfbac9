// SPDX-License-Identifier: Apache-2.0
//! What a device did wrong: counted each time, logged at most once a second.

use super::credit::Credit;
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Least time between two lines in the log about one device.
const BETWEEN_LINES: Duration = Duration::from_secs(1);

/// Counters of a driver, over all its connections.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DriverCounts {
    /// Connections so far that reached the point where the device was set up.
    pub sessions: u64,
    /// Page requests taken.
    pub requests: u64,
    /// Page requests that were invalid, or of a kind that was not negotiated.
    pub malformed_requests: u64,
    /// Page requests for a space that was never declared to the device.
    pub unknown_spaces: u64,
    /// Page requests with the id of one that was not answered yet.
    pub duplicate_requests: u64,
    /// Answers to requests of a device that was already gone.
    pub late_answers: u64,
    /// Events that the device refused and whose reply no thread waited for.
    pub refused_events: u64,
    /// Malformed replies.
    pub malformed_replies: u64,
    /// Records of the access log that the device reports as lost for want of buffers.
    pub lost_records: u64,
    /// Records of memory that is no space of the host.
    pub foreign_records: u64,
    /// Records of the access log that were invalid.
    pub malformed_records: u64,
    /// Connections closed because of what the device did, or did not do.
    pub broken_off: u64,
}

/// [`DriverCounts`] in atomic form.
#[derive(Default, Debug)]
pub(crate) struct Counts {
    pub(crate) sessions: Count,
    pub(crate) requests: Count,
    pub(crate) malformed_requests: Count,
    pub(crate) unknown_spaces: Count,
    pub(crate) duplicate_requests: Count,
    pub(crate) late_answers: Count,
    pub(crate) refused_events: Count,
    pub(crate) malformed_replies: Count,
    pub(crate) lost_records: Count,
    pub(crate) foreign_records: Count,
    pub(crate) malformed_records: Count,
    pub(crate) broken_off: Count,
    /// The patience that is left.
    pub(crate) credit: Credit,
    last_line: Mutex<Option<Instant>>,
    unsaid: Count,
}

impl Counts {
    /// The current values.
    pub(crate) fn look(&self) -> DriverCounts {
        DriverCounts {
            sessions: self.sessions.get(),
            requests: self.requests.get(),
            malformed_requests: self.malformed_requests.get(),
            unknown_spaces: self.unknown_spaces.get(),
            duplicate_requests: self.duplicate_requests.get(),
            late_answers: self.late_answers.get(),
            refused_events: self.refused_events.get(),
            malformed_replies: self.malformed_replies.get(),
            lost_records: self.lost_records.get(),
            foreign_records: self.foreign_records.get(),
            malformed_records: self.malformed_records.get(),
            broken_off: self.broken_off.get(),
        }
    }

    /// Logs what the device did wrong, unless a line was logged a moment ago.
    pub(crate) fn complain(&self, wrong: &dyn std::fmt::Display) {
        let mut last = self
            .last_line
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if last.is_some_and(|last| last.elapsed() < BETWEEN_LINES) {
            self.unsaid.add();
            return;
        }
        *last = Some(Instant::now());
        drop(last);
        let unsaid = self.unsaid.0.swap(0, Ordering::Relaxed);
        tracing::warn!(unsaid, "the DPU misbehaves: {wrong}");
    }
}

/// One counter.
#[derive(Default, Debug)]
pub(crate) struct Count(AtomicU64);

impl Count {
    /// Adds one.
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds `more`; a device may report any number.
    pub(crate) fn add_many(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
