// SPDX-License-Identifier: Apache-2.0
//! Traces as streams: events are read and written in batches, so that a trace of any length passes through
//! a bounded buffer.

use crate::event::Event;
use pagetide_access_log::TraceError;

/// Most events in a batch; large enough that the cost of a call is negligible.
pub const BATCH_EVENTS: usize = 4096;

/// A source of events, in order.
pub trait EventSource: Send {
    /// Appends the next events to `batch`, at most [`BATCH_EVENTS`]; none means the end.
    ///
    /// # Errors
    /// If the trace is broken there; events before the break were returned.
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError>;
}

/// A sink for events, in order.
pub trait EventSink {
    /// Writes `events`.
    ///
    /// # Errors
    /// If the file cannot take them, or the format cannot express one of them.
    fn write(&mut self, events: &[Event]) -> Result<(), TraceError>;

    /// Completes the trace; without it the file is incomplete.
    ///
    /// # Errors
    /// If the file cannot be completed.
    fn finish(self: Box<Self>) -> Result<(), TraceError>;
}

/// Events that are already in memory, as a source.
#[derive(Debug)]
pub struct Events<'a>(pub &'a [Event]);

impl EventSource for Events<'_> {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        let (now, later) = self.0.split_at(self.0.len().min(BATCH_EVENTS));
        batch.extend_from_slice(now);
        self.0 = later;
        Ok(now.len())
    }
}
