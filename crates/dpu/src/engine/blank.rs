// SPDX-License-Identifier: Apache-2.0
//! Which absent pages of a posted chain need no content, because they lie wholly in posted buffers.
//!
//! ```text
//!   pages      │   0    │   1    │   2    │   3    │
//!   chain 7      ▒▒▒▒▒▒▒▒▒▒▒▒                         page 0 is needed: its beginning is not posted
//!   chain 8                  ▒▒▒▒▒▒▒▒▒▒▒▒             page 1 is not: chains 7 and 8 cover it
//! ```
//! A driver that posts a buffer gives up what is in it (virtio 1.2, 2.7.8). Buffers of most drivers
//! are shorter than a page, and lie one behind the other in the order in which they are posted; so
//! the chains next to it are looked at, too. A chain that was filled has not been given up: what was
//! written into it is still to be reported.
//!
//! The chains may be used before the request is served. Whether the content is dropped is decided then,
//! by the time at which it was stored, and not by the chains (see `pagetide_gmem::Blank`). So the time
//! of the request must be one from before the look at the ring.

use crate::{
    kind::posted::ChainNo,
    memory::{DeviceMemory, Span},
    page_demand::PageDemand,
};
use pagetide_addr::{Access, DomainId, FilePage};

/// Chains before and behind one that are looked at. A page is covered by four of the shortest buffers that drivers
/// post for packets of 1,500 bytes.
const NEAR: u64 = 3;
/// Most parts of a chain that is looked at with its neighbours. Those of drivers have a few: 17 for 64 KiB.
pub(super) const NEAR_PARTS_MAX: usize = 32;

/// The demands for the absent pages of `spans`, all writable parts of a chain that is not used. `posted_ns` is a time
/// before it was read from the ring; `unused_parts` has the writable parts of another chain that is posted and unused.
pub(super) fn wanted_of_posted(
    memory: &DeviceMemory,
    chain: ChainNo,
    spans: &[Span],
    posted_ns: u64,
    mut unused_parts: impl FnMut(ChainNo) -> Vec<Span>,
) -> Vec<PageDemand> {
    let absent = absent_pages(memory, spans);
    let mut posted = Covered::default();
    posted.add(memory, spans);
    let is_covered = |posted: &Covered| {
        absent
            .iter()
            .all(|(domain, page)| posted.has(*domain, *page))
    };
    if spans.len() <= NEAR_PARTS_MAX && !is_covered(&posted) {
        let near = chain.0.saturating_sub(NEAR)..=chain.0 + NEAR;
        let others = near.filter(|other| *other != chain.0);
        let parts: Vec<_> = others
            .flat_map(|other| unused_parts(ChainNo(other)))
            .collect();
        posted.add(memory, &parts);
    }
    let demand = |(domain, page): (DomainId, FilePage)| PageDemand {
        domain,
        pages: page.single(),
        access: Access::Write,
        hold_us: 0,
        posted_ns: match posted.has(domain, page) {
            true => posted_ns,
            false => 0,
        },
    };
    absent.iter().copied().map(demand).collect()
}

fn absent_pages(memory: &DeviceMemory, spans: &[Span]) -> Vec<(DomainId, FilePage)> {
    let mut absent = Vec::new();
    for span in spans {
        let domain = memory.port(*span).domain();
        let bitmap = domain.attributes().bitmap();
        let pages = span.pages();
        let is_absent = |page: &FilePage| !bitmap.allows(page.single(), Access::Write);
        absent.extend(
            pages
                .iter()
                .filter(is_absent)
                .map(|page| (domain.id(), page)),
        );
    }
    absent.sort_unstable_by_key(|(domain, page)| (domain.0, *page));
    absent.dedup();
    absent
}

/// Bytes of files that lie in posted buffers.
#[derive(Debug, Default)]
struct Covered(Vec<(u32, u64, u64)>);

impl Covered {
    fn add(&mut self, memory: &DeviceMemory, spans: &[Span]) {
        let part = |span: &Span| {
            let end = span.offset + u64::from(span.len);
            (memory.port(*span).domain().id().0, span.offset, end)
        };
        self.put(spans.iter().map(part));
    }

    fn put(&mut self, parts: impl IntoIterator<Item = (u32, u64, u64)>) {
        self.0.extend(parts);
        self.0.sort_unstable();
        self.0.dedup_by(|next, last| {
            let joins = next.0 == last.0 && next.1 <= last.2;
            if joins {
                last.2 = last.2.max(next.2);
            }
            joins
        });
    }

    /// True if every byte of the page lies in one.
    fn has(&self, domain: DomainId, page: FilePage) -> bool {
        let (start, end) = (page.byte_offset(), page.next().byte_offset());
        let behind = self
            .0
            .partition_point(|part| (part.0, part.1) <= (domain.0, start));
        let part = behind.checked_sub(1).and_then(|at| self.0.get(at));
        part.is_some_and(|part| part.0 == domain.0 && part.1 <= start && end <= part.2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    #[test]
    fn page_is_covered_exactly_if_each_of_its_bytes_is() {
        const PAGES: u64 = 4;
        const BYTES: usize = 4 * 4096;
        for seed in 0..500 {
            let mut random = SplitMix64::new(seed);
            let mut covered = Covered::default();
            let mut naive = vec![[false; BYTES]; 2];
            for _ in 0..random.below(12) {
                let domain = u32::try_from(random.below(2)).unwrap();
                // Borders of pages are where mistakes are made.
                let start = random.below(PAGES * 8) * 512 + random.below(2) * random.below(512);
                let end = (start + 512 * random.below(20)).min(PAGES * 4096);
                let start = start.min(end);
                covered.put([(domain, start, end)]);
                for byte in start..end {
                    naive[domain as usize][usize::try_from(byte).unwrap()] = true;
                }
            }
            for domain in 0..2 {
                for page in 0..PAGES {
                    let start = usize::try_from(page * 4096).unwrap();
                    let bytes = start..start + 4096;
                    let all = naive[domain as usize][bytes].iter().all(|byte| *byte);
                    let has = covered.has(DomainId(domain), FilePage(page));
                    assert_eq!(has, all, "seed {seed}, domain {domain}, page {page}");
                }
            }
        }
    }
}
