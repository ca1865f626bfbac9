// SPDX-License-Identifier: Apache-2.0
//! A VM's table of extents: what its pool keeps of each, and which numbers are in use.
//!
//! An entry is two words in the pool. It is written once its batch has been acknowledged, and before any
//! page word names the extent. How many pages of an extent are live follows from the page words, so the
//! pool does not have it: a successor counts them ([`ExtentNumbers::recover`]). An entry whose extent no
//! word names is free, whatever it says.
//!
//! ```text
//!   word 0   │ version: 64, 0 = no extent                     │
//!   word 1   │ first sector: 48            │ sectors: 16      │
//! ```

use crate::batch::{EXTENT_PAGES_MAX, EXTENT_SECTORS_MAX};
use crate::{ExtentNo, Place, Position, Room, SectorNo, TierKind, Version, VmId};

const SECTORS_BITS: u32 = 16;

/// An extent as the pool keeps it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExtentEntry {
    /// The version that its pages are sealed under.
    pub version: Version,
    /// First sector; 0 in a tier without sectors.
    pub start: SectorNo,
    /// Sectors; 0 in a tier without sectors.
    pub sectors: u16,
}

impl ExtentEntry {
    /// Bytes of an entry in the pool.
    pub const BYTES: usize = 16;

    /// The entry of an extent that was written to `room`.
    #[must_use]
    pub fn new(version: Version, room: Room) -> Self {
        Self {
            version,
            start: room.start,
            sectors: room.sectors,
        }
    }

    /// The kind of tier that it is in: only a disk has sectors.
    #[must_use]
    pub const fn kind(self) -> TierKind {
        match self.sectors {
            0 => TierKind::Remote,
            _ => TierKind::Disk,
        }
    }

    /// As the pool keeps it; `None` if there is no such sector on any disk.
    #[must_use]
    pub fn words(self) -> Option<[u64; 2]> {
        if self.start.0 >> (u64::BITS - SECTORS_BITS) != 0 {
            return None;
        }
        let place = self.start.0 << SECTORS_BITS | u64::from(self.sectors);
        Some([self.version.0, place])
    }

    /// The entry in these words of a pool; `None` if there is no extent, or not one that was ever written.
    #[must_use]
    pub fn of(words: [u64; 2]) -> Option<Self> {
        let sectors = u16::try_from(words[1] & u64::from(u16::MAX)).unwrap_or(u16::MAX);
        if words[0] == 0 || sectors > EXTENT_SECTORS_MAX {
            return None;
        }
        Some(Self {
            version: Version(words[0]),
            start: SectorNo(words[1] >> SECTORS_BITS),
            sectors,
        })
    }

    /// The place of one of its pages, of `vm`'s extent `number`.
    #[must_use]
    pub fn place(self, vm: VmId, number: ExtentNo, position: Position, sectors: u16) -> Place {
        Place {
            extent: crate::ExtentName {
                vm,
                number,
                version: self.version,
            },
            position,
            start: self.start,
            sectors,
        }
    }
}

/// What is left of an extent of which a page was forgotten.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Left {
    /// Other pages.
    Pages,
    /// Nothing: the number is free again, and the entry in the pool may be cleared.
    Nothing,
}

/// A number or a page count that cannot be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NumberError {
    /// The table is shorter.
    #[error("extent {0:?} is outside the table of extents")]
    Outside(ExtentNo),
    /// It has no page.
    #[error("extent {0:?} has no page left to forget")]
    Empty(ExtentNo),
    /// More pages than fit in an extent.
    #[error("extent {0:?} has more pages than fit in one")]
    Crowded(ExtentNo),
}

/// Which extent numbers are in use, and how many live pages each has: 2 bytes for each number up to the
/// highest that was in use, and 4 for each of them that is free.
#[derive(Debug)]
pub struct ExtentNumbers {
    entries: u32,
    live: Vec<u16>,
    free: Vec<u32>,
}

/// Live pages of a number that is taken and has no page yet.
const TAKEN: u16 = u16::MAX;

impl ExtentNumbers {
    /// All numbers of a table of `entries` are free.
    #[must_use]
    pub fn new(entries: u32) -> Self {
        Self {
            entries,
            live: Vec::new(),
            free: Vec::new(),
        }
    }

    /// The numbers as the page words of a dead daemon have them: `named` has the extent of each word.
    ///
    /// # Errors
    /// [`NumberError`], if a word names an extent outside the table or too many name the same.
    pub fn recover(
        entries: u32,
        named: impl IntoIterator<Item = ExtentNo>,
    ) -> Result<Self, NumberError> {
        let mut live: Vec<u16> = Vec::new();
        for number in named {
            if number.0 >= entries {
                return Err(NumberError::Outside(number));
            }
            let index = number.0 as usize;
            live.resize(live.len().max(index + 1), 0);
            let pages = &mut live[index];
            if usize::from(*pages) == EXTENT_PAGES_MAX {
                return Err(NumberError::Crowded(number));
            }
            *pages += 1;
        }
        let free = (0..).zip(&live).filter(|(_, pages)| **pages == 0);
        let mut free: Vec<u32> = free.map(|(number, _)| number).collect();
        free.reverse();
        Ok(Self {
            entries,
            live,
            free,
        })
    }

    /// Takes a free number for a batch; `None` if the table is full.
    pub fn take(&mut self) -> Option<ExtentNo> {
        if let Some(number) = self.free.pop() {
            self.live[number as usize] = TAKEN;
            return Some(ExtentNo(number));
        }
        let next = u32::try_from(self.live.len()).ok();
        let next = next.filter(|next| *next < self.entries)?;
        self.live.push(TAKEN);
        Some(ExtentNo(next))
    }

    /// Says how many pages an extent has, once it is written and before any word names it. Those that then
    /// do not move to it are forgotten like others. No page at all gives the number back.
    ///
    /// # Errors
    /// [`NumberError`].
    pub fn begin(&mut self, number: ExtentNo, pages: u16) -> Result<Left, NumberError> {
        let live = (self.live)
            .get_mut(number.0 as usize)
            .filter(|live| **live == TAKEN)
            .ok_or(NumberError::Outside(number))?;
        if usize::from(pages) > EXTENT_PAGES_MAX {
            return Err(NumberError::Crowded(number));
        }
        *live = pages;
        Ok(self.left(number))
    }

    /// A page of it is not needed any more.
    ///
    /// # Errors
    /// [`NumberError`].
    pub fn forget_page(&mut self, number: ExtentNo) -> Result<Left, NumberError> {
        let live = match self.live.get_mut(number.0 as usize) {
            Some(live) => live,
            None if number.0 < self.entries => return Err(NumberError::Empty(number)),
            None => return Err(NumberError::Outside(number)),
        };
        if *live == 0 || *live == TAKEN {
            return Err(NumberError::Empty(number));
        }
        *live -= 1;
        Ok(self.left(number))
    }

    fn left(&mut self, number: ExtentNo) -> Left {
        if self.live[number.0 as usize] > 0 {
            return Left::Pages;
        }
        self.free.push(number.0);
        Left::Nothing
    }

    /// True if an extent of this number has pages, or is being written.
    #[must_use]
    pub fn is_used(&self, number: ExtentNo) -> bool {
        (self.live.get(number.0 as usize)).is_some_and(|pages| *pages > 0)
    }

    /// Memory it takes, in bytes, about.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.live.capacity() * 2 + self.free.capacity() * 4) as u64
    }

    /// Numbers in use.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.live.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::cast_possible_truncation, reason = "random numbers are cut")]

    use super::*;
    use pagetide_random::SplitMix64;
    use std::collections::BTreeMap;

    #[test]
    fn entry_survives_the_way_through_the_pool_and_nonsense_is_no_entry() {
        for (version, start, sectors) in
            [(1, 0, 0), (u64::MAX, (1 << 48) - 1, 4096), (7, 32_768, 1)]
        {
            let entry = ExtentEntry {
                version: Version(version),
                start: SectorNo(start),
                sectors,
            };
            assert_eq!(ExtentEntry::of(entry.words().unwrap()), Some(entry));
        }
        let far = ExtentEntry {
            version: Version(1),
            start: SectorNo(1 << 48),
            sectors: 1,
        };
        assert_eq!(far.words(), None);
        assert_eq!(ExtentEntry::of([0, 9]), None);
        assert_eq!(ExtentEntry::of([3, 4097]), None);
    }

    #[test]
    fn numbers_follow_a_naive_model_through_recoveries() {
        const ENTRIES: u32 = 20;
        let mut random = SplitMix64::new(1);
        let mut model: BTreeMap<ExtentNo, u16> = BTreeMap::new();
        let mut numbers = ExtentNumbers::new(ENTRIES);
        for step in 0..20_000 {
            match random.below(8) {
                0..=2 => match numbers.take() {
                    None => assert_eq!(model.len(), ENTRIES as usize),
                    Some(number) => {
                        assert!(!model.contains_key(&number), "step {step}");
                        let pages = random.below(4) as u16;
                        let left = numbers.begin(number, pages).unwrap();
                        assert_eq!(left == Left::Nothing, pages == 0);
                        if pages > 0 {
                            model.insert(number, pages);
                        }
                    }
                },
                3 if step % 100 == 3 => {
                    let named = model
                        .iter()
                        .flat_map(|(number, pages)| std::iter::repeat_n(*number, (*pages).into()));
                    numbers = ExtentNumbers::recover(ENTRIES, named).unwrap();
                }
                _ => {
                    let number = ExtentNo(random.below(u64::from(ENTRIES) + 1) as u32);
                    match (numbers.forget_page(number), model.get_mut(&number)) {
                        (Ok(Left::Nothing), Some(1)) => assert!(model.remove(&number).is_some()),
                        (Ok(Left::Pages), Some(pages)) => *pages -= 1,
                        (Err(NumberError::Empty(_)), None) => assert!(number.0 < ENTRIES),
                        (Err(NumberError::Outside(_)), None) => assert_eq!(number.0, ENTRIES),
                        other => panic!("step {step}: {other:?}"),
                    }
                }
            }
            assert_eq!(numbers.in_use(), model.len());
        }
    }

    #[test]
    fn words_that_cannot_be_are_typed_errors() {
        let far = ExtentNumbers::recover(4, [ExtentNo(4)]);
        assert_eq!(far.unwrap_err(), NumberError::Outside(ExtentNo(4)));
        let crowded = ExtentNumbers::recover(4, std::iter::repeat_n(ExtentNo(1), 513));
        assert_eq!(crowded.unwrap_err(), NumberError::Crowded(ExtentNo(1)));
        let mut numbers = ExtentNumbers::new(1);
        let first = numbers.take().unwrap();
        assert_eq!(numbers.take(), None);
        assert_eq!(
            numbers.forget_page(first),
            Err(NumberError::Empty(first)),
            "no page yet"
        );
        assert_eq!(numbers.begin(first, 513), Err(NumberError::Crowded(first)));
        assert_eq!(numbers.begin(first, 2), Ok(Left::Pages));
        assert_eq!(
            numbers.begin(first, 2),
            Err(NumberError::Outside(first)),
            "once"
        );
    }
}
