// SPDX-License-Identifier: Apache-2.0
//! Regions of paged memory that come while devices come, go and fault.

use super::{Setting, check};
use crate::{
    Activation, AddressSpace, AllocPolicy, Content, GmError, Installed, MemoryParts, Mode,
    PageTable, PagedMemory, PlaceError, RegionRequest, StoreError, Unlimited, VolatileWords,
};
use loom::thread;
use pagetide_addr::{Access, PAGE_BYTES, PageNo, PageRange, Va};
use std::sync::Arc;

/// Memory of one page, which is never there.
struct Nowhere;

impl crate::Place for Nowhere {
    fn install(&self, _: PageNo, _: &[u8; 4096]) -> Result<Installed, PlaceError> {
        Ok(Installed::Installed)
    }
    fn install_zero(&self, _: PageNo) -> Result<Installed, PlaceError> {
        Ok(Installed::Installed)
    }
    fn install_run(&self, pages: PageRange, _: &[u8]) -> Result<u64, PlaceError> {
        Ok(pages.len())
    }
    fn read(&self, _: PageRange, _: &mut [u8]) -> Result<(), PlaceError> {
        Ok(())
    }
    fn discard(&self, _: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }
    fn is_present(&self, _: PageNo) -> Result<bool, PlaceError> {
        Ok(false)
    }
    fn present_runs(&self, _: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        Ok(Vec::new())
    }
    fn wake(&self, _: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }
    fn poison(&self, _: PageNo) -> Result<(), PlaceError> {
        Ok(())
    }
}

impl crate::ContentStore for Nowhere {
    fn load(&self, _: PageNo, _: Content, _: &mut [u8; 4096]) -> Result<(), StoreError> {
        Ok(())
    }
    fn free(&self, _: Content) {}
}

impl crate::Incidents for Nowhere {
    fn foreign_page(&self, page: PageNo) {
        panic!("a foreign page in {page}");
    }
    fn poisoned(&self, page: PageNo, why: &StoreError) {
        panic!("{page}: {why}");
    }
    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        panic!("{page}: {why}");
    }
    fn fill_failed(&self, page: PageNo, why: &dyn std::error::Error) {
        panic!("{page}: {why}");
    }
}

fn space_over_memory() -> Arc<AddressSpace> {
    let words = VolatileWords::with_capacity(1);
    let memory = PagedMemory::new(MemoryParts {
        table: PageTable::growing(Box::new(words)),
        place: Arc::new(Nowhere),
        store: Arc::new(Nowhere),
        admission: Arc::new(Unlimited),
        incidents: Arc::new(Nowhere),
        neighbours_max: 0,
    });
    AddressSpace::over(memory, Va(0), Va(PAGE_BYTES), AllocPolicy::default()).unwrap()
}

#[test]
fn loom_memory_is_given_back_while_devices_come_and_go() {
    check(|| {
        let setting = Setting::new(0);
        let space = space_over_memory();
        let [one, two] = setting.devices.each_ref().map(Arc::clone);
        space.attach(&one, Mode::Coherent, Activation::Now).unwrap();
        let inner = Arc::clone(&space);
        let comer = thread::spawn(move || {
            inner.attach(&two, Mode::Coherent, Activation::Now).unwrap();
            two.detach(&inner).unwrap();
        });
        let region = space.alloc(&RegionRequest::of_bytes(PAGE_BYTES)).unwrap();
        region.dealloc().unwrap();
        comer.join().unwrap();
        one.detach(&space).unwrap();
        space.destroy().unwrap();
    });
}

#[test]
fn loom_fault_that_came_before_its_memory_is_woken_when_it_can_be_served() {
    check(|| {
        let setting = Setting::new(0);
        let space = space_over_memory();
        let inner = Arc::clone(&space);
        let grower = thread::spawn(move || {
            inner.alloc(&RegionRequest::of_bytes(PAGE_BYTES)).unwrap();
        });
        space
            .attach(&setting.devices[0], Mode::Coherent, Activation::Now)
            .unwrap();
        match setting.devices[0].fault(Va(0), Access::Read) {
            Ok(()) | Err(GmError::NotAllocated { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        grower.join().unwrap();
        setting.devices[0].fault(Va(0), Access::Read).unwrap();
    });
}
