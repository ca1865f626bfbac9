// SPDX-License-Identifier: Apache-2.0
//! Taking over the memory of a running VMM from outside, and giving it back.
//!
//! The VMM is not changed and not asked. Its RAM is a file in memory (memfd or
//! tmpfs) that it has mapped shared; whoever opens that file through
//! `/proc/PID/fd` has the same pages. What is missing is a say in the VMM's page
//! faults: for that a userfaultfd is made *inside* the VMM, by one of its
//! threads that is borrowed for some tens of microseconds, and left open there,
//! so that it outlives us.
//!
//! ```text
//!            VMM process                                this process
//!   ┌────────────────────────────┐          ┌──────────────────────────────────┐
//!   │ vCPU threads ── page fault ┼─────────►│ FaultReader ── FaultSink          │
//!   │ RAM mapping (registered)   │ userfault│ VmPlace, VcpuMmu (for gmem)       │
//!   │ userfaultfd, left open     │ fd       │ UnmapAndLook (what was accessed)  │
//!   └──────────┬─────────────────┘          └──────────┬───────────────────────┘
//!              └──────────── the file(s) behind RAM ───┘
//! ```
//!
//! The way of an attach, each step a module:
//! 1. [`process`]: the VMM by pid and start time, so that a pid used again is never mistaken.
//! 2. [`layout`]: where its RAM is, or the [`Refusal`] that says what to do.
//! 3. [`hazards`]: who else touches the RAM; what forbids eviction now.
//! 4. [`takeover`]: the userfaultfd.
//! 5. [`reader`], [`servers`], [`place`], [`tracker`]: serving it.

pub mod hazards;
pub mod layout;
pub mod place;
pub mod process;
pub mod reader;
mod refusal;
pub mod servers;
pub mod swap;
pub mod takeover;
pub mod threads;
pub mod tracker;

pub use refusal::Refusal;
