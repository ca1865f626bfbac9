// SPDX-License-Identifier: Apache-2.0
//! The VPRI function: the device's side of the interface to a host elsewhere (VPRI 5).
//!
//! [`core`] is what the device knows and decides, as a state machine that a driver's
//! messages and the engines' page requests go through; [`requests`] is its account of
//! page requests. `docs/vpri.md` is the specification that both keep.

pub mod core;
mod requests;
#[cfg(test)]
mod tests;

pub use self::{
    core::{DeviceSide, FunctionCore, FunctionFigures, Phase},
    requests::SourceNo,
};
