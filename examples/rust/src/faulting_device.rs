// SPDX-License-Identifier: Apache-2.0
//! A device that does DMA into memory of which part is swapped out.
//!
//! ```text
//!   device                                    host
//!   lease ──► refused: the page is absent
//!   page request ───────────────────────────► content back into the file, access granted
//!   lease, DMA, release  ◄─────────────────── page response
//! ```
//! The device looks at the PA-bitmap before each DMA, by taking a *lease*: as long as it has one, the host cannot
//! evict the page. The host is a thread here. In the daemon, `pagetide_vpri::FaultService` is it, and gmem decides
//! what is present.
//!
//! `cargo run -p pagetide-examples --bin faulting_device`
#![expect(clippy::print_stdout, reason = "what happens is the example's output")]

use pagetide_addr::{
    Access, DeviceId, FilePage, PAGE_BYTES, PageRequest, PageResponse, QueueId, RequestId,
    ResponseCode,
};
use pagetide_sys::memory_file::{FileError, GuestFile};
use pagetide_vpri::{
    DeviceEnd, DmaDomain, DomainTable, Doorbell, EnginePort, HostEnd, LookUp, fault_queue,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{collections::HashMap, error::Error, os::fd::AsFd, sync::Arc, thread};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// RAM of the VM, in pages.
const PAGES: u64 = 16;
/// Longest wait for the other side, which takes microseconds.
const PATIENCE: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// Who owns the VM's memory: evicts pages, and serves page requests.
struct Host {
    file: GuestFile,
    domain: Arc<DmaDomain>,
    stored: HashMap<FilePage, Vec<u8>>,
}

impl Host {
    /// Swaps `page` out, unless a DMA is under way in its section.
    fn evict(&mut self, page: FilePage) -> Outcome<()> {
        // From here on no DMA begins; one that began earlier shows as busy.
        let busy = self.domain.attributes().unmap_ranges(&[page.single()]);
        if !busy.is_empty() {
            self.domain.attributes().grant(page.single(), Access::Write);
            println!("host: page {} stays, for a DMA is under way", page.0);
            return Ok(());
        }
        let mut content = vec![0; pagetide_addr::to_usize(PAGE_BYTES)];
        self.file.read_at(page.byte_offset(), &mut content)?;
        self.file.punch(page.byte_offset(), PAGE_BYTES)?;
        self.stored.insert(page, content);
        println!("host: page {} is swapped out", page.0);
        Ok(())
    }

    /// Waits for a page request and answers it.
    fn serve_one(&mut self, queue: &HostEnd) -> Outcome<()> {
        let request = wait_for(queue.bell(), || queue.next())?;
        let code = if request.pages.end > FilePage(PAGES) {
            ResponseCode::InvalidRequest
        } else if let Err(error) = self.bring(&request) {
            println!("host: {error}");
            ResponseCode::ResponseFailure
        } else {
            ResponseCode::Success
        };
        queue.respond(PageResponse::to(&request, code));
        Ok(())
    }

    fn bring(&mut self, request: &PageRequest) -> Result<(), FileError> {
        for page in request.pages.iter() {
            if let Some(content) = self.stored.get(&page) {
                self.file.write_at(page.byte_offset(), content)?;
                self.stored.remove(&page);
                println!("host: page {} is back", page.0);
            }
        }
        self.domain
            .attributes()
            .grant(request.pages, request.access);
        Ok(())
    }
}

/// A device with one queue.
struct Device {
    port: EnginePort,
    queue: DeviceEnd,
    bell: Arc<Doorbell>,
    requests: u64,
}

impl Device {
    /// Reads the beginning of `page`, after as many page faults as it takes.
    fn dma_read(&mut self, page: FilePage, into: &mut [u8]) -> Outcome<()> {
        loop {
            if let Some(lease) = self.port.lease(page.single(), Access::Read) {
                let copied = (self.port.window()).copy_from(page.byte_offset(), into);
                self.port.release(lease);
                println!("device: page {} is read", page.0);
                return Ok(copied?);
            }
            println!("device: page {} is absent, and is requested", page.0);
            let id = RequestId(self.requests);
            self.requests += 1;
            let (device, queue) = (DeviceId(1), QueueId(0));
            let (domain, pages) = (self.port.domain().id(), page.single());
            let request = PageRequest::demand(id, device, queue, domain, pages, Access::Read);
            self.queue.submit(request)?;
            self.queue.kick();
            let response = wait_for(&self.bell, || self.queue.next())?;
            if response.code != ResponseCode::Success {
                return Err(format!("page {}: {:?}", page.0, response.code).into());
            }
        }
    }
}

/// What `take` finds, after sleeping until `bell` rings if that is nothing.
fn wait_for<T>(bell: &Doorbell, mut take: impl FnMut() -> Option<T>) -> Outcome<T> {
    loop {
        // Armed before the last look, so that what comes after it rings.
        bell.arm();
        let taken = take();
        if taken.is_none() {
            let mut awaited = [PollFd::new(bell, PollFlags::IN)];
            if poll(&mut awaited, Some(&PATIENCE))? == 0 {
                return Err("the other side is silent".into());
            }
        }
        bell.disarm()?;
        if let Some(taken) = taken {
            return Ok(taken);
        }
    }
}

fn main() -> Outcome<()> {
    let file = GuestFile::new_memfd("ram", PAGES * PAGE_BYTES)?;
    let page = FilePage(3);
    file.write_at(page.byte_offset(), b"a cold page")?;
    let window = DomainTable::new(1).map_whole(file.as_fd())?;
    let domain = Arc::clone(window.domain());
    domain.attach()?;
    let (bell, host_bell) = (Arc::new(Doorbell::new()?), Arc::new(Doorbell::new()?));
    let (queue, host_queue) = fault_queue(4, Arc::clone(&bell), host_bell);
    let stored = HashMap::new();
    let mut host = Host {
        file,
        domain,
        stored,
    };
    let port = EnginePort::new(window, 0, LookUp::On)?;

    let lease = port.lease(page.single(), Access::Write);
    host.evict(page)?;
    port.release(lease.ok_or("a page that is present can be leased")?);
    host.evict(page)?;

    let mut device = Device {
        port,
        queue,
        bell,
        requests: 0,
    };
    let mut text = [0; 11];
    thread::scope(|scope| {
        let host = scope.spawn(|| host.serve_one(&host_queue));
        device.dma_read(page, &mut text)?;
        host.join().map_err(|_| "the host panicked")?
    })?;
    println!("device: it says '{}'", str::from_utf8(&text)?);
    Ok(())
}
