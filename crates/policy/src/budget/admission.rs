// SPDX-License-Identifier: Apache-2.0
//! [`Gate`]: whether a fill may go ahead, decided in the path of the fault.
//!
//! Targets are decided once a period; between two periods fills and stored content use memory up. So
//! each fill is compared with what is free at that moment:
//!
//! | the VM after the fill | the budget after the fill | |
//! |---|---|---|
//! | within its floor | anything | goes ahead: that memory was promised |
//! | within its target | min is still free | goes ahead |
//! | else | | the VM evicts of its own coldest first, as much as is missing, within a bound |
//!
//! After that the fill goes ahead while the budget itself still has room: min is kept for that. Where
//! it has none ([`Gate::is_spent`]) the fill waits for other VMs to give some, but not for ever, since a guest
//! that waits is of no use. So what is being filled is all by which a budget is exceeded, and the next
//! fill makes it good.

use super::units::{Bytes, Permille};
use pagetide_addr::PAGE_BYTES;

/// Most that one fill evicts beyond its own size: it takes some tens of microseconds.
pub const DIRECT_MAX: Bytes = Bytes(64 * PAGE_BYTES);
/// What a byte evicted frees is never taken for less than this, however badly content compresses:
/// the bound above is reached anyway.
const SAVING_MIN: Permille = Permille(125);
/// What a byte evicted frees in a VM of which nothing is stored yet.
const SAVING_UNKNOWN: Permille = Permille(500);

/// What a fill of one VM is measured by, until the next step. Small and `Copy`, so that it can stand
/// where faults read it without a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gate {
    /// The budget.
    pub budget: Bytes,
    /// Its min watermark.
    pub min: Bytes,
    /// The VM's target.
    pub target: Bytes,
    /// Its floor.
    pub floor: Bytes,
    /// What is freed by evicting, as a share of what is evicted.
    pub saving: Permille,
}

/// A fill that is about to begin, and how things stand at that moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fill {
    /// Size of the fill.
    pub bytes: Bytes,
    /// Resident memory of the VM.
    pub resident: Bytes,
    /// Resident memory of all VMs and all that is stored.
    pub host_used: Bytes,
}

/// The answer to a fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// It may go ahead.
    Proceed,
    /// It may, at the cost of the memory that is kept for it: others must be reclaimed from soon.
    ProceedOnFloor,
    /// The VM first evicts so much of its own coldest memory, or as much of that as stands ready.
    ReclaimFirst(Bytes),
}

impl Gate {
    /// See the module.
    #[must_use]
    pub fn admit(&self, fill: &Fill) -> Admission {
        let resident = fill.resident + fill.bytes;
        let missing = (fill.host_used + fill.bytes + self.min).less(self.budget);
        if missing == Bytes::ZERO && resident <= self.target {
            return Admission::Proceed;
        }
        if resident <= self.floor {
            return if missing == Bytes::ZERO {
                Admission::Proceed
            } else {
                Admission::ProceedOnFloor
            };
        }
        let for_the_host = missing.part(1000, u64::from(self.saving.max(SAVING_MIN).0));
        let wanted = for_the_host.max(resident.less(self.target));
        let bytes = wanted
            .min(fill.bytes + DIRECT_MAX)
            .min(resident.less(self.floor));
        Admission::ReclaimFirst(bytes)
    }

    /// Whether the fill would exceed the budget itself, and is of memory that was not promised.
    #[must_use]
    pub fn is_spent(&self, fill: &Fill) -> bool {
        fill.host_used + fill.bytes > self.budget && fill.resident + fill.bytes > self.floor
    }
}

/// What a byte evicted frees in a VM, going by the content of what was evicted so far. Metadata is no part of
/// that: it is there whatever is evicted.
pub(super) fn saving(swapped: Bytes, content: Bytes) -> Permille {
    if swapped == Bytes::ZERO {
        return SAVING_UNKNOWN;
    }
    let share = swapped.less(content).part(1000, swapped.0).0;
    Permille(u16::try_from(share).unwrap_or(1000)).max(SAVING_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATE: Gate = Gate {
        budget: Bytes::mib(1000),
        min: Bytes::mib(10),
        target: Bytes::mib(100),
        floor: Bytes::mib(50),
        saving: Permille(500),
    };
    const PAGE: Bytes = Bytes(PAGE_BYTES);

    fn fill(resident: Bytes, host_used: Bytes) -> Fill {
        Fill {
            bytes: PAGE,
            resident,
            host_used,
        }
    }

    fn admit(resident: Bytes, host_used: Bytes) -> Admission {
        GATE.admit(&fill(resident, host_used))
    }

    #[test]
    fn fill_goes_ahead_while_min_stays_free_and_the_target_is_kept() {
        let last = Bytes::mib(990).less(PAGE);
        assert_eq!(admit(Bytes::mib(99), last), Admission::Proceed);
        assert_eq!(
            admit(Bytes::mib(99), Bytes::mib(990)),
            Admission::ReclaimFirst(PAGE + PAGE)
        );
        assert_eq!(
            admit(Bytes::mib(100), Bytes::mib(500)),
            Admission::ReclaimFirst(PAGE)
        );
    }

    #[test]
    fn fill_within_the_floor_goes_ahead_however_little_is_free() {
        let below = Bytes::mib(50).less(PAGE);
        assert_eq!(admit(below, Bytes::mib(500)), Admission::Proceed);
        assert_eq!(admit(below, Bytes::mib(1200)), Admission::ProceedOnFloor);
        assert_eq!(
            admit(Bytes::mib(50), Bytes::mib(1200)),
            Admission::ReclaimFirst(PAGE)
        );
    }

    #[test]
    fn direct_reclaim_is_bounded_and_leaves_the_floor() {
        assert_eq!(
            admit(Bytes::mib(90), Bytes::mib(1200)),
            Admission::ReclaimFirst(PAGE + DIRECT_MAX)
        );
        assert_eq!(
            admit(Bytes::mib(50) + PAGE, Bytes::mib(1200)),
            Admission::ReclaimFirst(PAGE + PAGE)
        );
    }

    #[test]
    fn budget_is_spent_by_the_last_page_and_never_for_a_floor() {
        let (last, above) = (GATE.budget.less(PAGE), Bytes::mib(50));
        assert!(!GATE.is_spent(&fill(above, last)));
        assert!(GATE.is_spent(&fill(above, GATE.budget)));
        assert!(GATE.is_spent(&fill(above, Bytes::mib(1200))));
        assert!(!GATE.is_spent(&fill(above.less(PAGE), Bytes::mib(1200))));
    }

    #[test]
    fn what_compresses_badly_takes_more_evictions_for_the_same_room() {
        assert_eq!(saving(Bytes::ZERO, Bytes::ZERO), SAVING_UNKNOWN);
        assert_eq!(saving(Bytes(1000), Bytes(100)), Permille(900));
        assert_eq!(saving(Bytes(1000), Bytes(1200)), SAVING_MIN);
    }
}
