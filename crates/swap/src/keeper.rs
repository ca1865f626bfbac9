// SPDX-License-Identifier: Apache-2.0
//! [`Keeper`]: puts the content of a page into the first tier that takes it.
//!
//! ```text
//!   one repeated word?  ─► zero, same: the page word alone
//!   room in lz4?        ─► lz4, uncompressed
//!   zstd used, and room ─► zstd            (lz4 has a limit, and has reached it)
//! ```
//! zstd takes three times as long to pack. So a page gets there by age ([`crate::demoter`]) as long as lz4 has
//! room.
//!
//! A page that neither makes smaller stays where it is while lz4 has no room for it. That says nothing about the
//! next one, so the store does not count as full for it. But many such pages tend to follow one another (media,
//! ciphertext): after each that zstd was tried on in vain, twice as many that lz4 does not make smaller are not
//! tried, up to [`SKIPPED_MAX`].

use crate::{
    store::{PoolStore, PutError},
    tier::{Form, PAGE, Packer, ZstdPacker, form_of, repeated_word},
};
use pagetide_addr::PageNo;
use pagetide_gmem::Content;

/// Most bytes of a page that zstd keeps: what takes more is not kept in the pool by it.
const PASSED_DOWN_BYTES_MAX: usize = 3 * PAGE / 4 + 512;

/// Most pages in a row that are not tried.
const SKIPPED_MAX: u32 = 63;

/// What became of a page.
#[derive(Debug)]
pub(crate) enum Kept {
    /// It is stored.
    Stored(Content),
    /// It needs room, and none was asked for.
    NeedsRoom,
    /// It is not stored.
    Refused(PutError),
}

/// Whether a page may be put where it needs room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MayTake {
    /// It may.
    Room,
    /// Only what needs none is kept.
    Nothing,
}

/// See the module. One per thread: it keeps buffers.
#[derive(Default)]
pub(crate) struct Keeper {
    packer: Packer,
    /// Made when it is needed first.
    zstd: Option<ZstdPacker>,
    doubt: Doubt,
}

/// Whether zstd is tried on pages that lz4 does not make smaller.
#[derive(Clone, Copy, Default)]
struct Doubt {
    /// Pages that are not tried after the next failure, less one.
    last: u32,
    /// Of them, those that are to come.
    left: u32,
}

impl Doubt {
    /// True if zstd is tried on the next page.
    const fn tries(&mut self) -> bool {
        let tries = self.left == 0;
        self.left = self.left.saturating_sub(1);
        tries
    }

    fn failed(&mut self) {
        self.last = (2 * self.last + 1).min(SKIPPED_MAX);
        self.left = self.last;
    }
}

impl Keeper {
    /// Stores the content of `page`.
    pub(crate) fn keep(
        &mut self,
        store: &PoolStore,
        page: PageNo,
        content: &[u8; PAGE],
        may_take: MayTake,
    ) -> Kept {
        if let Some(word) = repeated_word(content) {
            return Kept::Stored(store.put_same(word));
        }
        if may_take == MayTake::Nothing {
            return Kept::NeedsRoom;
        }
        let (form, stored) = match self.packer.pack(store.seed(), page, content) {
            None => return Kept::Stored(Content::ZERO),
            Some(stored) => (form_of(stored), store.put(stored)),
        };
        match stored {
            Ok(content) => Kept::Stored(content),
            Err(full @ PutError::Tier(_)) if store.tiers().uses_zstd() => {
                if form == Form::Uncompressed && !self.doubt.tries() {
                    store.turn_away(&full);
                    return Kept::Refused(full);
                }
                self.pass_down(store, page, content, full)
            }
            Err(why) => Kept::Refused(why),
        }
    }

    /// The tier above is `full`.
    fn pass_down(
        &mut self,
        store: &PoolStore,
        page: PageNo,
        content: &[u8; PAGE],
        full: PutError,
    ) -> Kept {
        let zstd = match &mut self.zstd {
            Some(zstd) => zstd,
            none => match ZstdPacker::new() {
                Ok(zstd) => none.insert(zstd),
                Err(why) => return Kept::Refused(PutError::File(why.to_string())),
            },
        };
        let Some(stored) = zstd.pack(store.seed(), page, content, PASSED_DOWN_BYTES_MAX) else {
            self.doubt.failed();
            store.turn_away(&full);
            return Kept::Refused(full);
        };
        self.doubt = Doubt::default();
        match store.put_below(stored) {
            Ok(content) => Kept::Stored(content),
            Err(why) => Kept::Refused(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Pool, PoolCap,
        store::{PoolTiers, ZstdTier},
    };
    use pagetide_random::SplitMix64;
    use std::{sync::Arc, time::Instant};

    const LZ4_BYTES: u64 = 1 << 20;

    fn noise(page: PageNo) -> [u8; PAGE] {
        let mut random = SplitMix64::new(page.0);
        std::array::from_fn(|_| random.next_u64().to_le_bytes()[0])
    }

    /// lz4 finds nothing to repeat in it; of each byte six bits say something.
    fn letters(page: PageNo) -> [u8; PAGE] {
        noise(page).map(|byte| b' ' + byte % 64)
    }

    fn records(page: PageNo) -> [u8; PAGE] {
        let mut bytes = [0; PAGE];
        bytes[..PAGE / 2].copy_from_slice(&noise(page)[..PAGE / 2]);
        bytes
    }

    /// A store whose lz4 tier has reached its limit.
    fn with_full_lz4(folder: &tempfile::TempDir) -> PoolStore {
        let pool = Pool::create(&folder.path().join("a.pool"), 4096, 0, b"").unwrap();
        let pool = pool.within(&PoolCap::new(None)).unwrap();
        let zstd = ZstdTier::On { limit_bytes: None };
        let tiers = PoolTiers::new(Some(LZ4_BYTES), zstd);
        let store = PoolStore::new(Arc::new(pool)).in_tiers(&tiers);
        while store.put(&[1; 4100]).is_ok() {}
        assert_eq!(store.full(), None);
        store
    }

    fn keep(keeper: &mut Keeper, store: &PoolStore, content: &[u8; PAGE]) -> Kept {
        keeper.keep(store, PageNo(0), content, MayTake::Room)
    }

    #[test]
    fn page_that_no_tier_makes_smaller_stays_and_the_next_one_that_gets_smaller_goes() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let store = with_full_lz4(&folder);
        let mut keeper = Keeper::default();
        assert_eq!(store.turned_away(Instant::now()), None);
        for round in 0..300 {
            let page = PageNo(round);
            let refused = keep(&mut keeper, &store, &noise(page));
            assert!(matches!(refused, Kept::Refused(ref why) if why.is_full()));
            assert_eq!(store.full(), None);
            assert!(store.takes_content() && store.turned_away(Instant::now()).is_some());
            let kept = keep(&mut keeper, &store, &records(page));
            assert!(matches!(kept, Kept::Stored(_)), "{kept:?}");
        }
        let later = Instant::now() + crate::store::FULL_MIN;
        assert_eq!(store.turned_away(later), None);
    }

    #[test]
    fn page_that_only_zstd_makes_smaller_is_found_among_those_that_nothing_does() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let store = with_full_lz4(&folder);
        let mut keeper = Keeper::default();
        assert_eq!(
            crate::tier::form_of(
                keeper
                    .packer
                    .pack(store.seed(), PageNo(1), &letters(PageNo(1)))
                    .unwrap()
            ),
            Form::Uncompressed
        );
        for page in 0..1000 {
            keep(&mut keeper, &store, &noise(PageNo(page)));
        }
        let tries = 1 + SKIPPED_MAX;
        let kept =
            (0..u64::from(tries)).map(|page| keep(&mut keeper, &store, &letters(PageNo(page))));
        let kept: Vec<bool> = kept.map(|kept| matches!(kept, Kept::Stored(_))).collect();
        let first = kept
            .iter()
            .position(|kept| *kept)
            .expect("it is tried in the end");
        assert!(
            kept[first..].iter().all(|kept| *kept),
            "and then each of them"
        );
    }

    #[test]
    fn zstd_is_tried_less_and_less_on_what_nothing_makes_smaller() {
        let mut doubt = Doubt::default();
        let mut tried = 0;
        for _ in 0..10_000 {
            if doubt.tries() {
                tried += 1;
                doubt.failed();
            }
        }
        assert_eq!(tried, 6 + (10_000 - (1 + 3 + 7 + 15 + 31) - 5) / 64);
    }
}
