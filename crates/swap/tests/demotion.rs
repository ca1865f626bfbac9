// SPDX-License-Identifier: Apache-2.0
//! Pages that stay cold are packed anew, and come back as they were, whatever happens meanwhile.

mod untouched;

use pagetide_addr::{DeviceId, PAGE_BYTES, PageNo, PageSet, SECTION_PAGES, SectionNo};
use pagetide_gmem::{
    AddressSpace, Content, Installed, MemoryParts, PageState, Place as _, RegionRequest,
    fake::{self, FakeMmu, FakePlace},
};
use pagetide_random::SplitMix64;
use pagetide_swap::{
    Demoter, Evictor, HeatCost, Limit, Pace, Pool, PoolCap, PoolStore, Reclaimer,
    demoter::{Demoted, DemotionStop},
    store::{PoolTiers, ZstdTier},
    tier::{Form, Located, PAGE},
};
use std::{
    cell::RefCell,
    ops::ControlFlow,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use untouched::{Untouched, touch};

const SECTIONS: u64 = 2;
const PAGES: u64 = SECTIONS * SECTION_PAGES;
const FIRST: SectionNo = SectionNo(0);

/// What a page holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// lz4 halves it, zstd makes it smaller still.
    Records,
    /// lz4 halves it, and there is nothing for zstd.
    HalfNoise,
    Noise,
    OneWord,
}

impl Kind {
    fn of(page: PageNo) -> Self {
        match page.0 % 8 {
            0..=4 => Self::Records,
            5 => Self::HalfNoise,
            6 => Self::Noise,
            _ => Self::OneWord,
        }
    }
}

/// Content of a page in a version. All pages of records take the same room in lz4, whatever their version.
fn content(page: PageNo, version: u64) -> [u8; PAGE] {
    let mut random = SplitMix64::stream(page.0, version);
    let mut bytes = [0; PAGE];
    match Kind::of(page) {
        Kind::OneWord => bytes
            .as_chunks_mut::<4>()
            .0
            .fill([7, 8, 9, version.to_le_bytes()[0]]),
        Kind::Noise => bytes.fill_with(|| random.next_u64().to_le_bytes()[0]),
        Kind::HalfNoise => bytes[..PAGE / 2].fill_with(|| random.next_u64().to_le_bytes()[0]),
        // Hexadecimal digits: half of each byte is known, and nothing repeats.
        Kind::Records => bytes[..PAGE / 2].fill_with(|| b"0123456789abcdef"[random.index(16)]),
    }
    bytes[PAGE - 8..].copy_from_slice(&version.to_le_bytes());
    if Kind::of(page) == Kind::OneWord {
        bytes
            .as_chunks_mut::<4>()
            .0
            .fill([7, 8, 9, version.to_le_bytes()[0]]);
    }
    bytes
}

fn put(place: &FakePlace, page: PageNo, version: u64) {
    let installed = place.install(page, &content(page, version));
    assert_eq!(installed.unwrap(), Installed::Installed);
}

struct Rig {
    place: Arc<FakePlace>,
    space: Arc<AddressSpace>,
    store: Arc<PoolStore>,
    limit: Arc<Limit>,
    evictor: RefCell<Evictor>,
    _folder: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let place = Arc::new(FakePlace::default());
        for page in PageNo(0).run(PAGES).iter() {
            put(&place, page, 0);
        }
        let pool = Pool::create_empty(&folder.path().join("vm.pool"), PAGES, 1, b"").unwrap();
        let pool = pool.within(&PoolCap::new(None)).unwrap();
        let tiers = PoolTiers::new(None, ZstdTier::On { limit_bytes: None });
        let store = Arc::new(PoolStore::new(Arc::new(pool)).in_tiers(&tiers));
        let limit = Arc::new(Limit::new());
        limit.stop();
        let parts = MemoryParts {
            store: Arc::clone(&store) as _,
            admission: Arc::clone(&limit) as _,
            ..fake::parts(PAGES, Arc::clone(&place) as _)
        };
        let space = fake::space(parts, DeviceId::VCPUS, Arc::new(FakeMmu::vcpus()));
        let all = RegionRequest::of_bytes(PAGES * PAGE_BYTES);
        space.alloc(&all).unwrap();
        let evictor = Evictor::new(Arc::clone(space.memory().unwrap()), Arc::clone(&store));
        Self {
            place,
            space,
            store,
            limit,
            evictor: RefCell::new(evictor),
            _folder: folder,
        }
    }

    fn evict(&self, section: SectionNo, wanted: &PageSet) {
        let none = || Ok(PageSet::EMPTY);
        let mut evictor = self.evictor.borrow_mut();
        let done = evictor.evict(section, wanted, u64::MAX, none, |pages| {
            self.limit.evicted_from(section, pages);
            ControlFlow::Continue(())
        });
        assert_eq!(done.unwrap().evicted_pages, wanted.len());
    }

    fn evict_all(&self) {
        for section in [FIRST, SectionNo(1)] {
            let all = PageSet::of_range(section, section.first_page().run(SECTION_PAGES));
            self.evict(section, &all);
        }
    }

    fn demoter(&self) -> Demoter {
        let memory = Arc::clone(self.space.memory().unwrap());
        Demoter::new(memory, Arc::clone(&self.store))
    }

    fn touch(&self, page: PageNo) {
        touch(&self.space, page);
    }

    /// A page is written anew, and evicted.
    fn rewrite(&self, page: PageNo, version: u64) {
        self.touch(page);
        self.place.discard(page.single()).unwrap();
        put(&self.place, page, version);
        let alone = PageSet::of_range(page.section(), page.single());
        self.evict(page.section(), &alone);
    }

    fn stored(&self, page: PageNo) -> Content {
        match self.space.memory().unwrap().table().word(page).state() {
            PageState::Stored(content) => content,
            state => panic!("{page} is {state:?}"),
        }
    }

    fn form(&self, page: PageNo) -> Option<Form> {
        let located = Located::of(self.stored(page)).unwrap();
        located.in_pool().map(|place| place.form)
    }

    /// Every page comes back as it was, and nothing is left in the store.
    fn verify(&self, version: impl Fn(PageNo) -> u64) {
        for page in PageNo(0).run(PAGES).iter() {
            self.touch(page);
            let mut found = [0; PAGE];
            self.place.read(page.single(), &mut found).unwrap();
            assert!(found == content(page, version(page)), "{page}");
        }
        assert_eq!(self.store.counts().pages(), 0);
        assert_eq!(self.store.bytes().stored_bytes, 0);
        let tiers = self.store.tiers();
        assert_eq!(
            tiers.used_bytes(Form::Lz4) + tiers.used_bytes(Form::Zstd),
            0
        );
    }
}

/// Calls a function after each page.
struct After<F>(F);

impl<F: Fn()> Pace for After<F> {
    fn go_on(&self) -> bool {
        true
    }

    fn may_stay(&self) -> bool {
        (self.0)();
        true
    }
}

#[test]
fn pages_that_get_smaller_go_to_zstd_and_all_come_back_as_they_were() {
    let rig = Rig::new();
    rig.evict_all();
    let before = rig.store.bytes();
    let Demoted {
        pages,
        packed_pages,
        saved_bytes,
        unused_pages,
        stop,
    } = rig.demoter().demote(FIRST, &|| true);
    assert!(stop.is_none(), "{stop:?}");
    let of = |kind| {
        FIRST
            .all_pages()
            .iter()
            .filter(|page| Kind::of(*page) == kind)
            .count() as u64
    };
    assert_eq!(pages, of(Kind::Records));
    let in_vain = of(Kind::HalfNoise) + of(Kind::Noise);
    assert_eq!(packed_pages, of(Kind::Records) + in_vain);
    assert_eq!(unused_pages, 0);
    for page in PageNo(0).run(PAGES).iter() {
        let form = match (Kind::of(page), page.section()) {
            (Kind::Records, FIRST) => Some(Form::Zstd),
            (Kind::Records | Kind::HalfNoise, _) => Some(Form::Lz4),
            (Kind::Noise, _) => Some(Form::Uncompressed),
            (Kind::OneWord, _) => None,
        };
        assert_eq!(rig.form(page), form, "{page}");
    }
    let counts = rig.store.counts();
    assert_eq!(counts.zstd_pages.load(Relaxed), pages);
    assert_eq!(
        counts.same_filled_pages.load(Relaxed),
        2 * of(Kind::OneWord)
    );
    let after = rig.store.bytes();
    assert!(after.stored_bytes < before.stored_bytes && saved_bytes > 0);
    // What is in zstd already is not packed again.
    let again = rig.demoter().demote(FIRST, &|| true);
    assert_eq!((again.pages, again.packed_pages), (0, in_vain));
    rig.verify(|_| 0);
}

#[test]
fn page_that_is_needed_while_it_is_copied_is_served_and_the_others_go() {
    let rig = Rig::new();
    rig.evict_all();
    let turn = RefCell::new(0_u64);
    let pace = After(|| {
        *turn.borrow_mut() += 1;
        if *turn.borrow() == 2 {
            // One was copied, the other is next.
            rig.touch(PageNo(1));
            rig.touch(PageNo(2));
        }
    });
    let done = rig.demoter().demote(FIRST, &pace);
    assert_eq!(done.unused_pages, 1);
    for (page, form) in [(0, Form::Zstd), (3, Form::Zstd)] {
        assert_eq!(rig.form(PageNo(page)), Some(form), "{page}");
    }
    rig.verify(|_| 0);
}

#[test]
fn page_that_is_evicted_anew_while_it_is_copied_keeps_its_new_content() {
    let rig = Rig::new();
    rig.evict_all();
    let last = RefCell::new(None);
    let turn = RefCell::new(0_u64);
    let pace = After(|| {
        *turn.borrow_mut() += 1;
        if *turn.borrow() == 1 {
            // It was copied. Its content changes, and takes the first free slot of its size: its own.
            for version in [5, 6] {
                rig.rewrite(PageNo(0), version);
                *last.borrow_mut() = Some(rig.stored(PageNo(0)));
            }
        }
    });
    let done = rig.demoter().demote(FIRST, &pace);
    assert_eq!(Some(rig.stored(PageNo(0))), *last.borrow());
    // All that was copied together with it is as it was, too.
    assert!(done.unused_pages > 1);
    assert_eq!(rig.form(PageNo(2)), Some(Form::Lz4));
    assert_eq!(rig.form(PageNo(32)), Some(Form::Zstd));
    assert!(rig.demoter().demote(FIRST, &|| true).pages > 0);
    assert_eq!(rig.form(PageNo(2)), Some(Form::Zstd));
    rig.verify(|page| if page == PageNo(0) { 6 } else { 0 });
}

#[test]
fn demotion_that_has_to_pause_goes_on_where_it_ended() {
    let rig = Rig::new();
    rig.evict_all();
    let mut demoter = rig.demoter();
    struct Once(RefCell<u32>);
    impl Pace for Once {
        fn go_on(&self) -> bool {
            *self.0.borrow_mut() += 1;
            *self.0.borrow() == 1
        }

        fn may_stay(&self) -> bool {
            false
        }
    }
    for turn in 1..=10 {
        let done = demoter.demote(FIRST, &Once(RefCell::new(0)));
        assert!(matches!(done.stop, Some(DemotionStop::Paced)));
        assert_eq!(done.packed_pages, 1);
        assert!(rig.store.counts().zstd_pages.load(Relaxed) <= turn);
    }
    rig.verify(|_| 0);
}

#[test]
fn demotion_without_room_for_copies_loses_nothing_and_does_not_make_the_store_full() {
    let rig = Rig::new();
    rig.evict_all();
    rig.store.trim().unwrap();
    let cap = rig.store.pool().cap();
    cap.set(Some(cap.used_bytes()));
    let done = rig.demoter().demote(FIRST, &|| true);
    assert!(matches!(done.stop, Some(DemotionStop::Store(ref why)) if why.is_full()));
    assert_eq!(rig.store.full(), None);
    cap.set(None);
    rig.verify(|_| 0);
}

#[test]
fn reclaimer_demotes_sections_once_they_were_left_alone_and_hears_of_what_is_needed() {
    let rig = Rig::new();
    let memory = Arc::clone(rig.space.memory().unwrap());
    let evictor = Evictor::new(memory, Arc::clone(&rig.store));
    let tracker = Arc::new(Untouched);
    let mut reclaimer = Reclaimer::new(
        evictor,
        Arc::clone(&rig.limit),
        tracker,
        HeatCost::default(),
    );
    let at = Duration::from_secs;
    assert_eq!(reclaimer.demotion_in(at(1)), None);
    reclaimer.demote_after(at(10), at(1));
    rig.evict_all();
    assert_eq!(reclaimer.demotion_in(at(2)), Some(at(10)));
    // A page of the first section is needed.
    rig.touch(PageNo(0));
    assert_eq!(reclaimer.demotion_in(at(8)), Some(at(4)));
    let done = reclaimer.demote(|| at(11), &|| true);
    assert_eq!(done.packed_pages, 0, "it is not time");
    let done = reclaimer.demote(|| at(12), &|| true);
    assert!(done.pages > 0);
    assert_eq!(rig.form(SectionNo(1).first_page()), Some(Form::Zstd));
    assert_eq!(rig.form(PageNo(1)), Some(Form::Lz4));
    assert_eq!(reclaimer.demotion_in(at(13)), Some(at(5)));
    let done = reclaimer.demote(|| at(18), &|| true);
    assert!(done.pages > 0);
    assert_eq!(rig.form(PageNo(1)), Some(Form::Zstd));
    assert_eq!(reclaimer.demotion_in(at(99)), None);
    // A successor finds what is stored, and lets it age anew.
    let memory = Arc::clone(rig.space.memory().unwrap());
    let evictor = Evictor::new(memory, Arc::clone(&rig.store));
    let mut successor = Reclaimer::new(
        evictor,
        Arc::clone(&rig.limit),
        Arc::new(Untouched),
        HeatCost::default(),
    );
    successor.demote_after(at(10), at(100));
    assert_eq!(successor.demotion_in(at(101)), Some(at(9)));
    rig.verify(|_| 0);
}
