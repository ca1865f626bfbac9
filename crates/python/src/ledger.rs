// SPDX-License-Identifier: Apache-2.0
//! A sweep whose points somebody else runs: the ledger stays with the caller, and a job for each open point goes to
//! a worker and comes back as the record of its run.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pagetide_sim::config::Config;
use pagetide_sim::study::{
    Build, Ledger as Points, Point, Preset, Run, Study as StudyPoints, Traces, run_point,
};
use pagetide_sim::{ServiceSamples, ServiceTime, Stop};
use pyo3::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{error, of_json, to_json};
use crate::interrupt::interruptible;
use crate::study::{Study, host, rows, this_build};
use crate::table::Table;
use crate::trace::Trace;

/// One point on its way to a worker.
#[derive(Serialize, Deserialize)]
struct Job {
    point: usize,
    preset: Preset,
    config: Config,
    /// Measured times of page faults, which are no part of a configuration's text.
    times: Vec<[u64; 3]>,
    /// The program that it must be run by.
    build: Build,
}

/// What is finished of a study.
#[pyclass(module = "pagetide._pagetide", frozen)]
pub struct Ledger {
    study: Arc<StudyPoints>,
    traces: Traces,
    build: Build,
    /// Taken when it is closed.
    points: Mutex<Option<Points>>,
}

impl Ledger {
    fn with<T>(&self, work: impl FnOnce(&mut Points) -> PyResult<T>) -> PyResult<T> {
        let mut points = self.points.lock().unwrap_or_else(PoisonError::into_inner);
        work(
            points
                .as_mut()
                .ok_or_else(|| error("the sweep is closed"))?,
        )
    }
}

#[pymethods]
impl Ledger {
    /// Begins, or goes on with, the sweep whose results go to `out`.
    #[new]
    fn new(py: Python<'_>, study: &Study, out: Option<PathBuf>) -> PyResult<Self> {
        let study = Arc::clone(&study.points);
        let build = this_build()?;
        let stop = Stop::default();
        let work = || {
            let traces = Traces::until(&study, &stop)?;
            let points = Points::open(&study, &traces, &build, out.as_deref())?;
            Ok::<_, pagetide_sim::study::StudyError>((traces, points))
        };
        let (traces, points) = interruptible(py, &stop, |_| Ok(()), work)?.map_err(error)?;
        Ok(Self {
            study,
            traces,
            build,
            points: Mutex::new(Some(points)),
        })
    }

    /// Numbers of the points to be run.
    fn open_points(&self) -> PyResult<Vec<usize>> {
        self.with(|points| Ok(points.open_points().to_vec()))
    }

    /// Points of the study.
    fn __len__(&self) -> usize {
        self.study.points.len()
    }

    /// The number of the trace of point `number`.
    fn trace_of(&self, number: usize) -> PyResult<usize> {
        Ok(self.point(number)?.trace)
    }

    /// Trace number `trace`.
    fn trace(&self, trace: usize) -> PyResult<Trace> {
        let found = self.study.traces.get(trace);
        let found = found.ok_or_else(|| error(format!("there is no trace {trace}")))?;
        Ok(Trace(found.clone()))
    }

    /// What a worker needs to run point `number`, beside its trace, as JSON.
    fn job(&self, number: usize) -> PyResult<String> {
        let point = self.point(number)?;
        let times = point.config.faults.times.all().iter();
        to_json(&Job {
            point: number,
            preset: point.preset,
            config: point.config.clone(),
            times: times
                .map(|time| [time.pre_ns, time.handling_ns, time.post_ns])
                .collect(),
            build: self.build.clone(),
        })
    }

    /// Records what a worker gave for point `number`.
    fn keep(&self, py: Python<'_>, number: usize, run: &str) -> PyResult<()> {
        self.point(number)?;
        let run: Run = of_json("a worker's record", run)?;
        py.detach(|| self.with(|points| points.keep(number, run).map_err(error)))
    }

    /// The error of point `number`, with what distinguishes it.
    fn at_point(&self, number: usize, reason: &str) -> PyResult<String> {
        self.point(number)?;
        let label = self.study.labels().swap_remove(number);
        Ok(match label.as_str() {
            "" => reason.to_owned(),
            _ => format!("point {number} ({label}): {reason}"),
        })
    }

    /// Writes the results, if they go to a file, and gives the rows; every point has been kept.
    fn close(&self, py: Python<'_>) -> PyResult<Table> {
        let taken = {
            let mut points = self.points.lock().unwrap_or_else(PoisonError::into_inner);
            points.take()
        };
        let points = taken.ok_or_else(|| error("the sweep is closed"))?;
        let work = || {
            let swept = points.close(&self.study, &self.traces)?;
            Ok::<_, pagetide_sim::study::StudyError>(rows(&self.study, &self.traces, &swept))
        };
        interruptible(py, &Stop::default(), |_| Ok(()), work)?.map_err(error)
    }
}

impl Ledger {
    fn point(&self, number: usize) -> PyResult<&Point> {
        let point = self.study.points.get(number);
        point.ok_or_else(|| error(format!("the study has no point {number}")))
    }
}

/// The runs of a worker over one trace.
#[pyclass(module = "pagetide._pagetide", frozen)]
pub struct Jobs {
    traces: Traces,
    /// Ends what they do, for good.
    stop: Stop,
    build: Build,
}

#[pymethods]
impl Jobs {
    /// Those over `trace`.
    #[new]
    fn new(py: Python<'_>, trace: &Trace) -> PyResult<Self> {
        let study = StudyPoints {
            traces: vec![trace.0.clone()],
            points: Vec::new(),
            skipped: 0,
            source: Value::Null,
            file: None,
        };
        let stop = Stop::default();
        let look = || Traces::until(&study, &stop);
        let traces = interruptible(py, &stop, |_| Ok(()), look)?.map_err(error)?;
        // Which points will come is not known here: what they share stays as long as this does.
        traces.keep_futures();
        let build = this_build()?;
        Ok(Self {
            traces,
            stop,
            build,
        })
    }

    /// Runs a job, and gives its record as JSON.
    fn run(&self, py: Python<'_>, job: &str) -> PyResult<String> {
        let job: Job = of_json("a job", job)?;
        if job.build != self.build {
            return Err(error(format!(
                "this worker has pagetide {} of another build than who asks it; install the same package on all \
                 machines of the cluster",
                self.build.pagetide_version
            )));
        }
        let mut config = job.config;
        let times = job.times.into_iter();
        config.faults.times = ServiceSamples::new(
            times
                .map(|[pre_ns, handling_ns, post_ns]| ServiceTime {
                    pre_ns,
                    handling_ns,
                    post_ns,
                })
                .collect(),
        );
        let point = Point {
            variant: None,
            preset: job.preset,
            config,
            trace: 0,
        };
        let work = || run_point(&self.traces, &point, &self.build, &host());
        let (run, _) = interruptible(py, &self.stop, |_| Ok(()), work)?.map_err(error)?;
        to_json(&run)
    }
}
