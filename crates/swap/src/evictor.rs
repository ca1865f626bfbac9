// SPDX-License-Identifier: Apache-2.0
//! [`Evictor`]: moves pages of one section from memory into the store, in an order that loses none.
//!
//! ```text
//!   round begun (devices shut out, vCPUs read-only)
//!     what was touched since it was chosen is spared
//!     for each run of up to 16 candidates:
//!        read ─► one word? pack, CRC ─► store ─► commit (word, punch, word)
//!   round ended (what was needed meanwhile has stayed)
//! ```
//! Content is in the store before its word names it, and the word names it before the page is
//! punched. A reference taken through a page table needs the page mapped; after the write
//! protection no new one for writing is taken. So each page is checked once more between the
//! protection and the punch: it is evicted only if it is still unmapped. Batches are small because
//! a fault in the section waits for a commit, and because content packed in vain is wasted work.
//!
//! A section that comes and goes whole (hugetlbfs) is packed batch by batch and committed at once, so a
//! store without room for all of it refuses all of it. It is not tried again for a while, as long as there is no more
//! room.
//!
//! Content that a full store refuses stays where it is, and so do the pages after it that would need
//! room; pages of zeros, and those of one repeated word, go all the same.

use crate::{
    keeper::{Keeper, Kept, MayTake},
    store::{PoolStore, PutError},
    tier::{Located, PAGE},
};
use pagetide_addr::{PageNo, PageRange, PageSet, SectionNo, to_usize};
use pagetide_gmem::{Content, ContentStore, EvictionError, EvictionRound, PagedMemory, PlaceError};
use pagetide_policy::tracker::TrackerError;
use std::{
    collections::HashMap,
    ops::ControlFlow,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// For how long a section that goes whole is left alone after there was no room for one of its pages, while there is
/// not more.
const REFUSED_TIME: Duration = Duration::from_secs(60);
/// Most of them that are known: 8 GiB.
const REFUSED_MAX: usize = 4096;
/// Pages read, packed and committed together.
const BATCH_PAGES: u64 = 16;

/// Result of evicting from a section.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct EvictReport {
    /// Pages absent now.
    pub evicted_pages: u64,
    /// Of them, pages of zeros.
    pub zero_pages: u64,
    /// Of them, pages of another word, again and again.
    pub same_filled_pages: u64,
    /// Candidates that were needed meanwhile, and stayed; and those that `progress` did not want any more.
    pub cancelled_pages: u64,
    /// Candidates that stayed because the store is full, or has no room for such pages.
    pub refused: PageSet,
    /// More pages were wanted than it was to evict: those behind them were not tried.
    pub was_trimmed: bool,
    /// `progress` has ended it.
    pub was_cut: bool,
}

/// Why evicting ended early. Pages evicted before that stay evicted.
#[derive(Debug, thiserror::Error)]
pub enum EvictorError {
    /// The section cannot be evicted from now.
    #[error(transparent)]
    Round(#[from] EvictionError),
    /// Content cannot be stored, for another reason than that the store is full.
    #[error(transparent)]
    Store(#[from] PutError),
    /// The VM's memory failed.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The tracker failed.
    #[error("cannot determine which pages were accessed: {0}")]
    Tracker(TrackerError),
}

/// See the module. One per worker: it keeps buffers.
pub struct Evictor {
    space: Arc<PagedMemory>,
    store: Arc<PoolStore>,
    keeper: Keeper,
    pages: Box<[u8]>,
    /// Sections that go whole and for a page of which there was no room, and when that was: what all workers know.
    refused: Arc<Mutex<HashMap<SectionNo, Instant>>>,
}

/// Why not all pages of a section that goes whole are stored.
enum Unpacked {
    /// There is no room for one of them.
    NoRoom,
    Failed(PutError),
}

impl Evictor {
    /// An evictor of `space` into `store`.
    #[must_use]
    pub fn new(space: Arc<PagedMemory>, store: Arc<PoolStore>) -> Self {
        let pages = vec![0; to_usize(BATCH_PAGES) * PAGE].into();
        Self {
            space,
            store,
            keeper: Keeper::default(),
            pages,
            refused: Arc::default(),
        }
    }

    /// One for another thread.
    #[must_use]
    pub fn another(&self) -> Self {
        let refused = Arc::clone(&self.refused);
        Self {
            refused,
            ..Self::new(Arc::clone(&self.space), Arc::clone(&self.store))
        }
    }

    /// The space.
    #[must_use]
    pub fn space(&self) -> &Arc<PagedMemory> {
        &self.space
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Arc<PoolStore> {
        &self.store
    }

    /// Evicts up to `pages_max` of the `wanted` pages of `section`; while the store is full, all of them
    /// that need no room. Once the pages are protected,
    /// `touched` returns those that must stay; `progress` is called after each batch with the number
    /// of pages it evicted, and may end the eviction there.
    ///
    /// # Errors
    /// [`EvictorError`].
    pub fn evict(
        &mut self,
        section: SectionNo,
        wanted: &PageSet,
        pages_max: u64,
        touched: impl FnOnce() -> Result<PageSet, TrackerError>,
        mut progress: impl FnMut(u64) -> ControlFlow<()>,
    ) -> Result<EvictReport, EvictorError> {
        let space = Arc::clone(&self.space);
        let mut wanted = *wanted;
        let goes_whole = space.goes_whole(section);
        let mut report = EvictReport::default();
        if goes_whole && self.is_refused(section) {
            report.refused = wanted;
            return Ok(report);
        }
        // Of a full store's pages only those of one word go, and which they are is not known yet.
        if self.store.takes_content() && !goes_whole {
            report.was_trimmed = trim_to(&mut wanted, section, pages_max);
        }
        let mut round = space.begin_eviction(section, &wanted)?;
        round.spare(&touched().map_err(EvictorError::Tracker)?);
        let begun = round.candidates();
        if goes_whole {
            self.evict_whole(&mut round, &begun, &mut report)?;
            report.was_cut = progress(report.evicted_pages).is_break();
            report.cancelled_pages = begun.len() - report.evicted_pages - report.refused.len();
            return Ok(report);
        }
        'runs: for run in begun.runs(section) {
            let mut first = run.start;
            while first < run.end {
                let end = run.end.min(first.plus(BATCH_PAGES));
                let before = report.evicted_pages;
                self.evict_batch(&mut round, PageRange::new(first, end), &mut report)?;
                if progress(report.evicted_pages - before).is_break() {
                    report.was_cut = true;
                    break 'runs;
                }
                first = end;
            }
        }
        report.cancelled_pages = begun.len() - report.evicted_pages - report.refused.len();
        Ok(report)
    }

    /// Evicts the whole section, or nothing of it: packs page after page while none of it is needed, and
    /// commits all of them together.
    fn evict_whole(
        &mut self,
        round: &mut EvictionRound<'_>,
        begun: &PageSet,
        report: &mut EvictReport,
    ) -> Result<(), EvictorError> {
        let mut batch: Vec<(PageNo, Content)> = Vec::with_capacity(to_usize(begun.len()));
        let packed = self.pack_whole(round, begun, &mut batch);
        let stored = batch.len() as u64 == begun.len();
        if !matches!(packed, Ok(None)) || !stored {
            for (_, content) in batch {
                self.free(content);
            }
            return match packed? {
                None => Ok(()),
                Some(Unpacked::Failed(why)) => Err(why.into()),
                Some(Unpacked::NoRoom) => {
                    report.refused = *begun;
                    self.refuse(round.section());
                    Ok(())
                }
            };
        }
        self.commit(round, &batch, report)
    }

    /// True if there was no room for a page of `section` lately, and there is not much more now: to pack 511 other
    /// pages would be for nothing again.
    fn is_refused(&self, section: SectionNo) -> bool {
        let now = Instant::now();
        let mut refused = self.refused();
        if self.store.full().is_none() && self.store.turned_away(now).is_none() {
            refused.clear();
        }
        let at = refused.get(&section);
        at.is_some_and(|at| now.saturating_duration_since(*at) < REFUSED_TIME)
    }

    fn refuse(&self, section: SectionNo) {
        let now = Instant::now();
        let mut refused = self.refused();
        if refused.len() >= REFUSED_MAX {
            refused.retain(|_, at| now.saturating_duration_since(*at) < REFUSED_TIME);
        }
        if refused.len() < REFUSED_MAX {
            refused.insert(section, now);
        }
    }

    fn refused(&self) -> MutexGuard<'_, HashMap<SectionNo, Instant>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the pages of `begun` into `batch`, as long as none was needed. Returns why a page is not stored.
    fn pack_whole(
        &mut self,
        round: &EvictionRound<'_>,
        begun: &PageSet,
        batch: &mut Vec<(PageNo, Content)>,
    ) -> Result<Option<Unpacked>, EvictorError> {
        let may_take = self.may_take();
        for run in begun.runs(round.section()) {
            let mut first = run.start;
            while first < run.end {
                let pages = PageRange::new(first, run.end.min(first.plus(BATCH_PAGES)));
                if round.candidates().is_empty() {
                    return Ok(None);
                }
                let bytes = &mut self.pages[..to_usize(pages.bytes())];
                round.read(pages, bytes)?;
                for (page, content) in pages.iter().zip(bytes.as_chunks::<PAGE>().0) {
                    match (self.keeper).keep(&self.store, page, content, may_take) {
                        Kept::Stored(content) => batch.push((page, content)),
                        Kept::NeedsRoom => return Ok(Some(Unpacked::NoRoom)),
                        Kept::Refused(why) if why.is_full() => return Ok(Some(Unpacked::NoRoom)),
                        Kept::Refused(why) => return Ok(Some(Unpacked::Failed(why))),
                    }
                }
                first = pages.end;
            }
        }
        Ok(None)
    }

    /// Of a full store's pages only those that need no room go.
    fn may_take(&self) -> MayTake {
        match self.store.takes_content() {
            true => MayTake::Room,
            false => MayTake::Nothing,
        }
    }

    fn free(&self, content: Content) {
        if !content.is_zero() {
            self.store.free(content);
        }
    }

    fn evict_batch(
        &mut self,
        round: &mut EvictionRound<'_>,
        pages: PageRange,
        report: &mut EvictReport,
    ) -> Result<(), EvictorError> {
        let candidates = round.candidates();
        // All of them were needed meanwhile, or removed from the VM: then there is not even anything
        // to read.
        if !pages.iter().any(|page| candidates.contains(page)) {
            return Ok(());
        }
        let may_take = self.may_take();
        let bytes = &mut self.pages[..to_usize(pages.bytes())];
        round.read(pages, bytes)?;
        let mut batch: Vec<(PageNo, Content)> = Vec::with_capacity(to_usize(pages.len()));
        let mut failed = None;
        for (page, content) in pages.iter().zip(bytes.as_chunks::<PAGE>().0) {
            if !candidates.contains(page) {
                continue;
            }
            match self.keeper.keep(&self.store, page, content, may_take) {
                Kept::Stored(content) => batch.push((page, content)),
                Kept::NeedsRoom => report.refused.insert(page),
                Kept::Refused(why) if why.is_full() => report.refused.insert(page),
                Kept::Refused(why) => {
                    failed = Some(why);
                    break;
                }
            }
        }
        self.commit(round, &batch, report)?;
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    fn commit(
        &self,
        round: &mut EvictionRound<'_>,
        batch: &[(PageNo, Content)],
        report: &mut EvictReport,
    ) -> Result<(), EvictorError> {
        let committed = round.commit(batch);
        for content in committed.unused {
            self.store.free(content);
        }
        report.evicted_pages += committed.evicted.len();
        let evicted = |(page, _): &&(PageNo, Content)| committed.evicted.contains(*page);
        for (_, content) in batch.iter().filter(evicted) {
            let is_same = matches!(Located::of(*content), Ok(Located::Same(_)));
            report.zero_pages += u64::from(content.is_zero());
            report.same_filled_pages += u64::from(is_same);
        }
        committed
            .problem
            .map_or(Ok(()), |problem| Err(problem.into()))
    }
}

/// Leaves the first `pages_max` pages in the set; true if it had more.
fn trim_to(set: &mut PageSet, section: SectionNo, pages_max: u64) -> bool {
    let has_more = set.len() > pages_max;
    if has_more {
        let surplus: Vec<PageNo> = set.pages(section).skip(to_usize(pages_max)).collect();
        for page in surplus {
            set.remove(page);
        }
    }
    has_more
}
