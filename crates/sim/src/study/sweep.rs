// SPDX-License-Identifier: Apache-2.0
//! Runs every point of a study on several threads.
//!
//! Points share no mutable state, so a result does not depend on which thread computes it or when. Workers
//! take the next unfinished point; each result goes into the journal before it counts as finished. When all
//! are, the rows are written in the order of the study.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::columns;
use super::error::StudyError;
use super::identity::PointId;
use super::journal::{Build, Journal, Run};
use super::output::check_output;
use super::points::Study;
use super::results::{SweepRow, write_results};
use super::traces::Traces;
use crate::error::SimError;

/// The settings of a sweep.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SweepOptions {
    /// Output file.
    pub out: PathBuf,
    /// Threads.
    pub jobs: NonZeroUsize,
    /// The program that runs it, for the record.
    pub build: Build,
    /// The machine, for the record.
    pub host: String,
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
    pub out: PathBuf,
    /// The record of finished points.
    pub journal: PathBuf,
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
    let traces = Traces::of(study)?;
    check_output(&options.out, study, &traces)?;
    let path = Journal::path_beside(&options.out);
    check_output(&path, study, &traces)?;
    let (journal, finished) = Journal::open(&path, &options.build)?;
    let ids: Vec<PointId> = study.points.iter().map(|point| traces.id(point)).collect();
    let mut seen: HashSet<&PointId> = finished.keys().collect();
    let open: Vec<(usize, &PointId)> = ids
        .iter()
        .enumerate()
        .filter(|(_, id)| seen.insert(*id))
        .collect();
    let run = open.len();
    traces.announce(open.iter().map(|(number, _)| &study.points[*number]));
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
            journal,
            finished,
            requests: 0,
            done: 0,
        }),
    };
    let Shared {
        finished, requests, ..
    } = work.on_threads()?;
    let rows = rows(ids, &finished);
    write_results(study, &traces, &rows, &options.out)?;
    Ok(Sweep {
        summary: SweepSummary {
            out: options.out.clone(),
            journal: path,
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

fn rows(ids: Vec<PointId>, finished: &HashMap<PointId, Run>) -> Vec<SweepRow> {
    ids.into_iter()
        .map(|id| {
            let Some(run) = finished.get(&id).cloned() else {
                unreachable!("every point is finished when all workers are");
            };
            SweepRow { id, run }
        })
        .collect()
}

/// State shared by the workers.
struct Work<'a> {
    options: &'a SweepOptions,
    study: &'a Study,
    traces: &'a Traces,
    kept: usize,
    /// Points to run, by number in the study.
    open: Vec<(usize, &'a PointId)>,
    /// The next of `open` that no worker has taken.
    next: AtomicUsize,
    /// A point failed: no further ones are started.
    failed: AtomicBool,
    told: &'a (dyn Fn(SweepProgress) + Sync),
    shared: Mutex<Shared>,
}

struct Shared {
    journal: Journal,
    finished: HashMap<PointId, Run>,
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
            && let Some((number, id)) = self.open.get(self.next.fetch_add(1, Ordering::Relaxed))
        {
            let finished = self
                .one(*number)
                .and_then(|(run, requests)| self.keep(id, run, requests));
            if finished.is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            (self.told)(finished?);
        }
        Ok(())
    }

    fn one(&self, number: usize) -> Result<(Run, u64), StudyError> {
        let began = Instant::now();
        let started_unix_ms = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(0));
        let outcome = self
            .traces
            .run(&self.study.points[number])
            .map_err(|error| self.at_point(number, error))?;
        let run = Run {
            build: self.options.build.clone(),
            host: self.options.host.clone(),
            started_unix_ms,
            wall_seconds: began.elapsed().as_secs_f64(),
            figures: columns::figures(&outcome),
        };
        Ok((run, outcome.requests))
    }

    /// An error of the model, with its point; an error of a trace names its file.
    fn at_point(&self, number: usize, error: StudyError) -> StudyError {
        match error {
            StudyError::Run(SimError::Trace(_)) => error,
            StudyError::Run(source) => StudyError::Point {
                point: number,
                label: self.study.labels().swap_remove(number),
                source: Box::new(source),
            },
            other => other,
        }
    }

    /// Records a result.
    fn keep(&self, id: &PointId, run: Run, requests: u64) -> Result<SweepProgress, StudyError> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.journal.add(id, &run)?;
        shared.finished.insert(id.clone(), run);
        shared.requests += requests;
        shared.done += 1;
        Ok(SweepProgress {
            done: self.kept + shared.done,
            points: self.study.points.len(),
            requests: shared.requests,
        })
    }
}
