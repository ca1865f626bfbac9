// SPDX-License-Identifier: Apache-2.0
//! Where a VMM's RAM is: its files, and where the VMM has mapped them.
//!
//! A VMM may have several RAM files (one per memory backend) and several mappings of one file. The
//! pages of a file are numbered consecutively, starting at a section boundary; so a [`PageNo`](pagetide_addr::PageNo)
//! means the same to every process that has the files, and the layout gives its address in the VMM:
//!
//! ```text
//!   files          ┌──── file 0 ────┐ gap ┌─────── file 1 ───────┐
//!   PageNo         0                n0    m                      m+n1
//!   mappings       └─ hva A ─┘└ hva B ┘   └────── hva C ──────┘
//! ```
//!
//! Every byte of a file is mapped exactly once: a page that the VMM does not map could not be
//! installed, and one mapped twice would have to be protected twice.
//!
//! A layout never changes. A VMM that gains or loses RAM while it runs gets a new one
//! ([`RamLayout::with`], [`RamLayout::without`]), which its [`LiveLayout`] provides to all users
//! from then on. Files that stay keep their page numbers; the numbers of a removed file are free.

mod error;
mod found;
mod live;
mod mapping;
mod new_ram;
mod ram;
mod recorded;
mod watched;

pub use error::LayoutError;
pub use found::SMALLEST_RAM_BYTES;
pub use live::{LiveLayout, RamNews, Strangers};
pub use mapping::{RamMapping, RecordedMapping};
pub use new_ram::NewRam;
pub use ram::{Piece, RamFile, RamLayout};
pub use recorded::{MapsChange, RecordedLayout};
