// SPDX-License-Identifier: Apache-2.0
//! The rules of VPRI 5.1, the life cycle, and page requests; checked against a naive model in
//! [`model`].

use super::*;
use crate::wire::{Answer, Code, Config, Event, Farewell, Reply, Status};
use pagetide_addr::{
    Access, DeviceId, DomainId, FileKey, FilePage, FileRange, FileSection, Marks, PAGE_BYTES,
    PageRequest, PageResponse, QueueId, RequestId, RequestKind, ResponseCode,
};
use pagetide_sys::memory_file::GuestFile;
use pagetide_vpri::{
    Attribute, DmaDomain, DomainError, DomainTable, EnginePort, Lease, LookUp, RamWindow,
};
use std::{os::fd::AsFd, sync::Arc};

mod model;
mod server;
mod turns;

/// Two sections and some more pages.
const PAGES: u64 = 1100;

pub(super) fn limits() -> Config {
    Config {
        spaces_max: 4,
        requests_max: 8,
        ranges_max: 256,
        lease_wait_us: 20,
        generation: 1,
    }
}

/// Records what the core sends to the engines.
#[derive(Default)]
pub(super) struct Engines {
    pub responses: Vec<(SourceNo, PageResponse)>,
    pub bounce: Option<(u64, u64)>,
}

impl DeviceSide for Engines {
    fn respond(&mut self, source: SourceNo, response: PageResponse) {
        self.responses.push((source, response));
    }

    fn land(&mut self, area: Option<(u64, u64)>) -> Result<(), Code> {
        if area.is_some_and(|(_, slots)| slots == 0) {
            return Err(Code::Invalid);
        }
        self.bounce = area;
        Ok(())
    }

    fn is_bounce(&self, slot: u32, count: u64) -> bool {
        let end = u64::from(slot) + count;
        self.bounce.is_some_and(|(_, slots)| end <= slots)
    }
}

struct Rig {
    table: Arc<DomainTable>,
    core: FunctionCore,
    engines: Engines,
    file: GuestFile,
}

impl Rig {
    fn new() -> Self {
        let table = Arc::new(DomainTable::new(1));
        Self {
            core: FunctionCore::new(Arc::clone(&table), limits()),
            table,
            engines: Engines::default(),
            file: GuestFile::new_memfd("ram", PAGES * PAGE_BYTES).unwrap(),
        }
    }

    /// A driver that is ready, with a space for the rig's file.
    fn with_space() -> (Self, DomainId) {
        let mut rig = Self::new();
        rig.tell(Event::Begin);
        let space = rig.create();
        rig.tell(Event::Ready);
        (rig, space)
    }

    fn name(&self) -> FileKey {
        self.file.key().unwrap()
    }

    fn ask(&mut self, event: &Event<'_>) -> Reply {
        self.core.event(event, &mut self.engines)
    }

    fn code(&mut self, event: &Event<'_>) -> Code {
        self.ask(event).status.code
    }

    fn tell(&mut self, event: Event<'_>) {
        assert_eq!(self.code(&event), Code::Ok, "{event:?}");
    }

    fn create(&mut self) -> DomainId {
        let name = self.name();
        let page_count = PAGES;
        let reply = self.ask(&Event::Create { name, page_count });
        assert_eq!(reply.status.code, Code::Ok);
        DomainId(u32::try_from(reply.status.value).unwrap())
    }

    /// A device of this process maps the file.
    fn open(&self) -> Arc<RamWindow> {
        self.table.map_whole(self.file.as_fd()).unwrap()
    }

    fn map(&mut self, space: DomainId, range: FileRange, access: Access) {
        let ranges = vec![range].into();
        self.tell(Event::Map {
            space,
            access,
            ranges,
        });
    }

    fn request(&mut self, id: u64, space: DomainId, page: u64) -> Option<PageRequest> {
        let request = request(id, space, page);
        let source = SourceNo(0);
        self.core.request(source, request, &mut self.engines)
    }

    fn respond(&mut self, ids: &[u64]) -> Status {
        let answer = |id: &u64| {
            let request = request(*id, DomainId(0), 0);
            Answer::from(&PageResponse::to(&request, ResponseCode::Success))
        };
        let answers = ids.iter().map(answer).collect::<Vec<_>>().into();
        self.ask(&Event::Respond { answers }).status
    }

    fn answered(&mut self) -> Vec<(u64, ResponseCode)> {
        let responses = std::mem::take(&mut self.engines.responses);
        let answer = |(_, response): (SourceNo, PageResponse)| (response.id.0, response.code);
        responses.into_iter().map(answer).collect()
    }

    fn unsent(&mut self) -> Vec<u64> {
        std::iter::from_fn(|| self.core.next_unsent())
            .map(|request| request.id.0)
            .collect()
    }
}

pub(super) fn request(id: u64, domain: DomainId, page: u64) -> PageRequest {
    let pages = FilePage(page).single();
    PageRequest::demand(
        RequestId(id),
        DeviceId(1),
        QueueId(7),
        domain,
        pages,
        Access::Write,
    )
}

fn range(first: u64, end: u64) -> FileRange {
    FileRange::new(FilePage(first), FilePage(end))
}

fn attributes(domain: &DmaDomain) -> Vec<Attribute> {
    let bitmap = domain.attributes().bitmap();
    let pages = (0..bitmap.page_count()).map(FilePage);
    pages.map(|page| bitmap.attribute(page)).collect()
}

fn all_are(domain: &DmaDomain, attribute: Attribute) -> bool {
    attributes(domain).iter().all(|there| *there == attribute)
}

fn lease(domain: &DmaDomain, page: u64, access: Access) -> Option<Lease> {
    domain
        .attributes()
        .lease(0, FilePage(page).single(), access)
}

fn release(domain: &DmaDomain, lease: Lease) {
    domain.attributes().release(0, lease);
}

#[test]
fn r1_space_begins_unmapped_in_the_step_that_creates_it_and_ends_in_one_step() {
    let mut rig = Rig::new();
    rig.tell(Event::Begin);
    rig.tell(Event::Ready);
    let window = rig.open();
    let domain = Arc::clone(window.domain());
    assert!(all_are(&domain, Attribute::ReadWrite));
    let space = rig.create();
    assert!(all_are(&domain, Attribute::Unmapped));
    rig.map(space, range(0, 3), Access::Read);
    rig.tell(Event::Destroy {
        space,
        farewell: Farewell::Release,
    });
    assert!(all_are(&domain, Attribute::ReadWrite));
    let space = rig.create();
    rig.map(space, range(0, PAGES), Access::Write);
    rig.tell(Event::Destroy {
        space,
        farewell: Farewell::Retire,
    });
    assert!(all_are(&domain, Attribute::Unmapped));
    assert_eq!(rig.code(&Event::UnmapAll { space }), Code::NoSpace);
}

#[test]
fn r2_unmap_is_done_only_when_no_dma_goes_on_and_allows_none_from_then_on() {
    let (mut rig, space) = Rig::with_space();
    let window = rig.open();
    let domain = Arc::clone(window.domain());
    rig.map(space, range(0, PAGES), Access::Write);
    let unmap = |first, end| Event::Unmap {
        space,
        ranges: vec![range(first, end)].into(),
    };
    let dma = lease(&domain, 600, Access::Write).unwrap();
    let busy = rig.ask(&unmap(590, 610)).status;
    assert_eq!((busy.code, busy.detail, busy.value), (Code::Busy, 1, 1));
    assert!(lease(&domain, 600, Access::Read).is_none());
    let invalidate = Event::Invalidate {
        space,
        ranges: vec![range(590, 610)].into(),
    };
    assert_eq!(rig.code(&invalidate), Code::Busy);
    release(&domain, dma);
    assert_eq!(rig.code(&invalidate), Code::Ok);
    assert_eq!(rig.code(&unmap(0, 2)), Code::Ok);
    let gone = |page: u64| page < 2 || (590..610).contains(&page);
    for (page, attribute) in (0..).zip(attributes(&domain)) {
        assert_eq!(attribute == Attribute::Unmapped, gone(page), "{page}");
    }
}

#[test]
fn r2_protected_page_is_read_but_not_written_and_an_unmapped_one_stays_so() {
    let (mut rig, space) = Rig::with_space();
    let window = rig.open();
    let domain = Arc::clone(window.domain());
    rig.map(space, range(0, 4), Access::Write);
    rig.tell(Event::Protect {
        space,
        ranges: vec![range(1, 6)].into(),
    });
    let expected = [
        Attribute::ReadWrite,
        Attribute::ReadOnly,
        Attribute::ReadOnly,
        Attribute::ReadOnly,
        Attribute::Unmapped,
    ];
    assert_eq!(attributes(&domain)[..5], expected);
    assert!(lease(&domain, 1, Access::Write).is_none());
    let reads = lease(&domain, 1, Access::Read).unwrap();
    release(&domain, reads);
}

#[test]
fn r3_dma_that_was_looked_up_keeps_its_page_until_it_is_done() {
    let (mut rig, space) = Rig::with_space();
    let window = rig.open();
    let domain = Arc::clone(window.domain());
    rig.map(space, range(0, 1), Access::Write);
    let dma = lease(&domain, 0, Access::Write).unwrap();
    let whole = Event::Invalidate {
        space,
        ranges: Vec::new().into(),
    };
    rig.tell(Event::UnmapAll { space });
    assert_eq!(rig.code(&whole), Code::Busy, "its page must not go yet");
    release(&domain, dma);
    assert_eq!(rig.code(&whole), Code::Ok);
}

#[test]
fn section_with_a_standing_page_is_left_and_the_others_are_done() {
    let (mut rig, space) = Rig::with_space();
    let window = rig.open();
    let domain = Arc::clone(window.domain());
    rig.map(space, range(0, PAGES), Access::Write);
    assert!(domain.attributes().wire(FilePage(700).single()));
    let dma = lease(&domain, 5, Access::Read).unwrap();
    let status = rig.ask(&Event::Unmap {
        space,
        ranges: vec![range(0, PAGES)].into(),
    });
    let status = status.status;
    assert_eq!(
        (status.code, status.detail, status.value),
        (Code::Standing, 1, 1),
        "standing is told before busy"
    );
    release(&domain, dma);
    let stays = |page: u64| (512..1024).contains(&page);
    for (page, attribute) in (0..).zip(attributes(&domain)) {
        assert_eq!(attribute == Attribute::ReadWrite, stays(page), "{page}");
    }
    rig.tell(Event::UnmapAll { space });
    assert_eq!(attributes(&domain)[700], Attribute::ReadWrite);
    assert_eq!(attributes(&domain)[701], Attribute::Unmapped);
    let pages = Some(range(600, 800));
    let reply = rig.ask(&Event::Standing { space, pages });
    let mask = reply.mask.unwrap();
    assert!(mask.pages(FileSection(1)).eq([FilePage(700)]));
    let reply = rig.ask(&Event::Standing { space, pages: None });
    assert_eq!((reply.status.value, reply.mask), (1, None));
}

#[test]
fn memory_is_unmapped_until_a_driver_is_ready_and_read_write_from_then_on() {
    let mut rig = Rig::new();
    let window = rig.open();
    let domain = Arc::clone(window.domain());
    assert!(all_are(&domain, Attribute::Unmapped));
    rig.tell(Event::Begin);
    assert!(all_are(&domain, Attribute::Unmapped));
    assert_eq!(rig.request(1, domain.id(), 3), None);
    assert!(rig.answered().is_empty(), "nobody knows yet");
    rig.tell(Event::Ready);
    assert!(all_are(&domain, Attribute::ReadWrite));
    assert_eq!(rig.answered(), [(1, ResponseCode::Success)]);
    assert_eq!(rig.request(2, domain.id(), 3), None);
    assert_eq!(rig.answered(), [(2, ResponseCode::Success)], "it was late");
}

#[test]
fn space_of_a_driver_that_died_stays_as_it_is_until_the_next_has_taken_it_up() {
    let (mut rig, space) = Rig::with_space();
    let window = rig.open();
    let domain = Arc::clone(window.domain());
    rig.map(space, range(0, 2), Access::Write);
    rig.core.hang_up(&mut rig.engines);
    assert_eq!(attributes(&domain)[1], Attribute::ReadWrite);
    rig.tell(Event::Begin);
    let unmap = Event::UnmapAll { space };
    assert_eq!(rig.code(&unmap), Code::NoSpace, "not its own yet");
    assert_eq!(attributes(&domain)[1], Attribute::ReadWrite);
    assert_eq!(rig.create(), space, "the same number");
    assert!(all_are(&domain, Attribute::Unmapped));
    rig.tell(Event::Ready);
    assert!(all_are(&domain, Attribute::Unmapped));
}

#[test]
fn space_that_the_next_driver_does_not_create_is_released_when_it_is_ready() {
    let (mut rig, space) = Rig::with_space();
    let window = rig.open();
    let domain = Arc::clone(window.domain());
    assert_eq!(rig.request(1, space, 0).unwrap().id, RequestId(1));
    rig.tell(Event::Begin);
    rig.tell(Event::Ready);
    assert!(all_are(&domain, Attribute::ReadWrite));
    assert!(!domain.is_attached());
    assert_eq!(rig.answered(), [(1, ResponseCode::Success)]);
}

#[test]
fn request_that_a_dead_driver_left_is_sent_to_the_next_and_answered_once() {
    let (mut rig, space) = Rig::with_space();
    assert!(rig.request(1, space, 0).is_some());
    assert!(rig.request(2, space, 1).is_some());
    assert_eq!(rig.respond(&[1]).code, Code::Ok);
    rig.core.hang_up(&mut rig.engines);
    assert_eq!(rig.request(3, space, 2), None);
    rig.tell(Event::Begin);
    rig.create();
    assert_eq!(rig.respond(&[2]).code, Code::Invalid, "it was not asked");
    assert!(rig.unsent().is_empty());
    rig.tell(Event::Ready);
    assert_eq!(rig.unsent(), [2, 3]);
    assert_eq!(rig.respond(&[3, 2]).code, Code::Ok);
    let success = |id| (id, ResponseCode::Success);
    assert_eq!(rig.answered(), [1, 3, 2].map(success));
    assert_eq!(rig.core.outstanding(), 0);
    assert_eq!(rig.core.figures().requests_sent_again, 2);
}

#[test]
fn answer_that_is_unknown_or_given_twice_is_invalid_and_the_others_count() {
    let (mut rig, space) = Rig::with_space();
    for id in 1..4 {
        assert!(rig.request(id, space, id).is_some());
    }
    let status = rig.respond(&[1, 99, 1, 2]);
    assert_eq!((status.code, status.detail), (Code::Invalid, 32 + 40));
    assert_eq!(rig.respond(&[2]).code, Code::Invalid);
    assert_eq!(rig.core.figures().unknown_answers, 3);
    assert_eq!(rig.core.outstanding(), 1);
    let answers = rig.engines.responses.iter();
    assert!(answers.clone().all(|(_, r)| r.queue == QueueId(7)));
    assert!(answers.map(|(_, r)| r.id.0).eq([1, 2]));
}

#[test]
fn barred_memory_is_unmapped_and_its_requests_wait_until_a_driver_takes_it_up() {
    let (mut rig, space) = Rig::with_space();
    let window = rig.open();
    let domain = Arc::clone(window.domain());
    rig.map(space, range(0, PAGES), Access::Write);
    rig.tell(Event::Begin);
    let name = rig.name();
    rig.tell(Event::Bar { name });
    rig.tell(Event::Ready);
    assert!(all_are(&domain, Attribute::Unmapped));
    assert_eq!(rig.request(1, space, 0), None);
    let bytes = PAGES * PAGE_BYTES;
    assert!(rig.table.open(name, bytes).is_err());
    let page_count = PAGES;
    assert_eq!(rig.code(&Event::Create { name, page_count }), Code::Exists);
    assert!(rig.answered().is_empty());
    rig.tell(Event::Begin);
    assert_eq!(rig.create(), space);
    rig.tell(Event::Ready);
    assert_eq!(rig.unsent(), [1]);
    assert!(rig.table.open(name, bytes).is_ok());
}

#[test]
fn bar_of_an_earlier_session_that_is_not_said_again_is_lifted() {
    let mut rig = Rig::new();
    let window = rig.open();
    let domain = Arc::clone(window.domain());
    rig.tell(Event::Begin);
    let name = rig.name();
    rig.tell(Event::Bar { name });
    rig.tell(Event::Ready);
    assert!(all_are(&domain, Attribute::Unmapped));
    rig.tell(Event::Begin);
    assert!(all_are(&domain, Attribute::Unmapped));
    rig.tell(Event::Ready);
    assert!(all_are(&domain, Attribute::ReadWrite));
}

#[test]
fn space_released_before_ready_is_unmapped_until_ready_and_longer_if_it_is_barred() {
    for then_barred in [true, false] {
        let (mut rig, space) = Rig::with_space();
        let window = rig.open();
        let domain = Arc::clone(window.domain());
        rig.map(space, range(0, 2), Access::Write);
        // A driver that recovers the space, and fails at the next step.
        rig.tell(Event::Begin);
        let space = rig.create();
        rig.map(space, range(0, 1), Access::Write);
        rig.tell(Event::Destroy {
            space,
            farewell: Farewell::Release,
        });
        assert!(all_are(&domain, Attribute::Unmapped), "pages may be away");
        assert!(!domain.is_attached());
        assert_eq!(rig.request(1, space, 9), None);
        assert!(rig.answered().is_empty(), "nobody knows yet");
        let name = rig.name();
        if then_barred {
            rig.tell(Event::Bar { name });
        }
        rig.tell(Event::Ready);
        if then_barred {
            assert!(all_are(&domain, Attribute::Unmapped));
            assert!(rig.answered().is_empty(), "barred");
        } else {
            assert!(all_are(&domain, Attribute::ReadWrite));
            assert_eq!(rig.answered(), [(1, ResponseCode::Success)]);
        }
    }
}

#[test]
fn device_without_look_up_waits_for_ready_and_keeps_its_memory_from_a_later_driver() {
    let mut rig = Rig::new();
    let window = rig.open();
    let port = || EnginePort::new(Arc::clone(&window), 0, LookUp::Off);
    let is_not_known = || matches!(port(), Err(DomainError::NotKnown(_)));
    assert!(is_not_known(), "no driver has said anything");
    rig.tell(Event::Begin);
    assert!(is_not_known());
    assert!(EnginePort::new(Arc::clone(&window), 0, LookUp::On).is_ok());
    rig.tell(Event::Ready);
    let known = port().unwrap();
    rig.core.hang_up(&mut rig.engines);
    rig.tell(Event::Begin);
    let (name, page_count) = (rig.name(), PAGES);
    let create = Event::Create { name, page_count };
    assert_eq!(rig.code(&create), Code::Unsupported, "it looks nothing up");
    assert!(is_not_known(), "a second one is not permitted any more");
    drop(known);
    let space = rig.create();
    assert!(matches!(port(), Err(DomainError::LookUpNeeded(_))));
    rig.tell(Event::Destroy {
        space,
        farewell: Farewell::Release,
    });
    assert!(is_not_known(), "pages of it may be away");
    rig.tell(Event::Bar { name });
    rig.tell(Event::Ready);
    assert!(matches!(port(), Err(DomainError::Barred(_))));
    // The next driver does not name it.
    rig.tell(Event::Begin);
    rig.tell(Event::Ready);
    assert!(port().is_ok());
}

#[test]
fn memory_with_a_drivers_rings_is_no_space_and_a_space_takes_no_rings_as_long_as_pages_may_be_away()
{
    let mut rig = Rig::new();
    let use_it = |rig: &Rig| rig.table.use_as_own(rig.name(), PAGES * PAGE_BYTES);
    rig.tell(Event::Begin);
    let rings = use_it(&rig).unwrap();
    let (name, page_count) = (rig.name(), PAGES);
    let create = Event::Create { name, page_count };
    assert_eq!(rig.code(&create), Code::Unsupported);
    drop(rings);
    let space = rig.create();
    let is_refused = |rig: &Rig| matches!(use_it(rig), Err(DomainError::OwnInPaged(_)));
    assert!(is_refused(&rig));
    rig.tell(Event::Ready);
    assert!(is_refused(&rig));
    // The host dies, and its pages stay away.
    rig.core.hang_up(&mut rig.engines);
    assert!(is_refused(&rig));
    rig.tell(Event::Begin);
    assert_eq!(rig.create(), space);
    rig.tell(Event::Ready);
    rig.tell(Event::Destroy {
        space,
        farewell: Farewell::Release,
    });
    assert!(use_it(&rig).is_ok());
}

#[test]
fn device_without_look_up_has_its_port_at_once_where_the_host_is_in_the_process() {
    let file = GuestFile::new_memfd("ram", PAGES * PAGE_BYTES).unwrap();
    let table = DomainTable::new(1);
    let window = table.map_whole(file.as_fd()).unwrap();
    assert!(EnginePort::new(Arc::clone(&window), 0, LookUp::Off).is_ok());
    window.domain().attach().unwrap();
    let refused = EnginePort::new(window, 0, LookUp::Off);
    assert!(matches!(refused, Err(DomainError::LookUpNeeded(_))));
}

#[test]
fn request_for_memory_that_was_retired_is_invalid() {
    let (mut rig, space) = Rig::with_space();
    let _device = rig.open();
    rig.tell(Event::Destroy {
        space,
        farewell: Farewell::Retire,
    });
    assert_eq!(rig.request(1, space, 0), None);
    assert_eq!(rig.answered(), [(1, ResponseCode::InvalidRequest)]);
}

#[test]
fn request_with_an_id_that_is_outstanding_fails_and_the_first_one_goes_on() {
    let (mut rig, space) = Rig::with_space();
    assert!(rig.request(1, space, 0).is_some());
    assert_eq!(rig.request(1, space, 1), None);
    assert_eq!(rig.answered(), [(1, ResponseCode::ResponseFailure)]);
    assert_eq!(rig.respond(&[1]).code, Code::Ok);
}

#[test]
fn overwrite_out_of_a_bounce_area_that_is_no_more_is_answered_with_nothing_installed() {
    let (mut rig, space) = Rig::with_space();
    let overwrite = |id| PageRequest {
        kind: RequestKind::Overwrite { slot: 3 },
        ..request(id, space, 0)
    };
    let ask = |rig: &mut Rig, id| {
        let source = SourceNo(0);
        rig.core.request(source, overwrite(id), &mut rig.engines)
    };
    let bounce = |slots| Event::Bounce { address: 0, slots };
    assert_eq!(ask(&mut rig, 1), None, "there is no area");
    rig.tell(bounce(4));
    assert!(ask(&mut rig, 2).is_some());
    assert_eq!(rig.code(&bounce(0)), Code::Invalid);
    rig.tell(Event::Begin);
    rig.create();
    rig.tell(bounce(3));
    rig.tell(Event::Ready);
    assert!(rig.unsent().is_empty());
    let responses = rig.engines.responses.iter();
    assert!(
        responses
            .clone()
            .all(|(_, response)| response.installed == 0)
    );
    assert!(responses.map(|(_, r)| r.id.0).eq([1, 2]));
}

#[test]
fn without_a_driver_only_what_needs_one_waits_for_it() {
    let (mut rig, space) = Rig::with_space();
    rig.open();
    rig.map(space, range(0, 1), Access::Write);
    rig.core.hang_up(&mut rig.engines);
    let of_kind = |id, page, kind| PageRequest {
        kind,
        ..request(id, space, page)
    };
    let alias_fault = |id, page| of_kind(id, page, RequestKind::AliasFault);
    for asked in [
        of_kind(1, 0, RequestKind::Overwrite { slot: 0 }),
        alias_fault(2, 0),
        alias_fault(3, 1),
        request(4, space, 1),
    ] {
        let sent = rig.core.request(SourceNo(0), asked, &mut rig.engines);
        assert_eq!(sent, None);
    }
    // The page that may be touched is a hole of the guest's; for the other this is not known.
    let zeros = ResponseCode::InvalidRequest;
    assert_eq!(
        rig.answered(),
        [(1, ResponseCode::Success), (2, zeros)],
        "the others wait"
    );
}

#[test]
fn message_out_of_its_session_or_its_bounds_is_invalid_and_changes_nothing() {
    let mut rig = Rig::new();
    let name = rig.name();
    assert_eq!(rig.code(&Event::Ready), Code::Invalid);
    assert_eq!(rig.code(&Event::Bar { name }), Code::Invalid);
    rig.tell(Event::Begin);
    let space = rig.create();
    rig.tell(Event::Ready);
    assert_eq!(rig.code(&Event::Ready), Code::Invalid);
    let map = |ranges: Vec<FileRange>| Event::Map {
        space,
        access: Access::Write,
        ranges: ranges.into(),
    };
    let status = rig.ask(&map(vec![range(0, 1), range(5, PAGES + 1)])).status;
    assert_eq!((status.code, status.detail), (Code::Invalid, 32 + 16));
    let status = rig.ask(&map(vec![range(0, 1); 257])).status;
    assert_eq!((status.code, status.detail), (Code::Invalid, 8));
    let window = rig.open();
    let domain = Arc::clone(window.domain());
    assert!(all_are(&domain, Attribute::Unmapped));
    let pages = range(1099, 1101);
    let marks = Marks::Keep;
    let touched = Event::Touched {
        space,
        pages,
        marks,
    };
    assert_eq!(rig.code(&touched), Code::Invalid);
    assert_eq!(rig.core.figures().invalid_events, 6);
}

#[test]
fn create_is_refused_twice_beyond_the_limit_and_with_another_length_than_the_device_has() {
    let (mut rig, _) = Rig::with_space();
    let name = rig.name();
    let page_count = PAGES;
    assert_eq!(rig.code(&Event::Create { name, page_count }), Code::Exists);
    let other = |ino| FileKey { dev: 0, ino };
    for ino in 1..4 {
        rig.tell(Event::Create {
            name: other(ino),
            page_count,
        });
    }
    let name = other(4);
    assert_eq!(rig.code(&Event::Create { name, page_count }), Code::Full);
    let _device = rig.open();
    rig.tell(Event::Begin);
    let name = rig.name();
    let page_count = PAGES - 1;
    let status = rig.ask(&Event::Create { name, page_count }).status;
    assert_eq!((status.code, status.detail), (Code::Invalid, 40));
    let page_count = u64::MAX / 8;
    assert_eq!(rig.code(&Event::Create { name, page_count }), Code::Invalid);
    // No device has this one mapped, so its name may now belong to other memory.
    rig.tell(Event::Create {
        name: other(1),
        page_count: 7,
    });
}

#[test]
fn pages_that_dma_has_touched_are_told_and_forgotten() {
    let (mut rig, space) = Rig::with_space();
    let window = rig.open();
    window.copy_to(600 * PAGE_BYTES, &[1]).unwrap();
    let mut touched = |marks| {
        let pages = range(512, 1024);
        let event = Event::Touched {
            space,
            pages,
            marks,
        };
        let mask = rig.ask(&event).mask.unwrap();
        mask.pages(FileSection(1))
            .map(|page| page.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(touched(Marks::Keep), [600]);
    assert_eq!(touched(Marks::Forget), [600]);
    assert!(touched(Marks::Keep).is_empty());
}
