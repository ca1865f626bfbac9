// SPDX-License-Identifier: Apache-2.0
//! The page word: where one page is, in 64 bits, and all its transitions.
//!
//! ```text
//!                       commit                    punched
//!            ┌────────────────────► Evicting ─────────────────┐
//!            │                          │ still present        ▼
//!         Present ◄─────────────────────┘                   Stored
//!          ▲ │  ▲                                            │ ▲ │
//!          │ │  │ zeros installed, or not              claim │ │ │ present though stored:
//!          │ │  └──────── Discarding ─────────┐              │ │ │ a foreign page (no transition)
//!          │ └ hole though ──►▲    │ left out └──────────────┼─┘
//!          │   present             └──────────► Stored(zero) │ │ install failed
//!          │ installed                                       ▼ │
//!          └───────────────────────────────────────────── Filling ──► Poisoned
//!                                                                content lost
//!
//!   Stored ── moved: its content is elsewhere now ──► Stored
//!   Unallocated ── allocate ──► Present or Stored(zero), by what is there
//!   Present, Evicting, Stored, Poisoned ── deallocate ──► Unallocated
//! ```
//! A page in no region is *unallocated*: it is ignored, present or not. Only a page that is not
//! being filled can become unallocated, and only a page that is not being filled can have its
//! content moved: whoever claims a page loads the content that its word named then.
//!
//! The word outlives the process. Each state is written *before* the act that makes it true begins,
//! or *after* that act is done. At whatever instant the daemon dies, word and presence together
//! determine where the content is:
//!
//! | word | page present | page absent |
//! |---|---|---|
//! | `Present` | fine | the guest discarded it: zeros |
//! | `Evicting` | the page wins, stored copy dropped | `Stored` |
//! | `Stored` | a foreign page: keep the copy, stop the VM | fine |
//! | `Filling` | the page wins, stored copy dropped | `Stored` |
//! | `Discarding` | the page wins | zeros |
//! | `Poisoned` | — | stays so |
//! | `Unallocated` | not looked at | not looked at |
//!
//! ```text
//!   63                        8 7    5  4   3      0
//!  ┌───────────────────────────┬──────┬───┬────────┐
//!  │ content (opaque, 56 bits) │  0   │ W │ state  │   W: the fill has a waiter
//!  └───────────────────────────┴──────┴───┴────────┘
//! ```

const STATE_MASK: u64 = 0xf;
const WAITED: u64 = 1 << 4;
const CONTENT_SHIFT: u32 = 8;
const UNALLOCATED: u64 = 7;

/// Where a stored page's content is: 56 bits that only the store can interpret.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Content(u64);

impl Content {
    /// A page of zeros: nothing is stored for it.
    pub const ZERO: Self = Self(0);

    /// Content at `place`; `None` if that needs more than 56 bits. 0 is reserved for [`Self::ZERO`].
    #[must_use]
    pub const fn at(place: u64) -> Option<Self> {
        if place == 0 || place >> (64 - CONTENT_SHIFT) != 0 {
            None
        } else {
            Some(Self(place))
        }
    }

    /// The 56 bits.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// True for a page of zeros.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }
}

/// State of a page. The numbers are on disk (in the metadata pool): never change them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageState {
    /// In its place; the guest may use it.
    Present,
    /// Stored, and about to be punched out of its place.
    Evicting(Content),
    /// Stored, and absent.
    Stored(Content),
    /// Stored, and being installed.
    Filling(Content),
    /// Given up by the guest; zeros are being installed.
    Discarding,
    /// Its content is lost.
    Poisoned,
    /// It is in no region of the address space.
    Unallocated,
}

/// A page word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PageWord(u64);

/// A word that no version of this program has written.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("page word {0:#x} is invalid: the metadata pool is damaged")]
pub struct DamagedWord(pub u64);

/// Whether a page is in its place, as the kernel reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Presence {
    /// It is.
    Present,
    /// It is a hole.
    Absent,
}

/// What happens to a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// Its content is stored and eviction is decided: the commit point.
    Commit(Content),
    /// It was punched out.
    Punched,
    /// It turned out to be still present; the stored copy is not needed.
    StillPresent,
    /// A fill begins.
    Claim,
    /// The fill (or the zeros of a discard) is installed.
    Installed,
    /// The fill could not be installed.
    InstallFailed,
    /// Its stored content is damaged.
    ContentLost,
    /// It is absent though the word says present: the guest gave it up.
    FoundHole,
    /// A discarded page is left absent instead of being filled with zeros.
    LeftOut,
    /// The same bytes are stored elsewhere, too: from now on that copy is the page's.
    Moved(Content),
    /// It becomes part of a region, in the state the place has it; a hole is a page of zeros.
    Allocate(Presence),
    /// It is no longer part of a region; the caller frees its stored content.
    Deallocate,
}

/// What a successor finds after a crash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Recovered {
    /// The word as it must be now; `dropped` is content that is no longer needed.
    Word {
        /// New word.
        word: PageWord,
        /// Stored content that the page's presence made void.
        dropped: Option<Content>,
    },
    /// Another process made the page present while its content is stored. The caller finds out
    /// which; the stored copy is kept.
    ForeignPage,
}

impl PageWord {
    /// The word of a state, without a waiter.
    #[must_use]
    pub const fn new(state: PageState) -> Self {
        let (number, content) = match state {
            PageState::Present => (1, 0),
            PageState::Evicting(content) => (2, content.0),
            PageState::Stored(content) => (3, content.0),
            PageState::Filling(content) => (4, content.0),
            PageState::Discarding => (5, 0),
            PageState::Poisoned => (6, 0),
            PageState::Unallocated => (UNALLOCATED, 0),
        };
        Self(number | content << CONTENT_SHIFT)
    }

    /// Reads a word from memory that may be damaged.
    ///
    /// # Errors
    /// [`DamagedWord`].
    pub const fn from_bits(bits: u64) -> Result<Self, DamagedWord> {
        let state = bits & STATE_MASK;
        let has_content = matches!(state, 2..=4);
        let reserved = bits & 0xe0 != 0;
        if state == 0
            || state > UNALLOCATED
            || reserved
            || (!has_content && bits >> CONTENT_SHIFT != 0)
        {
            return Err(DamagedWord(bits));
        }
        Ok(Self(bits))
    }

    /// The word as it is stored.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// State of the page.
    #[must_use]
    pub const fn state(self) -> PageState {
        let content = Content(self.0 >> CONTENT_SHIFT);
        match self.0 & STATE_MASK {
            1 => PageState::Present,
            2 => PageState::Evicting(content),
            3 => PageState::Stored(content),
            4 => PageState::Filling(content),
            5 => PageState::Discarding,
            UNALLOCATED => PageState::Unallocated,
            _ => PageState::Poisoned,
        }
    }

    /// True if a waiter joined while the page was being filled.
    #[must_use]
    pub const fn is_waited_for(self) -> bool {
        self.0 & WAITED != 0
    }

    /// The same word with a waiter; only a page that is being installed can have one.
    #[must_use]
    pub const fn with_waiter(self) -> Option<Self> {
        match self.state() {
            PageState::Filling(_) | PageState::Discarding => Some(Self(self.0 | WAITED)),
            _ => None,
        }
    }

    /// The word after `event`, or `None` if the event cannot occur in this state.
    #[must_use]
    pub const fn after(self, event: Event) -> Option<Self> {
        let next = match (self.state(), event) {
            (PageState::Present, Event::Commit(content)) => PageState::Evicting(content),
            (PageState::Evicting(content), Event::Punched) => PageState::Stored(content),
            (PageState::Stored(content), Event::Claim) => PageState::Filling(content),
            (PageState::Filling(content), Event::InstallFailed) => PageState::Stored(content),
            (PageState::Filling(_), Event::ContentLost) => PageState::Poisoned,
            (PageState::Present, Event::FoundHole) => PageState::Discarding,
            (PageState::Discarding, Event::LeftOut)
            | (PageState::Unallocated, Event::Allocate(Presence::Absent)) => {
                PageState::Stored(Content::ZERO)
            }
            (PageState::Stored(_), Event::Moved(content)) => PageState::Stored(content),
            (
                PageState::Present
                | PageState::Evicting(_)
                | PageState::Stored(_)
                | PageState::Poisoned,
                Event::Deallocate,
            ) => PageState::Unallocated,
            // Zeros that could not be installed leave a hole, which the next fault or round finds.
            // `Stored` would be wrong: another fault may have found the same hole and filled it in
            // the meantime.
            (PageState::Unallocated, Event::Allocate(Presence::Present))
            | (PageState::Evicting(_), Event::StillPresent)
            | (PageState::Filling(_) | PageState::Discarding, Event::Installed)
            | (PageState::Discarding, Event::InstallFailed) => PageState::Present,
            _ => return None,
        };
        Some(Self::new(next))
    }

    /// What a dead predecessor's word means, given whether the page is present.
    pub const fn recover(self, presence: Presence) -> Recovered {
        let (state, dropped) = match (self.state(), presence) {
            (PageState::Present | PageState::Discarding, Presence::Present) => {
                (PageState::Present, None)
            }
            (PageState::Present | PageState::Discarding, Presence::Absent) => {
                (PageState::Stored(Content::ZERO), None)
            }
            (PageState::Evicting(content) | PageState::Filling(content), Presence::Present) => {
                (PageState::Present, Some(content))
            }
            (
                PageState::Evicting(content)
                | PageState::Filling(content)
                | PageState::Stored(content),
                Presence::Absent,
            ) => (PageState::Stored(content), None),
            (PageState::Stored(_), Presence::Present) => return Recovered::ForeignPage,
            (PageState::Poisoned, _) => (PageState::Poisoned, None),
            (PageState::Unallocated, _) => (PageState::Unallocated, None),
        };
        Recovered::Word {
            word: Self::new(state),
            dropped,
        }
    }
}

impl std::fmt::Debug for PageWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:?}{}",
            self.state(),
            if self.is_waited_for() {
                " (waited for)"
            } else {
                ""
            }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const C: Content = Content(77);
    const ELSEWHERE: Content = Content(78);
    const STATES: [PageState; 7] = [
        PageState::Present,
        PageState::Evicting(C),
        PageState::Stored(C),
        PageState::Filling(C),
        PageState::Discarding,
        PageState::Poisoned,
        PageState::Unallocated,
    ];
    const EVENTS: [Event; 13] = [
        Event::Commit(C),
        Event::Punched,
        Event::StillPresent,
        Event::Claim,
        Event::Installed,
        Event::InstallFailed,
        Event::ContentLost,
        Event::FoundHole,
        Event::LeftOut,
        Event::Moved(ELSEWHERE),
        Event::Allocate(Presence::Present),
        Event::Allocate(Presence::Absent),
        Event::Deallocate,
    ];

    /// The diagram at the head of this file, as a table: every other pair is impossible.
    fn drawn(state: PageState, event: Event) -> Option<PageState> {
        Some(match (state, event) {
            (PageState::Present, Event::Commit(c)) => PageState::Evicting(c),
            (PageState::Present, Event::FoundHole) => PageState::Discarding,
            (PageState::Evicting(c), Event::Punched) => PageState::Stored(c),
            (PageState::Evicting(_), Event::StillPresent) => PageState::Present,
            (PageState::Stored(c), Event::Claim) => PageState::Filling(c),
            (PageState::Stored(_), Event::Moved(to)) => PageState::Stored(to),
            (PageState::Filling(_), Event::Installed) => PageState::Present,
            (PageState::Filling(c), Event::InstallFailed) => PageState::Stored(c),
            (PageState::Filling(_), Event::ContentLost) => PageState::Poisoned,
            (PageState::Discarding, Event::Installed) => PageState::Present,
            (PageState::Discarding, Event::InstallFailed) => PageState::Present,
            (PageState::Discarding, Event::LeftOut) => PageState::Stored(Content::ZERO),
            (PageState::Unallocated, Event::Allocate(Presence::Present)) => PageState::Present,
            (PageState::Unallocated, Event::Allocate(Presence::Absent)) => {
                PageState::Stored(Content::ZERO)
            }
            (PageState::Present, Event::Deallocate) => PageState::Unallocated,
            (PageState::Evicting(_), Event::Deallocate) => PageState::Unallocated,
            (PageState::Stored(_), Event::Deallocate) => PageState::Unallocated,
            (PageState::Poisoned, Event::Deallocate) => PageState::Unallocated,
            _ => return None,
        })
    }

    #[test]
    fn every_pair_of_state_and_event_does_what_the_picture_shows() {
        for state in STATES {
            for event in EVENTS {
                let after = PageWord::new(state).after(event).map(PageWord::state);
                assert_eq!(after, drawn(state, event), "{state:?} on {event:?}");
            }
        }
    }

    #[test]
    fn word_survives_the_way_through_its_bits() {
        for state in STATES {
            let word = PageWord::new(state);
            assert_eq!(PageWord::from_bits(word.bits()), Ok(word));
            assert_eq!(word.state(), state);
        }
    }

    #[test]
    fn damaged_bits_are_refused() {
        for bits in [0, 8, 15, 1 | 1 << 5, 1 | 9 << 8, 6 | 1 << 60, 7 | 1 << 8] {
            assert_eq!(PageWord::from_bits(bits), Err(DamagedWord(bits)));
        }
    }

    #[test]
    fn waiter_is_taken_only_while_the_page_is_being_installed() {
        for state in STATES {
            let word = PageWord::new(state).with_waiter();
            assert_eq!(
                word.is_some(),
                matches!(state, PageState::Filling(_) | PageState::Discarding)
            );
            assert!(word.is_none_or(PageWord::is_waited_for));
        }
    }

    #[test]
    fn recovery_never_loses_content_that_the_page_does_not_hold() {
        for state in STATES {
            for present in [false, true] {
                let presence = if present {
                    Presence::Present
                } else {
                    Presence::Absent
                };
                match PageWord::new(state).recover(presence) {
                    Recovered::ForeignPage => {
                        assert!(present && matches!(state, PageState::Stored(_)))
                    }
                    Recovered::Word { word, dropped } => {
                        assert_eq!(
                            dropped.is_some(),
                            present
                                && matches!(state, PageState::Evicting(_) | PageState::Filling(_))
                        );
                        let kept = matches!(word.state(), PageState::Stored(c) if c == C);
                        let had = matches!(
                            state,
                            PageState::Evicting(_) | PageState::Stored(_) | PageState::Filling(_)
                        );
                        assert_eq!(kept, had && !present, "{state:?} present={present}");
                    }
                }
            }
        }
    }

    #[test]
    fn content_needs_no_more_than_56_bits() {
        assert_eq!(Content::at(1 << 56), None);
        assert_eq!(Content::at(0), None);
        assert_eq!(
            Content::at((1 << 56) - 1).map(Content::bits),
            Some((1 << 56) - 1)
        );
    }
}
