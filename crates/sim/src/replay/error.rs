// SPDX-License-Identifier: Apache-2.0
//! Why a replay gives no result.

use pagetide_trace::TraceError;
use std::time::Duration;

/// Why a replay gives no result.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A trace is broken or cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// An access lies outside the VM.
    #[error(
        "access {access} touches section {section}, but the VM has {sections} sections; \
         give it more memory"
    )]
    Outside {
        /// Number of the access in its stream, from 0.
        access: u64,
        /// What it touches.
        section: u64,
        /// How many there are.
        sections: u64,
    },
    /// Time runs backwards.
    #[error("access {access} is at {at:?}, after one at {before:?}: times must not run backwards")]
    Backwards {
        /// Number of the access in its stream, from 0.
        access: u64,
        /// Its time.
        at: Duration,
        /// Time of the one before.
        before: Duration,
    },
    /// A request to a disk that no guest would make.
    #[error(
        "request {request} asks for {len_bytes} bytes at byte {offset_bytes} of disk {disk}; \
         a replay takes at most {max_bytes} bytes at once"
    )]
    Request {
        /// Its number in the trace, from 0.
        request: u64,
        /// The disk.
        disk: u32,
        /// Where.
        offset_bytes: u64,
        /// How much.
        len_bytes: u64,
        /// The most that is taken.
        max_bytes: u64,
    },
    /// An access log touches memory that its VM does not have.
    #[error(
        "record {record} of the log of {vm} touches {len_bytes} bytes at {address:#x}, but the VM has \
         {memory_bytes} bytes of memory; give it more"
    )]
    Address {
        /// The VM.
        vm: String,
        /// Number of the record in the log, from 0.
        record: u64,
        /// Where.
        address: u64,
        /// How much.
        len_bytes: u64,
        /// What there is.
        memory_bytes: u64,
    },
    /// What was asked for cannot be replayed.
    #[error("{0}")]
    Asked(String),
}
