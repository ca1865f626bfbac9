// SPDX-License-Identifier: Apache-2.0
//! Medians and means of figures, and rounding to the clock's precision.

use serde_json::Value;

/// The median, the upper of two; NaN without values.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let sorted = ascending(values);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The median, between the middle two if there are two; NaN without values.
pub(crate) fn midpoint(values: impl IntoIterator<Item = f64>) -> f64 {
    let sorted = ascending(values);
    match sorted.len() {
        0 => f64::NAN,
        count => f64::midpoint(sorted[(count - 1) / 2], sorted[count / 2]),
    }
}

/// The median over the rounds of a figure of one side over the same of the other: a moment in which the
/// machine is slow affects both slices of its round, and no other ratio.
pub(crate) fn median_ratio<T>(ours: &[T], theirs: &[T], figure: impl Fn(&T) -> f64) -> f64 {
    let rounds = ours.iter().zip(theirs);
    median(rounds.map(|(ours, theirs)| figure(ours) / figure(theirs)))
}

/// The arithmetic mean; 0 without values.
pub(crate) fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (sum, count) = values
        .into_iter()
        .fold((0.0, 0_u64), |(sum, count), value| (sum + value, count + 1));
    if count == 0 { 0.0 } else { sum / to_f64(count) }
}

/// The least value that `permille` thousandths of `sorted` do not exceed.
pub(crate) fn at_permille<T: Copy>(sorted: &[T], permille: usize) -> Option<T> {
    let rank = (sorted.len() * permille).div_ceil(1000).max(1);
    sorted.get(rank - 1).copied()
}

/// Rounds to a thousandth: no clock here is better than that.
pub(crate) fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// The same as a field of a report.
pub(crate) fn thousandths(value: f64) -> Value {
    rounded(value).into()
}

/// A count or a time for ratios and people.
#[expect(clippy::cast_precision_loss, reason = "figures for ratios and people")]
pub(crate) fn to_f64(number: u64) -> f64 {
    number as f64
}

fn ascending(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_few_is_one_of_them() {
        assert!((median([3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median([4.0, 1.0]) - 4.0).abs() < 1e-9);
        assert!(median([]).is_nan());
        assert!((midpoint([3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((midpoint([4.0, 1.0]) - 2.5).abs() < 1e-9);
        assert!(midpoint([]).is_nan());
    }

    #[test]
    fn mean_of_none_is_zero() {
        assert!((mean([1.0, 2.0, 6.0]) - 3.0).abs() < 1e-9);
        assert!(mean([]).abs() < 1e-9);
    }

    #[test]
    fn median_ratio_is_of_rounds_and_not_of_medians() {
        let (ours, theirs) = ([20.0, 100.0, 3000.0], [10.0, 100.0, 1000.0]);
        let ratio = median_ratio(&ours, &theirs, |figure| *figure);
        assert!((ratio - 2.0).abs() < 1e-9);
    }

    #[test]
    fn percentile_is_the_least_that_enough_do_not_exceed() {
        let sorted: Vec<u64> = (1..=10_000).collect();
        assert_eq!(at_permille(&sorted, 500), Some(5000));
        assert_eq!(at_permille(&sorted, 999), Some(9990));
        assert_eq!(at_permille(&sorted, 1000), Some(10_000));
        assert_eq!(at_permille(&[7], 1), Some(7));
        assert_eq!(at_permille::<u64>(&[], 500), None);
    }
}
