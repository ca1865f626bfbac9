// SPDX-License-Identifier: Apache-2.0
//! Why a run gives no result.

use pagetide_access_log::TraceError;

/// Why a run gives no result.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// The trace is broken or cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A parameter is impossible.
    #[error("{parameter} = {value}: {reason}")]
    Parameter {
        /// Its name in a study file.
        parameter: &'static str,
        /// Its value.
        value: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A parameter is set that flavour *hypersio* ignores.
    #[error(
        "{parameter}: flavour hypersio does as the authors' program, which has no such setting; \
         leave it out, or take flavour 'paper'"
    )]
    NotHeeded {
        /// Its name in a study file.
        parameter: &'static str,
    },
    /// The trace exceeds a limit of the model.
    #[error("request {request} of the trace: {reason}")]
    Request {
        /// Its number among the translation requests, from 0.
        request: u64,
        /// What is wrong.
        reason: String,
    },
    /// A policy of the caller's own did what it may not.
    #[error("policy of {part}: {reason}")]
    Policy {
        /// The part that it decides for.
        part: &'static str,
        /// What it did.
        reason: String,
    },
    /// The authors' program never ends on this trace with this configuration.
    #[error(
        "the request for {iova:#x} is for a 1 GiB page that hits the L2 page cache: the authors' program \
         loses such a request and waits for it for ever; use flavour 'paper'"
    )]
    NeverEnds {
        /// Requested address.
        iova: u64,
    },
}

/// An impossible value of `parameter`.
pub(crate) fn impossible(
    parameter: &'static str,
    value: impl std::fmt::Display,
    reason: &str,
) -> SimError {
    SimError::Parameter {
        parameter,
        value: value.to_string(),
        reason: reason.to_owned(),
    }
}
