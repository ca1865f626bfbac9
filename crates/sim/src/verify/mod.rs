// SPDX-License-Identifier: Apache-2.0
//! Comparison with the authors' program: a table of what it printed, the traces
//! it was given, and the model's answer for each row.
//!
//! A row belongs to a trace if the columns that describe a trace agree with the
//! `…params.json` beside the trace, all of them. LRU and oracle rows have one
//! answer. The program breaks LFU ties with `rand()` over the order of a hash
//! map, so an LFU row has a distribution: the model runs it under several tie
//! seeds, and its error is the distance of the program's answer from their
//! range, as a fraction of that answer.

mod report;
mod row;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use pagetide_trace::{Event, EventSource, Events, HypersioReader, TraceError};

use crate::config::Replacement;
use crate::error::SimError;
use crate::next_use::NextUses;
use crate::run::{TraceInput, run as run_model};

pub use report::{RowOutcome, VerifyFigures, VerifyReport};
use row::Reference;

/// Traces of no more requests than this are held in memory for all their rows.
const HELD_REQUESTS: u64 = 8 << 20;

/// Bytes of a request in the authors' format.
const REQUEST_BYTES: u64 = 48;

/// What to compare.
#[derive(Clone, Debug)]
pub struct VerifyRequest {
    /// Table of the program's answers, CSV with a header.
    pub reference: PathBuf,
    /// Directory with traces and their parameters, anywhere below it.
    pub traces: PathBuf,
    /// Tie seeds that an LFU row is run under.
    pub lfu_seeds: u64,
    /// Threads to run on.
    pub threads: usize,
}

/// Compares.
///
/// `progress` is told rows done and rows in all.
///
/// # Errors
/// If the table or a trace cannot be read, or a row describes a configuration
/// that the model cannot run.
pub fn run(
    request: &VerifyRequest,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<VerifyReport, SimError> {
    let rows = row::read_table(&request.reference)?;
    let traces = row::find_traces(&request.traces)?;
    let mut outcomes = Vec::new();
    let mut without_trace = rows.len();
    let matching: Vec<(PathBuf, Vec<&Reference>)> = traces
        .into_iter()
        .map(|(columns, path)| {
            let rows = rows.iter().filter(|row| row.trace == columns).collect();
            (path, rows)
        })
        .collect();
    let all = matching.iter().map(|(_, rows)| rows.len()).sum();
    let done = AtomicUsize::new(0);
    for (path, rows) in &matching {
        let tick = || progress(done.fetch_add(1, Ordering::Relaxed) + 1, all);
        outcomes.extend(compare_trace(path, rows, request, &tick)?);
        without_trace -= rows.len();
    }
    outcomes.sort_by_key(|outcome| outcome.row);
    Ok(VerifyReport::of(outcomes, without_trace))
}

/// A trace, in memory or on disk.
enum Opened<'a> {
    Held(Vec<Event>),
    OnDisk(&'a Path),
}

impl<'a> Opened<'a> {
    fn open(path: &'a Path) -> Result<Self, SimError> {
        let bytes = std::fs::metadata(path)
            .map_err(|source| TraceError::Io {
                path: path.to_owned(),
                source,
            })?
            .len();
        if bytes / REQUEST_BYTES > HELD_REQUESTS {
            return Ok(Self::OnDisk(path));
        }
        let mut events = Vec::new();
        let mut reader = HypersioReader::open(path)?;
        while reader.next_batch(&mut events)? > 0 {}
        Ok(Self::Held(events))
    }

    fn events(&self) -> Result<Box<dyn EventSource + '_>, SimError> {
        Ok(match self {
            Self::Held(events) => Box::new(Events(events)),
            Self::OnDisk(path) => Box::new(HypersioReader::open(path)?),
        })
    }
}

/// One run that a row needs.
struct Job<'a> {
    row: &'a Reference,
    seed: u64,
}

/// Runs every row of one trace, on all threads.
fn compare_trace(
    path: &Path,
    rows: &[&Reference],
    request: &VerifyRequest,
    tick: &(dyn Fn() + Sync),
) -> Result<Vec<RowOutcome>, SimError> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let trace = Opened::open(path)?;
    let future = if rows.iter().any(|row| row.config.needs_future()) {
        Some(NextUses::of(&mut *trace.events()?)?)
    } else {
        None
    };
    let jobs: Vec<Job<'_>> = rows
        .iter()
        .flat_map(|row| (0..seeds_of(row, request)).map(move |seed| Job { row, seed }))
        .collect();
    let next = AtomicUsize::new(0);
    let answers = Mutex::new(Vec::with_capacity(jobs.len()));
    let work = || -> Result<(), SimError> {
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut config = job.row.config.clone();
            config.seed = job.seed;
            let mut events = trace.events()?;
            let outcome = run_model(
                &config,
                TraceInput {
                    events: &mut *events,
                    next_uses: future.as_ref(),
                },
            )?;
            let mut answers = answers
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            answers.push((job.row.row, outcome.elapsed_ns, outcome.dropped_slots));
            if job.seed == 0 {
                tick();
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..request.threads.max(1))
            .map(|_| scope.spawn(work))
            .collect();
        for thread in threads {
            match thread.join() {
                Ok(result) => result?,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok::<(), SimError>(())
    })?;
    let answers = answers
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    Ok(rows
        .iter()
        .map(|row| {
            let own = answers.iter().filter(|(of, ..)| *of == row.row);
            RowOutcome::of(row, own.map(|(_, elapsed, dropped)| (*elapsed, *dropped)))
        })
        .collect())
}

fn seeds_of(row: &Reference, request: &VerifyRequest) -> u64 {
    if row.config.devtlb.replacement == Replacement::Lfu {
        request.lfu_seeds.max(1)
    } else {
        1
    }
}
