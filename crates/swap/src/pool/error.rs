// SPDX-License-Identifier: Apache-2.0
//! Why a pool cannot be used.

use super::{charge::CapReached, format::PAGES_MAX};
use pagetide_sys::{mapping::MappingError, memory_file::FileError};
use pagetide_tiers::seal::NoRandomBytes;
use std::path::PathBuf;

/// Why a pool cannot be created or used.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A system call on the pool's path failed.
    #[error("pool {path}: {operation} failed: {source}")]
    Path {
        /// The file.
        path: PathBuf,
        /// What was tried.
        operation: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Memory could not be allocated to the file, or another operation on it failed.
    #[error("pool {path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: FileError,
    },
    /// The file could not be mapped.
    #[error("pool {path}: {source}")]
    Map {
        /// The file.
        path: PathBuf,
        /// Why.
        source: MappingError,
    },
    /// It is not on tmpfs.
    #[error(
        "pool {0} is not on tmpfs: it must survive the daemon but not the host; choose a state directory on tmpfs, such as one under /dev/shm"
    )]
    NotTmpfs(PathBuf),
    /// A pool exists already.
    #[error(
        "pool {0} exists already: it holds the evicted pages of a VM that could not be recovered; restart the daemon to \
         try again, or remove the file when that VM is gone"
    )]
    Exists(PathBuf),
    /// Another daemon has it.
    #[error("pool {0} is in use by another daemon")]
    InUse(PathBuf),
    /// It is not a pool, or a damaged one.
    #[error("pool {path} cannot be used: {why}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// No key could be drawn for it.
    #[error(transparent)]
    NoKey(#[from] NoRandomBytes),
    /// The cap of all pools does not allow it.
    #[error(transparent)]
    Cap(#[from] CapReached),
    /// The VM is larger than a pool can describe.
    #[error("{0} pages are more than a pool can hold ({PAGES_MAX})")]
    TooLarge(u64),
    /// The identity does not fit.
    #[error("identity of {0} bytes does not fit into a pool's header")]
    IdentityTooLong(usize),
}

/// Why an extent cannot be entered.
#[derive(Debug, thiserror::Error)]
pub enum ExtentError {
    /// The table has no such place.
    #[error("extent {number} is past the end of a table of {capacity}")]
    PastTheEnd {
        /// Its number.
        number: u32,
        /// Extents in the table.
        capacity: u32,
    },
    /// The version is 0, which marks a free entry.
    #[error("extent {0} has no version")]
    NoVersion(u32),
    /// It begins at a sector that no disk has.
    #[error("extent {0} begins past the end of any disk")]
    TooFar(u32),
    /// The cap of all pools allows no memory for more of the table.
    #[error(transparent)]
    Cap(#[from] CapReached),
    /// There is no memory for more of the table.
    #[error(transparent)]
    File(#[from] FileError),
}
