// SPDX-License-Identifier: Apache-2.0
//! Prefetch by policies, in memory that is a map.

use super::vm::{VmHandles, VmProtection};
use pagetide_addr::{DeviceId, PAGE_BYTES, PageNo, SECTION_PAGES, SectionNo};
use pagetide_gmem::{
    RegionRequest,
    fake::{self, FakePlace},
};
use pagetide_policy::protect::{Change, Fate, PolicyReport, ProtectionPolicy, Touch};
use pagetide_swap::Limit;
use pagetide_sys::memory_file::GuestFile;
use pagetide_vpri::{DPU, DmaMmu, DomainTable, Doorbell, FaultService, IoSpace};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

const SECTIONS: u64 = 4;
const PAGES: u64 = SECTIONS * SECTION_PAGES;

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

/// A VM whose pages are all absent, and zero.
struct Rig {
    protection: VmProtection,
    place: Arc<FakePlace>,
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
        let place = Arc::new(FakePlace::default());
        let all = PageNo(0).run(PAGES);
        let mmu = Arc::new(DmaMmu::new([(domain as Arc<dyn IoSpace>, all)]));
        let parts = fake::parts(PAGES, Arc::clone(&place) as _);
        let space = fake::space(parts, DPU, Arc::clone(&mmu) as _);
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
            place,
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
        self.place.present().iter().map(|page| page.0).collect()
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
