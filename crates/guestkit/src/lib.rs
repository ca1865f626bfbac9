// SPDX-License-Identifier: Apache-2.0
//! Boots and drives real guests under stock QEMU, for the demo and the tests.
//!
//! What Pagetide claims is about running virtual machines that nobody changed,
//! so its last word is said by such machines: the distribution's QEMU, its cloud
//! kernel, and a guest that verifies every byte ([`pagetide_guest`]). This crate
//! makes the image, starts QEMU, listens to the guest, starts and kills the
//! daemon, and measures from outside what the daemon says of itself.
//!
//! It uses the daemon only as a user does, by its command line. (Of the product's
//! crates it uses `sys` alone, for the memory of a [stand-in](stand_in) for a VMM.)

pub mod adp_live;
pub mod bare;
pub mod borrowed;
pub mod client;
pub mod cpio;
pub mod demo;
pub mod dense;
pub mod fio;
pub mod guest;
pub mod hostile;
pub mod image;
pub mod leaks;
mod lines;
pub mod modules;
pub mod peer;
pub mod plug;
pub mod product;
pub mod programs;
pub mod qemu;
pub mod qmp;
pub mod report;
pub mod sampler;
pub mod soak;
pub mod stage;
pub mod stand_in;
pub mod steps;
pub mod swapless;
