// SPDX-License-Identifier: Apache-2.0
//! The software inside a test guest, and its protocol with the host.
//!
//! A squeezed guest must not notice, and only the guest itself can verify that. So the work here only
//! *checks*: every page of memory and every block of disk has content that follows from a seed, its own
//! number and a generation ([`pattern`]), so that a lost, stale, torn or misplaced page differs from the
//! right one. Two loops read, compare and rewrite the content until the stop command:
//!
//! ```text
//!   memory ─ sweep ─┬─ random pages ─┬─ hot set      every read compared, some
//!   disk   ─ cycle ─┴─ random blocks ┴─ flush, zero  rewritten one generation on
//!                         │
//!              second serial port: `PT {json}` lines up, command words down
//! ```
//! A soak ([`soak`]) has other loads instead: well-known programs, each with its own check. A bench of the
//! guest's speed runs the loads that the host names ([`loads`]), one of requests has a service answer them
//! ([`services`]), and one that records what devices ask of an IOMMU has servers behind many of them ([`record`]).
//! Where a well-known storage load is wanted,
//! fio works on the disk instead ([`fio`]).
//!
//! The host side includes this crate for [`wire`] only. There is no unsafe code and no clock in any
//! decision: a guest that stalls for seconds, because the daemon was killed, is only late.

pub mod disk;
pub mod fio;
pub mod loads;
pub mod memory;
pub mod params;
pub mod pattern;
pub mod plugged;
pub mod port;
pub mod record;
pub mod services;
pub mod shared;
pub mod soak;
pub mod wire;
