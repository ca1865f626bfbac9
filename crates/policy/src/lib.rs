// SPDX-License-Identifier: Apache-2.0
//! Which memory stays and which is evicted: hot and cold sections and the choice of victims (Taiji
//! 4.2), and the protection of sections that devices are about to touch (VPRI 6.2).
//!
//! No I/O, no clock, no thread, no page: only sections, times given by the caller, and decisions.
//! So exactly the code that decides in the daemon can be replayed on traces in virtual time.
//!
//! - [`marks`]: when reclaim begins and ends.
//! - [`sets`]: how hot each section is; [`victims`]: which one is evicted next.
//! - [`sampling`]: which pages are watched to learn that; [`candidates`]: sections selected for
//!   eviction.
//! - [`protect`]: what devices touch, and which sections the evictor therefore spares.
//! - [`scheduler`]: when the threads that do all this may use CPU time.

pub mod candidates;
mod cells;
mod chunks;
mod dense_links;
mod links;
pub mod marks;
pub mod protect;
mod random;
pub mod sampling;
pub mod scheduler;
mod section_set;
pub mod sets;
#[cfg(test)]
mod sets_tests;
pub mod victims;
