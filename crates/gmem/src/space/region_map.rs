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
//! A lock of this map is held for one look-up or one change, and no other lock is taken under it. A
//! caller that needs all of them takes them in order.

use crate::{
    error::GmError,
    region::RegionCore,
    sync::{Arc, AtomicU64, Ordering, RwLock, own, share},
};
use pagetide_addr::{PageNo, PageRange};
use std::collections::BTreeMap;

/// Enough that threads rarely meet in one shard.
#[cfg(not(loom))]
const SHARDS: usize = 32;
#[cfg(loom)]
const SHARDS: usize = 1;

/// Regions by their first page.
type Shard = RwLock<BTreeMap<PageNo, Arc<RegionCore>>>;

/// See the module.
pub(super) struct RegionMap {
    shards: Box<[Shard]>,
    long: Shard,
    /// 1 once the space is destroyed. Changed with all locks owned, so a holder of any lock sees it.
    destroyed: AtomicU64,
}

impl RegionMap {
    pub(super) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            long: Shard::default(),
            destroyed: AtomicU64::new(0),
        }
    }

    fn shard_of(&self, page: PageNo) -> &Shard {
        &self.shards[page.section().index() % SHARDS]
    }

    /// The shard for regions with exactly these pages.
    fn home_of(&self, pages: PageRange) -> &Shard {
        match pages.last() {
            Some(last) if last.section() == pages.start.section() => self.shard_of(pages.start),
            _ => &self.long,
        }
    }

    /// # Errors
    /// [`GmError::Destroyed`].
    pub(super) fn insert(&self, core: &Arc<RegionCore>) -> Result<(), GmError> {
        let mut home = own(self.home_of(core.pages));
        if self.is_destroyed() {
            return Err(GmError::Destroyed);
        }
        home.insert(core.pages.start, Arc::clone(core));
        Ok(())
    }

    pub(super) fn remove(&self, core: &RegionCore) {
        own(self.home_of(core.pages)).remove(&core.pages.start);
    }

    /// True if this very region is in the map.
    pub(super) fn knows(&self, core: &Arc<RegionCore>) -> bool {
        let home = share(self.home_of(core.pages));
        let known = home.get(&core.pages.start);
        known.is_some_and(|known| Arc::ptr_eq(known, core))
    }

    /// The region that holds all of `pages`.
    pub(super) fn over(&self, pages: PageRange) -> Option<Arc<RegionCore>> {
        let look_in = |shard: &Shard| {
            let regions = share(shard);
            let (_, found) = regions.range(..=pages.start).next_back()?;
            let whole = found.pages.contains(pages.start) && pages.end <= found.pages.end;
            whole.then(|| Arc::clone(found))
        };
        look_in(self.shard_of(pages.start)).or_else(|| look_in(&self.long))
    }

    /// All regions, ascending.
    pub(super) fn all(&self) -> Vec<Arc<RegionCore>> {
        let mut all: Vec<_> = Vec::new();
        for shard in self.shards.iter().chain([&self.long]) {
            all.extend(share(shard).values().map(Arc::clone));
        }
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
        let all: Vec<_> = self.shards.iter().chain([&self.long]).map(own).collect();
        if self.is_destroyed() {
            return Err(GmError::Destroyed);
        }
        if all.iter().any(|shard| !shard.is_empty()) {
            return Err(GmError::InUse {
                by: "an allocated region",
            });
        }
        self.destroyed.store(1, Ordering::Relaxed);
        Ok(())
    }

    /// Leaks all regions: a device may still use them.
    pub(super) fn leak(&self) {
        for shard in self.shards.iter().chain([&self.long]) {
            std::mem::forget(std::mem::take(&mut *own(shard)));
        }
    }
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
        map.destroy().unwrap();
        assert!(matches!(map.insert(&regions[0]), Err(GmError::Destroyed)));
    }
}
