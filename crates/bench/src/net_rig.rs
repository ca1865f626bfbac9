// SPDX-License-Identifier: Apache-2.0
//! Network devices in this process, with front ends of our own, for benches of receive faults: one engine on a CPU of
//! its own, RAM whose pages a bench takes away, and a host that takes a set time to bring each page back.

use pagetide_addr::{
    DeviceId, FilePage, FilePageSet, PAGE_BYTES, PageRequest, PageResponse, ResponseCode,
};
use pagetide_dpu::{
    DeviceReport, Dpu, DpuConfig, LinkConfig, NicConfig, RamPolicy, ReceiveConfig, SocketAccess,
};
use pagetide_frontend::nic::{Merging, NIC_RINGS_BYTES, Nic, Returned, Way};
use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
use pagetide_vpri::{DmaDomain, DomainTable, Doorbell, HostEnd, LookUp};
use std::{
    collections::VecDeque,
    fmt::Display,
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Buffers are a page apart, so that each has a fault of its own.
const BUFFER_BYTES: u32 = 2048;
/// Longest wait for a device to take its front end again.
const CONNECT_WAIT: Duration = Duration::from_secs(10);
/// RAM of an interface.
const RAM_BYTES: u64 = 64 << 20;

fn told(error: impl Display) -> String {
    error.to_string()
}

/// See the module documentation.
pub(crate) struct NetRig {
    // Dropped in this order: the engine first, so that every request gets its response.
    dpu: Dpu,
    domains: Arc<DomainTable>,
    _host: Host,
    dir: tempfile::TempDir,
}

impl NetRig {
    /// An engine on `cpu`, and a host that takes `page_time` for each page.
    ///
    /// # Errors
    /// A message.
    pub(crate) fn start(cpu: usize, page_time: Duration) -> Result<Self, String> {
        let dir = tempfile::Builder::new()
            .prefix("pagetide-bench-net-")
            .tempdir_in("/dev/shm")
            .map_err(told)?;
        let mut config = DpuConfig::new(dir.path().to_owned());
        config.cpus = vec![cpu];
        let bell = Arc::new(Doorbell::new().map_err(told)?);
        let domains = Arc::new(DomainTable::new(1));
        let (dpu, ends) = Dpu::start(&config, Arc::clone(&domains), &bell).map_err(told)?;
        let host = Host::start(ends, Arc::clone(&domains), bell, page_time)?;
        Ok(Self {
            dpu,
            domains,
            _host: host,
            dir,
        })
    }

    /// A new interface, connected, with `size` buffers posted.
    ///
    /// # Errors
    /// A message.
    pub(crate) fn add(
        &self,
        name: &str,
        link: LinkConfig,
        receive: ReceiveConfig,
        size: u16,
    ) -> Result<Interface, String> {
        let socket = self.dir.path().join(format!("{name}.sock"));
        let config = NicConfig {
            socket: socket.clone(),
            pairs: 1,
            link,
            receive,
            look_up: LookUp::On,
            ram: RamPolicy::default(),
            access: SocketAccess::default(),
        };
        let id = self.dpu.add_nic(&config).map_err(told)?;
        let file = GuestFile::new_memfd("bench-net", RAM_BYTES).map_err(told)?;
        let key = file.key().map_err(told)?;
        let ram = SharedMapping::new(file.as_fd(), RAM_BYTES).map_err(told)?;
        let (ram, fd) = (
            Arc::new(ram),
            file.as_fd().try_clone_to_owned().map_err(told)?,
        );
        let memory: (Arc<SharedMapping>, OwnedFd) = (Arc::clone(&ram), fd);
        let mut nic = Nic::new(memory, 0, size, Merging::Mergeable, &socket).map_err(told)?;
        for buffer in 0..u64::from(size) {
            let at = NIC_RINGS_BYTES + buffer * PAGE_BYTES;
            nic.give(Way::Receive, at, BUFFER_BYTES).map_err(told)?;
        }
        nic.connect().map_err(told)?;
        nic.kick(Way::Receive).map_err(told)?;
        let domain = self
            .domains
            .find(key)
            .ok_or("the device has not mapped its RAM")?;
        Ok(Interface {
            id,
            nic,
            ram,
            domain,
            size,
            unkicked: 0,
        })
    }

    /// What the DPU tells of an interface.
    ///
    /// # Errors
    /// It is gone.
    pub(crate) fn report(&self, interface: &Interface) -> Result<DeviceReport, String> {
        let mut devices = self.dpu.devices().into_iter();
        let found = devices.find(|device| device.id == interface.id);
        found.ok_or_else(|| "a device of the bench is gone".into())
    }
}

/// An interface and the RAM that it receives into.
pub(crate) struct Interface {
    id: DeviceId,
    nic: Nic,
    ram: Arc<SharedMapping>,
    domain: Arc<DmaDomain>,
    size: u16,
    unkicked: u32,
}

/// Posts of buffers between two kicks.
const KICK_EVERY: u32 = 32;

impl Interface {
    /// Where the n-th packet to be sent may be laid out: behind the buffers.
    pub(crate) fn sending_place(&self, n: u64) -> u64 {
        NIC_RINGS_BYTES + (u64::from(self.size) + n) * PAGE_BYTES
    }

    /// The number of the packet that was laid out there.
    pub(crate) fn sending_number(&self, at: u64) -> u64 {
        (at - NIC_RINGS_BYTES) / PAGE_BYTES - u64::from(self.size)
    }

    /// Its RAM.
    pub(crate) fn ram(&self) -> &SharedMapping {
        &self.ram
    }

    /// Connects again. The last connection may still be on its way out.
    ///
    /// # Errors
    /// The device does not take it.
    pub(crate) fn connect(&mut self) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            match self.nic.connect() {
                Ok(()) => return Ok(()),
                Err(error) if begun.elapsed() > CONNECT_WAIT => return Err(told(error)),
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    /// Its driver's side.
    pub(crate) fn nic(&mut self) -> &mut Nic {
        &mut self.nic
    }

    /// The next buffer that came back, which is posted again with its page taken away if it is to be `cold`.
    ///
    /// # Errors
    /// A message.
    pub(crate) fn receive(&mut self, cold: Cold) -> Result<Option<Returned>, String> {
        let taken = self.nic.take(Way::Receive).map_err(told)?;
        match taken {
            Some(buffer) => {
                if cold == Cold::Yes {
                    self.take_away(buffer.at);
                }
                self.nic
                    .give(Way::Receive, buffer.at, buffer.bytes)
                    .map_err(told)?;
                self.unkicked += 1;
                if self.unkicked >= KICK_EVERY {
                    self.kick()?;
                }
            }
            None if self.unkicked > 0 => self.kick()?,
            None => {}
        }
        Ok(taken)
    }

    fn kick(&mut self) -> Result<(), String> {
        self.unkicked = 0;
        self.nic.kick(Way::Receive).map_err(told)
    }

    /// Takes the pages of all buffers away.
    pub(crate) fn cool(&self) {
        for buffer in 0..u64::from(self.size) {
            self.take_away(NIC_RINGS_BYTES + buffer * PAGE_BYTES);
        }
    }

    /// Takes away the page of buffer `number`.
    pub(crate) fn take_away_of(&self, number: u64) {
        let number = number % u64::from(self.size);
        self.take_away(NIC_RINGS_BYTES + number * PAGE_BYTES);
    }

    fn take_away(&self, at: u64) {
        let page = FilePage::containing(at);
        let set = FilePageSet::of_range(page.section(), page.single());
        // A device that is just writing to it has it for less than a microsecond.
        while !self.domain.attributes().unmap(page.section(), &set) {
            std::hint::spin_loop();
        }
    }
}

/// Whether a buffer is posted without its page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cold {
    /// It is.
    Yes,
    /// It keeps what it has.
    No,
}

/// Answers each page request after a set time, as many at a time as there are.
struct Host {
    over: Arc<AtomicBool>,
    bell: Arc<Doorbell>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    fn start(
        ends: Vec<HostEnd>,
        domains: Arc<DomainTable>,
        bell: Arc<Doorbell>,
        page_time: Duration,
    ) -> Result<Self, String> {
        let over = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&over);
        let thread = std::thread::Builder::new()
            .name("host".into())
            .spawn(move || {
                let mut waiting = VecDeque::new();
                while !is_over.load(Ordering::Relaxed) {
                    answer_due(&ends, &domains, page_time, &mut waiting);
                    // Short of the time of a page by far.
                    std::thread::sleep(POLL);
                }
            });
        Ok(Self {
            over,
            bell,
            thread: Some(thread.map_err(told)?),
        })
    }
}

/// How often the host looks for requests.
const POLL: Duration = Duration::from_micros(100);

fn answer_due(
    ends: &[HostEnd],
    domains: &DomainTable,
    page_time: Duration,
    waiting: &mut VecDeque<(Instant, usize, PageRequest)>,
) {
    let now = Instant::now();
    for (index, end) in ends.iter().enumerate() {
        while let Some(request) = end.next() {
            waiting.push_back((now + page_time, index, request));
        }
    }
    while let Some((due, index, request)) = waiting.front().copied() {
        if due > now {
            return;
        }
        waiting.pop_front();
        if let Some(domain) = domains.all().iter().find(|d| d.id() == request.domain) {
            domain.attributes().grant(request.pages, request.access);
        }
        ends[index].respond(PageResponse::to(&request, ResponseCode::Success));
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.bell.ring_anyway();
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("the bench's host panicked");
        }
    }
}
