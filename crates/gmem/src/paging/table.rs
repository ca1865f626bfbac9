// SPDX-License-Identifier: Apache-2.0
//! The logical page table: a word for each page, a lock and an eviction round for each section.
//!
//! Words are behind [`WordArray`], because they outlive the process (in shared memory) and because
//! a model checker supplies its own. A word changes only by compare-and-swap through
//! [`PageWord::after`].
//!
//! # The section's lock
//! Every install, punch, write-protect and grant happens with the section's lock held, after
//! re-reading the word under it. A message from the kernel or a device is only a hint, because a
//! late ioctl from a cancelled eviction could undo the next one. Fills hold the lock shared, so
//! pages of one section are filled in parallel. An eviction holds it exclusively, in short steps.
//!
//! # The round
//! While an eviction of a section is under way, its *candidates* are the pages that may still be
//! evicted. A thread that needs one of them takes it out of the set (under the shared lock); the
//! commit (under the exclusive lock) evicts the rest. The set is process memory: a successor starts
//! without a round. Rounds are numbered, so that a round whose candidates were all taken cannot
//! commit its old reads for the candidates of the next round.
//!
//! # Growth
//! The table has room for more pages than there are. A *region* of pages begins at a section
//! border, so each section belongs to at most one region, and the section's pages are its first N.
//! Sections are made, in chunks, when their pages are first allocated. The word of a page outside
//! all regions is not used; the page counts as [`PageState::Unallocated`].
//!
//! ```text
//!   page     0 ············ 1044      2048 ······ 3071        capacity
//!            ├── region ─────┤          ├─ region ─┤              │
//!   section  │ 0: 512 │ 1: 512 │ 2: 21 │ 3: 0 │ 4: 512 │ 5: 512 │ … never made
//! ```
//! The number of pages in a section changes only under its lock, held exclusively. A read without
//! the lock is a hint.

use super::{
    place::Granule,
    word::{Event, PageState, PageWord},
    words::{NoRoom, WordArray},
};
use crate::sync::{AtomicU64, Ordering, RwLock};
use pagetide_addr::{PageNo, PageRange, PageSet, SECTION_PAGES, SectionNo, to_usize};
use std::sync::{Mutex, OnceLock, PoisonError};

/// State of one section.
pub(crate) struct Section {
    /// See the module.
    pub(crate) lock: RwLock<()>,
    /// How many of its pages, from the first, are in a region. Like `leaving`, not one of the model
    /// checker's atomics: it changes only under the lock, and a read without the lock is a hint.
    pages: std::sync::atomic::AtomicU64,
    /// How many of its pages are stored. A read without the lock is a hint.
    stored: std::sync::atomic::AtomicU64,
    /// Its removal has begun: devices lose access to it, and faults in it are no longer served.
    leaving: std::sync::atomic::AtomicBool,
    /// Pages that the round under way may still evict.
    candidates: [AtomicU64; SET_WORDS],
    /// Number of the round that the candidates belong to.
    round: std::sync::atomic::AtomicU64,
    /// When pages of it were last evicted, by the clock of the admission; 0 if never. Like `pages`, it changes only
    /// under the lock.
    pub(crate) evicted_ns: std::sync::atomic::AtomicU64,
    /// What the place can install here; unset until it was asked, and again when the section has no pages. Like
    /// `pages`, not one of the model checker's atomics.
    granule: std::sync::atomic::AtomicU8,
    /// Page after the last one filled here by a fault, to detect a sequential reader.
    pub(crate) next_expected: std::sync::atomic::AtomicU64,
    /// How many pages the last fault here read ahead.
    pub(crate) window: std::sync::atomic::AtomicU32,
    /// Faults in each block since the last round, four bits each.
    faults: [std::sync::atomic::AtomicU64; FAULT_WORDS],
}

/// Pages whose faults are counted together.
pub(crate) const BLOCK_PAGES: u64 = 16;
/// Bits of a count, and its highest value.
const COUNT_BITS: u64 = 4;
const COUNT_MAX: u64 = (1 << COUNT_BITS) - 1;
const COUNTS_PER_WORD: u64 = 64 / COUNT_BITS;
const FAULT_WORDS: usize = 2;
const _: () = assert!(FAULT_WORDS as u64 * COUNTS_PER_WORD * BLOCK_PAGES == SECTION_PAGES);
const SET_WORDS: usize = 8;
const _: () = assert!(SET_WORDS as u64 * 64 == SECTION_PAGES);

const GRANULE_UNASKED: u8 = 0;
const GRANULE_PAGE: u8 = 1;
const GRANULE_SECTION: u8 = 2;

impl Section {
    pub(crate) fn new() -> Self {
        Self {
            lock: RwLock::new(()),
            pages: std::sync::atomic::AtomicU64::new(0),
            stored: std::sync::atomic::AtomicU64::new(0),
            leaving: std::sync::atomic::AtomicBool::new(false),
            candidates: std::array::from_fn(|_| AtomicU64::new(0)),
            round: std::sync::atomic::AtomicU64::new(0),
            evicted_ns: std::sync::atomic::AtomicU64::new(0),
            granule: std::sync::atomic::AtomicU8::new(GRANULE_UNASKED),
            next_expected: std::sync::atomic::AtomicU64::new(u64::MAX),
            window: std::sync::atomic::AtomicU32::new(0),
            faults: std::array::from_fn(|_| std::sync::atomic::AtomicU64::new(0)),
        }
    }

    /// Counts a fault in the block of `page`; returns how many there were since the last round, up
    /// to 15.
    pub(crate) fn count_fault(&self, page: PageNo) -> u64 {
        let block = page.place_in_section() / BLOCK_PAGES;
        let shift = block % COUNTS_PER_WORD * COUNT_BITS;
        let word = &self.faults[to_usize(block / COUNTS_PER_WORD)];
        let count = |word: u64| (word >> shift) & COUNT_MAX;
        let counted = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
            (count(word) < COUNT_MAX).then(|| word + (1 << shift))
        });
        counted.map_or(COUNT_MAX, |before| count(before) + 1)
    }

    /// What the place can install here, if it was asked already.
    pub(crate) fn granule(&self) -> Option<Granule> {
        match self.granule.load(Ordering::Relaxed) {
            GRANULE_PAGE => Some(Granule::Page),
            GRANULE_SECTION => Some(Granule::Section),
            _ => None,
        }
    }

    /// The place was asked. The section's lock is held, and the section has pages.
    pub(crate) fn set_granule(&self, granule: Granule) {
        let number = match granule {
            Granule::Page => GRANULE_PAGE,
            Granule::Section => GRANULE_SECTION,
        };
        self.granule.store(number, Ordering::Relaxed);
    }

    /// True from the beginning of its removal to the end.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    /// Begins its removal. The section's lock is held exclusively.
    pub(crate) fn set_leaving(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    fn place(page: PageNo) -> (usize, u64) {
        let position = page.place_in_section();
        (to_usize(position / 64), 1 << (position % 64))
    }

    /// Number of the round under way, or of the last one.
    pub(crate) fn round(&self) -> u64 {
        self.round.load(Ordering::Relaxed)
    }

    /// Ends the current round, if any, and returns the number of the next one, which candidates set
    /// from now on belong to. The section's lock is held exclusively.
    pub(crate) fn next_round(&self) -> u64 {
        for counts in &self.faults {
            counts.store(0, Ordering::Relaxed);
        }
        self.round.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn is_candidate(&self, page: PageNo) -> bool {
        let (word, bit) = Self::place(page);
        self.candidates[word].load(Ordering::Relaxed) & bit != 0
    }

    /// Takes `page` out of the round; true if it was in. Relaxed suffices: the caller holds the
    /// section's lock shared and the commit holds it exclusively.
    pub(crate) fn cancel(&self, page: PageNo) -> bool {
        let (word, bit) = Self::place(page);
        if self.candidates[word].load(Ordering::Relaxed) & bit == 0 {
            return false;
        }
        self.candidates[word].fetch_and(!bit, Ordering::Relaxed) & bit != 0
    }

    pub(crate) fn set_candidate(&self, page: PageNo) {
        let (word, bit) = Self::place(page);
        self.candidates[word].fetch_or(bit, Ordering::Relaxed);
    }

    pub(crate) fn has_candidates(&self) -> bool {
        self.candidates
            .iter()
            .any(|word| word.load(Ordering::Relaxed) != 0)
    }
}

fn is_stored(state: PageState) -> bool {
    matches!(state, PageState::Stored(_))
}

/// Sections that are made together: 128 MiB of pages.
const CHUNK_SECTIONS: usize = 64;

/// Words and sections of one address space.
pub struct PageTable {
    words: Box<dyn WordArray>,
    chunks: Box<[OnceLock<Box<[Section]>>]>,
    /// End of the highest region.
    end: std::sync::atomic::AtomicU64,
    /// Held while `end` is recomputed from the sections. Nothing waits under it.
    settling_end: Mutex<()>,
}

impl PageTable {
    /// A table over `words` in which every page is in a region.
    #[must_use]
    pub fn new(words: Box<dyn WordArray>) -> Self {
        let everything = PageNo(0).run(words.page_count());
        let table = Self::growing(words);
        for (section, pages) in everything.by_section() {
            table.set_pages(section, pages.len());
        }
        table
    }

    /// A table over `words` without a region: see [`PagedMemory::allocate`](crate::PagedMemory).
    #[must_use]
    pub fn growing(words: Box<dyn WordArray>) -> Self {
        let sections = SectionNo(SectionNo::count_for(words.capacity_pages())).index();
        let chunks = sections.div_ceil(CHUNK_SECTIONS);
        Self {
            words,
            chunks: (0..chunks).map(|_| OnceLock::new()).collect(),
            end: std::sync::atomic::AtomicU64::new(0),
            settling_end: Mutex::new(()),
        }
    }

    /// A table over words that a dead process left, with the regions that those words show.
    /// [`super::recovery`] then repairs it.
    ///
    /// # Errors
    /// [`NoRoom`]: the existing words cannot be determined.
    pub fn reopen(words: Box<dyn WordArray>) -> Result<Self, NoRoom> {
        let with_room = words.sections_with_room()?;
        let table = Self::growing(words);
        let unallocated = PageWord::new(PageState::Unallocated).bits();
        for section in with_room {
            let all = section.pages(table.capacity_pages());
            let last = all
                .iter()
                .rfind(|page| table.raw_bits(*page) != unallocated);
            if let Some(last) = last {
                table.set_pages(section, last.0 + 1 - all.start.0);
            }
        }
        Ok(table)
    }

    /// Number of pages up to the end of the highest region; those between regions count.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        // Acquire pairs with the Release in `settle_end`: a reader of a region's end sees its
        // sections.
        self.end.load(Ordering::Acquire)
    }

    /// The most pages there can be.
    #[must_use]
    pub fn capacity_pages(&self) -> u64 {
        self.words.capacity_pages()
    }

    /// Number of sections up to the end of the highest region.
    #[must_use]
    pub fn section_count(&self) -> u64 {
        SectionNo::count_for(self.page_count())
    }

    /// True if `pages` end within the highest region. Only a hint: they may lie between regions or
    /// be removed at any time. The section's lock gives the exact answer.
    #[must_use]
    pub fn contains(&self, pages: PageRange) -> bool {
        pages.end.0 <= self.page_count()
    }

    /// The sections that have pages, in ascending order.
    pub fn sections(&self) -> impl Iterator<Item = SectionNo> + '_ {
        (0_u64..)
            .zip(&self.chunks)
            .filter_map(|(number, chunk)| Some((number, chunk.get()?)))
            .flat_map(|(number, chunk)| (number * CHUNK_SECTIONS as u64..).zip(chunk))
            .filter(|(_, section)| section.pages.load(Ordering::Relaxed) > 0)
            .map(|(number, _)| SectionNo(number))
    }

    /// The section, if pages of it (or of a nearby one) were ever allocated.
    pub(crate) fn section(&self, section: SectionNo) -> Option<&Section> {
        let (chunk, place) = Self::place(section);
        self.chunks.get(chunk)?.get()?.get(place)
    }

    /// The section, made if necessary; it lies within the capacity.
    pub(crate) fn made_section(&self, section: SectionNo) -> &Section {
        let (chunk, place) = Self::place(section);
        let all = SectionNo(SectionNo::count_for(self.capacity_pages())).index();
        let first = chunk * CHUNK_SECTIONS;
        let make = || {
            (first..all.min(first + CHUNK_SECTIONS))
                .map(|_| Section::new())
                .collect()
        };
        &self.chunks[chunk].get_or_init(make)[place]
    }

    fn place(section: SectionNo) -> (usize, usize) {
        let index = section.index();
        (index / CHUNK_SECTIONS, index % CHUNK_SECTIONS)
    }

    /// From now on the first `pages` of `section` are in a region, and their words are valid. A
    /// section without pages is no longer leaving. The section's lock is held exclusively, or the
    /// table is not in use yet.
    pub(crate) fn set_pages(&self, section: SectionNo, pages: u64) {
        assert!(pages <= SECTION_PAGES, "{pages} pages in a section");
        let state = self.made_section(section);
        // Release pairs with the Acquire in `word`: a reader that sees the page sees its word.
        let before = state.pages.swap(pages, Ordering::AcqRel);
        // Words that a dead process left may be damaged; a later step checks them.
        let is_stored = |page: &PageNo| {
            PageWord::from_bits(self.raw_bits(*page)).is_ok_and(|word| is_stored(word.state()))
        };
        let first = section.first_page();
        let all = first.run(pages);
        let stored = all.iter().filter(is_stored).count() as u64;
        state.stored.store(stored, Ordering::Relaxed);
        if pages == 0 {
            state.leaving.store(false, Ordering::Relaxed);
        }
        state.granule.store(GRANULE_UNASKED, Ordering::Relaxed);
        let first = section.0 * SECTION_PAGES;
        let _settling = (self.settling_end.lock()).unwrap_or_else(PoisonError::into_inner);
        if pages >= before {
            self.end.fetch_max(first + pages, Ordering::Release);
        } else {
            self.settle_end();
        }
    }

    fn settle_end(&self) {
        let end = |(number, chunk): (usize, &OnceLock<Box<[Section]>>)| {
            let last = |section: &Section| section.pages.load(Ordering::Relaxed) > 0;
            let chunk = chunk.get()?;
            let place = chunk.iter().rposition(last)?;
            let first = ((number * CHUNK_SECTIONS + place) as u64) * SECTION_PAGES;
            Some(first + chunk[place].pages.load(Ordering::Relaxed))
        };
        let end = self.chunks.iter().enumerate().rev().find_map(end);
        self.end.store(end.unwrap_or(0), Ordering::Release);
    }

    /// Gives the words of `pages` memory; words that had none become [`PageState::Unallocated`].
    pub(crate) fn make_room(&self, pages: PageRange) -> Result<(), NoRoom> {
        self.words.make_room(pages)
    }

    /// The current word of `page`; [`PageState::Unallocated`] if it is in no region.
    ///
    /// # Panics
    /// If the word is damaged: words are checked when the table is opened, and only this process
    /// writes them.
    #[must_use]
    pub fn word(&self, page: PageNo) -> PageWord {
        let position = page.place_in_section();
        let pages = |section: &Section| section.pages.load(Ordering::Acquire);
        if self.section(page.section()).map_or(0, pages) <= position {
            return PageWord::new(PageState::Unallocated);
        }
        self.word_with_room(page)
    }

    /// The word of a page whose section has room for words, though the page may be in no region yet.
    pub(crate) fn word_with_room(&self, page: PageNo) -> PageWord {
        // Acquire pairs with the Release in `change`: a reader of `Stored` sees the stored bytes.
        let bits = self.words.cell(page).load(Ordering::Acquire);
        match PageWord::from_bits(bits) {
            Ok(word) => word,
            Err(damaged) => panic!("{page}: {damaged}"),
        }
    }

    /// Applies `event` to `page`, whose word was `seen`. Returns the word it had at that moment
    /// (including a waiter flag set meanwhile), or `None` if the word has changed or the event does
    /// not apply to it.
    pub(crate) fn change(&self, page: PageNo, seen: PageWord, event: Event) -> Option<PageWord> {
        let cell = self.words.cell(page);
        let mut current = seen;
        loop {
            let next = current.after(event)?;
            match cell.compare_exchange(
                current.bits(),
                next.bits(),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => {
                    self.count_stored(page, current.state(), next.state());
                    return Some(current);
                }
                Err(bits) => {
                    // Another state, or damage: either way not the word that was seen.
                    match PageWord::from_bits(bits) {
                        Ok(found) if found.state() == seen.state() => current = found,
                        _ => return None,
                    }
                }
            }
        }
    }

    /// Marks `page` as waited for; false if it is no longer being installed.
    pub(crate) fn mark_waited(&self, page: PageNo) -> bool {
        let cell = self.words.cell(page);
        let mut bits = cell.load(Ordering::Acquire);
        loop {
            let Some(marked) = PageWord::from_bits(bits)
                .ok()
                .and_then(PageWord::with_waiter)
            else {
                return false;
            };
            match cell.compare_exchange(bits, marked.bits(), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => bits = now,
            }
        }
    }

    /// Writes a word unconditionally: only while nothing else uses the table.
    pub(crate) fn set_initial(&self, page: PageNo, word: PageWord) {
        let bits = self.words.cell(page).swap(word.bits(), Ordering::AcqRel);
        if let Ok(before) = PageWord::from_bits(bits) {
            self.count_stored(page, before.state(), word.state());
        }
    }

    fn count_stored(&self, page: PageNo, before: PageState, after: PageState) {
        let (was, is) = (is_stored(before), is_stored(after));
        let Some(section) = (was != is).then(|| self.section(page.section())).flatten() else {
            return;
        };
        if is {
            section.stored.fetch_add(1, Ordering::Relaxed);
        } else {
            let before = section.stored.fetch_sub(1, Ordering::Relaxed);
            debug_assert!(before > 0, "{page} was not counted as stored");
        }
    }

    /// How many pages of `section` are stored: a counter, no scan.
    #[must_use]
    pub fn stored_pages(&self, section: SectionNo) -> u64 {
        let stored = |section: &Section| section.stored.load(Ordering::Relaxed);
        self.section(section).map_or(0, stored)
    }

    /// The bits of a word, unchecked: for opening a table that a dead process left.
    pub(crate) fn raw_bits(&self, page: PageNo) -> u64 {
        self.words.cell(page).load(Ordering::Acquire)
    }

    /// Memory of this process that the sections take, in bytes; words are where their array keeps them.
    #[must_use]
    pub fn section_bytes(&self) -> u64 {
        let made = self.chunks.iter().filter_map(OnceLock::get);
        let sections = made.map(|chunk| size_of_val(&**chunk)).sum::<usize>();
        (size_of_val(&*self.chunks) + sections) as u64
    }

    /// The pages of `section` that are in a region; none if it is in none.
    #[must_use]
    pub fn pages_of(&self, section: SectionNo) -> PageRange {
        let pages = |section: &Section| section.pages.load(Ordering::Acquire);
        let len = self.section(section).map_or(0, pages);
        let start = section.first_page();
        start.run(len)
    }

    /// The pages of `section` whose state satisfies `wanted`.
    #[must_use]
    pub fn pages_in_state(
        &self,
        section: SectionNo,
        wanted: impl Fn(PageState) -> bool,
    ) -> PageSet {
        let mut set = PageSet::EMPTY;
        for page in self
            .pages_of(section)
            .iter()
            .filter(|page| wanted(self.word(*page).state()))
        {
            set.insert(page);
        }
        set
    }
}

impl std::fmt::Debug for PageTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PageTable({} pages)", self.page_count())
    }
}
