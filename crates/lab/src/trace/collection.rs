// SPDX-License-Identifier: Apache-2.0
//! The file `collection.json` beside recorded logs: what they are of.

use std::fs;
use std::path::{Path, PathBuf};

use pagetide_report::outcome::CommandError;
use serde::{Deserialize, Serialize};

/// Name of the file.
pub const NAME: &str = "collection.json";
/// How deep collections are looked for below a directory.
const DEPTH_MAX: u32 = 3;

/// What was recorded.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Collection {
    /// Kind of devices.
    pub device: String,
    /// What they did.
    pub workload: String,
    /// Who mapped their memory.
    pub mode: String,
    /// For how long they worked.
    pub seconds: u32,
    /// The guest's kernel.
    pub kernel: String,
    /// QEMU's version.
    pub qemu_version: String,
    /// The log of each run, below the directory of this file.
    pub logs: Vec<PathBuf>,
}

impl Collection {
    /// Every collection in `dir` and directories below it, in order of their paths; the paths of logs are complete.
    ///
    /// # Errors
    /// A directory cannot be read, a file is no collection, or there is none.
    pub fn all_below(dir: &Path) -> Result<Vec<Self>, CommandError> {
        let mut found = Vec::new();
        look(dir, DEPTH_MAX, &mut found)?;
        if found.is_empty() {
            return Err(CommandError::refused(format!(
                "{}: no {NAME} is in it or below it; `pagetide trace collect --out` makes one",
                dir.display()
            )));
        }
        Ok(found)
    }

    fn read(path: &Path) -> Result<Self, CommandError> {
        let refused = |error: String| CommandError::refused(format!("{}: {error}", path.display()));
        let text = fs::read(path).map_err(|error| refused(error.to_string()))?;
        let mut collection: Self =
            serde_json::from_slice(&text).map_err(|error| refused(error.to_string()))?;
        if collection.logs.is_empty() {
            return Err(refused("it names no log".to_owned()));
        }
        let dir = path.parent().unwrap_or(Path::new(""));
        for log in &mut collection.logs {
            *log = dir.join(&log);
        }
        Ok(collection)
    }
}

fn look(dir: &Path, depth: u32, found: &mut Vec<Collection>) -> Result<(), CommandError> {
    let refused =
        |error: std::io::Error| CommandError::refused(format!("{}: {error}", dir.display()));
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(refused)? {
        paths.push(entry.map_err(refused)?.path());
    }
    paths.sort();
    for path in paths {
        if path.is_dir() && depth > 0 {
            look(&path, depth - 1, found)?;
        } else if path.file_name().is_some_and(|name| name == NAME) {
            found.push(Collection::read(&path)?);
        }
    }
    Ok(())
}
