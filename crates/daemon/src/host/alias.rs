// SPDX-License-Identifier: Apache-2.0
//! [`AliasGuard`]: our own mapping of guest RAM, watched.
//!
//! DMA goes through this process' mapping of the VM's files, only ever to pages
//! it holds a lease on. Should it slip and touch a page that is absent, the
//! kernel would hand it a fresh page of zeros, and the guest would find that in
//! place of its data. So the mapping carries a userfaultfd of its own: a slip
//! becomes an event that is counted and served like any fault, by a thread that
//! is never an engine. The same happens, rightly, to DMA into a page that the
//! guest gave up to a balloon and took again without touching it.

use pagetide_addr::{Access, Hva, PAGE_BYTES, PageNo, PageRange};
use pagetide_gmem::{AddressSpace, Fault};
use pagetide_sys::uffd::{Features, UffdError, Userfaultfd, Watch, page_of};
use pagetide_vpri::{DPU, DmaDomain, DmaMmu, Doorbell};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fd::AsFd,
};
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

/// The watch over our mappings of one VM; ends when dropped.
pub(super) struct AliasGuard {
    userfaultfd: Arc<Userfaultfd>,
    ranges: Vec<(Hva, u64)>,
    stop: Arc<Stop>,
    faults: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

struct Stop {
    bell: Doorbell,
    asked: AtomicBool,
}

/// Why our mappings cannot be watched.
#[derive(Debug, thiserror::Error)]
pub(super) enum AliasError {
    #[error("our own mapping of the VM's RAM cannot be watched: {0}")]
    Uffd(#[from] UffdError),
    #[error("the watch over our own mapping cannot be started: {0}")]
    Thread(#[from] io::Error),
}

fn range_of(domain: &DmaDomain) -> (Hva, u64) {
    (Hva(domain.mapping().address() as u64), domain.len_bytes())
}

impl AliasGuard {
    /// Watches the mappings of `mmu`'s domains from now on. Their faults wait until
    /// [`Self::serve`] is called.
    pub(super) fn watch(mmu: &DmaMmu) -> Result<Self, AliasError> {
        let userfaultfd = Userfaultfd::create_here()?;
        userfaultfd.api(Features::WANTED)?;
        let stop = Arc::new(Stop {
            bell: Doorbell::new()?,
            asked: AtomicBool::new(false),
        });
        let mut guard = Self {
            userfaultfd: Arc::new(userfaultfd),
            ranges: Vec::new(),
            stop,
            faults: Arc::default(),
            thread: None,
        };
        for domain in mmu.domains() {
            guard.add(&domain)?;
        }
        Ok(guard)
    }

    /// Watches the mapping of one more domain.
    pub(super) fn add(&mut self, domain: &DmaDomain) -> Result<(), AliasError> {
        let (start, len_bytes) = range_of(domain);
        self.userfaultfd
            .register(start, len_bytes, Watch::MissingAndWriteProtected)?;
        self.ranges.push((start, len_bytes));
        Ok(())
    }

    /// Watches the mapping of a domain no more; threads of ours that wait there go on.
    pub(super) fn remove(&mut self, domain: &DmaDomain) {
        let range = range_of(domain);
        let known = self.ranges.len();
        self.ranges.retain(|known| *known != range);
        if self.ranges.len() < known {
            self.unwatch(range);
        }
    }

    fn unwatch(&self, (start, len_bytes): (Hva, u64)) {
        if let Err(error) = self.userfaultfd.unregister(start, len_bytes) {
            tracing::error!(%error, "our mapping of a VM's RAM stays watched");
        }
    }

    /// Serves the faults of our mappings through `space`.
    pub(super) fn serve(
        &mut self,
        space: Arc<AddressSpace>,
        mmu: Arc<DmaMmu>,
    ) -> Result<(), AliasError> {
        let server = AliasServer {
            userfaultfd: Arc::clone(&self.userfaultfd),
            stop: Arc::clone(&self.stop),
            faults: Arc::clone(&self.faults),
            space,
            mmu,
        };
        self.thread = Some(
            std::thread::Builder::new()
                .name("pt-alias".into())
                .spawn(move || server.run())?,
        );
        Ok(())
    }

    /// Accesses of ours to absent pages so far: pages that the guest gave up (balloon, free page
    /// reporting) while its device kept access; without a balloon each one is a bug of ours.
    pub(super) fn faults(&self) -> u64 {
        self.faults.load(Ordering::Relaxed)
    }
}

impl Drop for AliasGuard {
    fn drop(&mut self) {
        for range in &self.ranges {
            self.unwatch(*range);
        }
        self.stop.asked.store(true, Ordering::Release);
        self.stop.bell.ring_anyway();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the watch over our mapping ended by a panic");
        }
    }
}

struct AliasServer {
    userfaultfd: Arc<Userfaultfd>,
    stop: Arc<Stop>,
    faults: Arc<AtomicU64>,
    space: Arc<AddressSpace>,
    mmu: Arc<DmaMmu>,
}

impl AliasServer {
    fn run(self) {
        let mut events = Vec::new();
        while !self.stop.asked.load(Ordering::Acquire) {
            let mut polled = [
                PollFd::from_borrowed_fd(self.userfaultfd.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.stop.bell.as_fd(), PollFlags::IN),
            ];
            // EINTR: looked at again anyway.
            if let Err(error) = poll(&mut polled, None)
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(%error, "the watch over our mapping cannot wait for events");
                return;
            }
            if let Err(error) = self.userfaultfd.read_faults(&mut events) {
                tracing::error!(%error, "the watch over our mapping cannot read its events");
                return;
            }
            for event in &events {
                self.slip(page_of(event.address));
            }
        }
    }

    fn slip(&self, address: Hva) {
        let count = self.faults.fetch_add(1, Ordering::Relaxed);
        if count == 0 {
            tracing::error!(%address, "our DMA touched an absent page; it is served and counted. Without a balloon or free page reporting in the guest this is a bug");
        }
        let userfaultfd = Arc::clone(&self.userfaultfd);
        let wake = move || {
            if let Err(error) = userfaultfd.wake(address, PAGE_BYTES) {
                tracing::error!(%error, "a thread of ours stays blocked in its own fault");
            }
        };
        match self.page_at(address) {
            Some(page) => {
                let fault = Fault {
                    device: DPU,
                    pages: page,
                    access: Access::Write,
                };
                self.space.fault(&fault, Some(Box::new(move |_| wake())));
            }
            None => wake(),
        }
    }

    fn page_at(&self, address: Hva) -> Option<PageRange> {
        self.mmu.domains().iter().find_map(|domain| {
            let (start, len_bytes) = range_of(domain);
            let offset = address
                .offset_from(start)
                .filter(|offset| *offset < len_bytes)?;
            self.mmu
                .in_space(domain.id(), PageNo::containing(offset).single())
        })
    }
}
