// SPDX-License-Identifier: Apache-2.0
//! Reads into absent pages that are overwritten instead of brought back: what the guest sees, byte by
//! byte, whoever is quicker.

mod support;

use pagetide_addr::{
    Access, FilePage, FileRange, PAGE_BYTES, PageRequest, PageResponse, RequestKind, ResponseCode,
};
use pagetide_dpu::{
    BlkConfig, DeviceReport, DirectIo, Dpu, DpuConfig, ImageUse, OnFault, SocketAccess, Writes,
};
use pagetide_random::SplitMix64;
use pagetide_vpri::{
    BounceArea, DmaDomain, DomainTable, Doorbell, FaultSource, HostEnd, HostPresence, LookUp,
};
use std::{
    collections::HashMap,
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
};
use support::*;
use vhost::VhostBackend;

const PAGE: usize = 4096;
const IMAGE_BYTES: u64 = 4 << 20;

/// A DPU, and a host that keeps content of absent pages and answers when the test says so.
struct Setting {
    /// There until the end.
    dpu: Option<Dpu>,
    domains: Arc<DomainTable>,
    ends: Vec<HostEnd>,
    stored: HashMap<u64, Vec<u8>>,
    guest: Guest,
    dir: tempfile::TempDir,
    /// Pages brought back.
    filled: u64,
    /// Requests taken and not answered.
    taken: Vec<PageRequest>,
}

fn image_byte(at: u64) -> u8 {
    let sector = at / 512;
    u8::try_from((at ^ sector.wrapping_mul(37)) % 251).unwrap()
}

fn image(from: u64, len: usize) -> Vec<u8> {
    (from..).take(len).map(image_byte).collect()
}

fn old_byte(at: u64) -> u8 {
    u8::try_from(at % 241).unwrap() | 1
}

impl Setting {
    fn new(bounce_buffers: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let domains = Arc::new(DomainTable::new(1));
        let bell = Arc::new(Doorbell::new().unwrap());
        let mut config = DpuConfig::new(dir.path().to_owned());
        config.bounce_buffers = bounce_buffers;
        let (dpu, ends) = Dpu::start(&config, domains.clone(), &bell).unwrap();
        let path = dir.path().join("image");
        let mut file = File::create(&path).unwrap();
        let all = image(0, usize::try_from(IMAGE_BYTES).unwrap());
        file.write_all(&all).unwrap();
        let this = Self {
            dpu: Some(dpu),
            domains,
            ends,
            stored: HashMap::new(),
            guest: Guest::new(),
            dir,
            filled: 0,
            taken: Vec::new(),
        };
        this.dpu().add_blk(this.disk(&path)).unwrap();
        this
    }

    fn dpu(&self) -> &Dpu {
        self.dpu.as_ref().unwrap()
    }

    fn disk(&self, image: &Path) -> BlkConfig {
        BlkConfig {
            socket: self.socket(),
            image: image.to_owned(),
            queue_count: 1,
            writes: Writes::Taken,
            look_up: LookUp::On,
            serial: "tide-1".into(),
            direct_io: DirectIo::Auto,
            on_fault: OnFault::OutOfOrder,
            ram: pagetide_dpu::RamPolicy::default(),
            image_use: ImageUse::default(),
            access: SocketAccess::default(),
        }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("disk.sock")
    }

    fn connect(&mut self) -> Connection {
        let socket = self.socket();
        Connection::open(&socket, &mut self.guest, 1, F_INDIRECT)
    }

    fn domain(&self) -> Arc<DmaDomain> {
        let key = self.guest.file.key().unwrap();
        self.domains.find(key).unwrap()
    }

    fn report(&self) -> DeviceReport {
        self.dpu().devices().remove(0)
    }

    /// Evicts the pages of `bytes` at `at`, which hold [`old_byte`]s.
    fn evict(&mut self, at: u64, bytes: u64) {
        take_away(&self.domain(), at, bytes);
        for page in FileRange::covering(at, bytes).unwrap().iter() {
            let offset = page.byte_offset();
            let content: Vec<u8> = (offset..).take(PAGE).map(old_byte).collect();
            self.stored.insert(page.0, content);
            self.guest.file.punch(offset, PAGE_BYTES).unwrap();
        }
    }

    /// What a vCPU would see of `len` bytes at `at`.
    fn seen(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = self.guest.get(at, len);
        let range = at..at + len as u64;
        for (page, content) in &self.stored {
            let stored = (page * PAGE_BYTES..).zip(content);
            for (at, byte) in stored.filter(|(at, _)| range.contains(at)) {
                bytes[usize::try_from(at - range.start).unwrap()] = *byte;
            }
        }
        bytes
    }

    /// Makes a page present with what is stored of it, as a vCPU's fault does.
    fn bring(&mut self, page: FilePage) {
        if let Some(content) = self.stored.remove(&page.0) {
            self.guest.put(page.byte_offset(), &content);
            self.filled += 1;
        }
        let attributes = self.domain();
        let attributes = attributes.attributes();
        attributes.grant(page.single(), Access::Write);
    }

    fn next_request(&mut self) -> PageRequest {
        let mut found = None;
        eventually("a page request", || {
            found = self.ends[0].next();
            found.is_some()
        });
        let found = found.unwrap();
        self.taken.push(found);
        found
    }

    fn respond(&mut self, request: &PageRequest, code: ResponseCode, installed: u64) {
        self.taken.retain(|taken| taken.id != request.id);
        let mut response = PageResponse::to(request, code);
        response.installed = installed;
        self.ends[0].respond(response);
    }

    /// Serves a request as a host does.
    fn serve(&mut self, request: &PageRequest) {
        let mut installed = 0;
        if let RequestKind::Overwrite { slot } = request.kind {
            let mut content = Vec::new();
            let count = request.pages.len();
            let known = self.ends[0].read_bounced(slot, count, &mut content);
            for ((bit, page), bytes) in (0..).zip(request.pages.iter()).zip(content.chunks(PAGE)) {
                if known && self.stored.remove(&page.0).is_some() {
                    self.guest.put(page.byte_offset(), bytes);
                    installed |= 1 << bit;
                }
            }
        }
        for page in request.pages.iter() {
            // An overwrite brings nothing back.
            if !matches!(request.kind, RequestKind::Overwrite { .. })
                || !self.stored.contains_key(&page.0)
            {
                self.bring(page);
            }
        }
        self.respond(request, ResponseCode::Success, installed);
    }

    fn serve_next(&mut self) -> PageRequest {
        let request = self.next_request();
        self.serve(&request);
        request
    }

    /// Serves whatever comes until the queue has a used entry.
    fn finish(&mut self, queue: &mut TestQueue) -> (u16, u32) {
        let mut used = None;
        eventually("a used entry", || {
            while let Some(request) = self.ends[0].next() {
                self.serve(&request);
            }
            used = queue.poll_used(&self.guest);
            used.is_some()
        });
        used.unwrap()
    }
}

/// Overwrites that are out are answered, for a DPU does not end before.
impl Drop for Setting {
    fn drop(&mut self) {
        let dpu = self.dpu.take();
        let ending = std::thread::spawn(move || drop(dpu));
        while !ending.is_finished() {
            while let Some(request) = self.ends[0].next() {
                self.respond(&request, ResponseCode::Success, 0);
            }
            for request in self.taken.drain(..) {
                let response = PageResponse::to(&request, ResponseCode::Success);
                self.ends[0].respond(response);
            }
            std::thread::yield_now();
        }
        if ending.join().is_err() {
            eprintln!("the DPU ended by a panic");
        }
    }
}

fn is_overwrite(request: &PageRequest) -> bool {
    matches!(request.kind, RequestKind::Overwrite { .. })
}

fn pages(at: u64, count: u64) -> FileRange {
    let first = at / PAGE_BYTES;
    FileRange::new(FilePage(first), FilePage(first + count))
}

#[test]
fn read_that_covers_absent_pages_brings_none_of_them_back() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let read = BlkRequest::new(&mut set.guest, T_IN, 40, 4 * 4096);
    set.evict(read.data, 4 * PAGE_BYTES);
    queue.submit(&set.guest, &read.parts(WRITE));
    let request = set.next_request();
    assert!(is_overwrite(&request), "{request:?}");
    assert_eq!(request.pages, pages(read.data, 4));
    assert_eq!(request.access, Access::Write);
    // Until the host has installed them the pages are as they were, and nobody has a hold of any.
    assert!(!set.guest.file.is_data(read.data).unwrap());
    let old: Vec<u8> = (read.data..).take(4 * PAGE).map(old_byte).collect();
    assert_eq!(set.seen(read.data, 4 * PAGE), old);
    assert!(!set.domain().attributes().is_any_leased());
    let report = set.report();
    assert_eq!((report.inflight_requests, report.parked_chains), (1, 0));
    assert_eq!(queue.poll_used(&set.guest), None);
    set.serve(&request);
    let (_, len) = set.finish(queue);
    assert_eq!((read.status(&set.guest), len), (0, 4 * 4096 + 1));
    assert_eq!(set.seen(read.data, 4 * PAGE), image(40 * 512, 4 * PAGE));
    let report = set.report();
    assert_eq!((report.overwritten_pages, report.iopfs), (4, 0));
    assert_eq!((set.filled, set.stored.len()), (0, 0));
    assert_eq!(report.read_bytes, 4 * PAGE_BYTES);
    eventually("leases returned", || {
        !set.domain().attributes().is_any_leased()
    });
}

#[test]
fn pages_covered_in_part_are_brought_first_and_keep_what_lies_around_the_buffer() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let read = BlkRequest::new(&mut set.guest, T_IN, 8, 5 * 4096);
    set.evict(read.data, 5 * PAGE_BYTES);
    // From the middle of the first page to the middle of the last.
    let (at, len) = (read.data + 1024, 4 * 4096);
    let parts = [
        (read.header, 16, 0),
        (at, len, WRITE),
        (read.status, 1, WRITE),
    ];
    queue.submit(&set.guest, &parts);
    let edges = [set.serve_next(), set.serve_next()];
    for edge in &edges {
        assert_eq!((edge.kind, edge.pages.len()), (RequestKind::Demand, 1));
    }
    let request = set.serve_next();
    assert!(is_overwrite(&request));
    assert_eq!(request.pages, pages(read.data + PAGE_BYTES, 3));
    set.finish(queue);
    let mut expected: Vec<u8> = (read.data..).take(5 * PAGE).map(old_byte).collect();
    expected[1024..1024 + 4 * PAGE].copy_from_slice(&image(8 * 512, 4 * PAGE));
    assert_eq!(set.seen(read.data, 5 * PAGE), expected);
    assert_eq!((set.filled, set.report().overwritten_pages), (2, 3));
}

#[test]
fn header_and_status_are_brought_first_and_the_data_is_not() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let read = BlkRequest::new(&mut set.guest, T_IN, 8, 2 * 4096);
    let header = set.guest.get(read.header, PAGE);
    for at in [read.header, read.data, read.data + PAGE_BYTES, read.status] {
        set.evict(at, 1);
    }
    set.stored.insert(read.header / PAGE_BYTES, header);
    queue.submit(&set.guest, &read.parts(WRITE));
    set.finish(queue);
    assert_eq!(set.seen(read.data, 2 * PAGE), image(8 * 512, 2 * PAGE));
    assert_eq!((set.filled, set.report().overwritten_pages), (2, 2));
    assert_eq!(read.status(&set.guest), 0);
}

#[test]
fn present_pages_between_absent_ones_are_read_into_directly() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let read = BlkRequest::new(&mut set.guest, T_IN, 16, 5 * 4096);
    for page in [0, 1, 3] {
        set.evict(read.data + page * PAGE_BYTES, PAGE_BYTES);
    }
    queue.submit(&set.guest, &read.parts(WRITE));
    let (one, other) = (set.next_request(), set.next_request());
    let direct = set.guest.get(read.data + 2 * PAGE_BYTES, PAGE);
    assert_eq!(direct, image(16 * 512 + 2 * PAGE_BYTES, PAGE));
    let mut lens = [one.pages.len(), other.pages.len()];
    lens.sort_unstable();
    assert_eq!(lens, [1, 2]);
    set.serve(&one);
    assert_eq!(queue.poll_used(&set.guest), None, "one is out still");
    set.serve(&other);
    set.finish(queue);
    assert_eq!(set.seen(read.data, 5 * PAGE), image(16 * 512, 5 * PAGE));
    assert_eq!((set.filled, set.report().overwritten_pages), (0, 3));
}

#[test]
fn page_that_a_vcpu_was_quicker_to_bring_back_is_written_by_the_device() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let read = BlkRequest::new(&mut set.guest, T_IN, 24, 3 * 4096);
    set.evict(read.data, 3 * PAGE_BYTES);
    queue.submit(&set.guest, &read.parts(WRITE));
    let request = set.next_request();
    let second = FilePage(read.data / PAGE_BYTES + 1);
    set.bring(second);
    assert_eq!(
        set.seen(second.byte_offset(), 1),
        [old_byte(second.byte_offset())]
    );
    set.serve(&request);
    set.finish(queue);
    assert_eq!(set.seen(read.data, 3 * PAGE), image(24 * 512, 3 * PAGE));
    let report = set.report();
    assert_eq!(
        (set.filled, report.overwritten_pages, report.iopfs),
        (1, 2, 0)
    );
}

#[test]
fn page_that_came_and_went_again_is_had_by_beginning_again() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let read = BlkRequest::new(&mut set.guest, T_IN, 24, 2 * 4096);
    set.evict(read.data, 2 * PAGE_BYTES);
    queue.submit(&set.guest, &read.parts(WRITE));
    let request = set.next_request();
    // Nothing was installed, and nothing granted.
    set.respond(&request, ResponseCode::Success, 0);
    let again = set.next_request();
    assert_eq!(again.kind, RequestKind::Demand);
    assert_eq!(again.pages, pages(read.data, 2));
    let report = set.report();
    assert_eq!((report.inflight_requests, report.parked_chains), (0, 1));
    set.serve(&again);
    set.finish(queue);
    assert_eq!(set.seen(read.data, 2 * PAGE), image(24 * 512, 2 * PAGE));
    assert_eq!((set.filled, set.report().overwritten_pages), (2, 0));
}

#[test]
fn overwrite_that_is_refused_fails_its_request_as_a_fault_does() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let read = BlkRequest::new(&mut set.guest, T_IN, 24, 2 * 4096);
    set.evict(read.data, 2 * PAGE_BYTES);
    queue.submit(&set.guest, &read.parts(WRITE));
    for kind in ["overwrite", "demand"] {
        let request = set.next_request();
        assert_eq!(is_overwrite(&request), kind == "overwrite");
        set.respond(&request, ResponseCode::ResponseFailure, 0);
    }
    set.finish(queue);
    assert_eq!(read.status(&set.guest), S_IOERR);
    let old: Vec<u8> = (read.data..).take(2 * PAGE).map(old_byte).collect();
    assert_eq!(set.seen(read.data, 2 * PAGE), old);
}

#[test]
fn transfer_that_ends_early_overwrites_what_was_read_whole_and_no_byte_behind_it() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let read = BlkRequest::new(&mut set.guest, T_IN, 0, 4 * 4096);
    set.evict(read.data, 4 * PAGE_BYTES);
    // The image ends in the middle of the third page.
    let path = set.dir.path().join("image");
    let image_file = File::options().write(true).open(path).unwrap();
    image_file.set_len(2 * PAGE_BYTES + 1024).unwrap();
    queue.submit(&set.guest, &read.parts(WRITE));
    let request = set.serve_next();
    assert_eq!(request.pages, pages(read.data, 2));
    let (_, len) = set.finish(queue);
    assert_eq!((read.status(&set.guest), len), (S_IOERR, 1));
    let mut expected: Vec<u8> = (read.data..).take(4 * PAGE).map(old_byte).collect();
    expected[..2 * PAGE].copy_from_slice(&image(0, 2 * PAGE));
    assert_eq!(set.seen(read.data, 4 * PAGE), expected);
    let report = set.report();
    assert_eq!((report.overwritten_pages, report.failed_requests), (2, 1));
    assert_eq!(set.filled, 0);
}

#[test]
fn transfer_that_fails_at_once_overwrites_nothing() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let read = BlkRequest::new(&mut set.guest, T_IN, 8, 2 * 4096);
    set.evict(read.data, 2 * PAGE_BYTES);
    let path = set.dir.path().join("image");
    File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(0)
        .unwrap();
    queue.submit(&set.guest, &read.parts(WRITE));
    queue.wait_used(&set.guest);
    assert_eq!(read.status(&set.guest), S_IOERR);
    let old: Vec<u8> = (read.data..).take(2 * PAGE).map(old_byte).collect();
    assert_eq!(set.seen(read.data, 2 * PAGE), old);
    assert!(set.ends[0].next().is_none());
}

#[test]
fn what_finds_no_slot_is_brought_back_as_ever() {
    let mut set = Setting::new(6);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let first = BlkRequest::new(&mut set.guest, T_IN, 0, 2 * 4096);
    let second = BlkRequest::new(&mut set.guest, T_IN, 64, 2 * 4096);
    set.evict(first.data, 2 * PAGE_BYTES);
    set.evict(second.data, 2 * PAGE_BYTES);
    queue.submit(&set.guest, &first.parts(WRITE));
    let out = set.next_request();
    assert!(is_overwrite(&out));
    // A device has no more than half of the slots: three.
    queue.submit(&set.guest, &second.parts(WRITE));
    let asked = set.serve_next();
    assert_eq!(asked.kind, RequestKind::Demand);
    set.finish(queue);
    assert_eq!(set.seen(second.data, 2 * PAGE), image(64 * 512, 2 * PAGE));
    set.serve(&out);
    set.finish(queue);
    set.evict(second.data, 2 * PAGE_BYTES);
    queue.submit(&set.guest, &second.parts(WRITE));
    assert!(is_overwrite(&set.serve_next()), "they are free again");
    set.finish(queue);
}

#[test]
fn writes_to_the_image_bring_their_pages_back() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let write = BlkRequest::new(&mut set.guest, T_OUT, 0, 2 * 4096);
    set.evict(write.data, 2 * PAGE_BYTES);
    queue.submit(&set.guest, &write.parts(0));
    assert_eq!(set.serve_next().kind, RequestKind::Demand);
    set.finish(queue);
    let on_disk = std::fs::read(set.dir.path().join("image")).unwrap();
    let old: Vec<u8> = (write.data..).take(2 * PAGE).map(old_byte).collect();
    assert_eq!(on_disk[..2 * PAGE], old);
}

#[test]
fn device_that_gets_another_area_completes_what_has_landed_in_the_old_one() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let first = BlkRequest::new(&mut set.guest, T_IN, 0, 4096);
    let second = BlkRequest::new(&mut set.guest, T_IN, 8, 4096);
    set.evict(first.data, PAGE_BYTES);
    set.evict(second.data, PAGE_BYTES);
    queue.submit(&set.guest, &first.parts(WRITE));
    let out = set.next_request();
    // The host is another now, and knows nothing of the old slots.
    let file = pagetide_sys::memory_file::GuestFile::new_memfd("area", 8 * PAGE_BYTES).unwrap();
    let mapping =
        pagetide_sys::mapping::SharedMapping::new(std::os::fd::AsFd::as_fd(&file), 8 * PAGE_BYTES);
    let area = BounceArea::over(Arc::new(mapping.unwrap()), 0, 64, 8).unwrap();
    set.ends[0].set_bounce(Some(Arc::new(area)));
    set.serve(&out);
    let again = set.serve_next();
    assert_eq!(again.kind, RequestKind::Demand);
    set.finish(queue);
    assert_eq!(set.seen(first.data, PAGE), image(0, PAGE));
    queue.submit(&set.guest, &second.parts(WRITE));
    let RequestKind::Overwrite { slot } = set.serve_next().kind else {
        panic!("it has slots");
    };
    assert!((64..72).contains(&slot));
    set.finish(queue);
    assert_eq!(set.seen(second.data, PAGE), image(8 * 512, PAGE));
}

#[test]
fn queue_is_not_stopped_before_the_overwrites_that_are_out_are_answered() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let read = BlkRequest::new(&mut set.guest, T_IN, 0, 4096);
    set.evict(read.data, PAGE_BYTES);
    connection.queues[0].submit(&set.guest, &read.parts(WRITE));
    let out = set.next_request();
    let socket = set.socket();
    drop(connection.hang_up());
    // The front end has gone; until the host has answered, the device takes no other.
    eventually("the device sees that", || {
        set.report().state != pagetide_dpu::DeviceState::Connected
            || set.report().inflight_requests == 1
    });
    assert_eq!(set.report().inflight_requests, 1);
    set.serve(&out);
    eventually("its I/O is over", || set.report().inflight_requests == 0);
    assert_eq!(set.seen(read.data, PAGE), image(0, PAGE));
    let mut other = Guest::new();
    Connection::open(&socket, &mut other, 1, 0);
}

/// A read of one absent page whose overwrite is out, of a host that has gone since.
fn bounced_in_vain(set: &mut Setting, connection: &mut Connection) -> (BlkRequest, PageRequest) {
    let read = BlkRequest::new(&mut set.guest, T_IN, 0, 4096);
    set.evict(read.data, PAGE_BYTES);
    connection.queues[0].submit(&set.guest, &read.parts(WRITE));
    let out = set.next_request();
    assert!(is_overwrite(&out));
    set.ends[0].set_host(HostPresence::Away);
    (read, out)
}

#[test]
fn dpu_whose_host_is_away_ends_though_overwrites_are_out() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    bounced_in_vain(&mut set, &mut connection);
    let dpu = set.dpu.take();
    in_time("the DPU ends", move || drop(dpu));
    assert_eq!(connection.taken(0).len(), 1, "it is to be done again");
}

#[test]
fn read_that_landed_is_done_again_if_its_queue_is_stopped_while_the_host_is_away() {
    let mut set = Setting::new(64);
    let mut connection = set.connect();
    let (read, out) = bounced_in_vain(&mut set, &mut connection);
    connection = in_time("the queue stops", move || {
        connection.frontend.get_vring_base(0).unwrap();
        connection
    });
    assert_eq!(connection.taken(0).len(), 1);
    assert_eq!(set.report().inflight_requests, 0);
    connection.start_queues();
    set.ends[0].set_host(HostPresence::Here);
    let again = set.next_request();
    // What the host that comes next says of a bounce area that is no more.
    set.respond(&out, ResponseCode::Success, 0);
    set.serve(&again);
    set.finish(&mut connection.queues[0]);
    assert_eq!(read.status(&set.guest), 0);
    assert_eq!(set.seen(read.data, PAGE), image(0, PAGE));
    assert_eq!(connection.taken(0), [0; 0]);
    let report = set.report();
    assert_eq!((report.requests, report.inflight_requests), (1, 0));
}

#[test]
fn read_that_landed_and_that_nobody_tracks_fails_if_its_queue_is_stopped_while_the_host_is_away() {
    let mut set = Setting::new(64);
    let socket = set.socket();
    let mut connection = Connection::open_untracked(&socket, &mut set.guest, 1, F_INDIRECT);
    let (read, out) = bounced_in_vain(&mut set, &mut connection);
    connection = in_time("the queue stops", move || {
        connection.frontend.get_vring_base(0).unwrap();
        connection
    });
    connection.queues[0].wait_used(&set.guest);
    assert_eq!(read.status(&set.guest), S_IOERR);
    let old: Vec<u8> = (read.data..).take(PAGE).map(old_byte).collect();
    assert_eq!(set.seen(read.data, PAGE), old);
    set.respond(&out, ResponseCode::Success, 0);
    eventually("leases returned", || {
        !set.domain().attributes().is_any_leased()
    });
}

/// Cuts the sectors from `at` on into buffers at random borders.
fn buffers(random: &mut SplitMix64, at: u64, sectors: u64) -> Vec<(u64, u32, u16)> {
    let (mut from, end) = (at, at + sectors * 512);
    let mut parts = Vec::new();
    while from < end {
        let len = ((1 + random.below(20)) * 512).min(end - from);
        let len = u32::try_from(len).unwrap();
        parts.push((from, len, WRITE));
        from += u64::from(len);
    }
    parts
}

#[test]
fn random_reads_into_random_pages_leave_every_byte_as_it_must_be() {
    let mut set = Setting::new(48);
    let mut connection = set.connect();
    let queue = &mut connection.queues[0];
    let table = set.guest.room(PAGE_BYTES);
    let area_pages = 24;
    let area = set.guest.room(area_pages * PAGE_BYTES);
    let read = BlkRequest::new(&mut set.guest, T_IN, 0, 0);
    for seed in 1..=300_u64 {
        let mut random = SplitMix64::new(seed);
        for page in 0..area_pages {
            match random.below(3) {
                0 => set.bring(FilePage(area / PAGE_BYTES + page)),
                _ => set.evict(area + page * PAGE_BYTES, PAGE_BYTES),
            }
        }
        let mut expected = set.seen(area, usize::try_from(area_pages).unwrap() * PAGE);
        let first = random.below(area_pages * 4);
        let sectors = 1 + random.below(area_pages * 8 - first);
        let sector = random.below(IMAGE_BYTES / 512 - sectors);
        let data = buffers(&mut random, area + first * 512, sectors);
        let (from, len) = (first * 512, sectors * 512);
        let (from, len) = (
            usize::try_from(from).unwrap(),
            usize::try_from(len).unwrap(),
        );
        expected[from..from + len].copy_from_slice(&image(sector * 512, len));
        read.aim(&set.guest, T_IN, sector);
        let parts = [
            &[(read.header, 16, 0)],
            &data[..],
            &[(read.status, 1, WRITE)],
        ]
        .concat();
        queue.submit_indirect(&set.guest, table, &parts);
        let mut used = None;
        eventually("a used entry", || {
            while let Some(request) = set.ends[0].next() {
                if random.below(4) == 0 {
                    // A vCPU is quicker with one of them.
                    let at = request.pages.start.0 + random.below(request.pages.len());
                    set.bring(FilePage(at));
                }
                set.serve(&request);
            }
            used = queue.poll_used(&set.guest);
            used.is_some()
        });
        assert_eq!(read.status(&set.guest), 0, "seed {seed}");
        let seen = set.seen(area, expected.len());
        let wrong = seen.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(wrong, None, "seed {seed}: {data:?}");
    }
    let report = set.report();
    assert!(report.overwritten_pages > 500, "{report:?}");
    assert!(set.filled > 100);
    assert_eq!((report.inflight_requests, report.parked_chains), (0, 0));
}
