// SPDX-License-Identifier: Apache-2.0
//! [`Demoter`]: packs stored pages of one section anew, smaller: from lz4, or uncompressed, to zstd.
//!
//! ```text
//!   pages of the section that are Stored in lz4 or uncompressed, sixteen at a time:
//!     begin a relocation
//!     word read ─► load ─► zstd ─► store  (only what takes an eighth less)
//!     relocate the words                  (those that still name what was copied)
//!     free what no word names
//! ```
//! zstd costs some ten microseconds a page, so it is no work for an eviction, which fills may wait for. Here
//! nothing waits: a fault on a page is served from whichever content its word names, and wins over the
//! relocation. At whatever step the daemon dies, each word names content that is whole; a copy that no word
//! names is free for the successor.
//!
//! A slot may be freed, and get other content, while it is read: then the CRC does not match, or the word says
//! otherwise. Its memory stays: chunks are given back ([`PoolStore::trim`]) by the thread that demotes, and by
//! no other one.
//!
//! Which sections, when and how many is decided in [`pagetide_policy::demotion`].

use crate::{
    pace::Pace,
    slots::Slots,
    store::{PoolStore, PutError},
    tier::{Form, InPool, Located, PAGE, ZstdPacker, zstd::ZstdUnusable},
};
use pagetide_addr::{PageNo, SectionNo, to_usize};
use pagetide_gmem::{Content, ContentStore as _, Move, PageState, PagedMemory};
use std::sync::Arc;

/// Pages packed between two looks at the pace, and committed together: about 200 us.
const BATCH_PAGES: usize = 16;
/// A page is kept by zstd if that takes at least one of so many slot units less than lz4. What saves less
/// is not worth the longer load.
const SAVED_PART: u32 = 8;

/// What demoting from a section came to.
#[derive(Debug, Default)]
pub struct Demoted {
    /// Pages that are kept by zstd now.
    pub pages: u64,
    /// Pages that were packed.
    pub packed_pages: u64,
    /// Copies made in vain: their pages were needed, evicted anew or removed meanwhile.
    pub unused_pages: u64,
    /// Bytes of slots that this has freed.
    pub saved_bytes: u64,
    /// Why it ended before the end of the section, if it did.
    pub stop: Option<DemotionStop>,
}

/// Why demotion from a section ended early. What was demoted stays so.
#[derive(Debug, thiserror::Error)]
pub enum DemotionStop {
    /// There is no time for more.
    #[error("there is no time for more")]
    Paced,
    /// There is no room for the copies.
    #[error(transparent)]
    Store(#[from] PutError),
    /// The library cannot be used.
    #[error(transparent)]
    Zstd(#[from] ZstdUnusable),
}

/// See the module. One per VM: it keeps buffers.
pub struct Demoter {
    space: Arc<PagedMemory>,
    store: Arc<PoolStore>,
    /// Made when it is needed first.
    packer: Option<ZstdPacker>,
    page: Box<[u8; PAGE]>,
}

/// A page, and where its content is.
type Placed = (PageNo, InPool);

impl Demoter {
    /// A demoter of what `space` has in `store`.
    #[must_use]
    pub fn new(space: Arc<PagedMemory>, store: Arc<PoolStore>) -> Self {
        Self {
            space,
            store,
            packer: None,
            page: Box::new([0; PAGE]),
        }
    }

    /// Packs the pages of `section` anew that are stored in lz4, or uncompressed. `pace` is asked before each few of them.
    pub fn demote(&mut self, section: SectionNo, pace: &impl Pace) -> Demoted {
        let mut done = Demoted::default();
        let placed = self.above_zstd(section);
        let mut left = &placed[..];
        while !left.is_empty() {
            if !pace.go_on() {
                done.stop = Some(DemotionStop::Paced);
                break;
            }
            let (batch, _) = left.split_at(left.len().min(BATCH_PAGES));
            match self.demote_batch(section, batch, pace, &mut done) {
                Ok(tried) => left = &left[tried..],
                Err(stop) => {
                    done.stop = Some(stop);
                    break;
                }
            }
        }
        done
    }

    /// What lz4 does not make smaller zstd may: it packs symbols that are not equally frequent, too.
    fn above_zstd(&self, section: SectionNo) -> Vec<Placed> {
        let table = self.space.table();
        let stored = table.pages_in_state(section, |state| matches!(state, PageState::Stored(_)));
        let placed = |page| match self.content(page).map(Located::of) {
            Some(Ok(Located::Pool(place))) if place.form != Form::Zstd => Some((page, place)),
            _ => None,
        };
        stored.pages(section).filter_map(placed).collect()
    }

    /// The stored content of `page`, if it has any.
    fn content(&self, page: PageNo) -> Option<Content> {
        match self.space.table().word(page).state() {
            PageState::Stored(content) if !content.is_zero() => Some(content),
            _ => None,
        }
    }

    /// Returns how many pages of `batch` were tried, at least one: `pace` may cut it short.
    fn demote_batch(
        &mut self,
        section: SectionNo,
        batch: &[Placed],
        pace: &impl Pace,
        done: &mut Demoted,
    ) -> Result<usize, DemotionStop> {
        // Before any word is read: what is copied is then known to be what the word names in the end.
        let relocation = self.space.begin_relocation(section);
        let mut moves = Vec::with_capacity(batch.len());
        let mut tried = Ok(0);
        for (number, (page, place)) in (1..).zip(batch) {
            match self.copy(*page, *place, pace, done) {
                Ok(moved) => moves.extend(moved),
                Err(why) => {
                    tried = Err(why);
                    break;
                }
            }
            tried = Ok(number);
            if !pace.may_stay() {
                break;
            }
        }
        // The section's lock and that of the slots are such as faults wait for.
        let relocated = pace.firmly(|| self.space.relocate(relocation, &moves));
        let is_moved = |moved: &&Move| relocated.moved.contains(moved.page);
        for Move { from, to, .. } in moves.iter().filter(is_moved) {
            done.saved_bytes += slot_bytes(*from).saturating_sub(slot_bytes(*to));
        }
        done.pages += relocated.moved.len();
        done.unused_pages += relocated.unused.len() as u64;
        let freed = relocated.replaced.into_iter().chain(relocated.unused);
        pace.firmly(|| freed.for_each(|content| self.store.free(content)));
        tried
    }

    /// Stores a smaller copy of the content of `page`, if that is worth while and the page still has it.
    fn copy(
        &mut self,
        page: PageNo,
        place: InPool,
        pace: &impl Pace,
        done: &mut Demoted,
    ) -> Result<Option<Move>, DemotionStop> {
        let from = match self.content(page) {
            Some(content) if Located::of(content) == Ok(Located::Pool(place)) => content,
            _ => return Ok(None),
        };
        let bytes_max = bytes_max_of_copy(place.bytes);
        if bytes_max == 0 {
            return Ok(None);
        }
        if let Err(error) = self.store.load(page, from, &mut self.page) {
            // It was freed meanwhile, and its slot has other content; or it is damaged, and the fault that needs
            // it reports that.
            tracing::debug!(%error, "content is not demoted");
            return Ok(None);
        }
        let packer = match &mut self.packer {
            Some(packer) => packer,
            none => none.insert(ZstdPacker::new()?),
        };
        done.packed_pages += 1;
        let seed = self.store.seed();
        match packer.pack(seed, page, &self.page, to_usize(bytes_max)) {
            None => Ok(None),
            Some(packed) => {
                // The lock of the slots is one that faults wait for.
                let to = pace.firmly(|| self.store.put_copy(packed))?;
                Ok(Some(Move { page, from, to }))
            }
        }
    }
}

/// Most bytes of a copy that is kept in place of lz4 content of `bytes`; 0 if none is worth while.
#[must_use]
pub fn bytes_max_of_copy(bytes: u32) -> u64 {
    let units = Slots::units_for(bytes);
    Slots::bytes_in(units - units.div_ceil(SAVED_PART))
}

/// Bytes of the slot of `content`.
fn slot_bytes(content: Content) -> u64 {
    let place = Located::of(content).ok().and_then(Located::in_pool);
    place.map_or(0, |place| Slots::bytes_in(Slots::units_for(place.bytes)))
}
