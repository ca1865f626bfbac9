// SPDX-License-Identifier: Apache-2.0
//! Traces in motion: events are read and written in batches, so that a trace of
//! any length passes through a bounded buffer.

use crate::error::TraceError;
use crate::event::Event;

/// Events that a batch holds, at most; large enough that the cost of a call does not show.
pub const BATCH_EVENTS: usize = 4096;

/// Something events are read from, in order.
pub trait EventSource {
    /// Appends the next events to `batch`, at most [`BATCH_EVENTS`]; none means the end.
    ///
    /// # Errors
    /// If the trace is broken there; events before the break were handed out.
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError>;
}

/// Something events are written to, in order.
pub trait EventSink {
    /// Writes `events`.
    ///
    /// # Errors
    /// If the file cannot take them, or the format cannot express one of them.
    fn write(&mut self, events: &[Event]) -> Result<(), TraceError>;

    /// Completes the trace; without it the file is not a whole one.
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
