// SPDX-License-Identifier: Apache-2.0
//! Traces: a recipe, a file, or events in memory.

use std::path::{Path, PathBuf};

use pagetide_access_log::TraceError;
use pagetide_arrow::{EVENTS_MAX, TraceBatches, read_events, trace_schema};
use pagetide_sim::study::{MemoryTrace, Recipe, Trace as StudyTrace};
use pagetide_sim::{Stop, UntilStopped};
use pagetide_trace::{
    BATCH_EVENTS, Event, EventSink, EventSource, FormatChoice, HyperTrace, HypersioWriter, Input,
    OpenTrace, ParquetWriter, SourceRule, TraceFormat, TraceInfo, TraceMeta, TraceParams, info_of,
    open, open_trace,
};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use serde_json::{Map, Value};

use crate::capsule;
use crate::error::{error, of_json, to_json};
use crate::interrupt::interruptible;

/// A trace, as a recipe, a file, or events in memory.
#[pyclass(module = "pagetide._pagetide", frozen)]
pub struct Trace(pub StudyTrace);

/// Figures of a recipe that are named by one word, as on the command line.
const FIGURES: [(&str, &str); 16] = [
    ("tenants", "tenants"),
    ("packets", "packets"),
    ("workload", "input.synthetic.workload"),
    ("order", "order"),
    ("burst", "burst_packets"),
    ("seed", "seed"),
    ("third", "input.synthetic.third"),
    ("uses", "input.synthetic.uses_per_page"),
    ("live", "input.synthetic.live_pages"),
    ("run", "input.synthetic.run_packets"),
    ("init_frac", "input.synthetic.init.share"),
    ("stagger", "input.synthetic.stagger"),
    ("unmap", "input.synthetic.unmap"),
    ("end", "end"),
    ("weights", "weights"),
    ("membership", "membership"),
];

/// Events that own themselves, so that a stream of them may outlive the trace.
struct Shared {
    trace: MemoryTrace,
    at: usize,
}

impl EventSource for Shared {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        let rest = &self.trace.events().0[self.at..];
        let now = &rest[..rest.len().min(BATCH_EVENTS)];
        batch.extend_from_slice(now);
        self.at += now.len();
        Ok(now.len())
    }
}

/// The events of a trace and what is known about them.
fn opened(trace: &StudyTrace) -> Result<(Box<dyn EventSource>, TraceMeta), TraceError> {
    match trace {
        StudyTrace::File(path) => {
            let OpenTrace { source, meta, .. } = open_trace(path, FormatChoice::Detect)?;
            Ok((source, meta))
        }
        StudyTrace::Made(spec) => {
            let mut open_log = |path: &Path| open(path, FormatChoice::Detect);
            let source = HyperTrace::new(spec, &mut open_log)?;
            Ok((Box::new(source), spec.meta()?))
        }
        StudyTrace::Memory(memory) => {
            let trace = memory.clone();
            let source = Shared { trace, at: 0 };
            Ok((Box::new(source), memory.meta().clone()))
        }
    }
}

/// The rule for ids of sources that is called `name`.
fn rule(name: &Value) -> PyResult<Value> {
    let rule = name.as_str().and_then(SourceRule::from_name);
    rule.and_then(|rule| serde_json::to_value(rule).ok())
        .ok_or_else(|| {
            error(format!(
                "sids {name}: write unique, or log24 for the authors' rule with 24 devices a log"
            ))
        })
}

fn of_recipe(recipe: Recipe) -> PyResult<Trace> {
    let spec = recipe.spec().map_err(error)?;
    Ok(Trace(StudyTrace::Made(Box::new(spec))))
}

fn put_all(recipe: &mut Recipe, settings: &str) -> PyResult<()> {
    let settings: Map<String, Value> = of_json("the settings", settings)?;
    for (key, value) in settings {
        recipe.put(&key, value);
    }
    Ok(())
}

#[pymethods]
impl Trace {
    /// Synthetic tenants. `figures` is a JSON object of the command line's words, `settings` one of a recipe's keys.
    #[staticmethod]
    fn make(figures: &str, settings: &str) -> PyResult<Self> {
        let figures: Map<String, Value> = of_json("the figures", figures)?;
        let mut recipe = Recipe::default();
        for (name, value) in figures {
            match FIGURES.iter().find(|(word, _)| *word == name) {
                Some((_, key)) => recipe.put(key, value),
                None if name == "sids" => recipe.put("sources", rule(&value)?),
                None => return Err(error(format!("a trace has no figure '{name}'"))),
            }
        }
        put_all(&mut recipe, settings)?;
        of_recipe(recipe)
    }

    /// The recipe in the file at `path`, or that which a JSON object is.
    #[staticmethod]
    fn build(path: Option<PathBuf>, table: &str) -> PyResult<Self> {
        let mut recipe = match path {
            Some(path) => Recipe::read(&path).map_err(error)?,
            None => Recipe::default(),
        };
        put_all(&mut recipe, table)?;
        of_recipe(recipe)
    }

    /// The trace in the file at `path`, of any format.
    #[staticmethod]
    fn read(path: PathBuf) -> PyResult<Self> {
        let path = std::path::absolute(&path).unwrap_or(path);
        // That it can be opened is checked here, where the name was given.
        drop(open_trace(&path, FormatChoice::Detect).map_err(error)?);
        Ok(Self(StudyTrace::File(path)))
    }

    /// The events of a table.
    #[staticmethod]
    fn from_arrow(
        py: Python<'_>,
        table: &Bound<'_, PyAny>,
        requests_per_packet: Option<u32>,
    ) -> PyResult<Self> {
        let reader = capsule::batches(table)?;
        let schema = arrow_array::RecordBatchReader::schema(&reader);
        let stop = Stop::default();
        let flag = stop.clone();
        let batches = reader.take_while(move |_| !flag.is_set());
        let read = interruptible(py, &stop, |_| Ok(()), || read_events(&schema, batches))?;
        let (events, meta) = read.map_err(error)?;
        let mut meta = meta.unwrap_or_default();
        if let Some(requests) = requests_per_packet {
            meta.requests_per_packet = std::num::NonZeroU32::new(requests).ok_or_else(|| {
                error("requests_per_packet is 0; a packet has at least one request")
            })?;
        }
        Ok(Self(StudyTrace::Memory(MemoryTrace::new(events, meta))))
    }

    /// `recipe`, `file` or `memory`.
    #[getter]
    fn kind(&self) -> &'static str {
        match &self.0 {
            StudyTrace::File(_) => "file",
            StudyTrace::Made(_) => "recipe",
            StudyTrace::Memory(_) => "memory",
        }
    }

    /// Where a file is.
    #[getter]
    fn path(&self) -> Option<PathBuf> {
        match &self.0 {
            StudyTrace::File(path) => Some(path.clone()),
            _ => None,
        }
    }

    /// The recipe as JSON.
    fn recipe(&self) -> PyResult<Option<String>> {
        match &self.0 {
            StudyTrace::Made(spec) => to_json(spec).map(Some),
            _ => Ok(None),
        }
    }

    /// Logs that a recipe names.
    fn logs(&self) -> Vec<PathBuf> {
        match &self.0 {
            StudyTrace::Made(spec) => match &spec.input {
                Input::Recorded(input) => input.logs.clone(),
                Input::Synthetic(_) => Vec::new(),
            },
            _ => Vec::new(),
        }
    }

    /// The same recipe with other names of its logs.
    fn with_logs(&self, logs: Vec<PathBuf>) -> Self {
        let mut trace = self.0.clone();
        if let StudyTrace::Made(spec) = &mut trace
            && let Input::Recorded(input) = &mut spec.input
        {
            input.logs = logs;
        }
        Self(trace)
    }

    /// Requests that make a packet.
    fn requests_per_packet(&self) -> PyResult<Option<u32>> {
        self.0.requests_per_packet().map_err(error)
    }

    /// Statistics as JSON, in one pass over the file.
    fn info(&self, py: Python<'_>) -> PyResult<String> {
        let StudyTrace::File(path) = &self.0 else {
            return Err(error("only a file has been counted; write the trace first"));
        };
        let stop = Stop::default();
        let count = || -> Result<TraceInfo, TraceError> {
            let mut trace = open_trace(path, FormatChoice::Detect)?;
            trace.source = Box::new(UntilStopped::new(trace.source, &stop));
            info_of(trace)
        };
        let info = interruptible(py, &stop, |_| Ok(()), count)?;
        to_json(&info.map_err(error)?)
    }

    /// Writes it to `path`, and returns how many events it has.
    fn write(&self, py: Python<'_>, path: PathBuf, format: Option<&str>) -> PyResult<u64> {
        let format: TraceFormat = match format {
            Some(name) => name.parse::<TraceFormat>().map_err(error)?,
            None if path.to_string_lossy().ends_with("iotlb_trace.bin") => {
                TraceFormat::HypersioBinary
            }
            None => TraceFormat::Parquet,
        };
        if let StudyTrace::File(from) = &self.0
            && std::fs::canonicalize(from)
                .is_ok_and(|from| Ok(from) == std::fs::canonicalize(&path).map_err(drop))
        {
            return Err(error(format!(
                "{}: is the trace that is read; give another name",
                path.display()
            )));
        }
        let stop = Stop::default();
        let written = interruptible(
            py,
            &stop,
            |_| Ok(()),
            || write(&self.0, &path, format, &stop),
        )?;
        written.map_err(error)
    }

    /// The events by the Arrow PyCapsule interface.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        // The interface allows to leave a request for other types unheeded.
        drop(requested_schema);
        let (source, meta) = py.detach(|| opened(&self.0)).map_err(error)?;
        capsule::stream(py, Box::new(TraceBatches::new(source, &meta)))
    }

    /// The schema of a trace.
    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let (_, meta) = py.detach(|| opened(&self.0)).map_err(error)?;
        capsule::schema(py, &trace_schema(&meta))
    }

    /// The same with all events in memory, and how many there are.
    fn in_memory(&self, py: Python<'_>) -> PyResult<(Self, usize)> {
        let stop = Stop::default();
        let read = interruptible(py, &stop, |_| Ok(()), || load(&self.0, &stop))?;
        let memory = read.map_err(error)?;
        let events = memory.events().0.len();
        Ok((Self(StudyTrace::Memory(memory)), events))
    }
}

fn load(trace: &StudyTrace, stop: &Stop) -> Result<MemoryTrace, TraceError> {
    let (source, meta) = opened(trace)?;
    let mut source = UntilStopped::new(source, stop);
    let mut events = Vec::new();
    while source.next_batch(&mut events)? > 0 {
        if events.len() > EVENTS_MAX {
            let reason = format!("the trace has more than {EVENTS_MAX} events; leave it in a file");
            return Err(TraceError::Asked(reason));
        }
    }
    Ok(MemoryTrace::new(events, meta))
}

fn write(
    trace: &StudyTrace,
    path: &Path,
    format: TraceFormat,
    stop: &Stop,
) -> Result<u64, TraceError> {
    let (source, meta) = opened(trace)?;
    let sink: Box<dyn EventSink> = match format {
        TraceFormat::Parquet => Box::new(ParquetWriter::create(path, &meta)?),
        TraceFormat::HypersioBinary => Box::new(HypersioWriter::create(path)?),
        other => {
            let reason =
                format!("traces are not written as {other}; take parquet or hypersio-binary");
            return Err(TraceError::Asked(reason));
        }
    };
    let events = pagetide_trace::convert(&mut UntilStopped::new(source, stop), sink)?;
    if let (StudyTrace::Made(spec), TraceFormat::HypersioBinary) = (trace, format)
        && let (Some(params), Some(beside)) =
            (TraceParams::of(spec), TraceParams::path_beside(path))
    {
        params.write(&beside)?;
    }
    Ok(events)
}
