// SPDX-License-Identifier: Apache-2.0
//! [`SlowTiers`]: the tiers outside memory of a daemon.

use super::retries::{Retries, RetryPauses};
use pagetide_tiers::{DiskId, SlowTier, Standing, TierKind};
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

/// All of them, in the order in which pages go down to them. One per daemon.
pub struct SlowTiers {
    seats: Vec<Seat>,
    pub(super) retries: Arc<Retries>,
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

    /// The same without a thread of its own: loads whose tier did not answer wait until [`Self::try_again`]. For
    /// whoever has a time of his own, such as a simulation.
    #[must_use]
    pub fn stepped(seats: Vec<Seat>) -> Arc<Self> {
        Arc::new(Self {
            seats,
            retries: Retries::new(RetryPauses::default()),
        })
    }

    /// Tries all loads again that wait; returns how many there were.
    pub fn try_again(&self) -> usize {
        self.retries.try_all()
    }

    /// Loads that wait until they are tried again.
    #[must_use]
    pub fn waiting_loads(&self) -> usize {
        self.retries.waiting()
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
