// SPDX-License-Identifier: Apache-2.0
//! `gm_dev_fault`, `gm_region_set_policy`: where a page is placed, and who else may map it.

use crate::kit::{
    Actor, Build, Machine, Op, SPACE_BEGIN, attach_all, end, own_frames, refused, region_of,
    space_of, wire,
};
use pagetide_addr::{Access, PageNo, PageRange, Va};
use pagetide_gmem::{
    Activation, AddressSpace, Cause, Fault, FaultOutcome, GmError, MapOptions, Mapped, Mode,
    Placement, Protection, Served, Wait,
};
use std::sync::Arc;

/// A machine, a space of 64 pages, and a CPU and a GPU in it with so many frames each.
fn setting(frames: u64) -> (Machine, Arc<AddressSpace>, Actor, Actor) {
    let machine = Machine::eager();
    let (cpu, gpu) = machine.cpu_and_gpu(frames);
    let space = space_of(64);
    attach_all(&space, &[&cpu, &gpu]);
    (machine, space, cpu, gpu)
}

#[test]
fn new_page_is_of_zeros_in_the_memory_of_who_faulted() {
    let (machine, space, cpu, gpu) = setting(8);
    let region = region_of(&space, 2);
    let va = region.start().0;
    assert_eq!(gpu.touch(region.pages(), Access::Read), 2);
    assert_eq!(gpu.verify_zero(region.pages()), 0);
    assert_eq!(gpu.device.used_memory_bytes(), 8192);
    assert_eq!(region.mapped(), Mapped::Demand);
    assert_eq!(machine.world().prepared_pages, 2);
    assert_eq!(
        gpu.touch(region.pages(), Access::Write),
        0,
        "all access that the region allows"
    );
    let other = region_of(&space, 1);
    cpu.write(other.start().0, 1);
    assert_eq!(cpu.device.used_memory_bytes(), 4096);
    region.unmap().unwrap();
    assert_eq!(gpu.device.used_memory_bytes(), 0);
    assert_eq!(gpu.read(va), 0, "a new page again");
    end(&machine, &space, &[&cpu, &gpu]);
}

#[test]
fn unique_page_moves_to_who_faults_with_its_bytes() {
    let (machine, space, cpu, gpu) = setting(8);
    let region = region_of(&space, 3);
    for round in 0..4 {
        let (to, from) = if round % 2 == 0 {
            (&cpu, &gpu)
        } else {
            (&gpu, &cpu)
        };
        if round > 0 {
            assert_eq!(to.verify(region.pages(), round - 1), 3);
        }
        to.fill(region.pages(), round);
        assert_eq!(to.device.used_memory_bytes(), 3 * 4096);
        assert_eq!(from.device.used_memory_bytes(), 0);
        for page in region.pages().iter() {
            assert!(
                from.entry(page.byte_offset()).is_none(),
                "one mapping in the space"
            );
        }
    }
    assert_eq!(machine.world().copied_pages, 9);
    assert_eq!(machine.world().prepared_pages, 3);
    assert_eq!(cpu.count(Op::Copy), 0, "a device's own engine copies");
    end(&machine, &space, &[&cpu, &gpu]);
}

#[test]
fn unique_page_without_memory_of_ones_own_stays_in_the_hosts() {
    let machine = Machine::eager();
    let (cpu, plain, other) = (machine.cpu(), machine.gpu(), machine.gpu());
    cpu.give_memory(0x10_0000, 8);
    let space = space_of(64);
    attach_all(&space, &[&cpu, &plain, &other]);
    let region = region_of(&space, 1);
    let va = region.start().0;
    plain.write(va, 5);
    assert_eq!(cpu.device.used_memory_bytes(), 4096);
    assert_eq!(other.read(va), 5);
    assert!(plain.entry(va).is_none() && other.entry(va).is_some());
    assert_eq!(machine.world().copied_pages, 0);
    end(&machine, &space, &[&cpu, &plain, &other]);
}

#[test]
fn page_with_remote_access_stays_and_is_mapped_by_all() {
    let (machine, space, cpu, gpu) = setting(8);
    let region = region_of(&space, 2);
    region.set_policy(Placement::RemoteAccess, None).unwrap();
    cpu.fill(region.pages(), 1);
    assert_eq!(gpu.verify(region.pages(), 1), 2);
    gpu.fill(region.pages(), 2);
    assert_eq!(cpu.verify(region.pages(), 2), 0, "both keep it");
    assert_eq!(gpu.device.used_memory_bytes(), 0);
    assert_eq!(machine.world().copied_pages, 0);
    region.set_policy(Placement::Unique, None).unwrap();
    // Mapped by both still: the next fault makes it one's own.
    region.protect(Protection::Nothing).unwrap();
    region.protect(Protection::ReadWrite).unwrap();
    gpu.verify(region.pages(), 2);
    assert_eq!(gpu.device.used_memory_bytes(), 8192);
    assert!(cpu.entry(region.start().0).is_none());
    end(&machine, &space, &[&cpu, &gpu]);
}

#[test]
fn page_is_placed_in_the_memory_of_the_named_device() {
    let (machine, space, cpu, gpu) = setting(8);
    let region = region_of(&space, 2);
    region
        .set_policy(Placement::Unique, Some(&gpu.device))
        .unwrap();
    cpu.fill(region.pages(), 1);
    assert_eq!(gpu.device.used_memory_bytes(), 8192);
    gpu.verify(region.pages(), 1);
    region
        .set_policy(Placement::Unique, Some(&cpu.device))
        .unwrap();
    cpu.verify(region.pages(), 1);
    let used = (
        cpu.device.used_memory_bytes(),
        gpu.device.used_memory_bytes(),
    );
    assert_eq!(used, (8192, 0), "it moved when it was faulted on");
    assert_eq!(machine.world().copied_pages, 2);
    gpu.verify(region.pages(), 1);
    assert_eq!(
        machine.world().copied_pages,
        2,
        "its home is the host's memory"
    );
    end(&machine, &space, &[&cpu, &gpu]);
}

#[test]
fn full_memory_is_helped_out_by_the_hosts_and_a_page_stays_where_it_is() {
    let machine = Machine::eager();
    let (cpu, gpu) = (machine.cpu(), machine.gpu());
    cpu.give_memory(0x10_0000, 2);
    gpu.give_memory(0x90_0000, 1);
    let space = space_of(64);
    attach_all(&space, &[&cpu, &gpu]);
    let region = region_of(&space, 4);
    let page = |number: u64| region.start().0 + number * 4096;
    for number in 0..3 {
        gpu.write(page(number), number);
    }
    assert_eq!(gpu.device.used_memory_bytes(), 4096);
    assert_eq!(cpu.device.used_memory_bytes(), 8192);
    assert!(matches!(
        gpu.refused(page(3), Access::Read),
        GmError::NoMemory { va } if va == Va(page(3))
    ));
    // The host's memory is full as well: the device's page is used from where it is.
    assert_eq!(cpu.read(page(0)), 0);
    assert_eq!(machine.world().copied_pages, 0);
    assert_eq!(gpu.read(page(1)), 1);
    region.unmap().unwrap();
    gpu.write(page(3), 1);
    end(&machine, &space, &[&cpu, &gpu]);
}

#[test]
fn fault_without_any_memory_is_refused_and_leaves_the_region_empty() {
    let machine = Machine::new();
    let gpu = machine.gpu();
    let space = space_of(64);
    attach_all(&space, &[&gpu]);
    let region = region_of(&space, 1);
    let refusal = gpu.refused(region.start().0, Access::Read);
    assert!(matches!(refusal, GmError::NoMemory { .. }), "{refusal}");
    assert_eq!(region.mapped(), Mapped::Nothing);
    wire(&region, 0);
    end(&machine, &space, &[&gpu]);
}

#[test]
fn prefetch_brings_the_pages_behind_without_being_waited_for() {
    let (machine, space, cpu, gpu) = setting(32);
    let region = region_of(&space, 24);
    region.set_policy(Placement::Prefetch, None).unwrap();
    cpu.fill(region.pages(), 1);
    space.synchronize().unwrap();
    let moved = machine.world().copied_pages;
    gpu.read(region.start().0);
    assert_eq!(
        machine.world().copied_pages - moved,
        1,
        "only what was asked for"
    );
    space.synchronize().unwrap();
    assert_eq!(machine.world().copied_pages - moved, 16);
    assert_eq!(gpu.device.used_memory_bytes(), 16 * 4096);
    let first = region.pages().start.run(16);
    assert_eq!(gpu.verify(first, 1), 0);
    assert_eq!(gpu.verify(region.pages(), 1), 8);
    space.synchronize().unwrap();
    end(&machine, &space, &[&cpu, &gpu]);
}

#[test]
fn prefetch_that_finds_no_memory_or_no_device_tells_nobody() {
    let (machine, space, cpu, gpu) = setting(4);
    let region = region_of(&space, 16);
    region.set_policy(Placement::Prefetch, None).unwrap();
    gpu.read(region.start().0);
    gpu.device.detach(&space).unwrap();
    space.synchronize().unwrap();
    cpu.read(region.start().0);
    space.synchronize().unwrap();
    region.dealloc().unwrap();
    space.synchronize().unwrap();
    end(&machine, &space, &[&cpu, &gpu]);
}

#[test]
fn faults_that_must_not_be_served_are_refused_by_their_reason() {
    let (machine, space, cpu, gpu) = setting(8);
    let failing = machine.actor(Build::failing());
    attach_all(&space, &[&failing]);
    let region = region_of(&space, 1);
    let va = region.start();
    refused!(
        gpu.device.fault(Va(SPACE_BEGIN - 1), Access::Read),
        GmError::NotAllocated { .. }
    );
    refused!(failing.device.fault(va, Access::Read), GmError::CannotRecover { va: at, .. } if at == va);
    region.protect(Protection::ReadOnly).unwrap();
    refused!(gpu.device.fault(va, Access::Write), GmError::Denied { .. });
    gpu.device.detach(&space).unwrap();
    refused!(
        gpu.device.fault(va, Access::Read),
        GmError::NotActive { .. }
    );
    assert_eq!(region.mapped(), Mapped::Nothing);
    end(&machine, &space, &[&cpu, &gpu, &failing]);
}

#[test]
fn sharers_of_a_table_use_one_page_and_others_take_it_from_both() {
    let machine = Machine::eager();
    let sharers = [1, 1].map(|format| machine.actor(Build::of_format(format)));
    let other = machine.gpu();
    other.give_memory(0x90_0000, 8);
    sharers[0].give_memory(0x40_0000, 8);
    let space = space_of(64);
    for sharer in &sharers {
        sharer.join(&space, pagetide_gmem::Mode::Shared).unwrap();
    }
    attach_all(&space, &[&other]);
    let region = region_of(&space, 1);
    sharers[0].fill(region.pages(), 1);
    assert_eq!(sharers[1].verify(region.pages(), 1), 0, "it is one table");
    assert_eq!(other.verify(region.pages(), 1), 1);
    assert!(
        sharers
            .iter()
            .all(|sharer| sharer.entry(region.start().0).is_none())
    );
    assert_eq!(sharers[1].verify(region.pages(), 1), 1);
    end(&machine, &space, &[&sharers[0], &sharers[1], &other]);
}

#[test]
fn memory_of_a_device_that_left_is_used_until_its_pages_move() {
    let (machine, space, cpu, gpu) = setting(8);
    let region = region_of(&space, 1);
    gpu.fill(region.pages(), 1);
    gpu.device.detach(&space).unwrap();
    machine.assert_unreachable(region.pages());
    assert_eq!(cpu.verify(region.pages(), 1), 1);
    assert_eq!(gpu.device.used_memory_bytes(), 0);
    gpu.device.destroy().unwrap();
    end(&machine, &space, &[&cpu]);
}

#[test]
fn device_whose_tlb_is_stale_faults_and_finds_its_wired_mapping() {
    let machine = Machine::new();
    let gpu = machine.gpu();
    let space = space_of(64);
    attach_all(&space, &[&gpu]);
    let region = region_of(&space, 1);
    region
        .map(&own_frames(0, 1), &MapOptions::new(Access::Write))
        .unwrap();
    region.protect(Protection::ReadOnly).unwrap();
    gpu.read(region.start().0);
    region.protect(Protection::ReadWrite).unwrap();
    gpu.write(region.start().0, 3);
    assert_eq!(gpu.read(region.start().0), 3);
    end(&machine, &space, &[&gpu]);
}

#[test]
fn the_one_door_answers_each_fault_once() {
    let (machine, space, cpu, gpu) = setting(8);
    let region = region_of(&space, 2);
    let ask = |pages, access, device| {
        let (told, heard) = std::sync::mpsc::channel();
        let reply = Box::new(move |outcome| told.send(outcome).unwrap());
        let fault = Fault {
            device,
            pages,
            access,
        };
        assert_eq!(space.fault(&Cause::Fault(fault), Wait::Reply(reply)), None);
        let outcome = heard.recv().unwrap();
        assert!(heard.recv().is_err(), "answered once");
        outcome
    };
    let id = gpu.device.id();
    assert_eq!(
        ask(region.pages(), Access::Write, id),
        FaultOutcome::Present
    );
    assert_eq!(gpu.fill(region.pages(), 1), 0);
    let beyond = PageRange::new(region.pages().start, region.pages().end.plus(1));
    assert_eq!(ask(beyond, Access::Read, id), FaultOutcome::OutOfRange);
    region.protect(Protection::ReadOnly).unwrap();
    assert_eq!(
        ask(region.pages(), Access::Write, id),
        FaultOutcome::OutOfRange
    );
    let sleeper = machine.gpu();
    space
        .attach(&sleeper.device, Mode::Coherent, Activation::Later)
        .unwrap();
    let refused = ask(region.pages(), Access::Read, sleeper.device.id());
    assert_ne!(refused, FaultOutcome::Present, "it is not active");
    assert_eq!(sleeper.count(Op::Grant), 0, "and it is granted nothing");
    sleeper.device.detach(&space).unwrap();
    let at_once = |pages| {
        let fault = Fault {
            device: id,
            pages,
            access: Access::Read,
        };
        space.fault(&Cause::Fault(fault), Wait::Never)
    };
    assert_eq!(at_once(region.pages()), None);
    let refused = Served::nothing(FaultOutcome::OutOfRange);
    assert_eq!(at_once(beyond), Some(refused));
    assert!(space.memory().is_none());
    end(&machine, &space, &[&cpu, &gpu]);
}

#[test]
fn pages_behind_a_fault_at_the_one_door_are_prefetched() {
    let (machine, space, cpu, gpu) = setting(32);
    let region = region_of(&space, 20);
    region.set_policy(Placement::Prefetch, None).unwrap();
    let part = |from, to| {
        let start = region.pages().start.0;
        PageRange::new(PageNo(start + from), PageNo(start + to))
    };
    let fault = Fault {
        device: gpu.device.id(),
        pages: part(0, 2),
        access: Access::Write,
    };
    let served = space.fault(&Cause::Fault(fault), Wait::Here);
    assert_eq!(served, Some(Served::nothing(FaultOutcome::Present)));
    assert_eq!(
        gpu.device.used_memory_bytes(),
        2 << 12,
        "nobody waits for more"
    );
    space.synchronize().unwrap();
    assert_eq!(gpu.device.used_memory_bytes(), 17 << 12);
    assert_eq!(gpu.touch(part(0, 17), Access::Write), 0);
    assert_eq!(gpu.touch(part(17, 18), Access::Read), 1);
    space.synchronize().unwrap();
    assert_eq!(gpu.touch(part(18, 20), Access::Read), 0, "up to its end");
    end(&machine, &space, &[&cpu, &gpu]);
}
