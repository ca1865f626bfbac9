// SPDX-License-Identifier: Apache-2.0
//! Drivers that panic: regions are stuck until they are unmapped again, and nobody waits for ever.

use crate::kit::{
    Actor, DRIVERS_PANIC, Failing, Fails, Machine, Op, attach_all, end, own_frames, refused,
    region_of, space_of, wire,
};
use pagetide_addr::Access;
use pagetide_gmem::{AddressSpace, GmError, MapOptions, Mapped, Protection, Region};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
};

fn setting() -> (Machine, Arc<AddressSpace>, [Actor; 2]) {
    let machine = Machine::eager();
    let (cpu, gpu) = machine.cpu_and_gpu(8);
    let space = space_of(32);
    attach_all(&space, &[&cpu, &gpu]);
    (machine, space, [cpu, gpu])
}

/// The second call of `op` from now on panics: one table or device has done its part by then.
fn second_panics(machine: &Machine, op: Op) {
    machine.world().failing = Some(Failing {
        how: Fails::Panics,
        ..Failing::nth(op, machine.count(op) + 2)
    });
}

/// The driver's panic comes through.
#[track_caller]
fn panics<R>(act: impl FnOnce() -> R) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(act)) else {
        panic!("it went on");
    };
    assert_eq!(panic.downcast_ref(), Some(&DRIVERS_PANIC));
}

#[track_caller]
fn unmap_and_use_again(machine: &Machine, region: &Region, actor: &Actor) {
    assert_eq!(region.mapped(), Mapped::Leaving);
    refused!(
        region.map(&own_frames(0, 2), &MapOptions::new(Access::Write)),
        GmError::AlreadyMapped { .. }
    );
    refused!(
        actor.device.fault(region.start(), Access::Read),
        GmError::NotMapped { .. }
    );
    region.unmap().unwrap();
    machine.assert_unreachable(region.pages());
    wire(region, region.pages().start.0);
    actor.fill(region.pages(), 1);
}

#[test]
fn region_whose_unmap_panicked_is_stuck_until_it_is_unmapped_again() {
    for op in [Op::Restrict, Op::Invalidate] {
        let (machine, space, actors) = setting();
        let region = region_of(&space, 2);
        wire(&region, 0);
        second_panics(&machine, op);
        panics(|| region.unmap());
        unmap_and_use_again(&machine, &region, &actors[1]);
        let demand = region_of(&space, 2);
        actors[0].fill(demand.pages(), 3);
        machine.world().failing = Some(Failing {
            how: Fails::Panics,
            ..Failing::nth(op, machine.count(op) + 1)
        });
        panics(|| demand.unmap());
        assert_eq!(actors[0].device.used_memory_bytes(), 8192, "{op:?}");
        unmap_and_use_again(&machine, &demand, &actors[0]);
        end(&machine, &space, &[&actors[0], &actors[1]]);
    }
}

#[test]
fn region_whose_dealloc_panicked_is_allocated_and_goes_when_asked_again() {
    let (machine, space, actors) = setting();
    let region = region_of(&space, 2);
    wire(&region, 0);
    second_panics(&machine, Op::Invalidate);
    panics(|| region.dealloc());
    assert_eq!(space.lookup(region.start()).unwrap(), region);
    region.dealloc().unwrap();
    machine.assert_unreachable(region.pages());
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

#[test]
fn region_whose_map_panicked_is_stuck_until_it_is_unmapped() {
    let (machine, space, actors) = setting();
    let region = region_of(&space, 2);
    second_panics(&machine, Op::Grant);
    panics(|| wire(&region, 0));
    assert!(
        actors[0].entry(region.start().0).is_some(),
        "the first has it"
    );
    unmap_and_use_again(&machine, &region, &actors[1]);
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

#[test]
fn region_whose_protection_panicked_is_protected_when_asked_again() {
    let (machine, space, actors) = setting();
    let region = region_of(&space, 2);
    wire(&region, 0);
    second_panics(&machine, Op::Invalidate);
    panics(|| region.protect(Protection::ReadOnly));
    region.protect(Protection::ReadOnly).unwrap();
    for actor in &actors {
        actor.read(region.start().0);
        assert!(actor.try_write(region.start().0, 1).is_err());
    }
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

/// Queues three unmaps and a map, whose callbacks tell their numbers.
fn queue_all(regions: &[Region]) -> Receiver<(usize, Result<(), GmError>)> {
    let (tell, told) = channel();
    for (number, region) in regions.iter().enumerate() {
        let tell = tell.clone();
        let callback = Box::new(move |result| tell.send((number, result)).unwrap());
        if number == 3 {
            let options = MapOptions::new(Access::Write);
            let frames = own_frames(20, region.pages().len());
            region.map_later(frames, options, Some(callback)).unwrap();
        } else {
            region.unmap_later(Some(callback)).unwrap();
        }
    }
    told
}

#[test]
fn queue_whose_driver_panicked_ends_each_operation_and_goes_on() {
    for op in [Op::Restrict, Op::Invalidate, Op::Grant] {
        let (machine, space, actors) = setting();
        let regions: Vec<_> = (0..4).map(|_| region_of(&space, 2)).collect();
        for (number, region) in (0..).zip(&regions[..3]) {
            wire(region, 2 * number);
        }
        second_panics(&machine, op);
        let told = queue_all(&regions);
        panics(|| space.synchronize());
        // Nothing is queued, under way, or waited for.
        space.synchronize().unwrap();
        let mut numbers: Vec<_> = told.iter().map(|(number, _)| number).collect();
        numbers.dedup();
        assert!(numbers.len() < 4, "{op:?}: somebody's was dropped");
        assert!(numbers.is_sorted(), "{op:?}");
        for region in &regions {
            if region.mapped() == Mapped::Leaving {
                region.unmap().unwrap();
            }
            assert_eq!(region.mapped(), Mapped::Nothing, "{op:?}");
            machine.assert_unreachable(region.pages());
            wire(region, 30);
            region.unmap_later(None).unwrap();
            space.synchronize().unwrap();
        }
        end(&machine, &space, &[&actors[0], &actors[1]]);
    }
}

#[test]
fn thread_that_serves_the_queue_dies_of_its_driver_and_another_goes_on() {
    let (machine, space, actors) = setting();
    let region = region_of(&space, 2);
    wire(&region, 0);
    second_panics(&machine, Op::Invalidate);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| catch_unwind(AssertUnwindSafe(|| space.serve_operations())));
        let (tell, told) = channel();
        let callback = Box::new(move |result: Result<(), GmError>| tell.send(result).unwrap());
        region.unmap_later(Some(callback)).unwrap();
        let panic = server.join().unwrap().unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&DRIVERS_PANIC));
        assert!(told.recv().is_err(), "it was dropped");
    });
    unmap_and_use_again(&machine, &region, &actors[0]);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| space.serve_operations());
        let (tell, told) = channel();
        let callback = Box::new(move |result: Result<(), GmError>| tell.send(result).unwrap());
        region.unmap_later(Some(callback)).unwrap();
        told.recv().unwrap().unwrap();
        space.stop_operations();
        server.join().unwrap();
    });
    end(&machine, &space, &[&actors[0], &actors[1]]);
}
