// SPDX-License-Identifier: Apache-2.0
//! The future, for the oracle: when each request's page is requested again.

use pagetide_trace::{EventKind, EventSource, PageSize};
use rustc_hash::FxHashMap;

use crate::error::SimError;
use crate::request::{NEVER, Page};

/// Not requested again.
const NOT_AGAIN: u32 = u32::MAX;

/// Index of the next request for the same page, for each request of a trace:
/// four bytes a request.
#[derive(Debug)]
pub struct NextUses(Vec<u32>);

impl NextUses {
    /// Reads the whole trace.
    ///
    /// # Errors
    /// If the trace is broken or has more than `u32::MAX - 1` requests.
    pub fn of(source: &mut dyn EventSource) -> Result<Self, SimError> {
        let mut next = Vec::new();
        let mut last: FxHashMap<u64, u32> = FxHashMap::default();
        let mut batch = Vec::new();
        while source.next_batch(&mut batch)? > 0 {
            for event in batch
                .drain(..)
                .filter(|event| event.kind == EventKind::Translate)
            {
                let at = u32::try_from(next.len())
                    .ok()
                    .filter(|at| *at != NOT_AGAIN)
                    .ok_or_else(|| SimError::Request {
                        request: next.len() as u64,
                        reason: "the oracle looks ahead over 4,294,967,294 requests at most"
                            .to_owned(),
                    })?;
                next.push(NOT_AGAIN);
                let tag = Page::of(&event, 0, PageSize::SIZE_4K).tag();
                if let Some(before) = last.insert(tag, at) {
                    next[before as usize] = at;
                }
            }
        }
        Ok(Self(next))
    }

    /// Index of the request after `request` for the same page.
    #[inline]
    pub(crate) fn after(&self, request: u64) -> u64 {
        let next = usize::try_from(request)
            .ok()
            .and_then(|request| self.0.get(request));
        match next {
            Some(next) if *next != NOT_AGAIN => u64::from(*next),
            _ => NEVER,
        }
    }
}
