// SPDX-License-Identifier: Apache-2.0
//! Memory that moves to a device and back: `migrate` to `migrate_anon_huge_zero_err`.

use super::mirror::{BUFFER_PAGES, Fixture, HUGE_PAGES, Owner, TIMES, fault_back, pattern, zeros};
use crate::kit::{Failing, Op};
use pagetide_addr::{Access, PageRange, to_usize};
use pagetide_gmem::{FaultOutcome, GmError, Region};

/// A buffer that the CPU has filled is moved to the device, where its bytes are checked.
fn to_device(fixture: &Fixture, pages: u64, seed: u64) -> Region {
    let buffer = fixture.buffer(pages);
    fixture.cpu.fill(buffer.pages(), seed);
    let report = fixture.device().migrate(&buffer, buffer.pages()).unwrap();
    assert_eq!(report.cpages, pages);
    check_on_device(fixture, &buffer, seed);
    buffer
}

/// All of it lies in the device's memory and holds the pattern, without one more fault.
fn check_on_device(fixture: &Fixture, buffer: &Region, seed: u64) {
    let device = fixture.device();
    let (report, words) = device.read(buffer.pages()).unwrap();
    assert_eq!((report.cpages, report.faults), (buffer.pages().len(), 0));
    assert_eq!(words, pattern(buffer.pages(), seed));
    let count = to_usize(buffer.pages().len());
    let local = Some((Access::Write, Owner::First));
    assert_eq!(device.snapshot(buffer.pages()), vec![local; count]);
}

/// The CPU takes all of it back, with one fault and one copied page each.
fn check_fault_back(fixture: &Fixture, pages: PageRange, seed: u64) {
    let copied = fixture.machine.world().copied_pages;
    assert_eq!(fault_back(&fixture.cpu, pages), pages.len());
    assert_eq!(fixture.machine.world().copied_pages - copied, pages.len());
    assert_eq!(fixture.cpu.verify(pages, seed), 0);
}

#[test]
fn migrate() {
    let fixture = Fixture::new();
    to_device(&fixture, BUFFER_PAGES, 1);
    assert_eq!(fixture.machine.world().copied_pages, BUFFER_PAGES);
    fixture.end();
}

#[test]
fn migrate_fault() {
    let fixture = Fixture::new();
    let buffer = to_device(&fixture, BUFFER_PAGES, 1);
    check_fault_back(&fixture, buffer.pages(), 1);
    assert_eq!(fixture.device().actor.device.used_memory_bytes(), 0);
    let again = fixture.device().migrate(&buffer, buffer.pages()).unwrap();
    assert_eq!(again.cpages, BUFFER_PAGES);
    check_on_device(&fixture, &buffer, 1);
    fixture.end();
}

#[test]
fn migrate_release() {
    let fixture = Fixture::new();
    let buffer = to_device(&fixture, BUFFER_PAGES, 1);
    // The driver is closed: its pages come home as they are used, and its memory is free then.
    let device = &fixture.device().actor.device;
    device.detach(&fixture.space).unwrap();
    fixture.machine.assert_unreachable(buffer.pages());
    assert!(matches!(device.destroy(), Err(GmError::InUse { .. })));
    check_fault_back(&fixture, buffer.pages(), 1);
    device.destroy().unwrap();
    fixture.end();
}

#[test]
fn migrate_multiple() {
    let fixture = Fixture::new();
    for seed in 0..TIMES {
        let buffer = to_device(&fixture, BUFFER_PAGES, seed);
        check_fault_back(&fixture, buffer.pages(), seed);
        buffer.dealloc().unwrap();
    }
    fixture.end();
}

#[test]
fn migrate_anon_huge_empty() {
    let fixture = Fixture::new();
    let buffer = fixture.buffer(HUGE_PAGES);
    let report = fixture.device().migrate(&buffer, buffer.pages()).unwrap();
    assert_eq!(report.cpages, HUGE_PAGES, "made there");
    assert_eq!(
        fixture.machine.world().copied_pages,
        0,
        "there is nothing to copy"
    );
    let (report, words) = fixture.device().read(buffer.pages()).unwrap();
    assert_eq!((report.faults, words), (0, zeros(buffer.pages())));
    assert_eq!(fixture.cpu.verify_zero(buffer.pages()), 512);
    fixture.end();
}

#[test]
fn migrate_anon_huge_zero() {
    let fixture = Fixture::new();
    let buffer = fixture.buffer(HUGE_PAGES);
    // Looked at, never written.
    assert_eq!(fixture.cpu.verify_zero(buffer.pages()), 512);
    let report = fixture.device().migrate(&buffer, buffer.pages()).unwrap();
    assert_eq!(report.cpages, HUGE_PAGES);
    let (report, words) = fixture.device().read(buffer.pages()).unwrap();
    assert_eq!((report.faults, words), (0, zeros(buffer.pages())));
    assert_eq!(fixture.cpu.verify_zero(buffer.pages()), 512);
    assert_eq!(fixture.machine.world().copied_pages, 2 * HUGE_PAGES);
    fixture.end();
}

#[test]
fn migrate_anon_huge_fault() {
    let fixture = Fixture::new();
    let buffer = to_device(&fixture, HUGE_PAGES, 4);
    check_fault_back(&fixture, buffer.pages(), 4);
    fixture.end();
}

/// The device cannot give memory, later it cannot copy: what was written stays and is found.
fn migrate_with_errors(fixture: &Fixture, buffer: &Region, check: impl Fn()) {
    let device = fixture.device();
    let filler = fixture.buffer(2 * HUGE_PAGES);
    let full = device
        .write(filler.pages(), &pattern(filler.pages(), 8))
        .unwrap();
    assert_eq!(full.cpages, 2 * HUGE_PAGES);
    let report = device.migrate(buffer, buffer.pages()).unwrap();
    assert_eq!(report.cpages, 0, "used from where it lies");
    let remote = Some((Access::Write, Owner::Host));
    assert_eq!(
        device.snapshot(buffer.pages()),
        vec![remote; to_usize(HUGE_PAGES)]
    );
    check();
    filler.dealloc().unwrap();
    fixture.machine.world().failing = Some(Failing::always(Op::Copy));
    assert_eq!(
        device.migrate(buffer, buffer.pages()),
        Err(FaultOutcome::Lost)
    );
    assert_eq!(
        device.actor.device.used_memory_bytes(),
        0,
        "what was taken for it is free"
    );
    check();
    fixture.machine.world().failing = None;
    let report = device.migrate(buffer, buffer.pages()).unwrap();
    assert_eq!(report.cpages, HUGE_PAGES);
    check();
}

#[test]
fn migrate_anon_huge_err() {
    let fixture = Fixture::new();
    let buffer = fixture.buffer(HUGE_PAGES);
    fixture.cpu.fill(buffer.pages(), 5);
    migrate_with_errors(&fixture, &buffer, || {
        fixture.cpu.verify(buffer.pages(), 5);
    });
    fixture.end();
}

#[test]
fn migrate_anon_huge_zero_err() {
    let fixture = Fixture::new();
    let buffer = fixture.buffer(HUGE_PAGES);
    fixture.cpu.verify_zero(buffer.pages());
    migrate_with_errors(&fixture, &buffer, || {
        fixture.cpu.verify_zero(buffer.pages());
    });
    fixture.end();
}

/// A part of what was moved is unmapped; the rest comes back.
#[test]
fn migrate_partial_unmap_fault() {
    let fixture = Fixture::new();
    // A region goes as a whole, so the buffer is made of three.
    let parts = [0, 1, 2].map(|_| fixture.buffer(BUFFER_PAGES));
    let device = fixture.device();
    for part in &parts {
        fixture.cpu.fill(part.pages(), 6);
        assert_eq!(
            device.migrate(part, part.pages()).unwrap().cpages,
            BUFFER_PAGES
        );
    }
    parts[1].dealloc().unwrap();
    assert_eq!(
        device.actor.device.used_memory_bytes(),
        2 * BUFFER_PAGES * 4096
    );
    check_fault_back(&fixture, parts[0].pages(), 6);
    let hole = fixture.cpu.refused(parts[1].start().0, Access::Read);
    assert!(matches!(hole, GmError::NotAllocated { .. }), "{hole}");
    assert_eq!(device.read(parts[1].pages()), Err(FaultOutcome::OutOfRange));
    check_fault_back(&fixture, parts[2].pages(), 6);
    fixture.end();
}
