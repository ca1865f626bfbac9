// SPDX-License-Identifier: Apache-2.0
//! [`HeldRig`]: reader, servers, address space and store as a daemon puts them together, in this
//! process, with two differences: the fill of one page is delayed until it is released, and there is no
//! readahead, so that each page is one fault.
//!
//! To a fault this looks like a slow tier. The page is the guest's last; its fault is held from before the
//! start of the others until all of them are served, and for [`HOLD_MIN`] at least.

use super::Turn;
use crate::fault::{
    guest::{Answer, Beside, Order},
    process::Guest,
};
use pagetide_addr::{Access, DeviceId, PageNo, PageRange, PageSet, Va};
use pagetide_gmem::{
    Activation, AddressSpace, AllocPolicy, Cause, Content, ContentStore, Device, Fault,
    FaultOutcome, Incidents, LoadDone, MemoryParts, Mode, PageState, PageTable, PagedMemory,
    PlaceError, RegionRequest, StoreError, Unlimited, VolatileWords, Wait,
};
use pagetide_swap::{Evictor, Pool, PoolStore};
use pagetide_sys::uffd::Userfaultfd;
use pagetide_vmm::{
    layout::{LiveLayout, RamLayout},
    place::{VcpuMmu, VmPlace},
    process::VmmProcess,
    reader::{FaultReader, FaultSink, ReaderConfig, ReaderError, Served, VcpuFault},
    takeover::{let_go, take_over},
};
use std::{
    error::Error,
    fmt::Display,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    time::{Duration, Instant},
};

/// Least time for which a fault is held.
const HOLD_MIN: Duration = Duration::from_millis(50);
/// Longest wait until it is held.
const HOLD_WAIT: Duration = Duration::from_secs(10);

/// See the module.
pub(super) struct HeldRig {
    pool: PathBuf,
}

fn said(error: impl Display) -> String {
    error.to_string()
}

impl HeldRig {
    /// With its pool in `dir`.
    pub(super) fn new(dir: &Path) -> Self {
        Self {
            pool: dir.join("held.pool"),
        }
    }

    /// Takes `guest` over, evicts all of it, makes it execute `order`, and detaches it.
    pub(super) fn turn(&self, guest: &mut Guest, order: &Order) -> Result<Turn, String> {
        let vmm = VmmProcess::open(guest.pid()).map_err(said)?;
        let layout = RamLayout::of_process(&vmm).map_err(said)?;
        let taken = take_over(&vmm, &layout).map_err(said)?;
        let userfaultfd = Arc::new(taken.userfaultfd);
        let pages = layout.page_count();
        let layout = Arc::new(LiveLayout::new(layout));
        let pool = Pool::create(&self.pool, pages, 0, b"").map_err(said)?;
        let hold = Arc::new(Hold::default());
        let store = Arc::new(PoolStore::new(Arc::new(pool)));
        let held = Arc::new(HeldStore {
            store: Arc::clone(&store),
            hold: Arc::clone(&hold),
        });
        let (space, memory) = space_of(&userfaultfd, &layout, held, pages)?;
        let sink = Arc::new(Sink(space));
        let (config, cpus) = (ReaderConfig::default(), Arc::default());
        let (watched, known) = (Arc::clone(&userfaultfd), Arc::clone(&layout));
        let reader = FaultReader::start(&vmm, watched, known, sink, config, &cpus).map_err(said)?;
        let turn = evict(&memory, &store).and_then(|()| {
            let last = memory.table().word(PageNo(pages - 1)).state();
            timed(guest, order, &hold, last)
        });
        hold.let_go();
        let back = bring_back(&memory, pages);
        let gone = let_go(&vmm, &layout.now(), &userfaultfd, taken.number).map_err(said);
        reader.stop();
        store.pool().remove().map_err(said)?;
        back.and(gone)?;
        turn
    }
}

fn timed(guest: &mut Guest, order: &Order, hold: &Hold, last: PageState) -> Result<Turn, String> {
    let Order::TouchTogether { beside, .. } = order else {
        return Err(format!("{order:?} is not for this rig"));
    };
    if *beside == Beside::Nothing {
        return Turn::take(guest, order);
    }
    let PageState::Stored(content) = last else {
        return Err(format!("the last page is {last:?} and cannot be held"));
    };
    hold.begin(content);
    guest.begin(order)?;
    let since = hold.wait_until_held()?;
    let turn = guest.obey(&Order::Go).and_then(Turn::of);
    // The rest of the time is only waiting.
    hold.let_go_after(since + HOLD_MIN);
    match guest.answer()? {
        Answer::Done => turn,
        other => Err(format!("the guest ended with {other:?}")),
    }
}

fn space_of(
    userfaultfd: &Arc<Userfaultfd>,
    layout: &Arc<LiveLayout>,
    store: Arc<HeldStore>,
    pages: u64,
) -> Result<(Arc<AddressSpace>, Arc<PagedMemory>), String> {
    let words = VolatileWords::with_capacity(pages);
    let memory = PagedMemory::new(MemoryParts {
        table: PageTable::growing(Box::new(words)),
        place: Arc::new(VmPlace::new(Arc::clone(userfaultfd), Arc::clone(layout))),
        store,
        admission: Arc::new(Unlimited),
        incidents: Arc::new(LoggedIncidents),
        neighbours_max: 0,
    });
    let end = Va(PageNo(pages).byte_offset());
    let space = AddressSpace::over(memory, Va(0), end, AllocPolicy::default()).map_err(said)?;
    let memory = space.memory().map(Arc::clone);
    let memory = memory.ok_or("an address space without memory")?;
    let mmu = VcpuMmu::new(Arc::clone(userfaultfd), Arc::clone(layout));
    let vcpus = Device::with_id(DeviceId::VCPUS, Arc::new(mmu));
    space
        .attach(&vcpus, Mode::Coherent, Activation::Now)
        .map_err(said)?;
    let all = PageNo(0).run(pages);
    memory.make_room_for(all).map_err(said)?;
    let request = RegionRequest::of_bytes(PageNo(pages).byte_offset());
    space.alloc(&request).map_err(said)?;
    Ok((space, memory))
}

/// Evicts all pages; the guest does nothing meanwhile.
fn evict(memory: &Arc<PagedMemory>, store: &Arc<PoolStore>) -> Result<(), String> {
    let mut evictor = Evictor::new(Arc::clone(memory), Arc::clone(store));
    let table = memory.table();
    for section in table.sections() {
        let present = table.pages_in_state(section, |state| state == PageState::Present);
        let none = || Ok(PageSet::EMPTY);
        evictor
            .evict(section, &present, u64::MAX, none, |_| {
                ControlFlow::Continue(())
            })
            .map_err(said)?;
    }
    let left: u64 = table
        .sections()
        .map(|section| table.pages_of(section).len() - table.stored_pages(section))
        .sum();
    match left {
        0 => Ok(()),
        _ => Err(format!("{left} pages are not evicted")),
    }
}

/// Fills every page that is still absent.
fn bring_back(memory: &PagedMemory, pages: u64) -> Result<(), String> {
    let (reply, outcomes) = mpsc::channel();
    for page in (0..pages).map(PageNo) {
        let fault = Fault {
            device: DeviceId(1),
            pages: page.single(),
            access: Access::Write,
        };
        let reply = reply.clone();
        // The thread that filled a page for a vCPU may not have written its word yet.
        let told = move |outcome| {
            if reply.send(outcome).is_err() {
                tracing::debug!("the bench has given up");
            }
        };
        memory.fault(&Cause::Fault(fault), Wait::Reply(Box::new(told)));
        match outcomes.recv() {
            Ok(FaultOutcome::Present) => {}
            other => return Err(format!("{page} cannot be filled: {other:?}")),
        }
    }
    Ok(())
}

/// Serves faults as a daemon does.
struct Sink(Arc<AddressSpace>);

fn of_vcpu(fault: VcpuFault) -> Cause<'static> {
    Cause::Fault(Fault {
        device: DeviceId::VCPUS,
        pages: fault.page.single(),
        access: fault.access,
    })
}

impl FaultSink for Sink {
    fn fault_at_once(&self, fault: VcpuFault) -> Served {
        match self.0.fault(&of_vcpu(fault), Wait::Begin) {
            Some(_served) => Served::Yes,
            None => Served::WouldWait,
        }
    }

    fn fault(&self, fault: VcpuFault) {
        self.0.fault(&of_vcpu(fault), Wait::Here);
    }

    fn served(&self, _fault: VcpuFault) -> Option<PageRange> {
        None
    }

    fn bring_along(&self, _pages: PageRange) {}

    fn vmm_gone(&self) {}

    fn reader_failed(&self, error: &ReaderError) {
        tracing::error!(%error, "faults of the bench's guest are not served any more");
    }
}

struct LoggedIncidents;

impl Incidents for LoggedIncidents {
    fn foreign_page(&self, page: PageNo) {
        tracing::error!(%page, "another process writes to the RAM of the bench's guest");
    }

    fn poisoned(&self, page: PageNo, why: &StoreError) {
        tracing::error!(%page, %why, "content of the bench's guest is lost");
    }

    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        tracing::error!(%page, %why, "a lost page cannot be made to fail");
    }

    fn fill_failed(&self, page: PageNo, why: &dyn Error) {
        tracing::error!(%page, %why, "a page could not be served");
    }
}

/// The state of the held fault.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum Stage {
    #[default]
    Open,
    /// This content will be held.
    Armed(Content),
    /// A thread waits for it, since then.
    Held(Content, Instant),
}

#[derive(Default)]
struct Hold {
    stage: Mutex<Stage>,
    changed: Condvar,
}

impl Hold {
    fn begin(&self, content: Content) {
        *self.lock() = Stage::Armed(content);
    }

    fn let_go(&self) {
        *self.lock() = Stage::Open;
        self.changed.notify_all();
    }

    /// Waits until a thread waits; returns since when.
    fn wait_until_held(&self) -> Result<Instant, String> {
        let waiting = |stage: &mut Stage| !matches!(stage, Stage::Held(..));
        let waited = (self.changed).wait_timeout_while(self.lock(), HOLD_WAIT, waiting);
        match *waited.unwrap_or_else(PoisonError::into_inner).0 {
            Stage::Held(_, since) => Ok(since),
            Stage::Open | Stage::Armed(_) => Err("the last page was not asked for".to_owned()),
        }
    }

    fn let_go_after(&self, until: Instant) {
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        self.let_go();
    }

    /// True if `content` must be held.
    fn holds(&self, content: Content) -> bool {
        match *self.lock() {
            Stage::Open => false,
            Stage::Armed(held) | Stage::Held(held, _) => held == content,
        }
    }

    /// Waits while `content` is held.
    fn wait(&self, content: Content) {
        if !self.holds(content) {
            return;
        }
        let mut stage = self.lock();
        *stage = Stage::Held(content, Instant::now());
        self.changed.notify_all();
        let held = |stage: &mut Stage| *stage != Stage::Open;
        drop(self.changed.wait_while(stage, held));
    }

    fn lock(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The store, one page of which is slow.
struct HeldStore {
    store: Arc<PoolStore>,
    hold: Arc<Hold>,
}

impl ContentStore for HeldStore {
    fn load(
        &self,
        page: PageNo,
        content: Content,
        into: &mut [u8; 4096],
    ) -> Result<(), StoreError> {
        self.hold.wait(content);
        self.store.load(page, content, into)
    }

    /// As a slow tier does: whoever asks does not wait.
    fn load_later(&self, page: PageNo, content: Content, done: LoadDone) {
        let (store, hold) = (Arc::clone(&self.store), Arc::clone(&self.hold));
        let load = move || {
            hold.wait(content);
            let mut bytes = [0; 4096];
            let loaded = store.load(page, content, &mut bytes);
            done.complete(loaded.map(|()| &bytes));
        };
        let thread = std::thread::Builder::new().name("held".to_owned());
        if let Err(error) = thread.spawn(load) {
            tracing::error!(%page, %error, "no thread for the page that is held");
        }
    }

    fn free(&self, content: Content) {
        self.store.free(content);
    }

    fn is_at_hand(&self, content: Content) -> bool {
        !self.hold.holds(content)
    }
}
