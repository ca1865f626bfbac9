// SPDX-License-Identifier: Apache-2.0
//! Pictures of what a protector saves, and the data they are drawn from.
//!
//! | file | shows | Fig |
//! |---|---|---|
//! | `adp-sensitivity.svg` | saved faults of disks over the idle time after which sections are taken | – |
//! | `adp-ages.svg` | ages of evicted sections without a protector, by overcommit | – |
//! | `adp-capacity.svg` | sections that `adp` holds for one NIC, over an hour | 17 |
//! | `adp.json` | all of it as numbers | |

use super::{ARMS, MODES, Outcome, figures, sensitivity::Point};
use pagetide_chart::{Axis, Chart, Scale, Series, Shape};
use pagetide_sim::replay::{Division, EvictionAges};
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Ages beyond this are not drawn.
const AGE_MAX_S: u64 = 900;

/// Draws into `dir`, which is made if necessary; returns the files.
///
/// # Errors
/// If one cannot be drawn or written.
pub(super) fn draw(
    dir: &Path,
    points: &[Point],
    outcomes: &[Outcome],
) -> Result<Vec<PathBuf>, String> {
    fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let mut files = Vec::new();
    for (name, chart) in [
        ("adp-sensitivity.svg", sensitivity(points)),
        ("adp-ages.svg", ages(outcomes)),
        ("adp-capacity.svg", capacity(outcomes)),
    ] {
        let svg = chart.svg().map_err(|error| error.to_string())?;
        files.push(write(&dir.join(name), &svg)?);
    }
    let data = json!({
        "sensitivity": figures::points(points),
        "eviction_ages": ages_of(outcomes).iter().map(|(name, ages)| {
            json!({"overcommit": name, "class_s": EvictionAges::CLASS_S, "evictions": ages.counts})
        }).collect::<Vec<_>>(),
        "adp_nic_capacity": figures::nic_capacity(outcomes),
    });
    files.push(write(&dir.join("adp.json"), &format!("{data}\n"))?);
    Ok(files)
}

fn write(path: &Path, text: &str) -> Result<PathBuf, String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(path.to_owned())
}

fn sensitivity(points: &[Point]) -> Chart {
    let in_turn: Vec<&Point> = points
        .iter()
        .filter(|point| point.division == Division::InTurn && point.periodic.is_none())
        .collect();
    let line = |arm: &str| {
        let of = |point: &&Point| {
            let (_, reduction, _) = *point.arms.iter().find(|(name, ..)| *name == arm)?;
            Some((point.cold_after.as_secs_f64(), reduction?.max(0.0)))
        };
        Series {
            name: arm.to_owned(),
            shape: Shape::Line(in_turn.iter().filter_map(of).collect()),
        }
    };
    let last = in_turn.iter().map(|point| point.cold_after.as_secs_f64());
    chart(
        "Faults of disks saved, by the idle time after which the evictor takes a section",
        ("idle time, seconds", last.fold(0.0, f64::max)),
        ("faults saved", Scale::Shares),
        ARMS[1..].iter().map(|(arm, _)| line(arm)).collect(),
        Some((180.0, "the paper promotes".to_owned())),
    )
}

/// Ages by overcommit, without a protector, in the paper's mode, of all seeds.
fn ages_of(outcomes: &[Outcome]) -> Vec<(String, EvictionAges)> {
    let mut all: Vec<(String, EvictionAges)> = Vec::new();
    let wanted = |outcome: &&Outcome| outcome.mode == MODES[0] && outcome.arm == ARMS[0].0;
    for outcome in outcomes.iter().filter(wanted) {
        let name = format!("{:.0} %", outcome.overcommit * 100.0);
        if all.last().is_none_or(|(last, _)| *last != name) {
            all.push((name, EvictionAges::default()));
        }
        if let Some((_, ages)) = all.last_mut() {
            for vm in &outcome.accounts {
                ages.sum(&vm.eviction_ages);
            }
        }
    }
    all
}

fn ages(outcomes: &[Outcome]) -> Chart {
    let series = ages_of(outcomes).into_iter().map(|(name, ages)| {
        let all = ages.evictions().max(1) as f64;
        let mut seen = 0.0;
        let points = (1..).zip(&ages.counts).map(|(class, count)| {
            seen += f64::from(*count);
            ((class * EvictionAges::CLASS_S) as f64, seen / all)
        });
        let points = points.take_while(|(age_s, _)| *age_s <= AGE_MAX_S as f64);
        Series {
            name,
            shape: Shape::Line(points.collect()),
        }
    });
    chart(
        "How long devices had left sections alone that were evicted",
        ("age, seconds", AGE_MAX_S as f64),
        ("evictions up to that age", Scale::Shares),
        series.collect(),
        None,
    )
}

fn capacity(outcomes: &[Outcome]) -> Chart {
    let nic = figures::nic_of_first_guest(outcomes);
    let held = nic.map_or(&[][..], |(_, _, nic)| &nic.capacity);
    let begin = held.first().map_or(0.0, |first| first.at.as_secs_f64());
    let line = |name: &str, of: fn(&pagetide_sim::replay::Capacity) -> u64| Series {
        name: name.to_owned(),
        shape: Shape::Line(
            held.iter()
                .map(|held| ((held.at.as_secs_f64() - begin) / 60.0, of(held) as f64))
                .collect(),
        ),
    };
    let last = held.last().map_or(1.0, |last| last.at.as_secs_f64());
    chart(
        "Sections of one NIC in the two blocks of adp",
        ("minutes", ((last - begin) / 60.0).max(1.0)),
        ("sections", Scale::Plain),
        vec![
            line("active", |held| held.watched_sections),
            line("inactive", |held| held.protected_sections),
        ],
        None,
    )
}

fn chart(
    title: &str,
    x: (&str, f64),
    y: (&str, Scale),
    series: Vec<Series>,
    mark: Option<(f64, String)>,
) -> Chart {
    let top = series.iter().map(|series| series.shape.top());
    Chart {
        title: title.to_owned(),
        x: Axis::Numbers {
            name: x.0.to_owned(),
            max: x.1,
        },
        y_name: y.0.to_owned(),
        y_max: top.fold(0.0, f64::max) * 1.05,
        y_scale: y.1,
        series,
        mark,
    }
}
