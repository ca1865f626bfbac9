// SPDX-License-Identifier: Apache-2.0
//! A front end for tests: guest RAM in a memfd, rings written by hand, vhost's `Frontend` for the
//! messages; and a host that answers page requests as a test likes.
#![expect(dead_code, reason = "each test file uses a part of it")]

use pagetide_addr::{FilePageSet, PAGE_BYTES, PageRequest, PageResponse, ResponseCode};
use pagetide_dpu::{
    BlkConfig, DeviceReport, DirectIo, Dpu, DpuConfig, ImageUse, OnFault, ParkedDevice,
    SocketAccess, Writes,
};
use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
use pagetide_vpri::{DmaDomain, DomainTable, Doorbell, HostEnd, LookUp};
use std::{
    io::Write,
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::FileExt,
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};
use vhost::{
    VhostBackend, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend, VhostUserProtocolFeatures,
        message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight},
    },
};
use vmm_sys_util::eventfd::EventFd;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;
/// The least that counts as the RAM of a VM.
pub const RAM_BYTES: u64 = 16 << 20;
pub const GPA: u64 = 0x4000_0000;
const VA: u64 = 0x7000_0000_0000;
pub const QUEUE_SIZE: u16 = 64;
/// Longest any test waits for anything.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until `condition` holds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::yield_now();
    }
}

/// What `work` gives, which must not wait for ever.
pub fn in_time<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::spawn(work);
    eventually(what, || thread.is_finished());
    thread.join().unwrap()
}

/// The DPU under test with everything it needs.
pub struct Rig {
    pub dpu: Dpu,
    pub domains: Arc<DomainTable>,
    pub host: Host,
    known: Known,
    pub dir: tempfile::TempDir,
}

/// A disk with one queue that may be written.
pub fn disk_of(socket: PathBuf, image: PathBuf) -> BlkConfig {
    BlkConfig {
        socket,
        image,
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

/// Answers page requests: by default at once and in full.
pub struct Host {
    /// While set, requests are only collected.
    pub held: Arc<AtomicBool>,
    pub seen: Arc<AtomicU64>,
    /// The ends it answers at.
    pub ends: Vec<HostEnd>,
    verdict: Sender<(ResponseCode, usize)>,
    requests: Receiver<PageRequest>,
    stop: Arc<AtomicBool>,
    bell: Arc<Doorbell>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Rig {
    pub fn new(engines: usize) -> Self {
        Self::with_timeout(engines, Some(Duration::from_secs(3600)))
    }

    /// A rig whose requests wait so long for their pages.
    pub fn with_timeout(engines: usize, iopf_timeout: Option<Duration>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let domains = Arc::new(DomainTable::new(engines));
        let bell = Arc::new(Doorbell::new().unwrap());
        let mut config = DpuConfig::new(dir.path().to_owned());
        config.engine_count = engines;
        config.iopf_timeout = iopf_timeout;
        let (dpu, ends) = Dpu::start(&config, domains.clone(), &bell).unwrap();
        let known = Known::default();
        let host = Host::new(ends, known.clone(), bell);
        Self {
            dpu,
            domains,
            host,
            known,
            dir,
        }
    }

    /// An image of `bytes` in which each sector begins with its number.
    pub fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.dir.path().join(name);
        let mut file = std::io::BufWriter::new(std::fs::File::create(&path).unwrap());
        for sector in 0..bytes / 512 {
            let mut content = [0xa5; 512];
            content[..8].copy_from_slice(&sector.to_le_bytes());
            file.write_all(&content).unwrap();
        }
        file.into_inner().unwrap().sync_all().unwrap();
        path
    }

    pub fn add(&self, name: &str, queues: u16, writes: Writes) -> PathBuf {
        self.add_with(name, queues, writes, OnFault::OutOfOrder)
    }

    /// A device with an image of `bytes`.
    pub fn add_of(&self, name: &str, bytes: u64) -> PathBuf {
        let image = self.image(name, bytes);
        self.add_image(name, image, 1, Writes::Taken, OnFault::OutOfOrder)
    }

    pub fn add_with(&self, name: &str, queues: u16, writes: Writes, on_fault: OnFault) -> PathBuf {
        let image = self.image(name, 4 << 20);
        self.add_image(name, image, queues, writes, on_fault)
    }

    fn add_image(
        &self,
        name: &str,
        image: PathBuf,
        queues: u16,
        writes: Writes,
        on_fault: OnFault,
    ) -> PathBuf {
        let socket = self.dir.path().join(format!("{name}.sock"));
        let config = BlkConfig {
            queue_count: queues,
            writes,
            on_fault,
            ..disk_of(socket.clone(), image)
        };
        self.dpu.add_blk(config).unwrap();
        socket
    }

    /// The host grants nothing any more, whatever it answers.
    pub fn forget_domains(&self) {
        self.known.lock().unwrap().clear();
    }

    pub fn report(&self, socket: &Path) -> DeviceReport {
        self.dpu
            .devices()
            .into_iter()
            .find(|d| d.socket == socket)
            .unwrap()
    }
}

/// A test that fails while something waits for the host ends all the same.
impl Drop for Rig {
    fn drop(&mut self) {
        self.host.let_go();
    }
}

impl Host {
    fn new(ends: Vec<HostEnd>, known: Known, bell: Arc<Doorbell>) -> Self {
        let held = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(AtomicU64::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let (verdict, verdicts) = channel::<(ResponseCode, usize)>();
        let (tell, requests) = channel();
        let (h, s, st) = (held.clone(), seen.clone(), stop.clone());
        let kept = ends.clone();
        let thread = std::thread::spawn(move || {
            let mut waiting: Vec<(usize, PageRequest)> = Vec::new();
            while !st.load(Ordering::SeqCst) {
                for (index, end) in ends.iter().enumerate() {
                    while let Some(request) = end.next() {
                        s.fetch_add(1, Ordering::SeqCst);
                        tell.send(request).unwrap();
                        waiting.push((index, request));
                    }
                }
                let (code, count) = if h.load(Ordering::SeqCst) {
                    verdicts.try_recv().unwrap_or((ResponseCode::Success, 0))
                } else {
                    (ResponseCode::Success, waiting.len())
                };
                for (index, request) in waiting.drain(..count.min(waiting.len())) {
                    if code == ResponseCode::Success {
                        grant(&known, &request);
                    }
                    ends[index].respond(PageResponse::to(&request, code));
                }
                std::thread::yield_now();
            }
        });
        Self {
            held,
            seen,
            ends: kept,
            verdict,
            requests,
            stop,
            bell,
            thread: Some(thread),
        }
    }

    /// Answers the next `count` held requests with `code`.
    pub fn answer(&self, code: ResponseCode, count: usize) {
        self.verdict.send((code, count)).unwrap();
    }

    /// A request that has come already.
    pub fn request_at_hand(&self) -> Option<PageRequest> {
        self.requests.try_recv().ok()
    }

    pub fn next_request(&self) -> PageRequest {
        self.requests.recv_timeout(PATIENCE).unwrap()
    }

    pub fn hold(&self) {
        self.held.store(true, Ordering::SeqCst);
    }

    pub fn let_go(&self) {
        self.held.store(false, Ordering::SeqCst);
    }
}

/// Domains that a test's host may grant pages of: the table finds them by file only.
type Known = Arc<Mutex<Vec<Arc<DmaDomain>>>>;

fn grant(known: &Known, request: &PageRequest) {
    for domain in known.lock().unwrap().iter() {
        if domain.id() == request.domain {
            domain.attributes().grant(request.pages, request.access);
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.bell.ring_anyway();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// A guest: RAM, and a front end that shares it.
pub struct Guest {
    pub file: GuestFile,
    pub ram: SharedMapping,
    next_byte: u64,
}

impl Guest {
    pub fn new() -> Self {
        let file = GuestFile::new_memfd("guest", RAM_BYTES).unwrap();
        let ram = SharedMapping::new(file.as_fd(), RAM_BYTES).unwrap();
        Self {
            file,
            ram,
            next_byte: 0,
        }
    }

    /// Room for `bytes` that shares no page with other room; its offset in RAM.
    pub fn room(&mut self, bytes: u64) -> u64 {
        let at = self.next_byte;
        self.next_byte = (at + bytes).next_multiple_of(PAGE_BYTES);
        assert!(self.next_byte <= RAM_BYTES, "guest RAM is full");
        at
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.ram.copy_to(at, bytes).unwrap();
    }

    pub fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.copy_from(at, &mut bytes).unwrap();
        bytes
    }

    fn u16_at(&self, at: u64) -> u16 {
        let bytes = self.get(at, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    /// The domain of the guest's RAM, which must have been mapped by a device.
    pub fn domain(&self, rig: &Rig) -> Arc<DmaDomain> {
        let domain = rig.domains.find(self.file.key().unwrap()).unwrap();
        rig.known.lock().unwrap().push(domain.clone());
        domain
    }

    /// Makes the domain before any device does.
    pub fn early_domain(&self, rig: &Rig) -> Arc<DmaDomain> {
        let key = self.file.key().unwrap();
        let domain = rig.domains.open(key, RAM_BYTES).unwrap();
        rig.known.lock().unwrap().push(domain.clone());
        domain
    }
}

/// Takes the pages of `bytes` at `at` from devices.
pub fn take_away(domain: &DmaDomain, at: u64, bytes: u64) {
    let pages = pagetide_addr::FileRange::covering(at, bytes).unwrap();
    for (section, part) in pages.by_section() {
        let set = FilePageSet::of_range(section, part);
        eventually("no lease on pages to be taken", || {
            domain.attributes().unmap(section, &set)
        });
    }
}

/// A connected front end with its queues running.
pub struct Connection {
    pub frontend: Frontend,
    pub queues: Vec<TestQueue>,
    pub features: u64,
    pub inflight: Option<(VhostUserInflight, std::fs::File)>,
}

/// A queue as the guest's driver has it.
pub struct TestQueue {
    pub index: usize,
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
    pub next_avail: u16,
    pub next_used: u16,
    pub free: Vec<u16>,
    chains: Vec<Vec<u16>>,
    pub kick: EventFd,
    pub call: EventFd,
    pub error: EventFd,
}

pub const F_INDIRECT: u64 = 1 << 28;
pub const F_EVENT_IDX: u64 = 1 << 29;
const F_PROTOCOL: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << 32;

impl TestQueue {
    pub fn new(guest: &mut Guest, index: usize) -> Self {
        let size = u64::from(QUEUE_SIZE);
        Self {
            index,
            desc: guest.room(16 * size),
            avail: guest.room(6 + 2 * size),
            used: guest.room(6 + 8 * size),
            next_avail: 0,
            next_used: 0,
            free: (0..QUEUE_SIZE).rev().collect(),
            chains: Vec::new(),
            kick: EventFd::new(libc::EFD_NONBLOCK).unwrap(),
            call: EventFd::new(libc::EFD_NONBLOCK).unwrap(),
            error: EventFd::new(libc::EFD_NONBLOCK).unwrap(),
        }
    }

    pub fn descriptor(&self, guest: &Guest, table: u64, index: u16, fields: (u64, u32, u16, u16)) {
        let (addr, len, flags, next) = fields;
        let bytes = [
            &addr.to_le_bytes()[..],
            &len.to_le_bytes(),
            &flags.to_le_bytes(),
            &next.to_le_bytes(),
        ]
        .concat();
        let at = if table == 0 { self.desc } else { table };
        guest.put(at + 16 * u64::from(index), &bytes);
    }

    /// Makes a chain of `parts` (RAM offset, length, WRITE or 0) available; its head.
    pub fn submit(&mut self, guest: &Guest, parts: &[(u64, u32, u16)]) -> u16 {
        let heads: Vec<u16> = parts.iter().map(|_| self.free.pop().unwrap()).collect();
        for (i, (at, len, flags)) in parts.iter().enumerate() {
            let (more, next) = match heads.get(i + 1) {
                Some(next) => (NEXT, *next),
                None => (0, 0),
            };
            self.descriptor(
                guest,
                self.desc,
                heads[i],
                (GPA + at, *len, flags | more, next),
            );
        }
        self.publish(guest, heads[0]);
        let head = heads[0];
        self.chains.push(heads);
        head
    }

    /// As [`Self::submit`], through an indirect table at RAM offset `table`.
    pub fn submit_indirect(&mut self, guest: &Guest, table: u64, parts: &[(u64, u32, u16)]) -> u16 {
        let count = u16::try_from(parts.len()).unwrap();
        for (i, (at, len, flags)) in (0..count).zip(parts) {
            let more = if i + 1 < count { NEXT } else { 0 };
            self.descriptor(guest, table, i, (GPA + at, *len, flags | more, i + 1));
        }
        let head = self.free.pop().unwrap();
        self.descriptor(
            guest,
            self.desc,
            head,
            (GPA + table, 16 * u32::from(count), INDIRECT, 0),
        );
        self.publish(guest, head);
        self.chains.push(vec![head]);
        head
    }

    /// Puts `head` into the avail ring and kicks.
    pub fn publish(&mut self, guest: &Guest, head: u16) {
        let slot = u64::from(self.next_avail % QUEUE_SIZE);
        guest.put(self.avail + 4 + 2 * slot, &head.to_le_bytes());
        self.next_avail = self.next_avail.wrapping_add(1);
        std::sync::atomic::fence(Ordering::SeqCst);
        guest.put(self.avail + 2, &self.next_avail.to_le_bytes());
        std::sync::atomic::fence(Ordering::SeqCst);
        self.kick.write(1).unwrap();
    }

    /// The address in the descriptor `head`.
    pub fn address_of(&self, guest: &Guest, head: u16) -> u64 {
        let bytes = guest.get(self.desc + 16 * u64::from(head), 8);
        u64::from_le_bytes(bytes.try_into().unwrap())
    }

    /// True if there is a used entry.
    pub fn has_used(&self, guest: &Guest) -> bool {
        guest.u16_at(self.used + 2) != self.next_used
    }

    /// The next used entry, if there is one: head and length.
    pub fn poll_used(&mut self, guest: &Guest) -> Option<(u16, u32)> {
        if guest.u16_at(self.used + 2) == self.next_used {
            return None;
        }
        std::sync::atomic::fence(Ordering::SeqCst);
        let slot = u64::from(self.next_used % QUEUE_SIZE);
        let entry = guest.get(self.used + 4 + 8 * slot, 8);
        self.next_used = self.next_used.wrapping_add(1);
        // Ask to be called for the next.
        guest.put(
            self.avail + 4 + 2 * u64::from(QUEUE_SIZE),
            &self.next_used.to_le_bytes(),
        );
        let head = u16::from_le_bytes([entry[0], entry[1]]);
        if let Some(at) = self.chains.iter().position(|c| c[0] == head) {
            self.free.extend(self.chains.swap_remove(at));
        }
        let len = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        Some((head, len))
    }

    pub fn wait_used(&mut self, guest: &Guest) -> (u16, u32) {
        let mut found = None;
        eventually("a used entry", || {
            found = self.poll_used(guest);
            found.is_some()
        });
        found.unwrap()
    }
}

/// Connects and learns the features offered. As long as the device has not noticed that an earlier
/// front end has left, it hangs up on the next one: then once more, as real front ends do.
fn greeted(socket: &Path) -> (Frontend, u64) {
    let mut greeted = None;
    eventually("the device takes a front end", || {
        let Ok(frontend) = Frontend::connect(socket, 64) else {
            return false;
        };
        let offered = frontend.set_owner().and_then(|()| frontend.get_features());
        greeted = offered.ok().map(|offered| (frontend, offered));
        greeted.is_some()
    });
    greeted.unwrap()
}

impl Connection {
    /// Connects, shares the RAM, and starts `queues` queues.
    pub fn open(socket: &Path, guest: &mut Guest, queues: usize, features: u64) -> Self {
        let rings = (0..queues).map(|i| TestQueue::new(guest, i)).collect();
        Self::open_with(socket, guest, rings, features, None)
    }

    /// Connects with rings that exist, and perhaps an in-flight region from before.
    pub fn open_with(
        socket: &Path,
        guest: &Guest,
        queues: Vec<TestQueue>,
        features: u64,
        inflight: Option<(VhostUserInflight, std::fs::File)>,
    ) -> Self {
        let mut this = Self::greet(socket, guest, queues, features);
        let inflight = inflight.unwrap_or_else(|| {
            let count = u16::try_from(this.queues.len()).unwrap();
            let wanted = VhostUserInflight::new(0, 0, count, QUEUE_SIZE);
            this.frontend.get_inflight_fd(&wanted).unwrap()
        });
        this.frontend
            .set_inflight_fd(&inflight.0, inflight.1.as_raw_fd())
            .unwrap();
        this.inflight = Some(inflight);
        this.start_queues();
        this
    }

    /// As [`Self::open`], by a front end that knows of no in-flight region.
    pub fn open_untracked(socket: &Path, guest: &mut Guest, queues: usize, features: u64) -> Self {
        let rings = (0..queues).map(|i| TestQueue::new(guest, i)).collect();
        let mut this = Self::greet(socket, guest, rings, features);
        this.start_queues();
        this
    }

    /// As [`Self::open`], with a network device: both queues of each pair.
    pub fn open_nic(socket: &Path, guest: &mut Guest, pairs: usize, features: u64) -> Self {
        let rings = (0..2 * pairs).map(|i| TestQueue::new(guest, i)).collect();
        Self::open_nic_with(socket, guest, rings, features)
    }

    /// The same with rings that exist. As with QEMU, the device is told where the used rings are.
    pub fn open_nic_with(
        socket: &Path,
        guest: &Guest,
        queues: Vec<TestQueue>,
        features: u64,
    ) -> Self {
        let wanted = WANTED_OF_ALL;
        let mut this = Self::greet_with(socket, guest, queues, features, wanted);
        this.start_queues();
        this
    }

    /// Connects and shares the RAM.
    fn greet(socket: &Path, guest: &Guest, queues: Vec<TestQueue>, features: u64) -> Self {
        let wanted = WANTED_OF_ALL
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        Self::greet_with(socket, guest, queues, features | F_DISK, wanted)
    }

    fn greet_with(
        socket: &Path,
        guest: &Guest,
        queues: Vec<TestQueue>,
        features: u64,
        wanted: VhostUserProtocolFeatures,
    ) -> Self {
        let (mut frontend, offered) = greeted(socket);
        let features = offered & (features | F_PROTOCOL | F_VERSION_1);
        frontend.set_features(features).unwrap();
        let protocol = frontend.get_protocol_features().unwrap();
        assert!(protocol.contains(wanted));
        frontend.set_protocol_features(wanted).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_mem_table(&[region(guest)]).unwrap();
        Self {
            frontend,
            queues,
            features,
            inflight: None,
        }
    }

    pub fn start_queues(&mut self) {
        for queue in &self.queues {
            let i = queue.index;
            self.frontend.set_vring_num(i, QUEUE_SIZE).unwrap();
            self.frontend.set_vring_base(i, queue.next_used).unwrap();
            let config = VringConfigData {
                queue_max_size: QUEUE_SIZE,
                queue_size: QUEUE_SIZE,
                flags: 0,
                desc_table_addr: VA + queue.desc,
                used_ring_addr: VA + queue.used,
                avail_ring_addr: VA + queue.avail,
                log_addr: None,
            };
            self.frontend.set_vring_addr(i, &config).unwrap();
            self.frontend.set_vring_kick(i, &queue.kick).unwrap();
            self.frontend.set_vring_call(i, &queue.call).unwrap();
            self.frontend.set_vring_err(i, &queue.error).unwrap();
            self.frontend.set_vring_enable(i, true).unwrap();
        }
    }

    pub fn config(&mut self) -> Vec<u8> {
        let (_, bytes) = self
            .frontend
            .get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60])
            .unwrap();
        bytes
    }

    /// Heads of queue `index` that the in-flight region says were taken and not completed.
    pub fn taken(&self, index: u64) -> Vec<u16> {
        let (_, region) = self.inflight.as_ref().unwrap();
        let area = (16 + 16 * u64::from(QUEUE_SIZE)).next_multiple_of(64);
        let taken = |head: &u16| {
            let mut flag = [0];
            let at = index * area + 16 + 16 * u64::from(*head);
            region.read_exact_at(&mut flag, at).unwrap();
            flag[0] == 1
        };
        (0..QUEUE_SIZE).filter(taken).collect()
    }

    /// Hangs up; rings and in-flight region stay with the guest.
    pub fn hang_up(self) -> (Vec<TestQueue>, Option<(VhostUserInflight, std::fs::File)>) {
        (self.queues, self.inflight)
    }
}

/// Features of vhost-user that every device has.
const WANTED_OF_ALL: VhostUserProtocolFeatures =
    VhostUserProtocolFeatures::MQ.union(VhostUserProtocolFeatures::REPLY_ACK);

const F_DISK: u64 = 1 << 2 | 1 << 5 | 1 << 6 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 14;

pub fn region(guest: &Guest) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: GPA,
        memory_size: RAM_BYTES,
        userspace_addr: VA,
        mmap_offset: 0,
        mmap_handle: guest.file.as_fd().as_raw_fd(),
    }
}

/// A block request laid out in guest RAM: header, data and status on pages of their own.
pub struct BlkRequest {
    pub header: u64,
    pub data: u64,
    pub status: u64,
    pub data_len: u32,
}

impl BlkRequest {
    pub fn new(guest: &mut Guest, kind: u32, sector: u64, data_len: u32) -> Self {
        let this = Self {
            header: guest.room(16),
            data: guest.room(u64::from(data_len.max(1))),
            status: guest.room(1),
            data_len,
        };
        this.aim(guest, kind, sector);
        this
    }

    pub fn aim(&self, guest: &Guest, kind: u32, sector: u64) {
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        guest.put(self.header, &header);
        guest.put(self.status, &[0xff]);
    }

    /// Its parts, with data that the device writes or reads.
    pub fn parts(&self, data_flag: u16) -> Vec<(u64, u32, u16)> {
        let mut parts = vec![(self.header, 16, 0)];
        if self.data_len > 0 {
            parts.push((self.data, self.data_len, data_flag));
        }
        parts.push((self.status, 1, WRITE));
        parts
    }

    pub fn status(&self, guest: &Guest) -> u8 {
        guest.get(self.status, 1)[0]
    }
}

pub const S_IOERR: u8 = 1;
pub const T_IN: u32 = 0;
pub const T_OUT: u32 = 1;
pub const T_FLUSH: u32 = 4;
pub const T_GET_ID: u32 = 8;
pub const T_DISCARD: u32 = 11;
pub const T_WRITE_ZEROES: u32 = 13;

/// A copy of everything, as another process has it by its descriptors.
pub fn copy_of(device: &ParkedDevice) -> ParkedDevice {
    use pagetide_dpu::{InflightRecord, ParkedFrontEnd, Record, RingSettings, Runs};
    use std::os::fd::OwnedFd;
    let fd = |fd: &dyn AsFd| -> OwnedFd { fd.as_fd().try_clone_to_owned().unwrap() };
    let front_end = device.front_end.as_ref().map(|front_end| {
        let record = &front_end.record;
        let rings = record.rings.iter().map(|ring| RingSettings {
            size: ring.size,
            addresses: ring.addresses,
            base: ring.base,
            kick: ring.kick.as_ref().map(|kick| Arc::new(fd(&**kick))),
            call: ring.call.as_ref().map(|call| fd(call)),
            error: ring.error.as_ref().map(|error| fd(error)),
            enabled: ring.enabled,
            runs: Runs::No,
        });
        ParkedFrontEnd {
            connection: front_end.connection.try_clone().unwrap(),
            record: Record {
                features: record.features,
                protocol_features: record.protocol_features,
                memory: (record.memory.iter())
                    .map(|(shape, file)| (*shape, fd(file)))
                    .collect(),
                inflight: record.inflight.as_ref().map(|inflight| InflightRecord {
                    bytes: inflight.bytes,
                    file_offset: inflight.file_offset,
                    queues: inflight.queues,
                    queue_size: inflight.queue_size,
                    file: fd(&inflight.file),
                }),
                rings: rings.collect(),
            },
        }
    });
    ParkedDevice {
        socket: device.socket.clone(),
        listener: device.listener.try_clone().unwrap(),
        front_end,
        nic: device.nic.as_ref().map(|nic| nic.try_clone().unwrap()),
    }
}
