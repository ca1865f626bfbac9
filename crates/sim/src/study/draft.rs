// SPDX-License-Identifier: Apache-2.0
//! A study while it is assembled from a file and a command line, and its validation: everything that can be
//! checked without running is checked here.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use pagetide_trace::{HyperSpec, TenantShape};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::document::{assigned, parse_toml, read_toml, read_value};
use super::error::StudyError;
use super::expand::{expand, in_order_of, lay, put};
use super::points::{Point, Preset, Study};
use super::recipe::Recipe;
use super::trace::Trace;
use crate::config::{Config, Flavour};
use crate::faults::{ServiceSamples, read_samples};

/// Most points of a study: at a second each 18 hours of computing, and some 600 MB for the table of
/// results.
pub const POINTS_MAX: usize = 1 << 16;

/// Settings of a trace's recipe that are lists themselves.
const LISTS: [&str; 2] = ["weights", "input.recorded.logs"];

/// An unfinished study.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    table: Map<String, Value>,
    /// What was set besides the file; it also goes before what a variant says.
    set: Map<String, Value>,
    /// Base directory for relative names of traces.
    directory: PathBuf,
    /// Where the study was read.
    file: Option<PathBuf>,
    /// Traces in the place of the study's.
    given: Option<Vec<Trace>>,
}

/// A configuration, and the settings given for it.
struct Laid {
    variant: Option<String>,
    preset: Preset,
    config: Config,
    /// Requests a packet, if the study sets it.
    asked_per_packet: Option<u32>,
}

impl Draft {
    /// Reads the study at `path`; its traces' names are relative to its directory.
    ///
    /// # Errors
    /// If the file cannot be read or is no TOML.
    pub fn read(path: &Path) -> Result<Self, StudyError> {
        Ok(Self {
            table: read_toml(path)?,
            set: Map::new(),
            directory: path.parent().unwrap_or(Path::new("")).to_owned(),
            file: Some(path.to_owned()),
            given: None,
        })
    }

    /// Parses a study's text; its traces' names are relative to `directory`.
    ///
    /// # Errors
    /// If it is no TOML.
    pub fn parse(text: &str, directory: &Path) -> Result<Self, StudyError> {
        Ok(Self {
            table: parse_toml(text, None)?,
            set: Map::new(),
            directory: directory.to_owned(),
            file: None,
            given: None,
        })
    }

    /// A study that is a table already; its traces' names are relative to `directory`.
    #[must_use]
    pub fn of(table: Map<String, Value>, directory: &Path) -> Self {
        Self {
            table,
            directory: directory.to_owned(),
            ..Self::default()
        }
    }

    /// Replaces the study's traces with these.
    pub fn give_traces(&mut self, traces: Vec<Trace>) {
        let recorded = traces.iter().map(|trace| match trace {
            Trace::File(path) => serde_json::json!({ "file": path.to_string_lossy() }),
            Trace::Made(spec) => serde_json::to_value(spec).unwrap_or_default(),
            Trace::Memory(memory) => serde_json::json!({ "events_sha256": memory.sha256() }),
        });
        self.table.insert("trace".to_owned(), recorded.collect());
        self.given = Some(traces);
    }

    /// Sets a parameter: `devtlb.entries=64`, `flavour=hypersio`, `seed=[1, 2]`.
    ///
    /// # Errors
    /// If there is no `=`.
    pub fn set(&mut self, assignment: &str) -> Result<(), StudyError> {
        let (path, value) = assigned(assignment)?;
        let refused = match path.first().map(String::as_str) {
            Some("trace") => Some("traces are set in the study or by --trace"),
            Some("variant") => Some("variants are set in the study"),
            _ => None,
        };
        if let Some(reason) = refused {
            return Err(StudyError::key(assignment, reason));
        }
        put(&mut self.set, &path, value.clone());
        put(&mut self.table, &path, value);
        Ok(())
    }

    /// Replaces the study's traces with files; names are relative to the working directory.
    pub fn replace_traces<P: AsRef<Path>>(&mut self, files: &[P]) {
        let traces = files.iter().map(|file| {
            let file = file.as_ref();
            // A name that is not UTF-8 cannot be in a study; it is then not found.
            let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
            serde_json::json!({ "file": file.to_string_lossy() })
        });
        self.table.insert("trace".to_owned(), traces.collect());
    }

    /// Expands the lists and validates every point.
    ///
    /// # Errors
    /// The first key that is unknown or impossible, or point that cannot be run.
    pub fn study(&self) -> Result<Study, StudyError> {
        let source = Value::Object(self.table.clone());
        let mut table = self.table.clone();
        let traces = self.traces(table.remove("trace"))?;
        let impossible: Impossible = match take(&mut table, "skip_impossible")? {
            true => Impossible::Skipped,
            false => Impossible::Refused,
        };
        let variants = variants(table.remove("variant"))?;
        let mut configs = Vec::new();
        for variant in variants {
            let mut table = table.clone();
            lay(&mut table, variant.settings);
            lay(&mut table, self.set.clone());
            // It is a key of the study, and is taken above.
            table.remove("skip_impossible");
            for mut laid in configurations(table)? {
                laid.variant.clone_from(&variant.name);
                configs.push(laid);
            }
            if traces.len().saturating_mul(configs.len()) > POINTS_MAX {
                return Err(StudyError::TooMany { max: POINTS_MAX });
            }
        }
        self.read_samples(&mut configs)?;
        let mut study = Study {
            points: points_of(&traces, &configs)?,
            traces,
            skipped: 0,
            source,
            file: self.file.clone(),
        };
        match impossible {
            Impossible::Refused => study.check()?,
            Impossible::Skipped => study.skip_impossible()?,
        }
        Ok(study)
    }

    /// Reads the measured times of page faults that configurations name.
    fn read_samples(&self, configs: &mut [Laid]) -> Result<(), StudyError> {
        let mut known: HashMap<(String, String), (ServiceSamples, String)> = HashMap::new();
        for laid in configs {
            let faults = &mut laid.config.faults;
            if faults.samples.is_empty() {
                continue;
            }
            let key = (faults.samples.clone(), faults.samples_of.clone());
            if !known.contains_key(&key) {
                let path = self.directory.join(&faults.samples);
                let read = read_samples(&path, &faults.samples_of)
                    .map_err(|error| StudyError::key("faults.samples", error.to_string()))?;
                known.insert(key.clone(), read);
            }
            (faults.times, faults.samples_sha256) = known[&key].clone();
        }
        Ok(())
    }

    fn traces(&self, written: Option<Value>) -> Result<Vec<Trace>, StudyError> {
        if let Some(given) = &self.given {
            return Ok(given.clone());
        }
        let entries = match written {
            Some(Value::Array(entries)) if !entries.is_empty() => entries,
            // `[trace]` for a single one is accepted.
            Some(Value::Object(entry)) => vec![Value::Object(entry)],
            _ => {
                return Err(StudyError::key(
                    "trace",
                    "the study has no trace; add [[trace]] with 'file', or with 'tenants', \
                     'packets' and 'input.synthetic'",
                ));
            }
        };
        let mut traces: Vec<Trace> = Vec::new();
        for (number, entry) in entries.into_iter().enumerate() {
            let name = format!("trace[{number}]");
            let Value::Object(entry) = entry else {
                return Err(StudyError::key(name, "a trace is a table: write [[trace]]"));
            };
            for trace in self.expand_trace(&name, entry)? {
                // A repeated trace would only repeat its points.
                if !traces.contains(&trace) {
                    traces.push(trace);
                }
            }
        }
        Ok(traces)
    }

    fn expand_trace(
        &self,
        name: &str,
        entry: Map<String, Value>,
    ) -> Result<Vec<Trace>, StudyError> {
        let named = |error| match error {
            StudyError::Key { key, reason } if key.is_empty() => StudyError::key(name, reason),
            StudyError::Key { key, reason } => StudyError::key(format!("{name}.{key}"), reason),
            other => other,
        };
        let entry = in_order_of(entry, &trace_template());
        let expanded = expand(entry, &LISTS, POINTS_MAX).map_err(named)?;
        expanded
            .into_iter()
            .map(|one| self.trace(one).map_err(named))
            .collect()
    }

    fn trace(&self, mut entry: Map<String, Value>) -> Result<Trace, StudyError> {
        if let Some(file) = entry.remove("file") {
            let Value::String(file) = file else {
                return Err(StudyError::key("file", "the name of a file is a string"));
            };
            if let Some(other) = entry.keys().next() {
                return Err(StudyError::key(
                    other.as_str(),
                    "a trace from a file has no other key than 'file'",
                ));
            }
            return Ok(Trace::File(self.directory.join(file)));
        }
        let spec = Recipe::of(entry, &self.directory).spec()?;
        Ok(Trace::Made(Box::new(spec)))
    }
}

/// What becomes of a point whose configuration is impossible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Impossible {
    /// It is an error.
    Refused,
    /// It is left out, and counted.
    Skipped,
}

/// Settings that go together, under a name.
#[derive(Debug, Default)]
struct Variant {
    /// Its name; none if the study has no variants.
    name: Option<String>,
    /// What it sets, lists included.
    settings: Map<String, Value>,
}

/// The variants of a study: one without name and settings if it has none.
fn variants(given: Option<Value>) -> Result<Vec<Variant>, StudyError> {
    let entries = match given {
        None => return Ok(vec![Variant::default()]),
        Some(Value::Array(entries)) if !entries.is_empty() => entries,
        Some(_) => {
            return Err(StudyError::key(
                "variant",
                "variants are tables, at least one: write [[variant]]",
            ));
        }
    };
    let mut variants: Vec<Variant> = Vec::new();
    for (number, entry) in entries.into_iter().enumerate() {
        let key = |inner: &str| format!("variant[{number}]{inner}");
        let Value::Object(mut settings) = entry else {
            return Err(StudyError::key(
                key(""),
                "a variant is a table: write [[variant]]",
            ));
        };
        let name = match settings.remove("name") {
            Some(Value::String(name)) if !name.is_empty() => name,
            _ => {
                return Err(StudyError::key(
                    key(".name"),
                    "a variant has a name: write for example name = \"no prefetching\"",
                ));
            }
        };
        if variants
            .iter()
            .any(|other| other.name.as_ref() == Some(&name))
        {
            return Err(StudyError::key(
                key(".name"),
                format!("there is another variant '{name}'; give each a name of its own"),
            ));
        }
        for other in ["trace", "variant", "skip_impossible"] {
            if settings.contains_key(other) {
                return Err(StudyError::key(
                    key(&format!(".{other}")),
                    "this belongs to the study; a variant sets parameters of the model",
                ));
            }
        }
        variants.push(Variant {
            name: Some(name),
            settings,
        });
    }
    Ok(variants)
}

/// Keys of a trace in the order they are declared.
fn trace_template() -> Value {
    let spec = HyperSpec::synthetic(TenantShape::default(), 1);
    serde_json::to_value(spec).unwrap_or_default()
}

/// Every configuration of a variant.
fn configurations(table: Map<String, Value>) -> Result<Vec<Laid>, StudyError> {
    let mut template = Map::new();
    template.insert("preset".to_owned(), Value::Null);
    lay(&mut template, ground(Preset::Base, Flavour::Paper));
    let table = in_order_of(table, &Value::Object(template));
    expand(table, &[], POINTS_MAX)?
        .into_iter()
        .map(configuration)
        .collect()
}

/// The configuration of a preset with the settings in `over`.
fn configuration(mut over: Map<String, Value>) -> Result<Laid, StudyError> {
    let preset: Preset = take(&mut over, "preset")?;
    let flavour: Flavour = match over.get("flavour") {
        Some(_) => take(&mut over.clone(), "flavour")?,
        None => Flavour::default(),
    };
    let says = |part: &str, key: &str| over.get(part).is_some_and(|part| part.get(key).is_some());
    let says_ways = says("context_cache", "ways");
    let says_per_packet = says("link", "requests_per_packet");
    let mut laid = ground(preset, flavour);
    lay(&mut laid, over);
    let mut config: Config = read_value(laid)?;
    if !says_ways {
        // It is fully associative, so its ways follow from its entries.
        config.context_cache.ways = config.context_cache.entries;
    }
    Ok(Laid {
        variant: None,
        preset,
        asked_per_packet: says_per_packet.then_some(config.link.requests_per_packet),
        config,
    })
}

/// Every configuration with every trace.
fn points_of(traces: &[Trace], configs: &[Laid]) -> Result<Vec<Point>, StudyError> {
    let mut points = Vec::with_capacity(traces.len() * configs.len());
    for (number, trace) in traces.iter().enumerate() {
        let told = trace.requests_per_packet()?;
        for laid in configs {
            let mut config = laid.config.clone();
            match (told, laid.asked_per_packet) {
                (Some(told), Some(asked)) if told != asked => {
                    return Err(StudyError::key(
                        "link.requests_per_packet",
                        format!(
                            "{asked} a packet, but trace[{number}] was made with {told}; leave this out"
                        ),
                    ));
                }
                (Some(told), _) => config.link.requests_per_packet = told,
                (None, _) => {}
            }
            points.push(Point {
                variant: laid.variant.clone(),
                preset: laid.preset,
                config,
                trace: number,
            });
        }
    }
    Ok(points)
}

fn ground(preset: Preset, flavour: Flavour) -> Map<String, Value> {
    match serde_json::to_value(preset.config(flavour)) {
        Ok(Value::Object(map)) => map,
        other => unreachable!("a configuration is a table, not {other:?}"),
    }
}

/// Removes the word at `key` from `table`; the default if it is absent.
fn take<T: DeserializeOwned + Default>(
    table: &mut Map<String, Value>,
    key: &str,
) -> Result<T, StudyError> {
    match table.remove(key) {
        None => Ok(T::default()),
        Some(value) => {
            serde_json::from_value(value).map_err(|error| StudyError::key(key, error.to_string()))
        }
    }
}
