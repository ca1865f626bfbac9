// SPDX-License-Identifier: Apache-2.0
//! A file in the making: it has a temporary name beside its own, and gets its
//! own when it is whole. Whoever finds the name finds all of the file.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use crate::error::TraceError;

/// The temporary file of `path`; dropped before [`PartialFile::complete`], it is removed.
#[derive(Debug)]
pub struct PartialFile {
    path: PathBuf,
    temporary: PathBuf,
    complete: bool,
}

impl PartialFile {
    /// Makes the temporary file, empty, open for reading and writing.
    pub fn create(path: &Path) -> Result<(Self, File), TraceError> {
        let Some(name) = path.file_name() else {
            return Err(TraceError::Asked(format!(
                "{} is no name of a file to write",
                path.display()
            )));
        };
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        // Another process may be making the same file; the last to finish wins.
        hidden.push(format!(".{}.partial", std::process::id()));
        let partial = Self {
            path: path.to_owned(),
            temporary: path.with_file_name(hidden),
            complete: false,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&partial.temporary)
            .map_err(|source| partial.error(source))?;
        Ok((partial, file))
    }

    /// The name that the file will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives `file`, the temporary file, its name, once it is on disk.
    pub fn complete(mut self, file: &File) -> Result<(), TraceError> {
        file.sync_data()
            .and_then(|()| fs::rename(&self.temporary, &self.path))
            .map_err(|source| self.error(source))?;
        self.complete = true;
        Ok(())
    }

    /// An error of the system about this file.
    pub fn error(&self, source: std::io::Error) -> TraceError {
        TraceError::Io {
            path: self.path.clone(),
            source,
        }
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if !self.complete {
            // It may never have been made, or the directory is gone: either way
            // nothing is left to remove.
            drop(fs::remove_file(&self.temporary));
        }
    }
}
