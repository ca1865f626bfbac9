// SPDX-License-Identifier: Apache-2.0
//! The recipe of one trace, assembled from a file and a command line.

use std::path::{Path, PathBuf};

use pagetide_trace::{HyperSpec, Input, TenantShape};
use serde_json::{Map, Value};

use super::columns;
use super::document::{assigned, read_toml, read_value};
use super::error::StudyError;
use super::expand::{lay, put};

/// An unfinished recipe: a table with the keys of [`HyperSpec`].
#[derive(Clone, Debug, Default)]
pub struct Recipe {
    table: Map<String, Value>,
    /// Base directory for relative names of logs.
    directory: PathBuf,
}

impl Recipe {
    /// Reads the recipe at `path`; its logs' names are relative to its directory.
    ///
    /// # Errors
    /// If the file cannot be read or is no TOML.
    pub fn read(path: &Path) -> Result<Self, StudyError> {
        Ok(Self {
            table: read_toml(path)?,
            directory: path.parent().unwrap_or(Path::new("")).to_owned(),
        })
    }

    pub(super) fn of(table: Map<String, Value>, directory: &Path) -> Self {
        Self {
            table,
            directory: directory.to_owned(),
        }
    }

    /// Sets a figure by its key: `input.synthetic.ring.iova=0x34800000`.
    ///
    /// # Errors
    /// If there is no `=`.
    pub fn set(&mut self, assignment: &str) -> Result<(), StudyError> {
        let (path, value) = assigned(assignment)?;
        put(&mut self.table, &path, value);
        Ok(())
    }

    /// Sets the figure at `key`, a name of dotted parts.
    pub fn put(&mut self, key: &str, value: Value) {
        let path: Vec<String> = key.split('.').map(str::to_owned).collect();
        put(&mut self.table, &path, value);
    }

    /// The recipe, validated.
    ///
    /// # Errors
    /// The first key that is unknown or impossible.
    pub fn spec(mut self) -> Result<HyperSpec, StudyError> {
        if let Some(Value::Object(shape)) = self.table.get_mut("input").and_then(synthetic) {
            // This allows setting one figure of a page without the others.
            if let Value::Object(mut whole) = columns::json(&TenantShape::default()) {
                lay(&mut whole, std::mem::take(shape));
                *shape = whole;
            }
        }
        for (key, what) in [
            ("tenants", "write for example tenants = 16"),
            (
                "input",
                "write for example input.synthetic.workload = \"iperf3\", \
                 or input.recorded.logs = [\"a.log\"]",
            ),
        ] {
            if !self.table.contains_key(key) {
                return Err(StudyError::key("", format!("'{key}' is missing: {what}")));
            }
        }
        let mut spec: HyperSpec = read_value(self.table)?;
        if let Input::Recorded(input) = &mut spec.input {
            for log in &mut input.logs {
                *log = self.directory.join(&log);
            }
        }
        spec.look_at_settings()
            .map_err(|error| StudyError::key("", error.to_string()))?;
        Ok(spec)
    }
}

fn synthetic(input: &mut Value) -> Option<&mut Value> {
    input.get_mut("synthetic")
}
