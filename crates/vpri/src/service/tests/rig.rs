// SPDX-License-Identifier: Apache-2.0
//! Memory modelled by sets of numbers, and a device that only sends requests.

use super::super::*;
use crate::domain::{DmaDomain, DomainTable};
use pagetide_addr::{
    Access, DeviceId, FilePage, PAGE_BYTES, PageNo, PageRange, PageRequest, PageResponse, QueueId,
    RequestId, RequestKind, Va,
};
use pagetide_gmem::{
    Activation, Admission, AllocPolicy, Content, ContentStore, Device as GmDevice, Incidents,
    Installed, MemoryParts, Mode, PageTable, PagedMemory, Place, PlaceError, RegionRequest,
    StoreError, VolatileWords,
};
use pagetide_sys::{cpu, memory_file::GuestFile};
use std::{
    collections::{BTreeMap, HashSet, VecDeque},
    sync::{Condvar, Mutex, MutexGuard, atomic::Ordering, mpsc},
};

pub const PAGES: u64 = 1024;
/// Longer than anything here takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The present pages, each with the CPU on which it was filled, and whether there is room for more.
#[derive(Default)]
pub struct RamState {
    pub present: BTreeMap<u64, usize>,
    pub bytes: HashMap<u64, u8>,
    is_full: bool,
    /// Fills that wait for room.
    pub waiting: usize,
}

#[derive(Clone, Default)]
pub struct Ram(Arc<(Mutex<RamState>, Condvar)>);

impl Ram {
    pub fn lock(&self) -> MutexGuard<'_, RamState> {
        self.0.0.lock().unwrap()
    }

    /// From now on faults on absent pages have to wait.
    pub fn fill_up(&self) {
        self.lock().is_full = true;
    }

    pub fn make_room(&self) {
        self.lock().is_full = false;
        self.0.1.notify_all();
    }

    /// Returns when `count` fills wait for room.
    pub fn wait_for_waiting(&self, count: usize) {
        let state = self.lock();
        let waited = (self.0.1).wait_timeout_while(state, PATIENCE, |ram| ram.waiting < count);
        assert!(!waited.unwrap().1.timed_out(), "nobody waits for room");
    }

    fn put(&self, page: PageNo, byte: u8) -> Installed {
        let mut ram = self.lock();
        ram.bytes.insert(page.0, byte);
        match ram.present.insert(page.0, cpu::current()) {
            None => Installed::Installed,
            Some(_) => Installed::AlreadyThere,
        }
    }
}

impl Place for Ram {
    fn install(&self, page: PageNo, content: &[u8; 4096]) -> Result<Installed, PlaceError> {
        Ok(self.put(page, content[0]))
    }
    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        Ok(self.put(page, 0))
    }
    fn install_run(&self, pages: PageRange, content: &[u8]) -> Result<u64, PlaceError> {
        for (page, content) in pages.iter().zip(content.chunks(4096)) {
            assert_eq!(self.put(page, content[0]), Installed::Installed);
        }
        Ok(pages.len())
    }
    fn read(&self, _: PageRange, _: &mut [u8]) -> Result<(), PlaceError> {
        unreachable!("nothing is evicted")
    }
    fn discard(&self, _: PageRange) -> Result<(), PlaceError> {
        unreachable!("nothing is evicted")
    }
    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError> {
        Ok(self.lock().present.contains_key(&page.0))
    }
    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        let ram = self.lock();
        let within = ram.present.range(pages.start.0..pages.end.0);
        Ok(within.map(|(page, _)| PageNo(*page).single()).collect())
    }
    fn wake(&self, _: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }
    fn poison(&self, _: PageNo) -> Result<(), PlaceError> {
        unreachable!("nothing is stored that could be damaged")
    }
}

impl ContentStore for Ram {
    fn load(&self, _: PageNo, _: Content, _: &mut [u8; 4096]) -> Result<(), StoreError> {
        unreachable!("all is zero")
    }
    fn free(&self, _: Content) {
        unreachable!("all is zero")
    }
}

impl Admission for Ram {
    fn admit(&self, _: u64) {
        let mut ram = self.lock();
        ram.waiting += 1;
        self.0.1.notify_all();
        let waited = (self.0.1).wait_timeout_while(ram, PATIENCE, |ram| ram.is_full);
        waited.unwrap().0.waiting -= 1;
    }
    fn try_admit(&self, _: u64) -> bool {
        !self.lock().is_full
    }
    fn give_back(&self, _: u64) {}
    fn count_in(&self, _: u64) {}
}

impl Incidents for Ram {
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

/// A VM of [`PAGES`] pages, all absent and unmapped.
pub struct Vm {
    pub ram: Ram,
    pub domain: Arc<DmaDomain>,
    pub mmu: Arc<DmaMmu>,
    pub space: Arc<AddressSpace>,
}

impl Vm {
    pub fn new(table: &DomainTable) -> Self {
        let bytes = PAGES * PAGE_BYTES;
        let file = GuestFile::new_memfd("tenant", bytes).unwrap();
        let domain = table.open(file.key().unwrap(), bytes);
        let domain = domain.unwrap();
        domain.attach().unwrap();
        let ram = Ram::default();
        let memory = PagedMemory::new(MemoryParts {
            table: PageTable::growing(Box::new(VolatileWords::with_capacity(PAGES))),
            place: Arc::new(ram.clone()),
            store: Arc::new(ram.clone()),
            admission: Arc::new(ram.clone()),
            incidents: Arc::new(ram.clone()),
            neighbours_max: 0,
        });
        let all = PageNo(0).run(PAGES);
        let parts = [(Arc::clone(&domain) as Arc<dyn IoSpace>, all)];
        IoSpace::unmap_all(&*domain);
        let mmu = Arc::new(DmaMmu::new(parts));
        let space = AddressSpace::over(memory, Va(0), Va(bytes), AllocPolicy::default()).unwrap();
        let dpu = GmDevice::with_id(DPU, Arc::clone(&mmu) as _);
        space.attach(&dpu, Mode::Coherent, Activation::Now).unwrap();
        let region = space.alloc(&RegionRequest::of_bytes(bytes)).unwrap();
        assert_eq!(region.pages(), all);
        Self {
            ram,
            domain,
            mmu,
            space,
        }
    }

    pub fn join(&self, service: &FaultService) -> Arc<Tenant> {
        service
            .add_tenant(Arc::clone(&self.space), Arc::clone(&self.mmu))
            .unwrap()
    }

    pub fn is_granted(&self, page: u64) -> bool {
        let bitmap = self.domain.attributes().bitmap();
        bitmap.allows(FilePage(page).single(), Access::Write)
    }
}

/// A device that sends requests, and records the answers.
pub struct Device {
    bell: Arc<Doorbell>,
    requests: Mutex<VecDeque<PageRequest>>,
    answer: mpsc::Sender<PageResponse>,
    answers: Mutex<mpsc::Receiver<PageResponse>>,
    book: Mutex<Book>,
    is_gone: AtomicBool,
}

#[derive(Default)]
struct Book {
    asked: u64,
    answered: HashSet<RequestId>,
}

/// The byte that devices have written into their bounce buffers.
pub const BOUNCED: u8 = 0x5a;

impl Device {
    pub fn new(bell: &Arc<Doorbell>) -> Arc<Self> {
        let (answer, answers) = mpsc::channel();
        Arc::new(Self {
            bell: Arc::clone(bell),
            requests: Mutex::default(),
            answer,
            answers: Mutex::new(answers),
            book: Mutex::default(),
            is_gone: AtomicBool::new(false),
        })
    }

    /// A demand for one page of `vm`.
    pub fn demand(vm: &Vm, page: u64) -> PageRequest {
        let from = (DeviceId(7), QueueId(0));
        let page = FilePage(page).single();
        PageRequest::demand(RequestId(0), from, vm.domain.id(), page, Access::Write)
    }

    /// A request that no DMA waits for.
    pub fn prefault(vm: &Vm, page: u64) -> PageRequest {
        PageRequest {
            kind: RequestKind::Prefault,
            ..Self::demand(vm, page)
        }
    }

    /// Sends it, under an id of its own.
    pub fn ask(&self, request: PageRequest) -> RequestId {
        let mut book = self.book.lock().unwrap();
        let id = RequestId(book.asked);
        book.asked += 1;
        drop(book);
        let request = PageRequest { id, ..request };
        self.requests.lock().unwrap().push_back(request);
        self.bell.ring();
        id
    }

    /// From now on it may start its requests again.
    pub fn go(&self) {
        self.is_gone.store(true, Ordering::SeqCst);
    }

    pub fn waiting(&self) -> usize {
        self.requests.lock().unwrap().len()
    }

    /// The next answer.
    pub fn answer(&self) -> PageResponse {
        let answers = self.answers.lock().unwrap();
        answers.recv_timeout(PATIENCE).expect("an answer")
    }

    /// The next answer, if there is already one.
    pub fn answer_now(&self) -> Option<PageResponse> {
        self.answers.lock().unwrap().try_iter().next()
    }
}

impl FaultSource for Device {
    fn next(&self) -> Option<PageRequest> {
        self.requests.lock().unwrap().pop_front()
    }

    fn arm(&self) -> bool {
        self.waiting() > 0
    }

    fn respond(&self, response: PageResponse) {
        let mut book = self.book.lock().unwrap();
        assert!(response.id.0 < book.asked, "nobody asked: {response:?}");
        assert!(book.answered.insert(response.id), "twice: {response:?}");
        self.answer.send(response).unwrap();
    }

    fn read_bounced(&self, slot: u32, count: u64, into: &mut Vec<u8>) -> bool {
        let bytes = usize::try_from(count * PAGE_BYTES).unwrap();
        into.resize(into.len() + bytes, BOUNCED);
        slot == 0
    }

    fn still_wants(&self, _slot: u32) -> bool {
        !self.is_gone.load(Ordering::SeqCst)
    }
}

/// A service with one device.
pub struct Rig {
    pub service: Arc<FaultService>,
    pub bell: Arc<Doorbell>,
    pub device: Arc<Device>,
    pub source: FaultSourceId,
    pub domains: DomainTable,
    thread: Option<ServiceThread>,
}

impl Rig {
    /// With a dispatcher thread.
    pub fn started(handling: Handling) -> Self {
        let mut rig = Self::still(handling);
        rig.thread = Some(rig.service.start().unwrap());
        rig
    }

    /// Without: only the test itself does work.
    pub fn still(handling: Handling) -> Self {
        let bell = Arc::new(Doorbell::new().unwrap());
        let config = ServiceConfig {
            handling,
            preempt: Preempt::default(),
        };
        let service = FaultService::with(config, Vec::new(), Arc::clone(&bell));
        let device = Device::new(&bell);
        let source = service.add_source(Arc::clone(&device) as _);
        Self {
            service,
            bell,
            device,
            source,
            domains: DomainTable::new(1),
            thread: None,
        }
    }

    pub fn vm(&self) -> (Vm, Arc<Tenant>) {
        let vm = Vm::new(&self.domains);
        let tenant = vm.join(&self.service);
        (vm, tenant)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.stop();
        }
    }
}
