// SPDX-License-Identifier: Apache-2.0
//! Memory whose pages may be swapped out: the RAM of a VM.
//!
//! Each page has one place, in the VM's file. It is either present there or stored ([`word`]).
//! [`PagedMemory::fault`] is the only function that makes an absent page present, at once or when
//! the load ends that it has begun, and [`EvictionRound`] the only code that makes a present page absent. Both act for all devices of the
//! address space that the memory belongs to.
//!
//! Reading order: [`word`] (states of a page, and what a crash leaves), [`table`] (locks),
//! [`memory`] (the parts), `fill`, `slow_fill`, `whole`, [`overwrite`], [`blank`], [`readahead`], [`request`], [`serve`] (the one
//! entry), [`eviction`], [`relocate`], [`growth`], [`recovery`].

pub mod blank;
#[cfg(all(test, not(loom)))]
mod blank_tests;
pub mod eviction;
pub mod fault;
mod fill;
pub mod growth;
#[cfg(all(test, not(loom)))]
mod growth_tests;
pub mod memory;
#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod nested_tests;
pub mod overwrite;
pub mod place;
pub mod readahead;
pub mod recovery;
pub mod relocate;
pub mod request;
pub mod serve;
#[cfg(all(test, not(loom)))]
mod serve_tests;
mod slow_fill;
#[cfg(all(test, not(loom)))]
mod slow_fill_tests;
pub mod store;
pub mod table;
pub mod waiters;
mod whole;
#[cfg(all(test, not(loom)))]
mod whole_tests;
pub mod word;
pub mod words;

pub use blank::Blank;
pub use eviction::{Committed, EvictionError, EvictionRound};
pub use fault::{Fault, FaultOutcome, MemoryCounters};
pub use growth::GrowthError;
pub use memory::{MemoryParts, PagedMemory};
pub use overwrite::Overwrite;
pub use place::{Granule, Installed, Place, PlaceError};
pub use readahead::Readahead;
pub use relocate::{Move, Relocated, Relocation};
pub use request::{Cause, Served, Wait};
pub use store::{
    Admission, ContentStore, Corrections, Incidents, LoadDone, Loaded, StoreError, Unlimited,
};
pub use table::PageTable;
pub use waiters::Reply;
pub use word::{Content, PageState, PageWord};
pub use words::{NoRoom, VolatileWords, WordArray};
