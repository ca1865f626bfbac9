// SPDX-License-Identifier: Apache-2.0
//! Taking over the memory of a running VMM from outside, and giving it back.
//!
//! The VMM needs no change and does not cooperate. Its RAM is a file in memory (memfd or tmpfs)
//! that it maps shared; a process that opens that file through `/proc/PID/fd` has the same pages.
//! To handle the VMM's page faults, a userfaultfd is also needed: it is created *inside* the VMM by
//! a remote system call, which stops one of its threads for some tens of microseconds, and is left
//! open there, so that it outlives us.
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
//! The steps of an attach, one module each:
//! 1. [`process`]: the VMM by pid and start time, so that a reused pid is never mistaken for it.
//! 2. [`layout`]: where its RAM is, or a [`Refusal`] that says what to do.
//! 3. [`hazards`]: what else touches the RAM; what blocks eviction now.
//! 4. [`takeover`]: the userfaultfd.
//! 5. [`reader`], [`servers`], [`place`], [`tracker`]: serving it.
//!
//! ```
//! use pagetide_vmm::{Refusal, layout::RamLayout, process::VmmProcess};
//!
//! fn ram_bytes(pid: u32) -> Result<u64, Refusal> {
//!     let vmm = VmmProcess::open(pid)?;
//!     Ok(RamLayout::of_process(&vmm)?.len_bytes())
//! }
//! // This process is no VMM: the refusal says so.
//! assert!(ram_bytes(std::process::id()).is_err());
//! ```

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

pub use refusal::{HugetlbFault, Refusal};
