// SPDX-License-Identifier: Apache-2.0
//! Whether a tier can be used.

use crate::{TierError, TierKind};
use std::time::Instant;

/// How a tier stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It takes batches and returns pages.
    Working,
    /// A request took longer than its bound: it is sent no batches until it has recovered.
    Slow {
        /// The bound.
        bound_ms: u64,
    },
    /// It returns pages and has no room for more.
    Full,
    /// It cannot be reached.
    Gone {
        /// What the kernel or the network reported.
        reason: String,
    },
}

/// How a tier stands, and since when.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Health {
    /// How it stands.
    pub standing: Standing,
    /// Since when.
    pub since: Instant,
}

impl Health {
    /// Why a batch would be refused now, if it would.
    #[must_use]
    pub fn refusal(&self, kind: TierKind) -> Option<TierError> {
        match &self.standing {
            Standing::Working => None,
            Standing::Slow { bound_ms } => Some(TierError::Slow {
                kind,
                bound_ms: *bound_ms,
            }),
            Standing::Full => Some(TierError::Full(kind)),
            Standing::Gone { reason } => Some(TierError::Gone {
                kind,
                reason: reason.clone(),
            }),
        }
    }
}
