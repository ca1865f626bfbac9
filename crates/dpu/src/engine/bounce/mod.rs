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
//!   leases fail ─► plan ─► disk ─► overwrites out ─► all answered ─► answer, used ring
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

pub(crate) mod plan;
pub(crate) mod slots;

use super::{device::Device, request::Request};
use crate::{
    kind::work::Outcome,
    memory::{DeviceMemory, Span},
    parked::QueueKey,
    ring::Job,
};
use pagetide_addr::{
    Access, DeviceId, FilePage, PAGE_BYTES, PageRequest, PageResponse, QueueId, RequestId,
    RequestKind,
};
use pagetide_sys::clock::now_ns;
use pagetide_vpri::{BounceArea, QueueFull};
use slots::{CurrentSlots, Run};
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

/// Most overwrites one device has outstanding on an engine.
pub const OVERWRITES_PER_DEVICE_MAX: usize = 32;
/// Ids of overwrites have this bit set; those of other page requests do not.
const ID_BIT: u64 = 1 << 47;

/// A page that was not installed, and the slot with its new content.
struct Left {
    page: Span,
    area: Arc<BounceArea>,
    slot: u32,
}

/// A transfer to the guest that is done and whose pages are being installed.
struct Settling {
    job: Box<Job<Request>>,
    outcome: Outcome,
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

    /// Pages that were installed.
    pub fn installed_pages(&self) -> u64 {
        self.0.installed_pages
    }
}

/// Whether the guest has all data of a settled transfer.
#[must_use = "its chain must be completed or begun again, or its guest waits for ever"]
pub(crate) enum Delivered {
    /// Yes, and the place of the answer is leased: the chain can be completed.
    Entirely(Box<Job<Request>>, Outcome),
    /// No: a page is absent that was not installed, or that of the answer. Nothing is leased.
    NotYet(Box<Job<Request>>),
}

/// All transfers of an engine that use bounce buffers.
pub(crate) struct BounceBuffers {
    pub slots: CurrentSlots,
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
            slots: CurrentSlots::default(),
            settling: HashMap::new(),
            unsent: VecDeque::new(),
            waiting: HashMap::new(),
            by_device: HashMap::new(),
            next_id: (engine as u64) << 48 | ID_BIT,
            next_token: 0,
        }
    }

    /// Takes over a transfer that used bounce buffers and is done: its pages are to be overwritten.
    /// Returns the job if there are none. `now_ns` is the time of the batch.
    pub fn settle(
        &mut self,
        device: &Device,
        mut job: Box<Job<Request>>,
        outcome: Outcome,
        now_ns: u64,
    ) -> Option<Box<Job<Request>>> {
        job.request.course.transferred(now_ns);
        let written = u64::from(job.request.data_bytes).saturating_sub(job.dma.left());
        let mut unsent = Vec::new();
        for mut run in std::mem::take(&mut job.request.bounced) {
            let bytes = written.saturating_sub(run.from) / PAGE_BYTES * PAGE_BYTES;
            run.span.len = u32::try_from(bytes).map_or(run.span.len, |b| b.min(run.span.len));
            if run.span.len == 0 {
                self.slots.give_back(&run.slots);
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
        let token = self.next_token;
        self.next_token += 1;
        self.unsent.push_back(token);
        let settling = Settling {
            vector: queue.and_then(|queue| queue.asker(&device.shared, &memory).vector),
            device: device.shared.id,
            job,
            outcome,
            unsent,
            outstanding: 0,
            answered: Vec::new(),
            left: Vec::new(),
            installed_pages: 0,
        };
        self.settling.insert(token, settling);
        None
    }

    /// Copies the pages of a settled transfer that were not installed, if they are all present, and
    /// takes its slots back.
    pub fn deliver(&mut self, settled: Settled) -> Delivered {
        let Settled(mut settling) = settled;
        let request = &mut settling.job.request;
        let at = request.answer;
        let mut leases = std::mem::take(&mut request.leases);
        let memory = settling.job.dma.memory().clone();
        let left = settling.left.iter().map(|left| left.page);
        let delivered = (at.into_iter().chain(left))
            .all(|span| leases.take(&memory, span, Access::Write))
            && settling.copy_left(&memory);
        for run in &settling.answered {
            self.slots.give_back(&run.slots);
        }
        if !delivered {
            leases.release(&memory);
        }
        let mut job = settling.job;
        job.request.leases = leases;
        if delivered {
            Delivered::Entirely(job, settling.outcome)
        } else {
            Delivered::NotYet(job)
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
            self.slots.give_back(&run.slots);
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
            self.slots.give_back(&run.slots);
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
        let domain = self.job.dma.memory().port(run.span).domain().id();
        let pages = run.span.pages();
        PageRequest {
            kind: RequestKind::Overwrite {
                slot: run.slots.first,
            },
            vector: self.vector,
            sent_ns: now_ns,
            ..PageRequest::demand(
                id,
                self.device,
                QueueId(self.job.request.key.queue),
                domain,
                pages,
                Access::Write,
            )
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
