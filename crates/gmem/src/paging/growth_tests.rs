// SPDX-License-Identifier: Apache-2.0
//! Growth and removal, one thread at a time, over a VM of vectors.

use crate::{
    Activation, AddressSpace, Admission, AllocPolicy, Backing, Content, ContentStore, Device,
    Fault, FaultOutcome, GrowthError, Incidents, Installed, MemoryParts, Mmu, MmuError, MmuLimits,
    Mode, PageState, PageTable, PageWord, PagedMemory, Place, PlaceError, Restrict, Restricted,
    StoreError, TableId, VolatileWords, WordArray, recovery,
};
use crate::{Cause, Readahead, Wait};
use pagetide_addr::{
    Access, DeviceId, PageNo, PageRange, PageSet, SECTION_PAGES, SectionNo, Tier, Va,
};
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
};

const DEVICE: DeviceId = DeviceId(1);
/// 1 TiB.
const CAPACITY: u64 = 1 << 28;

/// What kernel, store and device have, as sets of page numbers.
#[derive(Default)]
struct Vm {
    present: BTreeSet<u64>,
    granted: BTreeSet<u64>,
    wired: BTreeSet<u64>,
    woken: BTreeSet<u64>,
    freed: Vec<Content>,
    busy: bool,
    gone: bool,
    counted_in: u64,
    given_back: u64,
}

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Vm>>);

impl Fake {
    fn with<R>(&self, act: impl FnOnce(&mut Vm) -> R) -> R {
        act(&mut self.0.lock().unwrap())
    }

    fn place<R>(&self, act: impl FnOnce(&mut Vm) -> R) -> Result<R, PlaceError> {
        self.with(|vm| {
            if vm.gone {
                Err(PlaceError::Gone)
            } else {
                Ok(act(vm))
            }
        })
    }
}

impl Place for Fake {
    fn install(&self, page: PageNo, _content: &[u8; 4096]) -> Result<Installed, PlaceError> {
        self.install_zero(page)
    }
    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        self.place(|vm| {
            if vm.present.insert(page.0) {
                Installed::Installed
            } else {
                Installed::AlreadyThere
            }
        })
    }
    fn install_run(&self, pages: PageRange, _content: &[u8]) -> Result<u64, PlaceError> {
        self.place(|vm| vm.present.extend(pages.iter().map(|page| page.0)))?;
        Ok(pages.len())
    }
    fn read(&self, _pages: PageRange, _into: &mut [u8]) -> Result<(), PlaceError> {
        self.place(|_| ())
    }
    fn discard(&self, pages: PageRange) -> Result<(), PlaceError> {
        self.place(|vm| vm.present.retain(|page| !pages.contains(PageNo(*page))))
    }
    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError> {
        self.place(|vm| vm.present.contains(&page.0))
    }
    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        let single = |page: &u64| PageNo(*page).single();
        self.place(|vm| {
            let within = vm.present.range(pages.start.0..pages.end.0);
            within.map(single).collect()
        })
    }
    fn wake(&self, pages: PageRange) -> Result<(), PlaceError> {
        self.place(|vm| vm.woken.extend(pages.iter().map(|page| page.0)))
    }
    fn poison(&self, _page: PageNo) -> Result<(), PlaceError> {
        self.place(|_| ())
    }
}

impl ContentStore for Fake {
    fn load(&self, _: PageNo, _: Content, _: &mut [u8; 4096]) -> Result<(), StoreError> {
        Ok(())
    }
    fn free(&self, content: Content) {
        self.with(|vm| vm.freed.push(content));
    }
}

impl Admission for Fake {
    fn admit(&self, _pages: u64) {}
    fn try_admit(&self, _pages: u64) -> bool {
        true
    }
    fn give_back(&self, pages: u64) {
        self.with(|vm| vm.given_back += pages);
    }
    fn count_in(&self, pages: u64) {
        self.with(|vm| vm.counted_in += pages);
    }
}

impl Incidents for Fake {
    fn foreign_page(&self, page: PageNo) {
        panic!("a foreign page in {page}");
    }
    fn poisoned(&self, page: PageNo, why: &StoreError) {
        panic!("{page}: {why}");
    }
    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        panic!("{page}: {why}");
    }
    fn fill_failed(&self, page: PageNo, why: &dyn std::error::Error) {
        panic!("{page}: {why}");
    }
}

impl Mmu for Fake {
    fn limits(&self) -> MmuLimits {
        MmuLimits::PAGED
    }
    fn wired(&self, section: SectionNo) -> PageSet {
        let mut set = PageSet::EMPTY;
        self.with(|vm| vm.wired.clone())
            .into_iter()
            .map(PageNo)
            .filter(|page| page.section() == section)
            .for_each(|page| set.insert(page));
        set
    }
    fn restrict(
        &self,
        _table: TableId,
        section: SectionNo,
        pages: &PageSet,
        _to: Restrict,
    ) -> Result<Restricted, MmuError> {
        self.with(|vm| {
            for page in pages.pages(section) {
                vm.granted.remove(&page.0);
            }
        });
        let busy = self.with(|vm| vm.busy);
        Ok(if busy {
            Restricted::Busy
        } else {
            Restricted::Done
        })
    }
    fn grant(
        &self,
        _table: TableId,
        pages: PageRange,
        _access: Access,
        _backing: Backing,
    ) -> Result<(), MmuError> {
        self.with(|vm| vm.granted.extend(pages.iter().map(|page| page.0)));
        Ok(())
    }
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

fn memory(table: PageTable) -> (Fake, Memory) {
    let fake = Fake::default();
    let memory = PagedMemory::new(MemoryParts {
        table,
        place: Arc::new(fake.clone()),
        store: Arc::new(fake.clone()),
        admission: Arc::new(fake.clone()),
        incidents: Arc::new(fake.clone()),
        neighbours_max: 4,
    });
    let end = Va(CAPACITY * pagetide_addr::PAGE_BYTES);
    let space = AddressSpace::over(memory, Va(0), end, AllocPolicy::default()).unwrap();
    let device = Device::with_id(DEVICE, Arc::new(fake.clone()));
    (space.attach(&device, Mode::Coherent, Activation::Now)).unwrap();
    (fake, Memory(space))
}

fn empty() -> (Fake, Memory) {
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
    let (fake, memory) = empty();
    fake.with(|vm| vm.present.extend([0, 1]));
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
    let (fake, memory) = empty();
    assert_eq!(fault(&memory, region(0, 1)), FaultOutcome::OutOfRange);
    let last = CAPACITY / SECTION_PAGES - 2;
    let (low, high) = (region(1, 600), region(last, 1024));
    let first = high.start.0;
    fake.with(|vm| vm.present.extend([513, first]));
    memory.allocate(low).unwrap();
    memory.allocate(high).unwrap();
    assert_eq!(memory.table().page_count(), CAPACITY);
    assert_eq!(state(&memory, 513), PageState::Present);
    assert_eq!(state(&memory, 514), PageState::Stored(Content::ZERO));
    fake.with(|vm| {
        assert_eq!(vm.granted, BTreeSet::from([513, first]));
        assert_eq!(vm.counted_in, 2);
        assert!(vm.woken.contains(&1111) && vm.woken.len() == 600 + 1024);
    });
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
    let (fake, memory) = empty();
    fake.with(|vm| vm.present.extend([1024, 1030]));
    memory.allocate(region(0, 512)).unwrap();
    memory.allocate(region(2, 512)).unwrap();
    let content = Content::at(77).unwrap();
    let section = SectionNo(2);
    let wanted = PageSet::of_range(section, PageNo(1024).single());
    let mut round = memory.begin_eviction(section, &wanted).unwrap();
    let committed = round.commit(&[(PageNo(1024), content)]);
    assert_eq!(committed.evicted.len(), 1);
    drop(round);
    fake.with(|vm| vm.gone = true);
    memory.deallocate(region(2, 512)).unwrap();
    fake.with(|vm| {
        assert_eq!(vm.freed, [content]);
        assert_eq!(vm.given_back, 1);
        assert!(vm.granted.is_empty());
    });
    assert_eq!(memory.table().page_count(), 512);
    memory.deallocate(region(2, 512)).unwrap();
    assert_eq!(fake.with(|vm| vm.freed.len()), 1);
    assert_eq!(fault(&memory, region(2, 1)), FaultOutcome::OutOfRange);
    fake.with(|vm| (vm.gone, vm.present) = (false, BTreeSet::new()));
    memory.allocate(region(2, 300)).unwrap();
    assert_eq!(state(&memory, 1024), PageState::Stored(Content::ZERO));
    assert_eq!(memory.table().page_count(), 1024 + 300);
}

#[test]
fn round_under_way_finds_its_pages_gone_and_hands_its_content_back() {
    let (fake, memory) = empty();
    fake.with(|vm| vm.present.insert(3));
    memory.allocate(region(0, 512)).unwrap();
    let wanted = PageSet::of_range(SectionNo(0), PageNo(3).single());
    let mut round = memory.begin_eviction(SectionNo(0), &wanted).unwrap();
    memory.deallocate(region(0, 512)).unwrap();
    assert!(round.candidates().is_empty());
    let content = Content::at(5).unwrap();
    let committed = round.commit(&[(PageNo(3), content)]);
    assert_eq!(committed.unused, [content]);
    round.spare(&wanted);
    assert!(fake.with(|vm| vm.granted.is_empty()));
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
fn busy_device_keeps_its_section_from_leaving_but_is_granted_nothing_more() {
    let (fake, memory) = empty();
    fake.with(|vm| vm.present.extend(0..1024));
    memory.allocate(region(0, 1024)).unwrap();
    fake.with(|vm| vm.busy = true);
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
    assert!(fake.with(|vm| vm.granted.is_empty()));
    let again = memory.allocate(region(0, 1024));
    assert!(matches!(again, Err(GrowthError::Leaving { .. })));
    fake.with(|vm| (vm.busy, vm.wired) = (false, BTreeSet::from([600])));
    let held = memory.deallocate(region(0, 1024));
    assert!(matches!(held, Err(GrowthError::Wired { device: DEVICE, section }) if section.0 == 1));
    assert_eq!(state(&memory, 9), PageState::Unallocated);
    fake.with(|vm| vm.wired.clear());
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
    let fake = Fake::default();
    fake.with(|vm| vm.present.insert(0));
    let mut stored = Vec::new();
    let report =
        recovery::recover_words(&table, &fake, |page, content| stored.push((page, content)));
    let report = report.unwrap();
    assert_eq!((report.present_pages, report.stored_pages), (1, 1));
    assert_eq!(stored, [(PageNo(1), content)]);
    let (fake, memory) = memory(table);
    fake.with(|vm| vm.present.insert(0));
    memory.allocate(region(0, 512)).unwrap();
    assert_eq!(state(&memory, 0), PageState::Present);
    assert_eq!(state(&memory, 1), PageState::Stored(content));
    assert_eq!(state(&memory, 2), PageState::Stored(Content::ZERO));
    assert_eq!(memory.table().page_count(), 512);
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
    let found = recovery::recover_words(&table, &Fake::default(), |_, _| {});
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
