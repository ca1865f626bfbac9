// SPDX-License-Identifier: Apache-2.0
//! Overwrites, readahead and faults that must not wait, one thread at a time: a page is known by its
//! first byte.

use crate::{
    AddressSpace, Cause, Content, Fault, FaultOutcome, Incidents, MemoryParts, Overwrite,
    PageState, PageWord, PlaceError, Readahead, RegionRequest, Served, StoreError, Wait,
    fake::{self, FakeMmu, FakePlace, FakeRooms, FakeStore},
};
use pagetide_addr::{
    Access, DeviceId, OVERWRITE_PAGES_MAX, PAGE_BYTES, PageNo, PageRange, SECTION_PAGES, SectionNo,
};
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

const DPU: DeviceId = DeviceId(1);
const PAGES: u64 = 2 * SECTION_PAGES;
/// Most pages that a fault reads ahead.
const AHEAD_MAX: u32 = 4;
/// First byte of what the store holds, and of what the device has written to page `n`.
const OLD: u8 = 0xee;
const NEW: u8 = 1;

/// What surrounds the memory.
#[derive(Default)]
struct Vm {
    place: Arc<FakePlace>,
    store: Arc<FakeStore>,
    rooms: Arc<FakeRooms>,
    mmu: Arc<FakeMmu>,
    incidents: Arc<Log>,
}

/// Incidents that some of these tests bring about.
#[derive(Default)]
struct Log {
    foreign_pages: Mutex<Vec<PageNo>>,
    failures: AtomicU64,
}

impl Incidents for Log {
    fn foreign_page(&self, page: PageNo) {
        self.foreign_pages.lock().unwrap().push(page);
    }
    fn poisoned(&self, page: PageNo, why: &StoreError) {
        panic!("{page}: {why}");
    }
    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        panic!("{page}: {why}");
    }
    fn fill_failed(&self, _page: PageNo, _why: &dyn std::error::Error) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }
}

impl Vm {
    fn byte(&self, page: u64) -> Option<u8> {
        self.place.first_byte(PageNo(page))
    }

    fn failures(&self) -> u64 {
        self.incidents.failures.load(Ordering::Relaxed)
    }

    /// Rooms taken, pages present, and content loaded.
    fn counts(&self) -> [u64; 3] {
        let taken = self.rooms.taken().try_into().unwrap();
        [taken, self.place.present_pages(), self.store.loads()]
    }
}

/// Two sections, every page stored: page `n` as content `n + 1`.
fn setting() -> (Vm, Arc<AddressSpace>) {
    let vm = Vm::default();
    let parts = MemoryParts {
        store: Arc::clone(&vm.store) as _,
        admission: Arc::clone(&vm.rooms) as _,
        incidents: Arc::clone(&vm.incidents) as _,
        neighbours_max: AHEAD_MAX,
        ..fake::parts(PAGES, Arc::clone(&vm.place) as _)
    };
    let space = fake::space(parts, DPU, Arc::clone(&vm.mmu) as _);
    let all = RegionRequest::of_bytes(PAGES * PAGE_BYTES);
    let region = space.alloc(&all).unwrap();
    assert_eq!(region.pages(), PageNo(0).run(PAGES));
    let words = space.memory().unwrap().table();
    let stored = PageWord::new(PageState::Stored(Content::ZERO));
    for page in region.pages().iter() {
        assert_eq!(words.word(page), stored);
        vm.store.keep_as(content(page.0), OLD);
        set(&space, page.0, PageState::Stored(content(page.0)));
    }
    (vm, space)
}

fn content(page: u64) -> Content {
    Content::at(page + 1).unwrap()
}

fn set(space: &AddressSpace, page: u64, state: PageState) {
    let table = space.memory().unwrap().table();
    table.set_initial(PageNo(page), PageWord::new(state));
}

fn state(space: &AddressSpace, page: u64) -> PageState {
    space.memory().unwrap().table().word(PageNo(page)).state()
}

fn make_present(vm: &Vm, space: &AddressSpace, page: u64, byte: u8) {
    vm.place.put(PageNo(page), byte);
    set(space, page, PageState::Present);
}

fn whole(first: u64, count: u64) -> (Fault, Vec<u8>) {
    let pages = PageRange::new(PageNo(first), PageNo(first + count));
    let fault = Fault {
        device: DPU,
        pages,
        access: Access::Write,
    };
    (fault, vec![NEW; pages.iter().count() * 4096])
}

fn request(
    space: &AddressSpace,
    fault: Fault,
    content: &[u8],
    still_wanted: &dyn Fn() -> bool,
    wait: Wait,
) -> Option<Served> {
    let overwrite = Overwrite {
        fault,
        content,
        still_wanted,
    };
    space.fault(&Cause::Overwrite(overwrite), wait)
}

fn overwrite(space: &AddressSpace, first: u64, count: u64) -> Served {
    let (fault, bytes) = whole(first, count);
    request(space, fault, &bytes, &|| true, Wait::Here).unwrap()
}

fn installed(bits: u64) -> Served {
    Served {
        outcome: FaultOutcome::Present,
        installed: bits,
    }
}

#[test]
fn absent_pages_get_the_bytes_written_and_their_stored_ones_are_dropped_unread() {
    let (vm, space) = setting();
    // Across a section's border, and longer than one fill.
    let first = SECTION_PAGES - 20;
    assert_eq!(overwrite(&space, first, 40), installed((1 << 40) - 1));
    for page in first..first + 40 {
        assert_eq!(vm.byte(page), Some(NEW));
        assert_eq!(state(&space, page), PageState::Present);
        assert!(vm.mmu.has(PageNo(page)));
    }
    let freed: Vec<_> = (first..first + 40).map(content).collect();
    assert_eq!((vm.store.loads(), vm.rooms.taken()), (0, 40));
    assert_eq!(vm.store.freed(), freed);
    let counters = space.memory().unwrap().counters();
    assert_eq!(counters.overwritten_pages.load(Ordering::Relaxed), 40);
    assert_eq!(counters.filled_pages.load(Ordering::Relaxed), 0);
}

#[test]
fn present_page_stays_as_it_is_and_is_granted_to_the_device_that_must_write_it() {
    let (vm, space) = setting();
    make_present(&vm, &space, 3, OLD);
    assert_eq!(overwrite(&space, 2, 3), installed(0b101));
    assert_eq!(vm.byte(3), Some(OLD));
    assert!(vm.mmu.has(PageNo(3)));
    assert_eq!(vm.store.freed(), [content(2), content(4)]);
    assert_eq!(vm.rooms.taken(), 2);
}

#[test]
fn page_that_somebody_is_filling_is_left_to_the_device() {
    let (vm, space) = setting();
    set(&space, 8, PageState::Filling(content(8)));
    assert_eq!(overwrite(&space, 7, 3), installed(0b101));
    assert_eq!(vm.byte(8), None);
    assert_eq!(state(&space, 8), PageState::Filling(content(8)));
}

#[test]
fn hole_that_the_guest_left_begins_with_the_bytes_written() {
    let (vm, space) = setting();
    set(&space, 5, PageState::Present);
    assert_eq!(overwrite(&space, 5, 1), installed(1));
    assert_eq!(
        (vm.byte(5), state(&space, 5)),
        (Some(NEW), PageState::Present)
    );
    assert!(vm.store.freed().is_empty());
    assert_eq!(vm.rooms.taken(), 0);
}

#[test]
fn page_whose_content_is_lost_is_refused_and_what_was_installed_before_it_is_told() {
    let (vm, space) = setting();
    set(&space, 11, PageState::Poisoned);
    let done = overwrite(&space, 10, 3);
    let expected = Served {
        outcome: FaultOutcome::Lost,
        installed: 0b001,
    };
    assert_eq!(done, expected);
    assert_eq!((vm.byte(11), vm.byte(12)), (None, None));
    assert_eq!(state(&space, 12), PageState::Stored(content(12)));
    assert_eq!(vm.rooms.taken(), 1);
}

#[test]
fn install_that_fails_half_way_leaves_the_rest_stored_with_its_old_content() {
    let (vm, space) = setting();
    vm.place.refuse_installs_after(2);
    let done = overwrite(&space, 0, 4);
    let expected = Served {
        outcome: FaultOutcome::Lost,
        installed: 0b0011,
    };
    assert_eq!(done, expected);
    assert_eq!(vm.store.freed(), [content(0), content(1)]);
    assert!(vm.failures() > 0);
    assert_eq!(vm.rooms.taken(), 2);
    for page in 2..4 {
        assert_eq!(state(&space, page), PageState::Stored(content(page)));
    }
    vm.place.refuse_no_installs();
    assert_eq!(overwrite(&space, 0, 4), installed(0b1100));
}

#[test]
fn page_that_a_foreign_writer_made_present_keeps_its_stored_copy() {
    let (vm, space) = setting();
    vm.place.put(PageNo(6), OLD);
    let done = overwrite(&space, 6, 1);
    assert_eq!(done, Served::nothing(FaultOutcome::Lost));
    assert_eq!(state(&space, 6), PageState::Stored(content(6)));
    assert_eq!(*vm.incidents.foreign_pages.lock().unwrap(), [PageNo(6)]);
    assert!(vm.store.freed().is_empty());
}

#[test]
fn without_waiting_nothing_is_done_at_the_limit_or_while_the_section_is_owned() {
    let (vm, space) = setting();
    let (fault, bytes) = whole(SECTION_PAGES - 1, 2);
    vm.rooms.fill_up();
    assert_eq!(request(&space, fault, &bytes, &|| true, Wait::Never), None);
    vm.rooms.make_room();
    let table = space.memory().unwrap().table();
    let own = |number| table.made_section(SectionNo(number)).lock.write().unwrap();
    {
        let _first = own(0);
        assert_eq!(request(&space, fault, &bytes, &|| true, Wait::Never), None);
        assert_eq!(vm.counts(), [0; 3]);
    }
    {
        let _second = own(1);
        let done = request(&space, fault, &bytes, &|| true, Wait::Never);
        assert_eq!(done, Some(installed(0b01)), "the rest is the device's");
    }
    assert_eq!(vm.rooms.taken(), 1);
    let done = request(&space, fault, &bytes, &|| true, Wait::Never);
    assert_eq!(done, Some(installed(0b10)));
}

#[test]
fn what_is_no_sound_overwrite_is_refused() {
    let (vm, space) = setting();
    let out_of_range = Served::nothing(FaultOutcome::OutOfRange);
    assert_eq!(overwrite(&space, 0, OVERWRITE_PAGES_MAX + 1), out_of_range);
    assert_eq!(overwrite(&space, PAGES - 1, 2), out_of_range);
    let (fault, bytes) = whole(0, 2);
    assert_eq!(
        request(&space, fault, &bytes[1..], &|| true, Wait::Here).unwrap(),
        out_of_range
    );
    let all = overwrite(&space, 0, OVERWRITE_PAGES_MAX);
    assert_eq!(all, installed(u64::MAX));
    assert_eq!(vm.byte(OVERWRITE_PAGES_MAX), None);
}

#[test]
fn device_that_gives_up_while_room_is_made_replaces_nothing_that_is_stored_by_then() {
    let (vm, space) = setting();
    let (fault, bytes) = whole(4, 2);
    // Once there is room, the request has been begun anew, and the page evicted with new content.
    let still_wanted = || {
        set(&space, 4, PageState::Stored(content(900)));
        vm.rooms.taken() == 0
    };
    let gone = Served::nothing(FaultOutcome::Gone);
    assert_eq!(
        request(&space, fault, &bytes, &still_wanted, Wait::Here).unwrap(),
        gone
    );
    let at_once = request(&space, fault, &bytes, &still_wanted, Wait::Never);
    assert_eq!(at_once, Some(gone), "it is over");
    assert_eq!(state(&space, 4), PageState::Stored(content(900)));
    assert_eq!(state(&space, 5), PageState::Stored(content(5)));
    assert!(vm.place.present().is_empty() && vm.store.freed().is_empty());
    assert_eq!(vm.rooms.taken(), 0, "it was given back");
}

#[test]
fn device_that_gives_up_half_way_is_told_what_was_installed_and_no_more_is() {
    let (vm, space) = setting();
    let (fault, bytes) = whole(SECTION_PAGES - 1, 2);
    let still_wanted = || vm.place.present().is_empty();
    let expected = Served {
        outcome: FaultOutcome::Gone,
        installed: 0b01,
    };
    assert_eq!(
        request(&space, fault, &bytes, &still_wanted, Wait::Here).unwrap(),
        expected
    );
    let second = SECTION_PAGES;
    assert_eq!(state(&space, second), PageState::Stored(content(second)));
    assert_eq!(vm.rooms.taken(), 1);
}

#[test]
fn hole_is_not_filled_for_a_device_that_has_given_up() {
    let (vm, space) = setting();
    set(&space, 5, PageState::Present);
    let (fault, bytes) = whole(5, 1);
    let done = request(&space, fault, &bytes, &|| false, Wait::Here).unwrap();
    assert_eq!(done, Served::nothing(FaultOutcome::Gone));
    assert_eq!((vm.byte(5), state(&space, 5)), (None, PageState::Present));
}

/// A fault that must not wait.
fn fault_at_once(space: &AddressSpace, device: DeviceId, pages: PageRange) -> Option<Served> {
    let fault = Fault {
        device,
        pages,
        access: Access::Write,
    };
    space.fault(&Cause::Fault(fault), Wait::Never)
}

#[test]
fn fault_that_must_not_wait_does_nothing_without_room_or_while_the_section_is_owned() {
    let (vm, space) = setting();
    let pages = PageNo(4).run(3);
    vm.rooms.fill_up();
    assert_eq!(fault_at_once(&space, DPU, pages), None);
    vm.rooms.make_room();
    {
        let table = space.memory().unwrap().table();
        let _owned = table.made_section(SectionNo(0)).lock.write().unwrap();
        assert_eq!(fault_at_once(&space, DPU, pages), None);
    }
    assert_eq!(vm.counts(), [0; 3]);
    // Too long to be served while others wait behind it.
    assert_eq!(fault_at_once(&space, DPU, PageNo(0).run(65)), None);
    let most = fault_at_once(&space, DPU, PageNo(0).run(64));
    assert_eq!(most, Some(installed(u64::MAX)));
    assert_eq!(vm.counts(), [64; 3]);
}

#[test]
fn pages_that_the_daemon_brings_back_are_filled_without_being_a_fault_of_anybody() {
    let (vm, space) = setting();
    for device in [DeviceId::DAEMON, DPU, DeviceId::VCPUS] {
        let pages = PageNo(u64::from(device.0 % 8) * 4).run(4);
        assert_eq!(
            fault_at_once(&space, device, pages),
            Some(installed(0b1111))
        );
    }
    assert_eq!(vm.counts(), [12; 3]);
    assert_eq!(vm.rooms.faulted(), [DPU, DeviceId::VCPUS]);
}

#[test]
fn refills_are_told_by_section_without_zeros_and_without_what_was_overwritten() {
    let (vm, space) = setting();
    set(&space, 1, PageState::Stored(Content::ZERO));
    let filled = fault_at_once(&space, DPU, PageNo(0).run(4));
    assert_eq!(filled, Some(installed(0b1111)));
    assert_eq!(overwrite(&space, 8, 2), installed(0b11));
    set(&space, 12, PageState::Stored(Content::ZERO));
    assert!(fault_at_once(&space, DPU, PageNo(12).single()).is_some());
    assert_eq!(vm.rooms.refilled(), [(SectionNo(0), 3)]);
}

#[test]
fn fill_of_another_thread_is_joined_by_a_vcpu_and_sends_a_device_that_must_not_wait_away() {
    let (vm, space) = setting();
    set(&space, 8, PageState::Filling(content(8)));
    let pages = PageNo(7).run(3);
    assert_eq!(fault_at_once(&space, DPU, pages), None);
    // The page before it is there all the same, and only its room is taken.
    assert_eq!((vm.byte(7), vm.byte(9)), (Some(OLD), None));
    assert_eq!(vm.rooms.taken(), 1);
    let vcpu = fault_at_once(&space, DeviceId::VCPUS, pages);
    assert_eq!(vcpu, Some(installed(0b100)));
    let memory = space.memory().unwrap();
    assert!(memory.table().word(PageNo(8)).is_waited_for());
    let counters = memory.counters();
    assert_eq!(counters.joined_faults.load(Ordering::Relaxed), 1);
}

#[test]
fn readahead_passes_over_a_page_that_cannot_be_installed_and_nobody_is_told_of_a_failure() {
    let (vm, space) = setting();
    vm.place.jam(PageNo(4));
    let ahead = Cause::Readahead(Readahead::Next(PageNo(2).run(10)));
    let done = space.fault(&ahead, Wait::Never).unwrap();
    assert_eq!(done.outcome, FaultOutcome::Present);
    assert_eq!(state(&space, 4), PageState::Stored(content(4)));
    assert!(vm.place.has(PageNo(3)) && !vm.place.has(PageNo(4)));
    assert_eq!(vm.failures(), 0);
    let loads = vm.store.loads();
    assert!(loads < 4 * u64::from(AHEAD_MAX), "{loads}");
}

#[test]
fn readahead_fills_stored_pages_up_to_its_limit_and_leaves_all_others_alone() {
    let (vm, space) = setting();
    make_present(&vm, &space, 3, OLD);
    set(&space, 5, PageState::Filling(content(5)));
    let ahead = Cause::Readahead(Readahead::Next(PageNo(2).run(10)));
    assert_eq!(space.fault(&ahead, Wait::Never), Some(installed(0b11_0101)));
    assert_eq!(vm.rooms.taken(), AHEAD_MAX.into());
    assert!(!vm.mmu.has(PageNo(3)) && vm.mmu.has(PageNo(4)));
    assert_eq!(state(&space, 5), PageState::Filling(content(5)));
    assert_eq!(state(&space, 8), PageState::Stored(content(8)));
    let counters = space.memory().unwrap().counters();
    assert_eq!(counters.readahead_pages.load(Ordering::Relaxed), 4);
    assert_eq!(counters.present_faults.load(Ordering::Relaxed), 0);
}

#[test]
fn swap_in_fills_all_that_is_stored_whatever_a_fault_may_read_ahead_and_counts_as_no_refault() {
    let (vm, space) = setting();
    make_present(&vm, &space, 3, OLD);
    let section = Cause::Readahead(Readahead::SwapIn(PageNo(2).run(10)));
    assert_eq!(
        space.fault(&section, Wait::Never),
        Some(installed(0b11_1111_1101))
    );
    assert_eq!(vm.rooms.taken(), 9);
    assert_eq!(vm.rooms.refilled(), []);
    let counters = space.memory().unwrap().counters();
    let [ahead, read_ahead] = [&counters.swapped_in_ahead_pages, &counters.readahead_pages]
        .map(|counter| counter.load(Ordering::Relaxed));
    assert_eq!((ahead, read_ahead), (9, 0));
    vm.rooms.fill_up();
    let more = Cause::Readahead(Readahead::SwapIn(PageNo(12).run(4)));
    assert_eq!(space.fault(&more, Wait::Never), Some(installed(0)));
    vm.rooms.make_room();
    let ahead = Cause::Readahead(Readahead::Next(PageNo(12).run(2)));
    assert_eq!(space.fault(&ahead, Wait::Never), Some(installed(0b11)));
    assert_eq!(vm.rooms.refilled(), [(SectionNo(0), 2)]);
}

#[test]
fn readahead_never_waits_whatever_its_caller_may() {
    let (vm, space) = setting();
    let ahead = Cause::Readahead(Readahead::Around(PageNo(0).run(16)));
    vm.rooms.fill_up();
    assert_eq!(space.fault(&ahead, Wait::Here), Some(installed(0)));
    vm.rooms.make_room();
    {
        let table = space.memory().unwrap().table();
        let _owned = table.made_section(SectionNo(0)).lock.write().unwrap();
        assert_eq!(space.fault(&ahead, Wait::Here), Some(installed(0)));
    }
    assert_eq!(vm.counts(), [0; 3]);
    assert_eq!(space.fault(&ahead, Wait::Here), Some(installed(0b1111)));
}
