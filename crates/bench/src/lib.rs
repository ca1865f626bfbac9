// SPDX-License-Identifier: Apache-2.0
//! Benches: each measures our product and a peer in alternation within one run, since absolute figures
//! drift between machines and minutes while ratios are stable.
//!
//! A bench is a folder here with `run() -> Result<BenchReport, BenchError>` and one line in [`command::run`]; rounds,
//! orders of turns, percentiles, bounds, progress and report are those of `harness`.

pub mod access_log;
pub mod adp;
pub mod adp_live;
pub mod blk;
pub mod budget;
pub mod burst;
pub mod busy;
mod cgroup;
pub mod cold_ring;
pub mod command;
pub mod crash;
mod daemon;
pub mod fairness;
pub mod fault;
pub mod fault_parallel;
pub mod gmem_async;
pub mod gmem_va;
pub mod guest_cost;
mod guest_net;
mod harness;
pub mod head_of_line;
mod interrupt;
pub mod iopf_daily;
pub mod iopf_impact;
pub mod iopf_rtt;
pub mod iopf_scale;
mod kernel_swap;
mod key_value;
mod memory;
pub mod memory_move;
pub mod name;
pub mod neighbour;
pub mod net_guest;
pub mod net_pps;
mod net_rig;
pub mod nic_impact;
mod options;
mod orders;
pub mod overcommit;
pub mod overhead;
pub mod pa_bitmap;
pub mod pinning;
pub mod pool;
mod programs;
pub mod real_size;
mod redis;
pub mod remote;
pub mod rnpf_rate;
pub mod schedule;
pub mod sim;
pub mod single_fault;
pub mod swap;
mod tenant_ram;
pub mod tiers;
pub mod tracker;
pub mod upgrade;

pub use harness::report::{BenchError, BenchHost, BenchReport};
pub use options::{LiveDevice, SizeOptions};
