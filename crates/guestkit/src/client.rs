// SPDX-License-Identifier: Apache-2.0
//! Clients of the daemon, which are processes of its own binary, and their answers.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use serde_json::Value;

use crate::image::command_line;

/// The daemon or one of its clients failed.
#[derive(Debug, thiserror::Error)]
pub enum ProductError {
    /// A file or process could not be used.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A client ended with an error.
    #[error("`{command}` ended with {status}: {said}")]
    Client {
        /// The command line.
        command: String,
        /// How it ended.
        status: ExitStatus,
        /// Its stderr.
        said: String,
    },
    /// A client printed something that is not one JSON object.
    #[error("`{command}` printed no JSON ({source}): {printed}")]
    NotJson {
        /// The command line.
        command: String,
        /// What it printed.
        printed: String,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// The daemon does not answer.
    #[error("`pagetide run` does not answer ({reason}); the end of its log:\n{log}")]
    Silent {
        /// The last failure of a client, or how the daemon ended.
        reason: String,
        /// End of the log.
        log: String,
    },
}

/// A client's answer.
#[derive(Debug)]
pub struct Answer {
    /// How it ended.
    pub status: ExitStatus,
    /// Its stdout.
    pub printed: String,
    /// Its stderr.
    pub said: String,
    command: String,
}

impl Answer {
    /// The JSON object it printed.
    ///
    /// # Errors
    /// It ended with an error, or printed something else.
    pub fn json(self) -> Result<Value, ProductError> {
        let answer = self.success()?;
        serde_json::from_str(&answer.printed).map_err(|source| ProductError::NotJson {
            command: answer.command,
            printed: answer.printed,
            source,
        })
    }

    /// Itself, if its status is success.
    ///
    /// # Errors
    /// It ended with an error.
    pub fn success(self) -> Result<Self, ProductError> {
        if self.status.success() {
            return Ok(self);
        }
        let said = self.said.trim().to_owned();
        Err(ProductError::Client {
            command: self.command,
            status: self.status,
            said,
        })
    }
}

/// Clients of one daemon, for threads that do not own it.
#[derive(Clone, Debug)]
pub struct Clients {
    binary: PathBuf,
    api: PathBuf,
}

impl Clients {
    /// Clients that are `binary`, of the daemon whose API is at `api`.
    #[must_use]
    pub fn new(binary: PathBuf, api: PathBuf) -> Self {
        Self { binary, api }
    }

    /// Runs a client and waits for it; the answer includes its exit status.
    ///
    /// # Errors
    /// It could not be started.
    pub fn run<I>(&self, words: I) -> Result<Answer, ProductError>
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        let mut command = Command::new(&self.binary);
        command.args(words).arg("--api").arg(&self.api);
        let output = command.output().map_err(|source| ProductError::File {
            path: self.binary.clone(),
            source,
        })?;
        Ok(Answer {
            status: output.status,
            printed: String::from_utf8_lossy(&output.stdout).into_owned(),
            said: String::from_utf8_lossy(&output.stderr).into_owned(),
            command: command_line(&command),
        })
    }

    /// The socket of the daemon's API.
    #[must_use]
    pub fn api(&self) -> &Path {
        &self.api
    }
}
