// SPDX-License-Identifier: Apache-2.0
//! Repairing the words of a VM whose daemon died. (The words of a VM just taken over are set as its
//! memory is allocated: see [`super::growth`].)

use super::{
    place::{Place, PlaceError},
    table::PageTable,
    word::{Content, DamagedWord, PageState, PageWord, Presence, Recovered},
};
use pagetide_addr::{PageNo, PageRange, PageSet};

/// Why words cannot be recovered.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    /// A word is damaged.
    #[error("{page}: {source}")]
    Damaged {
        /// Page of the word.
        page: PageNo,
        /// Bits of the word.
        source: DamagedWord,
    },
    /// Pages are present that must be absent.
    #[error(
        "{count} pages (the first is {first}) are present though their content is stored: another process has written to the VM's RAM"
    )]
    ForeignPage {
        /// The first of them.
        first: PageNo,
        /// How many.
        count: u64,
    },
    /// The place cannot report what is present.
    #[error(transparent)]
    Place(#[from] PlaceError),
}

/// Findings of a successor.
#[derive(Debug, Default)]
pub struct RecoveryReport {
    /// Pages that are present.
    pub present_pages: u64,
    /// Pages whose content is stored, zeros included.
    pub stored_pages: u64,
    /// Words that were in the middle of a transition.
    pub mended_words: u64,
    /// Pages whose content was already lost.
    pub poisoned_pages: u64,
}

/// Removes `pages` from the table before [`recover_words`]: whole regions whose memory went away
/// while no daemon ran. Their stored content is not reported as in use, so it is not kept.
pub fn forget_pages(table: &PageTable, pages: PageRange) {
    for (section, part) in pages.by_section() {
        let known = table.pages_of(section);
        let part = part.intersect(known);
        for page in part.iter() {
            table.set_initial(page, PageWord::new(PageState::Unallocated));
        }
        if part.end == known.end && !part.is_empty() {
            table.set_pages(section, part.start.since(known.start));
        }
    }
}

/// Repairs the words of a dead predecessor; calls `stored` for all content that is still needed.
/// Changes nothing if it fails.
///
/// # Errors
/// [`RecoveryError`].
pub fn recover_words(
    table: &PageTable,
    place: &dyn Place,
    mut stored: impl FnMut(PageNo, Content),
) -> Result<RecoveryReport, RecoveryError> {
    let mut report = RecoveryReport::default();
    let mut mended = Vec::new();
    let mut foreign_pages = Vec::new();
    for section in table.sections() {
        let pages = table.pages_of(section);
        let unclear = unclear(table, pages)?;
        let mut present = PageSet::EMPTY;
        if !unclear.is_empty() {
            for run in place.present_runs(unclear)? {
                present.unite(&PageSet::of_range(section, run));
            }
        }
        for page in pages.iter() {
            let bits = table.raw_bits(page);
            let word = word_of(bits, page)?;
            // A page outside the unclear ones is what its word says: see there.
            let presence = match word.state() {
                PageState::Present => Presence::Present,
                _ if present.contains(page) => Presence::Present,
                _ => Presence::Absent,
            };
            match word.recover(presence) {
                Recovered::ForeignPage => foreign_pages.push(page),
                Recovered::Word { word: now, .. } => {
                    if now.bits() != bits {
                        mended.push((page, now));
                    }
                    count(&mut report, page, now, &mut stored);
                }
            }
        }
    }
    if let Some(first) = foreign_pages.first() {
        return Err(RecoveryError::ForeignPage {
            first: *first,
            count: foreign_pages.len() as u64,
        });
    }
    report.mended_words = mended.len() as u64;
    for (page, word) in mended {
        table.set_initial(page, word);
    }
    Ok(report)
}

fn word_of(bits: u64, page: PageNo) -> Result<PageWord, RecoveryError> {
    PageWord::from_bits(bits).map_err(|source| RecoveryError::Damaged { page, source })
}

/// The smallest range of `pages` outside of which words mean the same whether their pages are present or
/// not. The kernel is asked about this range alone: in dense RAM most sections have none, and asking about
/// every page of a large VM would take longer than all the rest.
///
/// A page whose word is `Present` may have been discarded by the guest while no daemon ran. That is what
/// happens under a live daemon, too, and as there the page is a hole under such a word until it is touched.
fn unclear(table: &PageTable, pages: PageRange) -> Result<PageRange, RecoveryError> {
    let mut range = PageRange::new(pages.start, pages.start);
    for page in pages.iter() {
        match word_of(table.raw_bits(page), page)?.state() {
            PageState::Present | PageState::Poisoned | PageState::Unallocated => {}
            PageState::Evicting(_)
            | PageState::Stored(_)
            | PageState::Filling(_)
            | PageState::Discarding => {
                let start = match range.is_empty() {
                    true => page,
                    false => range.start,
                };
                range = PageRange::new(start, page.next());
            }
        }
    }
    Ok(range)
}

fn count(
    report: &mut RecoveryReport,
    page: PageNo,
    word: PageWord,
    stored: &mut impl FnMut(PageNo, Content),
) {
    match word.state() {
        PageState::Stored(content) => {
            report.stored_pages += 1;
            if !content.is_zero() {
                stored(page, content);
            }
        }
        PageState::Poisoned => report.poisoned_pages += 1,
        PageState::Unallocated => {}
        _ => report.present_pages += 1,
    }
}
