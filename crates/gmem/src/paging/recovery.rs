// SPDX-License-Identifier: Apache-2.0
//! Words at the beginning, of a VM whose daemon died. (Those of a VM just taken over are set as its
//! memory is allocated: see [`super::growth`].)

use super::{
    place::{Place, PlaceError},
    table::PageTable,
    word::{Content, DamagedWord, PageState, PageWord, Presence, Recovered},
};
use pagetide_addr::{PageNo, PageRange};

/// Why words cannot be brought in order.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    /// A word is damaged.
    #[error("{page}: {source}")]
    Damaged {
        /// Whose word.
        page: PageNo,
        /// What it holds.
        source: DamagedWord,
    },
    /// Pages are present that must not be.
    #[error(
        "{count} pages (the first is {first}) are present though their content is stored: another process has written to the VM's RAM"
    )]
    ForeignPage {
        /// The first of them.
        first: PageNo,
        /// How many.
        count: u64,
    },
    /// The place cannot tell what is present.
    #[error(transparent)]
    Place(#[from] PlaceError),
}

/// What a successor found.
#[derive(Debug, Default)]
pub struct RecoveryReport {
    /// Pages that are present.
    pub present_pages: u64,
    /// Pages whose content is stored, zeros included.
    pub stored_pages: u64,
    /// Words that were in the middle of something.
    pub mended_words: u64,
    /// Pages whose content was lost before.
    pub poisoned_pages: u64,
}

/// Before [`recover_words`]: leaves `pages`, whole regions whose memory went while no daemon ran, out of
/// the table. What is stored for them is told to nobody, and so is kept by nobody.
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

/// Brings the words of a dead predecessor in order; `stored` is told of all content that is still
/// needed. Nothing is changed if this fails.
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
        let mut present = pagetide_addr::PageSet::EMPTY;
        for run in place.present_runs(pages)? {
            present.unite(&pagetide_addr::PageSet::of_range(section, run));
        }
        for page in pages.iter() {
            let bits = table.raw_bits(page);
            let presence = if present.contains(page) {
                Presence::Present
            } else {
                Presence::Absent
            };
            let word = PageWord::from_bits(bits)
                .map_err(|source| RecoveryError::Damaged { page, source })?;
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
