// SPDX-License-Identifier: Apache-2.0
//! A section of two pages: the kernel, a store and two devices, for the models of huge pages.
//!
//! ```text
//!   hugetlb      both pages come and go by one call, and never apart
//!   THP          one folio or two: a *split* makes two of it, a *collapse* one
//! ```
//! The kernel's rules for a folio are those that were tried on a real one (`docs/linux-memory.md`): a
//! punch of a part splits it, and **if somebody holds a reference to it, the part is zeroed and stays**.

use super::{NEW, OLD};
use crate::{Activation, AllocPolicy, Backing};
use crate::{
    AddressSpace, Cause, Committed, Content, ContentStore, Device, Fault, FaultOutcome, Granule,
    GrowthError, Incidents, Installed, LoadDone, MemoryParts, Mmu, MmuError, MmuLimits, Mode,
    PageState, PageTable, PageWord, PagedMemory, Place, PlaceError, Restrict, Restricted,
    StoreError, TableId, Unlimited, VolatileWords, Wait,
};
use loom::sync::Mutex;
use pagetide_addr::{Access, DeviceId, PageNo, PageRange, PageSet, SectionNo};
use std::sync::Arc;

pub(super) const SECTION: SectionNo = SectionNo(0);
pub(super) const DPU: DeviceId = DeviceId(1);
/// Room for contents: two for each time that the section is stored, and one for a copy.
const CONTENTS: usize = 8;

pub(super) const fn both() -> PageRange {
    PageRange {
        start: PageNo(0),
        end: PageNo(2),
    }
}

/// How the kernel keeps the two pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kept {
    /// In a page of hugetlbfs.
    Hugetlb,
    /// In one folio, which can be split.
    Whole,
    /// Apart.
    Small,
}

pub(super) struct Kernel {
    pub present: [Option<u8>; 2],
    pub kept: Kept,
    /// Somebody has a reference to the folio.
    pub held: bool,
    pub write_protected: [bool; 2],
    pub stored: [Option<u8>; CONTENTS],
    pub frees: u32,
    pub installs: u32,
    pub punches: u32,
    pub splits: u32,
    pub collapses: u32,
    /// Pages that were zeroed by a punch, and stayed.
    pub lost: u32,
    pub device_may: [bool; 2],
    pub device_busy: bool,
    pub removed: bool,
    /// Content that is not at hand, and its load.
    pub far: Option<u64>,
    pub loading: Option<LoadDone>,
}

#[derive(Clone)]
pub(super) struct Model {
    kernel: Arc<Mutex<Kernel>>,
    granule: Granule,
}

impl Model {
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut Kernel) -> R) -> R {
        act(&mut self.kernel.lock().unwrap())
    }

    /// The kernel splits the folio by paging a part of it out: not while it is held. True if the pages are
    /// apart afterwards.
    pub(super) fn split(&self) -> bool {
        self.with(|k| {
            if k.kept == Kept::Whole && !k.held {
                k.kept = Kept::Small;
                k.splits += 1;
            }
            k.kept == Kept::Small
        })
    }

    /// `MADV_COLLAPSE`: makes one folio of pages that are all present.
    pub(super) fn collapse(&self) {
        self.with(|k| {
            let all = k.present.iter().all(Option::is_some);
            if k.kept == Kept::Small && all && !k.held {
                k.kept = Kept::Whole;
                k.collapses += 1;
            }
        });
    }

    /// The load under way, if there is one, delivers its content.
    pub(super) fn deliver(&self) {
        if let Some(done) = self.with(|k| k.loading.take()) {
            let byte = self.with(|k| k.stored[at(k.far)].expect("freed while it is loaded"));
            done.complete(Ok(&[byte; 4096]));
        }
    }
}

fn at(content: Option<u64>) -> usize {
    usize::try_from(content.expect("content")).unwrap()
}

fn index(page: PageNo) -> usize {
    usize::try_from(page.0).unwrap()
}

impl Kernel {
    fn install(&mut self, page: PageNo, byte: u8) -> Installed {
        assert!(!self.removed, "installed in removed memory");
        let place = &mut self.present[index(page)];
        if place.is_some() {
            return Installed::AlreadyThere;
        }
        *place = Some(byte);
        self.write_protected[index(page)] = false;
        Installed::Installed
    }

    fn punch(&mut self, pages: PageRange) {
        assert!(!self.removed, "removed memory is punched");
        self.punches += 1;
        for page in pages.iter() {
            assert!(!self.device_may[index(page)], "punched under a device");
        }
        let all = pages == both();
        match self.kept {
            Kept::Hugetlb => assert!(all, "a part of a huge page is punched"),
            Kept::Whole if !all && self.held => {
                self.lost += 1;
                self.present[index(pages.start)] = Some(0);
                return;
            }
            Kept::Whole => {
                self.kept = Kept::Small;
                self.splits += u32::from(!all);
            }
            Kept::Small => {}
        }
        for page in pages.iter() {
            self.present[index(page)] = None;
        }
    }
}

impl Place for Model {
    fn granule(&self, _section: SectionNo) -> Granule {
        self.granule
    }
    fn install(&self, page: PageNo, content: &[u8; 4096]) -> Result<Installed, PlaceError> {
        assert_eq!(self.granule, Granule::Page, "a part of a huge page");
        Ok(self.with(|k| {
            k.installs += 1;
            k.install(page, content[0])
        }))
    }
    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        self.install(page, &[0; 4096])
    }
    fn install_run(&self, pages: PageRange, content: &[u8]) -> Result<u64, PlaceError> {
        let whole = self.granule == Granule::Section;
        assert!(!whole || pages == both(), "a part of a huge page");
        Ok(self.with(|k| {
            let mut installed = 0;
            for (page, bytes) in pages.iter().zip(content.chunks(4096)) {
                if k.install(page, bytes[0]) == Installed::AlreadyThere {
                    break;
                }
                installed += 1;
            }
            k.installs += u32::from(installed > 0);
            installed
        }))
    }
    fn read(&self, pages: PageRange, into: &mut [u8]) -> Result<(), PlaceError> {
        self.with(|k| {
            for (page, bytes) in pages.iter().zip(into.chunks_mut(4096)) {
                bytes[0] = k.present[index(page)].unwrap_or(0);
            }
        });
        Ok(())
    }
    fn discard(&self, pages: PageRange) -> Result<(), PlaceError> {
        self.with(|k| k.punch(pages));
        Ok(())
    }
    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError> {
        Ok(self.with(|k| k.present[index(page)].is_some()))
    }
    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        let present = self.with(|k| k.present);
        let is_there = |page: &PageNo| present[index(*page)].is_some();
        Ok(pages.iter().filter(is_there).map(PageNo::single).collect())
    }
    fn wake(&self, _pages: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }
    fn poison(&self, _page: PageNo) -> Result<(), PlaceError> {
        unreachable!("nothing is damaged here")
    }
}

impl ContentStore for Model {
    fn load(&self, _: PageNo, content: Content, into: &mut [u8; 4096]) -> Result<(), StoreError> {
        let stored = self.with(|k| k.stored[at(Some(content.bits()))]);
        into[0] = stored.expect("loaded after it was freed");
        Ok(())
    }
    fn free(&self, content: Content) {
        self.with(|k| {
            let stored = k.stored[at(Some(content.bits()))].take();
            assert!(stored.is_some(), "freed twice");
            k.frees += 1;
        });
    }
    fn is_at_hand(&self, content: Content) -> bool {
        self.with(|k| k.far != Some(content.bits()))
    }
    fn load_later(&self, _page: PageNo, _content: Content, done: LoadDone) {
        let before = self.with(|k| k.loading.replace(done));
        assert!(before.is_none(), "two loads of one page");
    }
}

impl Incidents for Model {
    fn foreign_page(&self, page: PageNo) {
        panic!("a foreign page in {page}");
    }
    fn poisoned(&self, page: PageNo, _why: &StoreError) {
        panic!("{page} poisoned");
    }
    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        panic!("{page}: {why}");
    }
    fn fill_failed(&self, page: PageNo, why: &dyn std::error::Error) {
        panic!("{page}: {why}");
    }
}

struct Vcpus(Model);

impl Mmu for Vcpus {
    fn limits(&self) -> MmuLimits {
        MmuLimits {
            strongest: Restrict::ReadOnly,
            ..MmuLimits::PAGED
        }
    }
    fn restrict(
        &self,
        _: TableId,
        _: SectionNo,
        pages: &PageSet,
        _: Restrict,
    ) -> Result<Restricted, MmuError> {
        self.0.with(|k| {
            for page in pages.pages(SECTION) {
                k.write_protected[index(page)] = true;
            }
        });
        Ok(Restricted::Done)
    }
    fn grant(&self, _: TableId, pages: PageRange, _: Access, _: Backing) -> Result<(), MmuError> {
        self.0.with(|k| {
            for page in pages.iter() {
                k.write_protected[index(page)] = false;
            }
        });
        Ok(())
    }
}

struct Dpu(Model);

impl Mmu for Dpu {
    fn limits(&self) -> MmuLimits {
        MmuLimits::PAGED
    }
    fn restrict(
        &self,
        _: TableId,
        _: SectionNo,
        pages: &PageSet,
        _: Restrict,
    ) -> Result<Restricted, MmuError> {
        Ok(self.0.with(|k| {
            for page in pages.pages(SECTION) {
                k.device_may[index(page)] = false;
            }
            match k.device_busy {
                true => Restricted::Busy,
                false => Restricted::Done,
            }
        }))
    }
    fn grant(&self, _: TableId, pages: PageRange, _: Access, _: Backing) -> Result<(), MmuError> {
        self.0.with(|k| {
            for page in pages.iter() {
                k.device_may[index(page)] = true;
            }
        });
        Ok(())
    }
}

#[derive(Clone)]
pub(super) struct Memory(Arc<AddressSpace>);

impl std::ops::Deref for Memory {
    type Target = PagedMemory;

    fn deref(&self) -> &PagedMemory {
        self.0.memory().unwrap()
    }
}

/// Content of the page with this number, as [`stored`] and [`evict`] place it.
pub(super) fn content(number: u64) -> Content {
    Content::at(number).unwrap()
}

/// Both pages hold [`OLD`].
pub(super) fn present(kept: Kept) -> (Model, Memory) {
    let (granule, state) = (granule_of(kept), [PageState::Present; 2]);
    section(kept, granule, state, [Some(OLD); 2], [None; CONTENTS])
}

/// Both pages are stored, as contents 1 and 2, and a copy of page 1 as content 3.
pub(super) fn stored(kept: Kept) -> (Model, Memory) {
    let state = [1, 2].map(|number| PageState::Stored(content(number)));
    let mut contents = [None; CONTENTS];
    contents[1..4].fill(Some(OLD));
    section(kept, granule_of(kept), state, [None; 2], contents)
}

fn granule_of(kept: Kept) -> Granule {
    match kept {
        Kept::Hugetlb => Granule::Section,
        Kept::Whole | Kept::Small => Granule::Page,
    }
}

fn section(
    kept: Kept,
    granule: Granule,
    states: [PageState; 2],
    present: [Option<u8>; 2],
    stored: [Option<u8>; CONTENTS],
) -> (Model, Memory) {
    let kernel = Kernel {
        present,
        kept,
        held: false,
        write_protected: [false; 2],
        stored,
        frees: 0,
        installs: 0,
        punches: 0,
        splits: 0,
        collapses: 0,
        lost: 0,
        device_may: present.map(|byte| byte.is_some()),
        device_busy: false,
        removed: false,
        far: None,
        loading: None,
    };
    let kernel = Arc::new(Mutex::new(kernel));
    let model = Model { kernel, granule };
    let words = VolatileWords::new(2, PageWord::new(PageState::Present));
    let table = PageTable::new(Box::new(words));
    for (page, state) in both().iter().zip(states) {
        table.set_initial(page, PageWord::new(state));
    }
    let memory = PagedMemory::new(MemoryParts {
        table,
        place: Arc::new(model.clone()),
        store: Arc::new(model.clone()),
        admission: Arc::new(Unlimited),
        incidents: Arc::new(model.clone()),
        neighbours_max: 0,
    });
    let (start, end) = (both().start.va(), both().end.va());
    let space = AddressSpace::over(memory, start, end, AllocPolicy::default()).unwrap();
    let devices: [(DeviceId, Arc<dyn Mmu>); 2] = [
        (DeviceId::VCPUS, Arc::new(Vcpus(model.clone()))),
        (DPU, Arc::new(Dpu(model.clone()))),
    ];
    for (id, mmu) in devices {
        let device = Device::with_id(id, mmu);
        space
            .attach(&device, Mode::Coherent, Activation::Now)
            .unwrap();
    }
    (model, Memory(space))
}

pub(super) fn fault(space: &PagedMemory, device: DeviceId, page: PageNo) -> FaultOutcome {
    let cause = Cause::Fault(Fault {
        device,
        pages: page.single(),
        access: Access::Write,
    });
    let served = space.fault(&cause, Wait::Here);
    served.expect("a call that may wait is over").outcome
}

/// A vCPU's store: it faults until the page is there and writable.
pub(super) fn store_as_vcpu(model: &Model, space: &PagedMemory, page: PageNo) {
    loop {
        let stored = model.with(|k| {
            let can = k.present[index(page)].is_some() && !k.write_protected[index(page)];
            if can {
                k.present[index(page)] = Some(NEW);
            }
            can
        });
        if stored {
            return;
        }
        fault(space, DeviceId::VCPUS, page);
        loom::thread::yield_now();
    }
}

/// A device's store: it takes a lease if its bitmap allows, else it faults and tries again.
pub(super) fn store_as_device(model: &Model, space: &PagedMemory, page: PageNo) {
    loop {
        let leased = model.with(|k| {
            k.device_busy = k.device_may[index(page)];
            k.device_busy
        });
        if leased {
            model.with(|k| {
                assert!(k.present[index(page)].is_some(), "DMA into a hole");
                k.present[index(page)] = Some(NEW);
                k.device_busy = false;
            });
            return;
        }
        fault(space, DPU, page);
        loom::thread::yield_now();
    }
}

/// Evicts `pages`, as contents `first` and on. True if they went.
pub(super) fn evict(model: &Model, space: &PagedMemory, pages: PageRange, first: u64) -> bool {
    let wanted = PageSet::of_range(SECTION, pages);
    let Ok(mut round) = space.begin_eviction(SECTION, &wanted) else {
        return false;
    };
    let going = round.candidates();
    let mut batch = Vec::new();
    for (page, number) in pages.iter().zip(first..) {
        if !going.contains(page) {
            continue;
        }
        let mut bytes = [0; 4096];
        round.read(page.single(), &mut bytes).unwrap();
        model.with(|k| k.stored[at(Some(number))] = Some(bytes[0]));
        batch.push((page, content(number)));
    }
    let Committed {
        unused, evicted, ..
    } = round.commit(&batch);
    for content in unused {
        model.free(content);
    }
    !evicted.is_empty()
}

/// The memory of the section is taken out of the VM.
pub(super) fn remove(model: &Model, space: &PagedMemory) {
    loop {
        match space.deallocate(both()) {
            Ok(()) => break,
            Err(GrowthError::Busy { .. } | GrowthError::Loading { .. }) => {
                loom::thread::yield_now();
            }
            Err(error) => panic!("{error}"),
        }
    }
    model.with(|k| {
        assert_eq!(k.device_may, [false; 2], "a device may use removed memory");
        k.removed = true;
        k.present = [None; 2];
    });
}

/// What each page holds in the end, wherever it is. No other content is left.
pub(super) fn final_contents(model: &Model, space: &PagedMemory) -> [u8; 2] {
    let states = [0, 1].map(|page| space.table().word(PageNo(page)).state());
    model.with(|k| {
        assert_eq!(k.lost, 0, "a page was zeroed and stayed");
        let mut named = 0;
        let bytes = [0, 1].map(|page| match states[page] {
            PageState::Present => k.present[page].expect("present"),
            PageState::Stored(content) => {
                assert_eq!(k.present[page], None);
                named += 1;
                k.stored[at(Some(content.bits()))].expect("stored")
            }
            other => panic!("page {page} is left in {other:?}"),
        });
        let kept = k.stored.iter().flatten().count();
        assert_eq!(kept, named, "content is left behind");
        bytes
    })
}
