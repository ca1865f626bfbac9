// SPDX-License-Identifier: Apache-2.0
//! Why sectors are not had, or not accepted.

use crate::SectorNo;

/// Why there is no room now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoRoom {
    /// The VM needs another segment: [`super::Sectors::begin_segment`].
    Segment,
    /// There is no free segment either.
    Full,
    /// A page of this many sectors, or none at all, is not a page.
    Impossible,
}

/// Sectors that are not what the caller takes them for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SectorError {
    /// They do not lie in one segment of this disk.
    #[error("{sectors} sectors from {start:?} on are no extent of this disk")]
    Outside {
        /// The first one.
        start: SectorNo,
        /// How many.
        sectors: u16,
    },
    /// Another VM has the segment, or nobody.
    #[error("the segment of {0:?} is not this VM's")]
    NotOurs(SectorNo),
    /// They are not used.
    #[error("{sectors} sectors from {start:?} on are not in use")]
    NotUsed {
        /// The first one.
        start: SectorNo,
        /// How many.
        sectors: u16,
    },
    /// Two pages have the same sectors.
    #[error("{sectors} sectors from {start:?} on are used by two pages")]
    UsedTwice {
        /// The first one.
        start: SectorNo,
        /// How many.
        sectors: u16,
    },
}
