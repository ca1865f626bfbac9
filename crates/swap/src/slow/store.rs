// SPDX-License-Identifier: Apache-2.0
//! [`SlowStore`]: what one VM has in slow tiers.
//!
//! Key, versions and the table of extents are in its pool. Here are the numbers in use with their live pages,
//! which follow from the words.
//!
//! Requests to a tier hold the store. So it is dropped after the last of them, and only then, if the VM has
//! ended, are the tiers told to forget it.

use super::tiers::SlowTiers;
use crate::{
    pool::Pool,
    store::AdoptError,
    tier::{InSlow, Seed},
};
use pagetide_tiers::{
    ExtentName, ExtentNo, Place, TierKind, VmId,
    batch::SECTOR_BYTES,
    seal::Sealer,
    table::{ExtentNumbers, Left, NumberError},
};
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{
        AtomicBool, AtomicU64,
        Ordering::{self, Relaxed},
    },
};

/// What a VM has in slow tiers, and what has happened to it since the daemon serves it.
#[derive(Debug, Default)]
pub struct SlowCounts {
    /// Pages on disk.
    pub disk_pages: AtomicU64,
    /// Bytes that they take there, padding and seals included.
    pub disk_bytes: AtomicU64,
    /// Pages in memory of another host.
    pub remote_pages: AtomicU64,
    /// Bytes that they take there, rounded up to 512 each, seals included.
    pub remote_bytes: AtomicU64,
    /// Pages loaded.
    pub loaded_pages: AtomicU64,
    /// Loads tried again, because their tier did not answer.
    pub retried_loads: AtomicU64,
    /// Answers that were not the page as it was stored.
    pub wrong_answers: AtomicU64,
    /// Loads of pages that their tier does not have, which go on until it does: a page counts once for each load of
    /// it, so again if it was brought back meanwhile or its load was given up because too many wait.
    pub missing_pages: AtomicU64,
    /// Batches that could not be written.
    pub failed_batches: AtomicU64,
}

impl SlowCounts {
    /// Pages in any slow tier.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.disk_pages.load(Relaxed) + self.remote_pages.load(Relaxed)
    }

    fn count(&self, place: InSlow, sign: i64) {
        let add = |counter: &AtomicU64, amount: i64| {
            counter.fetch_add((amount * sign).cast_unsigned(), Relaxed);
        };
        let (pages, bytes) = match place.kind {
            TierKind::Disk => (&self.disk_pages, &self.disk_bytes),
            TierKind::Remote => (&self.remote_pages, &self.remote_bytes),
        };
        add(pages, 1);
        add(
            bytes,
            i64::from(place.sectors) * SECTOR_BYTES.cast_signed() as i64,
        );
    }
}

/// See the module.
pub struct SlowStore {
    vm: VmId,
    pool: Arc<Pool>,
    pub(super) seed: Seed,
    pub(super) sealer: Sealer,
    tiers: Arc<SlowTiers>,
    numbers: Mutex<ExtentNumbers>,
    pub(super) counts: SlowCounts,
    /// Found in words, until they are all known.
    found: Mutex<Vec<InSlow>>,
    is_over: AtomicBool,
}

impl std::fmt::Debug for SlowStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlowStore")
            .field("vm", &self.vm)
            .field("counts", &self.counts)
            .finish_non_exhaustive()
    }
}

impl SlowStore {
    /// What the VM of `pool` has in `tiers`: nothing yet. `None` if there can be nothing.
    pub(super) fn new(pool: &Arc<Pool>, tiers: &Arc<SlowTiers>) -> Option<Arc<Self>> {
        if tiers.is_empty() {
            return None;
        }
        let (vm, key) = (pool.slow_vm()?, pool.slow_key()?);
        Some(Arc::new(Self {
            vm,
            seed: pool.seed(),
            sealer: Sealer::new(&key),
            tiers: Arc::clone(tiers),
            numbers: Mutex::new(ExtentNumbers::new(pool.extent_capacity())),
            counts: SlowCounts::default(),
            found: Mutex::default(),
            is_over: AtomicBool::new(false),
            pool: Arc::clone(pool),
        }))
    }

    /// What there is, and what has happened.
    #[must_use]
    pub fn counts(&self) -> &SlowCounts {
        &self.counts
    }

    /// The tiers.
    #[must_use]
    pub fn tiers(&self) -> &Arc<SlowTiers> {
        &self.tiers
    }

    pub(super) fn vm(&self) -> VmId {
        self.vm
    }

    pub(super) fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Memory of this process that records its extents, in bytes, about.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        self.numbers().bytes()
    }

    pub(super) fn numbers(&self) -> MutexGuard<'_, ExtentNumbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn found(&self) -> MutexGuard<'_, Vec<InSlow>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where what a word names is, by the table; `None` if the table does not have its extent.
    pub(super) fn place_of(&self, place: InSlow) -> Option<Place> {
        let entry = self.pool.extent(place.extent)?;
        Some(entry.place(self.vm, place.extent, place.position, place.sectors))
    }

    /// A page has come to be there.
    pub(super) fn count_in(&self, place: InSlow) {
        self.counts.count(place, 1);
    }

    /// No word names it any more, and no load of it is under way.
    pub(super) fn free(&self, place: InSlow) {
        let at = self.place_of(place);
        self.counts.count(place, -1);
        match self.forget_page(place.extent) {
            Ok(()) => {}
            Err(error) => return tracing::error!(%error, "a page was freed twice"),
        }
        if let (Some(at), Some(seat)) = (at, self.tiers.seat(place.kind)) {
            seat.tier.forget(&[at]);
        }
    }

    /// The entry is cleared before the room is given back: a successor must not take for the VM's what
    /// another VM may have by then.
    fn forget_page(&self, number: ExtentNo) -> Result<(), NumberError> {
        // Under the lock, so that the number is not used again before it is cleared.
        let mut numbers = self.numbers();
        match numbers.forget_page(number)? {
            Left::Pages => {}
            Left::Nothing => self.pool.clear_extent(number),
        }
        Ok(())
    }

    /// A number that was taken for a batch is not needed.
    pub(super) fn give_number_back(&self, number: ExtentNo) {
        if let Err(error) = self.numbers().begin(number, 0).map(drop_left) {
            tracing::error!(%error, "the number of an extent cannot be given back");
        }
    }

    /// Records content that a word of a dead daemon names.
    pub(super) fn adopt(&self, place: InSlow) -> Result<(), AdoptError> {
        let Some(seat) = self.tiers.seat(place.kind) else {
            return Err(AdoptError::NoTier(place.kind));
        };
        if place.kind == TierKind::Disk && self.pool.disk() != seat.disk {
            return Err(AdoptError::OtherDisk);
        }
        if self.pool.extent(place.extent).is_none() {
            return Err(AdoptError::NoExtent(place.extent.0));
        }
        self.found().push(place);
        self.count_in(place);
        Ok(())
    }

    /// All words are known: extents that none of them names are forgotten, first in the pool.
    pub(super) fn finish_adoption(&self) -> Result<(), AdoptError> {
        let found = std::mem::take(&mut *self.found());
        let named = found.iter().map(|place| place.extent);
        let numbers = ExtentNumbers::recover(self.pool.extent_capacity(), named)?;
        let unnamed: Vec<ExtentNo> = (self.pool.extents())
            .map(|(number, _)| number)
            .filter(|number| !numbers.is_used(*number))
            .collect();
        for number in unnamed {
            self.pool.clear_extent(number);
        }
        *self.numbers() = numbers;
        for seat in self.tiers.seats() {
            let kind = seat.tier.kind();
            let there = found.iter().filter(|place| place.kind == kind);
            let places: Vec<Place> = there.filter_map(|place| self.place_of(*place)).collect();
            seat.tier.recover(self.vm, &places)?;
        }
        Ok(())
    }

    /// The VM has ended, and its pool is removed: once no request is under way, its tiers forget it.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }
}

fn drop_left(left: Left) {
    debug_assert_eq!(left, Left::Nothing);
}

/// Has `tiers` forget the VM of a pool that is removed. No request for it is under way.
pub fn forget(pool: &Pool, tiers: &SlowTiers) {
    let Some(vm) = pool.slow_vm() else {
        return;
    };
    for seat in tiers.seats() {
        let here = (pool.extents()).filter(|(_, entry)| entry.kind() == seat.tier.kind());
        let names = here.map(|(number, entry)| ExtentName {
            vm,
            number,
            version: entry.version,
        });
        let extents: Vec<ExtentName> = names.collect();
        seat.tier.forget_vm(vm, &extents);
    }
}

impl Drop for SlowStore {
    fn drop(&mut self) {
        if self.is_over.load(Ordering::Acquire) {
            forget(&self.pool, &self.tiers);
        }
    }
}
