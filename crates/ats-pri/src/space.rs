// SPDX-License-Identifier: Apache-2.0
//! [`PriSpace`]: an I/O address space whose authoritative state is the IOMMU's page table;
//! devices keep copies in their TLBs.
//!
//! To unmap a page, it does what a hypervisor does with such devices: it clears the
//! entry of the page table, invalidates the device TLB of each device that uses the
//! table, and waits until each has reported that no DMA uses the old translation.
//! Granting needs no invalidation: devices do not cache absent pages, and ask again
//! when they want to write a page that they may only read.

use super::{
    iommu::{Function, InvalidationQueue, Iommu},
    table::IoPageTable,
};
use pagetide_addr::{
    Access, DomainId, FileKey, FilePage, FilePageSet, FileRange, FileSection, Marks, PAGE_BYTES,
};
use pagetide_sys::mapping::SharedMapping;
use pagetide_vpri::{
    DomainError,
    space::{IoSpace, IoSpaces, LookError},
};
use std::{
    os::fd::BorrowedFd,
    sync::{
        Arc, PoisonError, RwLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

/// How often software checks for the end of DMA before it gives up: some microseconds, as with the
/// leases of a software DPU.
const COMPLETION_LOOKS: u32 = 200;

/// See the module.
#[derive(Debug)]
pub struct PriSpace {
    id: DomainId,
    key: FileKey,
    mapping: Arc<SharedMapping>,
    table: IoPageTable,
    functions: RwLock<Vec<Weak<Function>>>,
    invalidations: Arc<InvalidationQueue>,
    attached: AtomicBool,
}

impl PriSpace {
    /// A space over `mapping`, all of it read-write.
    pub(super) fn new(
        id: DomainId,
        key: FileKey,
        mapping: Arc<SharedMapping>,
        invalidations: Arc<InvalidationQueue>,
    ) -> Self {
        let space = Self {
            id,
            key,
            mapping,
            table: IoPageTable::default(),
            functions: RwLock::default(),
            invalidations,
            attached: AtomicBool::new(false),
        };
        space.table.grant(space.all(), Access::Write);
        space
    }

    pub(super) fn table(&self) -> &IoPageTable {
        &self.table
    }

    pub(super) fn memory(&self) -> &SharedMapping {
        &self.mapping
    }

    pub(super) fn attach_function(&self, function: &Arc<Function>) {
        let mut functions = self
            .functions
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        functions.retain(|known| known.strong_count() > 0);
        functions.push(Arc::downgrade(function));
    }

    fn functions(&self) -> Vec<Arc<Function>> {
        let functions = self
            .functions
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        functions.iter().filter_map(Weak::upgrade).collect()
    }

    fn all(&self) -> FileRange {
        let pages = self.mapping.len_bytes().div_ceil(PAGE_BYTES);
        FilePage(0).run(pages)
    }

    /// Invalidates `ranges`, whose entries are already restricted; false if DMA goes on there.
    fn invalidate(&self, ranges: &[FileRange]) -> bool {
        let functions = self.functions();
        self.invalidations.invalidate(&functions, ranges);
        let is_used = |function: &Arc<Function>| {
            let mut ranges = ranges.iter();
            ranges.any(|range| function.tlb.is_used(*range))
        };
        for _ in 0..COMPLETION_LOOKS {
            if !functions.iter().any(is_used) {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }
}

impl IoSpace for PriSpace {
    fn id(&self) -> DomainId {
        self.id
    }

    fn key(&self) -> FileKey {
        self.key
    }

    fn len_bytes(&self) -> u64 {
        self.mapping.len_bytes()
    }

    fn attach(&self) -> Result<(), DomainError> {
        if self.attached.swap(true, Ordering::AcqRel) {
            return Err(DomainError::AttachedAlready(self.key));
        }
        Ok(())
    }

    /// No process does: DMA of the model goes only through the device TLB.
    fn watch(&self) -> Result<(), DomainError> {
        Ok(())
    }

    fn detach(&self) {
        self.table.grant(self.all(), Access::Write);
        self.attached.store(false, Ordering::Release);
    }

    fn unmap_all(&self) {
        self.table.clear(self.all());
        self.invalidations
            .invalidate(&self.functions(), &[self.all()]);
    }

    fn is_any_leased(&self) -> bool {
        self.functions()
            .iter()
            .any(|function| function.tlb.is_any_used())
    }

    fn unmap(&self, section: FileSection, pages: &FilePageSet) -> bool {
        let runs = pages.runs(section);
        for run in &runs {
            self.table.clear(*run);
        }
        self.invalidate(&runs)
    }

    fn forbid_writes(&self, section: FileSection, pages: &FilePageSet) -> bool {
        let runs = pages.runs(section);
        for run in &runs {
            self.table.forbid_writes(*run);
        }
        self.invalidate(&runs)
    }

    fn grant(&self, range: FileRange, access: Access) {
        self.table.grant(range.intersect(self.all()), access);
    }

    /// The model's devices have no queues in guest memory.
    fn standing_in(&self, _section: FileSection) -> FilePageSet {
        FilePageSet::EMPTY
    }

    fn standing_pages(&self) -> u64 {
        0
    }

    /// The accessed bits of the page table. A page in a device's TLB is not walked again, so
    /// clearing marks also invalidates device TLBs.
    fn touched(
        &self,
        pages: FileRange,
        marks: Marks,
        visit: &mut dyn FnMut(FilePage),
    ) -> Result<(), LookError> {
        let mut any = false;
        self.table.accessed(pages, &mut |page| {
            any = true;
            visit(page);
        });
        if any && marks == Marks::Forget {
            self.table.forget(pages);
            self.invalidations.invalidate(&self.functions(), &[pages]);
        }
        Ok(())
    }
}

impl IoSpaces for Iommu {
    fn open(
        &self,
        file: BorrowedFd<'_>,
        key: FileKey,
        bytes: u64,
    ) -> Result<Arc<dyn IoSpace>, DomainError> {
        let space = self.open_space(file, key, bytes)?;
        Ok(space)
    }

    fn bar(&self, key: FileKey) {
        self.bar_file(key);
    }

    fn retire(&self, space: &dyn IoSpace) {
        self.forget_space(space.key());
        space.unmap_all();
    }

    /// In this process no device is made before then.
    fn all_known(&self) {}

    fn processes(&self) -> Vec<u32> {
        Vec::new()
    }

    fn eviction_blocker(&self) -> Option<String> {
        None
    }
}
