// SPDX-License-Identifier: Apache-2.0
//! [`LifeTable`]: learns after how long sections are touched again.
//!
//! It works like an actuary's life table: of the sections that *reached* an age, some were touched
//! before the next (*ended*), the others lived on. So sections still idle are counted correctly,
//! without waiting for their touch.
//!
//! ```text
//!   age, s        60        120        180        240        300 …
//!   reached       100   ►    80    ►    75   ►     40   ►     38
//!   ended          20        5          35         2            …
//!   worth          ▃         ▆          ▇          ▁
//! ```
//! The *worth* of protecting a section of some age is the number of touches saved per second of
//! protection, with the best moment to give up: the maximum, over all later ages, of (touched until
//! then) / (time protected until then). It anticipates a cycle: the worth rises before the age at
//! which sections are touched again, and falls after it.
//!
//! Before anything is learned, a touch is assumed less likely the longer ago the last one was,
//! which is the order of `adp`. Counts fade with a half-life of some 20 minutes.

/// Ages in seconds at which a section is evaluated again; it is in the interval of the last one it
/// has reached.
pub(super) const AGES_S: [u64; 24] = [
    0, 15, 30, 60, 90, 120, 180, 240, 300, 360, 450, 600, 750, 900, 1_200, 1_500, 1_800, 2_400,
    3_000, 3_600, 5_400, 7_200, 14_400, 28_800,
];
/// Number of intervals of age.
pub(super) const INTERVALS: usize = AGES_S.len();
/// Number of classes of sections.
pub(super) const CLASSES: usize = 25;
/// Part of the counts that is left after a minute.
const KEPT_A_MINUTE: f64 = 0.966;
/// Weight of the prior in each interval, in sections.
const BELIEF: f64 = 2.0;
/// Prior: share touched in an interval that doubles the age.
const BELIEVED_TOUCHED: f64 = 0.3;

/// What must be recomputed for a class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum News {
    /// No section of it was ever counted: the prior, the same for all such classes.
    NeverCounted,
    /// Nothing was counted, and nothing has faded, since it was computed.
    None,
    /// It was counted, or has faded.
    Some,
}

/// See the module.
#[derive(Debug)]
pub(super) struct LifeTable {
    news: [News; CLASSES],
    /// The time for which `soon` was computed.
    soon_s: f64,
    reached: [[f64; INTERVALS]; CLASSES],
    ended: [[f64; INTERVALS]; CLASSES],
    worth: [[f64; INTERVALS]; CLASSES],
    soon: [[f64; INTERVALS]; CLASSES],
}

impl LifeTable {
    pub(super) fn new() -> Self {
        let mut table = Self {
            news: [News::NeverCounted; CLASSES],
            soon_s: f64::NAN,
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
        self.news[class] = News::Some;
    }

    /// A section was touched in the interval.
    pub(super) fn ended(&mut self, class: usize, interval: usize) {
        self.ended[class][interval] += 1.0;
        self.news[class] = News::Some;
    }

    /// Touches saved per second of protection, for a section of this class and age.
    pub(super) fn worth(&self, class: usize, interval: usize) -> f64 {
        self.worth[class][interval]
    }

    /// Share of the sections of this class and age that are touched within the time given to
    /// [`Self::weigh`].
    pub(super) fn soon(&self, class: usize, interval: usize) -> f64 {
        self.soon[class][interval]
    }

    /// A minute has passed.
    pub(super) fn fade(&mut self) {
        for counts in self.reached.iter_mut().chain(&mut self.ended) {
            for count in counts {
                *count *= KEPT_A_MINUTE;
            }
        }
        for news in &mut self.news {
            if *news == News::None {
                *news = News::Some;
            }
        }
    }

    /// Recomputes the tables; *soon* means within `soon_s` seconds. Some hundred steps for each class that
    /// was counted.
    pub(super) fn weigh(&mut self, soon_s: f64) {
        let is_same_time = self.soon_s.total_cmp(&soon_s).is_eq();
        self.soon_s = soon_s;
        let mut believed = None;
        for class in 0..CLASSES {
            match self.news[class] {
                News::None | News::NeverCounted if is_same_time => continue,
                News::NeverCounted => {
                    if let Some(other) = believed {
                        self.worth[class] = self.worth[other];
                        self.soon[class] = self.soon[other];
                        continue;
                    }
                    believed = Some(class);
                }
                News::None | News::Some => self.news[class] = News::None,
            }
            let touched: [f64; INTERVALS] = std::array::from_fn(|k| self.touched_share(class, k));
            self.worth[class] = best_rates(&touched);
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

/// For each interval: the largest share touched from there on per second of protection, over all moments to
/// give up. All are computed side by side, which is several times faster than one after the other.
fn best_rates(touched: &[f64; INTERVALS]) -> [f64; INTERVALS] {
    let mut resting = [1.0; INTERVALS];
    let (mut saved, mut time_s, mut best) =
        ([0.0; INTERVALS], [0.0; INTERVALS], [0.0_f64; INTERVALS]);
    for (interval, share) in touched.iter().enumerate() {
        let length_s = length_s(interval);
        // Intervals that begin here or earlier.
        let begun = resting[..=interval]
            .iter_mut()
            .zip(&mut saved)
            .zip(&mut time_s)
            .zip(&mut best);
        for (((resting, saved), time_s), best) in begun {
            *saved += *resting * share;
            // Touched sections are assumed to be touched in the middle of the interval.
            *time_s += *resting * length_s * (1.0 - share / 2.0);
            *resting *= 1.0 - share;
            *best = best.max(*saved / *time_s);
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    /// The last interval that is reached, and that in which it is touched.
    type Life = (usize, Option<usize>);

    /// A share in thousandths, always below one.
    fn share(random: &mut SplitMix64) -> f64 {
        seconds(random.below(900)) / 1_000.0
    }

    #[test]
    fn rate_equals_the_best_of_cohorts_given_up_at_each_age() {
        let mut random = SplitMix64::new(7);
        for _ in 0..50 {
            let touched: [f64; INTERVALS] = std::array::from_fn(|_| share(&mut random));
            let from = random.index(24);
            let mut rate = 0.0_f64;
            for give_up in from..INTERVALS {
                let (mut alive, mut saved, mut time_s) = (1_000.0, 0.0, 0.0);
                for (interval, share) in (from..=give_up).zip(&touched[from..]) {
                    let go = alive * share;
                    saved += go;
                    time_s += (alive - go) * length_s(interval) + go * length_s(interval) / 2.0;
                    alive -= go;
                }
                rate = rate.max(saved / time_s);
            }
            assert!((best_rates(&touched)[from] - rate).abs() < 1e-9);
        }
    }

    #[test]
    fn share_touched_within_a_time_equals_that_of_a_cohort_followed_interval_by_interval() {
        let mut random = SplitMix64::new(8);
        for _ in 0..200 {
            let touched: [f64; INTERVALS] = std::array::from_fn(|_| share(&mut random));
            let (from, within_s) = (random.index(20), random.below(3_000));
            let begin_s = start_s(from) + length_s(from) / 2.0;
            let end_s = begin_s + seconds(within_s);
            let rests = (from..INTERVALS).map(|interval| {
                let (start, end) = (start_s(interval), start_s(interval) + length_s(interval));
                let seen_s = (end.min(end_s) - start.max(begin_s)).max(0.0);
                1.0 - touched[interval] * seen_s / (end - start)
            });
            let naive = 1.0 - rests.product::<f64>();
            let told = within(&touched[from..], from, seconds(within_s));
            assert!((told - naive).abs() < 1e-9, "{told} {naive}");
        }
    }

    #[test]
    fn touched_shares_equal_counts_and_belief_over_random_lives() {
        let mut random = SplitMix64::new(9);
        let mut table = LifeTable::new();
        let mut lives: Vec<Life> = Vec::new();
        for _ in 0..500 {
            let last = random.index(24);
            let ended = (random.below(3) > 0).then_some(last);
            (0..=last).for_each(|interval| table.reached(3, interval));
            if let Some(interval) = ended {
                table.ended(3, interval);
            }
            lives.push((last, ended));
        }
        for interval in 0..INTERVALS {
            let count = |test: &dyn Fn(&Life) -> bool| {
                f64::from(u32::try_from(lives.iter().filter(|life| test(life)).count()).unwrap())
            };
            let reached = count(&|life| life.0 >= interval);
            let ended = count(&|life| life.1 == Some(interval));
            let believed = (0.3 * length_s(interval) / start_s(interval).max(15.0)).min(0.5);
            let naive = (ended + 2.0 * believed) / (reached + 2.0);
            assert!((table.touched_share(3, interval) - naive).abs() < 1e-9);
            // Another class has learned nothing from it.
            let other = table.touched_share(4, interval);
            assert!((other - believed).abs() < 1e-9);
        }
    }
}
