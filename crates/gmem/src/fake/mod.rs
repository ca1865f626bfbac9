// SPDX-License-Identifier: Apache-2.0
//! Stand-ins for what surrounds paged memory, for tests of this crate and of those above it (feature
//! `fake`): memory, store, limit, device.
//!
//! Each does what its trait says, on maps in place of a kernel, and fails where its test says so:
//!
//! | | stands for | a test may |
//! |---|---|---|
//! | [`FakePlace`] | the RAM of a VM | put pages there, let installs fail, end the VM |
//! | [`FakeStore`] | the pool, slow tiers | keep content, near or far, count loads, end them in any order |
//! | [`FakeRooms`] | the limit | let fills wait for room, count what was taken |
//! | [`FakeMmu`] | a device | wire pages, let it be busy |
//! | [`NoIncidents`] | the operator | – |
//!
//! [`parts`] and [`space`] put them together. What a test does not ask for never happens: a fault of the
//! code under test, such as content that is freed twice, is a panic here.

mod device;
mod rooms;
mod whole;

pub use device::FakeMmu;
pub use rooms::FakeRooms;

use crate::{
    Activation, AddressSpace, AllocPolicy, Content, ContentStore, Device, Granule, Incidents,
    Installed, LoadDone, MemoryParts, Mmu, Mode, PageTable, PagedMemory, Place, PlaceError,
    StoreError, Unlimited, VolatileWords,
};
use pagetide_addr::{DeviceId, PAGE_BYTES, PageNo, PageRange, SECTION_PAGES, SectionNo, Va};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Longest wait for what must happen soon.
const PATIENCE: Duration = Duration::from_secs(60);

type Bytes = [u8; 4096];

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Parts of a memory of at most `capacity_pages` pages, over `place`: an empty store, no limit, no
/// readahead, and a panic for an incident. A test replaces what it needs otherwise.
#[must_use]
pub fn parts(capacity_pages: u64, place: Arc<dyn Place>) -> MemoryParts {
    let words = VolatileWords::with_capacity(capacity_pages);
    MemoryParts {
        table: PageTable::growing(Box::new(words)),
        place,
        store: Arc::new(FakeStore::default()),
        admission: Arc::new(Unlimited),
        incidents: Arc::new(NoIncidents),
        neighbours_max: 0,
    }
}

/// An address space over that memory, from address 0 to its capacity, with a device attached and active.
/// No page is in a region yet.
///
/// # Panics
/// If that is refused.
#[must_use]
pub fn space(parts: MemoryParts, device: DeviceId, mmu: Arc<dyn Mmu>) -> Arc<AddressSpace> {
    let end = Va(parts.table.capacity_pages() * PAGE_BYTES);
    let memory = PagedMemory::new(parts);
    let space = AddressSpace::over(memory, Va(0), end, AllocPolicy::default());
    let space = space.unwrap_or_else(|error| panic!("a space: {error}"));
    let device = Device::with_id(device, mmu);
    let attached = space.attach(&device, Mode::Coherent, Activation::Now);
    attached.unwrap_or_else(|error| panic!("attaching a device: {error}"));
    space
}

#[derive(Default)]
struct PlaceState {
    /// Content of the present pages; `None` is a page of zeros.
    present: BTreeMap<PageNo, Option<Box<Bytes>>>,
    woken: BTreeSet<PageNo>,
    /// Parts whose presence was asked for.
    asked: Vec<PageRange>,
    is_gone: bool,
    installs_left: Option<u64>,
    stuck: Option<PageNo>,
    /// Sections that the kernel can still install whole; `None` if it can install pages.
    huge_pages_free: Option<u64>,
    /// Calls that installed or discarded a section.
    whole_calls: [u64; 2],
}

/// The RAM of a VM: pages that are present, with their content, in any order and of any number.
pub struct FakePlace {
    state: Mutex<PlaceState>,
    installed: Box<dyn Fn(PageNo) + Send + Sync>,
}

impl Default for FakePlace {
    fn default() -> Self {
        Self::telling(|_| ())
    }
}

impl FakePlace {
    /// One that calls `installed` after each page that it installs, on the thread that did it.
    pub fn telling(installed: impl Fn(PageNo) + Send + Sync + 'static) -> Self {
        Self {
            state: Mutex::default(),
            installed: Box::new(installed),
        }
    }

    /// Makes a page present behind everybody's back, each byte of it `byte`.
    pub fn put(&self, page: PageNo, byte: u8) {
        let content = packed(&[byte; 4096]);
        lock(&self.state).present.insert(page, content);
    }

    /// Makes pages of zeros present behind everybody's back.
    pub fn put_zeros(&self, pages: PageRange) {
        let zeros = pages.iter().map(|page| (page, None));
        lock(&self.state).present.extend(zeros);
    }

    /// The present pages, ascending.
    #[must_use]
    pub fn present(&self) -> Vec<PageNo> {
        lock(&self.state).present.keys().copied().collect()
    }

    /// Number of present pages.
    #[must_use]
    pub fn present_pages(&self) -> u64 {
        lock(&self.state).present.len() as u64
    }

    /// True if `page` is present, also in a VM that has ended.
    #[must_use]
    pub fn has(&self, page: PageNo) -> bool {
        lock(&self.state).present.contains_key(&page)
    }

    /// First byte of a page; `None` if it is absent.
    #[must_use]
    pub fn first_byte(&self, page: PageNo) -> Option<u8> {
        let state = lock(&self.state);
        let content = state.present.get(&page)?;
        Some(content.as_ref().map_or(0, |bytes| bytes[0]))
    }

    /// The pages whose waiters were woken so far.
    #[must_use]
    pub fn woken(&self) -> BTreeSet<PageNo> {
        lock(&self.state).woken.clone()
    }

    /// The parts whose presence was asked for as runs since the last call.
    #[must_use]
    pub fn take_asked(&self) -> Vec<PageRange> {
        std::mem::take(&mut lock(&self.state).asked)
    }

    /// The VM ends: every call fails from now on.
    pub fn end(&self) {
        lock(&self.state).is_gone = true;
    }

    /// A VM begins anew, with no page present.
    pub fn begin_anew(&self) {
        *lock(&self.state) = PlaceState::default();
    }

    /// From now on the kernel installs so many pages, and refuses all others.
    pub fn refuse_installs_after(&self, pages: u64) {
        lock(&self.state).installs_left = Some(pages);
    }

    /// The kernel refuses no page any more.
    pub fn refuse_no_installs(&self) {
        lock(&self.state).installs_left = None;
    }

    /// The kernel does not install `page`, and does not report it as present either.
    pub fn jam(&self, page: PageNo) {
        lock(&self.state).stuck = Some(page);
    }

    fn running(&self) -> Result<MutexGuard<'_, PlaceState>, PlaceError> {
        let state = lock(&self.state);
        match state.is_gone {
            true => Err(PlaceError::Gone),
            false => Ok(state),
        }
    }

    fn install_packed(
        &self,
        page: PageNo,
        content: Option<Box<Bytes>>,
    ) -> Result<Installed, PlaceError> {
        let mut state = self.running()?;
        if let Some(left) = &mut state.installs_left {
            *left = left.checked_sub(1).ok_or_else(|| refused(page))?;
        }
        if state.stuck == Some(page) || state.present.contains_key(&page) {
            return Ok(Installed::AlreadyThere);
        }
        state.present.insert(page, content);
        drop(state);
        (self.installed)(page);
        Ok(Installed::Installed)
    }
}

fn packed(content: &Bytes) -> Option<Box<Bytes>> {
    (*content != [0; 4096]).then(|| Box::new(*content))
}

fn refused(page: PageNo) -> PlaceError {
    PlaceError::Kernel {
        operation: "install",
        start: page,
        end: page.next(),
        source: std::io::ErrorKind::OutOfMemory.into(),
    }
}

impl Place for FakePlace {
    fn granule(&self, _section: SectionNo) -> Granule {
        match lock(&self.state).huge_pages_free {
            Some(_) => Granule::Section,
            None => Granule::Page,
        }
    }

    fn install(&self, page: PageNo, content: &Bytes) -> Result<Installed, PlaceError> {
        self.install_packed(page, packed(content))
    }

    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        self.install_packed(page, None)
    }

    fn install_run(&self, pages: PageRange, content: &[u8]) -> Result<u64, PlaceError> {
        assert_eq!(content.len() as u64, pages.bytes(), "content of {pages:?}");
        if self.granule(pages.start.section()) == Granule::Section {
            return self.install_whole(pages, content);
        }
        let mut done = 0;
        for (page, bytes) in pages.iter().zip(content.as_chunks().0) {
            match self.install(page, bytes) {
                Ok(Installed::Installed) => done += 1,
                Err(error) if done == 0 => return Err(error),
                Ok(Installed::AlreadyThere) | Err(_) => break,
            }
        }
        Ok(done)
    }

    fn read(&self, pages: PageRange, into: &mut [u8]) -> Result<(), PlaceError> {
        assert_eq!(into.len() as u64, pages.bytes(), "room for {pages:?}");
        let state = self.running()?;
        for (page, bytes) in pages.iter().zip(into.as_chunks_mut().0) {
            match state.present.get(&page) {
                Some(Some(content)) => *bytes = **content,
                Some(None) | None => bytes.fill(0),
            }
        }
        Ok(())
    }

    fn discard(&self, pages: PageRange) -> Result<(), PlaceError> {
        let mut state = self.running()?;
        if let Some(free) = &mut state.huge_pages_free {
            assert!(pages.start.0.is_multiple_of(SECTION_PAGES), "{pages:?}");
            *free += 1;
            state.whole_calls[1] += 1;
        }
        for page in pages.iter() {
            state.present.remove(&page);
        }
        Ok(())
    }

    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError> {
        Ok(self.running()?.present.contains_key(&page))
    }

    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        let mut state = self.running()?;
        state.asked.push(pages);
        let mut runs: Vec<PageRange> = Vec::new();
        for (page, _) in state.present.range(pages.start..pages.end) {
            match runs.last_mut() {
                Some(run) if run.end == *page => run.end = page.next(),
                _ => runs.push(page.single()),
            }
        }
        Ok(runs)
    }

    fn wake(&self, pages: PageRange) -> Result<(), PlaceError> {
        self.running()?.woken.extend(pages.iter());
        Ok(())
    }

    fn poison(&self, _page: PageNo) -> Result<(), PlaceError> {
        self.running().map(drop)
    }
}

#[derive(Default)]
struct StoreState {
    kept: HashMap<Content, Box<Bytes>>,
    last: u64,
    loads: u64,
    freed: Vec<Content>,
    damaged: BTreeSet<u64>,
    /// Content that is not at hand.
    far: BTreeSet<u64>,
    /// Loads under way, in the order in which they began.
    loading: Vec<(Content, LoadDone)>,
}

/// A store of pages. Content that it does not have is never asked for and never freed, or the code under
/// test is wrong.
#[derive(Default)]
pub struct FakeStore(Mutex<StoreState>);

impl FakeStore {
    /// Keeps `bytes`; returns what names them.
    ///
    /// # Panics
    /// If they are no page.
    pub fn keep(&self, bytes: &[u8]) -> Content {
        let bytes = bytes.try_into().map(Box::new);
        let bytes = bytes.unwrap_or_else(|_| panic!("a page is 4096 bytes long"));
        let mut state = lock(&self.0);
        let content = loop {
            state.last += 1;
            match Content::at(state.last) {
                Some(content) if state.kept.contains_key(&content) => {}
                Some(content) => break content,
                None => panic!("no name is left"),
            }
        };
        state.kept.insert(content, bytes);
        content
    }

    /// Keeps a page, each byte of it `byte`, under a name of the test's choice.
    pub fn keep_as(&self, content: Content, byte: u8) {
        lock(&self.0).kept.insert(content, Box::new([byte; 4096]));
    }

    /// From now on `content` differs from what was stored.
    pub fn damage(&self, content: Content) {
        lock(&self.0).damaged.insert(content.bits());
    }

    /// From now on `content` is not at hand: each load of it ends when the test says so.
    pub fn put_far(&self, content: Content) {
        lock(&self.0).far.insert(content.bits());
    }

    /// The pages whose loads are under way, in the order in which they began.
    #[must_use]
    pub fn loading(&self) -> Vec<PageNo> {
        let state = lock(&self.0);
        state.loading.iter().map(|(_, done)| done.page()).collect()
    }

    /// The load of `page` delivers its content.
    ///
    /// # Panics
    /// If none is under way.
    pub fn deliver(&self, page: PageNo) {
        let (content, done) = self.take_load(page);
        let bytes = {
            let mut state = lock(&self.0);
            state.loads += 1;
            let bytes = state.kept.get(&content).cloned();
            bytes.unwrap_or_else(|| panic!("{content:?} of {page} is not stored"))
        };
        done.complete(Ok(&bytes));
    }

    /// The load of `page` fails.
    ///
    /// # Panics
    /// If none is under way.
    pub fn fail(&self, page: PageNo, why: StoreError) {
        self.take_load(page).1.complete(Err(why));
    }

    /// Takes over the duty to end the load of `page`.
    ///
    /// # Panics
    /// If none is under way.
    pub fn take_load(&self, page: PageNo) -> (Content, LoadDone) {
        let mut state = lock(&self.0);
        let place = state.loading.iter().position(|(_, it)| it.page() == page);
        let place = place.unwrap_or_else(|| panic!("{page} is not being loaded"));
        state.loading.remove(place)
    }

    /// How many contents are kept.
    #[must_use]
    pub fn kept(&self) -> usize {
        lock(&self.0).kept.len()
    }

    /// How often content was loaded.
    #[must_use]
    pub fn loads(&self) -> u64 {
        lock(&self.0).loads
    }

    /// What was freed, in that order.
    #[must_use]
    pub fn freed(&self) -> Vec<Content> {
        lock(&self.0).freed.clone()
    }
}

impl ContentStore for FakeStore {
    fn load(&self, page: PageNo, content: Content, into: &mut Bytes) -> Result<(), StoreError> {
        let mut state = lock(&self.0);
        if state.damaged.contains(&content.bits()) {
            let why = "the test says so";
            return Err(StoreError::Damaged { page, why });
        }
        state.loads += 1;
        let is_far = state.far.contains(&content.bits());
        assert!(
            !is_far,
            "{content:?} of {page} is loaded as if it were at hand"
        );
        match state.kept.get(&content) {
            Some(bytes) => *into = **bytes,
            None => panic!("{content:?} of {page} is not stored"),
        }
        Ok(())
    }

    fn free(&self, content: Content) {
        let mut state = lock(&self.0);
        let kept = state.kept.remove(&content);
        assert!(kept.is_some(), "{content:?} is freed but not stored");
        let is_loading = state.loading.iter().any(|(it, _)| *it == content);
        assert!(!is_loading, "{content:?} is freed while it is being loaded");
        state.far.remove(&content.bits());
        state.freed.push(content);
    }

    fn load_later(&self, page: PageNo, content: Content, done: LoadDone) {
        assert_eq!(done.page(), page, "a load of {content:?}");
        let mut state = lock(&self.0);
        let known = state.kept.contains_key(&content) && state.far.contains(&content.bits());
        assert!(known, "{content:?} of {page} is at hand, or not stored");
        state.loading.push((content, done));
    }

    fn is_at_hand(&self, content: Content) -> bool {
        !lock(&self.0).far.contains(&content.bits())
    }
}

/// For a test in which nothing goes wrong: every report is a panic.
#[derive(Clone, Copy, Debug)]
pub struct NoIncidents;

impl Incidents for NoIncidents {
    fn foreign_page(&self, page: PageNo) {
        panic!("a foreign page in {page}");
    }

    fn poisoned(&self, page: PageNo, why: &StoreError) {
        panic!("{page}: {why}");
    }

    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        panic!("{page}: {why}");
    }

    fn fill_failed(&self, page: PageNo, why: &dyn std::error::Error) {
        panic!("{page}: {why}");
    }
}
