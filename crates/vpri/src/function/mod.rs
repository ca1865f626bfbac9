// SPDX-License-Identifier: Apache-2.0
//! The VPRI function: the device's side of the interface to a host elsewhere (VPRI 5).
//!
//! [`core`] is what the device knows and decides, as a state machine that a driver's
//! messages and the engines' page requests go through; [`requests`] is its account of
//! page requests; [`server`] is the function as a vhost-user back end over it. `docs/vpri.md`
//! is the specification that all of them keep.

pub mod core;
mod memory;
mod messages;
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
