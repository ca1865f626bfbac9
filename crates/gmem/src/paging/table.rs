// SPDX-License-Identifier: Apache-2.0
//! The logical page table: a word for each page, a lock and a round for each section.
//!
//! Words lie behind [`WordArray`], because they outlive the process (in shared
//! memory) and because a model checker brings its own. A word is changed by
//! compare-and-swap through [`PageWord::after`] only.
//!
//! # The section's lock
//! Every install, punch, write-protect and grant is issued with the section's
//! lock held and the word read again under it; a message from the kernel or a
//! device is only a hint, because a late ioctl from a cancelled eviction could
//! undo the next one. Fills hold the lock shared, so pages of one section come
//! back in parallel; an eviction holds it exclusively, in short steps.
//!
//! # The round
//! While an eviction of a section is under way its *candidates* are the pages
//! that may still go. Whoever needs one of them takes it out of the set (under
//! the shared lock), and the commit (under the exclusive one) evicts what is
//! left. The set is process memory: a successor starts without a round.

use super::word::{Event, PageWord};
use crate::sync::{AtomicU64, Ordering, RwLock};
use pagetide_addr::{PageNo, PageRange, PageSet, SECTION_PAGES, SectionNo};

/// Words of an address space, one a page.
pub trait WordArray: Send + Sync {
    /// Number of pages.
    fn page_count(&self) -> u64;

    /// The cell of a page's word.
    ///
    /// # Panics
    /// If `page` is past the end.
    fn cell(&self, page: PageNo) -> &AtomicU64;
}

/// Words in the process' own memory: for tests, and for spaces that need not outlive it.
#[derive(Debug)]
pub struct VolatileWords(Box<[AtomicU64]>);

impl VolatileWords {
    /// `page_count` words, all `word`.
    #[must_use]
    pub fn new(page_count: u64, word: PageWord) -> Self {
        Self(
            (0..page_count)
                .map(|_| AtomicU64::new(word.bits()))
                .collect(),
        )
    }
}

impl WordArray for VolatileWords {
    fn page_count(&self) -> u64 {
        self.0.len() as u64
    }

    fn cell(&self, page: PageNo) -> &AtomicU64 {
        &self.0[page.index()]
    }
}

/// What is known of one section.
pub(crate) struct Section {
    /// See the module.
    pub(crate) lock: RwLock<()>,
    /// Pages that the round under way may still evict.
    candidates: [AtomicU64; SET_WORDS],
    /// Page after the last one filled here by a fault, for telling a sequential reader.
    pub(crate) next_expected: std::sync::atomic::AtomicU64,
    /// How many neighbours the last fault here brought along.
    pub(crate) window: std::sync::atomic::AtomicU32,
}

const SET_WORDS: usize = 8;
const _: () = assert!(SET_WORDS as u64 * 64 == SECTION_PAGES);

impl Section {
    fn new() -> Self {
        Self {
            lock: RwLock::new(()),
            candidates: std::array::from_fn(|_| AtomicU64::new(0)),
            next_expected: std::sync::atomic::AtomicU64::new(u64::MAX),
            window: std::sync::atomic::AtomicU32::new(0),
        }
    }

    fn place(page: PageNo) -> (usize, u64) {
        let position = page.0 % SECTION_PAGES;
        (PageNo(position / 64).index(), 1 << (position % 64))
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

/// Words and sections of one address space.
pub struct PageTable {
    words: Box<dyn WordArray>,
    sections: Box<[Section]>,
}

impl PageTable {
    /// A table over `words`.
    #[must_use]
    pub fn new(words: Box<dyn WordArray>) -> Self {
        let sections = SectionNo::count_for(words.page_count());
        let sections = (0..sections).map(|_| Section::new()).collect();
        Self { words, sections }
    }

    /// Number of pages.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.words.page_count()
    }

    /// Number of sections.
    #[must_use]
    pub fn section_count(&self) -> u64 {
        self.sections.len() as u64
    }

    /// True if all of `pages` exist.
    #[must_use]
    pub fn contains(&self, pages: PageRange) -> bool {
        pages.end.0 <= self.page_count()
    }

    /// The word of `page` now.
    ///
    /// # Panics
    /// If the word is damaged: words were checked when the table was opened, and only this process
    /// writes them.
    #[must_use]
    pub fn word(&self, page: PageNo) -> PageWord {
        // Acquire pairs with the Release in `change`: who sees `Stored` sees the stored bytes.
        let bits = self.words.cell(page).load(Ordering::Acquire);
        match PageWord::from_bits(bits) {
            Ok(word) => word,
            Err(damaged) => panic!("{page}: {damaged}"),
        }
    }

    /// Lets `event` befall `page`, whose word was `seen`. Returns the word it had at that moment
    /// (with its waiter flag, which others may set meanwhile), or `None` if the word is another now
    /// or the event cannot befall it.
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
                Ok(_) => return Some(current),
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

    /// Marks `page` as waited for; false if it is not being installed any more.
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

    /// Writes a word outright: only while nobody else uses the table.
    pub(crate) fn set_initial(&self, page: PageNo, word: PageWord) {
        self.words.cell(page).store(word.bits(), Ordering::Release);
    }

    /// The bits of a word, unchecked: for opening a table that a dead process left.
    pub(crate) fn raw_bits(&self, page: PageNo) -> u64 {
        self.words.cell(page).load(Ordering::Acquire)
    }

    pub(crate) fn section(&self, section: SectionNo) -> &Section {
        &self.sections[section.index()]
    }

    /// The pages of `section`.
    #[must_use]
    pub fn pages_of(&self, section: SectionNo) -> PageRange {
        section.pages(self.page_count())
    }

    /// The pages of `section` whose state satisfies `wanted`.
    #[must_use]
    pub fn pages_in_state(
        &self,
        section: SectionNo,
        wanted: impl Fn(crate::State) -> bool,
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
