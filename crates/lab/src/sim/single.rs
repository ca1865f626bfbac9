// SPDX-License-Identifier: Apache-2.0
//! `pagetide sim run`: one point, reported in full.

use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::time::Instant;

use pagetide_access_log::PartialFile;
use pagetide_sim::study::{Point, Traces, check_output};
use pagetide_sim::{Outcome, StepRecord};

use super::args::SimRunArgs;
use super::report::RunReport;
use super::{build, draft, host, of_study, of_trace};
use pagetide_report::outcome::{CommandError, print_report};

/// Runs the only point of a study.
pub fn run(args: &SimRunArgs) -> Result<(), CommandError> {
    if args.study.is_none() && args.changes.traces.is_empty() {
        return Err(CommandError::refused(
            "there is nothing to run: give a STUDY, or a trace with --trace FILE",
        ));
    }
    let study = draft(args.study.as_deref(), &args.changes)
        .and_then(|draft| draft.study())
        .map_err(of_study)?;
    let point = study.single().map_err(of_study)?;
    let traces = Traces::of(&study).map_err(of_trace)?;
    if let Some(events) = &args.events {
        check_output(events, &study, &traces).map_err(of_study)?;
    }
    let began = Instant::now();
    let mut figures = match &args.events {
        None => traces.run(point).map_err(of_study)?,
        Some(path) => run_to_file(&traces, point, path)?,
    };
    let wall_seconds = began.elapsed().as_secs_f64();
    if !args.tenants {
        figures.tenants.clear();
    }
    let report = RunReport {
        id: traces.id(point),
        build: build()?,
        host: host(),
        wall_seconds,
        preset: point.preset,
        config: point.config.clone(),
        trace: super::report::trace(&study.traces[point.trace]),
        trace_files: traces.files(point.trace).to_vec(),
        figures,
    };
    print_report(&report, args.json.into())
}

/// Runs `point` and writes each step to a file, which is renamed to `path` when it is complete.
fn run_to_file(traces: &Traces, point: &Point, path: &Path) -> Result<Outcome, CommandError> {
    let failed = |error: std::io::Error| {
        CommandError::failed(format!("{}: cannot be written: {error}", path.display()))
    };
    let (partial, file) = PartialFile::create(path).map_err(of_trace)?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    let mut written = Ok(());
    let mut told = |step: StepRecord| {
        // The model cannot be stopped; after an error the remaining steps are skipped.
        if written.is_ok() {
            written = serde_json::to_writer(&mut file, &step)
                .map_err(std::io::Error::from)
                .and_then(|()| file.write_all(b"\n"));
        }
    };
    let outcome = traces.run_told(point, &mut told).map_err(of_study)?;
    written.map_err(failed)?;
    let file = file
        .into_inner()
        .map_err(|error| failed(error.into_error()))?;
    partial.complete(&file).map_err(of_trace)?;
    Ok(outcome)
}
