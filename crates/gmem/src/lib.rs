// SPDX-License-Identifier: Apache-2.0
//! One memory-management interface for CPU and devices (GMEM 3, 4, 5.1 to 5.3).
//!
//! A VM's memory is shared by its vCPUs and by devices that do DMA into it.
//! This crate holds the one table that says where each page is, and the one
//! door through which an absent page becomes present, whoever asks. It does no
//! I/O of its own, keeps no clock and starts no thread: the memory itself
//! ([`Place`]), each device's translations ([`Mmu`]), the store of absent pages
//! ([`ContentStore`]) and the limit ([`Admission`]) are given to it.

pub mod arena;
pub mod mmu;
pub mod paging;
mod sync;

pub use mmu::{Mmu, MmuError, MmuLimits, OnAbsent, Restrict, Restricted};
pub use paging::{
    Admission, Committed, Content, ContentStore, EvictionError, EvictionRound, Fault, FaultOutcome,
    GrowthError, Incidents, Installed, MemoryCounters, MemoryParts, NoRoom, PageTable, PageWord,
    PagedMemory, Place, PlaceError, Reply, State, StoreError, Unlimited, VolatileWords, WordArray, recovery,
};
