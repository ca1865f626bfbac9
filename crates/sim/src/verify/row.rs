// SPDX-License-Identifier: Apache-2.0
//! Rows of the reference table and parameters of traces.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pagetide_access_log::TraceError;
use pagetide_trace::TraceParams;
use serde_json::Value;

use crate::config::{CacheConfig, Completion, Config, Flavour, PartitionBy, Replacement};
use crate::error::SimError;

/// The program that made a trace, as a column and as a key of its parameters. Parameters without one match
/// only a table without one.
const GENERATOR: &str = "generator";

/// Suffix by which the traces' parameter files are found.
const PARAMS_SUFFIX: &str = "params.json";
const TRACE_SUFFIX: &str = "iotlb_trace.bin";

/// The parameters of a trace, in the order of [`TraceParams::COLUMNS`], and its generator.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct TraceKey {
    columns: Vec<Datum>,
    /// Empty: not recorded.
    generator: String,
}

/// A value of a table: numbers are compared as numbers, so that 0 is 0.0.
#[derive(Clone, PartialEq, Debug)]
enum Datum {
    /// A whole number; seeds have all 64 bits.
    Whole(u64),
    /// Another number.
    Number(f64),
    /// Anything else.
    Text(String),
}

impl Datum {
    fn parse(text: &str) -> Self {
        let text = text.trim();
        if let Ok(whole) = text.parse() {
            return Self::Whole(whole);
        }
        match text.parse::<f64>() {
            // 1.0 is 1, and -0.0 is 0: `Display` writes the first as the second.
            Ok(number) => match (number + 0.0).to_string().parse() {
                Ok(whole) => Self::Whole(whole),
                Err(_) => Self::Number(number),
            },
            Err(_) => Self::Text(text.to_owned()),
        }
    }
}

/// A trace that was found.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) key: TraceKey,
    /// File with its parameters.
    pub(super) params: PathBuf,
    /// The trace that belongs to it, which may not exist.
    pub(super) trace: PathBuf,
}

/// One row: a configuration, and the program's answer for it.
#[derive(Clone, Debug)]
pub(super) struct Reference {
    /// Number of the row, the first below the header is 1.
    pub(super) row: usize,
    /// Name of the row's configuration, if the table has names.
    pub(super) name: String,
    pub(super) trace: TraceKey,
    pub(super) config: Config,
    pub(super) elapsed_ns: u64,
    pub(super) dropped_slots: Option<u64>,
}

/// Reads the table.
pub(super) fn read_table(path: &Path) -> Result<Vec<Reference>, SimError> {
    let broken = |reason: String| TraceError::File {
        path: path.to_owned(),
        reason,
    };
    let mut reader = csv::Reader::from_path(path).map_err(|error| broken(error.to_string()))?;
    let header = reader
        .headers()
        .map_err(|error| broken(error.to_string()))?
        .clone();
    let mut rows = Vec::new();
    for (before, record) in reader.records().enumerate() {
        let number = before + 1;
        let record = record.map_err(|error| broken(error.to_string()))?;
        let fields: BTreeMap<&str, &str> = header.iter().zip(record.iter()).collect();
        let row = Fields(&fields)
            .reference(number)
            .map_err(|reason| TraceError::Record {
                path: path.to_owned(),
                record: number as u64,
                reason,
            })?;
        rows.push(row);
    }
    if rows.is_empty() {
        return Err(broken("has no rows: there is nothing to compare with".to_owned()).into());
    }
    Ok(rows)
}

/// Finds the traces below `directory`, each with its parameters.
pub(super) fn find_traces(directory: &Path) -> Result<Vec<Found>, SimError> {
    let mut found: Vec<Found> = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        let at = |source| TraceError::Io {
            path: directory.clone(),
            source,
        };
        for entry in std::fs::read_dir(&directory).map_err(at)? {
            let entry = entry.map_err(at)?;
            let path = entry.path();
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if entry.file_type().map_err(at)?.is_dir() {
                directories.push(path);
            } else if let Some(prefix) = name.strip_suffix(PARAMS_SUFFIX)
                && let Some(key) = read_params(&path)?
            {
                found.push(Found {
                    key,
                    trace: path.with_file_name(format!("{prefix}{TRACE_SUFFIX}")),
                    params: path,
                });
            }
        }
    }
    // There may be copies of a trace; the order of a directory is arbitrary. Complete ones come first.
    found.sort_by_cached_key(|one| (!one.trace.exists(), one.params.clone()));
    let mut distinct: Vec<Found> = Vec::new();
    for one in found {
        if !distinct.iter().any(|seen| seen.key == one.key) {
            distinct.push(one);
        }
    }
    Ok(distinct)
}

/// The parameters in `path`; `None` if it has other content.
fn read_params(path: &Path) -> Result<Option<TraceKey>, SimError> {
    let broken = |reason: String| TraceError::File {
        path: path.to_owned(),
        reason,
    };
    let text = std::fs::read_to_string(path).map_err(|source| TraceError::Io {
        path: path.to_owned(),
        source,
    })?;
    let params: Value =
        serde_json::from_str(&text).map_err(|error| broken(format!("is no JSON: {error}")))?;
    if TraceParams::COLUMNS
        .iter()
        .all(|column| params.get(column).is_none())
    {
        return Ok(None);
    }
    let columns = TraceParams::COLUMNS
        .iter()
        .map(|column| match params.get(column) {
            Some(Value::String(text)) => Ok(Datum::parse(text)),
            Some(Value::Number(number)) => Ok(Datum::parse(&number.to_string())),
            Some(Value::Bool(yes)) => Ok(Datum::Whole(u64::from(*yes))),
            Some(other) => Err(broken(format!("'{column}' is {other}, not one figure"))),
            None => Err(broken(format!("has no '{column}'"))),
        })
        .collect::<Result<_, _>>()?;
    let generator = match params.get(GENERATOR) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(name)) => name.trim().to_owned(),
        Some(other) => {
            return Err(broken(format!(
                "'{GENERATOR}' is {other}, not the name of a program"
            ))
            .into());
        }
    };
    Ok(Some(TraceKey { columns, generator }))
}

/// The fields of one row, by column.
struct Fields<'a>(&'a BTreeMap<&'a str, &'a str>);

impl Fields<'_> {
    fn text(&self, column: &str) -> Result<&str, String> {
        self.0
            .get(column)
            .copied()
            .ok_or_else(|| format!("there is no column '{column}'"))
    }

    fn number(&self, column: &str) -> Result<u64, String> {
        let text = self.text(column)?;
        text.trim()
            .parse()
            .map_err(|_| format!("'{column}' is '{text}', which is no whole number"))
    }

    fn size(&self, column: &str) -> Result<u32, String> {
        let number = self.number(column)?;
        u32::try_from(number).map_err(|_| format!("'{column}' is {number}, which is too large"))
    }

    fn reference(&self, row: usize) -> Result<Reference, String> {
        let columns = TraceParams::COLUMNS
            .iter()
            .map(|column| self.text(column).map(Datum::parse))
            .collect::<Result<_, _>>()?;
        let optional = |column| self.text(column).unwrap_or_default().trim();
        Ok(Reference {
            row,
            name: optional("config").to_owned(),
            trace: TraceKey {
                columns,
                generator: optional(GENERATOR).to_owned(),
            },
            config: self.config()?,
            elapsed_ns: match self.number("time_ns")? {
                0 => return Err("'time_ns' is 0, and no run takes no time".to_owned()),
                elapsed_ns => elapsed_ns,
            },
            dropped_slots: match optional("dropped_slots") {
                "" => None,
                _ => Some(self.number("dropped_slots")?),
            },
        })
    }

    fn config(&self) -> Result<Config, String> {
        let mut config = Config::base(Flavour::Hypersio);
        config.devtlb = self.cache("iotlb")?;
        config.devtlb.replacement = match self.text("repl")?.trim() {
            "lru" => Replacement::Lru,
            "lfu" => Replacement::Lfu,
            "oracle" => Replacement::Oracle,
            other => return Err(format!("'repl' is '{other}', not lru, lfu or oracle")),
        };
        config.l2 = self.cache("l2")?;
        config.l3 = self.cache("l3")?;
        let contexts = self.size("cc")?;
        config.context_cache =
            CacheConfig::new(contexts, contexts, Replacement::Lfu).by(PartitionBy::DomainBits);
        config.ptb.entries = self.size("ptb")?;
        config.link.gbps = self.number("gbps")?;
        if self.number("inorder")? != 0 {
            config.completion = Completion::InOrder;
        }
        config.prefetch.buffer_entries = self.size("pb")?;
        config.prefetch.pages_per_tenant = self.size("hist")?;
        config.prefetch.history_length = self.size("stride")?;
        // The program has no switch: a distance that the trace never reaches acts as one.
        let requests = self.number("total_pkts")?.saturating_mul(3);
        config.prefetch.enabled = u64::from(config.prefetch.history_length) < requests;
        // The buffer exists, and is looked up, all the same.
        Ok(config)
    }

    fn cache(&self, name: &str) -> Result<CacheConfig, String> {
        let mut cache = CacheConfig::new(
            self.size(name)?,
            self.size(&format!("{name}_ways"))?,
            Replacement::Lru,
        )
        .by(PartitionBy::DomainBits);
        cache.partitions = self.size(&format!("{name}_groups"))?;
        Ok(cache)
    }
}
