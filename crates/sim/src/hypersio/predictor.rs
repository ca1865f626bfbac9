// SPDX-License-Identifier: Apache-2.0
//! The program's source predictor: the successor of a source is the source of the request `length + 1`
//! requests later, as first seen, and never changes.

use crate::config::PrefetchConfig;
use crate::policy::prefetch::{BuiltInPredictor, SourcePredictor};

/// No successor yet.
const NONE: u32 = u32::MAX;

/// The program's map from source to source.
#[derive(Debug)]
pub(crate) struct FirstSeen {
    length: usize,
    /// The last sources, a ring once there are `length` of them.
    recent: Vec<u32>,
    /// Place of the oldest in it.
    oldest: usize,
    /// The source that left `recent` last, whose successor is learnt next; [`NONE`] before there is one.
    previous: u32,
    successors: Vec<u32>,
}

impl BuiltInPredictor for FirstSeen {
    fn new(config: &PrefetchConfig) -> Self {
        Self {
            length: config.history_length as usize,
            recent: Vec::new(),
            oldest: 0,
            previous: NONE,
            successors: Vec::new(),
        }
    }
}

impl SourcePredictor for FirstSeen {
    #[inline(always)]
    fn observe(&mut self, tenant: u32) -> Option<u32> {
        if self.successors.len() <= tenant as usize {
            self.add(tenant);
        }
        let successor = self.successors[tenant as usize];
        if let Some(of_previous) = self.successors.get_mut(self.previous as usize)
            && *of_previous == NONE
            && self.previous != tenant
        {
            *of_previous = tenant;
        }
        if self.recent.len() < self.length {
            self.recent.push(tenant);
        } else {
            self.previous = std::mem::replace(&mut self.recent[self.oldest], tenant);
            self.oldest += 1;
            if self.oldest == self.length {
                self.oldest = 0;
            }
        }
        (successor != NONE).then_some(successor)
    }

    /// The program has no such register.
    fn set_length(&mut self, _length: u32) {}
}

impl FirstSeen {
    #[cold]
    fn add(&mut self, tenant: u32) {
        self.successors.resize(tenant as usize + 1, NONE);
    }
}
