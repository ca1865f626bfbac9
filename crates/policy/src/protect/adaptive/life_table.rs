// SPDX-License-Identifier: Apache-2.0
//! [`LifeTable`]: after how long sections are touched again, learnt while it happens.
//!
//! As an insurer's table does for the age of people: of the sections that *reached* an age, some
//! were touched before the next (*ended*), the others went on. So sections that still rest are
//! counted rightly, and nothing has to be waited for.
//!
//! ```text
//!   age, s        60        120        180        240        300 …
//!   reached       100   ►    80    ►    75   ►     40   ►     38
//!   ended          20        5          35         2            …
//!   worth          ▃         ▆          ▇          ▁
//! ```
//! The *worth* of protecting a section of some age is the touches that this saves by the second
//! that it is protected, with the best moment to give up: the largest, over all later ages, of
//! (touched until then) over (time protected until then). That sees a cycle coming: the worth
//! rises before the age at which sections are touched again, and falls behind it.
//!
//! Before anything was learnt a touch is thought the less likely the longer the last one is ago,
//! which is the order of `adp`. What was learnt fades with a half-life of some 20 minutes.

/// Ages in seconds at which a section is looked at again; it is in the interval of the last it
/// has reached.
pub(super) const AGES_S: [u64; 24] = [
    0, 15, 30, 60, 90, 120, 180, 240, 300, 360, 450, 600, 750, 900, 1_200, 1_500, 1_800, 2_400,
    3_000, 3_600, 5_400, 7_200, 14_400, 28_800,
];
/// Number of intervals of age.
pub(super) const INTERVALS: usize = AGES_S.len();
/// Kinds of sections that are told apart.
pub(super) const CLASSES: usize = 25;
/// How much of what was learnt is left after a minute.
const KEPT_A_MINUTE: f64 = 0.966;
/// Sections that the belief from before counts for in each interval.
const BELIEF: f64 = 2.0;
/// Share of them touched in an interval that doubles their age.
const BELIEVED_TOUCHED: f64 = 0.3;

/// See the module.
#[derive(Debug)]
pub(super) struct LifeTable {
    reached: [[f64; INTERVALS]; CLASSES],
    ended: [[f64; INTERVALS]; CLASSES],
    worth: [[f64; INTERVALS]; CLASSES],
    soon: [[f64; INTERVALS]; CLASSES],
}

impl LifeTable {
    pub(super) fn new() -> Self {
        let mut table = Self {
            reached: [[0.0; INTERVALS]; CLASSES],
            ended: [[0.0; INTERVALS]; CLASSES],
            worth: [[0.0; INTERVALS]; CLASSES],
            soon: [[0.0; INTERVALS]; CLASSES],
        };
        table.weigh(300.0);
        table
    }

    /// A section reached the interval.
    pub(super) fn reached(&mut self, class: usize, interval: usize) {
        self.reached[class][interval] += 1.0;
    }

    /// A section was touched in the interval.
    pub(super) fn ended(&mut self, class: usize, interval: usize) {
        self.ended[class][interval] += 1.0;
    }

    /// Touches saved by a second of protection, for a section of this class and age.
    pub(super) fn worth(&self, class: usize, interval: usize) -> f64 {
        self.worth[class][interval]
    }

    /// Share of the sections of this class and age that are touched within the time told to
    /// [`Self::weigh`].
    pub(super) fn soon(&self, class: usize, interval: usize) -> f64 {
        self.soon[class][interval]
    }

    /// A minute has gone by.
    pub(super) fn fade(&mut self) {
        for counts in self.reached.iter_mut().chain(&mut self.ended) {
            for count in counts {
                *count *= KEPT_A_MINUTE;
            }
        }
    }

    /// Works out what was learnt; *soon* is within `soon_s` seconds. Some ten thousand steps.
    pub(super) fn weigh(&mut self, soon_s: f64) {
        for class in 0..CLASSES {
            let touched: [f64; INTERVALS] = std::array::from_fn(|k| self.touched_share(class, k));
            self.worth[class] = std::array::from_fn(|from| best_rate(&touched[from..], from));
            self.soon[class] = std::array::from_fn(|from| within(&touched[from..], from, soon_s));
        }
    }

    /// Share of the sections that reached the interval which are touched in it.
    fn touched_share(&self, class: usize, interval: usize) -> f64 {
        let (start, length) = (start_s(interval), length_s(interval));
        let believed = (BELIEVED_TOUCHED * length / start.max(15.0)).min(0.5);
        let reached = self.reached[class][interval].max(self.ended[class][interval]);
        (self.ended[class][interval] + BELIEF * believed) / (reached + BELIEF)
    }
}

/// The largest share touched by second of protection over all moments to give up.
fn best_rate(touched: &[f64], from: usize) -> f64 {
    let (mut resting, mut saved, mut time_s, mut best) = (1.0, 0.0, 0.0, 0.0_f64);
    for (interval, share) in (from..).zip(touched) {
        saved += resting * share;
        // Those that are touched are so in the middle of the interval.
        time_s += resting * length_s(interval) * (1.0 - share / 2.0);
        resting *= 1.0 - share;
        best = best.max(saved / time_s);
    }
    best
}

/// Share touched within `time_s` of the middle of the interval `from`.
fn within(touched: &[f64], from: usize, time_s: f64) -> f64 {
    let (mut resting, mut left_s) = (1.0, time_s);
    for (interval, share) in (from..).zip(touched) {
        let whole_s = length_s(interval);
        let length_s = if interval == from {
            whole_s / 2.0
        } else {
            whole_s
        };
        let part = (left_s / whole_s).min(length_s / whole_s);
        resting *= 1.0 - share * part;
        left_s -= length_s;
        if left_s <= 0.0 {
            break;
        }
    }
    1.0 - resting
}

fn start_s(interval: usize) -> f64 {
    seconds(AGES_S[interval])
}

fn length_s(interval: usize) -> f64 {
    match AGES_S.get(interval + 1) {
        Some(end) => seconds(end - AGES_S[interval]),
        None => start_s(interval),
    }
}

/// Ages are far below 2^32 seconds.
fn seconds(whole: u64) -> f64 {
    f64::from(u32::try_from(whole).unwrap_or(u32::MAX))
}

/// The interval of an age.
pub(super) fn interval_of(age_s: u64) -> usize {
    AGES_S
        .partition_point(|start| *start <= age_s)
        .saturating_sub(1)
}
