// SPDX-License-Identifier: Apache-2.0
//! Pictures of days of production, and the data they are drawn from.
//!
//! | file | shows | Fig |
//! |---|---|---|
//! | `daily-faults.svg` | share of devices with up to so many faults a day, without a protector | 7 |
//! | `daily-adp.svg` | the same of all VMs, without a protector and with `adp` | 18 |
//! | `daily-nic.svg` | sections that `adp` holds for one NIC, over an hour | 17 |
//! | `daily.json` | all of it as numbers | |

use super::{
    ARMS, FleetDays, IopfDailyOptions, NicCapacity, VmDay,
    figures::{self, DeviceOf},
};
use pagetide_chart::{Axis, Chart, Scale, Series, Shape};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Faults a day beyond which nothing is drawn: the paper's 99th percentiles are below.
const FAULTS_MAX: u64 = 1_200;
/// Points of a line.
const POINTS: u64 = 240;
const KINDS: [(&str, DeviceOf); 2] = [("NIC", |vm| &vm.nic), ("block", |vm| &vm.disk)];

/// Draws into `dir`, which is made if necessary; returns the files.
///
/// # Errors
/// If one cannot be drawn or written.
pub(super) fn draw(
    dir: &Path,
    options: &IopfDailyOptions,
    days: &FleetDays,
    nic: Option<&NicCapacity>,
) -> Result<Vec<PathBuf>, String> {
    fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let earlier = options.earlier_vms.min(days[0].len());
    let earlier = lines("none", &days[0][..earlier]);
    let all = ARMS.iter().zip(days);
    let all: Vec<_> = all.flat_map(|(arm, vms)| lines(arm, vms)).collect();
    let mut files = Vec::new();
    for (name, chart) in [
        (
            "daily-faults.svg",
            faults("Faults of a device in a day, without a protector", &earlier),
        ),
        ("daily-adp.svg", faults("Faults of a device in a day", &all)),
        ("daily-nic.svg", capacity(nic)),
    ] {
        let svg = chart.svg().map_err(|error| error.to_string())?;
        files.push(write(&dir.join(name), &svg)?);
    }
    let data = json!({
        "fig7": of_lines(&earlier),
        "fig18": of_lines(&all),
        "fig17": figures::nic_capacity(nic),
    });
    files.push(write(&dir.join("daily.json"), &format!("{data}\n"))?);
    Ok(files)
}

fn write(path: &Path, text: &str) -> Result<PathBuf, String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(path.to_owned())
}

/// A line of devices: its name; and by number of faults, which share of them has at most so many.
type Line = (String, Vec<(u64, f64)>);

fn lines(arm: &str, vms: &[VmDay]) -> Vec<Line> {
    let line = |(kind, device): (&str, DeviceOf)| {
        let mut faults: Vec<u64> = vms.iter().map(|vm| device(vm).faults).collect();
        faults.sort_unstable();
        let share = |most: u64| {
            let up_to = faults.partition_point(|faults| *faults <= most);
            up_to as f64 / faults.len().max(1) as f64
        };
        let points = (0..=POINTS).map(|point| point * FAULTS_MAX / POINTS);
        let points = points.map(|most| (most, share(most)));
        (format!("{kind}, {arm}"), points.collect())
    };
    KINDS.map(line).into()
}

fn of_lines(lines: &[Line]) -> Value {
    let one = |(name, points): &Line| json!({"devices": name, "faults_and_share": points});
    lines.iter().map(one).collect()
}

fn faults(title: &str, lines: &[Line]) -> Chart {
    let series = lines.iter().map(|(name, points)| Series {
        name: name.clone(),
        shape: Shape::Line(
            points
                .iter()
                .map(|(faults, share)| (*faults as f64, *share))
                .collect(),
        ),
    });
    Chart {
        title: title.to_owned(),
        x: Axis::Numbers {
            name: "faults a day".to_owned(),
            max: FAULTS_MAX as f64,
        },
        y_name: "devices with up to so many".to_owned(),
        y_max: 1.0,
        y_scale: Scale::Shares,
        series: series.collect(),
        mark: None,
    }
}

fn capacity(nic: Option<&NicCapacity>) -> Chart {
    let held = nic.map_or(&[][..], |nic| &nic.held);
    let begin_s = held.first().map_or(0.0, |first| first.at.as_secs_f64());
    let minutes = |at: std::time::Duration| (at.as_secs_f64() - begin_s) / 60.0;
    let line = |name: &str, of: fn(&super::Capacity) -> u64| Series {
        name: name.to_owned(),
        shape: Shape::Line(
            held.iter()
                .map(|held| (minutes(held.at), of(held) as f64))
                .collect(),
        ),
    };
    let series = vec![
        line("active", |held| held.watched_sections),
        line("inactive", |held| held.protected_sections),
    ];
    let top = series.iter().map(|series| series.shape.top());
    Chart {
        title: "Sections of one NIC in the two blocks of adp".to_owned(),
        x: Axis::Numbers {
            name: "minutes".to_owned(),
            max: held.last().map_or(1.0, |last| minutes(last.at)).max(1.0),
        },
        y_name: "sections".to_owned(),
        y_max: top.fold(1.0, f64::max) * 1.05,
        y_scale: Scale::Plain,
        series,
        mark: None,
    }
}
