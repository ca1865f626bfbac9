// SPDX-License-Identifier: Apache-2.0
//! Figures: the numeric fields of a report, declared once.
//!
//! From one declaration, [`report!`] generates the struct that is sent as JSON, its OpenAPI schema, and
//! a table of [`Figure`]s from which the metrics page and its documentation are generated. A new figure
//! is therefore one line, and no place can miss it.
//!
//! A latency is sent as three percentiles for people and, to Prometheus, as a histogram: percentiles of
//! several daemons cannot be aggregated, buckets can.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::control::SetReport;

/// How a figure is exported to Prometheus.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FigureKind {
    /// May go up and down.
    Gauge,
    /// Only grows; restarts at zero when the VM is attached anew.
    Counter,
    /// A latency with buckets.
    Histogram,
    /// A gauge for each set, labelled `set`.
    PerSet,
}

/// One number of a report.
pub struct Figure<R> {
    /// Field of the report; ends with its unit.
    pub name: &'static str,
    /// First line of the field's documentation.
    pub help: &'static str,
    /// How it is exported.
    pub kind: FigureKind,
    /// Reads it; `None` where this report lacks it.
    pub read: fn(&R) -> Option<Reading<'_>>,
}

/// The value of a figure.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Reading<'a> {
    /// A whole number.
    Whole(u64),
    /// A number with a fraction.
    Real(f64),
    /// A latency.
    Latency(&'a LatencyUs),
    /// Section counts by set.
    Sets(&'a [SetReport]),
}

/// A report that has figures.
pub trait Report: Sized + 'static {
    /// Start of its metrics' names.
    const METRIC_PREFIX: &'static str;
    /// Its figures in the order of declaration.
    const FIGURES: &'static [Figure<Self>];
    /// Name and value of the label that distinguishes instances.
    fn label(&self) -> (&'static str, &str);
}

/// A field type that can be a figure.
pub trait Measured {
    /// The value, if there is one.
    fn reading(&self) -> Option<Reading<'_>>;
}

impl Measured for u64 {
    fn reading(&self) -> Option<Reading<'_>> {
        Some(Reading::Whole(*self))
    }
}

impl Measured for f64 {
    fn reading(&self) -> Option<Reading<'_>> {
        Some(Reading::Real(*self))
    }
}

impl Measured for LatencyUs {
    fn reading(&self) -> Option<Reading<'_>> {
        Some(Reading::Latency(self))
    }
}

impl Measured for Vec<SetReport> {
    fn reading(&self) -> Option<Reading<'_>> {
        Some(Reading::Sets(self))
    }
}

impl<T: Measured> Measured for Option<T> {
    fn reading(&self) -> Option<Reading<'_>> {
        self.as_ref().and_then(T::reading)
    }
}

/// Upper bounds of the latency buckets in microseconds; the last bucket has no bound.
///
/// They range from the kernel's own minimum for a fault to the second that a person would notice, with
/// two or three steps per decade. Between 10 and 15 they are finer: what Taiji (5.3.1) promises of nine in
/// ten faults is 10 us, to which the price of an install through userfaultfd is added here.
pub const BUCKET_BOUNDS_US: [u64; 20] = [
    2, 5, 10, 11, 12, 13, 14, 15, 20, 30, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 100_000,
    1_000_000,
];

/// Percentiles of a latency, in microseconds.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct LatencyUs {
    /// Half are as fast as this.
    pub p50: f64,
    /// Nine of ten are as fast as this.
    pub p90: f64,
    /// All but one in a hundred are as fast as this.
    pub p99: f64,
    /// For the metrics page only.
    #[serde(skip)]
    pub buckets: LatencyBuckets,
}

/// Counts of a latency by [`BUCKET_BOUNDS_US`].
#[derive(Clone, PartialEq, Default, Debug)]
pub struct LatencyBuckets {
    /// Sum of all latencies.
    pub sum_us: f64,
    /// Latencies in each bucket (not cumulative), the last one without bound.
    pub counts: [u64; BUCKET_BOUNDS_US.len() + 1],
}

impl LatencyUs {
    /// Converts a histogram of nanoseconds.
    #[must_use]
    pub fn from_ns(histogram: &hdrhistogram::Histogram<u64>) -> Self {
        #[expect(
            clippy::cast_precision_loss,
            reason = "a latency past 2^53 ns is 104 days"
        )]
        let us = |ns: u64| ns as f64 / 1e3;
        let at = |quantile: f64| us(histogram.value_at_quantile(quantile));
        let mut buckets = LatencyBuckets::default();
        for entry in histogram.iter_recorded() {
            let (value_ns, count) = (entry.value_iterated_to(), entry.count_at_value());
            let bucket = BUCKET_BOUNDS_US.partition_point(|bound| bound * 1_000 < value_ns);
            buckets.counts[bucket] += count;
            #[expect(clippy::cast_precision_loss, reason = "a count far below 2^53")]
            let many = count as f64;
            buckets.sum_us += us(value_ns) * many;
        }
        if histogram.is_empty() {
            return Self::default();
        }
        Self {
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            buckets,
        }
    }
}

/// Declares a report: `name: Type => kind` with kind one of `label "x"`,
/// `gauge`, `counter`, `histogram`, `per_set`, `skip` (no metric).
macro_rules! report {
    (
        #[doc = $about:literal]
        pub struct $report:ident in $prefix:literal {
            $(
                #[doc = $help:literal]
                $field:ident : $type:ty => $kind:ident $($label:literal)?
            ),* $(,)?
        }
    ) => {
        #[doc = $about]
        #[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
        pub struct $report {
            $( #[doc = $help] pub $field: $type, )*
        }

        impl $crate::figure::Report for $report {
            const METRIC_PREFIX: &'static str = $prefix;
            const FIGURES: &'static [$crate::figure::Figure<Self>] =
                $crate::figure::figures!(@ [] $( ($help $field $kind) )*);

            fn label(&self) -> (&'static str, &str) {
                $( $( ($label, self.$field.as_str()) )? )*
            }
        }
    };
}

/// Builds the table of a report's figures; skips the fields that are none.
macro_rules! figures {
    (@ [$($done:expr),*]) => { &[$($done),*] };
    (@ [$($done:expr),*] ($help:literal $field:ident skip) $($rest:tt)*) => {
        $crate::figure::figures!(@ [$($done),*] $($rest)*)
    };
    (@ [$($done:expr),*] ($help:literal $field:ident label) $($rest:tt)*) => {
        $crate::figure::figures!(@ [$($done),*] $($rest)*)
    };
    (@ [$($done:expr),*] ($help:literal $field:ident gauge) $($rest:tt)*) => {
        $crate::figure::figures!(@ [$($done,)*
            $crate::figure::figure!($help, $field, Gauge)] $($rest)*)
    };
    (@ [$($done:expr),*] ($help:literal $field:ident counter) $($rest:tt)*) => {
        $crate::figure::figures!(@ [$($done,)*
            $crate::figure::figure!($help, $field, Counter)] $($rest)*)
    };
    (@ [$($done:expr),*] ($help:literal $field:ident histogram) $($rest:tt)*) => {
        $crate::figure::figures!(@ [$($done,)*
            $crate::figure::figure!($help, $field, Histogram)] $($rest)*)
    };
    (@ [$($done:expr),*] ($help:literal $field:ident per_set) $($rest:tt)*) => {
        $crate::figure::figures!(@ [$($done,)*
            $crate::figure::figure!($help, $field, PerSet)] $($rest)*)
    };
}

/// One entry of the table.
macro_rules! figure {
    ($help:literal, $field:ident, $kind:ident) => {
        $crate::figure::Figure {
            name: stringify!($field),
            help: $help,
            kind: $crate::figure::FigureKind::$kind,
            read: |report| $crate::figure::Measured::reading(&report.$field),
        }
    };
}

pub(crate) use {figure, figures, report};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{DeviceReport, VmReport};

    #[test]
    fn latency_buckets_count_every_value_once_below_its_bound() {
        let mut histogram = hdrhistogram::Histogram::<u64>::new(3).unwrap();
        for us in [1, 2, 9, 40, 3_000_000] {
            histogram.record(us * 1_000).unwrap();
        }
        let latency = LatencyUs::from_ns(&histogram);
        assert_eq!(latency.buckets.counts.iter().sum::<u64>(), 5);
        assert_eq!(latency.buckets.counts[2], 1);
        assert_eq!(latency.buckets.counts[BUCKET_BOUNDS_US.len()], 1);
        assert!(latency.p50 >= 9.0 && latency.p50 < 9.1);
    }

    #[test]
    fn latency_of_an_empty_histogram_is_zero() {
        let histogram = hdrhistogram::Histogram::<u64>::new(3).unwrap();
        assert_eq!(LatencyUs::from_ns(&histogram), LatencyUs::default());
    }

    #[test]
    fn every_number_of_a_report_is_a_figure_or_named_as_none() {
        let named = [
            "name",
            "pid",
            "vmm",
            "state",
            "eviction_blockers",
            "warnings",
            "regions",
            "socket",
            "kind",
            "image",
            "error",
            "vm",
            "queues",
            "read_only",
            "lookup",
            "on_fault",
            "weight",
            "serial",
            "shared",
            "owner",
            "group",
            "mode",
            "ram_sealed",
            "id",
            "dma_protector",
            "protected_devices",
            "tracker",
            "target_reason",
            "link",
            "on_receive_fault",
            "wire",
        ];
        for (json, figures) in [
            (
                serde_json::to_value(VmReport::default()).unwrap(),
                VmReport::FIGURES.iter().map(|f| f.name).collect::<Vec<_>>(),
            ),
            (
                serde_json::to_value(DeviceReport::default()).unwrap(),
                DeviceReport::FIGURES.iter().map(|f| f.name).collect(),
            ),
        ] {
            for field in json.as_object().unwrap().keys() {
                let is_known = figures.contains(&field.as_str()) || named.contains(&field.as_str());
                assert!(is_known, "{field}");
            }
        }
    }
}
