// SPDX-License-Identifier: Apache-2.0
//! Amounts that must not be mixed up: bytes, shares, rates, weights, and the VM they belong to.

use pagetide_addr::PAGE_BYTES;
use std::{
    fmt,
    iter::Sum,
    ops::{Add, AddAssign},
    time::Duration,
};

const KIB: u64 = 1 << 10;

/// An amount of memory. Sums saturate: an amount near 2^64 is "no limit", and stays that.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Debug,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// `count` MiB.
    #[must_use]
    pub const fn mib(count: u64) -> Self {
        Self(count.saturating_mul(KIB * KIB))
    }

    /// `count` GiB.
    #[must_use]
    pub const fn gib(count: u64) -> Self {
        Self::mib(count.saturating_mul(KIB))
    }

    /// `count` pages.
    #[must_use]
    pub const fn of_pages(count: u64) -> Self {
        Self(count.saturating_mul(PAGE_BYTES))
    }

    /// Whole pages in it.
    #[must_use]
    pub const fn pages(self) -> u64 {
        self.0 / PAGE_BYTES
    }

    /// What is left after `other` is taken away, if anything.
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// `numerator` parts of `denominator`, rounded down.
    #[must_use]
    pub fn part(self, numerator: u64, denominator: u64) -> Self {
        // Nearly always, and much faster.
        if let Some(product) = self.0.checked_mul(numerator) {
            return Self(product / denominator.max(1));
        }
        let product = u128::from(self.0) * u128::from(numerator);
        Self(u64::try_from(product / u128::from(denominator.max(1))).unwrap_or(u64::MAX))
    }
}

impl Add for Bytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("GiB", 3), ("MiB", 2), ("KiB", 1)];
        for (name, power) in units {
            let unit = KIB.pow(power);
            if self.0 >= unit {
                let (whole, tenth) = (self.0 / unit, self.0 % unit * 10 / unit);
                return match tenth {
                    0 => write!(f, "{whole} {name}"),
                    _ => write!(f, "{whole}.{tenth} {name}"),
                };
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

/// A share in thousandths.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Debug,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(transparent)]
pub struct Permille(pub u16);

impl Permille {
    /// This share of `amount`.
    #[must_use]
    pub fn of(self, amount: Bytes) -> Bytes {
        amount.part(u64::from(self.0), 1000)
    }
}

/// Bytes per second.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Debug,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(transparent)]
pub struct Rate(pub Bytes);

impl Rate {
    /// What comes together in `time`.
    #[must_use]
    pub fn over(self, time: Duration) -> Bytes {
        self.0.part(millis(time), 1000)
    }
}

/// Whole milliseconds.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The share of a VM relative to the weights of the others, while they all want more than there is.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize,
)]
#[serde(try_from = "u32", into = "u32")]
pub struct Weight(u32);

/// A weight that no VM can have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "weight {0} is not possible: a VM of weight 0 would get nothing beyond its floor; \
     use 1 to {max}, where {default} is the default",
    max = Weight::MAX,
    default = Weight::DEFAULT
)]
pub struct WeightError(pub u32);

impl Weight {
    /// The largest weight, as for cgroups. With [`super::VMS_MAX`] VMs all weights add up to less
    /// than 2^32.
    pub const MAX: u32 = 10_000;
    /// Weight of a VM that is given none.
    pub const DEFAULT: u32 = 100;

    /// As a number, at least 1.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl Default for Weight {
    fn default() -> Self {
        Self(Self::DEFAULT)
    }
}

impl TryFrom<u32> for Weight {
    type Error = WeightError;

    fn try_from(weight: u32) -> Result<Self, WeightError> {
        if (1..=Self::MAX).contains(&weight) {
            Ok(Self(weight))
        } else {
            Err(WeightError(weight))
        }
    }
}

impl From<Weight> for u32 {
    fn from(weight: Weight) -> Self {
        weight.0
    }
}

/// A VM under the budget, by a number that its owner chooses.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize,
)]
#[serde(transparent)]
pub struct VmId(pub u64);

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VM {}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amount_is_displayed_in_its_largest_unit_with_one_decimal() {
        assert_eq!(Bytes::gib(48).to_string(), "48 GiB");
        assert_eq!(Bytes::mib(1536).to_string(), "1.5 GiB");
        assert_eq!(Bytes(4096).to_string(), "4 KiB");
        assert_eq!(Bytes(12).to_string(), "12 bytes");
    }

    #[test]
    fn part_of_the_largest_amount_does_not_overflow() {
        assert_eq!(Bytes(u64::MAX).part(1000, 1000), Bytes(u64::MAX));
        assert_eq!(Bytes(u64::MAX).part(2, 1), Bytes(u64::MAX));
        assert_eq!(Bytes(7).part(1, 0), Bytes(7));
        assert_eq!(
            Rate(Bytes::mib(64)).over(Duration::from_millis(500)),
            Bytes::mib(32)
        );
    }

    #[test]
    fn weight_of_zero_and_above_the_largest_are_refused() {
        assert_eq!(Weight::try_from(0), Err(WeightError(0)));
        assert_eq!(Weight::try_from(10_001), Err(WeightError(10_001)));
        assert_eq!(Weight::try_from(10_000).map(Weight::get), Ok(10_000));
        assert!(WeightError(0).to_string().contains("use 1 to 10000"));
    }
}
