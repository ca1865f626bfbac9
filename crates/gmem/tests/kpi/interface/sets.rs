// SPDX-License-Identifier: Apache-2.0
//! `gm_mapping_set_unmap`: mappings that belong together.

use crate::kit::{
    Actor, DRIVERS_PANIC, Failing, Fails, Machine, Op, attach_all, end, own_frames, refused,
    region_of, space_of, wire,
};
use pagetide_addr::Access;
use pagetide_gmem::{AddressSpace, GmError, MapOptions, Mapped, MappingSet, Region};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
};

/// How often a thread is looked for that must not come, and could meanwhile.
const LOOKS: u32 = 20_000;

/// Regions of one page each, wired and of the set.
fn wired_in(set: &MappingSet, space: &Arc<AddressSpace>, count: u64) -> Vec<Region> {
    let join = |number| {
        let region = region_of(space, 1);
        map_in(set, &region, number);
        region
    };
    (0..count).map(join).collect()
}

fn map_in(set: &MappingSet, region: &Region, frame: u64) {
    let options = MapOptions {
        set: Some(set.clone()),
        ..MapOptions::new(Access::Write)
    };
    region.map(&own_frames(frame, 1), &options).unwrap();
}

#[test]
fn set_is_unmapped_with_one_invalidation_a_device() {
    let machine = Machine::eager();
    let (one, two) = (machine.gpu(), machine.gpu());
    let space = space_of(64);
    attach_all(&space, &[&one, &two]);
    let set = MappingSet::new(&space);
    let regions = wired_in(&set, &space, 10);
    let other = region_of(&space, 1);
    wire(&other, 20);
    assert_eq!(set.mapping_count(), 10);
    set.unmap().unwrap();
    assert_eq!(machine.count(Op::Invalidate), 2);
    assert_eq!(set.mapping_count(), 0);
    for region in &regions {
        assert_eq!(region.mapped(), Mapped::Nothing);
        machine.assert_unreachable(region.pages());
    }
    assert_eq!(other.mapped(), Mapped::Wired, "it is not of the set");
    set.unmap().unwrap();
    assert_eq!(
        machine.count(Op::Invalidate),
        2,
        "an empty set costs nothing"
    );
    end(&machine, &space, &[&one, &two]);
}

#[test]
fn region_that_was_unmapped_on_its_own_and_mapped_again_is_not_of_the_set() {
    let machine = Machine::new();
    let gpu = machine.gpu();
    let space = space_of(64);
    attach_all(&space, &[&gpu]);
    let set = MappingSet::new(&space);
    let regions = wired_in(&set, &space, 4);
    regions[0].unmap().unwrap();
    wire(&regions[0], 30);
    regions[1].unmap().unwrap();
    regions[2].dealloc().unwrap();
    assert_eq!(set.mapping_count(), 1);
    set.unmap().unwrap();
    let states: Vec<_> = regions.iter().map(Region::mapped).collect();
    let nothing = Mapped::Nothing;
    assert_eq!(states, [Mapped::Wired, nothing, nothing, nothing]);
    map_in(&set, &regions[1], 1);
    assert_eq!(set.mapping_count(), 1, "it has joined anew");
    end(&machine, &space, &[&gpu]);
}

#[test]
fn clones_are_the_same_set_and_a_region_can_be_of_several_in_turn() {
    let space = space_of(64);
    let sets = [MappingSet::new(&space), MappingSet::new(&space)];
    let region = wired_in(&sets[0], &space, 1).remove(0);
    region.unmap().unwrap();
    map_in(&sets[1], &region, 0);
    sets[0].unmap().unwrap();
    assert_eq!(region.mapped(), Mapped::Wired);
    sets[1].clone().unmap().unwrap();
    assert_eq!(region.mapped(), Mapped::Nothing);
}

#[test]
fn mapping_that_would_not_go_is_of_the_set_still() {
    let machine = Machine::eager();
    let gpu = machine.gpu();
    let space = space_of(64);
    attach_all(&space, &[&gpu]);
    let set = MappingSet::new(&space);
    let regions = wired_in(&set, &space, 3);
    machine.world().failing = Some(Failing::always(Op::Invalidate));
    refused!(set.unmap(), GmError::Device { .. });
    assert_eq!(set.mapping_count(), 3);
    assert!(
        regions
            .iter()
            .all(|region| region.mapped() == Mapped::Leaving)
    );
    machine.world().failing = None;
    set.unmap().unwrap();
    assert_eq!(set.mapping_count(), 0);
    end(&machine, &space, &[&gpu]);
}

#[test]
fn set_is_unmapped_later_with_one_callback_for_all_of_it() {
    let machine = Machine::eager();
    let gpu = machine.gpu();
    let space = space_of(64);
    attach_all(&space, &[&gpu]);
    let set = MappingSet::new(&space);
    let regions = wired_in(&set, &space, 3);
    let called = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&called);
    set.unmap_later(Some(Box::new(move |result| {
        told.lock().unwrap().push(result.is_ok());
    })))
    .unwrap();
    assert_eq!(set.mapping_count(), 3);
    assert!(called.lock().unwrap().is_empty());
    space.synchronize().unwrap();
    assert_eq!(*called.lock().unwrap(), [true]);
    assert!(
        regions
            .iter()
            .all(|region| region.mapped() == Mapped::Nothing)
    );
    assert_eq!(machine.count(Op::Invalidate), 1);
    end(&machine, &space, &[&gpu]);
}

#[test]
fn queued_set_means_what_is_of_it_when_its_turn_comes() {
    let machine = Machine::eager();
    let gpu = machine.gpu();
    let space = space_of(64);
    attach_all(&space, &[&gpu]);
    let set = MappingSet::new(&space);
    let regions = wired_in(&set, &space, 2);
    let joins = region_of(&space, 1);
    let options = MapOptions {
        set: Some(set.clone()),
        ..MapOptions::new(Access::Write)
    };
    // One leaves the set before its turn, one joins.
    regions[0].unmap_later(None).unwrap();
    joins.map_later(own_frames(9, 1), options, None).unwrap();
    set.unmap_later(None).unwrap();
    space.synchronize().unwrap();
    assert_eq!(joins.mapped(), Mapped::Nothing);
    regions[0].dealloc().unwrap();
    map_in(&set, &regions[1], 1);
    regions[1].unmap_later(None).unwrap();
    set.unmap_later(None).unwrap();
    space.synchronize().expect("the set was empty by then");
    end(&machine, &space, &[&gpu]);
}

/// A device, a space, and a set of two regions in it.
fn setting() -> (Machine, Actor, Arc<AddressSpace>, MappingSet, Vec<Region>) {
    let machine = Machine::eager();
    let gpu = machine.gpu();
    let space = space_of(64);
    attach_all(&space, &[&gpu]);
    let set = MappingSet::new(&space);
    let regions = wired_in(&set, &space, 2);
    (machine, gpu, space, set, regions)
}

/// The first invalidation from now on stands still before it does anything.
struct StandsStill {
    reached: Receiver<()>,
    go_on: Sender<()>,
    is_going: Arc<AtomicBool>,
}

impl StandsStill {
    fn in_invalidation(machine: &Machine) -> Self {
        let (reach, reached) = channel();
        let (go_on, go) = channel();
        let is_going = Arc::new(AtomicBool::new(false));
        let going = Arc::clone(&is_going);
        let once = Mutex::new(Some((reach, go)));
        machine.before_each(Op::Invalidate, move || {
            let first = once.lock().unwrap().take();
            if let Some((reach, go)) = first {
                reach.send(()).unwrap();
                go.recv().unwrap();
                going.store(true, SeqCst);
            }
        });
        Self {
            reached,
            go_on,
            is_going,
        }
    }

    /// Nobody tells anything while it stands still; then it goes on.
    fn keeps_silent<T: std::fmt::Debug>(self, told: &Receiver<T>) {
        for _ in 0..LOOKS {
            std::thread::yield_now();
            let nothing = told.try_recv();
            assert!(
                matches!(nothing, Err(TryRecvError::Empty)),
                "{nothing:?} before the invalidation"
            );
        }
        self.go_on.send(()).unwrap();
    }
}

#[test]
fn set_that_is_being_unmapped_is_waited_for_by_whoever_unmaps_it_too() {
    let (machine, gpu, space, set, regions) = setting();
    let still = StandsStill::in_invalidation(&machine);
    let going = Arc::clone(&still.is_going);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| set.unmap());
        still.reached.recv().unwrap();
        let (started, begins) = channel();
        let (tell, told) = channel();
        let (set, regions) = (&set, &regions);
        scope.spawn(move || {
            started.send(()).unwrap();
            let result = set.unmap();
            let state = regions[0].mapped();
            tell.send((result, state, going.load(SeqCst))).unwrap();
        });
        begins.recv().unwrap();
        still.keeps_silent(&told);
        first.join().unwrap().unwrap();
        let (result, state, was_going) = told.recv().unwrap();
        result.unwrap();
        assert_eq!((state, was_going), (Mapped::Nothing, true));
    });
    end(&machine, &space, &[&gpu]);
}

/// One member is unmapped on its own and stands still; the set is queued meanwhile. Returns what its
/// callback was told.
fn set_beside_its_member(
    machine: &Machine,
    space: &Arc<AddressSpace>,
    set: &MappingSet,
    member: &Region,
) -> Result<(), GmError> {
    let still = StandsStill::in_invalidation(machine);
    let going = Arc::clone(&still.is_going);
    std::thread::scope(|scope| {
        let alone = scope.spawn(|| member.unmap());
        still.reached.recv().unwrap();
        let (tell, told) = channel();
        let waiting = scope.spawn(move || {
            set.unmap_later(Some(Box::new(move |result| {
                tell.send((result, going.load(SeqCst))).unwrap();
            })))
            .unwrap();
            space.synchronize()
        });
        still.keeps_silent(&told);
        let alone = alone.join().unwrap();
        let (result, was_going) = told.recv().unwrap();
        assert!(was_going, "called back before the invalidation");
        assert_eq!(alone.is_ok(), result.is_ok());
        assert_eq!(waiting.join().unwrap().is_ok(), result.is_ok());
        result
    })
}

#[test]
fn set_whose_member_is_being_unmapped_is_gone_when_that_is() {
    let (machine, gpu, space, set, regions) = setting();
    set_beside_its_member(&machine, &space, &set, &regions[0]).unwrap();
    assert_eq!(set.mapping_count(), 0);
    for region in &regions {
        machine.assert_unreachable(region.pages());
    }
    end(&machine, &space, &[&gpu]);
}

#[test]
fn set_whose_member_would_not_go_for_another_keeps_it_and_says_so() {
    let (machine, gpu, space, set, regions) = setting();
    regions[1].unmap().unwrap();
    machine.world().failing = Some(Failing::nth(Op::Invalidate, 2));
    let told = set_beside_its_member(&machine, &space, &set, &regions[0]);
    refused!(told, GmError::InUse { .. });
    assert_eq!(regions[0].mapped(), Mapped::Leaving);
    assert_eq!(set.mapping_count(), 1, "it is of the set still");
    set.unmap().unwrap();
    assert_eq!(set.mapping_count(), 0);
    machine.assert_unreachable(regions[0].pages());
    end(&machine, &space, &[&gpu]);
}

#[test]
fn queued_set_takes_what_would_not_go_for_the_unmap_before_it() {
    let (machine, gpu, space, set, regions) = setting();
    machine.world().failing = Some(Failing::nth(Op::Invalidate, 1));
    let (tell, told) = channel();
    for number in 0..2 {
        let tell = tell.clone();
        let callback = Box::new(move |result: Result<(), GmError>| {
            tell.send((number, result.is_ok())).unwrap();
        });
        if number == 0 {
            regions[0].unmap_later(Some(callback)).unwrap();
        } else {
            set.unmap_later(Some(callback)).unwrap();
        }
    }
    refused!(space.synchronize(), GmError::Device { .. });
    drop(tell);
    let told: Vec<_> = told.iter().collect();
    assert_eq!(told, [(0, false), (1, true)]);
    assert_eq!(set.mapping_count(), 0);
    end(&machine, &space, &[&gpu]);
}

#[test]
fn region_of_a_queued_set_can_be_mapped_anew_at_once() {
    let (machine, gpu, space, set, regions) = setting();
    set.unmap_later(None).unwrap();
    wire(&regions[0], 8);
    assert_eq!(regions[1].mapped(), Mapped::Nothing);
    space.synchronize().unwrap();
    assert_eq!(regions[0].mapped(), Mapped::Wired);
    assert_eq!(gpu.entry(regions[0].start().0).unwrap().pa, frame(8));
    end(&machine, &space, &[&gpu]);
}

#[test]
fn mapping_made_after_a_set_was_queued_is_not_taken_by_it() {
    let (machine, gpu, space, set, regions) = setting();
    set.unmap_later(None).unwrap();
    refused!(regions[0].unmap(), GmError::NotMapped { .. });
    map_in(&set, &regions[0], 9);
    space.synchronize().unwrap();
    assert_eq!(regions[0].mapped(), Mapped::Wired);
    assert_eq!(gpu.entry(regions[0].start().0).unwrap().pa, frame(9));
    assert_eq!(set.mapping_count(), 1);
    end(&machine, &space, &[&gpu]);
}

#[test]
fn mapping_queued_behind_a_queued_set_is_not_taken_by_it() {
    let (machine, gpu, space, set, regions) = setting();
    let options = MapOptions {
        set: Some(set.clone()),
        ..MapOptions::new(Access::Write)
    };
    set.unmap_later(None).unwrap();
    regions[0]
        .map_later(own_frames(9, 1), options, None)
        .unwrap();
    space.synchronize().unwrap();
    assert_eq!(regions[0].mapped(), Mapped::Wired);
    assert_eq!(set.mapping_count(), 1);
    end(&machine, &space, &[&gpu]);
}

#[test]
fn set_of_another_space_takes_no_mapping() {
    let (machine, gpu, space, _set, _regions) = setting();
    let elsewhere = space_of(4);
    let region = region_of(&space, 1);
    let options = MapOptions {
        set: Some(MappingSet::new(&elsewhere)),
        ..MapOptions::new(Access::Write)
    };
    let argument = "mapping set";
    refused!(
        region.map(&own_frames(9, 1), &options),
        GmError::InvalidArgument { argument: named, .. } if named == argument
    );
    refused!(
        region.map_later(own_frames(9, 1), options, None),
        GmError::InvalidArgument { argument: named, .. } if named == argument
    );
    end(&machine, &space, &[&gpu]);
}

#[test]
fn set_whose_drivers_panic_has_its_mappings_still() {
    for op in [Op::Restrict, Op::Invalidate] {
        for asked_later in [false, true] {
            let (machine, gpu, space, set, regions) = setting();
            machine.world().failing = Some(Failing {
                how: Fails::Panics,
                ..Failing::nth(op, 1)
            });
            let unmap = || {
                if asked_later {
                    set.unmap_later(None).unwrap();
                    space.synchronize()
                } else {
                    set.unmap()
                }
            };
            let panic = catch_unwind(AssertUnwindSafe(unmap)).unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&DRIVERS_PANIC));
            assert_eq!(regions[0].mapped(), Mapped::Leaving);
            assert_eq!(set.mapping_count(), 2, "{op:?}");
            set.unmap().unwrap();
            assert_eq!(set.mapping_count(), 0);
            for region in &regions {
                machine.assert_unreachable(region.pages());
            }
            end(&machine, &space, &[&gpu]);
        }
    }
}

fn frame(number: u64) -> u64 {
    own_frames(number, 1)[0].0
}
