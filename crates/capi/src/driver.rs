// SPDX-License-Identifier: Apache-2.0
//! [`Driver`]: a C driver's operations, as an [`Mmu`] and as [`PhysicalMemory`].
//!
//! A restriction arrives as a set of pages of a section and is passed on as runs; a mapping arrives
//! as runs already. Each operation is called with a mark on the thread ([`InDriver`]), and the
//! error keeps its return code.

#![expect(unsafe_code, reason = "functions of the caller's are called")]

use crate::{
    border::{InDriver, array},
    failure::{Failure, unsupported, wrong},
    types::*,
};
use gmem::{
    Backing, GmError, Inherited, Mmu, MmuError, MmuLimits, OnAbsent, PageSizes, PhysicalMemory,
    Restrict, Restricted, TableFormat, TableId,
};
use pagetide_addr::{Access, PAGE_SHIFT, Pa, PageRange, PageSet, SectionNo, Va};
use std::{
    collections::BTreeSet,
    ffi::{c_int, c_void},
    mem::size_of,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Most mappings that one device may have when it is attached: each becomes a region.
pub(crate) const INHERITED_MAX: usize = 1 << 20;

/// Code for a request that C does not offer.
const NOT_OFFERED: c_int = -95;

/// The operation that failed if a driver returned a table that another space has.
const ONE_TABLE_FOR_ALL: &str = "making another table than the one in use";
const USED: c_int = -16;

/// See the module.
pub(crate) struct Driver {
    operations: gm_mmu_t,
    arg: *mut c_void,
    on_absent: OnAbsent,
    /// Page tables of its making that are still in use, perhaps by others. Counted until the driver
    /// has destroyed them.
    tables: AtomicU64,
    /// The ids of these tables. Removed before the driver destroys one, since it may reuse the id
    /// at once.
    known: Mutex<BTreeSet<u64>>,
}

// SAFETY: gmem.h says that any thread may call the operations, several at once, with this argument.
unsafe impl Send for Driver {}
// SAFETY: as above.
unsafe impl Sync for Driver {}

/// Reads the operations that C passes.
///
/// # Safety
/// `given` must be NULL, or have a `struct_size` and that many bytes behind it.
pub(crate) unsafe fn operations(given: *const gm_mmu_t) -> Result<gm_mmu_t, Failure> {
    if given.is_null() || !given.is_aligned() {
        return Err(wrong("mmu", "it must not be NULL"));
    }
    // SAFETY: the caller guarantees that it can be read.
    let size = unsafe { (*given).struct_size };
    if size < size_of::<gm_mmu_t>() {
        return Err(wrong("struct_size", "it must be sizeof(gm_mmu_t)"));
    }
    // SAFETY: the caller guarantees this many bytes.
    let beyond = unsafe {
        let first: *const u8 = given.add(1).cast();
        array("mmu", first, size - size_of::<gm_mmu_t>())?
    };
    if beyond.iter().any(|byte| *byte != 0) {
        return Err(unsupported(
            "operations of a later version of this interface",
        ));
    }
    // SAFETY: the caller guarantees that it can be read; every bit pattern of a field is valid, and
    // functions are as the header demands.
    let operations = unsafe { *given };
    if operations.reserved != 0 {
        return Err(wrong("reserved", "it must be 0"));
    }
    Ok(operations)
}

/// True if a device was not attached because its driver has one table for all spaces.
pub(crate) fn has_one_table(error: &GmError) -> bool {
    let GmError::Device { source, .. } = error else {
        return false;
    };
    matches!(**source, MmuError::Driver { operation, .. } if operation == ONE_TABLE_FOR_ALL)
}

/// The device's behaviour on absent pages.
pub(crate) fn on_absent(cap: gm_dev_cap_t) -> Result<OnAbsent, Failure> {
    match cap {
        GM_DEV_CAP_NONE => Ok(OnAbsent::Fails),
        GM_DEV_CAP_RECOVERS => Ok(OnAbsent::Recovers),
        _ => Err(wrong("cap", "a bit of it is unknown")),
    }
}

fn table_to_c(table: TableId) -> gm_table_t {
    let address = usize::try_from(table.0).unwrap_or(usize::MAX);
    std::ptr::with_exposed_provenance_mut(address)
}

fn access_to_c(access: Access) -> gm_prot_t {
    match access {
        Access::Read => GM_PROT_READ,
        Access::Write => GM_PROT_READ | GM_PROT_WRITE,
    }
}

fn range_to_c(pages: PageRange) -> gm_range_t {
    gm_range_t {
        va: pages.start.0 << PAGE_SHIFT,
        size: pages.bytes(),
    }
}

fn done(operation: &'static str, code: c_int) -> Result<(), MmuError> {
    match code {
        0 => Ok(()),
        code => Err(MmuError::Driver { operation, code }),
    }
}

impl Driver {
    /// A driver that calls these operations with `arg`.
    pub(crate) fn new(
        operations: gm_mmu_t,
        arg: *mut c_void,
        on_absent: OnAbsent,
    ) -> Result<Self, Failure> {
        if operations.map.is_none() || operations.unmap.is_none() {
            return Err(wrong("mmu", "it must have `map` and `unmap`"));
        }
        Ok(Self {
            operations,
            arg,
            on_absent,
            tables: AtomicU64::new(0),
            known: Mutex::default(),
        })
    }

    fn known(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        // Changes in single steps: a panic leaves nothing half done.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the driver's next table.
    fn make_table(&self) -> Result<TableId, MmuError> {
        let mut table: gm_table_t = std::ptr::null_mut();
        if let Some(create) = self.operations.table_create {
            let code = {
                let _inside = InDriver::enter();
                // SAFETY: the driver's own function and argument, and a place for its result.
                unsafe { create(self.arg, &raw mut table) }
            };
            done("table_create", code)?;
        }
        let table = table.expose_provenance() as u64;
        if !self.known().insert(table) {
            // Not destroyed: it belongs to the other space, or to another device that shares it.
            return Err(MmuError::Driver {
                operation: ONE_TABLE_FOR_ALL,
                code: USED,
            });
        }
        Ok(TableId(table))
    }

    /// True if a page table of its making is still in use, even by another device.
    // Acquire pairs with Release in `destroy_table`: a table not counted has been destroyed.
    pub(crate) fn has_tables(&self) -> bool {
        self.tables.load(Ordering::Acquire) > 0
    }

    /// # Errors
    /// [`Failure`] if an operation that registered memory needs is missing.
    pub(crate) fn require_memory_operations(&self) -> Result<(), Failure> {
        match (self.operations.prepare, self.operations.copy) {
            (Some(_), Some(_)) => Ok(()),
            _ => Err(unsupported(
                "memory of a device whose driver has no `prepare` or no `copy`",
            )),
        }
    }

    /// Removes translations, or all access beyond reading.
    fn take(&self, table: TableId, pages: PageRange, to: Restrict) -> Result<Restricted, MmuError> {
        let gm_range_t { va, size } = range_to_c(pages);
        let table = table_to_c(table);
        let (operation, code) = match (to, self.operations.protect, self.operations.unmap) {
            (Restrict::ReadOnly, Some(protect), _) => {
                let _inside = InDriver::enter();
                // SAFETY: the driver's own function, argument and table.
                let code = unsafe { protect(self.arg, table, va, size, GM_PROT_READ) };
                ("protect", code)
            }
            (_, _, Some(unmap)) => {
                let _inside = InDriver::enter();
                // SAFETY: as above.
                ("unmap", unsafe { unmap(self.arg, table, va, size) })
            }
            (_, _, None) => ("unmap", NOT_OFFERED),
        };
        if code == GM_MMU_BUSY {
            return Ok(Restricted::Busy);
        }
        done(operation, code).map(|()| Restricted::Done)
    }
}

impl Mmu for Driver {
    fn limits(&self) -> MmuLimits {
        let format = self.operations.format;
        // A device without `activate` cannot be switched to another device's table.
        let shares = format != 0 && self.operations.activate.is_some();
        MmuLimits {
            on_absent: self.on_absent,
            format: shares.then_some(TableFormat(format)),
            page_sizes: PageSizes::of_bits(self.operations.page_sizes),
            ..MmuLimits::PAGED
        }
    }

    fn create_table(&self) -> Result<TableId, MmuError> {
        self.tables.fetch_add(1, Ordering::Relaxed);
        let made = self.make_table();
        if made.is_err() {
            self.tables.fetch_sub(1, Ordering::Release);
        }
        made
    }

    fn destroy_table(&self, table: TableId) {
        self.known().remove(&table.0);
        if let Some(destroy) = self.operations.table_destroy {
            let _inside = InDriver::enter();
            // SAFETY: the driver's own function, argument and table, which is no longer in use.
            unsafe { destroy(self.arg, table_to_c(table)) }
        }
        self.tables.fetch_sub(1, Ordering::Release);
    }

    fn activate(&self, table: TableId) -> Result<(), MmuError> {
        let Some(activate) = self.operations.activate else {
            return Ok(());
        };
        let _inside = InDriver::enter();
        // SAFETY: the driver's own function and argument; the table is of its making or its format.
        done("activate", unsafe { activate(self.arg, table_to_c(table)) })
    }

    fn deactivate(&self, table: TableId) -> Result<(), MmuError> {
        let Some(deactivate) = self.operations.deactivate else {
            return Ok(());
        };
        let _inside = InDriver::enter();
        // SAFETY: as in `activate`.
        let code = unsafe { deactivate(self.arg, table_to_c(table)) };
        done("deactivate", code)
    }

    fn restrict(
        &self,
        table: TableId,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, MmuError> {
        for run in pages.runs(section) {
            if self.take(table, run, to)? == Restricted::Busy {
                return Ok(Restricted::Busy);
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
        let gm_range_t { va, size } = range_to_c(pages);
        let prot = access_to_c(access);
        let code = match (backing, self.operations.map) {
            (Backing::Frames { first, page_bytes }, Some(map)) => {
                let table = table_to_c(table);
                let _inside = InDriver::enter();
                // SAFETY: the driver's own function, argument and table.
                unsafe { map(self.arg, table, va, size, first.0, page_bytes, prot) }
            }
            // Pages without frames exist only in spaces over paged memory, which C does not make.
            (Backing::Home, _) | (_, None) => NOT_OFFERED,
        };
        done("map", code)
    }

    fn invalidate(&self, table: TableId, ranges: &[PageRange]) -> Result<(), MmuError> {
        let Some(invalidate) = self.operations.invalidate else {
            return Ok(());
        };
        let ranges: Vec<gm_range_t> = ranges.iter().copied().map(range_to_c).collect();
        let table = table_to_c(table);
        let _inside = InDriver::enter();
        // SAFETY: the driver's own function and argument; the ranges live as long as the call.
        let code = unsafe { invalidate(self.arg, table, ranges.as_ptr(), ranges.len()) };
        done("invalidate", code)
    }

    fn inherited(&self) -> Result<Vec<Inherited>, MmuError> {
        let Some(inherit) = self.operations.inherit else {
            return Ok(Vec::new());
        };
        let mut list = InheritedList::default();
        let code = {
            let _inside = InDriver::enter();
            // SAFETY: the driver's own function and argument; `add` takes this very list, which
            // lives as long as the call.
            unsafe { inherit(self.arg, Some(add_inherited), (&raw mut list).cast()) }
        };
        done("inherit", code)?;
        match list.wrong {
            None => Ok(list.mappings),
            Some(wrong) => Err(wrong),
        }
    }
}

impl PhysicalMemory for Driver {
    fn prepare(&self, frame: Pa, bytes: u64) -> Result<(), MmuError> {
        let code = match self.operations.prepare {
            Some(prepare) => {
                let _inside = InDriver::enter();
                // SAFETY: the driver's own function and argument.
                unsafe { prepare(self.arg, frame.0, bytes) }
            }
            None => NOT_OFFERED,
        };
        done("prepare", code)
    }

    fn copy(&self, from: Pa, to: Pa, bytes: u64) -> Result<(), MmuError> {
        let code = match self.operations.copy {
            Some(copy) => {
                let _inside = InDriver::enter();
                // SAFETY: the driver's own function and argument.
                unsafe { copy(self.arg, to.0, from.0, bytes) }
            }
            None => NOT_OFFERED,
        };
        done("copy", code)
    }
}

/// Mappings reported by the driver.
#[derive(Default)]
struct InheritedList {
    mappings: Vec<Inherited>,
    wrong: Option<MmuError>,
}

/// Converts a mapping from C; `None` if it is invalid.
pub(crate) fn inherited_of_c(mapping: &gm_mapping_t) -> Option<Inherited> {
    let access = access_of_c(mapping.prot)?;
    Some(Inherited {
        start: Va(mapping.va),
        len_bytes: mapping.size,
        access,
        frames: Pa(mapping.pa),
    })
}

/// Converts a protection from C to an access; `None` if it allows nothing or is unknown.
pub(crate) fn access_of_c(prot: gm_prot_t) -> Option<Access> {
    const BOTH: gm_prot_t = GM_PROT_READ | GM_PROT_WRITE;
    match prot {
        GM_PROT_READ => Some(Access::Read),
        GM_PROT_WRITE | BOTH => Some(Access::Write),
        _ => None,
    }
}

/// The `add` of `inherit`.
///
/// # Safety
/// `list` must be the argument that came with it; `mapping` must be NULL or a mapping.
unsafe extern "C" fn add_inherited(list: *mut c_void, mapping: *const gm_mapping_t) {
    let list: *mut InheritedList = list.cast();
    // SAFETY: gmem.h demands that the driver passes its arguments on; one thread at a time.
    let (Some(list), Some(mapping)) = (unsafe { (list.as_mut(), mapping.as_ref()) }) else {
        return;
    };
    let refused = |code| MmuError::Driver {
        operation: "inherit",
        code,
    };
    match inherited_of_c(mapping) {
        _ if list.mappings.len() >= INHERITED_MAX => list.wrong = Some(refused(NOT_OFFERED)),
        Some(mapping) => list.mappings.push(mapping),
        None => list.wrong = Some(refused(WRONG_MAPPING)),
    }
}

/// Code for a mapping that allows nothing.
const WRONG_MAPPING: c_int = -22;
