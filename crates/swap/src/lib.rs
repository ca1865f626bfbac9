// SPDX-License-Identifier: Apache-2.0
//! Where pages go when they are cold, and how they are chosen (Taiji 4.2).
//!
//! - [`pool`]: the metadata pool, one file per VM that outlives the daemon: page
//!   words, identity of the VM, stored content.
//! - [`slots`]: room for stored content within the pool.
//! - [`tier`]: what stored content looks like: zero, lz4, uncompressed; always with a CRC.
//! - [`store`]: pool, slots and tiers together as gmem's `ContentStore`.
//! - [`limit`]: the VM's limit with its marks.
//! - [`cgroup`]: what the memory cgroups of this process allow it; [`room`]: whether content may
//!   still be stored within that.
//! - [`evictor`]: one section out of memory; [`reclaim`]: which, and how many,
//!   as `pagetide-policy` decides; [`reserve`]: what stands ready for whoever needs room at once;
//!   [`heat`]: what is known of hot and cold, and what that costs.

pub mod cgroup;
pub mod evictor;
pub mod heat;
pub mod limit;
pub mod pool;
pub mod reclaim;
pub mod reserve;
pub mod room;
pub mod slots;
pub mod store;
pub mod tier;

pub use evictor::{EvictReport, Evictor};
pub use heat::{HeatCost, HeatReport};
pub use limit::Limit;
pub use pool::{Counter, Pool, PoolError, PoolWords};
pub use reclaim::{AccessTracker, Reclaimer, Sampled, Touched};
pub use reserve::{DirectReclaim, Reserve};
pub use room::Room;
pub use store::PoolStore;
