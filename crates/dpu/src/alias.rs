// SPDX-License-Identifier: Apache-2.0
//! [`Alias`]: the DPU's own mapping of guest RAM, watched by a userfaultfd.
//!
//! DMA goes through this process' mapping of the VM's files, and only to pages with a lease. If it
//! touched an absent page (an alias fault), the kernel would supply a fresh page of zeros, and the
//! guest would find zeros in place of its data. So the mapping has a userfaultfd of its own while a
//! VM owns the domain. An alias fault becomes an event, and the event a page request
//! ([`RequestKind::AliasFault`]) in a queue beside those of the engines, counted and served by the
//! host like any other. The thread that waits for the page is never an engine. The same happens,
//! correctly, to DMA into a page that the guest gave up to a balloon and reused without touching
//! it.
//!
//! An alias fault that cannot be served (unplugged RAM, a lost page, a VM that ended) must not go
//! on forever: an engine that is only woken faults again, and all tenants of that engine stand
//! still with it. Such a page gets zeros, in a file that no longer belongs to the VM; if that
//! fails, the page is no longer watched. The first such case is logged, and then each time their
//! number doubles. A lost page stays lost for the guest: its poison marker is in the VMM's own page
//! table.

use pagetide_addr::{
    Access, DeviceId, DomainId, FilePage, Hva, PAGE_BYTES, PageRequest, PageResponse, QueueId,
    RequestId, RequestKind, ResponseCode,
};
use pagetide_sys::uffd::{Features, FillOutcome, Userfaultfd, Watch, page_of};
use pagetide_vpri::{DeviceEnd, Doorbell, MappingWatch, RamWindow};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fd::AsFd,
};
use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

/// Attempts to install zeros while our address space is changing.
const ZERO_TRIES_MAX: u32 = 10_000;
/// Outstanding alias faults: one for each thread of ours that can block in one, and many more.
pub(crate) const ALIAS_FAULTS_MAX: usize = 64;
/// Device id in requests for alias faults: the DPU itself, not one of its devices.
const DPU_ITSELF: DeviceId = DeviceId(u32::MAX);

/// The watch over this process' mappings.
#[derive(Debug)]
pub(crate) struct Alias {
    watched: Arc<WatchedRanges>,
    running: Mutex<Running>,
    bell: Arc<Doorbell>,
    stop: Arc<AtomicBool>,
}

#[derive(Debug)]
enum Running {
    /// Nothing is watched yet.
    Not(Option<Seed>),
    Yes {
        userfaultfd: Arc<Userfaultfd>,
        thread: Option<JoinHandle<()>>,
    },
}

/// The parts of the thread.
#[derive(Debug)]
struct Seed {
    end: DeviceEnd,
    index: usize,
}

#[derive(Debug, Default)]
struct WatchedRanges(Mutex<Vec<Watched>>);

#[derive(Debug, Clone, Copy)]
struct Watched {
    domain: DomainId,
    /// Offset in the file of its first byte.
    first_byte: u64,
    start: Hva,
    bytes: u64,
    /// Bytes of the file's pages.
    page_bytes: u64,
}

impl WatchedRanges {
    fn lock(&self) -> MutexGuard<'_, Vec<Watched>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Address and length of the huge page at `address`, if it is in one.
    fn huge_page_at(&self, address: Hva) -> Option<(Hva, u64)> {
        self.lock().iter().find_map(|watched| {
            let offset = address.offset_from(watched.start)?;
            let is_huge = offset < watched.bytes && watched.page_bytes > PAGE_BYTES;
            let start = watched.start.0 + offset - offset % watched.page_bytes;
            is_huge.then_some((Hva(start), watched.page_bytes))
        })
    }

    /// The domain and page at `address`.
    fn page_at(&self, address: Hva) -> Option<(DomainId, FilePage)> {
        self.lock().iter().find_map(|watched| {
            let offset = address.offset_from(watched.start)?;
            let page = FilePage::containing(watched.first_byte + offset);
            (offset < watched.bytes).then_some((watched.domain, page))
        })
    }
}

impl Alias {
    /// Watches nothing yet. `end` is the device end of a queue of its own, number `index` among the
    /// DPU's queues, whose responses ring `bell`.
    pub fn new(end: DeviceEnd, index: usize, bell: Arc<Doorbell>) -> Self {
        Self {
            watched: Arc::default(),
            running: Mutex::new(Running::Not(Some(Seed { end, index }))),
            bell,
            stop: Arc::default(),
        }
    }

    fn userfaultfd(&self) -> Result<Arc<Userfaultfd>, String> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let seed = match &mut *running {
            Running::Yes { userfaultfd, .. } => return Ok(Arc::clone(userfaultfd)),
            Running::Not(seed) => seed,
        };
        let userfaultfd = Userfaultfd::create_here().map_err(|error| error.to_string())?;
        let api = userfaultfd.api(Features::WANTED);
        api.map_err(|error| error.to_string())?;
        let userfaultfd = Arc::new(userfaultfd);
        let Some(Seed { end, index }) = seed.take() else {
            return Err("its thread could not be started before".to_owned());
        };
        let server = Server {
            userfaultfd: Arc::clone(&userfaultfd),
            watched: Arc::clone(&self.watched),
            bell: Arc::clone(&self.bell),
            stop: Arc::clone(&self.stop),
            end,
            next_id: (index as u64) << 48,
            asked: HashMap::new(),
            unsent: VecDeque::new(),
            alias_faults: 0,
            zeroed: 0,
        };
        let thread = std::thread::Builder::new()
            .name("pt-alias".into())
            .spawn(move || server.run())
            .map_err(|error| error.to_string())?;
        *running = Running::Yes {
            userfaultfd: Arc::clone(&userfaultfd),
            thread: Some(thread),
        };
        Ok(userfaultfd)
    }
}

impl MappingWatch for Alias {
    fn watch(&self, window: &RamWindow) -> Result<(), String> {
        let start = window.address();
        let page_bytes = window.page_bytes();
        let userfaultfd = self.userfaultfd()?;
        let watched = Watched {
            domain: window.domain().id(),
            first_byte: window.first_byte(),
            start,
            bytes: window.len_bytes().next_multiple_of(page_bytes),
            page_bytes,
        };
        {
            let mut listed = self.watched.lock();
            if listed.iter().any(|w| w.start == start) {
                return Ok(());
            }
            // Add it to the list first: an event may come at once.
            listed.push(watched);
        }
        let watch = Watch::MissingAndWriteProtected;
        let registered = userfaultfd.register(watched.start, watched.bytes, watch);
        registered.map_err(|error| {
            self.watched.lock().retain(|w| w.start != start);
            error.to_string()
        })
    }

    fn unwatch(&self, window: &RamWindow) {
        let gone = {
            let mut watched = self.watched.lock();
            let at = watched.iter().position(|w| w.start == window.address());
            at.map(|at| watched.swap_remove(at))
        };
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(gone), Running::Yes { userfaultfd, .. }) = (gone, &*running)
            // This wakes threads of ours that are blocked there.
            && let Err(error) = userfaultfd.unregister(gone.start, gone.bytes)
        {
            tracing::error!(%error, "our mapping of a VM's RAM stays watched");
        }
    }
}

impl Drop for Alias {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring_anyway();
        let running = self.running.get_mut();
        if let Running::Yes { thread, .. } = running.unwrap_or_else(PoisonError::into_inner)
            && thread.take().is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("the watch over our mapping panicked");
        }
    }
}

/// The thread that requests pages on alias faults.
struct Server {
    userfaultfd: Arc<Userfaultfd>,
    watched: Arc<WatchedRanges>,
    bell: Arc<Doorbell>,
    stop: Arc<AtomicBool>,
    end: DeviceEnd,
    next_id: u64,
    asked: HashMap<RequestId, Hva>,
    unsent: VecDeque<(PageRequest, Hva)>,
    alias_faults: u64,
    zeroed: u64,
}

impl Server {
    fn run(mut self) {
        let mut events = Vec::new();
        while !self.stop.load(Ordering::Acquire) {
            if let Err(error) = self.wait() {
                tracing::error!(%error, "the watch over our mapping cannot wait for events");
                return;
            }
            if let Err(error) = self.userfaultfd.read_faults(&mut events) {
                tracing::error!(%error, "the watch over our mapping cannot read its events");
                return;
            }
            for event in &events {
                self.alias_fault(page_of(event.address));
            }
            while let Some(response) = self.end.next() {
                self.answered(&response);
            }
            self.send();
        }
    }

    fn wait(&self) -> Result<(), rustix::io::Errno> {
        self.bell.arm();
        let waits = !self.end.has_response() && !self.stop.load(Ordering::Acquire);
        if waits {
            let mut polled = [
                PollFd::from_borrowed_fd(self.userfaultfd.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.bell.as_fd(), PollFlags::IN),
            ];
            match poll(&mut polled, None) {
                // EINTR: checked again anyway.
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        if let Err(error) = self.bell.disarm() {
            tracing::error!(%error, "the doorbell of the watch over our mapping is broken");
        }
        Ok(())
    }

    fn alias_fault(&mut self, address: Hva) {
        if self.alias_faults == 0 {
            tracing::error!(%address, "our DMA touched an absent page; it is served and counted. Without a balloon or free page reporting in the guest this is a bug");
        }
        self.alias_faults += 1;
        let Some((domain, page)) = self.watched.page_at(address) else {
            // No VM owns it any more: a blocked thread proceeds as with any file.
            self.release(address, ResponseCode::InvalidRequest);
            return;
        };
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let request = PageRequest {
            kind: RequestKind::AliasFault,
            ..PageRequest::demand(
                id,
                DPU_ITSELF,
                QueueId(0),
                domain,
                page.single(),
                Access::Write,
            )
        };
        self.unsent.push_back((request, address));
    }

    fn send(&mut self) {
        while let Some((request, address)) = self.unsent.pop_front() {
            if self.end.submit(request).is_err() {
                self.unsent.push_front((request, address));
                break;
            }
            self.asked.insert(request.id, address);
        }
        self.end.kick();
    }

    fn answered(&mut self, response: &PageResponse) {
        if let Some(address) = self.asked.remove(&response.id) {
            self.release(address, response.code);
        }
    }

    /// Unblocks a thread of ours that is in an alias fault.
    fn release(&mut self, address: Hva, code: ResponseCode) {
        if code != ResponseCode::Success {
            self.zeroed += 1;
            if self.zeroed.is_power_of_two() {
                tracing::error!(%address, ?code, count = self.zeroed, "our DMA touched a page that cannot be served; it got zeros");
            }
            match self.watched.huge_page_at(address) {
                // There may be no huge page for zeros.
                Some((start, bytes)) => stop_watching(&self.userfaultfd, start, bytes),
                None => fill_with_zeros(&self.userfaultfd, address),
            }
        }
        // In any case: installing a page that was already present wakes no thread.
        if let Err(error) = self.userfaultfd.wake(address, PAGE_BYTES) {
            tracing::error!(%error, "a thread of ours stays blocked in its own fault");
        }
    }
}

fn fill_with_zeros(userfaultfd: &Userfaultfd, address: Hva) {
    for _ in 0..ZERO_TRIES_MAX {
        match userfaultfd.zeropage(address, PAGE_BYTES) {
            Ok(FillOutcome::Retry) => std::thread::yield_now(),
            Ok(FillOutcome::Filled { .. } | FillOutcome::AlreadyThere | FillOutcome::Gone) => {
                return;
            }
            Err(error) => {
                tracing::debug!(%address, %error, "no zeros for an alias fault");
                break;
            }
        }
    }
    stop_watching(userfaultfd, address, PAGE_BYTES);
}

/// Memory that the file lacks then reads as zeros, and the device that touched it stops.
fn stop_watching(userfaultfd: &Userfaultfd, start: Hva, bytes: u64) {
    if let Err(error) = userfaultfd.unregister(start, bytes) {
        tracing::error!(%error, "a page of ours that cannot be served stays watched");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_sys::memory_file::GuestFile;
    use pagetide_vpri::{DomainTable, HostEnd, fault_queue};

    struct Rig {
        alias: Arc<Alias>,
        host: HostEnd,
        host_bell: Arc<Doorbell>,
        table: DomainTable,
        file: GuestFile,
        window: Arc<RamWindow>,
        domain: Arc<pagetide_vpri::DmaDomain>,
    }

    fn rig(pages: u64) -> Option<Rig> {
        if let Err(error) = Userfaultfd::create_here() {
            eprintln!("SKIPPED: {error}");
            return None;
        }
        let bell = || Arc::new(Doorbell::new().unwrap());
        let (own, host_bell) = (bell(), bell());
        let (end, host) = fault_queue(ALIAS_FAULTS_MAX, own.clone(), host_bell.clone());
        let alias = Arc::new(Alias::new(end, 1, own));
        let table = DomainTable::new(1);
        table.set_watch(alias.clone());
        let file = GuestFile::new_memfd("alias", pages * PAGE_BYTES).unwrap();
        let window = table.map_whole(file.as_fd()).unwrap();
        let domain = Arc::clone(window.domain());
        Some(Rig {
            alias,
            host,
            host_bell,
            table,
            file,
            window,
            domain,
        })
    }

    impl Rig {
        fn take(&self) {
            self.domain.attach().unwrap();
            self.domain.watch().unwrap();
        }

        /// Reads a byte of `page` through our mapping, and answers the alias fault with `answer`.
        fn touch(&self, page: u64, answer: impl FnOnce(PageRequest)) -> u8 {
            let mapping = &self.window;
            std::thread::scope(|scope| {
                let alias_fault = scope.spawn(|| {
                    let mut byte = [9];
                    mapping.copy_from(page * PAGE_BYTES, &mut byte).unwrap();
                    byte[0]
                });
                let request = loop {
                    self.host_bell.arm();
                    if let Some(request) = self.host.next() {
                        break request;
                    }
                    poll(&mut [PollFd::new(&self.host_bell, PollFlags::IN)], None).unwrap();
                    self.host_bell.disarm().unwrap();
                };
                answer(request);
                alias_fault.join().unwrap()
            })
        }
    }

    #[test]
    fn alias_fault_in_an_attached_domain_is_a_page_request_and_gets_zeros_only_if_it_is_refused() {
        let Some(rig) = rig(3) else { return };
        rig.take();
        let byte = rig.touch(1, |request| {
            assert_eq!(request.kind, RequestKind::AliasFault);
            assert_eq!(
                (request.domain, request.pages),
                (rig.domain.id(), FilePage(1).single())
            );
            // As a host does: first the page is written to the file, then the answer is sent.
            rig.file.write_at(PAGE_BYTES, &[77]).unwrap();
            rig.host
                .respond(PageResponse::to(&request, ResponseCode::Success));
        });
        assert_eq!(byte, 77);
        let byte = rig.touch(2, |request| {
            let refused = PageResponse::to(&request, ResponseCode::InvalidRequest);
            rig.host.respond(refused);
        });
        assert_eq!(byte, 0);
        assert!(rig.file.is_data(2 * PAGE_BYTES).unwrap() && !rig.file.is_data(0).unwrap());
    }

    #[test]
    fn domain_that_is_nobodys_or_was_given_back_is_not_watched() {
        let Some(rig) = rig(2) else { return };
        let mapping = rig.window.clone();
        mapping.copy_to(0, &[1]).unwrap();
        rig.take();
        assert_eq!(rig.alias.watched.lock().len(), 1);
        rig.domain.detach();
        assert!(rig.alias.watched.lock().is_empty());
        // Would block forever if it were watched.
        mapping.copy_to(PAGE_BYTES, &[1]).unwrap();
        rig.take();
        rig.table.retire(&rig.domain);
        assert!(rig.alias.watched.lock().is_empty());
    }
}
