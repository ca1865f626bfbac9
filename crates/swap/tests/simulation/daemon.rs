// SPDX-License-Identifier: Apache-2.0
//! The daemon: the real address space, store, limit, evictor and reclaimer over the simulated kernel.

use crate::{
    content::Stamps,
    device::Asked,
    dimm::{CAPACITY_PAGES, forget_what_is_gone},
    guest::Message,
    kernel::{Call, DeviceMmu, Life, Tracker, VcpuMmu, Words, World},
    knobs::{Eviction, Far, Room},
    slow::{RequestEnd, chain_of, sinker_of},
    state::{Frame, State},
};
use pagetide_addr::{
    Access, DeviceId, PAGE_BYTES, PageNo, PageRange, PageSet, SECTION_PAGES, SectionNo, Va,
};
use pagetide_gmem::{
    Activation, AddressSpace, Admission, AllocPolicy, Cause, Content, ContentStore, Device,
    EvictionError, Fault, FaultOutcome, Incidents, LoadDone, MemoryParts, Mode, Move, Overwrite,
    PageState, PageTable, PagedMemory, Readahead, Served, StoreError, Wait,
    recovery::recover_words,
};
use pagetide_policy::{
    protect::{Protector, Touch},
    swap_in::Together,
};
use pagetide_swap::{
    ChainStore, Demoter, DirectReclaim, Evictor, HeatCost, Limit, Pace, Pool, PoolStore, PoolWords,
    Reclaimer, Sinker, SlowTiers,
    demoter::DemotionStop,
    evictor::EvictorError,
    limit::MakeRoom as _,
    reclaim::{Need, Reach, Took, UNMAPPED_MIN},
    slots::SLOT_UNIT_BYTES,
    slow::Which,
    store::FULL_MIN,
    tier::{Form, Located, PAGE},
};
use std::{
    collections::HashMap,
    ops::ControlFlow,
    path::Path,
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::{Duration, Instant},
};

/// Addresses of the simulated space: far more than any VM here has pages.
const SPACE_BYTES: u64 = 1 << 40;

/// Pages asked for at a time, by a run that swaps in what it likes.
const SWAP_IN_PAGES: usize = 16;

/// Half of the sections that are touched, so that both kinds are met.
const POLICY: &str = "lru:share=0.5";
/// Sections that the policy takes the VM to have.
const POLICY_SECTIONS: u64 = 4;

/// What a daemon can be given to do.
#[derive(Clone, Copy, Debug)]
pub enum Task {
    Vcpu(Message),
    Device {
        device: usize,
        asked: Asked,
    },
    Evict {
        section: SectionNo,
        wanted: PageSet,
        pages_max: u64,
    },
    /// A device comes back that had gone.
    Attach {
        device: usize,
    },
    Scan,
    Reclaim {
        pages: u64,
        reach: Reach,
    },
    /// Sections are to stand ready.
    KeepReady {
        pages: u64,
    },
    /// Pages come back that nothing waits for: of this section, or of those that the reclaimer wants back.
    SwapIn {
        section: SectionNo,
    },
    /// A load of far content ends.
    EndLoad {
        page: PageNo,
        how: LoadEnd,
    },
    /// A request to the slow tier ends.
    EndRequest {
        index: usize,
        how: RequestEnd,
    },
    /// Loads that failed there are tried again.
    RetryLoads,
    /// Stored pages of the section are moved down to the slow tier.
    Sink {
        section: SectionNo,
        which: Which,
    },
    /// The content of a page moves to another place of the store.
    Relocate {
        page: PageNo,
    },
    /// A fill makes room of what stands ready.
    MakeRoom {
        pages: u64,
    },
    /// Stored pages of the section are packed anew.
    Demote {
        section: SectionNo,
    },
    /// Present pages of the section are granted to all devices, as a recovery leaves it for later.
    Grant {
        section: SectionNo,
    },
    Trim,
    CorrectLimit,
    /// Memory was plugged.
    Grow,
    /// Memory is unplugged.
    Shrink,
}

/// How a load ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LoadEnd {
    /// With what the store has, unless that fails.
    Delivered,
    /// The store drops it.
    Dropped,
}

impl Task {
    /// A load that ends now, in any order.
    pub fn next_load(state: &mut State) -> Option<Self> {
        if state.has_slow_work() && (state.loads.is_empty() || state.random.coin()) {
            return Some(Self::next_request(state));
        }
        let pages: Vec<PageNo> = state.loads.iter().map(|(_, done)| done.page()).collect();
        if pages.is_empty() {
            return None;
        }
        let page = state.random.pick(&pages);
        // To drop one is an error like any other.
        let how = match state.fails() {
            true => LoadEnd::Dropped,
            false => LoadEnd::Delivered,
        };
        Some(Self::EndLoad { page, how })
    }

    /// A fault that waits to be served.
    pub fn next_fault(state: &mut State) -> Option<Self> {
        if state.random.coin()
            && let Some(message) = state.take_message()
        {
            return Some(Self::Vcpu(message));
        }
        let asked = state.page_requests.pop_front()?;
        let request = state.requests.iter().find(|r| r.id == asked.request)?;
        let device = request.device;
        match asked.overwrite {
            Some(_) => state.coverage.overwrites += 1,
            None => state.coverage.page_requests += 1,
        }
        Some(Self::Device { device, asked })
    }

    /// Some pages of some section; `None` if evicting is the reclaimer's alone.
    pub fn random_eviction(state: &mut State) -> Option<Self> {
        if state.knobs.eviction == Eviction::Reclaimer {
            return None;
        }
        let pages_max = state.random.pick(&[1, 5, 512]);
        // Memory that is to go is evicted from as any other.
        if state.random.coin()
            && let Some(pages) = state.pages_to_remove()
        {
            let section = pages.start.section();
            return Some(Self::Evict {
                section,
                wanted: PageSet::of_range(section, pages),
                pages_max,
            });
        }
        let section = state.active_page().section();
        let mut wanted = PageSet::EMPTY;
        let density = state.random.pick(&[1, 2, 4]);
        for page in state.knobs.active.clone() {
            if page.section() == section && state.random.below(density) == 0 {
                wanted.insert(page);
            }
        }
        Some(Self::Evict {
            section,
            wanted,
            pages_max,
        })
    }
}

/// The pace of work in which anything may happen between two steps.
pub struct Between(pub Life);

impl Pace for Between {
    fn go_on(&self) -> bool {
        self.may_stay()
    }

    fn may_stay(&self) -> bool {
        match self.0.enter(Call::Unlocked) {
            Some(mut state) => state.random.below(8) > 0,
            None => false,
        }
    }
}

/// One incarnation of the daemon.
pub struct Daemon {
    pub life: Life,
    /// The space around the memory, to which devices are attached.
    whole: Arc<AddressSpace>,
    devices: Mutex<HashMap<usize, Arc<Device>>>,
    pub space: Arc<PagedMemory>,
    pub store: Arc<PoolStore>,
    pub chain: Arc<ChainStore>,
    pub tiers: Arc<SlowTiers>,
    pub sinker: Option<Mutex<Sinker>>,
    pub limit: Arc<Limit>,
    reclaimer: Mutex<Reclaimer>,
    direct: DirectReclaim,
    protector: Mutex<Protector>,
    /// Sections that the reclaimer has taken pages of.
    taken: Arc<Mutex<Vec<(SectionNo, Took)>>>,
    /// Content of others that takes up the room.
    pub hogs: Mutex<Vec<Content>>,
}

impl Daemon {
    /// The first daemon of a VM.
    pub fn found(world: &Arc<World>, path: &Path) -> Arc<Self> {
        let pool = Arc::new(Pool::create_empty(path, CAPACITY_PAGES, 4711, b"").expect("a pool"));
        let life = begin_life(world);
        let table = PageTable::growing(hooked_words(&life, &pool));
        let (chain, tiers) = chain_of(&life, pool);
        Self::assemble(life, table, chain, tiers)
    }

    /// A successor; `None` if the kernel failed it and another try is due.
    pub fn succeed(world: &Arc<World>, path: &Path) -> Option<Arc<Self>> {
        let pool = Arc::new(Pool::open(path).expect("the pool of a dead daemon"));
        pool.count_restart();
        let life = begin_life(world);
        let table = PageTable::reopen(hooked_words(&life, &pool)).expect("a pool");
        forget_what_is_gone(&life, &pool, &table);
        let (chain, tiers) = chain_of(&life, pool);
        let mut stored = Vec::new();
        let report = match recover_words(&table, &life, |_, content| stored.push(content)) {
            Ok(report) => report,
            Err(error) => {
                life.expect_trouble(&error);
                return None;
            }
        };
        for content in stored {
            chain.adopt(content).expect("content of one page each");
        }
        chain.finish_adoption().expect("a pool that can be punched");
        let known = report.present_pages + report.stored_pages + report.poisoned_pages;
        let most: u64 = table.sections().map(|s| table.pages_of(s).len()).sum();
        assert!(known <= most, "{known} pages of {most}");
        Some(Self::assemble(life, table, chain, tiers))
    }

    fn assemble(
        life: Life,
        table: PageTable,
        chain: Arc<ChainStore>,
        tiers: Arc<SlowTiers>,
    ) -> Arc<Self> {
        let store = Arc::clone(chain.pool());
        let knobs = life.world.lock().knobs.clone();
        let limit = Arc::new(Limit::new());
        // Nothing waits for time to pass here.
        limit.stop();
        let resident = life.world.lock().resident_pages();
        limit.set(knobs.limit_pages, resident);
        let memory = PagedMemory::new(MemoryParts {
            table,
            place: Arc::new(life.clone()),
            store: Arc::new(Checked {
                life: life.clone(),
                store: chain.clone(),
                far: knobs.far,
            }),
            admission: Arc::new(AtTheLimit {
                life: life.clone(),
                limit: limit.clone(),
            }),
            incidents: Arc::new(IncidentLog(life.clone())),
            neighbours_max: knobs.neighbours_max,
        });
        let whole = AddressSpace::over(memory, Va(0), Va(SPACE_BYTES), AllocPolicy::default())
            .expect("a range of pages");
        let space = whole.memory().expect("it is over one").clone();
        let vcpus = Device::with_id(DeviceId::VCPUS, Arc::new(VcpuMmu(life.clone())));
        attach_to_the_end(&life, &whole, &vcpus);
        let sinker = sinker_of(&space, &chain);
        let evictor = Evictor::new(space.clone(), store.clone());
        let tracker = Arc::new(Tracker(life.clone()));
        let mut reclaimer = Reclaimer::new(evictor, limit.clone(), tracker, HeatCost::default());
        limit.faulted().set(Together::On);
        let choice = POLICY.parse().expect("a policy");
        let protector = Protector::new(&choice, POLICY_SECTIONS);
        reclaimer.spare(protector.protected().clone());
        let clock = life.clone();
        let direct = reclaimer.direct(move || now_of(&clock));
        let taken: Arc<Mutex<Vec<(SectionNo, Took)>>> = Arc::default();
        let told = taken.clone();
        reclaimer.tell(move |section, took| {
            let mut taken = told.lock().unwrap_or_else(PoisonError::into_inner);
            taken.push((section, took));
        });
        let daemon = Arc::new(Self {
            reclaimer: Mutex::new(reclaimer),
            direct,
            protector: Mutex::new(protector),
            taken,
            hogs: Mutex::new(Vec::new()),
            life,
            whole,
            devices: Mutex::new(HashMap::new()),
            space,
            store,
            chain,
            tiers,
            sinker,
            limit,
        });
        daemon.take_room(knobs.room);
        daemon.life.world.set_daemon(Some(daemon.clone()));
        daemon.begin_devices(knobs.devices);
        daemon
    }

    /// What a device is granted: by its own attachment, or by the allocation.
    fn begin_devices(&self, devices: usize) {
        let devices_first = self.life.world.lock().random.coin();
        if !devices_first {
            self.allocate_base();
        }
        for device in 0..devices {
            self.attach(device);
        }
        if devices_first {
            self.allocate_base();
        }
    }

    /// The kernel as this daemon has it.
    pub fn life(&self) -> Life {
        self.life.clone()
    }

    fn attach(&self, device: usize) {
        let mmu = Arc::new(DeviceMmu {
            life: self.life.clone(),
            device,
        });
        let attached = Device::with_id(device_id(device), mmu);
        // A device that cannot be attached gets none of its requests answered: it comes again. Memory
        // that the VMM has unmapped must be out of the space for that.
        while let Err(error) = {
            let _frame = self.life.frame(Frame::Setup);
            self.whole
                .attach(&attached, Mode::Coherent, Activation::Now)
        } {
            self.life.expect_trouble(&error);
            // An attach of a VM that has ended fails; so does one of its devices.
            let mut state = self.life.world.lock();
            if state.gone {
                state.devices[device].cut_off = true;
                return;
            }
            drop(state);
            self.shrink();
        }
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        devices.insert(device, attached);
    }

    fn grant(&self, section: SectionNo) {
        let _frame = self.life.frame(Frame::Setup);
        match self.space.grant_section(section) {
            Ok(()) => self.life.world.lock().coverage.granted_sections += 1,
            Err(error) => self.life.expect_trouble(&error),
        }
    }

    /// Long after the store was found full: a run must not depend on the host's clock.
    fn look_for_room(&self) {
        self.store.look_for_room(Instant::now() + 2 * FULL_MIN);
    }

    fn take_room(&self, room: Room) {
        if room == Room::Ample {
            return;
        }
        let mut hogs = Vec::new();
        while let Ok(content) = self.store.put(&[1; 4100]) {
            hogs.push(content);
        }
        let some = self.life.world.lock().random.below(6);
        for _ in 0..some {
            self.store.free(hogs.pop().expect("a pool holds more"));
        }
        self.look_for_room();
        *self.hogs.lock().unwrap_or_else(PoisonError::into_inner) = hogs;
    }

    /// Does a task to its end, or dies.
    pub fn perform(&self, task: Task) {
        self.life.world.lock().tell_all(format_args!("{task:?}"));
        match task {
            Task::Vcpu(message) => self.serve_vcpu(message),
            Task::Device { device, asked } => self.serve_device(device, asked),
            Task::Evict {
                section,
                wanted,
                pages_max,
            } => self.evict(section, &wanted, pages_max),
            Task::Attach { device } => {
                let known = {
                    let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
                    devices.remove(&device)
                };
                if let Some(known) = known {
                    known.detach(&self.whole).expect("a device that lets go");
                }
                self.attach(device);
            }
            Task::Scan => self.scan(),
            Task::Reclaim { pages, reach } => self.reclaim_rested(pages, reach),
            Task::KeepReady { pages } => self.keep_ready(pages),
            Task::SwapIn { section } => self.swap_in(section),
            Task::EndLoad { page, how } => self.end_load(page, how),
            Task::EndRequest { index, how } => self.end_request(index, how),
            Task::RetryLoads => self.retry_loads(),
            Task::Sink { section, which } => self.sink(section, which),
            Task::Relocate { page } => self.relocate(page),
            Task::MakeRoom { pages } => self.take_directly(pages),
            Task::Demote { section } => self.demote(section),
            Task::Grant { section } => self.grant(section),
            Task::Trim => self.store.trim().expect("a pool that can be punched"),
            Task::CorrectLimit => {
                let loading = self.space.loading_pages();
                let resident = self.life.world.lock().resident_pages();
                self.limit.correct(resident + loading);
            }
            Task::Grow => self.grow(),
            Task::Shrink => self.shrink(),
        }
    }

    fn serve_vcpu(&self, message: Message) {
        let _frame = self.life.frame(Frame::VcpuFault(message.page.section()));
        let fault = Fault {
            device: DeviceId::VCPUS,
            pages: message.page.single(),
            access: message.access,
        };
        let quick = self.life.world.lock().random.coin();
        let cause = Cause::Fault(fault);
        if !quick || self.space.fault(&cause, Wait::Never).is_none() {
            self.space.fault(&cause, Wait::Here);
        }
        if let Some(pages) = self.space.readahead_after(message.page) {
            self.space.fault(&Cause::Readahead(pages), Wait::Never);
        }
    }

    fn serve_device(&self, device: usize, asked: Asked) {
        let _frame = self.life.frame(Frame::DeviceFault);
        let fault = Fault {
            device: device_id(device),
            pages: asked.pages,
            access: Access::Write,
        };
        let (quick, ticket) = {
            let mut state = self.life.world.lock();
            let ticket = state.number();
            state.unanswered.insert(ticket);
            (state.random.coin(), ticket)
        };
        let (life, id) = (self.life.clone(), asked.request);
        if let Some(written) = asked.overwrite {
            let done = self.overwrite(fault, written, if quick { Wait::Never } else { Wait::Here });
            life.answer(ticket, id, |state| state.answer_overwrite(id, done));
            return;
        }
        let reply = move |outcome: FaultOutcome| {
            life.answer(ticket, id, |state| state.answer(id, outcome));
        };
        let cause = Cause::Fault(fault);
        let at_once = quick.then(|| self.space.fault(&cause, Wait::Never));
        match at_once.flatten() {
            Some(served) => reply(served.outcome),
            None => {
                self.space.fault(&cause, Wait::Reply(Box::new(reply)));
            }
        }
    }

    /// As a thread of a slow tier does.
    fn end_load(&self, page: PageNo, how: LoadEnd) {
        let _frame = self.life.frame(Frame::VcpuFault(page.section()));
        let (content, done) = {
            let mut state = self.life.world.lock();
            let place = state.loads.iter().position(|load| load.1.page() == page);
            match place {
                Some(place) => state.loads.remove(place),
                // Another thread was faster.
                None => return,
            }
        };
        if how == LoadEnd::Dropped {
            self.life.world.lock().coverage.loads_dropped += 1;
            return;
        }
        let checked = Checked {
            life: self.life.clone(),
            store: self.chain.clone(),
            far: Far::Nothing,
        };
        let mut bytes = [0; PAGE];
        let loaded = checked.load(page, content, &mut bytes);
        let failed = u64::from(loaded.is_err());
        self.life.world.lock().coverage.loads_failed += failed;
        done.complete(loaded.map(|()| &bytes));
    }

    /// Stores the content of `page` once more, and has its word name the copy.
    fn relocate(&self, page: PageNo) {
        let section = page.section();
        let _frame = self.life.frame(Frame::VcpuFault(section));
        let begun = self.space.begin_relocation(section);
        let PageState::Stored(from) = self.space.table().word(page).state() else {
            return;
        };
        // Content of zstd would be taken for that of lz4 by its length.
        let place = match Located::of(from) {
            Ok(Located::Pool(place)) if place.form != Form::Zstd => place,
            _ => return,
        };
        let mut stored = vec![0; place.bytes as usize];
        let read = (self.store.pool()).read_content(place.slot.byte_offset(), &mut stored);
        read.expect("a place in the pool");
        let Ok(to) = self.store.put(&stored) else {
            return;
        };
        // Others act while the copy is written, or the daemon dies.
        for _ in 0..4 {
            drop(self.life.enter(Call::Unlocked));
        }
        let done = self.space.relocate(begun, &[Move { page, from, to }]);
        self.life.world.lock().coverage.relocations_in_vain += done.unused.len() as u64;
        for content in done.replaced.into_iter().chain(done.unused) {
            // A dead daemon frees nothing.
            if self.life.enter(Call::Locked).is_some() {
                self.store.free(content);
            }
        }
    }

    fn overwrite(&self, fault: Fault, written: Stamps, first: Wait) -> Served {
        let mut content = vec![0; fault.pages.iter().count() * PAGE];
        for page in content.chunks_exact_mut(PAGE) {
            written.render(page);
        }
        let cause = Cause::Overwrite(Overwrite {
            fault,
            content: &content,
            still_wanted: &|| true,
        });
        let served = self.space.fault(&cause, first);
        let served = served.or_else(|| self.space.fault(&cause, Wait::Here));
        served.expect("a call that may wait is over")
    }

    fn evict(&self, section: SectionNo, wanted: &PageSet, pages_max: u64) {
        let _frame = self.life.frame(Frame::Evict);
        let mut evictor = Evictor::new(self.space.clone(), self.store.clone());
        let limit = &self.limit;
        let touched = || Ok(PageSet::EMPTY);
        let done = evictor.evict(section, wanted, pages_max, touched, |pages| {
            limit.evicted(pages);
            ControlFlow::Continue(())
        });
        if let Ok(report) = &done {
            let coverage = &mut self.life.world.lock().coverage;
            coverage.same_filled_pages += report.same_filled_pages;
        }
        match done {
            Ok(report) if !report.refused.is_empty() => self.life.expect_full(),
            Ok(_)
            | Err(EvictorError::Round(
                EvictionError::Nothing | EvictionError::Busy | EvictionError::RoundUnderWay,
            )) => {}
            Err(error) => self.life.expect_trouble(&error),
        }
    }

    fn scan(&self) {
        let Ok(mut reclaimer) = self.reclaimer.try_lock() else {
            return;
        };
        let _frame = self.life.frame(Frame::Evict);
        self.look_for_room();
        let now = self.now();
        if let Err(error) = reclaimer.sweep(|| now, || now, &|| true) {
            self.life.expect_trouble(&*error);
        }
    }

    /// The first pass unmaps what the second takes.
    fn reclaim_rested(&self, pages: u64, reach: Reach) {
        self.reclaim(pages, reach);
        let wait_ms = u64::try_from(UNMAPPED_MIN.as_millis()).expect("some milliseconds");
        self.life.world.lock().pass_time(wait_ms);
        self.reclaim(pages, reach);
    }

    fn reclaim(&self, pages: u64, reach: Reach) {
        let Ok(mut reclaimer) = self.reclaimer.try_lock() else {
            return;
        };
        self.protect_some_section();
        let _frame = self.life.frame(Frame::Evict);
        let now = self.now();
        let done = reclaimer.reclaim(|| now, pages, reach, Need::Limit, &|| true);
        self.assert_protected_are_spared(reach);
        match done.stopped {
            None if self.store.full().is_some() => self.life.expect_full(),
            None => {}
            Some(error) => self.life.expect_trouble(&error),
        }
    }

    fn keep_ready(&self, pages: u64) {
        let Ok(mut reclaimer) = self.reclaimer.try_lock() else {
            return;
        };
        let _frame = self.life.frame(Frame::Evict);
        let now = self.now();
        if let Err(error) = reclaimer.keep_ready(|| now, pages, &|| true) {
            self.life.expect_trouble(&*error);
        }
    }

    fn swap_in(&self, section: SectionNo) {
        let _frame = self.life.frame(Frame::DeviceFault);
        if self.life.world.lock().knobs.eviction == Eviction::AtRandom {
            let pages = self.space.table().pages_of(section);
            for first in pages.iter().step_by(SWAP_IN_PAGES) {
                let end = first.plus(SWAP_IN_PAGES as u64).min(pages.end);
                let cause = Cause::Readahead(Readahead::SwapIn(PageRange::new(first, end)));
                self.space.fault(&cause, Wait::Never);
            }
            return;
        }
        let Ok(mut reclaimer) = self.reclaimer.try_lock() else {
            return;
        };
        let now = self.now();
        if let Some(wanted) = reclaimer.wanted_back(now) {
            reclaimer.swap_in(|| now, wanted, SECTION_PAGES, &|| true);
        }
    }

    fn demote(&self, section: SectionNo) {
        let _frame = self.life.frame(Frame::Evict);
        let mut demoter = Demoter::new(self.space.clone(), self.store.clone());
        let done = demoter.demote(section, &Between(self.life.clone()));
        match done.stop {
            None | Some(DemotionStop::Paced) => {}
            Some(DemotionStop::Store(why)) if why.is_full() => {}
            Some(why) => self.life.expect_trouble(&why),
        }
        let coverage = &mut self.life.world.lock().coverage;
        coverage.demoted_pages += done.pages;
        // The guest needed some of them, or they were evicted anew, while they were copied.
        coverage.demotions_in_vain += u64::from(done.unused_pages > 0);
    }

    /// Beside the reclaimer, and beside others that do the same.
    fn take_directly(&self, pages: u64) {
        let _frame = self.life.frame(Frame::Evict);
        // Nothing here forbids eviction.
        self.limit.reserve().open(Duration::MAX);
        let evicted = self.direct.make_room(pages);
        self.life.world.lock().coverage.directly_evicted_pages += evicted;
    }

    /// A device touches a section, as its policy has it.
    fn protect_some_section(&self) {
        let at = self.now();
        let section = {
            let mut state = self.life.world.lock();
            state.random.coin().then(|| state.active_page().section())
        };
        let mut protector = (self.protector.lock()).unwrap_or_else(PoisonError::into_inner);
        if let Some(section) = section {
            let touch = Touch {
                section,
                at,
                access: Access::Write,
                bytes: PAGE_BYTES,
            };
            protector.touched(device_id(0), touch);
        }
    }

    fn assert_protected_are_spared(&self, reach: Reach) {
        let protector = (self.protector.lock()).unwrap_or_else(PoisonError::into_inner);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let coverage = &mut self.life.world.lock().coverage;
        for (section, took) in taken.drain(..) {
            match took {
                Took::Whole => coverage.sections_taken_whole += 1,
                Took::Part => coverage.sections_taken_in_part += 1,
            }
            let was_protected = protector.protected().contains(section);
            assert_eq!(was_protected, reach == Reach::Protected, "{section:?}");
            if was_protected {
                coverage.evicted_though_protected += 1;
            } else if !protector.protected().is_empty() {
                coverage.evicted_beside_protected += 1;
            }
        }
    }

    /// Room for `pages` more, made by whoever needs it.
    fn make_room(&self, pages: u64) {
        let directly = self.life.world.lock().random.coin();
        if directly {
            self.take_directly(pages);
            return;
        }
        if self.life.world.lock().knobs.eviction == Eviction::Reclaimer {
            self.scan();
            let wait_ms = u64::try_from(UNMAPPED_MIN.as_millis()).expect("some milliseconds");
            self.life.world.lock().pass_time(wait_ms);
            let pages = pages.max(self.limit.headroom().pages_to_high());
            self.reclaim_rested(pages, Reach::AllResting);
            return;
        }
        let task = Task::random_eviction(&mut self.life.world.lock());
        if let Some(task) = task {
            self.perform(task);
        }
    }

    fn now(&self) -> Duration {
        now_of(&self.life)
    }
}

fn now_of(life: &Life) -> Duration {
    Duration::from_millis(life.world.lock().now_ms)
}

fn begin_life(world: &Arc<World>) -> Life {
    let mut state = world.lock();
    state.incarnation += 1;
    state.alive = true;
    Life {
        world: world.clone(),
        number: state.incarnation,
    }
}

/// Without its vCPUs a VM is not taken over. Nothing else goes on before.
fn attach_to_the_end(life: &Life, whole: &Arc<AddressSpace>, device: &Arc<Device>) {
    let _frame = life.frame(Frame::Grow);
    while let Err(error) = whole.attach_ungranted(device, Mode::Coherent) {
        life.expect_trouble(&error);
        if life.world.lock().gone {
            return;
        }
        // Memory that went just now is in the way.
        let gone = life.world.lock().pages_to_remove();
        if let (Some(pages), Some(memory)) = (gone, whole.memory())
            && let Err(error) = memory.deallocate(pages)
        {
            life.expect_trouble(&error);
        }
    }
}

fn hooked_words(life: &Life, pool: &Arc<Pool>) -> Box<Words> {
    Box::new(Words {
        life: life.clone(),
        pool: PoolWords::of(pool.clone()),
        nowhere: AtomicU64::new(0),
    })
}

fn device_id(device: usize) -> DeviceId {
    DeviceId(1 + u32::try_from(device).expect("few devices"))
}

impl Life {
    fn answer(&self, ticket: u64, id: u64, tell: impl FnOnce(&mut State)) {
        if std::thread::panicking() {
            return;
        }
        let mut state = self.world.lock();
        if state.alive && state.incarnation == self.number {
            assert!(
                state.unanswered.remove(&ticket),
                "request {id} is answered twice"
            );
            tell(&mut state);
        }
    }

    /// Something failed; that is only right if something was made to.
    pub fn expect_trouble<E: std::fmt::Display + ?Sized>(&self, error: &E) {
        if !std::thread::panicking() {
            let state = self.world.lock();
            let right = state.coverage.errors + state.coverage.unplugs > 0 || state.gone;
            assert!(right, "{error}, although nothing was made to fail");
        }
    }

    fn expect_full(&self) {
        let mut state = self.world.lock();
        assert_eq!(state.knobs.room, Room::Scarce, "the store is full");
        state.coverage.store_full += 1;
    }
}

/// The store, with calls that may fail.
struct Checked {
    life: Life,
    store: Arc<ChainStore>,
    /// Content that takes time.
    far: Far,
}

impl ContentStore for Checked {
    fn load(
        &self,
        page: PageNo,
        content: Content,
        into: &mut [u8; 4096],
    ) -> Result<(), StoreError> {
        let fails = self.life.enter(Call::Locked).is_none_or(|mut s| s.fails());
        if fails {
            return Err(StoreError::Unreadable {
                page,
                source: std::io::Error::other("injected"),
            });
        }
        self.store.load(page, content, into)
    }

    fn free(&self, content: Content) {
        let lives = self.life.enter(Call::Locked).is_some();
        if lives {
            self.store.free(content);
        }
    }

    fn load_later(&self, page: PageNo, content: Content, done: LoadDone) {
        let Some(mut state) = self.life.enter(Call::Locked) else {
            return drop(done);
        };
        match Located::of(content) {
            Ok(Located::Slow(place)) => {
                let at = (place.extent.0, place.position.0);
                state.slow_pages.insert(at, page);
                state.slow_wrong.remove(&at);
                drop(state);
                self.store.load_later(page, content, done);
            }
            _ => state.loads.push((content, done)),
        }
    }

    fn is_at_hand(&self, content: Content) -> bool {
        if matches!(Located::of(content), Ok(Located::Slow(_))) {
            return false;
        }
        match self.far {
            Far::Nothing => true,
            // A slot that begins at an even unit.
            Far::Half => match Located::of(content) {
                Ok(Located::Pool(place)) => {
                    (place.slot.byte_offset() / SLOT_UNIT_BYTES).is_multiple_of(2)
                }
                Ok(Located::Same(_) | Located::Slow(_)) | Err(_) => true,
            },
            Far::All => false,
        }
    }
}

/// The limit; instead of waiting for the reclaimer, a fill that may do so does its work.
struct AtTheLimit {
    life: Life,
    limit: Arc<Limit>,
}

impl Admission for AtTheLimit {
    fn admit(&self, pages: u64) {
        // Outer tasks may hold locks that an eviction needs.
        let alone = self.life.world.lock().frames.len() == 1;
        if alone
            && !has_room(&self.limit, pages)
            && let Some(daemon) = self.life.world.daemon()
        {
            daemon.make_room(pages);
        }
        if !has_room(&self.limit, pages) {
            self.life.world.lock().coverage.over_limit_pages += pages;
        }
        self.limit.admit(pages);
    }

    fn try_admit(&self, pages: u64) -> bool {
        self.limit.try_admit(pages)
    }

    fn give_back(&self, pages: u64) {
        self.limit.give_back(pages);
    }

    fn count_in(&self, pages: u64) {
        self.limit.count_in(pages);
    }
}

/// True if the limit believes in room for `pages` more.
pub fn has_room(limit: &Limit, pages: u64) -> bool {
    let has = limit.try_admit(pages);
    if has {
        limit.give_back(pages);
    }
    has
}

/// Whoever is told of trouble.
struct IncidentLog(Life);

impl Incidents for IncidentLog {
    fn foreign_page(&self, page: PageNo) {
        self.0.world.lock().foreign_pages.push(page);
    }

    fn poisoned(&self, page: PageNo, _why: &StoreError) {
        if let Some(mut state) = self.0.enter(Call::Locked) {
            assert!(
                state.page(page).damaged,
                "{page:?} was never damaged, and its content is lost"
            );
            state.quarantined += 1;
        }
    }

    fn cannot_poison(&self, page: PageNo, why: &pagetide_gmem::PlaceError) {
        self.fill_failed(page, why);
    }

    fn fill_failed(&self, _page: PageNo, why: &dyn std::error::Error) {
        self.0.expect_trouble(why);
    }
}
