// SPDX-License-Identifier: Apache-2.0
//! The model with the service, with eviction, with overflow, and with devices that misbehave.

use super::{
    device::PAGES_AT_ONCE,
    prq::{GROUPS_MAX, PageMessage, Position},
    source::GROUP_PAGES_MAX,
    *,
};
use pagetide_addr::{
    Access, FilePage, FilePageSet, FileRange, FileSection, Marks, PAGE_BYTES, PageNo, PageRange,
    PageRequest, PageResponse, PageSet, RequestId, ResponseCode, SectionNo, to_usize,
};
use pagetide_gmem::{
    AddressSpace, ContentStore, Installed, MemoryParts, Place, PlaceError, RegionRequest,
    fake::{self, FakeStore},
};
use pagetide_sys::{cpu::Urgency, mapping::SharedMapping, memory_file::GuestFile};
use pagetide_vpri::{
    mmu::DmaMmu,
    queue::Doorbell,
    service::{DPU, FaultService, ServiceThread},
    source::FaultSource,
    space::{IoSpace, IoSpaces},
};
use std::{
    collections::HashSet,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Two sections, the second not whole.
const PAGES: u64 = 700;
const PATIENCE: Duration = Duration::from_secs(60);

fn pages(start: u64, end: u64) -> FileRange {
    FileRange::new(FilePage(start), FilePage(end))
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::yield_now();
    }
}

/// RAM in a memfd, which devices map.
struct Ram {
    file: GuestFile,
}

impl Ram {
    fn new(page_count: u64) -> Arc<Self> {
        Arc::new(Self {
            file: GuestFile::new_memfd("pri", page_count * PAGE_BYTES).unwrap(),
        })
    }
}

impl Place for Ram {
    fn install(&self, page: PageNo, content: &[u8; 4096]) -> Result<Installed, PlaceError> {
        if self.is_present(page)? {
            return Ok(Installed::AlreadyThere);
        }
        self.file.write_at(page.byte_offset(), content).unwrap();
        Ok(Installed::Installed)
    }
    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        self.install(page, &[0; 4096])
    }
    fn install_run(&self, pages: PageRange, content: &[u8]) -> Result<u64, PlaceError> {
        let mut done = 0;
        for (page, bytes) in pages.iter().zip(content.chunks_exact(4096)) {
            if self.install(page, bytes.try_into().unwrap())? == Installed::AlreadyThere {
                break;
            }
            done += 1;
        }
        Ok(done)
    }
    fn read(&self, pages: PageRange, into: &mut [u8]) -> Result<(), PlaceError> {
        self.file.read_at(pages.start.byte_offset(), into).unwrap();
        Ok(())
    }
    fn discard(&self, pages: PageRange) -> Result<(), PlaceError> {
        self.file
            .punch(pages.start.byte_offset(), pages.bytes())
            .unwrap();
        Ok(())
    }
    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError> {
        Ok(self.file.is_data(page.byte_offset()).unwrap())
    }
    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        let present = |page: &PageNo| self.is_present(*page).unwrap();
        Ok(pages.iter().filter(present).map(PageNo::single).collect())
    }
    fn wake(&self, _pages: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }
    fn poison(&self, page: PageNo) -> Result<(), PlaceError> {
        panic!("{page} is poisoned");
    }
}

/// A VM without vCPUs: RAM in an address space, with the IOMMU as its device.
struct Vm {
    ram: Arc<Ram>,
    store: Arc<FakeStore>,
    iommu: Arc<Iommu>,
    io: Arc<PriSpace>,
    mmu: Arc<DmaMmu>,
    space: Arc<AddressSpace>,
}

impl Vm {
    /// All pages are absent, and zero.
    fn new(config: IommuConfig) -> Self {
        let ram = Ram::new(PAGES);
        let iommu = Iommu::new(config).unwrap();
        let io = open(&iommu, &ram);
        let store = Arc::new(FakeStore::default());
        let parts = MemoryParts {
            store: Arc::clone(&store) as _,
            ..fake::parts(PAGES, Arc::clone(&ram) as _)
        };
        io.attach().unwrap();
        io.unmap_all();
        let io_space = Arc::clone(&io) as Arc<dyn IoSpace>;
        let mmu = Arc::new(DmaMmu::new([(io_space, PageNo(0).run(PAGES))]));
        let space = fake::space(parts, DPU, Arc::clone(&mmu) as _);
        let all = RegionRequest::of_bytes(PAGES * PAGE_BYTES);
        space.alloc(&all).unwrap();
        Self {
            ram,
            store,
            iommu,
            io,
            mmu,
            space,
        }
    }

    fn device(&self, id: u16) -> DeviceModel {
        let config = DeviceConfig::new(RequesterId(id));
        DeviceModel::new(&self.iommu, &self.io, config).unwrap()
    }

    /// Evicts what it can of `section`; returns how many pages were evicted.
    fn evict(&self, section: SectionNo) -> u64 {
        let all = PageSet::of_range(section, section.pages(PAGES));
        let Ok(mut round) = self.space.memory().unwrap().begin_eviction(section, &all) else {
            return 0;
        };
        let mut batch = Vec::new();
        for page in round.candidates().pages(section) {
            let mut bytes = vec![0; 4096];
            round.read(page.single(), &mut bytes).unwrap();
            batch.push((page, self.store.keep(&bytes)));
        }
        let committed = round.commit(&batch);
        assert!(committed.problem.is_none());
        for content in committed.unused {
            self.store.free(content);
        }
        committed.evicted.len()
    }
}

fn open(iommu: &Iommu, ram: &Ram) -> Arc<PriSpace> {
    let (key, bytes) = (ram.file.key().unwrap(), ram.file.len_bytes().unwrap());
    iommu.open_space(ram.file.as_fd(), key, bytes).unwrap()
}

/// The service over the source of a VM's IOMMU.
struct Served {
    source: Arc<PriSource>,
    interrupts: Option<InterruptThread>,
    thread: Option<ServiceThread>,
    service: Arc<FaultService>,
}

impl Served {
    fn new(vm: &Vm) -> Self {
        let bell = Arc::new(Doorbell::new().unwrap());
        let source = PriSource::new(Arc::clone(&vm.iommu), Arc::clone(&bell));
        let service = FaultService::new(Vec::new(), bell);
        let (space, mmu) = (Arc::clone(&vm.space), Arc::clone(&vm.mmu));
        service.add_tenant(space, mmu).unwrap();
        service.add_source(Arc::clone(&source) as _);
        Self {
            interrupts: None,
            thread: Some(service.start().unwrap()),
            source,
            service,
        }
    }

    fn with_interrupts(vm: &Vm) -> Self {
        let mut served = Self::new(vm);
        served.start_interrupts();
        served
    }

    fn start_interrupts(&mut self) {
        self.interrupts = Some(self.source.start(Vec::new(), Urgency::Ordinary).unwrap());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.interrupts = None;
        if let Some(thread) = self.thread.take() {
            thread.stop();
        }
        assert!(Arc::strong_count(&self.service) >= 1);
    }
}

/// The word of `page` that belongs to `number`.
fn word(memory: &SharedMapping, page: FilePage, number: u64) -> &AtomicU64 {
    &memory
        .atomic_u64s(page.byte_offset() + number * 8, 1)
        .unwrap()[0]
}

#[test]
fn service_serves_groups_as_it_serves_requests_of_a_software_dpu() {
    let vm = Vm::new(IommuConfig::default());
    let served = Served::with_interrupts(&vm);
    let device = vm.device(7);
    let write = &mut |page: FilePage, memory: &SharedMapping| {
        word(memory, page, 0).store(page.0 + 1, Ordering::Relaxed);
    };
    let report = device.dma(pages(0, PAGES), Access::Write, write).unwrap();
    // All pages were absent, so each request of a translation found a whole group of them.
    assert_eq!(u64::from(report.groups), PAGES.div_ceil(PAGES_AT_ONCE));
    assert!(report.absent_at.unwrap() < report.resumed_at.unwrap());
    assert_eq!(vm.evict(SectionNo(0)), 512);
    assert_eq!(vm.evict(SectionNo(1)), PAGES - 512);
    let mut read = 0;
    let check = &mut |page: FilePage, memory: &SharedMapping| {
        assert_eq!(word(memory, page, 0).load(Ordering::Relaxed), page.0 + 1);
        read += 1;
    };
    device.dma(pages(0, PAGES), Access::Read, check).unwrap();
    assert_eq!(read, PAGES);
    // Present, writable pages: the first pass asks the IOMMU, the second finds them in the TLB.
    let again = &mut |_: FilePage, _: &SharedMapping| {};
    let report = device.dma(pages(100, 200), Access::Write, again).unwrap();
    assert_eq!((report.groups, report.translations), (0, 0));
    let counts = vm.iommu.counts();
    assert_eq!(counts.responses, served.source.counts().groups);
    assert_eq!((device.outstanding(), device.unexpected_answers()), (0, 0));
}

#[test]
fn dma_under_eviction_finds_what_it_wrote_and_the_last_page_goes_when_it_ends() {
    const ROUNDS: u64 = 400;
    let vm = Vm::new(IommuConfig::default());
    let _served = Served::with_interrupts(&vm);
    let (running, evicted) = (AtomicBool::new(true), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while running.load(Ordering::Acquire) {
                for section in [0, 1].map(SectionNo) {
                    evicted.fetch_add(vm.evict(section), Ordering::Relaxed);
                }
            }
        });
        let devices = [0_u16, 1, 2].map(|number| {
            let vm = &vm;
            scope.spawn(move || {
                let device = vm.device(number);
                let mine = u64::from(number);
                let mut written = vec![0_u64; to_usize(PAGES)];
                for round in 0..ROUNDS {
                    let start = round * 37 % (PAGES - 50);
                    let part = pages(start, start + 1 + round % 50);
                    let add = &mut |page: FilePage, memory: &SharedMapping| {
                        let was = word(memory, page, mine).fetch_add(1, Ordering::Relaxed);
                        assert_eq!(was, written[page.index()], "{page} of device {mine}");
                        written[page.index()] += 1;
                    };
                    device.dma(part, Access::Write, add).unwrap();
                }
                assert_eq!((device.outstanding(), device.unexpected_answers()), (0, 0));
            })
        });
        let ended = devices.map(|device| device.join());
        running.store(false, Ordering::Release);
        for ended in ended {
            ended.unwrap();
        }
    });
    assert!(evicted.into_inner() > 0, "nothing was evicted meanwhile");
    eventually("every page goes when nobody does DMA", || {
        vm.evict(SectionNo(0));
        vm.evict(SectionNo(1));
        (0..PAGES).all(|page| !vm.ram.is_present(PageNo(page)).unwrap())
    });
}

#[test]
fn page_in_use_is_not_taken_and_its_neighbour_is() {
    let vm = Vm::new(IommuConfig::default());
    vm.io.grant(pages(0, 2), Access::Write);
    let device = vm.device(1);
    let set = |page: u64| FilePageSet::of_range(FileSection(0), FilePage(page).single());
    let in_use = &mut |_: FilePage, _: &SharedMapping| {
        assert!(vm.io.is_any_leased());
        assert!(!vm.io.unmap(FileSection(0), &set(0)), "a DMA uses it");
        assert!(vm.io.unmap(FileSection(0), &set(1)));
    };
    device.dma(pages(0, 1), Access::Write, in_use).unwrap();
    assert!(vm.io.unmap(FileSection(0), &set(0)));
    assert!(!vm.io.is_any_leased());
}

#[test]
fn writes_are_forbidden_to_a_device_that_had_the_page_and_reads_go_on() {
    let vm = Vm::new(IommuConfig::default());
    vm.io.grant(pages(0, 1), Access::Write);
    let device = no_patience(&vm, 1);
    let nothing = &mut |_: FilePage, _: &SharedMapping| {};
    device.dma(pages(0, 1), Access::Write, nothing).unwrap();
    let all = FilePageSet::of_range(FileSection(0), pages(0, 1));
    assert!(vm.io.forbid_writes(FileSection(0), &all));
    device.dma(pages(0, 1), Access::Read, nothing).unwrap();
    let refused = device.dma(pages(0, 1), Access::Write, nothing);
    assert!(matches!(refused, Err(DmaError::NoAnswer { .. })));
}

/// A device with a short answer timeout.
fn no_patience(vm: &Vm, id: u16) -> DeviceModel {
    let config = DeviceConfig {
        answer_wait: Duration::ZERO,
        ..DeviceConfig::new(RequesterId(id))
    };
    DeviceModel::new(&vm.iommu, &vm.io, config).unwrap()
}

#[test]
fn host_that_does_not_answer_fails_the_dma_and_its_late_answer_frees_the_group() {
    let vm = Vm::new(IommuConfig::default());
    let source = source_of(&vm);
    let device = no_patience(&vm, 3);
    let nothing = &mut |_: FilePage, _: &SharedMapping| {};
    let ended = device.dma(pages(5, 9), Access::Read, nothing);
    let waited = Duration::ZERO;
    let page = FilePage(5);
    assert_eq!(ended, Err(DmaError::NoAnswer { page, waited }));
    assert_eq!(device.outstanding(), 1);
    source.interrupted();
    let request = source.next().unwrap();
    assert_eq!((request.pages, request.access), (pages(5, 9), Access::Read));
    source.respond(PageResponse::to(&request, ResponseCode::Success));
    assert_eq!((device.outstanding(), device.unexpected_answers()), (0, 0));
}

fn source_of(vm: &Vm) -> Arc<PriSource> {
    let bell = Arc::new(Doorbell::new().unwrap());
    PriSource::new(Arc::clone(&vm.iommu), bell)
}

fn message(device: u16, group: u16, page: u64, position: Position) -> PageMessage {
    PageMessage {
        device: RequesterId(device),
        group,
        position,
        page: FilePage(page),
        access: Access::Read,
        sent_ns: 0,
    }
}

fn send(vm: &Vm, message: PageMessage) {
    vm.iommu.page_request(message.encode());
}

fn taken(source: &PriSource) -> Vec<PageRequest> {
    std::iter::from_fn(|| source.next()).collect()
}

#[test]
fn group_waits_for_its_last_message_and_is_answered_once_with_the_worst_code() {
    let vm = Vm::new(IommuConfig::default());
    let source = source_of(&vm);
    let _devices = [vm.device(1), vm.device(2)];
    send(&vm, message(1, 9, 10, Position::More));
    send(&vm, message(2, 9, 99, Position::Last));
    send(&vm, message(1, 9, 11, Position::More));
    source.interrupted();
    let other = taken(&source);
    assert_eq!(other.len(), 1);
    assert_eq!(other[0].pages, pages(99, 100));
    send(&vm, message(1, 9, 40, Position::Last));
    source.interrupted();
    let parts = taken(&source);
    let ranges: Vec<FileRange> = parts.iter().map(|part| part.pages).collect();
    assert_eq!(ranges, [pages(10, 12), pages(40, 41)]);
    assert_eq!(vm.iommu.counts().responses, 0);
    source.respond(PageResponse::to(&parts[1], ResponseCode::InvalidRequest));
    assert_eq!(
        vm.iommu.counts().responses,
        0,
        "a part of it is not answered"
    );
    source.respond(PageResponse::to(&parts[0], ResponseCode::Success));
    source.respond(PageResponse::to(&parts[0], ResponseCode::Success));
    assert_eq!(vm.iommu.counts().responses, 1);
    assert_eq!(source.counts().unknown_responses, 1);
}

#[test]
fn groups_answered_in_any_order_are_each_answered_exactly_once() {
    let vm = Vm::new(IommuConfig::default());
    let source = source_of(&vm);
    let (running, groups) = (AtomicBool::new(true), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut waiting: Vec<PageRequest> = Vec::new();
            let mut seen: HashSet<RequestId> = HashSet::new();
            while running.load(Ordering::Acquire) {
                source.interrupted();
                for request in taken(&source) {
                    assert!(seen.insert(request.id), "{:?} came twice", request.id);
                    waiting.push(request);
                }
                // The newest first; some are left for later.
                for request in waiting.split_off(waiting.len() / 2) {
                    vm.io.grant(request.pages, request.access);
                    source.respond(PageResponse::to(&request, ResponseCode::Success));
                }
                std::thread::yield_now();
            }
        });
        let ended = [0_u16, 1, 2, 3].map(|number| {
            let (vm, groups) = (&vm, &groups);
            scope.spawn(move || {
                let device = vm.device(number);
                for round in 0..200 {
                    let page = FilePage((round * 7 + u64::from(number) * 150) % PAGES);
                    let nothing = &mut |_: FilePage, _: &SharedMapping| {};
                    let report = device.dma(page.single(), Access::Read, nothing).unwrap();
                    groups.fetch_add(report.groups.into(), Ordering::Relaxed);
                    // Evicted again, so that the next round faults.
                    let one = FilePageSet::of_range(page.section(), page.single());
                    eventually("nobody uses the page", || vm.io.unmap(page.section(), &one));
                }
                assert_eq!((device.outstanding(), device.unexpected_answers()), (0, 0));
            })
        });
        let ended = ended.map(|device| device.join());
        running.store(false, Ordering::Release);
        for ended in ended {
            ended.unwrap();
        }
    });
    assert_eq!(vm.iommu.counts().responses, groups.into_inner());
}

#[test]
fn overflow_answered_with_success_loses_no_transfer() {
    let vm = Vm::new(IommuConfig {
        prq_order: 0,
        ..IommuConfig::default()
    });
    let mut served = Served::new(&vm);
    std::thread::scope(|scope| {
        let devices = (0..8_u16).map(|number| {
            let vm = &vm;
            scope.spawn(move || {
                let device = vm.device(number);
                let start = u64::from(number) * 80;
                let mut touched = 0;
                let touch = &mut |_: FilePage, _: &SharedMapping| touched += 1;
                device
                    .dma(pages(start, start + 80), Access::Write, touch)
                    .unwrap();
                assert_eq!(touched, 80);
                assert_eq!((device.outstanding(), device.unexpected_answers()), (0, 0));
            })
        });
        let devices: Vec<_> = devices.collect();
        // 8 groups of 32 messages into a queue for 127, which is not emptied yet.
        eventually("an overflow", || vm.iommu.counts().queue.overflows > 0);
        served.start_interrupts();
        for device in devices {
            device.join().unwrap();
        }
    });
    let counts = vm.iommu.counts();
    assert!(counts.answered_by_hardware > 0 && counts.queue.dropped > 0);
    assert_eq!(counts.responses, served.source.counts().groups);
}

#[test]
fn overflow_answered_with_failure_stops_the_device_until_its_driver_restarts_it() {
    let vm = Vm::new(IommuConfig {
        prq_order: 0,
        overflow: OverflowAnswer::ResponseFailure,
        ..IommuConfig::default()
    });
    let source = source_of(&vm);
    let (device, other) = (vm.device(1), vm.device(2));
    for page in 0..200 {
        send(&vm, message(2, 0, page, Position::More));
    }
    let nothing = &mut |_: FilePage, _: &SharedMapping| {};
    let page = FilePage(3);
    let stopped = Err(DmaError::Stopped { page });
    assert_eq!(device.dma(pages(3, 4), Access::Read, nothing), stopped);
    assert_eq!(device.dma(pages(3, 4), Access::Read, nothing), stopped);
    // It can still access present pages.
    vm.io.grant(pages(8, 9), Access::Read);
    device.dma(pages(8, 9), Access::Read, nothing).unwrap();
    source.interrupted();
    assert_eq!(source.counts().discarded, 1, "the group that is not whole");
    device.restart();
    std::thread::scope(|scope| {
        let dma = scope.spawn(|| device.dma(pages(3, 4), Access::Read, &mut |_, _| {}));
        eventually("it is answered", || {
            source.interrupted();
            for request in taken(&source) {
                vm.io.grant(request.pages, request.access);
                source.respond(PageResponse::to(&request, ResponseCode::Success));
            }
            dma.is_finished()
        });
        assert_eq!(dma.join().unwrap().unwrap().groups, 1);
    });
    // The other device's next group must not include discarded messages.
    send(&vm, message(2, 0, 500, Position::Last));
    source.interrupted();
    let requests = taken(&source);
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].pages, pages(500, 501));
    drop(other);
}

#[test]
fn pages_outside_the_space_are_refused_and_the_device_works_on() {
    let vm = Vm::new(IommuConfig::default());
    let _served = Served::with_interrupts(&vm);
    let device = vm.device(4);
    for page in [PAGES, 1 << 36, (1 << 52) - 1].map(FilePage) {
        let touch = &mut |page: FilePage, _: &SharedMapping| panic!("touched {page}");
        let ended = device.dma(page.single(), Access::Write, touch);
        assert_eq!(ended, Err(DmaError::Refused { page }));
    }
    let mut touched = Vec::new();
    let touch = &mut |page: FilePage, _: &SharedMapping| touched.push(page.0);
    let over_the_end = pages(PAGES - 2, PAGES + 2);
    let ended = device.dma(over_the_end, Access::Read, touch);
    // Its group includes pages past the end, so it is invalid as a whole.
    let page = FilePage(PAGES - 2);
    assert_eq!(ended, Err(DmaError::Refused { page }));
    assert!(touched.is_empty());
    let inside = pages(PAGES - 2, PAGES);
    device.dma(inside, Access::Read, &mut |_, _| {}).unwrap();
}

#[test]
fn messages_that_no_sane_device_sends_are_answered_or_dropped_and_harm_nobody() {
    let vm = Vm::new(IommuConfig::default());
    let source = source_of(&vm);
    let _device = vm.device(6);
    // A group without a last message, then its last message.
    for page in 0..GROUP_PAGES_MAX as u64 + 10 {
        send(&vm, message(6, 1, page, Position::More));
    }
    send(&vm, message(6, 1, 0, Position::Last));
    source.interrupted();
    assert!(taken(&source).is_empty());
    assert_eq!(
        (source.counts().refused, vm.iommu.counts().responses),
        (1, 1)
    );
    // From an unknown device.
    send(&vm, message(99, 1, 0, Position::More));
    send(&vm, message(99, 1, 0, Position::Last));
    // An execute request in the middle of a group makes it invalid.
    send(&vm, message(6, 2, 1, Position::More));
    let mut execute = message(6, 2, 2, Position::More).encode();
    execute[0] |= 1 << 52;
    vm.iommu.page_request(execute);
    send(&vm, message(6, 2, 3, Position::Last));
    // The same index twice.
    send(&vm, message(6, 3, 3, Position::Last));
    send(&vm, message(6, 3, 4, Position::Last));
    source.interrupted();
    assert_eq!(source.counts().refused, 2);
    let twice = taken(&source);
    assert_eq!(twice.len(), 2);
    for request in &twice {
        source.respond(PageResponse::to(request, ResponseCode::Success));
    }
    assert_eq!(vm.iommu.counts().responses, 4, "each group has its answer");
    for group in 0..GROUPS_MAX {
        let mut noise = message(6, group, u64::from(group) << 20, Position::More).encode();
        noise[0] ^= u64::from(group) << 3;
        noise[2] = u64::MAX;
        vm.iommu.page_request(noise);
    }
    source.interrupted();
    assert!(source.lists() <= usize::from(GROUPS_MAX));
}

#[test]
fn device_that_is_gone_is_answered_no_more_and_its_successor_hears_nothing_of_it() {
    let vm = Vm::new(IommuConfig::default());
    let source = source_of(&vm);
    let first = vm.device(5);
    let taken_id = DeviceModel::new(&vm.iommu, &vm.io, DeviceConfig::new(RequesterId(5)));
    assert_eq!(taken_id.err(), Some(IdTaken(RequesterId(5))));
    send(&vm, message(5, 0, 1, Position::Last));
    send(&vm, message(5, 1, 2, Position::More));
    source.interrupted();
    let old = taken(&source);
    drop(first);
    let second = vm.device(5);
    source.respond(PageResponse::to(&old[0], ResponseCode::Success));
    send(&vm, message(5, 1, 7, Position::Last));
    source.interrupted();
    let new = taken(&source);
    assert_eq!(new.len(), 1);
    assert_eq!(
        new[0].pages,
        pages(7, 8),
        "without the page its predecessor asked for"
    );
    assert_eq!(
        (vm.iommu.counts().responses, second.unexpected_answers()),
        (0, 0)
    );
}

#[test]
fn small_device_tlb_makes_a_transfer_slow_and_never_stuck() {
    let vm = Vm::new(IommuConfig::default());
    let _served = Served::with_interrupts(&vm);
    let tiny = DeviceConfig {
        tlb: DevTlbSize { sets: 1, ways: 1 },
        ..DeviceConfig::new(RequesterId(8))
    };
    let device = DeviceModel::new(&vm.iommu, &vm.io, tiny).unwrap();
    std::thread::scope(|scope| {
        for start in [0, 300] {
            let device = &device;
            scope.spawn(move || {
                let mut touched = 0;
                let touch = &mut |_: FilePage, _: &SharedMapping| touched += 1;
                device
                    .dma(pages(start, start + 100), Access::Write, touch)
                    .unwrap();
                assert_eq!(touched, 100);
            });
        }
    });
    assert!(device.tlb_counts().evictions > 100);
}

#[test]
fn touched_pages_are_told_once_when_their_marks_are_forgotten_and_again_after_dma() {
    let vm = Vm::new(IommuConfig::default());
    vm.io.grant(pages(0, 100), Access::Write);
    let device = vm.device(1);
    let dma = |page: u64| {
        let one = FilePage(page).single();
        device.dma(one, Access::Write, &mut |_, _| {}).unwrap();
    };
    let touched = |marks| {
        let mut all = Vec::new();
        let visit = &mut |page: FilePage| all.push(page.0);
        vm.io.touched(pages(0, PAGES), marks, visit).unwrap();
        all
    };
    dma(3);
    dma(40);
    assert_eq!(touched(Marks::Keep), [3, 40]);
    assert_eq!(touched(Marks::Forget), [3, 40]);
    assert!(touched(Marks::Keep).is_empty());
    dma(40);
    assert_eq!(touched(Marks::Keep), [40], "also what the device TLB had");
}

#[test]
fn space_is_read_write_without_a_vm_and_unmapped_for_good_when_retired() {
    let iommu = Iommu::new(IommuConfig::default()).unwrap();
    let ram = Ram::new(PAGES);
    let io = open(&iommu, &ram);
    let device = DeviceModel::new(&iommu, &io, DeviceConfig::new(RequesterId(0))).unwrap();
    let all = pages(0, PAGES);
    let report = device.dma(all, Access::Write, &mut |_, _| {}).unwrap();
    assert_eq!(report.groups, 0);
    assert!(Arc::ptr_eq(&io, &open(&iommu, &ram)));
    io.attach().unwrap();
    assert!(io.attach().is_err());
    io.unmap_all();
    assert!(
        !io.table()
            .walk(FilePage(0), Access::Read)
            .allows(Access::Read)
    );
    io.detach();
    let last = FilePage(PAGES - 1);
    assert!(io.table().walk(last, Access::Write).allows(Access::Write));
    iommu.retire(&*io);
    assert_eq!(io.table().walk(last, Access::Read).access(), None);
    assert!(
        !Arc::ptr_eq(&io, &open(&iommu, &ram)),
        "the file again is another space"
    );
    let (key, bytes) = (ram.file.key().unwrap(), ram.file.len_bytes().unwrap());
    iommu.bar(key);
    assert!(iommu.open(ram.file.as_fd(), key, bytes).is_err());
}
