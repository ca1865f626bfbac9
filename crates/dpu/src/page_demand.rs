// SPDX-License-Identifier: Apache-2.0
//! Pages that a chain needs, before they are a page request.

use pagetide_addr::{Access, DomainId, FileRange};

/// Pages to request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageDemand {
    pub domain: DomainId,
    pub pages: FileRange,
    pub access: Access,
    /// Fault injection: the host must not answer earlier than this, in microseconds.
    pub hold_us: u32,
    /// Not 0: nobody needs what the pages held, because all of them lay wholly in posted buffers when the engine
    /// looked, after this time.
    pub posted_ns: u64,
}

/// A part of all memory, whose pages are to be wired, and the number of the memory that it belongs to: that may
/// change while the pages are requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PartNo {
    pub memory: u32,
    pub part: u32,
}

/// True if `all` includes `part`.
pub(crate) fn covers(all: &PageDemand, part: &PageDemand) -> bool {
    all.domain == part.domain
        && all.pages.start <= part.pages.start
        && part.pages.end <= all.pages.end
        && (all.access == Access::Write || part.access == Access::Read)
}

/// Joins runs of one domain that touch or overlap; the stronger access is kept. Pages whose content is needed are
/// not joined with others.
pub(crate) fn merge(wanted: &mut Vec<PageDemand>) {
    wanted.sort_by_key(|w| (w.domain, w.pages.start));
    wanted.dedup_by(|next, last| {
        let joins = last.domain == next.domain
            && next.pages.start <= last.pages.end
            && (last.posted_ns == 0) == (next.posted_ns == 0);
        if joins {
            last.pages.end = last.pages.end.max(next.pages.end);
            if next.access == Access::Write {
                last.access = Access::Write;
            }
            last.hold_us = last.hold_us.max(next.hold_us);
            last.posted_ns = last.posted_ns.min(next.posted_ns);
        }
        joins
    });
}
