// SPDX-License-Identifier: Apache-2.0
//! Faults, mappings, attachments and the queue against one another, under loom: every interleaving, up
//! to a bound of preemptions.
//!
//! The hardware is a mutex: two devices with a table each, a TLB that looks
//! everything up at once and keeps it until it is invalidated, and frames of two
//! bytes. It fails when a frame is filled or copied that somebody reaches, or a
//! table is used that was destroyed. A lock taken in a wrong order, or a wake-up
//! that is lost, is a deadlock, which loom reports.

mod paged;

use crate::{
    Activation, AddressSpace, AllocPolicy, Backing, Device, GmError, MapOptions, Mapped, Mmu,
    MmuError, MmuLimits, Mode, OnAbsent, PhysicalMemory, Placement, Protection, Region,
    RegionRequest, Restrict, Restricted, TableId,
};
use loom::{sync::Mutex, thread};
use pagetide_addr::{Access, PAGE_BYTES, Pa, PageRange, PageSet, SectionNo, Va};
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
};

/// A frame of the test's own.
const OWN_FRAME: Pa = Pa(0x10_0000);

#[derive(Default)]
struct Table {
    frame: Option<Pa>,
    destroyed: bool,
}

#[derive(Default)]
struct Hardware {
    tables: HashMap<u64, Table>,
    active: [Option<u64>; 2],
    tlbs: [Option<Pa>; 2],
    frames: HashMap<Pa, [u8; 2]>,
}

impl Hardware {
    fn is_reached(&self, frame: Pa) -> bool {
        let mut in_tables = self.tables.values().filter(|table| !table.destroyed);
        self.tlbs.contains(&Some(frame)) || in_tables.any(|table| table.frame == Some(frame))
    }

    /// Every device looks the page up.
    fn look_up(&mut self) {
        for (tlb, active) in self.tlbs.iter_mut().zip(self.active) {
            let table = active.and_then(|number| self.tables.get(&number));
            *tlb = tlb.or(table.and_then(|table| table.frame));
        }
    }
}

/// One of the two devices, its engine for memory included.
#[derive(Clone)]
struct Unit {
    hardware: Arc<Mutex<Hardware>>,
    number: usize,
    on_absent: OnAbsent,
}

impl Unit {
    fn with<R>(&self, act: impl FnOnce(&mut Hardware) -> R) -> R {
        let mut hardware = self.hardware.lock().unwrap();
        let done = act(&mut hardware);
        hardware.look_up();
        done
    }

    fn table(&self) -> u64 {
        self.number as u64
    }

    fn device(&self) -> Arc<Device> {
        Device::create(Arc::new(self.clone()))
    }

    /// Writes its byte of the page: translates, faults, tries again.
    fn store(&self, device: &Arc<Device>, va: Va, byte: u8) -> Result<(), GmError> {
        loop {
            let number = self.number;
            let stored = self.with(|hardware| {
                let Some(frame) = hardware.tlbs[number] else {
                    return false;
                };
                hardware.frames.entry(frame).or_default()[number] = byte;
                true
            });
            if stored {
                return Ok(());
            }
            device.fault(va, Access::Write)?;
        }
    }
}

impl PhysicalMemory for Unit {
    fn prepare(&self, frame: Pa, _bytes: u64) -> Result<(), MmuError> {
        self.with(|hardware| {
            assert!(
                !hardware.is_reached(frame),
                "filled while somebody reaches it"
            );
            hardware.frames.insert(frame, [0; 2]);
        });
        Ok(())
    }

    fn copy(&self, from: Pa, to: Pa, _bytes: u64) -> Result<(), MmuError> {
        self.with(|hardware| {
            assert!(
                !hardware.is_reached(from),
                "copied while somebody writes it"
            );
            assert!(!hardware.is_reached(to), "copied to where somebody reads");
            let content = hardware.frames[&from];
            hardware.frames.insert(to, content);
        });
        Ok(())
    }
}

impl Mmu for Unit {
    fn limits(&self) -> MmuLimits {
        MmuLimits {
            on_absent: self.on_absent,
            ..MmuLimits::PAGED
        }
    }

    fn create_table(&self) -> Result<TableId, MmuError> {
        self.with(|hardware| hardware.tables.insert(self.table(), Table::default()));
        Ok(TableId(self.table()))
    }

    fn destroy_table(&self, table: TableId) {
        self.with(|hardware| {
            assert!(
                !hardware.active.contains(&Some(table.0)),
                "destroyed in use"
            );
            hardware.tables.entry(table.0).or_default().destroyed = true;
        });
    }

    fn activate(&self, table: TableId) -> Result<(), MmuError> {
        self.with(|hardware| {
            assert!(
                !hardware.tables[&table.0].destroyed,
                "activated after its end"
            );
            hardware.tlbs[self.number] = None;
            hardware.active[self.number] = Some(table.0);
        });
        Ok(())
    }

    fn deactivate(&self, _table: TableId) -> Result<(), MmuError> {
        self.with(|hardware| {
            hardware.tlbs[self.number] = None;
            hardware.active[self.number] = None;
        });
        Ok(())
    }

    fn restrict(
        &self,
        table: TableId,
        _section: SectionNo,
        _pages: &PageSet,
        _to: Restrict,
    ) -> Result<Restricted, MmuError> {
        self.with(|hardware| hardware.tables.entry(table.0).or_default().frame = None);
        Ok(Restricted::Done)
    }

    fn grant(
        &self,
        table: TableId,
        _pages: PageRange,
        _access: Access,
        backing: Backing,
    ) -> Result<(), MmuError> {
        self.with(|hardware| {
            let table = hardware.tables.entry(table.0).or_default();
            assert!(!table.destroyed, "granted after its end");
            table.frame = match backing {
                Backing::Frames { first, .. } => Some(first),
                Backing::Home => None,
            };
        });
        Ok(())
    }

    fn invalidate(&self, table: TableId, _ranges: &[PageRange]) -> Result<(), MmuError> {
        self.with(|hardware| {
            assert_eq!(hardware.active[self.number], Some(table.0));
            hardware.tlbs[self.number] = None;
        });
        Ok(())
    }
}

/// Two devices with one frame of memory each, a space, and a region of one page.
struct Setting {
    units: [Unit; 2],
    devices: [Arc<Device>; 2],
    space: Arc<AddressSpace>,
    region: Region,
}

impl Setting {
    fn new(attached: usize) -> Self {
        Self::with(attached, OnAbsent::Recovers)
    }

    fn with(attached: usize, on_absent: OnAbsent) -> Self {
        let hardware = Arc::default();
        let unit = |number| Unit {
            hardware: Arc::clone(&hardware),
            number,
            on_absent,
        };
        let units = [unit(0), unit(1)];
        let devices = [units[0].device(), units[1].device()];
        let end = Va(PAGE_BYTES * 3);
        let space = AddressSpace::create(Va(PAGE_BYTES), end, AllocPolicy::default()).unwrap();
        for (unit, device) in units.iter().zip(&devices) {
            let begin = Pa(0x1000 * (1 + unit.table()));
            let memory = Arc::new(unit.clone());
            device
                .register_physmem(begin, Pa(begin.0 + PAGE_BYTES), memory)
                .unwrap();
        }
        for device in &devices[..attached] {
            space
                .attach(device, Mode::Coherent, Activation::Now)
                .unwrap();
        }
        let region = space.alloc(&RegionRequest::of_bytes(PAGE_BYTES)).unwrap();
        Self {
            units,
            devices,
            space,
            region,
        }
    }

    fn wire(&self) {
        let options = MapOptions::new(Access::Write);
        self.region.map(&[OWN_FRAME], &options).unwrap();
    }

    fn is_reached(&self, frame: Pa) -> bool {
        self.units[0].with(|hardware| hardware.is_reached(frame))
    }

    /// A callback that counts, and finds the test's own frame reached by nobody.
    fn callback(&self, called: &Arc<AtomicU32>) -> Option<crate::Callback> {
        let (unit, called) = (self.units[0].clone(), Arc::clone(called));
        Some(Box::new(move |result| {
            result.unwrap();
            let reached = unit.with(|hardware| hardware.is_reached(OWN_FRAME));
            assert!(!reached, "reached after its callback");
            called.fetch_add(1, SeqCst);
        }))
    }
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(4);
    builder.check(model);
}

#[test]
fn loom_fault_against_a_queued_unmap_never_reaches_its_frame_after_the_callback() {
    check(|| {
        let setting = Setting::new(1);
        setting.wire();
        let called = Arc::new(AtomicU32::new(0));
        setting
            .region
            .unmap_later(setting.callback(&called))
            .unwrap();
        let (unit, device) = (setting.units[0].clone(), Arc::clone(&setting.devices[0]));
        let va = setting.region.start();
        let storer = thread::spawn(move || match unit.store(&device, va, 1) {
            Ok(()) | Err(GmError::NotMapped { .. }) => {}
            Err(error) => panic!("{error}"),
        });
        setting.space.synchronize().unwrap();
        assert_eq!(called.load(SeqCst), 1);
        assert!(!setting.is_reached(OWN_FRAME));
        storer.join().unwrap();
        assert!(!setting.is_reached(OWN_FRAME));
    });
}

#[test]
fn loom_device_that_is_attached_while_a_region_is_wired_has_it() {
    check(|| {
        let setting = Setting::with(1, OnAbsent::Fails);
        let (space, late) = (Arc::clone(&setting.space), Arc::clone(&setting.devices[1]));
        let attacher = thread::spawn(move || {
            space
                .attach(&late, Mode::Coherent, Activation::Now)
                .unwrap();
        });
        setting.wire();
        attacher.join().unwrap();
        let reached = setting.units[0].with(|hardware| hardware.tlbs);
        assert_eq!(reached, [Some(OWN_FRAME); 2]);
        setting.region.unmap().unwrap();
        assert!(!setting.is_reached(OWN_FRAME));
    });
}

#[test]
fn loom_device_that_is_detached_while_it_faults_reaches_nothing() {
    check(|| {
        let setting = Setting::new(1);
        let (unit, device) = (setting.units[0].clone(), Arc::clone(&setting.devices[0]));
        let va = setting.region.start();
        let storer = thread::spawn(move || match unit.store(&device, va, 1) {
            Ok(()) | Err(GmError::NotActive { .. } | GmError::NotAttached { .. }) => {}
            Err(error) => panic!("{error}"),
        });
        setting.devices[0].detach(&setting.space).unwrap();
        storer.join().unwrap();
        assert!(!setting.is_reached(Pa(0x1000)));
        setting.region.dealloc().unwrap();
        assert_eq!(setting.devices[0].used_memory_bytes(), 0);
        setting.space.destroy().unwrap();
    });
}

#[test]
fn loom_page_that_two_devices_fault_on_keeps_what_both_wrote() {
    check(|| {
        let setting = Setting::new(2);
        let va = setting.region.start();
        let (unit, device) = (setting.units[1].clone(), Arc::clone(&setting.devices[1]));
        let other = thread::spawn(move || unit.store(&device, va, 2).unwrap());
        setting.units[0].store(&setting.devices[0], va, 1).unwrap();
        other.join().unwrap();
        let (tlbs, content) = setting.units[0].with(|hardware| {
            let frame = hardware.tlbs.iter().flatten().next();
            (hardware.tlbs, frame.map(|frame| hardware.frames[frame]))
        });
        assert_eq!(tlbs.iter().flatten().count(), 1, "one mapping in the space");
        assert_eq!(content, Some([1, 2]));
        let used = setting
            .devices
            .iter()
            .map(|device| device.used_memory_bytes());
        assert_eq!(used.sum::<u64>(), PAGE_BYTES);
    });
}

#[test]
fn loom_frame_is_given_to_another_only_after_its_invalidation() {
    check(|| {
        let setting = Setting::new(2);
        let [one, two] = setting.devices.each_ref().map(Arc::clone);
        let other = setting
            .space
            .alloc(&RegionRequest::of_bytes(PAGE_BYTES))
            .unwrap();
        other.set_policy(Placement::Unique, Some(&one)).unwrap();
        // The only frame of the first device.
        setting.units[0]
            .store(&one, setting.region.start(), 1)
            .unwrap();
        setting.region.unmap_later(None).unwrap();
        let unit = setting.units[1].clone();
        let va = other.start();
        let storer = thread::spawn(move || match unit.store(&two, va, 2) {
            Ok(()) | Err(GmError::NoMemory { .. }) => {}
            Err(error) => panic!("{error}"),
        });
        setting.space.synchronize().unwrap();
        storer.join().unwrap();
        let tlbs = setting.units[0].with(|hardware| hardware.tlbs);
        assert_eq!(tlbs[0], None);
    });
}

#[test]
fn loom_synchronize_waits_for_callbacks_of_whoever_serves_the_queue() {
    check(|| {
        let setting = Setting::new(1);
        setting.wire();
        let called = Arc::new(AtomicU32::new(0));
        let space = Arc::clone(&setting.space);
        let server = thread::spawn(move || space.serve_operations());
        setting
            .region
            .unmap_later(setting.callback(&called))
            .unwrap();
        setting.space.synchronize().unwrap();
        assert_eq!(called.load(SeqCst), 1);
        setting.space.stop_operations();
        server.join().unwrap();
    });
}

#[test]
fn loom_server_that_sleeps_is_called_for_what_is_queued() {
    check(|| {
        let setting = Setting::new(0);
        let called = Arc::new(AtomicU32::new(0));
        let (space, served) = (Arc::clone(&setting.space), Arc::clone(&called));
        let server = thread::spawn(move || {
            space.serve_operations();
            // It was told to stop after all was queued: so all is done.
            assert_eq!(served.load(SeqCst), 2);
        });
        for _ in 0..2 {
            setting.wire_later();
            setting
                .region
                .unmap_later(setting.callback(&called))
                .unwrap();
            thread::yield_now();
        }
        setting.space.stop_operations();
        server.join().unwrap();
        assert_eq!(setting.region.mapped(), Mapped::Nothing);
    });
}

impl Setting {
    fn wire_later(&self) {
        let options = MapOptions::new(Access::Write);
        self.region
            .map_later(vec![OWN_FRAME], options, None)
            .unwrap();
    }
}

#[test]
fn loom_two_who_unmap_and_one_who_gives_back_do_it_once() {
    check(|| {
        let setting = Setting::new(1);
        setting.wire();
        let called = Arc::new(AtomicU32::new(0));
        setting
            .region
            .unmap_later(setting.callback(&called))
            .unwrap();
        let region = setting.region.clone();
        let other = thread::spawn(move || match region.unmap() {
            Ok(()) | Err(GmError::NotMapped { .. } | GmError::Destroyed) => {}
            Err(error) => panic!("{error}"),
        });
        setting.region.dealloc().unwrap();
        assert!(!setting.is_reached(OWN_FRAME));
        other.join().unwrap();
        setting.space.synchronize().unwrap();
        assert_eq!(called.load(SeqCst), 1);
    });
}

#[test]
fn loom_space_is_destroyed_or_attached_to_and_never_both() {
    check(|| {
        let setting = Setting::new(0);
        setting.region.dealloc().unwrap();
        let (space, late) = (Arc::clone(&setting.space), Arc::clone(&setting.devices[0]));
        let attacher =
            thread::spawn(
                move || match space.attach(&late, Mode::Coherent, Activation::Now) {
                    Ok(()) => 1,
                    Err(GmError::Destroyed) => 0,
                    Err(error) => panic!("{error}"),
                },
            );
        let destroyed = match setting.space.destroy() {
            Ok(()) => 1,
            Err(GmError::InUse { .. }) => 0,
            Err(error) => panic!("{error}"),
        };
        assert_eq!(destroyed + attacher.join().unwrap(), 1);
    });
}

#[test]
fn loom_protection_holds_against_a_fault_under_way() {
    check(|| {
        let setting = Setting::new(1);
        setting.wire();
        let (unit, device) = (setting.units[0].clone(), Arc::clone(&setting.devices[0]));
        let va = setting.region.start();
        let storer = thread::spawn(move || match unit.store(&device, va, 1) {
            Ok(()) | Err(GmError::Denied { .. }) => {}
            Err(error) => panic!("{error}"),
        });
        setting.region.protect(Protection::Nothing).unwrap();
        assert!(!setting.is_reached(OWN_FRAME));
        storer.join().unwrap();
        assert!(!setting.is_reached(OWN_FRAME));
        setting.region.protect(Protection::ReadWrite).unwrap();
        setting.units[0].store(&setting.devices[0], va, 1).unwrap();
    });
}
