// SPDX-License-Identifier: Apache-2.0
//! Runs every point of a study on several threads.
//!
//! Points share no mutable state, so a result does not depend on which thread computes it or when. Workers
//! take the next unfinished point; each result goes into the journal before it counts as finished. When all
//! are, the rows are written in the order of the study.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::columns;
use super::error::StudyError;
use super::journal::{Build, Run};
use super::ledger::Ledger;
use super::points::{Point, Study};
use super::results::SweepRow;
use super::traces::Traces;
use crate::stop::Stop;

/// The settings of a sweep.
#[derive(Clone, Debug)]
pub struct SweepOptions {
    /// Output file, with a journal beside it; `None`: the rows are only returned.
    pub out: Option<PathBuf>,
    /// Threads.
    pub jobs: NonZeroUsize,
    /// The program that runs it, for the record.
    pub build: Build,
    /// The machine, for the record.
    pub host: String,
    /// Ends it early, with an error.
    pub stop: Stop,
}

/// Progress of a sweep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SweepProgress {
    /// Points finished, including those of an earlier sweep.
    pub done: usize,
    /// Points in total.
    pub points: usize,
    /// Translation requests simulated by this sweep.
    pub requests: u64,
}

/// Summary of a sweep.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct SweepSummary {
    /// The results.
    pub out: Option<PathBuf>,
    /// The record of finished points.
    pub journal: Option<PathBuf>,
    /// Points of the study.
    pub points: usize,
    /// Points that were left out because they are impossible; not among these.
    pub skipped: usize,
    /// Of the points, run now.
    pub run: usize,
    /// Of these, known from an earlier sweep, or the same as another point.
    pub kept: usize,
    /// Threads.
    pub jobs: usize,
    /// Translation requests simulated now.
    pub requests: u64,
    /// How long that took.
    pub elapsed_seconds: f64,
}

/// A finished sweep.
#[derive(Clone, PartialEq, Debug)]
pub struct Sweep {
    /// What was done.
    pub summary: SweepSummary,
    /// A row for each point, in the order of the study.
    pub rows: Vec<SweepRow>,
}

/// Runs what is not finished yet of `study` and writes the results. `told` is called at the start and after
/// each point, from any thread.
///
/// # Errors
/// Before anything runs, if the output path is impossible or an input of the study; later if a trace or the
/// model fails at a point, or a file cannot be written: points finished by then stay in the journal.
pub fn sweep(
    study: &Study,
    options: &SweepOptions,
    told: &(dyn Fn(SweepProgress) + Sync),
) -> Result<Sweep, StudyError> {
    let began = Instant::now();
    let traces = Traces::until(study, &options.stop)?;
    let ledger = Ledger::open(study, &traces, &options.build, options.out.as_deref())?;
    let open = ledger.open_points().to_vec();
    let (run, journal) = (open.len(), ledger.journal());
    traces.announce(open.iter().map(|number| &study.points[*number]));
    let work = Work {
        options,
        study,
        traces: &traces,
        kept: study.points.len() - run,
        open,
        next: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
        told,
        shared: Mutex::new(Shared {
            ledger,
            requests: 0,
            done: 0,
        }),
    };
    let Shared {
        ledger, requests, ..
    } = work.on_threads()?;
    let rows = ledger.close(study, &traces)?;
    Ok(Sweep {
        summary: SweepSummary {
            out: options.out.clone(),
            journal,
            points: study.points.len(),
            skipped: study.skipped,
            run,
            kept: study.points.len() - run,
            jobs: options.jobs.get(),
            requests,
            elapsed_seconds: began.elapsed().as_secs_f64(),
        },
        rows,
    })
}

/// Runs one point of a study, and returns what is recorded of it with its requests.
///
/// # Errors
/// If the trace or the model fails.
pub fn run_point(
    traces: &Traces,
    point: &Point,
    build: &Build,
    host: &str,
) -> Result<(Run, u64), StudyError> {
    let began = Instant::now();
    let started_unix_ms = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(0));
    let outcome = traces.run(point)?;
    let run = Run {
        build: build.clone(),
        host: host.to_owned(),
        started_unix_ms,
        wall_seconds: began.elapsed().as_secs_f64(),
        figures: columns::figures(&outcome),
    };
    Ok((run, outcome.requests))
}

/// State shared by the workers.
struct Work<'a> {
    options: &'a SweepOptions,
    study: &'a Study,
    traces: &'a Traces,
    kept: usize,
    /// Points to run, by number in the study.
    open: Vec<usize>,
    /// The next of `open` that no worker has taken.
    next: AtomicUsize,
    /// A point failed: no further ones are started.
    failed: AtomicBool,
    told: &'a (dyn Fn(SweepProgress) + Sync),
    shared: Mutex<Shared>,
}

struct Shared {
    ledger: Ledger,
    requests: u64,
    done: usize,
}

impl Work<'_> {
    fn on_threads(self) -> Result<Shared, StudyError> {
        (self.told)(SweepProgress {
            done: self.kept,
            points: self.study.points.len(),
            requests: 0,
        });
        let workers = self.options.jobs.get().min(self.open.len());
        let outcomes: Vec<Result<(), StudyError>> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..workers)
                .map(|_| scope.spawn(|| self.work_off()))
                .collect();
            let joined = workers.into_iter().map(|worker| worker.join());
            joined
                .map(|outcome| outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        outcomes.into_iter().collect::<Result<(), _>>()?;
        Ok(self
            .shared
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner))
    }

    fn work_off(&self) -> Result<(), StudyError> {
        // Relaxed: the count only hands out numbers; the entries behind them do not change.
        while !self.failed.load(Ordering::Relaxed)
            && let Some(number) = self.open.get(self.next.fetch_add(1, Ordering::Relaxed))
        {
            let finished = self
                .one(*number)
                .and_then(|(run, requests)| self.keep(*number, run, requests));
            if finished.is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            (self.told)(finished?);
        }
        Ok(())
    }

    fn one(&self, number: usize) -> Result<(Run, u64), StudyError> {
        let SweepOptions { build, host, .. } = self.options;
        run_point(self.traces, &self.study.points[number], build, host)
            .map_err(|error| self.study.at_point(number, error))
    }

    /// Records a result.
    fn keep(&self, number: usize, run: Run, requests: u64) -> Result<SweepProgress, StudyError> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.ledger.keep(number, run)?;
        shared.requests += requests;
        shared.done += 1;
        Ok(SweepProgress {
            done: self.kept + shared.done,
            points: self.study.points.len(),
            requests: shared.requests,
        })
    }
}
