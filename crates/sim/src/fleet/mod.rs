// SPDX-License-Identifier: Apache-2.0
//! Guests that are made up: what the paper's synthetic environment (VPRI 7.3) is here.

mod activity;
mod chance;
mod cpu;
mod disk;
mod guest;
mod nic;
mod sink;
mod stream;

pub use guest::{GuestRecipe, Load, paper_fleet};
pub use stream::{DISK, GuestStream, NIC, PROLOGUE};
