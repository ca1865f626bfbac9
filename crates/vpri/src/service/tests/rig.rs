// SPDX-License-Identifier: Apache-2.0
//! Memory that is a map, and a device that only sends requests.

use super::super::*;
use crate::domain::{DmaDomain, DomainTable};
use pagetide_addr::{
    Access, DeviceId, FilePage, PAGE_BYTES, PageNo, PageRequest, PageResponse, QueueId, RequestId,
    RequestKind,
};
use pagetide_gmem::{
    MemoryParts, RegionRequest,
    fake::{self, FakePlace, FakeRooms},
};
use pagetide_sys::{cpu, memory_file::GuestFile};
use std::{
    collections::{HashSet, VecDeque},
    sync::{Mutex, atomic::Ordering, mpsc},
};

pub const PAGES: u64 = 1024;
/// Longer than anything here takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A VM of [`PAGES`] pages, all absent, zero and unmapped.
pub struct Vm {
    pub place: Arc<FakePlace>,
    pub rooms: Arc<FakeRooms>,
    /// The CPU on which each page was filled.
    filled_on: Arc<Mutex<HashMap<PageNo, usize>>>,
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
        let filled_on = Arc::new(Mutex::new(HashMap::new()));
        let filled = Arc::clone(&filled_on);
        let place = Arc::new(FakePlace::telling(move |page| {
            filled.lock().unwrap().insert(page, cpu::current());
        }));
        let rooms = Arc::new(FakeRooms::default());
        let parts = MemoryParts {
            admission: Arc::clone(&rooms) as _,
            ..fake::parts(PAGES, Arc::clone(&place) as _)
        };
        let all = PageNo(0).run(PAGES);
        let io_space = Arc::clone(&domain) as Arc<dyn IoSpace>;
        io_space.unmap_all();
        let mmu = Arc::new(DmaMmu::new([(io_space, all)]));
        let space = fake::space(parts, DPU, Arc::clone(&mmu) as _);
        let region = space.alloc(&RegionRequest::of_bytes(bytes)).unwrap();
        assert_eq!(region.pages(), all);
        Self {
            place,
            rooms,
            filled_on,
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

    /// The CPU on which a page was filled.
    pub fn filled_on(&self, page: u64) -> usize {
        self.filled_on.lock().unwrap()[&PageNo(page)]
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
        let page = FilePage(page).single();
        PageRequest::demand(
            RequestId(0),
            DeviceId(7),
            QueueId(0),
            vm.domain.id(),
            page,
            Access::Write,
        )
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
            ..ServiceConfig::default()
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
