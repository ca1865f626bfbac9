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
        let swapped = kept.saturating_mul(PAGE_BYTES);
        let is_possible =
            self.may_evict() && !self.limit.is_stopped() && is_worth_it(swapped, stored);
        Some(VmReport {
            ram: Bytes(layout.len_bytes()),
            resident: Bytes(resident),
            swapped: Bytes(swapped),
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

/// What is stored of a VM is judged from this much on.
const JUDGED_BYTES_MIN: u64 = 64 << 20;

/// Until the first sweep nothing is known, and all counts as in use.
fn heat(sets: &[(pagetide_policy::sets::Level, u64)]) -> Heat {
    sets.try_into().map(Heat::of_sections).unwrap_or_default()
}

/// False if what is stored of a VM takes as much memory as it did before: more of that frees nothing, and a
/// budget would take all of the VM's memory in vain.
fn is_worth_it(swapped_bytes: u64, stored_bytes: u64) -> bool {
    swapped_bytes < JUDGED_BYTES_MIN || stored_bytes / 95 < swapped_bytes / 100
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_does_not_compress_is_left_alone_once_enough_of_it_is_known() {
        const GIB: u64 = 1 << 30;
        assert!(is_worth_it(0, 4 << 20), "words of an empty pool");
        assert!(is_worth_it(JUDGED_BYTES_MIN - 1, GIB));
        assert!(is_worth_it(GIB, GIB / 3));
        assert!(is_worth_it(GIB, GIB / 100 * 90));
        assert!(!is_worth_it(GIB, GIB / 100 * 96));
        assert!(!is_worth_it(GIB, GIB / 15 * 16));
    }
}
