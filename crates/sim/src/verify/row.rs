// SPDX-License-Identifier: Apache-2.0
//! Rows of the reference table and parameters of traces.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pagetide_trace::TraceError;
use serde_json::Value;

use crate::config::{CacheConfig, Completion, Config, Flavour, PartitionBy, Replacement};
use crate::error::SimError;

/// Columns that say which trace a row was run on.
const TRACE_COLUMNS: [&str; 13] = [
    "workload",
    "tenants",
    "order",
    "burst",
    "total_pkts",
    "seed",
    "third",
    "sids",
    "uses",
    "init_frac",
    "stagger",
    "run",
    "live",
];

/// Parameters that files of traces are found by.
const PARAMS_SUFFIX: &str = "params.json";
const TRACE_SUFFIX: &str = "iotlb_trace.bin";

/// What a trace was made with, in the order of [`TRACE_COLUMNS`].
pub(super) type TraceColumns = Vec<Datum>;

/// A value of a table: numbers are compared as numbers, so that 0 is 0.0.
#[derive(Clone, PartialEq, PartialOrd, Debug)]
pub(super) enum Datum {
    /// A number.
    Number(f64),
    /// Anything else.
    Text(String),
}

impl Datum {
    fn parse(text: &str) -> Self {
        text.trim()
            .parse()
            .map_or_else(|_| Self::Text(text.trim().to_owned()), Self::Number)
    }
}

/// One row: a configuration, and what the program printed for it.
#[derive(Clone, Debug)]
pub(super) struct Reference {
    /// Number of the row, the first below the header is 1.
    pub(super) row: usize,
    /// Name of the row's configuration, if the table has names.
    pub(super) name: String,
    pub(super) trace: TraceColumns,
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
    Ok(rows)
}

/// Finds the traces below `directory`, each with its parameters.
pub(super) fn find_traces(directory: &Path) -> Result<Vec<(TraceColumns, PathBuf)>, SimError> {
    let mut found = Vec::new();
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
            } else if let Some(prefix) = name.strip_suffix(PARAMS_SUFFIX) {
                let trace = path.with_file_name(format!("{prefix}{TRACE_SUFFIX}"));
                found.push((read_params(&path)?, trace));
            }
        }
    }
    // One trace may be there twice; the order of a directory is nobody's choice.
    found.sort_by(|(_, one), (_, other)| one.cmp(other));
    let mut distinct: Vec<(TraceColumns, PathBuf)> = Vec::new();
    for (columns, path) in found {
        if !distinct.iter().any(|(seen, _)| *seen == columns) {
            distinct.push((columns, path));
        }
    }
    Ok(distinct)
}

fn read_params(path: &Path) -> Result<TraceColumns, SimError> {
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
    TRACE_COLUMNS
        .iter()
        .map(|column| match params.get(column) {
            Some(Value::String(text)) => Ok(Datum::parse(text)),
            Some(Value::Number(number)) => Ok(Datum::Number(number.as_f64().unwrap_or(f64::NAN))),
            Some(Value::Bool(yes)) => Ok(Datum::Number(f64::from(u8::from(*yes)))),
            _ => Err(broken(format!("has no '{column}'")).into()),
        })
        .collect()
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
        let trace = TRACE_COLUMNS
            .iter()
            .map(|column| self.text(column).map(Datum::parse))
            .collect::<Result<_, _>>()?;
        Ok(Reference {
            row,
            name: self.text("config").unwrap_or_default().to_owned(),
            trace,
            config: self.config()?,
            elapsed_ns: self.number("time_ns")?,
            dropped_slots: self.number("dropped_slots").ok(),
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
        // The program has no switch: a distance that the trace never reaches is one.
        let requests = 3 * self.number("total_pkts")?;
        config.prefetch.enabled = u64::from(config.prefetch.history_length) < requests;
        // The buffer is there, and looked at, all the same.
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
