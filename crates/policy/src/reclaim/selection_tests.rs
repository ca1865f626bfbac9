// SPDX-License-Identifier: Apache-2.0
//! Passes over a handful of sections.

use super::*;
use crate::{set_times::TIME_MIN, sets::Level, victims::UNMAPPED_MIN};
use std::convert::Infallible;

const NOW: Duration = Duration::from_secs(60);
const PAGES: u64 = 10;

/// Sections of ten pages each.
#[derive(Default)]
struct Memory {
    now: Duration,
    absent: Vec<u64>,
    /// Touched again as soon as they are unmapped.
    in_use: Vec<u64>,
    /// Another thread evicts it now.
    elsewhere: Option<u64>,
    has_no_time: bool,
    unmapped: Vec<u64>,
    offered: Vec<u64>,
    /// Pages that a limit has room for.
    room: u64,
    swapped_in: Vec<u64>,
}

impl Sections for Memory {
    type Stop = Infallible;

    fn present_pages(&self, section: SectionNo) -> u64 {
        u64::from(!self.absent.contains(&section.0)) * PAGES
    }

    fn evict(&mut self, section: SectionNo, _: u64) -> Attempt<Infallible> {
        if self.has_no_time {
            return Attempt::NotNow;
        }
        if self.elsewhere == Some(section.0) {
            return Attempt::Elsewhere;
        }
        let is_used = self.in_use.contains(&section.0);
        let (pages, then) = match is_used {
            true => (0, Then::Next),
            false => (PAGES, Then::Emptied),
        };
        if !is_used {
            self.absent.push(section.0);
        }
        Attempt::Done(Evicted {
            taken: Taken { pages, then },
            present_pages: PAGES,
            mapped_pages: PAGES - pages,
            stop: None,
        })
    }

    fn unmap(&mut self, sections: &[SectionNo]) -> Result<Unmapped, Infallible> {
        self.unmapped
            .extend(sections.iter().map(|section| section.0));
        Ok(Unmapped {
            sections: sections.to_vec(),
            at: self.now,
        })
    }

    fn offer(&mut self, ready: Vec<Ready>) {
        self.offered = ready.iter().map(|ready| ready.section.0).collect();
    }

    fn swap_in(&mut self, section: SectionNo, pages_max: u64) -> Option<Prefetched> {
        if self.has_no_time {
            return None;
        }
        let stored = u64::from(self.absent.contains(&section.0)) * PAGES;
        if stored == 0 {
            return Some(Prefetched {
                pages: 0,
                rest: Rest::None,
            });
        }
        let pages = stored.min(pages_max).min(self.room);
        self.room -= pages;
        if pages == stored {
            self.absent.retain(|absent| *absent != section.0);
            self.swapped_in.push(section.0);
        }
        let rest = match pages == stored {
            true => Rest::None,
            false => Rest::Some,
        };
        Some(Prefetched { pages, rest })
    }
}

/// Sections 0 and 1 are cold, 2 is cool, 3 is hot; 1 and 3 are protected.
fn selection(memory: &mut Memory) -> Selection {
    let mut selection = Selection::default();
    let protected = ProtectedSections::default();
    protected.add(SectionNo(1));
    protected.add(SectionNo(3));
    selection.spare(Arc::new(protected));
    selection.follow((0..4).map(SectionNo));
    for (sweep, touched) in [&[2, 3][..], &[3], &[3], &[3]].iter().enumerate() {
        let at = TIME_MIN * u32::try_from(sweep + 1).unwrap();
        selection.swept(at, touched.iter().copied().map(SectionNo), memory);
    }
    memory.now = NOW;
    selection
}

/// A pass now, and another one when what it unmapped has aged; what is absent then.
fn evict(memory: &mut Memory, selection: &mut Selection, pages: u64, reach: Reach) -> Vec<u64> {
    let first = selection.reclaim(memory.now, pages, reach, Need::Limit, memory);
    assert!(first.evicted_pages == 0 || !first.rests, "{first:?}");
    memory.now += UNMAPPED_MIN;
    let left = pages - first.evicted_pages;
    selection.reclaim(memory.now, left, reach, Need::Limit, memory);
    memory.absent.clone()
}

#[test]
fn nothing_is_evicted_before_it_has_been_unmapped_for_long_enough() {
    let mut memory = Memory::default();
    let mut selection = selection(&mut memory);
    let first = selection.reclaim(NOW, 10, Reach::ColdOnly, Need::Limit, &mut memory);
    assert_eq!((first.evicted_pages, first.rests), (0, true));
    assert_eq!(memory.unmapped, [0, 2]);
    assert_eq!(memory.offered, [0, 2]);
    let early = NOW + UNMAPPED_MIN / 2;
    let again = selection.reclaim(early, 10, Reach::ColdOnly, Need::Limit, &mut memory);
    assert_eq!((again.evicted_pages, again.rests), (0, true));
    let aged = selection.reclaim(
        NOW + UNMAPPED_MIN,
        10,
        Reach::ColdOnly,
        Need::Limit,
        &mut memory,
    );
    assert_eq!((aged.evicted_pages, aged.rests), (10, false));
    assert_eq!(memory.absent, [0]);
    // What is left over stays ready.
    assert_eq!(memory.offered, [2]);
    assert_eq!(selection.reserve_sections(), 1);
}

#[test]
fn limit_that_protected_sections_can_keep_needs_no_second_try() {
    let order = [Reach::ColdOnly, Reach::AllResting, Reach::Protected];
    for (in_use, expected) in [
        (&[][..], &[0, 2][..]),
        (&[2], &[0, 1]),
        (&[0, 2], &[1, 3]),
        (&[0, 1, 2, 3], &[]),
    ] {
        let mut memory = Memory {
            in_use: in_use.to_vec(),
            ..Memory::default()
        };
        let mut selection = selection(&mut memory);
        for reach in order {
            let left = 20 - memory.absent.len() as u64 * PAGES;
            if left > 0 {
                evict(&mut memory, &mut selection, left, reach);
            }
        }
        assert_eq!(memory.absent, expected, "{in_use:?} in use");
        let protected = memory.absent.iter().filter(|section| *section % 2 == 1);
        let taken = selection.protected().taken_pages();
        assert_eq!(taken, protected.count() as u64 * PAGES);
    }
}

#[test]
fn section_in_use_is_tried_once_until_all_are_tried_again() {
    let mut memory = Memory {
        in_use: vec![0, 2],
        ..Memory::default()
    };
    let mut selection = selection(&mut memory);
    assert_eq!(evict(&mut memory, &mut selection, 20, Reach::ColdOnly), []);
    memory.in_use.clear();
    assert_eq!(
        evict(&mut memory, &mut selection, 20, Reach::AllResting),
        []
    );
    selection.try_again(&mut memory);
    let gone = evict(&mut memory, &mut selection, 20, Reach::AllResting);
    assert_eq!(gone.len(), 2, "{gone:?}");
}

#[test]
fn section_found_in_use_is_no_longer_among_the_cold_ones_whoever_found_it() {
    let mut memory = Memory {
        in_use: vec![0],
        ..Memory::default()
    };
    let mut selection = selection(&mut memory);
    let level = |selection: &Selection, section| selection.sets().level(SectionNo(section));
    assert_eq!(level(&selection, 0), Some(Level::Cold));
    evict(&mut memory, &mut selection, 10, Reach::ColdOnly);
    assert_eq!(level(&selection, 0), Some(Level::Cold.warmer()));
    assert_eq!(level(&selection, 1), Some(Level::Cold));
    // Few of its pages were in use.
    selection.evicted_elsewhere(SectionNo(1), After::Tried);
    assert_eq!(level(&selection, 1), Some(Level::Cold));
    selection.evicted_elsewhere(SectionNo(1), After::Warm);
    assert_eq!(level(&selection, 1), Some(Level::Cold.warmer()));
}

#[test]
fn section_that_came_back_untouched_is_evicted_before_protected_ones() {
    let mut memory = Memory::default();
    let mut selection = selection(&mut memory);
    assert_eq!(
        evict(&mut memory, &mut selection, 20, Reach::ColdOnly),
        [0, 2]
    );
    // Prefetched, for example.
    memory.absent.clear();
    let gone = evict(&mut memory, &mut selection, 20, Reach::AllResting);
    assert_eq!(gone, [0, 2]);
}

#[test]
fn pass_without_time_has_more_only_if_it_made_progress_and_leaves_what_others_evict() {
    let mut memory = Memory::default();
    let mut selection = selection(&mut memory);
    selection.reclaim(NOW, 20, Reach::ColdOnly, Need::Limit, &mut memory);
    memory.now += UNMAPPED_MIN;
    memory.has_no_time = true;
    let cut = selection.reclaim(memory.now, 20, Reach::ColdOnly, Need::Limit, &mut memory);
    assert_eq!((cut.evicted_pages, cut.has_more), (0, false));
    memory.has_no_time = false;
    memory.elsewhere = Some(0);
    let other = selection.reclaim(memory.now, 20, Reach::ColdOnly, Need::Limit, &mut memory);
    assert_eq!((other.evicted_pages, other.has_more), (10, false));
    assert_eq!(memory.absent, [2]);
    selection.evicted_elsewhere(SectionNo(0), After::Emptied);
    assert_eq!(selection.reserve_sections(), 0);
}

#[test]
fn ready_sections_are_kept_without_evicting_any() {
    let mut memory = Memory::default();
    let mut selection = selection(&mut memory);
    let Ok(()) = selection.keep_ready(NOW, 20, &mut memory);
    memory.now += UNMAPPED_MIN;
    let Ok(()) = selection.keep_ready(memory.now, 20, &mut memory);
    assert_eq!(memory.unmapped, [0, 2], "once");
    assert!(memory.absent.is_empty());
    assert_eq!(memory.offered, [0, 2]);
    selection.ram_changed((0..4).map(SectionNo));
    assert_eq!(selection.reserve_sections(), 0);
}

#[test]
fn a_pass_that_had_no_time_tries_no_more_the_next_time() {
    let mut memory = Memory::default();
    let mut selection = selection(&mut memory);
    selection.reclaim(NOW, 80, Reach::ColdOnly, Need::Limit, &mut memory);
    memory.now += UNMAPPED_MIN;
    let before = selection.ahead_factor;
    memory.has_no_time = true;
    let cut = selection.reclaim(memory.now, 80, Reach::ColdOnly, Need::Limit, &mut memory);
    assert_eq!((cut.evicted_pages, selection.ahead_factor), (0, before));
    // One that found everything in use does.
    memory.has_no_time = false;
    memory.in_use = vec![0, 1, 2, 3];
    selection.reclaim(memory.now, 80, Reach::ColdOnly, Need::Limit, &mut memory);
    assert_eq!(selection.ahead_factor, 2 * before);
}

/// All but the protected sections are evicted for this; what is wanted back then.
fn after_eviction(need: Need) -> (Memory, Selection) {
    let mut memory = Memory {
        room: 1000,
        ..Memory::default()
    };
    let mut selection = selection(&mut memory);
    selection.spare(Arc::default());
    for now in [NOW, NOW + UNMAPPED_MIN] {
        memory.now = now;
        selection.reclaim(now, 40, Reach::AllResting, need, &mut memory);
    }
    assert_eq!(memory.absent, [0, 1, 2, 3]);
    (memory, selection)
}

#[test]
fn only_what_was_in_use_comes_back_and_not_what_a_client_has_had_evicted() {
    let (mut memory, mut selection) = after_eviction(Need::Limit);
    assert_eq!(selection.wanted_back(), Some(Wanted::Ahead));
    let filled = selection.swap_in(NOW + UNMAPPED_MIN, Wanted::Ahead, 100, &mut memory);
    assert_eq!((filled, memory.swapped_in.as_slice()), (10, &[3][..]));
    assert_eq!(selection.wanted_back(), None);
    // A guess is the first to go.
    let level = selection.sets().level(SectionNo(3));
    assert_eq!(level, Some(Level::Cool));
    let (_, selection) = after_eviction(Need::Wish);
    assert_eq!(selection.wanted_back(), None);
}

#[test]
fn client_that_wants_memory_ends_what_was_to_come_back() {
    let (mut memory, mut selection) = after_eviction(Need::Limit);
    selection.reclaim(memory.now, 10, Reach::ColdOnly, Need::Wish, &mut memory);
    assert_eq!(selection.wanted_back(), None);
}

#[test]
fn swap_in_ends_its_turn_without_time_or_room_and_goes_on_in_another() {
    let (mut memory, mut selection) = after_eviction(Need::Limit);
    memory.has_no_time = true;
    assert_eq!(selection.swap_in(NOW, Wanted::Ahead, 100, &mut memory), 0);
    assert_eq!(selection.wanted_back(), Some(Wanted::Ahead));
    memory.has_no_time = false;
    assert_eq!(selection.swap_in(NOW, Wanted::Ahead, 4, &mut memory), 4);
    assert_eq!(selection.wanted_back(), Some(Wanted::Ahead));
    assert_eq!(selection.swap_in(NOW, Wanted::Ahead, 100, &mut memory), 10);
    assert_eq!(memory.swapped_in, [3]);
    assert_eq!(selection.wanted_back(), None);
    // One for which there is no room does not keep others waiting.
    selection.faulted(NOW, [0, 1].map(SectionNo));
    memory.room = 0;
    assert_eq!(
        selection.swap_in(NOW, Wanted::Together, 100, &mut memory),
        0
    );
    memory.room = 1000;
    assert_eq!(
        selection.swap_in(NOW, Wanted::Together, 100, &mut memory),
        10
    );
    assert_eq!(memory.swapped_in, [3, 0]);
}

#[test]
fn fault_brings_back_what_was_evicted_with_its_page_however_cold() {
    let (mut memory, mut selection) = after_eviction(Need::Wish);
    let sections = [0, 1].map(SectionNo);
    selection.faulted(NOW, sections);
    assert_eq!(selection.wanted_back(), Some(Wanted::Together));
    selection.swap_in(NOW, Wanted::Together, 100, &mut memory);
    assert_eq!(memory.swapped_in, [1, 0]);
    assert_eq!(selection.wanted_back(), None);
}

#[test]
fn section_found_touched_scan_after_scan_gets_back_what_was_evicted_of_it() {
    let (mut memory, mut selection) = after_eviction(Need::Wish);
    // A page of the coldest section has come back by a fault, and is used.
    for scan in 1..=3 {
        assert_eq!(selection.wanted_back(), None, "scan {scan}");
        selection.swept(NOW + scan * TIME_MIN, [SectionNo(0)], &mut memory);
        if selection.sets().level(SectionNo(0)) >= Some(Level::Warm) {
            break;
        }
    }
    assert_eq!(selection.wanted_back(), Some(Wanted::Ahead));
    selection.swap_in(NOW + 3 * TIME_MIN, Wanted::Ahead, 100, &mut memory);
    assert_eq!(memory.swapped_in, [0]);
}

#[test]
fn pass_looks_for_those_unmapped_sections_alone_that_it_comes_to() {
    let mut memory = Memory::default();
    let mut selection = selection(&mut memory);
    // Section 4 is new, so it is Active.
    selection.follow((0..5).map(SectionNo));
    let within = |selection: &Selection, reach| {
        let mut within: Vec<u64> = selection
            .standing_within(reach)
            .iter()
            .map(|section| section.0)
            .collect();
        within.sort_unstable();
        within
    };
    assert!(within(&selection, Reach::AllResting).is_empty());
    for section in (0..5).map(SectionNo) {
        selection.candidates.unmapped(section, NOW);
    }
    assert_eq!(within(&selection, Reach::ColdOnly), [0, 2]);
    assert_eq!(within(&selection, Reach::AllResting), [0, 2, 4]);
    assert_eq!(within(&selection, Reach::Protected), [1, 3]);
    selection.emptied(SectionNo(0));
    assert_eq!(within(&selection, Reach::ColdOnly), [2]);
    assert_eq!(within(&selection, Reach::AllResting), [2, 4]);
    // Fills are offered what is not protected, coldest first.
    selection.offer(&mut memory);
    assert_eq!(memory.offered, [2, 4]);
}
