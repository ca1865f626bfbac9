// SPDX-License-Identifier: Apache-2.0
//! [`PoolTiers`]: the tiers whose content lies in pools, and how much each may hold of all VMs.
//!
//! A page enters at the first tier that takes it: lz4, and zstd if lz4 has reached its limit. What a tier
//! holds is what its content takes with CRCs, without the rest of slots: the sum over all VMs of a daemon.
//! Content that a dead daemon left counts, even beyond a limit.

use crate::tier::Form;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

const NO_LIMIT: u64 = u64::MAX;

/// Whether pages that stay cold are kept by zstd.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ZstdTier {
    /// They are not. What a predecessor has kept so is served all the same.
    Off,
    /// They are, up to this limit.
    On {
        /// The limit, if there is one.
        limit_bytes: Option<u64>,
    },
}

/// A tier has reached its limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the tier {tier} has reached its limit of {limit_bytes} bytes: raise it (--tiers), or lift it"
)]
pub struct TierFull {
    /// Its name.
    pub tier: &'static str,
    /// Its limit.
    pub limit_bytes: u64,
}

#[derive(Debug)]
struct TierRoom {
    name: &'static str,
    limit_bytes: u64,
    used_bytes: AtomicU64,
}

impl TierRoom {
    fn new(name: &'static str, limit_bytes: Option<u64>) -> Self {
        Self {
            name,
            limit_bytes: limit_bytes.unwrap_or(NO_LIMIT),
            used_bytes: AtomicU64::new(0),
        }
    }

    fn take(&self, bytes: u64) -> Result<(), TierFull> {
        // Relaxed: the counter guards no other memory.
        let taken = self.used_bytes.fetch_update(Relaxed, Relaxed, |used| {
            let next = used.checked_add(bytes)?;
            (next <= self.limit_bytes).then_some(next)
        });
        taken.map(|_| ()).map_err(|_| TierFull {
            tier: self.name,
            limit_bytes: self.limit_bytes,
        })
    }

    fn left_bytes(&self) -> u64 {
        match self.limit_bytes {
            NO_LIMIT => u64::MAX,
            limit_bytes => limit_bytes.saturating_sub(self.used_bytes.load(Relaxed)),
        }
    }
}

/// See the module. One per daemon.
#[derive(Debug)]
pub struct PoolTiers {
    lz4: TierRoom,
    zstd: TierRoom,
    is_zstd_used: bool,
}

impl PoolTiers {
    /// These tiers, with nothing in them.
    #[must_use]
    pub fn new(lz4_limit_bytes: Option<u64>, zstd: ZstdTier) -> Arc<Self> {
        let (is_zstd_used, zstd_limit_bytes) = match zstd {
            ZstdTier::Off => (false, None),
            ZstdTier::On { limit_bytes } => (true, limit_bytes),
        };
        Arc::new(Self {
            lz4: TierRoom::new("lz4", lz4_limit_bytes),
            zstd: TierRoom::new("zstd", zstd_limit_bytes),
            is_zstd_used,
        })
    }

    /// Whether pages that stay cold are kept by zstd.
    #[must_use]
    pub const fn uses_zstd(&self) -> bool {
        self.is_zstd_used
    }

    /// What the tier of `form` holds of all VMs, in bytes.
    #[must_use]
    pub fn used_bytes(&self, form: Form) -> u64 {
        self.room(form).used_bytes.load(Relaxed)
    }

    /// What new content may still take, in bytes; `u64::MAX` without a limit.
    pub(super) fn left_bytes(&self) -> u64 {
        let zstd = match self.is_zstd_used {
            true => self.zstd.left_bytes(),
            false => 0,
        };
        self.lz4.left_bytes().max(zstd)
    }

    const fn room(&self, form: Form) -> &TierRoom {
        match form {
            // What does not compress has no tier of its own in the pool.
            Form::Lz4 | Form::Uncompressed => &self.lz4,
            Form::Zstd => &self.zstd,
        }
    }

    pub(super) fn take(&self, form: Form, bytes: u64) -> Result<(), TierFull> {
        self.room(form).take(bytes)
    }

    /// Takes what a predecessor has stored.
    pub(super) fn take_existing(&self, form: Form, bytes: u64) {
        self.room(form).used_bytes.fetch_add(bytes, Relaxed);
    }

    pub(super) fn give_back(&self, form: Form, bytes: u64) {
        let before = self.room(form).used_bytes.fetch_sub(bytes, Relaxed);
        debug_assert!(before >= bytes, "{bytes} of {before} bytes given back");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tier_takes_up_to_its_limit_and_again_what_was_given_back() {
        let on = ZstdTier::On {
            limit_bytes: Some(50),
        };
        let tiers = PoolTiers::new(Some(100), on);
        assert!(tiers.uses_zstd());
        assert_eq!(tiers.take(Form::Lz4, 60), Ok(()));
        assert_eq!(tiers.take(Form::Uncompressed, 40), Ok(()));
        let full = TierFull {
            tier: "lz4",
            limit_bytes: 100,
        };
        assert_eq!(tiers.take(Form::Lz4, 1), Err(full));
        assert_eq!(tiers.left_bytes(), 50);
        assert_eq!(tiers.take(Form::Zstd, 50), Ok(()));
        assert!(tiers.take(Form::Zstd, 1).is_err());
        assert_eq!(tiers.left_bytes(), 0);
        tiers.give_back(Form::Uncompressed, 40);
        assert_eq!(tiers.take(Form::Lz4, 40), Ok(()));
        // What a predecessor left counts, whatever the limit.
        tiers.take_existing(Form::Zstd, 500);
        assert_eq!(tiers.used_bytes(Form::Zstd), 550);
    }

    #[test]
    fn without_limits_there_is_always_room_and_without_zstd_only_that_of_lz4() {
        let tiers = PoolTiers::new(None, ZstdTier::Off);
        assert_eq!(tiers.left_bytes(), u64::MAX);
        assert_eq!(tiers.take(Form::Lz4, 1 << 60), Ok(()));
        let tiers = PoolTiers::new(Some(10), ZstdTier::Off);
        assert!(!tiers.uses_zstd());
        assert_eq!(tiers.left_bytes(), 10);
    }
}
