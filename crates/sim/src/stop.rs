// SPDX-License-Identifier: Apache-2.0
//! Runs that somebody may interrupt: a run ends with an error when it next reads its trace.
//!
//! A batch of events takes some milliseconds, so nothing in the model has to look for the flag.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pagetide_access_log::TraceError;
use pagetide_trace::{Event, EventSource};

/// A flag that ends the runs which look at it. Clones are the same flag.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Ends them.
    pub fn set(&self) {
        // Relaxed: nothing else is told by it.
        self.0.store(true, Ordering::Relaxed);
    }

    /// True once they are to end.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// An error once they are to end.
    pub(crate) fn check(&self) -> Result<(), TraceError> {
        match self.is_set() {
            true => Err(TraceError::Asked("the run was interrupted".to_owned())),
            false => Ok(()),
        }
    }
}

/// Events of a trace until a flag is set.
pub struct UntilStopped<'a> {
    source: Box<dyn EventSource + 'a>,
    stop: Stop,
}

impl<'a> UntilStopped<'a> {
    /// Those of `source`.
    #[must_use]
    pub fn new(source: Box<dyn EventSource + 'a>, stop: &Stop) -> Self {
        let stop = stop.clone();
        Self { source, stop }
    }
}

impl EventSource for UntilStopped<'_> {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        self.stop.check()?;
        self.source.next_batch(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_trace::Events;

    #[test]
    fn events_end_with_an_error_when_the_flag_is_set() {
        let events = vec![Event::default(); 10_000];
        let stop = Stop::default();
        let mut until = UntilStopped::new(Box::new(Events(&events)), &stop);
        let mut batch = Vec::new();
        assert_eq!(until.next_batch(&mut batch).unwrap(), 4096);
        stop.clone().set();
        let error = until.next_batch(&mut batch).unwrap_err();
        assert!(error.to_string().contains("interrupted"), "{error}");
        assert_eq!(batch.len(), 4096);
    }
}
