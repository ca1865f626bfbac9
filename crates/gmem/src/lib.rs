// SPDX-License-Identifier: Apache-2.0
//! One memory-management interface for CPU and devices (GMEM 3, 4, 5.1 to 5.3).
//!
//! A driver implements the operations of its [`Mmu`] and no memory management. It wraps them in a
//! [`Device`] and attaches that to an [`AddressSpace`], where a [`Region`] of addresses means the
//! same to the CPU and to every device. A region is backed by frames, or by the RAM of a VM, whose
//! pages may be swapped out ([`paging`]). All faults, of CPU and devices, enter through one
//! function, [`AddressSpace::fault`].
//!
//! The crate does no I/O of its own, reads no clock and starts no thread. The caller supplies the
//! memory itself ([`Place`]), the store of absent pages ([`ContentStore`]) and the limit
//! ([`Admission`]).
//!
//! The names of the paper's interface are searchable aliases (`gm_as_create`, …); the C interface
//! uses them unchanged.
//!
//! Reading order, bottom up: [`mmu`], [`device`], `attachments`; [`arena`], [`frames`]; [`paging`];
//! [`region`], [`space`], [`set`].
//!
//! ```
//! use pagetide_addr::Va;
//! use pagetide_gmem::{AddressSpace, AllocPolicy, GmError, Mapped, RegionRequest};
//!
//! let space = AddressSpace::create(Va(0x10_0000), Va(0x20_0000), AllocPolicy::default())?;
//! let region = space.alloc(&RegionRequest::of_bytes(12_000))?;
//! assert_eq!(region.len_bytes(), 3 * 4096);
//! assert_eq!(space.lookup(region.start())?.pages(), region.pages());
//! assert_eq!(region.mapped(), Mapped::Nothing, "before the first fault");
//! region.dealloc()?;
//! assert!(space.lookup(region.start()).is_err());
//! # Ok::<(), GmError>(())
//! ```
//! With devices: `examples/rust/src/gmem_device.rs`.

pub mod arena;
mod attachments;
pub mod device;
pub mod error;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
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
    Admission, Blank, Cause, Committed, Content, ContentStore, Corrections, EvictionError,
    EvictionRound, Fault, FaultOutcome, Granule, GrowthError, Incidents, Installed, LoadDone,
    Loaded, MemoryCounters, MemoryParts, Move, NoRoom, Overwrite, PageState, PageTable, PageWord,
    PagedMemory, Place, PlaceError, Readahead, Relocated, Relocation, Reply, Served, StoreError,
    Unlimited, VolatileWords, Wait, WordArray, recovery,
};
pub use region::{MapOptions, Mapped, Placement, Protection, Region};
pub use set::MappingSet;
pub use space::{
    Activation, AddressFit, AddressSpace, AllocPolicy, Caching, Callback, Guard, Mode,
    RegionRequest,
};
