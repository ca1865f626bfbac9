// SPDX-License-Identifier: Apache-2.0
//! A latency histogram of bounded size: exact counts in log-linear buckets, each 1/32 of its octave
//! wide.
//!
//! ```text
//!   256 ns units:  0 1 2 … 63 | 64..128 by 2 | 128..256 by 4 | … up to 2^30 units = 275 s
//!                  exact        32 buckets     32 buckets
//! ```
//! So a quantile is accurate to 3.2%, and never too small: it is reported as the upper end of its
//! bucket. Only the range of buckets that was ever hit uses memory. The latencies of a disk spread
//! over some octaves, so a histogram takes some hundred bytes, and at most 3.5 KiB.

/// Nanoseconds of a unit, as a shift.
const UNIT_SHIFT: u32 = 8;
/// Buckets of an octave, as a shift.
const STEPS_SHIFT: u32 = 5;
/// Highest bit of a value in units that is distinguished; longer latencies are in the last bucket.
const TOP_BIT: u32 = 29;
/// Most buckets.
pub(crate) const BUCKETS_MAX: usize = ((TOP_BIT - STEPS_SHIFT + 2) << STEPS_SHIFT) as usize;

/// See the module documentation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct LatencyCounts {
    /// Number of the first bucket of `counts`.
    first: usize,
    counts: Vec<u32>,
    total: u64,
}

/// The bucket of a latency.
fn bucket_of(ns: u64) -> usize {
    let units = (ns >> UNIT_SHIFT).min((2 << TOP_BIT) - 1);
    let top_bit = u64::BITS - 1 - (units | 1).leading_zeros();
    let shift = top_bit.saturating_sub(STEPS_SHIFT);
    let step = units >> shift;
    // At most `BUCKETS_MAX`, so nothing is lost.
    usize::try_from((u64::from(shift) << STEPS_SHIFT) + step).unwrap_or(BUCKETS_MAX - 1)
}

/// The longest latency of a bucket, in nanoseconds.
fn upper_end_ns(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let shift = (bucket >> STEPS_SHIFT).saturating_sub(1);
    let step = bucket - (shift << STEPS_SHIFT);
    ((step + 1) << (shift + u64::from(UNIT_SHIFT))) - 1
}

impl LatencyCounts {
    /// Counts one latency.
    pub fn record(&mut self, ns: u64) {
        self.count(bucket_of(ns), 1);
    }

    #[inline]
    fn count(&mut self, bucket: usize, number: u32) {
        let at = bucket.wrapping_sub(self.first);
        let slot = match self.counts.get_mut(at) {
            Some(slot) => slot,
            None => self.stretch_to(bucket),
        };
        *slot = slot.saturating_add(number);
        self.total += u64::from(number);
    }

    #[cold]
    fn stretch_to(&mut self, bucket: usize) -> &mut u32 {
        if self.counts.is_empty() {
            self.first = bucket;
        }
        if bucket < self.first {
            let more = self.first - bucket;
            self.counts.splice(0..0, std::iter::repeat_n(0, more));
            self.first = bucket;
        }
        let at = bucket - self.first;
        if self.counts.len() <= at {
            self.counts.resize(at + 1, 0);
        }
        &mut self.counts[at]
    }

    /// Adds all counts of `other`.
    pub fn add(&mut self, other: &Self) {
        for (bucket, number) in (other.first..).zip(&other.counts) {
            if *number > 0 {
                self.count(bucket, *number);
            }
        }
    }

    /// Latencies counted.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The latency that a fraction `numerator / denominator` of all does not exceed; `None` if
    /// empty.
    pub fn quantile_ns(&self, numerator: u64, denominator: u64) -> Option<u64> {
        let rank = self.total.saturating_mul(numerator).div_ceil(denominator);
        let mut passed = 0;
        for (bucket, number) in (self.first..).zip(&self.counts) {
            passed += u64::from(*number);
            if *number > 0 && passed >= rank.max(1) {
                return Some(upper_end_ns(bucket));
            }
        }
        None
    }

    /// Heap memory it uses.
    pub fn heap_bytes(&self) -> usize {
        self.counts.capacity() * size_of::<u32>()
    }

    /// Releases spare capacity.
    pub fn trim(&mut self) {
        self.counts.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_follow_one_another_without_gap_and_grow_by_a_thirty_second() {
        let mut below = 0;
        for bucket in 0..BUCKETS_MAX {
            let end = upper_end_ns(bucket);
            assert_eq!(bucket_of(end), bucket);
            assert_eq!(bucket_of(end + 1), (bucket + 1).min(BUCKETS_MAX - 1));
            assert_eq!(bucket_of(below), bucket);
            assert!(end - below <= (below / 32).max(256), "bucket {bucket}");
            below = end + 1;
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS_MAX - 1);
        assert!(below > 270_000_000_000, "covers minutes: {below} ns");
    }

    #[test]
    fn quantiles_of_nothing_are_none_and_of_one_are_that_one() {
        let mut counts = LatencyCounts::default();
        assert_eq!(counts.quantile_ns(1, 2), None);
        counts.record(5_000_000);
        for (n, d) in [(0, 1), (1, 2), (9999, 10_000), (1, 1)] {
            let told = counts.quantile_ns(n, d).unwrap();
            assert!((5_000_000..5_170_000).contains(&told), "{told}");
        }
    }

    proptest! {
        #[test]
        fn quantiles_are_those_of_the_sorted_values_within_a_bucket(
            values in prop::collection::vec(0_u64..400_000_000_000, 1..200),
            split in 0_usize..200,
            permyriad in 1_u64..=10_000,
        ) {
            let (mut counts, mut other) = (LatencyCounts::default(), LatencyCounts::default());
            for (i, value) in values.iter().enumerate() {
                if i < split { counts.record(*value) } else { other.record(*value) }
            }
            counts.add(&other);
            let mut sorted = values.clone();
            sorted.sort_unstable();
            let rank = (values.len() as u64 * permyriad).div_ceil(10_000).max(1);
            let exact = sorted[usize::try_from(rank - 1).unwrap()];
            let told = counts.quantile_ns(permyriad, 10_000).unwrap();
            prop_assert_eq!(counts.total(), values.len() as u64);
            prop_assert_eq!(bucket_of(told), bucket_of(exact));
            prop_assert!(told >= exact || bucket_of(exact) == BUCKETS_MAX - 1);
            counts.trim();
            prop_assert!(counts.heap_bytes() <= 4 * BUCKETS_MAX);
        }
    }
}
