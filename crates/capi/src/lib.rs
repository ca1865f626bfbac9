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
//! No Rust type crosses the border: a C program holds *handles*, numbers disguised as pointers that
//! no code ever follows ([`handle`]), and gets codes ([`failure`]). No panic crosses it either
//! ([`border`]).
//!
//! `tests/header.rs` generates the header from this source: all documentation for C programmers is
//! on the items of [`types`] and [`interface`], in terms of C, and nowhere else.
//!
//! *Invariant:* every exported function begins with [`border::call`], or cannot fail. *Invariant:*
//! a driver's operation is called only through [`border::InDriver`], so that its calls back are
//! refused instead of waiting for ever.
//!
//! `unsafe` is used where the caller's pointers are followed (`interface`, `border`, `callback`)
//! and its functions are called (`driver`, `callback`); and in `cpu`, which copies memory that the
//! caller has named.

mod border;
mod callback;
mod cpu;
mod driver;
mod failure;
mod handle;
pub mod interface;
mod objects;
pub mod types;
