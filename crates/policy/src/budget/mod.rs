// SPDX-License-Identifier: Apache-2.0
//! One budget for all VMs of a host: who may have how much of it resident, and why (Taiji 4.2.2,
//! 5.3.1).
//!
//! ```text
//!   each VM, once a period:                                        for each VM:
//!   resident, stored, heat, PSI ──►                            ──► target, reason
//!   refaults by distance ─────────►  HostBudget::step(now)     ──► state against the watermarks, pace
//!   settings, VMs that come and go ►                           ──► Gate
//!                                                                   │
//!   each fill: its size, what is used at this moment ──────────────► admit ──► go ahead | evict first
//! ```
//! Nothing here does I/O, reads a clock or waits. The daemon drives it with what it measures, the
//! replay and [`simulate`] with virtual time.
//!
//! # What is shared
//! The budget covers resident memory, stored content, and the metadata of both. Resident memory is
//! bounded by a *target* for each VM, which is put into force as its limit. What is stored follows
//! from that and from the content, so it is measured, never promised.
//!
//! # What a VM needs
//! Its *need* is what it uses plus what it lacks. It uses what is resident and in the sets Hot, Warm
//! and Active. What it lacks is told by its refaults: memory evicted and touched again, by distance
//! ([`Workingset`]). More memory is *worth it* if the refaults that it ends would otherwise fill as
//! much within [`Tuning::payback`]. Of what others do not use, a VM gets only as much as helps: if
//! its refaults need more than it could get, only its share by weight beside the others that want
//! more. A VM that stalls (PSI) is given longer to pay back. A need rises at once, by
//! [`Tuning::gain`] at most, and is held for [`Tuning::hold`] after it was last seen.
//!
//! What counts as used is known only some scans later. So while one VM lacks memory, others that hardly
//! refault are tried with less than what scans say, as far as they do not notice (`trial.rs`).
//!
//! # What a VM should have
//! Memory is laid on in rungs for all VMs alike: floors, needs, what is inactive, cool, cold, and
//! room up to the ceilings (`ladder.rs`). The rung at which it ends is shared by weight, between the
//! bounds of each (`fill.rs`). So cold memory anywhere goes before used memory elsewhere, whatever
//! the weights; when all want more than there is, weights decide; and nobody's floor pays for
//! another's ceiling.
//!
//! # How it gets there: take, then give
//! A lower target holds at once. A higher one is given only from memory that nobody is charged with,
//! and a VM is charged with its target or what is resident, whichever is more:
//!
//! ```text
//!   sum of max(target, resident)  +  stored   ≤  budget − low        after every target raised
//!          ▲                                     (budget − min, where a floor is filled)
//!          a byte that is to be evicted is not promised to another until it is gone
//! ```
//! So the targets and what is stored never exceed the budget, and neither does what is used, but
//! for the fills under way.
//!
//! # Watermarks
//! They are named for what is free of the budget. Below *low* targets are cut until *high* is free.
//! Between the two targets stay, and cold memory of all VMs is reclaimed at [`Tuning::pace`] until
//! high; without cold memory nothing is. Nothing is promised beyond high but to a VM that lacks
//! memory which another is about to evict. Below *min* a fill first evicts, of its own VM ([`Gate`]).
//!
//! # Idle VMs
//! A VM that has hardly refaulted for [`Tuning::idle_after`] loses what it does not use at a pace that
//! would take all its RAM in [`Tuning::idle_shrink`], down to its need or its floor, though nobody asks
//! for it: the next burst finds it free. The first refaults end that. Its need then grows by
//! [`Tuning::gain`].
//!
//! # Why it settles
//! With needs that do not change, what each should have depends only on needs, bounds and weights, is
//! unique, and changes no faster than they do. Targets then only fall to it, or rise to it as memory
//! becomes free: each step brings them nearer. Four things keep noise out. Memory is cold only after
//! several scans have not seen it touched ([`crate::sets`]). A need is the highest seen in the last
//! seconds, so two equal VMs that are busy in turns both keep theirs. A target is not lowered by less
//! than [`Tuning::deadband`] unless the sum demands it. And between low and high the sum is left
//! alone: what was just reclaimed is not promised again at once.
//!
//! # What is not promised
//! - Less than a period's notice: between two steps the gate holds the line, at the price of direct
//!   reclaim.
//! - Floors, if all VMs are at their floors and what is stored still does not fit: then the budget is
//!   kept, since the host has no more, and floors are cut by weight ([`Reason::BelowFloor`]). Floors
//!   should leave room for what is stored of the rest.
//! - Anything about memory that cannot be evicted. It counts as the VM's floor, and others pay for it.
//! - That a VM which goes round through more memory than it could get is helped: nothing would help
//!   it.

mod admission;
mod fill;
mod host;
mod ladder;
mod plan;
pub mod simulate;
#[cfg(test)]
mod tests;
mod trial;
mod units;
mod vm;
mod workingset;

pub use admission::{Admission, DIRECT_MAX, Fill, Gate};
pub use host::{Change, Decision, HostBudget, Reason, Reclaim, VmStatus, Water};
pub use plan::{
    BudgetError, FLOOR_MIN, HIGH_MAX, HostMemory, Mark, Plan, Saved, Tuning, VMS_MAX, VmShare,
    Watermarks,
};
pub use units::{Bytes, Permille, Rate, VmId, Weight, WeightError};
pub use vm::{Eviction, Heat, VmReport};
pub use workingset::{Refaults, Terms, Workingset};
