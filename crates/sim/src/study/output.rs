// SPDX-License-Identifier: Apache-2.0
//! Checks the output files before anything runs: a sweep of hours must not end with results that have no
//! place, nor start by emptying one of its inputs.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::error::StudyError;
use super::points::Study;
use super::traces::Traces;

/// Checks that `path` can be the name of a new file, or of a file to replace, and is no input of `study` or
/// of a trace of it.
///
/// # Errors
/// If it is a directory or a device, is in no directory, or is an input.
pub fn check_output(path: &Path, study: &Study, traces: &Traces) -> Result<(), StudyError> {
    let refused = |reason: &str| {
        Err(StudyError::Output {
            path: path.to_owned(),
            reason: reason.to_owned(),
        })
    };
    if path.file_name().is_none() {
        return refused("is no name of a file to write; give one");
    }
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    if !directory.is_dir() {
        return refused("its directory is not there; make it first");
    }
    // Follows links, since their target would be lost.
    let Ok(there) = std::fs::metadata(path) else {
        return Ok(());
    };
    if there.is_dir() {
        return refused("is a directory; give the name of a file in it");
    }
    if !there.is_file() {
        return refused("is a device or a pipe; give a file's name");
    }
    let files = (0..study.traces.len()).flat_map(|trace| traces.files(trace));
    let inputs = files.map(|file| &file.path).chain(&study.file);
    for input in inputs {
        let same = std::fs::metadata(input)
            .is_ok_and(|input| (input.dev(), input.ino()) == (there.dev(), there.ino()));
        if same {
            return refused("is read by this command; give another file to write");
        }
    }
    Ok(())
}
