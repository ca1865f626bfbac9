// SPDX-License-Identifier: Apache-2.0
//! The driver against a device that does what the test says, right or wrong.

use super::*;
use crate::fake::{Answers, FEATURES, Fake, eventually, good_config};
use crate::wire::{self, Code, Reply, Status, feature};
use pagetide_addr::{
    Access, DeviceId, FilePage, FilePageSet, FileRange, FileSection, Marks, PAGE_BYTES, QueueId,
    RequestId, RequestKind, ResponseCode, Tier,
};
use std::{os::fd::AsFd, os::unix::net::UnixListener};

const PAGES: u64 = 2048;
const LONG: Duration = Duration::from_secs(20);
/// Number of the first space that the fake has to create: earlier events are BEGIN and BOUNCE.
const FIRST: DomainId = DomainId(3);

struct Rig {
    driver: Arc<Driver>,
    dir: tempfile::TempDir,
    file: std::fs::File,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bell = Arc::new(Doorbell::new().unwrap());
        let driver = Driver::start(&dir.path().join("vpri.sock"), bell).unwrap();
        let file = tempfile::tempfile().unwrap();
        Self { driver, dir, file }
    }

    /// With a device that answers everything correctly.
    fn connected() -> (Self, Fake) {
        let rig = Self::new();
        let fake = rig.device();
        (rig, fake)
    }

    fn device(&self) -> Fake {
        let fake = Fake::listen(self.dir.path(), Answers::good);
        self.driver.wait_connected(LONG).unwrap();
        fake
    }

    fn open(&self, ino: u64) -> Arc<dyn IoSpace> {
        let opened = self
            .driver
            .open(self.file.as_fd(), key(ino), PAGES * PAGE_BYTES);
        opened.unwrap()
    }

    fn attached(&self, ino: u64) -> Arc<dyn IoSpace> {
        let space = self.open(ino);
        space.attach().unwrap();
        space
    }

    fn next_request(&self) -> PageRequest {
        let source = self.driver.source();
        let mut request = None;
        eventually("a page request", || {
            request = source.next();
            request.is_some()
        });
        request.unwrap()
    }
}

fn key(ino: u64) -> FileKey {
    FileKey { dev: 7, ino }
}

fn pages(start: u64, end: u64) -> FileRange {
    FileRange::new(FilePage(start), FilePage(end))
}

fn some_pages() -> FilePageSet {
    let mut set = FilePageSet::of_range(FileSection(1), pages(520, 530));
    set.insert(FilePage(700));
    set
}

fn demand(id: u64, space: DomainId) -> PageRequest {
    PageRequest::demand(
        RequestId(id),
        DeviceId(9),
        QueueId(2),
        space,
        pages(3, 5),
        Access::Write,
    )
}

/// Number that the fake has given to the space created last.
fn last_created(fake: &Fake) -> DomainId {
    let seen = fake.seen();
    let is_create = |event: &Event<'_>| matches!(event, Event::Create { .. });
    let position = seen.iter().rposition(is_create).unwrap();
    DomainId(u32::try_from(position + 1).unwrap())
}

fn answers(fake: &Fake) -> Vec<wire::Answer> {
    let mut found = Vec::new();
    for event in fake.seen() {
        if let Event::Respond { answers } = event {
            found.extend(answers.iter().copied());
        }
    }
    found
}

fn eventually_answers(fake: &Fake, count: usize) -> Vec<wire::Answer> {
    eventually("answers", || answers(fake).len() >= count);
    answers(fake)
}

#[test]
fn device_that_comes_late_is_told_what_the_host_said_before() {
    let rig = Rig::new();
    let space = rig.attached(1);
    let gone = rig.attached(2);
    gone.detach();
    let retired = rig.attached(3);
    rig.driver.retire(&*retired);
    rig.driver.bar(key(4));
    rig.driver.all_known();
    assert!(!space.unmap(FileSection(1), &some_pages()), "no device");
    let fake = rig.device();
    let create = |ino| Event::Create {
        name: key(ino),
        page_count: PAGES,
    };
    let seen = fake.seen();
    assert_eq!(seen[0], Event::Begin);
    assert!(matches!(seen[1], Event::Bounce { slots: 1024, .. }));
    assert_eq!(seen[2], create(1));
    assert_eq!(seen[3], Event::Bar { name: key(4) });
    assert_eq!(seen[4], create(3));
    let destroyed = Event::Destroy {
        space: DomainId(5),
        farewell: Farewell::Retire,
    };
    assert_eq!(seen[5], destroyed);
    assert_eq!(seen[6], Event::Ready);
    let settle = Event::Invalidate {
        space: FIRST,
        ranges: Vec::new().into(),
    };
    assert_eq!(seen[7..], [settle]);
    assert_eq!(rig.driver.eviction_blocker(), None);
    assert_eq!(rig.driver.processes(), [std::process::id()]);
}

#[test]
fn everything_asked_of_a_space_reaches_the_device_in_the_order_it_was_asked() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    space.unmap_all();
    space.grant(pages(0, 4), Access::Read);
    assert!(space.unmap(FileSection(1), &some_pages()));
    space.grant(pages(520, 521), Access::Write);
    assert!(space.forbid_writes(FileSection(1), &some_pages()));
    assert!(!space.is_any_leased());
    assert!(space.standing_in(FileSection(0)).is_empty());
    assert_eq!(space.standing_pages(), 0);
    space
        .touched(pages(500, 520), Marks::Forget, &mut |_| ())
        .unwrap();
    space.detach();
    let runs: Vec<FileRange> = vec![pages(520, 530), pages(700, 701)];
    let map = |range, access| Event::Map {
        space: FIRST,
        access,
        ranges: vec![range].into(),
    };
    let touched = |pages| Event::Touched {
        space: FIRST,
        pages,
        marks: Marks::Forget,
    };
    let standing = |pages| Event::Standing {
        space: FIRST,
        pages,
    };
    let expected = [
        Event::UnmapAll { space: FIRST },
        map(pages(0, 4), Access::Read),
        Event::Unmap {
            space: FIRST,
            ranges: runs.clone().into(),
        },
        map(pages(520, 521), Access::Write),
        Event::Protect {
            space: FIRST,
            ranges: runs.into(),
        },
        Event::Invalidate {
            space: FIRST,
            ranges: Vec::new().into(),
        },
        standing(Some(pages(0, 512))),
        standing(None),
        touched(pages(500, 512)),
        touched(pages(512, 520)),
        Event::Destroy {
            space: FIRST,
            farewell: Farewell::Release,
        },
    ];
    assert_eq!(fake.seen()[3..], expected);
    assert!(!space.unmap(FileSection(1), &some_pages()), "given back");
}

#[test]
fn restriction_counts_as_done_only_if_the_device_says_so() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    for code in Code::ALL {
        fake.follow(move |_, _| Answers::Reply(Status::of(code).into()));
        let done = code == Code::Ok;
        assert_eq!(space.unmap(FileSection(1), &some_pages()), done, "{code:?}");
        let protected = space.forbid_writes(FileSection(1), &some_pages());
        assert_eq!(protected, done, "{code:?}");
        let is_leased = !done && code != Code::Unsupported;
        assert_eq!(space.is_any_leased(), is_leased, "{code:?}");
        assert_eq!(space.watch().is_err(), code == Code::Unsupported);
        assert!(space.standing_in(FileSection(1)).is_empty(), "no mask");
        let looked = space.touched(pages(0, 1), Marks::Keep, &mut |_| ());
        assert!(looked.is_err(), "no mask");
    }
    assert!(rig.driver.is_connected());
}

#[test]
fn space_that_is_busy_when_it_is_to_be_watched_is_asked_again_by_rounds_until_it_is_watched() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    let busy = |event: &Event<'static>, number| match event {
        Event::Invalidate { .. } => Answers::Reply(Status::of(Code::Busy).into()),
        _ => Answers::good(event, number),
    };
    let asked = || {
        let seen = fake.seen();
        let of_whole = seen
            .iter()
            .filter(|event| matches!(event, Event::Invalidate { ranges, .. } if ranges.is_empty()));
        of_whole.count()
    };
    let touched = || {
        let pages = pages(0, 1);
        space.touched(pages, Marks::Keep, &mut |_| ()).unwrap();
    };
    fake.follow(busy);
    space.watch().unwrap();
    let tried = asked();
    assert!(tried > 1, "once is not enough");
    eventually("a round asks again", || {
        touched();
        asked() > tried
    });
    fake.follow(Answers::good);
    let tried = asked();
    eventually("an eviction asks again", || {
        assert!(space.standing_in(FileSection(0)).is_empty());
        asked() > tried
    });
    // It was OK. Another device is asked again.
    fake.follow(busy);
    fake.hang_up();
    eventually("another session", || rig.driver.counts().sessions == 2);
    rig.driver.wait_connected(LONG).unwrap();
    let tried = asked();
    eventually("a round asks the new device again", || {
        touched();
        asked() > tried
    });
}

#[test]
fn masks_and_numbers_that_the_device_tells_come_back_as_pages() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    let mut mask = FilePageSet::EMPTY;
    mask.insert(FilePage(3));
    mask.insert(FilePage(511));
    fake.follow(move |event, _| match event {
        Event::Standing { pages: None, .. } => Answers::Reply(Status::with_value(u64::MAX).into()),
        _ => Answers::Reply(Reply {
            status: Status::OK,
            mask: Some(mask),
        }),
    });
    let standing = space.standing_in(FileSection(2));
    let standing: Vec<_> = standing.pages(FileSection(2)).collect();
    assert_eq!(standing, [FilePage(1027), FilePage(1535)]);
    assert_eq!(space.standing_pages(), PAGES, "no more than there are");
    let mut touched = Vec::new();
    space
        .touched(pages(512, 1030), Marks::Keep, &mut |page| {
            touched.push(page)
        })
        .unwrap();
    assert_eq!(touched, [FilePage(515), FilePage(1023), FilePage(1027)]);
}

#[test]
fn device_that_refuses_a_space_refuses_its_vm_and_bars_eviction_if_it_came_later() {
    let (rig, fake) = Rig::connected();
    fake.follow(|event, number| match event {
        Event::Create { .. } => Answers::Reply(Status::of(Code::Full).into()),
        _ => Answers::good(event, number),
    });
    let space = rig.open(1);
    assert!(matches!(space.attach(), Err(DomainError::Device(_))));
    assert!(matches!(space.attach(), Err(DomainError::Device(_))));
    fake.follow(Answers::good);
    space.attach().unwrap();
    let again = rig.open(1).attach();
    assert!(matches!(again, Err(DomainError::AttachedAlready(_))));
    fake.follow(|event, number| match event {
        Event::Create { .. } => Answers::Reply(Status::of(Code::Full).into()),
        _ => Answers::good(event, number),
    });
    fake.hang_up();
    eventually("another session", || rig.driver.counts().sessions == 2);
    eventually("a reason", || {
        rig.driver
            .eviction_blocker()
            .is_some_and(|why| why.contains("Full"))
    });
    assert!(!space.unmap(FileSection(1), &some_pages()));
    space.detach();
    let bar = rig.driver.eviction_blocker().unwrap_or_default();
    assert!(!bar.contains("Full"), "it is no VM's any more: {bar}");
    // This lifts the device's bar.
    eventually("a session without it", || {
        rig.driver.eviction_blocker().is_none()
    });
}

#[test]
fn page_request_is_answered_under_the_devices_own_id_exactly_once() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    let mut sent = demand(77, FIRST);
    sent.hold_us = 5;
    sent.vector = Some(4);
    fake.request(&sent);
    let taken = rig.next_request();
    assert_eq!(taken.domain, space.id());
    let (id, domain) = (taken.id, taken.domain);
    assert_eq!(taken, PageRequest { id, domain, ..sent });
    let mut response = PageResponse::to(&taken, ResponseCode::Success);
    response.tier = Tier::Uncompressed;
    response.handling_ns = 12;
    rig.driver.source().respond(response);
    rig.driver.source().respond(response);
    let answers = eventually_answers(&fake, 1);
    assert_eq!(
        (answers[0].id, answers[0].tier),
        (RequestId(77), Tier::Uncompressed)
    );
    assert_eq!(answers[0].handling_ns, 12);
    assert_eq!(rig.driver.counts().late_answers, 1, "the second is dropped");
    // The id may be used again.
    fake.request(&sent);
    assert_ne!(rig.next_request().id, taken.id);
}

#[test]
fn request_that_cannot_be_is_refused_or_dropped_and_counted() {
    let rig = Rig::new();
    let features = FEATURES & !(feature::INJECT | feature::OVERWRITE);
    let fake = Fake::listen_as(rig.dir.path(), features, good_config(), Answers::good);
    rig.driver.wait_connected(LONG).unwrap();
    let _space = rig.attached(1);
    // After BEGIN: no bounce area was negotiated.
    let space = DomainId(2);
    let source = rig.driver.source();
    let mut refused = 0;
    let mut refuse = |bytes: &[u8]| {
        fake.send(bytes, 64);
        refused += 1;
        eventually("it is refused", || {
            assert_eq!(source.next(), None);
            answers(&fake).len() == refused
        });
        assert_eq!(
            answers(&fake)[refused - 1].code,
            ResponseCode::InvalidRequest
        );
    };
    refuse(&wire::encode_request(&demand(1, DomainId(99))));
    let mut hold = demand(2, space);
    hold.hold_us = 1;
    refuse(&wire::encode_request(&hold));
    let mut overwrite = demand(3, space);
    overwrite.kind = RequestKind::Overwrite { slot: 0 };
    refuse(&wire::encode_request(&overwrite));
    for kind in [RequestKind::Blank, RequestKind::BlankAhead] {
        let mut blank = demand(6, space);
        blank.kind = kind;
        refuse(&wire::encode_request(&blank));
    }
    let mut nonsense = wire::encode_request(&demand(4, space));
    nonsense[20] = 9;
    refuse(&nonsense);
    nonsense = wire::encode_request(&demand(5, space));
    nonsense[24..40].fill(0xff);
    refuse(&nonsense);
    let counts = rig.driver.counts();
    assert_eq!((counts.unknown_spaces, counts.malformed_requests), (1, 6));
    assert_eq!(counts.broken_off, 0);
    // The same id twice: an answer would be ambiguous.
    fake.request(&demand(6, space));
    rig.next_request();
    fake.request(&demand(6, space));
    eventually("it is given up", || {
        assert_eq!(source.next(), None);
        rig.driver.counts().duplicate_requests == 1
    });
    assert_eq!(rig.driver.counts().broken_off, 1);
}

#[test]
fn request_for_a_space_that_comes_before_its_number_is_taken_for_that_space() {
    let (rig, fake) = Rig::connected();
    let space = rig.open(1);
    // The device delays its answer to CREATE until the request was handled.
    let (met, is_met) = std::sync::mpsc::channel();
    let mut asks = Some((demand(7, FIRST), is_met));
    fake.follow(move |event, number| match (event, asks.take()) {
        (Event::Create { .. }, Some((request, until))) => Answers::Asking {
            request,
            until,
            reply: Status::with_value(number).into(),
        },
        _ => Answers::good(event, number),
    });
    let source = rig.driver.source();
    std::thread::scope(|scope| {
        let attaching = scope.spawn(|| space.attach().unwrap());
        eventually("the request", || source.arm());
        let taken = scope.spawn(|| source.next());
        eventually("it is taken off the queue", || {
            rig.driver.counts().requests == 1
        });
        met.send(()).unwrap();
        attaching.join().unwrap();
        let taken = taken.join().unwrap().expect("it is refused");
        assert_eq!(taken.domain, space.id());
    });
    assert_eq!(rig.driver.counts().unknown_spaces, 0);
}

#[test]
fn requests_of_a_device_that_went_are_forgotten_even_if_the_next_uses_their_ids() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    fake.land(5, &[1; 4096]);
    let mut overwrite = demand(8, FIRST);
    overwrite.kind = RequestKind::Overwrite { slot: 5 };
    fake.request(&overwrite);
    let old = rig.next_request();
    let source = rig.driver.source();
    let slot_of = |request: &PageRequest| match request.kind {
        RequestKind::Overwrite { slot } => slot,
        other => panic!("{other:?}"),
    };
    let mut content = Vec::new();
    assert!(source.read_bounced(slot_of(&old), 1, &mut content));
    assert_eq!(content, [1; 4096]);
    fake.hang_up();
    eventually("another session", || rig.driver.counts().sessions == 2);
    overwrite.domain = last_created(&fake);
    fake.request(&overwrite);
    let new = rig.next_request();
    assert_eq!(new.domain, space.id(), "the host's number stays");
    assert!(!source.read_bounced(slot_of(&old), 1, &mut content));
    assert!(source.read_bounced(slot_of(&new), 1, &mut content));
    source.respond(PageResponse::to(&old, ResponseCode::ResponseFailure));
    assert_eq!(rig.driver.counts().late_answers, 1);
    source.respond(PageResponse::to(&new, ResponseCode::Success));
    let answers = eventually_answers(&fake, 1);
    assert_eq!(answers.len(), 1);
    assert_eq!(answers[0].code, ResponseCode::Success);
}

#[test]
fn overwrite_of_a_device_that_went_is_wanted_no_more_even_if_its_content_was_read_before() {
    let (rig, fake) = Rig::connected();
    let _space = rig.attached(1);
    let mut overwrite = demand(8, FIRST);
    overwrite.kind = RequestKind::Overwrite { slot: 5 };
    fake.request(&overwrite);
    let RequestKind::Overwrite { slot } = rig.next_request().kind else {
        panic!("it was an overwrite");
    };
    let source = rig.driver.source();
    assert!(source.read_bounced(slot, 1, &mut Vec::new()));
    assert!(source.still_wants(slot));
    // A session that is not READY yet: from here on the device may start the request again.
    fake.follow(|event, number| match event {
        Event::Begin => Answers::Silence,
        _ => Answers::good(event, number),
    });
    let begun = |fake: &Fake| {
        let seen = fake.seen();
        seen.iter().filter(|event| **event == Event::Begin).count()
    };
    let before = begun(&fake);
    fake.hang_up();
    eventually("another session begins", || begun(&fake) > before);
    assert!(!source.still_wants(slot), "none is in use");
    fake.follow(Answers::good);
    fake.hang_up();
    eventually("another session", || rig.driver.counts().sessions == 2);
    rig.driver.wait_connected(LONG).unwrap();
    assert!(!source.still_wants(slot), "another is in use");
}

/// What a device does wrong, once.
type Wrong = fn(&Fake);

#[test]
fn device_that_breaks_a_ring_is_disconnected_and_a_better_one_taken() {
    let wrongs: [(&str, Wrong); 7] = [
        ("a head in the event queue", |fake| {
            fake.follow(|_, _| Answers::Head(1));
        }),
        ("a head far off in the event queue", |fake| {
            fake.follow(|_, _| Answers::Head(u32::MAX));
        }),
        ("a length in the event queue", |fake| {
            fake.follow(|_, _| Answers::Bytes(vec![0; 16], 17));
        }),
        ("an event that was not told", |fake| fake.use_up(0, 0, 16)),
        ("a head in the fault queue", |fake| fake.use_up(1, 256, 64)),
        ("a length in the fault queue", |fake| fake.use_up(1, 0, 65)),
        ("a short page request", |fake| fake.send(&[0; 63], 63)),
    ];
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    let source = rig.driver.source();
    for (broken, (what, wrong)) in (1..).zip(wrongs) {
        eventually("a session", || rig.driver.counts().sessions == broken);
        wrong(&fake);
        // Any caller that uses the device finds out.
        eventually(what, || {
            let is_done = space.unmap(FileSection(1), &some_pages());
            while source.next().is_some() {}
            rig.driver.counts().broken_off == broken && !is_done
        });
        fake.follow(Answers::good);
    }
    eventually("a session", || rig.driver.counts().sessions == 8);
    eventually("it works", || space.unmap(FileSection(1), &some_pages()));
    assert!(source.next().is_none());
}

#[test]
fn device_whose_reply_is_none_is_given_up() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    for (wrong, (bytes, len)) in
        (1..).zip([(vec![0; 16], 0), (vec![0; 16], 15), (vec![0xee; 16], 16)])
    {
        fake.follow(move |event, number| match event {
            Event::Unmap { .. } => Answers::Bytes(bytes.clone(), len),
            _ => Answers::good(event, number),
        });
        assert!(!space.unmap(FileSection(1), &some_pages()));
        let counts = rig.driver.counts();
        assert_eq!(
            (counts.malformed_replies, counts.broken_off),
            (wrong, wrong)
        );
        eventually("another session", || {
            rig.driver.counts().sessions == wrong + 1
        });
    }
    fake.follow(Answers::good);
    eventually("it works", || space.unmap(FileSection(1), &some_pages()));
}

#[test]
fn more_requests_than_the_device_says_there_can_be_end_the_connection() {
    let rig = Rig::new();
    let mut config = good_config();
    config.requests_max = 3;
    let fake = Fake::listen_as(rig.dir.path(), FEATURES, config, Answers::good);
    rig.driver.wait_connected(LONG).unwrap();
    let _space = rig.attached(1);
    for id in 0..3 {
        fake.request(&demand(id, FIRST));
        rig.next_request();
    }
    fake.request(&demand(3, FIRST));
    let source = rig.driver.source();
    eventually("it is given up", || {
        assert!(source.next().is_none());
        rig.driver.counts().broken_off == 1
    });
}

#[test]
fn silent_device_holds_a_caller_up_once_and_nobody_afterwards() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    fake.follow(|_, _| Answers::Silence);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!(!space.unmap(FileSection(1), &some_pages())));
        }
    });
    assert_eq!(rig.driver.counts().broken_off, 1);
    // It does not answer BEGIN either, so it is not used.
    assert!(rig.driver.eviction_blocker().is_some());
    assert!(!space.unmap(FileSection(1), &some_pages()));
    assert!(space.is_any_leased());
    fake.follow(Answers::good);
    rig.driver.wait_connected(LONG).unwrap();
    assert!(space.unmap(FileSection(1), &some_pages()));
}

#[test]
fn device_that_was_waited_for_long_is_waited_for_less_when_it_is_back() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    let patience = |opcode| {
        let session = rig.driver.shared.session().unwrap();
        session.events.patience(opcode, Instant::now())
    };
    let whole = patience(wire::Opcode::Unmap);
    assert_eq!(patience(wire::Opcode::Create), whole);
    fake.follow(|event, number| match event {
        Event::Unmap { .. } => Answers::Silence,
        _ => Answers::good(event, number),
    });
    assert!(!space.unmap(FileSection(1), &some_pages()));
    rig.driver.wait_connected(LONG).unwrap();
    assert!(patience(wire::Opcode::Unmap) < whole / 2);
    assert_eq!(patience(wire::Opcode::Create), whole, "no lock is held");
    assert!(!space.unmap(FileSection(1), &some_pages()));
    fake.follow(Answers::good);
    rig.driver.wait_connected(LONG).unwrap();
    assert!(
        space.unmap(FileSection(1), &some_pages()),
        "it is taken back"
    );
}

#[test]
fn caller_is_released_when_the_device_hangs_up_in_the_middle() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    let mut left = 1;
    fake.follow(move |event, number| {
        if left > 0 && matches!(event, Event::Unmap { .. }) {
            left -= 1;
            return Answers::HangUp;
        }
        Answers::good(event, number)
    });
    assert!(!space.unmap(FileSection(1), &some_pages()));
    eventually("it is back", || space.unmap(FileSection(1), &some_pages()));
    assert_eq!(rig.driver.counts().broken_off, 0, "it was no fault of its");
}

#[test]
fn each_of_many_callers_gets_his_own_answer() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    fake.follow(|event, number| match event {
        Event::Touched { pages, .. } => {
            let mut mask = FilePageSet::EMPTY;
            mask.insert(pages.start);
            Answers::Reply(Reply {
                status: Status::OK,
                mask: Some(mask),
            })
        }
        _ => Answers::good(event, number),
    });
    std::thread::scope(|scope| {
        for thread in 0..6_u64 {
            let space = &space;
            scope.spawn(move || {
                for round in 0..200 {
                    let page = (thread * 331 + round * 7) % PAGES;
                    // Posted events run in between.
                    space.grant(FilePage(page).single(), Access::Write);
                    let mut touched = Vec::new();
                    let visit = &mut |page| touched.push(page);
                    let single = FilePage(page).single();
                    space.touched(single, Marks::Keep, visit).unwrap();
                    assert_eq!(touched, [FilePage(page)]);
                }
            });
        }
    });
    let counts = rig.driver.counts();
    assert_eq!((counts.broken_off, counts.refused_events), (0, 0));
}

#[test]
fn posts_wait_for_room_and_none_is_lost() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    let before = fake.seen().len();
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            let space = &space;
            scope.spawn(move || {
                for page in 0..500 {
                    let page = FilePage(thread * 512 + page);
                    space.grant(page.single(), Access::Read);
                }
            });
        }
    });
    assert!(space.unmap(FileSection(1), &some_pages()));
    let seen = fake.seen();
    assert_eq!(seen.len(), before + 1501);
    for thread in 0..3_u64 {
        let of_thread = seen.iter().filter_map(|event| match event {
            Event::Map { ranges, .. } if ranges[0].start.0 / 512 == thread => Some(ranges[0]),
            _ => None,
        });
        let expected = (0..500).map(|page| FilePage(thread * 512 + page).single());
        assert!(of_thread.eq(expected), "thread {thread}");
    }
}

#[test]
fn armed_source_is_woken_by_the_device_itself() {
    let dir = tempfile::tempdir().unwrap();
    let bell = Arc::new(Doorbell::new().unwrap());
    let driver = Driver::start(&dir.path().join("vpri.sock"), Arc::clone(&bell)).unwrap();
    let fake = Fake::listen(dir.path(), Answers::good);
    driver.wait_connected(LONG).unwrap();
    let file = tempfile::tempfile().unwrap();
    let space = driver.open(file.as_fd(), key(1), PAGES * PAGE_BYTES);
    space.unwrap().attach().unwrap();
    let source = driver.source();
    bell.disarm().unwrap();
    bell.arm();
    assert!(!source.arm(), "nothing is there yet");
    fake.request(&demand(1, FIRST));
    let mut polled = [rustix::event::PollFd::new(
        &bell,
        rustix::event::PollFlags::IN,
    )];
    rustix::event::poll(&mut polled, None).unwrap();
    bell.disarm().unwrap();
    source.disarm();
    assert!(source.next().is_some());
    fake.request(&demand(2, FIRST));
    assert!(source.arm(), "it was there before");
}

#[test]
fn socket_of_something_else_is_told_in_a_sentence() {
    let rig = Rig::new();
    let fake = Fake::listen(rig.dir.path(), Answers::good);
    *fake.features.lock().unwrap() = 1 << 30;
    eventually("it lacks a feature", || {
        fake.hang_up();
        let bar = rig.driver.eviction_blocker();
        bar.is_some_and(|why| why.contains("no VPRI function"))
    });
    *fake.features.lock().unwrap() = FEATURES;
    let mut config = good_config();
    config.lease_wait_us = 60_000_000;
    *fake.config.lock().unwrap() = config.encode().to_vec();
    eventually("it would hold locks too long", || {
        let bar = rig.driver.eviction_blocker();
        bar.is_some_and(|why| why.contains("waits up to"))
    });
    *fake.config.lock().unwrap() = vec![0; 64];
    eventually("it has another configuration", || {
        let bar = rig.driver.eviction_blocker();
        bar.is_some_and(|why| why.contains("configuration space"))
    });
    assert!(!rig.driver.is_connected());
}

#[test]
fn driver_stops_though_the_other_end_never_says_a_word() {
    let rig = Rig::new();
    let listener = UnixListener::bind(rig.dir.path().join("vpri.sock")).unwrap();
    let (stream, _) = listener.accept().unwrap();
    rig.driver.stop();
    drop(stream);
    let late = rig.driver.wait_connected(Duration::ZERO);
    assert!(matches!(late, Err(DriverError::NotConnected { .. })));
}

#[test]
fn file_of_no_pages_and_one_that_is_barred_are_refused() {
    let rig = Rig::new();
    let fd = rig.file.as_fd();
    let none = rig.driver.open(fd, key(1), 0);
    assert!(matches!(none, Err(DomainError::TooLarge(0))));
    rig.driver.bar(key(2));
    let barred = rig.driver.open(fd, key(2), PAGE_BYTES);
    assert!(matches!(barred, Err(DomainError::Barred(_))));
}

/// The events that the fake received in the current session.
fn told_since_begin(fake: &Fake) -> Vec<Event<'static>> {
    let mut seen = fake.seen();
    let begin = seen.iter().rposition(|event| *event == Event::Begin);
    seen.split_off(begin.unwrap())
}

#[test]
fn space_that_a_new_device_refuses_is_barred_before_ready_until_its_vm_goes() {
    let (rig, fake) = Rig::connected();
    let space = rig.attached(1);
    let other = rig.attached(2);
    rig.driver.all_known();
    fake.follow(|event, number| match event {
        Event::Create { name, .. } if *name == key(1) => {
            Answers::Reply(Status::of(Code::Unsupported).into())
        }
        // DMA is under way, from a device without look-up.
        Event::Bar { .. } => Answers::Reply(Status::of(Code::Busy).into()),
        _ => Answers::good(event, number),
    });
    fake.hang_up();
    eventually("another session", || rig.driver.counts().sessions == 2);
    let told = told_since_begin(&fake);
    let at = |wanted: Event<'_>| told.iter().position(|event| *event == wanted);
    let barred = at(Event::Bar { name: key(1) }).expect("it is barred");
    assert!(Some(barred) < at(Event::Ready), "else READY releases it");
    assert_eq!(at(Event::Bar { name: key(2) }), None);
    // Its memory belongs to its VM alone again: only another session lifts the bar.
    space.detach();
    eventually("a third session", || rig.driver.counts().sessions == 3);
    let told = told_since_begin(&fake);
    assert!(told.contains(&Event::Ready));
    assert!(!told.contains(&Event::Bar { name: key(1) }));
    eventually("it is in use", || rig.driver.eviction_blocker().is_none());
    assert_eq!(rig.driver.counts().broken_off, 0);
    // A space that the device has is given back without that.
    other.detach();
    assert!(rig.driver.is_connected());
}

#[test]
fn device_that_has_dma_under_way_when_memory_is_barred_has_barred_it() {
    let (rig, fake) = Rig::connected();
    for code in Code::ALL {
        fake.follow(move |_, _| Answers::Reply(Status::of(code).into()));
        let kept = rig.driver.shared.keep_from_device(key(9));
        let is_done = matches!(code, Code::Ok | Code::Busy);
        assert_eq!(kept.is_ok(), is_done, "{code:?}");
    }
}
