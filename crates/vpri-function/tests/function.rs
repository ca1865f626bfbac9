// SPDX-License-Identifier: Apache-2.0
//! The driver and the function, which are two processes elsewhere, over their socket.

use pagetide_addr::{
    Access, DeviceId, DomainId, FileKey, FilePage, FilePageSet, FileRange, FileSection, PAGE_BYTES,
    PageRequest, PageResponse, QueueId, RequestId, ResponseCode,
};
use pagetide_random::SplitMix64;
use pagetide_sys::memory_file::GuestFile;
use pagetide_vpri::{
    Attribute, DeviceEnd, DmaDomain, DomainTable, Doorbell, EnginePort, FaultSource, IoSpace,
    IoSpaces, LogRecord, Logged, Logging, LookUp, RamWindow, Service, fault_queue,
};
use pagetide_vpri_function::{
    Driver,
    function::{FunctionParts, FunctionServer, Phase},
};
use std::{
    os::fd::AsFd,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

const PAGES: u64 = 1024;
const PATIENCE: Duration = Duration::from_secs(30);

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::yield_now();
    }
}

/// A DPU without disks: a function, and an engine that the test is.
struct Dpu {
    server: FunctionServer,
    table: Arc<DomainTable>,
    engine: DeviceEnd,
}

impl Dpu {
    fn start(dir: &Path) -> Self {
        let bell = || Arc::new(Doorbell::new().unwrap());
        let host_bell = bell();
        let (engine, host) = fault_queue(64, bell(), Arc::clone(&host_bell));
        let table = Arc::new(DomainTable::new(1));
        let server = FunctionServer::start(FunctionParts {
            socket: dir.join("vpri.sock"),
            domains: Arc::clone(&table),
            hosts: vec![host],
            engine_count: 1,
            bell: host_bell,
        });
        Self {
            server: server.unwrap(),
            table,
            engine,
        }
    }

    /// The domain of `file`, as a disk's front end brings it.
    fn bring(&self, file: &GuestFile) -> Arc<RamWindow> {
        self.table.map_whole(file.as_fd()).unwrap()
    }

    fn ask(&self, id: u64, domain: DomainId, pages: FileRange) {
        let request = PageRequest::demand(
            RequestId(id),
            DeviceId(3),
            QueueId(1),
            domain,
            pages,
            Access::Write,
        );
        self.engine.submit(request).unwrap();
        self.engine.kick();
    }

    fn answer(&self) -> PageResponse {
        let mut response = None;
        eventually("a page response", || {
            response = self.engine.next();
            response.is_some()
        });
        response.unwrap()
    }
}

struct Host {
    driver: Arc<Driver>,
    source: Arc<dyn FaultSource>,
}

impl Host {
    fn start(dir: &Path) -> Self {
        let bell = Arc::new(Doorbell::new().unwrap());
        let driver = Driver::start(&dir.join("vpri.sock"), bell).unwrap();
        let source = driver.source();
        Self { driver, source }
    }

    fn take(&self, file: &GuestFile) -> Arc<dyn IoSpace> {
        let key = file.key().unwrap();
        let space = self.driver.open(file.as_fd(), key, PAGES * PAGE_BYTES);
        let space = space.unwrap();
        space.attach().unwrap();
        space.unmap_all();
        space
    }

    fn next(&self) -> PageRequest {
        let mut request = None;
        eventually("a page request", || {
            request = self.source.next();
            request.is_some()
        });
        request.unwrap()
    }

    fn grant(&self, space: &dyn IoSpace, request: &PageRequest) {
        space.grant(request.pages, request.access);
        let response = PageResponse::to(request, ResponseCode::Success);
        self.source.respond(response);
    }
}

fn memory() -> GuestFile {
    GuestFile::new_memfd("function", PAGES * PAGE_BYTES).unwrap()
}

fn pages(start: u64, end: u64) -> FileRange {
    FileRange::new(FilePage(start), FilePage(end))
}

fn attribute(domain: &DmaDomain, page: u64) -> Attribute {
    domain.attributes().bitmap().attribute(FilePage(page))
}

#[test]
fn page_request_goes_to_the_host_and_its_grant_and_answer_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let (dpu, host) = (Dpu::start(dir.path()), Host::start(dir.path()));
    host.driver.wait_connected(PATIENCE).unwrap();
    let file = memory();
    let window = dpu.bring(&file);
    let domain = Arc::clone(window.domain());
    assert_eq!(attribute(&domain, 3), Attribute::Unmapped, "before READY");
    let space = host.take(&file);
    host.driver.all_known();
    let other_window = dpu.bring(&memory());
    let other = other_window.domain();
    assert_eq!(attribute(other, 3), Attribute::ReadWrite, "nobody's");
    dpu.ask(7, domain.id(), pages(3, 6));
    let request = host.next();
    assert_eq!((request.domain, request.pages), (space.id(), pages(3, 6)));
    assert_eq!((request.device, request.queue), (DeviceId(3), QueueId(1)));
    host.grant(&*space, &request);
    let response = dpu.answer();
    assert_eq!(response.id, RequestId(7));
    assert_eq!(response.queue, QueueId(1));
    // The grant went before the answer.
    let port = EnginePort::new(Arc::clone(&window), 0, LookUp::On).unwrap();
    let lease = port.lease(pages(3, 6), Access::Write).unwrap();
    let set = FilePageSet::of_range(FileSection(0), pages(3, 4));
    assert!(!space.unmap(FileSection(0), &set), "DMA is under way");
    assert!(space.is_any_leased());
    port.release(lease);
    assert!(space.unmap(FileSection(0), &set));
    assert!(!space.is_any_leased());
    assert_eq!(attribute(&domain, 3), Attribute::Unmapped);
    assert!(domain.attributes().wire(pages(5, 6)));
    assert_eq!(space.standing_pages(), 1);
    assert!(space.standing_in(FileSection(0)).contains(FilePage(5)));
    let set = FilePageSet::of_range(FileSection(0), pages(5, 6));
    assert!(!space.unmap(FileSection(0), &set), "it is standing");
    space.detach();
    assert_eq!(attribute(&domain, 900), Attribute::ReadWrite);
    assert_eq!(host.driver.counts().refused_events, 0);
}

#[test]
fn request_that_was_open_when_the_driver_died_is_answered_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let dpu = Dpu::start(dir.path());
    let file = memory();
    let window = dpu.bring(&file);
    let domain = Arc::clone(window.domain());
    let first = Host::start(dir.path());
    first.driver.wait_connected(PATIENCE).unwrap();
    let space = first.take(&file);
    first.driver.all_known();
    space.grant(pages(0, 2), Access::Write);
    dpu.ask(1, domain.id(), pages(9, 10));
    let open = first.next();
    assert!(!space.is_any_leased(), "the grant has arrived");
    first.driver.stop();
    eventually("the device notices", || dpu.server.phase() == Phase::Nobody);
    assert_eq!(attribute(&domain, 1), Attribute::ReadWrite, "it is present");
    assert_eq!(attribute(&domain, 9), Attribute::Unmapped);
    first
        .source
        .respond(PageResponse::to(&open, ResponseCode::ResponseFailure));
    let second = Host::start(dir.path());
    second.driver.wait_connected(PATIENCE).unwrap();
    let space = second.take(&file);
    assert_eq!(attribute(&domain, 1), Attribute::Unmapped);
    assert!(second.source.next().is_none(), "it is not ready yet");
    second.driver.all_known();
    let again = second.next();
    assert_eq!(again.pages, pages(9, 10));
    second.grant(&*space, &again);
    assert_eq!(dpu.answer().code, ResponseCode::Success);
    assert!(dpu.engine.next().is_none(), "one answer");
}

#[test]
fn device_that_starts_anew_is_found_and_begins_with_everything_unmapped() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start(dir.path());
    let file = memory();
    let space = host.take(&file);
    host.driver.all_known();
    let some = FilePageSet::of_range(FileSection(1), pages(512, 520));
    for round in 1..4 {
        assert!(!space.unmap(FileSection(1), &some), "there is no device");
        assert!(host.driver.eviction_blocker().is_some());
        let dpu = Dpu::start(dir.path());
        eventually("a session", || host.driver.counts().sessions == round);
        eventually("it is in use", || host.driver.eviction_blocker().is_none());
        let window = dpu.bring(&file);
        let domain = Arc::clone(window.domain());
        assert_eq!(attribute(&domain, 0), Attribute::Unmapped);
        dpu.ask(1, domain.id(), pages(512, 514));
        let request = host.next();
        host.grant(&*space, &request);
        assert_eq!(dpu.answer().code, ResponseCode::Success);
        assert!(space.unmap(FileSection(1), &some));
        drop(dpu);
        eventually("it is missed", || !host.driver.is_connected());
    }
    assert_eq!(host.driver.counts().broken_off, 0);
}

/// What the host knows of a page.
const AWAY: u64 = 0;
const HERE: u64 = 1;

/// The engine: DMA to whatever is mapped, and requests for the rest, until it is stopped.
fn do_dma(
    dpu: &Dpu,
    window: &Arc<RamWindow>,
    state: &[AtomicU64],
    leases: &AtomicU64,
    stop: &AtomicBool,
) {
    let domain = window.domain();
    let port = EnginePort::new(Arc::clone(window), 0, LookUp::On).unwrap();
    let (mut random, mut id) = (SplitMix64::new(1), 0);
    while !stop.load(Ordering::SeqCst) {
        let page = FilePage(random.below(PAGES));
        while dpu.engine.next().is_some() {}
        let Some(lease) = port.lease(page.single(), Access::Write) else {
            id += 1;
            if dpu.engine.outstanding() < 8 {
                dpu.ask(id, domain.id(), page.single());
            }
            std::thread::yield_now();
            continue;
        };
        leases.fetch_add(1, Ordering::Relaxed);
        let is_here = state[page.index()].load(Ordering::SeqCst) == HERE;
        assert!(is_here, "DMA to {page:?}, which was taken away");
        port.release(lease);
    }
}

#[test]
fn no_grant_outlives_an_unmap_under_load() {
    const SECTIONS: u64 = PAGES / 512;
    const ROUNDS: u64 = 400;
    let dir = tempfile::tempdir().unwrap();
    let (dpu, host) = (Dpu::start(dir.path()), Host::start(dir.path()));
    host.driver.wait_connected(PATIENCE).unwrap();
    let file = memory();
    let window = dpu.bring(&file);
    let domain = Arc::clone(window.domain());
    let space = host.take(&file);
    host.driver.all_known();
    let state: Vec<AtomicU64> = (0..PAGES).map(|_| AtomicU64::new(AWAY)).collect();
    let (stop, leases) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let engine = scope.spawn(|| do_dma(&dpu, &window, &state, &leases, &stop));
        // Each section has its lock's holder: grants and unmaps take turns, as under that lock.
        let holders: Vec<_> = (0..SECTIONS)
            .map(|section| {
                let (space, state, leases) = (&space, &state, &leases);
                scope.spawn(move || {
                    let first = section * 512;
                    for round in 0..ROUNDS {
                        let range = pages(first + round % 400, first + round % 400 + 100);
                        let set = FilePageSet::of_range(FileSection(section), range);
                        let mark = |what| {
                            let all = range.iter();
                            all.for_each(|page| state[page.index()].store(what, Ordering::SeqCst));
                        };
                        mark(HERE);
                        let before = leases.load(Ordering::Relaxed);
                        space.grant(range, Access::Write);
                        // Time for some DMA; the first time as long as it takes.
                        let mut looks = 0;
                        eventually("DMA", || {
                            looks += 1;
                            leases.load(Ordering::Relaxed) > before || (round > 0 && looks > 50)
                        });
                        while !space.unmap(FileSection(section), &set) {
                            std::hint::spin_loop();
                        }
                        mark(AWAY);
                    }
                })
            })
            .collect();
        // Requests are answered meanwhile, without a grant: the engine asks again.
        while !holders
            .iter()
            .all(std::thread::ScopedJoinHandle::is_finished)
        {
            if let Some(request) = host.source.next() {
                let response = PageResponse::to(&request, ResponseCode::Success);
                host.source.respond(response);
            }
        }
        for holder in holders {
            holder.join().unwrap();
        }
        // At the end nothing is left mapped.
        for page in 0..PAGES {
            assert_eq!(attribute(&domain, page), Attribute::Unmapped);
        }
        stop.store(true, Ordering::SeqCst);
        engine.join().unwrap();
    });
    assert!(leases.load(Ordering::Relaxed) > 0, "no DMA in the test");
    let counts = host.driver.counts();
    assert_eq!((counts.broken_off, counts.refused_events), (0, 0));
}

#[test]
fn barred_memory_is_reached_by_no_device_and_given_to_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let (dpu, host) = (Dpu::start(dir.path()), Host::start(dir.path()));
    host.driver.wait_connected(PATIENCE).unwrap();
    let file = memory();
    let window = dpu.bring(&file);
    let domain = Arc::clone(window.domain());
    host.driver.bar(file.key().unwrap());
    host.driver.all_known();
    assert_eq!(attribute(&domain, 1), Attribute::Unmapped);
    dpu.ask(1, domain.id(), pages(1, 2));
    let opened = host
        .driver
        .open(file.as_fd(), file.key().unwrap(), PAGES * PAGE_BYTES);
    assert!(opened.is_err());
    let other = FileKey { dev: 1, ino: 2 };
    assert!(host.driver.open(file.as_fd(), other, PAGE_BYTES).is_ok());
    assert!(host.source.next().is_none());
    assert!(dpu.engine.next().is_none(), "it stays unanswered");
}

fn access(space: DomainId, address: u64) -> LogRecord {
    LogRecord {
        time_ns: 77,
        device: DeviceId(3),
        space,
        address,
        len_bytes: 4096,
        access: Access::Write,
        service: Service::Block,
    }
}

#[test]
fn accesses_are_told_with_the_hosts_number_of_the_space_while_they_are_wanted_and_losses_are_counted()
 {
    let dir = tempfile::tempdir().unwrap();
    let dpu = Dpu::start(dir.path());
    let host = Host::start(dir.path());
    host.driver.wait_connected(PATIENCE).unwrap();
    let files = [0, 1, 2].map(|_| GuestFile::new_memfd("guest", PAGES * PAGE_BYTES).unwrap());
    // The device numbers what it meets first, after the memory of its driver.
    let window = dpu.bring(&files[2]);
    let brought = window.domain();
    let theirs = brought.id();
    let spaces = [0, 1, 2].map(|at| host.take(&files[at]));
    host.driver.all_known();
    assert_ne!(theirs, spaces[2].id(), "or the test shows nothing");
    let log = dpu.server.access_log();
    let mut pen = log.pen(0).unwrap();
    let source = host.driver.access_log();
    assert!(!log.is_on());
    source.want(Logging::On);
    let mut records = Vec::new();
    eventually("the log to be on", || {
        source.take(100, &mut records);
        log.is_on()
    });
    assert_eq!(pen.record(&access(theirs, 5)), Logged::Kept);
    eventually("a record", || {
        source.take(100, &mut records);
        !records.is_empty()
    });
    assert_eq!(records, [access(spaces[2].id(), 5)]);
    // Far more than there are credits for, and nobody takes any.
    for at in 0..100_000 {
        pen.record(&access(theirs, at));
        if at % 4096 == 0 {
            std::thread::yield_now();
        }
    }
    eventually("the loss to be told", || {
        source.take(100, &mut records);
        pen.record(&access(theirs, 0));
        source.lost() > 0
    });
    source.want(Logging::Off);
    eventually("the log to be off", || {
        pen.record(&access(theirs, 0));
        !log.is_on()
    });
    assert_eq!(host.driver.counts().malformed_records, 0);
    host.driver.stop();
}
