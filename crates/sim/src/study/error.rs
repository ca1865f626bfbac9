// SPDX-License-Identifier: Apache-2.0
//! Why a study cannot be run, or a sweep was not finished.

use std::path::PathBuf;

use pagetide_trace::TraceError;

use crate::error::SimError;

/// Why a study gives no results.
#[derive(Debug, thiserror::Error)]
pub enum StudyError {
    /// The study's file cannot be read.
    #[error("{}: {source}; give the name of a study's or recipe's TOML file", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The text is no TOML.
    #[error("{}not TOML: {reason}", of_file(path.as_ref()))]
    Syntax {
        /// The file, if it is from one.
        path: Option<PathBuf>,
        /// What is wrong, and where.
        reason: String,
    },
    /// A key is unknown or its value impossible.
    #[error("{}{reason}", before_colon(key))]
    Key {
        /// The key, from the top of the study; empty for the whole of it.
        key: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// Values that are possible each, and impossible together.
    #[error("{}{source}", of_point(*point, label))]
    Point {
        /// Its number, from 0.
        point: usize,
        /// What sets it apart from other points; empty if it is the only one.
        label: String,
        /// What is wrong.
        source: Box<SimError>,
    },
    /// More points than a study may have.
    #[error("the study's lists make more than {max} points; split it")]
    TooMany {
        /// Points that a study may have.
        max: usize,
    },
    /// Several points where one was wanted.
    #[error(
        "this is a study of {points} points, and 'sim run' runs one: take 'sim sweep', \
         or leave one value in each list"
    )]
    Several {
        /// How many there are.
        points: usize,
    },
    /// A trace is broken or cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A run failed.
    #[error(transparent)]
    Run(#[from] SimError),
    /// The record of finished points cannot be used.
    #[error("{}: {reason}", path.display())]
    Journal {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A file to write is not given as it must be.
    #[error("{}: {reason}", path.display())]
    Output {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// Results or their journal cannot be written.
    #[error("{}: cannot be written: {reason}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
}

impl StudyError {
    /// True if what was asked for is wrong, or a trace is broken; false if a
    /// sound request failed.
    #[must_use]
    pub fn is_wrong_use(&self) -> bool {
        match self {
            Self::Write { .. } => false,
            Self::Read { source, .. } => is_not_there(source),
            Self::Trace(error) | Self::Run(SimError::Trace(error)) => is_wrong_trace(error),
            Self::Syntax { .. }
            | Self::Key { .. }
            | Self::Point { .. }
            | Self::TooMany { .. }
            | Self::Several { .. }
            | Self::Journal { .. }
            | Self::Output { .. }
            | Self::Run(_) => true,
        }
    }

    pub(super) fn key(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Key {
            key: key.into(),
            reason: reason.into(),
        }
    }
}

fn before_colon(key: &str) -> String {
    match key {
        "" => String::new(),
        _ => format!("{key}: "),
    }
}

fn of_file(path: Option<&PathBuf>) -> String {
    match path {
        None => "the study is ".to_owned(),
        Some(path) => format!("{}: the file is ", path.display()),
    }
}

fn of_point(point: usize, label: &str) -> String {
    match label {
        "" => String::new(),
        _ => format!("point {point} ({label}): "),
    }
}

/// True if a trace is broken, or was asked for in a way that cannot be; false
/// if the system failed.
#[must_use]
pub fn is_wrong_trace(error: &TraceError) -> bool {
    match error {
        TraceError::Io { source, .. } => is_not_there(source),
        TraceError::File { .. } | TraceError::Record { .. } | TraceError::Asked(_) => true,
    }
}

/// True if a name was wrong and not the system.
fn is_not_there(error: &std::io::Error) -> bool {
    use std::io::ErrorKind;
    matches!(
        error.kind(),
        ErrorKind::NotFound
            | ErrorKind::IsADirectory
            | ErrorKind::NotADirectory
            | ErrorKind::PermissionDenied
            | ErrorKind::InvalidData
            | ErrorKind::InvalidInput
    )
}
