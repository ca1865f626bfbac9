// SPDX-License-Identifier: Apache-2.0
//! The driver of a page request queue: the interrupt thread of an IOMMU, and the source
//! that it provides to the I/O page fault service (VPRI 2.1, steps 6 to 9).
//!
//! After Linux' `prq_event_thread` and `io-pgfault.c`:
//! - One thread for each IOMMU, however many devices there are. It takes messages,
//!   collects those of a group until the last has come, hands the whole group over,
//!   and never handles a fault itself.
//! - Groups may be answered in any order, each exactly once, with the worst of its
//!   pages' codes.
//! - When the queue has overflown, incomplete groups are discarded before the queue
//!   works again: the hardware has answered, or will answer, their devices, and a
//!   message of an old group must not join a new one with the same index.
//! - A group that cannot be served is answered as invalid at once.
//!
//! Linux bounds none of its lists. Here a group has at most [`GROUP_PAGES_MAX`] pages, and a
//! device at most 512 incomplete groups; a group beyond that is invalid. The number of
//! complete groups is bounded by what the devices may have outstanding; a device that
//! exceeds its allowance can have at most [`DUE_MAX`] of them.

use super::{
    iommu::{Function, Iommu},
    prq::{Message, PageMessage, Position, RequesterId},
};
use pagetide_addr::{
    DeviceId, FileRange, PageRequest, PageResponse, QueueId, RequestId, ResponseCode,
};
use pagetide_sys::cpu::{self, Urgency};
use pagetide_vpri::{queue::Doorbell, source::FaultSource, space::IoSpace};
use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

/// Most messages of a group.
pub const GROUP_PAGES_MAX: usize = 512;
/// Most page requests that are handed over and not answered; further groups are invalid.
pub const DUE_MAX: usize = 1 << 16;

/// What a source has counted so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SourceCounts {
    /// Groups handed over.
    pub groups: u64,
    /// Groups answered as invalid without being handed over.
    pub refused: u64,
    /// Groups discarded because some of their messages may have been lost.
    pub discarded: u64,
    /// Responses to requests that were not due; they are dropped.
    pub unknown_responses: u64,
}

/// Page requests of the devices behind one IOMMU.
pub struct PriSource {
    iommu: Arc<Iommu>,
    /// The service's doorbell.
    bell: Arc<Doorbell>,
    ready: Mutex<VecDeque<PageRequest>>,
    groups: Mutex<Groups>,
    stopped: AtomicBool,
}

#[derive(Default)]
struct Groups {
    partial: HashMap<(RequesterId, u16), Partial>,
    due: HashMap<RequestId, Arc<Due>>,
    last_id: u64,
    counts: SourceCounts,
}

/// A group whose last message has not arrived.
#[derive(Default)]
struct Partial {
    function: Weak<Function>,
    pages: Vec<PageMessage>,
    is_bad: bool,
}

/// A group that is handed over.
struct Due {
    function: Weak<Function>,
    group: u16,
    answers: Mutex<Answers>,
}

struct Answers {
    missing: usize,
    worst: ResponseCode,
}

/// The interrupt thread; ends when dropped.
pub struct InterruptThread {
    source: Arc<PriSource>,
    thread: Option<JoinHandle<()>>,
}

impl PriSource {
    /// The source of `iommu`, which rings `bell` for its taker. It takes nothing from the queue
    /// before [`Self::start`].
    #[must_use]
    pub fn new(iommu: Arc<Iommu>, bell: Arc<Doorbell>) -> Arc<Self> {
        Arc::new(Self {
            iommu,
            bell,
            ready: Mutex::default(),
            groups: Mutex::default(),
            stopped: AtomicBool::new(false),
        })
    }

    /// Starts the interrupt thread: on `cpus` only, if there are any, and with `urgency`, if it is
    /// allowed. Linux' interrupt threads are in the class `SCHED_FIFO`, with priority 50.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(
        self: &Arc<Self>,
        cpus: Vec<usize>,
        urgency: Urgency,
    ) -> io::Result<InterruptThread> {
        let source = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("pt-prq".into())
            .spawn(move || source.serve_interrupts(&cpus, urgency))?;
        Ok(InterruptThread {
            source: Arc::clone(self),
            thread: Some(thread),
        })
    }

    /// The counters so far.
    #[must_use]
    pub fn counts(&self) -> SourceCounts {
        self.lock().counts
    }

    /// Number of incomplete groups.
    #[cfg(test)]
    pub(super) fn lists(&self) -> usize {
        self.lock().partial.len()
    }

    fn serve_interrupts(&self, cpus: &[usize], urgency: Urgency) {
        if !cpus.is_empty()
            && let Err(error) = cpu::set_affinity(cpus)
        {
            tracing::debug!(%error, ?cpus, "the interrupt thread stays where it is");
        }
        if let Err(error) = cpu::set_urgency(urgency) {
            tracing::debug!(%error, ?urgency, "the interrupt thread may not be this urgent");
        }
        while !self.stopped.load(Ordering::Acquire) {
            match self.iommu.queue().interrupt().wait() {
                Ok(_) => self.interrupted(),
                Err(error) => {
                    tracing::error!(%error, "the page request queue's interrupt is broken");
                    return;
                }
            }
        }
    }

    /// One run of the interrupt thread.
    pub(super) fn interrupted(&self) {
        let queue = self.iommu.queue();
        let mut messages = Vec::new();
        loop {
            queue.acknowledge();
            let tail = queue.read(&mut messages);
            for message in messages.drain(..) {
                self.take(message);
            }
            // As in Linux' driver, only now: the entries are read, and handled as far as they are
            // handled here.
            queue.done(tail);
            self.ring_if_ready();
            // Messages stored before the overflow and after the tail was read come first.
            if !queue.has_overflown() || queue.clear_overflow(|| self.discard_partial()) {
                return;
            }
        }
    }

    fn take(&self, message: Message) {
        let (device, group, position, page) = match message {
            Message::Page(page) => (page.device, page.group, page.position, Some(page)),
            Message::Unsupported {
                device,
                group,
                position,
            } => (device, group, position, None),
            // The device gets no answer. Its earlier requests are answered as usual.
            Message::StopMarker(_) => return,
        };
        let mut groups = self.lock();
        let Some(function) = self.iommu.function(device) else {
            // There is no device to answer, and lists of missing devices would never be cleared.
            groups.partial.remove(&(device, group));
            return;
        };
        let partial = groups.partial.entry((device, group)).or_default();
        if !std::ptr::eq(partial.function.as_ptr(), Arc::as_ptr(&function)) {
            // Messages of a device that had this id before.
            *partial = Partial {
                function: Arc::downgrade(&function),
                ..Partial::default()
            };
        }
        match page {
            Some(page) if partial.pages.len() < GROUP_PAGES_MAX => partial.pages.push(page),
            _ => partial.is_bad = true,
        }
        if position == Position::Last
            && let Some(whole) = groups.partial.remove(&(device, group))
        {
            self.hand_over(groups, &function, group, &whole);
        }
    }

    /// Handles a complete group.
    fn hand_over(
        &self,
        mut groups: MutexGuard<'_, Groups>,
        function: &Arc<Function>,
        group: u16,
        whole: &Partial,
    ) {
        let runs = runs(&whole.pages);
        if whole.is_bad || groups.due.len() + runs.len() > DUE_MAX {
            groups.counts.refused += 1;
            drop(groups);
            self.iommu
                .respond(function, group, ResponseCode::InvalidRequest);
            return;
        }
        groups.counts.groups += 1;
        let due = Arc::new(Due {
            function: Arc::downgrade(function),
            group,
            answers: Mutex::new(Answers {
                missing: runs.len(),
                worst: ResponseCode::Success,
            }),
        });
        let mut requests = VecDeque::with_capacity(runs.len());
        for (first, pages) in runs {
            groups.last_id += 1;
            let id = RequestId(groups.last_id);
            groups.due.insert(id, Arc::clone(&due));
            let domain = function.space.id();
            requests.push_back(PageRequest {
                sent_ns: first.sent_ns,
                ..PageRequest::demand(
                    id,
                    DeviceId(u32::from(first.device.0)),
                    QueueId(0),
                    domain,
                    pages,
                    first.access,
                )
            });
        }
        drop(groups);
        self.lock_ready().append(&mut requests);
    }

    fn ring_if_ready(&self) {
        let any = !self.lock_ready().is_empty();
        if any {
            self.bell.ring();
        }
    }

    fn discard_partial(&self) {
        let mut groups = self.lock();
        groups.counts.discarded += groups.partial.len() as u64;
        groups.partial.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Groups> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_ready(&self) -> MutexGuard<'_, VecDeque<PageRequest>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FaultSource for PriSource {
    fn next(&self) -> Option<PageRequest> {
        self.lock_ready().pop_front()
    }

    /// The interrupt thread checks the bell, which its owner arms.
    fn arm(&self) -> bool {
        !self.lock_ready().is_empty()
    }

    fn respond(&self, response: PageResponse) {
        let due = {
            let mut groups = self.lock();
            let due = groups.due.remove(&response.id);
            if due.is_none() {
                groups.counts.unknown_responses += 1;
            }
            due
        };
        let Some(due) = due else {
            return;
        };
        let mut answers = due.answers.lock().unwrap_or_else(PoisonError::into_inner);
        answers.missing -= 1;
        answers.worst = worse(answers.worst, response.code);
        if answers.missing == 0
            && let Some(function) = due.function.upgrade()
        {
            self.iommu.respond(&function, due.group, answers.worst);
        }
    }
}

impl Drop for InterruptThread {
    fn drop(&mut self) {
        self.source.stopped.store(true, Ordering::Release);
        self.source.iommu.queue().interrupt().raise();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the interrupt thread of a page request queue ended by a panic");
        }
    }
}

/// Splits a group into runs of adjacent pages with the same access, each with its first message.
fn runs(pages: &[PageMessage]) -> Vec<(PageMessage, FileRange)> {
    let mut runs: Vec<(PageMessage, FileRange)> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some((first, run)) if run.end == page.page && first.access == page.access => {
                run.end = run.end.next();
            }
            _ => runs.push((*page, page.page.single())),
        }
    }
    runs
}

/// The worse of two answers.
const fn worse(one: ResponseCode, other: ResponseCode) -> ResponseCode {
    match (one, other) {
        (ResponseCode::ResponseFailure, _) | (_, ResponseCode::ResponseFailure) => {
            ResponseCode::ResponseFailure
        }
        (ResponseCode::InvalidRequest, _) | (_, ResponseCode::InvalidRequest) => {
            ResponseCode::InvalidRequest
        }
        (ResponseCode::Success, ResponseCode::Success) => ResponseCode::Success,
    }
}
