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
//!
//! A slip that cannot be served (RAM that was unplugged, a page that is lost, a VM
//! that ended) must not go on for ever: an engine that is only woken faults again,
//! and with it stand all tenants of that engine. It gets a page of zeros, of a file
//! that is the VM's no more; where that fails the page is watched no more. The
//! log says so, the first time and whenever the number has doubled. A page that is
//! lost stays so for the guest: that mark is in the VMM's own page table.

use pagetide_addr::{Access, Hva, PAGE_BYTES, PageNo, PageRange};
use pagetide_gmem::{AddressSpace, Fault, FaultOutcome};
use pagetide_sys::uffd::{Features, FillOutcome, UffdError, Userfaultfd, Watch, page_of};
use pagetide_vpri::{DPU, DmaMmu, Doorbell, IoSpace};
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

/// Tries to put zeros in place while our address space is changing.
const ZERO_TRIES_MAX: u32 = 10_000;

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

/// Where this process has mapped the domain's file; `None` if it has not.
fn range_of(domain: &dyn IoSpace) -> Option<(Hva, u64)> {
    let mapping = domain.mapping()?;
    Some((Hva(mapping.address() as u64), domain.len_bytes()))
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
            guard.add(&*domain)?;
        }
        Ok(guard)
    }

    /// Watches the mapping of one more domain.
    pub(super) fn add(&mut self, domain: &dyn IoSpace) -> Result<(), AliasError> {
        let Some((start, len_bytes)) = range_of(domain) else {
            return Ok(());
        };
        self.userfaultfd
            .register(start, len_bytes, Watch::MissingAndWriteProtected)?;
        self.ranges.push((start, len_bytes));
        Ok(())
    }

    /// Watches the mapping of a domain no more; threads of ours that wait there go on.
    pub(super) fn remove(&mut self, domain: &dyn IoSpace) {
        let Some(range) = range_of(domain) else {
            return;
        };
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
            zeroed: Arc::default(),
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
    zeroed: Arc<AtomicU64>,
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
        let waiting = Waiting {
            userfaultfd: Arc::clone(&self.userfaultfd),
            zeroed: Arc::clone(&self.zeroed),
            address,
        };
        match self.page_at(address) {
            Some(page) => {
                let fault = Fault {
                    device: DPU,
                    pages: page,
                    access: Access::Write,
                };
                let answer = move |outcome| waiting.release(outcome);
                self.space.fault(&fault, Some(Box::new(answer)));
            }
            None => waiting.release(FaultOutcome::OutOfRange),
        }
    }

    fn page_at(&self, address: Hva) -> Option<PageRange> {
        self.mmu.domains().iter().find_map(|domain| {
            let (start, len_bytes) = range_of(&**domain)?;
            let offset = address
                .offset_from(start)
                .filter(|offset| *offset < len_bytes)?;
            self.mmu
                .in_space(domain.id(), PageNo::containing(offset).single())
        })
    }
}

/// A thread of ours that has slipped and waits.
struct Waiting {
    userfaultfd: Arc<Userfaultfd>,
    zeroed: Arc<AtomicU64>,
    address: Hva,
}

impl Waiting {
    /// Lets it go on. May be called under a section's lock: our own page table is all it changes.
    fn release(&self, outcome: FaultOutcome) {
        if outcome != FaultOutcome::Present {
            let count = self.zeroed.fetch_add(1, Ordering::Relaxed) + 1;
            if count.is_power_of_two() {
                tracing::error!(address = %self.address, ?outcome, count, "our DMA touched a page that cannot be served; it got zeros");
            }
            self.fill_with_zeros();
        }
        // Also after that: a page that was there already wakes nobody.
        if let Err(error) = self.userfaultfd.wake(self.address, PAGE_BYTES) {
            tracing::error!(%error, "a thread of ours stays blocked in its own fault");
        }
    }

    fn fill_with_zeros(&self) {
        for _ in 0..ZERO_TRIES_MAX {
            match self.userfaultfd.zeropage(self.address, PAGE_BYTES) {
                Ok(FillOutcome::Retry) => std::thread::yield_now(),
                Ok(FillOutcome::Filled { .. } | FillOutcome::AlreadyThere | FillOutcome::Gone) => {
                    return;
                }
                Err(error) => {
                    tracing::debug!(address = %self.address, %error, "no zeros for a slip");
                    break;
                }
            }
        }
        if let Err(error) = self.userfaultfd.unregister(self.address, PAGE_BYTES) {
            tracing::error!(%error, "a page of ours that cannot be served stays watched");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};

    #[test]
    fn slip_that_cannot_be_served_gets_zeros_once_and_its_thread_goes_on() {
        let userfaultfd = match Userfaultfd::create_here() {
            Ok(userfaultfd) => Arc::new(userfaultfd),
            Err(error) => {
                eprintln!("SKIPPED: {error}");
                return;
            }
        };
        userfaultfd.api(Features::WANTED).unwrap();
        let file = GuestFile::new_memfd("alias", 2 * PAGE_BYTES).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), 2 * PAGE_BYTES).unwrap();
        let start = Hva(mapping.address() as u64);
        userfaultfd
            .register(start, 2 * PAGE_BYTES, Watch::MissingAndWriteProtected)
            .unwrap();
        let zeroed = Arc::new(AtomicU64::new(0));
        std::thread::scope(|scope| {
            let slip = scope.spawn(|| {
                let mut byte = [9];
                mapping.copy_from(PAGE_BYTES, &mut byte).unwrap();
                byte
            });
            let mut events = Vec::new();
            while userfaultfd.read_faults(&mut events).unwrap() == 0 {
                let readable = PollFd::from_borrowed_fd(userfaultfd.as_fd(), PollFlags::IN);
                poll(&mut [readable], None).unwrap();
            }
            let waiting = Waiting {
                userfaultfd: Arc::clone(&userfaultfd),
                zeroed: Arc::clone(&zeroed),
                address: page_of(events[0].address),
            };
            waiting.release(FaultOutcome::OutOfRange);
            assert_eq!(slip.join().unwrap(), [0]);
        });
        assert_eq!(zeroed.load(Ordering::Relaxed), 1);
        assert!(file.is_data(PAGE_BYTES).unwrap() && !file.is_data(0).unwrap());
    }
}
