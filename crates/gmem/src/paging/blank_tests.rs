// SPDX-License-Identifier: Apache-2.0
//! Pages that lay in posted buffers become zeros, and nothing that was used since ever does: a guest, a
//! device, an evictor and late requests in random orders, beside a plain list of what each page must hold.

use crate::{
    AddressSpace, Blank, Cause, Content, Fault, FaultOutcome, MemoryParts, PageState, PageWord,
    RegionRequest, Wait,
    fake::{self, FakeMmu, FakePlace, FakeRooms, FakeStore},
};
use pagetide_addr::{Access, DeviceId, PAGE_BYTES, PageNo, PageSet, SECTION_PAGES, SectionNo};
use pagetide_random::SplitMix64;
use std::sync::{Arc, atomic::Ordering};

const NIC: DeviceId = DeviceId(1);
const PAGES_COUNT: usize = 8;
const PAGES: u64 = PAGES_COUNT as u64;

struct Vm {
    place: Arc<FakePlace>,
    store: Arc<FakeStore>,
    rooms: Arc<FakeRooms>,
    space: Arc<AddressSpace>,
}

impl Vm {
    fn new(clock_ns: Option<u64>) -> Self {
        let (place, store) = (Arc::<FakePlace>::default(), Arc::<FakeStore>::default());
        let rooms = Arc::<FakeRooms>::default();
        if let Some(now) = clock_ns {
            rooms.set_clock(now);
        }
        let parts = MemoryParts {
            store: Arc::clone(&store) as _,
            admission: Arc::clone(&rooms) as _,
            ..fake::parts(SECTION_PAGES, Arc::clone(&place) as _)
        };
        let space = fake::space(parts, NIC, Arc::<FakeMmu>::default() as _);
        space
            .alloc(&RegionRequest::of_bytes(SECTION_PAGES * PAGE_BYTES))
            .unwrap();
        Self {
            place,
            store,
            rooms,
            space,
        }
    }

    /// Page `page` is stored, with each byte of it `byte`.
    fn stored(&self, page: u64, byte: u8) -> Content {
        let content = self.store.keep(&[byte; 4096]);
        let word = PageWord::new(PageState::Stored(content));
        let table = self.space.memory().unwrap().table();
        table.set_initial(PageNo(page), word);
        content
    }

    fn fault(&self, device: DeviceId, page: u64) {
        let fault = Fault {
            device,
            pages: PageNo(page).single(),
            access: Access::Write,
        };
        let served = self.space.fault(&Cause::Fault(fault), Wait::Here).unwrap();
        assert_eq!(served.outcome, FaultOutcome::Present);
    }

    fn blank(&self, page: u64, posted_ns: u64, wait: Wait) -> Option<FaultOutcome> {
        let fault = Fault {
            device: NIC,
            pages: PageNo(page).single(),
            access: Access::Write,
        };
        let cause = Cause::Blank(Blank { fault, posted_ns });
        Some(self.space.fault(&cause, wait)?.outcome)
    }

    fn evict(&self, page: u64) {
        let wanted = PageSet::of_range(SectionNo(0), PageNo(page).single());
        let memory = self.space.memory().unwrap();
        let Ok(mut round) = memory.begin_eviction(SectionNo(0), &wanted) else {
            return;
        };
        let mut bytes = [0; 4096];
        round.read(PageNo(page).single(), &mut bytes).unwrap();
        let content = match bytes == [0; 4096] {
            true => Content::ZERO,
            false => self.store.keep(&bytes),
        };
        assert!(round.commit(&[(PageNo(page), content)]).unused.is_empty());
    }

    fn byte(&self, page: u64) -> Option<u8> {
        self.place.first_byte(PageNo(page))
    }

    fn blanked(&self) -> u64 {
        let counters = self.space.memory().unwrap().counters();
        counters.blanked_pages.load(Ordering::Relaxed)
    }
}

#[test]
fn content_from_before_the_buffer_was_posted_is_dropped_unread_wherever_it_is() {
    let vm = Vm::new(Some(10));
    let (near, far) = (vm.stored(1, 7), vm.stored(2, 8));
    vm.store.put_far(far);
    for page in [1, 2] {
        let outcome = vm.blank(page, 11, Wait::Never);
        assert_eq!(outcome, Some(FaultOutcome::Present));
        assert_eq!(vm.byte(page), Some(0));
    }
    assert_eq!((vm.store.loads(), vm.blanked()), (0, 2));
    assert_eq!(vm.store.freed(), [near, far]);
    assert_eq!(vm.rooms.taken(), 2);
}

#[test]
fn content_that_is_younger_than_the_request_is_loaded() {
    // Requests of before this daemon began, or of the very moment at which it evicted.
    let vm = Vm::new(Some(10));
    vm.stored(1, 7);
    assert_eq!(vm.blank(1, 10, Wait::Here), Some(FaultOutcome::Present));
    assert_eq!(vm.byte(1), Some(7));
    vm.rooms.set_clock(20);
    vm.evict(1);
    for posted_ns in [15, 20] {
        assert_eq!(
            vm.blank(1, posted_ns, Wait::Here),
            Some(FaultOutcome::Present)
        );
        assert_eq!(vm.byte(1), Some(7));
        vm.evict(1);
    }
    assert_eq!(vm.blanked(), 0);
    assert_eq!(vm.blank(1, 21, Wait::Here), Some(FaultOutcome::Present));
    assert_eq!((vm.byte(1), vm.blanked()), (Some(0), 1));
}

#[test]
fn without_a_clock_all_content_is_loaded() {
    let vm = Vm::new(None);
    vm.stored(1, 7);
    let outcome = vm.blank(1, u64::MAX, Wait::Here);
    assert_eq!(outcome, Some(FaultOutcome::Present));
    assert_eq!((vm.byte(1), vm.blanked()), (Some(7), 0));
}

#[test]
fn present_page_is_left_as_it_is_and_one_that_loads_is_awaited() {
    let vm = Vm::new(Some(10));
    vm.stored(1, 7);
    vm.fault(DeviceId::VCPUS, 1);
    assert_eq!(vm.blank(1, 11, Wait::Never), Some(FaultOutcome::Present));
    assert_eq!((vm.byte(1), vm.blanked()), (Some(7), 0));
    let far = vm.stored(2, 8);
    vm.store.put_far(far);
    let fault = Fault {
        device: DeviceId::VCPUS,
        pages: PageNo(2).single(),
        access: Access::Read,
    };
    vm.space.fault(&Cause::Fault(fault), Wait::Begin);
    assert_eq!(vm.blank(2, 11, Wait::Never), None);
    vm.store.deliver(PageNo(2));
    assert_eq!(vm.blank(2, 11, Wait::Never), Some(FaultOutcome::Present));
    assert_eq!((vm.byte(2), vm.blanked()), (Some(8), 0));
}

/// Who has a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    Guest,
    Device,
}

/// What the guest must find in a page that it has.
#[derive(Clone, Copy, Debug)]
struct Expected {
    owner: Owner,
    byte: u8,
    /// It has posted the page since it last looked: it may find zeros as well.
    or_zeros: bool,
}

struct Run {
    vm: Vm,
    random: SplitMix64,
    now_ns: u64,
    pages: [Expected; PAGES_COUNT],
    /// Requests on their way: the page, and when it was seen to be posted.
    late: Vec<(u64, u64)>,
    next_byte: u8,
}

impl Run {
    fn step(&mut self) {
        self.now_ns += self.random.below(2);
        self.vm.rooms.set_clock(self.now_ns);
        let number = self.random.below(PAGES);
        let page = self.pages[usize::try_from(number).unwrap()];
        let after = match (self.random.below(6), page.owner) {
            (0, Owner::Guest) => Expected {
                owner: Owner::Device,
                or_zeros: true,
                ..page
            },
            (0, Owner::Device) if self.random.below(3) == 0 => Expected {
                owner: Owner::Guest,
                ..page
            },
            (1, Owner::Guest) => self.touch(number, page),
            (1, Owner::Device) => self.receive(number, page),
            (2, _) => {
                self.vm.evict(number);
                page
            }
            (3 | 4, Owner::Device) if self.vm.byte(number).is_none() => {
                self.late.push((number, self.now_ns));
                page
            }
            (_, _) => {
                self.serve_one();
                page
            }
        };
        self.pages[usize::try_from(number).unwrap()] = after;
    }

    /// The guest reads the page, and perhaps writes it.
    fn touch(&mut self, number: u64, page: Expected) -> Expected {
        self.vm.fault(DeviceId::VCPUS, number);
        let seen = self.vm.byte(number).unwrap();
        assert!(
            seen == page.byte || (page.or_zeros && seen == 0),
            "page {number}: {seen}, not {page:?}"
        );
        let byte = match self.random.below(2) {
            0 => seen,
            _ => self.write(number),
        };
        Expected {
            byte,
            or_zeros: false,
            ..page
        }
    }

    /// The device fills the buffer, if its page is there, and gives it back.
    fn receive(&mut self, number: u64, page: Expected) -> Expected {
        if self.vm.byte(number).is_none() {
            return page;
        }
        Expected {
            owner: Owner::Guest,
            byte: self.write(number),
            or_zeros: false,
        }
    }

    fn write(&mut self, number: u64) -> u8 {
        self.next_byte = self.next_byte.checked_add(1).unwrap_or(1);
        self.vm.place.put(PageNo(number), self.next_byte);
        self.next_byte
    }

    /// A request arrives, early or late.
    fn serve_one(&mut self) {
        if self.late.is_empty() {
            return;
        }
        let at = usize::try_from(self.random.below(self.late.len() as u64)).unwrap();
        let (number, posted_ns) = self.late.swap_remove(at);
        let outcome = self.vm.blank(number, posted_ns, Wait::Here);
        assert_eq!(outcome, Some(FaultOutcome::Present));
    }
}

#[test]
fn page_that_was_used_after_it_was_posted_never_becomes_zeros_in_any_order() {
    let (mut blanked, mut loaded) = (0, 0);
    for seed in 0..400 {
        let vm = Vm::new(Some(1));
        for page in 0..PAGES {
            vm.stored(page, 200);
        }
        let expected = Expected {
            owner: Owner::Guest,
            byte: 200,
            or_zeros: false,
        };
        let mut run = Run {
            vm,
            random: SplitMix64::new(seed),
            now_ns: 1,
            pages: [expected; PAGES_COUNT],
            late: Vec::new(),
            next_byte: 0,
        };
        for _ in 0..300 {
            run.step();
        }
        for number in 0..PAGES {
            let page = run.pages[usize::try_from(number).unwrap()];
            run.touch(number, page);
        }
        blanked += run.vm.blanked();
        loaded += run.vm.store.loads();
    }
    assert!(blanked > 1000 && loaded > 1000, "{blanked}, {loaded}");
}
