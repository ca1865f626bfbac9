// SPDX-License-Identifier: Apache-2.0
//! Which parts of a read go straight to guest memory, and which to bounce buffers.
//!
//! ```text
//!   data buffer          ├─head─┼── page ──┼── page ──┼── page ──┼─tail─┤
//!   its pages              there   absent     absent     there     away
//!   goes to                guest ┌ slot n ┐ ┌ slot n+1┐  guest     asked for first
//! ```
//! The old content of a page that a buffer covers only in part is needed, so that page is requested
//! before the transfer begins, like those of headers and status bytes.

use super::slots::{CurrentSlots, Run};
use crate::{
    chain::Buffers,
    engine::pages::absent_runs,
    frame::Frame,
    memory::{DeviceMemory, Span},
    page_demand::PageDemand,
    ring::Piece,
};
use pagetide_addr::{Access, DeviceId, FilePage, FileRange, OVERWRITE_PAGES_MAX, PAGE_BYTES};

/// Most runs of absent pages that one request bounces: each is a page request.
const RUNS_MAX: usize = 64;

/// The targets of a read.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub pieces: Vec<Piece>,
    pub runs: Vec<Run>,
    bytes: u64,
}

/// What to do with a chain some of whose pages are absent.
pub(crate) enum Planned {
    /// It is no read, or no slots are free: request all its pages.
    Nothing,
    /// The content of these pages is needed before it can begin.
    First(Vec<PageDemand>),
    /// It can begin once the guest's parts are leased.
    Begin(Plan),
}

/// What must be present before a read can begin: all but the pages that its data covers entirely.
fn needed_first(memory: &DeviceMemory, frame: &Frame, buffers: &Buffers) -> Vec<PageDemand> {
    let read = std::iter::once(&frame.header)
        .chain(&frame.header_rest)
        .chain(&buffers.readable)
        .map(|span| (*span, Access::Read));
    let edges = buffers.writable.iter().flat_map(|span| {
        let [head, _, tail] = cut(*span);
        [head, tail]
    });
    let written = (frame.answer.into_iter())
        .chain(edges.flatten())
        .map(|span| (span, Access::Write));
    read.chain(written)
        .flat_map(|(span, access)| absent_runs(memory, span, access))
        .collect()
}

/// Plans a chain that cannot be leased as it is.
pub(crate) fn plan(
    slots: &mut CurrentSlots,
    device: DeviceId,
    memory: &DeviceMemory,
    frame: &Frame,
    buffers: &Buffers,
) -> Planned {
    let mut plan = Plan::default();
    let mut bounced = true;
    for span in &buffers.writable {
        bounced = bounced && plan.take_buffer(slots, device, memory, *span);
    }
    if !bounced || plan.runs.is_empty() {
        slots.give_up(plan.runs);
        return Planned::Nothing;
    }
    let first = needed_first(memory, frame, buffers);
    if first.is_empty() {
        return Planned::Begin(plan);
    }
    slots.give_up(plan.runs);
    Planned::First(first)
}

impl Plan {
    /// The parts that the device itself writes.
    pub fn guest_spans(&self) -> impl Iterator<Item = Span> + '_ {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Guest(span) => Some(*span),
            Piece::Slots { .. } => None,
        })
    }

    /// Adds a buffer of the chain; false if there are not enough slots or runs for all of it.
    fn take_buffer(
        &mut self,
        slots: &mut CurrentSlots,
        device: DeviceId,
        memory: &DeviceMemory,
        buffer: Span,
    ) -> bool {
        let [head, whole, tail] = cut(buffer);
        self.add_guest(head);
        if let Some(whole) = whole {
            let mut page = whole.pages().start;
            for absent in absent_in(memory, whole) {
                self.add_guest(part(whole, page, absent.start));
                page = absent.start;
                while page < absent.end {
                    let end = absent.end.min(page.plus(OVERWRITE_PAGES_MAX));
                    let Some(run) = part(whole, page, end) else {
                        return false;
                    };
                    if !self.add_run(slots, device, run) {
                        return false;
                    }
                    page = end;
                }
            }
            self.add_guest(part(whole, page, whole.pages().end));
        }
        self.add_guest(tail);
        true
    }

    fn add_guest(&mut self, span: Option<Span>) {
        if let Some(span) = span {
            self.bytes += u64::from(span.len);
            self.pieces.push(Piece::Guest(span));
        }
    }

    fn add_run(&mut self, slots: &mut CurrentSlots, device: DeviceId, span: Span) -> bool {
        let count = u32::try_from(span.pages().len()).unwrap_or(u32::MAX);
        if self.runs.len() == RUNS_MAX {
            return false;
        }
        let Some(taken) = slots.take(device, count) else {
            return false;
        };
        self.pieces.push(Piece::Slots {
            area: taken.area.clone(),
            first: taken.first,
            len: span.len,
        });
        self.runs.push(Run {
            span,
            from: self.bytes,
            slots: taken,
        });
        self.bytes += u64::from(span.len);
        true
    }
}

/// Cuts a buffer at page boundaries: the part before the first whole page, the whole pages, the
/// rest.
fn cut(span: Span) -> [Option<Span>; 3] {
    let end = span.offset + u64::from(span.len);
    let first = span.offset.next_multiple_of(PAGE_BYTES).min(end);
    let last = (end - end % PAGE_BYTES).max(first);
    [(span.offset, first), (first, last), (last, end)].map(|(from, to)| {
        let len = u32::try_from(to - from).unwrap_or(u32::MAX);
        (len > 0).then_some(Span {
            offset: from,
            len,
            ..span
        })
    })
}

/// The runs of absent pages in `whole`. Present pages are left out: they would have to be copied
/// from a bounce buffer.
fn absent_in(memory: &DeviceMemory, whole: Span) -> Vec<FileRange> {
    let domain = memory.port(whole).domain();
    let bitmap = domain.attributes().bitmap();
    let is_absent = |page: &FilePage| !bitmap.allows(page.single(), Access::Write);
    let mut runs: Vec<FileRange> = Vec::new();
    for page in whole.pages().iter().filter(is_absent) {
        match runs.last_mut() {
            Some(run) if run.end == page => run.end = page.next(),
            _ => runs.push(page.single()),
        }
    }
    runs
}

/// The pages of `whole` from `from` up to, not including, `to`, if there are any.
fn part(whole: Span, from: FilePage, to: FilePage) -> Option<Span> {
    let bytes = FileRange::new(from, to.max(from)).bytes();
    let len = u32::try_from(bytes).ok().filter(|len| *len > 0)?;
    Some(Span {
        offset: from.byte_offset(),
        len,
        ..whole
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(offset: u64, len: u32) -> Span {
        Span {
            port: 3,
            offset,
            len,
        }
    }

    #[test]
    fn buffer_is_cut_at_pages_borders_and_nothing_of_it_is_lost() {
        let cases = [
            (span(0, 4096), [None, Some((0, 4096)), None]),
            (span(512, 512), [Some((512, 512)), None, None]),
            (
                span(512, 4096),
                [Some((512, 3584)), None, Some((4096, 512))],
            ),
            (
                span(4000, 8400),
                [Some((4000, 96)), Some((4096, 8192)), Some((12_288, 112))],
            ),
            (span(8192, 100), [None, None, Some((8192, 100))]),
            (span(5000, 3192), [Some((5000, 3192)), None, None]),
        ];
        for (buffer, expected) in cases {
            let parts = cut(buffer).map(|part| part.map(|p| (p.offset, p.len)));
            assert_eq!(parts, expected, "{buffer:?}");
            assert!(cut(buffer).iter().flatten().all(|part| part.port == 3));
        }
    }
}
