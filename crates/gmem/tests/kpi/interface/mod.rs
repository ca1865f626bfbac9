// SPDX-License-Identifier: Apache-2.0
//! Every function of the interface, every error, and the cases at the borders (GMEM 4.1).

mod attaching;
mod devices;
mod endings;
mod faults;
mod paged;
mod panics;
mod regions;
mod sets;
mod spaces;
