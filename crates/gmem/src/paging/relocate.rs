// SPDX-License-Identifier: Apache-2.0
//! Relocation: a stored page's content moves to another place of the store, while it stays absent.
//!
//! A store that moves content down to a slower tier, or closer together, first stores a copy, then
//! asks for the words to be changed, and frees the old copy last. So at whatever instant the daemon
//! dies, each word names content that is complete; a copy that no word names is free.
//!
//! ```text
//!   begin ─► read the words and what they name ─► copies stored at `to`, acknowledged
//!     ─► Stored(from) ─► Stored(to) ─► `from` freed
//!     └─ the word says otherwise, or a round has begun ─► `to` freed
//! ```
//! # Why the section's lock is held shared
//! The change is one compare-and-swap, from exactly the word that names `from`. A fill claims its
//! page by a compare-and-swap of the same word, so one of them comes first and wins whole. If the
//! fill does, the page is not `Stored` any more and `to` is unused. If the relocation does, the
//! claim fails and the fill reads the word again, which names `to`. So faults need not wait for a
//! relocation, though it has up to a section of pages to change. The lock is held at all because of
//! those who hold it exclusively and rely on words that stand still: a removal must not read a word,
//! lose it to a relocation, and free nothing.
//!
//! # A page that was evicted anew meanwhile
//! The word alone cannot tell whether it still means the bytes that were copied. While the copy is
//! written, which may take as long as it likes, the page may be filled, changed and evicted again,
//! and the store may give the new content the place of the old one, which is free by then. So a
//! relocation begins before anything is read ([`PagedMemory::begin_relocation`]) and notes the
//! number of the section's eviction round. A page that becomes stored after that was chosen by a
//! later round, and a removal ends the round, too. So if the number is still the same under the
//! lock, a word that names `from` has named it all the time. If it is not, no page is moved, and the
//! caller may begin again: sections whose content moves down are seldom evicted from.

use super::{
    memory::PagedMemory,
    word::{Content, Event, PageState, PageWord},
};
use crate::sync::share;
use pagetide_addr::{PageNo, PageSet, SectionNo};
use std::sync::atomic::Ordering::Relaxed;

/// A relocation that has begun: taken before the pages of a section are looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Relocation {
    section: SectionNo,
    round: u64,
}

/// A page whose content is stored twice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// The page.
    pub page: PageNo,
    /// What its word named when it was copied.
    pub from: Content,
    /// The copy, which can be read back by a successor. No word names it.
    pub to: Content,
}

/// What became of moves. All content in it belongs to the caller, to free or to keep: no word names
/// it. ([`Content::ZERO`], for which nothing is stored, is left out.)
#[derive(Debug, Default)]
#[must_use = "content that is not freed takes room for ever"]
pub struct Relocated {
    /// The pages whose words name the copy now.
    pub moved: PageSet,
    /// Their old content.
    pub replaced: Vec<Content>,
    /// Copies made in vain: their pages were needed or removed meanwhile, or pages of the section
    /// were evicted.
    pub unused: Vec<Content>,
}

impl PagedMemory {
    /// Begins to move content of `section`. Words and content that are copied must be read after
    /// this. To begin costs nothing, and binds nobody.
    #[must_use]
    pub fn begin_relocation(&self, section: SectionNo) -> Relocation {
        let state = self.table.section(section);
        // Under the lock, so that what is read afterwards is no older than the number.
        let round = state.map_or(0, |state| {
            let _shared = share(&state.lock);
            state.round()
        });
        Relocation { section, round }
    }

    /// Moves the content of stored pages, if their words still name what was copied. Faults on them
    /// are served meanwhile.
    ///
    /// # Panics
    /// If a page lies in another section than the relocation, or a copy is the content that it was made of.
    pub fn relocate(&self, relocation: Relocation, moves: &[Move]) -> Relocated {
        let Relocation { section, round } = relocation;
        let mut done = Relocated::default();
        let state = self.table.section(section);
        let _shared = state.map(|state| share(&state.lock));
        let stays = state.is_some_and(|state| !state.is_leaving() && state.round() == round);
        for Move { page, from, to } in moves {
            assert_eq!(page.section(), section, "{page} is not of the section");
            assert_ne!(from, to, "{page} is moved to where it is");
            let is_stored = stays && self.table.pages_of(section).contains(*page);
            let stored = PageWord::new(PageState::Stored(*from));
            let moved = is_stored
                && (self.table)
                    .change(*page, stored, Event::Moved(*to))
                    .is_some();
            let (list, content) = match moved {
                true => (&mut done.replaced, *from),
                false => (&mut done.unused, *to),
            };
            if !content.is_zero() {
                list.push(content);
            }
            if moved {
                done.moved.insert(*page);
            }
        }
        let moved = done.moved.len();
        self.counters.relocated_pages.fetch_add(moved, Relaxed);
        done
    }
}
