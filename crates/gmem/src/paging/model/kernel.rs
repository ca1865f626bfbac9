// SPDX-License-Identifier: Apache-2.0
//! What the models run over: a kernel with one page in it, a store, two devices.

use super::*;
use pagetide_addr::PageRange;

/// The kernel's view of one page.
#[derive(Default)]
pub(super) struct Kernel {
    pub(super) present: Option<u8>,
    pub(super) write_protected: bool,
    pub(super) stored: Option<u8>,
    /// The same bytes at [`COPY`].
    pub(super) copy: Option<u8>,
    pub(super) frees: u32,
    /// The load of far content that is under way.
    pub(super) loading: Option<LoadDone>,
    /// Fills that failed.
    pub(super) failures: u32,
    pub(super) device_may: bool,
    pub(super) device_busy: bool,
    pub(super) removed: bool,
}

/// Whether stored content is at hand. (No part of the kernel: to look is no step of a model.)
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Tier {
    Near,
    /// All but the copy.
    Far,
}

#[derive(Clone)]
pub(super) struct Model {
    kernel: Arc<Mutex<Kernel>>,
    tier: Tier,
    /// The time. (Not the checker's atomic: to look at it is no step of a model.)
    ticks: Arc<std::sync::atomic::AtomicU64>,
}

/// No limit, and a clock that goes on by one with each look.
struct Ticking(Arc<std::sync::atomic::AtomicU64>);

impl Admission for Ticking {
    fn admit(&self, _pages: u64) -> Corrections {
        Corrections::default()
    }

    fn try_admit(&self, _pages: u64) -> bool {
        true
    }

    fn give_back(&self, _pages: u64) {}

    fn give_back_unless_corrected(&self, _pages: u64, _since: Corrections) {}

    fn count_in(&self, _pages: u64) {}

    fn clock_ns(&self) -> u64 {
        self.0.fetch_add(1, std::sync::atomic::Ordering::SeqCst)
    }
}

impl Model {
    /// The time, by the clock of evictions.
    pub(super) fn now_ns(&self) -> u64 {
        Ticking(Arc::clone(&self.ticks)).clock_ns()
    }

    pub(super) fn with<R>(&self, act: impl FnOnce(&mut Kernel) -> R) -> R {
        act(&mut self.kernel.lock().unwrap())
    }

    /// Takes over the load under way, if there is one.
    pub(super) fn take_load(&self) -> Option<LoadDone> {
        self.with(|k| k.loading.take())
    }

    /// The load under way, if there is one, delivers its content.
    pub(super) fn deliver(&self) {
        if let Some(done) = self.take_load() {
            let byte = self.with(|k| k.stored.expect("freed while it is loaded"));
            done.complete(Ok(&[byte; 4096]));
        }
    }
}

impl Place for Model {
    fn install(&self, _page: PageNo, content: &[u8; 4096]) -> Result<Installed, PlaceError> {
        Ok(self.with(|k| {
            assert!(!k.removed, "installed in removed memory");
            if k.present.is_some() {
                return Installed::AlreadyThere;
            }
            (k.present, k.write_protected) = (Some(content[0]), false);
            Installed::Installed
        }))
    }
    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        self.install(page, &[0; 4096])
    }
    fn install_run(&self, pages: PageRange, content: &[u8]) -> Result<u64, PlaceError> {
        let installed = self.install(pages.start, content[..4096].try_into().unwrap())?;
        Ok(u64::from(installed == Installed::Installed))
    }
    fn read(&self, _pages: PageRange, into: &mut [u8]) -> Result<(), PlaceError> {
        into[0] = self.with(|k| k.present.unwrap_or(0));
        Ok(())
    }
    fn discard(&self, _pages: PageRange) -> Result<(), PlaceError> {
        self.with(|k| {
            assert!(!k.device_may, "punched under a device");
            assert!(!k.removed, "removed memory is punched");
            k.present = None;
        });
        Ok(())
    }
    fn is_present(&self, _page: PageNo) -> Result<bool, PlaceError> {
        Ok(self.with(|k| k.present.is_some()))
    }
    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        Ok(if self.is_present(PAGE)? {
            vec![pages]
        } else {
            Vec::new()
        })
    }
    fn wake(&self, _pages: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }
    fn poison(&self, _page: PageNo) -> Result<(), PlaceError> {
        unreachable!("nothing is damaged here")
    }
}

impl ContentStore for Model {
    fn load(
        &self,
        _page: PageNo,
        content: Content,
        into: &mut [u8; 4096],
    ) -> Result<(), StoreError> {
        into[0] = self.with(|k| {
            let bytes = if content == COPY { k.copy } else { k.stored };
            bytes.expect("loaded after it was freed")
        });
        Ok(())
    }
    fn free(&self, content: Content) {
        self.with(|k| {
            let bytes = match content == COPY {
                true => &mut k.copy,
                false => &mut k.stored,
            };
            assert!(bytes.take().is_some(), "freed twice");
            k.frees += 1;
        });
    }
    fn is_at_hand(&self, content: Content) -> bool {
        self.tier == Tier::Near || content == COPY
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
        assert!(self.tier == Tier::Far, "{page}: {why}");
        self.with(|k| k.failures += 1);
    }
}

pub(super) struct Vcpus(Model);

impl Mmu for Vcpus {
    fn limits(&self) -> MmuLimits {
        MmuLimits {
            strongest: Restrict::ReadOnly,
            ..MmuLimits::PAGED
        }
    }
    fn restrict(
        &self,
        _table: TableId,
        _section: SectionNo,
        _pages: &PageSet,
        _to: Restrict,
    ) -> Result<Restricted, MmuError> {
        self.0.with(|k| k.write_protected = true);
        Ok(Restricted::Done)
    }
    fn grant(
        &self,
        _table: TableId,
        _pages: PageRange,
        _access: Access,
        _backing: Backing,
    ) -> Result<(), MmuError> {
        self.0.with(|k| k.write_protected = false);
        Ok(())
    }
}

/// A device; its bitmap and lease are one mutex here (the lease protocol has a model of its own).
pub(super) struct Dpu(Model);

impl Mmu for Dpu {
    fn limits(&self) -> MmuLimits {
        MmuLimits::PAGED
    }
    fn restrict(
        &self,
        _table: TableId,
        _section: SectionNo,
        _pages: &PageSet,
        _to: Restrict,
    ) -> Result<Restricted, MmuError> {
        Ok(self.0.with(|k| {
            k.device_may = false;
            if k.device_busy {
                Restricted::Busy
            } else {
                Restricted::Done
            }
        }))
    }
    fn grant(
        &self,
        _table: TableId,
        _pages: PageRange,
        _access: Access,
        _backing: Backing,
    ) -> Result<(), MmuError> {
        self.0.with(|k| k.device_may = true);
        Ok(())
    }
}

/// The memory, and the space that keeps its devices.
#[derive(Clone)]
pub(super) struct Memory(pub(super) Arc<AddressSpace>);

impl std::ops::Deref for Memory {
    type Target = PagedMemory;

    fn deref(&self) -> &PagedMemory {
        self.0.memory().unwrap()
    }
}

pub(super) fn space(kernel: Kernel, state: PageState) -> (Model, Memory) {
    space_with(kernel, state, Tier::Near)
}

pub(super) fn space_with(kernel: Kernel, state: PageState, tier: Tier) -> (Model, Memory) {
    let kernel = Arc::new(Mutex::new(kernel));
    let ticks = Arc::default();
    let model = Model {
        kernel,
        tier,
        ticks,
    };
    let words = VolatileWords::new(1, PageWord::new(state));
    let memory = PagedMemory::new(MemoryParts {
        table: PageTable::new(Box::new(words)),
        place: Arc::new(model.clone()),
        store: Arc::new(model.clone()),
        admission: Arc::new(Ticking(Arc::clone(&model.ticks))),
        incidents: Arc::new(model.clone()),
        neighbours_max: 0,
    });
    let space =
        AddressSpace::over(memory, PAGE.va(), PAGE.next().va(), AllocPolicy::default()).unwrap();
    let devices: [(DeviceId, Arc<dyn Mmu>); 2] = [
        (DeviceId::VCPUS, Arc::new(Vcpus(model.clone()))),
        (DeviceId(1), Arc::new(Dpu(model.clone()))),
    ];
    for (id, mmu) in devices {
        let device = Device::with_id(id, mmu);
        space
            .attach(&device, Mode::Coherent, Activation::Now)
            .unwrap();
    }
    (model, Memory(space))
}
