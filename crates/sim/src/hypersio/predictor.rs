// SPDX-License-Identifier: Apache-2.0
//! The program's source predictor: the successor of a source is the source of
//! the request `length + 1` requests later, as first seen, for ever.

use std::collections::VecDeque;

use crate::config::PrefetchConfig;
use crate::flavour::SourcePredictor;

/// No successor yet.
const NONE: u32 = u32::MAX;

/// The program's map from source to source.
#[derive(Debug)]
pub(crate) struct FirstSeen {
    length: usize,
    /// The last sources, oldest first, `length` of them.
    recent: VecDeque<u32>,
    /// The source that left `recent` last: the one to learn a successor for.
    previous: Option<u32>,
    successors: Vec<u32>,
}

impl SourcePredictor for FirstSeen {
    fn new(config: &PrefetchConfig) -> Self {
        Self {
            length: config.history_length as usize,
            recent: VecDeque::new(),
            previous: None,
            successors: Vec::new(),
        }
    }

    #[inline]
    fn observe(&mut self, tenant: u32) -> Option<u32> {
        if self.successors.len() <= tenant as usize {
            self.successors.resize(tenant as usize + 1, NONE);
        }
        let successor = self.successors[tenant as usize];
        if let Some(previous) = self.previous
            && previous != tenant
            && self.successors[previous as usize] == NONE
        {
            self.successors[previous as usize] = tenant;
        }
        if self.recent.len() >= self.length {
            self.previous = self.recent.pop_front();
        }
        self.recent.push_back(tenant);
        (successor != NONE).then_some(successor)
    }

    /// The program has no such register.
    fn set_length(&mut self, _length: u32) {}
}
