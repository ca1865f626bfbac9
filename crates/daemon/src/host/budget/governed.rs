// SPDX-License-Identifier: Apache-2.0
//! [`Governed`]: what the budget needs of a VM; and how a VM gives it.

use super::super::{core::VmCore, lock::lock};
use pagetide_addr::PAGE_BYTES;
use pagetide_policy::budget::{Bytes, Eviction, Heat, VmReport};
use pagetide_swap::store::TierCounts;
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
        let kept = Kept::of(self.store.counts(), stored);
        let is_possible = self.may_evict() && !self.limit.is_stopped() && kept.frees_memory();
        Some(VmReport {
            ram: Bytes(layout.len_bytes()),
            resident: Bytes(resident),
            heat: heat(&lock(&self.heat.last).sets),
            pressure: None,
            eviction: match is_possible {
                true => Eviction::Possible,
                false => Eviction::Blocked,
            },
            ..kept.report()
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

/// What is stored of a VM.
struct Kept {
    /// As the guest counts it.
    swapped_bytes: u64,
    /// Its content, compressed.
    content_bytes: u64,
    /// All of its pool: content with what fragmentation loses, and the words of all its RAM.
    pool_bytes: u64,
}

impl Kept {
    fn of(tiers: &TierCounts, pool_bytes: u64) -> Self {
        Self {
            swapped_bytes: tiers.pages().saturating_mul(PAGE_BYTES),
            content_bytes: tiers.stored_bytes.load(Relaxed),
            pool_bytes,
        }
    }

    /// False if what is stored of a VM takes as much memory as it did before: more of that frees nothing, and
    /// a budget would take all of the VM's memory in vain. Only content tells: the words of a VM of 64 GiB are
    /// 128 MiB, whatever is evicted, and a chunk that is empty now takes the next content.
    fn frees_memory(&self) -> bool {
        self.swapped_bytes < JUDGED_BYTES_MIN || self.content_bytes / 95 < self.swapped_bytes / 100
    }

    /// A report of this alone.
    fn report(&self) -> VmReport {
        VmReport {
            swapped: Bytes(self.swapped_bytes),
            content: Bytes(self.content_bytes),
            stored: Bytes(self.pool_bytes),
            ..VmReport::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::SECTION_BYTES;
    use std::sync::atomic::AtomicU64;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    /// Of a VM with a page of words for each section.
    fn kept(ram_bytes: u64, swapped_bytes: u64, content_bytes: u64) -> Kept {
        let words_bytes = ram_bytes / SECTION_BYTES * PAGE_BYTES;
        let tiers = TierCounts {
            lz4_pages: AtomicU64::new(swapped_bytes / PAGE_BYTES),
            stored_bytes: AtomicU64::new(content_bytes),
            ..TierCounts::default()
        };
        Kept::of(&tiers, words_bytes + content_bytes)
    }

    #[test]
    fn memory_that_does_not_compress_is_left_alone_once_enough_of_it_is_known() {
        let frees = |swapped, content| kept(GIB, swapped, content).frees_memory();
        assert!(frees(0, 0));
        assert!(frees(JUDGED_BYTES_MIN - PAGE_BYTES, GIB));
        assert!(frees(GIB, GIB / 3));
        assert!(frees(GIB, GIB / 100 * 90));
        assert!(!frees(GIB, GIB / 100 * 96));
        assert!(!frees(GIB, GIB / 15 * 16));
    }

    #[test]
    fn page_words_of_a_large_vm_are_no_content_that_does_not_compress() {
        let large = kept(64 * GIB, 64 * MIB, 16 * MIB);
        assert!(large.pool_bytes > 2 * large.swapped_bytes);
        assert!(large.frees_memory());
        let report = large.report();
        assert_eq!(
            report.stored,
            Bytes::mib(128 + 16),
            "the sum counts all of it"
        );
        assert_eq!(
            (report.swapped, report.content),
            (Bytes::mib(64), Bytes::mib(16))
        );
        assert!(!kept(64 * GIB, 64 * MIB, 64 * MIB).frees_memory());
    }
}
