// SPDX-License-Identifier: Apache-2.0
//! The trace as the model reads it: a batch of events and a position in it.

use pagetide_trace::{Event, EventSource};

use crate::error::SimError;
use crate::next_use::NextUses;

/// The trace as the model reads it.
pub(super) struct Input<'a> {
    pub(super) source: &'a mut dyn EventSource,
    pub(super) next_uses: Option<&'a NextUses>,
    pub(super) batch: Vec<Event>,
    pub(super) at: usize,
    pub(super) ended: bool,
}

impl Input<'_> {
    /// The next event, without consuming it.
    #[inline]
    pub(super) fn peek(&mut self) -> Result<Option<&Event>, SimError> {
        if self.at == self.batch.len() && !self.ended {
            self.batch.clear();
            self.at = 0;
            self.ended = self.source.next_batch(&mut self.batch)? == 0;
        }
        Ok(self.batch.get(self.at))
    }
}
