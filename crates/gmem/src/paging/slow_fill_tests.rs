// SPDX-License-Identifier: Apache-2.0
//! Slow fills and relocations, one thread at a time: the test ends each load when it likes.

use crate::{
    AddressSpace, Cause, Content, ContentStore, Fault, FaultOutcome, GrowthError, Incidents,
    LoadDone, MemoryParts, Move, Overwrite, PageState, PageWord, PagedMemory, PlaceError,
    Readahead, RegionRequest, Relocated, Served, StoreError, Wait,
    fake::{self, FakeMmu, FakePlace, FakeRooms, FakeStore},
};
use pagetide_addr::{
    Access, DeviceId, PAGE_BYTES, PageNo, PageRange, PageSet, SECTION_PAGES, SectionNo, to_usize,
};
use pagetide_random::SplitMix64;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
};

const DPU: DeviceId = DeviceId(1);
const SECTION: SectionNo = SectionNo(0);

/// What surrounds the memory: one section, every page stored and far.
#[derive(Default)]
struct Vm {
    place: Arc<FakePlace>,
    store: Arc<FakeStore>,
    rooms: Arc<FakeRooms>,
    mmu: Arc<FakeMmu>,
    incidents: Arc<Log>,
}

#[derive(Default)]
struct Log {
    failed: Mutex<Vec<PageNo>>,
    poisoned: Mutex<Vec<PageNo>>,
    foreign: Mutex<Vec<PageNo>>,
}

impl Incidents for Log {
    fn foreign_page(&self, page: PageNo) {
        self.foreign.lock().unwrap().push(page);
    }
    fn poisoned(&self, page: PageNo, _why: &StoreError) {
        self.poisoned.lock().unwrap().push(page);
    }
    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        panic!("{page}: {why}");
    }
    fn fill_failed(&self, page: PageNo, _why: &dyn std::error::Error) {
        self.failed.lock().unwrap().push(page);
    }
}

/// Page `n` is stored as content `n + 1`, each of its bytes `n + 1`.
fn setting() -> (Vm, Arc<AddressSpace>) {
    let vm = Vm::default();
    let space = space_of(&vm, Arc::clone(&vm.store) as _);
    (vm, space)
}

fn space_of(vm: &Vm, store: Arc<dyn ContentStore>) -> Arc<AddressSpace> {
    let parts = MemoryParts {
        store,
        admission: Arc::clone(&vm.rooms) as _,
        incidents: Arc::clone(&vm.incidents) as _,
        neighbours_max: 16,
        ..fake::parts(SECTION_PAGES, Arc::clone(&vm.place) as _)
    };
    let space = fake::space(parts, DPU, Arc::clone(&vm.mmu) as _);
    let all = RegionRequest::of_bytes(SECTION_PAGES * PAGE_BYTES);
    let region = space.alloc(&all).unwrap();
    for page in region.pages().iter() {
        vm.store.keep_as(content(page.0), byte_of(page.0));
        vm.store.put_far(content(page.0));
        set(&space, page.0, PageState::Stored(content(page.0)));
    }
    // The allocation has woken every page.
    vm.place.begin_anew();
    space
}

fn content(page: u64) -> Content {
    Content::at(page + 1).unwrap()
}

fn byte_of(page: u64) -> u8 {
    (page + 1).to_le_bytes()[0]
}

fn memory(space: &AddressSpace) -> &Arc<PagedMemory> {
    space.memory().unwrap()
}

fn set(space: &AddressSpace, page: u64, state: PageState) {
    let word = PageWord::new(state);
    memory(space).table().set_initial(PageNo(page), word);
}

fn state(space: &AddressSpace, page: u64) -> PageState {
    memory(space).table().word(PageNo(page)).state()
}

/// The content of `page` is at hand.
fn put_near(vm: &Vm, space: &AddressSpace, page: u64) {
    let near = Content::at(10_000 + page).unwrap();
    vm.store.keep_as(near, byte_of(page));
    set(space, page, PageState::Stored(near));
}

/// Answers to one fault.
#[derive(Clone, Default)]
struct Answers(Arc<Mutex<Vec<FaultOutcome>>>);

impl Answers {
    fn all(&self) -> Vec<FaultOutcome> {
        self.0.lock().unwrap().clone()
    }
}

fn cause(device: DeviceId, pages: PageRange) -> Cause<'static> {
    Cause::Fault(Fault {
        device,
        pages,
        access: Access::Write,
    })
}

/// A device's fault, whose reply may come later.
fn ask(space: &AddressSpace, pages: PageRange) -> Answers {
    let answers = Answers::default();
    let told = answers.clone();
    let reply = Box::new(move |outcome| told.0.lock().unwrap().push(outcome));
    let over = space.fault(&cause(DPU, pages), Wait::Reply(reply));
    assert_eq!(over, None);
    answers
}

fn fault_of_vcpu(space: &AddressSpace, page: u64) -> FaultOutcome {
    let cause = cause(DeviceId::VCPUS, PageNo(page).single());
    let served = space.fault(&cause, Wait::Here).unwrap();
    assert_eq!(served.installed, 0, "nothing is there yet");
    served.outcome
}

fn unreadable(page: u64) -> StoreError {
    StoreError::Unreadable {
        page: PageNo(page),
        source: std::io::ErrorKind::ConnectionReset.into(),
    }
}

fn counts(space: &AddressSpace) -> [u64; 3] {
    let counters = memory(space).counters();
    let all = [
        &counters.filled_pages,
        &counters.slowly_filled_pages,
        &counters.failed_loads,
    ];
    all.map(|counter| counter.load(Relaxed))
}

#[test]
fn fault_on_far_content_is_answered_when_its_load_has_ended_and_nobody_waits_in_the_call() {
    let (vm, space) = setting();
    let answers = ask(&space, PageNo(3).single());
    assert_eq!((answers.all(), vm.place.has(PageNo(3))), (vec![], false));
    assert_eq!(state(&space, 3), PageState::Filling(content(3)));
    assert_eq!(vm.store.loading(), [PageNo(3)]);
    assert_eq!(memory(&space).loading_pages(), 1);
    vm.store.deliver(PageNo(3));
    assert_eq!(answers.all(), [FaultOutcome::Present]);
    assert_eq!(vm.place.first_byte(PageNo(3)), Some(byte_of(3)));
    assert_eq!(state(&space, 3), PageState::Present);
    assert!(vm.mmu.has(PageNo(3)));
    assert_eq!(vm.store.freed(), [content(3)]);
    assert_eq!(memory(&space).loading_pages(), 0);
    assert_eq!(counts(&space), [1, 1, 0]);
    assert_eq!(vm.rooms.taken(), 1);
    assert_eq!(vm.rooms.refilled(), [(SECTION, 1)]);
}

#[test]
fn reader_begins_the_load_of_a_vcpus_page_and_waits_for_nothing() {
    let (vm, space) = setting();
    let cause = cause(DeviceId::VCPUS, PageNo(4).single());
    assert_eq!(space.fault(&cause, Wait::Never), None, "it declines");
    assert!(vm.store.loading().is_empty());
    for _ in 0..2 {
        // The second joins the first.
        let served = space.fault(&cause, Wait::Begin).unwrap();
        assert_eq!(
            (served.outcome, served.installed),
            (FaultOutcome::Present, 0)
        );
    }
    assert_eq!(vm.store.loading(), [PageNo(4)]);
    vm.store.deliver(PageNo(4));
    assert_eq!(state(&space, 4), PageState::Present);
    assert!(vm.place.woken().contains(&PageNo(4)));
    assert_eq!(vm.rooms.taken(), 1);
}

#[test]
fn who_asks_is_told_once_a_load_under_way_has_ended_and_at_once_where_there_is_none() {
    let (vm, space) = setting();
    let memory = space.memory().unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let ask = |page: u64| {
        let told = Arc::clone(&told);
        let tell = move |outcome| told.lock().unwrap().push((page, outcome));
        memory.tell_filled(PageNo(page), Box::new(tell));
    };
    for page in [4, 5] {
        assert!(!memory.is_being_loaded(PageNo(page)));
        assert_eq!(fault_of_vcpu(&space, page), FaultOutcome::Present);
        assert!(memory.is_being_loaded(PageNo(page)), "it was only begun");
        ask(page);
    }
    assert!(told.lock().unwrap().is_empty());
    vm.store.deliver(PageNo(4));
    vm.store.fail(PageNo(5), unreadable(5));
    ask(4);
    ask(u64::MAX / 4096);
    let expected = [
        (4, FaultOutcome::Present),
        (5, FaultOutcome::Lost),
        (4, FaultOutcome::Present),
        (u64::MAX / 4096, FaultOutcome::OutOfRange),
    ];
    assert_eq!(*told.lock().unwrap(), expected);
    assert!(!memory.is_being_loaded(PageNo(4)));
}

#[test]
fn vcpu_is_woken_by_the_install_or_else_faults_again_and_a_new_load_begins() {
    let (vm, space) = setting();
    assert_eq!(fault_of_vcpu(&space, 5), FaultOutcome::Present);
    vm.store.fail(PageNo(5), unreadable(5));
    assert_eq!(state(&space, 5), PageState::Stored(content(5)));
    assert!(vm.place.woken().contains(&PageNo(5)));
    assert_eq!(*vm.incidents.failed.lock().unwrap(), [PageNo(5)]);
    assert!(vm.store.loading().is_empty());
    assert_eq!(fault_of_vcpu(&space, 5), FaultOutcome::Present);
    vm.store.deliver(PageNo(5));
    assert_eq!(vm.place.first_byte(PageNo(5)), Some(byte_of(5)));
    assert_eq!(counts(&space), [1, 1, 1]);
}

#[test]
fn without_waiting_nothing_is_claimed_if_a_page_is_far() {
    let (vm, space) = setting();
    put_near(&vm, &space, 7);
    let pages = PageNo(7).run(2);
    for device in [DPU, DeviceId::VCPUS] {
        assert_eq!(space.fault(&cause(device, pages), Wait::Never), None);
    }
    assert_eq!((vm.place.present_pages(), vm.rooms.taken()), (0, 0));
    assert!(vm.store.loading().is_empty());
}

#[test]
fn near_pages_of_a_fault_are_filled_at_once_and_far_ones_in_any_order() {
    let (vm, space) = setting();
    for near in [10, 14] {
        put_near(&vm, &space, near);
    }
    set(&space, 12, PageState::Stored(Content::ZERO));
    let answers = ask(&space, PageNo(10).run(7));
    let at_once = [10, 12, 14].map(PageNo);
    assert_eq!(vm.place.present(), at_once);
    let far = [11, 13, 15, 16].map(PageNo);
    assert_eq!(vm.store.loading(), far);
    for page in far.into_iter().rev() {
        assert_eq!(answers.all(), []);
        vm.store.deliver(page);
    }
    assert_eq!(answers.all(), [FaultOutcome::Present]);
    for page in [10, 11, 13, 14, 15, 16] {
        assert_eq!(vm.place.first_byte(PageNo(page)), Some(byte_of(page)));
    }
    assert_eq!(vm.rooms.taken(), 7);
    assert_eq!(counts(&space), [7, 4, 0]);
}

#[test]
fn one_load_that_fails_is_what_a_fault_of_many_pages_is_told_once_all_have_ended() {
    let (vm, space) = setting();
    let answers = ask(&space, PageNo(0).run(3));
    vm.store.fail(PageNo(1), unreadable(1));
    vm.store.deliver(PageNo(0));
    assert_eq!(answers.all(), []);
    vm.store.deliver(PageNo(2));
    assert_eq!(answers.all(), [FaultOutcome::Lost]);
}

#[test]
fn later_faults_join_the_load_and_none_begins_another() {
    let (vm, space) = setting();
    let first = ask(&space, PageNo(3).single());
    let second = ask(&space, PageNo(2).run(3));
    assert_eq!(fault_of_vcpu(&space, 3), FaultOutcome::Present);
    let again = cause(DPU, PageNo(3).single());
    assert_eq!(space.fault(&again, Wait::Never), None);
    assert_eq!(vm.store.loading(), [3, 2, 4].map(PageNo));
    vm.store.deliver(PageNo(3));
    assert_eq!(
        (first.all(), second.all()),
        (vec![FaultOutcome::Present], vec![])
    );
    vm.store.deliver(PageNo(2));
    vm.store.deliver(PageNo(4));
    assert_eq!(second.all(), [FaultOutcome::Present]);
    let joined = memory(&space).counters().joined_faults.load(Relaxed);
    assert_eq!(joined, 2);
}

#[test]
fn readahead_and_swap_in_pass_over_far_pages() {
    let (vm, space) = setting();
    let near = [20, 22, 23, 26];
    for page in near {
        put_near(&vm, &space, page);
    }
    let next = Cause::Readahead(Readahead::Next(PageNo(20).run(4)));
    let served = space.fault(&next, Wait::Here).unwrap();
    assert_eq!(served.installed, 0b1101);
    let section = Cause::Readahead(Readahead::SwapIn(PageNo(24).run(8)));
    let served = space.fault(&section, Wait::Never).unwrap();
    assert_eq!(served.installed, 0b100);
    assert_eq!(vm.place.present(), near.map(PageNo));
    assert!(vm.store.loading().is_empty());
    assert_eq!(vm.rooms.taken(), 4);
}

#[test]
fn load_that_the_store_drops_ends_its_fill() {
    let (vm, space) = setting();
    let answers = ask(&space, PageNo(6).single());
    let (_, done) = vm.store.take_load(PageNo(6));
    drop(done);
    assert_eq!(answers.all(), [FaultOutcome::Lost]);
    assert_eq!(state(&space, 6), PageState::Stored(content(6)));
    assert!(vm.place.woken().contains(&PageNo(6)));
    assert_eq!(counts(&space), [0, 0, 1]);
    let answers = ask(&space, PageNo(6).single());
    vm.store.deliver(PageNo(6));
    assert_eq!(answers.all(), [FaultOutcome::Present]);
}

#[test]
fn damaged_content_poisons_its_page() {
    let (vm, space) = setting();
    let answers = ask(&space, PageNo(6).single());
    let page = PageNo(6);
    vm.store
        .fail(page, StoreError::Damaged { page, why: "tag" });
    assert_eq!(answers.all(), [FaultOutcome::Lost]);
    assert_eq!(state(&space, 6), PageState::Poisoned);
    assert_eq!(*vm.incidents.poisoned.lock().unwrap(), [page]);
    let poisoned = memory(&space).counters().poisoned_pages.load(Relaxed);
    assert_eq!(poisoned, 1);
    assert!(vm.store.freed().is_empty());
}

fn overwrite(space: &AddressSpace, page: u64) -> Served {
    let fault = Fault {
        device: DPU,
        pages: PageNo(page).single(),
        access: Access::Write,
    };
    let overwrite = Overwrite {
        fault,
        content: &[0xaa; 4096],
        still_wanted: &|| true,
    };
    let cause = Cause::Overwrite(overwrite);
    space.fault(&cause, Wait::Here).unwrap()
}

#[test]
fn far_page_that_is_written_whole_is_not_loaded() {
    let (vm, space) = setting();
    assert_eq!(overwrite(&space, 9).installed, 1);
    assert_eq!(vm.place.first_byte(PageNo(9)), Some(0xaa));
    assert!(vm.store.loading().is_empty());
    assert_eq!(vm.store.freed(), [content(9)]);
}

#[test]
fn page_that_is_written_whole_while_it_is_loaded_is_left_to_the_device_which_joins() {
    let (vm, space) = setting();
    assert_eq!(fault_of_vcpu(&space, 9), FaultOutcome::Present);
    assert_eq!(overwrite(&space, 9), Served::nothing(FaultOutcome::Present));
    let answers = ask(&space, PageNo(9).single());
    vm.store.deliver(PageNo(9));
    assert_eq!(answers.all(), [FaultOutcome::Present]);
    assert_eq!(vm.place.first_byte(PageNo(9)), Some(byte_of(9)));
    assert!(vm.mmu.has(PageNo(9)), "it writes its bytes itself");
    assert_eq!((vm.store.freed(), vm.rooms.taken()), (vec![content(9)], 1));
}

#[test]
fn removal_comes_again_after_the_loads_of_its_pages_which_install_nothing() {
    let (vm, space) = setting();
    let all = PageNo(0).run(SECTION_PAGES);
    let answers = ask(&space, PageNo(3).run(2));
    let held = memory(&space).deallocate(all);
    assert!(
        matches!(held, Err(GrowthError::Loading { section, taken_pages: 0, left_pages: 512 }) if section == SECTION),
        "{held:?}"
    );
    assert_eq!(state(&space, 3), PageState::Filling(content(3)));
    assert_eq!(
        ask(&space, PageNo(3).single()).all(),
        [FaultOutcome::OutOfRange]
    );
    // Its memory may be unmapped by now.
    vm.store.deliver(PageNo(3));
    assert_eq!(state(&space, 3), PageState::Stored(content(3)));
    assert!(memory(&space).deallocate(all).is_err());
    vm.store.fail(PageNo(4), unreadable(4));
    assert_eq!(answers.all(), [FaultOutcome::OutOfRange]);
    assert_eq!(vm.place.present_pages(), 0);
    assert!(vm.place.woken().is_empty(), "nobody there may be waked");
    memory(&space).deallocate(all).unwrap();
    assert_eq!(vm.store.freed().len() as u64, SECTION_PAGES);
    assert!(vm.incidents.failed.lock().unwrap().is_empty());
    assert_eq!(counts(&space), [0; 3]);
}

#[test]
fn load_does_nothing_to_a_page_that_is_not_claimed_for_it() {
    let (vm, space) = setting();
    let others = [
        PageState::Stored(content(3)),
        PageState::Filling(content(4)),
        PageState::Poisoned,
    ];
    for other in others {
        set(&space, 3, PageState::Stored(content(3)));
        assert_eq!(fault_of_vcpu(&space, 3), FaultOutcome::Present);
        set(&space, 3, other);
        let (_, done) = vm.store.take_load(PageNo(3));
        done.complete(Ok(&[0x55; 4096]));
        assert_eq!(state(&space, 3), other);
    }
    assert_eq!(vm.place.present_pages(), 0);
    assert!(vm.store.freed().is_empty());
}

#[test]
fn install_that_the_kernel_refuses_leaves_the_page_stored_and_wakes_who_waits() {
    let (vm, space) = setting();
    let answers = ask(&space, PageNo(3).single());
    vm.place.refuse_installs_after(0);
    vm.store.deliver(PageNo(3));
    assert_eq!(answers.all(), [FaultOutcome::Lost]);
    assert_eq!(state(&space, 3), PageState::Stored(content(3)));
    assert!(vm.place.woken().contains(&PageNo(3)));
    vm.place.refuse_no_installs();
    let answers = ask(&space, PageNo(3).single());
    vm.place.put(PageNo(3), 0x77);
    vm.store.deliver(PageNo(3));
    assert_eq!(answers.all(), [FaultOutcome::Lost]);
    assert_eq!(*vm.incidents.foreign.lock().unwrap(), [PageNo(3)]);
    assert!(vm.store.freed().is_empty());
}

#[test]
fn vcpu_tries_again_if_the_kernel_neither_installs_its_page_nor_has_it() {
    let (vm, space) = setting();
    assert_eq!(fault_of_vcpu(&space, 3), FaultOutcome::Present);
    vm.place.jam(PageNo(3));
    vm.store.deliver(PageNo(3));
    assert_eq!(state(&space, 3), PageState::Stored(content(3)));
    assert!(vm.place.woken().contains(&PageNo(3)));
    assert!(vm.store.freed().is_empty());
}

#[test]
fn load_that_ends_after_the_vm_tells_that_it_is_gone() {
    let (vm, space) = setting();
    let answers = ask(&space, PageNo(3).single());
    vm.place.end();
    vm.store.deliver(PageNo(3));
    assert_eq!(answers.all(), [FaultOutcome::Gone]);
    assert_eq!(state(&space, 3), PageState::Stored(content(3)));
}

#[test]
fn load_does_not_keep_the_memory_and_finds_nothing_to_do_when_it_is_gone() {
    let (vm, space) = setting();
    let answers = ask(&space, PageNo(3).single());
    let weak = Arc::downgrade(memory(&space));
    drop(space);
    assert!(weak.upgrade().is_none());
    assert_eq!(answers.all(), [FaultOutcome::Gone]);
    vm.store.deliver(PageNo(3));
    assert_eq!((vm.place.present_pages(), answers.all().len()), (0, 1));
    assert!(vm.store.freed().is_empty());
}

#[test]
fn nobody_waits_for_a_load_once_waiting_has_ended() {
    let (vm, space) = setting();
    let answers = ask(&space, PageNo(3).run(2));
    memory(&space).end_waiting();
    assert_eq!(answers.all(), [FaultOutcome::Gone]);
    for pages in [PageNo(3).single(), PageNo(8).single()] {
        assert_eq!(ask(&space, pages).all(), [FaultOutcome::Gone]);
    }
    for page in vm.store.loading() {
        vm.store.deliver(page);
    }
    assert_eq!(answers.all().len(), 1);
    assert_eq!(state(&space, 3), PageState::Present);
}

#[test]
fn pages_beside_one_that_is_loaded_are_evicted_and_it_comes_in_the_middle_of_the_round() {
    let (vm, space) = setting();
    for page in [0, 2] {
        vm.place.put(PageNo(page), 0x33);
        set(&space, page, PageState::Present);
    }
    let answers = ask(&space, PageNo(1).single());
    let wanted = PageSet::of_range(SECTION, PageNo(0).run(3));
    let mut round = memory(&space).begin_eviction(SECTION, &wanted).unwrap();
    assert_eq!(round.candidates().len(), 2);
    let [one, two] = [1, 2].map(|n| Content::at(20_000 + n).unwrap());
    assert_eq!(round.commit(&[(PageNo(0), one)]).evicted.len(), 1);
    vm.store.deliver(PageNo(1));
    assert_eq!(answers.all(), [FaultOutcome::Present]);
    assert!(!round.candidates().contains(PageNo(1)));
    assert_eq!(round.commit(&[(PageNo(2), two)]).evicted.len(), 1);
    drop(round);
    assert_eq!(vm.place.present(), [PageNo(1)]);
}

/// A store that has only the blocking way to load, for content that is not at hand.
struct Blocking(Arc<FakeStore>);

impl ContentStore for Blocking {
    fn load(
        &self,
        _page: PageNo,
        content: Content,
        into: &mut [u8; 4096],
    ) -> Result<(), StoreError> {
        into.fill(content.bits().to_le_bytes()[0]);
        Ok(())
    }
    fn free(&self, content: Content) {
        self.0.free(content);
    }
    fn is_at_hand(&self, _content: Content) -> bool {
        false
    }
}

#[test]
fn store_without_a_way_of_its_own_loads_in_the_call() {
    let vm = Vm::default();
    let space = space_of(&vm, Arc::new(Blocking(Arc::clone(&vm.store))));
    let answers = ask(&space, PageNo(3).run(20));
    assert_eq!(answers.all(), [FaultOutcome::Present]);
    assert_eq!(vm.place.first_byte(PageNo(22)), Some(byte_of(22)));
    assert_eq!((vm.store.freed().len(), vm.rooms.taken()), (20, 20));
}

#[test]
fn load_is_ended_once_by_completion_or_by_dropping() {
    let ends: Arc<Mutex<Vec<String>>> = Arc::default();
    let duty = || {
        let ends = Arc::clone(&ends);
        LoadDone::new(PageNo(1), move |loaded| {
            let end = loaded.map_or_else(|error| error.to_string(), |bytes| bytes[0].to_string());
            ends.lock().unwrap().push(end);
        })
    };
    duty().complete(Ok(&[9; 4096]));
    drop(duty());
    let given_up = StoreError::GivenUp { page: PageNo(1) }.to_string();
    assert_eq!(*ends.lock().unwrap(), ["9".to_owned(), given_up]);
}

fn relocate(space: &AddressSpace, moves: &[Move]) -> Relocated {
    let section = moves[0].page.section();
    let memory = memory(space);
    memory.relocate(memory.begin_relocation(section), moves)
}

fn copy(vm: &Vm, page: u64) -> Content {
    let to = Content::at(30_000 + page).unwrap();
    vm.store.keep_as(to, byte_of(page));
    to
}

#[test]
fn relocation_moves_what_is_still_stored_as_it_was_copied_and_hands_back_the_rest() {
    let (vm, space) = setting();
    let moves: Vec<Move> = (0..6)
        .map(|page| Move {
            page: PageNo(page),
            from: content(page),
            to: copy(&vm, page),
        })
        .collect();
    // 0 and 5 stay as they were. The others: being loaded, present, evicted anew, lost.
    let answers = ask(&space, PageNo(1).single());
    assert_eq!(overwrite(&space, 2).installed, 1);
    let anew = Content::at(40_000).unwrap();
    set(&space, 3, PageState::Stored(anew));
    set(&space, 4, PageState::Poisoned);
    let done = relocate(&space, &moves);
    let moved: Vec<PageNo> = done.moved.pages(SECTION).collect();
    assert_eq!(moved, [0, 5].map(PageNo));
    assert_eq!(done.replaced, [0, 5].map(content));
    let unused: Vec<Content> = (1..5).map(|page| moves[page].to).collect();
    assert_eq!(done.unused, unused);
    for free in done.replaced.into_iter().chain(done.unused) {
        vm.store.free(free);
    }
    assert_eq!(state(&space, 0), PageState::Stored(moves[0].to));
    assert_eq!(state(&space, 3), PageState::Stored(anew));
    assert_eq!(memory(&space).table().stored_pages(SECTION), 512 - 3);
    vm.store.deliver(PageNo(1));
    assert_eq!(answers.all(), [FaultOutcome::Present]);
    // The copy is at hand, so it is filled in the call.
    let served = space.fault(&cause(DPU, PageNo(5).single()), Wait::Never);
    assert_eq!(served.unwrap().installed, 1);
    assert_eq!(vm.place.first_byte(PageNo(5)), Some(byte_of(5)));
    let relocated = memory(&space).counters().relocated_pages.load(Relaxed);
    assert_eq!(relocated, 2);
}

#[test]
fn nothing_is_relocated_where_no_page_is_or_is_to_stay() {
    let (vm, space) = setting();
    let answers = ask(&space, PageNo(3).single());
    let all = PageNo(0).run(SECTION_PAGES);
    assert!(memory(&space).deallocate(all).is_err());
    let to = copy(&vm, 0);
    let leaving = Move {
        page: PageNo(0),
        from: content(0),
        to,
    };
    assert_eq!(relocate(&space, &[leaving]).unused, [to]);
    vm.store.deliver(PageNo(3));
    assert_eq!(answers.all(), [FaultOutcome::OutOfRange]);
    memory(&space).deallocate(all).unwrap();
    let removed = relocate(&space, &[leaving]);
    assert_eq!((removed.unused, removed.moved.len()), (vec![to], 0));
    let nowhere = Move {
        page: PageNo(SECTION_PAGES * 1000),
        ..leaving
    };
    assert_eq!(relocate(&space, &[nowhere]).unused, [to]);
}

#[test]
fn page_that_is_evicted_anew_to_the_same_place_keeps_its_new_content() {
    let (vm, space) = setting();
    put_near(&vm, &space, 0);
    let PageState::Stored(from) = state(&space, 0) else {
        panic!("it is stored");
    };
    let begun = memory(&space).begin_relocation(SECTION);
    let to = copy(&vm, 0);
    let one = Move {
        page: PageNo(0),
        from,
        to,
    };
    assert_eq!(
        ask(&space, PageNo(0).single()).all(),
        [FaultOutcome::Present]
    );
    let wanted = PageSet::of_range(SECTION, PageNo(0).single());
    let mut round = memory(&space).begin_eviction(SECTION, &wanted).unwrap();
    vm.store.keep_as(from, 0x99);
    assert_eq!(round.commit(&[(PageNo(0), from)]).evicted.len(), 1);
    drop(round);
    let done = memory(&space).relocate(begun, &[one]);
    assert_eq!((done.unused, done.replaced), (vec![to], vec![]));
    assert_eq!(state(&space, 0), PageState::Stored(from));
    let done = relocate(&space, &[one]);
    assert_eq!((done.unused, done.replaced), (vec![], vec![from]));
}

#[test]
fn content_of_zeros_belongs_to_nobody_and_is_not_handed_back() {
    let (vm, space) = setting();
    let to_zeros = |page| Move {
        page: PageNo(page),
        from: content(page),
        to: Content::ZERO,
    };
    set(&space, 1, PageState::Present);
    let done = relocate(&space, &[to_zeros(0), to_zeros(1)]);
    assert_eq!(done.replaced, [content(0)]);
    assert!(done.unused.is_empty() && vm.store.freed().is_empty());
    assert_eq!(state(&space, 0), PageState::Stored(Content::ZERO));
}

/// What a random run knows of its few pages.
struct Run {
    vm: Vm,
    space: Arc<AddressSpace>,
    random: SplitMix64,
    asked: Vec<Answers>,
    next_content: u64,
    /// The byte that each page holds, wherever it is.
    bytes: BTreeMap<u64, u8>,
}

/// Pages of a random run.
const FEW: u64 = 6;

impl Run {
    fn new(seed: u64) -> Self {
        let (vm, space) = setting();
        let bytes = (0..FEW).map(|page| (page, byte_of(page))).collect();
        Self {
            vm,
            space,
            random: SplitMix64::new(seed),
            asked: Vec::new(),
            next_content: 50_000,
            bytes,
        }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    /// New content with the byte of `page`, near or far.
    fn store(&mut self, page: u64) -> Content {
        self.next_content += 1;
        let content = Content::at(self.next_content).unwrap();
        self.vm.store.keep_as(content, self.bytes[&page]);
        if self.below(2) == 0 {
            self.vm.store.put_far(content);
        }
        content
    }

    fn evict(&mut self, page: u64) {
        let wanted = PageSet::of_range(SECTION, PageNo(page).single());
        let memory = Arc::clone(memory(&self.space));
        let Ok(mut round) = memory.begin_eviction(SECTION, &wanted) else {
            return;
        };
        let content = self.store(page);
        let done = round.commit(&[(PageNo(page), content)]);
        assert_eq!(done.evicted.len(), 1);
    }

    fn relocate(&mut self, page: u64) {
        let from = match state(&self.space, page) {
            PageState::Stored(content) | PageState::Filling(content) => content,
            _ => Content::at(self.next_content).unwrap(),
        };
        let to = self.store(page);
        let one = Move {
            page: PageNo(page),
            from,
            to,
        };
        let done = relocate(&self.space, &[one]);
        for content in done.replaced.into_iter().chain(done.unused) {
            self.vm.store.free(content);
        }
    }

    fn end_a_load(&mut self) {
        let loading = self.vm.store.loading();
        if loading.is_empty() {
            return;
        }
        let page = loading[to_usize(self.below(loading.len() as u64))];
        match self.below(4) {
            0 => self.vm.store.fail(page, unreadable(page.0)),
            1 => drop(self.vm.store.take_load(page)),
            _ => self.vm.store.deliver(page),
        }
    }

    fn step(&mut self) {
        let page = self.below(FEW);
        match self.below(8) {
            0 | 1 => {
                let pages = PageNo(page).run(1 + self.below(FEW - page));
                self.asked.push(ask(&self.space, pages));
            }
            2 => self.evict(page),
            3 => self.relocate(page),
            4 => {
                if overwrite(&self.space, page).installed == 1 {
                    self.bytes.insert(page, 0xaa);
                }
            }
            _ => self.end_a_load(),
        }
    }

    fn check(&self) {
        for (page, byte) in &self.bytes {
            let present = self.vm.place.first_byte(PageNo(*page));
            match state(&self.space, *page) {
                PageState::Present => assert_eq!(present, Some(*byte), "page {page}"),
                PageState::Stored(_) => assert_eq!(present, None, "page {page}"),
                PageState::Filling(_) => {
                    assert!(self.vm.store.loading().contains(&PageNo(*page)));
                }
                other => panic!("page {page} is {other:?}"),
            }
        }
        let loading = memory(&self.space).loading_pages();
        assert_eq!(loading, self.vm.store.loading().len() as u64);
    }

    /// All comes back, and everybody was answered once.
    fn end(self) {
        let last = ask(&self.space, PageNo(0).run(FEW));
        for page in self.vm.store.loading() {
            self.vm.store.deliver(page);
        }
        assert_eq!(last.all(), [FaultOutcome::Present]);
        self.check();
        assert_eq!(self.vm.place.present_pages(), FEW);
        for answers in &self.asked {
            assert_eq!(answers.all().len(), 1);
        }
        // What is left is the content of the pages that nobody has asked for.
        let left = self.vm.store.kept() as u64;
        assert_eq!(left, SECTION_PAGES - FEW);
    }
}

#[test]
fn no_order_of_loads_loses_a_byte_an_answer_or_a_content() {
    for seed in 0..300 {
        let mut run = Run::new(seed);
        for _ in 0..60 {
            run.step();
            run.check();
        }
        run.end();
    }
}
