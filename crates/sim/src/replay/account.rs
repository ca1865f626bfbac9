// SPDX-License-Identifier: Apache-2.0
//! The counters of a replay.

use super::{Bursts, Service};
use pagetide_addr::DeviceId;
use serde::Serialize;
use std::time::Duration;

/// A number of sections over time.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Share {
    /// Sum over time, in sections times nanoseconds.
    pub section_ns: u128,
    /// Most in any sample.
    pub max_sections: u64,
}

impl Share {
    /// `sections` held for `time`.
    pub(super) fn add(&mut self, sections: u64, time: Duration) {
        self.section_ns += u128::from(sections) * time.as_nanos();
        self.max_sections = self.max_sections.max(sections);
    }

    /// Mean over `time`; 0 if that is zero.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a mean for people")]
    pub fn mean_sections(&self, time: Duration) -> f64 {
        if time.is_zero() {
            return 0.0;
        }
        self.section_ns as f64 / time.as_nanos() as f64
    }
}

/// The sections that one policy held for one device at one time (VPRI Fig 17).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// When.
    pub at: Duration,
    /// Sections tracked but not protected: the paper's active block.
    pub watched_sections: u64,
    /// Sections it protected: the paper's inactive block.
    pub protected_sections: u64,
}

/// Faults by the time since the device's last touch of the section, which a protector would have had to
/// bridge. A fault on a section that this device never touched is not included.
///
/// As JSON it is a list of pairs: upper bound in seconds, or null, and faults.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
#[serde(into = "Vec<(Option<u64>, u64)>")]
pub struct FaultAges {
    /// Faults at ages from one bound up to the next; the last, beyond [`Self::BOUNDS_S`], has no end.
    pub counts: [u64; Self::BOUNDS_S.len() + 1],
}

impl FaultAges {
    /// Upper bounds, in seconds.
    pub const BOUNDS_S: [u64; 9] = [60, 120, 180, 240, 300, 450, 600, 900, 1_800];

    /// The sum of both.
    #[must_use]
    pub fn sum(self, other: Self) -> Self {
        let mut sum = self;
        for (count, more) in sum.counts.iter_mut().zip(other.counts) {
            *count += more;
        }
        sum
    }

    /// A fault `age` after the touch before it.
    pub(super) fn add(&mut self, age: Duration) {
        let below = |bound: &u64| Duration::from_secs(*bound) <= age;
        let at = Self::BOUNDS_S
            .iter()
            .take_while(|bound| below(bound))
            .count();
        self.counts[at] += 1;
    }
}

impl From<FaultAges> for Vec<(Option<u64>, u64)> {
    fn from(ages: FaultAges) -> Self {
        let bounds = FaultAges::BOUNDS_S.into_iter().map(Some).chain([None]);
        bounds.zip(ages.counts).collect()
    }
}

/// Ages of evicted sections, to ten seconds.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct EvictionAges {
    /// Evictions by age: in place `n` those of `10 n` seconds and more, and less than ten seconds more.
    pub counts: Vec<u32>,
}

impl EvictionAges {
    /// Width of a class, in seconds.
    pub const CLASS_S: u64 = 10;
    /// Ages beyond a day are counted as a day.
    const CLASSES_MAX: u64 = 24 * 3_600 / Self::CLASS_S;

    pub(super) fn add(&mut self, age: Duration) {
        let class = (age.as_secs() / Self::CLASS_S).min(Self::CLASSES_MAX);
        let class = usize::try_from(class).unwrap_or(0);
        if self.counts.len() <= class {
            self.counts.resize(class + 1, 0);
        }
        self.counts[class] = self.counts[class].saturating_add(1);
    }

    /// Adds those of another account.
    pub fn sum(&mut self, other: &Self) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more);
        }
    }

    /// Those that are not in `before`, an earlier state of this account.
    #[must_use]
    pub fn since(mut self, before: &Self) -> Self {
        for (count, before) in self.counts.iter_mut().zip(&before.counts) {
            *count = count.saturating_sub(*before);
        }
        self
    }

    /// Evictions.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.counts.iter().map(|count| u64::from(*count)).sum()
    }

    /// The age in seconds below which a share of `permille` thousandths of the evictions are, to a class.
    #[must_use]
    pub fn quantile_s(&self, permille: u64) -> Option<u64> {
        let wanted = (self.evictions() * permille.min(1_000))
            .div_ceil(1_000)
            .max(1);
        let mut seen = 0;
        (0..).zip(&self.counts).find_map(|(class, count)| {
            seen += u64::from(*count);
            (seen >= wanted).then_some(class * Self::CLASS_S)
        })
    }
}

/// The counters of one device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceAccount {
    /// The device.
    pub device: DeviceId,
    /// Its kind.
    pub service: Service,
    /// DMA accesses.
    pub touches: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Sections it ever touched.
    pub footprint_sections: u64,
    /// I/O page faults: DMA to an evicted section.
    pub faults: u64,
    /// Of those, faults on sections that no device had touched before, so that no policy could have
    /// protected them: only prefetching of unrequested sections helps.
    pub first_faults: u64,
    /// The others, by age.
    pub fault_ages: FaultAges,
    /// Consecutive touches of one section more than 300 s apart (4.2.2).
    pub long_reuses: u64,
    /// Sections it touched in each whole minute, added up over the minutes.
    pub minute_sections: u64,
    /// What its policy protected.
    pub protected: Share,
    /// Sections that left protection because there were too many.
    pub dropped_sections: u64,
    /// Most memory that its policy used, in bytes.
    pub policy_bytes_max: u64,
    /// What its policy held over time, if requested.
    pub capacity: Vec<Capacity>,
}

impl DeviceAccount {
    pub(super) fn new(device: DeviceId, service: Service) -> Self {
        Self {
            device,
            service,
            touches: 0,
            bytes: 0,
            footprint_sections: 0,
            faults: 0,
            first_faults: 0,
            fault_ages: FaultAges::default(),
            long_reuses: 0,
            minute_sections: 0,
            protected: Share::default(),
            dropped_sections: 0,
            policy_bytes_max: 0,
            capacity: Vec::new(),
        }
    }
}

/// The counters of one VM.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct VmAccount {
    /// Virtual time that has passed.
    pub time: Duration,
    /// Its memory, in sections.
    pub sections: u64,
    /// Bytes of one section.
    pub section_bytes: u64,
    /// The limit over time, in sections; the VM's size while there is none.
    pub limit: Share,
    /// Sections that were present.
    pub resident: Share,
    /// Accesses of its CPUs.
    pub cpu_touches: u64,
    /// CPU accesses to an evicted section.
    pub cpu_faults: u64,
    /// Sections evicted, each time counted.
    pub evicted_sections: u64,
    /// Of those, protected sections: the limit could not be kept otherwise.
    pub evicted_protected: u64,
    /// Scans of what was touched.
    pub scans: u64,
    /// Fills that went over the limit because nothing could be evicted at once.
    pub over_limit_fills: u64,
    /// Sections swapped in though nothing had asked for them: they had been in use, and there was room again.
    pub swapped_in_ahead: u64,
    /// Sections that were absent.
    pub absent: Share,
    /// How long devices had left the sections alone that were evicted, of those that any had touched.
    pub eviction_ages: EvictionAges,
    /// Sections protected for any of its devices.
    pub protected: Share,
    /// Bursts of its devices' faults.
    pub bursts: Bursts,
    /// Its devices, in the order of their first touch.
    pub devices: Vec<DeviceAccount>,
}

impl VmAccount {
    /// Faults of its devices of one kind.
    #[must_use]
    pub fn faults(&self, service: Service) -> u64 {
        let of_kind = |device: &&DeviceAccount| device.service == service;
        self.devices.iter().filter(of_kind).map(|d| d.faults).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantile_of_ages_is_the_class_in_which_that_share_of_them_is_reached() {
        let mut ages = EvictionAges::default();
        assert_eq!(ages.quantile_s(500), None);
        for age_s in [3, 9, 10, 45, 1_000_000] {
            ages.add(Duration::from_secs(age_s));
        }
        let quantiles = [0, 400, 401, 800, 1_000].map(|permille| ages.quantile_s(permille));
        let expected = [0, 0, 10, 40, 86_400].map(Some);
        assert_eq!(quantiles, expected);
        let before = ages.clone();
        ages.add(Duration::from_secs(12));
        let since = ages.clone().since(&before);
        assert_eq!((since.evictions(), since.quantile_s(500)), (1, Some(10)));
        ages.sum(&since);
        assert_eq!(ages.evictions(), 7);
    }

    #[test]
    fn fault_is_counted_below_the_bound_that_its_age_has_not_reached() {
        let mut ages = FaultAges::default();
        for (age_s, times) in [(0, 1), (59, 1), (60, 3), (1_799, 2), (1_800, 5)] {
            for _ in 0..times {
                ages.add(Duration::from_secs(age_s));
            }
        }
        let told = Vec::from(ages.sum(ages));
        assert_eq!(told.first(), Some(&(Some(60), 4)));
        assert_eq!(told[1], (Some(120), 6));
        assert_eq!(told[8..], [(Some(1_800), 4), (None, 10)]);
    }
}
