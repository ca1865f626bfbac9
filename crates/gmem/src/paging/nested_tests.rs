// SPDX-License-Identifier: Apache-2.0
//! Memory on memory that is itself away: the RAM of a VM, the rings of its devices and the store of its absent pages
//! lie in the RAM of an outer VM, which is paged, too.
//!
//! ```text
//!   level 2   guest, device ──touch──► page p of the inner space ──► the inner place, words, store
//!                                            │ is page p of the outer VM's RAM          │ slot s is page RAM + s of it
//!   level 1   ────────────────touch──► page q of the outer space ◄─────────────────────┘
//!   level 0   the outer place and store
//! ```
//! As on real machines an access goes through both levels at once: it is allowed at the inner level and present at
//! the outer one in the same moment, or it is tried anew from the inner level on, after a fault at one of them.
//! The outer level knows nothing of the inner one. So a fault of the inner level, with the lock of its section
//! held, may wait for one of the outer level, and never the other way round: waits go down and end there.

use crate::{
    Activation, AddressSpace, Backing, Cause, Content, ContentStore, Device, Fault, Installed,
    MemoryParts, Mmu, MmuError, MmuLimits, Mode, PageState, PagedMemory, Place, PlaceError,
    RegionRequest, Restrict, Restricted, StoreError, TableId, Wait,
    fake::{self, FakeStore},
};
use pagetide_addr::{
    Access, DeviceId, PAGE_BYTES, PageNo, PageRange, PageSet, SECTION_PAGES, SectionNo, to_usize,
};
use pagetide_random::SplitMix64;
use std::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
};

type Bytes = [u8; 4096];

/// Pages of the inner VM's RAM, in two sections.
const RAM: u64 = SECTION_PAGES + 48;
/// Pages of the inner store, behind it in the outer VM's RAM.
const SLOTS: u64 = SECTION_PAGES;
const DEVICE: DeviceId = DeviceId(1);
/// Tries of an access, after which it waits for something that does not end.
const TRIES_MAX: u32 = 100_000;

/// The frames of one level, and what its vCPUs and its device may do with them.
struct Frames<T> {
    present: Vec<Option<T>>,
    /// For vCPUs: kept from writing.
    read_only: Vec<bool>,
    /// For the device.
    granted: Vec<bool>,
}

/// One level's memory: its place, and the translations of those who use it.
struct Level<T> {
    frames: Mutex<Frames<T>>,
    below: Option<Arc<Outer>>,
}

/// The level whose frames are memory.
type Memory = Level<Box<Bytes>>;
/// The level whose frames are pages of the outer VM.
type InPages = Level<()>;

/// The outer VM's RAM, paged.
struct Outer {
    ram: Arc<Memory>,
    space: Arc<AddressSpace>,
    store: Arc<FakeStore>,
    /// Faults that found a page of it absent.
    faults: AtomicU64,
}

impl<T> Level<T> {
    fn new(pages: u64, below: Option<Arc<Outer>>) -> Self {
        let all = usize::try_from(pages).unwrap();
        let frames = Frames {
            present: (0..all).map(|_| None).collect(),
            read_only: vec![false; all],
            granted: vec![false; all],
        };
        Self {
            frames: Mutex::new(frames),
            below,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Frames<T>> {
        self.frames.lock().unwrap()
    }
}

impl Outer {
    fn new(pages: u64) -> Arc<Self> {
        let ram = Arc::new(Memory::new(pages, None));
        for frame in &mut ram.lock().present {
            *frame = Some(Box::new([0; 4096]));
        }
        let store = Arc::new(FakeStore::default());
        let parts = MemoryParts {
            store: Arc::clone(&store) as _,
            ..fake::parts(pages, Arc::clone(&ram) as _)
        };
        let space = fake::space(parts, DeviceId::VCPUS, Arc::new(Vcpus(Arc::clone(&ram))));
        space
            .alloc(&RegionRequest::of_bytes(pages * PAGE_BYTES))
            .unwrap();
        Arc::new(Self {
            ram,
            space,
            store,
            faults: AtomicU64::new(0),
        })
    }

    /// An access of a vCPU of the outer VM, if the page is there and allows it now.
    fn try_access(&self, page: PageNo, access: Access, with: &mut dyn FnMut(&mut Bytes)) -> bool {
        let mut frames = self.ram.lock();
        if access == Access::Write && frames.read_only[page.index()] {
            return false;
        }
        match &mut frames.present[page.index()] {
            Some(bytes) => {
                with(bytes);
                true
            }
            None => false,
        }
    }

    fn fault(&self, page: PageNo, access: Access) {
        self.faults.fetch_add(1, Relaxed);
        // By a thread of the outer daemon: the one that waits belongs to another program.
        std::thread::scope(|scope| {
            scope.spawn(|| touch(&self.space, DeviceId::VCPUS, page, access));
        });
    }

    /// An access of a vCPU of the outer VM, which waits for the page: that of the inner daemon.
    fn access(&self, page: PageNo, access: Access, mut with: impl FnMut(&mut Bytes)) {
        for _ in 0..TRIES_MAX {
            if self.try_access(page, access, &mut with) {
                return;
            }
            self.fault(page, access);
        }
        panic!("{page} of the outer VM does not come");
    }

    fn evict(&self, pages: &[PageNo]) -> u64 {
        let keep = |_, bytes: &Bytes| Some(self.store.keep(bytes));
        evict(self.space.memory().unwrap(), pages, keep, &*self.store)
    }
}

fn touch(space: &AddressSpace, device: DeviceId, page: PageNo, access: Access) {
    let fault = Fault {
        device,
        pages: page.single(),
        access,
    };
    let served = space.fault(&Cause::Fault(fault), Wait::Here);
    assert!(served.is_some(), "{page} is in no region");
}

/// Evicts those of `pages`, of one section, that can go.
fn evict(
    memory: &PagedMemory,
    pages: &[PageNo],
    keep: impl Fn(PageNo, &Bytes) -> Option<Content>,
    store: &dyn ContentStore,
) -> u64 {
    let mut wanted = PageSet::EMPTY;
    pages.iter().for_each(|page| wanted.insert(*page));
    let section = pages[0].section();
    let Ok(mut round) = memory.begin_eviction(section, &wanted) else {
        return 0;
    };
    let mut batch = Vec::new();
    for page in round.candidates().pages(section) {
        let mut bytes = [0; 4096];
        round.read(page.single(), &mut bytes).unwrap();
        batch.extend(keep(page, &bytes).map(|content| (page, content)));
    }
    let committed = round.commit(&batch);
    committed.unused.into_iter().for_each(|it| store.free(it));
    assert!(committed.problem.is_none());
    committed.evicted.len()
}

/// What a place does, of frames that are memory or are pages.
trait Frame: Send + Sized {
    fn fill(level: &Level<Self>, page: PageNo, content: &Bytes) -> Self;
    fn read(level: &Level<Self>, page: PageNo, into: &mut Bytes);
}

impl Frame for Box<Bytes> {
    fn fill(_level: &Level<Self>, _page: PageNo, content: &Bytes) -> Self {
        Box::new(*content)
    }

    fn read(level: &Level<Self>, page: PageNo, into: &mut Bytes) {
        let frames = level.lock();
        *into = frames.present[page.index()]
            .as_deref()
            .copied()
            .unwrap_or([0; 4096]);
    }
}

impl Frame for () {
    /// The daemon in the outer VM copies into a page of it, which may be away.
    fn fill(level: &Level<Self>, page: PageNo, content: &Bytes) {
        let below = level.below.as_ref().unwrap();
        below.access(page, Access::Write, |bytes| *bytes = *content);
    }

    fn read(level: &Level<Self>, page: PageNo, into: &mut Bytes) {
        let is_present = level.lock().present[page.index()].is_some();
        into.fill(0);
        if is_present {
            let below = level.below.as_ref().unwrap();
            below.access(page, Access::Read, |bytes| *into = *bytes);
        }
    }
}

impl<T: Frame> Place for Level<T> {
    /// Called under the section's lock, so nobody else fills the page.
    fn install(&self, page: PageNo, content: &Bytes) -> Result<Installed, PlaceError> {
        if self.lock().present[page.index()].is_some() {
            return Ok(Installed::AlreadyThere);
        }
        let filled = T::fill(self, page, content);
        self.lock().present[page.index()] = Some(filled);
        Ok(Installed::Installed)
    }

    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        self.install(page, &[0; 4096])
    }

    fn install_run(&self, pages: PageRange, content: &[u8]) -> Result<u64, PlaceError> {
        let mut done = 0;
        for (page, bytes) in pages.iter().zip(content.as_chunks().0) {
            if self.install(page, bytes)? == Installed::AlreadyThere {
                break;
            }
            done += 1;
        }
        Ok(done)
    }

    fn read(&self, pages: PageRange, into: &mut [u8]) -> Result<(), PlaceError> {
        for (page, bytes) in pages.iter().zip(into.as_chunks_mut().0) {
            T::read(self, page, bytes);
        }
        Ok(())
    }

    fn discard(&self, pages: PageRange) -> Result<(), PlaceError> {
        let mut frames = self.lock();
        for page in pages.iter() {
            frames.present[page.index()] = None;
            frames.read_only[page.index()] = false;
        }
        Ok(())
    }

    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError> {
        Ok(self.lock().present[page.index()].is_some())
    }

    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        let frames = self.lock();
        let present = pages
            .iter()
            .filter(|page| frames.present[page.index()].is_some());
        Ok(present.map(PageNo::single).collect())
    }

    fn wake(&self, _pages: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }

    fn poison(&self, page: PageNo) -> Result<(), PlaceError> {
        panic!("{page} is lost");
    }
}

/// The vCPUs of a level.
struct Vcpus<T>(Arc<Level<T>>);

impl<T: Send> Mmu for Vcpus<T> {
    fn limits(&self) -> MmuLimits {
        MmuLimits {
            strongest: Restrict::ReadOnly,
            ..MmuLimits::PAGED
        }
    }

    fn restrict(
        &self,
        _table: TableId,
        section: SectionNo,
        pages: &PageSet,
        _to: Restrict,
    ) -> Result<Restricted, MmuError> {
        let mut frames = self.0.lock();
        for page in pages.pages(section) {
            frames.read_only[page.index()] = true;
        }
        Ok(Restricted::Done)
    }

    fn grant(
        &self,
        _table: TableId,
        pages: PageRange,
        _access: Access,
        _backing: Backing,
    ) -> Result<(), MmuError> {
        let mut frames = self.0.lock();
        for page in pages.iter() {
            frames.read_only[page.index()] = false;
        }
        Ok(())
    }
}

/// The device of a level. Its transfers end within the lock, so none is ever under way.
struct Dma<T>(Arc<Level<T>>);

impl<T: Send> Mmu for Dma<T> {
    fn limits(&self) -> MmuLimits {
        MmuLimits::PAGED
    }

    fn restrict(
        &self,
        _table: TableId,
        section: SectionNo,
        pages: &PageSet,
        _to: Restrict,
    ) -> Result<Restricted, MmuError> {
        let mut frames = self.0.lock();
        for page in pages.pages(section) {
            frames.granted[page.index()] = false;
        }
        Ok(Restricted::Done)
    }

    fn grant(
        &self,
        _table: TableId,
        pages: PageRange,
        _access: Access,
        _backing: Backing,
    ) -> Result<(), MmuError> {
        let mut frames = self.0.lock();
        for page in pages.iter() {
            frames.granted[page.index()] = true;
        }
        Ok(())
    }
}

/// The store of the inner VM's absent pages: slots in the outer VM's RAM.
struct Slots {
    below: Arc<Outer>,
    free: Mutex<Vec<u64>>,
}

impl Slots {
    fn page(slot: u64) -> PageNo {
        PageNo(RAM + slot)
    }

    /// A slot with these bytes, if there is one.
    fn keep(&self, bytes: &Bytes) -> Option<Content> {
        let slot = self.free.lock().unwrap().pop()?;
        let page = Self::page(slot);
        self.below
            .access(page, Access::Write, |into| *into = *bytes);
        Content::at(slot + 1)
    }

    fn slot(content: Content) -> u64 {
        content.bits() - 1
    }
}

impl ContentStore for Slots {
    fn load(&self, _: PageNo, content: Content, into: &mut Bytes) -> Result<(), StoreError> {
        let page = Self::page(Self::slot(content));
        self.below
            .access(page, Access::Read, |bytes| *into = *bytes);
        Ok(())
    }

    fn free(&self, content: Content) {
        self.free.lock().unwrap().push(Self::slot(content));
    }
}

/// The inner VM.
struct Inner {
    ram: Arc<InPages>,
    space: Arc<AddressSpace>,
    store: Arc<Slots>,
    faults: AtomicU64,
}

impl Inner {
    fn new(below: &Arc<Outer>) -> Self {
        let ram = Arc::new(InPages::new(RAM, Some(Arc::clone(below))));
        for frame in &mut ram.lock().present {
            *frame = Some(());
        }
        let store = Arc::new(Slots {
            below: Arc::clone(below),
            free: Mutex::new((0..SLOTS).collect()),
        });
        let parts = MemoryParts {
            store: Arc::clone(&store) as _,
            ..fake::parts(RAM, Arc::clone(&ram) as _)
        };
        let space = fake::space(parts, DeviceId::VCPUS, Arc::new(Vcpus(Arc::clone(&ram))));
        let device = Device::with_id(DEVICE, Arc::new(Dma(Arc::clone(&ram))));
        space
            .attach(&device, Mode::Coherent, Activation::Now)
            .unwrap();
        space
            .alloc(&RegionRequest::of_bytes(RAM * PAGE_BYTES))
            .unwrap();
        Self {
            ram,
            space,
            store,
            faults: AtomicU64::new(0),
        }
    }

    fn below(&self) -> &Outer {
        self.ram.below.as_ref().unwrap()
    }

    /// An access of the inner guest, or of its device.
    fn access(&self, by: DeviceId, page: PageNo, access: Access, mut with: impl FnMut(&mut Bytes)) {
        for _ in 0..TRIES_MAX {
            let is_allowed = {
                // Held over the access below, as a translation through both levels is one step.
                let frames = self.ram.lock();
                let here = frames.present[page.index()].is_some();
                let is_allowed = here
                    && match by {
                        DEVICE => frames.granted[page.index()],
                        _ => access == Access::Read || !frames.read_only[page.index()],
                    };
                if is_allowed && self.below().try_access(page, access, &mut with) {
                    return;
                }
                is_allowed
            };
            match is_allowed {
                true => self.below().fault(page, access),
                false => {
                    self.faults.fetch_add(1, Relaxed);
                    touch(&self.space, by, page, access);
                }
            }
        }
        panic!("{page} of the inner VM does not come");
    }

    fn evict(&self, pages: &[PageNo]) -> u64 {
        let keep = |_, bytes: &Bytes| self.store.keep(bytes);
        evict(self.space.memory().unwrap(), pages, keep, &*self.store)
    }

    fn is_stored(&self, page: PageNo) -> bool {
        let state = self.space.memory().unwrap().table().word(page).state();
        matches!(state, PageState::Stored(_))
    }
}

fn content(page: PageNo, version: u64) -> Bytes {
    let mut random = SplitMix64::new(page.0 << 32 | version);
    let mut bytes = [0; 4096];
    for word in bytes.as_chunks_mut::<8>().0 {
        *word = random.next_u64().to_le_bytes();
    }
    bytes
}

#[test]
fn page_that_is_away_at_both_levels_comes_back_with_its_bytes_and_so_does_its_slot() {
    let outer = Outer::new(RAM + SLOTS);
    let inner = Inner::new(&outer);
    let page = PageNo(3);
    let bytes = content(page, 1);
    inner.access(DeviceId::VCPUS, page, Access::Write, |into| *into = bytes);
    assert_eq!(inner.evict(&[page]), 1);
    // The slot that it went to, and the frame that it is to come back to, go as well.
    let slot = (0..SLOTS).find(|slot| !inner.store.free.lock().unwrap().contains(slot));
    let slot = Slots::page(slot.unwrap());
    assert_eq!((outer.evict(&[page]), outer.evict(&[slot])), (1, 1));
    let before = outer.faults.load(Relaxed);
    let mut found = [0; 4096];
    inner.access(DEVICE, page, Access::Read, |bytes| found = *bytes);
    assert!(found == bytes);
    // One for the slot and one for the frame, however often they were tried.
    assert_eq!(outer.faults.load(Relaxed) - before, 2);
    // Away at the outer level alone: nothing of that is the inner level's.
    let faults = inner.faults.load(Relaxed);
    assert_eq!(outer.evict(&[page]), 1);
    found = [0; 4096];
    inner.access(DeviceId::VCPUS, page, Access::Read, |bytes| found = *bytes);
    assert!(found == bytes && !inner.is_stored(page));
    assert_eq!(inner.faults.load(Relaxed), faults);
}

/// Pages of each user of the inner RAM.
const OWN_PAGES: u64 = 24;
/// Slots that are in use at most, about: the last ones are taken first.
const USED_SLOTS: u64 = 3 * OWN_PAGES;

/// The first page of each user, who has it for itself: two vCPUs and the device.
const USERS: [(DeviceId, PageNo); 3] = [
    (DeviceId::VCPUS, PageNo(0)),
    (DeviceId::VCPUS, PageNo(SECTION_PAGES)),
    (DEVICE, PageNo(SECTION_PAGES + OWN_PAGES)),
];

/// A user of the inner RAM: it writes its own pages, and compares what it reads of them.
fn work(inner: &Inner, by: DeviceId, first: PageNo) {
    let mut random = SplitMix64::new(first.0);
    let mut versions = vec![0_u64; to_usize(OWN_PAGES)];
    for _ in 0..1_500 {
        let number = random.below(OWN_PAGES);
        let (page, version) = (first.plus(number), &mut versions[to_usize(number)]);
        if random.below(2) == 0 {
            *version += 1;
            let bytes = content(page, *version);
            inner.access(by, page, Access::Write, |into| *into = bytes);
        } else {
            let mut found = [0; 4096];
            inner.access(by, page, Access::Read, |bytes| found = *bytes);
            let wanted = match *version {
                0 => [0; 4096],
                version => content(page, version),
            };
            assert!(found == wanted, "{page} is not version {version}");
        }
    }
}

/// Calls `evict` with some pages of one of `runs`, again and again; returns how many went.
fn evict_until(
    is_over: &AtomicBool,
    runs: &[PageRange],
    seed: u64,
    evict: impl Fn(&[PageNo]) -> u64,
) -> u64 {
    let (mut random, mut evicted) = (SplitMix64::new(seed), 0);
    while !is_over.load(Relaxed) {
        let run = runs[to_usize(random.below(runs.len() as u64))];
        let first = run.start.plus(random.below(run.len()));
        let end = run.end.min(first.plus(8));
        let pages = PageRange::new(first, end).iter();
        let pages: Vec<PageNo> = pages.filter(|it| it.section() == first.section()).collect();
        evicted += evict(&pages);
        thread::yield_now();
    }
    evicted
}

#[test]
fn bytes_are_right_and_every_wait_ends_while_each_level_evicts_what_the_other_needs() {
    let outer = Outer::new(RAM + SLOTS);
    let inner = Inner::new(&outer);
    let is_over = AtomicBool::new(false);
    let used = USERS.map(|(_, first)| first.run(OWN_PAGES));
    let slots = PageRange::new(Slots::page(SLOTS - USED_SLOTS), Slots::page(SLOTS));
    let below = [&used[..], &[slots]].concat();
    let (inner_evicted, outer_evicted) = thread::scope(|scope| {
        let evicting = [
            scope.spawn(|| evict_until(&is_over, &used, 1, |pages| inner.evict(pages))),
            scope.spawn(|| evict_until(&is_over, &below, 2, |pages| outer.evict(pages))),
        ];
        let users = USERS.map(|(by, first)| {
            let inner = &inner;
            scope.spawn(move || work(inner, by, first))
        });
        let done = users.map(|user| user.join());
        is_over.store(true, Relaxed);
        let [inner, outer] = evicting.map(|thread| thread.join().unwrap());
        done.into_iter().for_each(Result::unwrap);
        (inner, outer)
    });
    assert!(inner_evicted > 0 && outer_evicted > 0);
    // On a busy machine nobody may have met an eviction: now all that one of them uses is away at both levels.
    let (by, first) = USERS[0];
    let own: Vec<PageNo> = first.run(OWN_PAGES).iter().collect();
    let frames: Vec<PageNo> = below.iter().flat_map(|run| run.iter()).collect();
    for (pages, evict) in [
        (
            &own,
            &(|pages: &[PageNo]| inner.evict(pages)) as &dyn Fn(&[PageNo]) -> u64,
        ),
        (&frames, &|pages: &[PageNo]| outer.evict(pages)),
    ] {
        pages
            .chunk_by(|one, next| one.section() == next.section())
            .for_each(|run| {
                evict(run);
            });
    }
    for page in own {
        inner.access(by, page, Access::Read, |_| {});
    }
    assert!(inner.faults.load(Relaxed) > 0 && outer.faults.load(Relaxed) > 0);
}
