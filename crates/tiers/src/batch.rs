// SPDX-License-Identifier: Apache-2.0
//! Sealed pages on their way down, and the names of their places.
//!
//! ```text
//!   batch    │ page, sealed │ padding │ page, sealed │ …              granules of the tier
//!   disk     position = sector of the page within the extent (512 bytes)
//!   remote   position = how many pages of the extent come before it
//! ```
//! A batch becomes one *extent*, under a *version* that its VM has never used before. Positions are unique
//! within an extent, so version and position together occur once in a VM's life: they are the nonce of the
//! page's seal ([`crate::seal`]).

use crate::TierKind;
use std::fmt;

/// Bytes of a sector: the unit of places on a disk, whatever its blocks are.
pub const SECTOR_BYTES: usize = 512;
/// Most sectors of an extent: a page's position in it has 12 bits in its word.
pub const EXTENT_SECTORS_MAX: u16 = 1 << 12;
/// Most pages of an extent: those of one section.
pub const EXTENT_PAGES_MAX: usize = 512;
/// Most sectors of a sealed page: their number less 1 has 4 bits in its word.
pub const PAGE_SECTORS_MAX: u16 = 1 << 4;

/// Longest sealed page.
pub const SEALED_BYTES_MAX: usize = PAGE_SECTORS_MAX as usize * SECTOR_BYTES;

/// A VM, as tiers know it: drawn at random when its pool is created, so no two VMs ever share one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub u128);

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VM {self}")
    }
}

/// A disk tier, as its header has it: drawn when the header is first written.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DiskId(pub u128);

/// Index into a VM's table of extents.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ExtentNo(pub u32);

/// Counts the batches of a VM. Never repeated, across deaths of the daemon too.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version(pub u64);

/// Where in an extent a page is; see the header for what it counts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Position(pub u32);

/// A sector of a disk tier.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SectorNo(pub u64);

impl SectorNo {
    /// The sector `sectors` further on.
    #[must_use]
    pub const fn plus(self, sectors: u64) -> Self {
        Self(self.0 + sectors)
    }

    /// Offset of its first byte.
    #[must_use]
    pub const fn byte_offset(self) -> u64 {
        self.0 * SECTOR_BYTES as u64
    }
}

/// An extent of a VM in one of its lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ExtentName {
    /// Whose.
    pub vm: VmId,
    /// Its place in the VM's table.
    pub number: ExtentNo,
    /// Which of all extents that had or will have this number.
    pub version: Version,
}

/// Where a sealed page is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Place {
    /// Its extent.
    pub extent: ExtentName,
    /// Where in the extent.
    pub position: Position,
    /// The first sector of the extent; 0 in a tier without sectors.
    pub start: SectorNo,
    /// Sectors that the page takes; in a tier without sectors, how many would hold it.
    pub sectors: u16,
}

/// Room for an extent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Room {
    /// The kind of tier that it is in.
    pub kind: TierKind,
    /// First sector; 0 in a tier without sectors.
    pub start: SectorNo,
    /// Sectors; 0 in a tier without sectors.
    pub sectors: u16,
    /// How many pages of the batch it is for.
    pub pages: u16,
}

/// Why a page cannot be added to a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BatchError {
    /// The room was made for fewer pages or shorter ones.
    #[error("a page of {bytes} bytes does not fit in the room made for the batch")]
    NoRoom {
        /// Length of the sealed page.
        bytes: usize,
    },
    /// A sealed page must be whole granules and not too long.
    #[error("a sealed page of {bytes} bytes is not 1 to 16 sectors of 512 bytes")]
    Length {
        /// Length of the sealed page.
        bytes: usize,
    },
}

/// One page of a batch.
#[derive(Clone, Copy, Debug)]
pub struct SealedPage<'a> {
    /// Where in the extent.
    pub position: Position,
    /// Ciphertext and tag.
    pub bytes: &'a [u8],
}

/// The sealed pages of an extent, one after the other.
#[derive(Debug)]
pub struct Batch {
    extent: ExtentName,
    room: Room,
    bytes: Vec<u8>,
    /// For each page, where its bytes end.
    ends: Vec<usize>,
}

impl Batch {
    /// A batch without pages for `room`.
    #[must_use]
    pub fn new(extent: ExtentName, room: Room) -> Self {
        Self {
            extent,
            room,
            bytes: Vec::with_capacity(usize::from(room.sectors) * SECTOR_BYTES),
            ends: Vec::with_capacity(usize::from(room.pages)),
        }
    }

    /// The extent that it becomes.
    #[must_use]
    pub fn extent(&self) -> ExtentName {
        self.extent
    }

    /// Its room.
    #[must_use]
    pub fn room(&self) -> Room {
        self.room
    }

    /// The position of the page that is added next: what it must be sealed for.
    #[must_use]
    pub fn next_position(&self) -> Position {
        self.position_at(self.ends.len(), self.bytes.len())
    }

    fn position_at(&self, index: usize, offset: usize) -> Position {
        let position = match self.room.kind {
            TierKind::Disk => offset / SECTOR_BYTES,
            TierKind::Remote => index,
        };
        Position(u32::try_from(position).unwrap_or(u32::MAX))
    }

    /// Adds a sealed page; returns where it will be.
    ///
    /// # Errors
    /// [`BatchError`]; nothing is added then.
    pub fn push(&mut self, sealed: &[u8]) -> Result<Place, BatchError> {
        let into = self.extend(sealed.len())?;
        into.copy_from_slice(sealed);
        Ok(self.last_place())
    }

    /// Adds a page of `bytes` zeros, to be sealed in place.
    pub(crate) fn extend(&mut self, bytes: usize) -> Result<&mut [u8], BatchError> {
        let whole = self.room.kind != TierKind::Disk || bytes.is_multiple_of(SECTOR_BYTES);
        if bytes == 0 || !whole || bytes > SEALED_BYTES_MAX {
            return Err(BatchError::Length { bytes });
        }
        let start = self.bytes.len();
        let outside = self.room.kind == TierKind::Disk
            && start + bytes > usize::from(self.room.sectors) * SECTOR_BYTES;
        if outside || self.ends.len() == usize::from(self.room.pages) {
            return Err(BatchError::NoRoom { bytes });
        }
        self.bytes.resize(start + bytes, 0);
        self.ends.push(start + bytes);
        Ok(&mut self.bytes[start..])
    }

    /// Where the page that was added last will be.
    pub(crate) fn last_place(&self) -> Place {
        let index = self.ends.len().saturating_sub(1);
        let start = match index {
            0 => 0,
            _ => self.ends[index - 1],
        };
        self.place(self.position_at(index, start), self.bytes.len() - start)
    }

    fn place(&self, position: Position, bytes: usize) -> Place {
        Place {
            extent: self.extent,
            position,
            start: self.room.start,
            sectors: u16::try_from(bytes.div_ceil(SECTOR_BYTES)).unwrap_or(u16::MAX),
        }
    }

    /// Its pages, in order.
    pub fn pages(&self) -> impl Iterator<Item = SealedPage<'_>> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts
            .zip(&self.ends)
            .enumerate()
            .map(|(index, (start, &end))| SealedPage {
                position: self.position_at(index, start),
                bytes: &self.bytes[start..end],
            })
    }

    /// How many pages it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True if it has no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// All its pages as they lie in a disk's extent.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(kind: TierKind, sectors: u16, pages: u16) -> Batch {
        let extent = ExtentName {
            vm: VmId(7),
            number: ExtentNo(3),
            version: Version(9),
        };
        Batch::new(
            extent,
            Room {
                kind,
                start: SectorNo(64),
                sectors,
                pages,
            },
        )
    }

    #[test]
    fn position_on_a_disk_is_the_sector_and_elsewhere_the_index() {
        let pages = [vec![1; 1024], vec![2; 512], vec![3; 4608]];
        for (kind, positions) in [(TierKind::Disk, [0, 2, 3]), (TierKind::Remote, [0, 1, 2])] {
            let mut batch = room(kind, 12, 3);
            for (page, position) in pages.iter().zip(positions) {
                assert_eq!(batch.next_position(), Position(position));
                let place = batch.push(page).unwrap();
                assert_eq!(place.position, Position(position));
                assert_eq!((place.start, place.extent), (SectorNo(64), batch.extent()));
            }
            for ((sealed, page), position) in batch.pages().zip(&pages).zip(positions) {
                assert_eq!(
                    (sealed.position, sealed.bytes),
                    (Position(position), &page[..])
                );
            }
            assert_eq!((batch.len(), batch.bytes().len()), (3, 6144));
        }
    }

    #[test]
    fn page_that_does_not_fit_is_refused_and_leaves_the_batch_as_it_is() {
        let mut batch = room(TierKind::Disk, 3, 2);
        assert!(batch.is_empty());
        assert_eq!(batch.push(&[]), Err(BatchError::Length { bytes: 0 }));
        assert_eq!(
            batch.push(&[0; 100]),
            Err(BatchError::Length { bytes: 100 })
        );
        assert_eq!(
            batch.push(&[0; 17 * 512]),
            Err(BatchError::Length { bytes: 17 * 512 })
        );
        assert_eq!(batch.push(&[0; 1024]).unwrap().sectors, 2);
        assert_eq!(
            batch.push(&[0; 1024]),
            Err(BatchError::NoRoom { bytes: 1024 })
        );
        assert_eq!(batch.push(&[0; 512]).unwrap().position, Position(2));
        assert_eq!(
            batch.push(&[0; 512]),
            Err(BatchError::NoRoom { bytes: 512 })
        );
        assert_eq!(batch.len(), 2);
        let mut remote = room(TierKind::Remote, 0, 1);
        assert_eq!(remote.push(&[0; 700]).unwrap().sectors, 2);
    }
}
