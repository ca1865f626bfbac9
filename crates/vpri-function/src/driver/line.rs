// SPDX-License-Identifier: Apache-2.0
//! Whether a connection is still up: all its users check this before they wait.
//!
//! A caller that finds the device in breach of the protocol breaks the line off. From
//! then on no thread waits for the device; the link's thread sees the socket close
//! and cleans up.

use super::counts::Counts;
use std::{
    io,
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::{Arc, OnceLock},
};

/// The device is gone, or was given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the connection to the DPU is gone")]
pub(crate) struct Gone;

/// See the module.
#[derive(Debug)]
pub(crate) struct Line {
    stream: UnixStream,
    /// Why it is down.
    why: OnceLock<String>,
    counts: Arc<Counts>,
}

impl Line {
    /// A line that is up.
    pub(crate) fn new(stream: UnixStream, counts: Arc<Counts>) -> Self {
        Self {
            stream,
            why: OnceLock::new(),
            counts,
        }
    }

    /// The socket, to be watched.
    pub(crate) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// The driver's counters.
    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// An error if it is down.
    pub(crate) fn check(&self) -> Result<(), Gone> {
        match self.why.get() {
            None => Ok(()),
            Some(_) => Err(Gone),
        }
    }

    /// Why it is down, if it is.
    pub(crate) fn why(&self) -> Option<&str> {
        self.why.get().map(String::as_str)
    }

    /// The other side has hung up.
    pub(crate) fn ended(&self, why: &str) {
        // Only the first reason counts.
        self.why.get_or_init(|| why.to_owned());
        self.hang_up();
    }

    /// Gives up the device, because of what it did.
    pub(crate) fn break_off(&self, why: &dyn std::fmt::Display) {
        self.why.get_or_init(|| {
            self.counts.broken_off.add();
            tracing::error!("giving up the connection to the DPU: {why}");
            why.to_string()
        });
        self.hang_up();
    }

    fn hang_up(&self) {
        if let Err(error) = self.stream.shutdown(Shutdown::Both)
            && error.kind() != io::ErrorKind::NotConnected
        {
            tracing::debug!(%error, "shutting down the connection to the DPU");
        }
    }
}
