// SPDX-License-Identifier: Apache-2.0
//! The `-trace` log of a stock QEMU with an emulated VT-d (`-device intel-iommu`).
//!
//! # QEMU's lines, and which of them are requests
//! For each access of a device that goes through the IOMMU, `vtd_do_iommu_translate`
//! (`hw/i386/intel_iommu.c`) looks into QEMU's own IOTLB. Then exactly one of these follows:
//!
//! | line | what happened | here |
//! |---|---|---|
//! | `vtd_iotlb_page_hit` | it was there | a request |
//! | `vtd_iotlb_page_update` | it was not, the walk found it, it is cached now | a request |
//! | `vtd_dmar_fault` | there is no translation | nothing: nothing to cache |
//! | `vtd_translate_pt` | the device passes through | nothing: no translation |
//!
//! So hits and updates together are the stream of requests in front of any cache, and each request is in it
//! once. QEMU's IOTLB (1024 entries, emptied as a whole when full: `vtd_iotlb_reset`) is an artefact of the
//! emulation and does not affect it.
//!
//! `vtd_dmar_translate` follows every success, also those that were not translated (DMA remapping off,
//! pass-through). As a request it would count twice; but it has the page size, which hit and update do not
//! (below). `vtd_iotlb_cc_hit` adds nothing to the request after it.
//!
//! | line | here |
//! |---|---|
//! | `vtd_iotlb_cc_update` | the source may have another domain from now on |
//! | `vtd_inv_desc_iotlb_global` | every translation void |
//! | `vtd_inv_desc_iotlb_domain`, `…_pasid` | translations of the domain void (of one PASID: all of the domain here) |
//! | `vtd_inv_desc_iotlb_pages`, `…_pasid_pages` | those in `4 KiB << mask` around `addr` void |
//! | `vtd_inv_desc_cc_global` | all context entries void |
//! | `vtd_inv_desc_cc_domain` | those of the domain void; QEMU then does and logs a global one, which is left out |
//! | `vtd_inv_desc_cc_device` | that of one source void |
//! | `vtd_inv_desc_cc_devices` | nothing: a `…_device` follows for each it concerns |
//!
//! A source joins its domain with its first request, and joins again if a context update changed its
//! domain. The domain is taken from requests only: in scalable mode the context entry has none.
//!
//! # Page size
//! The lines have the last page-table entry (`slpte`), without its level:
//!
//! - bit 7 (page size) clear: an entry of level 1, 4 KiB;
//! - bit 7 set, and an address that is not aligned to 2 MiB: 4 KiB too (bit 7 is free at level 1, and means
//!   PAT in first-stage tables);
//! - bit 7 set, aligned to 2 MiB and not to 1 GiB: 2 MiB;
//! - bit 7 set, aligned to 1 GiB: 2 MiB or 1 GiB. Then the mask of the `vtd_dmar_translate` that follows
//!   decides, if it was recorded; else it is unknown.
//!
//! # Time
//! With `-msg timestamp=on` a line begins with `PID@SECONDS.MICROSECONDS:`, in newer versions with the time
//! after ISO 8601 and a blank. Times count from the first line that has one. Threads of QEMU read the clock
//! before they queue for the log, and the clock may be set, so a time that runs backwards is replaced by
//! the one before it.

mod dma;
mod line;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::event::{Event, EventKind, IommuDomain, PageSize, SourceId};
use crate::stream::{BATCH_EVENTS, EventSource};
use crate::text::Lines;
use line::Said;
use pagetide_access_log::TraceError;

pub use dma::{DmaRecord, QemuDmaReader};

/// Reads requests, invalidations and sources that join from a log of stock QEMU.
#[derive(Debug)]
pub struct QemuLogReader<R = File> {
    lines: Lines<R>,
    /// Events ready to be returned; all but the last if `awaits_size`.
    ready: VecDeque<Event>,
    /// Whether the last of `ready` is a request whose size may follow in the next lines.
    awaits_size: bool,
    clock: Clock,
    /// The state of each source; at most one entry for each of 2^16 ids.
    sources: HashMap<SourceId, Known>,
    /// Whether the last invalidation of context entries was of a domain.
    domain_just_now: bool,
    seen: Seen,
    /// Lines with an event of the emulated VT-d that does not count.
    others: u64,
    broken: Option<TraceError>,
    ended: bool,
}

/// The state of a source.
#[derive(Debug)]
struct Known {
    domain: IommuDomain,
    context: Context,
}

/// Whether a source's context entry was read again since its last request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Context {
    Same,
    Updated,
}

/// The most useful kind of lines so far.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Seen {
    /// None of the emulated VT-d.
    Nothing,
    /// Some, of kinds that do not count.
    Others,
    /// Some that count, but no request.
    Events,
    /// Translations without the lines that make requests.
    Translations,
    Requests,
}

/// Times of lines as times of events.
#[derive(Debug, Default)]
struct Clock {
    /// Time of the first line that has one.
    zero_ns: Option<u64>,
    /// Latest time returned, from zero.
    last_ns: u64,
}

impl Clock {
    fn event_time(&mut self, line_ns: Option<u64>) -> Option<u64> {
        let line_ns = line_ns?;
        let zero_ns = *self.zero_ns.get_or_insert(line_ns);
        self.last_ns = line_ns.saturating_sub(zero_ns).max(self.last_ns);
        Some(self.last_ns)
    }
}

impl QemuLogReader {
    /// Opens the log at `path`.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(|source| TraceError::Io {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self::new(path, file))
    }
}

impl<R: Read> QemuLogReader<R> {
    /// Reads from `input`; errors name `path`.
    pub fn new(path: &Path, input: R) -> Self {
        Self {
            lines: Lines::new(path, input),
            ready: VecDeque::new(),
            awaits_size: false,
            clock: Clock::default(),
            sources: HashMap::new(),
            domain_just_now: false,
            seen: Seen::Nothing,
            others: 0,
            broken: None,
            ended: false,
        }
    }

    /// The next event, or `None` at the end.
    fn next_event(&mut self) -> Result<Option<Event>, TraceError> {
        loop {
            if self.ready.len() > usize::from(self.awaits_size) {
                return Ok(self.ready.pop_front());
            }
            let Some(line) = self.lines.next()? else {
                self.awaits_size = false;
                return match self.ready.pop_front() {
                    Some(event) => Ok(Some(event)),
                    None => self.end(),
                };
            };
            match line::parse(line) {
                Ok(None) => {}
                Ok(Some((line_ns, said))) => {
                    let time_ns = self.clock.event_time(line_ns);
                    self.take(time_ns, said);
                }
                Err(reason) => return Err(self.lines.error(reason)),
            }
        }
    }

    /// Turns a line's content into events.
    fn take(&mut self, time_ns: Option<u64>, said: Said) {
        self.seen = self.seen.max(match said {
            Said::Request { .. } => Seen::Requests,
            Said::Translated { .. } => Seen::Translations,
            Said::Other => Seen::Others,
            Said::ContextUpdated(_) | Said::Invalidated(_) => Seen::Events,
        });
        match said {
            Said::Request { event, .. } => self.request(Event { time_ns, ..event }),
            Said::Translated { source, iova, size } => self.learn_size(source, iova, size),
            Said::ContextUpdated(source) => {
                if let Some(known) = self.sources.get_mut(&source) {
                    known.context = Context::Updated;
                }
            }
            Said::Invalidated(event) => self.invalidation(Event { time_ns, ..event }),
            Said::Other => self.others += 1,
        }
    }

    fn request(&mut self, event: Event) {
        let Event { source, domain, .. } = event;
        let known = self.sources.insert(
            source,
            Known {
                domain,
                context: Context::Same,
            },
        );
        // A source with PASIDs has several domains at a time: only a new context entry shows that it left
        // one for another.
        let joins =
            known.is_none_or(|known| known.domain != domain && known.context == Context::Updated);
        self.awaits_size = false;
        if joins {
            self.ready.push_back(Event {
                time_ns: event.time_ns,
                source,
                domain,
                kind: EventKind::Join,
                ..Event::default()
            });
        }
        self.ready.push_back(event);
        self.awaits_size = event.page_size.is_none();
    }

    /// Completes the request that waits for its size, if this is the same one.
    fn learn_size(&mut self, source: SourceId, iova: u64, size: Option<PageSize>) {
        if let Some(event) = self.ready.back_mut().filter(|_| self.awaits_size)
            && let Some(size) = size
            && event.source == source
            && event.iova.0 & !(size.bytes() - 1) == iova
        {
            event.page_size = Some(size);
            self.awaits_size = false;
        }
    }

    fn invalidation(&mut self, mut event: Event) {
        match event.kind {
            EventKind::InvalidateContexts if self.domain_just_now => {
                self.domain_just_now = false;
                return;
            }
            EventKind::InvalidateSource => match self.sources.get(&event.source) {
                Some(known) => event.domain = known.domain,
                // It has made no request yet, so nothing of it can be cached.
                None => return,
            },
            _ => {}
        }
        self.domain_just_now = event.kind == EventKind::InvalidateContextsOfDomain;
        self.awaits_size = false;
        self.ready.push_back(event);
    }

    /// The end of a log that may hold nothing useful.
    fn end(&self) -> Result<Option<Event>, TraceError> {
        match self.seen {
            Seen::Requests | Seen::Events => Ok(None),
            Seen::Nothing => Err(self
                .lines
                .file_error("it has no trace event of an emulated VT-d (`vtd_…`)")),
            Seen::Others => Err(self.lines.file_error(&format!(
                "none of its {} trace events of an emulated VT-d counts: requests are \
                 `vtd_iotlb_page_hit` and `vtd_iotlb_page_update`",
                self.others
            ))),
            Seen::Translations => Err(self.lines.file_error(
                "it has `vtd_dmar_translate` and no request: record `vtd_iotlb_page_hit` and \
                 `vtd_iotlb_page_update` too (if they were recorded, DMA remapping was off)",
            )),
        }
    }
}

impl<R: Read + Send> EventSource for QemuLogReader<R> {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        let mut count = 0;
        while count < BATCH_EVENTS && !self.ended {
            match self.next_event() {
                Ok(Some(event)) => {
                    batch.push(event);
                    count += 1;
                }
                Ok(None) => self.ended = true,
                Err(error) => {
                    self.ended = true;
                    // The request that waited for its size was before the break.
                    count += self.ready.len();
                    batch.extend(self.ready.drain(..));
                    if count == 0 {
                        return Err(error);
                    }
                    self.broken = Some(error);
                }
            }
        }
        Ok(count)
    }
}
