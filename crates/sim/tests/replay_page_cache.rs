// SPDX-License-Identifier: Apache-2.0
//! The modelled page cache against one that is a plain list.

use pagetide_addr::{Access, DeviceId, SectionNo};
use pagetide_sim::replay::{
    Actor, CachedReads, DiskRequest, GuestPageCache, PageCacheParams, ReplayAccess, Service,
};
use proptest::prelude::*;
use std::time::Duration;

const PAGE: u64 = 4096;
const PAGES: usize = 12;
const BASE: u64 = 3 * PAGE;
const SECTION: u64 = 4 * PAGE;

/// One page: which block, where in memory, dirty since when.
#[derive(Clone, Debug)]
struct Page {
    block: (DeviceId, u64),
    frame: u64,
    dirty_at: Option<Duration>,
}

/// Pages, the least recently used first.
#[derive(Default)]
struct Naive {
    reads: CachedReads,
    pages: Vec<Page>,
    out: Vec<ReplayAccess>,
}

impl Naive {
    fn touch(&mut self, at: Duration, actor: Actor, access: Access, frame: u64) {
        let section = SectionNo((BASE + frame * PAGE) / SECTION);
        if let Some(last) = self.out.last_mut()
            && (last.at, last.actor, last.access, last.section) == (at, actor, access, section)
        {
            last.bytes += PAGE;
            return;
        }
        self.out.push(ReplayAccess {
            at,
            actor,
            section,
            access,
            bytes: PAGE,
        });
    }

    fn take(&mut self, at: Duration, block: (DeviceId, u64)) -> u64 {
        let frame = if self.pages.len() < PAGES {
            self.pages.len() as u64
        } else {
            let old = self.pages.remove(0);
            if old.dirty_at.is_some() {
                self.touch(at, disk(old.block.0), Access::Read, old.frame);
            }
            old.frame
        };
        self.pages.push(Page {
            block,
            frame,
            dirty_at: None,
        });
        frame
    }

    /// Another page is taken; the one that had the block is the next to be used again.
    fn read_again(&mut self, at: Duration, block: (DeviceId, u64), known: Option<usize>) {
        let mut dropped = None;
        if let Some(i) = known {
            // It becomes the newest before it is given up.
            let mut page = self.pages.remove(i);
            page.block = (DeviceId(99), 99);
            if page.dirty_at.take().is_some() {
                self.touch(at, disk(block.0), Access::Read, page.frame);
            }
            dropped = Some(page.frame);
            self.pages.push(page);
        }
        let frame = self.take(at, block);
        let is_dropped =
            |page: &Page| Some(page.frame) == dropped && page.block == (DeviceId(99), 99);
        if let Some(i) = self.pages.iter().position(is_dropped) {
            let page = self.pages.remove(i);
            self.pages.insert(0, page);
        }
        self.touch(at, disk(block.0), Access::Write, frame);
    }

    fn request(&mut self, at: Duration, request: &DiskRequest) {
        let end = request.offset_bytes + request.len_bytes;
        for number in request.offset_bytes / PAGE..end.div_ceil(PAGE) {
            let block = (request.disk, number);
            let mut known = self.pages.iter().position(|page| page.block == block);
            if self.reads == CachedReads::ReadAgain && request.access == Access::Read {
                self.read_again(at, block, known.take());
                continue;
            }
            let frame = match known {
                Some(i) => {
                    let page = self.pages.remove(i);
                    self.pages.push(page.clone());
                    page.frame
                }
                None => self.take(at, block),
            };
            let whole = request.offset_bytes <= number * PAGE && (number + 1) * PAGE <= end;
            let brought = known.is_none() && (request.access == Access::Read || !whole);
            if brought {
                self.touch(at, disk(request.disk), Access::Write, frame);
            }
            if request.access == Access::Write || known.is_some() {
                self.touch(at, Actor::Cpu, request.access, frame);
            }
            if request.access == Access::Write {
                let page = self.pages.last_mut().unwrap();
                page.dirty_at = page.dirty_at.or(Some(at));
            }
        }
    }

    fn passed(&mut self, now: Duration) {
        let mut old: Vec<usize> = (0..self.pages.len())
            .filter(|&i| {
                let dirty_at = self.pages[i].dirty_at;
                dirty_at.is_some_and(|at| at + Duration::from_secs(30) <= now)
            })
            .collect();
        old.sort_by_key(|&i| self.pages[i].block);
        for i in old {
            self.pages[i].dirty_at = None;
            let Page { block, frame, .. } = self.pages[i];
            self.touch(now, disk(block.0), Access::Read, frame);
        }
    }
}

fn disk(id: DeviceId) -> Actor {
    Actor::Device(id, Service::Block)
}

fn cache(reads: CachedReads) -> GuestPageCache {
    GuestPageCache::new(PageCacheParams {
        base_bytes: BASE,
        cache_bytes: PAGES as u64 * PAGE,
        section_bytes: SECTION,
        dirty_expire: Duration::from_secs(30),
        writeback_every: Duration::from_secs(5),
        reads,
        run_bytes: None,
    })
    .unwrap()
}

fn request_strategy() -> impl Strategy<Value = (u64, DiskRequest)> {
    let access = prop_oneof![Just(Access::Read), Just(Access::Write)];
    (0_u64..20, 1_u32..3, 0..30 * PAGE, 0..5 * PAGE, access).prop_map(
        |(seconds, disk, offset_bytes, len_bytes, access)| {
            let aligned = |bytes: u64| bytes / 512 * 512;
            let request = DiskRequest {
                number: 0,
                disk: DeviceId(disk),
                offset_bytes: aligned(offset_bytes),
                len_bytes: aligned(len_bytes),
                access,
            };
            (seconds, request)
        },
    )
}

proptest! {
    #[test]
    fn cache_touches_memory_as_a_plain_list_does(
        requests in proptest::collection::vec(request_strategy(), 1..120),
        reads in prop_oneof![Just(CachedReads::Served), Just(CachedReads::ReadAgain)],
    ) {
        let (mut cache, mut naive) = (cache(reads), Naive::default());
        naive.reads = reads;
        let mut out = Vec::new();
        let mut now = Duration::ZERO;
        for (seconds, request) in requests {
            let until = now + Duration::from_secs(seconds);
            // The naive one looks at every tick, the other when it says there may be something.
            for tick in (now.as_secs() / 5 + 1)..=(until.as_secs() / 5) {
                naive.passed(Duration::from_secs(tick * 5));
            }
            while let Some(due) = cache.due().filter(|due| *due <= until) {
                cache.passed(due, &mut out);
            }
            now = until;
            cache.request(now, &request, &mut out).unwrap();
            naive.request(now, &request);
        }
        prop_assert_eq!(out, naive.out);
    }
}

#[test]
fn fresh_memory_is_taken_in_order_and_used_memory_in_the_order_of_last_use() {
    let mut cache = cache(CachedReads::Served);
    let mut out = Vec::new();
    let mut read = |block: u64, pages: u64| {
        out.clear();
        let request = DiskRequest {
            number: 0,
            disk: DeviceId(1),
            offset_bytes: block * PAGE,
            len_bytes: pages * PAGE,
            access: Access::Read,
        };
        cache.request(Duration::ZERO, &request, &mut out).unwrap();
        let touch = |a: &ReplayAccess| (a.section.0, a.bytes / PAGE, a.actor == Actor::Cpu);
        out.iter().map(touch).collect::<Vec<_>>()
    };
    // Frames 0 to 11 lie in sections 0 (one page), 1, 2 (four each), 3 (three).
    assert_eq!(
        read(100, 12),
        [(0, 1, false), (1, 4, false), (2, 4, false), (3, 3, false)]
    );
    assert_eq!(read(100, 1), [(0, 1, true)]);
    assert_eq!(read(500, 4), [(1, 4, false)]);
    assert_eq!(read(101, 1), [(2, 1, false)]);
    assert_eq!(cache.counts().recycled, 5);
}

#[test]
fn request_that_is_too_long_or_wraps_round_is_an_error_with_its_number() {
    for (offset_bytes, len_bytes) in [(0, 1 << 40), (u64::MAX - 10, 4096)] {
        let request = DiskRequest {
            number: 77,
            disk: DeviceId(1),
            offset_bytes,
            len_bytes,
            access: Access::Read,
        };
        let error = cache(CachedReads::Served)
            .request(Duration::ZERO, &request, &mut Vec::new())
            .unwrap_err();
        assert!(
            error.to_string().starts_with("record 77 asks for"),
            "{error}"
        );
    }
}

#[test]
fn cache_without_a_page_or_with_sections_smaller_than_pages_is_refused() {
    for (memory, cache, section) in [(1 << 20, 100, 4096), (1 << 20, 4096, 512)] {
        let params = PageCacheParams::at_the_end_of(memory, cache, section);
        assert!(GuestPageCache::new(params).is_err());
    }
}

#[test]
fn memory_in_runs_is_all_used_once_and_each_run_lies_together() {
    let run = 2 * PAGE;
    let params = PageCacheParams {
        run_bytes: Some(run),
        ..PageCacheParams::at_the_end_of(200 * PAGE, 101 * PAGE, PAGE)
    };
    let mut cache = GuestPageCache::new(params).unwrap();
    let mut out = Vec::new();
    let request = DiskRequest {
        number: 0,
        disk: DeviceId(1),
        offset_bytes: 0,
        len_bytes: 101 * PAGE,
        access: Access::Read,
    };
    cache.request(Duration::ZERO, &request, &mut out).unwrap();
    let mut pages: Vec<u64> = out.iter().map(|a| a.section.0).collect();
    assert!(!pages.is_sorted());
    let pairs: Vec<_> = pages.chunks_exact(2).collect();
    assert!(
        pairs
            .iter()
            .all(|pair| pair[1] == pair[0] + 1 && pair[0] % 2 == 1)
    );
    assert_eq!(
        pages.last(),
        Some(&199),
        "what is left after the last run stays"
    );
    pages.sort_unstable();
    assert_eq!(pages, (99..200).collect::<Vec<_>>());
}
