// SPDX-License-Identifier: Apache-2.0
//! The interface (GMEM 4.1, 5.3), proved over simulated memory, devices and translation caches.
//!
//! [`kit`] is the hardware. The other modules are tests: of each function
//! ([`interface`]), of strict security step by step ([`strict`]), of every
//! operation failing at every step ([`injection`]), of threads on the same pages
//! ([`hammer`]), and of what Linux tests its own heterogeneous memory with
//! ([`hmm`]).

mod hammer;
mod hmm;
mod injection;
mod interface;
mod kit;
mod strict;
