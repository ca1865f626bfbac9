// SPDX-License-Identifier: Apache-2.0
//! The figures of an analysis, as the paper draws them (VPRI Fig 9, 10, 11).
//!
//! [`Tallies`] are plain counts and can be added up: of several devices, of
//! several VMs. Shares are made from them at the end.

use std::time::Duration;

use pagetide_addr::DeviceId;
use serde::Serialize;

use super::{AnalysisParams, GrowthCurve};
use pagetide_access_log::Service;

/// First access count of each row; the last has no end. The paper's limits are among them: more than twice,
/// fewer than 10, fewer than 50.
const COUNT_ROWS: [u64; 14] = [
    1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000,
];

/// Start of each row of reuse intervals, in seconds; the last has no end. A value on a limit belongs to the
/// row before it, so that the rows after 300 contain the intervals longer than 300.
const REUSE_ROWS_SECONDS: [u64; 15] = [
    0, 1, 2, 5, 10, 20, 30, 60, 120, 180, 300, 600, 1200, 1800, 3600,
];

/// The row for this many accesses.
pub(super) fn count_row(accesses: u64) -> usize {
    COUNT_ROWS
        .partition_point(|from| *from <= accesses)
        .saturating_sub(1)
}

/// The row for an interval.
pub(super) fn reuse_row(interval: Duration) -> usize {
    REUSE_ROWS_SECONDS
        .partition_point(|from| Duration::from_secs(*from) < interval)
        .saturating_sub(1)
}

/// The counts, by rows.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Tallies {
    /// Accesses to sections.
    pub accesses: u64,
    /// Sections by how often they were touched.
    pub sections: [u64; COUNT_ROWS.len()],
    /// Simulated faults by how often their sections were touched.
    pub faults: [u64; COUNT_ROWS.len()],
    /// Intervals between touches of one section by one device.
    pub reuse: [u64; REUSE_ROWS_SECONDS.len()],
}

impl Tallies {
    /// Adds other counts.
    pub fn add(&mut self, other: &Self) {
        self.accesses += other.accesses;
        add_rows(&mut self.sections, &other.sections);
        add_rows(&mut self.faults, &other.faults);
        add_rows(&mut self.reuse, &other.reuse);
    }
}

fn add_rows(rows: &mut [u64], others: &[u64]) {
    for (row, other) in rows.iter_mut().zip(others) {
        *row += other;
    }
}

/// The row of sections with a similar number of touches.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CountRow {
    /// Fewest accesses of the row.
    pub from_accesses: u64,
    /// Most accesses of the row; `None` in the last.
    pub to_accesses: Option<u64>,
    /// Sections.
    pub sections: u64,
    /// Share of all sections that were touched.
    pub sections_share: Option<f64>,
    /// Simulated faults on them.
    pub faults: u64,
    /// Share of all simulated faults.
    pub faults_share: Option<f64>,
}

/// Intervals between touches of one section by one device.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ReuseRow {
    /// They are longer than this (the first row: at least).
    pub from_seconds: u64,
    /// And at most this; `None` in the last row.
    pub to_seconds: Option<u64>,
    /// How many there are.
    pub intervals: u64,
    /// Share of all intervals.
    pub intervals_share: Option<f64>,
}

/// How devices reuse memory. A share is `None` if its whole is zero.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Locality {
    /// Accesses to sections.
    pub accesses: u64,
    /// Sections that were touched, each counted for each device.
    pub sections: u64,
    /// Simulated faults (4.2.2).
    pub simulated_faults: u64,
    /// Sections that were touched fewer than 10 times, as a share.
    pub sections_under_10_share: Option<f64>,
    /// Sections that were touched more than twice, as a share.
    pub sections_over_2_share: Option<f64>,
    /// Simulated faults on sections that were touched fewer than 10 times, as a share.
    pub faults_under_10_share: Option<f64>,
    /// Simulated faults on sections that were touched fewer than 50 times, as a share.
    pub faults_under_50_share: Option<f64>,
    /// Sections and simulated faults by the number of accesses.
    pub by_access_count: Vec<CountRow>,
    /// Intervals by their length.
    pub reuse_intervals: Vec<ReuseRow>,
}

impl Locality {
    /// The figures of `tallies`.
    #[must_use]
    pub fn of(tallies: &Tallies) -> Self {
        let Tallies {
            accesses,
            sections,
            faults,
            reuse,
        } = tallies;
        let under = |rows: &[u64], accesses| share(up_to(rows, accesses), sum(rows));
        Self {
            accesses: *accesses,
            sections: sum(sections),
            simulated_faults: sum(faults),
            sections_under_10_share: under(sections, 10),
            sections_over_2_share: under(sections, 3).map(|others| 1.0 - others),
            faults_under_10_share: under(faults, 10),
            faults_under_50_share: under(faults, 50),
            by_access_count: rows(&COUNT_ROWS)
                .zip(sections.iter().zip(faults))
                .map(|((from, next), (in_row, faults_in_row))| CountRow {
                    from_accesses: from,
                    to_accesses: next.map(|next| next - 1),
                    sections: *in_row,
                    sections_share: share(*in_row, sum(sections)),
                    faults: *faults_in_row,
                    faults_share: share(*faults_in_row, sum(faults)),
                })
                .collect(),
            reuse_intervals: rows(&REUSE_ROWS_SECONDS)
                .zip(reuse)
                .map(|((from, next), intervals)| ReuseRow {
                    from_seconds: from,
                    to_seconds: next,
                    intervals: *intervals,
                    intervals_share: share(*intervals, sum(reuse)),
                })
                .collect(),
        }
    }
}

/// Start of each row and of the next one.
fn rows(begins: &[u64]) -> impl Iterator<Item = (u64, Option<u64>)> + '_ {
    let next = begins.iter().skip(1).copied().map(Some).chain([None]);
    begins.iter().copied().zip(next)
}

fn sum(rows: &[u64]) -> u64 {
    rows.iter().sum()
}

/// Total of the rows of fewer than `accesses`, which is the start of a row.
fn up_to(rows: &[u64], accesses: u64) -> u64 {
    let below = COUNT_ROWS.iter().take_while(|from| **from < accesses);
    rows.iter().zip(below).map(|(row, _)| row).sum()
}

/// A part of a whole; `None` of nothing.
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// The figures of one device.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DeviceAnalysis {
    /// Which device.
    pub device: DeviceId,
    /// Its name, if the caller knows one.
    pub name: Option<String>,
    /// What kind of device.
    pub service: Service,
    /// Memory it touched, in bytes, whole sections (Fig 9).
    pub footprint_bytes: u64,
    /// That as a share of the VM's memory, if its size is known.
    pub footprint_share: Option<f64>,
    /// The most of it that was touched within one minute, in bytes.
    pub busiest_minute_bytes: u64,
    /// Time from one point of `footprint_points_sections` to the next, in seconds.
    pub footprint_step_seconds: u64,
    /// Sections that had been touched by the end of each step (Fig 10b, 11b).
    pub footprint_points_sections: Vec<u64>,
    /// How it reuses memory (Fig 10c, 10d, 11c, 11d).
    #[serde(flatten)]
    pub locality: Locality,
    /// The counts behind it.
    #[serde(skip)]
    pub tallies: Tallies,
}

impl DeviceAnalysis {
    pub(super) fn of(
        device: DeviceId,
        service: Service,
        params: &AnalysisParams,
        tallies: Tallies,
        footprint: &GrowthCurve,
        busiest_minute_sections: u64,
    ) -> Self {
        let footprint_bytes = footprint.total().saturating_mul(params.section_bytes);
        Self {
            device,
            name: None,
            service,
            footprint_bytes,
            footprint_share: params
                .memory_bytes
                .and_then(|memory| share(footprint_bytes, memory)),
            busiest_minute_bytes: busiest_minute_sections.saturating_mul(params.section_bytes),
            footprint_step_seconds: footprint.step().as_secs(),
            footprint_points_sections: footprint.points().to_vec(),
            locality: Locality::of(&tallies),
            tallies,
        }
    }
}

/// Footprints of several devices, as shares of their VMs' memory (Fig 9a): their mean, median, and so on.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct FootprintShares {
    /// Mean.
    pub mean: f64,
    /// Half of the devices have at most this.
    pub p50: f64,
    /// 95 of 100 devices have at most this.
    pub p95: f64,
    /// The largest.
    pub max: f64,
}

impl FootprintShares {
    /// Of these footprints; `None` if there are none.
    #[must_use]
    pub fn of(mut shares: Vec<f64>) -> Option<Self> {
        shares.sort_by(f64::total_cmp);
        let max = *shares.last()?;
        // The smallest value that this many of a hundred do not exceed.
        let at = |hundredths: usize| {
            let rank = (shares.len() * hundredths).div_ceil(100).max(1);
            shares.get(rank - 1).copied().unwrap_or(max)
        };
        Some(Self {
            mean: shares.iter().sum::<f64>() / shares.len() as f64,
            p50: at(50),
            p95: at(95),
            max,
        })
    }
}

/// The figures of all devices of one kind.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ServiceAnalysis {
    /// Which kind.
    pub service: Service,
    /// Devices.
    pub devices: u64,
    /// Their footprints, if the size of their VMs' memory is known.
    pub footprint_share: Option<FootprintShares>,
    /// How they reuse memory, all taken together.
    #[serde(flatten)]
    pub locality: Locality,
}

impl ServiceAnalysis {
    /// Of those of `devices`, of one VM or of many, that are of this kind.
    #[must_use]
    pub fn of<'a>(service: Service, devices: impl IntoIterator<Item = &'a DeviceAnalysis>) -> Self {
        let mut tallies = Tallies::default();
        let mut shares = Vec::new();
        let mut count = 0;
        for device in devices {
            if device.service == service {
                count += 1;
                tallies.add(&device.tallies);
                shares.extend(device.footprint_share);
            }
        }
        Self {
            service,
            devices: count,
            footprint_share: FootprintShares::of(shares),
            locality: Locality::of(&tallies),
        }
    }
}

/// The figures of a VM's devices.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct AccessAnalysis {
    /// The VM's memory, in bytes, if known.
    pub memory_bytes: Option<u64>,
    /// Size of a section, in bytes.
    pub section_bytes: u64,
    /// A touch after longer than this is a simulated fault, in seconds.
    pub fault_interval_seconds: f64,
    /// From the first touch to the last, in seconds.
    pub span_seconds: f64,
    /// Each kind of device that there is.
    pub services: Vec<ServiceAnalysis>,
    /// Each device.
    pub devices: Vec<DeviceAnalysis>,
}

impl AccessAnalysis {
    pub(super) fn of(
        params: &AnalysisParams,
        span: Duration,
        devices: Vec<DeviceAnalysis>,
    ) -> Self {
        Self {
            memory_bytes: params.memory_bytes,
            section_bytes: params.section_bytes,
            fault_interval_seconds: params.fault_interval.as_secs_f64(),
            span_seconds: span.as_secs_f64(),
            services: Service::ALL
                .into_iter()
                .map(|service| ServiceAnalysis::of(service, &devices))
                .filter(|service| service.devices > 0)
                .collect(),
            devices,
        }
    }

    /// The figures of one kind of device, if there are any.
    #[must_use]
    pub fn service(&self, service: Service) -> Option<&ServiceAnalysis> {
        self.services
            .iter()
            .find(|analysis| analysis.service == service)
    }
}
