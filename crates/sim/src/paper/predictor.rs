// SPDX-License-Identifier: Apache-2.0
//! Source predictor: a table from each source to the one that was seen `length`
//! requests after it (III: 'directly maps from the currently accessed SID to a
//! predicted SID').
//!
//! ```text
//!   length = 3       requests   a b c d e …        when e comes, b is 3 back:
//!                                 └─────┘          successor of b := e
//! ```
//! The table is read before the request changes it. A source may be its own
//! successor, as the text has no exception for that.

use std::collections::VecDeque;

use crate::config::{Predictor, PrefetchConfig};
use crate::policy::prefetch::{BuiltInPredictor, SourcePredictor};

/// No successor known.
const NONE: u32 = u32::MAX;

/// The table and the sources that wait to learn their successor.
#[derive(Debug)]
pub(crate) struct Successors {
    rule: Predictor,
    length: usize,
    /// The last sources, oldest first, at most `length` of them.
    recent: VecDeque<u32>,
    table: Vec<u32>,
}

impl BuiltInPredictor for Successors {
    fn new(config: &PrefetchConfig) -> Self {
        Self {
            rule: config.predictor,
            length: config.history_length as usize,
            recent: VecDeque::new(),
            table: Vec::new(),
        }
    }
}

impl SourcePredictor for Successors {
    #[inline]
    fn observe(&mut self, tenant: u32) -> Option<u32> {
        let at = tenant as usize;
        if self.table.len() <= at {
            self.table.resize(at + 1, NONE);
        }
        let predicted = self.table[at];
        if self.recent.len() == self.length
            && let Some(earlier) = self.recent.pop_front()
        {
            let successor = &mut self.table[earlier as usize];
            if self.rule == Predictor::Latest || *successor == NONE {
                *successor = tenant;
            }
        }
        self.recent.push_back(tenant);
        (predicted != NONE).then_some(predicted)
    }

    fn set_length(&mut self, length: u32) {
        self.length = length.max(1) as usize;
        let surplus = self.recent.len().saturating_sub(self.length);
        self.recent.drain(..surplus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Flavour};

    fn predictor(length: u32, rule: Predictor) -> Successors {
        let mut config = Config::hypertrio(Flavour::Paper).prefetch;
        config.history_length = length;
        config.predictor = rule;
        Successors::new(&config)
    }

    fn observe_all(predictor: &mut Successors, tenants: &[u32]) -> Vec<Option<u32>> {
        tenants.iter().map(|t| predictor.observe(*t)).collect()
    }

    #[test]
    fn successor_is_the_source_seen_length_requests_later() {
        let mut two = predictor(2, Predictor::Latest);
        assert_eq!(observe_all(&mut two, &[0, 1, 2, 3]), [None; 4]);
        assert_eq!(
            observe_all(&mut two, &[0, 1, 2]),
            [Some(2), Some(3), Some(0)]
        );
    }

    #[test]
    fn latest_follows_when_the_order_changes_and_first_seen_does_not() {
        for (rule, after) in [(Predictor::Latest, 2), (Predictor::FirstSeen, 1)] {
            let mut one = predictor(1, rule);
            observe_all(&mut one, &[0, 1, 2, 0, 1, 2]);
            // Tenant 1 leaves.
            observe_all(&mut one, &[0, 2, 0, 2]);
            assert_eq!(one.observe(0), Some(after), "{rule:?}");
        }
    }

    #[test]
    fn written_length_takes_effect_at_once_when_shorter() {
        let mut long = predictor(3, Predictor::Latest);
        observe_all(&mut long, &[0, 1, 2]);
        long.set_length(1);
        observe_all(&mut long, &[3, 4]);
        assert_eq!(observe_all(&mut long, &[2, 3]), [Some(3), Some(4)]);
    }

    #[test]
    fn written_length_takes_effect_when_enough_was_seen_when_longer() {
        let mut short = predictor(1, Predictor::Latest);
        observe_all(&mut short, &[0, 1]);
        short.set_length(3);
        observe_all(&mut short, &[2, 3, 4]);
        // Tenant 1 was the first of the three in memory when 4 came.
        assert_eq!(short.observe(1), Some(4));
    }
}
