// SPDX-License-Identifier: Apache-2.0
//! Leases: what keeps a page where it is while a device's DMA is under way.
//!
//! # Idea
//! A DMA engine looks at the PA-bitmap and then works on the page for anything
//! from a microsecond to seconds. Between the two the page must not be taken
//! away (VPRI 5.1, R3). So an engine *leases* the sections it is about to touch,
//! looks at the bitmap, and returns the lease when the DMA is done. An evictor
//! clears the bits, then looks for leases.
//!
//! ```text
//!   engine (often)                        evictor (once a section)
//!     count[section] += 1   (plain)         bitmap: clear bits
//!     light fence           (no code)       heavy fence  (membarrier)
//!     bitmap: all bits set?                 count[section] of every engine == 0?
//!       yes: DMA, later count -= 1            yes: no DMA can touch the pages
//!       no:  count -= 1, page fault           no:  wait a little, else Busy
//! ```
//! Either the engine sees the cleared bits, or the evictor sees the count: the
//! fences forbid that both look before both have written. Each engine has
//! counters of its own and is their only writer, so neither a locked
//! instruction nor a fence is on the DMA path; `membarrier` makes the evictor
//! pay for both. Checked under loom below.
//!
//! *Wired* pages are leased for long: the rings of an enabled queue. They are
//! kept by page, not by section, and are never restricted at all.
//!
//! # What may go wrong
//! A lease that is never returned keeps its sections from eviction for ever;
//! so [`Lease`] is a duty value, consumed by [`EnginePort::release`] alone.

use crate::{
    bitmap::{Attribute, PaBitmap},
    sync::{AtomicU32, Mutex, Ordering, heavy_fence, light_fence, spin_loop},
};
use pagetide_addr::{Access, PageNo, PageRange, PageSet, SECTION_PAGES, SectionNo};
use std::collections::BTreeMap;

/// How often [`PageAttributes::restrict`] looks for leases before it gives up: some microseconds,
/// enough for a look-up that is about to fail, not for a disk.
const LEASE_LOOKS: u32 = 200;

/// The PA-bitmap of a domain together with the leases on its pages.
#[derive(Debug)]
pub struct PageAttributes {
    bitmap: PaBitmap,
    /// One row of counters for each engine, indexed by section.
    leases: Box<[Box<[AtomicU32]>]>,
    /// How many queues have each wired page.
    wired: Mutex<BTreeMap<PageNo, u32>>,
}

/// Sections an engine holds for one DMA. Must go back by [`EnginePort::release`].
#[must_use = "a lease that is not released keeps its pages from eviction for ever"]
#[derive(Debug)]
pub struct Lease {
    first: u32,
    count: u32,
}

impl PageAttributes {
    /// Attributes of `page_count` pages for `engine_count` engines, all pages `attribute`.
    #[must_use]
    pub fn new(page_count: u64, engine_count: usize, attribute: Attribute) -> Self {
        let sections = PageNo(SectionNo::count_for(page_count)).index();
        let row = || (0..sections).map(|_| AtomicU32::new(0)).collect();
        Self {
            bitmap: PaBitmap::new(page_count, attribute),
            leases: (0..engine_count).map(|_| row()).collect(),
            wired: Mutex::new(BTreeMap::new()),
        }
    }

    /// The bitmap itself.
    #[must_use]
    pub fn bitmap(&self) -> &PaBitmap {
        &self.bitmap
    }

    /// Leases `range` for engine `engine`, if every page of it allows `access`.
    ///
    /// Only the thread of that engine may call this, and [`Self::release`]: the counters have one
    /// writer each. [`EnginePort`] keeps to it.
    #[inline]
    pub(crate) fn lease(&self, engine: usize, range: PageRange, access: Access) -> Option<Lease> {
        if range.end.0 > self.bitmap.page_count() {
            return None;
        }
        let lease = Lease::over(range);
        self.add(engine, &lease, 1);
        light_fence();
        if self.bitmap.allows(range, access) {
            Some(lease)
        } else {
            self.release(engine, lease);
            None
        }
    }

    /// Returns a lease.
    #[inline]
    pub(crate) fn release(&self, engine: usize, lease: Lease) {
        self.add(engine, &lease, u32::MAX);
    }

    #[inline]
    fn add(&self, engine: usize, lease: &Lease, difference: u32) {
        let row = &self.leases[engine];
        for section in lease.first..lease.first + lease.count {
            let counter = &row[PageNo(u64::from(section)).index()];
            let now = counter.load(Ordering::Relaxed).wrapping_add(difference);
            // Release: an evictor that sees 0 sees what the DMA wrote (pairs with `is_leased`).
            counter.store(now, Ordering::Release);
        }
    }

    /// True while any engine holds a lease on `section`.
    #[must_use]
    pub fn is_leased(&self, section: SectionNo) -> bool {
        self.leases
            .iter()
            .any(|row| row[section.index()].load(Ordering::Acquire) != 0)
    }

    /// True while any engine holds any lease.
    #[must_use]
    pub fn is_any_leased(&self) -> bool {
        let sections = SectionNo::count_for(self.bitmap.page_count());
        (0..sections).any(|s| self.is_leased(SectionNo(s)))
    }

    /// Wires `range` for a queue, if every page of it is read-write now.
    #[must_use]
    pub fn wire(&self, range: PageRange) -> bool {
        let mut wired = self.lock_wired();
        // Under this lock no restriction is under way, so the bits stay as they are seen.
        if !self.bitmap.allows(range, Access::Write) {
            return false;
        }
        for page in range.iter() {
            *wired.entry(page).or_insert(0) += 1;
        }
        true
    }

    /// Takes back what [`Self::wire`] did, for the same range.
    pub fn unwire(&self, range: PageRange) {
        let mut wired = self.lock_wired();
        for page in range.iter() {
            match wired.get_mut(&page) {
                Some(1) => {
                    wired.remove(&page);
                }
                Some(count) => *count -= 1,
                None => debug_assert!(false, "{page} was not wired"),
            }
        }
    }

    /// Number of wired pages.
    #[must_use]
    pub fn wired_pages(&self) -> u64 {
        self.lock_wired().len() as u64
    }

    /// The wired pages of `section`.
    #[must_use]
    pub fn wired_in(&self, section: SectionNo) -> PageSet {
        wired_set(&self.lock_wired(), section)
    }

    /// Allows `access` to `range` (to be called only for present pages, under the section's lock).
    pub fn grant(&self, range: PageRange, access: Access) {
        self.bitmap.grant(range, access);
    }

    /// Makes `pages` of `section` unmapped and waits some microseconds for leases on the section to
    /// go. False if one is still held, or if a page is wired (nothing was done then).
    #[must_use]
    pub fn unmap(&self, section: SectionNo, pages: &PageSet) -> bool {
        {
            let wired = self.lock_wired();
            if pages.intersects(&wired_set(&wired, section)) {
                return false;
            }
            self.bitmap.unmap(section, pages);
        }
        self.no_lease_left(section)
    }

    /// Like [`Self::unmap`], but reads stay allowed.
    #[must_use]
    pub fn forbid_writes(&self, section: SectionNo, pages: &PageSet) -> bool {
        {
            let wired = self.lock_wired();
            if pages.intersects(&wired_set(&wired, section)) {
                return false;
            }
            self.bitmap.forbid_writes(section, pages);
        }
        self.no_lease_left(section)
    }

    /// Makes every page but the wired ones unmapped. Leases may still be held afterwards: wait
    /// until [`Self::is_any_leased`] is false.
    pub fn unmap_all(&self) {
        {
            let wired = self.lock_wired();
            for section in (0..SectionNo::count_for(self.bitmap.page_count())).map(SectionNo) {
                let mut pages = PageSet::of_range(section, section.pages(self.bitmap.page_count()));
                pages.subtract(&wired_set(&wired, section));
                self.bitmap.unmap(section, &pages);
            }
        }
        heavy_fence();
    }

    /// Makes every page read-write: the end of a VM's time under Pagetide.
    pub fn grant_all(&self) {
        self.bitmap.grant(
            PageRange::new(PageNo(0), PageNo(self.bitmap.page_count())),
            Access::Write,
        );
    }

    fn no_lease_left(&self, section: SectionNo) -> bool {
        heavy_fence();
        for _ in 0..LEASE_LOOKS {
            if !self.is_leased(section) {
                return true;
            }
            spin_loop();
            if cfg!(loom) {
                break;
            }
        }
        false
    }

    fn lock_wired(&self) -> impl std::ops::DerefMut<Target = BTreeMap<PageNo, u32>> + '_ {
        // A panic elsewhere cannot leave the map half changed: each change is one insert or remove.
        self.wired
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn wired_set(wired: &BTreeMap<PageNo, u32>, section: SectionNo) -> PageSet {
    let span = section.pages(u64::MAX / 2);
    let mut set = PageSet::EMPTY;
    for page in wired.range(span.start..span.end).map(|(page, _)| *page) {
        set.insert(page);
    }
    set
}

impl Lease {
    /// A lease on no section at all.
    #[cfg(not(loom))]
    pub(crate) fn nothing() -> Self {
        Self { first: 0, count: 0 }
    }

    #[inline]
    fn over(range: PageRange) -> Self {
        let first = range.start.0 / SECTION_PAGES;
        let end = if range.is_empty() {
            first
        } else {
            range.end.0.div_ceil(SECTION_PAGES)
        };
        // A domain has at most 2^32 sections (2^53 bytes): checked when it is made.
        #[expect(
            clippy::cast_possible_truncation,
            reason = "a domain has fewer than 2^32 sections"
        )]
        let (first, count) = (first as u32, (end - first) as u32);
        Self { first, count }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;

    /// A page as DMA sees it: an engine that holds a lease writes 1; the evictor, once it may,
    /// takes the page away, which is a write of 2 that no DMA may follow.
    #[test]
    fn loom_lease_and_restriction_never_overlap() {
        loom::model(|| {
            let attributes = Arc::new(PageAttributes::new(1, 1, Attribute::ReadWrite));
            let page = Arc::new(loom::cell::UnsafeCell::new(0));
            let range = PageNo(0).single();
            let engine = {
                let (attributes, page) = (attributes.clone(), page.clone());
                loom::thread::spawn(move || {
                    if let Some(lease) = attributes.lease(0, range, Access::Write) {
                        page.with_mut(|_| ());
                        attributes.release(0, lease);
                    }
                })
            };
            let section = SectionNo(0);
            if attributes.unmap(section, &PageSet::of_range(section, range)) {
                page.with_mut(|_| ());
            }
            engine.join().unwrap();
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn page(n: u64) -> PageRange {
        PageNo(n).single()
    }

    fn set(n: u64) -> (SectionNo, PageSet) {
        let section = PageNo(n).section();
        (section, PageSet::of_range(section, page(n)))
    }

    #[test]
    fn restriction_is_busy_while_a_lease_is_held_and_done_after() {
        let attributes = PageAttributes::new(2048, 2, Attribute::ReadWrite);
        let lease = attributes
            .lease(1, PageRange::new(PageNo(500), PageNo(600)), Access::Write)
            .unwrap();
        let (section, pages) = set(1);
        assert!(!attributes.unmap(section, &pages));
        let (other, its_pages) = set(1999);
        assert!(attributes.unmap(other, &its_pages));
        attributes.release(1, lease);
        assert!(attributes.unmap(section, &pages));
        assert!(attributes.lease(0, page(1), Access::Read).is_none());
        assert!(!attributes.is_any_leased());
    }

    #[test]
    fn wired_page_is_never_restricted_but_its_neighbour_is() {
        let attributes = PageAttributes::new(512, 1, Attribute::ReadWrite);
        assert!(attributes.wire(page(7)));
        assert!(attributes.wire(page(7)));
        let (section, pages) = set(7);
        assert!(!attributes.unmap(section, &pages));
        let (_, neighbour) = set(8);
        assert!(attributes.unmap(section, &neighbour));
        attributes.unmap_all();
        assert_eq!(
            attributes.bitmap().attribute(PageNo(7)),
            Attribute::ReadWrite
        );
        attributes.unwire(page(7));
        assert_eq!(attributes.wired_pages(), 1);
        attributes.unwire(page(7));
        assert!(attributes.unmap(section, &pages));
        assert!(!attributes.wire(page(7)));
    }

    #[test]
    fn lease_past_the_end_is_refused() {
        let attributes = PageAttributes::new(10, 1, Attribute::ReadWrite);
        assert!(
            attributes
                .lease(0, PageRange::new(PageNo(9), PageNo(11)), Access::Read)
                .is_none()
        );
    }
}
