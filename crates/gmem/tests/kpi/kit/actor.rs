// SPDX-License-Identifier: Apache-2.0
//! [`Actor`]: a device with its MMU, and what its engines do: translate, fault, try again.

use super::{Entry, Fails, Machine, Op, World, refusal};
use pagetide_addr::{
    Access, DeviceId, PAGE_BYTES, PAGE_SHIFT, Pa, PageNo, PageRange, PageSet, SectionNo, Va,
    to_usize,
};
use pagetide_gmem::{
    Activation, AddressSpace, Backing, Device, GmError, Inherited, Mmu, MmuError, MmuLimits, Mode,
    OnAbsent, PageSizes, Restrict, Restricted, TableFormat, TableId,
};
use std::sync::Arc;

/// Faults in a row on one page after which a device gives up: far more than others can steal it.
const FAULTS_MAX: u32 = 100_000;

/// What a driver panics with.
pub const DRIVERS_PANIC: &str = "a driver's panic";

/// What a device is to be like.
pub struct Build {
    pub id: Option<DeviceId>,
    pub on_absent: OnAbsent,
    pub format: Option<u32>,
    pub page_sizes: PageSizes,
    pub inherited: Vec<Inherited>,
    pub strongest: Restrict,
}

impl Default for Build {
    fn default() -> Self {
        Self {
            id: None,
            on_absent: OnAbsent::Recovers,
            format: None,
            page_sizes: PageSizes::of_bits(2 << 20),
            inherited: Vec::new(),
            strongest: Restrict::NoAccess,
        }
    }
}

impl Build {
    pub fn of_format(format: u32) -> Self {
        Self {
            format: Some(format),
            ..Self::default()
        }
    }

    /// A device that cannot wait for a page.
    pub fn failing() -> Self {
        Self {
            on_absent: OnAbsent::Fails,
            ..Self::default()
        }
    }
}

/// Why an access did not happen.
#[derive(Debug)]
pub enum Stopped {
    /// A device that cannot recover met no translation.
    NoTranslation,
    /// The fault was refused.
    Refused(GmError),
}

/// A device at work.
#[derive(Clone)]
pub struct Actor {
    pub device: Arc<Device>,
    pub machine: Machine,
    pub unit: usize,
}

impl Machine {
    pub fn actor(&self, build: Build) -> Actor {
        let unit = {
            let mut world = self.world();
            world.units.push(super::Unit::default());
            world.units.len() - 1
        };
        let id = build.id;
        let mmu = Arc::new(SimulatedMmu {
            machine: self.clone(),
            unit,
            build,
        });
        let device = match id {
            Some(id) => Device::with_id(id, mmu),
            None => Device::create(mmu),
        };
        Actor {
            device,
            machine: self.clone(),
            unit,
        }
    }

    /// A device as most are.
    pub fn gpu(&self) -> Actor {
        self.actor(Build::default())
    }

    /// The host's CPU.
    pub fn cpu(&self) -> Actor {
        self.actor(Build {
            id: Some(DeviceId::VCPUS),
            ..Build::default()
        })
    }

    /// A CPU and a device with so many frames of memory each.
    pub fn cpu_and_gpu(&self, frames: u64) -> (Actor, Actor) {
        let (cpu, gpu) = (self.cpu(), self.gpu());
        cpu.give_memory(0x100_0000, frames);
        gpu.give_memory(0x4000_0000, frames);
        (cpu, gpu)
    }
}

impl Actor {
    /// Registers `frames` frames of memory from `begin` on.
    pub fn give_memory(&self, begin: u64, frames: u64) {
        let end = Pa(begin + (frames << PAGE_SHIFT));
        let engine = self.machine.engine(self.unit);
        self.device
            .register_physmem(Pa(begin), end, engine)
            .unwrap();
    }

    /// Attaches the device, active.
    pub fn join(&self, space: &Arc<AddressSpace>, mode: Mode) -> Result<(), GmError> {
        space.attach(&self.device, mode, Activation::Now)
    }

    /// One access: by the TLB, by the table, or by a fault and again. Returns the faults it took.
    pub fn access<R>(
        &self,
        va: u64,
        access: Access,
        mut act: impl FnMut(&mut u64) -> R,
    ) -> Result<(R, u32), Stopped> {
        let page = va >> PAGE_SHIFT;
        for faults in 0..FAULTS_MAX {
            {
                let mut world = self.machine.world();
                if let Some(frame) = world.translate(self.unit, page, access) {
                    let done = act(world.word(frame + va % PAGE_BYTES));
                    return Ok((done, faults));
                }
                if self.device.limits().on_absent == OnAbsent::Fails {
                    return Err(Stopped::NoTranslation);
                }
                // It asks anew for what it was refused: nothing of it is kept.
                world.units[self.unit].tlb.remove(&page);
                world.units[self.unit].faults += 1;
            }
            self.device
                .fault(Va(va), access)
                .map_err(Stopped::Refused)?;
        }
        panic!("page {page} cannot be had by {FAULTS_MAX} faults");
    }

    pub fn try_read(&self, va: u64) -> Result<u64, Stopped> {
        self.access(va, Access::Read, |word| *word)
            .map(|(value, _)| value)
    }

    pub fn try_write(&self, va: u64, value: u64) -> Result<(), Stopped> {
        self.access(va, Access::Write, |word| *word = value)
            .map(|((), _)| ())
    }

    #[track_caller]
    pub fn read(&self, va: u64) -> u64 {
        self.try_read(va).unwrap()
    }

    #[track_caller]
    pub fn write(&self, va: u64, value: u64) {
        self.try_write(va, value).unwrap();
    }

    /// The error that an access is refused with.
    #[track_caller]
    pub fn refused(&self, va: u64, access: Access) -> GmError {
        match self.access(va, access, |_| ()) {
            Err(Stopped::Refused(error)) => error,
            other => panic!("{other:?} at {va:#x}"),
        }
    }

    /// Writes a pattern of its own into every word of `pages`; returns the faults.
    #[track_caller]
    pub fn fill(&self, pages: PageRange, seed: u64) -> u32 {
        self.each_word(pages, Access::Write, |va, word| *word = va ^ seed)
    }

    /// Checks the pattern in every word of `pages`; returns the faults.
    #[track_caller]
    pub fn verify(&self, pages: PageRange, seed: u64) -> u32 {
        self.each_word(pages, Access::Read, |va, word| {
            assert_eq!(*word, va ^ seed, "at {va:#x}");
        })
    }

    #[track_caller]
    pub fn verify_zero(&self, pages: PageRange) -> u32 {
        self.each_word(pages, Access::Read, |va, word| {
            assert_eq!(*word, 0, "at {va:#x}")
        })
    }

    #[track_caller]
    fn each_word(&self, pages: PageRange, access: Access, act: impl Fn(u64, &mut u64)) -> u32 {
        let mut all = 0;
        let begin = pages.start.byte_offset();
        for va in (begin..begin + pages.bytes()).step_by(8) {
            let ((), faults) = self.access(va, access, |word| act(va, word)).unwrap();
            all += faults;
        }
        all
    }

    /// Faults on the first word of each page as the device would before it begins: returns how many
    /// were needed.
    #[track_caller]
    pub fn touch(&self, pages: PageRange, access: Access) -> u32 {
        let touch = |page: PageNo| self.access(page.byte_offset(), access, |_| ()).unwrap().1;
        pages.iter().map(touch).sum()
    }

    /// The translation it would use for `va` without a fault.
    pub fn entry(&self, va: u64) -> Option<Entry> {
        let page = va >> PAGE_SHIFT;
        let world = self.machine.world();
        let unit = &world.units[self.unit];
        let by_table = || world.tables.get(&unit.active?)?.entries.get(&page).copied();
        unit.tlb.get(&page).copied().or_else(by_table)
    }

    /// How often an operation was asked of this device.
    pub fn count(&self, op: Op) -> u32 {
        let world = self.machine.world();
        world.units[self.unit].counts.get(&op).copied().unwrap_or(0)
    }

    pub fn table(&self) -> Option<u64> {
        self.machine.world().units[self.unit].active
    }
}

struct SimulatedMmu {
    machine: Machine,
    unit: usize,
    build: Build,
}

impl SimulatedMmu {
    /// Does `act` unless the plan says otherwise; whatever is done, the machine looks at it after.
    fn operate<R>(
        &self,
        op: Op,
        name: &'static str,
        act: impl FnOnce(&mut World, Option<Fails>) -> R,
    ) -> Result<R, MmuError> {
        self.machine.interrupt(op, self.unit);
        let mut world = self.machine.world();
        let fails = self.machine.ask(&mut world, op, self.unit);
        if fails == Some(Fails::Panics) {
            drop(world);
            std::panic::resume_unwind(Box::new(DRIVERS_PANIC));
        }
        if fails == Some(Fails::Before) || (fails == Some(Fails::Busy) && op != Op::Restrict) {
            return Err(refusal(name));
        }
        let done = act(&mut world, fails);
        if fails != Some(Fails::Busy) {
            world.after_each_operation();
        }
        match fails {
            Some(Fails::After) => Err(refusal(name)),
            _ => Ok(done),
        }
    }
}

impl Mmu for SimulatedMmu {
    fn limits(&self) -> MmuLimits {
        MmuLimits {
            on_absent: self.build.on_absent,
            format: self.build.format.map(TableFormat),
            page_sizes: self.build.page_sizes,
            strongest: self.build.strongest,
        }
    }

    fn create_table(&self) -> Result<TableId, MmuError> {
        self.operate(Op::CreateTable, "create_table", |world, fails| {
            world.next_table += 1;
            let number = world.next_table;
            if fails.is_none() {
                world.tables.insert(number, super::Table::default());
            }
            TableId(number)
        })
    }

    fn destroy_table(&self, table: TableId) {
        let done = self.operate(Op::DestroyTable, "destroy_table", |world, _| {
            if world.units.iter().any(|unit| unit.active == Some(table.0)) {
                world.violation(format!("{table:?} is destroyed while in use"));
            }
            if let Some(known) = world.tables.get_mut(&table.0) {
                known.destroyed += 1;
                if known.destroyed > 1 {
                    world.violation(format!("{table:?} is destroyed twice"));
                }
            }
        });
        done.unwrap();
    }

    fn activate(&self, table: TableId) -> Result<(), MmuError> {
        let unit = self.unit;
        self.operate(Op::Activate, "activate", |world, fails| {
            if world.units[unit].active.is_some() && !world.spaces_end {
                world.violation(format!("unit {unit} is activated twice"));
            }
            if world.tables.get(&table.0).is_none_or(|t| t.destroyed > 0) {
                world.violation(format!("unit {unit} is activated in no table"));
            }
            world.units[unit].tlb.clear();
            world.units[unit].active = fails.is_none().then_some(table.0);
        })
    }

    fn deactivate(&self, table: TableId) -> Result<(), MmuError> {
        let unit = self.unit;
        self.operate(Op::Deactivate, "deactivate", |world, fails| {
            if world.units[unit].active != Some(table.0) {
                world.violation(format!("unit {unit} is not active in {table:?}"));
            }
            if fails.is_none() {
                world.units[unit].active = None;
                world.units[unit].tlb.clear();
            }
        })
    }

    fn restrict(
        &self,
        table: TableId,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, MmuError> {
        self.operate(Op::Restrict, "restrict", |world, fails| {
            let Some(known) = world.tables.get_mut(&table.0) else {
                return Restricted::Done;
            };
            // One that fails has done half of it.
            let half = to_usize(pages.len()) / 2;
            let count = fails.map_or(usize::MAX, |_| half);
            for page in pages.pages(section).take(count) {
                match to {
                    Restrict::NoAccess => {
                        known.entries.remove(&page.0);
                    }
                    Restrict::ReadOnly => {
                        if let Some(entry) = known.entries.get_mut(&page.0) {
                            entry.access = Access::Read;
                        }
                    }
                }
            }
            match fails {
                Some(Fails::Busy) => Restricted::Busy,
                _ => Restricted::Done,
            }
        })
    }

    fn grant(
        &self,
        table: TableId,
        pages: PageRange,
        access: Access,
        backing: Backing,
    ) -> Result<(), MmuError> {
        self.operate(Op::Grant, "grant", |world, _| {
            if let Backing::Frames { first, page_bytes } = backing {
                let aligned = pages.start.byte_offset().is_multiple_of(page_bytes)
                    && pages.bytes().is_multiple_of(page_bytes)
                    && first.0.is_multiple_of(page_bytes);
                if !aligned || !self.limits().page_sizes.contains(page_bytes) {
                    world.violation(format!("{pages:?} cannot be mapped by {page_bytes:#x}"));
                }
            }
            for (at, page) in (0_u64..).zip(pages.iter()) {
                let pa = match backing {
                    Backing::Home => super::HOME + page.byte_offset(),
                    Backing::Frames { first, .. } => first.0 + at * PAGE_BYTES,
                };
                world.enter(table.0, page.0, Entry { pa, access });
            }
        })
    }

    fn invalidate(&self, table: TableId, ranges: &[PageRange]) -> Result<(), MmuError> {
        let unit = self.unit;
        self.operate(Op::Invalidate, "invalidate", |world, fails| {
            if world.units[unit].active != Some(table.0) {
                world.violation(format!("unit {unit} does not use {table:?}"));
            }
            let apart = ranges.windows(2).all(|two| two[0].end < two[1].start);
            if !apart {
                world.violation(format!("ranges are not ascending and apart: {ranges:?}"));
            }
            // One that fails has forgotten the first of them.
            let count = fails.map_or(usize::MAX, |_| 1);
            let keep = |page: &u64| {
                let mut ranges = ranges.iter().take(count);
                !ranges.any(|range| range.contains(PageNo(*page)))
            };
            world.units[unit].tlb.retain(|page, _| keep(page));
        })
    }

    fn inherited(&self) -> Result<Vec<Inherited>, MmuError> {
        self.operate(Op::Inherited, "inherited", |_, _| {
            self.build.inherited.clone()
        })
    }
}
