// SPDX-License-Identifier: Apache-2.0
//! Prefetch by policies, in memory that is a set of numbers.

use super::vm::{VmHandles, VmProtection};
use pagetide_addr::{DeviceId, PAGE_BYTES, PageNo, PageRange, SECTION_PAGES, SectionNo, Va};
use pagetide_gmem::{
    Activation, AddressSpace, AllocPolicy, Content, ContentStore, Device, Incidents, Installed,
    MemoryParts, Mode, PageTable, PagedMemory, Place, PlaceError, RegionRequest, StoreError,
    Unlimited, VolatileWords,
};
use pagetide_policy::protect::{Change, Fate, PolicyReport, ProtectionPolicy, Touch};
use pagetide_swap::Limit;
use pagetide_sys::memory_file::GuestFile;
use pagetide_vpri::{DPU, DmaMmu, DomainTable, Doorbell, FaultService, IoSpace};
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

const SECTIONS: u64 = 4;
const PAGES: u64 = SECTIONS * SECTION_PAGES;

/// The set of present pages. Absent pages are zero.
#[derive(Default)]
struct Ram(Mutex<BTreeSet<u64>>);

impl Place for Ram {
    fn install(&self, page: PageNo, _: &[u8; 4096]) -> Result<Installed, PlaceError> {
        self.install_zero(page)
    }

    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        match self.0.lock().unwrap().insert(page.0) {
            true => Ok(Installed::Installed),
            false => Ok(Installed::AlreadyThere),
        }
    }

    fn install_run(&self, pages: PageRange, _: &[u8]) -> Result<u64, PlaceError> {
        self.0.lock().unwrap().extend(pages.start.0..pages.end.0);
        Ok(pages.len())
    }

    fn read(&self, _: PageRange, _: &mut [u8]) -> Result<(), PlaceError> {
        unreachable!("nothing is evicted")
    }

    fn discard(&self, _: PageRange) -> Result<(), PlaceError> {
        unreachable!("nothing is evicted")
    }

    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError> {
        Ok(self.0.lock().unwrap().contains(&page.0))
    }

    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        let present = self.0.lock().unwrap();
        let within = present.range(pages.start.0..pages.end.0);
        Ok(within.map(|page| PageNo(*page).single()).collect())
    }

    fn wake(&self, _: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }

    fn poison(&self, _: PageNo) -> Result<(), PlaceError> {
        unreachable!("nothing could be damaged")
    }
}

impl ContentStore for Ram {
    fn load(&self, _: PageNo, _: Content, _: &mut [u8; 4096]) -> Result<(), StoreError> {
        unreachable!("all is zero")
    }

    fn free(&self, _: Content) {
        unreachable!("all is zero")
    }
}

impl Incidents for Ram {
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

/// Prefetches whatever is evicted, and logs the fates it receives.
#[derive(Default, Clone)]
struct Wishing(Arc<Mutex<Vec<(SectionNo, Fate)>>>);

impl ProtectionPolicy for Wishing {
    fn touched(&mut self, _: Touch, _: &mut Vec<Change>) {}

    fn passed(&mut self, _: Duration, _: &mut Vec<Change>) {}

    fn fate(&mut self, section: SectionNo, fate: Fate, _: Duration, changes: &mut Vec<Change>) {
        if fate == Fate::Evicted {
            changes.push(Change::BringBack(section));
        }
        self.0.lock().unwrap().push((section, fate));
    }

    fn resized(&mut self, _: u64, _: &mut Vec<Change>) {}

    fn report(&self) -> PolicyReport {
        PolicyReport::default()
    }
}

/// A VM whose pages are all absent.
struct Rig {
    protection: VmProtection,
    ram: Arc<Ram>,
    limit: Arc<Limit>,
    _service: Arc<FaultService>,
}

impl Rig {
    fn new() -> Self {
        let bytes = PAGES * PAGE_BYTES;
        let file = GuestFile::new_memfd("live", bytes).unwrap();
        let table = DomainTable::new(1);
        let domain = table.open(file.key().unwrap(), bytes);
        let domain = domain.unwrap();
        domain.attach().unwrap();
        IoSpace::unmap_all(&*domain);
        let ram = Arc::new(Ram::default());
        let memory = PagedMemory::new(MemoryParts {
            table: PageTable::growing(Box::new(VolatileWords::with_capacity(PAGES))),
            place: Arc::clone(&ram) as _,
            store: Arc::clone(&ram) as _,
            admission: Arc::new(Unlimited),
            incidents: Arc::clone(&ram) as _,
            neighbours_max: 0,
        });
        let all = PageNo(0).run(PAGES);
        let mmu = Arc::new(DmaMmu::new([(domain as Arc<dyn IoSpace>, all)]));
        let space = AddressSpace::over(memory, Va(0), Va(bytes), AllocPolicy::default()).unwrap();
        let dpu = Device::with_id(DPU, Arc::clone(&mmu) as _);
        space.attach(&dpu, Mode::Coherent, Activation::Now).unwrap();
        space.alloc(&RegionRequest::of_bytes(bytes)).unwrap();
        let service = FaultService::new(Vec::new(), Arc::new(Doorbell::new().unwrap()));
        let tenant = service.add_tenant(Arc::clone(&space), Arc::clone(&mmu));
        let limit = Arc::new(Limit::new());
        let handles = VmHandles {
            space,
            limit: Arc::clone(&limit),
            tenant: tenant.unwrap(),
        };
        let policy = "adaptive".parse().unwrap();
        Self {
            protection: VmProtection::new(&policy, mmu, vec![all], Some(handles)),
            ram,
            limit,
            _service: service,
        }
    }

    /// Gives a device that policy; returns it with its log.
    fn wishing(&self) -> Wishing {
        let policy = Wishing::default();
        self.protection.enter(DeviceId(1), Box::new(policy.clone()));
        policy
    }

    /// Evicts the sections and lets the policies request prefetches.
    fn evict(&self, sections: impl IntoIterator<Item = u64>) {
        for section in sections {
            self.protection.evicted(SectionNo(section));
        }
        self.protection.hear_fates(Duration::from_secs(1));
    }

    fn present(&self) -> Vec<u64> {
        self.ram.0.lock().unwrap().iter().copied().collect()
    }
}

#[test]
fn wished_sections_come_back_a_budget_at_a_time_oldest_wish_first() {
    let rig = Rig::new();
    rig.protection.request_prefetch(SectionNo(2));
    rig.protection.request_prefetch(SectionNo(0));
    rig.protection.prefetch(500);
    let begin = 2 * SECTION_PAGES;
    assert_eq!(rig.present(), (begin..begin + 512).collect::<Vec<_>>());
    assert!(rig.protection.wants_prefetch());
    rig.protection.prefetch(100);
    assert_eq!(rig.present().len(), 512 + 112);
    rig.protection.prefetch(1000);
    assert_eq!(rig.present().len(), 1024);
    assert!(!rig.protection.wants_prefetch());
    assert_eq!(rig.protection.report().prefetched_pages, 1024);
}

#[test]
fn wishes_below_the_low_mark_come_to_nothing_and_do_not_wait_for_room() {
    let rig = Rig::new();
    rig.limit.set(Some(1000), 1000);
    rig.protection.request_prefetch(SectionNo(1));
    rig.protection.prefetch(500);
    assert!(!rig.protection.wants_prefetch());
    rig.limit.set(None, 0);
    rig.protection.prefetch(500);
    assert!(rig.present().is_empty());
}

impl Wishing {
    /// Prefetches that failed since the last call.
    fn in_vain(&self) -> Vec<u64> {
        let told = std::mem::take(&mut *self.0.lock().unwrap());
        let in_vain = told.iter().filter(|it| it.1 == Fate::NotBroughtBack);
        in_vain.map(|(section, _)| section.0).collect()
    }
}

#[test]
fn policy_hears_that_its_wish_came_to_nothing_below_the_low_mark_and_not_that_one_was_granted() {
    let rig = Rig::new();
    let policy = rig.wishing();
    rig.limit.set(Some(1000), 1000);
    rig.evict([1, 3]);
    assert!(policy.in_vain().is_empty(), "nothing was tried yet");
    rig.protection.prefetch(5000);
    assert_eq!(policy.in_vain(), [1, 3]);
    rig.limit.set(None, 0);
    rig.evict([3]);
    rig.protection.prefetch(5000);
    assert!(policy.in_vain().is_empty());
    assert_eq!(rig.present().len() as u64, SECTION_PAGES);
}

#[test]
fn policy_hears_that_what_it_wished_was_there_already() {
    let rig = Rig::new();
    let policy = rig.wishing();
    rig.evict([2]);
    rig.protection.prefetch(100);
    rig.protection.prefetch(5000);
    assert!(policy.in_vain().is_empty(), "it came back, if in two parts");
    rig.evict([2]);
    rig.protection.prefetch(5000);
    assert_eq!(policy.in_vain(), [2]);
}

#[test]
fn policy_hears_of_the_oldest_wishes_when_there_are_too_many() {
    let rig = Rig::new();
    let policy = rig.wishing();
    // More than the queue holds, in two parts: one batch of prefetches by a policy is bounded too.
    rig.evict(0..2000);
    rig.evict(2000..2100);
    assert_eq!(policy.in_vain(), (0..52).collect::<Vec<_>>());
}
