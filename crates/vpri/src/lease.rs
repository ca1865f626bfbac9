// SPDX-License-Identifier: Apache-2.0
//! Leases: they keep a page in place while a device's DMA is under way.
//!
//! # Idea
//! A DMA engine checks the PA-bitmap and then works on the page for anything
//! from a microsecond to seconds. The page must not be evicted in between (VPRI
//! 5.1, R3). So an engine *leases* the sections that it is about to touch,
//! checks the bitmap, and returns the lease when the DMA is done. An evictor
//! clears the bits, then checks for leases.
//!
//! ```text
//!   engine (often)                        evictor (once a section)
//!     count[section] += 1   (plain)         bitmap: clear bits
//!     light fence           (no code)       heavy fence  (see below)
//!     bitmap: all bits set?                 count[section] of every engine == 0?
//!       yes: DMA, later count -= 1            yes: no DMA can touch the pages
//!       no:  count -= 1, page fault           no:  wait a little, else Busy
//! ```
//! Either the engine sees the cleared bits, or the evictor sees the count: the
//! fences forbid that both read before both have written. Each engine has its
//! own counters and is their only writer, so the DMA path has neither a locked
//! instruction nor a fence; the evictor pays for both. Checked under loom
//! below.
//!
//! # The heavy fence
//! An evictor first *asks*: it increments a number that each engine reads when
//! it begins to take a lease, and that the engine then acknowledges. All leases
//! before the acknowledgement are counted, and all later ones see the cleared
//! bits: no fence is needed. An engine at work acknowledges within a
//! microsecond. One that sleeps, or copies something long, does not. Then
//! `membarrier` makes every thread of the process pass a fence: this costs ten
//! times as much while an engine runs (an interrupt to its CPU), and little
//! while none does.
//!
//! Counters are made for a GiB when an engine first takes a lease in it; a missing
//! counter is 0. Publishing a counter is a store like any other of the engine's,
//! so the protocol above holds for the first lease, too.
//!
//! *Wired* pages are leased for long: the rings of an enabled queue. They are
//! recorded by page, not by section, and are never restricted.
//!
//! # Many ranges
//! A caller that restricts more than a section ([`PageAttributes::begin_unmap`])
//! clears all bits first, then passes *one* heavy fence, and then checks for
//! leases in all sections that it touched: the fence costs the same for a page and
//! for a terabyte.
//!
//! # What may go wrong
//! A lease that is never returned blocks eviction of its sections forever, so
//! [`Lease`] must be used: only [`EnginePort::release`](crate::domain::EnginePort::release) consumes it.
//!
//! [`EnginePort::release`](crate::domain::EnginePort::release): crate::domain::EnginePort::release

use crate::{
    bitmap::{Attribute, PaBitmap},
    sparse::{SECTIONS_PER_GIB, Sparse, by_gib, pages_of},
    sync::{AtomicU32, AtomicU64, Mutex, Ordering, heavy_fence, light_fence, spin_loop},
    wired::WiredPages,
};
use pagetide_addr::{
    Access, FilePage, FilePageSet, FileRange, FileSection, SECTION_PAGES, to_usize,
};

/// How often a restriction checks for leases before it gives up: some microseconds, enough for a
/// look-up that is about to fail, not for a disk.
const LEASE_LOOKS: u32 = 200;

/// How often an evictor checks that all engines have acknowledged, before it makes them pass a
/// fence: some microseconds. Under the model checker, the second check comes after a turn of the
/// engines.
const ASK_LOOKS: u32 = if cfg!(loom) { 2 } else { 256 };

/// The PA-bitmap of a domain together with the leases on its pages.
#[derive(Debug)]
pub struct PageAttributes {
    bitmap: PaBitmap,
    /// The counters of each engine, one for each section.
    leases: Box<[Sparse<AtomicU32>]>,
    /// How often evictors asked.
    asked: OwnLine,
    /// The last of these numbers that each engine has acknowledged.
    seen: Box<[OwnLine]>,
    /// How many queues wire each page.
    wired: Mutex<WiredPages>,
}

/// A number on a cache line of its own.
#[derive(Debug)]
#[repr(align(128))]
struct OwnLine(AtomicU64);

impl OwnLine {
    fn zero() -> Self {
        Self(AtomicU64::new(0))
    }
}

/// Sections an engine holds for one DMA. Must be returned by [`EnginePort::release`](crate::domain::EnginePort::release).
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
        let counters = (0..engine_count).map(|_| Sparse::new(page_count, || ()));
        Self {
            bitmap: PaBitmap::new(page_count, attribute),
            leases: counters.collect(),
            asked: OwnLine::zero(),
            seen: (0..engine_count).map(|_| OwnLine::zero()).collect(),
            wired: Mutex::new(WiredPages::default()),
        }
    }

    /// The bitmap itself.
    #[must_use]
    pub fn bitmap(&self) -> &PaBitmap {
        &self.bitmap
    }

    /// Memory that bitmap and counters use now, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bitmap.bytes() + self.leases.iter().map(Sparse::bytes).sum::<u64>()
    }

    /// Leases `range` for engine `engine`, if every page of it allows `access`.
    ///
    /// Only the thread of that engine may call this and [`Self::release`]: each counter has one
    /// writer. [`EnginePort`](crate::domain::EnginePort) ensures it.
    #[inline]
    pub fn lease(&self, engine: usize, range: FileRange, access: Access) -> Option<Lease> {
        self.lease_past(engine, range, access, light_fence)
    }

    /// [`Self::lease`]; `fence` runs between the count and the look-up.
    #[inline]
    fn lease_past(
        &self,
        engine: usize,
        range: FileRange,
        access: Access,
        fence: impl Fn(),
    ) -> Option<Lease> {
        if range.end.0 > self.bitmap.page_count() {
            return None;
        }
        self.say_seen(engine);
        let lease = Lease::over(range);
        self.add(engine, &lease, 1);
        fence();
        if self.bitmap.allows(range, access) {
            Some(lease)
        } else {
            self.release(engine, lease);
            None
        }
    }

    /// Acknowledges to waiting evictors that every lease is counted, and that what they cleared will
    /// be seen.
    #[inline]
    fn say_seen(&self, engine: usize) {
        // Acquire: look-ups from now on see the bits that were cleared before the request.
        let asked = self.asked.0.load(Ordering::Acquire);
        let seen = &self.seen[engine].0;
        if seen.load(Ordering::Relaxed) != asked {
            // Release: an evictor that sees this sees the counts of all leases until now.
            seen.store(asked, Ordering::Release);
        }
    }

    /// Call after clearing bits: from now on every engine has either published its lease or will see
    /// our bits. See the module.
    fn fence(&self) {
        if !self.ask() {
            heavy_fence();
        }
    }

    /// Asks all engines, and returns whether they acknowledge soon.
    fn ask(&self) -> bool {
        // Release, and a read-modify-write: an engine that sees a later number sees what we
        // cleared, too.
        let number = self.asked.0.fetch_add(1, Ordering::Release) + 1;
        for _ in 0..ASK_LOOKS {
            let has_seen = |seen: &OwnLine| seen.0.load(Ordering::Acquire) >= number;
            if self.seen.iter().all(has_seen) {
                return true;
            }
            spin_loop();
        }
        false
    }

    /// Returns a lease.
    #[inline]
    pub fn release(&self, engine: usize, lease: Lease) {
        debug_assert!(self.holds(engine, &lease), "{lease:?} is not of {engine}");
        self.add(engine, &lease, u32::MAX);
    }

    /// True if every section of `lease` has a lease of this engine. For its own thread.
    fn holds(&self, engine: usize, lease: &Lease) -> bool {
        let mut sections = (lease.first..lease.first + lease.count).map(|s| FileSection(s.into()));
        sections.all(|section| {
            let (gib, index) = place(section);
            let counters = self.leases[engine].get(gib);
            counters.is_some_and(|counters| counters[index].load(Ordering::Relaxed) > 0)
        })
    }

    #[inline]
    fn add(&self, engine: usize, lease: &Lease, difference: u32) {
        let row = &self.leases[engine];
        for section in (lease.first..lease.first + lease.count).map(|s| FileSection(s.into())) {
            let (gib, index) = place(section);
            let counters = match row.get(gib) {
                Some(counters) => counters,
                None => self.make_counters(engine, gib),
            };
            let counter = &counters[index];
            let now = counter.load(Ordering::Relaxed).wrapping_add(difference);
            // Release: an evictor that sees 0 sees what the DMA wrote (pairs with `is_leased`).
            counter.store(now, Ordering::Release);
        }
    }

    /// The first lease of an engine in a GiB. On that engine's thread, so no other thread makes
    /// them.
    #[cold]
    fn make_counters(&self, engine: usize, gib: usize) -> &[AtomicU32] {
        let sections = FileSection::count_for(pages_of(gib, self.bitmap.page_count()).len());
        let counters = || (0..sections).map(|_| AtomicU32::new(0)).collect();
        let slot = self.leases[engine].slot(gib);
        // A lease lies within the domain: this is checked before anything is counted.
        slot.and_then(|slot| slot.get_or_make(counters))
            .unwrap_or_default()
    }

    /// True while any engine holds a lease on `section`.
    #[must_use]
    pub fn is_leased(&self, section: FileSection) -> bool {
        let (gib, index) = place(section);
        self.leases.iter().any(|row| {
            let counter = row.get(gib).and_then(|counters| counters.get(index));
            counter.is_some_and(|counter| counter.load(Ordering::Acquire) != 0)
        })
    }

    /// True while any engine holds any lease.
    #[must_use]
    pub fn is_any_leased(&self) -> bool {
        let made = self.leases.iter().flat_map(Sparse::made);
        made.flatten()
            .any(|counter| counter.load(Ordering::Acquire) != 0)
    }

    /// The sections of `ranges` on which any engine holds a lease, ascending, each once.
    #[must_use]
    pub fn leased_in(&self, ranges: &[FileRange]) -> Vec<FileSection> {
        let mut leased = Vec::new();
        for (gib, part) in ranges.iter().flat_map(|range| by_gib(*range)) {
            for counters in self.leases.iter().filter_map(|row| row.get(gib)) {
                let held = part.sections().filter(|section| {
                    let counter = counters.get(place(*section).1);
                    counter.is_some_and(|counter| counter.load(Ordering::Acquire) != 0)
                });
                leased.extend(held);
            }
        }
        leased.sort_unstable();
        leased.dedup();
        leased
    }

    /// Wires `range` for a queue, if every page of it is read-write now.
    #[must_use]
    pub fn wire(&self, range: FileRange) -> bool {
        let mut wired = self.lock_wired();
        // No restriction is under way under this lock, so the bits stay as they are seen.
        if !self.bitmap.allows(range, Access::Write) {
            return false;
        }
        wired.wire(range);
        true
    }

    /// Reverts [`Self::wire`], for the same range.
    pub fn unwire(&self, range: FileRange) {
        self.lock_wired().unwire(range);
    }

    /// Number of wired pages.
    #[must_use]
    pub fn wired_pages(&self) -> u64 {
        self.lock_wired().len()
    }

    /// The wired pages of `section`.
    #[must_use]
    pub fn wired_in(&self, section: FileSection) -> FilePageSet {
        self.lock_wired().of(section)
    }

    /// Allows `access` to `range` (to be called only for present pages, under the section's lock).
    pub fn grant(&self, range: FileRange, access: Access) {
        self.bitmap.grant(range, access);
    }

    /// Unmaps `pages` of `section` and waits some microseconds for leases on the section to be
    /// returned. False if one is still held, or if a page is wired (nothing was done then).
    #[must_use]
    pub fn unmap(&self, section: FileSection, pages: &FilePageSet) -> bool {
        {
            let wired = self.lock_wired();
            if pages.intersects(&wired.of(section)) {
                return false;
            }
            self.bitmap.unmap(section, pages);
        }
        self.no_lease_left(section)
    }

    /// Like [`Self::unmap`], but reads stay allowed.
    #[must_use]
    pub fn forbid_writes(&self, section: FileSection, pages: &FilePageSet) -> bool {
        {
            let wired = self.lock_wired();
            if pages.intersects(&wired.of(section)) {
                return false;
            }
            self.bitmap.forbid_writes(section, pages);
        }
        self.no_lease_left(section)
    }

    /// Unmaps all of `ranges`, then waits some microseconds for leases on their sections to be
    /// returned. Returns the sections that stayed busy, empty if none: see [`Restriction::wait`].
    #[must_use]
    pub fn unmap_ranges(&self, ranges: &[FileRange]) -> Vec<Busy> {
        self.begin_unmap(ranges).wait()
    }

    /// Like [`Self::unmap_ranges`], but reads stay allowed.
    #[must_use]
    pub fn forbid_writes_ranges(&self, ranges: &[FileRange]) -> Vec<Busy> {
        self.begin_forbid_writes(ranges).wait()
    }

    /// The first half of [`Self::unmap_ranges`]: from now on no DMA into `ranges` begins. Where a
    /// range has wired pages, its parts in their sections are left as they were. Pages past the end
    /// are ignored.
    pub fn begin_unmap(&self, ranges: &[FileRange]) -> Restriction<'_> {
        self.begin(ranges, PaBitmap::unmap_range)
    }

    /// The first half of [`Self::forbid_writes_ranges`]: from now on no DMA that writes into
    /// `ranges` begins. Wired pages are left as with [`Self::begin_unmap`].
    pub fn begin_forbid_writes(&self, ranges: &[FileRange]) -> Restriction<'_> {
        self.begin(ranges, PaBitmap::forbid_writes_range)
    }

    fn begin(&self, ranges: &[FileRange], clear: fn(&PaBitmap, FileRange)) -> Restriction<'_> {
        let mut restriction = Restriction {
            attributes: self,
            cleared: Vec::with_capacity(ranges.len()),
            wired: Vec::new(),
        };
        let wired = self.lock_wired();
        for range in ranges {
            self.split_at_wired(&wired, *range, &mut restriction);
        }
        for range in &restriction.cleared {
            clear(&self.bitmap, *range);
        }
        drop(wired);
        if !restriction.cleared.is_empty() {
            self.fence();
        }
        restriction
    }

    /// Adds `range` to the ranges to clear, without the sections in which a page of it is wired.
    fn split_at_wired(&self, wired: &WiredPages, range: FileRange, to: &mut Restriction<'_>) {
        let page_count = self.bitmap.page_count();
        let range = range.intersect(FilePage(0).run(page_count));
        let mut start = range.start;
        let mut push = |start: FilePage, end: FilePage| {
            if start < end {
                to.cleared.push(FileRange::new(start, end));
            }
        };
        for section in wired.sections_in(range) {
            let spared = range.intersect(section.pages(page_count));
            push(start, spared.start);
            start = spared.end;
            to.wired.push(section);
        }
        push(start, range.end);
    }

    /// Unmaps every page but the wired ones. Leases may still be held afterwards: wait until
    /// [`Self::is_any_leased`] is false.
    pub fn unmap_all(&self) {
        {
            let wired = self.lock_wired();
            for run in wired.others(self.bitmap.page_count()) {
                self.bitmap.unmap_range(run);
            }
        }
        self.fence();
    }

    /// Makes every page read-write: for the end of a VM's time under Pagetide.
    pub fn grant_all(&self) {
        self.bitmap
            .grant(FilePage(0).run(self.bitmap.page_count()), Access::Write);
    }

    fn no_lease_left(&self, section: FileSection) -> bool {
        self.fence();
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

    fn lock_wired(&self) -> impl std::ops::DerefMut<Target = WiredPages> + '_ {
        // A panic elsewhere cannot leave it inconsistent: nothing that is called under it panics.
        self.wired
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Pages whose bits are cleared while DMA that began before may still be under way.
#[must_use = "DMA that began before may still be under way: wait for it"]
#[derive(Debug)]
pub struct Restriction<'a> {
    attributes: &'a PageAttributes,
    cleared: Vec<FileRange>,
    wired: Vec<FileSection>,
}

/// Why pages of a section could not be restricted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Busy {
    /// One of them is wired: the part of its range in the section was left as it was.
    Wired(FileSection),
    /// A DMA is under way in the section. Its bits are cleared: no further one begins.
    Leased(FileSection),
}

impl Restriction<'_> {
    /// Waits for leases on the sections concerned, at most some microseconds in all. Returns the
    /// sections in which DMA may go on: as long as one is [`Busy`], its pages must not be evicted.
    /// A caller that gives up grants the ranges again.
    #[must_use]
    pub fn wait(self) -> Vec<Busy> {
        let mut leased = self.attributes.leased_in(&self.cleared);
        for _ in 0..LEASE_LOOKS {
            if leased.is_empty() || cfg!(loom) {
                break;
            }
            spin_loop();
            leased.retain(|section| self.attributes.is_leased(*section));
        }
        let wired = self.wired.into_iter().map(Busy::Wired);
        let leased = leased.into_iter().map(Busy::Leased);
        let mut busy: Vec<Busy> = wired.chain(leased).collect();
        busy.dedup();
        busy
    }
}

/// The GiB of a section, and its index among the sections of that GiB.
#[inline]
const fn place(section: FileSection) -> (usize, usize) {
    (
        to_usize(section.0 / SECTIONS_PER_GIB),
        to_usize(section.0 % SECTIONS_PER_GIB),
    )
}

impl Lease {
    /// A lease on no section at all.
    #[cfg(not(loom))]
    pub(crate) fn nothing() -> Self {
        Self { first: 0, count: 0 }
    }

    #[inline]
    fn over(range: FileRange) -> Self {
        let first = range.start.0 / SECTION_PAGES;
        let end = if range.is_empty() {
            first
        } else {
            range.end.0.div_ceil(SECTION_PAGES)
        };
        // A domain has at most 2^32 sections (2^53 bytes): this is checked when it is made.
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

    /// A page as DMA sees it: an engine that holds a lease writes 1. The evictor, once it may,
    /// evicts the page, which is a write of 2 that no DMA may follow.
    #[test]
    fn loom_lease_and_restriction_never_overlap() {
        loom::model(|| {
            let attributes = Arc::new(PageAttributes::new(1, 1, Attribute::ReadWrite));
            let page = Arc::new(loom::cell::UnsafeCell::new(0));
            let range = FilePage(0).single();
            let engine = {
                let (attributes, page) = (attributes.clone(), page.clone());
                loom::thread::spawn(move || {
                    if let Some(lease) = attributes.lease(0, range, Access::Write) {
                        page.with_mut(|_| ());
                        attributes.release(0, lease);
                    }
                })
            };
            let section = FileSection(0);
            if attributes.unmap(section, &FilePageSet::of_range(section, range)) {
                page.with_mut(|_| ());
            }
            engine.join().unwrap();
        });
    }

    /// An engine that takes one lease after the other acknowledges the evictor's request: then
    /// neither side passes a fence.
    #[test]
    fn loom_engine_that_has_seen_needs_no_fence() {
        loom::model(|| {
            let attributes = Arc::new(PageAttributes::new(1, 1, Attribute::ReadWrite));
            let page = Arc::new(loom::cell::UnsafeCell::new(0));
            let range = FilePage(0).single();
            let engine = {
                let (attributes, page) = (attributes.clone(), page.clone());
                loom::thread::spawn(move || {
                    for _ in 0..2 {
                        let lease = attributes.lease_past(0, range, Access::Write, || ());
                        if let Some(lease) = lease {
                            page.with_mut(|_| ());
                            attributes.release(0, lease);
                        }
                    }
                })
            };
            attributes.bitmap.unmap_range(range);
            if attributes.ask() && !attributes.is_leased(FileSection(0)) {
                page.with_mut(|_| ());
            }
            engine.join().unwrap();
        });
    }

    /// The same where the restriction is the first change of a part of the GiB, so that its chunk
    /// is made meanwhile: a DMA to the adjacent page is not disturbed by that.
    #[test]
    fn loom_lease_against_a_restriction_that_makes_the_chunk() {
        loom::model(|| {
            let attributes = Arc::new(PageAttributes::new(2, 1, Attribute::ReadWrite));
            let page = Arc::new(loom::cell::UnsafeCell::new(0));
            let engine = {
                let (attributes, page) = (attributes.clone(), page.clone());
                loom::thread::spawn(move || {
                    if let Some(lease) = attributes.lease(0, FilePage(0).single(), Access::Write) {
                        page.with_mut(|_| ());
                        attributes.release(0, lease);
                    }
                    assert!(
                        attributes
                            .bitmap
                            .allows(FilePage(1).single(), Access::Write)
                    );
                })
            };
            if attributes.unmap_ranges(&[FilePage(0).single()]).is_empty() {
                page.with_mut(|_| ());
            }
            engine.join().unwrap();
        });
    }

    /// One DMA into the last page of a section and the first of the next, which are restricted as
    /// two ranges: each may be taken only while no DMA goes on in it.
    #[test]
    fn loom_one_fence_is_enough_for_several_ranges() {
        loom::model(|| {
            let attributes = Arc::new(PageAttributes::new(513, 1, Attribute::Unmapped));
            let both = FileRange::new(FilePage(511), FilePage(513));
            attributes.grant(both, Access::Write);
            let pages: Arc<[_; 2]> = Arc::new([(); 2].map(|()| loom::cell::UnsafeCell::new(0)));
            let engine = {
                let (attributes, pages) = (attributes.clone(), pages.clone());
                loom::thread::spawn(move || {
                    if let Some(lease) = attributes.lease(0, both, Access::Write) {
                        pages.iter().for_each(|page| page.with_mut(|_| ()));
                        attributes.release(0, lease);
                    }
                })
            };
            let busy = attributes.unmap_ranges(&[FilePage(511).single(), FilePage(512).single()]);
            for (n, section) in [FileSection(0), FileSection(1)].into_iter().enumerate() {
                if !busy.contains(&Busy::Leased(section)) {
                    pages[n].with_mut(|_| ());
                }
            }
            engine.join().unwrap();
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sparse::PAGES_PER_GIB;

    fn page(n: u64) -> FileRange {
        FilePage(n).single()
    }

    fn set(n: u64) -> (FileSection, FilePageSet) {
        let section = FilePage(n).section();
        (section, FilePageSet::of_range(section, page(n)))
    }

    #[test]
    fn restriction_is_busy_while_a_lease_is_held_and_done_after() {
        let attributes = PageAttributes::new(2048, 2, Attribute::ReadWrite);
        let lease = attributes
            .lease(
                1,
                FileRange::new(FilePage(500), FilePage(600)),
                Access::Write,
            )
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
            attributes.bitmap().attribute(FilePage(7)),
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
                .lease(0, FileRange::new(FilePage(9), FilePage(11)), Access::Read)
                .is_none()
        );
    }

    fn range(start: u64, end: u64) -> FileRange {
        FileRange::new(FilePage(start), FilePage(end))
    }

    #[test]
    fn ranges_are_unmapped_together_and_each_section_that_is_busy_is_told_once() {
        let pages = 3 * PAGES_PER_GIB;
        let attributes = PageAttributes::new(pages, 2, Attribute::ReadWrite);
        let far = PAGES_PER_GIB + 5;
        let leases = [
            attributes.lease(0, range(510, 514), Access::Write),
            attributes.lease(1, page(513), Access::Read),
            attributes.lease(1, page(far), Access::Write),
        ];
        assert!(attributes.wire(page(5000)) && attributes.wire(page(5001)));
        let wanted = [
            range(0, 10),
            range(512, 5001),
            range(5001, 6000),
            range(6000, pages + 1000),
        ];
        let busy = attributes.unmap_ranges(&wanted);
        let wired = Busy::Wired(FilePage(5000).section());
        let held = [0, 1, far / 512].map(|section| Busy::Leased(FileSection(section)));
        assert_eq!(busy, [wired, held[0], held[1], held[2]]);
        // The section with the wired page stays as it was; in the others every requested page is
        // unmapped.
        let attribute = |page| attributes.bitmap().attribute(FilePage(page));
        for page in [10, 511, 4608, 5000, 5119] {
            assert_eq!(attribute(page), Attribute::ReadWrite, "page {page}");
        }
        for page in [0, 9, 512, 4607, 5120, far, pages - 1] {
            assert_eq!(attribute(page), Attribute::Unmapped, "page {page}");
        }
        for (engine, lease) in [0, 1, 1].into_iter().zip(leases) {
            attributes.release(engine, lease.unwrap());
        }
        assert_eq!(attributes.unmap_ranges(&wanted), [wired]);
        assert!(attributes.unmap_ranges(&[]).is_empty());
    }

    #[test]
    fn reads_of_a_range_go_on_while_its_writes_are_forbidden() {
        let attributes = PageAttributes::new(1024, 1, Attribute::ReadWrite);
        assert!(attributes.forbid_writes_ranges(&[range(3, 700)]).is_empty());
        assert!(attributes.lease(0, page(699), Access::Write).is_none());
        let reading = attributes.lease(0, page(699), Access::Read).unwrap();
        attributes.release(0, reading);
        assert!(attributes.bitmap().allows(range(700, 1024), Access::Write));
    }

    #[test]
    fn terabyte_with_nothing_in_it_takes_less_than_a_megabyte() {
        let pages = 1024 * PAGES_PER_GIB;
        let attributes = PageAttributes::new(pages, 4, Attribute::ReadWrite);
        attributes.unmap_all();
        assert!(attributes.unmap_ranges(&[range(0, pages)]).is_empty());
        assert!(!attributes.is_any_leased());
        let empty = attributes.bytes();
        assert!(empty < 200 << 10, "{empty} bytes");
        // One page in the middle, with a DMA to it by one engine.
        let middle = page(pages / 2 + 99);
        attributes.grant(middle, Access::Write);
        let lease = attributes.lease(3, middle, Access::Write).unwrap();
        assert!(attributes.is_any_leased());
        attributes.release(3, lease);
        assert_eq!(attributes.bitmap().chunk_count(), 1);
        assert_eq!(attributes.bytes() - empty, (64 << 10) + 512 * 4);
        attributes.grant_all();
        assert!(attributes.bitmap().allows(range(0, pages), Access::Write));
        assert!(attributes.bytes() < 1 << 20);
    }
}
