// SPDX-License-Identifier: Apache-2.0
//! Traces of DMA: which memory devices have touched, and when (VPRI 4.2, 5.3).
//!
//! These differ from the other traces of this crate. Those record translation requests, and feed a model of
//! translation; these record accesses to a VM's memory, and feed decisions about that memory.
//!
//! ```text
//!   a device's log ──► AccessRecord ──► pagetide-access-log: our format, written live, read back
//!   other people's ──► BlockRequest ◄── block/     disk addresses, no memory in them
//!                          │
//!                 SectionTouch: when, which device, which section
//!                          ▼
//!                      analysis/        footprint, access counts, reuse intervals
//! ```
//! A **section** is the unit in which memory is tracked and evicted, 2 MiB by default. A **space** is a
//! VM's memory as its host numbers it; addresses in an access log are offsets in it.

pub(crate) mod analysis;
pub(crate) mod block;
