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

use crate::{
    store::{PoolStore, PutError},
    tier::{PAGE, Packer, ZstdPacker, repeated_word},
};
use pagetide_addr::PageNo;
use pagetide_gmem::Content;

/// Most bytes of a page that zstd keeps: what takes more is not kept in the pool by it.
const PASSED_DOWN_BYTES_MAX: usize = 3 * PAGE / 4 + 512;

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
        let stored = match self.packer.pack(store.seed(), page, content) {
            None => Ok(Content::ZERO),
            Some(stored) => store.put(stored),
        };
        match stored {
            Ok(content) => Kept::Stored(content),
            Err(full @ PutError::Tier(_)) if store.tiers().uses_zstd() => {
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
            store.refused_by_all(&full);
            return Kept::Refused(full);
        };
        match store.put_below(stored) {
            Ok(content) => Kept::Stored(content),
            Err(why) => Kept::Refused(why),
        }
    }
}
