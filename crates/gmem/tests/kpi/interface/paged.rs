// SPDX-License-Identifier: Apache-2.0
//! Regions of memory whose pages may be elsewhere: a VM's RAM (GMEM 4.2).

use crate::kit::{Actor, Build, HOME, Machine, Ram, attach_all, own_frames, refused};
use pagetide_addr::{
    Access, PAGE_BYTES, PAGE_SHIFT, PageSet, SECTION_BYTES, SECTION_PAGES, Va, to_usize,
};
use pagetide_gmem::{
    AddressSpace, AllocPolicy, GmError, MapOptions, Mapped, Mode, PageSizes, PageState, Placement,
    Protection, Region, RegionRequest,
};
use std::sync::Arc;

const SECTIONS: u64 = 4;

fn setting() -> (Machine, Ram, Arc<AddressSpace>) {
    let machine = Machine::eager();
    let ram = Ram::new(&machine);
    let memory = ram.memory(SECTIONS * SECTION_PAGES);
    let end = Va(SECTIONS * SECTION_BYTES);
    let space = AddressSpace::over(memory, Va(0), end, AllocPolicy::default()).unwrap();
    (machine, ram, space)
}

fn region_of_bytes(space: &Arc<AddressSpace>, bytes: u64) -> Region {
    space.alloc(&RegionRequest::of_bytes(bytes)).unwrap()
}

/// Every page of the region is evicted.
fn evict(space: &AddressSpace, ram: &Ram, region: &Region) {
    let memory = space.memory().unwrap();
    let section = region.pages().start.section();
    let wanted = PageSet::of_range(section, region.pages());
    let mut round = memory.begin_eviction(section, &wanted).unwrap();
    let mut batch = Vec::new();
    for page in region.pages().iter() {
        let mut bytes = vec![0; to_usize(PAGE_BYTES)];
        round.read(page.single(), &mut bytes).unwrap();
        batch.push((page, ram.store(page, &bytes)));
    }
    let committed = round.commit(&batch);
    assert!(committed.unused.is_empty());
}

#[test]
fn absent_page_is_filled_by_the_first_fault_and_all_devices_get_it() {
    let (machine, ram, space) = setting();
    let (one, two) = (machine.gpu(), machine.gpu());
    attach_all(&space, &[&one, &two]);
    let region = region_of_bytes(&space, 8 * PAGE_BYTES);
    assert_eq!(region.mapped(), Mapped::Paged);
    assert_eq!(one.touch(region.pages(), Access::Read), 8);
    assert_eq!(
        two.verify_zero(region.pages()),
        0,
        "an install grants to all"
    );
    one.fill(region.pages(), 1);
    assert_eq!(two.verify(region.pages(), 1), 0);
    assert_eq!(ram.present_pages(), 8);
    assert_eq!(
        one.entry(region.start().0).unwrap().pa,
        HOME + region.start().0
    );
    machine.assert_sound();
    assert!(ram.incidents().is_empty());
}

#[test]
fn evicted_page_comes_back_with_its_bytes_through_the_same_door() {
    let (machine, ram, space) = setting();
    let gpu = machine.gpu();
    attach_all(&space, &[&gpu]);
    let region = region_of_bytes(&space, 8 * PAGE_BYTES);
    gpu.fill(region.pages(), 3);
    evict(&space, &ram, &region);
    machine.assert_unreachable(region.pages());
    assert_eq!((ram.present_pages(), ram.stored_pages()), (0, 8));
    assert_eq!(gpu.verify(region.pages(), 3), 8);
    assert_eq!((ram.present_pages(), ram.stored_pages()), (8, 0));
    let late = machine.gpu();
    attach_all(&space, &[&late]);
    assert_eq!(
        late.verify(region.pages(), 3),
        0,
        "what is present is granted at once"
    );
    machine.assert_sound();
}

#[test]
fn removed_memory_is_reached_by_nobody_and_its_addresses_serve_again() {
    let (machine, ram, space) = setting();
    let gpu = machine.gpu();
    attach_all(&space, &[&gpu]);
    let region = region_of_bytes(&space, SECTION_BYTES);
    let stays = region_of_bytes(&space, 4 * PAGE_BYTES);
    gpu.touch(region.pages(), Access::Write);
    gpu.fill(stays.pages(), 2);
    let va = region.start().0;
    region.dealloc().unwrap();
    machine.assert_unreachable(region.pages());
    assert!(matches!(
        gpu.refused(va, Access::Read),
        GmError::NotAllocated { .. }
    ));
    refused!(region.dealloc(), GmError::Destroyed);
    assert_eq!(gpu.verify(stays.pages(), 2), 0);
    // The VMM has unmapped it: the next region there begins absent.
    let memory = space.memory().unwrap();
    assert_eq!(
        memory.table().word(region.pages().start).state(),
        PageState::Unallocated
    );
    let hint = Some(region.start());
    let there = RegionRequest {
        hint,
        ..RegionRequest::of_bytes(SECTION_BYTES)
    };
    let again = space.alloc(&there).unwrap();
    assert_eq!(again.start(), region.start());
    again.dealloc().unwrap();
    stays.dealloc().unwrap();
    gpu.device.detach(&space).unwrap();
    space.destroy().unwrap();
    assert!(ram.incidents().is_empty());
    machine.assert_sound();
}

#[test]
fn regions_begin_at_sections_and_all_room_comes_back() {
    let (_machine, _ram, space) = setting();
    let small: Vec<_> = (0..SECTIONS)
        .map(|_| region_of_bytes(&space, PAGE_BYTES))
        .collect();
    for region in &small {
        assert!(region.start().0.is_multiple_of(SECTION_BYTES));
    }
    refused!(
        space.alloc(&RegionRequest::of_bytes(PAGE_BYTES)),
        GmError::NoAddresses { .. }
    );
    for region in small {
        region.dealloc().unwrap();
    }
    region_of_bytes(&space, SECTIONS * SECTION_BYTES)
        .dealloc()
        .unwrap();
    space.destroy().unwrap();
}

#[test]
fn memory_that_was_refused_is_not_kept() {
    let (_machine, _ram, space) = setting();
    space.destroy().unwrap();
    refused!(
        space.alloc(&RegionRequest::of_bytes(PAGE_BYTES)),
        GmError::Destroyed
    );
    assert_eq!(space.memory().unwrap().table().page_count(), 0);
}

#[test]
fn paged_memory_is_not_wired_protected_or_unmapped() {
    let (_machine, _ram, space) = setting();
    let region = region_of_bytes(&space, PAGE_BYTES);
    let options = MapOptions::new(Access::Read);
    let frames = own_frames(0, 1);
    refused!(region.map(&frames, &options), GmError::Unsupported { .. });
    refused!(
        region.map_later(frames, options, None),
        GmError::Unsupported { .. }
    );
    refused!(region.unmap(), GmError::Unsupported { .. });
    refused!(region.unmap_later(None), GmError::Unsupported { .. });
    refused!(
        region.protect(Protection::ReadOnly),
        GmError::Unsupported { .. }
    );
    region.dealloc().unwrap();
    refused!(region.unmap(), GmError::Destroyed);
}

#[test]
fn fault_on_paged_memory_by_who_may_not_is_refused() {
    let (machine, _ram, space) = setting();
    let (gpu, failing) = (machine.gpu(), machine.actor(Build::failing()));
    attach_all(&space, &[&gpu]);
    refused!(
        failing.join(&space, Mode::Coherent),
        GmError::Unsupported { .. }
    );
    let region = region_of_bytes(&space, PAGE_BYTES);
    refused!(
        gpu.device
            .fault(Va(region.start().0 + PAGE_BYTES), Access::Read),
        GmError::NotAllocated { .. }
    );
    gpu.device.detach(&space).unwrap();
    refused!(
        gpu.device.fault(region.start(), Access::Read),
        GmError::NotActive { .. }
    );
}

#[test]
fn placement_of_paged_memory_is_what_it_is_and_another_is_refused() {
    let (machine, _ram, space) = setting();
    let (cpu, gpu) = (machine.cpu(), machine.gpu());
    attach_all(&space, &[&cpu, &gpu]);
    let region = region_of_bytes(&space, 8 * PAGE_BYTES);
    assert!(matches!(region.policy(), (Placement::RemoteAccess, None)));
    for (placement, home) in [
        (Placement::Unique, None),
        (Placement::Prefetch, None),
        (Placement::Unique, Some(&cpu.device)),
        (Placement::RemoteAccess, Some(&gpu.device)),
    ] {
        let refusal = region.set_policy(placement, home).unwrap_err();
        assert!(
            matches!(refusal, GmError::Unsupported { what } if what.contains("paged memory")),
            "{refusal}"
        );
        assert!(matches!(region.policy(), (Placement::RemoteAccess, None)));
    }
    let at_cpu = region.set_policy(Placement::RemoteAccess, Some(&cpu.device));
    at_cpu.unwrap();
    let (placement, home) = region.policy();
    assert_eq!(placement, Placement::RemoteAccess);
    assert!(home.is_some_and(|home| Arc::ptr_eq(&home, &cpu.device)));
    region.dealloc().unwrap();
    refused!(
        region.set_policy(Placement::RemoteAccess, None),
        GmError::Destroyed
    );
}

#[test]
fn page_whose_content_is_damaged_is_lost_and_says_so() {
    let (machine, ram, space) = setting();
    let gpu = machine.gpu();
    attach_all(&space, &[&gpu]);
    let region = region_of_bytes(&space, PAGE_BYTES);
    gpu.fill(region.pages(), 1);
    evict(&space, &ram, &region);
    ram.lose(region.pages().start);
    let refusal = gpu.refused(region.start().0, Access::Read);
    assert!(
        matches!(refusal, GmError::Lost { va } if va == region.start()),
        "{refusal}"
    );
    assert_eq!(ram.incidents().len(), 2, "{:?}", ram.incidents());
}

#[test]
fn host_device_with_inherited_mappings_is_not_for_paged_memory() {
    let (machine, _ram, space) = setting();
    let inherited = vec![pagetide_gmem::Inherited {
        start: Va(0),
        len_bytes: PAGE_BYTES,
        access: Access::Write,
        frames: pagetide_addr::Pa(0x1000),
    }];
    let actor: Actor = machine.actor(Build {
        inherited,
        page_sizes: PageSizes::SMALLEST,
        ..Build::default()
    });
    refused!(
        actor.join(&space, Mode::Coherent),
        GmError::Unsupported { .. }
    );
    assert!(space.regions().is_empty());
    assert_eq!(space.memory().unwrap().table().page_count(), 0);
    assert_eq!(space.pages().len() << PAGE_SHIFT, SECTIONS * SECTION_BYTES);
}
