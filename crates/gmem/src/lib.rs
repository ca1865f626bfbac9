// SPDX-License-Identifier: Apache-2.0
//! One page table and one door for CPU and devices (GMEM 3, 4).

pub mod mmu;
pub mod place;
mod sync;

pub use mmu::{Mmu, MmuError, MmuLimits, Restrict, Restricted};
pub use place::{Installed, Place, PlaceError};
