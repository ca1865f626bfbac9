// SPDX-License-Identifier: Apache-2.0
//! The interface of GMEM in C (GMEM 4.1): `libpagetide_gmem`, whose header is `include/gmem.h`.
//!
//! ```text
//!    C program            driver's operations (gmem.h: gm_mmu_t)
//!        │ gm_…                        ▲
//!   ─────┼─────────────────────────────┼─────────────────────────  border
//!   interface/*  ──► handle ──► object │
//!     (border)       (table)      │    │
//!                                 ▼    │
//!                       gmem: AddressSpace, Device, Region ──► Mmu: driver.rs, cpu.rs
//! ```
//! Nothing of Rust crosses the border: a C program holds *handles*, numbers
//! dressed as pointers which no code ever follows ([`handle`]), and gets codes
//! ([`failure`]). No panic crosses it either ([`border`]).
//!
//! The header is made from this source by `tests/header.rs`: what a C programmer
//! is to know stands at the items of [`types`] and [`interface`], in the words of
//! C, and nowhere else.
//!
//! *Invariant:* every exported function begins with [`border::call`], or cannot
//! fail. *Invariant:* a driver's operation is called through
//! [`border::InDriver`] only, so that its calls back are refused and not waited for
//! for ever.
//!
//! `unsafe` is where pointers of the caller are followed (`interface`, `border`,
//! `callback`) and where the caller's functions are called (`driver`, `callback`);
//! and in `cpu`, which copies memory that the caller has named.

mod border;
mod callback;
mod cpu;
mod driver;
mod failure;
mod handle;
pub mod interface;
mod objects;
pub mod types;
