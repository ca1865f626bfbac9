// SPDX-License-Identifier: Apache-2.0
//! Sealing: who reads the disk or the wire learns nothing, and changes nothing unnoticed.
//!
//! ```text
//!   content      │ length: 2 │ content: 0 to 8,174 │ zeros to a granule of the tier │
//!                └──────────────────────── AES-256-GCM ──────────────────────────────┘
//!   sealed       │ ciphertext, as long                                              │ tag: 16 │
//!
//!   nonce        │ version: 8 │ position in the extent: 4 │            from the pool, never from the tier
//!   bound to it  │ tier: 1 │ page number: 8 │ extent number: 4 │ position: 4 │
//! ```
//! - **No nonce is used twice** with a key: a VM has its own key, a version is used for one batch, and no
//!   two pages of a batch have the same position. The counter of versions is raised in the pool before a
//!   version is used, so a daemon that dies never repeats one.
//! - **No old answer passes**: the version comes from the pool's table of extents. What was sealed under
//!   another version, for another page, place or tier, or by another VM, does not open.
//! - **Lengths tell little**: a page is padded to the granule before it is sealed.
//!
//! The key and the counter stand in the pool on tmpfs and nowhere else. They die with the VM or the host,
//! and what lies in the tiers then is noise.

use crate::batch::{Batch, BatchError, Place, SEALED_BYTES_MAX};
use crate::{DiskId, ExtentNo, Position, TierKind, Version, VmId};
use aes_gcm::{
    Aes256Gcm, KeyInit, Nonce, Tag,
    aead::{AeadInOut, consts::U12},
};
use pagetide_addr::PageNo;
use std::fmt;
use zeroize::Zeroizing;

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;
const TAG_BYTES: usize = 16;
const LENGTH_BYTES: usize = 2;
const BOUND_BYTES: usize = 1 + 8 + 4 + 4;
/// Longest content that can be sealed.
pub const CONTENT_BYTES_MAX: usize = SEALED_BYTES_MAX - TAG_BYTES - LENGTH_BYTES;
const _: () = assert!(CONTENT_BYTES_MAX <= u16::MAX as usize);

/// Why a page could not be sealed or opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SealError {
    /// It is longer than any stored page.
    #[error("a page of {bytes} bytes is too long to be sealed")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// It does not fit in its batch.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The cipher refused; it does for absurd lengths only.
    #[error("the cipher refused a page of {bytes} bytes")]
    Cipher {
        /// Its length with padding.
        bytes: usize,
    },
    /// What the tier returned is not this page as it was sealed last: damaged, old, or of another place.
    #[error("what the {kind} tier returned is not page {page} as it was stored")]
    NotThisPage {
        /// The tier.
        kind: TierKind,
        /// The page.
        page: PageNo,
    },
}

/// No key could be drawn.
#[derive(Debug, thiserror::Error)]
#[error("the kernel returned no random bytes for a key: {0}")]
pub struct NoRandomBytes(getrandom::Error);

fn draw() -> Result<u128, NoRandomBytes> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(NoRandomBytes)?;
    // 0 is said of what has no name.
    Ok(u128::from_le_bytes(bytes).max(1))
}

impl VmId {
    /// One that nobody has.
    ///
    /// # Errors
    /// [`NoRandomBytes`].
    pub fn draw() -> Result<Self, NoRandomBytes> {
        draw().map(Self)
    }
}

impl DiskId {
    /// One that no other disk has.
    ///
    /// # Errors
    /// [`NoRandomBytes`].
    pub fn draw() -> Result<Self, NoRandomBytes> {
        draw().map(Self)
    }
}

/// A VM's key. Wiped when it is dropped, and never printed.
pub struct Key(Box<Zeroizing<[u8; KEY_BYTES]>>);

impl Key {
    /// Draws a key from the kernel.
    ///
    /// # Errors
    /// [`NoRandomBytes`].
    pub fn generate() -> Result<Self, NoRandomBytes> {
        let mut key = Box::new(Zeroizing::new([0; KEY_BYTES]));
        getrandom::fill(&mut key[..]).map_err(NoRandomBytes)?;
        Ok(Self(key))
    }

    /// The key with these bytes: those of a pool.
    #[must_use]
    pub fn from_pool(bytes: &[u8; KEY_BYTES]) -> Self {
        let mut key = Box::new(Zeroizing::new([0; KEY_BYTES]));
        key.copy_from_slice(bytes);
        Self(key)
    }

    /// Its bytes, to be written into the pool and nowhere else.
    #[must_use]
    pub fn for_pool(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// Length of the sealed form of `content_bytes` in a tier with this granule.
///
/// # Errors
/// [`SealError::TooLong`].
pub fn sealed_bytes(content_bytes: usize, granule_bytes: usize) -> Result<usize, SealError> {
    if content_bytes > CONTENT_BYTES_MAX {
        return Err(SealError::TooLong {
            bytes: content_bytes,
        });
    }
    Ok((content_bytes + LENGTH_BYTES + TAG_BYTES).next_multiple_of(granule_bytes.max(1)))
}

/// Seals and opens the pages of one VM.
pub struct Sealer {
    cipher: Aes256Gcm,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealer")
    }
}

/// What a seal is bound to.
#[derive(Clone, Copy)]
struct Bound {
    kind: TierKind,
    page: PageNo,
    number: ExtentNo,
    version: Version,
    position: Position,
}

impl Bound {
    fn nonce(self) -> Nonce<U12> {
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&self.version.0.to_le_bytes());
        nonce[8..].copy_from_slice(&self.position.0.to_le_bytes());
        nonce.into()
    }

    fn data(self) -> [u8; BOUND_BYTES] {
        let mut data = [0; BOUND_BYTES];
        data[0] = self.kind as u8;
        data[1..9].copy_from_slice(&self.page.0.to_le_bytes());
        data[9..13].copy_from_slice(&self.number.0.to_le_bytes());
        data[13..].copy_from_slice(&self.position.0.to_le_bytes());
        data
    }
}

impl Sealer {
    /// A sealer with this key.
    #[must_use]
    pub fn new(key: &Key) -> Self {
        Self {
            cipher: Aes256Gcm::new(key.for_pool().into()),
        }
    }

    /// Seals the content of `page` as the next page of `batch`; returns where it will be.
    ///
    /// The version of the batch must be new: two batches of a VM under one version would give both away.
    ///
    /// # Errors
    /// [`SealError`]. The batch must not be written then.
    pub fn seal(
        &self,
        page: PageNo,
        content: &[u8],
        granule_bytes: usize,
        batch: &mut Batch,
    ) -> Result<Place, SealError> {
        let bytes = sealed_bytes(content.len(), granule_bytes)?;
        let bound = Bound {
            kind: batch.room().kind,
            page,
            number: batch.extent().number,
            version: batch.extent().version,
            position: batch.next_position(),
        };
        let length = u16::try_from(content.len()).map_err(|_| SealError::TooLong { bytes })?;
        let (text, tag) = batch.extend(bytes)?.split_at_mut(bytes - TAG_BYTES);
        text[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
        text[LENGTH_BYTES..LENGTH_BYTES + content.len()].copy_from_slice(content);
        let sealed = self
            .cipher
            .encrypt_inout_detached(&bound.nonce(), &bound.data(), text.into())
            .map_err(|_| SealError::Cipher { bytes })?;
        tag.copy_from_slice(&sealed);
        Ok(batch.last_place())
    }

    /// Opens what a tier returned for `page` at `place`, in place; returns the content.
    ///
    /// # Errors
    /// [`SealError::NotThisPage`], if it is anything else than what was sealed for exactly this.
    pub fn open<'a>(
        &self,
        kind: TierKind,
        page: PageNo,
        place: &Place,
        sealed: &'a mut [u8],
    ) -> Result<&'a [u8], SealError> {
        let bound = Bound {
            kind,
            page,
            number: place.extent.number,
            version: place.extent.version,
            position: place.position,
        };
        let other = SealError::NotThisPage { kind, page };
        let text_bytes = sealed.len().checked_sub(TAG_BYTES).ok_or(other)?;
        let (text, tag) = sealed.split_at_mut(text_bytes);
        let tag = Tag::try_from(&tag[..]).map_err(|_| other)?;
        self.cipher
            .decrypt_inout_detached(&bound.nonce(), &bound.data(), (&mut *text).into(), &tag)
            .map_err(|_| other)?;
        let (length, content) = text.split_first_chunk().ok_or(other)?;
        content
            .get(..usize::from(u16::from_le_bytes(*length)))
            .ok_or(other)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::cast_possible_truncation, reason = "random numbers are cut")]

    use super::*;
    use crate::{ExtentName, Room, SectorNo};
    use pagetide_random::SplitMix64;

    const PAGE: PageNo = PageNo(77);

    fn batch(kind: TierKind, version: u64) -> Batch {
        let extent = ExtentName {
            vm: VmId(1),
            number: ExtentNo(5),
            version: Version(version),
        };
        let room = Room {
            kind,
            start: SectorNo(0),
            sectors: 4096,
            pages: 512,
        };
        Batch::new(extent, room)
    }

    fn sealed_page(batch: &Batch, index: usize) -> Vec<u8> {
        batch.pages().nth(index).unwrap().bytes.to_vec()
    }

    #[test]
    fn content_of_any_length_comes_back_and_looks_like_noise_meanwhile() {
        let sealer = Sealer::new(&Key::generate().unwrap());
        let mut random = SplitMix64::new(17);
        for (kind, granule) in [(TierKind::Disk, 512), (TierKind::Remote, 1)] {
            let mut all = batch(kind, 1);
            let lengths = [0, 1, 493, 494, 495, 511, 512, 4096, 4101, CONTENT_BYTES_MAX];
            let contents: Vec<Vec<u8>> = lengths
                .iter()
                .map(|&len| (0..len).map(|_| random.next_u64() as u8).collect())
                .chain([vec![0; 4096]])
                .collect();
            let places: Vec<Place> = contents
                .iter()
                .map(|content| sealer.seal(PAGE, content, granule, &mut all).unwrap())
                .collect();
            for (index, (content, place)) in contents.iter().zip(&places).enumerate() {
                let mut sealed = sealed_page(&all, index);
                assert_eq!(sealed.len(), sealed_bytes(content.len(), granule).unwrap());
                assert!(sealed.len().is_multiple_of(granule));
                assert!(content.len() < 16 || !sealed.windows(16).any(|w| w == &content[..16]));
                let opened = sealer.open(kind, PAGE, place, &mut sealed).unwrap();
                assert_eq!(opened, content);
            }
        }
    }

    #[test]
    fn each_flipped_bit_and_each_other_length_is_refused() {
        let sealer = Sealer::new(&Key::generate().unwrap());
        let mut all = batch(TierKind::Remote, 9);
        let place = sealer.seal(PAGE, b"sixteen letters.", 1, &mut all).unwrap();
        let sealed = sealed_page(&all, 0);
        let refused = Err(SealError::NotThisPage {
            kind: TierKind::Remote,
            page: PAGE,
        });
        let open = |mut bytes: Vec<u8>| {
            let opened = sealer.open(TierKind::Remote, PAGE, &place, &mut bytes);
            opened.map(<[u8]>::to_vec)
        };
        for bit in 0..sealed.len() * 8 {
            let mut damaged = sealed.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(damaged), refused, "bit {bit}");
        }
        for len in 0..sealed.len() {
            assert_eq!(open(sealed[..len].to_vec()), refused, "{len} bytes");
        }
        assert_eq!(open([&sealed[..], &[0]].concat()), refused);
        assert_eq!(open(sealed).unwrap(), b"sixteen letters.");
    }

    #[test]
    fn each_other_page_place_version_tier_and_key_is_refused() {
        let key = Key::generate().unwrap();
        let sealer = Sealer::new(&Key::from_pool(key.for_pool()));
        let mut all = batch(TierKind::Disk, 9);
        let place = sealer.seal(PAGE, &[3; 300], 512, &mut all).unwrap();
        let sealed = sealed_page(&all, 0);
        let open = |sealer: &Sealer, kind, page, place: Place| {
            let mut bytes = sealed.clone();
            sealer.open(kind, page, &place, &mut bytes).is_ok()
        };
        assert!(open(&sealer, TierKind::Disk, PAGE, place));
        assert!(!open(&sealer, TierKind::Remote, PAGE, place));
        assert!(!open(&sealer, TierKind::Disk, PageNo(78), place));
        let other_key = Sealer::new(&Key::generate().unwrap());
        assert!(!open(&other_key, TierKind::Disk, PAGE, place));
        let (mut number, mut version, mut position) = (place, place, place);
        number.extent.number = ExtentNo(6);
        version.extent.version = Version(10);
        position.position = Position(1);
        for other in [number, version, position] {
            assert!(!open(&sealer, TierKind::Disk, PAGE, other));
        }
    }

    #[test]
    fn what_cannot_be_sealed_is_refused_and_keys_are_never_printed() {
        let key = Key::from_pool(&[0xab; KEY_BYTES]);
        let sealer = Sealer::new(&key);
        let mut all = batch(TierKind::Remote, 9);
        let long = vec![0; CONTENT_BYTES_MAX + 1];
        assert!(matches!(
            sealer.seal(PAGE, &long, 1, &mut all),
            Err(SealError::TooLong { .. })
        ));
        for _ in 0..512 {
            sealer.seal(PAGE, &[1], 1, &mut all).unwrap();
        }
        assert!(matches!(
            sealer.seal(PAGE, &[1], 1, &mut all),
            Err(SealError::Batch(BatchError::NoRoom { .. }))
        ));
        let printed = format!("{key:?} {sealer:?}");
        assert_eq!(printed, "Key Sealer");
    }
}
