// SPDX-License-Identifier: Apache-2.0
//! `gm_region_map`, `gm_region_unmap`, protections: the caller's frames.

use crate::kit::{
    Build, Failing, Fails, Machine, Op, SPACE_BEGIN, attach_all, end, own_frames, refused,
    region_of, space_of, wire,
};
use pagetide_addr::{Access, Pa, Va};
use pagetide_gmem::{
    GmError, MapOptions, Mapped, MappingSet, PageSizes, Placement, Protection, RegionRequest,
};

const HUGE: u64 = 2 << 20;

#[test]
fn region_is_mapped_once_and_unmapped_once() {
    let machine = Machine::eager();
    let gpu = machine.gpu();
    let space = space_of(16);
    attach_all(&space, &[&gpu]);
    let region = region_of(&space, 2);
    refused!(region.unmap(), GmError::NotMapped { va } if va == region.start());
    wire(&region, 0);
    assert_eq!(region.mapped(), Mapped::Wired);
    let again = region.map(&own_frames(4, 2), &MapOptions::new(Access::Read));
    refused!(again, GmError::AlreadyMapped { va } if va == region.start());
    gpu.fill(region.pages(), 1);
    region.unmap().unwrap();
    assert_eq!(region.mapped(), Mapped::Nothing);
    machine.assert_unreachable(region.pages());
    refused!(region.unmap(), GmError::NotMapped { .. });
    wire(&region, 4);
    gpu.fill(region.pages(), 2);
    assert_eq!(
        gpu.entry(region.start().0).unwrap().pa,
        own_frames(4, 1)[0].0
    );
    end(&machine, &space, &[&gpu]);
}

#[test]
fn frames_that_do_not_fit_are_refused() {
    let space = space_of(1024);
    let region = region_of(&space, 2);
    let map = |frames: &[Pa], page_bytes| {
        let options = MapOptions {
            page_bytes,
            ..MapOptions::new(Access::Read)
        };
        region.map(frames, &options)
    };
    refused!(
        map(&own_frames(0, 1), 4096),
        GmError::InvalidArgument { .. }
    );
    refused!(
        map(&own_frames(0, 3), 4096),
        GmError::InvalidArgument { .. }
    );
    refused!(
        map(&[Pa(4097), Pa(0)], 4096),
        GmError::InvalidArgument { .. }
    );
    refused!(
        map(&own_frames(0, 2), 2048),
        GmError::InvalidArgument { .. }
    );
    refused!(
        map(&own_frames(0, 2), 5000),
        GmError::InvalidArgument { .. }
    );
    refused!(
        map(&own_frames(0, 2), HUGE),
        GmError::InvalidArgument { .. }
    );
    refused!(
        map(&[Pa(u64::MAX - 4095), Pa(0)], 4096),
        GmError::InvalidArgument { .. }
    );
    let foreign = MapOptions {
        set: Some(MappingSet::new(&space_of(4))),
        ..MapOptions::new(Access::Read)
    };
    refused!(
        region.map(&own_frames(0, 2), &foreign),
        GmError::InvalidArgument { .. }
    );
    assert_eq!(region.mapped(), Mapped::Nothing);
    map(&own_frames(0, 2), 4096).unwrap();
}

#[test]
fn huge_pages_are_mapped_where_every_device_can() {
    let machine = Machine::eager();
    let (big, small) = (
        machine.gpu(),
        machine.actor(Build {
            page_sizes: PageSizes::SMALLEST,
            ..Build::default()
        }),
    );
    let space = space_of(2048);
    attach_all(&space, &[&big, &small]);
    let request = RegionRequest {
        align: HUGE,
        ..RegionRequest::of_bytes(2 * HUGE)
    };
    let region = space.alloc(&request).unwrap();
    let options = MapOptions {
        page_bytes: HUGE,
        ..MapOptions::new(Access::Write)
    };
    let frames = [Pa(8 * HUGE), Pa(4 * HUGE)];
    refused!(region.map(&frames, &options), GmError::Unsupported { .. });
    small.device.detach(&space).unwrap();
    region.map(&frames, &options).unwrap();
    big.write(region.start().0 + HUGE + 8, 3);
    assert_eq!(*machine.world().word(4 * HUGE + 8), 3);
    assert_eq!(big.count(Op::Grant), 2, "one command a run of frames");
    end(&machine, &space, &[&big]);
}

#[test]
fn protection_is_kept_by_all_devices_at_once() {
    let machine = Machine::eager();
    let (gpu, pinned) = (machine.gpu(), machine.actor(Build::failing()));
    let space = space_of(16);
    attach_all(&space, &[&gpu, &pinned]);
    let region = region_of(&space, 2);
    let va = region.start().0;
    wire(&region, 0);
    gpu.fill(region.pages(), 1);
    region.protect(Protection::ReadOnly).unwrap();
    assert!(matches!(
        gpu.refused(va, Access::Write),
        GmError::Denied {
            access: Access::Write,
            ..
        }
    ));
    assert!(pinned.try_write(va, 7).is_err());
    assert_eq!(gpu.verify(region.pages(), 1), 0);
    pinned.verify(region.pages(), 1);
    region.protect(Protection::Nothing).unwrap();
    assert!(matches!(
        gpu.refused(va, Access::Read),
        GmError::Denied { .. }
    ));
    assert!(pinned.try_read(va).is_err());
    machine.assert_unreachable(region.pages());
    region.protect(Protection::ReadOnly).unwrap();
    gpu.verify(region.pages(), 1);
    pinned.verify(region.pages(), 1);
    region.protect(Protection::ReadWrite).unwrap();
    pinned.fill(region.pages(), 2);
    gpu.fill(region.pages(), 3);
    end(&machine, &space, &[&gpu, &pinned]);
}

#[test]
fn mapping_allows_no_more_than_it_was_made_for() {
    let machine = Machine::eager();
    let gpu = machine.gpu();
    let space = space_of(16);
    attach_all(&space, &[&gpu]);
    let region = region_of(&space, 1);
    region
        .map(&own_frames(0, 1), &MapOptions::new(Access::Read))
        .unwrap();
    gpu.read(region.start().0);
    assert!(matches!(
        gpu.refused(region.start().0, Access::Write),
        GmError::Denied { .. }
    ));
    region.protect(Protection::Nothing).unwrap();
    region.protect(Protection::ReadWrite).unwrap();
    assert!(matches!(
        gpu.refused(region.start().0, Access::Write),
        GmError::Denied { .. }
    ));
    region.unmap().unwrap();
    region.protect(Protection::ReadOnly).unwrap();
    let map = region.map(&own_frames(0, 1), &MapOptions::new(Access::Write));
    refused!(
        map,
        GmError::Denied {
            access: Access::Write,
            ..
        }
    );
    end(&machine, &space, &[&gpu]);
}

#[test]
fn protection_of_pages_that_faults_brought_is_kept() {
    let machine = Machine::eager();
    let (cpu, gpu) = machine.cpu_and_gpu(8);
    let space = space_of(16);
    attach_all(&space, &[&cpu, &gpu]);
    let region = region_of(&space, 2);
    let va = region.start().0;
    gpu.fill(region.pages(), 1);
    region.protect(Protection::ReadOnly).unwrap();
    assert!(matches!(
        gpu.refused(va, Access::Write),
        GmError::Denied { .. }
    ));
    assert!(matches!(
        cpu.refused(va, Access::Write),
        GmError::Denied { .. }
    ));
    assert_eq!(
        gpu.verify(region.pages(), 1),
        0,
        "reads go on without a fault"
    );
    cpu.verify(region.pages(), 1);
    region.protect(Protection::Nothing).unwrap();
    assert!(matches!(
        cpu.refused(va, Access::Read),
        GmError::Denied { .. }
    ));
    region.protect(Protection::ReadWrite).unwrap();
    assert_eq!(gpu.fill(region.pages(), 2), 2, "one fault a page");
    cpu.verify(region.pages(), 2);
    end(&machine, &space, &[&cpu, &gpu]);
}

#[test]
fn device_that_stays_busy_keeps_the_mapping_until_it_is_unmapped_again() {
    let machine = Machine::eager();
    let gpu = machine.gpu();
    let space = space_of(16);
    attach_all(&space, &[&gpu]);
    let region = region_of(&space, 2);
    wire(&region, 0);
    gpu.fill(region.pages(), 1);
    let busy = Failing {
        how: Fails::Busy,
        ..Failing::always(Op::Restrict)
    };
    machine.world().failing = Some(busy);
    refused!(region.unmap(), GmError::Busy { device } if device == gpu.device.id());
    assert_eq!(region.mapped(), Mapped::Leaving);
    refused!(region.dealloc(), GmError::Busy { .. });
    refused!(
        region.map(&own_frames(4, 2), &MapOptions::new(Access::Read)),
        GmError::AlreadyMapped { .. }
    );
    refused!(
        gpu.device.fault(region.start(), Access::Read),
        GmError::NotMapped { .. }
    );
    // Busy a few times, then at rest.
    let number = machine.count(Op::Restrict);
    machine.world().failing = Some(Failing {
        from: number + 1,
        count: 3,
        ..busy
    });
    region.unmap().unwrap();
    machine.assert_unreachable(region.pages());
    machine.world().failing = None;
    end(&machine, &space, &[&gpu]);
}

#[test]
fn device_that_fails_is_named_and_nothing_else_is_mapped() {
    let machine = Machine::new();
    let (one, two) = (machine.gpu(), machine.gpu());
    let space = space_of(16);
    attach_all(&space, &[&one, &two]);
    let region = region_of(&space, 2);
    machine.world().failing = Some(Failing::nth(Op::Grant, 2));
    let map = region.map(&own_frames(0, 2), &MapOptions::new(Access::Write));
    let error = map.unwrap_err();
    assert!(matches!(&error, GmError::Device { device, .. } if *device == two.device.id()));
    assert!(
        error.to_string().contains("grant failed with code 5"),
        "{error}"
    );
    assert_eq!(region.mapped(), Mapped::Nothing);
    machine.assert_unreachable(region.pages());
    wire(&region, 0);
    end(&machine, &space, &[&one, &two]);
}

#[test]
fn region_that_could_not_be_mapped_nor_taken_back_is_unmapped_before_it_is_used() {
    for undone in [Op::Restrict, Op::Invalidate] {
        let machine = Machine::eager();
        let (one, two) = (machine.gpu(), machine.gpu());
        let space = space_of(16);
        attach_all(&space, &[&one, &two]);
        let region = region_of(&space, 2);
        machine.world().failing = Some(Failing::nth(Op::Grant, 2));
        machine.world().failing_too = Some(Failing::always(undone));
        let options = MapOptions::new(Access::Write);
        let map = || region.map(&own_frames(0, 2), &options);
        refused!(map(), GmError::Device { device, .. } if device == two.device.id());
        assert!(one.entry(region.start().0).is_some(), "{undone:?}");
        assert_eq!(region.mapped(), Mapped::Leaving);
        refused!(map(), GmError::AlreadyMapped { .. });
        refused!(region.dealloc(), GmError::Device { .. });
        machine.world().failing_too = None;
        region.unmap().unwrap();
        machine.assert_unreachable(region.pages());
        map().unwrap();
        end(&machine, &space, &[&one, &two]);
    }
}

#[test]
fn region_across_sections_is_taken_away_whole() {
    let machine = Machine::eager();
    let gpu = machine.gpu();
    let space = space_of(2048);
    attach_all(&space, &[&gpu]);
    let request = RegionRequest {
        hint: Some(Va(SPACE_BEGIN + HUGE - 8192)),
        ..RegionRequest::of_bytes(HUGE + 5 * 4096)
    };
    let region = space.alloc(&request).unwrap();
    assert_eq!(region.pages().sections().count(), 3);
    wire(&region, 0);
    gpu.touch(region.pages(), Access::Write);
    region.protect(Protection::ReadOnly).unwrap();
    for page in region.pages().iter() {
        assert_eq!(gpu.entry(page.byte_offset()).unwrap().access, Access::Read);
    }
    region.unmap().unwrap();
    machine.assert_unreachable(region.pages());
    assert_eq!(machine.count(Op::Restrict), 6, "each section's part once");
    end(&machine, &space, &[&gpu]);
}

#[test]
fn unmap_asks_only_tables_that_may_map_the_region() {
    let machine = Machine::eager();
    let (cpu, gpu) = machine.cpu_and_gpu(4);
    let space = space_of(64);
    attach_all(&space, &[&cpu, &gpu]);
    let region = region_of(&space, 1);
    region.set_policy(Placement::RemoteAccess, None).unwrap();
    cpu.write(region.start().0, 1);
    gpu.write(region.start().0, 2);
    gpu.device.detach(&space).unwrap();
    // Its table takes the place of the one that is gone, and not its mappings.
    let next = machine.gpu();
    attach_all(&space, &[&next]);
    region.unmap().unwrap();
    assert_eq!(machine.count(Op::Restrict), 1);
    assert_eq!(
        (cpu.count(Op::Invalidate), next.count(Op::Invalidate)),
        (1, 0)
    );
    end(&machine, &space, &[&cpu, &next]);
}

#[test]
fn unmap_costs_one_restriction_a_table_and_one_invalidation_a_device() {
    let machine = Machine::new();
    let actors = [machine.gpu(), machine.gpu(), machine.gpu()];
    let space = space_of(64);
    attach_all(&space, &[&actors[0], &actors[1], &actors[2]]);
    let region = region_of(&space, 32);
    wire(&region, 0);
    let before = (machine.count(Op::Restrict), machine.count(Op::Invalidate));
    region.unmap().unwrap();
    let after = (machine.count(Op::Restrict), machine.count(Op::Invalidate));
    assert_eq!((after.0 - before.0, after.1 - before.1), (3, 3));
}

#[test]
fn region_goes_by_its_first_address_mapped_or_not() {
    let machine = Machine::eager();
    let gpu = machine.gpu();
    let space = space_of(16);
    attach_all(&space, &[&gpu]);
    let region = region_of(&space, 2);
    let start = region.start();
    refused!(
        space.dealloc_va(Va(start.0 + 4096)),
        GmError::NotAllocated { .. }
    );
    refused!(
        space.dealloc_va(Va(start.0 + 1)),
        GmError::NotAllocated { .. }
    );
    wire(&region, 0);
    gpu.fill(region.pages(), 1);
    space.dealloc_va(start).unwrap();
    machine.assert_unreachable(region.pages());
    refused!(region.dealloc(), GmError::Destroyed);
    let request = RegionRequest::of_bytes(2 * 4096);
    let start = space.alloc_va(&request).unwrap();
    let found = space.lookup(Va(start.0 + 4096)).unwrap();
    space.dealloc_va(start).unwrap();
    refused!(space.dealloc_va(start), GmError::NotAllocated { .. });
    let late = found.map(&own_frames(0, 2), &MapOptions::new(Access::Read));
    refused!(late, GmError::Destroyed);
    end(&machine, &space, &[&gpu]);
}

#[test]
fn of_threads_that_free_an_address_one_does() {
    let machine = Machine::eager();
    let space = space_of(16);
    let barrier = std::sync::Barrier::new(4);
    for _ in 0..200 {
        let start = space.alloc_va(&RegionRequest::of_bytes(4096)).unwrap();
        let freed = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        space.dealloc_va(start).is_ok()
                    })
                })
                .collect();
            let freed = threads.into_iter().map(|thread| thread.join().unwrap());
            freed.filter(|freed| *freed).count()
        });
        assert_eq!(freed, 1);
        assert!(space.regions().is_empty());
    }
    end(&machine, &space, &[]);
}
