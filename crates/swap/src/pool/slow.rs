// SPDX-License-Identifier: Apache-2.0
//! What tiers outside memory (disk, remote) keep in the pool: a key, versions, and a table of extents.
//!
//! Content that leaves the host's memory is sealed with the VM's *key*. Each extent, a batch of pages written
//! together, is sealed under a *version* that no other extent of the VM ever has: nonces are made of it. Key
//! and versions are here and nowhere else, so they outlive a killed daemon, and die with the host or the VM.
//! An answer from disk or wire is checked against the version in the table; so an old one is refused.
//!
//! ```text
//!   header     key: 4 cells, last version reserved, place and capacity of the table, its bytes with memory;
//!              the VM's name in tiers, the disk that it has pages on: 2 cells each
//!   …          words, content
//!   extents_at ┌ extent 0: version │ place ┐ 16 bytes each, native byte order (`pagetide_tiers::table`)
//!              │ extent 1: …               │ version 0: free
//!              └ (a hole from the last extent that was ever used)
//! ```
//! *Order.* A version is reserved (in the mapping, which outlives the process) before it is used: a daemon that
//! dies between the two leaves a gap, never a version used twice. An extent is entered after it was written
//! and acknowledged, and before a page word names it. Of an entry the version is written last, and taken away
//! first.
//!
//! A pool from before there were such tiers has zeros in these cells: it has no table, and none of its pages
//! goes to disk or wire.

use super::{
    Pool,
    error::{ExtentError, PoolError},
    file::at,
    format::{Cell, EXTENTS_PER_SECTION},
};
use crate::slots::CHUNK_BYTES;
use pagetide_addr::SECTION_PAGES;
use pagetide_tiers::{
    DiskId, ExtentNo, VmId,
    seal::{KEY_BYTES, Key},
    table::ExtentEntry,
};
use std::{
    ops::RangeInclusive,
    path::Path,
    sync::{
        PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

const KEY_CELLS: [Cell; 4] = [Cell::Key0, Cell::Key1, Cell::Key2, Cell::Key3];
const _: () = assert!(KEY_CELLS.len() * 8 == KEY_BYTES);
const VM_CELLS: [Cell; 2] = [Cell::SlowVm0, Cell::SlowVm1];
const DISK_CELLS: [Cell; 2] = [Cell::Disk0, Cell::Disk1];
const ENTRY_CELLS: usize = 2;
const ENTRY_BYTES: u64 = 8 * ENTRY_CELLS as u64;
const _: () = assert!(ENTRY_BYTES == ExtentEntry::BYTES as u64);

/// Extents in the table of a pool for `capacity_pages`.
pub(super) fn extent_capacity_for(capacity_pages: u64) -> u32 {
    let sections = capacity_pages.div_ceil(SECTION_PAGES);
    u32::try_from(sections * EXTENTS_PER_SECTION).unwrap_or(u32::MAX)
}

/// Bytes of a table of that capacity, by whole chunks.
pub(super) fn table_bytes(extent_capacity: u32) -> u64 {
    (u64::from(extent_capacity) * ENTRY_BYTES).next_multiple_of(CHUNK_BYTES)
}

/// Checks what the header of a pool of `length` bytes says of its table: place, capacity, bytes with memory.
pub(super) fn is_table_sound([extents_at, capacity, with_memory]: [u64; 3], length: u64) -> bool {
    if extents_at == 0 {
        return capacity == 0 && with_memory == 0;
    }
    let Ok(capacity) = u32::try_from(capacity) else {
        return false;
    };
    let bytes = table_bytes(capacity);
    extents_at.is_multiple_of(CHUNK_BYTES)
        && extents_at
            .checked_add(bytes)
            .is_some_and(|end| end <= length)
        && with_memory <= bytes
        && with_memory.is_multiple_of(CHUNK_BYTES)
}

impl Pool {
    /// Writes the cells of a new pool.
    pub(super) fn begin_slow(
        &self,
        extents_at: u64,
        extent_capacity: u32,
    ) -> Result<(), PoolError> {
        let key = Key::generate()?;
        for (cell, part) in KEY_CELLS.into_iter().zip(key.for_pool().as_chunks::<8>().0) {
            self.cell(cell)
                .store(u64::from_ne_bytes(*part), Ordering::Relaxed);
        }
        self.set_wide(VM_CELLS, VmId::draw()?.0);
        self.cell(Cell::ExtentsAt)
            .store(extents_at, Ordering::Relaxed);
        let capacity = u64::from(extent_capacity);
        self.cell(Cell::ExtentCapacity)
            .store(capacity, Ordering::Relaxed);
        Ok(())
    }

    fn set_wide(&self, [low, high]: [Cell; 2], value: u128) {
        let half = |bits: u128| u64::try_from(bits & u128::from(u64::MAX)).unwrap_or(0);
        self.cell(low).store(half(value), Ordering::Relaxed);
        self.cell(high).store(half(value >> 64), Ordering::Release);
    }

    fn wide(&self, [low, high]: [Cell; 2]) -> u128 {
        let high = self.cell(high).load(Ordering::Acquire);
        u128::from(high) << 64 | u128::from(self.cell(low).load(Ordering::Relaxed))
    }

    /// What the VM is called in tiers; `None` in a pool from before there were any.
    #[must_use]
    pub fn slow_vm(&self) -> Option<VmId> {
        let vm = self.wide(VM_CELLS);
        (vm != 0).then_some(VmId(vm))
    }

    /// The disk that pages of the VM have gone to; `None` before the first.
    #[must_use]
    pub fn disk(&self) -> Option<DiskId> {
        let disk = self.wide(DISK_CELLS);
        (disk != 0).then_some(DiskId(disk))
    }

    /// From now on pages of the VM go to this disk. None of them is on another.
    pub fn set_disk(&self, disk: DiskId) {
        self.set_wide(DISK_CELLS, disk.0);
    }

    /// The key with which content that leaves the host's memory is sealed; `None` in a pool from before there
    /// was one.
    #[must_use]
    pub fn slow_key(&self) -> Option<Key> {
        let mut key = [0; KEY_BYTES];
        for (cell, part) in KEY_CELLS.into_iter().zip(key.as_chunks_mut::<8>().0) {
            *part = self.cell(cell).load(Ordering::Relaxed).to_ne_bytes();
        }
        // No key is drawn that is all zeros, but once in 2^256 times.
        (key != [0; KEY_BYTES]).then(|| Key::from_pool(&key))
    }

    /// Reserves `count` versions that no extent of this VM has had or will have; `None` if there are not so many
    /// left, or `count` is 0. They are reserved when this returns, whatever becomes of this process.
    #[must_use]
    pub fn reserve_versions(&self, count: u64) -> Option<RangeInclusive<u64>> {
        if count == 0 {
            return None;
        }
        let last = self.cell(Cell::SlowVersion);
        let reserve = |last: u64| last.checked_add(count);
        // Release: whoever sees a version used sees it reserved.
        let before = last.fetch_update(Ordering::AcqRel, Ordering::Relaxed, reserve);
        before.map_or(None, |before| Some(before + 1..=before + count))
    }

    /// Extents that the table has room for; 0 in a pool from before there was one.
    #[must_use]
    pub fn extent_capacity(&self) -> u32 {
        let capacity = self.cell(Cell::ExtentCapacity).load(Ordering::Relaxed);
        u32::try_from(capacity).unwrap_or(0)
    }

    /// The extent of that number, if it is in use.
    #[must_use]
    pub fn extent(&self, number: ExtentNo) -> Option<ExtentEntry> {
        let [version, place] = self.entry(number)?;
        // Pairs with the store of the version in `set_extent`.
        let version = version.load(Ordering::Acquire);
        ExtentEntry::of([version, place.load(Ordering::Relaxed)])
    }

    /// Enters an extent, in place of what was there. Cannot fail for want of memory after
    /// [`Self::make_extent_room`].
    ///
    /// # Errors
    /// [`ExtentError`]; nothing has changed.
    pub fn set_extent(&self, number: ExtentNo, entry: ExtentEntry) -> Result<(), ExtentError> {
        let [version_word, place_word] = entry.words().ok_or(ExtentError::TooFar(number.0))?;
        if version_word == 0 {
            return Err(ExtentError::NoVersion(number.0));
        }
        self.make_extent_room(number)?;
        let Some([version, place]) = self.entry(number) else {
            unreachable!("it has memory");
        };
        version.store(0, Ordering::Release);
        place.store(place_word, Ordering::Release);
        version.store(version_word, Ordering::Release);
        Ok(())
    }

    /// Frees an extent's entry: no page word names it any more.
    pub fn clear_extent(&self, number: ExtentNo) {
        if let Some([version, ..]) = self.entry(number) {
            version.store(0, Ordering::Release);
        }
    }

    /// All extents in use, by number.
    pub fn extents(&self) -> impl Iterator<Item = (ExtentNo, ExtentEntry)> + '_ {
        let with_memory = self.extent_bytes() / ENTRY_BYTES;
        let numbers = 0..u32::try_from(with_memory).unwrap_or(u32::MAX);
        let numbers = numbers.take_while(|number| *number < self.extent_capacity());
        numbers
            .map(ExtentNo)
            .filter_map(|number| Some((number, self.extent(number)?)))
    }

    /// Bytes of the table that have memory.
    #[must_use]
    pub fn extent_bytes(&self) -> u64 {
        self.cell(Cell::ExtentBytes).load(Ordering::Acquire)
    }

    /// The cells of an entry that has memory.
    fn entry(&self, number: ExtentNo) -> Option<&[AtomicU64; ENTRY_CELLS]> {
        let offset = u64::from(number.0) * ENTRY_BYTES;
        if number.0 >= self.extent_capacity() || offset + ENTRY_BYTES > self.extent_bytes() {
            return None;
        }
        let extents_at = self.cell(Cell::ExtentsAt).load(Ordering::Relaxed);
        let cells = self.mapping.atomic_u64s(extents_at + offset, ENTRY_CELLS)?;
        cells.first_chunk()
    }

    /// Gives the table memory up to this extent, which is to be entered.
    ///
    /// # Errors
    /// [`ExtentError`]; nothing has changed.
    pub fn make_extent_room(&self, number: ExtentNo) -> Result<(), ExtentError> {
        let capacity = self.extent_capacity();
        if number.0 >= capacity {
            let number = number.0;
            return Err(ExtentError::PastTheEnd { number, capacity });
        }
        let end = (u64::from(number.0) + 1) * ENTRY_BYTES;
        if end <= self.extent_bytes() {
            return Ok(());
        }
        let _changing = (self.changing.lock()).unwrap_or_else(PoisonError::into_inner);
        let before = self.extent_bytes();
        let wanted = end.next_multiple_of(CHUNK_BYTES);
        if wanted <= before {
            return Ok(());
        }
        let more = wanted - before;
        self.take_for_words(more)?;
        let extents_at = self.cell(Cell::ExtentsAt).load(Ordering::Relaxed);
        // A dead daemon may have given memory to a part and not said so: it is given once more.
        if let Err(error) = self.file.allocate(extents_at + before, more) {
            self.give_back(more);
            return Err(error.into());
        }
        self.cell(Cell::ExtentBytes)
            .store(wanted, Ordering::Release);
        Ok(())
    }
}

/// The table of a new pool at `path` gets its place behind `end`; the file gets so long.
pub(super) fn lay_out(
    path: &Path,
    file: &impl std::os::fd::AsFd,
    end: u64,
    capacity_pages: u64,
) -> Result<(u64, u32, u64), PoolError> {
    let extents_at = end.next_multiple_of(CHUNK_BYTES);
    let extent_capacity = extent_capacity_for(capacity_pages);
    let length = extents_at + table_bytes(extent_capacity);
    rustix::fs::ftruncate(file, length).map_err(|source| at(path, "ftruncate", source))?;
    Ok((extents_at, extent_capacity, length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::PoolCap;
    use pagetide_random::SplitMix64;
    use pagetide_tiers::{SectorNo, Version};
    use std::collections::BTreeMap;

    fn directory() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    #[test]
    fn key_outlives_the_daemon_differs_between_pools_and_is_not_shown() {
        let dir = directory();
        let path = dir.path().join("a.pool");
        let pool = Pool::create(&path, 512, 0, b"").unwrap();
        let key = pool.slow_key().unwrap();
        let other = Pool::create(&dir.path().join("b.pool"), 512, 0, b"").unwrap();
        assert_ne!(other.slow_key().unwrap().for_pool(), key.for_pool());
        let (vm, disk) = (pool.slow_vm().unwrap(), DiskId(5 << 64 | 7));
        assert_ne!(other.slow_vm(), Some(vm));
        assert_eq!(pool.disk(), None);
        pool.set_disk(disk);
        drop(pool);
        let pool = Pool::open(&path).unwrap();
        assert_eq!(pool.slow_key().unwrap().for_pool(), key.for_pool());
        assert_eq!((pool.slow_vm(), pool.disk()), (Some(vm), Some(disk)));
        assert!(!format!("{key:?}").contains(char::is_numeric));
    }

    #[test]
    fn no_version_is_given_twice_by_threads_and_daemons() {
        let dir = directory();
        let path = dir.path().join("a.pool");
        let mut seen = Vec::new();
        for _ in 0..3 {
            let pool = match path.exists() {
                true => Pool::open(&path).unwrap(),
                false => Pool::create(&path, 512, 0, b"").unwrap(),
            };
            std::thread::scope(|scope| {
                let reserve = || {
                    let ranges = (1..50).map(|count| pool.reserve_versions(count).unwrap());
                    ranges.flatten().collect::<Vec<u64>>()
                };
                let threads = [scope.spawn(reserve), scope.spawn(reserve)];
                for thread in threads {
                    seen.extend(thread.join().unwrap());
                }
            });
        }
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count);
        assert!(seen[0] > 0);
        let pool = Pool::open(&path).unwrap();
        assert_eq!(pool.reserve_versions(0), None);
        assert_eq!(pool.reserve_versions(u64::MAX), None);
        assert!(pool.reserve_versions(1).is_some());
    }

    /// Against a map, over restarts.
    #[test]
    fn extents_are_what_was_entered_and_the_table_takes_memory_as_it_grows() {
        let dir = directory();
        let path = dir.path().join("a.pool");
        let mut pool = Pool::create(&path, 512, 0, b"").unwrap();
        let empty = pool.allocated_bytes().unwrap();
        assert_eq!(pool.extents().count(), 0);
        let mut model = BTreeMap::new();
        let mut random = SplitMix64::new(6);
        for step in 0..4_000 {
            let number = ExtentNo(u32::try_from(random.below(6_000)).unwrap());
            if random.below(3) > 0 {
                let entry = ExtentEntry {
                    version: Version(1 + random.below(u64::MAX - 1)),
                    start: SectorNo(random.below(1 << 48)),
                    sectors: u16::try_from(random.below(4_097)).unwrap(),
                };
                pool.set_extent(number, entry).unwrap();
                model.insert(number, entry);
            } else {
                pool.clear_extent(number);
                model.remove(&number);
            }
            assert_eq!(pool.extent(number), model.get(&number).copied());
            if step % 1_000 == 0 {
                drop(pool);
                pool = Pool::open(&path).unwrap();
                assert!(pool.extents().eq(model.iter().map(|(n, e)| (*n, *e))));
            }
        }
        let most = table_bytes(6_000);
        assert!(pool.allocated_bytes().unwrap() <= empty + most);
        assert_eq!(pool.extent_bytes(), most);
    }

    #[test]
    fn extent_that_cannot_be_entered_changes_nothing() {
        let dir = directory();
        let cap = PoolCap::new(None);
        let pool = Pool::create(&dir.path().join("a.pool"), 512, 0, b"").unwrap();
        let pool = pool.within(&cap).unwrap();
        let entry = ExtentEntry {
            version: Version(7),
            start: SectorNo(8),
            sectors: 9,
        };
        let capacity = pool.extent_capacity();
        assert!(u64::from(capacity) >= pool.capacity_pages() / SECTION_PAGES);
        let past = pool.set_extent(ExtentNo(capacity), entry);
        assert!(matches!(past, Err(ExtentError::PastTheEnd { .. })));
        let none = pool.set_extent(
            ExtentNo(0),
            ExtentEntry {
                version: Version(0),
                ..entry
            },
        );
        assert!(matches!(none, Err(ExtentError::NoVersion(0))));
        let start = SectorNo(1 << 48);
        let far = pool.set_extent(ExtentNo(0), ExtentEntry { start, ..entry });
        assert!(matches!(far, Err(ExtentError::TooFar(0))));
        cap.set(Some(cap.used_bytes() + 10));
        let capped = pool.set_extent(ExtentNo(0), entry);
        assert!(matches!(capped, Err(ExtentError::Cap(_))));
        assert_eq!((pool.extent_bytes(), pool.extents().count()), (0, 0));
        cap.set(None);
        pool.set_extent(ExtentNo(0), entry).unwrap();
        pool.clear_extent(ExtentNo(capacity - 1));
        assert_eq!(pool.extent(ExtentNo(0)), Some(entry));
        assert_eq!(cap.used_bytes(), pool.charged_bytes());
    }

    #[test]
    fn pool_from_before_there_was_a_table_has_none_and_is_served() {
        let dir = directory();
        let path = dir.path().join("a.pool");
        let pool = Pool::create(&path, 512, 0, b"").unwrap();
        for cell in KEY_CELLS
            .into_iter()
            .chain(VM_CELLS)
            .chain([Cell::ExtentsAt, Cell::ExtentCapacity])
        {
            pool.cell(cell).store(0, Ordering::Relaxed);
        }
        drop(pool);
        let pool = Pool::open(&path).unwrap();
        assert!(pool.slow_key().is_none() && pool.slow_vm().is_none());
        assert_eq!(pool.extent_capacity(), 0);
        assert_eq!(pool.extent(ExtentNo(0)), None);
        assert_eq!(pool.extents().count(), 0);
    }

    #[test]
    fn header_that_contradicts_itself_is_refused() {
        let dir = directory();
        for (cell, value) in [
            (Cell::ExtentsAt, 8),
            (Cell::ExtentsAt, u64::MAX - CHUNK_BYTES + 1),
            (Cell::ExtentCapacity, 1 << 32),
            (Cell::ExtentCapacity, u64::from(u32::MAX)),
            (Cell::ExtentBytes, 1),
            (Cell::ExtentBytes, 1 << 50),
        ] {
            let path = dir.path().join(format!("{}-{value}.pool", cell as u32));
            let pool = Pool::create(&path, 512, 0, b"").unwrap();
            pool.cell(cell).store(value, Ordering::Relaxed);
            drop(pool);
            let opened = Pool::open(&path);
            assert!(matches!(opened, Err(PoolError::Damaged { .. })), "{value}");
        }
    }
}
