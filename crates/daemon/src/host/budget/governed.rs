// SPDX-License-Identifier: Apache-2.0
//! [`Governed`]: what the budget needs of a VM; and how a VM gives it.

use super::super::{core::VmCore, lock::lock};
use pagetide_addr::PAGE_BYTES;
use pagetide_policy::budget::{Bytes, Eviction, Heat, VmReport};
use std::sync::atomic::Ordering::Relaxed;

/// See the module.
pub(in crate::host) trait Governed: Send + Sync {
    /// As it is now, without the stalls of its VMM; `None` if that cannot be told, as at its end.
    fn measure(&self) -> Option<VmReport>;

    /// Its target is another: puts the limit that follows into force.
    fn enforce(&self);
}

impl Governed for VmCore {
    fn measure(&self) -> Option<VmReport> {
        let layout = self.layout.look();
        let (resident, stored) = match (layout.allocated_bytes(), self.pool.allocated_bytes()) {
            (Ok(resident), Ok(stored)) => (resident, stored),
            (Err(error), _) => {
                tracing::debug!(vm = self.name, %error, "how much is resident is unknown");
                return None;
            }
            (_, Err(error)) => {
                tracing::debug!(vm = self.name, %error, "how much its pool takes is unknown");
                return None;
            }
        };
        let tiers = self.store.counts();
        let kept = tiers.lz4_pages.load(Relaxed) + tiers.uncompressed_pages.load(Relaxed);
        let is_possible = self.may_evict() && !self.limit.is_stopped();
        Some(VmReport {
            ram: Bytes(layout.len_bytes()),
            resident: Bytes(resident),
            swapped: Bytes(kept.saturating_mul(PAGE_BYTES)),
            stored: Bytes(stored),
            heat: heat(&lock(&self.heat.last).sets),
            pressure: None,
            eviction: match is_possible {
                true => Eviction::Possible,
                false => Eviction::Blocked,
            },
        })
    }

    fn enforce(&self) {
        // A detach has lifted the limit and brings everything back.
        if self.limit.is_stopped() {
            return;
        }
        self.enforce_limit();
        self.limit.want_reclaim();
    }
}

/// Until the first sweep nothing is known, and all counts as in use.
fn heat(sets: &[(pagetide_policy::sets::Level, u64)]) -> Heat {
    sets.try_into().map(Heat::of_sections).unwrap_or_default()
}
