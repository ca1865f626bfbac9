// SPDX-License-Identifier: Apache-2.0
//! Checks of DMA: page requests, and pages that are unmapped.

use super::{
    Check, Checked, Ended, Tester,
    disk::{CONTENT, Disk, HEADER, PAGES},
    ensure, expect,
    probe::PATIENCE,
};
use pagetide_addr::{
    Access, DomainId, FilePage, FileRange, PageRequest, RequestKind, ResponseCode, Tier,
};
use pagetide_vpri_function::wire::{Answer, Code, Event, Farewell};
use std::time::Instant;

/// Pages of each read.
pub(super) const READ_PAGES: u64 = 4;
const READ: FileRange = FileRange {
    start: CONTENT,
    end: CONTENT.plus(READ_PAGES),
};
/// Status of a block request that went well, and of one that failed.
const FINE: u8 = 0;
const IO_ERROR: u8 = 1;
/// Rounds of the race between DMA and UNMAP.
const RACES: u32 = 300;

/// The checks, in order.
pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "transfer/no-space",
        demand: "after READY memory without a space is read-write: no page request",
        run: no_space,
    },
    Check {
        name: "transfer/fault",
        demand: "DMA to an unmapped page asks for it, touches nothing before, and goes on after MAP",
        run: fault,
    },
    Check {
        name: "transfer/mapped",
        demand: "DMA to pages that are mapped asks for nothing",
        run: mapped,
    },
    Check {
        name: "transfer/unmapped-again",
        demand: "DMA to a page that was unmapped, or protected against writes, asks again",
        run: unmapped_again,
    },
    Check {
        name: "transfer/race",
        demand: "once UNMAP is answered OK nothing writes to the page (R2, R3)",
        run: race,
    },
    Check {
        name: "transfer/standing",
        demand: "the rings of a queue are standing: reported, and not unmapped by UNMAP or UNMAP_ALL",
        run: standing,
    },
    Check {
        name: "transfer/refused",
        demand: "a request that is refused fails its transfer, and the disk goes on",
        run: refused,
    },
    Check {
        name: "respond/twice",
        demand: "a second answer to a request is INVALID",
        run: answered_twice,
    },
    Check {
        name: "transfer/no-buffer",
        demand: "a request waits until there is a buffer for it",
        run: no_buffer,
    },
    Check {
        name: "transfer/driver-returns",
        demand: "a request without an answer is sent to the next driver, with the same id, after READY",
        run: driver_returns,
    },
    Check {
        name: "transfer/driver-away",
        demand: "while there is no driver, pages that are mapped stay so, and others wait",
        run: driver_away,
    },
    Check {
        name: "transfer/release",
        demand: "DMA to a space that was released asks for nothing",
        run: released,
    },
];

/// A disk whose memory has a space with every page unmapped.
pub(super) struct Rig {
    pub(super) disk: Disk,
    pub(super) space: DomainId,
}

fn disk(tester: &mut Tester) -> Result<Disk, Ended> {
    let none = || Ended::Skipped("it needs a disk of the same DPU: --disk SOCKET".to_owned());
    let socket = tester.disk().ok_or_else(none)?.to_owned();
    tester.ready()?;
    let began = Instant::now();
    loop {
        // A disk that has not yet noticed the end of the last check hangs up.
        match Disk::connect(&socket) {
            Ok(disk) => return Ok(disk),
            Err(error) if began.elapsed() > PATIENCE => return Err(error),
            Err(_) => std::thread::sleep(super::RETURN_LOOK),
        }
    }
}

impl Rig {
    pub(super) fn new(tester: &mut Tester) -> Result<Self, Ended> {
        let mut disk = disk(tester)?;
        // Its rings are in use from here on.
        disk.read(READ_PAGES)?;
        let status = disk.wait_done()?;
        ensure(|| status == FINE, || format!("a read ended with {status}"))?;
        disk.punch(READ)?;
        let space = tester.create_named(disk.name()?, PAGES)?;
        tester.probe()?.give_buffers(0, 64)?;
        Ok(Self { disk, space })
    }

    pub(super) fn map(&self, tester: &mut Tester, pages: FileRange, access: Access) -> Checked {
        let event = Event::Map {
            space: self.space,
            access,
            ranges: vec![pages].into(),
        };
        tester.must(&event, Code::Ok).map(|_| ())
    }

    /// Unmaps `pages`, with as many tries as it takes.
    fn unmap(&self, tester: &mut Tester, pages: FileRange) -> Checked {
        let event = Event::Unmap {
            space: self.space,
            ranges: vec![pages].into(),
        };
        let began = Instant::now();
        loop {
            let reply = tester.probe()?.call(&event)?;
            if reply.status.code != Code::Busy || began.elapsed() > PATIENCE {
                return expect(reply, Code::Ok, "UNMAP").map(|_| ());
            }
        }
    }

    /// Checks that this disk may send `request`.
    fn look_at(&self, request: &PageRequest) -> Checked {
        ensure(
            || request.domain == self.space,
            || format!("a request for space {}", request.domain.0),
        )?;
        ensure(
            || request.pages.end.0 <= PAGES,
            || format!("a request for {:?}, past the end", request.pages),
        )
    }

    /// Maps the pages of `request`, and answers it.
    fn grant(&self, tester: &mut Tester, request: &PageRequest) -> Checked {
        self.map(tester, request.pages, request.access)?;
        answer(tester, request, ResponseCode::Success)
    }

    /// Grants every request until the read is done; returns its status and the requests.
    fn serve(&mut self, tester: &mut Tester) -> Result<(u8, Vec<PageRequest>), Ended> {
        let began = Instant::now();
        let mut asked = Vec::new();
        loop {
            if let Some(request) = tester.probe()?.request()? {
                self.look_at(&request)?;
                self.grant(tester, &request)?;
                asked.push(request);
            }
            if let Some(status) = self.disk.done()? {
                return Ok((status, asked));
            }
            ensure(
                || began.elapsed() < PATIENCE,
                || format!("a read is not done after {} answered requests", asked.len()),
            )?;
            std::thread::yield_now();
        }
    }

    /// The first request of a new read for its content; earlier ones are granted.
    fn content_request(&self, tester: &mut Tester) -> Result<PageRequest, Ended> {
        loop {
            let request = tester.probe()?.wait_request()?;
            self.look_at(&request)?;
            if !request.pages.intersect(READ).is_empty() && request.kind == RequestKind::Demand {
                return Ok(request);
            }
            self.grant(tester, &request)?;
        }
    }

    fn finish(&mut self, tester: &mut Tester) -> Checked {
        let (status, _) = self.serve(tester)?;
        ensure(
            || status == FINE,
            || format!("the read ended with {status}"),
        )
    }
}

fn respond(request: &PageRequest, code: ResponseCode) -> Event<'static> {
    let answer = Answer {
        id: request.id,
        code,
        tier: Tier::Zero,
        installed: 0,
        waited_ns: 0,
        handling_ns: 0,
    };
    Event::Respond {
        answers: vec![answer].into(),
    }
}

fn answer(tester: &mut Tester, request: &PageRequest, code: ResponseCode) -> Checked {
    tester.must(&respond(request, code), Code::Ok).map(|_| ())
}

fn asks_for_nothing(tester: &mut Tester) -> Checked {
    let request = tester.probe()?.request()?;
    ensure(|| request.is_none(), || format!("it asked: {request:?}"))
}

fn no_space(tester: &mut Tester) -> Checked {
    let mut disk = disk(tester)?;
    tester.probe()?.give_buffers(0, 8)?;
    disk.read(READ_PAGES)?;
    let status = disk.wait_done()?;
    ensure(|| status == FINE, || format!("a read ended with {status}"))?;
    asks_for_nothing(tester)
}

fn fault(tester: &mut Tester) -> Checked {
    let mut rig = Rig::new(tester)?;
    rig.disk.read(READ_PAGES)?;
    let request = rig.content_request(tester)?;
    ensure(
        || request.access == Access::Write,
        || "it asks to read pages that it is to write".to_owned(),
    )?;
    let space = rig.space;
    // Enough time for DMA that does not wait.
    for _ in 0..100 {
        tester.must(&Event::Standing { space, pages: None }, Code::Ok)?;
    }
    for page in READ.iter() {
        ensure(
            || rig.disk.is_hole(page).unwrap_or(false),
            || format!("page {page} was touched before it was mapped"),
        )?;
    }
    let early = rig.disk.done()?;
    ensure(|| early.is_none(), || "the read was done before".to_owned())?;
    rig.grant(tester, &request)?;
    rig.finish(tester)?;
    for page in READ.iter() {
        ensure(
            || !rig.disk.is_hole(page).unwrap_or(true),
            || format!("page {page} was not written though the read went well"),
        )?;
    }
    Ok(())
}

fn mapped(tester: &mut Tester) -> Checked {
    let mut rig = Rig::new(tester)?;
    let everything = FilePage(0).run(PAGES);
    rig.map(tester, everything, Access::Write)?;
    rig.disk.read(READ_PAGES)?;
    let status = rig.disk.wait_done()?;
    ensure(
        || status == FINE,
        || format!("the read ended with {status}"),
    )?;
    asks_for_nothing(tester)
}

fn unmapped_again(tester: &mut Tester) -> Checked {
    let mut rig = Rig::new(tester)?;
    rig.disk.read(READ_PAGES)?;
    rig.finish(tester)?;
    let page = CONTENT.next().single();
    rig.unmap(tester, page)?;
    rig.disk.read(READ_PAGES)?;
    let (status, asked) = rig.serve(tester)?;
    let asks = |asked: &[PageRequest]| {
        let for_it = |request: &PageRequest| request.pages.contains(page.start);
        asked.iter().any(for_it)
    };
    ensure(
        || status == FINE && asks(&asked),
        || format!("after UNMAP: status {status}, asked {asked:?}"),
    )?;
    let protect = Event::Protect {
        space: rig.space,
        ranges: vec![page].into(),
    };
    tester.must(&protect, Code::Ok)?;
    rig.disk.read(READ_PAGES)?;
    let (status, asked) = rig.serve(tester)?;
    ensure(
        || status == FINE && asks(&asked),
        || format!("after PROTECT: status {status}, asked {asked:?}"),
    )
}

fn race(tester: &mut Tester) -> Checked {
    let mut rig = Rig::new(tester)?;
    let space = rig.space;
    let mark = [0xa5; 64];
    for round in 0..RACES {
        rig.map(tester, READ, Access::Write)?;
        rig.map(tester, HEADER.single(), Access::Write)?;
        rig.disk.read(READ_PAGES)?;
        rig.unmap(tester, READ)?;
        for page in READ.iter() {
            rig.disk.put(page, &mark)?;
        }
        for _ in 0..4 {
            tester.must(&Event::Standing { space, pages: None }, Code::Ok)?;
        }
        for page in READ.iter() {
            let mut now = [0; 64];
            rig.disk.get(page, &mut now)?;
            ensure(
                || now == mark,
                || format!("page {page} was written after UNMAP was answered OK (round {round})"),
            )?;
        }
        rig.finish(tester)?;
    }
    Ok(())
}

fn standing(tester: &mut Tester) -> Checked {
    let mut rig = Rig::new(tester)?;
    let space = rig.space;
    let event = Event::Standing { space, pages: None };
    let count = tester.must(&event, Code::Ok)?.status.value;
    ensure(|| count > 0, || "no page is standing".to_owned())?;
    let pages = Some(FilePage(0).run(512));
    let mask = tester
        .must(&Event::Standing { space, pages }, Code::Ok)?
        .mask;
    ensure(
        || mask.is_some_and(|mask| mask.contains(FilePage(0))),
        || "the page of the ring is not in the mask".to_owned(),
    )?;
    let ring = Event::Unmap {
        space,
        ranges: vec![FilePage(0).single()].into(),
    };
    tester.must(&ring, Code::Standing)?;
    tester.must(&Event::UnmapAll { space }, Code::Ok)?;
    rig.disk.read(READ_PAGES)?;
    rig.finish(tester)
}

fn refused(tester: &mut Tester) -> Checked {
    let mut rig = Rig::new(tester)?;
    for code in [ResponseCode::InvalidRequest, ResponseCode::ResponseFailure] {
        rig.disk.read(READ_PAGES)?;
        let request = rig.content_request(tester)?;
        answer(tester, &request, code)?;
        // Its status must still be written.
        let (status, _) = rig.serve(tester)?;
        ensure(
            || status == IO_ERROR,
            || format!("the read ended with {status} though its pages were refused ({code:?})"),
        )?;
        rig.unmap(tester, READ)?;
    }
    rig.disk.read(READ_PAGES)?;
    rig.finish(tester)
}

fn answered_twice(tester: &mut Tester) -> Checked {
    let mut rig = Rig::new(tester)?;
    rig.disk.read(READ_PAGES)?;
    let request = rig.content_request(tester)?;
    rig.grant(tester, &request)?;
    let again = respond(&request, ResponseCode::Success);
    tester.must(&again, Code::Invalid)?;
    rig.finish(tester)
}

fn no_buffer(tester: &mut Tester) -> Checked {
    let mut disk = disk(tester)?;
    disk.read(READ_PAGES)?;
    disk.wait_done()?;
    let space = tester.create_named(disk.name()?, PAGES)?;
    disk.read(READ_PAGES)?;
    for _ in 0..100 {
        tester.must(&Event::Standing { space, pages: None }, Code::Ok)?;
    }
    let early = disk.done()?;
    ensure(
        || early.is_none(),
        || "the read was done without asking".to_owned(),
    )?;
    // One at a time is enough.
    tester.probe()?.give_buffers(0, 1)?;
    let mut rig = Rig { disk, space };
    rig.finish(tester)
}

fn driver_returns(tester: &mut Tester) -> Checked {
    let mut rig = Rig::new(tester)?;
    rig.disk.read(READ_PAGES)?;
    let request = rig.content_request(tester)?;
    tester.reconnect()?;
    tester.must(&Event::Begin, Code::Ok)?;
    tester.probe()?.give_buffers(0, 64)?;
    rig.space = tester.create_named(rig.disk.name()?, PAGES)?;
    asks_for_nothing(tester)?;
    tester.ready()?;
    let again = rig.content_request(tester)?;
    ensure(
        || again.id == request.id && again.pages == request.pages,
        || format!("{:?} was asked for, then {:?}", request.id, again.id),
    )?;
    rig.grant(tester, &again)?;
    rig.finish(tester)
}

fn driver_away(tester: &mut Tester) -> Checked {
    let mut rig = Rig::new(tester)?;
    rig.disk.read(READ_PAGES)?;
    rig.finish(tester)?;
    tester.hang_up();
    rig.disk.read(READ_PAGES)?;
    let status = rig.disk.wait_done()?;
    ensure(
        || status == FINE,
        || format!("a read of mapped pages ended with {status} without a driver"),
    )?;
    // One page more than are mapped.
    rig.disk.read(READ_PAGES + 1)?;
    tester.reconnect()?;
    let early = rig.disk.done()?;
    ensure(
        || early.is_none(),
        || "a read of an unmapped page went on without a driver".to_owned(),
    )?;
    tester.must(&Event::Begin, Code::Ok)?;
    tester.probe()?.give_buffers(0, 64)?;
    rig.space = tester.create_named(rig.disk.name()?, PAGES)?;
    tester.ready()?;
    rig.finish(tester)
}

fn released(tester: &mut Tester) -> Checked {
    let mut rig = Rig::new(tester)?;
    let event = Event::Destroy {
        space: rig.space,
        farewell: Farewell::Release,
    };
    tester.must(&event, Code::Ok)?;
    rig.disk.read(READ_PAGES)?;
    let status = rig.disk.wait_done()?;
    ensure(
        || status == FINE,
        || format!("the read ended with {status}"),
    )?;
    asks_for_nothing(tester)
}
