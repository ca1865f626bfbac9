// SPDX-License-Identifier: Apache-2.0
//! Boots and drives real guests under stock QEMU, for the demo and the tests.
//!
//! Pagetide's claims are about running, unmodified virtual machines, so the final test uses such
//! machines: the distribution's QEMU, its cloud kernel, and a guest that verifies every byte
//! ([`pagetide_guest`]). This crate builds the image, starts QEMU, reads the guest's output, starts
//! and kills the daemon, and measures from outside what the daemon reports about itself.
//!
//! It uses the daemon only as a user does, through its command line. (Of the product's crates it
//! uses `sys` alone, for the memory of a [stand-in](stand_in) for a VMM.)

pub mod adp_live;
pub mod bare;
pub mod borrowed;
pub mod client;
pub mod cpio;
pub mod demo;
pub mod dense;
pub mod far;
pub mod fio;
pub mod guest;
pub mod hostile;
pub mod image;
pub mod leaks;
mod lines;
pub mod modules;
pub mod network;
pub mod peer;
pub mod plug;
pub mod product;
pub mod programs;
pub mod qemu;
pub mod qmp;
pub mod recording;
pub mod report;
pub mod sampler;
pub mod small_disk;
pub mod soak;
pub mod stage;
pub mod stand_in;
pub mod steps;
pub mod swapless;
