// SPDX-License-Identifier: Apache-2.0
//! Tiers outside memory (disk, remote) under a VM's pool.
//!
//! ```text
//!   fault ─► PagedMemory ─► ChainStore ─┬─ PoolStore                     at hand
//!                                       └─ SlowStore ─► SlowTier ─► disk later
//!                                              ▲
//!   pages left alone for long ─► Sinker ───────┘        by batches of a section
//! ```
//! - [`SlowTiers`]: the tiers of a daemon, in their order, and what becomes of pages whose tier is gone.
//! - [`SlowStore`]: what one VM has in them: seals, extents, loads ([`load`]).
//! - [`ChainStore`]: pool and slow tiers together, as an address space needs them.
//! - [`Sinker`]: moves the stored pages of a section down.
//!
//! # What is sealed
//! The *stored form*, as it was in the pool, with its CRC, behind one byte that tells the form. So a page is
//! packed once, and comes back by two checks: the seal (it is this page, as it was stored last), and the CRC
//! (nothing happened to it before it was sealed).
//!
//! # Who has a page at each death
//! ```text
//!   versions reserved ─► batch written, acknowledged ─► extent entered ─► word changed ─► slot freed
//!   word: pool          pool                           pool             tier            tier
//! ```
//! A successor clears entries that no word names, and then frees their room. Content in the pool that no
//! word names is free to it anyway.

mod chain;
mod load;
mod retries;
mod sinker;
mod store;
#[cfg(test)]
mod tests;

pub use chain::{ChainError, ChainStore};
pub use retries::RetryPauses;
pub use sinker::{SinkStop, Sinker, Sunk};
pub use store::{SlowCounts, SlowStore, forget};

use crate::tier::Form;
use pagetide_tiers::{DiskId, SlowTier, Standing, TierKind};
use retries::Retries;
use std::{fmt, io, sync::Arc};

/// What becomes of a page that is needed while its tier is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum WhenGone {
    /// The fault waits until the tier is back.
    #[default]
    Wait,
    /// The page is lost, and accesses to it fail.
    Lost,
}

/// A tier, and what the operator has chosen for it.
#[derive(Clone)]
pub struct Seat {
    /// The tier.
    pub tier: Arc<dyn SlowTier>,
    /// What becomes of its pages while it is gone.
    pub when_gone: WhenGone,
    /// Of a disk: which one it is.
    pub disk: Option<DiskId>,
}

/// See the module. One per daemon.
pub struct SlowTiers {
    seats: Vec<Seat>,
    retries: Arc<Retries>,
}

impl fmt::Debug for SlowTiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = self.seats.iter().map(|seat| seat.tier.kind());
        f.debug_list().entries(kinds).finish()
    }
}

impl SlowTiers {
    /// These tiers, in the order in which pages go down to them, at most one of a kind.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn new(seats: Vec<Seat>, pauses: RetryPauses) -> io::Result<Arc<Self>> {
        let retries = Retries::new(pauses);
        if !seats.is_empty() {
            Retries::start(&retries)?;
        }
        Ok(Arc::new(Self { seats, retries }))
    }

    /// No tier.
    #[must_use]
    pub fn none() -> Arc<Self> {
        Arc::new(Self {
            seats: Vec::new(),
            retries: Retries::new(RetryPauses::default()),
        })
    }

    /// True if there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.seats.is_empty()
    }

    /// All, in their order.
    #[must_use]
    pub fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// The tier of this kind.
    #[must_use]
    pub fn seat(&self, kind: TierKind) -> Option<&Seat> {
        self.seats.iter().find(|seat| seat.tier.kind() == kind)
    }

    /// True if one of them takes pages.
    #[must_use]
    pub fn takes_pages(&self) -> bool {
        let works = |seat: &Seat| seat.tier.health().standing == Standing::Working;
        self.seats.iter().any(works)
    }
}

impl Drop for SlowTiers {
    fn drop(&mut self) {
        self.retries.end();
    }
}

/// What is sealed begins with this, so the numbers never change.
const fn byte_of(form: Form) -> u8 {
    match form {
        Form::Lz4 => 1,
        Form::Uncompressed => 2,
        Form::Zstd => 3,
    }
}

const fn form_of(byte: u8) -> Option<Form> {
    match byte {
        1 => Some(Form::Lz4),
        2 => Some(Form::Uncompressed),
        3 => Some(Form::Zstd),
        _ => None,
    }
}
