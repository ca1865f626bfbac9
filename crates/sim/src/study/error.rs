// SPDX-License-Identifier: Apache-2.0
//! Why a study cannot be run, or a sweep did not finish.

use std::path::PathBuf;

use pagetide_access_log::TraceError;

use crate::error::SimError;

/// Why a study gives no results.
#[derive(Debug, thiserror::Error)]
pub enum StudyError {
    /// The study's file cannot be read.
    #[error("{}: {source}; give the name of a study's or recipe's TOML file", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
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
    /// Values that are possible individually, and impossible together.
    #[error("{}{source}", of_point(*point, label))]
    Point {
        /// Its number, from 0.
        point: usize,
        /// What distinguishes it from other points; empty if it is the only one.
        label: String,
        /// What is wrong.
        source: Box<SimError>,
    },
    /// Too many points.
    #[error("the study's lists make more than {max} points; split it")]
    TooMany {
        /// Most points of a study.
        max: usize,
    },
    /// Several points where one is required.
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
    /// An invalid output file.
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
        /// The system's error.
        reason: String,
    },
}

impl StudyError {
    /// True if the request is wrong, or a trace is broken; false if a valid request failed.
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

    pub(crate) fn key(key: impl Into<String>, reason: impl Into<String>) -> Self {
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

/// True if a trace is broken, or its selection is impossible; false if the system failed.
#[must_use]
pub fn is_wrong_trace(error: &TraceError) -> bool {
    match error {
        TraceError::Io { source, .. } => is_not_there(source),
        TraceError::File { .. } | TraceError::Record { .. } | TraceError::Asked(_) => true,
    }
}

/// True if a name was wrong rather than the system.
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
