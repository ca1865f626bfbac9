// SPDX-License-Identifier: Apache-2.0
//! Reads into absent pages whose old content is not needed.
//!
//! # Idea
//! A read that covers an absent page entirely makes its old content worthless. So such pages are
//! not requested: their part of the transfer lands in bounce buffers of the engine
//! ([`BounceArea`]), the rest goes to guest memory as usual. When the disk is done and the number
//! of bytes read is known, the host is asked to install the pages with the data from the bounce
//! buffers ([`Overwrite`](RequestKind::Overwrite)).
//!
//! ```text
//!   leases fail ─► plan ─► disk ─► overwrites out ─► all answered ─► status, used ring
//!                   │ no slots, no read                  │
//!                   ▼                                    └─ a page was there after all (a vCPU was
//!         all pages are asked for                           quicker): copy it under a lease; if that
//!                                                           is not to be had: the chain begins again
//! ```
//!
//! # What the guest sees
//! Until a page is installed it keeps its old content; then it holds the new data, all at once. A
//! transfer that failed half way overwrites only pages it had read entirely. Later pages, and a
//! page it had read in part, stay untouched. The used ring tells the driver not to rely on any byte
//! of either.
//!
//! # While overwrites are out
//! The chain holds no lease: the host may have to evict for it. It counts as I/O under way, not as
//! parked. It never times out and is never abandoned, because the host may still install its pages,
//! and after its completion, or its queue's end, the guest may use them for something else. After a
//! death it is in the in-flight region, and the read is done again.
//!
//! A host that is gone installs none of these pages any more: the bounce area went with its
//! session, and the next host answers accordingly. So a queue that stops without a host does not
//! wait for it (see [`super::stop`]).
//!
//! # Limits
//! Slots are few (see [`slots`]), and a device has at most [`OVERWRITES_PER_DEVICE_MAX`] requests
//! outstanding. Pages that get no slot are requested as usual.

mod plan;
pub(crate) mod slots;

pub(crate) use plan::{Plan, Planned, Run};

use super::{
    Device, Io,
    chain::{Origin, Request},
    take_queue,
};
use crate::{
    blk::request::{Frame, Header, Status, Work, decide},
    chain::Buffers,
    memory::{DeviceMemory, LeaseSet, Span},
    parked::{PageDemand, QueueKey},
    ring::Job,
    shared::{add, sub},
};
use pagetide_addr::{
    Access, DeviceId, FilePage, PAGE_BYTES, PageRequest, PageResponse, QueueId, RequestId,
    RequestKind,
};
use pagetide_vpri::{BounceArea, QueueFull};
use rustix::time::{ClockId, clock_gettime};
use slots::{Slots, Taken};
use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::Arc,
};

/// Most overwrites one device has outstanding on an engine.
pub const OVERWRITES_PER_DEVICE_MAX: usize = 32;
/// Ids of overwrites have this bit set; those of other page requests do not.
const ID_BIT: u64 = 1 << 47;

/// A read that may begin although some of its pages are absent.
pub(crate) struct Bounce {
    pub plan: Plan,
    /// Its offset on the image.
    pub offset: u64,
}

/// Whether a chain that cannot be leased as it is may use bounce buffers.
pub(crate) enum MayLand {
    /// No: request all its pages.
    No,
    /// Once these pages are present; their content is needed.
    Later(Vec<PageDemand>),
    /// Now. All pages that the device itself writes are leased.
    Now(LeaseSet, Box<Bounce>),
}

/// A page that was not installed, and the slot with its new content.
struct Left {
    page: Span,
    area: Arc<BounceArea>,
    slot: u32,
}

/// A read whose transfer is done and whose pages are being installed.
struct Settling {
    job: Box<Job<Request>>,
    status: Status,
    device: DeviceId,
    vector: Option<u16>,
    unsent: Vec<Run>,
    outstanding: usize,
    answered: Vec<Run>,
    left: Vec<Left>,
    installed_pages: u64,
}

/// An outstanding overwrite.
struct Out {
    of: u64,
    device: DeviceId,
    run: Run,
}

/// What a page response means for the bounce buffers.
pub(crate) enum Answered {
    /// It does not answer an overwrite.
    Foreign,
    /// More answers are due.
    More,
    /// All overwrites of this transfer are answered.
    Last(Settled),
}

/// A transfer whose overwrites have all been answered.
#[must_use = "its chain must be completed, or its guest waits for ever"]
pub(crate) struct Settled(Settling);

impl Settled {
    /// The slot of its device.
    pub fn device(&self) -> usize {
        self.0.job.request.key.device
    }
}

/// All transfers of an engine that use bounce buffers.
pub(crate) struct BounceBuffers {
    slots: Option<Slots>,
    settling: HashMap<u64, Settling>,
    /// Transfers with unsent overwrites.
    unsent: VecDeque<u64>,
    waiting: HashMap<RequestId, Out>,
    by_device: HashMap<DeviceId, usize>,
    next_id: u64,
    next_token: u64,
}

impl BounceBuffers {
    /// No transfers and no slots yet, for engine number `engine`.
    pub fn new(engine: usize) -> Self {
        Self {
            slots: None,
            settling: HashMap::new(),
            unsent: VecDeque::new(),
            waiting: HashMap::new(),
            by_device: HashMap::new(),
            next_id: (engine as u64) << 48 | ID_BIT,
            next_token: 0,
        }
    }

    /// Transfers use this area from now on; data in an earlier area stays until it is settled.
    pub fn set_area(&mut self, area: Option<Arc<BounceArea>>) {
        let same = match (&self.slots, &area) {
            (Some(slots), Some(area)) => Arc::ptr_eq(slots.area(), area),
            (None, None) => true,
            _ => false,
        };
        if !same {
            self.slots = area.map(Slots::new);
        }
    }

    fn take(&mut self, device: DeviceId, count: u32) -> Option<Taken> {
        self.slots.as_mut()?.take(device, count)
    }

    fn give_back(&mut self, slots: &Taken) {
        if let Some(mine) = &mut self.slots {
            mine.give_back(slots);
        }
    }

    pub(super) fn abandon(&mut self, plan: &Plan) {
        for run in &plan.runs {
            self.give_back(&run.slots);
        }
    }

    /// Returns the slots of a transfer that will not be done.
    pub(super) fn give_up(&mut self, runs: &mut Vec<Run>) {
        for run in runs.drain(..) {
            self.give_back(&run.slots);
        }
    }

    /// Forgets a transfer of `queue` that is being settled and returns its job, until there is none
    /// left. Slots of outstanding overwrites stay taken until the answers arrive.
    pub fn forsake_next(&mut self, queue: QueueKey) -> Option<Box<Job<Request>>> {
        let its = self.settling.iter();
        let mut its = its.filter(|(_, settling)| settling.job.request.key == queue);
        let token = *its.next()?.0;
        let settling = self.settling.remove(&token)?;
        self.unsent.retain(|unsent| *unsent != token);
        for run in settling.unsent.iter().chain(&settling.answered) {
            self.give_back(&run.slots);
        }
        Some(settling.job)
    }

    /// True if there are overwrites to be sent.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends overwrites, as far as the queue takes them and no device exceeds its share; returns
    /// how many.
    pub fn send(&mut self, mut submit: impl FnMut(PageRequest) -> Result<(), QueueFull>) -> usize {
        let mut sent = 0;
        let now_ns = now_ns();
        for _ in 0..self.unsent.len() {
            let Some(token) = self.unsent.pop_front() else {
                break;
            };
            let full = self.send_of(token, now_ns, &mut submit, &mut sent);
            let left = |settling: &Settling| !settling.unsent.is_empty();
            if self.settling.get(&token).is_some_and(left) {
                self.unsent.push_back(token);
            }
            if full.is_err() {
                break;
            }
        }
        sent
    }

    fn send_of(
        &mut self,
        token: u64,
        now_ns: u64,
        submit: &mut impl FnMut(PageRequest) -> Result<(), QueueFull>,
        sent: &mut usize,
    ) -> Result<(), QueueFull> {
        let Some(settling) = self.settling.get_mut(&token) else {
            return Ok(());
        };
        let device = settling.device;
        let outstanding = self.by_device.entry(device).or_insert(0);
        while *outstanding < OVERWRITES_PER_DEVICE_MAX
            && let Some(run) = settling.unsent.pop()
        {
            let id = RequestId(self.next_id);
            if let Err(full) = submit(settling.request(id, &run, now_ns)) {
                settling.unsent.push(run);
                return Err(full);
            }
            settling.outstanding += 1;
            *outstanding += 1;
            let of = token;
            self.waiting.insert(id, Out { of, device, run });
            self.next_id += 1;
            *sent += 1;
        }
        Ok(())
    }

    /// Handles the answer to an overwrite.
    pub fn answer(&mut self, response: &PageResponse) -> Answered {
        if response.id.0 & ID_BIT == 0 {
            return Answered::Foreign;
        }
        let Some(Out { of, device, run }) = self.waiting.remove(&response.id) else {
            return Answered::More;
        };
        if let Some(outstanding) = self.by_device.get_mut(&device) {
            *outstanding -= 1;
            if *outstanding == 0 {
                self.by_device.remove(&device);
            }
        }
        let Some(settling) = self.settling.get_mut(&of) else {
            // Its transfer was forsaken.
            self.give_back(&run.slots);
            return Answered::More;
        };
        settling.take_answer(run, response.installed);
        if settling.outstanding > 0 || !settling.unsent.is_empty() {
            return Answered::More;
        }
        match self.settling.remove(&of) {
            Some(settling) => Answered::Last(Settled(settling)),
            None => Answered::More,
        }
    }
}

impl Settling {
    fn request(&self, id: RequestId, run: &Run, now_ns: u64) -> PageRequest {
        let from = (self.device, QueueId(self.job.request.key.queue));
        let domain = self.job.dma.memory().port(run.span).domain().id();
        let pages = run.span.pages();
        PageRequest {
            kind: RequestKind::Overwrite {
                slot: run.slots.first,
            },
            vector: self.vector,
            sent_ns: now_ns,
            ..PageRequest::demand(id, from, domain, pages, Access::Write)
        }
    }

    fn take_answer(&mut self, run: Run, installed: u64) {
        self.outstanding -= 1;
        for (slot, page) in (run.slots.first..).zip(run.span.pages().iter()) {
            if installed & 1 << (slot - run.slots.first) != 0 {
                self.installed_pages += 1;
            } else {
                self.left.push(Left {
                    page: one_page(run.span, page),
                    area: run.slots.area.clone(),
                    slot,
                });
            }
        }
        self.answered.push(run);
    }

    /// Copies the pages that were not installed; all of them are leased. Returns false only after a
    /// bug of ours.
    fn copy_left(&self, memory: &DeviceMemory) -> bool {
        self.left.iter().all(|left| {
            let (from, to) = (left.area.bytes(left.slot, 1), memory.slice(left.page));
            let (Some(from), Ok(to)) = (from, to) else {
                debug_assert!(false, "a slot or page that was there is not");
                return false;
            };
            from.copy_to_volatile_slice(to);
            true
        })
    }
}

/// The host's monotonic clock, which both sides of the page fault queue read.
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let part = |number: i64| u64::try_from(number).unwrap_or(0);
    part(now.tv_sec)
        .saturating_mul(1_000_000_000)
        .saturating_add(part(now.tv_nsec))
}

fn one_page(run: Span, page: FilePage) -> Span {
    Span {
        offset: page.byte_offset(),
        len: PAGE_LEN,
        ..run
    }
}

/// [`PAGE_BYTES`], as lengths of spans are.
const PAGE_LEN: u32 = 4096;
const _: () = assert!(PAGE_LEN as u64 == PAGE_BYTES);

/// Leases the guest memory of a read that uses bounce buffers.
fn lease_around(memory: &DeviceMemory, frame: &Frame, plan: &Plan, leases: &mut LeaseSet) -> bool {
    leases.take(memory, frame.status, Access::Write)
        && std::iter::once(&frame.header)
            .chain(&frame.header_rest)
            .all(|span| leases.take(memory, *span, Access::Read))
        && plan
            .guest_spans()
            .all(|span| leases.take(memory, span, Access::Write))
}

impl Io {
    /// Decides whether a chain that cannot be leased as it is may use bounce buffers.
    pub(super) fn may_land(
        &mut self,
        device: &Device,
        memory: &DeviceMemory,
        frame: &Frame,
        buffers: &Buffers,
    ) -> MayLand {
        let id = device.shared.id;
        let plan = match plan::plan(&mut self.bounces, id, memory, frame, buffers) {
            Planned::Nothing => return MayLand::No,
            Planned::First(wanted) => return MayLand::Later(wanted),
            Planned::Begin(plan) => plan,
        };
        let mut leases = LeaseSet::default();
        if lease_around(memory, frame, &plan, &mut leases)
            && let Ok(header) = Header::read(memory, frame)
        {
            let bytes = |spans: &[Span]| spans.iter().map(|s| u64::from(s.len)).sum::<u64>();
            let (readable, writable) = (bytes(&buffers.readable), bytes(&buffers.writable));
            let work = decide(device.shared.limits(), header, readable, writable);
            if let Work::Read { offset } = work {
                return MayLand::Now(leases, Box::new(Bounce { plan, offset }));
            }
        }
        leases.release(memory);
        self.bounces.abandon(&plan);
        MayLand::No
    }

    /// Settles a transfer that used bounce buffers: requests that its pages be overwritten. Returns
    /// the job if there are none.
    pub(super) fn settle(
        &mut self,
        device: &Device,
        mut job: Box<Job<Request>>,
        status: Status,
    ) -> Option<Box<Job<Request>>> {
        job.request.course.transferred(self.now_ns);
        let written = u64::from(job.request.data_bytes).saturating_sub(job.dma.left());
        let mut unsent = Vec::new();
        for mut run in std::mem::take(&mut job.request.bounced) {
            let bytes = written.saturating_sub(run.from) / PAGE_BYTES * PAGE_BYTES;
            run.span.len = u32::try_from(bytes).map_or(run.span.len, |b| b.min(run.span.len));
            if run.span.len == 0 {
                self.bounces.give_back(&run.slots);
            } else {
                unsent.push(run);
            }
        }
        if unsent.is_empty() {
            return Some(job);
        }
        let memory = job.dma.memory().clone();
        job.request.leases.release(&memory);
        let queue = device.queues.get(usize::from(job.request.key.queue));
        let queue = queue.and_then(Option::as_ref);
        let bounces = &mut self.bounces;
        let token = bounces.next_token;
        bounces.next_token += 1;
        bounces.unsent.push_back(token);
        let settling = Settling {
            vector: queue.and_then(|queue| queue.asker(&device.shared, &memory).vector),
            device: device.shared.id,
            job,
            status,
            unsent,
            outstanding: 0,
            answered: Vec::new(),
            left: Vec::new(),
            installed_pages: 0,
        };
        bounces.settling.insert(token, settling);
        None
    }

    /// Completes a transfer whose pages are installed, or restarts its chain.
    pub(super) fn settled(&mut self, device: &mut Device, settled: Settled) -> io::Result<()> {
        let Settled(mut settling) = settled;
        let counters = &device.shared.counters[self.index];
        add(&counters.overwritten_pages, settling.installed_pages);
        let request = &mut settling.job.request;
        let (key, head, at) = (request.key, request.head, request.status);
        let course = request.course;
        let mut leases = std::mem::take(&mut request.leases);
        let memory = settling.job.dma.memory().clone();
        let left = settling.left.iter().map(|left| left.page);
        let delivered = std::iter::once(at)
            .chain(left)
            .all(|span| leases.take(&memory, span, Access::Write))
            && settling.copy_left(&memory);
        for run in &settling.answered {
            self.bounces.give_back(&run.slots);
        }
        let mut job = settling.job;
        if delivered {
            job.request.leases = leases;
            self.complete_job(device, job, settling.status);
            return Ok(());
        }
        leases.release(&memory);
        job.request.leases = leases;
        self.scratch.keep(job);
        let Some(mut queue) = take_queue(device, key) else {
            debug_assert!(false, "a queue went away under its I/O");
            return Ok(());
        };
        queue.in_flight -= 1;
        sub(&device.shared.counters[self.index].in_flight, 1);
        // A chain of an abandoned queue stays in the in-flight region.
        if !queue.is_abandoned() {
            self.serve(device, &mut queue, head, Origin::Again(course))?;
        }
        device.queues[usize::from(key.queue)] = Some(queue);
        Ok(())
    }
}
