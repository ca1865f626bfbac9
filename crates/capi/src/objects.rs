// SPDX-License-Identifier: Apache-2.0
//! The objects behind the handles: [`Space`], [`Dev`], [`Area`] (a region), [`Set`].
//!
//! *One handle a region.* A space keeps the handle of each of its regions by start address. A
//! region that was found may be freed at any moment, and another be allocated in its place. So an
//! entry is made, with the list locked, only after the region is looked up once more, and removed
//! only for the region it was made for. A new region's entry replaces that of a freed one.
//!
//! *Operations.* A space starts a thread for its asynchronous operations with the first of them. A
//! destroyed space has none, so a thread that queued an operation at that very moment checks
//! afterwards and carries it out itself.

use crate::{
    cpu::Cpu,
    driver::Driver,
    failure::Failure,
    handle::{Handle, Handles, Kind},
    types::{gm_as_t, gm_dev_t, gm_mapping_set_t, gm_region_t},
};
use gmem::{AddressSpace, Device, GmError, MappingSet, PhysicalMemory, Region};
use pagetide_addr::Va;
use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

pub(crate) static SPACES: Handles<Space> = Handles::new(Kind {
    number: 1,
    name: "address space",
});
pub(crate) static DEVICES: Handles<Dev> = Handles::new(Kind {
    number: 2,
    name: "device",
});
pub(crate) static REGIONS: Handles<Area> = Handles::new(Kind {
    number: 3,
    name: "region",
});
pub(crate) static SETS: Handles<Set> = Handles::new(Kind {
    number: 4,
    name: "mapping set",
});

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The guarded data changes in single steps: a panic leaves nothing half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An address space.
pub(crate) struct Space {
    pub(crate) space: Arc<AddressSpace>,
    handle: Handle<Space>,
    regions: Mutex<BTreeMap<Va, (Region, Handle<Area>)>>,
    sets: Mutex<Vec<Handle<Set>>>,
    worker: Mutex<Worker>,
    ended: AtomicBool,
}

/// The thread that carries operations out.
enum Worker {
    NotYet,
    Runs(JoinHandle<()>),
    Ended,
}

/// A region.
pub(crate) struct Area {
    pub(crate) region: Region,
    pub(crate) space: Arc<Space>,
}

/// A mapping set.
pub(crate) struct Set {
    pub(crate) set: MappingSet,
    pub(crate) space: Arc<Space>,
}

/// A device.
pub(crate) struct Dev {
    pub(crate) device: Arc<Device>,
    pub(crate) operations: Operations,
    /// Held while it is being attached and while it is being destroyed: see [`Dev::destroy`].
    standing: Mutex<()>,
}

/// The implementation of a device's operations.
pub(crate) enum Operations {
    /// That of a C program.
    Driver(Arc<Driver>),
    /// That of this library for the CPU.
    Cpu(Arc<Cpu>),
}

impl Space {
    pub(crate) fn of_c(given: *const gm_as_t) -> Result<Arc<Self>, Failure> {
        SPACES.get(Handle::of_c(given))
    }

    pub(crate) fn publish(space: Arc<AddressSpace>) -> Result<Handle<Self>, Failure> {
        let (handle, _) = SPACES.insert_with(|handle| Self {
            space,
            handle,
            regions: Mutex::default(),
            sets: Mutex::default(),
            worker: Mutex::new(Worker::NotYet),
            ended: AtomicBool::new(false),
        })?;
        Ok(handle)
    }

    pub(crate) fn handle(&self) -> Handle<Self> {
        self.handle
    }

    /// The handle of a region just allocated or found; `None` if it was freed since.
    pub(crate) fn handle_of(
        self: &Arc<Self>,
        region: &Region,
    ) -> Result<Option<Handle<Area>>, Failure> {
        let mut known = lock(&self.regions);
        if let Some((same, handle)) = known.get(&region.start())
            && same == region
        {
            return Ok(Some(*handle));
        }
        match self.space.lookup(region.start()) {
            Ok(found) if found == *region => {}
            _ => return Ok(None),
        }
        let (handle, _) = REGIONS.insert_with(|_| Area {
            region: region.clone(),
            space: Arc::clone(self),
        })?;
        let before = known.insert(region.start(), (region.clone(), handle));
        if let Some((_, stale)) = before {
            REGIONS.remove(stale);
        }
        Ok(Some(handle))
    }

    /// Invalidates the handle of a freed region.
    pub(crate) fn forget(&self, region: &Region) {
        let mut known = lock(&self.regions);
        let is_it = |(same, _): &(Region, _)| same == region;
        if known.get(&region.start()).is_some_and(is_it)
            && let Some((_, handle)) = known.remove(&region.start())
        {
            REGIONS.remove(handle);
        }
    }

    pub(crate) fn new_set(self: &Arc<Self>) -> Result<Handle<Set>, Failure> {
        let mut sets = lock(&self.sets);
        // Checked with the list locked: a space that ends takes this lock afterwards.
        if self.has_ended() {
            return Err(GmError::Destroyed.into());
        }
        let (handle, _) = SETS.insert_with(|_| Set {
            set: MappingSet::new(&self.space),
            space: Arc::clone(self),
        })?;
        sets.push(handle);
        Ok(handle)
    }

    pub(crate) fn drop_set(&self, handle: Handle<Set>) {
        lock(&self.sets).retain(|known| *known != handle);
        SETS.remove(handle);
    }

    /// Acquire pairs with Release in [`Space::end`].
    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Starts the thread that carries operations out, if there is none.
    pub(crate) fn serve_operations(&self) -> Result<(), Failure> {
        let mut worker = lock(&self.worker);
        if let Worker::NotYet = *worker {
            let space = Arc::clone(&self.space);
            let thread = std::thread::Builder::new().name("gmem-operations".to_owned());
            match thread.spawn(move || serve(&space)) {
                Ok(thread) => *worker = Worker::Runs(thread),
                Err(error) => return Err(Failure::NoThread { error }),
            }
        }
        Ok(())
    }

    /// Queues an operation with `queue`, for the thread. If the space is just ending there is none,
    /// and the operation is carried out here.
    pub(crate) fn queue(&self, queue: impl FnOnce() -> Result<(), GmError>) -> Result<(), Failure> {
        self.serve_operations()?;
        queue()?;
        // Either the end sees the operation in the queue, or this sees the end: both take the
        // queue's lock, the end after the mark is set.
        if self.has_ended() {
            self.space.synchronize()?;
        }
        Ok(())
    }

    /// Ends the space; invalidates its handle and those of its mapping sets.
    pub(crate) fn end(&self) -> Result<(), Failure> {
        self.space.destroy()?;
        self.ended.store(true, Ordering::Release);
        SPACES.remove(self.handle);
        for set in std::mem::take(&mut *lock(&self.sets)) {
            SETS.remove(set);
        }
        for (_, region) in std::mem::take(&mut *lock(&self.regions)).into_values() {
            REGIONS.remove(region);
        }
        let worker = std::mem::replace(&mut *lock(&self.worker), Worker::Ended);
        if let Worker::Runs(thread) = worker
            && thread.thread().id() != std::thread::current().id()
        {
            let ended_well = thread.join().is_ok();
            debug_assert!(ended_well, "the thread catches every panic");
        }
        // Carries out operations queued meanwhile. An unreported failure is dropped with the space:
        // it has no regions left that the failure could concern.
        match self.space.synchronize() {
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

/// Body of the thread: a panic of an operation ends that operation and not the thread.
fn serve(space: &AddressSpace) {
    while catch_unwind(AssertUnwindSafe(|| space.serve_operations())).is_err() {}
}

impl Area {
    pub(crate) fn of_c(given: *const gm_region_t) -> Result<Arc<Self>, Failure> {
        REGIONS.get(Handle::of_c(given))
    }
}

impl Set {
    pub(crate) fn of_c(given: *const gm_mapping_set_t) -> Result<Arc<Self>, Failure> {
        SETS.get(Handle::of_c(given))
    }
}

impl Dev {
    pub(crate) fn of_c(given: *const gm_dev_t) -> Result<Arc<Self>, Failure> {
        DEVICES.get(Handle::of_c(given))
    }

    pub(crate) fn publish(
        device: Arc<Device>,
        operations: Operations,
    ) -> Result<Handle<Self>, Failure> {
        let (handle, _) = DEVICES.insert_with(|_| Self {
            device,
            operations,
            standing: Mutex::default(),
        })?;
        Ok(handle)
    }

    /// Keeps the device from being attached or destroyed until the guard is dropped.
    pub(crate) fn hold(&self) -> MutexGuard<'_, ()> {
        lock(&self.standing)
    }

    /// The operations on the device's memory.
    ///
    /// # Errors
    /// [`Failure`] if its driver has no such operations.
    pub(crate) fn memory(&self) -> Result<Arc<dyn PhysicalMemory>, Failure> {
        match &self.operations {
            Operations::Driver(driver) => {
                driver.require_memory_operations()?;
                let memory: Arc<dyn PhysicalMemory> = Arc::clone(driver) as _;
                Ok(memory)
            }
            Operations::Cpu(cpu) => Ok(Arc::clone(cpu) as _),
        }
    }

    /// Destroys a device that is not attached anywhere and whose page tables are not in use: when
    /// this returns without error its driver is not called again.
    ///
    /// A table outlives the attachment that made it while other devices share it. Only an
    /// attachment makes new tables, and none can begin with the device held.
    pub(crate) fn destroy(&self) -> Result<(), Failure> {
        let _held = self.hold();
        if let Operations::Driver(driver) = &self.operations
            && driver.has_tables()
        {
            return Err(Failure::Gmem(GmError::InUse {
                by: "an address space that the device, or one that shares its page table, is attached to",
            }));
        }
        self.device.destroy()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gmem::{AllocPolicy, RegionRequest};

    fn space() -> Arc<Space> {
        let space = AddressSpace::create(Va(1 << 20), Va(1 << 24), AllocPolicy::default());
        let handle = Space::publish(space.unwrap()).unwrap();
        SPACES.get(handle).unwrap()
    }

    #[test]
    fn space_that_ended_is_held_by_nobody_and_neither_is_what_was_in_it() {
        let space = space();
        let region = space.space.alloc(&RegionRequest::of_bytes(4096)).unwrap();
        let handle = space.handle_of(&region).unwrap().unwrap();
        let area = Arc::downgrade(&REGIONS.get(handle).unwrap());
        let set = space.new_set().unwrap();
        let set = Arc::downgrade(&SETS.get(set).unwrap());
        space.serve_operations().unwrap();
        assert!(space.end().is_err());
        region.dealloc().unwrap();
        space.forget(&region);
        drop(region);
        space.end().unwrap();
        assert!(area.upgrade().is_none());
        assert!(set.upgrade().is_none());
        assert_eq!(Arc::strong_count(&space), 1);
        assert_eq!(Arc::strong_count(&space.space), 1);
        assert!(matches!(
            SPACES.get(space.handle()),
            Err(Failure::Destroyed { .. })
        ));
        assert!(space.new_set().is_err());
    }

    #[test]
    fn region_that_was_freed_gets_no_handle_and_its_successor_a_new_one() {
        let space = space();
        let request = RegionRequest {
            hint: Some(Va(1 << 20)),
            ..RegionRequest::of_bytes(4096)
        };
        let first = space.space.alloc(&request).unwrap();
        let handle = space.handle_of(&first).unwrap().unwrap();
        assert!(space.handle_of(&first).unwrap() == Some(handle));
        // Freed, and its address reused, before its handle was invalidated.
        first.dealloc().unwrap();
        let second = space.space.alloc(&request).unwrap();
        assert_eq!(second.start(), first.start());
        let next = space.handle_of(&second).unwrap().unwrap();
        assert!(next != handle);
        assert!(matches!(
            REGIONS.get(handle),
            Err(Failure::Destroyed { .. })
        ));
        // A late look-up of the first changes nothing about the second.
        assert!(space.handle_of(&first).unwrap().is_none());
        space.forget(&first);
        assert!(space.handle_of(&second).unwrap() == Some(next));
        second.dealloc().unwrap();
        space.forget(&second);
        space.end().unwrap();
    }
}
