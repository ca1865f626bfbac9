// SPDX-License-Identifier: Apache-2.0
//! The driver's side of the wire without its decisions: how a connection is set up, the memory shared with
//! the function, its rings. [`driver`](crate::driver) is built on it, and so are testers of functions.

pub mod area;
pub mod connect;
pub mod event;
pub mod ring;
