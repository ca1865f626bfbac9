// SPDX-License-Identifier: Apache-2.0
//! `gm_dev_create`, `gm_as_attach`, `gm_dev_switch`, `gm_dev_detach`, `gm_dev_register_physmem`,
//! `gm_dev_destroy`: who uses a space, and by which table.

use crate::kit::{
    Actor, Build, Failing, Machine, Op, SPACE_BEGIN, attach_all, end, other_space_of, own_frames,
    refused, region_of, space_of, wire,
};
use pagetide_addr::{Access, DeviceId, Pa, Va};
use pagetide_gmem::{
    Activation, AllocPolicy, GmError, Inherited, MapOptions, Mapped, Mode, OnAbsent, PageSizes,
    PhysicalMemory, Placement, Protection, Restrict,
};
use std::sync::Arc;

struct NoEngine;

impl PhysicalMemory for NoEngine {
    fn prepare(&self, _: Pa, _: u64) -> Result<(), pagetide_gmem::MmuError> {
        Ok(())
    }
    fn copy(&self, _: Pa, _: Pa, _: u64) -> Result<(), pagetide_gmem::MmuError> {
        Ok(())
    }
}

#[test]
fn sharers_of_a_format_use_one_table_and_a_coherent_device_its_own() {
    let machine = Machine::eager();
    let sharers = [1, 1].map(|format| machine.actor(Build::of_format(format)));
    let own = machine.actor(Build::of_format(1));
    let space = space_of(16);
    for sharer in &sharers {
        sharer.join(&space, Mode::Shared).unwrap();
    }
    own.join(&space, Mode::Coherent).unwrap();
    assert_eq!(sharers[0].table(), sharers[1].table());
    assert_ne!(sharers[0].table(), own.table());
    let region = region_of(&space, 2);
    wire(&region, 0);
    let all = [&sharers[0], &sharers[1], &own];
    for (seed, actor) in (0..).zip(all) {
        actor.fill(region.pages(), seed);
        for reader in all {
            assert_eq!(reader.verify(region.pages(), seed), 0);
        }
    }
    let before = all.map(|actor| actor.count(Op::Invalidate));
    region.unmap().unwrap();
    let after = all.map(|actor| actor.count(Op::Invalidate));
    assert_eq!(after, before.map(|count| count + 1), "each has a TLB");
    assert_eq!(machine.count(Op::Restrict), 2, "once a table");
    machine.assert_unreachable(region.pages());
    sharers[0].device.detach(&space).unwrap();
    assert_eq!(
        machine.live_tables(),
        2,
        "its maker left, the other shares it"
    );
    wire(&region, 0);
    sharers[1].fill(region.pages(), 9);
    own.verify(region.pages(), 9);
    sharers[1].device.detach(&space).unwrap();
    assert_eq!(machine.live_tables(), 1);
    end(&machine, &space, &all);
}

#[test]
fn sharing_without_a_partner_of_the_format_makes_a_table() {
    let machine = Machine::new();
    let space = space_of(16);
    let coherent = machine.actor(Build::of_format(1));
    coherent.join(&space, Mode::Coherent).unwrap();
    let others = [Some(1), Some(2), None, None];
    let others = others.map(|format| {
        machine.actor(Build {
            format,
            ..Build::default()
        })
    });
    for other in &others {
        other.join(&space, Mode::Shared).unwrap();
    }
    let tables: std::collections::BTreeSet<_> = others.iter().map(Actor::table).collect();
    assert_eq!(tables.len(), 4);
    assert!(!tables.contains(&coherent.table()), "that one is coherent");
    let partner = machine.actor(Build::of_format(2));
    partner.join(&space, Mode::Shared).unwrap();
    assert_eq!(partner.table(), others[1].table());
}

#[test]
fn space_has_64_tables_at_most_and_their_places_are_used_again() {
    let machine = Machine::new();
    let space = space_of(16);
    let actors: Vec<_> = (0..64)
        .map(|_| machine.actor(Build::of_format(1)))
        .collect();
    for actor in &actors[..63] {
        actor.join(&space, Mode::Coherent).unwrap();
    }
    actors[63].join(&space, Mode::Shared).unwrap();
    let region = region_of(&space, 1);
    wire(&region, 0);
    let (more, sharer) = (machine.gpu(), machine.actor(Build::of_format(1)));
    refused!(
        more.join(&space, Mode::Coherent),
        GmError::Unsupported { .. }
    );
    sharer.join(&space, Mode::Shared).unwrap();
    actors[7].device.detach(&space).unwrap();
    more.join(&space, Mode::Coherent).unwrap();
    more.fill(region.pages(), 3);
    actors[63].verify(region.pages(), 3);
    let all: Vec<_> = actors.iter().chain([&more, &sharer]).collect();
    end(&machine, &space, &all);
}

#[test]
fn device_is_attached_once_and_only_what_is_attached_is_used() {
    let machine = Machine::new();
    let gpu = machine.gpu();
    let space = space_of(16);
    let region = region_of(&space, 1);
    refused!(gpu.device.detach(&space), GmError::NotAttached { .. });
    refused!(gpu.device.switch(&space), GmError::NotAttached { .. });
    refused!(
        region.set_policy(Placement::Unique, Some(&gpu.device)),
        GmError::NotAttached { .. }
    );
    refused!(
        gpu.device.fault(region.start(), Access::Read),
        GmError::NotActive { .. }
    );
    attach_all(&space, &[&gpu]);
    refused!(
        gpu.join(&space, Mode::Coherent),
        GmError::AlreadyAttached { .. }
    );
    let same_number = machine.actor(Build {
        id: Some(gpu.device.id()),
        ..Build::default()
    });
    refused!(
        same_number.join(&space, Mode::Coherent),
        GmError::AlreadyAttached { device } if device == gpu.device.id()
    );
    region
        .set_policy(Placement::Unique, Some(&gpu.device))
        .unwrap();
    let (placement, home) = region.policy();
    assert_eq!(placement, Placement::Unique);
    assert!(Arc::ptr_eq(&home.unwrap(), &gpu.device));
    gpu.device.detach(&space).unwrap();
    assert_eq!(machine.live_tables(), 0);
}

#[test]
fn device_is_active_in_one_space_at_a_time() {
    let machine = Machine::eager();
    let gpu = machine.gpu();
    let spaces = [space_of(16), space_of(16)];
    let regions = [0, 1].map(|n| region_of(&spaces[n], 1));
    wire(&regions[0], 0);
    wire(&regions[1], 1);
    let va = regions[0].start().0;
    assert_eq!(va, regions[1].start().0);
    spaces[0]
        .attach(&gpu.device, Mode::Coherent, Activation::Later)
        .unwrap();
    assert!(!gpu.device.is_active());
    gpu.device.switch(&spaces[0]).unwrap();
    gpu.write(va, 10);
    spaces[1]
        .attach(&gpu.device, Mode::Coherent, Activation::Later)
        .unwrap();
    assert_eq!(gpu.read(va), 10, "it stays where it is active");
    gpu.device.switch(&spaces[1]).unwrap();
    gpu.write(va, 20);
    // What it cached of the other space would show here.
    gpu.device.switch(&spaces[0]).unwrap();
    assert_eq!(gpu.read(va), 10);
    gpu.device.switch(&spaces[0]).unwrap();
    assert_eq!(gpu.count(Op::Activate), 3, "it was active there already");
    regions[1].unmap().unwrap();
    assert_eq!(
        gpu.count(Op::Invalidate),
        0,
        "it caches nothing of a space it left"
    );
    gpu.device.switch(&spaces[1]).unwrap();
    assert!(gpu.entry(va).is_none());
    gpu.device.detach(&spaces[1]).unwrap();
    assert!(!gpu.device.is_active());
    refused!(
        gpu.device.fault(Va(va), Access::Read),
        GmError::NotActive { .. }
    );
    gpu.device.switch(&spaces[0]).unwrap();
    assert_eq!(gpu.read(va), 10);
    gpu.device.detach(&spaces[0]).unwrap();
    machine.assert_sound();
}

#[test]
fn attachment_deactivates_elsewhere() {
    let machine = Machine::new();
    let gpu = machine.gpu();
    let spaces = [space_of(16), space_of(16)];
    attach_all(&spaces[0], &[&gpu]);
    let first = gpu.table();
    attach_all(&spaces[1], &[&gpu]);
    assert_ne!(gpu.table(), first);
    gpu.device.detach(&spaces[0]).unwrap();
    assert!(gpu.device.is_active(), "it is active in the other");
    gpu.device.detach(&spaces[1]).unwrap();
    assert_eq!(machine.live_tables(), 0);
    machine.assert_sound();
}

#[test]
fn device_that_cannot_come_is_active_where_it_was() {
    let machine = Machine::eager();
    let gpu = machine.gpu();
    let (home, away) = (space_of(16), other_space_of(16));
    attach_all(&home, &[&gpu]);
    let region = region_of(&home, 1);
    wire(&region, 0);
    gpu.write(region.start().0, 1);
    for op in [Op::CreateTable, Op::Activate, Op::Inherited] {
        let next = machine.count(op) + 1;
        machine.world().failing = Some(Failing::nth(op, next));
        refused!(gpu.join(&away, Mode::Coherent), GmError::Device { .. });
        assert_eq!(gpu.read(region.start().0), 1, "{op:?}");
        refused!(gpu.device.detach(&away), GmError::NotAttached { .. });
    }
    away.attach(&gpu.device, Mode::Coherent, Activation::Later)
        .unwrap();
    for op in [Op::Deactivate, Op::Activate] {
        let next = machine.count(op) + 1;
        machine.world().failing = Some(Failing::nth(op, next));
        refused!(gpu.device.switch(&away), GmError::Device { .. });
        assert_eq!(gpu.read(region.start().0), 1, "{op:?}");
    }
    // Neither here nor there: it is active nowhere, and can be switched again.
    machine.world().failing = Some(Failing::always(Op::Activate));
    refused!(gpu.device.switch(&away), GmError::Device { .. });
    assert!(!gpu.device.is_active());
    machine.world().failing = None;
    gpu.device.switch(&home).unwrap();
    assert_eq!(gpu.read(region.start().0), 1);
    gpu.device.detach(&away).unwrap();
    away.destroy().unwrap();
    end(&machine, &home, &[&gpu]);
}

#[test]
fn virtual_functions_are_active_each_in_its_space() {
    let machine = Machine::new();
    let functions = [machine.gpu(), machine.gpu()];
    let spaces = [space_of(16), space_of(16)];
    for at in [0, 1] {
        attach_all(&spaces[at], &[&functions[at]]);
        wire(&region_of(&spaces[at], 1), at as u64);
    }
    for at in [0, 1] {
        functions[at].write(SPACE_BEGIN, at as u64);
    }
    for at in [0, 1] {
        assert_eq!(functions[at].read(SPACE_BEGIN), at as u64);
    }
    for at in [0, 1] {
        functions[at].device.detach(&spaces[at]).unwrap();
    }
    for space in &spaces {
        end(&machine, space, &[]);
    }
}

#[test]
fn device_is_destroyed_once_and_only_when_unused() {
    let machine = Machine::new();
    let (cpu, gpu) = machine.cpu_and_gpu(4);
    let space = space_of(16);
    attach_all(&space, &[&cpu, &gpu]);
    refused!(gpu.device.destroy(), GmError::InUse { .. });
    let region = region_of(&space, 1);
    gpu.write(region.start().0, 1);
    assert_eq!(gpu.device.used_memory_bytes(), 4096);
    gpu.device.detach(&space).unwrap();
    refused!(gpu.device.destroy(), GmError::InUse { .. });
    region.unmap().unwrap();
    gpu.device.destroy().unwrap();
    refused!(gpu.device.destroy(), GmError::Destroyed);
    refused!(gpu.join(&space, Mode::Coherent), GmError::Destroyed);
    refused!(
        gpu.device.fault(region.start(), Access::Read),
        GmError::Destroyed
    );
    let memory = Arc::new(NoEngine);
    refused!(
        gpu.device.register_physmem(Pa(0), Pa(4096), memory),
        GmError::Destroyed
    );
    end(&machine, &space, &[&cpu]);
}

#[test]
fn device_of_a_space_that_was_dropped_is_free_and_reaches_nothing() {
    let machine = Machine::eager();
    let (cpu, gpu) = machine.cpu_and_gpu(4);
    let space = space_of(16);
    attach_all(&space, &[&cpu, &gpu]);
    let region = region_of(&space, 2);
    gpu.fill(region.pages(), 1);
    wire(&region_of(&space, 1), 0);
    let pages = space.pages();
    drop(region);
    drop(space);
    machine.assert_unreachable(pages);
    assert_eq!(machine.live_tables(), 0);
    assert_eq!(gpu.device.used_memory_bytes(), 0);
    let other = space_of(16);
    attach_all(&other, &[&gpu]);
    gpu.write(region_of(&other, 1).start().0, 1);
    end(&machine, &other, &[&gpu]);
    gpu.device.destroy().unwrap();
    cpu.device.destroy().unwrap();
}

#[test]
fn device_that_will_not_let_go_keeps_its_frames_and_its_table() {
    let machine = Machine::eager();
    let (cpu, gpu) = machine.cpu_and_gpu(4);
    let space = space_of(16);
    attach_all(&space, &[&cpu, &gpu]);
    let region = region_of(&space, 2);
    gpu.fill(region.pages(), 1);
    machine.world().failing = Some(Failing::always(Op::Deactivate));
    refused!(gpu.device.detach(&space), GmError::Device { .. });
    assert!(gpu.device.is_active());
    assert_eq!(gpu.verify(region.pages(), 1), 0, "it is attached as before");
    let (pages, used) = (region.pages(), gpu.device.used_memory_bytes());
    drop(region);
    drop(space);
    assert_eq!(gpu.device.used_memory_bytes(), used);
    assert!(gpu.entry(pages.start.byte_offset()).is_some());
    machine.assert_sound();
}

#[test]
fn memory_is_taken_back_when_it_holds_no_page() {
    let machine = Machine::eager();
    let (cpu, gpu) = machine.cpu_and_gpu(2);
    gpu.give_memory(0x9000_0000, 1);
    let space = space_of(16);
    attach_all(&space, &[&cpu, &gpu]);
    let region = region_of(&space, 2);
    gpu.fill(region.pages(), 1);
    let taken = |begin: u64, pages: u64| {
        let end = Pa(begin + pages * 4096);
        gpu.device.unregister_physmem(Pa(begin), end)
    };
    refused!(taken(0x4000_0000, 2), GmError::InUse { .. });
    refused!(taken(0x4000_0000, 1), GmError::InvalidArgument { .. });
    refused!(taken(0x5000_0000, 1), GmError::InvalidArgument { .. });
    taken(0x9000_0000, 1).unwrap();
    refused!(taken(0x9000_0000, 1), GmError::InvalidArgument { .. });
    cpu.verify(region.pages(), 1);
    taken(0x4000_0000, 2).unwrap();
    gpu.verify(region.pages(), 1);
    assert_eq!(gpu.device.used_memory_bytes(), 0, "it has none any more");
    end(&machine, &space, &[&cpu, &gpu]);
}

#[test]
fn memory_that_is_no_range_or_registered_twice_is_refused() {
    let gpu = Machine::new().gpu();
    let register = |begin, end| {
        let memory = Arc::new(NoEngine);
        gpu.device.register_physmem(Pa(begin), Pa(end), memory)
    };
    for (begin, end) in [(0, 0), (8192, 4096), (1, 4096), (0, 4097)] {
        refused!(register(begin, end), GmError::InvalidArgument { .. });
    }
    register(0x1_0000, 0x2_0000).unwrap();
    for (begin, end) in [
        (0x1_0000, 0x2_0000),
        (0xf000, 0x1_1000),
        (0x1_f000, 0x3_0000),
    ] {
        refused!(register(begin, end), GmError::InvalidArgument { .. });
    }
    register(0x2_0000, 0x2_1000).unwrap();
    register(0xf000, 0x1_0000).unwrap();
    assert_eq!(gpu.device.used_memory_bytes(), 0);
}

#[test]
fn wired_mappings_reach_devices_that_cannot_recover_also_later_ones() {
    let machine = Machine::eager();
    let early = machine.actor(Build::failing());
    let late = machine.actor(Build::failing());
    let inactive = machine.actor(Build::failing());
    let space = space_of(32);
    attach_all(&space, &[&early]);
    space
        .attach(&inactive.device, Mode::Coherent, Activation::Later)
        .unwrap();
    let region = region_of(&space, 3);
    let frames: Vec<_> = [own_frames(8, 2), own_frames(2, 1)].concat();
    region
        .map(&frames, &MapOptions::new(Access::Write))
        .unwrap();
    assert_eq!(early.fill(region.pages(), 5), 0);
    attach_all(&space, &[&late]);
    assert_eq!(late.verify(region.pages(), 5), 0);
    inactive.device.switch(&space).unwrap();
    assert_eq!(inactive.verify(region.pages(), 5), 0);
    assert_eq!(
        early.entry(region.start().0 + 8192).unwrap().pa,
        frames[2].0
    );
    refused!(
        late.device.fault(region.start(), Access::Read),
        GmError::CannotRecover { .. }
    );
    end(&machine, &space, &[&early, &late, &inactive]);
}

#[test]
fn device_attached_under_a_protection_gets_what_it_allows_later() {
    let machine = Machine::eager();
    let late = machine.actor(Build::failing());
    let space = space_of(32);
    let region = region_of(&space, 1);
    wire(&region, 0);
    region.protect(Protection::Nothing).unwrap();
    attach_all(&space, &[&late]);
    assert!(late.try_read(region.start().0).is_err());
    region.protect(Protection::ReadOnly).unwrap();
    late.read(region.start().0);
    assert!(late.try_write(region.start().0, 1).is_err());
    region.protect(Protection::ReadWrite).unwrap();
    late.write(region.start().0, 1);
    end(&machine, &space, &[&late]);
}

#[test]
fn device_without_the_page_size_of_a_wired_mapping_is_not_attached() {
    let machine = Machine::new();
    let small = || Build {
        page_sizes: PageSizes::SMALLEST,
        format: Some(1),
        ..Build::default()
    };
    let space = space_of(1024);
    let region = region_of(&space, 512);
    let huge = MapOptions {
        page_bytes: 2 << 20,
        ..MapOptions::new(Access::Write)
    };
    let sharer = machine.actor(Build::of_format(1));
    sharer.join(&space, Mode::Shared).unwrap();
    region.map(&[Pa(2 << 20)], &huge).unwrap();
    for mode in [Mode::Shared, Mode::Coherent] {
        let actor = machine.actor(small());
        refused!(actor.join(&space, mode), GmError::Unsupported { .. });
        assert!(!actor.device.is_active());
        actor.device.destroy().unwrap();
    }
    assert_eq!(machine.live_tables(), 1);
    end(&machine, &space, &[&sharer]);
}

fn inherited(start: u64, pages: u64, frames: u64) -> Inherited {
    Inherited {
        start: Va(start),
        len_bytes: pages * 4096,
        access: Access::Write,
        frames: Pa(frames),
    }
}

#[test]
fn mappings_that_the_cpu_has_become_regions_of_the_space() {
    let machine = Machine::eager();
    let gpu = machine.actor(Build::failing());
    let space = space_of(64);
    attach_all(&space, &[&gpu]);
    let cpu = machine.actor(Build {
        id: Some(DeviceId::VCPUS),
        inherited: vec![
            inherited(SPACE_BEGIN, 2, 0x9_0000),
            inherited(SPACE_BEGIN + 0x8000, 1, 0x7_0000),
        ],
        ..Build::default()
    });
    attach_all(&space, &[&cpu]);
    let regions = space.regions();
    assert_eq!(regions.len(), 2);
    assert!(
        regions
            .iter()
            .all(|region| region.mapped() == Mapped::Wired)
    );
    assert_eq!(gpu.entry(SPACE_BEGIN + 4096).unwrap().pa, 0x9_1000);
    cpu.fill(regions[0].pages(), 4);
    gpu.verify(regions[0].pages(), 4);
    end(&machine, &space, &[&cpu, &gpu]);
}

#[test]
fn cpu_whose_mappings_do_not_fit_is_not_attached() {
    let machine = Machine::new();
    for wrong in [
        inherited(SPACE_BEGIN + 4096, 2, 0x9_0000),
        inherited(SPACE_BEGIN + (64 << 12), 1, 0x9_0000),
        inherited(SPACE_BEGIN + 1, 1, 0x9_0000),
        inherited(SPACE_BEGIN + (8 << 12), 0, 0x9_0000),
        inherited(u64::MAX - 4095, 2, 0x9_0000),
    ] {
        let space = space_of(64);
        let occupied = region_of(&space, 2);
        let cpu = machine.actor(Build {
            inherited: vec![inherited(SPACE_BEGIN + (16 << 12), 1, 0x7_0000), wrong],
            ..Build::default()
        });
        refused!(
            cpu.join(&space, Mode::Coherent),
            GmError::NoAddresses { .. } | GmError::InvalidArgument { .. }
        );
        assert_eq!(space.regions().len(), 1);
        assert!(!cpu.device.is_active());
        occupied.dealloc().unwrap();
        end(&machine, &space, &[&cpu]);
    }
}

#[test]
fn device_that_cannot_be_kept_from_reading_is_not_for_frames() {
    let machine = Machine::new();
    let reader = machine.actor(Build {
        strongest: Restrict::ReadOnly,
        ..Build::default()
    });
    refused!(
        reader.join(&space_of(16), Mode::Coherent),
        GmError::Unsupported { .. }
    );
    reader.device.destroy().unwrap();
}

#[test]
fn device_says_what_it_is() {
    let machine = Machine::new();
    let device = machine.actor(Build::failing()).device;
    assert_eq!(device.limits().on_absent, OnAbsent::Fails);
    assert_eq!(device.mmu().limits(), *device.limits());
    assert_eq!(machine.cpu().device.id(), DeviceId::VCPUS);
    assert!(PageSizes::of_bits(1 << 21).contains(1 << 21));
    assert!(PageSizes::of_bits(0).contains(4096));
    assert!(!PageSizes::of_bits(u64::MAX).contains(2048));
    assert_eq!(
        AllocPolicy::default().fit,
        pagetide_gmem::AddressFit::Instant
    );
}
