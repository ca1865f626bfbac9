// SPDX-License-Identifier: Apache-2.0
//! What runs inside a test guest, and the words it speaks with its host.
//!
//! A guest that is squeezed must not notice, and the only witness that can say
//! so is the guest itself. So the work here is nothing but *checking*: every
//! page of memory and every block of disk has content that follows from a seed,
//! its own number and a generation ([`pattern`]), so that a lost, stale, torn or
//! foreign page is told apart from the right one, and two loops read, compare
//! and rewrite it until told to stop:
//!
//! ```text
//!   memory ─ sweep ─┬─ random pages ─┬─ hot set      every read compared, some
//!   disk   ─ cycle ─┴─ random blocks ┴─ flush, zero  rewritten one generation on
//!                         │
//!              second serial port: `PT {json}` lines up, command words down
//! ```
//! A soak ([`soak`]) has other loads instead: programs that people know, each with its own check.
//! For a bench of its speed it runs the loads that the host names ([`loads`]).
//! On the disk fio may work instead ([`fio`]), where a load is wanted that people know.
//!
//! The host side includes this crate for [`wire`] only. There is no unsafe code
//! and no clock in any decision: a guest that stands still for seconds, because
//! the daemon was killed, is late and nothing else.

pub mod disk;
pub mod fio;
pub mod loads;
pub mod memory;
pub mod params;
pub mod pattern;
pub mod plugged;
pub mod port;
pub mod shared;
pub mod soak;
pub mod wire;
