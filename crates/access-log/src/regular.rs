// SPDX-License-Identifier: Apache-2.0
//! Files that are read more than once.

use crate::error::TraceError;
use std::{
    fs::{self, File},
    io::ErrorKind,
    path::Path,
};

/// Opens the file at `path` for more than one pass: a pipe's content can be read only once, and a device
/// may never end.
///
/// # Errors
/// If there is none, or it is no regular file.
pub fn open_regular(path: &Path) -> Result<File, TraceError> {
    let io = |source| TraceError::Io {
        path: path.to_owned(),
        source,
    };
    // Checked before the open, since opening a pipe waits for its other end.
    let kind = fs::metadata(path).map_err(io)?.file_type();
    if kind.is_dir() {
        return Err(io(ErrorKind::IsADirectory.into()));
    }
    if !kind.is_file() {
        return Err(TraceError::File {
            path: path.to_owned(),
            reason: "is a pipe or a device, and has to be read more than once; \
                     copy it into a file first"
                .to_owned(),
        });
    }
    File::open(path).map_err(io)
}
