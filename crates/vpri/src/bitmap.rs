// SPDX-License-Identifier: Apache-2.0
//! The PA-bitmap: two bits a page that say what a device may do there now (VPRI 4.1, 5.1).
//!
//! ```text
//!   word n:  63 62 │ … │ 3 2 │ 1 0        bit 2k    page 32n+k may be read
//!            page 31       1     0        bit 2k+1  and written
//! ```
//! A page is *unmapped* (00), *read-only* (01) or *read-write* (11). One load
//! covers 32 pages, so a look-up before a DMA of up to 128 KiB costs one or two
//! loads and no call to the host. A section is 16 words, a GiB 8,192: 64 KiB.
//!
//! # A terabyte
//! A space is seldom busy all over. Above the words, each GiB has one entry:
//! *uniform*, all its pages alike, or a *chunk* of its 8,192 words.
//!
//! ```text
//!   GiB        0        1         2      …     1023
//!   uniform    RW      (stale)    –               RW
//!   chunk      none      ●       none             none      32 bytes both
//!                        └──► 8,192 words
//! ```
//! An empty terabyte takes 32 KiB, and is mapped or unmapped by 1,024 stores. The
//! first change of a part of a GiB makes its chunk. Chunks stay while the bitmap
//! lives, even when all their pages are alike again: look-ups take no lock, so it
//! is never known when the last one has left. A terabyte that was busy all over
//! keeps 64 MiB.
//!
//! # Look-ups against changes
//! A look-up reads the chunk and its word, or else the uniform state. Words change
//! by one atomic operation each. A thread that makes a chunk or changes the
//! uniform state holds `making`. A chunk is published with the uniform state of
//! that instant in it, and that state never changes again. So
//!
//! > A look-up finds no chunk. Before it reads the uniform state a chunk appears
//! > and a page of it is unmapped. The look-up still reads *mapped*: that was true
//! > until the chunk appeared, which was after the look-up had begun.
//!
//! each look-up of a word returns a state that held at one instant between its
//! beginning and its end (linearisable). A look-up of several words, and a change
//! of several, is one such instant for each word. A whole DMA is made safe against
//! a change (VPRI 5.1, R2 and R3) by the lease that is taken before the look-up:
//! see [`crate::lease`]. R1, that the bitmap comes and goes with its memory, is up
//! to the domain.

use crate::{
    sparse::{PAGES_PER_GIB, Sparse, by_gib, gib_of, pages_of},
    sync::{AtomicU8, AtomicU64, Mutex, Ordering},
};
use pagetide_addr::{Access, FilePage, FilePageSet, FileRange, FileSection, to_usize};

const PAGES_PER_WORD: u64 = 32;
const READ_BITS: u64 = 0x5555_5555_5555_5555;
const _: () = assert!(2 * PAGES_PER_WORD == u64::BITS as u64);
const _: () = assert!(PAGES_PER_GIB.is_multiple_of(PAGES_PER_WORD));

/// What devices may do with a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attribute {
    /// Nothing: a DMA takes an I/O page fault.
    Unmapped,
    /// Read it.
    ReadOnly,
    /// Read and write it.
    ReadWrite,
}

impl Attribute {
    /// Its two bits.
    const fn bits(self) -> u8 {
        match self {
            Self::Unmapped => 0b00,
            Self::ReadOnly => 0b01,
            Self::ReadWrite => 0b11,
        }
    }
}

/// Page attributes of one DMA domain.
#[derive(Debug)]
pub struct PaBitmap {
    page_count: u64,
    /// The chunks, and the bits of all pages of each GiB that has none.
    gibs: Sparse<AtomicU64, AtomicU8>,
    /// Held while a chunk is made or a uniform state changes.
    making: Mutex<()>,
}

/// What a change does to pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    AllowRead,
    AllowWrite,
    ForbidAll,
    ForbidWrites,
}

impl PaBitmap {
    /// A bitmap of `page_count` pages, all `attribute`.
    #[must_use]
    pub fn new(page_count: u64, attribute: Attribute) -> Self {
        Self {
            page_count,
            gibs: Sparse::new(page_count, || AtomicU8::new(attribute.bits())),
            making: Mutex::new(()),
        }
    }

    /// Number of pages it covers.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.page_count
    }

    /// Memory it uses now, in bytes: 32 a GiB, and 65,536 more for each GiB that has a chunk.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.gibs.bytes()
    }

    /// Number of GiBs whose pages are, or once were, not all alike: those that have a chunk.
    #[must_use]
    pub fn chunk_count(&self) -> usize {
        self.gibs.made().count()
    }

    /// True if every page of `range` allows `access`. A range past the end is not allowed.
    ///
    /// A caller that sees a page allowed sees its content, too (Acquire; [`Self::grant`] is the
    /// partner). Only a lease makes it *stay* allowed.
    #[must_use]
    #[inline]
    pub fn allows(&self, range: FileRange, access: Access) -> bool {
        if range.end.0 > self.page_count {
            return false;
        }
        let mut page = range.start.0;
        while page < range.end.0 {
            let (bits, known_to) = self.look(page);
            let next = known_to.min(range.end.0);
            let mask = match access {
                Access::Read => span(page, next) & READ_BITS,
                Access::Write => span(page, next),
            };
            if bits & mask != mask {
                return false;
            }
            page = next;
        }
        true
    }

    /// What may be done with `page` now; a page past the end is unmapped.
    #[must_use]
    #[inline]
    pub fn attribute(&self, page: FilePage) -> Attribute {
        if page.0 >= self.page_count {
            return Attribute::Unmapped;
        }
        let (bits, _) = self.look(page.0);
        match bits >> (2 * (page.0 % PAGES_PER_WORD)) & 0b11 {
            0b11 => Attribute::ReadWrite,
            0b01 => Attribute::ReadOnly,
            _ => Attribute::Unmapped,
        }
    }

    /// The word that holds the bits of `page`, which lies within the space, and the page up to
    /// which it holds: one word holds for all of a GiB without a chunk.
    #[inline]
    fn look(&self, page: u64) -> (u64, u64) {
        let next_gib = (page / PAGES_PER_GIB + 1) * PAGES_PER_GIB;
        let Some(gib) = self.gibs.slot(gib_of(FilePage(page))) else {
            return (pattern(Attribute::Unmapped.bits()), next_gib);
        };
        match gib.get() {
            Some(words) => {
                let word = &words[word_of(page)];
                (word.load(Ordering::Acquire), next_word(page))
            }
            None => (pattern(gib.beside.load(Ordering::Acquire)), next_gib),
        }
    }

    /// Allows `access` to all of `range`; pages past the end stay unmapped. Read-write pages stay so
    /// when reads are granted.
    pub fn grant(&self, range: FileRange, access: Access) {
        let change = match access {
            Access::Read => Change::AllowRead,
            Access::Write => Change::AllowWrite,
        };
        self.change(range, change);
    }

    /// Makes `pages` of `section` unmapped.
    pub fn unmap(&self, section: FileSection, pages: &FilePageSet) {
        for run in pages.runs(section) {
            self.unmap_range(run);
        }
    }

    /// Makes `pages` of `section` read-only where they were read-write.
    pub fn forbid_writes(&self, section: FileSection, pages: &FilePageSet) {
        for run in pages.runs(section) {
            self.forbid_writes_range(run);
        }
    }

    /// Makes all of `range` unmapped.
    pub fn unmap_range(&self, range: FileRange) {
        self.change(range, Change::ForbidAll);
    }

    /// Makes all of `range` read-only where it was read-write.
    pub fn forbid_writes_range(&self, range: FileRange) {
        self.change(range, Change::ForbidWrites);
    }

    fn change(&self, range: FileRange, change: Change) {
        let all = FilePage(0).run(self.page_count);
        for (gib, part) in by_gib(range.intersect(all)) {
            if let Some(words) = self.chunk_for(gib, part, change) {
                change_words(words, part, change);
            }
        }
    }

    /// The chunk in which to make `change` to `part`; `None` if it is already done in the uniform
    /// state.
    fn chunk_for(&self, gib: usize, part: FileRange, change: Change) -> Option<&[AtomicU64]> {
        let whole = pages_of(gib, self.page_count);
        let gib = self.gibs.slot(gib)?;
        if let Some(words) = gib.get() {
            return Some(words);
        }
        let _making = self
            .making
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        // The previous holder of the lock may have made the chunk.
        if let Some(words) = gib.get() {
            return Some(words);
        }
        let now = gib.beside.load(Ordering::Relaxed);
        let next = change.of(now);
        if next == now || part == whole {
            // Release, also for the same value: a caller that sees the bits sees the page.
            gib.beside.store(next, Ordering::Release);
            return None;
        }
        let word_count = whole.len().div_ceil(PAGES_PER_WORD);
        let words = (0..word_count).map(|_| AtomicU64::new(pattern(now)));
        gib.get_or_make(|| words.collect())
    }
}

impl Change {
    /// The bits that it makes of `bits`.
    const fn of(self, bits: u8) -> u8 {
        match self {
            Self::AllowRead => bits | 0b01,
            Self::AllowWrite => 0b11,
            Self::ForbidAll => 0b00,
            Self::ForbidWrites => bits & 0b01,
        }
    }

    /// Applies it to the pages of `word` that `span` covers.
    #[inline]
    fn make(self, word: &AtomicU64, span: u64) {
        // A word that is covered whole and whose old value does not matter takes a plain store.
        let whole = span == u64::MAX;
        // Release pairs with the Acquire of a look-up. Clearing needs no order of its own: the
        // heavy fence that follows orders it against the engines.
        match self {
            Self::AllowWrite if whole => word.store(u64::MAX, Ordering::Release),
            Self::ForbidAll if whole => word.store(0, Ordering::Relaxed),
            Self::AllowWrite => {
                word.fetch_or(span, Ordering::Release);
            }
            Self::AllowRead => {
                word.fetch_or(span & READ_BITS, Ordering::Release);
            }
            Self::ForbidAll => {
                word.fetch_and(!span, Ordering::Relaxed);
            }
            Self::ForbidWrites => {
                word.fetch_and(!span | READ_BITS, Ordering::Relaxed);
            }
        }
    }
}

/// Makes `change` to the pages of `part`, which lies in the GiB of `words`.
fn change_words(words: &[AtomicU64], part: FileRange, change: Change) {
    let mut page = part.start.0;
    while page < part.end.0 {
        let next = next_word(page).min(part.end.0);
        change.make(&words[word_of(page)], span(page, next));
        page = next;
    }
}

/// A word whose pages all have `bits`.
#[inline]
const fn pattern(bits: u8) -> u64 {
    bits as u64 * READ_BITS
}

/// Index of the word of `page` within its GiB.
#[inline]
fn word_of(page: u64) -> usize {
    to_usize(page % PAGES_PER_GIB / PAGES_PER_WORD)
}

/// The first page of the word after that of `page`.
#[inline]
const fn next_word(page: u64) -> u64 {
    (page / PAGES_PER_WORD + 1) * PAGES_PER_WORD
}

/// The bits of pages `page..next` in the word of `page`. If not all of them lie in it, the rest is
/// left out: this happens only for uniform states, where each page stands for all.
#[inline]
const fn span(page: u64, next: u64) -> u64 {
    let bits = 2 * (next - page);
    let low = if bits >= 64 {
        u64::MAX
    } else {
        (1 << bits) - 1
    };
    low << (2 * (page % PAGES_PER_WORD))
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::{sync::Arc, thread};

    /// Two words of one GiB.
    const PAGES: u64 = 40;

    fn bitmap(attribute: Attribute) -> Arc<PaBitmap> {
        Arc::new(PaBitmap::new(PAGES, attribute))
    }

    fn all() -> FileRange {
        FilePage(0).run(PAGES)
    }

    #[test]
    fn loom_two_writers_that_both_need_the_chunk_lose_no_change() {
        loom::model(|| {
            let bitmap = bitmap(Attribute::ReadWrite);
            let other = {
                let bitmap = Arc::clone(&bitmap);
                thread::spawn(move || bitmap.unmap_range(FilePage(33).single()))
            };
            bitmap.forbid_writes_range(FilePage(0).single());
            other.join().unwrap();
            assert_eq!(bitmap.attribute(FilePage(0)), Attribute::ReadOnly);
            assert_eq!(bitmap.attribute(FilePage(1)), Attribute::ReadWrite);
            assert_eq!(bitmap.attribute(FilePage(33)), Attribute::Unmapped);
        });
    }

    #[test]
    fn loom_change_of_a_gib_against_a_page_of_it_is_one_after_the_other() {
        loom::model(|| {
            let bitmap = bitmap(Attribute::ReadOnly);
            let other = {
                let bitmap = Arc::clone(&bitmap);
                thread::spawn(move || bitmap.grant(all(), Access::Write))
            };
            bitmap.unmap_range(FilePage(33).single());
            other.join().unwrap();
            assert!(bitmap.allows(FilePage(0).run(33), Access::Write));
            assert_ne!(bitmap.attribute(FilePage(33)), Attribute::ReadOnly);
        });
    }

    /// A page that was seen mapped is never seen unmapped again while no thread unmaps it, whether
    /// its GiB is described by the uniform state or by the chunk that appears meanwhile.
    #[test]
    fn loom_look_ups_never_go_back_to_a_state_that_was_left() {
        loom::model(|| {
            let bitmap = bitmap(Attribute::Unmapped);
            let looking = {
                let bitmap = Arc::clone(&bitmap);
                thread::spawn(move || {
                    let first = bitmap.allows(FilePage(0).single(), Access::Read);
                    let second = bitmap.allows(FilePage(0).single(), Access::Read);
                    assert!(second || !first);
                })
            };
            bitmap.grant(all(), Access::Read);
            bitmap.unmap_range(FilePage(33).single());
            looking.join().unwrap();
        });
    }

    /// A thread that sees a page allowed sees what was put there before, whether the uniform state,
    /// a chunk that appears, or an existing chunk says so.
    #[test]
    fn loom_page_that_is_seen_is_seen_with_its_content() {
        let page = FilePage(0).single();
        for (before, granted) in [(None, all()), (None, page), (Some(FilePage(9)), page)] {
            loom::model(move || {
                let bitmap = bitmap(Attribute::Unmapped);
                if let Some(page) = before {
                    bitmap.grant(page.single(), Access::Read);
                }
                let content = Arc::new(loom::cell::UnsafeCell::new(0));
                let looking = {
                    let (bitmap, content) = (Arc::clone(&bitmap), Arc::clone(&content));
                    thread::spawn(move || {
                        if bitmap.allows(page, Access::Read) {
                            content.with(|_| ());
                        }
                    })
                };
                content.with_mut(|_| ());
                bitmap.grant(granted, Access::Write);
                looking.join().unwrap();
            });
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    /// Pages of a space of two GiBs and some more, so that its last GiB is not whole.
    const PAGES: u64 = 2 * PAGES_PER_GIB + 512 + 77;

    struct Random(SplitMix64);

    impl Random {
        fn below(&mut self, end: u64) -> u64 {
            self.0.below(end)
        }

        /// Some pages, a section, whole GiBs or anything.
        fn range(&mut self) -> FileRange {
            let start = self.below(PAGES);
            let (start, len) = match self.below(8) {
                0..4 => (start, self.below(100)),
                4..6 => (start / 512 * 512, 512),
                6 => {
                    let first = self.below(3) * PAGES_PER_GIB;
                    (first, (1 + self.below(3)) * PAGES_PER_GIB)
                }
                _ => (start, self.below(PAGES)),
            };
            FileRange::new(FilePage(start), FilePage((start + len).min(PAGES)))
        }
    }

    fn change_both(bitmap: &PaBitmap, naive: &mut [Attribute], range: FileRange, kind: u64) {
        use Attribute::{ReadOnly, ReadWrite, Unmapped};
        let pages = &mut naive[range.start.index()..range.end.index()];
        match kind {
            0 => {
                bitmap.grant(range, Access::Write);
                pages.fill(ReadWrite);
            }
            1 => {
                bitmap.grant(range, Access::Read);
                let unmapped = pages.iter_mut().filter(|a| **a == Unmapped);
                unmapped.for_each(|a| *a = ReadOnly);
            }
            2 => {
                bitmap.unmap_range(range);
                pages.fill(Unmapped);
            }
            _ => {
                bitmap.forbid_writes_range(range);
                let writable = pages.iter_mut().filter(|a| **a == ReadWrite);
                writable.for_each(|a| *a = ReadOnly);
            }
        }
    }

    #[test]
    fn bitmap_agrees_with_a_naive_one_under_random_operations() {
        for seed in 0..12 {
            let bitmap = PaBitmap::new(PAGES, Attribute::Unmapped);
            let mut naive = vec![Attribute::Unmapped; to_usize(PAGES)];
            let mut random = Random(SplitMix64::new(seed));
            for _ in 0..150 {
                let range = random.range();
                change_both(&bitmap, &mut naive, range, random.below(4));
                let range = random.range();
                let pages = &naive[range.start.index()..range.end.index()];
                let read = pages.iter().all(|a| *a != Attribute::Unmapped);
                let write = pages.iter().all(|a| *a == Attribute::ReadWrite);
                assert_eq!(bitmap.allows(range, Access::Read), read, "{range:?}");
                assert_eq!(bitmap.allows(range, Access::Write), write, "{range:?}");
            }
            for (page, attribute) in naive.iter().enumerate() {
                assert_eq!(bitmap.attribute(FilePage(page as u64)), *attribute);
            }
        }
    }

    #[test]
    fn sets_of_a_section_change_their_pages_and_no_others() {
        let bitmap = PaBitmap::new(PAGES, Attribute::ReadWrite);
        let section = FileSection(3);
        let mut set = FilePageSet::EMPTY;
        for page in [1536, 1537, 1600, 2047].map(FilePage) {
            set.insert(page);
        }
        bitmap.forbid_writes(section, &set);
        let mut gone = FilePageSet::EMPTY;
        gone.insert(FilePage(1600));
        bitmap.unmap(section, &gone);
        for page in 1500..2100 {
            let expected = match page {
                1536 | 1537 | 2047 => Attribute::ReadOnly,
                1600 => Attribute::Unmapped,
                _ => Attribute::ReadWrite,
            };
            assert_eq!(bitmap.attribute(FilePage(page)), expected, "page {page}");
        }
    }

    #[test]
    fn terabyte_whose_pages_are_alike_has_no_chunk_whatever_is_done_to_all_of_it() {
        let pages = 1024 * PAGES_PER_GIB;
        let bitmap = PaBitmap::new(pages, Attribute::ReadWrite);
        let all = FilePage(0).run(pages);
        bitmap.forbid_writes_range(all);
        assert!(bitmap.allows(all, Access::Read) && !bitmap.allows(all, Access::Write));
        bitmap.unmap_range(all);
        assert!(!bitmap.allows(all, Access::Read));
        // A change that changes nothing makes no chunk.
        bitmap.unmap_range(FilePage(77).single());
        assert_eq!(bitmap.chunk_count(), 0);
        assert_eq!(bitmap.bytes(), 32 * 1024);
        bitmap.grant(FilePage(5 * PAGES_PER_GIB).single(), Access::Read);
        assert_eq!(bitmap.chunk_count(), 1);
        assert_eq!(bitmap.bytes(), 32 * 1024 + 64 * 1024);
        bitmap.grant(all, Access::Write);
        assert!(bitmap.allows(all, Access::Write));
        assert_eq!(bitmap.chunk_count(), 1);
    }

    #[test]
    fn range_past_the_end_is_not_allowed_though_its_word_is_set() {
        let bitmap = PaBitmap::new(40, Attribute::ReadWrite);
        let over = FileRange::new(FilePage(39), FilePage(41));
        assert!(bitmap.allows(FilePage(0).run(40), Access::Write));
        assert!(!bitmap.allows(over, Access::Read));
        bitmap.unmap_range(over);
        bitmap.grant(over, Access::Write);
        bitmap.grant(FilePage(u64::MAX - 1).single(), Access::Write);
        assert_eq!(bitmap.attribute(FilePage(39)), Attribute::ReadWrite);
        assert_eq!(bitmap.attribute(FilePage(40)), Attribute::Unmapped);
        assert!(!bitmap.allows(over, Access::Read));
    }
}
