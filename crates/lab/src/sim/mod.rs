// SPDX-License-Identifier: Apache-2.0
//! `pagetide sim`: the performance model of I/O address translation, by command.
//!
//! [`pagetide_sim`] does the work; this module has the command line, the provenance (program and
//! machine) and the reports as text.

pub mod args;
mod faults;
mod figures;
mod report;
mod single;

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Mutex;

use pagetide_access_log::TraceError;
use pagetide_bench::BenchReport;
use pagetide_sim::study::{
    Build, Draft, StudyError, SweepOptions, SweepProgress, is_wrong_trace, sweep,
};
use pagetide_sim::verify::{self, VerifyRequest};
use pagetide_sim::{
    RecordedLogs, SimError, Stop, findings, run_hardware_study, run_recorded_study,
};

use crate::trace::collection::Collection;
use args::{
    HardwareStudyArgs, RecordedStudyArgs, SimCommand, StudyArgs, StudyCommand, SweepArgs,
    VerifyArgs,
};
use pagetide_report::outcome::{CommandError, Form, print_report, print_with};
use pagetide_report::progress::Progress;
use report::{SweepReport, verify_text};

/// Executes the command.
pub fn execute(command: SimCommand) -> Result<(), CommandError> {
    match command {
        SimCommand::Run(args) => single::run(&args),
        SimCommand::Sweep(args) => run_sweep(args),
        SimCommand::Verify(args) => run_verify(args),
        SimCommand::Study(StudyCommand::Faults(args)) => faults::run(&args),
        SimCommand::Study(StudyCommand::Hardware(args)) => run_hardware(&args),
        SimCommand::Study(StudyCommand::Recorded(args)) => run_recorded(&args),
        SimCommand::Figures(args) => figures::run(args),
        SimCommand::Findings { json } => run_findings(json.into()),
    }
}

/// The study of `file`, or an empty one, with the changes of the command line.
fn draft(file: Option<&Path>, changes: &StudyArgs) -> Result<Draft, StudyError> {
    let mut draft = match file {
        Some(file) => Draft::read(file)?,
        None => Draft::default(),
    };
    for (key, value) in [("preset", &changes.preset), ("flavour", &changes.flavour)] {
        if let Some(value) = value {
            draft.set(&format!("{key}={value}"))?;
        }
    }
    for assignment in &changes.set {
        draft.set(assignment)?;
    }
    if !changes.traces.is_empty() {
        draft.replace_traces(&changes.traces);
    }
    Ok(draft)
}

fn run_sweep(args: SweepArgs) -> Result<(), CommandError> {
    let study = draft(Some(&args.study), &args.changes)
        .and_then(|draft| draft.study())
        .map_err(of_study)?;
    let options = SweepOptions {
        out: Some(args.out),
        jobs: args.jobs.unwrap_or_else(all_cores),
        build: build()?,
        host: host(),
        stop: Stop::default(),
    };
    let swept = sweep_progress("sweep", |told| sweep(&study, &options, told)).map_err(of_study)?;
    print_report(&SweepReport::of(&study, swept), args.json.into())
}

/// What `work` gives, with a bar under `name` while it calls what it is passed.
fn sweep_progress<T>(
    name: &'static str,
    work: impl FnOnce(&(dyn Fn(SweepProgress) + Sync)) -> T,
) -> T {
    let progress = Progress::new(name, "points");
    // Workers report points in any order; the bar only moves forward.
    let most = Mutex::new(0);
    work(&|at: SweepProgress| {
        let mut most = most
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        *most = at.done.max(*most);
        progress.at(*most as u64, Some(at.points as u64));
    })
}

fn run_verify(args: VerifyArgs) -> Result<(), CommandError> {
    let request = VerifyRequest {
        reference: args.reference,
        traces: args.traces,
        lfu_seeds: args.seeds,
        threads: args.jobs.unwrap_or_else(all_cores).get(),
    };
    let progress = Progress::new("verify", "rows");
    let report = verify::run(&request, &|done, all| {
        progress.at(done as u64, Some(all as u64));
    })
    .map_err(of_sim)?;
    drop(progress);
    print_with(&report, args.json.into(), verify_text)?;
    if report.agrees {
        Ok(())
    } else {
        Err(CommandError::failed(
            "the model does not agree with the table, or no row has its trace",
        ))
    }
}

fn run_hardware(args: &HardwareStudyArgs) -> Result<(), CommandError> {
    let jobs = args.jobs.unwrap_or_else(all_cores).get();
    let progress = Progress::new("study", "runs");
    let figures = run_hardware_study(jobs, &|done, all| progress.at(done, Some(all)));
    drop(progress);
    let mut report = BenchReport::new("hardware");
    report.figures = figures.map_err(of_sim)?;
    print_report(&report, args.json.into())
}

fn run_recorded(args: &RecordedStudyArgs) -> Result<(), CommandError> {
    let collections = Collection::all_below(&args.traces)?;
    let logs: Vec<RecordedLogs> = collections
        .into_iter()
        .map(|collection| RecordedLogs {
            mode: collection.mode,
            workload: collection.workload,
            logs: collection.logs,
        })
        .collect();
    let jobs = args.jobs.unwrap_or_else(all_cores).get();
    let progress = Progress::new("study", "runs");
    let figures = run_recorded_study(&logs, jobs, &|done, all| progress.at(done, Some(all)));
    drop(progress);
    let mut report = BenchReport::new("recorded");
    report.figures = figures.map_err(of_sim)?;
    print_report(&report, args.json.into())
}

/// Findings that do not hold are results too, so the status is 0 either way.
fn run_findings(form: Form) -> Result<(), CommandError> {
    let progress = Progress::new("findings", "runs");
    let report = findings::run(&|done, all| progress.at(done, Some(all))).map_err(of_sim)?;
    drop(progress);
    print_with(&report, form, findings::FindingsReport::render)
}

/// One thread per core.
fn all_cores() -> NonZeroUsize {
    std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)
}

/// Identifies this program.
fn build() -> Result<Build, CommandError> {
    let commit = option_env!("PAGETIDE_GIT_COMMIT");
    Build::running(env!("CARGO_PKG_VERSION"), commit).map_err(of_study)
}

/// Identifies this machine.
fn host() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// The command error of a study without results.
pub fn of_study(error: StudyError) -> CommandError {
    if error.is_wrong_use() {
        CommandError::refused(error)
    } else {
        CommandError::failed(error)
    }
}

/// The command error of a run without a result.
pub fn of_sim(error: SimError) -> CommandError {
    of_study(StudyError::Run(error))
}

/// The command error of a trace that could not be read or written.
pub fn of_trace(error: TraceError) -> CommandError {
    if is_wrong_trace(&error) {
        CommandError::refused(error)
    } else {
        CommandError::failed(error)
    }
}
