// SPDX-License-Identifier: Apache-2.0
//! Sections that come and go whole, one thread at a time.

use crate::{
    AddressSpace, Cause, Content, EvictionError, Fault, FaultOutcome, Incidents, MemoryParts,
    Overwrite, PageState, PageWord, PlaceError, Readahead, RegionRequest, StoreError, Wait,
    fake::{self, FakeMmu, FakePlace, FakeRooms, FakeStore},
    paging::recovery::recover_words,
};
use pagetide_addr::{
    Access, DeviceId, PAGE_BYTES, PageNo, PageRange, PageSet, SECTION_PAGES, SectionNo, to_usize,
};
use pagetide_random::SplitMix64;
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

const DPU: DeviceId = DeviceId(1);
const SECTIONS: u64 = 3;
const PAGES: u64 = SECTIONS * SECTION_PAGES;

#[derive(Default)]
struct Log {
    foreign: AtomicU64,
    poisoned: Mutex<Vec<PageNo>>,
}

impl Incidents for Log {
    fn foreign_page(&self, _page: PageNo) {
        self.foreign.fetch_add(1, Ordering::Relaxed);
    }
    fn poisoned(&self, page: PageNo, _why: &StoreError) {
        self.poisoned.lock().unwrap().push(page);
    }
    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        panic!("{page}: {why}");
    }
    fn fill_failed(&self, _page: PageNo, _why: &dyn std::error::Error) {}
}

struct Vm {
    place: Arc<FakePlace>,
    store: Arc<FakeStore>,
    rooms: Arc<FakeRooms>,
    mmu: Arc<FakeMmu>,
    incidents: Arc<Log>,
    space: Arc<AddressSpace>,
}

/// All pages stored: page `n` as content `n + 1`, whose bytes are the low byte of that.
fn setting(huge_pages_free: u64) -> Vm {
    let place = Arc::new(FakePlace::default());
    place.go_whole(huge_pages_free);
    let (store, rooms, mmu): (Arc<FakeStore>, Arc<FakeRooms>, Arc<FakeMmu>) = Default::default();
    let incidents = Arc::new(Log::default());
    let parts = MemoryParts {
        store: Arc::clone(&store) as _,
        admission: Arc::clone(&rooms) as _,
        incidents: Arc::clone(&incidents) as _,
        neighbours_max: 8,
        ..fake::parts(PAGES, Arc::clone(&place) as _)
    };
    let space = fake::space(parts, DPU, Arc::clone(&mmu) as _);
    let all = RegionRequest::of_bytes(PAGES * PAGE_BYTES);
    space.alloc(&all).unwrap();
    let vm = Vm {
        place,
        store,
        rooms,
        mmu,
        incidents,
        space,
    };
    for page in 0..PAGES {
        vm.store.keep_as(content(page), byte(page));
        vm.set(page, PageState::Stored(content(page)));
    }
    vm
}

fn content(page: u64) -> Content {
    Content::at(page + 1).unwrap()
}

const fn byte(page: u64) -> u8 {
    (page + 1).to_le_bytes()[0]
}

fn fault(first: u64, count: u64) -> Fault {
    Fault {
        device: DPU,
        pages: PageNo(first).run(count),
        access: Access::Write,
    }
}

impl Vm {
    fn memory(&self) -> &crate::PagedMemory {
        self.space.memory().unwrap()
    }

    fn set(&self, page: u64, state: PageState) {
        (self.memory().table()).set_initial(PageNo(page), PageWord::new(state));
    }

    fn state(&self, page: u64) -> PageState {
        self.memory().table().word(PageNo(page)).state()
    }

    fn ask(&self, first: u64, count: u64) -> FaultOutcome {
        let cause = Cause::Fault(fault(first, count));
        let served = self.space.fault(&cause, Wait::Here);
        served.expect("a call that may wait is over").outcome
    }

    /// Evicts a section as a reclaimer does, but for what it stores its bytes as.
    fn evict(&self, section: u64) -> Result<bool, EvictionError> {
        let number = SectionNo(section);
        let pages = self.memory().table().pages_of(number);
        let wanted = PageSet::of_range(number, pages);
        let mut round = self.memory().begin_eviction(number, &wanted)?;
        assert!(round.goes_whole());
        let mut bytes = vec![0; to_usize(pages.bytes())];
        round.read(pages, &mut bytes).unwrap();
        let keep = |(page, bytes): (PageNo, &[u8])| (page, self.store.keep(bytes));
        let batch: Vec<_> = pages.iter().zip(bytes.chunks(4096)).map(keep).collect();
        let committed = round.commit(&batch);
        for content in committed.unused {
            crate::ContentStore::free(&*self.store, content);
        }
        assert!(committed.evicted.is_empty() || committed.evicted.len() == SECTION_PAGES);
        Ok(!committed.evicted.is_empty())
    }
}

#[test]
fn fault_on_any_page_fills_its_section_by_one_call_and_takes_room_for_all_of_it() {
    let vm = setting(SECTIONS);
    assert_eq!(vm.ask(700, 1), FaultOutcome::Present);
    assert_eq!(vm.place.whole_calls(), [1, 0]);
    for page in SECTION_PAGES..2 * SECTION_PAGES {
        assert_eq!(vm.place.first_byte(PageNo(page)), Some(byte(page)));
        assert_eq!(vm.state(page), PageState::Present);
        assert!(vm.mmu.has(PageNo(page)));
    }
    assert_eq!(vm.place.present_pages(), SECTION_PAGES);
    assert_eq!(vm.rooms.taken(), SECTION_PAGES.cast_signed());
    assert_eq!(vm.store.freed().len() as u64, SECTION_PAGES);
    assert_eq!(vm.ask(600, 20), FaultOutcome::Present);
    assert_eq!(vm.place.whole_calls(), [1, 0]);
}

#[test]
fn fault_across_two_sections_fills_both() {
    let vm = setting(SECTIONS);
    assert_eq!(vm.ask(SECTION_PAGES - 3, 6), FaultOutcome::Present);
    assert_eq!(vm.place.whole_calls(), [2, 0]);
    assert_eq!(vm.rooms.taken(), 2 * SECTION_PAGES.cast_signed());
}

#[test]
fn caller_that_must_not_wait_and_readahead_fill_no_section() {
    let vm = setting(SECTIONS);
    let cause = Cause::Fault(fault(5, 1));
    assert_eq!(vm.space.fault(&cause, Wait::Never), None);
    let ahead = Cause::Readahead(Readahead::Next(PageNo(5).run(8)));
    let served = vm.space.fault(&ahead, Wait::Never).unwrap();
    assert_eq!((served.installed, vm.rooms.taken()), (0, 0));
    assert_eq!(vm.place.whole_calls(), [0, 0]);
}

#[test]
fn section_is_swapped_in_ahead_as_a_whole() {
    let vm = setting(SECTIONS);
    let ahead = Cause::Readahead(Readahead::SwapIn(PageNo(16).run(16)));
    let served = vm.space.fault(&ahead, Wait::Never).unwrap();
    assert_eq!(served.installed, 0xffff);
    assert_eq!(vm.place.present_pages(), SECTION_PAGES);
    assert_eq!(vm.rooms.taken(), SECTION_PAGES.cast_signed());
}

#[test]
fn overwrite_fills_the_old_content_and_leaves_the_bytes_to_the_device() {
    let vm = setting(SECTIONS);
    let overwrite = Overwrite {
        fault: fault(3, 2),
        content: &[0xee; 2 * 4096],
        still_wanted: &|| true,
    };
    let served = vm.space.fault(&Cause::Overwrite(overwrite), Wait::Here);
    let served = served.unwrap();
    assert_eq!(
        (served.outcome, served.installed),
        (FaultOutcome::Present, 0)
    );
    assert_eq!(vm.place.first_byte(PageNo(3)), Some(byte(3)));
    assert_eq!(vm.rooms.taken(), SECTION_PAGES.cast_signed());
}

#[test]
fn section_goes_by_one_punch_and_comes_back_as_it_was() {
    let vm = setting(1);
    assert_eq!(vm.ask(0, 1), FaultOutcome::Present);
    vm.place.put(PageNo(9), 77);
    assert!(vm.evict(0).unwrap());
    assert_eq!(
        (vm.place.whole_calls(), vm.place.present_pages()),
        ([1, 1], 0)
    );
    assert_eq!(vm.ask(511, 1), FaultOutcome::Present);
    let bytes = |page| vm.place.first_byte(PageNo(page));
    assert_eq!((bytes(9), bytes(10)), (Some(77), Some(byte(10))));
}

#[test]
fn one_page_that_stays_keeps_its_section() {
    let vm = setting(SECTIONS);
    vm.ask(0, 1);
    let all = vm.memory().table().pages_of(SectionNo(0));
    let mut most = PageSet::of_range(SectionNo(0), all);
    most.remove(PageNo(40));
    let refused = vm.memory().begin_eviction(SectionNo(0), &most);
    assert!(matches!(refused, Err(EvictionError::Nothing)));
    vm.mmu.wire([PageNo(7)]);
    assert!(matches!(vm.evict(0), Err(EvictionError::Nothing)));
}

#[test]
fn access_to_one_page_takes_all_out_of_the_round() {
    let vm = setting(SECTIONS);
    vm.ask(0, 1);
    let number = SectionNo(0);
    let all = vm.memory().table().pages_of(number);
    let wanted = PageSet::of_range(number, all);
    let mut round = vm.memory().begin_eviction(number, &wanted).unwrap();
    let batch: Vec<_> = (all.iter())
        .map(|page| (page, vm.store.keep(&[1; 4096])))
        .collect();
    assert_eq!(vm.ask(100, 1), FaultOutcome::Present);
    assert!(round.candidates().is_empty());
    let committed = round.commit(&batch);
    assert!(committed.evicted.is_empty());
    assert_eq!(committed.unused.len() as u64, SECTION_PAGES);
    drop(round);
    assert!(all.iter().all(|page| vm.mmu.has(page)));
    // And what the tracker saw touched spares all, too.
    let mut round = vm.memory().begin_eviction(number, &wanted).unwrap();
    let mut one = PageSet::EMPTY;
    one.insert(PageNo(4));
    round.spare(&one);
    assert!(round.candidates().is_empty());
}

#[test]
fn batch_that_lacks_a_page_evicts_nothing() {
    let vm = setting(SECTIONS);
    vm.ask(0, 1);
    let number = SectionNo(0);
    let all = vm.memory().table().pages_of(number);
    let wanted = PageSet::of_range(number, all);
    let mut round = vm.memory().begin_eviction(number, &wanted).unwrap();
    let some: Vec<_> = (all.iter().skip(1))
        .map(|page| (page, vm.store.keep(&[1; 4096])))
        .collect();
    let committed = round.commit(&some);
    assert_eq!((committed.evicted.len(), committed.unused.len()), (0, 511));
    drop(round);
    assert_eq!(vm.place.present_pages(), SECTION_PAGES);
}

#[test]
fn fill_that_finds_no_huge_page_waits_and_ends_without_a_failure() {
    let vm = setting(0);
    let before = vm.state(600);
    assert_eq!(vm.ask(600, 1), FaultOutcome::Present);
    let waits = &vm.memory().counters().waits_for_huge_page;
    assert!(waits.load(Ordering::Relaxed) > 1);
    assert_eq!(vm.state(600), before);
    assert_eq!(vm.rooms.taken(), 0, "it comes again");
    assert!(vm.place.woken().contains(&PageNo(600)));
    vm.place.go_whole(1);
    assert_eq!(vm.ask(600, 1), FaultOutcome::Present);
    assert_eq!(vm.state(600), PageState::Present);
}

#[test]
fn faults_that_wait_for_one_section_keep_room_for_one() {
    for is_corrected in [false, true] {
        let vm = setting(SECTIONS);
        vm.rooms.fill_up();
        std::thread::scope(|scope| {
            for page in 0..6 {
                let vm = &vm;
                scope.spawn(move || assert_eq!(vm.ask(page, 1), FaultOutcome::Present));
            }
            vm.rooms.wait_for_waiting(6);
            if is_corrected {
                vm.rooms.correct(0);
            }
            vm.rooms.make_room();
        });
        assert_eq!(vm.place.present_pages(), SECTION_PAGES);
        assert_eq!(vm.rooms.taken(), SECTION_PAGES.cast_signed());
    }
}

#[test]
fn page_that_is_lost_keeps_its_section_absent_and_the_others_stored() {
    let vm = setting(SECTIONS);
    vm.store.damage(content(20));
    assert_eq!(vm.ask(5, 1), FaultOutcome::Lost);
    assert_eq!(*vm.incidents.poisoned.lock().unwrap(), [PageNo(20)]);
    assert_eq!(vm.state(20), PageState::Poisoned);
    assert_eq!(vm.state(0), PageState::Stored(content(0)));
    assert_eq!(vm.ask(300, 1), FaultOutcome::Lost);
    assert_eq!(vm.state(300), PageState::Stored(content(300)));
    assert_eq!(vm.place.present_pages(), 0);
    // The leader itself.
    vm.store.damage(content(SECTION_PAGES));
    assert_eq!(vm.ask(SECTION_PAGES + 1, 1), FaultOutcome::Lost);
    assert_eq!(vm.state(SECTION_PAGES), PageState::Poisoned);
    assert_eq!(vm.ask(SECTION_PAGES + 1, 1), FaultOutcome::Lost);
}

#[test]
fn section_that_the_guest_gave_up_begins_with_zeros() {
    let vm = setting(SECTIONS);
    for page in 0..SECTION_PAGES {
        vm.set(page, PageState::Present);
    }
    assert_eq!(vm.ask(17, 1), FaultOutcome::Present);
    assert_eq!(vm.place.first_byte(PageNo(3)), Some(0));
    assert_eq!(
        (vm.state(3), vm.state(0)),
        (PageState::Present, PageState::Present)
    );
    assert_eq!(vm.place.whole_calls(), [1, 0]);
}

#[test]
fn section_of_mixed_words_takes_and_counts_room_for_what_was_stored() {
    let vm = setting(SECTIONS);
    let filled = || {
        let counters = vm.memory().counters();
        counters.filled_pages.load(Ordering::Relaxed)
    };
    // The guest gave up what came first, or what came last.
    for page in (0..100).chain(SECTION_PAGES + 200..2 * SECTION_PAGES) {
        vm.set(page, PageState::Present);
    }
    vm.set(SECTION_PAGES + 7, PageState::Stored(Content::ZERO));
    assert_eq!(vm.ask(3, 1), FaultOutcome::Present);
    assert_eq!((filled(), vm.rooms.taken()), (412, 412));
    let ahead = Cause::Readahead(Readahead::SwapIn(PageNo(SECTION_PAGES).run(SECTION_PAGES)));
    assert!(vm.space.fault(&ahead, Wait::Never).is_some());
    assert_eq!((filled(), vm.rooms.taken()), (612, 612));
    assert_eq!(vm.place.present_pages(), 2 * SECTION_PAGES);
    let bytes = |page| vm.place.first_byte(PageNo(page));
    assert_eq!((bytes(99), bytes(100)), (Some(0), Some(byte(100))));
    let last = SECTION_PAGES + 199;
    assert_eq!((bytes(last), bytes(last + 1)), (Some(byte(last)), Some(0)));
}

/// A section whose punch was refused is present or stored as a whole, whatever page the kernel tells nothing of.
#[test]
fn section_whose_punch_fails_is_settled_by_one_answer() {
    for hidden in [0, 5, 511] {
        let vm = setting(SECTIONS);
        vm.ask(0, 1);
        vm.place.refuse_punches();
        vm.place.hide([PageNo(hidden)]);
        assert!(!vm.evict(0).unwrap());
        vm.place.refuse_no_punches();
        let is_known = hidden != 0;
        for page in 0..SECTION_PAGES {
            let is_present = vm.state(page) == PageState::Present;
            assert_eq!(is_present, is_known, "{page}, {hidden} hidden");
        }
        vm.place.hide([]);
        assert_eq!(vm.ask(9, 1), FaultOutcome::Present);
        assert!(vm.evict(0).unwrap(), "{hidden} hidden");
        assert_eq!(vm.ask(0, 1), FaultOutcome::Present);
        assert_eq!(vm.place.first_byte(PageNo(5)), Some(byte(5)));
        // The other way round: it was punched, and nobody could tell.
        vm.place.refuse_punches();
        vm.place.hide([PageNo(0)]);
        assert!(!vm.evict(0).unwrap());
        vm.place.refuse_no_punches();
        crate::Place::discard(&*vm.place, PageNo(0).run(SECTION_PAGES)).unwrap();
        assert_eq!(vm.ask(9, 1), FaultOutcome::Lost, "it is not known yet");
        vm.place.hide([]);
        assert_eq!(vm.ask(9, 1), FaultOutcome::Present);
        assert_eq!(vm.place.first_byte(PageNo(5)), Some(byte(5)));
    }
    // And words that an eviction has left behind so.
    let vm = setting(SECTIONS);
    for page in [1, 300, 511] {
        vm.set(page, PageState::Evicting(content(page)));
    }
    assert_eq!(vm.ask(9, 1), FaultOutcome::Present);
    assert_eq!(vm.place.first_byte(PageNo(300)), Some(byte(300)));
}

#[test]
fn foreign_section_is_told_and_its_content_kept() {
    let vm = setting(SECTIONS);
    vm.place.put_zeros(PageNo(0).run(SECTION_PAGES));
    assert_eq!(vm.ask(1, 1), FaultOutcome::Lost);
    assert_eq!(vm.incidents.foreign.load(Ordering::Relaxed), 1);
    assert_eq!(vm.state(1), PageState::Stored(content(1)));
}

/// Whatever prefix of a fill's or an eviction's words a dead daemon has written, its successor finds no
/// foreign page and the content whole.
#[test]
fn death_between_any_two_words_leaves_the_section_present_or_stored() {
    type Words = fn(u64, u64) -> PageState;
    let claims: Words = |page, done| match page < done {
        true => PageState::Filling(content(page)),
        false => PageState::Stored(content(page)),
    };
    // The leader is finished last.
    let finishes: Words = |page, done| match page != 0 && page <= done {
        true => PageState::Present,
        false => PageState::Filling(content(page)),
    };
    let commits: Words = |page, done| match page < done {
        true => PageState::Evicting(content(page)),
        false => PageState::Present,
    };
    let punched: Words = |page, done| match page < done {
        true => PageState::Stored(content(page)),
        false => PageState::Evicting(content(page)),
    };
    let cases = [
        (claims, false),
        (finishes, true),
        (commits, true),
        (punched, false),
    ];
    for (words, is_present) in cases {
        for done in [0, 1, 2, 255, 511, 512] {
            let vm = setting(SECTIONS);
            if is_present {
                vm.place.put_zeros(PageNo(0).run(SECTION_PAGES));
            }
            for page in 0..SECTION_PAGES {
                vm.set(page, words(page, done));
            }
            let table = vm.memory().table();
            recover_words(table, &*vm.place, |_, _| ()).unwrap();
            for page in 0..SECTION_PAGES {
                let expected = match is_present {
                    true => PageState::Present,
                    false => PageState::Stored(content(page)),
                };
                assert_eq!(vm.state(page), expected, "{page} of {done}");
            }
        }
    }
}

/// Random faults, evictions, guest writes and discards against bytes kept aside.
#[test]
fn random_operations_agree_with_a_naive_model() {
    let vm = setting(SECTIONS);
    let mut random = SplitMix64::new(7);
    let mut bytes: Vec<u8> = (0..PAGES).map(byte).collect();
    for _ in 0..400 {
        let page = random.below(PAGES);
        let section = page / SECTION_PAGES;
        let first = section * SECTION_PAGES;
        match random.below(8) {
            0..3 => {
                assert_eq!(vm.ask(page, 1), FaultOutcome::Present);
            }
            3 | 4 if vm.place.has(PageNo(page)) => {
                let new = byte(random.below(255));
                vm.place.put(PageNo(page), new);
                bytes[to_usize(page)] = new;
            }
            5 | 6 => match vm.evict(section) {
                Ok(evicted) => assert!(evicted),
                Err(EvictionError::Nothing) => assert!(!vm.place.has(PageNo(page))),
                Err(error) => panic!("{error}"),
            },
            7 if vm.place.has(PageNo(page)) => {
                let pages = PageNo(first).run(SECTION_PAGES);
                crate::Place::discard(&*vm.place, pages).unwrap();
                bytes[to_usize(first)..][..to_usize(SECTION_PAGES)].fill(0);
            }
            _ => {}
        }
        let there: PageRange = PageNo(first).run(SECTION_PAGES);
        let present = there.iter().filter(|page| vm.place.has(*page)).count() as u64;
        assert!(
            present == 0 || present == SECTION_PAGES,
            "{present} present"
        );
    }
    for page in 0..PAGES {
        assert_eq!(vm.ask(page, 1), FaultOutcome::Present);
        let seen = vm.place.first_byte(PageNo(page));
        assert_eq!(seen, Some(bytes[to_usize(page)]), "{page}");
    }
}
