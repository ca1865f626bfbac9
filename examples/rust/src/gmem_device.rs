// SPDX-License-Identifier: Apache-2.0
//! A CPU and an accelerator in one GMEM address space.
//!
//! A driver implements the few operations that its hardware has ([`Mmu`]: enter and clear translations;
//! [`PhysicalMemory`]: fill and copy frames) and no memory management. It forwards its faults, and pages move to
//! whoever uses them. The same in C: `examples/c/two_devices.c`.
//!
//! `cargo run -p pagetide-examples --bin gmem_device`
#![expect(clippy::print_stdout, reason = "what happens is the example's output")]

use pagetide_addr::{
    Access, DeviceId, PAGE_BYTES, Pa, PageNo, PageRange, PageSet, SectionNo, Va, to_usize,
};
use pagetide_gmem::{
    Activation, AddressSpace, AllocPolicy, Backing, Device, GmError, Mmu, MmuError, MmuLimits,
    Mode, PhysicalMemory, Placement, RegionRequest, Restrict, Restricted, TableId,
};
use std::{
    collections::BTreeMap,
    error::Error,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Addresses of the space, in pages.
const SPACE: Range<Va> = Va(0x1000_0000)..Va(0x1000_0000 + 256 * PAGE_BYTES);
/// Physical memory: frames of the host, then those on the accelerator.
const HOST_FRAMES: Range<u64> = 0..64;
const OWN_FRAMES: Range<u64> = 64..80;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All physical memory. A real driver's would be behind its copy engine.
struct Memory(Mutex<Vec<u8>>);

fn bytes_at(start: Pa, bytes: u64) -> Range<usize> {
    to_usize(start.0)..to_usize(start.0 + bytes)
}

impl PhysicalMemory for Memory {
    fn prepare(&self, frame: Pa, bytes: u64) -> Result<(), MmuError> {
        lock(&self.0)[bytes_at(frame, bytes)].fill(0);
        Ok(())
    }

    fn copy(&self, from: Pa, to: Pa, bytes: u64) -> Result<(), MmuError> {
        lock(&self.0).copy_within(bytes_at(from, bytes), to_usize(to.0));
        println!("  the page is copied from {from} to {to}");
        Ok(())
    }
}

/// The page table of one device. It has no TLB: each access holds the lock, so that none is under way when
/// [`Mmu::restrict`] returns.
#[derive(Default)]
struct Table(Mutex<BTreeMap<PageNo, (Pa, Access)>>);

impl Mmu for Table {
    fn limits(&self) -> MmuLimits {
        MmuLimits::PAGED
    }

    fn restrict(
        &self,
        _table: TableId,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, MmuError> {
        let mut table = lock(&self.0);
        for page in pages.pages(section) {
            match to {
                Restrict::NoAccess => drop(table.remove(&page)),
                Restrict::ReadOnly => {
                    table.entry(page).and_modify(|entry| entry.1 = Access::Read);
                }
            }
        }
        Ok(Restricted::Done)
    }

    fn grant(
        &self,
        _table: TableId,
        pages: PageRange,
        access: Access,
        backing: Backing,
    ) -> Result<(), MmuError> {
        let Backing::Frames { first, .. } = backing else {
            return Err(MmuError::Driver {
                operation: "grant of pages without frames",
                code: 1,
            });
        };
        for page in pages.iter() {
            let frame = Pa(first.0 + page.since(pages.start) * PAGE_BYTES);
            lock(&self.0).insert(page, (frame, access));
        }
        Ok(())
    }
}

/// A device at work: its hardware, and what gmem knows of it.
struct Unit {
    name: &'static str,
    memory: Arc<Memory>,
    table: Arc<Table>,
    device: Arc<Device>,
}

impl Unit {
    fn new(
        name: &'static str,
        id: DeviceId,
        frames: Range<u64>,
        memory: &Arc<Memory>,
    ) -> Result<Self, GmError> {
        let table = Arc::new(Table::default());
        let device = Device::with_id(id, Arc::clone(&table) as _);
        let place = |frame| Pa(frame * PAGE_BYTES);
        let engine = Arc::clone(memory) as _;
        device.register_physmem(place(frames.start), place(frames.end), engine)?;
        let memory = Arc::clone(memory);
        Ok(Self {
            name,
            memory,
            table,
            device,
        })
    }

    /// One byte, as the hardware reaches it: by its page table, else after a fault.
    fn access(&self, va: Va, access: Access, act: impl FnOnce(&mut u8)) -> Result<(), GmError> {
        loop {
            {
                let table = lock(&self.table.0);
                if let Some((frame, allowed)) = table.get(&va.page())
                    && (access == Access::Read || *allowed == Access::Write)
                {
                    let at = to_usize(frame.0 + va.0 % PAGE_BYTES);
                    act(&mut lock(&self.memory.0)[at]);
                    return Ok(());
                }
            }
            println!("  {} faults at {va}", self.name);
            self.device.fault(va, access)?;
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let bytes = to_usize(OWN_FRAMES.end * PAGE_BYTES);
    let memory = Arc::new(Memory(Mutex::new(vec![0; bytes])));
    let space = AddressSpace::create(SPACE.start, SPACE.end, AllocPolicy::default())?;
    let cpu = Unit::new("the CPU", DeviceId::VCPUS, HOST_FRAMES, &memory)?;
    let accelerator = Unit::new("the accelerator", DeviceId(1), OWN_FRAMES, &memory)?;
    for unit in [&cpu, &accelerator] {
        space.attach(&unit.device, Mode::Coherent, Activation::Now)?;
    }
    let region = space.alloc(&RegionRequest::of_bytes(PAGE_BYTES))?;
    let at = |nth: usize| Va(region.start().0 + nth as u64);

    let text = b"one address, two devices";
    println!("the CPU writes");
    for (nth, letter) in text.iter().enumerate() {
        cpu.access(at(nth), Access::Write, |byte| *byte = *letter)?;
    }
    println!("the accelerator makes capitals");
    for nth in 0..text.len() {
        accelerator.access(at(nth), Access::Write, |byte| byte.make_ascii_uppercase())?;
    }
    let used = accelerator.device.used_memory_bytes();
    println!("  {used} bytes are in its memory");
    println!("the CPU reads, and the page stays where it is");
    region.set_policy(Placement::RemoteAccess, None)?;
    let mut read = Vec::new();
    for nth in 0..text.len() {
        cpu.access(at(nth), Access::Read, |byte| read.push(*byte))?;
    }
    println!("  '{}'", String::from_utf8(read)?);

    println!("the region is freed");
    region.dealloc()?;
    let used = accelerator.device.used_memory_bytes();
    println!("  {used} bytes are in the accelerator's memory");
    for unit in [&cpu, &accelerator] {
        unit.device.detach(&space)?;
    }
    Ok(space.destroy()?)
}
