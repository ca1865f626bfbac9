// SPDX-License-Identifier: Apache-2.0
//! Which pages a chain needs, which of them are absent, and leasing them all or none.

use super::queue::EngineQueue;
use crate::{
    chain::{Buffers, Length, WalkError, walk},
    frame::{Frame, answer_of, frame},
    memory::{DeviceMemory, LeaseSet, Span},
    page_demand::PageDemand,
    shared::StopReason,
};
use pagetide_addr::Access;

/// Most present pages between absent ones of a transfer that are requested along with them.
const GAP_PAGES_MAX: u64 = 16;

/// A parsed chain.
pub(super) enum Located {
    Frame(Frame),
    TableAbsent(Vec<Span>),
    /// To be answered with an error, written here.
    Refused {
        answer: Option<Span>,
        why: Refused,
    },
}

/// Why a valid chain is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// Part of it is not in guest memory.
    Outside,
    /// It exceeds the length that is served.
    TooLong,
}

/// Walks a chain and parses it.
pub(super) fn locate(
    queue: &EngineQueue,
    memory: &DeviceMemory,
    head: u16,
    buffers: &mut Buffers,
) -> Result<Located, StopReason> {
    let (number, layout) = (queue.key.queue, queue.table.layout);
    match walk(memory, queue.table, head, buffers) {
        Ok(()) => {}
        Err(WalkError::TableAbsent(spans)) => return Ok(Located::TableAbsent(spans)),
        Err(WalkError::Broken(source)) => {
            return Err(StopReason::Chain {
                queue: number,
                head,
                source,
            });
        }
    }
    let why = match (buffers.outside, buffers.length) {
        (Some(_), _) => Some(Refused::Outside),
        (None, Length::TooLong) => Some(Refused::TooLong),
        (None, Length::Served) => None,
    };
    let located = match why {
        Some(why) => answer_of(layout, buffers).map(|answer| Located::Refused { answer, why }),
        None => frame(layout, buffers).map(Located::Frame),
    };
    located.map_err(|source| StopReason::Request {
        queue: number,
        head,
        source,
    })
}

/// Every part of a chain, with the access that the device needs.
fn parts<'a>(frame: &'a Frame, buffers: &'a Buffers) -> impl Iterator<Item = (Span, Access)> + 'a {
    let read = std::iter::once(&frame.header)
        .chain(&frame.header_rest)
        .chain(&buffers.readable);
    let write = buffers.writable.iter().chain(&frame.answer);
    read.map(|span| (*span, Access::Read))
        .chain(write.map(|span| (*span, Access::Write)))
}

/// Leases every part of a chain; false if a page is absent (earlier leases stay).
#[inline]
pub(super) fn lease_all(
    memory: &DeviceMemory,
    frame: &Frame,
    buffers: &Buffers,
    leases: &mut LeaseSet,
) -> bool {
    // Plain loops: every request passes here, and the iterator of `parts` is not free.
    let together = match frame.answer {
        None => false,
        Some(answer) if !leases.take(memory, answer, Access::Write) => return false,
        // Most drivers have header and answer in one structure. A writable page may be read, too.
        Some(answer) => frame.header.port == answer.port && frame.header.pages() == answer.pages(),
    };
    let mut header = frame.header;
    let mut readable = buffers.readable.as_slice();
    // A packet mostly follows its header without a gap: one lease is enough.
    if let [first, rest @ ..] = readable
        && !together
        && frame.header_rest.is_empty()
        && let Some(whole) = header.joined(*first)
    {
        (header, readable) = (whole, rest);
    }
    if !together && !leases.take(memory, header, Access::Read) {
        return false;
    }
    for span in frame.header_rest.iter().chain(readable) {
        if !leases.take(memory, *span, Access::Read) {
            return false;
        }
    }
    buffers
        .writable
        .iter()
        .all(|span| leases.take(memory, *span, Access::Write))
}

/// Every absent page of a chain.
pub(super) fn absent_of(
    memory: &DeviceMemory,
    frame: &Frame,
    buffers: &Buffers,
) -> Vec<PageDemand> {
    parts(frame, buffers)
        .flat_map(|(span, access)| absent_runs(memory, span, access))
        .collect()
}

/// Every page of a chain.
pub(super) fn all_of(memory: &DeviceMemory, frame: &Frame, buffers: &Buffers) -> Vec<PageDemand> {
    parts(frame, buffers)
        .flat_map(|(span, access)| whole(memory, span, access))
        .collect()
}

/// The absent pages of `spans`; all of them if none is absent any more.
pub(super) fn wanted_of(memory: &DeviceMemory, spans: &[Span], access: Access) -> Vec<PageDemand> {
    let absent: Vec<PageDemand> = spans
        .iter()
        .flat_map(|span| absent_runs(memory, *span, access))
        .collect();
    if absent.is_empty() {
        let all = spans.iter().flat_map(|span| whole(memory, *span, access));
        return all.collect();
    }
    absent
}

pub(crate) fn whole(memory: &DeviceMemory, span: Span, access: Access) -> Option<PageDemand> {
    let pages = span.pages();
    (!pages.is_empty()).then(|| PageDemand {
        domain: memory.port(span).domain().id(),
        pages,
        access,
        hold_us: 0,
        posted_ns: 0,
    })
}

/// The runs of pages of `span` that do not allow `access` now. Runs with only a few present pages
/// between them are joined: each run is a request of its own, and finding a page present costs
/// less.
pub(crate) fn absent_runs(memory: &DeviceMemory, span: Span, access: Access) -> Vec<PageDemand> {
    let domain = memory.port(span).domain();
    let bitmap = domain.attributes().bitmap();
    let mut runs: Vec<PageDemand> = Vec::new();
    for page in span.pages().iter() {
        if bitmap.allows(page.single(), access) {
            continue;
        }
        match runs.last_mut() {
            Some(run) if page.since(run.pages.end) <= GAP_PAGES_MAX => {
                run.pages.end = page.next();
            }
            _ => runs.push(PageDemand {
                domain: domain.id(),
                pages: page.single(),
                access,
                hold_us: 0,
                posted_ns: 0,
            }),
        }
    }
    runs
}
