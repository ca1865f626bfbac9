// SPDX-License-Identifier: Apache-2.0
//! The order of turns: RR and RAND with weights, and by time.
//!
//! In RR with weights, a tenant of half the largest weight skips every other round. Its credit grows by its
//! weight each round; at the largest weight it pays for a turn. Credits start full, so every tenant has a
//! turn in the first round. RAND with weights draws a point on the line of all weights laid end to end.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::tenant::random_stream::RandomStream;

/// Tenants that have packets left, and which of them is next.
#[derive(Debug)]
pub(super) enum Turns {
    RoundRobin(RoundRobin),
    Random(Random),
    /// Next times, earliest first; ties by number.
    ByTime(BinaryHeap<Reverse<(u64, u32)>>),
}

impl Turns {
    /// The tenant of the next turn; `None` if none is left.
    pub(super) fn next(&mut self) -> Option<u32> {
        match self {
            Self::RoundRobin(turns) => turns.next(),
            Self::Random(turns) => turns.next(),
            Self::ByTime(heap) => heap.pop().map(|Reverse((_, tenant))| tenant),
        }
    }

    /// `tenant`, whose turn it was, has no further one.
    pub(super) fn remove(&mut self, tenant: u32) {
        match self {
            Self::RoundRobin(turns) => turns.remove(tenant),
            Self::Random(turns) => turns.remove(tenant),
            Self::ByTime(_) => {}
        }
    }

    /// `tenant`, whose turn it was, comes next at `time_ns`; for turns by time.
    pub(super) fn again_at(&mut self, tenant: u32, time_ns: u64) {
        if let Self::ByTime(heap) = self {
            heap.push(Reverse((time_ns, tenant)));
        }
    }

    /// This round is the last.
    pub(super) fn finish_round(&mut self) {
        if let Self::RoundRobin(turns) = self {
            turns.last_round = true;
        }
    }
}

/// One tenant in the round.
#[derive(Clone, Copy, Debug)]
struct Place {
    tenant: u32,
    weight: u32,
    /// Below twice the largest weight.
    credit: u32,
    alive: bool,
}

/// RR.
#[derive(Debug)]
pub(super) struct RoundRobin {
    places: Vec<Place>,
    /// The next place to check.
    at: usize,
    largest: u32,
    some_gone: bool,
    last_round: bool,
}

impl RoundRobin {
    /// Tenants 0, 1, … of the given weights, each at least 1.
    pub(super) fn new(weights: impl Iterator<Item = u32>) -> Self {
        let mut places: Vec<Place> = (0..)
            .zip(weights)
            .map(|(tenant, weight)| Place {
                tenant,
                weight,
                credit: 0,
                alive: true,
            })
            .collect();
        let largest = largest(&places);
        for place in &mut places {
            place.credit = largest - place.weight;
        }
        Self {
            places,
            at: 0,
            largest,
            some_gone: false,
            last_round: false,
        }
    }

    fn next(&mut self) -> Option<u32> {
        loop {
            while let Some(place) = self.places.get_mut(self.at) {
                self.at += 1;
                if !place.alive {
                    continue;
                }
                place.credit += place.weight;
                if place.credit >= self.largest {
                    place.credit -= self.largest;
                    return Some(place.tenant);
                }
            }
            if self.last_round {
                return None;
            }
            self.begin_round();
            if self.places.is_empty() {
                return None;
            }
        }
    }

    fn begin_round(&mut self) {
        self.at = 0;
        if self.some_gone {
            self.some_gone = false;
            self.places.retain(|place| place.alive);
            self.largest = largest(&self.places);
            for place in &mut self.places {
                place.credit = place.credit.min(self.largest);
            }
        }
    }

    fn remove(&mut self, tenant: u32) {
        // The tenant whose turn it was is right before the next place.
        if let Some(place) = self.at.checked_sub(1).and_then(|i| self.places.get_mut(i)) {
            debug_assert_eq!(place.tenant, tenant);
            place.alive = false;
            self.some_gone = true;
        }
    }
}

fn largest(places: &[Place]) -> u32 {
    places.iter().map(|p| p.weight).max().unwrap_or(1)
}

/// RAND.
#[derive(Debug)]
pub(super) struct Random {
    random: RandomStream,
    alive: Vec<(u32, u32)>,
    /// Where each of `alive` ends on the line of weights; empty if all are equal.
    ends: Vec<u64>,
    /// Place in `alive` of the tenant whose turn it was.
    last: usize,
}

impl Random {
    /// Tenants 0, 1, … of the given weights, each at least 1.
    pub(super) fn new(random: RandomStream, weights: impl Iterator<Item = u32>) -> Self {
        let mut turns = Self {
            random,
            alive: (0..).zip(weights).collect(),
            ends: Vec::new(),
            last: 0,
        };
        turns.lay_out();
        turns
    }

    fn next(&mut self) -> Option<u32> {
        self.last = match self.ends.last() {
            Some(&end) => {
                let point = self.random.below_u64(end);
                self.ends.partition_point(|&end| end <= point)
            }
            #[expect(clippy::cast_possible_truncation, reason = "numbered by u32")]
            None => self.random.below(self.alive.len() as u32) as usize,
        };
        self.alive.get(self.last).map(|&(tenant, _)| tenant)
    }

    fn remove(&mut self, tenant: u32) {
        debug_assert_eq!(self.alive.get(self.last).map(|a| a.0), Some(tenant));
        if self.last < self.alive.len() {
            self.alive.swap_remove(self.last);
            if !self.ends.is_empty() {
                self.lay_out();
            }
        }
    }

    fn lay_out(&mut self) {
        self.ends.clear();
        let alike = self.alive.windows(2).all(|pair| pair[0].1 == pair[1].1);
        if alike {
            return;
        }
        let mut end = 0;
        self.ends.extend(self.alive.iter().map(|&(_, weight)| {
            end += u64::from(weight);
            end
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_robin_with_weights_gives_turns_in_proportion() {
        let mut turns = RoundRobin::new([4, 1, 2].into_iter());
        let mut count = [0; 3];
        for _ in 0..700 {
            count[turns.next().unwrap() as usize] += 1;
        }
        assert_eq!(count, [400, 100, 200]);
    }

    #[test]
    fn round_robin_with_all_removed_ends() {
        let mut turns = RoundRobin::new([1, 3].into_iter());
        while let Some(tenant) = turns.next() {
            turns.remove(tenant);
        }
        assert_eq!(turns.next(), None);
    }

    #[test]
    fn random_with_weights_gives_turns_in_proportion() {
        let mut turns = Random::new(RandomStream::new(1, 0), [9, 1].into_iter());
        let light = (0..10_000).filter(|_| turns.next() == Some(1)).count();
        assert!((900..1100).contains(&light), "{light}");
    }

    #[test]
    fn random_with_all_removed_ends() {
        let mut turns = Random::new(RandomStream::new(1, 0), [1, 1, 5].into_iter());
        let mut seen = Vec::new();
        while let Some(tenant) = turns.next() {
            turns.remove(tenant);
            seen.push(tenant);
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2]);
    }
}
