// SPDX-License-Identifier: Apache-2.0
//! Several who use the same pages: `exclusive`, `double_map`, `snapshot`, `migrate_mixed`.

use super::mirror::{BUFFER_PAGES, Fixture, Owner, Report, pattern, zeros};
use crate::kit::own_frames;
use pagetide_addr::{Access, PageRange, to_usize};
use pagetide_gmem::{FaultOutcome, GmError, MapOptions, Placement, Protection, Region};

/// A buffer in the host's memory that only the device has mapped.
fn exclusive_buffer(fixture: &Fixture) -> Region {
    let buffer = fixture.buffer(BUFFER_PAGES);
    fixture.cpu.fill(buffer.pages(), 1);
    // Its home is the host's memory: exclusive access does not move it.
    buffer
        .set_policy(Placement::Unique, Some(&fixture.cpu.device))
        .unwrap();
    let (report, words) = fixture.device().read(buffer.pages()).unwrap();
    assert_eq!(
        report,
        Report {
            cpages: BUFFER_PAGES,
            faults: 1
        }
    );
    assert_eq!(words, pattern(buffer.pages(), 1));
    assert_eq!(fixture.machine.world().copied_pages, 0);
    buffer
}

#[test]
fn exclusive() {
    let fixture = Fixture::new();
    let buffer = exclusive_buffer(&fixture);
    let device = fixture.device();
    let count = to_usize(BUFFER_PAGES);
    let mine = Some((Access::Write, Owner::Host));
    assert_eq!(device.snapshot(buffer.pages()), vec![mine; count]);
    // The CPU's accesses end it, page by page.
    assert_eq!(fixture.cpu.fill(buffer.pages(), 2), 32);
    assert_eq!(device.snapshot(buffer.pages()), vec![None; count]);
    // And the device's take it again.
    let written = device
        .write(buffer.pages(), &pattern(buffer.pages(), 3))
        .unwrap();
    assert_eq!(
        written,
        Report {
            cpages: BUFFER_PAGES,
            faults: 1
        }
    );
    assert_eq!(fixture.cpu.verify(buffer.pages(), 3), 32);
    fixture.end();
}

#[test]
fn exclusive_mprotect() {
    let fixture = Fixture::new();
    let buffer = exclusive_buffer(&fixture);
    buffer.protect(Protection::ReadOnly).unwrap();
    let device = fixture.device();
    let words = pattern(buffer.pages(), 2);
    assert_eq!(
        device.write(buffer.pages(), &words),
        Err(FaultOutcome::OutOfRange)
    );
    let refusal = device.actor.refused(buffer.start().0, Access::Write);
    assert!(matches!(refusal, GmError::Denied { .. }), "{refusal}");
    assert_eq!(
        fixture.cpu.verify(buffer.pages(), 1),
        32,
        "nothing was written"
    );
    fixture.end();
}

#[test]
fn double_map() {
    let fixture = Fixture::new();
    let buffer = fixture.buffer(BUFFER_PAGES);
    let pages = buffer.pages();
    fixture.cpu.fill(pages, 1);
    buffer.set_policy(Placement::RemoteAccess, None).unwrap();
    buffer.protect(Protection::ReadOnly).unwrap();
    let both = Report {
        cpages: BUFFER_PAGES,
        faults: 1,
    };
    for device in &fixture.devices {
        assert_eq!(device.read(pages).unwrap(), (both, pattern(pages, 1)));
    }
    // Moved to one of them, it is of the other no more, which moves it on.
    let [one, two] = &fixture.devices;
    buffer.set_policy(Placement::Unique, None).unwrap();
    assert_eq!(one.migrate(&buffer, pages).unwrap().cpages, BUFFER_PAGES);
    let count = to_usize(BUFFER_PAGES);
    assert_eq!(two.snapshot(pages), vec![None; count]);
    assert_eq!(
        one.snapshot(pages),
        vec![Some((Access::Read, Owner::First)); count]
    );
    assert_eq!(one.read(pages).unwrap().0.faults, 0);
    assert_eq!(two.read(pages).unwrap(), (both, pattern(pages, 1)));
    assert_eq!(
        two.snapshot(pages),
        vec![Some((Access::Read, Owner::Second)); count]
    );
    assert_eq!(fixture.cpu.verify(pages, 1), 32);
    fixture.end();
}

/// One page of each kind, side by side: what each device has of it.
#[test]
fn snapshot() {
    let fixture = Fixture::new();
    let kinds: Vec<_> = (0..7).map(|_| fixture.buffer(1)).collect();
    let [one, two] = &fixture.devices;
    let remote = |buffer: &Region| buffer.set_policy(Placement::RemoteAccess, None).unwrap();
    // 0: nothing is allowed. 1: never touched. 2: read, not written. 3: read only.
    fixture.cpu.fill(kinds[0].pages(), 1);
    kinds[0].protect(Protection::Nothing).unwrap();
    remote(&kinds[2]);
    fixture.cpu.verify_zero(kinds[2].pages());
    one.read(kinds[2].pages()).unwrap();
    remote(&kinds[3]);
    fixture.cpu.fill(kinds[3].pages(), 1);
    kinds[3].protect(Protection::ReadOnly).unwrap();
    one.read(kinds[3].pages()).unwrap();
    two.read(kinds[3].pages()).unwrap();
    // 4: wired. 5: in the memory of the first. 6: in that of the second.
    kinds[4]
        .map(&own_frames(0, 1), &MapOptions::new(Access::Write))
        .unwrap();
    for (device, buffer) in [(one, &kinds[5]), (two, &kinds[6])] {
        fixture.cpu.fill(buffer.pages(), 1);
        assert_eq!(device.migrate(buffer, buffer.pages()).unwrap().cpages, 1);
    }
    let seen = |device: &super::mirror::Mirror| -> Vec<_> {
        kinds
            .iter()
            .flat_map(|buffer| device.snapshot(buffer.pages()))
            .collect()
    };
    let (read, write) = (Access::Read, Access::Write);
    let wired = Some((write, Owner::Tests));
    let host = |access| Some((access, Owner::Host));
    let first = Some((write, Owner::First));
    assert_eq!(
        seen(one),
        [None, None, host(write), host(read), wired, first, None]
    );
    let second = Some((write, Owner::Second));
    assert_eq!(
        seen(two),
        [None, None, None, host(read), wired, None, second]
    );
    fixture.end();
}

/// Pages of several kinds are moved together, and what cannot be moved stops it.
#[test]
fn migrate_mixed() {
    let fixture = Fixture::new();
    let [one, two] = &fixture.devices;
    let guarded = fixture.buffer(2);
    guarded.protect(Protection::Nothing).unwrap();
    assert_eq!(
        one.migrate(&guarded, guarded.pages()),
        Err(FaultOutcome::OutOfRange)
    );
    let buffer = fixture.buffer(4);
    let beyond = PageRange::new(buffer.pages().start, buffer.pages().end.plus(1));
    assert_eq!(one.migrate(&buffer, beyond), Err(FaultOutcome::OutOfRange));
    // Page 0 was never touched, 1 read, 2 and 3 written, 3 in the second device's memory.
    let page = |at: u64| buffer.pages().start.plus(at).single();
    fixture.cpu.verify_zero(page(1));
    fixture.cpu.fill(page(2), 1);
    fixture.cpu.fill(page(3), 1);
    assert_eq!(two.migrate(&buffer, page(3)).unwrap().cpages, 1);
    assert_eq!(one.migrate(&buffer, buffer.pages()).unwrap().cpages, 4);
    let words = [
        zeros(page(0)),
        zeros(page(1)),
        pattern(page(2), 1),
        pattern(page(3), 1),
    ]
    .concat();
    assert_eq!(
        one.read(buffer.pages()).unwrap(),
        (
            Report {
                cpages: 4,
                faults: 0
            },
            words
        )
    );
    // Where Linux leaves a page that another device has, it comes here by a copy.
    assert_eq!(fixture.machine.world().copied_pages, 4);
    assert_eq!(two.actor.device.used_memory_bytes(), 0);
    fixture.end();
}
