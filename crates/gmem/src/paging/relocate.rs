// SPDX-License-Identifier: Apache-2.0
//! Relocation: a stored page's content moves to another place of the store, while it stays absent.
//!
//! A store that moves content down to a slower tier, or closer together, first stores a copy, then
//! asks for the words to be changed, and frees the old copy last. So at whatever instant the daemon
//! dies, each word names content that is complete; a copy that no word names is free.
//!
//! ```text
//!   copy stored at `to`, acknowledged ─► Stored(from) ─► Stored(to) ─► `from` freed
//!                                     └─ the word says otherwise ────► `to` freed
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
//! A page that was filled and evicted again since its copy was made names other content by then:
//! `from` is freed when it is filled. It could name `from` again only if the store gave that place
//! to a new content of the same page. So a store must keep `from` from being given out again until
//! the relocation has ended; the move itself cannot tell.

use super::{
    memory::PagedMemory,
    word::{Content, Event, PageState, PageWord},
};
use crate::sync::share;
use pagetide_addr::{PageNo, PageSet, SectionNo};
use std::sync::atomic::Ordering::Relaxed;

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
    /// Copies made in vain: their pages were needed, evicted anew or removed meanwhile.
    pub unused: Vec<Content>,
}

impl PagedMemory {
    /// Moves the content of stored pages of `section`, if their words still name what was copied.
    /// Faults on them are served meanwhile.
    ///
    /// # Panics
    /// If a page lies in another section, or a copy is the content that it was made of.
    pub fn relocate(&self, section: SectionNo, moves: &[Move]) -> Relocated {
        let mut done = Relocated::default();
        let state = self.table.section(section);
        let _shared = state.map(|state| share(&state.lock));
        let stays = state.is_some_and(|state| !state.is_leaving());
        for Move { page, from, to } in moves {
            assert_eq!(page.section(), section, "{page} is not of the section");
            assert_ne!(from, to, "{page} is moved to where it is");
            // A page that is in no region has a word that only its section's removal explains.
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
