// SPDX-License-Identifier: Apache-2.0
//! `gm_mapping_set_unmap`: mappings that belong together.

use crate::kit::{
    Failing, Machine, Op, attach_all, end, own_frames, refused, region_of, space_of, wire,
};
use pagetide_addr::Access;
use pagetide_gmem::{AddressSpace, GmError, MapOptions, Mapped, MappingSet, Region};
use std::sync::{Arc, Mutex};

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
