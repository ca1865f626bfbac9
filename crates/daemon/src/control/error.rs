// SPDX-License-Identifier: Apache-2.0
//! [`ControlError`]: why something that was asked of the daemon is not done.

use pagetide_report::outcome::CommandError;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a request was not done.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error, Serialize, Deserialize, ToSchema)]
#[error("{message}")]
pub struct ControlError {
    /// Whose fault it is.
    pub kind: ErrorKind,
    /// One sentence: what, why, what to do.
    pub message: String,
}

impl ControlError {
    /// The request cannot mean anything (exit status 2).
    #[must_use]
    pub fn wrong_use(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::WrongUse, message)
    }

    /// What the request names does not exist (exit status 2).
    #[must_use]
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// Doing it would endanger a VM, or a rule forbids it (exit status 2).
    #[must_use]
    pub fn refused(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Refused, message)
    }

    /// It was tried and did not work (exit status 1).
    #[must_use]
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Failed, message)
    }

    pub(super) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }
}

/// Whose fault a [`ControlError`] is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// The request cannot mean anything.
    WrongUse,
    /// What the request names does not exist.
    NotFound,
    /// Doing it would endanger a VM, or a rule forbids it.
    Refused,
    /// It was tried and did not work.
    Failed,
}

impl From<ControlError> for CommandError {
    fn from(error: ControlError) -> Self {
        match error.kind {
            ErrorKind::WrongUse | ErrorKind::NotFound | ErrorKind::Refused => {
                CommandError::Refused(error.message)
            }
            ErrorKind::Failed => CommandError::Failed(error.message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_of_the_daemon_end_with_status_1() {
        for (error, refused) in [
            (ControlError::wrong_use("x"), true),
            (ControlError::not_found("x"), true),
            (ControlError::refused("x"), true),
            (ControlError::failed("x"), false),
        ] {
            let ended = CommandError::from(error);
            assert_eq!(ended == CommandError::Refused("x".into()), refused);
        }
    }
}
