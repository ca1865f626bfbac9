// SPDX-License-Identifier: Apache-2.0
//! The VPRI function: the device's side of the interface to a host in another process
//! (VPRI 5).
//!
//! [`core`] holds the device's state and decisions, as a state machine that a driver's
//! messages and the engines' page requests go through; [`requests`] accounts for page
//! requests; [`server`] is the vhost-user back end on top. All of them follow the
//! specification in `docs/vpri.md`.

mod backend;
pub mod core;
mod memory;
mod requests;
mod rings;
pub mod server;
mod state;
#[cfg(test)]
mod tests;

pub use self::{
    core::{DeviceSide, FunctionCore, FunctionFigures, Phase},
    requests::SourceNo,
    server::{FunctionError, FunctionParts, FunctionServer},
    state::QueueFigures,
};
