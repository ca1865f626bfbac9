// SPDX-License-Identifier: Apache-2.0
//! TOML as a study and a recipe read it: from a file, from `key=value`, and into a typed value with the key in
//! its error.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::StudyError;

/// Largest size of a study's file; one that a person wrote has some hundred bytes.
const STUDY_BYTES_MAX: u64 = 1 << 20;

/// Reads the TOML file at `path`.
pub(super) fn read_toml(path: &Path) -> Result<Map<String, Value>, StudyError> {
    use std::io::Read as _;
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(STUDY_BYTES_MAX + 1).read_to_string(&mut text))
        .map_err(|source| StudyError::Read {
            path: path.to_owned(),
            source,
        })?;
    if text.len() as u64 > STUDY_BYTES_MAX {
        return Err(StudyError::Syntax {
            path: Some(path.to_owned()),
            reason: "it is larger than a MiB".to_owned(),
        });
    }
    parse_toml(&text, Some(path))
}

/// Parses TOML; `file` is where it was read.
pub(super) fn parse_toml(
    text: &str,
    file: Option<&Path>,
) -> Result<Map<String, Value>, StudyError> {
    toml::from_str(text).map_err(|error| StudyError::Syntax {
        path: file.map(Path::to_owned),
        reason: error.to_string().trim_end().to_owned(),
    })
}

/// `key.of.many.parts=value`: the value as TOML, or else as a plain string.
///
/// # Errors
/// If there is no `=`, or nothing before it.
pub(super) fn assigned(assignment: &str) -> Result<(Vec<String>, Value), StudyError> {
    let wrong = || StudyError::key(assignment, "write key=value, such as devtlb.entries=64");
    let (key, value) = assignment.split_once('=').ok_or_else(wrong)?;
    let path: Vec<String> = key.split('.').map(|part| part.trim().to_owned()).collect();
    if path.iter().any(String::is_empty) {
        return Err(wrong());
    }
    let value = value.trim();
    let parsed = toml::from_str::<Map<String, Value>>(&format!("value = {value}"))
        .ok()
        .and_then(|mut table| table.remove("value"));
    Ok((path, parsed.unwrap_or_else(|| value.into())))
}

/// Reads a `T`, with the key in the error.
pub(super) fn read_value<T: DeserializeOwned>(table: Map<String, Value>) -> Result<T, StudyError> {
    serde_path_to_error::deserialize(Value::Object(table)).map_err(|error| {
        let path = error.path().to_string();
        let reason = error.inner().to_string();
        match path.as_str() {
            "." => StudyError::key("", reason),
            _ => StudyError::key(path, reason),
        }
    })
}
