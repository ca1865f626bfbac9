// SPDX-License-Identifier: Apache-2.0
//! Pictures of one round and of what came after the rounds, by Taiji's Fig 14 and 15, and the data they are
//! drawn from.
//!
//! | file | shows | Fig |
//! |---|---|---|
//! | `burst-free.svg` | free memory of the budget beside its watermarks | 14e |
//! | `burst-throughput.svg` | both tenants, ours and on zram, over what they do with all memory present | – |
//! | `burst-scheduler.svg` | CPU time by class of the scheduler | 14b |
//! | `burst-heat.svg` | hot sections and the cold share | 14c, d |
//! | `burst-faults.svg` | distribution of fault times | 14f |
//! | `online-free.svg` | free memory of the budget | 15a |
//! | `online-cold.svg` | distribution of the cold share | 15b |
//! | `online-faults.svg` | distribution of fault times | 15d |
//! | `burst.json` | all of it as numbers | |

use super::{
    online::cold_shares,
    report::{Measured, Sizes},
    slice::{BURSTING, Rates, STEADY, Slice, Told},
};
use crate::harness::{
    figures::{rounded, to_f64},
    latencies::Latencies,
};
use pagetide_chart::{Axis, Chart, Scale, Series, Shape};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Longest fault in the picture.
const FAULT_MAX_US: f64 = 60.0;
/// Most points of a line: a picture has some hundred pixels.
const POINTS_MAX: usize = 800;

/// Draws `round` and `online` into `dir`, which is made if necessary; returns the files.
///
/// # Errors
/// If one cannot be drawn or written.
pub(super) fn draw(
    dir: &Path,
    sizes: &Sizes,
    round: &Measured,
    online: &Slice,
) -> Result<Vec<PathBuf>, String> {
    fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let charts = [
        ("burst-free.svg", free(sizes, &round.ours)),
        ("burst-throughput.svg", throughput(round)),
        ("burst-scheduler.svg", scheduler(&round.ours)),
        ("burst-heat.svg", heat(&round.ours)),
        ("burst-faults.svg", faults(round)),
        ("online-free.svg", free(sizes, online)),
        ("online-cold.svg", cold(online)),
        ("online-faults.svg", online_faults(round, online)),
    ];
    let mut files = Vec::new();
    for (name, chart) in charts {
        let svg = chart.svg().map_err(|error| error.to_string())?;
        files.push(write(&dir.join(name), &svg)?);
    }
    let data =
        serde_json::to_string(&data(sizes, round, online)).map_err(|error| error.to_string())?;
    files.push(write(&dir.join("burst.json"), &(data + "\n"))?);
    Ok(files)
}

fn write(path: &Path, text: &str) -> Result<PathBuf, String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(path.to_owned())
}

/// A picture over time. The x axis begins at 0, so the burst is where it happened.
struct OverTime<'a> {
    slice: &'a Slice,
    /// Seconds looked at before the burst.
    before_s: f64,
}

impl<'a> OverTime<'a> {
    fn of(slice: &'a Slice) -> Self {
        let first = slice.rates.first().map_or(0.0, |rates| rates.from_s);
        Self {
            slice,
            before_s: (-first).max(0.0),
        }
    }

    fn line(&self, name: &str, points: impl Iterator<Item = (f64, f64)>) -> Series {
        let points: Vec<(f64, f64)> = points
            .map(|(at_s, y)| (at_s + self.before_s, y))
            .filter(|(x, _)| *x >= 0.0)
            .collect();
        let every = points.len().div_ceil(POINTS_MAX).max(1);
        Series {
            name: name.to_owned(),
            shape: Shape::Line(points.into_iter().step_by(every).collect()),
        }
    }

    fn chart(&self, title: &str, y: (&str, Scale), series: Vec<Series>) -> Chart {
        let y_max = series
            .iter()
            .map(|series| series.shape.top())
            .fold(0.0, f64::max);
        Chart {
            title: title.to_owned(),
            x: Axis::Numbers {
                name: "seconds".to_owned(),
                max: self.before_s + self.slice.end_s(),
            },
            y_name: y.0.to_owned(),
            y_max: y_max * 1.05,
            y_scale: y.1,
            series,
            mark: (self.slice.rates.first())
                .filter(|first| first.from_s < 0.0)
                .map(|_| (self.before_s, "burst".to_owned())),
        }
    }
}

fn mib(bytes: u64) -> f64 {
    to_f64(bytes) / f64::from(1 << 20)
}

fn free(sizes: &Sizes, slice: &Slice) -> Chart {
    let over = OverTime::of(slice);
    let free = slice
        .used
        .iter()
        .map(|(at_s, used)| (*at_s, mib(sizes.budget_bytes.saturating_sub(*used))));
    let level = |name: &str, bytes: u64| {
        let ends = [-over.before_s, slice.end_s()];
        over.line(name, ends.into_iter().map(|at_s| (at_s, mib(bytes))))
    };
    let series = vec![
        over.line("free", free),
        level("high", sizes.high_bytes),
        level("low", sizes.low_bytes),
        level("min", sizes.min_bytes),
    ];
    over.chart("Free memory of the budget", ("MiB", Scale::Plain), series)
}

fn throughput(round: &Measured) -> Chart {
    let over = OverTime::of(&round.ours);
    let reference = &round.reference;
    let line = |name: &str, slice: &Slice, of: fn(&Rates) -> f64, before: f64| {
        let points = slice
            .rates
            .iter()
            .map(|rates| ((rates.from_s + rates.to_s) / 2.0, of(rates) / before));
        over.line(name, points)
    };
    let mut series = vec![
        line(
            "bursting",
            &round.ours,
            |rates| rates.bursting,
            reference.bursting,
        ),
        line(
            "steady",
            &round.ours,
            |rates| rates.steady,
            reference.steady,
        ),
    ];
    if let Some(zram) = &round.zram {
        series.push(line(
            "bursting, zram",
            zram,
            |rates| rates.bursting,
            reference.bursting,
        ));
        series.push(line(
            "steady, zram",
            zram,
            |rates| rates.steady,
            reference.steady,
        ));
    }
    let title = "Throughput over that of the larger working set with all memory present";
    over.chart(title, ("share", Scale::Shares), series)
}

fn scheduler(slice: &Slice) -> Chart {
    let over = OverTime::of(slice);
    let classes = slice.told.first().map_or(0, |told| told.shares.len());
    let series = (0..classes).map(|class| {
        let name = &slice.told[0].shares[class].0;
        over.line(
            name,
            slice
                .told
                .iter()
                .map(|told| (told.at_s, told.shares[class].1)),
        )
    });
    let series = series.collect();
    over.chart(
        "CPU time by class of the scheduler",
        ("share of all CPUs", Scale::Shares),
        series,
    )
}

fn heat(slice: &Slice) -> Chart {
    let over = OverTime::of(slice);
    let hot = |name: &str, tenant: usize| {
        let most = slice
            .told
            .iter()
            .flat_map(|told| told.hot_sections)
            .max()
            .unwrap_or(0)
            .max(1);
        let points = slice
            .told
            .iter()
            .map(|told| (told.at_s, to_f64(told.hot_sections[tenant]) / to_f64(most)));
        over.line(&format!("{name} (100% are {most} sections)"), points)
    };
    let series = vec![
        hot("hot, bursting", BURSTING),
        hot("hot, steady", STEADY),
        over.line(
            "cold share",
            slice.told.iter().map(|told| (told.at_s, told.cold_share)),
        ),
    ];
    over.chart(
        "Hot sections and cold share",
        ("share", Scale::Shares),
        series,
    )
}

/// The share of `latencies` that took at most so long.
fn distribution(latencies: &Latencies) -> Vec<(f64, f64)> {
    let points = (0..=1000).map(|permille| (latencies.us(permille), to_f64(permille as u64) / 1e3));
    points.filter(|(us, _)| *us <= FAULT_MAX_US).collect()
}

/// A line of a distribution.
fn shares_of(name: &str, points: Vec<(f64, f64)>) -> Series {
    Series {
        name: name.to_owned(),
        shape: Shape::Line(points),
    }
}

fn fault_chart(title: &str, round: &Measured, series: Vec<Series>) -> Chart {
    Chart {
        title: title.to_owned(),
        x: Axis::Numbers {
            name: "microseconds".to_owned(),
            max: FAULT_MAX_US,
        },
        y_name: "share of the faults".to_owned(),
        y_max: 1.0,
        y_scale: Scale::Shares,
        series,
        mark: Some((round.whole_limit_us(), "aim at 90% (whole)".to_owned())),
    }
}

fn faults(round: &Measured) -> Chart {
    let mut series = vec![
        shares_of("served", round.ours.served.shares(FAULT_MAX_US)),
        shares_of("whole", distribution(&round.ours.faults)),
        shares_of(
            "bare userfaultfd",
            distribution(&round.reference.round_trips),
        ),
    ];
    if let Some(zram) = &round.zram {
        series.push(shares_of("whole, zram", distribution(&zram.faults)));
    }
    fault_chart(
        "Faults after the burst, by the time they took",
        round,
        series,
    )
}

fn online_faults(round: &Measured, online: &Slice) -> Chart {
    let series = vec![
        shares_of("served", online.served.shares(FAULT_MAX_US)),
        shares_of("whole", distribution(&online.faults)),
    ];
    fault_chart("Faults online, by the time they took", round, series)
}

/// Shares of the time in which at most so much was cold.
fn cold(online: &Slice) -> Chart {
    let shares = cold_shares(online);
    let all = to_f64(shares.len().max(1) as u64);
    let points = shares
        .iter()
        .zip(1..)
        .map(|(share, number)| (share * 100.0, to_f64(number) / all));
    let every = shares.len().div_ceil(POINTS_MAX).max(1);
    Chart {
        title: "Cold share online".to_owned(),
        x: Axis::Numbers {
            name: "percent cold".to_owned(),
            max: 100.0,
        },
        y_name: "share of the time".to_owned(),
        y_max: 1.0,
        y_scale: Scale::Shares,
        series: vec![shares_of("cold share", points.step_by(every).collect())],
        mark: None,
    }
}

/// At most [`POINTS_MAX`] of `all`.
fn some<T>(all: &[T], one: impl Fn(&T) -> Value) -> Vec<Value> {
    let every = all.len().div_ceil(POINTS_MAX).max(1);
    all.iter().step_by(every).map(one).collect()
}

fn slice_data(slice: &Slice) -> Value {
    let scheduler = |told: &Told| {
        let shares = told.shares.iter();
        let named = shares.map(|(class, share)| (class.clone(), json!(rounded(*share))));
        Value::Object(named.collect())
    };
    json!({
        "rates": some(&slice.rates, |rates| json!({
            "from_s": rounded(rates.from_s),
            "to_s": rounded(rates.to_s),
            "steady_per_s": rates.steady.round(),
            "bursting_per_s": rates.bursting.round(),
        })),
        "told": some(&slice.told, |told| json!({
            "at_s": rounded(told.at_s),
            "hot_sections": { "steady": told.hot_sections[STEADY], "bursting": told.hot_sections[BURSTING] },
            "cold_share": rounded(told.cold_share),
            "scheduler_share": scheduler(told),
        })),
        "used": some(&slice.used, |(at_s, bytes)| json!({ "at_s": rounded(*at_s), "bytes": bytes })),
        "whole": points(&distribution(&slice.faults)),
        "served": points(&slice.served.shares(FAULT_MAX_US)),
    })
}

fn data(sizes: &Sizes, round: &Measured, online: &Slice) -> Value {
    json!({
        "budget_bytes": sizes.budget_bytes,
        "min_bytes": sizes.min_bytes,
        "low_bytes": sizes.low_bytes,
        "high_bytes": sizes.high_bytes,
        "reference": {
            "steady_per_s": round.reference.steady.round(),
            "bursting_per_s": round.reference.bursting.round(),
            "uffd_round_trip": points(&distribution(&round.reference.round_trips)),
        },
        "ours": slice_data(&round.ours),
        "zram": round.zram.as_ref().map(slice_data),
        "online": slice_data(online),
    })
}

fn points(points: &[(f64, f64)]) -> Vec<Value> {
    let of = |(us, share): &(f64, f64)| json!({ "us": rounded(*us), "share": rounded(*share) });
    points.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            report::tests::{SIZES, measured},
            slice::tests::slice,
        },
        *,
    };

    #[test]
    fn each_picture_has_its_lines_and_the_data_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let round = measured(Some(slice(15)));
        let files = draw(dir.path(), &SIZES, &round, &slice(0)).unwrap();
        assert_eq!(files.len(), 9);
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        for (name, lines) in [
            ("burst-free.svg", 4),
            ("burst-throughput.svg", 4),
            ("burst-scheduler.svg", 2),
            ("burst-heat.svg", 3),
            ("burst-faults.svg", 4),
            ("online-free.svg", 4),
            ("online-cold.svg", 1),
            ("online-faults.svg", 2),
        ] {
            // The axes have one each, and the mark.
            let svg = read(name);
            let drawn = svg.matches("stroke-width=\"2\"").count();
            assert_eq!(drawn, lines, "{name}: {svg}");
        }
        let data: Value = serde_json::from_str(&read("burst.json")).unwrap();
        assert_eq!(data["ours"]["rates"].as_array().unwrap().len(), 80);
        assert!(data["zram"]["used"].is_array());
    }
}
