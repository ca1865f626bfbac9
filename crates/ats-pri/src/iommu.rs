// SPDX-License-Identifier: Apache-2.0
//! The IOMMU, between devices and host memory.
//!
//! It receives three things from devices: translation requests, which it answers by
//! a walk of the page table; page request messages, which it puts into its queue;
//! and completions of invalidations. It sends two things to devices, both by
//! descriptors that software puts into the *invalidation queue*: invalidations of
//! device TLBs, and page group responses. The queue is in order, and one thread at
//! a time fills it (Linux has a spin lock there).

use super::{
    prq::{Descriptor, Message, PageRequestQueue, Position, QueueCounts, RequesterId, Stored},
    requests::PageRequests,
    space::PriSpace,
    table::Entry,
    tlb::DevTlb,
};
use pagetide_addr::{Access, DomainId, FileKey, FileRange, ResponseCode};
use pagetide_sys::mapping::SharedMapping;
use pagetide_vpri::DomainError;
use std::{
    collections::{HashMap, HashSet},
    io,
    os::fd::BorrowedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// Id of the first space: far from those of [`pagetide_vpri::DomainTable`], which counts from 0, so that one
/// service can serve both.
const FIRST_ID: u32 = 1 << 31;

/// How the hardware answers the last message of a group that finds the queue overflown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OverflowAnswer {
    /// *Success*, though nothing was done: the device still finds the page absent, and asks again.
    Success,
    /// *Response failure*: the device's page request interface stops until its driver restarts it.
    ResponseFailure,
}

/// Configuration of an IOMMU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IommuConfig {
    /// The page request queue has 2^order pages of 4 KiB; Linux' has order 4: 2,048 descriptors.
    pub prq_order: u32,
    /// Time of one way across PCIe. A device spins this long where real hardware would wait.
    pub crossing: Duration,
    /// The answer for groups when the queue is full.
    pub overflow: OverflowAnswer,
}

impl Default for IommuConfig {
    /// Linux' settings for VT-d, on a bus that takes no time.
    fn default() -> Self {
        Self {
            prq_order: 4,
            crossing: Duration::ZERO,
            overflow: OverflowAnswer::Success,
        }
    }
}

/// Counters of an IOMMU.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct IommuCounts {
    /// Its page request queue.
    pub queue: QueueCounts,
    /// Translation requests answered.
    pub translations: u64,
    /// Groups that the hardware answered itself, because of an overflow.
    pub answered_by_hardware: u64,
    /// Page group responses that software sent.
    pub responses: u64,
    /// Invalidations of device TLBs.
    pub invalidations: u64,
}

/// A device, as seen by the IOMMU.
#[derive(Debug)]
pub(super) struct Function {
    pub id: RequesterId,
    pub space: Arc<PriSpace>,
    pub tlb: DevTlb,
    pub requests: PageRequests,
}

/// The invalidation queue, through which software reaches devices.
#[derive(Debug)]
pub(super) struct InvalidationQueue {
    crossing: Duration,
    /// Held while descriptors are put in, which the hardware carries out in order.
    ring: Mutex<()>,
    invalidations: AtomicU64,
    responses: AtomicU64,
}

impl InvalidationQueue {
    /// Has `functions` drop translations of `ranges`. They have done so when this returns; DMA that
    /// had begun before may still be under way.
    pub fn invalidate(&self, functions: &[Arc<Function>], ranges: &[FileRange]) {
        if functions.is_empty() {
            return;
        }
        {
            let _ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
            for function in functions {
                for range in ranges {
                    function.tlb.invalidate(*range);
                    self.invalidations.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        // To the devices and back, all at once; software spins until the wait descriptor is done.
        spin(self.crossing * 2);
    }

    /// Sends a page group response; true if the device expected one. The device spins for the way.
    pub fn respond(&self, function: &Function, group: u16, code: ResponseCode) -> bool {
        let _ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        self.responses.fetch_add(1, Ordering::Relaxed);
        function.requests.answer(group, code)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Iommu {
    config: IommuConfig,
    queue: PageRequestQueue,
    invalidations: Arc<InvalidationQueue>,
    contexts: RwLock<HashMap<RequesterId, Arc<Function>>>,
    spaces: Mutex<Spaces>,
    translations: AtomicU64,
    answered_by_hardware: AtomicU64,
}

#[derive(Debug)]
struct Spaces {
    next_id: u32,
    barred: HashSet<FileKey>,
    by_key: HashMap<FileKey, Weak<PriSpace>>,
}

impl Iommu {
    /// An IOMMU without devices.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub fn new(config: IommuConfig) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            config,
            queue: PageRequestQueue::new(config.prq_order)?,
            invalidations: Arc::new(InvalidationQueue {
                crossing: config.crossing,
                ring: Mutex::default(),
                invalidations: AtomicU64::new(0),
                responses: AtomicU64::new(0),
            }),
            contexts: RwLock::default(),
            spaces: Mutex::new(Spaces {
                next_id: FIRST_ID,
                barred: HashSet::new(),
                by_key: HashMap::new(),
            }),
            translations: AtomicU64::new(0),
            answered_by_hardware: AtomicU64::new(0),
        }))
    }

    /// Time of one way across PCIe.
    #[must_use]
    pub fn crossing(&self) -> Duration {
        self.config.crossing
    }

    /// The counters so far.
    #[must_use]
    pub fn counts(&self) -> IommuCounts {
        IommuCounts {
            queue: self.queue.counts(),
            translations: self.translations.load(Ordering::Relaxed),
            answered_by_hardware: self.answered_by_hardware.load(Ordering::Relaxed),
            responses: self.invalidations.responses.load(Ordering::Relaxed),
            invalidations: self.invalidations.invalidations.load(Ordering::Relaxed),
        }
    }

    /// The address space of `file`, made and mapped if there is none. `key` and `bytes` are as
    /// `fstat` reports them. Every page is read-write until a VM is attached and unmaps it: up to
    /// then the space is like that of a pinned VM.
    ///
    /// # Errors
    /// [`DomainError::Barred`], [`DomainError::Map`], [`DomainError::TooLarge`].
    pub fn open_space(
        &self,
        file: BorrowedFd<'_>,
        key: FileKey,
        bytes: u64,
    ) -> Result<Arc<PriSpace>, DomainError> {
        let mut spaces = self.lock_spaces();
        if spaces.barred.contains(&key) {
            return Err(DomainError::Barred(key));
        }
        if let Some(known) = spaces.by_key.get(&key).and_then(Weak::upgrade) {
            return Ok(known);
        }
        if bytes.div_ceil(pagetide_addr::PAGE_BYTES) > super::table::PAGES_MAX {
            return Err(DomainError::TooLarge(bytes));
        }
        let mapped = SharedMapping::new(file, bytes);
        let mapping = mapped.map_err(|source| DomainError::Map { key, bytes, source })?;
        let id = DomainId(spaces.next_id);
        spaces.next_id += 1;
        let queue = Arc::clone(&self.invalidations);
        let space = Arc::new(PriSpace::new(id, key, Arc::new(mapping), queue));
        spaces.by_key.retain(|_, known| known.strong_count() > 0);
        spaces.by_key.insert(key, Arc::downgrade(&space));
        Ok(space)
    }

    /// From now on, no space of the file `key` is opened.
    pub(super) fn bar_file(&self, key: FileKey) {
        self.lock_spaces().barred.insert(key);
    }

    /// Removes the space of the file `key`, so that it is no longer found.
    pub(super) fn forget_space(&self, key: FileKey) {
        self.lock_spaces().by_key.remove(&key);
    }

    fn lock_spaces(&self) -> MutexGuard<'_, Spaces> {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The page request queue, for its driver.
    pub(super) fn queue(&self) -> &PageRequestQueue {
        &self.queue
    }

    /// Registers `function`; `None` if its id is taken.
    pub(super) fn add(&self, function: Function) -> Option<Arc<Function>> {
        let mut contexts = self
            .contexts
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if contexts.contains_key(&function.id) {
            return None;
        }
        let function = Arc::new(function);
        function.space.attach_function(&function);
        contexts.insert(function.id, Arc::clone(&function));
        Some(function)
    }

    /// Unregisters `id`: its messages are dropped.
    pub(super) fn remove(&self, id: RequesterId) {
        let mut contexts = self
            .contexts
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        contexts.remove(&id);
    }

    /// The device `id`.
    pub(super) fn function(&self, id: RequesterId) -> Option<Arc<Function>> {
        let contexts = self.contexts.read().unwrap_or_else(PoisonError::into_inner);
        contexts.get(&id).map(Arc::clone)
    }

    /// Hardware: a translation request for one or several adjacent pages. Appends the entries to
    /// `found`.
    pub(super) fn translate(
        &self,
        function: &Function,
        pages: FileRange,
        access: Access,
        found: &mut Vec<Entry>,
    ) {
        spin(self.config.crossing);
        let table = function.space.table();
        found.extend(pages.iter().map(|page| table.walk(page, access)));
        self.translations.fetch_add(1, Ordering::Relaxed);
        spin(self.config.crossing);
    }

    /// Hardware: a page request message has arrived from the device that it names.
    pub(super) fn page_request(&self, words: Descriptor) {
        if self.queue.put(words) == Stored::Stored {
            return;
        }
        let (device, group, position) = match Message::decode(words) {
            Message::Page(page) => (page.device, page.group, page.position),
            Message::Unsupported {
                device,
                group,
                position,
            } => (device, group, position),
            Message::StopMarker(_) => return,
        };
        if position == Position::Last
            && let Some(function) = self.function(device)
        {
            self.answered_by_hardware.fetch_add(1, Ordering::Relaxed);
            let code = match self.config.overflow {
                OverflowAnswer::Success => ResponseCode::Success,
                OverflowAnswer::ResponseFailure => ResponseCode::ResponseFailure,
            };
            function.requests.answer(group, code);
        }
    }

    /// Software: answers a group; true if the device expected that.
    pub(super) fn respond(&self, function: &Function, group: u16, code: ResponseCode) -> bool {
        self.invalidations.respond(function, group, code)
    }
}

/// Waits as hardware does: without yielding the CPU.
pub(super) fn spin(time: Duration) {
    if time.is_zero() {
        return;
    }
    let begun = Instant::now();
    while begun.elapsed() < time {
        std::hint::spin_loop();
    }
}
