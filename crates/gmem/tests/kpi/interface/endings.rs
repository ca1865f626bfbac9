// SPDX-License-Identifier: Apache-2.0
//! What becomes of devices, tables, memory and callbacks when a space is dropped or a device ends.

use crate::kit::{
    Actor, Build, Failing, Machine, Op, attach_all, end, other_space_of, refused, region_of,
    space_of, wire,
};
use pagetide_addr::Pa;
use pagetide_gmem::{GmError, MappingSet, MmuError, Mode, PhysicalMemory, Region};
use std::sync::{Arc, Mutex, mpsc::channel};

#[test]
fn table_of_sharers_stays_while_one_of_them_will_not_let_go() {
    for refusing in [1, 2] {
        let machine = Machine::eager();
        let sharers = [1, 1].map(|format| machine.actor(Build::of_format(format)));
        sharers[0].give_memory(0x4000_0000, 4);
        let space = space_of(16);
        for sharer in &sharers {
            sharer.join(&space, Mode::Shared).unwrap();
        }
        let region = region_of(&space, 2);
        sharers[0].fill(region.pages(), 1);
        machine.world().failing = Some(Failing::nth(Op::Deactivate, refusing));
        drop(region);
        drop(space);
        assert_eq!(machine.live_tables(), 1, "call {refusing} is refused");
        let active = sharers.iter().filter(|sharer| sharer.table().is_some());
        assert_eq!(active.count(), 1);
        assert_eq!(sharers[0].device.used_memory_bytes(), 8192);
        for sharer in &sharers {
            assert!(!sharer.device.is_active());
        }
        machine.assert_sound();
    }
}

#[test]
fn device_that_went_elsewhere_while_its_space_ended_is_left_alone() {
    let machine = Machine::eager();
    machine.world().spaces_end = true;
    let (stays, last) = (machine.gpu(), machine.gpu());
    let (ends, goes_on) = (space_of(16), other_space_of(16));
    attach_all(&ends, &[&stays, &last]);
    wire(&region_of(&ends, 1), 0);
    let region = region_of(&goes_on, 1);
    wire(&region, 1);
    let (went, asked) = (Arc::new(Mutex::new(false)), stays.clone());
    let space = Arc::clone(&goes_on);
    // The last is let go first; by then the space is at its end.
    machine.before_each(Op::Deactivate, move || {
        let mut went = went.lock().unwrap();
        if !*went {
            *went = true;
            assert!(!asked.device.is_active(), "its space is at its end");
            attach_all(&space, &[&asked]);
        }
    });
    drop(ends);
    machine.world().before_each = None;
    assert!(stays.device.is_active());
    assert_eq!(stays.count(Op::Deactivate), 0, "it is used elsewhere");
    assert_eq!(machine.live_tables(), 1);
    stays.write(region.start().0, 3);
    assert!(!last.device.is_active());
    last.device.destroy().unwrap();
    end(&machine, &goes_on, &[&stays]);
}

#[test]
fn callbacks_of_a_space_that_is_dropped_are_told_so() {
    let machine = Machine::eager();
    let gpu = machine.gpu();
    let space = space_of(16);
    attach_all(&space, &[&gpu]);
    let regions: Vec<Region> = (0..3).map(|_| region_of(&space, 1)).collect();
    let (tell, told) = channel();
    for (number, region) in (0..).zip(&regions) {
        wire(region, number);
        let tell = tell.clone();
        let callback = Box::new(move |result| tell.send((number, result)).unwrap());
        region.unmap_later(Some(callback)).unwrap();
    }
    let set = MappingSet::new(&space);
    let callback = Box::new(move |result| tell.send((3, result)).unwrap());
    set.unmap_later(Some(callback)).unwrap();
    drop((regions, set));
    let pages = space.pages();
    drop(space);
    for wanted in 0..4 {
        let (number, result) = told.recv().unwrap();
        assert_eq!(number, wanted);
        refused!(result, GmError::Destroyed);
    }
    assert!(told.recv().is_err(), "each is called once");
    assert!(!gpu.device.is_active());
    refused!(
        gpu.device
            .fault(pagetide_addr::Va(0), pagetide_addr::Access::Read),
        GmError::NotActive { .. }
    );
    machine.assert_unreachable(pages);
    gpu.device.destroy().unwrap();
}

#[test]
fn set_of_a_space_that_was_destroyed_is_refused() {
    let space = space_of(16);
    let set = MappingSet::new(&space);
    space.destroy().unwrap();
    refused!(set.unmap_later(None), GmError::Destroyed);
}

struct Idle;

impl PhysicalMemory for Idle {
    fn prepare(&self, _: Pa, _: u64) -> Result<(), MmuError> {
        Ok(())
    }
    fn copy(&self, _: Pa, _: Pa, _: u64) -> Result<(), MmuError> {
        Ok(())
    }
}

#[test]
fn device_that_is_destroyed_drops_its_memory() {
    let actor: Actor = Machine::new().gpu();
    let memory = Arc::new(Idle);
    let registered = Arc::clone(&memory) as Arc<dyn PhysicalMemory>;
    actor
        .device
        .register_physmem(Pa(0), Pa(4096), registered)
        .unwrap();
    assert_eq!(Arc::strong_count(&memory), 2);
    actor.device.destroy().unwrap();
    assert_eq!(Arc::strong_count(&memory), 1);
}
