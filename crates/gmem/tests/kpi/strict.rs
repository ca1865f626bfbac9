// SPDX-License-Identifier: Apache-2.0
//! Asynchronous operations under strict security (GMEM 5.3).
//!
//! The machine is eager: after each operation of an MMU every active device
//! looks up every page, so a TLB holds what it can until it is invalidated. A
//! callback forbids its pages, and from then on each step is looked at.

use crate::kit::{
    Actor, Event, Failing, Machine, Op, attach_all, end, own_frames, refused, region_of, space_of,
    wire,
};
use pagetide_addr::Access;
use pagetide_gmem::{
    AddressSpace, Callback, GmError, MapOptions, Mapped, Mode, Region, RegionRequest,
    space::QUEUED_MAX,
};
use pagetide_random::SplitMix64;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

/// An eager machine with two devices in one space of 256 pages.
fn setting() -> (Machine, Arc<AddressSpace>, [Actor; 2]) {
    let machine = Machine::eager();
    let (cpu, gpu) = machine.cpu_and_gpu(64);
    let space = space_of(256);
    attach_all(&space, &[&cpu, &gpu]);
    (machine, space, [cpu, gpu])
}

/// The number of an operation, and what became of it.
type Outcome = (u64, Result<(), String>);

/// What callbacks tell, in the order they are called in.
#[derive(Clone, Default)]
struct Outcomes(Arc<Mutex<Vec<Outcome>>>);

impl Outcomes {
    /// A callback that tells its number.
    fn by(&self, number: u64) -> Option<Callback> {
        let told = self.clone();
        Some(Box::new(move |result: Result<(), GmError>| {
            let result = result.map_err(|error| error.to_string());
            told.0.lock().unwrap().push((number, result));
        }))
    }

    fn numbers(&self) -> Vec<u64> {
        let all = self.0.lock().unwrap();
        all.iter().map(|(number, _)| *number).collect()
    }

    #[track_caller]
    fn assert_all_went_well(&self) {
        for (number, result) in self.0.lock().unwrap().iter() {
            assert_eq!(*result, Ok(()), "operation {number}");
        }
    }
}

/// A callback that forbids the region's pages, and checks that it came after both steps.
fn forbidding(machine: &Machine, region: &Region) -> Option<Callback> {
    let (machine, pages) = (machine.clone(), region.pages());
    Some(Box::new(move |result| {
        result.unwrap();
        machine.note("callback", pages.start.0);
        machine.forbid(pages);
    }))
}

#[test]
fn page_is_never_reached_after_its_unmaps_callback() {
    let (machine, space, actors) = setting();
    let regions: Vec<_> = (0..8).map(|_| region_of(&space, 4)).collect();
    for (number, region) in (0_u64..).zip(&regions) {
        if number % 2 == 0 {
            wire(region, number * 4);
        }
        for actor in &actors {
            actor.fill(region.pages(), number);
        }
    }
    for region in &regions {
        region.unmap_later(forbidding(&machine, region)).unwrap();
        for actor in &actors {
            // Until the callback the pages count as mapped.
            actor
                .access(region.start().0, Access::Read, |_| ())
                .unwrap();
        }
    }
    space.synchronize().unwrap();
    machine.assert_sound();
    let events = machine.world().events.clone();
    let last = |wanted: &dyn Fn(&Event) -> bool| events.iter().rposition(wanted).unwrap();
    let first_callback = events
        .iter()
        .position(|event| matches!(event, Event::Note(..)));
    let restricted = last(&|event| matches!(event, Event::Did(Op::Restrict, _)));
    let invalidated = last(&|event| matches!(event, Event::Did(Op::Invalidate, _)));
    assert!(restricted < invalidated && invalidated < first_callback.unwrap());
    machine.permit(space.pages());
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

/// How a region goes.
type Goes = fn(&AddressSpace, &Region);

#[test]
fn frames_and_addresses_are_not_used_again_before_the_invalidation() {
    let ways: [Goes; 3] = [
        |_, region| region.dealloc().unwrap(),
        |_, region| {
            region.unmap().unwrap();
            region.dealloc().unwrap();
        },
        |space, region| {
            region.unmap_later(None).unwrap();
            space.synchronize().unwrap();
            region.dealloc().unwrap();
        },
    ];
    for goes in ways {
        let machine = Machine::eager();
        let (gpu, other) = (machine.gpu(), machine.gpu());
        gpu.give_memory(0x40_0000, 4);
        let space = space_of(4);
        attach_all(&space, &[&gpu, &other]);
        for round in 0..4 {
            let region = region_of(&space, 4);
            assert_eq!(gpu.verify_zero(region.pages()), 4, "round {round}");
            gpu.fill(region.pages(), round);
            let asked = grab_in_the_middle(&machine, &space, &gpu);
            goes(&space, &region);
            machine.world().before_each = None;
            assert_eq!(asked.load(SeqCst), 2, "in the table and in the TLB");
            assert_eq!(gpu.device.used_memory_bytes(), 0);
            machine.assert_unreachable(space.pages());
        }
        end(&machine, &space, &[&gpu, &other]);
    }
}

/// In the middle of an unmap of all there is, somebody asks for addresses and another for frames: both
/// are refused. Returns how often they asked.
fn grab_in_the_middle(machine: &Machine, space: &Arc<AddressSpace>, gpu: &Actor) -> Arc<AtomicU64> {
    let asked = Arc::new(AtomicU64::new(0));
    let (count, space, device) = (
        Arc::clone(&asked),
        Arc::clone(space),
        Arc::clone(&gpu.device),
    );
    machine.world().before_each = Some(Arc::new(move |op, _| {
        if matches!(op, Op::Restrict | Op::Invalidate) {
            count.fetch_add(1, SeqCst);
            let more = RegionRequest::of_bytes(1);
            refused!(space.alloc(&more), GmError::NoAddresses { .. });
            assert_eq!(device.used_memory_bytes(), 4 * 4096, "a frame is free");
        }
    }));
    asked
}

#[test]
fn queued_unmaps_cost_one_invalidation_of_each_active_device() {
    let (machine, space, actors) = setting();
    let sleeper = machine.gpu();
    sleeper.join(&space, Mode::Coherent).unwrap();
    let elsewhere = space_of(4);
    sleeper.join(&elsewhere, Mode::Coherent).unwrap();
    let regions: Vec<_> = (0..100).map(|_| region_of(&space, 1)).collect();
    for (number, region) in (0_u64..).zip(&regions) {
        wire(region, number);
    }
    let told = Outcomes::default();
    for (number, region) in (0_u64..).zip(&regions) {
        region.unmap_later(told.by(number)).unwrap();
    }
    assert_eq!(machine.count(Op::Invalidate), 0);
    space.synchronize().unwrap();
    assert_eq!(actors[0].count(Op::Invalidate), 1);
    assert_eq!(actors[1].count(Op::Invalidate), 1);
    assert_eq!(sleeper.count(Op::Invalidate), 0, "it is active elsewhere");
    assert_eq!(
        sleeper.count(Op::Restrict),
        1,
        "its table is kept all the same"
    );
    assert_eq!(
        told.numbers(),
        (0..100).collect::<Vec<_>>(),
        "in their order"
    );
    told.assert_all_went_well();
    sleeper.device.detach(&elsewhere).unwrap();
    end(&machine, &space, &[&actors[0], &actors[1], &sleeper]);
}

#[test]
fn waiting_for_one_queued_unmap_costs_no_more_than_unmapping() {
    let (machine, space, actors) = setting();
    let region = region_of(&space, 3);
    let cost = |unmap: &dyn Fn()| {
        wire(&region, 0);
        let before = machine.mmu_operations();
        unmap();
        machine.mmu_operations() - before
    };
    let at_once = cost(&|| region.unmap().unwrap());
    let later = cost(&|| {
        region.unmap_later(None).unwrap();
        space.synchronize().unwrap();
    });
    assert_eq!((at_once, later), (4, 4), "two tables and two TLBs");
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

#[test]
fn operations_take_effect_in_the_order_they_were_queued_in() {
    let (machine, space, actors) = setting();
    let region = region_of(&space, 1);
    let told = Outcomes::default();
    let write = || MapOptions::new(Access::Write);
    region
        .map_later(own_frames(1, 1), write(), told.by(0))
        .unwrap();
    region.unmap_later(told.by(1)).unwrap();
    region
        .map_later(own_frames(2, 1), write(), told.by(2))
        .unwrap();
    region
        .map_later(own_frames(3, 1), write(), told.by(3))
        .unwrap();
    assert!(told.numbers().is_empty());
    assert_eq!(region.mapped(), Mapped::Nothing);
    // What comes after, and is not queued, waits for them.
    region.unmap().unwrap();
    assert_eq!(told.numbers(), [0, 1, 2, 3]);
    let results: Vec<_> = told
        .0
        .lock()
        .unwrap()
        .iter()
        .map(|(_, r)| r.is_ok())
        .collect();
    assert_eq!(results, [true, true, true, false], "it was mapped already");
    refused!(space.synchronize(), GmError::AlreadyMapped { .. });
    space.synchronize().expect("a failure is told once");
    region.map_later(own_frames(2, 1), write(), None).unwrap();
    region.protect(pagetide_gmem::Protection::ReadOnly).unwrap();
    assert_eq!(region.mapped(), Mapped::Wired, "it was mapped first");
    space.synchronize().unwrap();
    actors[1].read(region.start().0);
    assert!(actors[1].try_write(region.start().0, 1).is_err());
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

#[test]
fn unmap_twice_in_one_batch_fails_the_second() {
    let (machine, space, actors) = setting();
    let region = region_of(&space, 1);
    wire(&region, 0);
    let told = Outcomes::default();
    region.unmap_later(told.by(0)).unwrap();
    region.unmap_later(told.by(1)).unwrap();
    refused!(space.synchronize(), GmError::NotMapped { .. });
    let results: Vec<_> = told
        .0
        .lock()
        .unwrap()
        .iter()
        .map(|(_, r)| r.is_ok())
        .collect();
    assert_eq!(results, [true, false]);
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

#[test]
fn device_that_fails_a_batch_keeps_its_regions_and_both_are_told() {
    let (machine, space, actors) = setting();
    let regions = [region_of(&space, 2), region_of(&space, 2)];
    wire(&regions[0], 0);
    wire(&regions[1], 2);
    actors[1].fill(regions[0].pages(), 1);
    let told = Outcomes::default();
    machine.world().failing = Some(Failing::nth(Op::Invalidate, 2));
    regions[0].unmap_later(told.by(0)).unwrap();
    regions[1].unmap_later(told.by(1)).unwrap();
    refused!(space.synchronize(), GmError::Device { device, .. } if device == actors[1].device.id());
    assert!(
        told.0
            .lock()
            .unwrap()
            .iter()
            .all(|(_, result)| result.is_err())
    );
    for region in &regions {
        assert_eq!(region.mapped(), Mapped::Leaving);
        region.unmap_later(forbidding(&machine, region)).unwrap();
    }
    space.synchronize().unwrap();
    machine.permit(space.pages());
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

#[test]
fn region_that_the_failing_device_never_had_goes_all_the_same() {
    let (machine, space, actors) = setting();
    let regions = [region_of(&space, 2), region_of(&space, 2)];
    actors[0].fill(regions[0].pages(), 1);
    actors[1].fill(regions[1].pages(), 1);
    let told = Outcomes::default();
    machine.world().failing = Some(Failing::nth(Op::Invalidate, 2));
    regions[0].unmap_later(told.by(0)).unwrap();
    regions[1].unmap_later(told.by(1)).unwrap();
    refused!(space.synchronize(), GmError::Device { .. });
    let went: Vec<_> = told
        .0
        .lock()
        .unwrap()
        .iter()
        .map(|(_, r)| r.is_ok())
        .collect();
    assert_eq!(went, [true, false]);
    let mapped = regions.each_ref().map(Region::mapped);
    assert_eq!(mapped, [Mapped::Nothing, Mapped::Leaving]);
    assert_eq!(actors[0].device.used_memory_bytes(), 0);
    assert_eq!(actors[1].device.used_memory_bytes(), 8192);
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

#[test]
fn callback_may_synchronize_and_then_sees_what_was_queued() {
    let (machine, space, actors) = setting();
    let regions = [0, 1, 2].map(|_| region_of(&space, 1));
    for (number, region) in (0..).zip(&regions) {
        wire(region, number);
    }
    let told = Outcomes::default();
    let (inner_space, inner_told) = (Arc::clone(&space), told.clone());
    let inner = regions[2].clone();
    regions[0]
        .unmap_later(Some(Box::new(move |result| {
            result.unwrap();
            inner.unmap_later(inner_told.by(2)).unwrap();
            inner_space.synchronize().unwrap();
            assert_eq!(inner.mapped(), Mapped::Nothing);
        })))
        .unwrap();
    regions[1].unmap_later(told.by(1)).unwrap();
    space.synchronize().unwrap();
    let mut numbers = told.numbers();
    numbers.sort_unstable();
    assert_eq!(numbers, [1, 2], "each once");
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

#[test]
fn full_queue_is_carried_out_by_whoever_queues_one_more() {
    let (machine, space, actors) = setting();
    let region = region_of(&space, 1);
    let called = Arc::new(AtomicU64::new(0));
    let count = || -> Option<Callback> {
        let called = Arc::clone(&called);
        Some(Box::new(move |result| {
            result.unwrap();
            called.fetch_add(1, SeqCst);
        }))
    };
    for _ in 0..QUEUED_MAX / 2 {
        let write = MapOptions::new(Access::Write);
        region.map_later(own_frames(0, 1), write, count()).unwrap();
        region.unmap_later(count()).unwrap();
    }
    assert_eq!(called.load(SeqCst), 0);
    let write = MapOptions::new(Access::Write);
    region.map_later(own_frames(0, 1), write, count()).unwrap();
    let some = called.load(SeqCst);
    assert!(some > 0 && some <= QUEUED_MAX as u64, "{some}");
    space.synchronize().unwrap();
    assert_eq!(called.load(SeqCst), QUEUED_MAX as u64 + 1);
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

#[test]
fn callback_may_use_the_whole_interface() {
    let (machine, space, actors) = setting();
    let region = region_of(&space, 2);
    wire(&region, 0);
    let told = Outcomes::default();
    let (inner, inner_space, inner_told) = (region.clone(), Arc::clone(&space), told.clone());
    let gpu = actors[1].clone();
    region
        .unmap_later(Some(Box::new(move |result| {
            result.unwrap();
            wire(&inner, 4);
            gpu.fill(inner.pages(), 7);
            inner.unmap().unwrap();
            gpu.touch(inner.pages(), Access::Write);
            gpu.device.detach(&inner_space).unwrap();
            gpu.join(&inner_space, Mode::Coherent).unwrap();
            gpu.device.switch(&inner_space).unwrap();
            let other = region_of(&inner_space, 1);
            gpu.write(other.start().0, 1);
            other.dealloc().unwrap();
            inner.unmap_later(inner_told.by(1)).unwrap();
        })))
        .unwrap();
    // The thread that carries it out holds the device: it is detaching it.
    actors[1].device.detach(&space).unwrap();
    space.synchronize().unwrap();
    assert_eq!(told.numbers(), [1]);
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

#[test]
fn callback_that_panics_leaves_the_queue_usable_and_the_others_called() {
    let (machine, space, actors) = setting();
    let regions = [0, 1, 2].map(|_| region_of(&space, 1));
    let told = Outcomes::default();
    for (number, region) in (0..).zip(&regions) {
        wire(region, number);
        let callback = if number == 1 {
            Some(Box::new(|_: Result<(), GmError>| -> () { panic!("a test's panic") }) as Callback)
        } else {
            told.by(number)
        };
        region.unmap_later(callback).unwrap();
    }
    let panicked = catch_unwind(AssertUnwindSafe(|| space.synchronize()));
    let panic = panicked.unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"a test's panic"));
    assert_eq!(told.numbers(), [0, 2]);
    space.synchronize().unwrap();
    wire(&regions[1], 1);
    regions[1].unmap_later(told.by(9)).unwrap();
    space.synchronize().unwrap();
    assert_eq!(told.numbers(), [0, 2, 9]);
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

#[test]
fn space_that_is_destroyed_carries_out_what_is_queued() {
    let (machine, space, actors) = setting();
    let region = region_of(&space, 1);
    wire(&region, 0);
    let told = Outcomes::default();
    region.unmap_later(told.by(0)).unwrap();
    refused!(space.destroy(), GmError::InUse { .. });
    assert_eq!(told.numbers(), [0]);
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

#[test]
fn threads_that_serve_the_queue_call_each_callback_once_and_stop() {
    let (machine, space, actors) = setting();
    let called = Arc::new(AtomicU64::new(0));
    std::thread::scope(|scope| {
        let servers = [0, 1].map(|_| scope.spawn(|| space.serve_operations()));
        let askers = [0, 1, 2].map(|asker: u64| {
            let (space, called, machine) = (&space, &called, &machine);
            scope.spawn(move || {
                for round in 0..200 {
                    let region = region_of(space, 2);
                    wire(&region, asker * 2);
                    let called = Arc::clone(called);
                    let (machine, pages) = (machine.clone(), region.pages());
                    let count = move |result: Result<(), GmError>| {
                        result.unwrap();
                        machine.assert_unreachable(pages);
                        called.fetch_add(1, SeqCst);
                    };
                    region.unmap_later(Some(Box::new(count))).unwrap();
                    if round % 3 == 0 {
                        space.synchronize().unwrap();
                    }
                    // Its addresses are given to others only after its callback's checks.
                    space.synchronize().unwrap();
                    region.dealloc().unwrap();
                }
            })
        });
        for asker in askers {
            asker.join().unwrap();
        }
        space.stop_operations();
        for server in servers {
            server.join().unwrap();
        }
    });
    assert_eq!(called.load(SeqCst), 600);
    end(&machine, &space, &[&actors[0], &actors[1]]);
}

/// Where a region of the random run stands, as its callbacks tell.
const NOTHING: u64 = 0;
const WIRED: u64 = 1;
const UNDER_WAY: u64 = 2;

#[test]
fn random_queues_never_leave_a_page_reachable_after_its_callback() {
    for seed in 0..40 {
        let (machine, space, actors) = setting();
        let mut random = SplitMix64::new(seed);
        let regions: Vec<_> = (0..6)
            .map(|_| region_of(&space, 1 + random.below(6)))
            .collect();
        let stands: Vec<_> = (0..6).map(|_| Arc::new(AtomicU64::new(NOTHING))).collect();
        for region in &regions {
            machine.forbid(region.pages());
        }
        for _ in 0..200 {
            let at = usize::try_from(random.below(6)).unwrap();
            let (region, stand) = (&regions[at], Arc::clone(&stands[at]));
            match (random.below(8), stand.load(SeqCst)) {
                (0, _) => space.synchronize().unwrap(),
                (1, WIRED) => {
                    let actor = &actors[usize::from(random.below(2) == 0)];
                    actor.fill(region.pages(), seed);
                }
                (_, NOTHING) => {
                    machine.permit(region.pages());
                    stand.store(UNDER_WAY, SeqCst);
                    let frames = own_frames(at as u64 * 8, region.pages().len());
                    let wired: Callback = Box::new(move |result| {
                        result.unwrap();
                        stand.store(WIRED, SeqCst);
                    });
                    let options = MapOptions::new(Access::Write);
                    region.map_later(frames, options, Some(wired)).unwrap();
                }
                (_, WIRED) => {
                    stand.store(UNDER_WAY, SeqCst);
                    let (machine, pages) = (machine.clone(), region.pages());
                    let gone: Callback = Box::new(move |result| {
                        result.unwrap();
                        machine.forbid(pages);
                        stand.store(NOTHING, SeqCst);
                    });
                    region.unmap_later(Some(gone)).unwrap();
                }
                _ => {}
            }
        }
        space.synchronize().unwrap();
        machine.assert_sound();
        machine.permit(space.pages());
        end(&machine, &space, &[&actors[0], &actors[1]]);
    }
}
