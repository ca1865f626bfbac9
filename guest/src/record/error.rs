// SPDX-License-Identifier: Apache-2.0
//! What may go wrong in a recorded guest, and how often it looks for what it waits for.

use std::io;
use std::time::Duration;

/// Between two looks for something that is awaited.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// A recorded guest cannot do what it should.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The command is not valid.
    #[error("'{0}' is no order: serve or assign iperf3|media|search, disks SECONDS, trace")]
    NoOrder(String),
    /// A program or file failed.
    #[error("{what}: {source}")]
    Io {
        /// Which.
        what: String,
        /// Why.
        source: io::Error,
    },
    /// A program failed.
    #[error("{program}: {said}")]
    Program {
        /// Which.
        program: String,
        /// Its status and output.
        said: String,
    },
    /// There is no device of the kind that is needed.
    #[error("the machine has no {0}")]
    NoDevice(&'static str),
    /// Something did not happen in time.
    #[error("{what} did not happen within {seconds} s")]
    Late {
        /// What was awaited.
        what: String,
        /// How long.
        seconds: u64,
    },
}

impl RecordError {
    pub(super) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
