// SPDX-License-Identifier: Apache-2.0
//! A process that receives out of order is killed at any instant: its successor gives no buffer back
//! twice, loses none, and packets keep their order.

mod support;

use pagetide_addr::{FilePage, FilePageSet, PageResponse, ResponseCode};
use pagetide_dpu::{
    Dpu, DpuConfig, LinkConfig, NicConfig, OnReceiveFault, Prefault, RamPolicy, ReceiveConfig,
    SocketAccess, wait_for_dead_engines,
};
use pagetide_random::SplitMix64;
use pagetide_vpri::{DomainTable, Doorbell, HostEnd, LookUp};
use std::{
    collections::{HashMap, HashSet},
    io::Read,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};
use support::*;
use vhost::VhostBackend;

/// Where the process serves, if it is to.
const DIR: &str = "PAGETIDE_TEST_RECEIVER";
/// First page of the buffers, and their number.
const PAGES: &str = "PAGETIDE_TEST_PAGES";
const RX: usize = 0;
const PACKET_BYTES: u16 = 64;
const F_MRG_RXBUF: u64 = 1 << 15;

/// Is the process that is killed, if it was started as that.
#[test]
fn receiver_if_this_process_is_one() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    let pages = std::env::var(PAGES).unwrap();
    let (first, count) = pages.split_once('+').unwrap();
    receive(
        Path::new(&dir),
        FilePage(first.parse().unwrap()),
        count.parse().unwrap(),
    );
}

fn socket_in(dir: &Path) -> std::path::PathBuf {
    dir.join("nic.sock")
}

/// Receives without end into buffers whose pages go and come all the time.
fn receive(dir: &Path, first: FilePage, count: u64) {
    wait_for_dead_engines(dir, None, |_| {}).unwrap();
    let domains = Arc::new(DomainTable::new(1));
    let bell = Arc::new(Doorbell::new().unwrap());
    let config = DpuConfig::new(dir.to_owned());
    let (dpu, ends) = Dpu::start(&config, domains.clone(), &bell).unwrap();
    dpu.add_nic(&NicConfig {
        socket: socket_in(dir),
        pairs: 1,
        link: LinkConfig::Source {
            bytes: PACKET_BYTES,
        },
        receive: ReceiveConfig {
            on_fault: OnReceiveFault::OutOfOrder,
            prefault: Prefault::Off,
            ..ReceiveConfig::default()
        },
        look_up: LookUp::On,
        ram: RamPolicy::default(),
        access: SocketAccess::default(),
    })
    .unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let told = over.clone();
    let ear = std::thread::spawn(move || {
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        told.store(true, Ordering::SeqCst);
    });
    let mut random = SplitMix64::new(std::process::id().into());
    let mut waiting: Vec<(usize, pagetide_addr::PageRequest)> = Vec::new();
    while !over.load(Ordering::SeqCst) {
        for (index, end) in ends.iter().enumerate() {
            while let Some(request) = end.next() {
                waiting.push((index, request));
            }
        }
        if let Some(domain) = domains.all().first() {
            if random.below(3) == 0 {
                let page = FilePage(first.0 + random.below(count));
                let set = FilePageSet::of_range(page.section(), page.single());
                // Not while the device writes to it.
                let _busy = domain.attributes().unmap(page.section(), &set);
            }
            // In any order, and late.
            if waiting.len() > 20 || (!waiting.is_empty() && random.below(4) == 0) {
                let (index, request) = waiting.swap_remove(random.index(waiting.len()));
                domain.attributes().grant(request.pages, request.access);
                answer(&ends[index], &request);
            }
        }
        std::thread::yield_now();
    }
    // An orderly end waits for no page.
    for (index, request) in waiting {
        answer(&ends[index], &request);
    }
    dpu.shut_down();
    ear.join().unwrap();
}

fn answer(end: &HostEnd, request: &pagetide_addr::PageRequest) {
    end.respond(PageResponse::to(request, ResponseCode::Success));
}

/// The process, which is ended with the test.
struct Receiver(Child);

impl Receiver {
    fn start(dir: &Path, first_page: u64, count: u64) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "receiver_if_this_process_is_one", "--nocapture"])
            .env(DIR, dir)
            .env(PAGES, format!("{first_page}+{count}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// The driver: what it has posted, by head.
struct Driver {
    guest: Guest,
    posted: HashMap<u16, (u64, u64)>,
    posts: u64,
    /// The last packet of this receiver's life.
    last: Option<u64>,
    packets: u64,
    /// Packets that came into another buffer than the oldest.
    overtaken: u64,
    returned_empty: u64,
}

impl Driver {
    fn post(&mut self, queue: &mut TestQueue, at: u64) {
        let head = queue.submit(&self.guest, &[(at, 2048, WRITE)]);
        self.posts += 1;
        let before = self.posted.insert(head, (at, self.posts));
        assert!(before.is_none(), "head {head} is posted already");
    }

    /// Takes a buffer back, if one is there; its place.
    fn take(&mut self, queue: &mut TestQueue) -> Option<u64> {
        let (head, bytes) = queue.poll_used(&self.guest)?;
        let (at, post) = self.posted.remove(&head).expect("the driver has it");
        if bytes == 0 {
            self.returned_empty += 1;
            return Some(at);
        }
        assert_eq!(bytes, 12 + u32::from(PACKET_BYTES));
        let number = self.guest.get(at + 12 + 14, 8);
        let number = u64::from_le_bytes(number.try_into().unwrap());
        assert!(self.last.is_none_or(|last| number > last), "out of order");
        self.last = Some(number);
        self.packets += 1;
        self.overtaken += u64::from(self.posted.values().any(|(_, earlier)| *earlier < post));
        Some(at)
    }
}

#[test]
fn killed_receivers_leave_every_buffer_to_their_successors() {
    let dir = tempfile::tempdir().unwrap();
    let socket = socket_in(dir.path());
    let mut driver = Driver {
        guest: Guest::new(),
        posted: HashMap::new(),
        posts: 0,
        last: None,
        packets: 0,
        overtaken: 0,
        returned_empty: 0,
    };
    let rings = (0..2).map(|i| TestQueue::new(&mut driver.guest, i));
    let mut rings: Vec<TestQueue> = rings.collect();
    let count = u64::from(QUEUE_SIZE);
    let buffers: Vec<u64> = (0..count).map(|_| driver.guest.room(4096)).collect();
    let first_page = buffers[0] / 4096;
    for at in &buffers {
        driver.post(&mut rings[RX], *at);
    }
    let mut random = SplitMix64::new(1905);
    for life in 0..12 {
        let mut receiver = Receiver::start(dir.path(), first_page, count);
        driver.last = None;
        let mut connection = Connection::open_nic_with(&socket, &driver.guest, rings, F_MRG_RXBUF);
        let until = driver.packets + 50 + random.below(400);
        eventually("packets arrive", || {
            while let Some(at) = driver.take(&mut connection.queues[RX]) {
                driver.post(&mut connection.queues[RX], at);
            }
            driver.packets >= until
        });
        if life == 11 {
            end_in_order(&mut driver, connection, &mut receiver, &buffers);
            break;
        }
        receiver.0.kill().unwrap();
        receiver.0.wait().unwrap();
        (rings, _) = connection.hang_up();
        while let Some(at) = driver.take(&mut rings[RX]) {
            driver.post(&mut rings[RX], at);
        }
    }
    assert!(driver.overtaken > 100, "{} overtaken", driver.overtaken);
}

/// What is held goes back empty; then the driver has all that is not in the avail ring.
fn end_in_order(
    driver: &mut Driver,
    connection: Connection,
    receiver: &mut Receiver,
    buffers: &[u64],
) {
    let base = connection.frontend.get_vring_base(RX).unwrap();
    let (mut rings, _) = connection.hang_up();
    let ring = &mut rings[RX];
    let mut back: HashSet<u64> = HashSet::new();
    while let Some(at) = driver.take(ring) {
        assert!(back.insert(at), "twice");
    }
    assert_eq!(base, u32::from(ring.next_used), "all before it is returned");
    let in_ring = ring.next_avail.wrapping_sub(ring.next_used);
    assert_eq!(driver.posted.len(), usize::from(in_ring), "some are lost");
    for index in 0..in_ring {
        let slot = ring.next_used.wrapping_add(index) % QUEUE_SIZE;
        let head = driver.guest.get(ring.avail + 4 + 2 * u64::from(slot), 2);
        let head = u16::from_le_bytes(head.try_into().unwrap());
        let (at, _) = driver.posted.remove(&head).expect("it is the device's");
        assert!(back.insert(at), "twice");
    }
    assert_eq!(back.len(), buffers.len());
    // The end of its input ends it well.
    drop(receiver.0.stdin.take());
    assert!(receiver.0.wait().unwrap().success());
}
