// SPDX-License-Identifier: Apache-2.0
//! Reading and writing a process's memory by a device: `open_close` to `compound`, and files.

use super::mirror::{
    BUFFER_PAGES, Fixture, HUGE_PAGES, Owner, Report, TIMES, denied, pattern, zeros,
};
use crate::kit::{Machine, Ram, attach_all, own_frames};
use pagetide_addr::{
    Access, PAGE_BYTES, Pa, PageNo, PageRange, PageSet, SECTION_BYTES, Va, to_usize,
};
use pagetide_gmem::{
    AddressSpace, AllocPolicy, FaultOutcome, GmError, MapOptions, Placement, Protection,
    RegionRequest,
};
use std::sync::Barrier;

fn whole(pages: u64, faults: u64) -> Report {
    Report {
        cpages: pages,
        faults,
    }
}

#[test]
fn open_close() {
    let fixture = Fixture::new();
    let device = &fixture.device().actor.device;
    device.detach(&fixture.space).unwrap();
    fixture
        .device()
        .actor
        .join(&fixture.space, pagetide_gmem::Mode::Coherent)
        .unwrap();
    fixture.end();
}

/// Reads a buffer whose first two pages nobody has written to, the second of them looked at.
fn read_once(fixture: &Fixture) {
    let buffer = fixture.buffer(BUFFER_PAGES);
    buffer.set_policy(Placement::RemoteAccess, None).unwrap();
    let pages = buffer.pages();
    let third = pages.start.plus(2);
    let (first, rest) = (
        PageRange::new(pages.start, third),
        PageRange::new(third, pages.end),
    );
    fixture.cpu.fill(rest, 1);
    buffer.protect(Protection::ReadOnly).unwrap();
    assert_eq!(fixture.cpu.read(pages.start.byte_offset() + PAGE_BYTES), 0);
    let (report, words) = fixture.device().read(pages).unwrap();
    assert_eq!(report, whole(BUFFER_PAGES, 1));
    assert_eq!(words, [zeros(first), pattern(rest, 1)].concat());
    buffer.dealloc().unwrap();
}

#[test]
fn anon_read() {
    let fixture = Fixture::new();
    read_once(&fixture);
    fixture.end();
}

#[test]
fn anon_read_multiple() {
    let fixture = Fixture::new();
    for _ in 0..TIMES {
        read_once(&fixture);
    }
    fixture.end();
}

#[test]
fn anon_read_prot() {
    let fixture = Fixture::new();
    let buffer = fixture.buffer(BUFFER_PAGES);
    fixture.cpu.fill(buffer.pages(), 1);
    buffer.protect(Protection::Nothing).unwrap();
    // The first page is refused already: what the device has read stays as it was, empty.
    assert_eq!(
        fixture.device().read(buffer.pages()),
        Err(FaultOutcome::OutOfRange)
    );
    assert_eq!(fixture.device().snapshot(buffer.pages()), vec![None; 32]);
    buffer.protect(Protection::ReadWrite).unwrap();
    fixture.cpu.verify(buffer.pages(), 1);
    let (report, words) = fixture.device().read(buffer.pages()).unwrap();
    assert_eq!(
        (report, words),
        (whole(BUFFER_PAGES, 1), pattern(buffer.pages(), 1))
    );
    fixture.end();
}

#[test]
fn anon_write() {
    let fixture = Fixture::new();
    let buffer = fixture.buffer(BUFFER_PAGES);
    let written = fixture
        .device()
        .write(buffer.pages(), &pattern(buffer.pages(), 2));
    assert_eq!(written, Ok(whole(BUFFER_PAGES, 1)));
    assert_eq!(fixture.cpu.verify(buffer.pages(), 2), 32);
    fixture.end();
}

#[test]
fn anon_write_prot() {
    let fixture = Fixture::new();
    let buffer = fixture.buffer(BUFFER_PAGES);
    buffer.protect(Protection::ReadOnly).unwrap();
    let first = buffer.pages().start.single();
    let (report, words) = fixture.device().read(first).unwrap();
    assert_eq!((report, words), (whole(1, 1), zeros(first)));
    let words = pattern(buffer.pages(), 2);
    let device = fixture.device();
    assert_eq!(
        device.write(buffer.pages(), &words),
        Err(FaultOutcome::OutOfRange)
    );
    let by_itself = device.actor.refused(buffer.start().0, Access::Write);
    assert!(matches!(by_itself, GmError::Denied { .. }), "{by_itself}");
    fixture.cpu.verify_zero(buffer.pages());
    buffer.protect(Protection::ReadWrite).unwrap();
    assert_eq!(
        device.write(buffer.pages(), &words),
        Ok(whole(BUFFER_PAGES, 1))
    );
    fixture.cpu.verify(buffer.pages(), 2);
    fixture.end();
}

#[test]
fn anon_write_huge() {
    let fixture = Fixture::new();
    let buffer = fixture.buffer(HUGE_PAGES);
    let written = fixture
        .device()
        .write(buffer.pages(), &pattern(buffer.pages(), 3));
    assert_eq!(written, Ok(whole(HUGE_PAGES, 1)));
    fixture.cpu.verify(buffer.pages(), 3);
    fixture.end();
}

/// The process unmaps a buffer while the device reads it.
#[test]
fn anon_teardown() {
    for round in 0..TIMES {
        let fixture = Fixture::new();
        let buffer = fixture.buffer(BUFFER_PAGES);
        fixture.cpu.fill(buffer.pages(), round);
        let begin = Barrier::new(2);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                begin.wait();
                let actor = &fixture.device().actor;
                for page in buffer.pages().iter() {
                    for va in (page.byte_offset()..page.byte_offset() + PAGE_BYTES).step_by(512) {
                        match actor.try_read(va) {
                            // Before the unmapping, or a new page after it.
                            Ok(value) => assert!(value == va ^ round || value == 0, "{value:#x}"),
                            stopped => return denied(stopped.map(|_| ())),
                        }
                    }
                }
                true
            });
            begin.wait();
            buffer.unmap().unwrap();
            buffer.dealloc().unwrap();
            assert!(reader.join().unwrap());
        });
        assert_eq!(
            fixture.device().read(buffer.pages()),
            Err(FaultOutcome::OutOfRange)
        );
        fixture.end();
    }
}

/// What a device has mapped of a huge page, as it is protected.
#[test]
fn compound() {
    let fixture = Fixture::new();
    let buffer = fixture.buffer(HUGE_PAGES);
    let huge = HUGE_PAGES * PAGE_BYTES;
    let options = MapOptions {
        page_bytes: huge,
        ..MapOptions::new(Access::Write)
    };
    buffer.map(&[Pa(1 << 40)], &options).unwrap();
    let count = to_usize(HUGE_PAGES);
    let device = fixture.device();
    let snapshot = || device.snapshot(buffer.pages());
    assert_eq!(snapshot(), vec![Some((Access::Write, Owner::Tests)); count]);
    buffer.protect(Protection::ReadOnly).unwrap();
    assert_eq!(snapshot(), vec![Some((Access::Read, Owner::Tests)); count]);
    buffer.protect(Protection::Nothing).unwrap();
    assert_eq!(snapshot(), vec![None; count]);
    fixture.end();
}

/// A pinned buffer (`get_user_pages`): its frames are known to whoever pinned them, and they stay.
#[test]
fn hmm_gup_test() {
    let fixture = Fixture::new();
    let buffer = fixture.buffer(4);
    fixture.device().migrate(&buffer, buffer.pages()).unwrap();
    let frames = own_frames(0, 4);
    let wire = || buffer.map(&frames, &MapOptions::new(Access::Write));
    assert!(
        matches!(wire(), Err(GmError::AlreadyMapped { .. })),
        "not behind a device's back"
    );
    buffer.unmap().unwrap();
    wire().unwrap();
    let written = fixture
        .device()
        .write(buffer.pages(), &pattern(buffer.pages(), 5));
    assert_eq!(written, Ok(whole(4, 0)), "what is wired is not faulted on");
    for (page, frame) in buffer.pages().iter().zip(&frames) {
        let word = *fixture.machine.world().word(frame.0 + 8);
        assert_eq!(word, (page.byte_offset() + 8) ^ 5, "seen through the frame");
        *fixture.machine.world().word(frame.0 + 8) = page.0;
        assert_eq!(fixture.cpu.read(page.byte_offset() + 8), page.0);
    }
    let report = fixture.device().migrate(&buffer, buffer.pages()).unwrap();
    assert_eq!(report.cpages, 0, "pinned pages do not move");
    assert_eq!(fixture.machine.world().copied_pages, 0);
    fixture.end();
}

/// A file of 16 pages, none of which is in memory.
struct File {
    machine: Machine,
    ram: Ram,
    space: std::sync::Arc<AddressSpace>,
    pages: PageRange,
}

const FILE_PAGES: u64 = 16;

impl File {
    fn new(seed: u64) -> Self {
        let machine = Machine::eager();
        let ram = Ram::new(&machine);
        let policy = AllocPolicy::default();
        let memory = ram.memory(SECTION_BYTES / PAGE_BYTES);
        let space = AddressSpace::over(memory, Va(0), Va(SECTION_BYTES), policy).unwrap();
        let pages = PageNo(0).run(FILE_PAGES);
        for page in pages.iter() {
            ram.preset(page, |va| va ^ seed);
        }
        space
            .alloc(&RegionRequest::of_bytes(pages.bytes()))
            .unwrap();
        let file = Self {
            machine,
            ram,
            space,
            pages,
        };
        file.write_back();
        file
    }

    /// Its pages leave memory.
    fn write_back(&self) {
        let memory = self.space.memory().unwrap();
        let section = self.pages.start.section();
        let wanted = PageSet::of_range(section, self.pages);
        let mut round = memory.begin_eviction(section, &wanted).unwrap();
        let mut batch = Vec::new();
        for page in self.pages.iter() {
            let mut bytes = vec![0; to_usize(PAGE_BYTES)];
            round.read(page.single(), &mut bytes).unwrap();
            batch.push((page, self.ram.store(page, &bytes)));
        }
        assert!(round.commit(&batch).unused.is_empty());
        drop(round);
        assert_eq!(self.ram.present_pages(), 0);
        assert_eq!(self.ram.stored_pages(), self.pages.iter().len());
    }
}

#[test]
fn file_read() {
    let file = File::new(6);
    let device = super::mirror::Mirror::new(file.machine.gpu(), &file.space);
    attach_all(&file.space, &[&device.actor]);
    let (report, words) = device.read(file.pages).unwrap();
    assert_eq!(
        (report, words),
        (whole(FILE_PAGES, 1), pattern(file.pages, 6))
    );
    assert_eq!(file.ram.present_pages(), file.pages.iter().len());
    assert!(file.ram.incidents().is_empty());
    file.machine.assert_sound();
}

#[test]
fn file_write() {
    let file = File::new(6);
    let device = super::mirror::Mirror::new(file.machine.gpu(), &file.space);
    attach_all(&file.space, &[&device.actor]);
    let written = device.write(file.pages, &pattern(file.pages, 7));
    assert_eq!(written, Ok(whole(FILE_PAGES, 1)));
    file.write_back();
    let (report, words) = device.read(file.pages).unwrap();
    assert_eq!(
        (report, words),
        (whole(FILE_PAGES, 1), pattern(file.pages, 7))
    );
    assert!(file.ram.incidents().is_empty());
    file.machine.assert_sound();
}
