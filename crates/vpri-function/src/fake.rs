// SPDX-License-Identifier: Apache-2.0
//! A device for tests that does what the test says, right or wrong: a vhost-user back end whose
//! rings are written by hand.

use crate::frontend::area::BASE;
use crate::wire::{self, Config, Event, Reply, Status};
use pagetide_addr::PageRequest;
use pagetide_sys::mapping::SharedMapping;
use std::{
    fs::File,
    io::Write,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering, fence},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};
use vhost::{
    VhostUserMemoryRegionBase,
    vhost_user::{
        BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut,
        VhostUserProtocolFeatures,
        message::{
            VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags,
            VhostUserInflight, VhostUserLog, VhostUserMemoryRegion, VhostUserShMemConfig,
            VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags,
            VhostUserVringState,
        },
    },
};

const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until `condition` holds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::yield_now();
    }
}

/// What the device does with an event.
pub enum Answers {
    /// This reply.
    Reply(Reply),
    /// These bytes, and this length in the used ring.
    Bytes(Vec<u8>, u32),
    /// First a page request, then this reply once the request was handled.
    Asking {
        /// The request.
        request: PageRequest,
        /// Waits until a message comes here, or the sender is gone.
        until: mpsc::Receiver<()>,
        /// The reply.
        reply: Reply,
    },
    /// Nothing at all.
    Silence,
    /// Uses a chain that does not exist.
    Head(u32),
    /// It closes the connection.
    HangUp,
}

impl Answers {
    /// Success.
    pub fn ok() -> Self {
        Self::Reply(Status::OK.into())
    }

    /// The reply of a well-behaved device without memory.
    pub fn good(event: &Event<'_>, number: u64) -> Self {
        match event {
            Event::Create { .. } => Self::Reply(Status::with_value(number).into()),
            Event::Standing { pages: Some(_), .. } | Event::Touched { .. } => Self::Reply(Reply {
                status: Status::OK,
                mask: Some(pagetide_addr::FilePageSet::EMPTY),
            }),
            _ => Self::ok(),
        }
    }
}

type Script = dyn FnMut(&Event<'static>, u64) -> Answers + Send;

#[derive(Default)]
struct Queue {
    size: u16,
    descriptors: u64,
    available: u64,
    used: u64,
    next_available: u16,
    next_used: u16,
    kick: Option<OwnedFd>,
    call: Option<File>,
    enabled: bool,
}

struct Memory {
    mapping: SharedMapping,
    at: u64,
}

impl Memory {
    fn get<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        let offset = address - self.at;
        self.mapping.copy_from(offset, &mut bytes).unwrap();
        bytes
    }

    fn put(&self, address: u64, bytes: &[u8]) {
        self.mapping.copy_to(address - self.at, bytes).unwrap();
    }

    fn descriptor(&self, queue: &Queue, index: u16) -> (u64, u32, u16, u16) {
        let bytes: [u8; 16] = self.get(queue.descriptors + 16 * u64::from(index));
        let (address, rest) = bytes.split_at(8);
        (
            u64::from_le_bytes(address.try_into().unwrap()),
            u32::from_le_bytes(rest[..4].try_into().unwrap()),
            u16::from_le_bytes(rest[4..6].try_into().unwrap()),
            u16::from_le_bytes(rest[6..].try_into().unwrap()),
        )
    }

    fn pop(&self, queue: &mut Queue) -> Option<u16> {
        let index = u16::from_le_bytes(self.get(queue.available + 2));
        fence(Ordering::SeqCst);
        if index == queue.next_available {
            return None;
        }
        let slot = u64::from(queue.next_available % queue.size);
        queue.next_available = queue.next_available.wrapping_add(1);
        Some(u16::from_le_bytes(self.get(queue.available + 4 + 2 * slot)))
    }

    fn use_up(&self, queue: &mut Queue, head: u32, len: u32) {
        let slot = u64::from(queue.next_used % queue.size);
        let element = [head.to_le_bytes(), len.to_le_bytes()].concat();
        self.put(queue.used + 4 + 8 * slot, &element);
        fence(Ordering::SeqCst);
        queue.next_used = queue.next_used.wrapping_add(1);
        self.put(queue.used + 2, &queue.next_used.to_le_bytes());
        fence(Ordering::SeqCst);
        let call = queue.call.as_mut().unwrap();
        call.write_all(&1_u64.to_ne_bytes()).unwrap();
    }
}

impl Memory {
    fn ask(&self, queue: &mut Queue, bytes: &[u8], len: u32) {
        let head = self.pop(queue).expect("a buffer for the page request");
        let (address, room, flags, _) = self.descriptor(queue, head);
        assert!(flags & 2 != 0 && usize::try_from(room).unwrap() >= bytes.len());
        self.put(address, bytes);
        self.use_up(queue, u32::from(head), len);
    }
}

#[derive(Default)]
struct Backend {
    memory: Option<Memory>,
    queues: [Queue; 3],
    config: Vec<u8>,
    features: u64,
    acked: u64,
}

/// What the fake offers by default.
pub const FEATURES: u64 =
    1 << 32 | 1 << 30 | wire::feature::OVERWRITE | wire::feature::INJECT | wire::feature::TOUCHED;

/// See the module.
pub struct Fake {
    /// Its configuration space.
    pub config: Arc<Mutex<Vec<u8>>>,
    /// The features it offers.
    pub features: Arc<Mutex<u64>>,
    backend: Arc<Mutex<Backend>>,
    stream: Arc<Mutex<Option<UnixStream>>>,
    script: Arc<Mutex<Box<Script>>>,
    seen: Arc<Mutex<Vec<Event<'static>>>>,
    stopped: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Limits of a device that any driver accepts.
pub fn good_config() -> Config {
    Config {
        spaces_max: 64,
        requests_max: 512,
        ranges_max: 256,
        lease_wait_us: 1000,
        generation: 1,
    }
}

impl Fake {
    /// Listens in `dir`, and answers events by `script`, which receives their number, from 1 on.
    pub fn listen(
        dir: &Path,
        script: impl FnMut(&Event<'static>, u64) -> Answers + Send + 'static,
    ) -> Self {
        Self::listen_as(dir, FEATURES, good_config(), script)
    }

    /// Like [`Self::listen`], with features and limits.
    pub fn listen_as(
        dir: &Path,
        features: u64,
        config: Config,
        script: impl FnMut(&Event<'static>, u64) -> Answers + Send + 'static,
    ) -> Self {
        let socket = dir.join("vpri.sock");
        if socket.exists() {
            std::fs::remove_file(&socket).unwrap();
        }
        let listener = UnixListener::bind(&socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut fake = Self {
            config: Arc::new(Mutex::new(config.encode().to_vec())),
            features: Arc::new(Mutex::new(features)),
            backend: Arc::default(),
            stream: Arc::default(),
            script: Arc::new(Mutex::new(Box::new(script))),
            seen: Arc::default(),
            stopped: Arc::default(),
            threads: Vec::new(),
        };
        let (stream, backend) = (Arc::clone(&fake.stream), Arc::clone(&fake.backend));
        let (config, features) = (Arc::clone(&fake.config), Arc::clone(&fake.features));
        let stopped = Arc::clone(&fake.stopped);
        fake.threads.push(std::thread::spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                let Ok((new, _)) = listener.accept() else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                new.set_nonblocking(false).unwrap();
                *lock(&backend) = Backend {
                    config: lock(&config).clone(),
                    features: *lock(&features),
                    ..Backend::default()
                };
                *lock(&stream) = Some(new.try_clone().unwrap());
                let mut messages = BackendReqHandler::from_stream(new, Arc::clone(&backend));
                while messages.handle_request().is_ok() {}
                *lock(&stream) = None;
                lock(&backend)
                    .queues
                    .iter_mut()
                    .for_each(|queue| queue.enabled = false);
            }
        }));
        fake.start_events();
        fake
    }

    fn start_events(&mut self) {
        let (backend, script) = (Arc::clone(&self.backend), Arc::clone(&self.script));
        let (seen, stopped) = (Arc::clone(&self.seen), Arc::clone(&self.stopped));
        let stream = Arc::clone(&self.stream);
        self.threads.push(std::thread::spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                if !work_on_events(&mut lock(&backend), &script, &seen, &stream) {
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        }));
    }

    /// Events received so far, the latest last.
    pub fn seen(&self) -> Vec<Event<'static>> {
        lock(&self.seen).clone()
    }

    /// From now on it answers by `script`.
    pub fn follow(&self, script: impl FnMut(&Event<'static>, u64) -> Answers + Send + 'static) {
        *lock(&self.script) = Box::new(script);
    }

    /// Sends these bytes as a page request with the length `len`.
    pub fn send(&self, bytes: &[u8], len: u32) {
        let mut backend = lock(&self.backend);
        let Backend { memory, queues, .. } = &mut *backend;
        (memory.as_ref().unwrap()).ask(&mut queues[1], bytes, len);
    }

    /// Sends a page request.
    pub fn request(&self, request: &PageRequest) {
        self.send(&wire::encode_request(request), 64);
    }

    /// Writes any element into the used ring of `queue`.
    pub fn use_up(&self, queue: usize, head: u32, len: u32) {
        let mut backend = lock(&self.backend);
        let Backend { memory, queues, .. } = &mut *backend;
        let memory = memory.as_ref().unwrap();
        memory.use_up(&mut queues[queue], head, len);
    }

    /// Writes into the bounce area that it was given.
    pub fn land(&self, slot: u64, content: &[u8]) {
        let seen = self.seen();
        let address = seen.iter().rev().find_map(|event| match event {
            Event::Bounce { address, .. } => Some(*address),
            _ => None,
        });
        let backend = lock(&self.backend);
        let memory = backend.memory.as_ref().unwrap();
        memory.put(address.unwrap() + slot * wire::SLOT_BYTES, content);
    }

    /// Closes the connection; it goes on listening.
    pub fn hang_up(&self) {
        if let Some(stream) = lock(&self.stream).as_ref() {
            stream.shutdown(std::net::Shutdown::Both).unwrap();
        }
    }
}

/// Answers one event, if there is one.
fn work_on_events(
    backend: &mut Backend,
    script: &Mutex<Box<Script>>,
    seen: &Mutex<Vec<Event<'static>>>,
    stream: &Mutex<Option<UnixStream>>,
) -> bool {
    let Backend { memory, queues, .. } = backend;
    let (Some(memory), [queue, faults, _]) = (memory.as_ref(), queues) else {
        return false;
    };
    if !queue.enabled {
        return false;
    }
    let Some(head) = memory.pop(queue) else {
        return false;
    };
    let (address, len, _, next) = memory.descriptor(queue, head);
    let mut message = vec![0; usize::try_from(len).unwrap()];
    let offset = address - memory.at;
    memory.mapping.copy_from(offset, &mut message).unwrap();
    let event = Event::decode(&message).expect("a driver of ours sends events");
    let (reply_at, room, flags, _) = memory.descriptor(queue, next);
    assert_eq!(flags, 2);
    assert_eq!(usize::try_from(room).unwrap(), event.reply_bytes());
    let number = {
        let mut seen = lock(seen);
        seen.push(event.clone());
        seen.len() as u64
    };
    let answers = lock(script)(&event, number);
    match answers {
        Answers::Reply(reply) => {
            let bytes = reply.encode();
            memory.put(reply_at, &bytes);
            memory.use_up(queue, u32::from(head), u32::try_from(bytes.len()).unwrap());
        }
        Answers::Bytes(bytes, len) => {
            memory.put(reply_at, &bytes);
            memory.use_up(queue, u32::from(head), len);
        }
        Answers::Asking {
            request,
            until,
            reply,
        } => {
            memory.ask(faults, &wire::encode_request(&request), 64);
            // Its other end is gone if the test has failed.
            until.recv().unwrap_or_default();
            let bytes = reply.encode();
            memory.put(reply_at, &bytes);
            memory.use_up(queue, u32::from(head), u32::try_from(bytes.len()).unwrap());
        }
        Answers::Silence => {}
        Answers::Head(head) => memory.use_up(queue, head, 16),
        Answers::HangUp => {
            if let Some(stream) = lock(stream).as_ref() {
                stream.shutdown(std::net::Shutdown::Both).unwrap();
            }
        }
    }
    true
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.hang_up();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                assert!(std::thread::panicking(), "the fake device panicked");
            }
        }
    }
}

fn none<T>() -> Result<T> {
    Err(Error::InvalidOperation("not of this device"))
}

impl VhostUserBackendReqHandlerMut for Backend {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }
    fn reset_owner(&mut self) -> Result<()> {
        Ok(())
    }
    fn reset_device(&mut self) -> Result<()> {
        Ok(())
    }
    fn get_features(&mut self) -> Result<u64> {
        Ok(self.features)
    }
    fn set_features(&mut self, features: u64) -> Result<()> {
        self.acked = features;
        Ok(())
    }
    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let mapping = SharedMapping::new(files[0].as_fd(), regions[0].memory_size).unwrap();
        let at = regions[0].guest_phys_addr;
        assert_eq!((at, regions[0].user_addr), (BASE, BASE));
        self.memory = Some(Memory { mapping, at });
        Ok(None)
    }
    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.queues[index as usize].size = u16::try_from(num).unwrap();
        Ok(())
    }
    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let queue = &mut self.queues[index as usize];
        queue.descriptors = descriptor;
        queue.used = used;
        queue.available = available;
        Ok(())
    }
    fn set_vring_base(&mut self, _index: u32, base: u32) -> Result<()> {
        assert_eq!(base, 0);
        Ok(())
    }
    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        Ok(VhostUserVringState::new(index, 0))
    }
    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.queues[usize::from(index)].kick = fd.map(OwnedFd::from);
        Ok(())
    }
    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.queues[usize::from(index)].call = fd;
        Ok(())
    }
    fn set_vring_err(&mut self, _index: u8, _fd: Option<File>) -> Result<()> {
        Ok(())
    }
    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::REPLY_ACK)
    }
    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }
    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(3)
    }
    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.queues[index as usize].enabled = enable;
        Ok(())
    }
    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let (from, to) = (offset as usize, (offset + size) as usize);
        Ok(self.config[from..to].to_vec())
    }
    fn set_config(&mut self, _o: u32, _b: &[u8], _f: VhostUserConfigFlags) -> Result<()> {
        none()
    }
    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        none()
    }
    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        none()
    }
    fn get_inflight_fd(&mut self, _w: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        none()
    }
    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        none()
    }
    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(1)
    }
    fn add_mem_region(
        &mut self,
        _region: &VhostUserSingleMemoryRegion,
        _file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        none()
    }
    fn remove_mem_region(&mut self, _region: &VhostUserSingleMemoryRegion) -> Result<()> {
        none()
    }
    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        none()
    }
    fn check_device_state(&mut self) -> Result<()> {
        none()
    }
    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        none()
    }
    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        none()
    }
}
