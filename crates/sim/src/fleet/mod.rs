// SPDX-License-Identifier: Apache-2.0
//! Synthetic guests: our counterpart of the paper's synthetic environment (VPRI 7.3).

mod activity;
mod aged;
mod disk;
mod guest;
mod nic;
mod production;
mod random;
mod round;
mod sink;
mod statistics;
mod stream;

pub use guest::{GuestRecipe, Load, paper_fleet};
pub use production::{Day, Fleet, Life, ProductionGuest, ProductionHost, Wakings};
pub use round::Round;
pub use statistics::{ColdShares, GuestStatistics, production_statistics, statistics};
pub use stream::{DISK, GuestStream, NIC, PROLOGUE};
