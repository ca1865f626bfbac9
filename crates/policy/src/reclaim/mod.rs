// SPDX-License-Identifier: Apache-2.0
//! The reclaim loop of one VM (Taiji 4.2), as decisions without a clock, a thread or I/O.
//!
//! ```text
//!                 situation: time, headroom, blocked?, requests
//!                      │
//!   ReclaimLoop ◄──────┘            order: look for hazards, sample, rest, keep sections ready,
//!        └────────────────────────────► evict N pages within reach R, swap in N pages, demote
//!                                                     │
//!   Selection ◄── sweeps, outcomes                    ▼
//!        └────────────────────────────► for each section: evict, or unmap and let it rest
//! ```
//! [`ReclaimLoop`] decides what the reclaim thread does next, and [`Selection`] which sections a pass
//! unmaps and evicts. The daemon carries the orders out on pages; a replay carries the same ones out
//! on flags, in virtual time. All limits and intervals of its decisions are constants of this crate.

mod orders;
mod plan;
mod reclaim_loop;
mod selection;

pub use orders::{Content, EvictOrder, Eviction, Order, Situation};
pub use reclaim_loop::{
    HAZARDS_HOLD, HOLD_EVERY, HOLD_MAX, LEARNING_MAX, LEARNING_REST, ROUND, ReclaimLoop,
    SUSPENSION, SWEEPS_TO_BEGIN,
};
pub use selection::{
    Attempt, DIRECT_SECTIONS_MAX, Evicted, OFFERED_MAX, PassReport, Sections, Selection, Unmapped,
    is_warm,
};
