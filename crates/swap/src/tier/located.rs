// SPDX-License-Identifier: Apache-2.0
//! [`Located`]: what the content bits of a page word say.
//!
//! ```text
//!   Content (56 bits)   │ tag: 4 │ payload: 52                                          │
//!   tag 0   pool, lz4 or uncompressed   │ slot in 64-byte units: 38 │ bytes stored: 14 │
//!   tag 1   same-filled                 │ 0: 20 │ word that fills the page: 32         │
//!   tag 2   pool, zstd                  │ slot in 64-byte units: 38 │ bytes stored: 14 │
//!   tag 3   reserved: pool, zstd with a dictionary
//!   tag 8   disk                        │ 0: 4 │ extent: 32 │ first sector in it: 12 │ sectors less one: 4 │
//!   tag 9   remote                      │ 0: 4 │ extent: 32 │ position in it: 12     │ sectors less one: 4 │
//! ```
//! Tag 0 holds what a pool holds whose words have no tags: a slot had 42 bits there, of which no pool has
//! ever used more than 38 (16 TiB of content). So a word of such a pool reads the same.
//!
//! The sectors of a remote page are what a successor counts in the tier's limit.
//!
//! A word that no writer of this version writes is damaged, or of a newer version: [`Located::of`] refuses it.

use super::crc::{CRC_BYTES, STORED_BYTES_MAX};
use crate::slots::SlotNo;
use pagetide_gmem::Content;
use pagetide_tiers::{ExtentNo, Position, TierKind, batch::PAGE_SECTORS_MAX};

const PAYLOAD_BITS: u32 = 52;
const LENGTH_BITS: u32 = 14;
const SLOT_BITS: u32 = PAYLOAD_BITS - LENGTH_BITS;
const TAG_POOL: u64 = 0;
const TAG_SAME: u64 = 1;
const TAG_ZSTD: u64 = 2;
const TAG_DISK: u64 = 8;
const TAG_REMOTE: u64 = 9;
const EXTENT_BITS: u32 = 32;
const POSITION_BITS: u32 = 12;
const SECTORS_BITS: u32 = 4;
const _: () = assert!(STORED_BYTES_MAX < 1 << LENGTH_BITS);

/// How the bytes of a slot make a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// An lz4 block.
    Lz4,
    /// The page itself: lz4 does not make it smaller.
    Uncompressed,
    /// A zstd frame: it stayed cold.
    Zstd,
}

/// A content in a slot of the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InPool {
    /// Its slot.
    pub slot: SlotNo,
    /// Its length with the CRC, in bytes.
    pub bytes: u32,
    /// What the bytes are.
    pub form: Form,
}

/// Where the content of an absent page is, if it is not a page of zeros.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Located {
    /// In the pool.
    Pool(InPool),
    /// Here: this word, again and again.
    Same(u32),
    /// Outside memory.
    Slow(InSlow),
}

/// A content in a tier outside memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InSlow {
    /// Which tier.
    pub kind: TierKind,
    /// Its extent.
    pub extent: ExtentNo,
    /// Where in the extent it begins.
    pub position: Position,
    /// Its sectors; in a tier without sectors, how many would hold it.
    pub sectors: u16,
}

impl InSlow {
    fn of(kind: TierKind, payload: u64) -> Option<Self> {
        let part = |shift: u32, bits: u32| payload >> shift & ((1 << bits) - 1);
        let extent = payload >> (POSITION_BITS + SECTORS_BITS);
        let Ok(extent) = u32::try_from(extent).map(ExtentNo) else {
            return None;
        };
        let sectors = u16::try_from(part(0, SECTORS_BITS)).unwrap_or(0);
        let position = u32::try_from(part(SECTORS_BITS, POSITION_BITS)).unwrap_or(0);
        Some(Self {
            kind,
            extent,
            position: Position(position),
            sectors: sectors + 1,
        })
    }

    fn payload(self) -> Option<u64> {
        let low = match self.sectors {
            1..=PAGE_SECTORS_MAX => u64::from(self.sectors - 1),
            _ => return None,
        };
        if self.position.0 >> POSITION_BITS != 0 {
            return None;
        }
        let extent = u64::from(self.extent.0) << (POSITION_BITS + SECTORS_BITS);
        Some(extent | u64::from(self.position.0) << SECTORS_BITS | low)
    }
}
const _: () = assert!(EXTENT_BITS + POSITION_BITS + SECTORS_BITS <= PAYLOAD_BITS);

/// Content bits that no store of this version has written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a page word with content {0:#x} is damaged, or was written by a newer version")]
pub struct UnknownContent(pub u64);

impl Located {
    /// What a page word's content says.
    ///
    /// # Errors
    /// [`UnknownContent`].
    pub fn of(content: Content) -> Result<Self, UnknownContent> {
        let bits = content.bits();
        let unknown = UnknownContent(bits);
        let payload = bits & ((1 << PAYLOAD_BITS) - 1);
        match bits >> PAYLOAD_BITS {
            TAG_POOL => {
                let (slot, bytes) = slot_of(payload).ok_or(unknown)?;
                let form = match bytes as usize {
                    STORED_BYTES_MAX => Form::Uncompressed,
                    _ => Form::Lz4,
                };
                Ok(Self::Pool(InPool { slot, bytes, form }))
            }
            TAG_ZSTD => {
                let (slot, bytes) = slot_of(payload).ok_or(unknown)?;
                let form = Form::Zstd;
                Ok(Self::Pool(InPool { slot, bytes, form }))
            }
            TAG_SAME => match u32::try_from(payload) {
                Ok(word) if word != 0 => Ok(Self::Same(word)),
                _ => Err(unknown),
            },
            TAG_DISK => InSlow::of(TierKind::Disk, payload)
                .map(Self::Slow)
                .ok_or(unknown),
            TAG_REMOTE => InSlow::of(TierKind::Remote, payload)
                .map(Self::Slow)
                .ok_or(unknown),
            _ => Err(unknown),
        }
    }

    /// The content as a page word holds it; `None` if it is a page of zeros, or its slot number or length is
    /// impossible.
    #[must_use]
    pub fn content(self) -> Option<Content> {
        match self {
            Self::Same(0) => None,
            Self::Same(word) => Content::at(TAG_SAME << PAYLOAD_BITS | u64::from(word)),
            Self::Slow(in_slow) => {
                let tag = match in_slow.kind {
                    TierKind::Disk => TAG_DISK,
                    TierKind::Remote => TAG_REMOTE,
                };
                Content::at(tag << PAYLOAD_BITS | in_slow.payload()?)
            }
            Self::Pool(InPool { slot, bytes, form }) => {
                let tag = match form {
                    Form::Lz4 | Form::Uncompressed => TAG_POOL,
                    Form::Zstd => TAG_ZSTD,
                };
                if slot.0 >> SLOT_BITS != 0 || !is_length(bytes) {
                    return None;
                }
                let payload = slot.0 << LENGTH_BITS | u64::from(bytes);
                Content::at(tag << PAYLOAD_BITS | payload)
            }
        }
    }

    /// The slot, if it has one.
    #[must_use]
    pub const fn in_pool(self) -> Option<InPool> {
        match self {
            Self::Pool(in_pool) => Some(in_pool),
            Self::Same(_) | Self::Slow(_) => None,
        }
    }
}

fn slot_of(payload: u64) -> Option<(SlotNo, u32)> {
    let bytes = u32::try_from(payload & ((1 << LENGTH_BITS) - 1)).unwrap_or(0);
    is_length(bytes).then_some((SlotNo(payload >> LENGTH_BITS), bytes))
}

const fn is_length(bytes: u32) -> bool {
    bytes as usize > CRC_BYTES && bytes as usize <= STORED_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    fn at(bits: u64) -> Content {
        Content::at(bits).unwrap()
    }

    #[test]
    fn words_of_pools_without_tags_read_the_same() {
        // Slot and length as version 1 has packed them before there were tags: slot << 14 | bytes.
        for (bits, slot, bytes, form) in [
            (0x0000_0000_0000_0005, 0, 5, Form::Lz4),
            (0x0000_0000_0000_47a3, 1, 1_955, Form::Lz4),
            (0x0000_0000_0028_1004, 160, 4_100, Form::Uncompressed),
            (0x000f_ffff_ffff_c040, (1 << 38) - 1, 64, Form::Lz4),
        ] {
            let slot = SlotNo(slot);
            let located = Located::Pool(InPool { slot, bytes, form });
            assert_eq!(Located::of(at(bits)), Ok(located), "{bits:#x}");
            assert_eq!(located.content(), Some(at(bits)));
        }
    }

    #[test]
    fn location_survives_the_way_through_a_page_word() {
        let mut random = SplitMix64::new(3);
        for _ in 0..10_000 {
            let slot = SlotNo(random.below(1 << SLOT_BITS));
            let bytes = u32::try_from(5 + random.below(4_095)).unwrap();
            let extent = ExtentNo(u32::try_from(random.below(1 << 32)).unwrap());
            let position = Position(u32::try_from(random.below(1 << 12)).unwrap());
            let located = match random.below(6) {
                4 => Located::Slow(InSlow {
                    kind: TierKind::Disk,
                    extent,
                    position,
                    sectors: u16::try_from(1 + random.below(16)).unwrap(),
                }),
                5 => Located::Slow(InSlow {
                    kind: TierKind::Remote,
                    extent,
                    position,
                    sectors: u16::try_from(1 + random.below(16)).unwrap(),
                }),
                0 => Located::Same(u32::try_from(1 + random.below(u64::from(u32::MAX))).unwrap()),
                1 => Located::Pool(InPool {
                    slot,
                    bytes: u32::try_from(STORED_BYTES_MAX).unwrap(),
                    form: Form::Uncompressed,
                }),
                2 => Located::Pool(InPool {
                    slot,
                    bytes,
                    form: Form::Zstd,
                }),
                _ => Located::Pool(InPool {
                    slot,
                    bytes,
                    form: Form::Lz4,
                }),
            };
            assert_eq!(Located::of(located.content().unwrap()), Ok(located));
        }
    }

    #[test]
    fn what_has_no_place_in_a_word_makes_none() {
        let in_pool = |slot, bytes| {
            let slot = SlotNo(slot);
            let form = Form::Lz4;
            Located::Pool(InPool { slot, bytes, form })
        };
        let slow = |kind, position, sectors| {
            Located::Slow(InSlow {
                kind,
                extent: ExtentNo(3),
                position: Position(position),
                sectors,
            })
        };
        for located in [
            Located::Same(0),
            slow(TierKind::Disk, 0, 0),
            slow(TierKind::Disk, 0, 17),
            slow(TierKind::Disk, 1 << 12, 1),
            slow(TierKind::Remote, 0, 0),
            slow(TierKind::Remote, 0, 17),
            in_pool(1 << 38, 64),
            in_pool(0, 0),
            in_pool(0, 4),
            in_pool(0, 4_101),
        ] {
            assert_eq!(located.content(), None, "{located:?}");
        }
    }

    #[test]
    fn words_that_nobody_has_written_are_refused() {
        let tagged = |tag: u64, payload: u64| tag << PAYLOAD_BITS | payload;
        let reserved = (3..8)
            .chain(10..16)
            .map(|tag| tagged(tag, 1 << LENGTH_BITS | 64));
        let wrong = [
            tagged(TAG_SAME, 0),
            tagged(TAG_SAME, 1 << 32),
            tagged(TAG_POOL, 1 << LENGTH_BITS),
            tagged(TAG_POOL, 4),
            tagged(TAG_POOL, 4_101),
            tagged(TAG_ZSTD, 16_383),
            tagged(TAG_ZSTD, 0),
            tagged(TAG_DISK, 1 << 48),
            tagged(TAG_REMOTE, 1 << 48),
        ];
        for bits in wrong.into_iter().chain(reserved) {
            assert_eq!(Located::of(at(bits)), Err(UnknownContent(bits)));
        }
    }
}
