// SPDX-License-Identifier: Apache-2.0
//! The traces of a study, read by many points at the same time.
//!
//! A synthetic trace is not stored but generated for each point while it is read: that costs less than
//! reading the same events from a file, and no memory. Expensive data is computed once and shared: logs
//! split into tenants (on disk, for the duration of the study), and the future that the oracle needs (4
//! bytes a request in memory, from the first to the last point that uses it).

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pagetide_access_log::TraceError;
use pagetide_trace::{EventSource, FormatChoice, HyperTrace, Input, Recordings};
use serde_json::{Value, json};

use super::columns;
use super::error::StudyError;
use super::identity::{Content, PointId, TraceIdentity};
use super::points::{Point, Study};
use super::trace::Trace;
use crate::next_use::NextUses;
use crate::observe::StepRecord;
use crate::outcome::Outcome;
use crate::run::{TraceInput, run, run_told};
use crate::stop::{Stop, UntilStopped};

/// A file that a trace comes from.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize)]
pub struct TraceFile {
    /// Its name.
    pub path: PathBuf,
    /// SHA-256 of its content, in hexadecimal.
    pub sha256: String,
    /// Its length.
    pub bytes: u64,
}

impl TraceFile {
    fn of(path: &Path, stop: &Stop) -> Result<Self, TraceError> {
        let Content { sha256, bytes } = Content::of(path, stop)?;
        Ok(Self {
            path: path.to_owned(),
            sha256,
            bytes,
        })
    }

    fn content(&self) -> Value {
        json!({ "sha256": self.sha256, "bytes": self.bytes })
    }
}

/// The traces of a study, checked: their files exist, and are identified by content.
#[derive(Debug)]
pub struct Traces {
    looked: Vec<Looked>,
    /// Ends the runs over them.
    stop: Stop,
}

#[derive(Debug)]
struct Looked {
    trace: Trace,
    files: Vec<TraceFile>,
    identity: TraceIdentity,
    /// Logs of a recipe, split when the first point needs them.
    recordings: OnceLock<Recordings>,
    /// One thread splits logs or reads the future, the others wait for it.
    making: Mutex<Future>,
}

/// The future of a trace, and how many points will still need it.
#[derive(Debug, Default)]
struct Future {
    made: Option<Arc<NextUses>>,
    askers: usize,
}

impl Traces {
    /// Reads every file of `study` once, for its hash.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn of(study: &Study) -> Result<Self, TraceError> {
        Self::until(study, &Stop::default())
    }

    /// The same; reading ends with an error when `stop` is set, now and in runs.
    ///
    /// # Errors
    /// If a file cannot be read, or `stop` is set.
    pub fn until(study: &Study, stop: &Stop) -> Result<Self, TraceError> {
        let looked = study.traces.iter().map(|trace| {
            let files = files_of(trace, stop)?;
            Ok(Looked {
                identity: identity(trace, &files),
                trace: trace.clone(),
                files,
                recordings: OnceLock::new(),
                making: Mutex::default(),
            })
        });
        Ok(Self {
            looked: looked.collect::<Result<_, _>>()?,
            stop: stop.clone(),
        })
    }

    /// Identity of a point of that study.
    #[must_use]
    pub fn id(&self, point: &Point) -> PointId {
        self.looked[point.trace].identity.point(&point.config)
    }

    /// Files that trace number `trace` comes from.
    #[must_use]
    pub fn files(&self, trace: usize) -> &[TraceFile] {
        &self.looked[trace].files
    }

    /// Announces that `points` will be run, so that their shared data is kept until the last of them has
    /// used it.
    pub(super) fn announce<'a>(&self, points: impl Iterator<Item = &'a Point>) {
        for point in points.filter(|point| point.config.needs_future()) {
            lock(&self.looked[point.trace].making).askers += 1;
        }
    }

    /// The same for as many points as may come: for whoever does not know them in advance.
    pub fn keep_futures(&self) {
        for looked in &self.looked {
            lock(&looked.making).askers = usize::MAX;
        }
    }

    /// Runs a point.
    ///
    /// # Errors
    /// If the trace is broken, or needs what the model does not have.
    pub fn run(&self, point: &Point) -> Result<Outcome, StudyError> {
        let future = self.future(point)?;
        let input = TraceInput {
            events: &mut *self.open(point.trace)?,
            next_uses: future.as_deref(),
        };
        Ok(run(&point.config, input)?)
    }

    /// Runs a point and calls `told` for every step of it.
    ///
    /// # Errors
    /// As [`Traces::run`].
    pub fn run_told(
        &self,
        point: &Point,
        told: &mut dyn FnMut(StepRecord),
    ) -> Result<Outcome, StudyError> {
        let future = self.future(point)?;
        let input = TraceInput {
            events: &mut *self.open(point.trace)?,
            next_uses: future.as_deref(),
        };
        Ok(run_told(&point.config, input, told)?)
    }
}

impl Traces {
    /// Opens trace number `trace` at its start.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(&self, trace: usize) -> Result<Box<dyn EventSource + '_>, TraceError> {
        let source = self.looked[trace].open(&self.stop)?;
        Ok(Box::new(UntilStopped::new(source, &self.stop)))
    }

    /// The future of a point's trace, if its configuration needs one.
    ///
    /// # Errors
    /// If the trace is broken.
    pub fn future(&self, point: &Point) -> Result<Option<Arc<NextUses>>, StudyError> {
        if !point.config.needs_future() {
            return Ok(None);
        }
        // Opened before the lock is taken: splitting logs takes the same lock.
        let mut events = self.open(point.trace)?;
        self.looked[point.trace].future(&mut *events).map(Some)
    }
}

impl Looked {
    /// Opens it at its start.
    fn open(&self, stop: &Stop) -> Result<Box<dyn EventSource + '_>, TraceError> {
        match &self.trace {
            Trace::File(path) => open_file(path),
            Trace::Memory(memory) => Ok(Box::new(memory.events())),
            Trace::Made(spec) => match &spec.input {
                Input::Synthetic(_) => Ok(Box::new(HyperTrace::synthetic(spec)?)),
                Input::Recorded(input) => {
                    let recordings = self.recordings(&input.logs, stop)?;
                    Ok(Box::new(HyperTrace::recorded(spec, recordings)?))
                }
            },
        }
    }

    fn recordings(&self, logs: &[PathBuf], stop: &Stop) -> Result<&Recordings, TraceError> {
        let _making = lock(&self.making);
        if let Some(made) = self.recordings.get() {
            return Ok(made);
        }
        let mut recordings = Recordings::new()?;
        for log in logs {
            recordings.add(&mut UntilStopped::new(open_file(log)?, stop))?;
        }
        Ok(self.recordings.get_or_init(|| recordings))
    }

    fn future(&self, events: &mut dyn EventSource) -> Result<Arc<NextUses>, StudyError> {
        let mut future = lock(&self.making);
        let made = match &future.made {
            Some(made) => Arc::clone(made),
            None => Arc::new(NextUses::of(events)?),
        };
        future.askers = future.askers.saturating_sub(1);
        future.made = (future.askers > 0).then(|| Arc::clone(&made));
        Ok(made)
    }
}

/// A thread that panicked leaves no inconsistent state here.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A trace in any format.
fn open_file(path: &Path) -> Result<Box<dyn EventSource>, TraceError> {
    pagetide_trace::open(path, FormatChoice::Detect)
}

fn files_of(trace: &Trace, stop: &Stop) -> Result<Vec<TraceFile>, TraceError> {
    match trace {
        Trace::File(path) => Ok(vec![TraceFile::of(path, stop)?]),
        Trace::Memory(_) => Ok(Vec::new()),
        Trace::Made(spec) => match &spec.input {
            Input::Synthetic(_) => Ok(Vec::new()),
            Input::Recorded(input) => {
                let logs = input.logs.iter();
                logs.map(|log| TraceFile::of(log, stop)).collect()
            }
        },
    }
}

fn identity(trace: &Trace, files: &[TraceFile]) -> TraceIdentity {
    let contents: Vec<Value> = files.iter().map(TraceFile::content).collect();
    TraceIdentity(match trace {
        Trace::File(_) => contents.into_iter().collect(),
        Trace::Memory(memory) => json!({ "events_sha256": memory.sha256() }),
        Trace::Made(spec) => {
            let mut recipe = columns::json(spec);
            if let Some(logs) = recipe.pointer_mut("/input/recorded/logs") {
                *logs = contents.into();
            }
            json!({ "made": recipe })
        }
    })
}
