// SPDX-License-Identifier: Apache-2.0
//! Slow tiers: where stored pages go when memory is too dear for them (Taiji 4.2.2, 7.1).
//!
//! - [`tier`]: [`SlowTier`], what a store asks of a tier, and the duties to answer it.
//! - [`batch`]: sealed pages on their way down, and the names of their places.
//! - [`seal`]: encryption and authentication of each page.
//! - [`table`]: what a VM's pool keeps of its extents.
//! - [`extent`]: which sectors of a disk hold what.
//! - [`disk`]: the disk tier.
//! - [`remote`]: the tier on another host.
//! - `fake`: a disk tier without a disk, for tests (feature `fake`).
//! - [`health`]: whether a tier can be used.
//! - [`figures`]: what a tier has done.
//!
//! Nothing here knows page words. The store above says which pages go down, keeps the table of extents in
//! its pool, and changes words.

pub mod batch;
mod bitmap;
pub mod disk;
pub mod extent;
#[cfg(feature = "fake")]
pub mod fake;
pub mod figures;
pub mod health;
pub mod remote;
pub mod seal;
pub mod table;
pub mod tier;

pub use batch::{
    Batch, BatchError, DiskId, ExtentName, ExtentNo, Place, Position, Room, SectorNo, Version, VmId,
};
pub use bitmap::BlockSize;
pub use figures::{Latency, TierFigures};
pub use health::{Health, Standing};
pub use tier::{NotRecovered, ReadDone, SlowTier, TierError, TierKind, WriteDone};
