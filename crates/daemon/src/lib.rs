// SPDX-License-Identifier: Apache-2.0
//! What the program `pagetide` does: command line, configuration, HTTP API, metrics, and the composition of
//! the other crates into a running daemon.
//!
//! [`control`] is the seam: every request of a user or a program is a method of one trait, and the
//! report types there are its answers. On one side stand [`api`], [`metrics`] and the clients in
//! [`command`]; on the other side [`host`], which assembles VMs and tiers, [`dpu`], which holds the
//! devices, and [`protection`], which keeps memory that devices touch from being evicted.
//!
//! *Invariant:* only `host`, `dpu`, `protection` and `estimate` depend on the crates that do the work.

pub mod api;
pub mod budget;
pub mod cli;
pub mod client;
pub mod command;
pub mod control;
pub mod cpus;
pub mod dpu;
pub mod estimate;
pub mod figure;
pub mod files;
pub mod host;
pub mod injection;
mod lab;
mod letting_go;
pub mod metrics;
pub mod name;
mod notify;
pub mod percent;
pub mod pool;
pub mod protection;
pub mod run;
pub mod scheduler;
pub mod settings;
mod signals;
pub mod slo;
pub mod state_dir;
mod steps;
pub mod text;
pub mod tiers;
pub mod upgrade;
