// SPDX-License-Identifier: Apache-2.0
//! `gm_as_create`, `gm_as_destroy`, `gm_as_alloc`, `gm_as_lookup`, `gm_region_dealloc`: addresses.

use crate::kit::{
    Actor, Machine, SPACE_BEGIN, attach_all, refused, region_of, space_of, space_with,
};
use pagetide_addr::{Access, PAGE_BYTES, PAGE_SHIFT, Va};
use pagetide_gmem::{
    AddressFit, AddressSpace, AllocPolicy, Caching, GmError, Guard, Mapped, Mode, Region,
    RegionRequest,
};

const FIRST_FIT: AllocPolicy = AllocPolicy {
    fit: AddressFit::First,
    guard: Guard::Unguarded,
    cache: Caching::Uncached,
};

fn bytes(pages: u64) -> u64 {
    pages << PAGE_SHIFT
}

fn request(pages: u64) -> RegionRequest {
    RegionRequest::of_bytes(bytes(pages))
}

fn at(pages: u64) -> Va {
    Va(SPACE_BEGIN + bytes(pages))
}

#[test]
fn space_of_no_or_of_broken_pages_is_refused() {
    for (begin, end) in [(0, 0), (8192, 4096), (1, 8192), (0, 8191)] {
        let made = AddressSpace::create(Va(begin), Va(end), AllocPolicy::default());
        refused!(made, GmError::InvalidArgument { .. });
    }
}

#[test]
fn space_from_address_zero_can_be_allocated_whole() {
    let space = AddressSpace::create(Va(0), Va(bytes(3)), FIRST_FIT).unwrap();
    let whole = region_of(&space, 3);
    assert_eq!(whole.start(), Va(0));
    refused!(
        space.alloc(&request(1)),
        GmError::NoAddresses { bytes: 4096 }
    );
    whole.dealloc().unwrap();
    space.destroy().unwrap();
}

#[test]
fn space_is_destroyed_only_without_regions_and_devices_and_only_once() {
    let machine = Machine::new();
    let gpu = machine.gpu();
    let space = space_of(16);
    let region = region_of(&space, 1);
    refused!(space.destroy(), GmError::InUse { .. });
    region.dealloc().unwrap();
    attach_all(&space, &[&gpu]);
    refused!(space.destroy(), GmError::InUse { .. });
    gpu.device.detach(&space).unwrap();
    space.destroy().unwrap();
    refused!(space.destroy(), GmError::Destroyed);
    refused!(space.alloc(&request(1)), GmError::Destroyed);
    refused!(gpu.join(&space, Mode::Coherent), GmError::Destroyed);
    refused!(space.lookup(at(0)), GmError::NotAllocated { .. });
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let space = space_of(16);
    let plain = request(2);
    let wrong = [
        request(0),
        RegionRequest::of_bytes(u64::MAX),
        RegionRequest { align: 3, ..plain },
        RegionRequest {
            no_cross: 3 << 12,
            ..plain
        },
        RegionRequest {
            no_cross: 4096,
            ..plain
        },
        RegionRequest {
            hint: Some(Va(SPACE_BEGIN + 1)),
            ..plain
        },
    ];
    for request in wrong {
        refused!(space.alloc(&request), GmError::InvalidArgument { .. });
    }
    assert!(space.regions().is_empty());
}

#[test]
fn length_is_rounded_up_to_whole_pages() {
    let space = space_of(16);
    let region = space.alloc(&RegionRequest::of_bytes(4097)).unwrap();
    assert_eq!(region.len_bytes(), 8192);
    assert_eq!(region.pages().len(), 2);
    assert_eq!(region.mapped(), Mapped::Nothing);
    assert!(std::sync::Arc::ptr_eq(region.space(), &space));
}

#[test]
fn first_fit_takes_the_lowest_place() {
    let space = space_with(16, FIRST_FIT);
    let regions: Vec<_> = (0..4).map(|_| region_of(&space, 2)).collect();
    let starts: Vec<_> = regions.iter().map(pagetide_gmem::Region::start).collect();
    assert_eq!(starts, [at(0), at(2), at(4), at(6)]);
    regions[1].dealloc().unwrap();
    regions[3].dealloc().unwrap();
    assert_eq!(region_of(&space, 3).start(), at(6));
    assert_eq!(region_of(&space, 2).start(), at(2));
}

#[test]
fn guarded_region_traps_one_byte_past_either_end() {
    let machine = Machine::new();
    let (cpu, gpu) = machine.cpu_and_gpu(8);
    let policy = AllocPolicy {
        guard: Guard::Guarded,
        ..FIRST_FIT
    };
    let space = space_with(16, policy);
    attach_all(&space, &[&cpu, &gpu]);
    let (low, high) = (region_of(&space, 2), region_of(&space, 1));
    for region in [&low, &high] {
        let (begin, end) = (region.start().0, region.start().0 + region.len_bytes());
        gpu.write(begin, 1);
        gpu.write(end - 8, 2);
        for outside in [begin - 8, end] {
            let refusal = gpu.refused(outside, Access::Read);
            assert!(matches!(refusal, GmError::NotAllocated { va } if va == Va(outside)));
        }
    }
    assert!(low.pages().end < high.pages().start);
    assert_eq!(
        low.start(),
        at(1),
        "a guard lies before the first region too"
    );
}

#[test]
fn guards_count_when_room_is_short() {
    let policy = AllocPolicy {
        guard: Guard::Guarded,
        ..FIRST_FIT
    };
    refused!(
        space_with(2, policy).alloc(&request(1)),
        GmError::NoAddresses { .. }
    );
    let space = space_with(3, policy);
    let region = region_of(&space, 1);
    assert_eq!(region.start(), at(1));
    region.dealloc().unwrap();
    assert_eq!(region_of(&space, 1).start(), at(1));
}

#[test]
fn cached_space_gives_a_freed_region_again_and_loses_nothing() {
    let policy = AllocPolicy {
        cache: Caching::Cached,
        ..AllocPolicy::default()
    };
    let space = space_with(256, policy);
    let first = region_of(&space, 4);
    let start = first.start();
    first.dealloc().unwrap();
    assert_eq!(region_of(&space, 4).start(), start);
    for pages in [1, 4, 16, 17] {
        let all: Vec<_> = (0..3).map(|_| region_of(&space, pages)).collect();
        for region in all {
            region.dealloc().unwrap();
        }
    }
    space.lookup(start).unwrap().dealloc().unwrap();
    assert_eq!(region_of(&space, 256).pages(), space.pages());
}

#[test]
fn request_that_asks_for_what_all_have_comes_from_the_caches() {
    let policy = AllocPolicy {
        cache: Caching::Cached,
        ..FIRST_FIT
    };
    let space = space_with(256, policy);
    let last = Some(Va(at(256).0 - 1));
    let wanted = [
        request(4),
        RegionRequest {
            align: PAGE_BYTES,
            ..request(4)
        },
        RegionRequest {
            max: last,
            ..request(4)
        },
        RegionRequest {
            max: Some(Va(u64::MAX)),
            align: 1,
            ..request(4)
        },
    ];
    for freed in &wanted {
        for asked in &wanted {
            let region = space.alloc(freed).unwrap();
            let start = region.start();
            region.dealloc().unwrap();
            let again = space.alloc(asked).unwrap();
            assert_eq!(again.start(), start, "{freed:?}, {asked:?}");
            again.dealloc().unwrap();
        }
    }
    // What asks for more does not: the addresses in the caches are taken, as far as it knows.
    let region = region_of(&space, 4);
    let start = region.start();
    region.dealloc().unwrap();
    let max = Some(Va(at(256).0 - 2));
    let limited = space.alloc(&RegionRequest { max, ..request(4) }).unwrap();
    assert_ne!(limited.start(), start);
}

#[test]
fn hint_is_taken_if_free_else_above_it_else_anywhere() {
    for fit in [AddressFit::First, AddressFit::Instant] {
        let space = space_with(16, AllocPolicy { fit, ..FIRST_FIT });
        let hinted = |pages, hint| {
            let hint = Some(at(hint));
            let request = RegionRequest {
                hint,
                ..request(pages)
            };
            space.alloc(&request).map(|region| region.start())
        };
        assert_eq!(hinted(2, 6).unwrap(), at(6));
        assert!(hinted(2, 6).unwrap() >= at(8));
        assert_eq!(hinted(2, 14).unwrap(), at(14));
        assert!(hinted(2, 15).unwrap() < at(14), "nothing is above");
        assert!(hinted(2, 100).unwrap() < at(14), "the hint is no address");
    }
}

#[test]
fn align_no_cross_and_max_are_kept() {
    for fit in [AddressFit::First, AddressFit::Instant] {
        let space = space_with(64, AllocPolicy { fit, ..FIRST_FIT });
        let first = region_of(&space, 1);
        let align = bytes(8);
        let aligned = space
            .alloc(&RegionRequest {
                align,
                ..request(1)
            })
            .unwrap();
        assert!(aligned.start().0.is_multiple_of(align));
        for _ in 0..5 {
            let no_cross = bytes(4);
            let region = space
                .alloc(&RegionRequest {
                    no_cross,
                    ..request(3)
                })
                .unwrap();
            let last = region.start().0 + region.len_bytes() - 1;
            assert_eq!(region.start().0 / no_cross, last / no_cross);
        }
        let max = Some(Va(at(40).0 - 1));
        let limited = RegionRequest { max, ..request(1) };
        while let Ok(region) = space.alloc(&limited) {
            assert!(region.start().0 + region.len_bytes() <= at(40).0);
        }
        assert!(
            space.alloc(&request(1)).is_ok(),
            "there is room above the limit"
        );
        first.dealloc().unwrap();
        assert_eq!(space.alloc(&limited).unwrap().start(), at(0));
        let max = Some(Va(SPACE_BEGIN + 4094));
        refused!(
            space.alloc(&RegionRequest { max, ..request(1) }),
            GmError::NoAddresses { .. }
        );
    }
}

#[test]
fn all_constraints_hold_together_under_guards() {
    let policy = AllocPolicy {
        guard: Guard::Guarded,
        ..FIRST_FIT
    };
    let space = space_with(64, policy);
    let wanted = RegionRequest {
        hint: Some(at(16)),
        align: bytes(4),
        no_cross: bytes(8),
        max: Some(Va(at(32).0 - 1)),
        ..request(3)
    };
    let regions: Vec<_> = std::iter::from_fn(|| space.alloc(&wanted).ok()).collect();
    assert_eq!(regions[0].start(), at(16));
    for region in &regions {
        assert!(region.start().0.is_multiple_of(bytes(4)));
        assert!(region.pages().end.byte_offset() <= at(32).0);
    }
    let all = space.regions();
    assert!(
        all.windows(2)
            .all(|two| two[0].pages().end < two[1].pages().start)
    );
    assert_eq!(all.len(), regions.len());
}

#[test]
fn lookup_finds_the_region_of_each_byte_and_none_beside_it() {
    let space = space_with(16, FIRST_FIT);
    let region = region_of(&space, 2);
    let next = region_of(&space, 1);
    for va in [region.start().0, region.start().0 + 2 * PAGE_BYTES - 1] {
        assert_eq!(space.lookup(Va(va)).unwrap().start(), region.start());
    }
    assert_eq!(space.lookup(next.start()).unwrap().start(), next.start());
    for va in [SPACE_BEGIN - 1, at(3).0, at(16).0, u64::MAX, 0] {
        refused!(space.lookup(Va(va)), GmError::NotAllocated { .. });
    }
    region.dealloc().unwrap();
    refused!(space.lookup(at(0)), GmError::NotAllocated { .. });
    let starts: Vec<_> = space
        .regions()
        .iter()
        .map(pagetide_gmem::Region::start)
        .collect();
    assert_eq!(starts, [at(2)]);
}

#[test]
fn every_policy_guards_both_ends_and_gives_all_addresses_back() {
    let machine = Machine::new();
    let (cpu, gpu) = machine.cpu_and_gpu(64);
    for fit in [AddressFit::First, AddressFit::Instant] {
        for guard in [Guard::Unguarded, Guard::Guarded] {
            for cache in [Caching::Uncached, Caching::Cached] {
                let space = space_with(512, AllocPolicy { fit, guard, cache });
                attach_all(&space, &[&cpu, &gpu]);
                let mut all = Vec::new();
                for pages in (1..20).cycle() {
                    match space.alloc(&request(pages)) {
                        Ok(region) => all.push(region),
                        Err(GmError::NoAddresses { .. }) => break,
                        Err(error) => panic!("{error}"),
                    }
                }
                assert!(all.len() > 20);
                if guard == Guard::Guarded {
                    // Requests of other kinds, and addresses from the caches, have theirs too.
                    for region in all.split_off(all.len() - 12) {
                        region.dealloc().unwrap();
                    }
                    let hint = Some(Va(all[0].start().0 & !(PAGE_BYTES - 1)));
                    let hinted = RegionRequest { hint, ..request(1) };
                    all.extend([1, 5, 16].map(|pages| region_of(&space, pages)));
                    all.push(space.alloc(&hinted).unwrap());
                    all.iter().for_each(|region| probe_guards(region, &gpu));
                }
                for region in all {
                    region.dealloc().unwrap();
                }
                for actor in [&cpu, &gpu] {
                    actor.device.detach(&space).unwrap();
                }
                let margin = if guard == Guard::Guarded { 2 } else { 0 };
                region_of(&space, 512 - margin).dealloc().unwrap();
                space.destroy().unwrap();
            }
        }
    }
}

/// Its ends can be written to, and the bytes beside them not.
fn probe_guards(region: &Region, gpu: &Actor) {
    let (begin, end) = (region.start().0, region.start().0 + region.len_bytes());
    gpu.write(begin, 1);
    gpu.write(end - 8, 2);
    for outside in [begin - 8, end] {
        let refusal = gpu.refused(outside, Access::Write);
        assert!(
            matches!(refusal, GmError::NotAllocated { va } if va == Va(outside)),
            "{refusal:?}"
        );
    }
    region.unmap().unwrap();
}

#[test]
fn operations_on_a_region_that_was_given_back_are_refused() {
    let space = space_of(16);
    let region = region_of(&space, 1);
    region.dealloc().unwrap();
    let frames = crate::kit::own_frames(0, 1);
    let options = pagetide_gmem::MapOptions::new(Access::Read);
    refused!(region.map(&frames, &options), GmError::Destroyed);
    refused!(region.map_later(frames, options, None), GmError::Destroyed);
    refused!(region.unmap(), GmError::Destroyed);
    refused!(region.unmap_later(None), GmError::Destroyed);
    refused!(region.dealloc(), GmError::Destroyed);
    refused!(
        region.protect(pagetide_gmem::Protection::ReadOnly),
        GmError::Destroyed
    );
    refused!(
        region.set_policy(pagetide_gmem::Placement::Unique, None),
        GmError::Destroyed
    );
    assert_eq!(region.mapped(), Mapped::Nothing);
}
