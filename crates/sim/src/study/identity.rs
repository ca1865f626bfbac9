// SPDX-License-Identifier: Apache-2.0
//! The identity of a point: the first 128 bits of the SHA-256 of its canonical JSON, which has the keys of
//! each table in order of their bytes and no space.
//!
//! ```text
//! {"config":{…every parameter…},"trace":{"made":{…the recipe…}}}
//! {"config":{…every parameter…},"trace":{"bytes":4800,"sha256":"…"}}
//! ```
//!
//! So neither the layout of a study, nor explicit defaults, nor the name of a trace's file changes the
//! identity; one bit of the file's content does. In a recipe with logs the content of those logs replaces
//! their names.

use std::io::Read;
use std::path::Path;

use pagetide_access_log::{TraceError, open_regular};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::columns;
use crate::config::Config;
use crate::stop::Stop;

/// Identity of a point: 32 hexadecimal digits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PointId(pub String);

impl std::fmt::Display for PointId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The identity of a trace, independent of its location.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct TraceIdentity(pub(super) Value);

impl TraceIdentity {
    /// The point of `config` over this trace.
    #[must_use]
    pub fn point(&self, config: &Config) -> PointId {
        let whole = json!({ "config": columns::json(config), "trace": self.0 });
        hash(&whole)
    }
}

/// The identity of `value`.
pub(super) fn hash(value: &Value) -> PointId {
    let digest = Sha256::digest(canonical(value).to_string().as_bytes());
    PointId(hex(&digest[..16]))
}

/// Content of a file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Content {
    /// SHA-256 of it, in hexadecimal.
    pub sha256: String,
    /// Its length.
    pub bytes: u64,
}

impl Content {
    /// Reads all of the file at `path`, unless `stop` is set meanwhile; it has to be a regular one.
    pub(super) fn of(path: &Path, stop: &Stop) -> Result<Self, TraceError> {
        let io = |source| TraceError::Io {
            path: path.to_owned(),
            source,
        };
        let mut file = open_regular(path)?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            stop.check()?;
            let read = file.read(&mut buffer).map_err(io)?;
            if read == 0 {
                break;
            }
            hash.update(&buffer[..read]);
            bytes += read as u64;
        }
        Ok(Self {
            sha256: hex(&hash.finalize()),
            bytes,
        })
    }
}

/// SHA-256 of `bytes`, in hexadecimal.
pub(super) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub(super) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        if write!(text, "{byte:02x}").is_err() {
            unreachable!("a string takes everything");
        }
        text
    })
}

/// The same with the keys of each table sorted.
pub(super) fn canonical(value: &Value) -> Value {
    match value {
        Value::Object(table) => {
            let mut keys: Vec<&String> = table.keys().collect();
            keys.sort_unstable();
            let sorted: Map<String, Value> = keys
                .into_iter()
                .map(|key| (key.clone(), canonical(&table[key])))
                .collect();
            Value::Object(sorted)
        }
        Value::Array(values) => values.iter().map(canonical).collect(),
        leaf => leaf.clone(),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::*;

    #[test]
    fn content_of_a_pipe_or_directory_is_refused_without_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        mkfifoat(CWD, &pipe, Mode::from_raw_mode(0o600)).unwrap();
        for (path, told) in [
            (pipe.as_path(), "copy it into a file"),
            (dir.path(), "give the name of a file"),
        ] {
            let error = Content::of(path, &Stop::default()).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
    }

    #[test]
    fn content_of_a_file_is_its_length_and_hash() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "abc").unwrap();
        let content = Content::of(&file, &Stop::default()).unwrap();
        assert_eq!(content.bytes, 3);
        assert!(content.sha256.starts_with("ba7816bf"));
    }
}
