// SPDX-License-Identifier: Apache-2.0
//! Synthetic tenants after HyperTRIO IV-D.
//!
//! The paper found three groups among the pages that one tenant's device touches: one page with the ring,
//! touched by every packet; some thirty data pages, each used around 1500 times and then left for the next,
//! in a period; and pages used only while the driver starts. It also found that all tenants use the same
//! addresses, and (V-C) that 8, 32 or 36 pages are active at a time.
//!
//! Taken literally, the last two findings contradict each other: used 1500 times *in a row*, one data page
//! would be active and not six or thirty. [`TenantShape`] reconciles them by a window of live pages that
//! moves on by one page every 1500 packets:
//!
//! ```text
//!   data pages   0 1 2 3 4 5 6 7 8 …            (live_pages = 6, uses_per_page = 1500)
//!   packets 0…        [─────────]
//!   packets 1500…       [─────────]             page 0 is left, and unmapped if asked
//!   packets 3000…         [─────────]
//! ```
//!
//! [`Workload::Seq`] is the literal reading. A tenant's stream is a function of the recipe, the seed and
//! the tenant's number alone, computed in integers, so that it is the same everywhere.

pub(crate) mod random_stream;
mod shape;
mod stream;

pub use shape::{
    DataPages, GroupAccess, InitPages, MAX_GROUP_PAGES, PageChoice, RunLengths, SinglePage,
    Stagger, TenantShape, ThirdPage, Timing, Unmap, Workload,
};
pub use stream::SyntheticTenant;
