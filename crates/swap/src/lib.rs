// SPDX-License-Identifier: Apache-2.0
//! Where cold pages go, and how they are chosen (Taiji 4.2).
//!
//! - [`pool`]: the metadata pool, one file per VM that outlives the daemon: page
//!   words, identity of the VM, stored content.
//! - [`slots`]: room for stored content within the pool.
//! - [`tier`]: what stored content looks like: zero, same-filled, lz4, uncompressed, zstd; what is in the pool always has a CRC.
//! - [`store`]: pool, slots and tiers together as gmem's `ContentStore`; [`demoter`]: packs what stayed
//!   cold smaller.
//! - [`slow`]: tiers outside memory, under the pool: how pages get there and back.
//! - [`limit`]: the VM's limit with its watermarks; [`host_share`]: what a budget of the whole host has to
//!   say beside it.
//! - [`cgroup`]: how much memory the cgroups of this process allow; [`room`]: whether more content
//!   fits within that.
//! - [`evictor`]: evicts one section; [`reclaim`]: which sections, and how many, as
//!   `pagetide-policy` decides; [`reserve`]: sections ready for a fill that needs room at once;
//!   [`heat`]: what is known of hot and cold, and its cost; [`together`]: sections that faults have led back to;
//!   [`touched`]: sections of which stored pages were needed.
//! - [`scheduled`]: when the threads that do this work use CPU time, beside faults; [`pace`]: what they ask
//!   between two steps of it.
//!
//! ```
//! use pagetide_addr::PageNo;
//! use pagetide_swap::tier::{Form, PAGE, Packer, Seed, unpack};
//!
//! let (mut packer, seed) = (Packer::default(), Seed(0x5eed));
//! assert!(packer.pack(seed, PageNo(1), &[0; PAGE]).is_none(), "zeros take no room");
//!
//! let page = [7; PAGE];
//! let stored = packer.pack(seed, PageNo(1), &page).expect("not zeros").to_vec();
//! assert!(stored.len() < PAGE / 10);
//! let mut back = [0; PAGE];
//! assert_eq!(unpack(seed, PageNo(1), Form::Lz4, &stored, &mut back), Ok(()));
//! assert_eq!(back, page);
//! assert!(unpack(seed, PageNo(2), Form::Lz4, &stored, &mut back).is_err(), "another page's");
//! ```

pub mod cgroup;
pub mod demoter;
pub mod direct;
pub mod evictor;
pub mod heat;
pub mod host_share;
mod keeper;
pub mod limit;
pub mod pace;
pub mod pool;
pub mod reclaim;
pub mod reserve;
pub mod room;
pub mod scheduled;
pub mod slots;
pub mod slow;
pub mod store;
mod taken;
pub mod tier;
pub mod together;
pub mod touched;

pub use demoter::Demoter;
pub use direct::DirectReclaim;
pub use evictor::{EvictReport, Evictor};
pub use heat::{HeatCost, HeatReport};
pub use host_share::HostShare;
pub use limit::Limit;
pub use pace::Pace;
pub use pool::{Counter, Pool, PoolCap, PoolError, PoolWords};
pub use reclaim::Reclaimer;
pub use reserve::Reserve;
pub use room::Room;
pub use slow::{ChainStore, Sinker, SlowTiers};
pub use store::PoolStore;
