// SPDX-License-Identifier: Apache-2.0
//! A simulated machine: physical memory, page tables, and devices that cache translations.
//!
//! ```text
//!   Actor::read ──► TLB of the device ──► its page table ──► words of a frame
//!                        │ stale until invalidated  │ nothing there
//!                        ▼                          ▼
//!                  what it says is used        Device::fault, and again
//! ```
//! One lock is held over each access and each operation of an MMU, so an access
//! either is over before an invalidation or comes after it. An *eager* machine
//! lets every active device look up every page after each operation, so that its
//! TLB holds all that could ever be in it: what is not invalidated stays
//! reachable, and is found.
//!
//! The machine knows rules that hold whoever calls it, and keeps what breaks
//! them ([`World::violations`]): a frame that is filled or copied is reached by
//! nobody, no frame is behind two pages, a table in use is not destroyed.

/// The expression is this error.
macro_rules! refused {
    ($result:expr, $error:pat $(if $condition:expr)?) => {
        match $result {
            Err($error) $(if $condition)? => {}
            other => panic!("{other:?} is not {}", stringify!($error)),
        }
    };
}
pub(crate) use refused;

mod actor;
mod place;
mod plan;

pub use actor::{Actor, Build, DRIVERS_PANIC, Stopped};
pub use place::Ram;
pub use plan::{Failing, Fails, Op};

use pagetide_addr::{Access, PAGE_BYTES, PAGE_SHIFT, Pa, PageNo, PageRange, Va, to_usize};
use pagetide_gmem::{
    Activation, AddressSpace, AllocPolicy, MapOptions, MmuError, Mode, PhysicalMemory, Region,
    RegionRequest,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Words of eight bytes in a page.
pub const PAGE_WORDS: u64 = PAGE_BYTES / 8;
/// Frames that a test wires itself begin here.
pub const OWN_FRAMES: u64 = 0x1000_0000;
/// Where an absent page's slot would be: see [`Ram`].
pub const HOME: u64 = 0x8_0000_0000;

/// A translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Its frame.
    pub pa: u64,
    pub access: Access,
}

impl Entry {
    fn allows(self, access: Access) -> bool {
        access == Access::Read || self.access == Access::Write
    }
}

#[derive(Default)]
pub struct Table {
    pub entries: BTreeMap<u64, Entry>,
    pub destroyed: u32,
}

/// A device as the hardware sees it.
#[derive(Default)]
pub struct Unit {
    pub active: Option<u64>,
    pub tlb: BTreeMap<u64, Entry>,
    pub counts: HashMap<Op, u32>,
    pub faults: u32,
}

/// Where a page can be reached from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reach {
    pub unit: Option<usize>,
    pub table: Option<u64>,
    pub page: u64,
    pub entry: Entry,
}

/// What happened, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// An operation on a unit (the one that made the table, for translations).
    Did(Op, usize),
    /// Something that a test put in between.
    Note(&'static str, u64),
}

#[derive(Default)]
pub struct World {
    pub memory: HashMap<u64, Vec<u64>>,
    pub tables: BTreeMap<u64, Table>,
    pub units: Vec<Unit>,
    pub counts: HashMap<Op, u32>,
    pub failing: Option<Failing>,
    /// What fails beside it, as where an operation cannot be undone.
    pub failing_too: Option<Failing>,
    /// The plan has failed an operation.
    pub failed: u32,
    pub violations: Vec<String>,
    pub events: Vec<Event>,
    pub copied_pages: u64,
    pub prepared_pages: u64,
    /// Pages that nobody may reach.
    pub forbidden: BTreeSet<u64>,
    pub eager: bool,
    /// Called before each operation, with nothing locked that is the machine's: for what a test does
    /// in the middle of something. One that names the machine must be taken out again.
    pub before_each: Option<BeforeEach>,
    /// A device that is active may be activated for another table: its space is at its end.
    pub spaces_end: bool,
    next_table: u64,
}

/// See [`World::before_each`]: the operation, and the unit it is asked of.
pub type BeforeEach = Arc<dyn Fn(Op, usize) + Send + Sync>;

/// No test forgets to ask whether a rule was broken.
impl Drop for World {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(self.violations.is_empty(), "{:#?}", self.violations);
        }
    }
}

impl World {
    pub fn word(&mut self, pa: u64) -> &mut u64 {
        let frame = self.memory.entry(pa & !(PAGE_BYTES - 1));
        let words = frame.or_insert_with(|| vec![0xdead; to_usize(PAGE_WORDS)]);
        &mut words[to_usize((pa % PAGE_BYTES) / 8)]
    }

    fn frame(&self, pa: u64) -> Vec<u64> {
        let known = self.memory.get(&pa).cloned();
        known.unwrap_or_else(|| vec![0xdead; to_usize(PAGE_WORDS)])
    }

    pub fn violation(&mut self, what: String) {
        self.violations.push(what);
    }

    /// All translations that a device could use now (`unit`), or after it is activated (`table`).
    pub fn reaches(&self) -> Vec<Reach> {
        let mut found = Vec::new();
        for (unit, state) in self.units.iter().enumerate() {
            for (page, entry) in &state.tlb {
                found.push(Reach {
                    unit: Some(unit),
                    table: None,
                    page: *page,
                    entry: *entry,
                });
            }
        }
        for (number, table) in self.tables.iter().filter(|(_, table)| table.destroyed == 0) {
            for (page, entry) in &table.entries {
                found.push(Reach {
                    unit: None,
                    table: Some(*number),
                    page: *page,
                    entry: *entry,
                });
            }
        }
        found
    }

    fn nobody_reaches(&mut self, frame: u64, while_it_is: &str) {
        if let Some(reach) = self
            .reaches()
            .into_iter()
            .find(|reach| reach.entry.pa == frame)
        {
            self.violation(format!("{frame:#x} is {while_it_is} while in {reach:?}"));
        }
    }

    /// What every device could do is done, and looked at.
    fn after_each_operation(&mut self) {
        if self.eager {
            for unit in &mut self.units {
                let Some(table) = unit.active.and_then(|number| self.tables.get(&number)) else {
                    continue;
                };
                for (page, entry) in &table.entries {
                    // What it has cached stays; what is new is cached.
                    unit.tlb.entry(*page).or_insert(*entry);
                }
            }
        }
        if self.forbidden.is_empty() {
            return;
        }
        for reach in self.reaches() {
            if self.forbidden.contains(&reach.page) {
                self.violation(format!("reached after its callback: {reach:?}"));
            }
        }
    }

    /// One page's translation is made.
    fn enter(&mut self, table: u64, page: u64, entry: Entry) {
        let other = |reach: &Reach| reach.entry.pa == entry.pa && reach.page != page;
        if let Some(reach) = self.reaches().into_iter().find(other) {
            let pa = entry.pa;
            self.violation(format!("{pa:#x} for page {page} is still in {reach:?}"));
        }
        let Some(known) = self.tables.get_mut(&table) else {
            self.violation(format!("table {table} was never made"));
            return;
        };
        if known.destroyed > 0 {
            self.violation(format!("granted in table {table}, which is destroyed"));
            return;
        }
        known.entries.insert(page, entry);
    }

    /// How a device reaches `page`: by its TLB, else by its table.
    fn translate(&mut self, unit: usize, page: u64, access: Access) -> Option<u64> {
        let state = &mut self.units[unit];
        if let Some(entry) = state.tlb.get(&page) {
            return entry.allows(access).then_some(entry.pa);
        }
        let table = self.tables.get(&state.active?)?;
        let entry = *table.entries.get(&page)?;
        if !entry.allows(access) {
            return None;
        }
        state.tlb.insert(page, entry);
        Some(entry.pa)
    }
}

/// The machine; clones are the same one.
#[derive(Clone, Default)]
pub struct Machine(Arc<Mutex<World>>);

impl Machine {
    pub fn new() -> Self {
        Self::default()
    }

    /// A machine whose devices look up every page after each operation.
    pub fn eager() -> Self {
        let machine = Self::default();
        machine.world().eager = true;
        machine
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn count(&self, op: Op) -> u32 {
        self.world().counts.get(&op).copied().unwrap_or(0)
    }

    /// Operations on translations: what an unmap costs.
    pub fn mmu_operations(&self) -> u32 {
        self.count(Op::Restrict) + self.count(Op::Invalidate) + self.count(Op::Grant)
    }

    /// From now on `act` is called before each operation of kind `op`.
    pub fn before_each(&self, op: Op, act: impl Fn() + Send + Sync + 'static) {
        let only = move |asked, _| {
            if asked == op {
                act();
            }
        };
        self.world().before_each = Some(Arc::new(only));
    }

    /// The test's own doings before an operation.
    fn interrupt(&self, op: Op, unit: usize) {
        let before_each = self.world().before_each.clone();
        if let Some(act) = before_each {
            act(op, unit);
        }
    }

    pub fn note(&self, what: &'static str, number: u64) {
        self.world().events.push(Event::Note(what, number));
    }

    /// From now on reaching one of `pages` breaks a rule; looked at at once, too.
    pub fn forbid(&self, pages: PageRange) {
        let mut world = self.world();
        world.forbidden.extend(pages.iter().map(|page| page.0));
        world.after_each_operation();
    }

    pub fn permit(&self, pages: PageRange) {
        let mut world = self.world();
        world
            .forbidden
            .retain(|page| !pages.contains(PageNo(*page)));
    }

    /// Nothing broke a rule so far.
    #[track_caller]
    pub fn assert_sound(&self) {
        let world = self.world();
        assert!(world.violations.is_empty(), "{:#?}", world.violations);
    }

    /// Nobody can reach any of `pages`, now or when a device is activated.
    #[track_caller]
    pub fn assert_unreachable(&self, pages: PageRange) {
        for reach in self.world().reaches() {
            assert!(!pages.contains(PageNo(reach.page)), "{reach:?}");
        }
    }

    /// Tables that are made and not destroyed.
    pub fn live_tables(&self) -> usize {
        let world = self.world();
        world
            .tables
            .values()
            .filter(|table| table.destroyed == 0)
            .count()
    }

    /// Asks for an operation: counts it, and says whether it is to fail.
    fn ask(&self, world: &mut World, op: Op, unit: usize) -> Option<Fails> {
        let count = world.counts.entry(op).or_default();
        *count += 1;
        let number = *count;
        *world.units[unit].counts.entry(op).or_default() += 1;
        world.events.push(Event::Did(op, unit));
        let fails = world
            .failing
            .as_ref()
            .and_then(|plan| plan.fails(op, number));
        if fails.is_some() {
            world.failed += 1;
        }
        let too = world.failing_too.as_ref();
        fails.or_else(|| too.and_then(|plan| plan.fails(op, number)))
    }

    /// Physical memory with its engine, as unit `unit` works it.
    fn engine(&self, unit: usize) -> Arc<dyn PhysicalMemory> {
        Arc::new(Engine {
            machine: self.clone(),
            unit,
        })
    }
}

struct Engine {
    machine: Machine,
    unit: usize,
}

fn refusal(operation: &'static str) -> MmuError {
    MmuError::Driver { operation, code: 5 }
}

impl PhysicalMemory for Engine {
    fn prepare(&self, frame: Pa, bytes: u64) -> Result<(), MmuError> {
        self.machine.interrupt(Op::Prepare, self.unit);
        let mut world = self.machine.world();
        let fails = self.machine.ask(&mut world, Op::Prepare, self.unit);
        assert_eq!(bytes, PAGE_BYTES);
        world.nobody_reaches(frame.0, "filled");
        if fails == Some(Fails::Panics) {
            std::panic::resume_unwind(Box::new(DRIVERS_PANIC));
        }
        if fails.is_some() {
            return Err(refusal("prepare"));
        }
        world.prepared_pages += 1;
        let zeros = vec![0; to_usize(PAGE_WORDS)];
        world.memory.insert(frame.0, zeros);
        world.after_each_operation();
        Ok(())
    }

    fn copy(&self, from: Pa, to: Pa, bytes: u64) -> Result<(), MmuError> {
        self.machine.interrupt(Op::Copy, self.unit);
        let mut world = self.machine.world();
        let fails = self.machine.ask(&mut world, Op::Copy, self.unit);
        assert_eq!(bytes, PAGE_BYTES);
        world.nobody_reaches(from.0, "copied from");
        world.nobody_reaches(to.0, "copied to");
        if fails == Some(Fails::Panics) {
            std::panic::resume_unwind(Box::new(DRIVERS_PANIC));
        }
        if fails.is_some() {
            return Err(refusal("copy"));
        }
        world.copied_pages += 1;
        let content = world.frame(from.0);
        world.memory.insert(to.0, content);
        world.after_each_operation();
        Ok(())
    }
}

/// Frames of the test's own, `count` of them from the `first`th on.
pub fn own_frames(first: u64, count: u64) -> Vec<Pa> {
    (first..first + count)
        .map(|number| Pa(OWN_FRAMES + (number << PAGE_SHIFT)))
        .collect()
}

/// Spaces of tests begin here: at a border of huge pages, and not at 0.
pub const SPACE_BEGIN: u64 = 4 << 20;

/// A space of so many pages.
pub fn space_of(pages: u64) -> Arc<AddressSpace> {
    space_with(pages, AllocPolicy::default())
}

pub fn space_with(pages: u64, policy: AllocPolicy) -> Arc<AddressSpace> {
    let end = Va(SPACE_BEGIN + (pages << PAGE_SHIFT));
    AddressSpace::create(Va(SPACE_BEGIN), end, policy).unwrap()
}

/// A space of other addresses: pages tell which of the two they are of.
pub fn other_space_of(pages: u64) -> Arc<AddressSpace> {
    let begin = SPACE_BEGIN * 16;
    let end = Va(begin + (pages << PAGE_SHIFT));
    AddressSpace::create(Va(begin), end, AllocPolicy::default()).unwrap()
}

/// A region of so many pages, anywhere.
#[track_caller]
pub fn region_of(space: &Arc<AddressSpace>, pages: u64) -> Region {
    space
        .alloc(&RegionRequest::of_bytes(pages << PAGE_SHIFT))
        .unwrap()
}

/// Wires a region to the test's own frames from the `first`th on, for reading and writing.
#[track_caller]
pub fn wire(region: &Region, first: u64) {
    let frames = own_frames(first, region.pages().len());
    let options = MapOptions::new(Access::Write);
    region.map(&frames, &options).unwrap();
}

/// Attaches actors with tables of their own, active.
#[track_caller]
pub fn attach_all(space: &Arc<AddressSpace>, actors: &[&Actor]) {
    for actor in actors {
        space
            .attach(&actor.device, Mode::Coherent, Activation::Now)
            .unwrap();
    }
}

/// Ends everything: all must have been given back, which one region over the whole space shows.
#[track_caller]
pub fn end(machine: &Machine, space: &Arc<AddressSpace>, actors: &[&Actor]) {
    for region in space.regions() {
        region.dealloc().unwrap();
    }
    for actor in actors {
        match actor.device.detach(space) {
            Ok(()) | Err(pagetide_gmem::GmError::NotAttached { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        assert_eq!(actor.device.used_memory_bytes(), 0);
    }
    let whole = region_of(space, space.pages().len());
    assert_eq!(whole.pages(), space.pages());
    whole.dealloc().unwrap();
    space.destroy().unwrap();
    assert_eq!(machine.live_tables(), 0);
    machine.assert_unreachable(space.pages());
    machine.assert_sound();
}
