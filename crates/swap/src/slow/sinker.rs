// SPDX-License-Identifier: Apache-2.0
//! [`Sinker`]: moves the stored pages of one section from the pool to a slow tier.
//!
//! ```text
//!   this thread                                                  a thread of the tier
//!     begin a relocation
//!     words read, stored forms copied
//!     room made, numbers taken, versions reserved
//!     sealed, one batch for each room ──► written ─────────────► acknowledged
//!                                                                  extent entered in the pool
//!                                                                  words changed, old slots freed
//!                                                                  what did not move forgotten
//! ```
//! Nobody waits for the tier here: a few batches are under way at a time ([`BATCHES_MAX`]), and what is not
//! moved stays in the pool, whatever happened. The pages that do not compress go first, or alone ([`Which`]).
//! What may fail for want of room fails before anything is written: room in the tier, a number, and memory of the
//! table in the pool.
//!
//! The locks of a tier are such as faults wait for, so they are taken firmly ([`Pace::firmly`]).
//!
//! A page that is needed while it is on its way is served from the pool, and the relocation leaves it out.
//! One that is evicted anew meanwhile ends the relocation of its whole section ([`pagetide_gmem::Relocation`]).
//!
//! A VM that ends does not wait for its batches: what they meant to move is gone, and their store
//! ([`SlowStore`]) is there until the last of them has ended.

use super::{form::byte_of, store::SlowStore, tiers::Seat};
use crate::{
    pace::Pace,
    pool::{Counter, ExtentError},
    store::PoolStore,
    tier::{Form, InPool, InSlow, Located},
};
use pagetide_addr::{PageNo, SectionNo};
use pagetide_gmem::{Content, ContentStore as _, Move, PageState, PagedMemory, Relocation};
use pagetide_tiers::{
    Batch, ExtentName, ExtentNo, Place, Room, TierError, Version, WriteDone,
    seal::{SealError, sealed_bytes},
    table::ExtentEntry,
};
use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

/// Batches of a VM under way with which no further section is begun.
const BATCHES_MAX: usize = 4;

/// Which pages of a section are moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Which {
    /// All that are in the pool.
    All,
    /// Those that lz4 has not made smaller: they take as much there as they have freed.
    Uncompressed,
}

/// What moving a section down came to.
#[derive(Debug, Default)]
pub struct Sunk {
    /// Pages on their way.
    pub pages: u64,
    /// Why it ended before the end of the section, if it did.
    pub stop: Option<SinkStop>,
}

/// Why pages of a section stay where they are.
#[derive(Debug, thiserror::Error)]
pub enum SinkStop {
    /// Enough is under way.
    #[error("enough batches are under way")]
    UnderWay,
    /// No tier takes them.
    #[error(transparent)]
    Tier(#[from] TierError),
    /// The table of extents is full, or there are no versions left.
    #[error("the VM's table of extents is full")]
    TableFull,
    /// There is no memory for more of the table.
    #[error("there is no room for the VM's table of extents: {0}")]
    NoRoom(#[from] ExtentError),
    /// They could not be sealed.
    #[error(transparent)]
    Seal(#[from] SealError),
}

/// What the threads of tiers tell the sinker.
#[derive(Default)]
struct News {
    batches: AtomicUsize,
    /// Sections of which pages were not written.
    failed: Mutex<BTreeSet<SectionNo>>,
}

impl News {
    fn failed(&self) -> MutexGuard<'_, BTreeSet<SectionNo>> {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See the module. One per VM.
pub struct Sinker {
    memory: Arc<PagedMemory>,
    pool: Arc<PoolStore>,
    slow: Arc<SlowStore>,
    news: Arc<News>,
}

/// A page, and its content as it is sealed.
struct Packed {
    page: PageNo,
    from: Content,
    form: Form,
    bytes: Vec<u8>,
}

/// Where a page is to be: as a word has it, and as its tier has it.
type To = (InSlow, Place);

/// A batch on its way.
struct UnderWay {
    memory: Weak<PagedMemory>,
    pool: Arc<PoolStore>,
    slow: Arc<SlowStore>,
    news: Arc<News>,
    section: SectionNo,
    relocation: Relocation,
    number: ExtentNo,
    entry: ExtentEntry,
    moves: Vec<Move>,
    to: Vec<To>,
}

impl Sinker {
    /// A sinker of what `memory` has in `pool`.
    #[must_use]
    pub fn new(memory: Arc<PagedMemory>, pool: Arc<PoolStore>, slow: Arc<SlowStore>) -> Self {
        Self {
            memory,
            pool,
            slow,
            news: Arc::default(),
        }
    }

    /// Sections of which pages could not be moved, since the last call.
    pub fn take_failed(&self) -> BTreeSet<SectionNo> {
        std::mem::take(&mut self.news.failed())
    }

    /// Batches under way.
    #[must_use]
    pub fn batches_under_way(&self) -> usize {
        self.news.batches.load(Relaxed)
    }

    /// Begins to move pages of `section` from the pool to the first slow tier that takes them.
    pub fn sink(&mut self, section: SectionNo, which: Which, pace: &impl Pace) -> Sunk {
        let mut sunk = Sunk::default();
        if self.batches_under_way() >= BATCHES_MAX {
            sunk.stop = Some(SinkStop::UnderWay);
            return sunk;
        }
        // A fault would wait for all of its pages.
        if self.memory.goes_whole(section) {
            return sunk;
        }
        // Before any word is read: what is copied is then known to be what the word names in the end.
        let relocation = self.memory.begin_relocation(section);
        let packed = self.packed(section, which);
        if let Err(stop) = self.send(section, relocation, packed, pace, &mut sunk.pages) {
            sunk.stop = Some(stop);
        }
        sunk
    }

    fn packed(&self, section: SectionNo, which: Which) -> Vec<Packed> {
        let is_wanted = |place: InPool| which == Which::All || place.form == Form::Uncompressed;
        let table = self.memory.table();
        let stored = table.pages_in_state(section, |state| matches!(state, PageState::Stored(_)));
        let in_pool = |page| match table.word(page).state() {
            PageState::Stored(content) if !content.is_zero() => match Located::of(content) {
                Ok(Located::Pool(place)) if is_wanted(place) => self.copy(page, content, place),
                _ => None,
            },
            _ => None,
        };
        let mut packed: Vec<Packed> = stored.pages(section).filter_map(in_pool).collect();
        // They take most room in the pool, for least work when they are needed.
        packed.sort_by_key(|packed| packed.form != Form::Uncompressed);
        packed
    }

    fn copy(&self, page: PageNo, from: Content, place: InPool) -> Option<Packed> {
        let mut bytes = Vec::with_capacity(1 + place.bytes as usize);
        bytes.push(byte_of(place.form));
        self.pool.copy_stored(place, &mut bytes)?;
        Some(Packed {
            page,
            from,
            form: place.form,
            bytes,
        })
    }

    fn send(
        &self,
        section: SectionNo,
        relocation: Relocation,
        packed: Vec<Packed>,
        pace: &impl Pace,
        pages: &mut u64,
    ) -> Result<(), SinkStop> {
        if packed.is_empty() {
            return Ok(());
        }
        let (seat, rooms) = pace.firmly(|| self.make_room(&packed))?;
        if let Some(disk) = seat.disk
            && self.slow.pool().disk() != Some(disk)
        {
            // Pages on another disk would have kept the VM from being recovered with this one.
            self.slow.pool().set_disk(disk);
        }
        let mut rest = &packed[..];
        let mut rooms = rooms.into_iter();
        while let Some(room) = rooms.next() {
            let (part, behind) = rest.split_at(rest.len().min(room.pages.into()));
            let sealed = self.seal(seat, room, part, pace);
            let (batch, number, to) = match sealed {
                Ok(sealed) => sealed,
                Err(stop) => {
                    let unused = std::iter::once(room).chain(rooms);
                    let give_back = |room| seat.tier.give_back(self.slow.vm(), room);
                    pace.firmly(|| unused.for_each(give_back));
                    return Err(stop);
                }
            };
            let moved = part.iter().zip(&to);
            let moves = moved.filter_map(|(packed, (place, _))| {
                Some(Move {
                    page: packed.page,
                    from: packed.from,
                    to: Located::Slow(*place).content()?,
                })
            });
            let under_way = UnderWay {
                memory: Arc::downgrade(&self.memory),
                pool: Arc::clone(&self.pool),
                slow: Arc::clone(&self.slow),
                news: Arc::clone(&self.news),
                section,
                relocation,
                number,
                entry: ExtentEntry::new(batch.extent().version, room),
                moves: moves.collect(),
                to,
            };
            *pages += part.len() as u64;
            self.news.batches.fetch_add(1, Relaxed);
            let told = move |written| under_way.end(written);
            let done = WriteDone::new(seat.tier.kind(), told);
            pace.firmly(|| seat.tier.write(batch, done));
            rest = behind;
        }
        Ok(())
    }

    /// Room in the first tier that takes the pages.
    fn make_room(&self, packed: &[Packed]) -> Result<(&Seat, Vec<Room>), SinkStop> {
        let mut refusal = None;
        for seat in self.slow.tiers().seats() {
            let granule_bytes = seat.tier.granule_bytes();
            let lengths = packed
                .iter()
                .map(|packed| sealed_bytes(packed.bytes.len(), granule_bytes));
            let lengths: Vec<usize> = lengths.collect::<Result<_, _>>()?;
            match seat.tier.make_room(self.slow.vm(), &lengths) {
                Ok(rooms) => return Ok((seat, rooms)),
                // It makes room, and will have some soon.
                Err(busy @ TierError::Busy(_)) => return Err(busy.into()),
                // What the first tier says is what the operator is to hear.
                Err(why) => drop(refusal.get_or_insert(why)),
            }
        }
        Err(refusal.map_or(SinkStop::UnderWay, SinkStop::Tier))
    }

    /// Seals pages for a room, under a number and a version of their own.
    fn seal(
        &self,
        seat: &Seat,
        room: Room,
        part: &[Packed],
        pace: &impl Pace,
    ) -> Result<(Batch, ExtentNo, Vec<To>), SinkStop> {
        let number = pace.firmly(|| self.slow.numbers().take());
        let number = number.ok_or(SinkStop::TableFull)?;
        // Once the batch is written nothing may be missing that its entry needs.
        let has_room = pace.firmly(|| self.slow.pool().make_extent_room(number));
        let sealed = has_room.map_err(SinkStop::from);
        let sealed = sealed.and_then(|()| self.seal_as(number, seat, room, part));
        if sealed.is_err() {
            pace.firmly(|| self.slow.give_number_back(number));
        }
        let (batch, to) = sealed?;
        Ok((batch, number, to))
    }

    fn seal_as(
        &self,
        number: ExtentNo,
        seat: &Seat,
        room: Room,
        part: &[Packed],
    ) -> Result<(Batch, Vec<To>), SinkStop> {
        let versions = self.slow.pool().reserve_versions(1);
        let version = *versions.ok_or(SinkStop::TableFull)?.start();
        let extent = ExtentName {
            vm: self.slow.vm(),
            number,
            version: Version(version),
        };
        let mut batch = Batch::new(extent, room);
        let granule_bytes = seat.tier.granule_bytes();
        let mut to = Vec::with_capacity(part.len());
        for Packed { page, bytes, .. } in part {
            let sealed = (self.slow.sealer).seal(*page, bytes, granule_bytes, &mut batch)?;
            let place = InSlow {
                kind: seat.tier.kind(),
                extent: number,
                position: sealed.position,
                sectors: sealed.sectors,
            };
            to.push((place, sealed));
        }
        Ok((batch, to))
    }
}

impl UnderWay {
    fn end(self, written: Result<(), TierError>) {
        let news = Arc::clone(&self.news);
        let section = self.section;
        if let Err(why) = self.enter(written) {
            tracing::debug!(%why, "pages stay in the pool");
            news.failed().insert(section);
        }
        news.batches.fetch_sub(1, Relaxed);
    }

    fn enter(self, written: Result<(), TierError>) -> Result<(), String> {
        let Self { slow, number, .. } = &self;
        if let Err(why) = written {
            // Its room is the tier's again.
            slow.counts.failed_batches.fetch_add(1, Relaxed);
            slow.give_number_back(*number);
            return Err(why.to_string());
        }
        // Without its memory the VM has ended, or leaves this daemon. No entry names the batch, by which a tier could
        // forget it with the VM.
        let Some(memory) = self.memory.upgrade() else {
            slow.give_number_back(*number);
            self.forget_all();
            return Ok(());
        };
        let entered = slow.pool().set_extent(*number, self.entry);
        let pages = u16::try_from(self.to.len()).unwrap_or(u16::MAX);
        let entered = entered.map_err(|why| why.to_string()).and_then(|()| {
            let begun = slow.numbers().begin(*number, pages);
            begun.map(drop).map_err(|why| why.to_string())
        });
        if let Err(why) = entered {
            slow.pool().clear_extent(*number);
            slow.give_number_back(*number);
            self.forget_all();
            return Err(why);
        }
        for (place, _) in &self.to {
            slow.count_in(*place);
        }
        let relocated = memory.relocate(self.relocation, &self.moves);
        for content in relocated.replaced {
            self.pool.free(content);
        }
        for content in relocated.unused {
            if let Ok(Located::Slow(place)) = Located::of(content) {
                slow.free(place);
            }
        }
        let sunk = relocated.moved.len();
        let counter = slow.pool().counter(Counter::SunkPages);
        counter.fetch_add(sunk, Relaxed);
        Ok(())
    }

    fn forget_all(&self) {
        let places: Vec<Place> = self.to.iter().map(|(_, place)| *place).collect();
        let kind = self.to.first().map(|(place, _)| place.kind);
        if let Some(seat) = kind.and_then(|kind| self.slow.tiers().seat(kind)) {
            seat.tier.forget(&places);
        }
    }
}
