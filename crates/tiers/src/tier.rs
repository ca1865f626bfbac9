// SPDX-License-Identifier: Apache-2.0
//! [`SlowTier`]: what a store asks of a tier that answers later.
//!
//! # The way down
//! 1. [`SlowTier::make_room`] says in which extents the pages of a batch go, and where in them.
//! 2. The store takes an extent number and a new version for each, and seals the pages for their places.
//! 3. [`SlowTier::write`] writes the extent. Its duty is told `Ok` when a successor of this daemon, should it
//!    be killed, would read the pages back; from then on the store may name them in words.
//! 4. [`SlowTier::forget`] gives a page's place up, once no word names it and no read of it is under way.
//!
//! If a write fails, the room of its batch is the tier's again, once its I/O has ended; the store forgets
//! nothing of it.
//!
//! # The way up
//! [`SlowTier::read`] returns a page's sealed bytes: whatever stood there. Only the sealer tells whether
//! they are that page's.
//!
//! # Rules for a tier
//! - No call waits for the disk or the network. Where room takes time, `make_room` begins to make it, and
//!   says [`TierError::Busy`] until it is there.
//! - Each duty is told once, within a time bound, on a thread of the tier, which holds no lock of
//!   its own meanwhile. The bound of a read is long: a tier that is merely slow still delivers. A request that is refused outright is told within the call: so the caller holds no
//!   lock that its duty takes.
//! - All queues are bounded: what does not fit is refused with [`TierError::Busy`].

use crate::{Batch, Health, Place, Room, TierFigures, VmId};
use std::fmt;

/// The kinds of tier. The numbers are sealed with each page, so they never change.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TierKind {
    /// A file or block device of this host.
    Disk = 1,
    /// Memory of another host.
    Remote = 2,
}

impl fmt::Display for TierKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Disk => "disk",
            Self::Remote => "remote",
        })
    }
}

/// Why a tier did not do what it was asked.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TierError {
    /// It has no room for more. Reads work.
    #[error("the {0} tier is full")]
    Full(TierKind),
    /// It was not done within its time bound, or the tier has not recovered from such a request.
    #[error("the {kind} tier is slow: a request took more than {bound_ms} ms")]
    Slow {
        /// Which tier.
        kind: TierKind,
        /// The time bound.
        bound_ms: u64,
    },
    /// It cannot be reached, or has ended.
    #[error("the {kind} tier is gone: {reason}")]
    Gone {
        /// Which tier.
        kind: TierKind,
        /// What the kernel or the network reported.
        reason: String,
    },
    /// Its queue is full: try later.
    #[error("the {0} tier has as many requests as it takes at a time")]
    Busy(TierKind),
    /// The tier works, and does not have the page (any more).
    #[error("the {0} tier does not have this page")]
    NotThere(TierKind),
    /// This one request failed.
    #[error("{operation} of the {kind} tier failed: {reason}")]
    Io {
        /// Which tier.
        kind: TierKind,
        /// What it was to do.
        operation: &'static str,
        /// What the kernel or the server reported.
        reason: String,
    },
}

impl TierError {
    /// True if the same request may succeed once the tier has recovered, so that a fault may wait for it.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Slow { .. } | Self::Gone { .. } | Self::Busy(_))
    }
}

/// Pages that a dead daemon left cannot be in the tier.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the {kind} tier does not have what the VM's pool says: {why}")]
pub struct NotRecovered {
    /// Which tier.
    pub kind: TierKind,
    /// What contradicts what.
    pub why: String,
}

type Tell<T> = Box<dyn FnOnce(Result<T, TierError>) + Send>;

/// The duty to tell how a request ended. If it is dropped, its owner is told that the tier is gone.
pub struct Done<T> {
    kind: TierKind,
    tell: Option<Tell<T>>,
}

/// The duty to tell how a write ended.
pub type WriteDone = Done<()>;
/// The duty to hand over the sealed bytes of a page that was read.
pub type ReadDone = Done<Vec<u8>>;

impl<T> Done<T> {
    /// The duty to call `tell`, for a request to a tier of this kind.
    pub fn new(kind: TierKind, tell: impl FnOnce(Result<T, TierError>) + Send + 'static) -> Self {
        Self {
            kind,
            tell: Some(Box::new(tell)),
        }
    }

    /// Fulfils it.
    pub fn tell(mut self, result: Result<T, TierError>) {
        if let Some(tell) = self.tell.take() {
            tell(result);
        }
    }
}

impl<T> Drop for Done<T> {
    fn drop(&mut self) {
        if let Some(tell) = self.tell.take() {
            tell(Err(TierError::Gone {
                kind: self.kind,
                reason: "it has ended".to_owned(),
            }));
        }
    }
}

impl<T> fmt::Debug for Done<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Done")
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

/// A tier that answers later.
pub trait SlowTier: Send + Sync {
    /// What it is.
    fn kind(&self) -> TierKind;

    /// Sealed pages are padded to multiples of this, in bytes.
    fn granule_bytes(&self) -> usize;

    /// Room for pages whose sealed forms have these lengths, in order: each [`Room`] is an extent for the
    /// next pages. What is not used is given back by [`Self::give_back`].
    ///
    /// # Errors
    /// [`TierError::Full`], [`TierError::Busy`] if it is worth while to come again soon, or why the tier takes
    /// nothing now. Nothing is taken then.
    fn make_room(&self, vm: VmId, sealed_bytes: &[usize]) -> Result<Vec<Room>, TierError>;

    /// Gives back room of `vm` that no batch was written to.
    fn give_back(&self, vm: VmId, room: Room);

    /// Writes a batch.
    fn write(&self, batch: Batch, done: WriteDone);

    /// Reads the sealed bytes of one page.
    fn read(&self, place: Place, done: ReadDone);

    /// The pages at these places are not needed any more, and no read of them is under way.
    fn forget(&self, places: &[Place]);

    /// A VM that a dead daemon left is served again: all its pages in this tier are at these places.
    ///
    /// # Errors
    /// [`NotRecovered`]. The VM must not be served then.
    fn recover(&self, vm: VmId, places: &[Place]) -> Result<(), NotRecovered> {
        // A tier that keeps no record of places has nothing to compare with.
        let _unread = (vm, places);
        Ok(())
    }

    /// Nothing of these VMs' extents is needed any more, and no request for them is under way.
    fn forget_vm(&self, vm: VmId, extents: &[crate::ExtentName]);

    /// Whether another program would find it where this one has.
    ///
    /// # Errors
    /// [`TierError::Gone`]: something else is there now.
    fn is_found(&self) -> Result<(), TierError> {
        Ok(())
    }

    /// Whether it can be used now.
    fn health(&self) -> Health;

    /// What it has done so far.
    fn figures(&self) -> TierFigures;
}
