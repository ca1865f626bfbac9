// SPDX-License-Identifier: Apache-2.0
//! Which memory stays and which goes: hot and cold sections and the choice of
//! victims (Taiji 4.2), and the protection of what devices are about to touch
//! (VPRI 6.2).
//!
//! No I/O, no clock, no thread, no page: only sections, times given by the caller,
//! and decisions. So the very code that decides in the daemon is replayed on traces in
//! virtual time.

pub mod marks;
pub mod protect;
#[cfg(test)]
mod random;
