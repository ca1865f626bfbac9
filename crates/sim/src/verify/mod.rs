// SPDX-License-Identifier: Apache-2.0
//! Comparison with the authors' program: a table of its output, its input traces, and the model's answer
//! for each row.
//!
//! A row belongs to a trace if the columns that describe a trace agree with the `…params.json` beside the
//! trace, all of them, and both are of one generator: two generators make different traces of the same
//! figures. LRU and oracle rows have one answer. The program breaks LFU ties with `rand()` over the order
//! of a hash map. Seed 0 does the same, so an LFU row is exact if the answer of seed 0 is. But a policy
//! that breaks ties at random has a distribution of answers, of which the program gives one: a row's error
//! is the distance of the program's answer from the range of several tie seeds, as a fraction of that
//! answer.

mod report;
mod row;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use pagetide_access_log::TraceError;
use pagetide_trace::{Event, EventSource, Events, HypersioReader};

use crate::config::Replacement;
use crate::error::SimError;
use crate::next_use::NextUses;
use crate::run::{TraceInput, run as run_model};

use report::{Answer, PROGRAM_SEED};
pub use report::{RowOutcome, VerifyFigures, VerifyReport};
use row::{Found, Reference};

/// Traces of at most this many requests are held in memory for all their rows.
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
    /// Number of tie seeds for an LFU row.
    pub lfu_seeds: u64,
    /// Threads to run on.
    pub threads: usize,
}

/// Compares.
///
/// `progress` receives the rows done and the total.
///
/// # Errors
/// If the table or a trace cannot be read, or a row describes a configuration that the model cannot run.
pub fn run(
    request: &VerifyRequest,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<VerifyReport, SimError> {
    let rows = row::read_table(&request.reference)?;
    let traces = row::find_traces(&request.traces)?;
    let mut outcomes = Vec::new();
    let mut without_trace = rows.len();
    let matching: Vec<(Found, Vec<&Reference>)> = traces
        .into_iter()
        .map(|found| {
            let rows = rows.iter().filter(|row| row.trace == found.key).collect();
            (found, rows)
        })
        .collect();
    let all = matching.iter().map(|(_, rows)| rows.len()).sum();
    let done = AtomicUsize::new(0);
    let mut missing_traces = Vec::new();
    for (found, rows) in &matching {
        if !found.trace.exists() {
            missing_traces.push(found.trace.clone());
            continue;
        }
        let tick = || progress(done.fetch_add(1, Ordering::Relaxed) + 1, all);
        outcomes.extend(compare_trace(found, rows, request, &tick)?);
        without_trace -= rows.len();
    }
    outcomes.sort_by_key(|outcome| outcome.row);
    Ok(VerifyReport::of(outcomes, without_trace, missing_traces))
}

/// A trace, in memory or on disk.
enum Opened<'a> {
    Held(Vec<Event>),
    OnDisk(&'a Path),
}

impl<'a> Opened<'a> {
    fn open(found: &'a Found) -> Result<Self, SimError> {
        let path = &found.trace;
        let metadata = std::fs::metadata(path).map_err(|source| TraceError::Io {
            path: path.clone(),
            source,
        })?;
        let bytes = metadata.len();
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

/// Runs every row of one trace, on all threads. The trace is dropped at the end: no two are held at a time.
fn compare_trace(
    found: &Found,
    rows: &[&Reference],
    request: &VerifyRequest,
    tick: &(dyn Fn() + Sync),
) -> Result<Vec<RowOutcome>, SimError> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let trace = Opened::open(found)?;
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
    let work = || -> Result<Vec<Answer>, SimError> {
        let mut answers = Vec::new();
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let answer = job.answer(&trace, future.as_ref());
            answers.push(answer.map_err(|error| job.named(error, &request.reference))?);
            if job.seed == PROGRAM_SEED {
                tick();
            }
        }
        Ok(answers)
    };
    let mut answers = Vec::with_capacity(jobs.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..request.threads.max(1))
            .map(|_| scope.spawn(work))
            .collect();
        for thread in threads {
            match thread.join() {
                Ok(result) => answers.extend(result?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok::<(), SimError>(())
    })?;
    Ok(rows
        .iter()
        .map(|row| RowOutcome::of(row, &answers))
        .collect())
}

impl Job<'_> {
    fn answer(&self, trace: &Opened<'_>, future: Option<&NextUses>) -> Result<Answer, SimError> {
        let mut config = self.row.config.clone();
        config.seed = self.seed;
        let mut events = trace.events()?;
        let input = TraceInput {
            events: &mut *events,
            next_uses: future,
        };
        let outcome = run_model(&config, input)?;
        Ok(Answer {
            row: self.row.row,
            seed: self.seed,
            elapsed_ns: outcome.elapsed_ns,
            dropped_slots: outcome.dropped_slots,
        })
    }
}

impl Job<'_> {
    /// `error` with its row; errors of a trace name the trace themselves.
    fn named(&self, error: SimError, reference: &Path) -> SimError {
        match error {
            SimError::Trace(_) => error,
            other => TraceError::Record {
                path: reference.to_owned(),
                record: self.row.row as u64,
                reason: other.to_string(),
            }
            .into(),
        }
    }
}

fn seeds_of(row: &Reference, request: &VerifyRequest) -> u64 {
    if row.config.devtlb.replacement == Replacement::Lfu {
        request.lfu_seeds.max(1)
    } else {
        1
    }
}

#[cfg(test)]
mod tests;
