// SPDX-License-Identifier: Apache-2.0
//! Errors of traces, with the file and the record.

use std::path::PathBuf;

/// Why a trace cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file could not be opened, read or written.
    #[error("{}: {source}{}", path.display(), advice(source))]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file as a whole is invalid.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// One record is broken.
    #[error("{}, record {record}: {reason}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// Number of the record, from 0; in text files of the line, from 1.
        record: u64,
        /// What is wrong.
        reason: String,
    },
    /// The request cannot be fulfilled.
    #[error("{0}")]
    Asked(String),
}

/// A hint for the user, where the system's message gives none.
fn advice(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::NotFound => "; check the name and the directory it is in",
        ErrorKind::PermissionDenied => "; it belongs to another user, or its mode forbids it",
        ErrorKind::IsADirectory => "; give the name of a file",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; make room, or write elsewhere",
        _ => "",
    }
}
