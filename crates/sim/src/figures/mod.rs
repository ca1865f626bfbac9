// SPDX-License-Identifier: Apache-2.0
//! The paper's figures, computed by the model (HyperTRIO II to V).
//!
//! A figure is data (`catalogue`): a study of its own, which column of the results is its x axis, which its
//! y, what tells its lines and its panels apart, and the numbers that the paper's text has for it. The text
//! leaves three questions open, as it does for the [findings](crate::findings); a study has them as lists, so
//! each figure is computed under every *reading*, and has its panels once for each.
//!
//! ```text
//!   catalogue ─► studies ─► one sweep, one journal ─► rows ─► panels, numbers beside the paper's
//!                   │                                  │
//!                   └► figure-10.toml                  └► figure-10.parquet
//! ```
//! All figures together are one sweep: what two of them share is run once, and a killed command goes on where
//! it stopped. Each study is also written out, for `sim sweep` and for changes of one's own. Figures 8a and
//! 8b and table III are about a trace and not about a run of the model (`tenant`).
//!
//! The pictures of the paper are no part of its text, so what is compared are the numbers that its sentences
//! have. This module draws nothing: its panels are for whoever does.

mod base;
mod catalogue;
mod collect;
mod figure;
mod paper;
mod parts;
mod rows;
mod tenant;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Instant;

use pagetide_access_log::PartialFile;
use serde::Serialize;
use serde_json::{Value, json};

use crate::stop::Stop;
use crate::study::{
    Build, Draft, Study, StudyError, SweepOptions, SweepProgress, SweepRow, Traces, cells, sweep,
    write_table,
};
use catalogue::FIGURES;
use collect::collect;
use figure::Figure;
use rows::Row;

/// What is drawn, where to, and by whom.
#[derive(Clone, Debug)]
pub struct FigureOptions {
    /// Directory of the data.
    pub out: PathBuf,
    /// Packets of each run.
    pub packets: u64,
    /// Names of the figures; empty: all.
    pub only: Vec<String>,
    /// Threads.
    pub jobs: std::num::NonZeroUsize,
    /// The program, for the record.
    pub build: Build,
    /// The machine, for the record.
    pub host: String,
    /// Ends it early, with an error.
    pub stop: Stop,
}

/// How what a panel shows is drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Lines over named places.
    Lines,
    /// Dots in numbers.
    Dots,
    /// A bar at each named place.
    Bars,
}

/// The x axis of a panel.
#[derive(Clone, PartialEq, Debug)]
pub enum Places {
    /// Named places, in order; point `i` is at `i`.
    Named(Vec<String>),
    /// Numbers up to this one.
    Numbers(f64),
}

/// One line, or group of dots or bars.
#[derive(Clone, PartialEq, Debug)]
pub struct Curve {
    /// Its name.
    pub name: String,
    /// Its points.
    pub points: Vec<(f64, f64)>,
}

/// One picture of a figure.
#[derive(Clone, PartialEq, Debug)]
pub struct Panel {
    /// The reading of the paper that it is computed under; empty if none matters.
    pub reading: String,
    /// What distinguishes it from other panels of the reading; empty if nothing does.
    pub name: String,
    /// What x counts.
    pub x_name: &'static str,
    /// What y counts.
    pub y_name: &'static str,
    /// y is a share, to be shown as percent.
    pub shares: Shares,
    /// The places on the x axis.
    pub places: Places,
    /// How it is drawn.
    pub form: Form,
    /// The curves.
    pub curves: Vec<Curve>,
}

/// Whether y is a share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shares {
    /// It is.
    Yes,
    /// It is a number.
    No,
}

/// A number of the paper and ours.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Beside {
    /// What it is of.
    pub what: &'static str,
    /// The paper's, with its section.
    pub paper: &'static str,
    /// Ours, by reading.
    pub ours: Vec<(String, String)>,
}

/// One figure, computed.
#[derive(Clone, PartialEq, Debug)]
pub struct Computed {
    /// Its name: `10`, `history-length`.
    pub id: &'static str,
    /// Its title.
    pub title: &'static str,
    /// Where the paper has it.
    pub section: &'static str,
    /// What is computed, and where it differs from the paper's.
    pub about: &'static str,
    /// The panels, by reading; none for a table.
    pub panels: Vec<Panel>,
    /// The paper's numbers.
    pub beside: Vec<Beside>,
    /// Files with data and study, in the directory of [`FigureOptions::out`].
    pub files: Vec<String>,
}

/// All figures.
#[derive(Clone, Debug)]
pub struct ComputedFigures {
    /// In the paper's order.
    pub figures: Vec<Computed>,
    /// Points of all studies.
    pub points: usize,
    /// Of these, run now.
    pub run: usize,
    /// Impossible ones that were left out.
    pub skipped: usize,
    /// Translation requests simulated now.
    pub requests: u64,
    /// How long it all took.
    pub wall_seconds: f64,
}

/// The names of all figures.
#[must_use]
pub fn names() -> Vec<&'static str> {
    let studied = FIGURES.iter().map(|figure| figure.id);
    let mut names: Vec<&str> = studied.chain(tenant::NAMES).collect();
    names.sort_by_key(|name| catalogue::place(name));
    names
}

/// Computes the figures and writes their data. `told` is called as by [`sweep`].
///
/// # Errors
/// If a name is of no figure, a file cannot be written, or a run fails.
pub fn compute(
    options: &FigureOptions,
    told: &(dyn Fn(SweepProgress) + Sync),
) -> Result<ComputedFigures, StudyError> {
    let began = Instant::now();
    let known = names();
    for name in &options.only {
        if !known.contains(&name.as_str()) {
            let reason = format!("there is no such figure; there are {}", known.join(", "));
            return Err(StudyError::key(name.as_str(), reason));
        }
    }
    let wanted = |name: &str| options.only.is_empty() || options.only.iter().any(|o| o == name);
    let chosen: Vec<&Figure> = FIGURES.iter().filter(|f| wanted(f.id)).collect();
    let mut figures = Vec::new();
    let mut sums = (0, 0, 0, 0);
    if !chosen.is_empty() {
        let studies = chosen
            .iter()
            .map(|figure| Draft::parse(&figure.toml(options.packets), Path::new(""))?.study())
            .collect::<Result<Vec<Study>, _>>()?;
        let swept = sweep(&together(&studies, &chosen), &sweep_options(options), told)?;
        let summary = &swept.summary;
        sums = (
            summary.points,
            summary.run,
            summary.skipped,
            usize::try_from(summary.requests).unwrap_or(usize::MAX),
        );
        let mut rows = swept.rows.into_iter();
        for (figure, study) in chosen.iter().zip(&studies) {
            let own: Vec<SweepRow> = rows.by_ref().take(study.points.len()).collect();
            figures.push(of_study(figure, study, &own, options)?);
        }
    }
    for name in tenant::NAMES.into_iter().filter(|name| wanted(name)) {
        figures.push(tenant::compute(name, &options.out)?);
    }
    figures.sort_by_key(|figure| catalogue::place(figure.id));
    let (points, run, skipped, requests) = sums;
    Ok(ComputedFigures {
        figures,
        points,
        run,
        skipped,
        requests: requests as u64,
        wall_seconds: began.elapsed().as_secs_f64(),
    })
}

/// One sweep for all of them; its results are all rows in one file.
fn sweep_options(options: &FigureOptions) -> SweepOptions {
    SweepOptions {
        out: Some(options.out.join("points.parquet")),
        jobs: options.jobs,
        build: options.build.clone(),
        host: options.host.clone(),
        stop: options.stop.clone(),
    }
}

/// The studies as one.
fn together(studies: &[Study], figures: &[&Figure]) -> Study {
    let mut all = Study {
        traces: Vec::new(),
        points: Vec::new(),
        skipped: 0,
        source: Value::Null,
        file: None,
    };
    let mut sources = serde_json::Map::new();
    for (study, figure) in studies.iter().zip(figures) {
        let first = all.traces.len();
        all.traces.extend(study.traces.iter().cloned());
        all.points
            .extend(study.points.iter().cloned().map(|mut point| {
                point.trace += first;
                point
            }));
        all.skipped += study.skipped;
        sources.insert(figure.id.to_owned(), study.source.clone());
    }
    all.source = sources.into();
    all
}

/// Writes data and study of a figure, and collects its panels.
fn of_study(
    figure: &Figure,
    study: &Study,
    swept: &[SweepRow],
    options: &FigureOptions,
) -> Result<Computed, StudyError> {
    let traces = Traces::of(study)?;
    let table: Vec<Vec<(String, Value)>> = swept
        .iter()
        .enumerate()
        .map(|(number, row)| cells(study, &traces, number, row))
        .collect();
    let data = format!("figure-{}.parquet", figure.id);
    write_table(&table, &study.source, &options.out.join(&data))?;
    let text = format!("figure-{}.toml", figure.id);
    write_text(&options.out.join(&text), &figure.toml(options.packets))?;
    let rows: Vec<Row> = table.into_iter().map(Row::of).collect();
    let (panels, beside) = collect(figure, &rows);
    Ok(Computed {
        id: figure.id,
        title: figure.title,
        section: figure.section,
        about: figure.about,
        panels,
        beside,
        files: vec![data, text],
    })
}

/// Writes a small file whole.
pub(super) fn write_text(path: &Path, text: &str) -> Result<(), StudyError> {
    use std::io::Write as _;
    let (partial, mut file) = PartialFile::create(path)?;
    file.write_all(text.as_bytes())
        .map_err(|source| StudyError::from(partial.error(source)))?;
    Ok(partial.complete(&file)?)
}

/// Rows of a trace's figure as a file, with how they were made.
fn write_rows(path: &Path, rows: &[Vec<(String, Value)>], made: &str) -> Result<(), StudyError> {
    write_table(rows, &json!({ "made": made }), path)
}
