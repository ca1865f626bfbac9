// SPDX-License-Identifier: Apache-2.0
//! [`AccessTracker`]: which pages were touched lately, without help from guest or VMM.
//!
//! It is used in two ways. A *sample* checks a few pages of each section and costs the guest next to
//! nothing; it shows how hot a section is. A look at *whole* sections unmaps all their pages, which
//! costs a small fault for each page in use, and is for sections that are to be evicted.
//!
//! [`UnmapAndLook`] works everywhere. Whole sections are always handled by it, whichever tracker
//! samples: the rule on pins requires pages to be unmapped.

mod look;

pub use look::{AccessTracker, DmaLook, Look, NoDma, Sampled, Touched, TrackerError};

mod huge;
pub mod idle;
mod ranges;
mod unmap;
mod whole;

pub use idle::IdlePages;
pub use unmap::{UnmapAndLook, refault_cost};
pub use whole::WholeSections;
