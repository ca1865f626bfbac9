// SPDX-License-Identifier: Apache-2.0
//! `gm_as_attach`: who is refused, what a refusal leaves alone, and mappings that are there already.

use crate::kit::{
    Actor, Build, Failing, Machine, Op, Ram, SPACE_BEGIN, attach_all, end, other_space_of, refused,
    region_of, space_of, space_with, wire,
};
use pagetide_addr::{
    Access, DeviceId, PAGE_BYTES, Pa, PageRange, PageSet, SECTION_BYTES, SectionNo, Va,
};
use pagetide_gmem::{
    Activation, AddressSpace, AllocPolicy, Backing, Device, GmError, Guard, Inherited, MapOptions,
    Mapped, Mmu, MmuError, MmuLimits, Mode, RegionRequest, Restrict, Restricted, TableId,
};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::SeqCst},
};

/// An MMU with nothing of its own: it has one table, and counts the pages it is granted.
#[derive(Default)]
struct Bare {
    inherited: Vec<Inherited>,
    granted_pages: AtomicU64,
    destroyed: AtomicU64,
}

impl Mmu for Bare {
    fn limits(&self) -> MmuLimits {
        MmuLimits::PAGED
    }

    fn destroy_table(&self, _: TableId) {
        self.destroyed.fetch_add(1, SeqCst);
    }

    fn restrict(
        &self,
        _: TableId,
        _: SectionNo,
        _: &PageSet,
        _: Restrict,
    ) -> Result<Restricted, MmuError> {
        Ok(Restricted::Done)
    }

    fn grant(&self, _: TableId, pages: PageRange, _: Access, _: Backing) -> Result<(), MmuError> {
        self.granted_pages.fetch_add(pages.len(), SeqCst);
        Ok(())
    }

    fn inherited(&self) -> Result<Vec<Inherited>, MmuError> {
        Ok(self.inherited.clone())
    }
}

fn inherited(start: u64, pages: u64, frames: u64) -> Inherited {
    Inherited {
        start: Va(start),
        len_bytes: pages * PAGE_BYTES,
        access: Access::Write,
        frames: Pa(frames),
    }
}

/// A CPU with mappings of its own.
fn cpu_with(machine: &Machine, inherited: Vec<Inherited>) -> Actor {
    machine.actor(Build {
        id: Some(DeviceId::VCPUS),
        inherited,
        ..Build::default()
    })
}

#[test]
fn device_that_cannot_wait_is_not_for_memory_that_may_be_elsewhere() {
    let machine = Machine::eager();
    let memory = Ram::new(&machine).memory(512);
    let end = Va(SECTION_BYTES);
    let space = AddressSpace::over(memory, Va(0), end, AllocPolicy::default()).unwrap();
    let waits = machine.actor(Build::of_format(1));
    waits.join(&space, Mode::Shared).unwrap();
    for mode in [Mode::Shared, Mode::Coherent] {
        let fails = machine.actor(Build {
            format: Some(1),
            ..Build::failing()
        });
        refused!(fails.join(&space, mode), GmError::Unsupported { .. });
        assert!(!fails.device.is_active());
        assert_eq!(fails.count(Op::CreateTable), 0);
    }
}

#[test]
fn device_that_cannot_wait_shares_no_table_with_one_that_can() {
    let machine = Machine::eager();
    let waits = [1, 1].map(|format| machine.actor(Build::of_format(format)));
    let fails = [1, 1].map(|format| {
        machine.actor(Build {
            format: Some(format),
            ..Build::failing()
        })
    });
    let space = space_of(16);
    for actor in [&waits[0], &fails[0], &waits[1], &fails[1]] {
        actor.join(&space, Mode::Shared).unwrap();
    }
    assert_eq!(waits[0].table(), waits[1].table());
    assert_eq!(fails[0].table(), fails[1].table());
    assert_ne!(waits[0].table(), fails[0].table());
    waits[0].give_memory(0x4000_0000, 2);
    let region = region_of(&space, 1);
    waits[0].write(region.start().0, 1);
    assert_eq!(waits[1].read(region.start().0), 1);
    assert!(fails[0].entry(region.start().0).is_none());
    let all = [&waits[0], &waits[1], &fails[0], &fails[1]];
    end(&machine, &space, &all);
}

#[test]
fn device_that_makes_no_tables_is_for_one_space() {
    let mmu = Arc::new(Bare::default());
    let device = Device::create(Arc::clone(&mmu) as Arc<dyn Mmu>);
    let (home, away) = (space_of(16), other_space_of(16));
    let attach =
        |space: &Arc<AddressSpace>| space.attach(&device, Mode::Coherent, Activation::Later);
    attach(&home).unwrap();
    refused!(attach(&away), GmError::Unsupported { .. });
    refused!(device.detach(&away), GmError::NotAttached { .. });
    assert_eq!(mmu.destroyed.load(SeqCst), 0, "it is the first space's");
    device.switch(&home).unwrap();
    wire(&region_of(&home, 2), 0);
    assert_eq!(mmu.granted_pages.load(SeqCst), 2);
    device.detach(&home).unwrap();
    assert_eq!(mmu.destroyed.load(SeqCst), 1);
    attach(&away).unwrap();
    drop(away);
    assert_eq!(mmu.destroyed.load(SeqCst), 2);
    attach(&home).unwrap();
    device.detach(&home).unwrap();
    device.destroy().unwrap();
}

/// A reason why a device cannot come, the error's name, and the space it cannot come to.
type Obstacle = (
    &'static str,
    &'static str,
    fn(&Machine, &Actor) -> Arc<AddressSpace>,
);

fn next_fails(machine: &Machine, op: Op) -> Arc<AddressSpace> {
    let next = machine.count(op) + 1;
    machine.world().failing = Some(Failing::nth(op, next));
    other_space_of(1024)
}

const OBSTACLES: [Obstacle; 9] = [
    ("no table", "Device", |machine, _| {
        next_fails(machine, Op::CreateTable)
    }),
    ("nothing to inherit", "Device", |machine, _| {
        next_fails(machine, Op::Inherited)
    }),
    ("an inherited mapping fails", "Device", |machine, _| {
        next_fails(machine, Op::Grant)
    }),
    ("a wired mapping fails", "Device", |machine, _| {
        let away = other_space_of(1024);
        wire(&region_of(&away, 1), 8);
        next_fails(machine, Op::Grant);
        away
    }),
    ("a page size", "Unsupported", |_, _| {
        let away = other_space_of(1024);
        let options = MapOptions {
            page_bytes: 1 << 20,
            ..MapOptions::new(Access::Write)
        };
        let region = away.alloc(&RegionRequest {
            align: 1 << 20,
            ..RegionRequest::of_bytes(1 << 20)
        });
        region.unwrap().map(&[Pa(1 << 20)], &options).unwrap();
        away
    }),
    (
        "addresses of an inherited mapping",
        "NoAddresses",
        |_, _| {
            let away = other_space_of(1024);
            away.alloc(&RegionRequest::of_bytes(1024 * PAGE_BYTES))
                .unwrap();
            away
        },
    ),
    ("its number", "AlreadyAttached", |machine, actor| {
        let away = other_space_of(1024);
        let same = machine.actor(Build {
            id: Some(actor.device.id()),
            ..Build::default()
        });
        attach_all(&away, &[&same]);
        away
    }),
    ("the end of the space", "Destroyed", |_, _| {
        let away = other_space_of(1024);
        away.destroy().unwrap();
        away
    }),
    (
        "paged memory has no inherited mappings",
        "Unsupported",
        |machine, _| {
            let memory = Ram::new(machine).memory(512);
            let end = Va(SECTION_BYTES);
            AddressSpace::over(memory, Va(0), end, AllocPolicy::default()).unwrap()
        },
    ),
];

#[test]
fn device_that_cannot_come_never_stops_where_it_is() {
    for (why, error, obstruct) in OBSTACLES {
        let machine = Machine::eager();
        let home = other_space_of(1024);
        let cpu = cpu_with(&machine, vec![inherited(home_begin(), 1, 0x9_0000)]);
        cpu.give_memory(0x100_0000, 2);
        attach_all(&home, &[&cpu]);
        let region = region_of(&home, 1);
        cpu.write(region.start().0, 5);
        let away = obstruct(&machine, &cpu);
        let state = || {
            let calls = [Op::Activate, Op::Deactivate].map(|op| cpu.count(op));
            (calls, cpu.table())
        };
        let before = state();
        let refused = cpu.join(&away, Mode::Coherent).unwrap_err();
        let refused = format!("{refused:?}");
        assert!(refused.starts_with(error), "{why}: {refused}");
        machine.world().failing = None;
        assert_eq!(state(), before, "{why}: it stopped for a while");
        assert_eq!(cpu.read(region.start().0), 5, "{why}");
        cpu.write(region_of(&home, 1).start().0, 6);
        refused!(cpu.device.detach(&away), GmError::NotAttached { .. });
        drop(away);
        end(&machine, &home, &[&cpu]);
    }
}

fn home_begin() -> u64 {
    SPACE_BEGIN * 16
}

#[test]
fn device_that_cannot_be_told_what_is_present_never_stops_where_it_is() {
    let machine = Machine::eager();
    let (cpu, gpu) = machine.cpu_and_gpu(4);
    let home = other_space_of(16);
    attach_all(&home, &[&cpu, &gpu]);
    let region = region_of(&home, 1);
    gpu.write(region.start().0, 1);
    let ram = Ram::new(&machine);
    let sections_end = Va(SECTION_BYTES);
    let away =
        AddressSpace::over(ram.memory(512), Va(0), sections_end, AllocPolicy::default()).unwrap();
    let first = machine.gpu();
    attach_all(&away, &[&first]);
    let present = away
        .alloc(&RegionRequest::of_bytes(2 * PAGE_BYTES))
        .unwrap();
    first.fill(present.pages(), 2);
    let calls = || [Op::Activate, Op::Deactivate].map(|op| gpu.count(op));
    let before = calls();
    let joined = ram.silently(|| gpu.join(&away, Mode::Coherent));
    refused!(joined, GmError::Lost { .. });
    assert_eq!(calls(), before);
    assert_eq!(gpu.read(region.start().0), 1);
    refused!(gpu.device.detach(&away), GmError::NotAttached { .. });
    gpu.join(&away, Mode::Coherent).unwrap();
    assert_eq!(gpu.verify(present.pages(), 2), 0);
    gpu.device.detach(&away).unwrap();
    gpu.device.switch(&home).unwrap();
    drop((present, away));
    end(&machine, &home, &[&cpu, &gpu]);
}

#[test]
fn device_that_cannot_be_activated_here_serves_its_faults_where_it_was() {
    let machine = Machine::eager();
    let (cpu, gpu) = machine.cpu_and_gpu(4);
    let (home, away) = (space_of(16), other_space_of(16));
    attach_all(&home, &[&cpu, &gpu]);
    let table = gpu.table();
    let next = machine.count(Op::Activate) + 1;
    machine.world().failing = Some(Failing::nth(Op::Activate, next));
    refused!(gpu.join(&away, Mode::Coherent), GmError::Device { .. });
    machine.world().failing = None;
    assert_eq!(gpu.table(), table);
    assert!(gpu.device.is_active());
    let region = region_of(&home, 1);
    gpu.write(region.start().0, 1);
    region.unmap().unwrap();
    assert_eq!(gpu.count(Op::Invalidate), 1, "it is active there");
    machine.assert_unreachable(region.pages());
    away.destroy().unwrap();
    end(&machine, &home, &[&cpu, &gpu]);
}

#[test]
fn inherited_mapping_of_any_length_costs_no_list_of_frames() {
    let bytes = 1_u64 << 46;
    let mmu = Arc::new(Bare {
        inherited: vec![Inherited {
            start: Va(0),
            len_bytes: bytes,
            access: Access::Read,
            frames: Pa(0),
        }],
        ..Bare::default()
    });
    let device = Device::create(Arc::clone(&mmu) as Arc<dyn Mmu>);
    let end = Va(2 * bytes);
    let space = AddressSpace::create(Va(0), end, AllocPolicy::default()).unwrap();
    space
        .attach(&device, Mode::Coherent, Activation::Now)
        .unwrap();
    assert_eq!(mmu.granted_pages.load(SeqCst), bytes / PAGE_BYTES);
    let region = space.lookup(Va(bytes - 1)).unwrap();
    assert_eq!(
        (region.len_bytes(), region.mapped()),
        (bytes, Mapped::Wired)
    );
    refused!(space.lookup(Va(bytes)), GmError::NotAllocated { .. });
    device.detach(&space).unwrap();
}

#[test]
fn inherited_mapping_that_is_not_of_whole_pages_is_refused_as_such() {
    let machine = Machine::new();
    let good = inherited(SPACE_BEGIN, 1, 0x9_0000);
    let wrong = [
        Inherited {
            len_bytes: PAGE_BYTES + 1,
            ..good
        },
        Inherited {
            len_bytes: 0,
            ..good
        },
        Inherited {
            len_bytes: u64::MAX,
            ..good
        },
        Inherited {
            start: Va(SPACE_BEGIN + 8),
            ..good
        },
        Inherited {
            frames: Pa(0x9_0008),
            ..good
        },
        Inherited {
            frames: Pa(u64::MAX - 4095),
            len_bytes: 2 * PAGE_BYTES,
            ..good
        },
    ];
    for mapping in wrong {
        let space = space_of(64);
        let cpu = cpu_with(&machine, vec![mapping]);
        refused!(
            cpu.join(&space, Mode::Coherent),
            GmError::InvalidArgument {
                argument: "inherited mapping",
                ..
            }
        );
        assert!(space.regions().is_empty());
        end(&machine, &space, &[&cpu]);
    }
}

#[test]
fn device_that_comes_again_finds_its_inherited_mappings_as_they_are() {
    let machine = Machine::eager();
    let gpu = machine.actor(Build::failing());
    let space = space_of(64);
    let mappings = vec![
        inherited(SPACE_BEGIN, 2, 0x9_0000),
        inherited(SPACE_BEGIN + 0x8000, 1, 0x7_0000),
    ];
    let cpu = cpu_with(&machine, mappings);
    attach_all(&space, &[&cpu, &gpu]);
    let regions = space.regions();
    cpu.fill(regions[0].pages(), 4);
    for _ in 0..2 {
        cpu.device.detach(&space).unwrap();
        assert_eq!(gpu.verify(regions[0].pages(), 4), 0, "they are the space's");
        attach_all(&space, &[&cpu]);
        assert_eq!(space.regions(), regions);
        assert_eq!(cpu.verify(regions[0].pages(), 4), 0);
    }
    // One that is another by now is in the way.
    cpu.device.detach(&space).unwrap();
    regions[1].unmap().unwrap();
    wire(&regions[1], 0);
    refused!(
        cpu.join(&space, Mode::Coherent),
        GmError::NoAddresses { .. }
    );
    assert_eq!(regions[0].mapped(), Mapped::Wired);
    end(&machine, &space, &[&cpu, &gpu]);
}

#[test]
fn inherited_mappings_touch_one_another_in_a_guarded_space_and_it_is_given_back_whole() {
    let machine = Machine::eager();
    let policy = AllocPolicy {
        guard: Guard::Guarded,
        ..AllocPolicy::default()
    };
    let space = space_with(64, policy);
    let mappings = vec![
        inherited(SPACE_BEGIN, 2, 0x9_0000),
        inherited(SPACE_BEGIN + 2 * PAGE_BYTES, 1, 0x7_0000),
        inherited(SPACE_BEGIN + 63 * PAGE_BYTES, 1, 0x6_0000),
    ];
    let cpu = cpu_with(&machine, mappings);
    attach_all(&space, &[&cpu]);
    assert_eq!(space.regions().len(), 3);
    for region in space.regions() {
        region.dealloc().unwrap();
    }
    cpu.device.detach(&space).unwrap();
    let whole = region_of(&space, 62);
    assert_eq!(whole.start(), Va(SPACE_BEGIN + PAGE_BYTES));
    whole.dealloc().unwrap();
    space.destroy().unwrap();
}
