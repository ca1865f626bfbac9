// SPDX-License-Identifier: Apache-2.0
//! What the program `pagetide-lab` does: everything that is measured, simulated or tested beside the daemon.
//!
//! `pagetide bench`, `replay`, `sim`, `trace` and `vpri` start it in their place, so nothing of it is in
//! the program that runs as root.

pub mod cli;
pub mod replay;
pub mod reproduce;
pub mod sim;
pub mod trace;
pub mod vpri;
