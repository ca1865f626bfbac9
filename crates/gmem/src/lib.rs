// SPDX-License-Identifier: Apache-2.0
//! One page table and one door for CPU and devices (GMEM 3, 4).
//!
//! A VM's memory is shared by its vCPUs and by devices that do DMA into it.
//! This crate holds the one table that says where each page is, and the one
//! door through which an absent page becomes present, whoever asks. It does no
//! I/O of its own, keeps no clock and starts no thread: the memory itself
//! ([`Place`]), each device's translations ([`Mmu`]), the store of absent pages
//! ([`ContentStore`]) and the limit ([`Admission`]) are given to it.
//!
//! Read in this order: [`word`] (states of a page, and what a crash means),
//! [`table`] (locks), [`space`] (faults), [`eviction`], [`recovery`].

pub mod eviction;
pub mod fault;
pub mod mmu;
#[cfg(all(test, loom))]
mod model;
pub mod neighbours;
pub mod place;
pub mod recovery;
pub mod space;
pub mod store;
mod sync;
pub mod table;
pub mod waiters;
pub mod word;

pub use eviction::{Committed, EvictionError, EvictionRound};
pub use fault::{Fault, FaultOutcome, SpaceCounters};
pub use mmu::{Mmu, MmuError, MmuLimits, OnAbsent, Restrict, Restricted};
pub use place::{Installed, Place, PlaceError};
pub use space::{AddressSpace, SpaceParts};
pub use store::{Admission, ContentStore, Incidents, StoreError, Unlimited};
pub use table::{PageTable, VolatileWords, WordArray};
pub use waiters::Reply;
pub use word::{Content, PageWord, State};
