// SPDX-License-Identifier: Apache-2.0
//! Exit status of a command: 0 success, 1 failure, 2 usage error or refusal.

use std::process::ExitCode;

use serde::Serialize;

use crate::text::{Text, json};

/// The failure of a command, as one sentence.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CommandError {
    /// Wrong use, or refused: status 2.
    #[error("{0}")]
    Refused(String),
    /// Tried and failed: status 1.
    #[error("{0}")]
    Failed(String),
    /// The reader of our output has closed it: nothing to print, status 1.
    #[error("the output is no longer read")]
    OutputClosed,
}

impl CommandError {
    /// Wraps any error that means a usage error or a refusal.
    pub fn refused(error: impl std::fmt::Display) -> Self {
        Self::Refused(error.to_string())
    }

    /// Wraps any error that means failure.
    pub fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }

    /// Exit status of the process.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Refused(_) => ExitCode::from(2),
            Self::Failed(_) | Self::OutputClosed => ExitCode::FAILURE,
        }
    }
}

/// How a report is printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Aligned lines for people.
    Text,
    /// One JSON object.
    Json,
}

/// Selects the form by the flag `--json`.
impl From<bool> for Form {
    fn from(json: bool) -> Self {
        if json { Self::Json } else { Self::Text }
    }
}

/// Prints a report in the requested form.
pub fn print_report<T: Text + Serialize>(report: &T, form: Form) -> Result<(), CommandError> {
    print_with(report, form, Text::text)
}

/// Prints a report in the requested form, as lines by `text`.
pub fn print_with<T: Serialize>(
    report: &T,
    form: Form,
    text: impl FnOnce(&T) -> String,
) -> Result<(), CommandError> {
    match form {
        Form::Json => print(&json(report).map_err(CommandError::failed)?),
        Form::Text => print(&text(report)),
    }
}

/// Prints to stdout; the only function of this program that does.
pub fn print(text: &str) -> Result<(), CommandError> {
    use std::io::Write as _;
    let mut stdout = std::io::stdout().lock();
    stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::BrokenPipe => CommandError::OutputClosed,
            _ => CommandError::Failed(format!("cannot write the output: {error}")),
        })
}

/// Ends a program: says on stderr what failed, and returns the exit status.
#[must_use]
pub fn end(done: Result<(), CommandError>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if error != CommandError::OutputClosed {
                eprintln!("pagetide: {error}");
            }
            error.exit_code()
        }
    }
}
