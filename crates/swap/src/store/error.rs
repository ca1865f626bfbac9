// SPDX-License-Identifier: Apache-2.0
//! Why content cannot be stored, or taken over from a dead daemon.

use super::tiers::TierFull;
use crate::{pool::CapReached, room::Shortage, slots::SlotError, tier::UnknownContent};
use pagetide_tiers::{NotRecovered, TierKind, table::NumberError};

/// Why content cannot be stored.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PutError {
    /// The cap of all pools is reached.
    #[error("the pool is full: {0}; only pages of zeros are evicted until then")]
    Cap(#[from] CapReached),
    /// The tiers of the pool have reached their limits.
    #[error("the pool is full: {0}; only pages of zeros are evicted until then")]
    Tier(#[from] TierFull),
    /// The tmpfs has no room left, or the pool has reached its size.
    #[error(
        "the pool is full ({used_bytes} bytes of content): make its tmpfs larger or raise the VM's limit; only pages of \
         zeros are evicted until then"
    )]
    Full {
        /// Bytes of content stored.
        used_bytes: u64,
    },
    /// The daemon's memory cgroup has no room left.
    #[error(transparent)]
    Group(#[from] Shortage),
    /// The pool's file failed.
    #[error("the pool cannot be written: {0}")]
    File(String),
}

impl PutError {
    /// True if there is no room, so that pages of zeros can still be evicted.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        match self {
            Self::Cap(_) | Self::Tier(_) | Self::Full { .. } | Self::Group(_) => true,
            Self::File(_) => false,
        }
    }
}

/// Why content that a dead predecessor stored cannot be there.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdoptError {
    /// A word names an impossible place.
    #[error(transparent)]
    Slot(#[from] SlotError),
    /// A word names no place.
    #[error(transparent)]
    Unknown(#[from] UnknownContent),
    /// It is in a tier that this daemon does not have.
    #[error(
        "its content is in the {0} tier, which this daemon was started without: start it with the --tiers of before"
    )]
    NoTier(TierKind),
    /// It is on another disk.
    #[error(
        "its content is on another disk than the one named in --tiers (a new file, or that of another host): start \
         the daemon with the one of before"
    )]
    OtherDisk,
    /// The table of extents does not have its extent.
    #[error("its content is in extent {0}, which the pool does not know")]
    NoExtent(u32),
    /// A word names an impossible extent.
    #[error(transparent)]
    Number(#[from] NumberError),
    /// The tier cannot have it.
    #[error(transparent)]
    Tier(#[from] NotRecovered),
}
