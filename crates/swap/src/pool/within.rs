// SPDX-License-Identifier: Apache-2.0
//! A pool within the cap of all pools: what it takes is charged before it is allocated, and given back
//! when it is freed.

use super::{
    Pool,
    charge::{CapReached, Charge, PoolCap},
    error::PoolError,
    file::remove_quietly,
    format::Cell,
};
use pagetide_sys::memory_file::FileError;
use std::sync::{Arc, atomic::Ordering};

impl Pool {
    /// From now on the pool, which was just created, is charged to `cap`.
    ///
    /// # Errors
    /// [`PoolError::Cap`]: what it has taken already is more than the cap allows; [`PoolError::File`].
    /// The pool is removed then.
    pub fn within(self, cap: &Arc<PoolCap>) -> Result<Self, PoolError> {
        let charge = (self.known_bytes()).and_then(|bytes| Ok(Charge::new(cap, bytes)?));
        match charge {
            Ok(charge) => Ok(self.charged(charge)),
            Err(error) => {
                remove_quietly(&self.path);
                Err(error)
            }
        }
    }

    /// From now on the pool, which a dead daemon left, is charged to `cap`, even beyond it.
    ///
    /// # Errors
    /// [`PoolError::File`].
    pub fn found_within(self, cap: &Arc<PoolCap>) -> Result<Self, PoolError> {
        let bytes = self.known_bytes()?;
        Ok(self.charged(Charge::existing(cap, bytes)))
    }

    fn charged(self, charge: Charge) -> Self {
        let peak = self.cell(Cell::PeakBytes);
        peak.fetch_max(charge.bytes(), Ordering::Relaxed);
        Self { charge, ..self }
    }

    fn known_bytes(&self) -> Result<u64, PoolError> {
        let bytes = self.file.allocated_bytes();
        bytes.map_err(|source| PoolError::File {
            path: self.path.clone(),
            source,
        })
    }

    /// The cap of all pools.
    #[must_use]
    pub fn cap(&self) -> &Arc<PoolCap> {
        self.charge.cap()
    }

    /// What the pool takes, by its own account: what it has allocated, or is about to.
    #[must_use]
    pub fn charged_bytes(&self) -> u64 {
        self.charge.bytes()
    }

    /// The most bytes that the pool has taken since it was created.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.cell(Cell::PeakBytes).load(Ordering::Relaxed)
    }

    /// What content may still take of the cap; `u64::MAX` without one.
    #[must_use]
    pub fn cap_left_bytes(&self) -> u64 {
        self.charge.left_bytes()
    }

    /// The pool's part of the cap, by weight; `u64::MAX` without a cap.
    #[must_use]
    pub fn share_bytes(&self) -> u64 {
        self.charge.share_bytes()
    }

    /// The VM's weight, by which pools share the cap.
    pub fn set_weight(&self, weight: u32) {
        self.charge.set_weight(weight);
    }

    /// Takes `bytes` that are about to be allocated for content from the cap.
    pub(crate) fn take_for_content(&self, bytes: u64) -> Result<(), CapReached> {
        self.charge
            .take_for_content(bytes)
            .map(|taken| self.took(taken))
    }

    /// Takes `bytes` that are about to be allocated for page words from the cap.
    pub(crate) fn take_for_words(&self, bytes: u64) -> Result<(), CapReached> {
        self.charge.take(bytes).map(|taken| self.took(taken))
    }

    fn took(&self, taken_bytes: u64) {
        self.cell(Cell::PeakBytes)
            .fetch_max(taken_bytes, Ordering::Relaxed);
    }

    /// Gives back what was taken and is no longer allocated.
    pub(crate) fn give_back(&self, bytes: u64) {
        self.charge.give_back(bytes);
    }

    /// Gives back what is charged and not allocated: content of a dead daemon that no word names.
    pub(crate) fn settle_charge(&self) -> Result<(), FileError> {
        let surplus = self.charge.bytes().saturating_sub(self.allocated_bytes()?);
        self.charge.give_back(surplus);
        Ok(())
    }

    /// The tmpfs that the pool is on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn tmpfs_room(&self) -> std::io::Result<TmpfsRoom> {
        let tmpfs = rustix::fs::fstatvfs(&self.file)?;
        Ok(TmpfsRoom {
            left_bytes: tmpfs.f_bavail * tmpfs.f_frsize,
            len_bytes: tmpfs.f_blocks * tmpfs.f_frsize,
        })
    }
}

/// A tmpfs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TmpfsRoom {
    /// Memory that could still be allocated on it.
    pub left_bytes: u64,
    /// Its size.
    pub len_bytes: u64,
}
