// SPDX-License-Identifier: Apache-2.0
//! The VPRI function: the interface of I/O page faults for a device and a host in different processes, or
//! on different sides of PCIe (VPRI 5).
//!
//! [`wire`] has the messages, specified in `docs/vpri.md`; [`function`] is the device's side of them and
//! [`driver`] the host's; [`frontend`] is what a driver and a tester of functions share. What the messages
//! are about is in `pagetide-vpri`.

pub mod driver;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod frontend;
pub mod function;
pub mod wire;

pub use driver::{Driver, DriverCounts, DriverError};
