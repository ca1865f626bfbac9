// SPDX-License-Identifier: Apache-2.0
//! Which memory stays and which is evicted: hot and cold sections and the choice of victims (Taiji
//! 4.2), and the protection of sections that devices are about to touch (VPRI 6.2).
//!
//! No I/O, no clock, no thread, no page: only sections, times given by the caller, and decisions.
//! So exactly the code that decides in the daemon can be replayed on traces in virtual time.
//!
//! - [`watermarks`]: when reclaim begins and ends; [`reclaim`]: what the reclaim thread does, and which
//!   sections it unmaps and evicts.
//! - [`sets`]: how hot each section is, with its [`set_times`]; [`victims`]: which one is evicted next.
//! - [`sampling`]: which pages are watched to learn that, by a [`tracker`]; [`candidates`]: sections selected for
//!   eviction.
//! - [`budget`]: how much memory each VM of a host may have.
//! - [`protect`]: what devices touch, and which sections the evictor therefore spares.
//! - [`swap_in`]: which sections come back before anything asks for them, in turns of [`prefetch`]; [`demotion`]: of which stored pages are
//!   packed anew, smaller.
//! - [`scheduler`]: when the threads that do all this may use CPU time.
//!
//! ```
//! use pagetide_addr::SectionNo;
//! use pagetide_policy::sets::{HotColdSets, Level};
//! use std::time::Duration;
//!
//! let mut sets = HotColdSets::new(2);
//! for scan in 1..=3 {
//!     sets.scanned(Duration::from_secs(5 * scan), [SectionNo(1)]);
//! }
//! assert_eq!(sets.level(SectionNo(0)), Some(Level::Cold));
//! assert_eq!(sets.level(SectionNo(1)), Some(Level::Hot));
//! assert_eq!(sets.coldest_first().next(), Some(SectionNo(0)));
//! ```

pub mod budget;
pub mod candidates;
mod cells;
mod chunks;
pub mod demotion;
mod dense_links;
mod links;
pub mod prefetch;
pub mod protect;
pub mod reclaim;
pub mod sampling;
pub mod scheduler;
mod section_set;
pub mod set_times;
pub mod sets;
#[cfg(test)]
mod sets_tests;
pub mod swap_in;
pub mod tracker;
pub mod victims;
pub mod watermarks;
