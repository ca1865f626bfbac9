// SPDX-License-Identifier: Apache-2.0
//! [`Cpu`]: the MMU of the host's CPUs, for a program without a kernel interface to it
//! (`gm_mmu_CPU`).
//!
//! In the paper the CPU's MMU is the hardware. A process cannot hand its own page tables to a
//! library. So here the CPU has a table like any device's, and a program reaches memory at
//! addresses of the space through [`Cpu::copy_out`] and [`Cpu::copy_in`], which translate, copy,
//! and report where a fault is.
//!
//! ```text
//!    va ──► table of the active space ──► pa ──► window ──► memory of this process
//! ```
//! The program defines physical addresses by *windows*: a window maps a range of physical addresses
//! to memory of this process. A page in a device's memory can be reached only through a window;
//! nothing else is ever dereferenced.
//!
//! One lock guards table and windows. It is held shared while a page is read, and exclusively while
//! one is written or a translation is removed. So when a removal returns no access is under way,
//! and there is no TLB to invalidate.

#![expect(
    unsafe_code,
    reason = "memory that the caller has named is copied and cleared"
)]

use crate::{
    driver::inherited_of_c,
    failure::{Failure, wrong},
    types::gm_mapping_t,
};
use gmem::{
    Backing, Inherited, Mmu, MmuError, MmuLimits, OnAbsent, PageSizes, PhysicalMemory, Restrict,
    Restricted, TableId,
};
use pagetide_addr::{Access, PAGE_BYTES, Pa, PageNo, PageRange, PageSet, SectionNo, Va};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

/// Code for a physical address outside all windows.
pub(crate) const NO_WINDOW: i32 = -14;

/// Consecutive pages with consecutive frames, and the end of the run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Run {
    end: PageNo,
    first: Pa,
    access: Access,
}

/// A page table: disjoint runs, by start. Its size grows with the number of mappings and of pages
/// changed individually, not with the length of a mapping.
#[derive(Default)]
struct Runs(BTreeMap<PageNo, Run>);

impl Runs {
    /// Frame and access of a page.
    fn get(&self, page: PageNo) -> Option<(Pa, Access)> {
        let (start, run) = self.0.range(..=page).next_back()?;
        (page < run.end).then(|| (run.frame_of(page, *start), run.access))
    }

    /// Splits a run that crosses `page`, so that one begins there.
    fn cut(&mut self, page: PageNo) {
        let Some((start, run)) = self.0.range_mut(..page).next_back() else {
            return;
        };
        if page < run.end {
            let first = run.frame_of(page, *start);
            let rest = Run { first, ..*run };
            run.end = page;
            self.0.insert(page, rest);
        }
    }

    fn remove(&mut self, pages: PageRange) {
        self.cut(pages.start);
        self.cut(pages.end);
        while let Some((start, _)) = self.0.range(pages.start..pages.end).next() {
            let start = *start;
            self.0.remove(&start);
        }
    }

    /// Restricts pages to reading.
    fn make_read_only(&mut self, pages: PageRange) {
        self.cut(pages.start);
        self.cut(pages.end);
        for (_, run) in self.0.range_mut(pages.start..pages.end) {
            run.access = Access::Read;
        }
    }

    /// Enters pages, replacing existing entries.
    fn insert(&mut self, pages: PageRange, first: Pa, access: Access) {
        self.remove(pages);
        let end = pages.end;
        if !pages.is_empty() {
            self.0.insert(pages.start, Run { end, first, access });
        }
    }
}

impl Run {
    fn frame_of(&self, page: PageNo, start: PageNo) -> Pa {
        Pa(self.first.0 + (page.since(start)) * PAGE_BYTES)
    }
}

/// A range of physical addresses, and its memory.
struct Window {
    pa: Pa,
    bytes: u64,
    memory: *mut u8,
}

// SAFETY: gmem.h demands that any thread may use a window's memory until the window is removed.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

#[derive(Default)]
struct State {
    tables: HashMap<TableId, Runs>,
    last_table: u64,
    active: Option<TableId>,
    windows: Vec<Window>,
}

/// See the module.
pub(crate) struct Cpu {
    on_absent: OnAbsent,
    inherited: Vec<Inherited>,
    state: RwLock<State>,
}

/// Why an access stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// This page is not mapped, or not for that access.
    Fault(Va),
    /// No window shows the page's frame.
    NoWindow(Pa),
}

impl Cpu {
    /// The CPU, with the mappings that spaces inherit when it is attached.
    ///
    /// # Errors
    /// [`Failure`] if one of the mappings allows nothing.
    pub(crate) fn new(mappings: &[gm_mapping_t], on_absent: OnAbsent) -> Result<Self, Failure> {
        let inherited = mappings.iter().map(inherited_of_c).collect::<Option<_>>();
        let inherited =
            inherited.ok_or_else(|| wrong("mappings", "one of them allows no access"))?;
        Ok(Self {
            on_absent,
            inherited,
            state: RwLock::default(),
        })
    }

    fn share(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn own(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps the physical addresses from `pa` on to `bytes` of `memory`.
    ///
    /// # Errors
    /// [`Failure`] if a window covers part of them already, or the range is invalid.
    pub(crate) fn add_window(&self, pa: Pa, bytes: u64, memory: *mut u8) -> Result<(), Failure> {
        let fits = |start: u64| start.checked_add(bytes).is_some();
        if bytes == 0 || !fits(pa.0) || !fits(memory.addr() as u64) {
            return Err(wrong(
                "size",
                "it must not be 0, nor pass the end of memory",
            ));
        }
        if memory.is_null() {
            return Err(wrong("memory", "it must not be NULL"));
        }
        let mut state = self.own();
        let end = pa.0 + bytes;
        let meets = |known: &Window| known.pa.0 < end && pa.0 < known.pa.0 + known.bytes;
        if state.windows.iter().any(meets) {
            return Err(wrong("pa", "a window shows part of that already"));
        }
        state.windows.push(Window { pa, bytes, memory });
        Ok(())
    }

    /// Removes a window. When this returns, its memory is no longer accessed.
    ///
    /// # Errors
    /// [`Failure`] if none begins at `pa`.
    pub(crate) fn remove_window(&self, pa: Pa) -> Result<(), Failure> {
        let mut state = self.own();
        match state.windows.iter().position(|known| known.pa == pa) {
            Some(at) => {
                state.windows.swap_remove(at);
                Ok(())
            }
            None => Err(wrong("pa", "no window begins there")),
        }
    }

    /// Reads `bytes`, which lie in one page, from `va` on.
    ///
    /// # Safety
    /// `to` must have room for that many bytes.
    pub(crate) unsafe fn copy_out(&self, va: Va, to: *mut u8, bytes: u64) -> Result<(), Stopped> {
        let state = self.share();
        let from = state.memory_at(va, bytes, Access::Read)?;
        // SAFETY: the window has the bytes and stays while the lock is held; the caller has the
        // room; `copy` allows both to be the same memory.
        unsafe { from.copy_to(to, length(bytes)) };
        Ok(())
    }

    /// Writes `bytes`, which lie in one page, from `va` on.
    ///
    /// # Safety
    /// `from` must have that many bytes.
    pub(crate) unsafe fn copy_in(
        &self,
        va: Va,
        from: *const u8,
        bytes: u64,
    ) -> Result<(), Stopped> {
        // Exclusive, so that writes and reads of one page do not overlap.
        let state = self.own();
        let to = state.memory_at(va, bytes, Access::Write)?;
        // SAFETY: as in `copy_out`, the other way.
        unsafe { from.copy_to(to, length(bytes)) };
        Ok(())
    }
}

impl State {
    fn active(&self) -> Option<&Runs> {
        self.active.and_then(|table| self.tables.get(&table))
    }

    /// The memory behind `bytes` of one page.
    fn memory_at(&self, va: Va, bytes: u64, access: Access) -> Result<*mut u8, Stopped> {
        let page = va.page();
        let entry = self.active().and_then(|table| table.get(page));
        let fault = Stopped::Fault(va);
        let Some((frame, allowed)) = entry else {
            return Err(fault);
        };
        if access == Access::Write && allowed != Access::Write {
            return Err(fault);
        }
        let pa = Pa(frame.0 + va.0 % PAGE_BYTES);
        self.window_at(pa, bytes).ok_or(Stopped::NoWindow(pa))
    }

    /// The memory of `bytes` from `pa` on, if one window covers all of them.
    fn window_at(&self, pa: Pa, bytes: u64) -> Option<*mut u8> {
        let end = pa.0.checked_add(bytes)?;
        let shows = |known: &&Window| known.pa <= pa && end <= known.pa.0 + known.bytes;
        let window = self.windows.iter().find(shows)?;
        Some(window.memory.wrapping_add(length(pa.0 - window.pa.0)))
    }

    fn windowed(&self, operation: &'static str, pa: Pa, bytes: u64) -> Result<*mut u8, MmuError> {
        let code = NO_WINDOW;
        let missing = MmuError::Driver { operation, code };
        self.window_at(pa, bytes).ok_or(missing)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "64-bit targets only, as asserted in handle.rs"
)]
const fn length(bytes: u64) -> usize {
    bytes as usize
}

impl Mmu for Cpu {
    fn limits(&self) -> MmuLimits {
        MmuLimits {
            on_absent: self.on_absent,
            page_sizes: PageSizes::of_bits(u64::MAX),
            ..MmuLimits::PAGED
        }
    }

    fn create_table(&self) -> Result<TableId, MmuError> {
        let mut state = self.own();
        state.last_table += 1;
        let table = TableId(state.last_table);
        state.tables.insert(table, Runs::default());
        Ok(table)
    }

    fn destroy_table(&self, table: TableId) {
        self.own().tables.remove(&table);
    }

    fn activate(&self, table: TableId) -> Result<(), MmuError> {
        self.own().active = Some(table);
        Ok(())
    }

    fn deactivate(&self, _table: TableId) -> Result<(), MmuError> {
        self.own().active = None;
        Ok(())
    }

    fn restrict(
        &self,
        table: TableId,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, MmuError> {
        let mut state = self.own();
        let table = state.tables.get_mut(&table).ok_or(MmuError::Gone)?;
        for run in pages.runs(section) {
            match to {
                Restrict::NoAccess => table.remove(run),
                Restrict::ReadOnly => table.make_read_only(run),
            }
        }
        Ok(Restricted::Done)
    }

    fn grant(
        &self,
        table: TableId,
        pages: PageRange,
        access: Access,
        backing: Backing,
    ) -> Result<(), MmuError> {
        let Backing::Frames { first, .. } = backing else {
            // Pages without frames exist only in spaces over paged memory, which C does not make.
            return Err(MmuError::Gone);
        };
        let mut state = self.own();
        let table = state.tables.get_mut(&table).ok_or(MmuError::Gone)?;
        table.insert(pages, first, access);
        Ok(())
    }

    fn inherited(&self) -> Result<Vec<Inherited>, MmuError> {
        Ok(self.inherited.clone())
    }
}

impl PhysicalMemory for Cpu {
    fn prepare(&self, frame: Pa, bytes: u64) -> Result<(), MmuError> {
        let state = self.share();
        let memory = state.windowed("prepare", frame, bytes)?;
        // SAFETY: the window has the bytes and stays while the lock is held; the frame is not yet
        // in use.
        unsafe { memory.write_bytes(0, length(bytes)) };
        Ok(())
    }

    fn copy(&self, from: Pa, to: Pa, bytes: u64) -> Result<(), MmuError> {
        let state = self.share();
        let from = state.windowed("copy", from, bytes)?;
        let to = state.windowed("copy", to, bytes)?;
        // SAFETY: windows have the bytes and stay while the lock is held; neither frame is mapped
        // now.
        unsafe { from.copy_to(to, length(bytes)) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    const PAGE: PageNo = PageNo(4);
    const VA: Va = PAGE.va();

    fn cpu_over(memory: &mut [u8], pa: Pa) -> Cpu {
        let cpu = Cpu::new(&[], OnAbsent::Recovers).unwrap();
        cpu.add_window(pa, memory.len() as u64, memory.as_mut_ptr())
            .unwrap();
        let table = cpu.create_table().unwrap();
        cpu.activate(table).unwrap();
        cpu
    }

    fn read(cpu: &Cpu, va: Va) -> Result<u8, Stopped> {
        let mut byte = 0;
        // SAFETY: there is room for one byte.
        unsafe { cpu.copy_out(va, &raw mut byte, 1) }.map(|()| byte)
    }

    fn write(cpu: &Cpu, va: Va, byte: u8) -> Result<(), Stopped> {
        // SAFETY: there is one byte.
        unsafe { cpu.copy_in(va, &raw const byte, 1) }
    }

    #[test]
    fn runs_of_pages_say_of_each_page_what_a_map_of_pages_says() {
        const PAGES: u64 = 24;
        let mut random = SplitMix64::new(1);
        let mut runs = Runs::default();
        let mut pages = BTreeMap::<PageNo, (Pa, Access)>::new();
        for turn in 0..20_000_u64 {
            let start = random.below(PAGES);
            let end = start + random.below(PAGES - start + 1);
            let range = PageRange::new(PageNo(start), PageNo(end));
            match random.below(4) {
                0 => {
                    runs.remove(range);
                    pages.retain(|page, _| !range.contains(*page));
                }
                1 => {
                    runs.make_read_only(range);
                    for (_, (_, access)) in pages.range_mut(range.start..range.end) {
                        *access = Access::Read;
                    }
                }
                _ => {
                    let first = Pa(turn << 20);
                    runs.insert(range, first, Access::Write);
                    for (number, page) in (0_u64..).zip(range.iter()) {
                        let frame = Pa(first.0 + number * PAGE_BYTES);
                        pages.insert(page, (frame, Access::Write));
                    }
                }
            }
            for page in (0..=PAGES).map(PageNo) {
                assert_eq!(runs.get(page), pages.get(&page).copied(), "{turn} {page:?}");
            }
            assert!(runs.0.len() <= pages.len());
        }
    }

    #[test]
    fn mapping_of_a_tebibyte_is_one_run_however_it_is_cut() {
        let mut memory = [0; 4096];
        let cpu = cpu_over(&mut memory, Pa(0));
        let table = TableId(1);
        let whole = PageRange::new(PageNo(0), PageNo(1 << 28));
        let backing = Backing::Frames {
            first: Pa(1 << 40),
            page_bytes: PAGE_BYTES,
        };
        cpu.grant(table, whole, Access::Write, backing).unwrap();
        let runs = |cpu: &Cpu| cpu.share().tables[&table].0.len();
        assert_eq!(runs(&cpu), 1);
        let mut one = PageSet::EMPTY;
        one.insert(PageNo(7 * pagetide_addr::SECTION_PAGES));
        let gone = cpu.restrict(table, SectionNo(7), &one, Restrict::NoAccess);
        assert_eq!(gone.unwrap(), Restricted::Done);
        assert_eq!(runs(&cpu), 2);
    }

    #[test]
    fn access_goes_by_table_and_window_and_stops_where_either_ends() {
        let mut memory = vec![7_u8; 8192];
        let cpu = cpu_over(&mut memory, Pa(0x10_0000));
        let table = TableId(1);
        assert_eq!(read(&cpu, VA), Err(Stopped::Fault(VA)));
        let backing = |pa| Backing::Frames {
            first: Pa(pa),
            page_bytes: PAGE_BYTES,
        };
        cpu.grant(table, PAGE.single(), Access::Read, backing(0x10_1000))
            .unwrap();
        assert_eq!(read(&cpu, VA), Ok(7));
        assert_eq!(write(&cpu, VA, 1), Err(Stopped::Fault(VA)));
        cpu.grant(table, PAGE.single(), Access::Write, backing(0x10_1000))
            .unwrap();
        assert_eq!(write(&cpu, VA, 1), Ok(()));
        cpu.grant(table, PAGE.single(), Access::Write, backing(0x10_2000))
            .unwrap();
        assert_eq!(read(&cpu, VA), Err(Stopped::NoWindow(Pa(0x10_2000))));
        cpu.deactivate(table).unwrap();
        assert_eq!(read(&cpu, VA), Err(Stopped::Fault(VA)));
        drop(cpu);
        assert_eq!(memory[4096], 1);
    }

    #[test]
    fn windows_that_overlap_are_empty_or_pass_the_end_are_refused() {
        let mut memory = vec![0_u8; 8192];
        let cpu = cpu_over(&mut memory, Pa(0x10_0000));
        let place = memory.as_mut_ptr();
        for (pa, bytes) in [(0x10_1000, 1), (0xf_f000, 0x1001), (0, 0), (u64::MAX, 2)] {
            assert!(cpu.add_window(Pa(pa), bytes, place).is_err(), "{pa:#x}");
        }
        assert!(cpu.add_window(Pa(0), 1, std::ptr::null_mut()).is_err());
        assert!(cpu.remove_window(Pa(0x10_1000)).is_err());
        cpu.remove_window(Pa(0x10_0000)).unwrap();
        assert!(cpu.prepare(Pa(0x10_0000), PAGE_BYTES).is_err());
        assert!(cpu.copy(Pa(0x10_0000), Pa(0x10_1000), PAGE_BYTES).is_err());
        cpu.add_window(Pa(0x10_1000), 1, place).unwrap();
    }
}
