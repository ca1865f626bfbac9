// SPDX-License-Identifier: Apache-2.0
//! Tiers outside memory (disk, remote) under a VM's pool.
//!
//! ```text
//!   fault ─► PagedMemory ─► ChainStore ─┬─ PoolStore                     at hand
//!                                       └─ SlowStore ─► SlowTier ─► disk later
//!                                              ▲
//!   pages left alone for long ─► Sinker ───────┘        by batches of a section
//! ```
//! - [`SlowTiers`]: the tiers of a daemon, in their order, and what becomes of pages whose tier is gone.
//! - [`SlowStore`]: what one VM has in them: seals, extents, loads ([`load`]).
//! - [`ChainStore`]: pool and slow tiers together, as an address space needs them.
//! - [`Sinker`]: moves the stored pages of a section down.
//!
//! # What is sealed
//! The *stored form*, as it was in the pool, with its CRC, behind one byte that tells the form. So a page is
//! packed once, and comes back by two checks: the seal (it is this page, as it was stored last), and the CRC
//! (nothing happened to it before it was sealed).
//!
//! # Who has a page at each death
//! ```text
//!   versions reserved ─► batch written, acknowledged ─► extent entered ─► word changed ─► slot freed
//!   word: pool          pool                           pool             tier            tier
//! ```
//! A successor clears entries that no word names, and then frees their room. Content in the pool that no
//! word names is free to it anyway.

mod chain;
mod form;
mod load;
mod retries;
mod sinker;
mod store;
#[cfg(test)]
mod tests;
mod tiers;

pub use chain::{ChainError, ChainStore};
pub use load::WRONG_MAX;
pub use retries::RetryPauses;
pub use sinker::{SinkStop, Sinker, Sunk, Which};
pub use store::{SlowCounts, SlowStore, forget};
pub use tiers::{Seat, SlowTiers, WhenGone};
