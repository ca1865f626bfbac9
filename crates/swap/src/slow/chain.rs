// SPDX-License-Identifier: Apache-2.0
//! [`ChainStore`]: a VM's pool and what it has in slow tiers, as one [`ContentStore`].

use super::{store::SlowStore, tiers::SlowTiers};
use crate::{
    store::{AdoptError, PoolStore},
    tier::{InSlow, Located},
};
use pagetide_addr::{PageNo, Tier};
use pagetide_gmem::{Content, ContentStore, LoadDone, StoreError};
use pagetide_sys::memory_file::FileError;
use std::{io, sync::Arc};

/// Why content that a dead daemon left cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// A word, or what it names.
    #[error(transparent)]
    Adopt(#[from] AdoptError),
    /// The pool's file.
    #[error(transparent)]
    File(#[from] FileError),
}

/// See the module. One per VM.
#[derive(Debug)]
pub struct ChainStore {
    pool: Arc<PoolStore>,
    /// `None` if the daemon has no slow tiers, or the pool is from before there were any.
    slow: Option<Arc<SlowStore>>,
}

impl ChainStore {
    /// The chain of a VM: `pool`, then `tiers`.
    #[must_use]
    pub fn new(pool: Arc<PoolStore>, tiers: &Arc<SlowTiers>) -> Arc<Self> {
        let slow = SlowStore::new(pool.pool(), tiers);
        Arc::new(Self { pool, slow })
    }

    /// What it has in the pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<PoolStore> {
        &self.pool
    }

    /// What it has in slow tiers, if there can be anything.
    #[must_use]
    pub fn slow(&self) -> Option<&Arc<SlowStore>> {
        self.slow.as_ref()
    }

    /// Records content that a dead predecessor stored.
    ///
    /// # Errors
    /// [`AdoptError`].
    pub fn adopt(&self, content: Content) -> Result<(), AdoptError> {
        match (in_slow(content), &self.slow) {
            (Some(place), Some(slow)) => slow.adopt(place),
            // The pool's store refuses what is in a slow tier.
            _ => self.pool.adopt(content),
        }
    }

    /// After the last [`Self::adopt`].
    ///
    /// # Errors
    /// [`ChainError`]. The VM must not be served then.
    pub fn finish_adoption(&self) -> Result<(), ChainError> {
        if let Some(slow) = &self.slow {
            slow.finish_adoption()?;
        }
        Ok(self.pool.finish_adoption()?)
    }
}

fn in_slow(content: Content) -> Option<InSlow> {
    match Located::of(content) {
        Ok(Located::Slow(place)) => Some(place),
        _ => None,
    }
}

impl ContentStore for ChainStore {
    fn load(
        &self,
        page: PageNo,
        content: Content,
        into: &mut [u8; 4096],
    ) -> Result<(), StoreError> {
        match in_slow(content) {
            None => self.pool.load(page, content, into),
            // Nobody may wait here.
            Some(_) => Err(StoreError::Unreadable {
                page,
                source: io::ErrorKind::WouldBlock.into(),
            }),
        }
    }

    fn load_later(&self, page: PageNo, content: Content, done: LoadDone) {
        match (in_slow(content), &self.slow) {
            (Some(place), Some(slow)) => slow.load_later(page, place, done),
            _ => {
                let mut bytes = [0; 4096];
                let loaded = self.load(page, content, &mut bytes);
                done.complete(loaded.map(|()| &bytes));
            }
        }
    }

    fn free(&self, content: Content) {
        match (in_slow(content), &self.slow) {
            (Some(place), Some(slow)) => slow.free(place),
            _ => self.pool.free(content),
        }
    }

    fn is_at_hand(&self, content: Content) -> bool {
        in_slow(content).is_none()
    }

    fn tier(&self, content: Content) -> Tier {
        self.pool.tier(content)
    }
}
