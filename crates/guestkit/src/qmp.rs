// SPDX-License-Identifier: Apache-2.0
//! The few QMP commands that tests send to QEMU.
//!
//! One JSON object a line in both directions. Events between command and answer are skipped. See QEMU's
//! `docs/interop/qmp-spec.rst`.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// Longest wait for an answer: QEMU's main loop may itself wait for a page fault.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// A QMP command failed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket failed or sent nothing.
    #[error("QMP: {0}")]
    Io(#[from] io::Error),
    /// QEMU sent something that is not JSON.
    #[error("QMP: {0}")]
    Json(#[from] serde_json::Error),
    /// QEMU refused.
    #[error("QMP: {command}: {message}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's reason.
        message: String,
    },
}

/// A connection to QEMU's monitor.
#[derive(Debug)]
pub struct Qmp {
    reader: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects and leaves negotiation mode.
    ///
    /// # Errors
    /// No process listens there, or QEMU refuses.
    pub fn connect(path: &Path) -> Result<Self, QmpError> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        let mut qmp = Self {
            reader: BufReader::new(stream),
        };
        qmp.read()?;
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Runs one command and returns its result.
    ///
    /// # Errors
    /// The connection fails, or QEMU refuses with a reason.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, QmpError> {
        let question = json!({ "execute": command, "arguments": arguments });
        writeln!(self.reader.get_mut(), "{question}")?;
        loop {
            let mut answer = self.read()?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                let message = error["desc"]
                    .as_str()
                    .unwrap_or("no reason given")
                    .to_owned();
                return Err(QmpError::Refused {
                    command: command.to_owned(),
                    message,
                });
            }
        }
    }

    fn read(&mut self) -> Result<Value, QmpError> {
        let mut line = String::new();
        if self.reader.read_line(&mut line)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(serde_json::from_str(&line)?)
    }
}
