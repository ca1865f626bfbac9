// SPDX-License-Identifier: Apache-2.0
//! Where A's absent pages come from, in `bench head-of-line`.
//!
//! ```text
//!   ours      engine ─► page request ─► FaultService, which the idle engine assists ─► address space ─► model of a
//!             disk: as the daemon ships it, and the page is evicted and comes back as there
//!   touching  engine ─► page fault ─► userfaultfd of this process ─► the tier's thread, after as long
//!   stock     the same of qemu-storage-daemon: its userfaultfd is made inside it and taken over
//! ```
//! On all sides the page is a hole of the memory's file before the request, and the disk takes as long. The thread
//! of the tier sleeps for that time and supplies one page after the other, which is enough: the next fault comes
//! long after. It has priority over the client on their CPU: the client polls for B's answers, which a
//! touching engine cannot give before the tier has run.

use super::frontend::Pages;
use crate::{
    harness::rounds::progress,
    tenant_ram::{self, Filling, ModelDisk, failed, in_file},
};
use pagetide_addr::{Access, FileKey, Hva, PAGE_BYTES, PageNo};
use pagetide_gmem::{Fault, FaultOutcome};
use pagetide_swap::tier::PAGE;
use pagetide_sys::{
    cpu::{self, Urgency},
    memory_file::GuestFile,
    process::ProcessFd,
    ptrace::run_inside,
    uffd::{Features, FillOutcome, Userfaultfd, Watch, page_of},
};
use pagetide_vpri::{DPU, DomainTable, FaultService, ServiceThread, TenantCpus};
use rustix::event::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};
use std::{
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};

/// Real-time priority of the tier: above the client's.
const PRIORITY: u8 = 20;

/// Names a memory file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MemoryName {
    /// Device number.
    pub(super) dev: u64,
    /// Inode number.
    pub(super) ino: u64,
    /// The process that has it open.
    pub(super) pid: u32,
    /// Its descriptor there.
    pub(super) descriptor: i32,
}

/// See the module.
pub(super) enum Tier {
    Served(Box<ServedTier>),
    Touched(TouchedTier),
    Stock(StockTier),
}

impl Tier {
    /// Starts to serve A's memory.
    pub(super) fn take(&mut self, name: MemoryName) -> Result<(), String> {
        match self {
            Self::Served(tier) => tier.take(name),
            Self::Touched(tier) => tier.take(name),
            Self::Stock(tier) => tier.take(name),
        }
    }

    /// A's pages are to be so. The client has emptied or filled the file before, which is all that an engine
    /// without look-ups sees.
    pub(super) fn set(&mut self, pages: Pages) -> Result<(), String> {
        match self {
            Self::Served(tier) => tier.set(pages),
            Self::Touched(_) | Self::Stock(_) => Ok(()),
        }
    }

    /// Pages that were waited for since the last call.
    pub(super) fn take_waited_for(&mut self) -> u64 {
        match self {
            Self::Served(tier) => tier.take_waited_for(),
            Self::Touched(tier) => tier.waited_for.swap(0, Ordering::Relaxed),
            Self::Stock(tier) => tier.waited_for.swap(0, Ordering::Relaxed),
        }
    }

    /// Ends what must not outlive the engines.
    pub(super) fn stop(self) {
        if let Self::Served(tier) = self {
            tier.thread.stop();
        }
    }
}

fn key_of(name: MemoryName) -> FileKey {
    FileKey {
        dev: name.dev,
        ino: name.ino,
    }
}

/// The service as shipped, with A as its tenant.
pub(super) struct ServedTier {
    service: Arc<FaultService>,
    thread: ServiceThread,
    domains: Arc<DomainTable>,
    hold: Duration,
    cpu: usize,
    /// What a read of the disk takes at the moment.
    disk_ns: Arc<AtomicU64>,
    served: Option<Served>,
    requests_told: u64,
}

struct Served {
    memory: tenant_ram::Tenant,
    tenant: Arc<pagetide_vpri::Tenant>,
    pages: u64,
}

impl ServedTier {
    /// A's CPU is `cpu`.
    pub(super) fn new(
        service: Arc<FaultService>,
        domains: Arc<DomainTable>,
        hold: Duration,
        cpu: usize,
    ) -> Result<Self, String> {
        let thread = service.start().map_err(|e| failed("the service")(&e))?;
        Ok(Self {
            service,
            thread,
            domains,
            hold,
            cpu,
            disk_ns: Arc::default(),
            served: None,
            requests_told: 0,
        })
    }

    fn take(&mut self, name: MemoryName) -> Result<(), String> {
        let wrong = failed("A's memory");
        let domain = self.domains.find(key_of(name));
        let bytes = domain.ok_or("no disk has that memory")?.len_bytes();
        let client = ProcessFd::open(name.pid).map_err(|e| wrong(&e))?;
        let file = client.take_descriptor(name.descriptor);
        let file = GuestFile::from(file.map_err(|e| wrong(&e))?);
        let pages = bytes / PAGE_BYTES;
        let disk = ModelDisk::start(Arc::clone(&self.disk_ns))?;
        let spaces = &*self.domains;
        let memory = tenant_ram::Tenant::over(file, spaces, pages, Filling::Programs, Some(disk))?;
        let (space, mmu) = (Arc::clone(&memory.space), Arc::clone(&memory.mmu));
        let tenant = self.service.add_tenant(space, mmu).map_err(|e| wrong(&e))?;
        tenant.set_cpus(TenantCpus::dedicated(&[self.cpu]));
        self.served = Some(Served {
            memory,
            tenant,
            pages,
        });
        Ok(())
    }

    /// All pages are brought in at once, so that they are as the client has left them, and evicted if they are to
    /// be absent.
    fn set(&mut self, pages: Pages) -> Result<(), String> {
        let Some(served) = &mut self.served else {
            return Err("no memory is known".into());
        };
        self.disk_ns.store(0, Ordering::Relaxed);
        // What the client has filled would be in the way of what comes back: nobody else supplies this memory's pages.
        let all = PageNo(0).run(served.pages);
        let emptied = served
            .memory
            .file()
            .punch(all.start.byte_offset(), all.bytes());
        emptied.map_err(|e| failed("A's memory")(&e))?;
        for page in all.iter() {
            served.bring(page)?;
            let content = [0x11; PAGE];
            let written = served.memory.file().write_at(page.byte_offset(), &content);
            written.map_err(|e| failed("A's memory")(&e))?;
        }
        if pages == Pages::Absent {
            served.memory.evict_all()?;
            let hold_ns = u64::try_from(self.hold.as_nanos()).unwrap_or(u64::MAX);
            self.disk_ns.store(hold_ns, Ordering::Relaxed);
        }
        self.requests_told = served.tenant.account().requests();
        Ok(())
    }

    fn take_waited_for(&mut self) -> u64 {
        let all = self.served.as_ref();
        let all = all.map_or(0, |served| served.tenant.account().requests());
        all - std::mem::replace(&mut self.requests_told, all)
    }
}

impl Served {
    /// Makes a page present for devices, too.
    fn bring(&self, page: PageNo) -> Result<(), String> {
        let fault = Fault {
            device: DPU,
            pages: page.single(),
            access: Access::Write,
        };
        let (told, outcome) = mpsc::channel();
        tenant_ram::Tenant::fault(&self.memory.space, &fault, move |outcome| {
            if told.send(outcome).is_err() {
                tracing::error!("bench: nobody waits for a page");
            }
        });
        match outcome.recv() {
            Ok(FaultOutcome::Present) => Ok(()),
            other => Err(format!("{}: {other:?}", in_file(page))),
        }
    }
}

/// Userfaults of this process.
pub(super) struct TouchedTier {
    domains: Arc<DomainTable>,
    hold: Duration,
    waited_for: Arc<AtomicU64>,
}

impl TouchedTier {
    pub(super) fn new(domains: Arc<DomainTable>, hold: Duration) -> Self {
        Self {
            domains,
            hold,
            waited_for: Arc::default(),
        }
    }

    fn take(&mut self, name: MemoryName) -> Result<(), String> {
        let domain = self.domains.find(key_of(name));
        let domain = domain.ok_or("no disk has that memory")?;
        let windows = domain.windows();
        let windows: Vec<(Hva, u64)> = windows
            .iter()
            .map(|window| (window.address(), window.len_bytes()))
            .collect();
        let userfaultfd = Userfaultfd::create_here().map_err(|error| error.to_string())?;
        start(userfaultfd, &windows, self.hold, &self.waited_for)
    }
}

/// Userfaults of qemu-storage-daemon.
pub(super) struct StockTier {
    pid: u32,
    hold: Duration,
    waited_for: Arc<AtomicU64>,
}

impl StockTier {
    pub(super) fn new(pid: u32, hold: Duration) -> Self {
        Self {
            pid,
            hold,
            waited_for: Arc::default(),
        }
    }

    fn take(&mut self, name: MemoryName) -> Result<(), String> {
        let wrong = failed("qemu-storage-daemon");
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid));
        let windows = mappings_of(name.ino, &maps.map_err(|e| wrong(&e))?);
        let process = ProcessFd::open(self.pid).map_err(|e| wrong(&e))?;
        let ran = run_inside(&process, |thread| thread.make_userfaultfd());
        let number = ran.map_err(|e| wrong(&e))?.value;
        let userfaultfd = process.take_descriptor(number).map_err(|e| wrong(&e))?;
        start(
            Userfaultfd::from(userfaultfd),
            &windows,
            self.hold,
            &self.waited_for,
        )
    }
}

/// Address and bytes of each mapping of the memfd with this inode number in a `/proc/PID/maps`.
fn mappings_of(ino: u64, maps: &str) -> Vec<(Hva, u64)> {
    let of_line = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (range, inode) = (fields.next()?, fields.nth(3)?);
        let is_memfd = fields.next()?.starts_with("/memfd:");
        let (start, end) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16);
        match (number(start), number(end)) {
            (Ok(start), Ok(end)) if is_memfd && inode.parse() == Ok(ino) => {
                Some((Hva(start), end - start))
            }
            _ => None,
        }
    };
    maps.lines().filter_map(of_line).collect()
}

/// Watches `windows`, and starts the thread that supplies their pages. It ends with the process.
fn start(
    userfaultfd: Userfaultfd,
    windows: &[(Hva, u64)],
    hold: Duration,
    waited_for: &Arc<AtomicU64>,
) -> Result<(), String> {
    let api = userfaultfd.api(Features::WANTED);
    api.map_err(|error| error.to_string())?;
    if windows.is_empty() {
        return Err("no disk maps that memory".to_owned());
    }
    for (address, bytes) in windows {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let registered = userfaultfd.register(*address, bytes, Watch::Missing);
        registered.map_err(|error| error.to_string())?;
    }
    let waited_for = Arc::clone(waited_for);
    let thread = std::thread::Builder::new().name("tier".into());
    let spawned = thread.spawn(move || {
        if let Err(error) = cpu::set_urgency(Urgency::Preempting(PRIORITY)) {
            progress(
                "head-of-line",
                format_args!("the tier has no priority: {error}"),
            );
        }
        bring_touched(&userfaultfd, hold, &waited_for);
    });
    spawned.map(drop).map_err(|error| error.to_string())
}

fn bring_touched(userfaultfd: &Userfaultfd, hold: Duration, waited_for: &AtomicU64) {
    let mut faults = Vec::new();
    loop {
        let mut polled = [PollFd::from_borrowed_fd(userfaultfd.as_fd(), PollFlags::IN)];
        if let Err(error) = poll(&mut polled, None) {
            progress(
                "head-of-line",
                format_args!("waiting for touched pages: {error}"),
            );
            return;
        }
        if let Err(error) = userfaultfd.read_faults(&mut faults) {
            progress(
                "head-of-line",
                format_args!("reading touched pages: {error}"),
            );
            return;
        }
        for fault in &faults {
            std::thread::sleep(hold);
            waited_for.fetch_add(1, Ordering::Relaxed);
            let at = page_of(fault.address);
            match userfaultfd.zeropage(at, PAGE_BYTES) {
                Ok(FillOutcome::Filled { .. }) => {}
                Ok(_) => {
                    if let Err(error) = userfaultfd.wake(at, PAGE_BYTES) {
                        progress("head-of-line", format_args!("waking the engine: {error}"));
                    }
                }
                Err(error) => progress("head-of-line", format_args!("bringing a page: {error}")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_a_memfd_are_found_by_inode() {
        let maps = "7f0000000000-7f0000400000 rw-s 00000000 00:01 1234 /memfd:bench-tenant (deleted)\n\
                    7f0000400000-7f0000401000 rw-s 00000000 00:01 1235 /memfd:other (deleted)\n\
                    7f0000500000-7f0000501000 r--p 00000000 fe:00 1234 /usr/lib/x.so\n\
                    7f0000600000-7f0000601000 rw-p 00000000 00:00 0 \n";
        let found = mappings_of(1234, maps);
        assert_eq!(found, [(Hva(0x7f00_0000_0000), 4 << 20)]);
        assert_eq!(mappings_of(9, maps), []);
    }
}
