// SPDX-License-Identifier: Apache-2.0
//! The ways in which [`AccessTracker`]s learn which pages were touched lately, without help from guest or VMM.
//!
//! [`UnmapAndLook`] works everywhere. Whole sections are always handled by it, whichever tracker
//! samples: the rule on pins requires pages to be unmapped.

mod look;

pub use look::{DmaLook, NoDma, TrackerError};
pub use pagetide_policy::{
    sampling::{Look, Sampled, Touched},
    tracker::AccessTracker,
};

mod huge;
pub mod idle;
mod ranges;
mod unmap;
mod whole;

pub use idle::IdlePages;
pub use unmap::{UnmapAndLook, refault_cost};
pub use whole::WholeSections;
