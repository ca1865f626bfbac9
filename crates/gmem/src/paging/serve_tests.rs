// SPDX-License-Identifier: Apache-2.0
//! Overwrites, readahead and faults that must not wait, one thread at a time: a page is known by its
//! first byte.

use crate::{
    Activation, AddressSpace, Admission, AllocPolicy, Backing, Cause, Content, ContentStore,
    Device, Fault, FaultOutcome, Incidents, Installed, MemoryParts, Mmu, MmuError, MmuLimits, Mode,
    Overwrite, PageState, PageTable, PageWord, PagedMemory, Place, PlaceError, Readahead,
    RegionRequest, Restrict, Restricted, Served, StoreError, TableId, VolatileWords, Wait,
};
use pagetide_addr::{
    Access, DeviceId, OVERWRITE_PAGES_MAX, PAGE_BYTES, PageNo, PageRange, SECTION_PAGES, SectionNo,
    Va,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, atomic::Ordering},
};

const DPU: DeviceId = DeviceId(1);
const PAGES: u64 = 2 * SECTION_PAGES;
/// Most pages that a fault reads ahead.
const AHEAD_MAX: u32 = 4;
/// First byte of what the store holds, and of what the device has written to page `n`.
const OLD: u8 = 0xee;
const NEW: u8 = 1;

#[derive(Default)]
struct Vm {
    present: BTreeMap<u64, u8>,
    granted: BTreeSet<u64>,
    freed: Vec<Content>,
    loads: u32,
    /// Rooms taken and not given back.
    room_taken: i64,
    is_full: bool,
    /// Told as filled from the store.
    refilled: Vec<(SectionNo, u64)>,
    /// Pages that may still be installed before the kernel refuses one.
    installs_left: Option<u32>,
    /// A page that the kernel neither installs nor reports as present.
    stuck: Option<u64>,
    foreign_pages: Vec<PageNo>,
    failures: u32,
}

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Vm>>);

impl Fake {
    fn with<R>(&self, act: impl FnOnce(&mut Vm) -> R) -> R {
        act(&mut self.0.lock().unwrap())
    }

    fn byte(&self, page: u64) -> Option<u8> {
        self.with(|vm| vm.present.get(&page).copied())
    }
}

fn refused(pages: PageRange) -> PlaceError {
    PlaceError::Kernel {
        operation: "install",
        start: pages.start,
        end: pages.end,
        source: std::io::ErrorKind::OutOfMemory.into(),
    }
}

impl Place for Fake {
    fn install(&self, page: PageNo, content: &[u8; 4096]) -> Result<Installed, PlaceError> {
        self.with(|vm| {
            if let Some(left) = &mut vm.installs_left {
                *left = left.checked_sub(1).ok_or(refused(page.single()))?;
            }
            if vm.present.contains_key(&page.0) || vm.stuck == Some(page.0) {
                return Ok(Installed::AlreadyThere);
            }
            vm.present.insert(page.0, content[0]);
            Ok(Installed::Installed)
        })
    }
    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        self.install(page, &[0; 4096])
    }
    fn install_run(&self, pages: PageRange, content: &[u8]) -> Result<u64, PlaceError> {
        let mut done = 0;
        for (page, bytes) in pages.iter().zip(content.chunks_exact(4096)) {
            match self.install(page, bytes.try_into().unwrap()) {
                Ok(Installed::Installed) => done += 1,
                Err(error) if done == 0 => return Err(error),
                Ok(Installed::AlreadyThere) | Err(_) => break,
            }
        }
        Ok(done)
    }
    fn read(&self, _pages: PageRange, _into: &mut [u8]) -> Result<(), PlaceError> {
        unreachable!("nothing is evicted here")
    }
    fn discard(&self, _pages: PageRange) -> Result<(), PlaceError> {
        unreachable!("nothing is evicted here")
    }
    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError> {
        Ok(self.byte(page.0).is_some())
    }
    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        let present = |page: &PageNo| self.byte(page.0).is_some();
        Ok(pages.iter().filter(present).map(PageNo::single).collect())
    }
    fn wake(&self, _pages: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }
    fn poison(&self, _page: PageNo) -> Result<(), PlaceError> {
        Ok(())
    }
}

impl ContentStore for Fake {
    fn load(&self, _: PageNo, _: Content, into: &mut [u8; 4096]) -> Result<(), StoreError> {
        self.with(|vm| vm.loads += 1);
        into.fill(OLD);
        Ok(())
    }
    fn free(&self, content: Content) {
        self.with(|vm| vm.freed.push(content));
    }
}

impl Admission for Fake {
    fn admit(&self, pages: u64) {
        self.with(|vm| vm.room_taken += i64::try_from(pages).unwrap());
    }
    fn try_admit(&self, pages: u64) -> bool {
        let is_full = self.with(|vm| vm.is_full);
        if !is_full {
            self.admit(pages);
        }
        !is_full
    }
    fn give_back(&self, pages: u64) {
        self.with(|vm| vm.room_taken -= i64::try_from(pages).unwrap());
    }
    fn count_in(&self, pages: u64) {
        self.admit(pages);
    }
    fn refilled(&self, section: SectionNo, pages: u64) {
        self.with(|vm| vm.refilled.push((section, pages)));
    }
}

impl Incidents for Fake {
    fn foreign_page(&self, page: PageNo) {
        self.with(|vm| vm.foreign_pages.push(page));
    }
    fn poisoned(&self, page: PageNo, why: &StoreError) {
        panic!("{page}: {why}");
    }
    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        panic!("{page}: {why}");
    }
    fn fill_failed(&self, _page: PageNo, _why: &dyn std::error::Error) {
        self.with(|vm| vm.failures += 1);
    }
}

impl Mmu for Fake {
    fn limits(&self) -> MmuLimits {
        MmuLimits::PAGED
    }
    fn restrict(
        &self,
        _table: TableId,
        _section: SectionNo,
        _pages: &pagetide_addr::PageSet,
        _to: Restrict,
    ) -> Result<Restricted, MmuError> {
        Ok(Restricted::Done)
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

/// Two sections, every page stored: page `n` as content `n + 1`.
fn setting() -> (Fake, Arc<AddressSpace>) {
    let fake = Fake::default();
    let stored = PageWord::new(PageState::Stored(Content::ZERO));
    let table = PageTable::growing(Box::new(VolatileWords::with_capacity(PAGES)));
    let memory = PagedMemory::new(MemoryParts {
        table,
        place: Arc::new(fake.clone()),
        store: Arc::new(fake.clone()),
        admission: Arc::new(fake.clone()),
        incidents: Arc::new(fake.clone()),
        neighbours_max: AHEAD_MAX,
    });
    let end = Va(PAGES * PAGE_BYTES);
    let space = AddressSpace::over(memory, Va(0), end, AllocPolicy::default()).unwrap();
    let device = Device::with_id(DPU, Arc::new(fake.clone()));
    (space.attach(&device, Mode::Coherent, Activation::Now)).unwrap();
    let region = space.alloc(&RegionRequest::of_bytes(end.0)).unwrap();
    assert_eq!(region.pages(), PageNo(0).run(PAGES));
    let words = space.memory().unwrap().table();
    for page in region.pages().iter() {
        assert_eq!(words.word(page), stored);
        set(&space, page.0, PageState::Stored(content(page.0)));
    }
    (fake, space)
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

fn make_present(fake: &Fake, space: &AddressSpace, page: u64, byte: u8) {
    fake.with(|vm| vm.present.insert(page, byte));
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
    let (fake, space) = setting();
    // Across a section's border, and longer than one fill.
    let first = SECTION_PAGES - 20;
    assert_eq!(overwrite(&space, first, 40), installed((1 << 40) - 1));
    for page in first..first + 40 {
        assert_eq!(fake.byte(page), Some(NEW));
        assert_eq!(state(&space, page), PageState::Present);
        assert!(fake.with(|vm| vm.granted.contains(&page)));
    }
    let freed: Vec<_> = (first..first + 40).map(content).collect();
    fake.with(|vm| {
        assert_eq!((vm.loads, vm.room_taken), (0, 40));
        assert_eq!(vm.freed, freed);
    });
    let counters = space.memory().unwrap().counters();
    assert_eq!(counters.overwritten_pages.load(Ordering::Relaxed), 40);
    assert_eq!(counters.filled_pages.load(Ordering::Relaxed), 0);
}

#[test]
fn present_page_stays_as_it_is_and_is_granted_to_the_device_that_must_write_it() {
    let (fake, space) = setting();
    make_present(&fake, &space, 3, OLD);
    assert_eq!(overwrite(&space, 2, 3), installed(0b101));
    assert_eq!(fake.byte(3), Some(OLD));
    fake.with(|vm| {
        assert!(vm.granted.contains(&3));
        assert_eq!(vm.freed, [content(2), content(4)]);
        assert_eq!(vm.room_taken, 2);
    });
}

#[test]
fn page_that_somebody_is_filling_is_left_to_the_device() {
    let (fake, space) = setting();
    set(&space, 8, PageState::Filling(content(8)));
    assert_eq!(overwrite(&space, 7, 3), installed(0b101));
    assert_eq!(fake.byte(8), None);
    assert_eq!(state(&space, 8), PageState::Filling(content(8)));
}

#[test]
fn hole_that_the_guest_left_begins_with_the_bytes_written() {
    let (fake, space) = setting();
    set(&space, 5, PageState::Present);
    assert_eq!(overwrite(&space, 5, 1), installed(1));
    assert_eq!(
        (fake.byte(5), state(&space, 5)),
        (Some(NEW), PageState::Present)
    );
    assert!(fake.with(|vm| vm.freed.is_empty() && vm.room_taken == 0));
}

#[test]
fn page_whose_content_is_lost_is_refused_and_what_was_installed_before_it_is_told() {
    let (fake, space) = setting();
    set(&space, 11, PageState::Poisoned);
    let done = overwrite(&space, 10, 3);
    let expected = Served {
        outcome: FaultOutcome::Lost,
        installed: 0b001,
    };
    assert_eq!(done, expected);
    assert_eq!((fake.byte(11), fake.byte(12)), (None, None));
    assert_eq!(state(&space, 12), PageState::Stored(content(12)));
    assert_eq!(fake.with(|vm| vm.room_taken), 1);
}

#[test]
fn install_that_fails_half_way_leaves_the_rest_stored_with_its_old_content() {
    let (fake, space) = setting();
    fake.with(|vm| vm.installs_left = Some(2));
    let done = overwrite(&space, 0, 4);
    let expected = Served {
        outcome: FaultOutcome::Lost,
        installed: 0b0011,
    };
    assert_eq!(done, expected);
    fake.with(|vm| {
        assert_eq!(vm.freed, [content(0), content(1)]);
        assert!(vm.failures > 0);
        assert_eq!(vm.room_taken, 2);
    });
    for page in 2..4 {
        assert_eq!(state(&space, page), PageState::Stored(content(page)));
    }
    fake.with(|vm| vm.installs_left = None);
    assert_eq!(overwrite(&space, 0, 4), installed(0b1100));
}

#[test]
fn page_that_a_foreign_writer_made_present_keeps_its_stored_copy() {
    let (fake, space) = setting();
    fake.with(|vm| vm.present.insert(6, OLD));
    let done = overwrite(&space, 6, 1);
    assert_eq!(done, Served::nothing(FaultOutcome::Lost));
    assert_eq!(state(&space, 6), PageState::Stored(content(6)));
    fake.with(|vm| {
        assert_eq!(vm.foreign_pages, [PageNo(6)]);
        assert!(vm.freed.is_empty());
    });
}

#[test]
fn without_waiting_nothing_is_done_at_the_limit_or_while_the_section_is_owned() {
    let (fake, space) = setting();
    let (fault, bytes) = whole(SECTION_PAGES - 1, 2);
    fake.with(|vm| vm.is_full = true);
    assert_eq!(request(&space, fault, &bytes, &|| true, Wait::Never), None);
    fake.with(|vm| vm.is_full = false);
    let table = space.memory().unwrap().table();
    let own = |number| table.made_section(SectionNo(number)).lock.write().unwrap();
    {
        let _first = own(0);
        assert_eq!(request(&space, fault, &bytes, &|| true, Wait::Never), None);
        assert_eq!(fake.with(|vm| (vm.room_taken, vm.present.len())), (0, 0));
    }
    {
        let _second = own(1);
        let done = request(&space, fault, &bytes, &|| true, Wait::Never);
        assert_eq!(done, Some(installed(0b01)), "the rest is the device's");
    }
    assert_eq!(fake.with(|vm| vm.room_taken), 1);
    let done = request(&space, fault, &bytes, &|| true, Wait::Never);
    assert_eq!(done, Some(installed(0b10)));
}

#[test]
fn what_is_no_sound_overwrite_is_refused() {
    let (fake, space) = setting();
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
    assert_eq!(fake.byte(OVERWRITE_PAGES_MAX), None);
}

#[test]
fn device_that_gives_up_while_room_is_made_replaces_nothing_that_is_stored_by_then() {
    let (fake, space) = setting();
    let (fault, bytes) = whole(4, 2);
    // Once there is room, the request has been begun anew, and the page evicted with new content.
    let still_wanted = || {
        set(&space, 4, PageState::Stored(content(900)));
        fake.with(|vm| vm.room_taken == 0)
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
    fake.with(|vm| {
        assert!(vm.present.is_empty() && vm.freed.is_empty());
        assert_eq!(vm.room_taken, 0, "it was given back");
    });
}

#[test]
fn device_that_gives_up_half_way_is_told_what_was_installed_and_no_more_is() {
    let (fake, space) = setting();
    let (fault, bytes) = whole(SECTION_PAGES - 1, 2);
    let still_wanted = || fake.with(|vm| vm.present.is_empty());
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
    assert_eq!(fake.with(|vm| vm.room_taken), 1);
}

#[test]
fn hole_is_not_filled_for_a_device_that_has_given_up() {
    let (fake, space) = setting();
    set(&space, 5, PageState::Present);
    let (fault, bytes) = whole(5, 1);
    let done = request(&space, fault, &bytes, &|| false, Wait::Here).unwrap();
    assert_eq!(done, Served::nothing(FaultOutcome::Gone));
    assert_eq!((fake.byte(5), state(&space, 5)), (None, PageState::Present));
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
    let (fake, space) = setting();
    let pages = PageNo(4).run(3);
    fake.with(|vm| vm.is_full = true);
    assert_eq!(fault_at_once(&space, DPU, pages), None);
    fake.with(|vm| vm.is_full = false);
    {
        let table = space.memory().unwrap().table();
        let _owned = table.made_section(SectionNo(0)).lock.write().unwrap();
        assert_eq!(fault_at_once(&space, DPU, pages), None);
    }
    fake.with(|vm| assert_eq!((vm.room_taken, vm.present.len(), vm.loads), (0, 0, 0)));
    // Too long to be served while others wait behind it.
    assert_eq!(fault_at_once(&space, DPU, PageNo(0).run(65)), None);
    let most = fault_at_once(&space, DPU, PageNo(0).run(64));
    assert_eq!(most, Some(installed(u64::MAX)));
    fake.with(|vm| assert_eq!((vm.room_taken, vm.present.len(), vm.loads), (64, 64, 64)));
}

#[test]
fn refills_are_told_by_section_without_zeros_and_without_what_was_overwritten() {
    let (fake, space) = setting();
    set(&space, 1, PageState::Stored(Content::ZERO));
    let filled = fault_at_once(&space, DPU, PageNo(0).run(4));
    assert_eq!(filled, Some(installed(0b1111)));
    assert_eq!(overwrite(&space, 8, 2), installed(0b11));
    set(&space, 12, PageState::Stored(Content::ZERO));
    assert!(fault_at_once(&space, DPU, PageNo(12).single()).is_some());
    fake.with(|vm| assert_eq!(vm.refilled, [(SectionNo(0), 3)]));
}

#[test]
fn fill_of_another_thread_is_joined_by_a_vcpu_and_sends_a_device_that_must_not_wait_away() {
    let (fake, space) = setting();
    set(&space, 8, PageState::Filling(content(8)));
    let pages = PageNo(7).run(3);
    assert_eq!(fault_at_once(&space, DPU, pages), None);
    // The page before it is there all the same, and only its room is taken.
    assert_eq!((fake.byte(7), fake.byte(9)), (Some(OLD), None));
    assert_eq!(fake.with(|vm| vm.room_taken), 1);
    let vcpu = fault_at_once(&space, DeviceId::VCPUS, pages);
    assert_eq!(vcpu, Some(installed(0b100)));
    let memory = space.memory().unwrap();
    assert!(memory.table().word(PageNo(8)).is_waited_for());
    let counters = memory.counters();
    assert_eq!(counters.joined_faults.load(Ordering::Relaxed), 1);
}

#[test]
fn readahead_passes_over_a_page_that_cannot_be_installed_and_nobody_is_told_of_a_failure() {
    let (fake, space) = setting();
    fake.with(|vm| vm.stuck = Some(4));
    let ahead = Cause::Readahead(Readahead::Next(PageNo(2).run(10)));
    let done = space.fault(&ahead, Wait::Never).unwrap();
    assert_eq!(done.outcome, FaultOutcome::Present);
    assert_eq!(state(&space, 4), PageState::Stored(content(4)));
    fake.with(|vm| {
        assert!(vm.present.contains_key(&3) && !vm.present.contains_key(&4));
        assert_eq!(vm.failures, 0);
        assert!(vm.loads < 4 * AHEAD_MAX, "{}", vm.loads);
    });
}

#[test]
fn readahead_fills_stored_pages_up_to_its_limit_and_leaves_all_others_alone() {
    let (fake, space) = setting();
    make_present(&fake, &space, 3, OLD);
    set(&space, 5, PageState::Filling(content(5)));
    let ahead = Cause::Readahead(Readahead::Next(PageNo(2).run(10)));
    assert_eq!(space.fault(&ahead, Wait::Never), Some(installed(0b11_0101)));
    fake.with(|vm| {
        assert_eq!(vm.room_taken, AHEAD_MAX.into());
        assert!(!vm.granted.contains(&3) && vm.granted.contains(&4));
    });
    assert_eq!(state(&space, 5), PageState::Filling(content(5)));
    assert_eq!(state(&space, 8), PageState::Stored(content(8)));
    let counters = space.memory().unwrap().counters();
    assert_eq!(counters.readahead_pages.load(Ordering::Relaxed), 4);
    assert_eq!(counters.present_faults.load(Ordering::Relaxed), 0);
}

#[test]
fn readahead_never_waits_whatever_its_caller_may() {
    let (fake, space) = setting();
    let ahead = Cause::Readahead(Readahead::Around(PageNo(0).run(16)));
    fake.with(|vm| vm.is_full = true);
    assert_eq!(space.fault(&ahead, Wait::Here), Some(installed(0)));
    fake.with(|vm| vm.is_full = false);
    {
        let table = space.memory().unwrap().table();
        let _owned = table.made_section(SectionNo(0)).lock.write().unwrap();
        assert_eq!(space.fault(&ahead, Wait::Here), Some(installed(0)));
    }
    fake.with(|vm| assert_eq!((vm.room_taken, vm.present.len()), (0, 0)));
    assert_eq!(space.fault(&ahead, Wait::Here), Some(installed(0b1111)));
}
