// SPDX-License-Identifier: Apache-2.0
//! [`DeviceModel`]: a device with ATS and PRI that does DMA.
//!
//! ```text
//!   DMA of a page ──► device TLB ── hit ──────────────────────────► touch, release
//!                         │ miss                                ▲
//!                         └─► ATS ── present: keep ─────────────┘
//!                         ▲    │ absent
//!                         │    └─► page request group of the transfer's absent pages
//!                         └─────── page group response ◄┘
//! ```
//! A DMA is translated page by page, like its bus transactions, and uses one
//! translation at a time: a small device TLB makes it slow, but never stuck. The
//! answer to a group does not describe pages: the device asks by ATS again, and
//! once more if a page has gone meanwhile.
//!
//! The caller acts as the engine of the device; several threads may call at a
//! time.

use super::{
    iommu::{Function, Iommu, spin},
    prq::{PageMessage, Position, RequesterId},
    requests::{Group, NotNow, PageRequests},
    space::PriSpace,
    table::Entry,
    tlb::{DevTlb, DevTlbSize, Found, InUse, Kept, Ticket, TlbCounts},
};
use pagetide_addr::{Access, FilePage, FileRange, ResponseCode, to_usize};
use pagetide_sys::{clock::now_ns, mapping::SharedMapping};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Pages of one translation request, and of one page request group.
pub const PAGES_AT_ONCE: u64 = 32;
/// How often one page may fault in one DMA before the DMA fails: with a queue that overflows all
/// the time it may be some ten thousand times.
const FAULTS_MAX: u32 = 1 << 20;
/// Checks for an answer between two readings of the clock.
const LOOKS: u32 = 256;

/// How an engine waits for an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Polling {
    /// It keeps its CPU, like hardware that uses none of the host's CPUs.
    Spin,
    /// It yields its CPU meanwhile.
    Yield,
}

/// Configuration of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceConfig {
    /// Its id; only one device has it at a time.
    pub id: RequesterId,
    /// Its device TLB.
    pub tlb: DevTlbSize,
    /// Page request messages it may have outstanding (PCIe's *outstanding page request allocation*);
    /// at least [`PAGES_AT_ONCE`].
    pub messages_max: u32,
    /// Longest wait for the answer to a group.
    pub answer_wait: Duration,
    /// How it waits.
    pub polling: Polling,
}

impl DeviceConfig {
    /// A device of 1,024 translations in sets of 8, with 512 messages outstanding, that waits 30 s.
    #[must_use]
    pub const fn new(id: RequesterId) -> Self {
        Self {
            id,
            tlb: DevTlbSize { sets: 128, ways: 8 },
            messages_max: 512,
            answer_wait: Duration::from_secs(30),
            polling: Polling::Yield,
        }
    }
}

/// Why a DMA did not complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DmaError {
    /// The host reports that there is no such page, or not for this access.
    #[error("the host refuses {page}: it is not in the device's address space")]
    Refused {
        /// First page of the group.
        page: FilePage,
    },
    /// The page request interface is stopped by a response failure.
    #[error("page requests are stopped at {page}; restart them and repeat the transfer")]
    Stopped {
        /// The page that was wanted.
        page: FilePage,
    },
    /// No answer within the time limit.
    #[error("the host has not answered the page request for {page} within {waited:?}")]
    NoAnswer {
        /// First page of the group.
        page: FilePage,
        /// The time limit.
        waited: Duration,
    },
    /// The page was absent again each time.
    #[error("{page} is absent after {faults} page requests")]
    NoProgress {
        /// The page.
        page: FilePage,
        /// How often it faulted.
        faults: u32,
    },
}

/// Two devices cannot have the same id.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is a device {0:?} already")]
pub struct IdTaken(pub RequesterId);

/// Statistics of a DMA.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DmaReport {
    /// Translation requests it took.
    pub translations: u32,
    /// Page request groups it took.
    pub groups: u32,
    /// When it first found a page absent.
    pub absent_at: Option<Instant>,
    /// When it could resume after its last fault.
    pub resumed_at: Option<Instant>,
}

/// See the module.
#[derive(Debug)]
pub struct DeviceModel {
    iommu: Arc<Iommu>,
    function: Arc<Function>,
    config: DeviceConfig,
}

impl DeviceModel {
    /// A device behind `iommu` that works in `space`.
    ///
    /// # Errors
    /// [`IdTaken`].
    pub fn new(
        iommu: &Arc<Iommu>,
        space: &Arc<PriSpace>,
        config: DeviceConfig,
    ) -> Result<Self, IdTaken> {
        let messages_max = config.messages_max.max(messages(PAGES_AT_ONCE));
        let function = iommu.add(Function {
            id: config.id,
            space: Arc::clone(space),
            tlb: DevTlb::new(config.tlb),
            requests: PageRequests::new(messages_max),
        });
        Ok(Self {
            iommu: Arc::clone(iommu),
            function: function.ok_or(IdTaken(config.id))?,
            config,
        })
    }

    /// Does a DMA of `pages`: calls `touch` for each, in order, while the page cannot be evicted.
    ///
    /// # Errors
    /// [`DmaError`]; pages before the one named were touched.
    pub fn dma(
        &self,
        pages: FileRange,
        access: Access,
        touch: &mut dyn FnMut(FilePage, &SharedMapping),
    ) -> Result<DmaReport, DmaError> {
        let mut report = DmaReport::default();
        for page in pages.iter() {
            let rest = FileRange::new(page, pages.end);
            let used = self.usable(rest, access, &mut report)?;
            touch(page, self.function.space.memory());
            self.function.tlb.release(used);
        }
        Ok(report)
    }

    /// Driver: lets page requests go out again after [`DmaError::Stopped`].
    pub fn restart(&self) {
        self.function.requests.restart();
    }

    /// Counters of its device TLB.
    #[must_use]
    pub fn tlb_counts(&self) -> TlbCounts {
        self.function.tlb.counts()
    }

    /// Groups that wait for their answers.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.function.requests.outstanding()
    }

    /// Answers to groups that were not outstanding: the host answered one twice, or invented one.
    #[must_use]
    pub fn unexpected_answers(&self) -> u64 {
        self.function.requests.unexpected()
    }

    /// A translation of the first page of `rest`, in use.
    fn usable(
        &self,
        rest: FileRange,
        access: Access,
        report: &mut DmaReport,
    ) -> Result<InUse, DmaError> {
        let page = rest.start;
        let mut faults = 0;
        loop {
            let asked = match self.function.tlb.look_up(page, access) {
                Found::Hit(used) => return Ok(resumed(used, faults, report)),
                Found::Miss(asked) => asked,
            };
            let wanted = FileRange::new(page, rest.end.min(page.saturating_plus(PAGES_AT_ONCE)));
            let mut found = Vec::with_capacity(to_usize(wanted.len()));
            match self.ask(wanted, access, asked, &mut found) {
                Answer::Present(Kept::Used(used)) => {
                    report.translations += 1;
                    return Ok(resumed(used, faults, report));
                }
                Answer::Present(Kept::Again) => {
                    report.translations += 1;
                    std::thread::yield_now();
                }
                Answer::Absent => {
                    report.translations += 1;
                    report.absent_at.get_or_insert_with(Instant::now);
                    if faults == FAULTS_MAX {
                        return Err(DmaError::NoProgress { page, faults });
                    }
                    faults += 1;
                    report.groups += 1;
                    let absent = wanted.iter().zip(&found);
                    let absent = absent.filter(|(_, entry)| !entry.allows(access));
                    let absent: Vec<FilePage> = absent.map(|(page, _)| page).collect();
                    self.request(&absent, access)?;
                }
            }
        }
    }

    /// Asks the IOMMU, and keeps translations of present pages.
    fn ask(
        &self,
        wanted: FileRange,
        access: Access,
        asked: Ticket,
        found: &mut Vec<Entry>,
    ) -> Answer {
        let tlb = &self.function.tlb;
        let others = FileRange::new(wanted.start.next(), wanted.end);
        let tickets: Vec<Ticket> = others.iter().map(|page| tlb.ticket(page)).collect();
        self.iommu.translate(&self.function, wanted, access, found);
        let Some((first, more)) = found.split_first() else {
            return Answer::Absent;
        };
        if !first.allows(access) {
            return Answer::Absent;
        }
        for ((page, ticket), entry) in others.iter().zip(tickets).zip(more) {
            if let Some(allowed) = entry.access()
                && entry.allows(access)
            {
                tlb.keep(page, allowed, ticket);
            }
        }
        // Last, so that none of the others evicts it.
        let allowed = first.access().unwrap_or(access);
        Answer::Present(tlb.keep_and_use(wanted.start, allowed, asked))
    }

    /// Sends a page request group for `absent`, and waits for its answer.
    fn request(&self, absent: &[FilePage], access: Access) -> Result<(), DmaError> {
        let Some((last, _)) = absent.split_last() else {
            return Ok(());
        };
        let page = absent.first().copied().unwrap_or(*last);
        let group = self.begin(messages(absent.len() as u64), page)?;
        // Hardware has no such clock; the time goes as private data of the message, so that all sources are
        // measured alike.
        let sent_ns = now_ns();
        spin(self.iommu.crossing());
        for page in absent {
            let position = if page == last {
                Position::Last
            } else {
                Position::More
            };
            let message = PageMessage {
                device: self.config.id,
                group: group.0,
                position,
                page: *page,
                access,
                sent_ns,
            };
            self.iommu.page_request(message.encode());
        }
        match self.answer_to(&group, page)? {
            ResponseCode::Success => Ok(()),
            ResponseCode::InvalidRequest => Err(DmaError::Refused { page }),
            ResponseCode::ResponseFailure => Err(DmaError::Stopped { page }),
        }
    }

    fn begin(&self, messages: u32, page: FilePage) -> Result<Group, DmaError> {
        let begun = Instant::now();
        loop {
            match self.function.requests.begin(messages) {
                Ok(group) => return Ok(group),
                Err(NotNow::Stopped) => return Err(DmaError::Stopped { page }),
                Err(NotNow::Full) => self.look_at_clock(begun, page)?,
            }
        }
    }

    fn answer_to(&self, group: &Group, page: FilePage) -> Result<ResponseCode, DmaError> {
        let begun = Instant::now();
        loop {
            for _ in 0..LOOKS {
                if let Some(code) = self.function.requests.answer_to(group) {
                    // It has been on its way for this long.
                    spin(self.iommu.crossing());
                    self.function.requests.end(group);
                    return Ok(code);
                }
                std::hint::spin_loop();
            }
            if let Err(error) = self.look_at_clock(begun, page) {
                self.function.requests.give_up(group);
                return Err(error);
            }
        }
    }

    fn look_at_clock(&self, begun: Instant, page: FilePage) -> Result<(), DmaError> {
        let waited = self.config.answer_wait;
        if begun.elapsed() >= waited {
            return Err(DmaError::NoAnswer { page, waited });
        }
        if self.config.polling == Polling::Yield {
            std::thread::yield_now();
        }
        Ok(())
    }
}

impl Drop for DeviceModel {
    fn drop(&mut self) {
        self.iommu.remove(self.config.id);
    }
}

enum Answer {
    Present(Kept),
    Absent,
}

fn resumed(used: InUse, faults: u32, report: &mut DmaReport) -> InUse {
    if faults > 0 {
        report.resumed_at = Some(Instant::now());
    }
    used
}

fn messages(pages: u64) -> u32 {
    u32::try_from(pages).unwrap_or(u32::MAX)
}
