// SPDX-License-Identifier: Apache-2.0
//! The program `pagetide`: command line, configuration, HTTP API, metrics, and
//! the composition of the other crates into a running daemon.
//!
//! [`control`] is the seam: everything a person or a program can ask for is a
//! method of one trait, its answers are the report types there. On one side of
//! it stand [`api`], [`metrics`] and the clients in [`command`]; on the other
//! [`host`], which puts VMs and tiers together, [`dpu`], which holds the devices, and
//! [`protection`], which keeps what devices touch from being evicted.
//!
//! *Invariant:* nothing but `host`, `dpu`, `protection`, `bench`, `estimate`, `replay`,
//! `sim`, `trace` and `vpri` knows another crate of the workspace.

pub mod api;
pub mod bench;
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
mod letting_go;
pub mod metrics;
pub mod name;
pub mod outcome;
pub mod percent;
pub mod progress;
pub mod protection;
pub mod replay;
pub mod run;
pub mod settings;
pub mod sim;
pub mod size;
pub mod slo;
pub mod state_dir;
pub mod text;
pub mod trace;
pub mod vpri;
