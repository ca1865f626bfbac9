// SPDX-License-Identifier: Apache-2.0
//! The queue under loom: every interleaving, up to a bound of preemptions. A lost wake-up shows as
//! a thread that waits for ever.

use crate::{
    Activation, AddressSpace, AllocPolicy, Device, GmError, MapOptions, Mapped, MappingSet, Mmu,
    MmuError, MmuLimits, Mode, Region, RegionRequest, Restrict, Restricted, TableId,
};
use loom::sync::{
    Condvar, Mutex,
    atomic::{AtomicU32, Ordering::Relaxed},
};
use pagetide_addr::{Access, PAGE_BYTES, Pa, PageRange, PageSet, SectionNo, Va};
use std::sync::Arc;

/// A device that obeys every call, and counts invalidations.
struct Obedient(AtomicU32);

impl Mmu for Obedient {
    fn limits(&self) -> MmuLimits {
        MmuLimits::PAGED
    }

    fn restrict(
        &self,
        _table: TableId,
        _section: SectionNo,
        _pages: &PageSet,
        _to: Restrict,
    ) -> Result<Restricted, MmuError> {
        Ok(Restricted::Done)
    }

    fn grant(
        &self,
        _table: TableId,
        _pages: PageRange,
        _access: Access,
        _backing: crate::Backing,
    ) -> Result<(), MmuError> {
        Ok(())
    }

    fn invalidate(&self, _table: TableId, _ranges: &[PageRange]) -> Result<(), MmuError> {
        self.0.fetch_add(1, Relaxed);
        Ok(())
    }
}

/// A space with a device and `count` wired regions.
struct Scene {
    space: Arc<AddressSpace>,
    device: Arc<Obedient>,
    regions: Vec<Region>,
}

impl Scene {
    fn new(count: u64) -> Self {
        let end = Va(16 * PAGE_BYTES);
        let space = AddressSpace::create(Va(0), end, AllocPolicy::default()).unwrap();
        let device = Arc::new(Obedient(AtomicU32::new(0)));
        let attached = Device::create(Arc::clone(&device) as Arc<dyn Mmu>);
        space
            .attach(&attached, Mode::Coherent, Activation::Now)
            .unwrap();
        let regions = (0..count).map(|frame| {
            let region = region_of(&space);
            let frames = [Pa(frame * PAGE_BYTES)];
            region
                .map(&frames, &MapOptions::new(Access::Write))
                .unwrap();
            region
        });
        Self {
            regions: regions.collect(),
            device,
            space,
        }
    }

    /// A region that is not wired.
    fn region(&self) -> Region {
        region_of(&self.space)
    }

    /// A thread that serves the queue.
    fn server(&self) -> loom::thread::JoinHandle<()> {
        let space = Arc::clone(&self.space);
        loom::thread::spawn(move || space.serve_operations())
    }

    /// Queues the unmap of a region, which the callback counts.
    fn unmap_later(&self, region: usize, called: &Arc<Called>) {
        let (device, called) = (Arc::clone(&self.device), Arc::clone(called));
        let callback = Box::new(move |result: Result<(), GmError>| {
            result.unwrap();
            let invalidations = device.0.load(Relaxed);
            assert!(invalidations > 0, "called back before the invalidation");
            called.add_one();
        });
        self.regions[region].unmap_later(Some(callback)).unwrap();
    }
}

fn region_of(space: &Arc<AddressSpace>) -> Region {
    space.alloc(&RegionRequest::of_bytes(PAGE_BYTES)).unwrap()
}

/// Callbacks so far.
struct Called {
    count: Mutex<u32>,
    more: Condvar,
}

impl Called {
    fn none() -> Arc<Self> {
        Arc::new(Self {
            count: Mutex::new(0),
            more: Condvar::new(),
        })
    }

    fn add_one(&self) {
        *self.count.lock().unwrap() += 1;
        self.more.notify_all();
    }

    fn count(&self) -> u32 {
        *self.count.lock().unwrap()
    }

    /// Waits without carrying out operations.
    fn wait_for(&self, wanted: u32) {
        let mut count = self.count.lock().unwrap();
        while *count < wanted {
            count = self.more.wait(count).unwrap();
        }
    }
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn loom_thread_that_serves_is_called_whenever_something_is_queued() {
    check(|| {
        let (scene, called) = (Scene::new(3), Called::none());
        let server = scene.server();
        scene.unmap_later(0, &called);
        scene.unmap_later(1, &called);
        called.wait_for(2);
        scene.unmap_later(2, &called);
        called.wait_for(3);
        scene.space.stop_operations();
        server.join().unwrap();
    });
}

#[test]
fn loom_second_thread_that_serves_is_called_while_the_first_is_in_a_callback() {
    check(|| {
        let (scene, called, entered) = (Scene::new(2), Called::none(), Called::none());
        let servers = [scene.server(), scene.server()];
        let (inner, outer) = (Arc::clone(&called), Arc::clone(&entered));
        let first = Box::new(move |_| {
            outer.add_one();
            inner.wait_for(1);
        });
        scene.regions[0].unmap_later(Some(first)).unwrap();
        entered.wait_for(1);
        scene.unmap_later(1, &called);
        called.wait_for(1);
        scene.space.stop_operations();
        for server in servers {
            server.join().unwrap();
        }
    });
}

#[test]
fn loom_synchronize_beside_a_thread_that_serves_returns_after_the_callbacks() {
    check(|| {
        let (scene, called) = (Scene::new(2), Called::none());
        let server = scene.server();
        for (region, callbacks) in [(0, 1), (1, 2)] {
            scene.unmap_later(region, &called);
            scene.space.synchronize().unwrap();
            assert_eq!(called.count(), callbacks);
        }
        scene.space.stop_operations();
        server.join().unwrap();
    });
}

#[test]
fn loom_what_is_queued_before_the_stop_is_carried_out() {
    check(|| {
        let (scene, called) = (Scene::new(1), Called::none());
        let server = scene.server();
        scene.unmap_later(0, &called);
        scene.space.stop_operations();
        server.join().unwrap();
        assert_eq!(called.count(), 1);
    });
}

/// Wires the region to frame number `frame`, in the set.
fn joins(set: &MappingSet, region: &Region, frame: u64) -> Result<(), GmError> {
    let options = MapOptions {
        set: Some(set.clone()),
        ..MapOptions::new(Access::Write)
    };
    region.map(&[Pa(frame * PAGE_BYTES)], &options)
}

#[test]
fn loom_two_threads_that_unmap_one_set_both_return_after_the_invalidation() {
    check(|| {
        let scene = Scene::new(0);
        let (set, region) = (MappingSet::new(&scene.space), scene.region());
        joins(&set, &region, 0).unwrap();
        let unmap = |set: MappingSet, device: Arc<Obedient>| {
            move || {
                set.unmap().unwrap();
                assert!(device.0.load(Relaxed) > 0, "returned too early");
            }
        };
        let other = loom::thread::spawn(unmap(set.clone(), Arc::clone(&scene.device)));
        unmap(set, Arc::clone(&scene.device))();
        other.join().unwrap();
        assert_eq!(region.mapped(), Mapped::Nothing);
    });
}

#[test]
fn loom_set_beside_its_members_unmap_takes_nothing_that_is_not_its() {
    check(|| {
        let scene = Scene::new(0);
        let (set, region) = (MappingSet::new(&scene.space), scene.region());
        joins(&set, &region, 0).unwrap();
        let (all, device) = (set.clone(), Arc::clone(&scene.device));
        let other = loom::thread::spawn(move || {
            all.unmap().unwrap();
            assert!(device.0.load(Relaxed) > 0, "returned too early");
        });
        match region.unmap() {
            Ok(()) | Err(GmError::NotMapped { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        // Refused while the set unmaps its previous mappings.
        let mapped = region.map(&[Pa(PAGE_BYTES)], &MapOptions::new(Access::Write));
        other.join().unwrap();
        match mapped {
            Ok(()) => assert_eq!(region.mapped(), Mapped::Wired),
            Err(_) => assert_eq!(region.mapped(), Mapped::Nothing),
        }
        assert_eq!(set.mapping_count(), 0);
    });
}
