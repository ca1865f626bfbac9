// SPDX-License-Identifier: Apache-2.0
//! The software DPU: its devices ([`DeviceSet`]), in the daemon itself or in a
//! process of their own ([`process`]).

mod account;
pub mod process;
mod set;

pub(crate) use set::DeviceSet;
