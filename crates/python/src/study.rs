// SPDX-License-Identifier: Apache-2.0
//! Studies, single runs, and sweeps on threads of this process.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use pagetide_sim::policy::OwnPolicies;
use pagetide_sim::study::{
    Build, Draft, Point, PointId, Study as Points, StudyError, SweepOptions, SweepProgress, Traces,
    cells, sweep as sweep_study,
};
use pagetide_sim::{NextUses, Outcome, Stop, TraceInput, run_own};
use pyo3::prelude::*;
use serde_json::{Map, Value, json};

use crate::error::{error, of_json, to_json};
use crate::interrupt::{UntilSignal, contained, interruptible};
use crate::policy::Policies;
use crate::table::Table;
use crate::trace::Trace;

/// The file that this library is in.
static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Says which file this library is in, for the record of who ran what.
#[pyfunction]
pub fn set_program(path: PathBuf) {
    PROGRAM.get_or_init(|| path);
}

/// The build of this library.
pub fn this_build() -> PyResult<Build> {
    let path = PROGRAM
        .get()
        .ok_or_else(|| error("the package is not initialised"))?;
    let commit = option_env!("PAGETIDE_GIT_COMMIT");
    Build::of(path, env!("CARGO_PKG_VERSION"), commit).map_err(error)
}

/// The build of this library as JSON.
#[pyfunction]
pub fn build() -> PyResult<String> {
    to_json(&this_build()?)
}

/// This machine.
pub fn host() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

/// A study with every list expanded.
#[pyclass(module = "pagetide._pagetide", frozen)]
pub struct Study {
    pub points: Arc<Points>,
}

#[pymethods]
impl Study {
    /// The study in the file at `path`, or that which the JSON object `table` is; `set` has assignments as the
    /// command line's, and `traces` take the place of the study's.
    #[new]
    fn new(
        path: Option<PathBuf>,
        table: &str,
        set: Vec<String>,
        traces: Option<Vec<PyRef<'_, Trace>>>,
    ) -> PyResult<Self> {
        let mut draft = match path {
            Some(path) => Draft::read(&path).map_err(error)?,
            None => {
                let table: Map<String, Value> = of_json("the study", table)?;
                Draft::of(table, Path::new(""))
            }
        };
        for assignment in &set {
            draft.set(assignment).map_err(error)?;
        }
        if let Some(traces) = traces {
            draft.give_traces(traces.iter().map(|trace| trace.0.clone()).collect());
        }
        let points = Arc::new(draft.study().map_err(error)?);
        Ok(Self { points })
    }

    /// Points.
    fn __len__(&self) -> usize {
        self.points.points.len()
    }

    /// Points that were left out because they are impossible.
    #[getter]
    fn skipped(&self) -> usize {
        self.points.skipped
    }

    /// What distinguishes each point.
    fn labels(&self) -> Vec<String> {
        self.points.labels()
    }
}

/// The rows of a finished sweep as a table.
pub fn rows(study: &Points, traces: &Traces, rows: &[pagetide_sim::study::SweepRow]) -> Table {
    let cells = rows
        .iter()
        .enumerate()
        .map(|(number, row)| cells(study, traces, number, row));
    Table::new(cells.collect(), Some(&study.source))
}

/// Runs the only point of a study, and gives its record as JSON.
#[pyfunction]
pub fn run(
    py: Python<'_>,
    study: &Study,
    policies: HashMap<String, Bound<'_, PyAny>>,
) -> PyResult<String> {
    let points = Arc::clone(&study.points);
    let point = points.single().map_err(error)?;
    let stop = Stop::default();
    let began = Instant::now();
    let (id, outcome) = if policies.is_empty() {
        let run = || -> Result<_, StudyError> {
            let traces = Traces::until(&points, &stop)?;
            Ok((Some(traces.id(point)), traces.run(point)?))
        };
        interruptible(py, &stop, |_| Ok(()), run)?.map_err(error)?
    } else {
        let policies = Policies::of(policies)?;
        let prepare = || Prepared::of(&points, point, &stop);
        let prepared = interruptible(py, &stop, |_| Ok(()), prepare)?.map_err(error)?;
        contained(|| with_policies(&prepared, point, policies))??
    };
    to_json(&json!({
        "id": id,
        "preset": point.preset,
        "config": point.config,
        "wall_seconds": began.elapsed().as_secs_f64(),
        "figures": outcome,
    }))
}

/// What a point needs before its first event: files hashed, logs split, the future read.
struct Prepared {
    traces: Traces,
    future: Option<Arc<NextUses>>,
}

impl Prepared {
    fn of(points: &Points, point: &Point, stop: &Stop) -> Result<Self, StudyError> {
        let traces = Traces::until(points, stop)?;
        // Opening splits the logs, whether or not there is a future to be read.
        drop(traces.open(point.trace)?);
        let future = traces.future(point)?;
        Ok(Self { traces, future })
    }
}

/// Runs a point with policies of Python's, in the calling thread, which keeps the interpreter's lock.
///
/// It has no identity: what a policy does is not known from its name.
fn with_policies(
    prepared: &Prepared,
    point: &Point,
    policies: Policies,
) -> PyResult<(Option<PointId>, Outcome)> {
    let raised = Mutex::new(None);
    let mut events = UntilSignal {
        source: prepared.traces.open(point.trace).map_err(error)?,
        raised: &raised,
    };
    let input = TraceInput {
        events: &mut events,
        next_uses: prepared.future.as_deref(),
    };
    let (own, failures): (OwnPolicies, _) = policies.own();
    let outcome = run_own(&point.config, input, own);
    let signal = raised.lock().unwrap_or_else(PoisonError::into_inner).take();
    match (outcome, signal) {
        (_, Some(exception)) => Err(exception),
        (Ok(outcome), None) => Ok((None, outcome)),
        (Err(reason), None) => Err(failures.exception(reason)),
    }
}

/// Progress as it is told from any thread.
#[derive(Default)]
pub struct Progress {
    done: AtomicUsize,
    points: AtomicUsize,
}

impl Progress {
    pub fn tell(&self, at: SweepProgress) {
        // Relaxed: numbers for people; nothing follows from them.
        self.done.fetch_max(at.done, Ordering::Relaxed);
        self.points.store(at.points, Ordering::Relaxed);
    }

    /// What calls `callback` with them.
    pub fn between<'a>(
        &'a self,
        callback: &'a Option<Py<PyAny>>,
    ) -> impl FnMut(Python<'_>) -> PyResult<()> + Send + 'a {
        let mut told = (0, 0);
        move |py| {
            let now = (
                self.done.load(Ordering::Relaxed),
                self.points.load(Ordering::Relaxed),
            );
            if let Some(callback) = callback
                && now != told
            {
                told = now;
                callback.call1(py, now)?;
            }
            Ok(())
        }
    }
}

/// Threads: as many as asked for, or one a core.
pub fn threads(jobs: Option<usize>) -> PyResult<NonZeroUsize> {
    match jobs {
        Some(jobs) => {
            NonZeroUsize::new(jobs).ok_or_else(|| error("jobs is 0; take at least one thread"))
        }
        None => Ok(std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN)),
    }
}

/// Runs every point of a study on threads, and gives the rows and a summary as JSON.
#[pyfunction]
pub fn sweep(
    py: Python<'_>,
    study: &Study,
    out: Option<PathBuf>,
    jobs: Option<usize>,
    progress: Option<Py<PyAny>>,
) -> PyResult<(Table, String)> {
    let points = Arc::clone(&study.points);
    let options = SweepOptions {
        out,
        jobs: threads(jobs)?,
        build: this_build()?,
        host: host(),
        stop: Stop::default(),
    };
    let at = Progress::default();
    let work = || -> Result<_, StudyError> {
        let swept = sweep_study(&points, &options, &|progress| at.tell(progress))?;
        let traces = Traces::until(&points, &options.stop)?;
        Ok((rows(&points, &traces, &swept.rows), swept.summary))
    };
    let swept = interruptible(py, &options.stop, at.between(&progress), work)?;
    let (table, summary) = swept.map_err(error)?;
    Ok((table, to_json(&summary)?))
}
