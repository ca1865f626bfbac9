// SPDX-License-Identifier: Apache-2.0
//! [`RegionMap`]: the allocated regions of a space, found by any address in them.
//!
//! Drivers allocate and free small regions by the million, from several threads. So regions are
//! spread over shards, by the *granule* of 2 MiB that they lie in. A region that spans several
//! granules (a VM's RAM) is in the list of long ones. An address is looked up in its granule's
//! shard, then in that list:
//!
//! ```text
//!   granule   0          1          2          3
//!             ├─aa──b────┼──c─dddd──┼──────────┼───e──
//!                       └─ fffffffffff ─┘          (long: crosses a border)
//! ```
//! A shard finds a granule by hashing its number, and a granule its regions by a bit for each page
//! ([`super::granule`]).
//!
//! A lock of this map is held for one look-up or one change, and no other lock is waited for under it. A
//! caller that needs all of them takes them in order. [`RegionMap::take_if`] tries the lock of a region, and
//! takes nothing if another thread has it.

use super::granule::Granule;
use crate::{
    error::GmError,
    region::RegionCore,
    sync::{Arc, AtomicU64, Ordering, RwLock, own, share},
};
use pagetide_addr::{PageNo, PageRange, SectionNo};
use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasherDefault, Hasher},
};

/// Enough that threads rarely meet in one shard.
#[cfg(not(loom))]
const SHARDS: usize = 32;
#[cfg(loom)]
const SHARDS: usize = 1;

/// Spreads numbers of granules: a multiplication and a rotation, so that low bits depend on all. Nobody gains by
/// making granules collide: addresses are the space's own choice, or the host's.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
        self.0 = (self.0 ^ number).wrapping_mul(GOLDEN).rotate_left(32);
    }
}

type Granules = HashMap<SectionNo, Granule, BuildHasherDefault<Spread>>;

/// Regions within granules. It has a pair of cache lines to itself, as CPUs fetch two at once.
#[derive(Default)]
#[repr(align(128))]
struct Shard(RwLock<Granules>);

/// Regions by their first page.
type Long = RwLock<BTreeMap<PageNo, Arc<RegionCore>>>;

/// See the module.
pub(super) struct RegionMap {
    shards: Box<[Shard]>,
    long: Long,
    /// 1 once the space is destroyed. Changed with all locks owned, so a holder of any lock sees it.
    destroyed: AtomicU64,
}

/// The granule of regions with these pages, unless they cross a border.
fn granule_of(pages: PageRange) -> Option<SectionNo> {
    let granule = pages.start.section();
    let last = pages.last()?;
    (last.section() == granule).then_some(granule)
}

impl RegionMap {
    pub(super) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            long: Long::default(),
            destroyed: AtomicU64::new(0),
        }
    }

    fn shard_of(&self, granule: SectionNo) -> &RwLock<Granules> {
        &self.shards[granule.index() % SHARDS].0
    }

    /// # Errors
    /// [`GmError::Destroyed`].
    pub(super) fn insert(&self, core: &Arc<RegionCore>) -> Result<(), GmError> {
        let known = Arc::clone(core);
        if let Some(granule) = granule_of(core.pages) {
            let mut granules = own(self.shard_of(granule));
            self.refuse_if_destroyed()?;
            granules.entry(granule).or_default().insert(known);
        } else {
            let mut long = own(&self.long);
            self.refuse_if_destroyed()?;
            long.insert(core.pages.start, known);
        }
        Ok(())
    }

    fn refuse_if_destroyed(&self) -> Result<(), GmError> {
        if self.is_destroyed() {
            return Err(GmError::Destroyed);
        }
        Ok(())
    }

    pub(super) fn remove(&self, core: &RegionCore) {
        let start = core.pages.start;
        // Dropped without a lock.
        let _removed = match granule_of(core.pages) {
            Some(granule) => remove_from(&mut own(self.shard_of(granule)), granule, start),
            None => own(&self.long).remove(&start),
        };
    }

    /// Removes the region within a granule that begins at `start`, if there is one and `may_go` says so.
    pub(super) fn take_if(
        &self,
        start: PageNo,
        may_go: impl FnOnce(&RegionCore) -> bool,
    ) -> Option<Arc<RegionCore>> {
        let granule = start.section();
        let mut granules = own(self.shard_of(granule));
        let core = granules.get(&granule)?.get(start)?;
        if !may_go(core) {
            return None;
        }
        remove_from(&mut granules, granule, start)
    }

    /// True if this very region is in the map.
    pub(super) fn knows(&self, core: &Arc<RegionCore>) -> bool {
        let start = core.pages.start;
        let is_it = |known: &Arc<RegionCore>| Arc::ptr_eq(known, core);
        match granule_of(core.pages) {
            Some(granule) => {
                let granules = share(self.shard_of(granule));
                let known = granules.get(&granule).and_then(|all| all.get(start));
                known.is_some_and(is_it)
            }
            None => share(&self.long).get(&start).is_some_and(is_it),
        }
    }

    /// The region that holds all of `pages`.
    pub(super) fn over(&self, pages: PageRange) -> Option<Arc<RegionCore>> {
        let (page, granule) = (pages.start, pages.start.section());
        let whole = |found: &Arc<RegionCore>| {
            let whole = found.pages.contains(page) && pages.end <= found.pages.end;
            whole.then(|| Arc::clone(found))
        };
        let within = {
            let granules = share(self.shard_of(granule));
            let found = granules
                .get(&granule)
                .and_then(|all| all.at_or_before(page));
            found.and_then(whole)
        };
        within.or_else(|| {
            let long = share(&self.long);
            let (_, found) = long.range(..=page).next_back()?;
            whole(found)
        })
    }

    /// All regions, ascending.
    pub(super) fn all(&self) -> Vec<Arc<RegionCore>> {
        let mut all: Vec<_> = Vec::new();
        for shard in &self.shards {
            let granules = share(&shard.0);
            all.extend(granules.values().flat_map(Granule::regions).map(Arc::clone));
        }
        all.extend(share(&self.long).values().map(Arc::clone));
        all.sort_unstable_by_key(|core| core.pages.start);
        all
    }

    pub(super) fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Relaxed) == 1
    }

    /// Refuses all insertions from now on.
    ///
    /// # Errors
    /// [`GmError::InUse`] if there is a region, [`GmError::Destroyed`] if this was done before.
    pub(super) fn destroy(&self) -> Result<(), GmError> {
        let shards: Vec<_> = self.shards.iter().map(|shard| own(&shard.0)).collect();
        let long = own(&self.long);
        self.refuse_if_destroyed()?;
        if !long.is_empty() || shards.iter().any(|shard| !shard.is_empty()) {
            return Err(GmError::InUse {
                by: "an allocated region",
            });
        }
        self.destroyed.store(1, Ordering::Relaxed);
        Ok(())
    }

    /// Leaks all regions: a device may still use them.
    pub(super) fn leak(&self) {
        for shard in &self.shards {
            std::mem::forget(std::mem::take(&mut *own(&shard.0)));
        }
        std::mem::forget(std::mem::take(&mut *own(&self.long)));
    }
}

/// Removes the region that begins at `start`, and its granule with the last one.
fn remove_from(
    granules: &mut Granules,
    granule: SectionNo,
    start: PageNo,
) -> Option<Arc<RegionCore>> {
    let regions = granules.get_mut(&granule)?;
    let removed = regions.remove(start);
    if regions.is_empty() {
        granules.remove(&granule);
    }
    removed
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::region::{Kind, Origin};

    fn region(start: u64, end: u64) -> Arc<RegionCore> {
        let pages = PageRange::new(PageNo(start), PageNo(end));
        RegionCore::new(pages, Origin::Chosen, Kind::Frames)
    }

    #[test]
    fn every_page_finds_its_region_and_no_other_whatever_borders_it_crosses() {
        let map = RegionMap::new();
        let regions = [
            region(0, 1),
            region(3, 512),
            region(512, 513),
            region(600, 1700),
            region(1700, 2048),
            region(512 * 32, 512 * 32 + 7),
        ];
        for core in &regions {
            map.insert(core).unwrap();
        }
        for page in (0..2100).chain(512 * 32 - 2..512 * 32 + 9).map(PageNo) {
            let expected = regions.iter().find(|core| core.pages.contains(page));
            let found = map.over(page.single());
            assert_eq!(
                found.as_ref().map(|core| core.pages),
                expected.map(|core| core.pages),
                "{page}"
            );
        }
        assert!(map.over(PageRange::new(PageNo(511), PageNo(513))).is_none());
        let starts: Vec<_> = map.all().iter().map(|core| core.pages.start.0).collect();
        assert_eq!(starts, [0, 3, 512, 600, 1700, 512 * 32]);
        for core in &regions {
            assert!(map.destroy().is_err());
            map.remove(core);
            assert!(!map.knows(core));
        }
        assert!(map.shards.iter().all(|shard| share(&shard.0).is_empty()));
        map.destroy().unwrap();
        assert!(matches!(map.insert(&regions[0]), Err(GmError::Destroyed)));
    }
    #[test]
    fn region_is_taken_only_from_its_start_and_if_it_may_go() {
        let map = RegionMap::new();
        let core = region(5, 9);
        map.insert(&core).unwrap();
        assert!(map.take_if(PageNo(6), |_| true).is_none());
        assert!(map.take_if(PageNo(5), |_| false).is_none());
        assert!(map.knows(&core));
        let taken = map.take_if(PageNo(5), |found| found.pages == core.pages);
        assert!(Arc::ptr_eq(&taken.unwrap(), &core));
        assert!(!map.knows(&core) && map.over(PageNo(6).single()).is_none());
    }
}
