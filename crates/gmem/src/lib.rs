// SPDX-License-Identifier: Apache-2.0
//! One memory-management interface for CPU and devices (GMEM 3, 4, 5.1 to 5.3).
//!
//! A driver writes the operations of its [`Mmu`] and no memory management. It
//! makes a [`Device`] of them and attaches it to an [`AddressSpace`], where a
//! [`Region`] of addresses means the same to the CPU and to every device. Behind
//! a region are frames, or the RAM of a VM, whose pages may be elsewhere
//! ([`paging`]). Whoever faults comes through one door, [`AddressSpace::fault`].
//!
//! The crate does no I/O of its own, keeps no clock and starts no thread: the
//! memory itself ([`Place`]), the store of absent pages ([`ContentStore`]) and the
//! limit ([`Admission`]) are given to it.
//!
//! Names of the paper's interface can be searched for (`gm_as_create`, …); the C
//! interface has them as they are.
//!
//! Read in this order: [`space`], [`region`], [`device`], [`arena`]; then [`paging`].

pub mod arena;
pub mod device;
pub mod error;
pub mod frames;
pub mod mmu;
pub mod paging;
pub mod region;
pub mod set;
pub mod space;
mod sync;

pub use device::Device;
pub use error::GmError;
pub use frames::PhysicalMemory;
pub use mmu::{
    Backing, Inherited, Mmu, MmuError, MmuLimits, OnAbsent, PageSizes, Restrict, Restricted,
    TableFormat, TableId,
};
pub use paging::{
    Admission, Committed, Content, ContentStore, EvictionError, EvictionRound, Fault, FaultOutcome,
    GrowthError, Incidents, Installed, MemoryCounters, MemoryParts, NoRoom, Overwritten, PageState,
    PageTable, PageWord, PagedMemory, Place, PlaceError, Reply, StoreError, Unlimited,
    VolatileWords, WordArray, neighbours::Neighbours, recovery,
};
pub use region::{MapOptions, Mapped, Placement, Protection, Region};
pub use set::MappingSet;
pub use space::{
    Activation, AddressFit, AddressSpace, AllocPolicy, Caching, Callback, Guard, Mode,
    RegionRequest,
};
