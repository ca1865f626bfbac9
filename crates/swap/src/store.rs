// SPDX-License-Identifier: Apache-2.0
//! [`PoolStore`]: stored content in a VM's pool.
//!
//! # Full
//! A chunk needs memory from three sides: the cap of all pools, the daemon's memory cgroup, the tmpfs; and a
//! tier may have a limit. Where one of them refuses, the store is *full*: it says so ([`PoolStore::full`]), and takes content only
//! for slots that are free in chunks it has, and only while those are many. Pages of zeros, and others that
//! consist of one repeated word, need no room: they are evicted all the same.
//!
//! A store is full for [`FULL_MIN`] at least, and until there is room for [`resume_bytes`] of its share of the
//! cap and of the tmpfs. Else it would be full and have room by turns near its cap, each time for a few pages,
//! and each time fills would wait for them. Only a cap that was changed is no reason to wait.

mod error;
mod tiers;

pub use error::{AdoptError, PutError};
pub use tiers::{PoolTiers, TierFull, ZstdTier};

use crate::{
    pool::Pool,
    room::Room,
    slots::{Allocated, CHUNK_BYTES, Slots},
    tier::{
        Form, InPool, Located, STORED_BYTES_MAX, Seed, UnknownContent, fill_with_word, form_of,
        unpack,
    },
};
use pagetide_addr::PageNo;
use pagetide_gmem::{Content, ContentStore, StoreError};
use pagetide_sys::memory_file::FileError;
use pagetide_tiers::TierKind;
use std::{
    cell::RefCell,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Least room with which a full store takes content again.
pub const RESUME_BYTES: u64 = 1 << 20;
/// Most of it: more would only be wasted.
const RESUME_BYTES_MAX: u64 = 256 << 20;
const _: () = assert!(RESUME_BYTES <= RESUME_BYTES_MAX);
/// Part of a share of the cap, or of a tmpfs, that must be free for content to be taken again.
const RESUME_PART: u64 = 16;
/// A full store stays full for at least this long.
pub const FULL_MIN: Duration = Duration::from_secs(5);
/// Content is packed for a full store only while more than this part of its chunks is free: to pack what
/// then finds no slot of its size costs as much as to store it.
const FREE_PART: u64 = 16;
/// Empty chunks kept for the next content.
const SPARE_CHUNKS: usize = 4;

/// Bytes of `of_bytes`, a share of the cap or a tmpfs, that must be free for a full store to take content again.
#[must_use]
pub fn resume_bytes(of_bytes: u64) -> u64 {
    (of_bytes / RESUME_PART).clamp(RESUME_BYTES, RESUME_BYTES_MAX)
}

/// What content takes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct StoreBytes {
    /// Content with its CRCs.
    pub stored_bytes: u64,
    /// Memory of the chunks that it lies in, empty ones included.
    pub chunk_bytes: u64,
    /// Memory of this process that records the slots.
    pub slots_bytes: u64,
}

impl StoreBytes {
    /// Memory of chunks that holds no content: free slots, what content leaves of its slot, what slots
    /// leave of a chunk, and empty chunks.
    #[must_use]
    pub const fn fragmented_bytes(&self) -> u64 {
        self.chunk_bytes.saturating_sub(self.stored_bytes)
    }
}

/// Stored pages by tier.
#[derive(Debug, Default)]
pub struct TierCounts {
    /// Pages that consist of one repeated word other than 0.
    pub same_filled_pages: AtomicU64,
    /// Pages compressed by lz4.
    pub lz4_pages: AtomicU64,
    /// Pages stored uncompressed.
    pub uncompressed_pages: AtomicU64,
    /// Pages compressed by zstd.
    pub zstd_pages: AtomicU64,
    /// Bytes stored for all of them, CRCs included.
    pub stored_bytes: AtomicU64,
    /// Of them, those of pages compressed by zstd.
    pub zstd_bytes: AtomicU64,
}

impl TierCounts {
    /// Pages with content, of whatever tier.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.same_filled_pages.load(Relaxed) + self.pool_pages()
    }

    /// Pages with content in slots of the pool.
    #[must_use]
    pub fn pool_pages(&self) -> u64 {
        let pages = [&self.lz4_pages, &self.uncompressed_pages, &self.zstd_pages];
        pages.iter().map(|pages| pages.load(Relaxed)).sum()
    }
}

/// The first refusal since there was room.
#[derive(Clone, Debug)]
struct Refusal {
    why: PutError,
    at: Instant,
}

/// See the module.
#[derive(Debug)]
pub struct PoolStore {
    pool: Arc<Pool>,
    seed: Seed,
    slots: Mutex<Slots>,
    room: Arc<Room>,
    tiers: Arc<PoolTiers>,
    counts: TierCounts,
    /// Until there is room again.
    full: Mutex<Option<Refusal>>,
    /// The same, for who only wants to know whether.
    is_full: AtomicBool,
    /// The last page that did not get smaller, and found no room.
    turned_away: Mutex<Option<Refusal>>,
}

impl PoolStore {
    /// A store without content.
    #[must_use]
    pub fn new(pool: Arc<Pool>) -> Self {
        let slots = Mutex::new(Slots::new(pool.chunk_limit()));
        let seed = pool.seed();
        Self {
            pool,
            seed,
            slots,
            room: Arc::new(Room::unlimited()),
            tiers: PoolTiers::new(None, ZstdTier::Off),
            counts: TierCounts::default(),
            full: Mutex::default(),
            is_full: AtomicBool::new(false),
            turned_away: Mutex::default(),
        }
    }

    /// From now on memory for content is taken from `room`.
    #[must_use]
    pub fn within(mut self, room: Arc<Room>) -> Self {
        self.room = room;
        self
    }

    /// From now on, before there is any content, these tiers are used.
    #[must_use]
    pub fn in_tiers(mut self, tiers: &Arc<PoolTiers>) -> Self {
        self.tiers = Arc::clone(tiers);
        self
    }

    /// The tiers of its content.
    #[must_use]
    pub fn tiers(&self) -> &Arc<PoolTiers> {
        &self.tiers
    }

    /// Where memory for content is taken from.
    #[must_use]
    pub fn room(&self) -> &Arc<Room> {
        &self.room
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Seed of the CRCs.
    #[must_use]
    pub fn seed(&self) -> Seed {
        self.seed
    }

    /// Pages and bytes by tier.
    #[must_use]
    pub fn counts(&self) -> &TierCounts {
        &self.counts
    }

    /// What content takes now.
    #[must_use]
    pub fn bytes(&self) -> StoreBytes {
        let slots = self.lock();
        StoreBytes {
            stored_bytes: self.counts.stored_bytes.load(Relaxed),
            chunk_bytes: slots.chunk_bytes(),
            slots_bytes: slots.metadata_bytes(),
        }
    }

    /// Why content is refused, if the store is full.
    #[must_use]
    pub fn full(&self) -> Option<PutError> {
        self.lock_full().as_ref().map(|refusal| refusal.why.clone())
    }

    /// True if packing content for this store is worth while: it is not full, or has many free slots.
    #[must_use]
    pub fn takes_content(&self) -> bool {
        if !self.is_full.load(Relaxed) {
            return true;
        }
        let slots = self.lock();
        slots.free_bytes() > RESUME_BYTES.max(slots.chunk_bytes() / FREE_PART)
    }

    /// A full store looks whether it has room again, at `now`.
    pub fn look_for_room(&self, now: Instant) {
        let Some(refusal) = self.lock_full().clone() else {
            return;
        };
        let is_over = now.saturating_duration_since(refusal.at) >= FULL_MIN;
        if (is_over || self.has_another_cap(&refusal.why)) && self.has_room() {
            let mut full = self.lock_full();
            *full = None;
            self.is_full.store(false, Relaxed);
        }
    }

    /// The cap is another than the one that refused content.
    fn has_another_cap(&self, why: &PutError) -> bool {
        match why {
            PutError::Cap(reached) => self.pool.cap().cap_bytes() != Some(reached.cap_bytes()),
            PutError::Tier(_) | PutError::Full { .. } | PutError::Group(_) | PutError::File(_) => {
                false
            }
        }
    }

    fn has_room(&self) -> bool {
        let (spare_bytes, area_bytes) = {
            let slots = self.lock();
            (slots.spare_bytes(), slots.unused_bytes())
        };
        let has = |left_bytes: u64, of_bytes| {
            left_bytes.saturating_add(spare_bytes) >= resume_bytes(of_bytes)
        };
        let has_tmpfs = || match self.pool.tmpfs_room() {
            Ok(tmpfs) => has(tmpfs.left_bytes, tmpfs.len_bytes),
            // Only trying tells.
            Err(_) => true,
        };
        self.tiers.left_bytes() >= RESUME_BYTES
            && has(area_bytes, 0)
            && has(self.pool.cap_left_bytes(), self.pool.share_bytes())
            && self.room.shortage().is_none()
            && has_tmpfs()
    }

    fn refused(&self, why: &PutError) {
        if why.is_full() {
            let mut full = self.lock_full();
            full.get_or_insert_with(|| Refusal {
                why: why.clone(),
                at: Instant::now(),
            });
            self.is_full.store(true, Relaxed);
        }
    }

    fn lock_full(&self) -> MutexGuard<'_, Option<Refusal>> {
        self.full.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the packed form of a page, in the tier lz4.
    ///
    /// # Errors
    /// [`PutError`]. After [`PutError::Tier`] the tier below may take the page.
    pub fn put(&self, stored: &[u8]) -> Result<Content, PutError> {
        let put = self.put_as(form_of(stored), stored);
        put.inspect_err(|why| {
            let may_pass_down = matches!(why, PutError::Tier(_)) && self.tiers.uses_zstd();
            if !may_pass_down {
                self.refused(why);
            }
        })
    }

    /// Stores the zstd form of a page for which the tier above has no room.
    ///
    /// # Errors
    /// [`PutError`].
    pub fn put_below(&self, stored: &[u8]) -> Result<Content, PutError> {
        let put = self.put_as(Form::Zstd, stored);
        put.inspect_err(|why| self.refused(why))
    }

    /// Neither this tier nor one below it takes a page, because of `why`: there is no room for pages that do not
    /// get smaller. Others are stored.
    pub(crate) fn turn_away(&self, why: &PutError) {
        let refusal = Refusal {
            why: why.clone(),
            at: Instant::now(),
        };
        *self.lock_turned_away() = Some(refusal);
    }

    /// Why pages that do not get smaller were not stored just before `now`, if so. They are where they were.
    #[must_use]
    pub fn turned_away(&self, now: Instant) -> Option<PutError> {
        let last = self.lock_turned_away();
        let is_recent = |refusal: &&Refusal| now.saturating_duration_since(refusal.at) < FULL_MIN;
        let last = last.as_ref().filter(is_recent);
        last.map(|refusal| refusal.why.clone())
    }

    fn lock_turned_away(&self) -> MutexGuard<'_, Option<Refusal>> {
        (self.turned_away.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the zstd form of a page that has content in the store already.
    ///
    /// # Errors
    /// [`PutError`]. The store is not full for that: nothing is lost.
    pub fn put_copy(&self, stored: &[u8]) -> Result<Content, PutError> {
        self.put_as(Form::Zstd, stored)
    }

    /// Content that consists of `word`, which takes no room; for 0 that is no stored content at all.
    pub fn put_same(&self, word: u32) -> Content {
        let located = Located::Same(word);
        match located.content() {
            Some(content) => {
                self.count(located, 1);
                content
            }
            None => Content::ZERO,
        }
    }

    fn put_as(&self, form: Form, stored: &[u8]) -> Result<Content, PutError> {
        let bytes = u32::try_from(stored.len()).unwrap_or(u32::MAX);
        self.tiers.take(form, bytes.into())?;
        let put = self.put_in_tier(form, bytes, stored);
        if put.is_err() {
            self.tiers.give_back(form, bytes.into());
        }
        put
    }

    fn put_in_tier(&self, form: Form, bytes: u32, stored: &[u8]) -> Result<Content, PutError> {
        let slot = self.allocate(bytes)?.slot;
        let located = Located::Pool(InPool { slot, bytes, form });
        let written = self.pool.write_content(slot.byte_offset(), stored);
        match (written, located.content()) {
            (Ok(()), Some(content)) => {
                self.count(located, 1);
                Ok(content)
            }
            (written, _) => {
                self.lock().free(slot, bytes);
                let why = written.err().map_or_else(
                    || "its slot number is too large".to_owned(),
                    |e| e.to_string(),
                );
                Err(PutError::File(why))
            }
        }
    }

    /// Appends the stored form of what is in the pool there to `into`, unchecked: it is checked when it is
    /// loaded. `None` if there is no such place.
    pub(crate) fn copy_stored(&self, at: InPool, into: &mut Vec<u8>) -> Option<()> {
        let begin = into.len();
        into.resize(begin + at.bytes as usize, 0);
        let stored = into.get_mut(begin..)?;
        let read = self.pool.read_content(at.slot.byte_offset(), stored);
        read.is_ok().then_some(())
    }

    fn allocate(&self, bytes: u32) -> Result<Allocated, PutError> {
        let mut slots = self.lock();
        let full = |slots: &Slots| PutError::Full {
            used_bytes: slots.used_bytes(),
        };
        let allocated = slots.allocate(bytes).map_err(|_| full(&slots))?;
        let Some(chunk) = allocated.new_chunk else {
            return Ok(allocated);
        };
        // The chunk is charged when it is allocated, and a charge beyond the group's limit kills
        // the process.
        let taken = self.room.take(CHUNK_BYTES).map_err(PutError::from);
        if let Err(why) = taken.and_then(|()| Ok(self.pool.take_for_content(CHUNK_BYTES)?)) {
            slots.chunk_without_memory(&allocated, bytes);
            return Err(why);
        }
        // Memory first, and only then a write through the mapping: without memory that could raise
        // SIGBUS.
        match self.pool.allocate_chunk(chunk) {
            Ok(()) => Ok(allocated),
            Err(error) => {
                self.pool.give_back(CHUNK_BYTES);
                slots.chunk_without_memory(&allocated, bytes);
                Err(match error {
                    FileError::NoSpace { .. } => full(&slots),
                    other => PutError::File(other.to_string()),
                })
            }
        }
    }

    /// Records content that a dead predecessor stored.
    ///
    /// # Errors
    /// [`AdoptError`].
    pub fn adopt(&self, content: Content) -> Result<(), AdoptError> {
        let located = Located::of(content)?;
        if let Located::Slow(slow) = located {
            return Err(AdoptError::NoTier(slow.kind));
        }
        if let Located::Pool(InPool { slot, bytes, form }) = located {
            self.lock().adopt(slot, bytes)?;
            self.tiers.take_existing(form, bytes.into());
        }
        self.count(located, 1);
        Ok(())
    }

    /// After the last [`Self::adopt`]: returns the memory of all other chunks, since the
    /// predecessor may have died between storing and committing.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn finish_adoption(&self) -> Result<(), FileError> {
        let slots = self.lock();
        let mut next = 0;
        for used in slots.chunks_in_use() {
            if used > next {
                self.pool.release_chunks(next, used - next)?;
            }
            next = used + 1;
        }
        let limit = self.pool.chunk_limit();
        if next < limit {
            self.pool.release_chunks(next, limit - next)?;
        }
        self.pool.settle_charge()
    }

    /// Returns the memory of all but a few empty chunks to the system.
    ///
    /// # Errors
    /// [`FileError`].
    pub fn trim(&self) -> Result<(), FileError> {
        // The chunks stay out of reach of `allocate` while the lock is held.
        let mut slots = self.lock();
        for chunk in slots.take_empty_chunks(SPARE_CHUNKS) {
            self.pool.release_chunks(chunk, 1)?;
            self.pool.give_back(CHUNK_BYTES);
        }
        Ok(())
    }

    fn count(&self, located: Located, sign: i64) {
        let counts = &self.counts;
        let add = |counter: &AtomicU64, amount: i64| {
            counter.fetch_add(amount.cast_unsigned(), Relaxed);
        };
        let InPool { bytes, form, .. } = match located {
            Located::Pool(in_pool) => in_pool,
            Located::Same(_) => return add(&counts.same_filled_pages, sign),
            // They are counted where they are.
            Located::Slow(_) => return,
        };
        let bytes = i64::from(bytes) * sign;
        match form {
            Form::Lz4 => add(&counts.lz4_pages, sign),
            Form::Uncompressed => add(&counts.uncompressed_pages, sign),
            Form::Zstd => {
                add(&counts.zstd_pages, sign);
                add(&counts.zstd_bytes, bytes);
            }
        }
        add(&counts.stored_bytes, bytes);
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PoolStore {
    /// What is left in the pool is no longer of this daemon's tiers: the VM is gone, or was never recovered.
    fn drop(&mut self) {
        let zstd_bytes = self.counts.zstd_bytes.load(Relaxed);
        let lz4_bytes = self.counts.stored_bytes.load(Relaxed) - zstd_bytes;
        self.tiers.give_back(Form::Lz4, lz4_bytes);
        self.tiers.give_back(Form::Zstd, zstd_bytes);
    }
}

/// Calls `work` with this thread's buffer for a stored page; its content is arbitrary. Clearing it
/// at each fault would cost a thirtieth of the time to load the content.
fn with_buffer<R>(work: impl FnOnce(&mut [u8]) -> R) -> R {
    thread_local! {
        static STORED: RefCell<Box<[u8]>> = RefCell::new(vec![0; STORED_BYTES_MAX].into());
    }
    STORED.with_borrow_mut(|buffer| work(buffer))
}

impl ContentStore for PoolStore {
    fn load(
        &self,
        page: PageNo,
        content: Content,
        into: &mut [u8; 4096],
    ) -> Result<(), StoreError> {
        let damaged = |why| StoreError::Damaged { page, why };
        let located = Located::of(content);
        let InPool { slot, bytes, form } = match located {
            Ok(Located::Pool(in_pool)) => in_pool,
            Ok(Located::Same(word)) => {
                fill_with_word(word, into);
                return Ok(());
            }
            Ok(Located::Slow(_)) => return Err(damaged("it is not in the pool")),
            Err(UnknownContent(_)) => return Err(damaged("its place is none that is known")),
        };
        with_buffer(|buffer| {
            let Some(stored) = buffer.get_mut(..bytes as usize) else {
                return Err(damaged("its length is more than a page's"));
            };
            let read = self.pool.read_content(slot.byte_offset(), stored);
            read.map_err(|_| damaged("its place is outside the pool"))?;
            unpack(self.seed, page, form, stored, into).map_err(damaged)
        })
    }

    /// # Panics
    /// If nothing is stored there.
    fn free(&self, content: Content) {
        let located = Located::of(content).unwrap_or_else(|unknown| panic!("freed: {unknown}"));
        if let Located::Pool(freed) = located {
            self.lock().free(freed.slot, freed.bytes);
            self.tiers.give_back(freed.form, freed.bytes.into());
        }
        self.count(located, -1);
    }

    fn tier(&self, content: Content) -> pagetide_addr::Tier {
        match Located::of(content) {
            Ok(Located::Pool(in_pool)) => match in_pool.form {
                Form::Lz4 | Form::Zstd => pagetide_addr::Tier::Compressed,
                Form::Uncompressed => pagetide_addr::Tier::Uncompressed,
            },
            Ok(Located::Same(_)) => pagetide_addr::Tier::Compressed,
            Ok(Located::Slow(slow)) => match slow.kind {
                TierKind::Disk => pagetide_addr::Tier::Disk,
                TierKind::Remote => pagetide_addr::Tier::Remote,
            },
            Err(UnknownContent(_)) => pagetide_addr::Tier::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{slots::SlotNo, tier::Packer};

    fn slot_of(content: Content) -> SlotNo {
        Located::of(content).unwrap().in_pool().unwrap().slot
    }

    #[test]
    fn stored_page_comes_back_and_damage_in_the_pool_is_noticed() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let pool = Arc::new(Pool::create(&dir.path().join("a.pool"), 64, 3, b"").unwrap());
        let store = PoolStore::new(pool.clone());
        let mut packer = Packer::default();
        let page: [u8; 4096] = std::array::from_fn(|i| (i % 97).to_le_bytes()[0]);
        let content = store
            .put(packer.pack(store.seed(), PageNo(9), &page).unwrap())
            .unwrap();
        let mut back = [0; 4096];
        store.load(PageNo(9), content, &mut back).unwrap();
        assert!(back == page);
        assert!(matches!(
            store.load(PageNo(8), content, &mut back),
            Err(StoreError::Damaged { .. })
        ));
        pool.write_content(slot_of(content).byte_offset() + 6, &[0xff])
            .unwrap();
        assert!(matches!(
            store.load(PageNo(9), content, &mut back),
            Err(StoreError::Damaged { .. })
        ));
        store.free(content);
        assert_eq!(store.counts().stored_bytes.load(Relaxed), 0);
    }

    #[test]
    fn stored_page_tells_whether_it_is_compressed_or_uncompressed() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let pool = Arc::new(Pool::create(&dir.path().join("b.pool"), 64, 3, b"").unwrap());
        let store = PoolStore::new(pool);
        let mut packer = Packer::default();
        let mut noise = 1_u32;
        let mut noisy = |_| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            noise.to_le_bytes()[3]
        };
        let text: [u8; 4096] = std::array::from_fn(|i| (i % 97).to_le_bytes()[0]);
        for (page, tier) in [
            (text, pagetide_addr::Tier::Compressed),
            (
                std::array::from_fn(&mut noisy),
                pagetide_addr::Tier::Uncompressed,
            ),
        ] {
            let packed = packer.pack(store.seed(), PageNo(0), &page).unwrap();
            let content = store.put(packed).unwrap();
            assert_eq!(store.tier(content), tier);
        }
    }

    /// A store in a pool of a cap of 64 MiB, with a page that does not compress.
    fn capped(dir: &tempfile::TempDir) -> (PoolStore, Vec<u8>) {
        let cap = crate::pool::PoolCap::new(Some(64 << 20));
        let pool = Pool::create(&dir.path().join("c.pool"), 64, 3, b"").unwrap();
        let store = PoolStore::new(Arc::new(pool.within(&cap).unwrap()));
        (store, vec![1; STORED_BYTES_MAX])
    }

    #[test]
    fn store_near_its_cap_stays_full_until_usage_is_well_below_it_and_for_a_while() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (store, page) = capped(&dir);
        let pool = store.pool();
        pool.take_for_content(pool.cap_left_bytes()).unwrap();
        assert!(matches!(store.put(&page), Err(PutError::Cap(_))));
        let later = Instant::now() + FULL_MIN;
        let is_full_at = |now| {
            store.look_for_room(now);
            store.full().is_some()
        };
        pool.give_back(2 * RESUME_BYTES);
        assert!(is_full_at(later), "near its cap");
        pool.give_back((64 << 20) / RESUME_PART - 2 * RESUME_BYTES);
        assert!(is_full_at(Instant::now()), "a moment after it was full");
        assert!(!is_full_at(later));
        // Whoever raises the cap need not wait.
        pool.take_for_content(pool.cap_left_bytes()).unwrap();
        assert!(store.put(&page).is_err() && is_full_at(Instant::now()));
        pool.cap().set(Some(128 << 20));
        assert!(!is_full_at(Instant::now()));
    }

    #[test]
    fn store_whose_content_area_is_exhausted_stays_full_until_chunks_are_free() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (store, page) = capped(&dir);
        *store.lock() = Slots::new(20);
        let mut stored = Vec::new();
        let refused = loop {
            match store.put(&page) {
                Ok(content) => stored.push(content),
                Err(refused) => break refused,
            }
        };
        assert!(matches!(refused, PutError::Full { .. }), "{refused}");
        let later = Instant::now() + FULL_MIN;
        store.look_for_room(later);
        assert_eq!(
            store.full(),
            Some(refused),
            "cap and tmpfs have room, the area has not"
        );
        let most = stored.len() / 20 * 16;
        stored.drain(..most).for_each(|content| store.free(content));
        store.look_for_room(later);
        assert_eq!(store.full(), None);
    }

    #[test]
    fn same_filled_page_takes_no_room_and_comes_back_after_a_restart_too() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("s.pool");
        let pool = Arc::new(Pool::create(&path, 64, 3, b"").unwrap());
        let before = pool.allocated_bytes().unwrap();
        let store = PoolStore::new(Arc::clone(&pool));
        assert_eq!(store.put_same(0), Content::ZERO);
        let content = store.put_same(0xdead_beef);
        assert_eq!(store.counts().pages(), 1);
        assert_eq!(pool.allocated_bytes().unwrap(), before);
        drop((store, pool));
        let successor = PoolStore::new(Arc::new(Pool::open(&path).unwrap()));
        successor.adopt(content).unwrap();
        // Any page may consist of the same word.
        successor.adopt(content).unwrap();
        let mut page = [0; 4096];
        successor.load(PageNo(3), content, &mut page).unwrap();
        assert_eq!(crate::tier::repeated_word(&page), Some(0xdead_beef));
        successor.free(content);
        successor.free(content);
        assert_eq!(successor.counts().pages(), 0);
    }

    #[test]
    fn word_of_a_newer_version_is_not_adopted_and_not_loaded() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let pool = Pool::create(&dir.path().join("n.pool"), 64, 3, b"").unwrap();
        let store = PoolStore::new(Arc::new(pool));
        let newer = Content::at(15 << 52 | 64).unwrap();
        assert!(matches!(store.adopt(newer), Err(AdoptError::Unknown(_))));
        let loaded = store.load(PageNo(0), newer, &mut [0; 4096]);
        assert!(matches!(loaded, Err(StoreError::Damaged { .. })));
    }

    #[test]
    fn tier_at_its_limit_passes_down_and_the_store_is_full_when_the_last_one_is() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let pool = Pool::create(&dir.path().join("t.pool"), 64, 3, b"").unwrap();
        let zstd = ZstdTier::On {
            limit_bytes: Some(3 << 20),
        };
        let tiers = PoolTiers::new(Some(2 << 20), zstd);
        let store = PoolStore::new(Arc::new(pool)).in_tiers(&tiers);
        let page = vec![1; STORED_BYTES_MAX];
        let mut stored = Vec::new();
        while let Ok(content) = store.put(&page) {
            stored.push(content);
        }
        assert_eq!(stored.len(), (2 << 20) / STORED_BYTES_MAX);
        assert!(matches!(store.put(&page), Err(PutError::Tier(_))));
        assert_eq!(store.full(), None, "zstd has room");
        while let Ok(content) = store.put_below(&page[..3_000]) {
            stored.push(content);
        }
        assert!(matches!(store.full(), Some(PutError::Tier(_))));
        let later = Instant::now() + FULL_MIN;
        store.look_for_room(later);
        assert!(store.full().is_some());
        stored.drain(..256).for_each(|content| store.free(content));
        store.look_for_room(later);
        assert_eq!(store.full(), None);
        drop(store);
        assert_eq!(
            tiers.used_bytes(Form::Lz4) + tiers.used_bytes(Form::Zstd),
            0
        );
    }
}
