// SPDX-License-Identifier: Apache-2.0
//! A stand-in for a VMM of realistic density: all of its RAM is filled, its vCPUs never pause, and
//! everything that it reads is checked.
//!
//! Small idle guests do not show the effects on a large host, and a real guest of 16 GiB takes minutes to
//! fill its memory. The stand-in does it in seconds. To Pagetide it is a VMM: a process with a VMM's name,
//! its RAM one shared memfd not inherited by children, and threads named like QEMU's vCPUs.
//!
//! ```text
//!   bench ── BusyGuest ──stdin──► Order          main thread, asleep in read()
//!                      ◄─stdout── Answer         vCPUs: choose a hot page, check or write it, count
//! ```
//! [`ram`] has the memory and the required content of each page, [`pattern`] the choice of hot pages,
//! [`guest`] the process, [`process`] the bench's side of it. [`kvm`] is a guest under KVM instead,
//! [`stock`] a stock Linux guest. [`disk`] is its work on a disk, whose buffers lie in its RAM.
//!
//! # The content of a page
//! A function of its number and its version ([`content`]). A write raises the version, which is also kept
//! outside of the RAM; so a page filled with old content is detected, as is one of another page or a torn
//! one. Each touch of a vCPU checks eight cache lines of its page, and [`Order::VerifyAll`](guest::Order)
//! each byte of each page.

pub mod content;
pub mod disk;
pub mod guest;
pub(super) mod kvm;
pub mod pattern;
pub(super) mod process;
pub mod ram;
pub(super) mod stock;
