// SPDX-License-Identifier: Apache-2.0
//! What must hold when nobody is in the middle of anything, and what must hold even when a daemon has
//! just died in the middle of something.

use crate::{
    content::Stamps,
    daemon::{Daemon, has_room},
    dimm::{BASE, PAGE_COUNT, Phase, SLOT},
    random::Random,
    slow::{SlowPlaces, audit_slow, in_slow, load_slow, slow_loads},
    state::State,
};
use pagetide_addr::{PAGE_BYTES, PageNo};
use pagetide_gmem::{
    Content, ContentStore, PageState as WordState, PageTable, PageWord, StoreError,
    paging::word::{Presence, Recovered},
};
use pagetide_swap::{
    PoolStore, PoolWords,
    slots::{CHUNK_BYTES, SLOT_UNIT_BYTES},
    tier::{Located, PAGE},
};
use std::sync::atomic::Ordering::Relaxed;

/// Header of a pool, and what it keeps in spare chunks.
const HEADER_BYTES: u64 = 64 << 10;
const SPARE_CHUNKS: u64 = 4;

/// The words as whoever opens the pool finds them.
pub fn words(store: &PoolStore) -> PageTable {
    PageTable::reopen(Box::new(PoolWords::of(store.pool().clone()))).expect("a pool")
}

fn pages() -> impl Iterator<Item = PageNo> {
    (0..PAGE_COUNT).map(PageNo)
}

/// A page is no part of the space where nobody may reach it; and it is one, if it should be and nothing
/// is under way.
fn check_membership(state: &State, page: PageNo, word: PageWord) {
    let member = word.state() != WordState::Unallocated;
    let removed = state.pages[page.index()].removed;
    assert!(!(member && removed), "{page:?} is removed, and {word:?}");
    let whole = if BASE.contains(page) {
        state.base_allocated
    } else {
        state.dimm.phase == Phase::Allocated && state.dimm.pages.contains(page)
    };
    assert!(member || !whole, "{page:?} is not part of the space");
}

fn is_present(state: &State, page: PageNo) -> bool {
    state.pages[page.index()].content.is_some()
}

/// At any instant of death each page is present or stored, with content that it may hold, and no
/// stored content belongs to two pages.
pub fn audit(state: &State, store: &PoolStore) {
    let words = words(store);
    let mut slow = SlowPlaces::new();
    // What is in the slot may be other memory than the words are of; a successor sees that.
    let known = state.knows_the_slot(store.pool());
    for page in pages().filter(|page| known || !SLOT.contains(*page)) {
        check_membership(state, page, words.word(page));
        let presence = if is_present(state, page) {
            Presence::Present
        } else {
            Presence::Absent
        };
        match words.word(page).recover(presence) {
            Recovered::ForeignPage => panic!("{page:?} is present though its word says stored"),
            Recovered::Word { word, .. } => check_content(state, store, &mut slow, page, word),
        }
    }
}

fn check_content(
    state: &State,
    store: &PoolStore,
    slow: &mut SlowPlaces,
    number: PageNo,
    word: PageWord,
) {
    let page = &state.pages[number.index()];
    match word.state() {
        WordState::Poisoned => assert!(page.damaged, "{number:?} is poisoned, never damaged"),
        WordState::Stored(content) => {
            let adopted = match in_slow(content) {
                Some(place) => slow.insert((place.extent, place.position)),
                None => content.is_zero() || store.adopt(content).is_ok(),
            };
            assert!(adopted, "{number:?} shares its stored content with another");
            if page.unmapped {
                // What it held matters to nobody.
                return;
            }
            let held = match in_slow(content) {
                Some(place) => load_slow(&state.disk, store.pool(), number, place),
                None => load(store, number, content),
            };
            let Some(held) = held else {
                assert!(page.damaged, "stored content of {number:?} is damaged");
                return;
            };
            let versions = &page.versions;
            assert!(
                versions.contains(&held),
                "{held:?} is stored for {number:?}, which may hold {versions:?}"
            );
        }
        WordState::Unallocated => {}
        _ => assert!(page.content.is_some(), "{number:?} is nowhere"),
    }
}

fn load(store: &PoolStore, page: PageNo, content: Content) -> Option<Stamps> {
    if content.is_zero() {
        return Some(Stamps::ZERO);
    }
    let mut bytes = [0; PAGE];
    match store.load(page, content, &mut bytes) {
        Ok(()) => {}
        Err(StoreError::Damaged { .. }) => return None,
        Err(error) => panic!("{error}"),
    }
    Some(Stamps::parse(&bytes).unwrap_or_else(|| panic!("{page:?}: nobody wrote what is stored")))
}

/// Between two tasks of a daemon that lives.
pub fn audit_at_rest(state: &State, daemon: &Daemon) {
    assert!(state.frames.is_empty());
    assert!(
        state.foreign_pages.is_empty(),
        "false alarm: {:?}",
        state.foreign_pages
    );
    assert!(
        state.unanswered.is_empty() || state.has_loads(),
        "page requests stay unanswered: {}",
        state.describe()
    );
    let loading = daemon.space.loading_pages();
    let slow_loads = slow_loads(state, daemon);
    assert_eq!(
        loading,
        state.loads.len() as u64 + slow_loads,
        "loads under way"
    );
    let words = words(&daemon.store);
    for section in words.sections() {
        let stored = words.pages_in_state(section, |it| matches!(it, WordState::Stored(_)));
        let counted = daemon.space.table().stored_pages(section);
        assert_eq!(counted, stored.len(), "stored pages of {section:?}");
    }
    let (mut contents, mut bytes, mut slow_pages) = (0, 0, 0);
    for page in pages() {
        check_membership(state, page, words.word(page));
        let content = match words.word(page).state() {
            WordState::Filling(content)
                if (state.loads.iter()).any(|load| (load.0, load.1.page()) == (content, page)) =>
            {
                content
            }
            WordState::Filling(content) if slow_loads > 0 && in_slow(content).is_some() => content,
            WordState::Filling(_) | WordState::Discarding => panic!("{page:?} is left half done"),
            WordState::Evicting(content) => {
                let right = state.coverage.errors + state.coverage.unplugs > 0;
                assert!(right, "{page:?} is left half evicted");
                content
            }
            WordState::Stored(content) => {
                assert!(!is_present(state, page), "{page:?} is present and stored");
                content
            }
            WordState::Present | WordState::Poisoned | WordState::Unallocated => continue,
        };
        match in_slow(content) {
            Some(_) => slow_pages += 1,
            None => contents += u64::from(!content.is_zero()),
        }
        bytes += stored_bytes(content);
    }
    audit_counts(state, daemon, contents, bytes);
    audit_slow(state, daemon, slow_pages);
    audit_limit(state, daemon);
    if state.coverage.errors == 0 {
        audit_restrictions(state, &words);
        if state.coverage.discards + state.coverage.deaths == 0 {
            audit_grants(state, &words);
        }
    }
}

/// Bytes of the pool that `content` takes.
fn stored_bytes(content: Content) -> u64 {
    if content.is_zero() {
        return 0;
    }
    let located = Located::of(content).expect("a word that the store wrote");
    located.in_pool().map_or(0, |place| place.bytes.into())
}

/// Each stored content belongs to one page, and what belongs to none was freed.
fn audit_counts(state: &State, daemon: &Daemon, contents: u64, bytes: u64) {
    let hogs = daemon.hogs.lock().map_or(0, |hogs| hogs.len() as u64);
    let counts = daemon.store.counts();
    let stored = counts.pages();
    let named = contents + hogs;
    assert!(
        (named..=named + state.quarantined).contains(&stored),
        "{stored} contents are stored, {named} named by a word, {} found damaged",
        state.quarantined
    );
    if state.quarantined == 0 {
        let stored_bytes = counts.stored_bytes.load(Relaxed);
        assert_eq!(stored_bytes, bytes + hogs * 4100, "bytes stored, and named");
    }
}

/// The headroom is never more than what is really free. Only a correction sees that a guest takes
/// pages back that it had given up, that pages of a long request were evicted while it was served, or
/// that a fill failed half-way and nobody can say where.
fn audit_limit(state: &State, daemon: &Daemon) {
    let Some(limit) = state.knobs.limit_pages else {
        return;
    };
    if state.coverage.discards + state.coverage.errors > 0 || !state.devices.is_empty() {
        return;
    }
    // A correction may see that memory is gone before its removal gives the pages back once more.
    if state.dimm.phase == Phase::Plugged || state.coverage.unplugs > 0 {
        return;
    }
    let resident = state.resident_pages();
    let over = match limit.checked_sub(resident) {
        Some(free) => has_room(&daemon.limit, free + 1),
        None => has_room(&daemon.limit, 0),
    };
    assert!(
        !over,
        "{resident} pages of {limit} are present, and the limit believes in more room"
    );
}

/// No device may use a page that is stored, unless it kept it for its rings: then the guest gave the
/// page up, and the device's own mapping faults.
fn audit_restrictions(state: &State, words: &PageTable) {
    for page in pages() {
        let stored = matches!(words.word(page).state(), WordState::Stored(_));
        for device in &state.devices {
            let may = device.may[page.index()] && !device.once_wired.contains(&page);
            assert!(
                !(stored && may),
                "a device may use {page:?}, which is stored"
            );
        }
    }
}

/// Outside a round every device may use every present page, and no absent one.
fn audit_grants(state: &State, words: &PageTable) {
    // Not in the middle of a removal, though.
    let under_way = state.dimm.phase == Phase::Unplugged;
    for page in pages().filter(|page| !under_way || BASE.contains(*page)) {
        let present = words.word(page).state() == WordState::Present;
        let protected = state.pages[page.index()].protected;
        assert!(!(present && protected), "{page:?} is left protected");
        for device in &state.devices {
            assert_eq!(device.may[page.index()], present, "bit of {page:?}");
        }
    }
}

/// All pages are back: the pool is empty, and its memory given back.
pub fn audit_nothing_stored(state: &State, store: &PoolStore) {
    let counts = store.counts();
    let stored = counts.pages();
    assert!(
        stored <= state.quarantined,
        "{stored} contents are left behind"
    );
    if state.quarantined == 0 {
        assert_eq!(state.disk.used_sectors(), 0, "left behind in the slow tier");
        assert_eq!(store.pool().extents().count(), 0);
    }
    store.trim().expect("a pool that can be punched");
    let words = words(store).sections().count() as u64 * PAGE_BYTES;
    let table = store.pool().extent_bytes();
    let most = HEADER_BYTES + words + table + (SPARE_CHUNKS + state.quarantined) * CHUNK_BYTES;
    let bytes = store.pool().allocated_bytes().expect("a file");
    assert!(
        bytes <= most.next_multiple_of(PAGE_BYTES),
        "an empty pool takes up {bytes} bytes"
    );
}

/// Damages the stored content of `page`, if it has any; true if so.
pub fn flip_stored_bit(store: &PoolStore, page: PageNo, random: &mut Random) -> bool {
    let WordState::Stored(content) = words(store).word(page).state() else {
        return false;
    };
    if content.is_zero() {
        return false;
    }
    let Ok(Located::Pool(located)) = Located::of(content) else {
        return false;
    };
    assert!(located.slot.byte_offset().is_multiple_of(SLOT_UNIT_BYTES));
    let at = located.slot.byte_offset() + random.below(u64::from(located.bytes));
    let mut byte = [0];
    store.pool().read_content(at, &mut byte).expect("stored");
    byte[0] ^= 1 << random.below(8);
    store.pool().write_content(at, &byte).expect("stored");
    true
}
