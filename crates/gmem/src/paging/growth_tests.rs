// SPDX-License-Identifier: Apache-2.0
//! Growth and removal, one thread at a time, over fakes.

use crate::{
    AddressSpace, Cause, Content, Device, Fault, FaultOutcome, GrowthError, MemoryParts, Mode,
    PageState, PageTable, PageWord, PagedMemory, Readahead, VolatileWords, Wait, WordArray,
    fake::{self, FakeMmu, FakePlace, FakeRooms, FakeStore},
    recovery,
};
use pagetide_addr::{Access, DeviceId, PageNo, PageRange, PageSet, SECTION_PAGES, SectionNo, Tier};
use std::{collections::BTreeSet, sync::Arc};

const DEVICE: DeviceId = DeviceId(1);
/// 1 TiB.
const CAPACITY: u64 = 1 << 28;

/// What surrounds the memory.
#[derive(Default)]
struct Vm {
    place: Arc<FakePlace>,
    store: Arc<FakeStore>,
    rooms: Arc<FakeRooms>,
    mmu: Arc<FakeMmu>,
}

/// The memory, and the space that keeps its devices.
#[derive(Clone)]
struct Memory(Arc<AddressSpace>);

impl std::ops::Deref for Memory {
    type Target = PagedMemory;

    fn deref(&self) -> &PagedMemory {
        self.0.memory().unwrap()
    }
}

fn memory(table: PageTable) -> (Vm, Memory) {
    let vm = Vm::default();
    let parts = MemoryParts {
        table,
        store: Arc::clone(&vm.store) as _,
        admission: Arc::clone(&vm.rooms) as _,
        neighbours_max: 4,
        ..fake::parts(CAPACITY, Arc::clone(&vm.place) as _)
    };
    let space = fake::space(parts, DEVICE, Arc::clone(&vm.mmu) as _);
    (vm, Memory(space))
}

fn empty() -> (Vm, Memory) {
    let words = VolatileWords::with_capacity(CAPACITY);
    memory(PageTable::growing(Box::new(words)))
}

/// `len` pages from the border of `section` on.
fn region(section: u64, len: u64) -> PageRange {
    let start = section * SECTION_PAGES;
    PageRange::new(PageNo(start), PageNo(start + len))
}

fn fault(memory: &PagedMemory, pages: PageRange) -> FaultOutcome {
    let fault = Fault {
        device: DEVICE,
        pages,
        access: Access::Write,
    };
    let cause = Cause::Fault(fault);
    let quick = memory.fault(&cause, Wait::Never);
    let (tell, told) = std::sync::mpsc::channel();
    let reply = Box::new(move |outcome| tell.send(outcome).unwrap());
    assert_eq!(memory.fault(&cause, Wait::Reply(reply)), None);
    let outcome = told.recv().unwrap();
    assert!(quick.is_none_or(|quick| quick.outcome == outcome));
    outcome
}

fn state(memory: &PagedMemory, page: u64) -> PageState {
    memory.table().word(PageNo(page)).state()
}

#[test]
fn slowest_page_of_a_range_tells_the_tier_it_would_come_from() {
    let (vm, memory) = empty();
    vm.place.put_zeros(PageNo(0).run(2));
    memory.allocate(region(0, 8)).unwrap();
    let tier = |first, end| memory.tier_of(PageRange::new(PageNo(first), PageNo(end)));
    assert_eq!(tier(0, 2), Tier::Present);
    assert_eq!(tier(1, 3), Tier::Zero);
    let place = Content::at(7).unwrap();
    let stored = PageWord::new(PageState::Stored(place));
    memory.table().set_initial(PageNo(5), stored);
    // This store does not tell its tiers apart.
    assert_eq!(tier(0, 8), Tier::Unknown);
    assert_eq!(tier(6, 8), Tier::Zero);
    assert_eq!(tier(CAPACITY - 1, CAPACITY + 1), Tier::Unknown);
}

#[test]
fn region_anywhere_below_the_capacity_is_as_its_memory_is() {
    let (vm, memory) = empty();
    assert_eq!(fault(&memory, region(0, 1)), FaultOutcome::OutOfRange);
    let last = CAPACITY / SECTION_PAGES - 2;
    let (low, high) = (region(1, 600), region(last, 1024));
    let first = high.start.0;
    let present = BTreeSet::from([PageNo(513), high.start]);
    (present.iter()).for_each(|page| vm.place.put(*page, 1));
    memory.allocate(low).unwrap();
    memory.allocate(high).unwrap();
    assert_eq!(memory.table().page_count(), CAPACITY);
    assert_eq!(state(&memory, 513), PageState::Present);
    assert_eq!(state(&memory, 514), PageState::Stored(Content::ZERO));
    assert_eq!(vm.mmu.granted(), present);
    assert_eq!(vm.rooms.counted_in(), 2);
    let woken = vm.place.woken();
    assert!(woken.contains(&PageNo(1111)) && woken.len() == 600 + 1024);
    for page in [0, 511, 512 + 600, 4096, first - 1] {
        assert_eq!(state(&memory, page), PageState::Unallocated, "page {page}");
        let outcome = fault(&memory, PageNo(page).single());
        assert_eq!(outcome, FaultOutcome::OutOfRange, "page {page}");
    }
    for page in [512, 1111, first + 7, CAPACITY - 1] {
        let outcome = fault(&memory, PageNo(page).single());
        assert_eq!(outcome, FaultOutcome::Present, "page {page}");
    }
    let sections: Vec<u64> = memory.table().sections().map(|section| section.0).collect();
    assert_eq!(sections, [1, 2, last, last + 1]);
}

#[test]
fn removal_leaves_nothing_and_frees_each_stored_content_once() {
    let (vm, memory) = empty();
    for page in [1024, 1030] {
        vm.place.put(PageNo(page), 1);
    }
    memory.allocate(region(0, 512)).unwrap();
    memory.allocate(region(2, 512)).unwrap();
    let content = vm.store.keep(&[1; 4096]);
    let section = SectionNo(2);
    let wanted = PageSet::of_range(section, PageNo(1024).single());
    let mut round = memory.begin_eviction(section, &wanted).unwrap();
    let committed = round.commit(&[(PageNo(1024), content)]);
    assert_eq!(committed.evicted.len(), 1);
    drop(round);
    vm.place.end();
    memory.deallocate(region(2, 512)).unwrap();
    assert_eq!(vm.store.freed(), [content]);
    assert_eq!(vm.rooms.given_back(), 1);
    assert!(vm.mmu.granted().is_empty());
    assert_eq!(memory.table().page_count(), 512);
    memory.deallocate(region(2, 512)).unwrap();
    assert_eq!(vm.store.freed().len(), 1);
    assert_eq!(fault(&memory, region(2, 1)), FaultOutcome::OutOfRange);
    vm.place.begin_anew();
    memory.allocate(region(2, 300)).unwrap();
    assert_eq!(state(&memory, 1024), PageState::Stored(Content::ZERO));
    assert_eq!(memory.table().page_count(), 1024 + 300);
}

#[test]
fn round_under_way_finds_its_pages_gone_and_hands_its_content_back() {
    let (vm, memory) = empty();
    vm.place.put(PageNo(3), 1);
    memory.allocate(region(0, 512)).unwrap();
    let wanted = PageSet::of_range(SectionNo(0), PageNo(3).single());
    let mut round = memory.begin_eviction(SectionNo(0), &wanted).unwrap();
    memory.deallocate(region(0, 512)).unwrap();
    assert!(round.candidates().is_empty());
    let content = Content::at(5).unwrap();
    let committed = round.commit(&[(PageNo(3), content)]);
    assert_eq!(committed.unused, [content]);
    round.spare(&wanted);
    assert!(vm.mmu.granted().is_empty());
    assert!(
        memory
            .begin_eviction(SectionNo(0), &wanted)
            .is_err_and(|error| matches!(error, crate::EvictionError::Nothing))
    );
    // Other memory in the same place, and a round of its own: what the old one read is not its content.
    memory.allocate(region(0, 512)).unwrap();
    let mut next = memory.begin_eviction(SectionNo(0), &wanted).unwrap();
    assert!(round.candidates().is_empty());
    assert_eq!(round.commit(&[(PageNo(3), content)]).unused, [content]);
    drop(round);
    let other = Content::at(6).unwrap();
    assert_eq!(next.commit(&[(PageNo(3), other)]).evicted.len(), 1);
    drop(next);
    assert_eq!(state(&memory, 3), PageState::Stored(other));
}

#[test]
fn page_faulted_on_after_it_was_read_stays_though_its_content_is_stored() {
    let (vm, memory) = empty();
    vm.place.put_zeros(PageNo(3).run(2));
    memory.allocate(region(0, 512)).unwrap();
    let wanted = PageSet::of_range(SectionNo(0), PageNo(3).run(2));
    let mut round = memory.begin_eviction(SectionNo(0), &wanted).unwrap();
    assert!(vm.mmu.granted().is_empty());
    assert_eq!(fault(&memory, PageNo(3).single()), FaultOutcome::Present);
    assert_eq!(vm.mmu.granted(), BTreeSet::from([PageNo(3)]));
    // Its device may have written to it since then.
    let stored = [5, 6].map(|place| Content::at(place).unwrap());
    let committed = round.commit(&[(PageNo(3), stored[0]), (PageNo(4), stored[1])]);
    assert_eq!(committed.unused, [stored[0]]);
    assert_eq!(committed.evicted.len(), 1);
    drop(round);
    assert_eq!(vm.place.present(), [PageNo(3)]);
    assert_eq!(state(&memory, 3), PageState::Present);
    assert_eq!(state(&memory, 4), PageState::Stored(stored[1]));
}

#[test]
fn busy_device_keeps_its_section_from_leaving_but_is_granted_nothing_more() {
    let (vm, memory) = empty();
    vm.place.put_zeros(region(0, 1024));
    memory.allocate(region(0, 1024)).unwrap();
    vm.mmu.be_busy();
    match memory.deallocate(region(0, 1024)) {
        Err(GrowthError::Busy {
            device,
            section,
            taken_pages,
            left_pages,
        }) => {
            assert_eq!((device, section), (DEVICE, SectionNo(0)));
            assert_eq!((taken_pages, left_pages), (0, 1024));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(state(&memory, 9), PageState::Present);
    assert_eq!(fault(&memory, region(0, 9)), FaultOutcome::OutOfRange);
    let ahead = Cause::Readahead(Readahead::Next(PageNo(9).single()));
    let served = memory.fault(&ahead, Wait::Never).unwrap();
    assert_eq!(served.installed, 0);
    memory.grant_present(DEVICE).unwrap();
    assert!(vm.mmu.granted().is_empty());
    let again = memory.allocate(region(0, 1024));
    assert!(matches!(again, Err(GrowthError::Leaving { .. })));
    vm.mmu.be_idle();
    vm.mmu.wire([PageNo(600)]);
    let held = memory.deallocate(region(0, 1024));
    assert!(matches!(held, Err(GrowthError::Wired { device: DEVICE, section }) if section.0 == 1));
    assert_eq!(state(&memory, 9), PageState::Unallocated);
    vm.mmu.wire([]);
    memory.deallocate(region(0, 1024)).unwrap();
    assert_eq!(memory.table().page_count(), 0);
}

#[test]
fn range_that_cannot_be_a_region_is_refused() {
    let (_, memory) = empty();
    for pages in [
        PageRange::new(PageNo(1), PageNo(512)),
        PageRange::new(PageNo(512), PageNo(512)),
        PageRange::new(PageNo(0), PageNo(CAPACITY + 1)),
    ] {
        assert!(matches!(
            memory.allocate(pages),
            Err(GrowthError::Misplaced { .. })
        ));
        assert!(matches!(
            memory.deallocate(pages),
            Err(GrowthError::Misplaced { .. })
        ));
    }
    memory.allocate(region(0, 600)).unwrap();
    for shorter in [region(0, 512 + 20), region(1, 20)] {
        let refused = memory.deallocate(shorter);
        assert!(matches!(refused, Err(GrowthError::Occupied { .. })));
    }
    assert!(matches!(
        memory.allocate(region(1, 20)),
        Err(GrowthError::Occupied { .. })
    ));
    memory.allocate(region(0, 600)).unwrap();
}

/// Words that a dead process left half allocated.
struct Left(VolatileWords, Vec<SectionNo>);

impl WordArray for Left {
    fn page_count(&self) -> u64 {
        0
    }
    fn capacity_pages(&self) -> u64 {
        self.0.capacity_pages()
    }
    fn cell(&self, page: PageNo) -> &crate::sync::AtomicU64 {
        self.0.cell(page)
    }
    fn sections_with_room(&self) -> Result<Vec<SectionNo>, crate::NoRoom> {
        Ok(self.1.clone())
    }
}

#[test]
fn successor_finds_the_regions_of_a_dead_process_and_goes_on_where_it_stopped() {
    let words = VolatileWords::with_capacity(CAPACITY);
    words.make_room(region(0, 2048)).unwrap();
    let content = Content::at(99).unwrap();
    for (page, left) in [
        (0, PageState::Present),
        (1, PageState::Filling(content)),
        (1024, PageState::Stored(Content::at(98).unwrap())),
    ] {
        let bits = PageWord::new(left).bits();
        words
            .cell(PageNo(page))
            .store(bits, std::sync::atomic::Ordering::Relaxed);
    }
    let with_room = (0..4).map(SectionNo).collect();
    let table = PageTable::reopen(Box::new(Left(words, with_room))).unwrap();
    assert_eq!(table.pages_of(SectionNo(0)).len(), 2);
    assert_eq!(table.pages_of(SectionNo(1)).len(), 0);
    assert_eq!(table.page_count(), 1025);
    recovery::forget_pages(&table, region(2, 512));
    assert_eq!(table.page_count(), 2);
    let place = FakePlace::default();
    place.put(PageNo(0), 1);
    let mut stored = Vec::new();
    let keep = |page, content| stored.push((page, content));
    let report = recovery::recover_words(&table, &place, keep).unwrap();
    assert_eq!((report.present_pages, report.stored_pages), (1, 1));
    assert_eq!(stored, [(PageNo(1), content)]);
    let (vm, memory) = memory(table);
    vm.place.put(PageNo(0), 1);
    memory.allocate(region(0, 512)).unwrap();
    assert_eq!(state(&memory, 0), PageState::Present);
    assert_eq!(state(&memory, 1), PageState::Stored(content));
    assert_eq!(state(&memory, 2), PageState::Stored(Content::ZERO));
    assert_eq!(memory.table().page_count(), 512);
}

/// A table over words that a dead process left in as many sections as there are ranges.
fn left(words: impl Fn(PageNo) -> PageState, sections: u64) -> PageTable {
    let array = VolatileWords::with_capacity(CAPACITY);
    let pages = region(0, sections * SECTION_PAGES);
    array.make_room(pages).unwrap();
    for page in pages.iter() {
        let bits = PageWord::new(words(page)).bits();
        let cell = array.cell(page);
        cell.store(bits, std::sync::atomic::Ordering::Relaxed);
    }
    let with_room = (0..sections).map(SectionNo).collect();
    PageTable::reopen(Box::new(Left(array, with_room))).unwrap()
}

#[test]
fn presence_is_asked_for_only_where_words_do_not_tell_after_a_death() {
    let stored = PageState::Stored(Content::at(5).unwrap());
    let filling = PageState::Filling(Content::at(6).unwrap());
    let table = left(
        |page| match page.0 {
            530 => PageState::Discarding,
            700 | 701 => filling,
            1024.. => stored,
            _ => PageState::Present,
        },
        3,
    );
    let place = FakePlace::default();
    place.put(PageNo(700), 1);
    let report = recovery::recover_words(&table, &place, |_, _| {}).unwrap();
    let asked = [PageRange::new(PageNo(530), PageNo(702)), region(2, 512)];
    assert_eq!(place.take_asked(), asked);
    // Page 530 is a hole, and page 0 may be one: only the first was being given up.
    let of = |page| table.word(PageNo(page)).state();
    assert_eq!(
        (of(0), of(530)),
        (PageState::Present, PageState::Stored(Content::ZERO))
    );
    assert_eq!(
        (of(700), of(701)),
        (
            PageState::Present,
            PageState::Stored(Content::at(6).unwrap())
        )
    );
    assert_eq!((report.stored_pages, report.mended_words), (514, 3));
    // A stored page that is present is found, wherever it is.
    place.put(PageNo(1300), 1);
    let table = left(|_| stored, 3);
    let found = recovery::recover_words(&table, &place, |_, _| {});
    assert!(matches!(
        found,
        Err(recovery::RecoveryError::ForeignPage {
            first: PageNo(700),
            count: 2
        })
    ));
}

#[test]
fn hole_that_a_guest_left_while_nobody_served_is_filled_when_it_is_touched() {
    let table = left(|_| PageState::Present, 1);
    let (vm, memory) = memory(table);
    // By the attach of the device, which is granted what is present.
    assert_eq!(vm.place.take_asked(), [region(0, 512)]);
    memory.allocate(region(0, 512)).unwrap();
    assert!(vm.place.take_asked().is_empty());
    assert_eq!(fault(&memory, PageNo(3).single()), FaultOutcome::Present);
    assert!(vm.place.has(PageNo(3)) && vm.mmu.has(PageNo(3)));
}

#[test]
fn pages_that_are_allocated_already_are_neither_asked_for_nor_counted_again() {
    let (vm, memory) = empty();
    vm.place.put_zeros(region(0, 512));
    memory.allocate(region(0, 600)).unwrap();
    assert_eq!(vm.place.take_asked().len(), 2);
    let granted = vm.mmu.granted();
    assert_eq!(granted.len(), 512);
    memory.allocate(region(0, 600)).unwrap();
    assert!(vm.place.take_asked().is_empty());
    // The last section grows: it alone is looked at.
    memory.allocate(region(0, 700)).unwrap();
    assert_eq!(
        vm.place.take_asked(),
        [PageRange::new(PageNo(512), PageNo(700))]
    );
    assert_eq!(vm.mmu.granted(), granted);
}

#[test]
fn device_attached_without_a_page_gets_those_that_are_present_by_section_or_by_faults() {
    let (vm, memory) = empty();
    vm.place.put_zeros(PageRange::new(PageNo(0), PageNo(700)));
    memory.allocate(region(0, 1024)).unwrap();
    let late = Arc::new(FakeMmu::default());
    let device = Device::with_id(DeviceId(7), Arc::clone(&late) as _);
    (memory.0)
        .attach_ungranted(&device, Mode::Coherent)
        .unwrap();
    assert!(late.granted().is_empty());
    assert_eq!(fault(&memory, PageNo(5).single()), FaultOutcome::Present);
    assert_eq!(late.granted(), BTreeSet::from([PageNo(5)]));
    memory.grant_section(SectionNo(1)).unwrap();
    let of_section: BTreeSet<PageNo> = PageRange::new(PageNo(512), PageNo(700)).iter().collect();
    assert!(late.granted().is_superset(&of_section));
    assert_eq!(late.granted().len(), 1 + of_section.len());
    assert!(!vm.place.take_asked().is_empty());
    // Nothing is present there by its words, so nobody is asked.
    memory.allocate(region(4, 512)).unwrap();
    assert!(!vm.place.take_asked().is_empty());
    memory.grant_section(SectionNo(4)).unwrap();
    assert!(vm.place.take_asked().is_empty());
}

#[test]
fn word_that_is_damaged_is_found_by_a_successor_which_changes_nothing() {
    let words = VolatileWords::with_capacity(CAPACITY);
    words.make_room(region(0, 512)).unwrap();
    let mended = PageWord::new(PageState::Filling(Content::ZERO)).bits();
    let damaged = u64::MAX;
    assert!(PageWord::from_bits(damaged).is_err());
    for (page, bits) in [(0, mended), (1, damaged)] {
        words
            .cell(PageNo(page))
            .store(bits, std::sync::atomic::Ordering::Relaxed);
    }
    let table = PageTable::reopen(Box::new(Left(words, vec![SectionNo(0)]))).unwrap();
    let found = recovery::recover_words(&table, &FakePlace::default(), |_, _| {});
    assert!(
        matches!(&found, Err(recovery::RecoveryError::Damaged { page, .. }) if *page == PageNo(1)),
        "{found:?}"
    );
    assert_eq!(table.raw_bits(PageNo(0)), mended);
}

#[test]
fn forgotten_tail_of_a_section_leaves_a_region_that_is_found_by_its_new_length() {
    let (_, memory) = empty();
    memory.allocate(region(0, 2 * 512)).unwrap();
    recovery::forget_pages(memory.table(), PageRange::new(PageNo(700), PageNo(1024)));
    assert_eq!(memory.table().page_count(), 700);
    assert_eq!(state(&memory, 700), PageState::Unallocated);
    memory.allocate(region(0, 700)).unwrap();
}

#[test]
fn room_made_beforehand_is_no_memory_yet_and_none_is_made_where_a_region_cannot_be() {
    let (_, memory) = empty();
    memory.make_room_for(region(3, 600)).unwrap();
    assert_eq!(memory.table().page_count(), 0);
    memory.allocate(region(3, 600)).unwrap();
    let shorter = memory.make_room_for(region(3, 500));
    assert!(matches!(shorter, Err(GrowthError::Occupied { .. })));
    let beyond = PageRange::new(PageNo(CAPACITY - 512), PageNo(CAPACITY + 512));
    let beyond = memory.make_room_for(beyond);
    assert!(matches!(beyond, Err(GrowthError::Misplaced { .. })));
}
