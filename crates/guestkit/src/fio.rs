// SPDX-License-Identifier: Apache-2.0
//! fio of this machine, and what it needs to run in a guest.
//!
//! The guest has no distribution in it, only an initramfs of ours; so the installed program goes there
//! with the shared objects that the loader would take, each at the path it has here.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::image::Addition;

const PROGRAM: &str = "/usr/bin/fio";

/// fio cannot be given to a guest.
#[derive(Debug, thiserror::Error)]
pub enum FioError {
    /// It is not installed.
    #[error("there is no {PROGRAM}: install the package fio")]
    Missing,
    /// What it needs cannot be told.
    #[error("`ldd {PROGRAM}` failed: {0}")]
    Objects(String),
    /// `ldd` cannot be run.
    #[error("ldd could not be started: {0}")]
    Start(#[from] io::Error),
}

/// Program and shared objects, as additions to a guest's initramfs, and these job files.
///
/// # Errors
/// fio is not installed, or a shared object it needs is not there.
pub fn additions(jobs: &[(&str, String)]) -> Result<Vec<Addition>, FioError> {
    if !Path::new(PROGRAM).exists() {
        return Err(FioError::Missing);
    }
    let output = Command::new("ldd").arg(PROGRAM).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(FioError::Objects(said));
    }
    let list = String::from_utf8_lossy(&output.stdout);
    let mut additions = vec![Addition::copy(Path::new(PROGRAM), "bin/fio")];
    for path in objects(&list)? {
        let name = path.strip_prefix("/").unwrap_or(&path).to_string_lossy();
        additions.push(Addition::copy(&path, &name));
    }
    for (name, job) in jobs {
        additions.push(Addition::text(&format!("fio/{name}.fio"), job));
    }
    Ok(additions)
}

/// The paths in an answer of `ldd`.
fn objects(list: &str) -> Result<Vec<PathBuf>, FioError> {
    let mut paths = Vec::new();
    for line in list.lines() {
        if line.contains("not found") {
            return Err(FioError::Objects(line.trim().to_owned()));
        }
        // `NAME => PATH (ADDRESS)`, or `PATH (ADDRESS)`; what the kernel itself provides has no path.
        paths.extend(
            line.split_whitespace()
                .find(|word| word.starts_with('/'))
                .map(PathBuf::from),
        );
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_from_ldds_answer_and_what_is_missing_is_named() {
        let list = "\tlinux-vdso.so.1 (0x00007f)\n\
                    \tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let found = objects(list).expect("all are there");
        let wanted = [
            "/lib/x86_64-linux-gnu/libz.so.1",
            "/lib64/ld-linux-x86-64.so.2",
        ];
        assert_eq!(found, wanted.map(PathBuf::from));
        let error = objects("\tlibaio.so.1 => not found\n").expect_err("it is missing");
        assert!(error.to_string().contains("libaio"));
    }
}
