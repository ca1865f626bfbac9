// SPDX-License-Identifier: Apache-2.0
//! The limit of open files of this process.
//!
//! Shells and service managers start processes with a soft limit of 1024 or less, for programs that use
//! `select`; the hard limit is much higher. A process that may need more files raises the soft limit
//! itself.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Open files that a process with one engine needs at least. An engine's io_uring has a table of files,
/// and the kernel refuses a table larger than the limit.
pub const FILES_MIN: u64 = 512;

/// The error if the limit is too low.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "this process may have {found} files open, and at least {FILES_MIN} are needed, {FILES_MIN} for the table of an \
     engine alone: raise the hard limit (ulimit -Hn; LimitNOFILE= in a systemd unit; --ulimit nofile= of a container)"
)]
pub struct TooFew {
    /// The limit.
    pub found: u64,
}

/// Raises the soft limit to the hard one.
///
/// # Errors
/// [`TooFew`], if that is still too low.
pub fn raise_limit() -> Result<(), TooFew> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, "the limit on open files could not be raised");
        }
    }
    // None means that there is no limit.
    match getrlimit(Resource::Nofile).current {
        Some(found) if found < FILES_MIN => Err(TooFew { found }),
        _ => Ok(()),
    }
}
