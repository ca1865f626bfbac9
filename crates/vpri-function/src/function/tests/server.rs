// SPDX-License-Identifier: Apache-2.0
//! The function over its socket, with a driver that writes its rings by hand, valid or not.

use super::{PAGES, range, request};
use crate::{
    fake::eventually,
    frontend::{
        connect::{agree, notify_of},
        ring::{Descriptor, NEXT, Ring, RingPlace, WRITE},
    },
    function::{FunctionParts, FunctionServer, Phase},
    wire::{
        Answer, Code, Config, Event, LogEntry, LogRecord, Opcode, QUEUE_COUNT, Reply, STATUS_BYTES,
        Service, decode_request, feature,
    },
};
use pagetide_addr::{
    Access, DeviceId, DomainId, FileKey, PAGE_BYTES, PageRequest, PageResponse, RequestKind,
    ResponseCode,
};
use pagetide_sys::{event::for_vhost, mapping::SharedMapping, memory_file::GuestFile};
use pagetide_vpri::{
    Attribute, DeviceEnd, DomainTable, Doorbell, HostPresence, Logged, fault_queue,
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::OwnedFd,
    fs::MemfdFlags,
};
use std::{
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixStream,
    },
    sync::Arc,
};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData, vhost_user::Frontend};

const EVENTS: usize = 0;
const FAULTS: usize = 1;
const LOG: usize = 2;
/// Address of the memory in the front end.
const AT: u64 = 0x7000_0000;
/// Address of the memory in descriptors.
const BUS: u64 = 0x4000;
const BYTES: u64 = 64 * PAGE_BYTES;
/// Messages, replies, requests, records: a page each; bounce buffers follow.
const MESSAGE: u64 = 16 * PAGE_BYTES;
const REPLY: u64 = 17 * PAGE_BYTES;
const REQUESTS: u64 = 18 * PAGE_BYTES;
const RECORDS: u64 = 19 * PAGE_BYTES;
const BOUNCE: u64 = 32 * PAGE_BYTES;

struct Rig {
    server: FunctionServer,
    table: Arc<DomainTable>,
    engine: DeviceEnd,
    directory: tempfile::TempDir,
    file: GuestFile,
}

impl Rig {
    fn new() -> Self {
        let bell = || Arc::new(Doorbell::new().unwrap());
        let host_bell = bell();
        let (engine, host) = fault_queue(8, bell(), Arc::clone(&host_bell));
        let table = Arc::new(DomainTable::new(1));
        let directory = tempfile::tempdir().unwrap();
        let server = FunctionServer::start(FunctionParts {
            socket: directory.path().join("vpri"),
            domains: Arc::clone(&table),
            hosts: vec![host],
            engine_count: 1,
            bell: host_bell,
        });
        Self {
            server: server.unwrap(),
            table,
            engine,
            directory,
            file: GuestFile::new_memfd("ram", PAGES * PAGE_BYTES).unwrap(),
        }
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.directory.path().join("vpri")).unwrap()
    }

    fn driver(&self) -> Driver {
        Driver::new(self.connect(), Seal::Yes).unwrap()
    }

    fn name(&self) -> FileKey {
        self.file.key().unwrap()
    }

    /// A driver that is ready, with a space for the rig's memory.
    fn ready_driver(&self) -> (Driver, DomainId) {
        self.ready(self.driver())
    }

    fn ready(&self, mut driver: Driver) -> (Driver, DomainId) {
        assert_eq!(driver.code(&Event::Begin), Code::Ok);
        let (name, page_count) = (self.name(), PAGES);
        let reply = driver.ask(&Event::Create { name, page_count });
        assert_eq!(driver.code(&Event::Ready), Code::Ok);
        let space = u32::try_from(reply.unwrap().status.value).unwrap();
        (driver, DomainId(space))
    }

    fn ask_for(&self, id: u64, space: DomainId) {
        self.engine.submit(request(id, space, 5)).unwrap();
        self.engine.kick();
    }

    fn answer_of(&self) -> PageResponse {
        let mut answer = None;
        eventually("a response", || {
            answer = self.engine.next();
            answer.is_some()
        });
        answer.unwrap()
    }
}

#[derive(PartialEq)]
enum Seal {
    Yes,
    No,
}

struct Driver {
    frontend: Frontend,
    config: Config,
    memory: Arc<SharedMapping>,
    rings: Vec<Ring>,
    kicks: Vec<OwnedFd>,
    errors: OwnedFd,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap()
}

fn is_rung(event: &OwnedFd) -> bool {
    rustix::io::read(event, &mut [0; 8]).is_ok()
}

const fn place(queue: u64) -> RingPlace {
    RingPlace::at(queue * PAGE_BYTES, 16)
}

impl Driver {
    fn new(stream: UnixStream, seal: Seal) -> Result<Self, vhost::Error> {
        Self::agreeing(stream, seal, 0)
    }

    /// One that agrees on `features`, too.
    fn agreeing(stream: UnixStream, seal: Seal, features: u64) -> Result<Self, vhost::Error> {
        let common = 1 << 29 | feature::ACCESS_LOG | feature::LOG_LOSSES | feature::OVERWRITE;
        let wanted = common | features;
        let (mut frontend, features, config) = agree(stream, wanted).unwrap();
        // The function seals it by itself, if it accepts seals at all.
        let flags = match seal {
            Seal::Yes => MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
            Seal::No => MemfdFlags::CLOEXEC,
        };
        let file = rustix::fs::memfd_create("function", flags).unwrap();
        rustix::fs::ftruncate(&file, BYTES).unwrap();
        frontend.set_mem_table(&[VhostUserMemoryRegionInfo {
            guest_phys_addr: BUS,
            memory_size: BYTES,
            userspace_addr: AT,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        }])?;
        let memory = Arc::new(SharedMapping::new(file.as_fd(), BYTES).unwrap());
        let (mut rings, mut kicks, errors) = (Vec::new(), Vec::new(), event());
        for queue in 0..u64::from(QUEUE_COUNT) {
            let (at, kick) = (place(queue), event());
            rings.push(Ring::new(Arc::clone(&memory), at, notify_of(features)));
            start(&mut frontend, queue, at, [&kick, &errors])?;
            kicks.push(kick);
        }
        Ok(Self {
            frontend,
            config,
            memory,
            rings,
            kicks,
            errors,
        })
    }

    /// Gives the device a chain: parts as address, length and flags.
    fn give(&mut self, queue: usize, head: u16, parts: &[(u64, u32, u16)]) {
        let ring = &mut self.rings[queue];
        let mut room = 0;
        for (index, (at, len, flags)) in (head..).zip(parts) {
            let is_last = usize::from(index - head) + 1 == parts.len();
            let descriptor = Descriptor {
                address: *at,
                len: *len,
                flags: if is_last { *flags } else { flags | NEXT },
                next: index + 1,
            };
            ring.describe(index, descriptor).unwrap();
            room += if flags & WRITE == 0 { 0 } else { *len };
        }
        ring.publish(head, room).unwrap();
        self.show(queue);
    }

    fn show(&mut self, queue: usize) {
        if self.rings[queue].show().unwrap() {
            rustix::io::write(&self.kicks[queue], &1_u64.to_ne_bytes()).unwrap();
        }
    }

    fn used(&mut self, queue: usize) -> u32 {
        let mut used = None;
        let ring = &mut self.rings[queue];
        eventually("a chain used", || {
            used = ring.take().unwrap();
            used.is_some()
        });
        used.unwrap().len
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.copy_to(at, bytes).unwrap();
    }

    fn get(&self, at: u64, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.memory.copy_from(at, &mut bytes).unwrap();
        bytes
    }

    /// A message of raw bytes with room for a whole reply.
    fn send(&mut self, bytes: &[u8]) -> Option<Reply> {
        self.put(MESSAGE, bytes);
        let len = u32::try_from(bytes.len()).unwrap();
        let parts = [(BUS + MESSAGE, len, 0), (BUS + REPLY, 80, WRITE)];
        self.give(EVENTS, 0, &parts);
        let len = self.used(EVENTS);
        Reply::decode(&self.get(REPLY, len)).ok()
    }

    fn ask(&mut self, event: &Event<'_>) -> Option<Reply> {
        let mut bytes = Vec::new();
        event.encode(&mut bytes);
        self.send(&bytes)
    }

    fn code(&mut self, event: &Event<'_>) -> Code {
        self.ask(event).unwrap().status.code
    }

    fn want_request(&mut self) {
        self.give(FAULTS, 0, &[(BUS + REQUESTS, 64, WRITE)]);
    }

    fn next_request(&mut self) -> PageRequest {
        let len = self.used(FAULTS);
        decode_request(&self.get(REQUESTS, len)).unwrap()
    }

    fn respond(&mut self, request: &PageRequest) {
        let response = PageResponse::to(request, ResponseCode::Success);
        let answers = vec![Answer::from(&response)].into();
        assert_eq!(self.code(&Event::Respond { answers }), Code::Ok);
    }
}

fn start(
    frontend: &mut Frontend,
    queue: u64,
    at: RingPlace,
    [kick, errors]: [&OwnedFd; 2],
) -> Result<(), vhost::Error> {
    let index = usize::try_from(queue).unwrap();
    let copy = |event: &OwnedFd| for_vhost(event.try_clone().unwrap());
    frontend.set_vring_num(index, at.size)?;
    frontend.set_vring_base(index, 0)?;
    let addresses = VringConfigData {
        queue_max_size: at.size,
        queue_size: at.size,
        flags: 0,
        desc_table_addr: AT + at.descriptors,
        used_ring_addr: AT + at.used,
        avail_ring_addr: AT + at.available,
        log_addr: None,
    };
    frontend.set_vring_addr(index, &addresses)?;
    frontend.set_vring_call(index, &copy(&event()))?;
    frontend.set_vring_err(index, &copy(errors))?;
    frontend.set_vring_kick(index, &copy(kick))?;
    frontend.set_vring_enable(index, true)
}

#[test]
fn page_fault_goes_to_the_driver_and_its_response_to_the_engine() {
    let rig = Rig::new();
    assert_eq!(rig.engine.host(), HostPresence::Away);
    let (mut driver, space) = rig.ready_driver();
    assert_eq!(rig.engine.host(), HostPresence::Here);
    assert_eq!(driver.config.requests_max, 8);
    driver.want_request();
    rig.ask_for(1, space);
    let request = driver.next_request();
    assert_eq!(request, super::request(1, space, 5));
    let ranges = vec![request.pages].into();
    let access = Access::Write;
    let map = Event::Map {
        space,
        access,
        ranges,
    };
    assert_eq!(driver.code(&map), Code::Ok);
    driver.respond(&request);
    let response = rig.answer_of();
    assert_eq!(response, PageResponse::to(&request, ResponseCode::Success));
    let domain = rig.table.find(rig.name()).unwrap();
    let attribute = domain.attributes().bitmap().attribute(request.pages.start);
    assert_eq!(attribute, Attribute::ReadWrite);
}

#[test]
fn request_waits_for_a_descriptor_and_goes_as_soon_as_there_is_one() {
    let rig = Rig::new();
    let (mut driver, space) = rig.ready_driver();
    rig.ask_for(1, space);
    rig.ask_for(2, space);
    driver.want_request();
    assert_eq!(driver.next_request().id.0, 1);
    driver.want_request();
    assert_eq!(driver.next_request().id.0, 2);
}

#[test]
fn engine_that_assists_puts_its_request_into_the_ring_itself() {
    let rig = Rig::new();
    let (mut driver, space) = rig.ready_driver();
    let assist = rig.server.assist();
    driver.want_request();
    rig.engine.submit(request(1, space, 5)).unwrap();
    // The thread may hold the lock, and then does the work.
    if !assist.assist(0) {
        rig.engine.kick();
    }
    assert_eq!(driver.next_request().id.0, 1);
    rig.engine.submit(request(2, space, 5)).unwrap();
    assert!(!assist.assist(0), "there is no descriptor for it");
    eventually("an engine that is none", || assist.assist(7));
}

#[test]
fn message_that_is_malformed_is_invalid_and_the_next_one_is_handled() {
    let rig = Rig::new();
    let mut driver = rig.driver();
    let mut bad = |bytes: &[u8]| driver.send(bytes).unwrap().status;
    assert_eq!(bad(&[]).code, Code::Invalid);
    assert_eq!(bad(&[1; 20]).code, Code::Invalid);
    assert_eq!(bad(&[0xff; 32]).code, Code::Unsupported);
    let mut reserved = [0; 32];
    reserved[0] = Opcode::Begin as u8;
    reserved[12] = 1;
    let status = bad(&reserved);
    assert_eq!((status.code, status.detail), (Code::Invalid, 12));
    assert_eq!(driver.code(&Event::Begin), Code::Ok);
    let (figures, queues) = rig.server.figures();
    assert_eq!((figures.events, figures.invalid_events), (5, 4));
    assert_eq!(queues.dropped_events, 0);
}

#[test]
fn chain_without_room_or_out_of_order_is_dropped_and_the_device_lives() {
    let rig = Rig::new();
    let mut driver = rig.driver();
    let mut bytes = Vec::new();
    Event::Begin.encode(&mut bytes);
    driver.put(MESSAGE, &bytes);
    let (message, reply) = (BUS + MESSAGE, BUS + REPLY);
    let chains: [&[(u64, u32, u16)]; 5] = [
        &[(message, 32, 0)],
        &[(message, 32, 0), (reply, 15, WRITE)],
        &[(reply, 16, WRITE), (message, 32, 0)],
        &[(message, 32, 0), (BUS + BYTES - 8, 16, WRITE)],
        &[(0, 32, 0), (reply, 16, WRITE)],
    ];
    for parts in chains {
        driver.give(EVENTS, 0, parts);
        assert_eq!(driver.used(EVENTS), 0, "{parts:?}");
    }
    assert_eq!(rig.server.figures().1.dropped_events, 5);
    assert_eq!(rig.server.phase(), Phase::Nobody);
    assert_eq!(driver.code(&Event::Begin), Code::Ok);
    // Written across two parts.
    let parts = [(message, 32, 0), (reply, 9, WRITE), (reply + 9, 7, WRITE)];
    driver.give(EVENTS, 0, &parts);
    assert_eq!(driver.used(EVENTS), 16);
}

#[test]
fn message_longer_than_any_can_be_is_invalid_and_not_read() {
    let rig = Rig::new();
    let mut driver = rig.driver();
    let parts = [(BUS, 60_000, 0), (BUS, 60_000, 0), (BUS + REPLY, 80, WRITE)];
    driver.give(EVENTS, 0, &parts);
    let len = driver.used(EVENTS);
    let reply = Reply::decode(&driver.get(REPLY, len)).unwrap();
    assert_eq!(reply.status.code, Code::Invalid);
}

#[test]
fn mask_without_room_for_it_is_refused_and_changes_nothing() {
    let rig = Rig::new();
    let (mut driver, space) = rig.ready_driver();
    let mut bytes = Vec::new();
    let pages = Some(range(0, 3));
    Event::Standing { space, pages }.encode(&mut bytes);
    driver.put(MESSAGE, &bytes);
    let parts = [(BUS + MESSAGE, 48, 0), (BUS + REPLY, 16, WRITE)];
    driver.give(EVENTS, 0, &parts);
    assert_eq!(driver.used(EVENTS) as usize, STATUS_BYTES);
    let reply = Reply::decode(&driver.get(REPLY, 16)).unwrap();
    assert_eq!(reply.status.code, Code::Invalid);
    let reply = driver.ask(&Event::Standing { space, pages }).unwrap();
    assert!(reply.mask.unwrap().is_empty());
}

#[test]
fn buffer_too_small_for_a_request_is_given_back_and_the_next_is_used() {
    let rig = Rig::new();
    let (mut driver, space) = rig.ready_driver();
    driver.give(FAULTS, 3, &[(BUS + REQUESTS, 63, WRITE)]);
    driver.want_request();
    rig.ask_for(1, space);
    assert_eq!(driver.used(FAULTS), 0);
    assert_eq!(driver.next_request().id.0, 1);
    assert_eq!(rig.server.figures().1.useless_chains, 1);
}

#[test]
fn request_of_a_driver_that_died_is_sent_to_the_next_one() {
    let rig = Rig::new();
    let (mut driver, space) = rig.ready_driver();
    driver.want_request();
    rig.ask_for(1, space);
    assert_eq!(driver.next_request().id.0, 1);
    drop(driver);
    eventually("the hang-up", || rig.server.phase() == Phase::Nobody);
    assert_eq!(rig.engine.host(), HostPresence::Away);
    rig.ask_for(2, space);
    let (mut driver, again) = rig.ready_driver();
    assert_eq!(again, space);
    for id in 1..3 {
        driver.want_request();
        let request = driver.next_request();
        assert_eq!(request.id.0, id);
        driver.respond(&request);
        assert_eq!(rig.answer_of().id.0, id);
    }
    assert_eq!(rig.server.outstanding(), 0);
}

#[test]
fn second_driver_is_turned_away_as_long_as_the_first_is_there() {
    let rig = Rig::new();
    let mut first = rig.driver();
    let second = rig.connect();
    eventually("the second to be hung up on", || {
        pagetide_sys::socket::has_hung_up(&second)
    });
    assert_eq!(rig.server.figures().1.drivers_turned_away, 1);
    assert_eq!(first.code(&Event::Begin), Code::Ok);
    drop(first);
    assert_eq!(rig.driver().code(&Event::Begin), Code::Ok);
}

#[test]
fn driver_whose_ring_is_broken_is_told_and_hung_up_on() {
    let rig = Rig::new();
    let mut driver = rig.driver();
    // An index further ahead than the queue is long.
    for _ in 0..20 {
        driver.rings[EVENTS].publish_raw(0).unwrap();
    }
    driver.show(EVENTS);
    eventually("the error", || is_rung(&driver.errors));
    eventually("the end", || driver.frontend.get_features().is_err());
    assert_eq!(rig.server.figures().1.drivers_hung_up_on, 1);
    assert_eq!(rig.driver().code(&Event::Begin), Code::Ok);
}

#[test]
fn memory_that_could_be_shrunk_is_refused() {
    let rig = Rig::new();
    assert!(Driver::new(rig.connect(), Seal::No).is_err());
    assert_eq!(rig.driver().code(&Event::Begin), Code::Ok);
}

fn access(address: u64) -> LogRecord {
    LogRecord {
        time_ns: 1,
        device: DeviceId(2),
        space: DomainId(3),
        address,
        len_bytes: 512,
        access: Access::Read,
        service: Service::Block,
    }
}

#[test]
fn accesses_are_logged_once_there_are_buffers_and_losses_are_told_first() {
    let rig = Rig::new();
    let log = rig.server.access_log();
    let mut pen = log.pen(0).unwrap();
    let (mut driver, _) = rig.ready_driver();
    assert!(!log.is_on(), "nobody has asked for records");
    // Room for one; for none; for two.
    driver.give(LOG, 0, &[(BUS + RECORDS, 40, WRITE)]);
    eventually("the log to be on", || log.is_on());
    driver.give(LOG, 1, &[(BUS + RECORDS, 31, WRITE)]);
    driver.give(LOG, 2, &[(BUS + RECORDS + 64, 64, WRITE)]);
    assert_eq!(pen.record(&access(1)), Logged::Kept);
    assert_eq!(driver.used(LOG), 32);
    assert_eq!(pen.record(&access(2)), Logged::Kept);
    assert_eq!(driver.used(LOG), 0);
    assert_eq!(driver.used(LOG), 32);
    let told = |driver: &Driver, at| LogEntry::decode(&driver.get(at, 32)).unwrap();
    assert_eq!(told(&driver, RECORDS), LogEntry::Access(access(1)));
    assert_eq!(told(&driver, RECORDS + 64), LogEntry::Access(access(2)));
    // No buffer is left.
    assert_eq!(pen.record(&access(3)), Logged::Kept);
    eventually("the loss", || log.lost() == 1);
    driver.give(LOG, 3, &[(BUS + RECORDS, 64, WRITE)]);
    assert_eq!(driver.used(LOG), 32);
    let loss = told(&driver, RECORDS);
    assert!(
        matches!(loss, LogEntry::Lost { records: 1, .. }),
        "{loss:?}"
    );
    drop(driver);
    eventually("the log to be off", || !log.is_on());
}

#[test]
fn driver_that_gives_no_buffer_for_long_is_not_logged_for_until_it_gives_one() {
    let rig = Rig::new();
    let log = rig.server.access_log();
    let mut pen = log.pen(0).unwrap();
    let (mut driver, _) = rig.ready_driver();
    driver.give(LOG, 0, &[(BUS + RECORDS, 32, WRITE)]);
    eventually("the log to be on", || log.is_on());
    assert_eq!(pen.record(&access(1)), Logged::Kept);
    assert_eq!(driver.used(LOG), 32);
    eventually("the log to be off", || !log.is_on());
    driver.give(LOG, 1, &[(BUS + RECORDS, 32, WRITE)]);
    eventually("the log to be on again", || log.is_on());
}

#[test]
fn bounce_buffers_are_given_to_the_engine_and_told_as_the_driver_counts_them() {
    let rig = Rig::new();
    let (mut driver, space) = rig.ready_driver();
    let bounce = |address, slots| Event::Bounce { address, slots };
    for (address, slots) in [
        (BUS + BOUNCE, 33),
        (0, 1),
        (BUS + BOUNCE + 1, 1),
        (u64::MAX, 2),
    ] {
        assert_eq!(driver.code(&bounce(address, slots)), Code::Invalid);
    }
    assert!(rig.engine.bounce().is_none());
    assert_eq!(driver.code(&bounce(BUS + BOUNCE, 8)), Code::Ok);
    assert_eq!(rig.engine.bounce().unwrap().slots(), 0..8);
    assert_eq!(driver.code(&bounce(BUS + BOUNCE + PAGE_BYTES, 4)), Code::Ok);
    let area = rig.engine.bounce().unwrap();
    assert_eq!(area.slots(), 8..12, "other numbers");
    area.bytes(9, 1).unwrap().copy_from(&[7_u8; 16]);
    assert_eq!(driver.get(BOUNCE + 2 * PAGE_BYTES, 2), [7, 7]);
    let overwrite = |id, slot| PageRequest {
        kind: RequestKind::Overwrite { slot },
        ..request(id, space, 5)
    };
    rig.engine.submit(overwrite(1, 2)).unwrap();
    rig.engine.submit(overwrite(2, 9)).unwrap();
    rig.engine.kick();
    driver.want_request();
    assert_eq!(driver.next_request(), overwrite(2, 1));
    let stale = rig.answer_of();
    assert_eq!((stale.id.0, stale.installed), (1, 0));
    drop(driver);
    eventually("the slots to be taken back", || {
        rig.engine.bounce().is_none()
    });
}

#[test]
fn request_without_content_is_one_with_content_for_a_driver_that_does_not_know_it() {
    for (features, sent) in [
        (0, [RequestKind::Demand, RequestKind::Prefault]),
        (
            feature::BLANK,
            [RequestKind::Blank, RequestKind::BlankAhead],
        ),
    ] {
        let rig = Rig::new();
        let driver = Driver::agreeing(rig.connect(), Seal::Yes, features).unwrap();
        let (mut driver, space) = rig.ready(driver);
        for (id, kind) in [(1, RequestKind::Blank), (2, RequestKind::BlankAhead)] {
            let blank = PageRequest {
                kind,
                sent_ns: 77,
                ..request(id, space, 5)
            };
            rig.engine.submit(blank).unwrap();
        }
        rig.engine.kick();
        for kind in sent {
            driver.want_request();
            let came = driver.next_request();
            assert_eq!((came.kind, came.sent_ns), (kind, 77));
        }
    }
}

#[test]
fn part_of_the_configuration_is_read_by_its_offset() {
    let rig = Rig::new();
    let mut driver = rig.driver();
    let flags = vhost::vhost_user::message::VhostUserConfigFlags::empty();
    let (_, part) = driver.frontend.get_config(16, 4, flags, &[0; 4]).unwrap();
    assert_eq!(part, rig.server.limits().ranges_max.to_le_bytes());
}

#[test]
fn function_that_stops_leaves_its_socket_to_the_next() {
    let rig = Rig::new();
    let driver = rig.driver();
    let path = rig.directory.path().join("vpri");
    drop(rig.server);
    assert!(!path.exists());
    drop(driver);
}
