// SPDX-License-Identifier: Apache-2.0
//! [`HandoverError`].

use std::io;

/// Why a message was not sent, or not understood.
#[derive(Debug, thiserror::Error)]
pub enum HandoverError {
    /// The other side has ended.
    #[error("it has ended")]
    HungUp,
    /// The other side does not answer, or does not read.
    #[error("it did not answer within {waited_ms} ms")]
    TimedOut {
        /// How long it was waited for.
        waited_ms: u64,
    },
    /// The kernel's error.
    #[error("its socket: {0}")]
    Socket(#[from] io::Error),
    /// A packet is not one of ours.
    #[error("what it sent is not a hand-over message: {what}")]
    Packet {
        /// What is wrong with it.
        what: &'static str,
    },
    /// A message is too long, or has too many descriptors.
    #[error("a hand-over message has {found} {what}, and at most {most} are possible")]
    TooMuch {
        /// What there is too much of.
        what: &'static str,
        /// How much there is.
        found: u64,
        /// How much there may be.
        most: u64,
    },
    /// It is no JSON, or lacks a field.
    #[error("a hand-over message makes no sense: {0}")]
    Content(#[from] serde_json::Error),
    /// Another message was expected.
    #[error("it said {found} where {wanted} was expected")]
    Unexpected {
        /// The message that came.
        found: &'static str,
        /// The message that should have come.
        wanted: &'static str,
    },
    /// A message names a descriptor that did not come with it, or names it twice.
    #[error(
        "a hand-over message names descriptor {index}, which did not come with it or was named before"
    )]
    Descriptor {
        /// The number in the message.
        index: u32,
    },
}
