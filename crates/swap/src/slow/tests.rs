// SPDX-License-Identifier: Apache-2.0
//! Pages go to a slow tier and come back, whatever the tier does and when.

use super::*;
use crate::{
    Evictor, HeatCost, Limit, Pace, Pool, PoolCap, PoolStore, Reclaimer,
    store::AdoptError,
    tier::{Form, Located, PAGE},
};
use pagetide_addr::{
    Access, DeviceId, PAGE_BYTES, PageNo, PageSet, SECTION_PAGES, SectionNo, to_usize,
};
use pagetide_gmem::{
    AddressSpace, Cause, Content, ContentStore as _, Fault, Incidents, Installed, LoadDone,
    MemoryParts, PageState, PagedMemory, Place as _, PlaceError, RegionRequest, StoreError, Wait,
    fake::{self, FakeMmu, FakePlace},
};
use pagetide_policy::{
    demotion::BULKY_AFTER,
    sampling::{Look, Sampled, Touched},
    tracker::{AccessTracker, TrackerError},
};
use pagetide_random::SplitMix64;
use pagetide_tiers::{
    Batch, DiskId, ExtentName, Health, Place, ReadDone, Room, SlowTier, Standing, TierError,
    TierFigures, TierKind, VmId, WriteDone, fake::FakeDisk, table::ExtentEntry,
};
use std::{
    collections::BTreeSet,
    ops::ControlFlow,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

const SECTIONS: u64 = 2;
const PAGES: u64 = SECTIONS * SECTION_PAGES;
const FIRST: SectionNo = SectionNo(0);
const DISK: DiskId = DiskId(77);
const PAUSES: RetryPauses = RetryPauses {
    busy: Duration::from_millis(1),
    failed: Duration::from_millis(1),
};

/// Notes the pages that were lost.
#[derive(Default)]
struct Lost(Mutex<BTreeSet<PageNo>>);

impl Incidents for Lost {
    fn foreign_page(&self, page: PageNo) {
        panic!("{page}");
    }
    fn poisoned(&self, page: PageNo, _: &StoreError) {
        self.0.lock().unwrap().insert(page);
    }
    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        panic!("{page}: {why}");
    }
    fn fill_failed(&self, _: PageNo, _: &dyn std::error::Error) {}
}

/// Noise in every fourth page, records in the others; a version in each.
fn content(page: PageNo, version: u64) -> [u8; PAGE] {
    let mut random = SplitMix64::stream(page.0, version);
    let mut bytes = [0; PAGE];
    let noisy = if page.0.is_multiple_of(4) {
        PAGE
    } else {
        PAGE / 4
    };
    bytes[..noisy].fill_with(|| random.next_u64().to_le_bytes()[0]);
    bytes[PAGE - 8..].copy_from_slice(&(version + 1).to_le_bytes());
    bytes
}

struct Rig {
    place: Arc<FakePlace>,
    space: Arc<AddressSpace>,
    chain: Arc<ChainStore>,
    disk: Arc<FakeDisk>,
    lost: Arc<Lost>,
    limit: Arc<Limit>,
    evictor: Evictor,
    sinker: Sinker,
    folder: tempfile::TempDir,
}

fn tiers(disk: &Arc<FakeDisk>, when_gone: WhenGone) -> Arc<SlowTiers> {
    let seat = Seat {
        tier: Arc::clone(disk) as _,
        when_gone,
        disk: Some(DISK),
    };
    SlowTiers::new(vec![seat], PAUSES).unwrap()
}

fn pool_at(path: &Path) -> Arc<Pool> {
    let pool = match path.exists() {
        true => Pool::open(path).unwrap(),
        // With a table that has room for every extent of every test.
        false => Pool::create_empty(path, 4 * PAGES, 1, b"").unwrap(),
    };
    Arc::new(pool.within(&PoolCap::new(None)).unwrap())
}

impl Rig {
    fn new(when_gone: WhenGone) -> Self {
        Self::over(|disk| tiers(disk, when_gone))
    }

    fn over(tiers: impl FnOnce(&Arc<FakeDisk>) -> Arc<SlowTiers>) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let disk = Arc::new(FakeDisk::new(1 << 16));
        let pool = pool_at(&folder.path().join("vm.pool"));
        let chain = ChainStore::new(Arc::new(PoolStore::new(pool)), &tiers(&disk));
        let place = Arc::new(FakePlace::default());
        for page in PageNo(0).run(PAGES).iter() {
            let installed = place.install(page, &content(page, 0));
            assert_eq!(installed.unwrap(), Installed::Installed);
        }
        let limit = Arc::new(Limit::new());
        limit.stop();
        let lost = Arc::new(Lost::default());
        let parts = MemoryParts {
            store: Arc::clone(&chain) as _,
            admission: Arc::clone(&limit) as _,
            incidents: Arc::clone(&lost) as _,
            ..fake::parts(PAGES, Arc::clone(&place) as _)
        };
        let space = fake::space(parts, DeviceId::VCPUS, Arc::new(FakeMmu::vcpus()));
        space
            .alloc(&RegionRequest::of_bytes(PAGES * PAGE_BYTES))
            .unwrap();
        let memory = Arc::clone(space.memory().unwrap());
        let store = Arc::clone(chain.pool());
        let slow = Arc::clone(chain.slow().unwrap());
        Self {
            evictor: Evictor::new(Arc::clone(&memory), Arc::clone(&store)),
            sinker: Sinker::new(memory, store, slow),
            place,
            space,
            chain,
            disk,
            lost,
            limit,
            folder,
        }
    }

    fn sink(&mut self, section: SectionNo) -> Sunk {
        self.sinker.sink(section, Which::All, &|| true)
    }

    fn memory(&self) -> &Arc<PagedMemory> {
        self.space.memory().unwrap()
    }

    fn evict(&mut self, section: SectionNo, wanted: &PageSet) {
        let none = || Ok(PageSet::EMPTY);
        let limit = Arc::clone(&self.limit);
        let go_on = |pages| {
            limit.evicted_from(section, pages);
            ControlFlow::Continue(())
        };
        let done = self.evictor.evict(section, wanted, u64::MAX, none, go_on);
        assert_eq!(done.unwrap().evicted_pages, wanted.len());
    }

    fn evict_all(&mut self) {
        for section in 0..SECTIONS {
            let section = SectionNo(section);
            let all = PageSet::of_range(section, section.first_page().run(SECTION_PAGES));
            self.evict(section, &all);
        }
    }

    /// A rig with all pages of the first section on disk.
    fn sunk(when_gone: WhenGone) -> Self {
        let mut rig = Self::new(when_gone);
        rig.evict_all();
        let sunk = rig.sink(FIRST);
        assert!(sunk.stop.is_none(), "{:?}", sunk.stop);
        assert_eq!(sunk.pages, SECTION_PAGES);
        rig.disk.finish_all();
        assert_eq!(rig.on_disk(), SECTION_PAGES);
        rig
    }

    fn on_disk(&self) -> u64 {
        self.chain.slow().unwrap().counts().disk_pages.load(Relaxed)
    }

    fn touch(&self, page: PageNo) {
        let fault = Fault {
            device: DeviceId::VCPUS,
            pages: page.single(),
            access: Access::Write,
        };
        let reply = Box::new(|_| ());
        self.space.fault(&Cause::Fault(fault), Wait::Reply(reply));
    }

    /// A page is written anew, and evicted.
    fn rewrite(&mut self, page: PageNo, version: u64) {
        self.touch(page);
        self.disk.finish_all();
        self.place.discard(page.single()).unwrap();
        let installed = self.place.install(page, &content(page, version));
        assert_eq!(installed.unwrap(), Installed::Installed);
        let alone = PageSet::of_range(page.section(), page.single());
        self.evict(page.section(), &alone);
    }

    fn state(&self, page: PageNo) -> PageState {
        self.memory().table().word(page).state()
    }

    fn is_on_disk(&self, page: PageNo) -> bool {
        match self.state(page) {
            PageState::Stored(content) => {
                matches!(Located::of(content), Ok(Located::Slow(_)))
            }
            _ => false,
        }
    }

    fn holds(&self, page: PageNo, version: u64) -> bool {
        let mut found = [0; PAGE];
        self.place.read(page.single(), &mut found).unwrap();
        found == content(page, version)
    }

    /// Every page that is not lost comes back as it was, and nothing is left anywhere.
    fn verify(&self, version: impl Fn(PageNo) -> u64) {
        for page in PageNo(0).run(PAGES).iter() {
            self.touch(page);
            self.disk.finish_all();
            // A wrong answer is asked for again.
            while matches!(self.state(page), PageState::Filling(_)) {
                wait_for_request(&self.disk);
                self.disk.finish_all();
            }
            if !self.lost.0.lock().unwrap().contains(&page) {
                assert_eq!(self.state(page), PageState::Present, "{page}");
                assert!(self.holds(page, version(page)), "{page}");
            }
        }
        let lost = self.lost.0.lock().unwrap().len() as u64;
        assert_eq!(self.chain.pool().counts().pages(), 0);
        // What is lost keeps its room until its VM ends.
        assert!(self.on_disk() <= lost);
        if lost == 0 {
            assert_eq!(self.disk.used_sectors(), 0);
            assert_eq!(self.chain.pool().pool().extents().count(), 0);
        }
    }
}

fn gone() -> TierError {
    TierError::Gone {
        kind: TierKind::Disk,
        reason: "unplugged".to_owned(),
    }
}

/// Waits for the thread that tries loads again.
fn wait_for_request(disk: &FakeDisk) {
    while disk.requests() == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn section_goes_to_disk_sealed_and_each_page_comes_back_as_it_was() {
    let mut rig = Rig::new(WhenGone::Wait);
    rig.evict_all();
    let before = rig.chain.pool().bytes().stored_bytes;
    assert_eq!(rig.sink(FIRST).pages, SECTION_PAGES);
    // Nothing has moved before the disk has it.
    assert_eq!(rig.chain.pool().bytes().stored_bytes, before);
    assert!(!rig.is_on_disk(PageNo(0)));
    assert_eq!(rig.sinker.batches_under_way(), 2);
    rig.disk.finish(1);
    rig.disk.finish(0);
    assert_eq!(rig.sinker.batches_under_way(), 0);
    assert!(FIRST.all_pages().iter().all(|page| rig.is_on_disk(page)));
    assert!(rig.chain.pool().bytes().stored_bytes < before * 6 / 10);
    assert_eq!(rig.on_disk(), SECTION_PAGES);
    let slow = Arc::clone(rig.chain.slow().unwrap());
    let counts = slow.counts();
    let bytes = counts.disk_bytes.load(Relaxed);
    assert_eq!(bytes, rig.disk.figures().stored_bytes);
    // There is nothing left to move.
    assert_eq!(rig.sink(FIRST).pages, 0);
    assert_eq!(rig.disk.requests(), 0);
    rig.verify(|_| 0);
    assert_eq!(counts.loaded_pages.load(Relaxed), SECTION_PAGES);
}

#[test]
fn page_that_is_needed_or_written_anew_on_its_way_keeps_what_it_has() {
    let mut rig = Rig::new(WhenGone::Wait);
    rig.evict_all();
    assert_eq!(rig.sink(FIRST).pages, SECTION_PAGES);
    rig.touch(PageNo(5));
    assert!(rig.holds(PageNo(5), 0), "nobody waits for the disk");
    rig.disk.finish_all();
    assert!(!rig.is_on_disk(PageNo(5)) && rig.is_on_disk(PageNo(6)));
    assert_eq!(rig.on_disk(), SECTION_PAGES - 1);
    // An eviction from the section ends the relocation of all of it.
    let sunk = rig.sink(SectionNo(1));
    assert_eq!(sunk.pages, SECTION_PAGES);
    let other = PageNo(SECTION_PAGES + 3);
    rig.touch(other);
    let alone = PageSet::of_range(SectionNo(1), other.single());
    rig.evict(SectionNo(1), &alone);
    rig.disk.finish_all();
    assert_eq!(rig.on_disk(), SECTION_PAGES - 1);
    rig.verify(|_| 0);
}

#[test]
fn write_that_fails_or_is_dropped_leaves_all_pages_in_the_pool_and_tells_the_section() {
    let mut rig = Rig::new(WhenGone::Wait);
    rig.evict_all();
    rig.sink(FIRST);
    rig.disk.fail(0, TierError::Full(TierKind::Disk));
    rig.disk.drop_request(0);
    assert_eq!(rig.sinker.take_failed(), BTreeSet::from([FIRST]));
    assert_eq!((rig.on_disk(), rig.disk.used_sectors()), (0, 0));
    assert_eq!(rig.chain.pool().pool().extents().count(), 0);
    for standing in [
        Standing::Full,
        Standing::Slow { bound_ms: 5 },
        Standing::Gone {
            reason: "unplugged".to_owned(),
        },
    ] {
        rig.disk.set_standing(standing);
        let sunk = rig.sink(FIRST);
        assert!(
            matches!(sunk.stop, Some(SinkStop::Tier(_))),
            "{:?}",
            sunk.stop
        );
        assert_eq!(sunk.pages, 0);
    }
    rig.disk.set_standing(Standing::Working);
    assert_eq!(rig.sink(FIRST).pages, SECTION_PAGES);
    rig.disk.finish_all();
    assert_eq!(rig.on_disk(), SECTION_PAGES);
    rig.verify(|_| 0);
}

/// What a word says of the form of a page in the pool.
fn form_of(rig: &Rig, page: PageNo) -> Option<Form> {
    match rig.state(page) {
        PageState::Stored(content) => Located::of(content).unwrap().in_pool().map(|it| it.form),
        state => panic!("{page} is {state:?}"),
    }
}

#[test]
fn batch_for_whose_entry_there_is_no_memory_is_not_written() {
    let mut rig = Rig::new(WhenGone::Wait);
    rig.evict_all();
    let pool = Arc::clone(rig.chain.pool().pool());
    let cap = Arc::clone(pool.cap());
    cap.set(Some(cap.used_bytes()));
    let version = *pool.reserve_versions(1).unwrap().end();
    let sunk = rig.sink(FIRST);
    let no_room = matches!(sunk.stop, Some(SinkStop::NoRoom(_)));
    assert!(no_room && sunk.pages == 0, "{:?}", sunk.stop);
    assert_eq!((rig.disk.requests(), rig.disk.used_sectors()), (0, 0));
    assert_eq!(rig.chain.slow().unwrap().numbers().in_use(), 0);
    assert_eq!(pool.reserve_versions(1).unwrap(), version + 1..=version + 1);
    cap.set(None);
    assert!(rig.sink(FIRST).stop.is_none());
    // From here on it needs none.
    cap.set(Some(1));
    rig.disk.finish_all();
    assert_eq!(rig.on_disk(), SECTION_PAGES);
    cap.set(None);
    rig.verify(|_| 0);
}

#[test]
fn page_that_is_touched_comes_up_to_memory_and_its_copy_is_gone_from_the_tier() {
    let mut rig = Rig::sunk(WhenGone::Wait);
    let (page, other) = (PageNo(5), PageNo(6));
    let PageState::Stored(before) = rig.state(page) else {
        panic!("it is on disk");
    };
    let used = rig.disk.used_sectors();
    rig.touch(page);
    rig.disk.finish_all();
    assert_eq!(rig.state(page), PageState::Present);
    assert_eq!(rig.on_disk(), SECTION_PAGES - 1);
    let Ok(Located::Slow(place)) = Located::of(before) else {
        panic!("{before:?}");
    };
    assert_eq!(used - rig.disk.used_sectors(), usize::from(place.sectors));
    // Its next way down begins at the top, also if nobody has written to it.
    rig.evict(FIRST, &PageSet::of_range(FIRST, page.single()));
    assert_eq!(form_of(&rig, page), Some(Form::Lz4));
    assert!(rig.is_on_disk(other));
    assert_eq!(rig.sink(FIRST).pages, 1);
    rig.disk.finish_all();
    let PageState::Stored(after) = rig.state(page) else {
        panic!("it is on disk");
    };
    assert_ne!(before, after);
    assert_eq!(rig.disk.used_sectors(), used);
    rig.verify(|_| 0);
}

#[test]
fn what_does_not_compress_goes_alone_if_so_wanted() {
    let mut rig = Rig::new(WhenGone::Wait);
    rig.evict_all();
    let sunk = rig.sinker.sink(FIRST, Which::Uncompressed, &|| true);
    assert_eq!(sunk.pages, SECTION_PAGES / 4);
    rig.disk.finish_all();
    for page in FIRST.all_pages().iter() {
        assert_eq!(rig.is_on_disk(page), page.0.is_multiple_of(4), "{page}");
    }
    let counts = rig.chain.pool().counts();
    let left = counts.uncompressed_pages.load(Relaxed);
    assert_eq!(left, SECTION_PAGES / 4, "those of the other section");
    rig.verify(|_| 0);
}

/// No page is ever mapped.
struct Untouched;

impl AccessTracker for Untouched {
    fn sample(&self, _: &[Look]) -> Result<Sampled, TrackerError> {
        Ok(Sampled::default())
    }

    fn take_out(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        Ok(vec![Touched::default(); sections.len()])
    }

    fn mapped(&self, _: SectionNo) -> Result<PageSet, TrackerError> {
        Ok(PageSet::EMPTY)
    }
}

#[test]
fn what_does_not_compress_leaves_the_pool_long_before_the_rest_and_ages_anew_when_touched() {
    let mut rig = Rig::new(WhenGone::Wait);
    let (limit, tracker) = (Arc::clone(&rig.limit), Arc::new(Untouched));
    let evictor = rig.evictor.another();
    let mut reclaimer = Reclaimer::new(evictor, limit, tracker, HeatCost::default());
    let memory = Arc::clone(rig.memory());
    let (store, slow) = (Arc::clone(rig.chain.pool()), rig.chain.slow().unwrap());
    let sinker = Sinker::new(memory, store, Arc::clone(slow));
    let at = Duration::from_secs;
    reclaimer.sink_after(sinker, at(1800), at(0));
    rig.evict_all();
    assert_eq!(reclaimer.demotion_in(at(1)), Some(BULKY_AFTER));
    rig.touch(PageNo(1));
    assert_eq!(reclaimer.demotion_in(at(31)), Some(BULKY_AFTER - at(30)));
    let mut sink = |rig: &Rig, now: u64| {
        reclaimer.demotion_in(at(now));
        let sunk = reclaimer.sink(|| at(now), &|| true);
        assert!(sunk.stop.is_none(), "{:?}", sunk.stop);
        rig.disk.finish_all();
        sunk.pages
    };
    assert_eq!(sink(&rig, 60), 0);
    assert_eq!(sink(&rig, 61), SECTION_PAGES / 4, "of the other section");
    assert_eq!(sink(&rig, 90), 0);
    assert_eq!(sink(&rig, 91), SECTION_PAGES / 4);
    assert!(rig.is_on_disk(PageNo(4)) && !rig.is_on_disk(PageNo(2)));
    // One of them comes up, and goes down again as it did.
    rig.touch(PageNo(4));
    rig.disk.finish_all();
    rig.evict(FIRST, &PageSet::of_range(FIRST, PageNo(4).single()));
    assert_eq!(form_of(&rig, PageNo(4)), Some(Form::Uncompressed));
    assert_eq!(sink(&rig, 100), 0);
    assert_eq!(sink(&rig, 159), 0);
    assert_eq!(sink(&rig, 160), 1);
    // The rest at its time.
    assert_eq!(sink(&rig, 1800), 0);
    assert_eq!(sink(&rig, 1801), SECTION_PAGES * 3 / 4);
    assert_eq!(sink(&rig, 1899), 0);
    assert_eq!(sink(&rig, 1900), SECTION_PAGES * 3 / 4 - 1);
    rig.verify(|_| 0);
}

/// A tier that must be called firmly.
struct Firm {
    disk: Arc<FakeDisk>,
    is_firm: Arc<AtomicBool>,
    /// Pages that it was to forget one by one.
    forgotten: Arc<AtomicU64>,
}

impl Firm {
    fn disk(&self) -> &FakeDisk {
        assert!(self.is_firm.load(Relaxed), "a weak thread holds its locks");
        &self.disk
    }
}

impl SlowTier for Firm {
    fn kind(&self) -> TierKind {
        self.disk.kind()
    }
    fn granule_bytes(&self) -> usize {
        self.disk.granule_bytes()
    }
    fn make_room(&self, vm: VmId, sealed_bytes: &[usize]) -> Result<Vec<Room>, TierError> {
        self.disk().make_room(vm, sealed_bytes)
    }
    fn give_back(&self, vm: VmId, room: Room) {
        self.disk().give_back(vm, room);
    }
    fn write(&self, batch: Batch, done: WriteDone) {
        self.disk().write(batch, done);
    }
    fn read(&self, place: Place, done: ReadDone) {
        self.disk.read(place, done);
    }
    fn forget(&self, places: &[Place]) {
        self.forgotten.fetch_add(places.len() as u64, Relaxed);
        self.disk.forget(places);
    }
    fn forget_vm(&self, vm: VmId, extents: &[ExtentName]) {
        self.disk.forget_vm(vm, extents);
    }
    fn health(&self) -> Health {
        self.disk.health()
    }
    fn figures(&self) -> TierFigures {
        self.disk.figures()
    }
}

struct Firmly(Arc<AtomicBool>);

impl Pace for Firmly {
    fn go_on(&self) -> bool {
        true
    }

    fn firmly<T>(&self, work: impl FnOnce() -> T) -> T {
        assert!(!self.0.swap(true, Relaxed));
        let done = work();
        self.0.store(false, Relaxed);
        done
    }
}

fn firm(
    disk: &Arc<FakeDisk>,
    is_firm: &Arc<AtomicBool>,
    forgotten: &Arc<AtomicU64>,
) -> Arc<SlowTiers> {
    let firm = Firm {
        disk: Arc::clone(disk),
        is_firm: Arc::clone(is_firm),
        forgotten: Arc::clone(forgotten),
    };
    let seat = Seat {
        tier: Arc::new(firm),
        when_gone: WhenGone::Wait,
        disk: Some(DISK),
    };
    SlowTiers::new(vec![seat], PAUSES).unwrap()
}

/// A tier that knows a VM's pages by the entries of its pool alone, such as that of another host.
#[test]
fn batch_that_is_written_when_its_vm_has_ended_is_forgotten_page_by_page() {
    let forgotten = Arc::<AtomicU64>::default();
    let is_firm = Arc::new(AtomicBool::new(true));
    let mut rig = Rig::over(|disk| firm(disk, &is_firm, &forgotten));
    rig.evict_all();
    assert_eq!(rig.sink(FIRST).pages, SECTION_PAGES);
    let Rig {
        space,
        chain,
        disk,
        evictor,
        sinker,
        ..
    } = rig;
    chain.pool().pool().remove().unwrap();
    chain.slow().unwrap().end();
    drop((space, chain, evictor, sinker));
    disk.finish(0);
    let part = forgotten.load(Relaxed);
    assert!(0 < part && part < SECTION_PAGES, "{part}");
    disk.finish_all();
    assert_eq!(forgotten.load(Relaxed), SECTION_PAGES);
    assert_eq!(disk.used_sectors(), 0);
}

#[test]
fn locks_of_a_tier_are_taken_firmly() {
    let is_firm = Arc::<AtomicBool>::default();
    let mut rig = Rig::over(|disk| firm(disk, &is_firm, &Arc::default()));
    rig.evict_all();
    let pace = Firmly(is_firm);
    let sunk = rig.sinker.sink(FIRST, Which::All, &pace);
    assert_eq!(sunk.pages, SECTION_PAGES);
    rig.disk.finish_all();
    rig.verify(|_| 0);
    // Room that is given back, too.
    rig.evict_all();
    let slow = Arc::clone(rig.chain.slow().unwrap());
    while slow.numbers().take().is_some() {}
    let sunk = rig.sinker.sink(FIRST, Which::All, &pace);
    assert!(
        matches!(sunk.stop, Some(SinkStop::TableFull)),
        "{:?}",
        sunk.stop
    );
    assert_eq!(rig.disk.used_sectors(), 0);
}

#[test]
fn few_batches_are_under_way_at_a_time() {
    let mut rig = Rig::new(WhenGone::Wait);
    rig.evict_all();
    for section in [FIRST, SectionNo(1)] {
        assert_eq!(rig.sink(section).pages, SECTION_PAGES);
    }
    let more = rig.sink(FIRST);
    assert!(matches!(more.stop, Some(SinkStop::UnderWay)));
    rig.disk.finish_all();
    assert!(rig.sink(FIRST).stop.is_none());
    rig.verify(|_| 0);
}

#[test]
fn flipped_bit_costs_that_page_and_no_wrong_byte_is_seen() {
    let rig = Rig::sunk(WhenGone::Wait);
    assert!(rig.disk.flip(12_345));
    rig.verify(|_| 0);
    let lost = rig.lost.0.lock().unwrap().len();
    assert_eq!(lost, 1);
}

#[test]
fn load_waits_while_its_tier_is_gone_and_ends_when_it_is_back() {
    let rig = Rig::sunk(WhenGone::Wait);
    rig.touch(PageNo(7));
    for error in [
        gone(),
        TierError::Slow {
            kind: TierKind::Disk,
            bound_ms: 5,
        },
        TierError::Busy(TierKind::Disk),
        gone(),
    ] {
        wait_for_request(&rig.disk);
        rig.disk.fail(0, error);
    }
    wait_for_request(&rig.disk);
    rig.disk.drop_request(0);
    wait_for_request(&rig.disk);
    assert!(matches!(rig.state(PageNo(7)), PageState::Filling(_)));
    rig.disk.finish(0);
    assert!(rig.holds(PageNo(7), 0));
    let counts = rig.chain.slow().unwrap().counts();
    assert_eq!(counts.retried_loads.load(Relaxed), 5);
    rig.verify(|_| 0);
}

#[test]
fn page_of_a_tier_that_is_gone_is_lost_if_so_chosen_but_not_of_a_slow_one() {
    let rig = Rig::sunk(WhenGone::Lost);
    rig.touch(PageNo(7));
    rig.disk.fail(
        0,
        TierError::Slow {
            kind: TierKind::Disk,
            bound_ms: 5,
        },
    );
    wait_for_request(&rig.disk);
    assert!(rig.lost.0.lock().unwrap().is_empty());
    rig.disk.fail(0, gone());
    assert_eq!(*rig.lost.0.lock().unwrap(), BTreeSet::from([PageNo(7)]));
    assert_eq!(rig.state(PageNo(7)), PageState::Poisoned);
    // One that cannot be read again and again.
    rig.touch(PageNo(8));
    for _ in 0..5 {
        wait_for_request(&rig.disk);
        let io = TierError::Io {
            kind: TierKind::Disk,
            operation: "read",
            reason: "medium error".to_owned(),
        };
        rig.disk.fail(0, io);
    }
    assert_eq!(rig.state(PageNo(8)), PageState::Poisoned);
    rig.verify(|_| 0);
}

#[test]
fn vm_that_ends_is_forgotten_once_its_last_request_has_ended() {
    let mut rig = Rig::sunk(WhenGone::Wait);
    rig.sink(SectionNo(1));
    rig.touch(PageNo(3));
    let requests = rig.disk.requests();
    assert!(requests >= 2);
    let Rig {
        space,
        chain,
        disk,
        evictor,
        sinker,
        ..
    } = rig;
    chain.pool().pool().remove().unwrap();
    chain.slow().unwrap().end();
    space.memory().unwrap().end_waiting();
    drop((space, chain, evictor, sinker));
    for left in (0..requests).rev() {
        assert!(disk.used_sectors() > 0);
        disk.finish(0);
        assert_eq!(disk.requests(), left);
    }
    assert_eq!(disk.used_sectors(), 0);
}

/// What a successor finds in the words of a daemon that died, and in its pool.
fn adopt(rig: &Rig, when_gone: WhenGone, disk: DiskId) -> Result<Arc<ChainStore>, AdoptError> {
    let words: Vec<Content> = PageNo(0)
        .run(PAGES)
        .iter()
        .filter_map(|page| match rig.state(page) {
            PageState::Stored(content) if !content.is_zero() => Some(content),
            _ => None,
        })
        .collect();
    // The lock of a pool is its process's: a copy stands for it after the death.
    let path = rig.folder.path().join("copy.pool");
    std::fs::copy(rig.folder.path().join("vm.pool"), &path).unwrap();
    let seat = Seat {
        tier: Arc::clone(&rig.disk) as _,
        when_gone,
        disk: Some(disk),
    };
    let tiers = SlowTiers::new(vec![seat], PAUSES).unwrap();
    let chain = ChainStore::new(Arc::new(PoolStore::new(pool_at(&path))), &tiers);
    words.into_iter().try_for_each(|word| chain.adopt(word))?;
    chain.finish_adoption().map_err(|error| match error {
        chain::ChainError::Adopt(error) => error,
        chain::ChainError::File(error) => panic!("{error}"),
    })?;
    Ok(chain)
}

fn load(chain: &ChainStore, disk: &FakeDisk, page: PageNo, content: Content) -> Option<[u8; PAGE]> {
    let loaded = Arc::new(Mutex::new(None));
    let told = Arc::clone(&loaded);
    let done = LoadDone::new(page, move |bytes| {
        *told.lock().unwrap() = bytes.ok().copied();
    });
    chain.load_later(page, content, done);
    disk.finish_all();
    let loaded = loaded.lock().unwrap();
    *loaded
}

/// A daemon dies with batches under way, some of them landed.
#[test]
fn successor_finds_every_page_and_gives_back_what_no_word_names() {
    for seed in 0..40 {
        let mut random = SplitMix64::new(seed);
        let mut rig = Rig::new(WhenGone::Wait);
        rig.evict_all();
        let mut versions = vec![0; to_usize(PAGES)];
        for version in 1..random.below(12) {
            rig.sink(SectionNo(random.below(SECTIONS)));
            while rig.disk.requests() > 0 && random.below(3) > 0 {
                rig.disk.finish(random.index(rig.disk.requests()));
            }
            if random.below(2) == 0 {
                let page = PageNo(random.below(PAGES));
                rig.rewrite(page, version);
                versions[to_usize(page.0)] = version;
            }
        }
        // Some that were written are entered, and no word names them yet.
        for (extent, room) in rig.disk.die(|| random.below(2) == 0) {
            if random.below(2) == 0 {
                let entry = ExtentEntry::new(extent.version, room);
                let pool = rig.chain.pool().pool();
                pool.set_extent(extent.number, entry).unwrap();
            }
        }
        let reopened = adopt(&rig, WhenGone::Wait, DISK).unwrap();
        let slow = reopened.slow().unwrap();
        assert_eq!(
            slow.counts().disk_bytes.load(Relaxed),
            rig.disk.figures().stored_bytes,
            "seed {seed}"
        );
        for page in PageNo(0).run(PAGES).iter() {
            let PageState::Stored(word) = rig.state(page) else {
                continue;
            };
            let found = load(&reopened, &rig.disk, page, word);
            let version = versions[to_usize(page.0)];
            assert!(found == Some(content(page, version)), "seed {seed}: {page}");
            reopened.free(word);
        }
        assert_eq!(rig.disk.used_sectors(), 0, "seed {seed}");
        assert_eq!(reopened.pool().counts().pages(), 0);
        let in_table = reopened.pool().pool().extents().count();
        assert_eq!(in_table, 0, "seed {seed}");
    }
}

#[test]
fn pool_whose_tier_is_missing_or_another_is_refused_with_a_sentence() {
    let rig = Rig::sunk(WhenGone::Wait);
    let other = adopt(&rig, WhenGone::Wait, DiskId(78)).unwrap_err();
    assert!(other.to_string().contains("another disk"), "{other}");
    let PageState::Stored(word) = rig.state(PageNo(0)) else {
        panic!("it is stored");
    };
    let path = rig.folder.path().join("copy.pool");
    let store = Arc::new(PoolStore::new(pool_at(&path)));
    let none = ChainStore::new(store, &SlowTiers::none());
    let missing = none.adopt(word).unwrap_err();
    assert!(missing.to_string().contains("--tiers"), "{missing}");
}
