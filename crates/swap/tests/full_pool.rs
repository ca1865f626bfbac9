// SPDX-License-Identifier: Apache-2.0
//! A pool that has reached its cap: pages of zeros are evicted all the same, others stay, nothing is
//! lost, and once there is room eviction goes on. And what the record of all this takes.

mod untouched;

use pagetide_addr::{DeviceId, PAGE_BYTES, PageNo, PageSet, SECTION_PAGES, SectionNo};
use pagetide_gmem::{
    AddressSpace, Installed, MemoryParts, PageState, PageTable, Place as _, RegionRequest,
    fake::{self, FakeMmu, FakePlace},
};
use pagetide_swap::{
    EvictReport, Evictor, HeatCost, Limit, Pace, Pool, PoolCap, PoolStore, PoolWords, Reclaimer,
    reclaim::{Need, Reach, UNMAPPED_MIN},
    slots::Slots,
    store::{FULL_MIN, PoolTiers, PutError, RESUME_BYTES, ZstdTier},
};
use std::{
    cell::Cell,
    ops::ControlFlow,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use untouched::{Untouched, touch};

const SECTIONS: u64 = 4;
const PAGES: u64 = SECTIONS * SECTION_PAGES;
const PAGE: usize = 4096;

/// Every third page is zero; the others do not compress.
fn content(page: PageNo) -> [u8; PAGE] {
    if page.0.is_multiple_of(3) {
        return [0; PAGE];
    }
    let mut random = page.0 + 1;
    std::array::from_fn(|_| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 56).to_le_bytes()[0]
    })
}

struct Rig {
    ram: Arc<FakePlace>,
    space: Arc<AddressSpace>,
    store: Arc<PoolStore>,
    evictor: Evictor,
}

impl Rig {
    fn new(folder: &Path, cap: &Arc<PoolCap>) -> Self {
        let tiers = PoolTiers::new(None, ZstdTier::Off);
        Self::with(folder, cap, &tiers, |_| ())
    }

    /// One whose RAM is arranged before the space takes it.
    fn with(
        folder: &Path,
        cap: &Arc<PoolCap>,
        tiers: &Arc<PoolTiers>,
        arrange: impl FnOnce(&FakePlace),
    ) -> Self {
        let ram = Arc::new(FakePlace::default());
        for page in PageNo(0).run(PAGES).iter() {
            let installed = ram.install(page, &content(page));
            assert_eq!(installed.unwrap(), Installed::Installed);
        }
        arrange(&ram);
        let pool = Pool::create_empty(&folder.join("full.pool"), PAGES, 1, b"").unwrap();
        let pool = Arc::new(pool.within(cap).unwrap());
        let store = Arc::new(PoolStore::new(Arc::clone(&pool)).in_tiers(tiers));
        let parts = MemoryParts {
            table: PageTable::growing(Box::new(PoolWords::of(pool))),
            store: Arc::clone(&store) as _,
            ..fake::parts(PAGES, Arc::clone(&ram) as _)
        };
        let space = fake::space(parts, DeviceId::VCPUS, Arc::new(FakeMmu::vcpus()));
        let all = RegionRequest::of_bytes(PAGES * PAGE_BYTES);
        space.alloc(&all).unwrap();
        let evictor = Evictor::new(Arc::clone(space.memory().unwrap()), Arc::clone(&store));
        Self {
            ram,
            space,
            store,
            evictor,
        }
    }

    /// Evicts at most `pages_max` of a section's pages.
    fn evict(&mut self, section: u64, pages_max: u64) -> EvictReport {
        let section = SectionNo(section);
        let wanted = PageSet::of_range(section, section.first_page().run(SECTION_PAGES));
        let none = || Ok(PageSet::EMPTY);
        let done = self.evictor.evict(section, &wanted, pages_max, none, |_| {
            ControlFlow::Continue(())
        });
        done.unwrap()
    }

    fn is_stored(&self, page: PageNo) -> bool {
        let table = self.evictor.space().table();
        matches!(table.word(page).state(), PageState::Stored(_))
    }

    fn touch(&self, page: PageNo) {
        touch(&self.space, page);
    }

    fn held(&self, page: PageNo) -> [u8; PAGE] {
        let mut found = [1; PAGE];
        self.ram.read(page.single(), &mut found).unwrap();
        found
    }

    /// Every page comes back as it was.
    fn verify(&self) {
        for page in PageNo(0).run(PAGES).iter() {
            self.touch(page);
            assert!(self.held(page) == content(page), "{page}");
        }
        self.store.trim().unwrap();
    }
}

/// When a store that is full now may take content again.
fn later() -> Instant {
    Instant::now() + FULL_MIN
}

fn zeros_of(section: u64) -> u64 {
    let pages = SectionNo(section).first_page().run(SECTION_PAGES);
    pages.iter().filter(|page| page.0.is_multiple_of(3)).count() as u64
}

#[test]
fn zeros_leave_a_full_pool_and_the_rest_stays_until_there_is_room_and_nothing_is_lost() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    // Header and words, and chunks for some pages of the first section.
    let cap = PoolCap::new(Some((64 << 10) + SECTIONS * PAGE_BYTES + (1 << 20)));
    let mut rig = Rig::new(folder.path(), &cap);
    assert_eq!(rig.store.full(), None);
    let first = rig.evict(0, u64::MAX);
    assert_eq!(first.zero_pages, zeros_of(0));
    assert_eq!(first.evicted_pages + first.refused.len(), SECTION_PAGES);
    // 15 to a chunk of 64 KiB.
    assert_eq!(first.evicted_pages - first.zero_pages, 16 * 15);
    assert_eq!(first.cancelled_pages, 0);
    let full = rig.store.full().unwrap();
    assert!(matches!(full, PutError::Cap(_)), "{full}");
    assert!(full.to_string().contains("pagetide pool cap"), "{full}");
    assert!(cap.used_bytes() <= cap.cap_bytes().unwrap());
    // However few pages are wanted: zeros cost nothing, and may come last.
    let second = rig.evict(1, 1);
    assert_eq!(second.evicted_pages, zeros_of(1));
    assert_eq!(second.refused.len(), SECTION_PAGES - zeros_of(1));
    for page in SectionNo(1).first_page().run(SECTION_PAGES).iter() {
        assert_eq!(rig.is_stored(page), page.0.is_multiple_of(3), "{page}");
    }
    rig.store.look_for_room(later());
    assert_eq!(rig.store.full(), Some(full), "nothing has changed");
    cap.set(Some(cap.used_bytes() + RESUME_BYTES));
    rig.store.look_for_room(Instant::now());
    assert_eq!(rig.store.full(), None);
    let third = rig.evict(1, u64::MAX);
    assert_eq!((third.evicted_pages, third.zero_pages), (16 * 15, 0));
    cap.set(None);
    rig.store.look_for_room(Instant::now());
    for section in 0..SECTIONS {
        rig.evict(section, u64::MAX);
    }
    assert!(PageNo(0).run(PAGES).iter().all(|page| rig.is_stored(page)));
    rig.verify();
    let bytes = rig.store.bytes();
    assert_eq!(bytes.stored_bytes, 0);
    let pool = rig.store.pool();
    assert_eq!(pool.charged_bytes(), pool.allocated_bytes().unwrap());
    assert!(pool.peak_bytes() > SECTIONS * (1 << 20), "{bytes:?}");
}

/// Has to pause as soon as it can, each time, and goes on so many times.
struct Halting(Cell<u64>);

impl Pace for Halting {
    fn go_on(&self) -> bool {
        let left = self.0.get();
        self.0.set(left.saturating_sub(1));
        left > 0
    }

    fn may_stay(&self) -> bool {
        false
    }
}

#[test]
fn search_of_a_full_pool_for_zeros_goes_on_after_a_pause_behind_what_was_refused() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let cap = PoolCap::new(Some((64 << 10) + SECTIONS * PAGE_BYTES + RESUME_BYTES));
    let mut rig = Rig::new(folder.path(), &cap);
    rig.evict(0, u64::MAX);
    assert!(rig.store.full().is_some());
    let evictor = rig.evictor.another();
    let limit = Arc::new(Limit::new());
    let mut reclaimer = Reclaimer::new(evictor, limit, Arc::new(Untouched), HeatCost::default());
    let now = Cell::new(Duration::ZERO);
    let clock = || now.get();
    reclaimer.sweep(clock, clock, &|| true).unwrap();
    // The first pass unmaps what the second takes. A pause comes at most after each page.
    for _ in 0..2 {
        now.set(now.get() + UNMAPPED_MIN);
        let pace = Halting(Cell::new(2 * PAGES));
        let done = reclaimer.reclaim(clock, PAGES, Reach::AllResting, Need::Limit, &pace);
        assert!(done.stopped.is_none(), "{done:?}");
        assert!(pace.0.get() > 0, "it stays at the same pages");
    }
    for page in PageNo(0)
        .run(PAGES)
        .iter()
        .filter(|page| page.0 >= SECTION_PAGES)
    {
        assert_eq!(rig.is_stored(page), page.0.is_multiple_of(3), "{page}");
    }
    rig.verify();
}

/// Half of it is noise.
fn record(page: PageNo) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    bytes[..PAGE / 2].copy_from_slice(&content(PageNo(3 * page.0 + 1))[..PAGE / 2]);
    bytes
}

#[test]
fn pages_that_do_not_compress_do_not_hide_those_behind_them() {
    const NOISE: u64 = 200;
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let zstd = ZstdTier::On { limit_bytes: None };
    let tiers = PoolTiers::new(Some(1 << 20), zstd);
    let is_noise = |page: PageNo| page.0 % SECTION_PAGES < NOISE;
    let bytes = |page: PageNo| match is_noise(page) {
        true => content(PageNo(3 * page.0 + 1)),
        false => record(page),
    };
    let rig = Rig::with(folder.path(), &PoolCap::new(None), &tiers, |ram| {
        for page in PageNo(0).run(PAGES).iter() {
            ram.discard(page.single()).unwrap();
            let installed = ram.install(page, &bytes(page)).unwrap();
            assert_eq!(installed, Installed::Installed);
        }
    });
    while rig.store.put(&[1; 4100]).is_ok() {}
    let evictor = rig.evictor.another();
    let limit = Arc::new(Limit::new());
    let mut reclaimer = Reclaimer::new(evictor, limit, Arc::new(Untouched), HeatCost::default());
    let now = Cell::new(Duration::ZERO);
    let clock = || now.get();
    reclaimer.sweep(clock, clock, &|| true).unwrap();
    // The first pass unmaps what the second takes.
    for _ in 0..2 {
        now.set(now.get() + UNMAPPED_MIN);
        reclaimer.reclaim(clock, 64, Reach::AllResting, Need::Limit, &|| true);
    }
    assert!(rig.store.turned_away(Instant::now()).is_some());
    let stored: Vec<PageNo> = PageNo(0)
        .run(PAGES)
        .iter()
        .filter(|page| rig.is_stored(*page))
        .collect();
    assert_eq!(stored.len(), 64, "as many as were wanted");
    for page in stored {
        assert!(!is_noise(page));
        rig.touch(page);
        assert!(rig.held(page) == bytes(page), "{page}");
    }
}

/// Of a section that goes whole one page is enough to keep all of it.
#[test]
fn section_that_goes_whole_is_packed_for_nothing_once_and_goes_when_there_is_room() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let cap = PoolCap::new(Some((64 << 10) + SECTIONS * PAGE_BYTES + RESUME_BYTES));
    let tiers = PoolTiers::new(None, ZstdTier::Off);
    let pages_of = |section: u64| SectionNo(section).first_page().run(SECTION_PAGES);
    let mut rig = Rig::with(folder.path(), &cap, &tiers, |ram| {
        ram.put_zeros(pages_of(3));
        ram.go_whole(0);
    });
    let refused = rig.evict(0, u64::MAX);
    assert_eq!(
        (refused.evicted_pages, refused.refused.len()),
        (0, SECTION_PAGES)
    );
    assert!(rig.store.full().is_some());
    assert_eq!(rig.store.counts().pages(), 0);
    // While another round is under way, none can begin: so none was tried.
    let memory = Arc::clone(rig.space.memory().unwrap());
    let wanted = PageSet::of_range(SectionNo(0), pages_of(0));
    let round = memory.begin_eviction(SectionNo(0), &wanted).unwrap();
    let again = rig.evict(0, u64::MAX);
    assert_eq!(
        (again.evicted_pages, again.refused.len()),
        (0, SECTION_PAGES)
    );
    drop(round);
    let zeros = rig.evict(3, u64::MAX);
    assert_eq!(zeros.zero_pages, SECTION_PAGES);
    cap.set(None);
    rig.store.look_for_room(Instant::now());
    for section in 0..3 {
        let done = rig.evict(section, u64::MAX);
        assert_eq!(done.evicted_pages, SECTION_PAGES);
    }
    for page in PageNo(0).run(3 * SECTION_PAGES).iter() {
        rig.touch(page);
        assert!(rig.held(page) == content(page), "{page}");
    }
}

#[test]
fn content_that_goes_makes_room_in_a_full_pool() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let cap = PoolCap::new(Some((64 << 10) + SECTIONS * PAGE_BYTES + 2 * RESUME_BYTES));
    let mut rig = Rig::new(folder.path(), &cap);
    rig.evict(0, u64::MAX);
    rig.evict(1, u64::MAX);
    assert!(rig.store.full().is_some());
    for page in SectionNo(0).first_page().run(SECTION_PAGES).iter() {
        rig.touch(page);
    }
    rig.store.look_for_room(later());
    assert_eq!(rig.store.full(), None);
    assert!(rig.evict(2, u64::MAX).evicted_pages > zeros_of(2));
    assert!(cap.used_bytes() <= cap.cap_bytes().unwrap());
    rig.verify();
}

#[test]
fn page_that_is_known_to_be_free_is_not_packed_and_its_stored_copy_goes_with_its_next_use() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut rig = Rig::new(folder.path(), &PoolCap::new(None));
    let given_up = SectionNo(2).first_page().run(SECTION_PAGES);
    // The guest gives the section up while it is present: holes that we did not punch.
    rig.ram.discard(given_up).unwrap();
    let section = SectionNo(2);
    let wanted = PageSet::of_range(section, given_up);
    let none = || Ok(PageSet::EMPTY);
    let nothing = rig.evictor.evict(section, &wanted, u64::MAX, none, |_| {
        ControlFlow::Continue(())
    });
    assert!(nothing.is_err(), "{nothing:?}");
    assert!(given_up.iter().all(|page| rig.is_stored(page)));
    assert_eq!(rig.store.bytes().stored_bytes, 0);
    rig.touch(given_up.start);
    assert!(rig.ram.has(given_up.start) && rig.held(given_up.start) == [0; PAGE]);
    // The guest gives stored pages up: nothing shows that, and the copies stay until a touch.
    rig.evict(1, u64::MAX);
    let stored_bytes = rig.store.bytes().stored_bytes;
    rig.ram
        .discard(SectionNo(1).first_page().run(SECTION_PAGES))
        .unwrap();
    assert_eq!(rig.store.bytes().stored_bytes, stored_bytes);
    SectionNo(1)
        .first_page()
        .run(SECTION_PAGES)
        .iter()
        .for_each(|page| rig.touch(page));
    assert_eq!(rig.store.bytes().stored_bytes, 0);
}

#[test]
fn pool_that_is_opened_again_counts_what_it_has_even_above_the_cap() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("full.pool");
    let (content_bytes, peak_bytes) = {
        let mut rig = Rig::new(folder.path(), &PoolCap::new(None));
        rig.evict(0, u64::MAX);
        rig.store.trim().unwrap();
        let pool = rig.store.pool();
        (pool.charged_bytes(), pool.peak_bytes())
    };
    let cap = PoolCap::new(Some(1 << 20));
    let pool = Pool::open(&path).unwrap().found_within(&cap).unwrap();
    assert_eq!(pool.charged_bytes(), content_bytes);
    assert_eq!(cap.used_bytes(), content_bytes);
    assert_eq!(pool.peak_bytes(), peak_bytes);
    let pool = Arc::new(pool);
    let store = PoolStore::new(Arc::clone(&pool));
    assert!(matches!(store.put(&[1; 4100]), Err(PutError::Cap(_))));
    // No word names any of the content here.
    store.finish_adoption().unwrap();
    assert_eq!(pool.charged_bytes(), pool.allocated_bytes().unwrap());
    assert!(store.put(&[1; 4100]).is_ok());
    drop(store);
    drop(pool);
    assert_eq!(cap.used_bytes(), 0);
}

/// The record of 8 GiB of RAM, half of it evicted and not a page of it compressible: words, sections
/// and slots, which grow with the RAM, in what they take of memory. What else there is of a page or a
/// section is added by its documented size: page attributes of devices (2 bits a page and 4 bytes a
/// section for each engine), samples and sets (48 and 16 bytes a section), a policy (50).
#[test]
fn metadata_of_a_large_vm_is_less_than_four_thousandths_of_its_memory() {
    const RAM_PAGES: u64 = 8 << 18;
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("large.pool");
    let pool = Arc::new(Pool::create(&path, RAM_PAGES, 1, b"").unwrap());
    let table = PageTable::new(Box::new(PoolWords::of(Arc::clone(&pool))));
    let mut slots = Slots::new(pool.chunk_limit());
    for _ in 0..RAM_PAGES / 2 {
        slots.allocate(4_100).unwrap();
    }
    let sections = RAM_PAGES / SECTION_PAGES;
    let by_size = RAM_PAGES / 4 + sections * (4 + 48 + 16 + 50);
    let in_pool = pool.allocated_bytes().unwrap();
    assert!(in_pool >= RAM_PAGES * 8, "{in_pool}");
    let metadata = in_pool + table.section_bytes() + slots.metadata_bytes() + by_size;
    let limit = RAM_PAGES * PAGE_BYTES / 1_000 * 4;
    assert!(metadata < limit, "{metadata} of {limit}");
}
