// SPDX-License-Identifier: Apache-2.0
//! Random drivers, engines and crashes, against a model that keeps each page in a plain
//! list.

use super::*;
use pagetide_addr::{FilePage, FileRange, PAGE_BYTES, to_usize};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const MEMORIES: usize = 3;

#[derive(Debug, Clone)]
enum Step {
    Begin,
    Ready,
    HangUp,
    Bar(usize),
    Create(usize),
    Destroy(usize, Farewell),
    Map(usize, Access, Vec<FileRange>),
    Unmap(usize, Vec<FileRange>),
    Protect(usize, Vec<FileRange>),
    Invalidate(usize, Vec<FileRange>),
    UnmapAll(usize),
    Standing(usize, FileRange),
    Respond(Vec<u64>),
    /// A device maps the memory.
    Open(usize),
    Lease(usize, FileRange, Access),
    /// The oldest lease ends.
    Release,
    Wire(usize, FilePage),
    Ask(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let memory = || 0..MEMORIES;
    let access = || prop_oneof![Just(Access::Read), Just(Access::Write)];
    let page = || prop_oneof![0..8_u64, 508..516_u64, 1020..PAGES];
    let range = move || (page(), page()).prop_map(|(a, b)| self::range(a.min(b), a.max(b) + 1));
    let ranges = move || prop::collection::vec(range(), 1..4);
    let in_section = range().prop_map(|r| r.intersect(r.start.section().pages(PAGES)));
    let farewell = prop_oneof![Just(Farewell::Release), Just(Farewell::Retire)];
    let step = prop_oneof![
        2 => Just(Step::Begin),
        3 => Just(Step::Ready),
        1 => Just(Step::HangUp),
        1 => memory().prop_map(Step::Bar),
        6 => memory().prop_map(Step::Create),
        1 => (memory(), farewell).prop_map(|(m, f)| Step::Destroy(m, f)),
        8 => (memory(), access(), ranges()).prop_map(|(m, a, r)| Step::Map(m, a, r)),
        6 => (memory(), ranges()).prop_map(|(m, r)| Step::Unmap(m, r)),
        4 => (memory(), ranges()).prop_map(|(m, r)| Step::Protect(m, r)),
        2 => (memory(), ranges()).prop_map(|(m, r)| Step::Invalidate(m, r)),
        1 => memory().prop_map(Step::UnmapAll),
        2 => (memory(), in_section).prop_map(|(m, r)| Step::Standing(m, r)),
        4 => prop::collection::vec(0..12_u64, 1..4).prop_map(Step::Respond),
        4 => memory().prop_map(Step::Open),
        5 => (memory(), range(), access()).prop_map(|(m, r, a)| Step::Lease(m, r, a)),
        4 => Just(Step::Release),
        2 => (memory(), page()).prop_map(|(m, p)| Step::Wire(m, FilePage(p))),
        5 => memory().prop_map(Step::Ask),
    ];
    prop::collection::vec(step, 1..80)
}

/// The state of a memory in the model.
#[derive(Debug, Clone, Default)]
struct Memory {
    /// Its pages, as far as they are known.
    pages: Option<Vec<Attribute>>,
    has_device: bool,
    space_since: Option<u64>,
    barred_since: Option<u64>,
    standing: BTreeSet<u64>,
    leases: Vec<FileRange>,
}

impl Memory {
    fn unmap_all(&mut self) {
        for (page, attribute) in (0..).zip(self.pages.iter_mut().flatten()) {
            if !self.standing.contains(&page) {
                *attribute = Attribute::Unmapped;
            }
        }
    }

    fn fill(&mut self, attribute: Attribute) {
        self.pages
            .iter_mut()
            .flatten()
            .for_each(|page| *page = attribute);
    }

    /// Now only the device knows it.
    fn forget(&mut self) {
        if !self.has_device {
            self.pages = None;
        }
    }

    fn is_leased(&self, section: u64) -> bool {
        let covers = |lease: &FileRange| lease.sections().any(|s| s.0 == section);
        self.leases.iter().any(covers)
    }

    /// Restricts each page by `to`; returns the expected code.
    fn restrict(&mut self, ranges: &[FileRange], to: impl Fn(Attribute) -> Attribute) -> Code {
        let (mut standing, mut cleared) = (false, BTreeSet::new());
        for (section, part) in ranges.iter().flat_map(|range| range.by_section()) {
            if part.iter().any(|page| self.standing.contains(&page.0)) {
                standing = true;
                continue;
            }
            cleared.insert(section.0);
            for page in part.iter() {
                let pages = self.pages.as_mut().unwrap();
                pages[page.index()] = to(pages[page.index()]);
            }
        }
        if standing {
            Code::Standing
        } else if cleared.into_iter().any(|section| self.is_leased(section)) {
            Code::Busy
        } else {
            Code::Ok
        }
    }
}

/// A request, which memory it is for (none: it was retired since), and whether the driver has it.
type Asked = BTreeMap<u64, (Option<usize>, bool)>;

#[derive(Debug, Default)]
struct Model {
    phase: Phase,
    session: u64,
    is_known: bool,
    memories: [Memory; MEMORIES],
    asked: Asked,
    /// Expected answers, and requests expected to be sent again.
    answered: Vec<(u64, ResponseCode)>,
    sent: Vec<u64>,
}

enum Fate {
    Send,
    Hold,
    Answer(ResponseCode),
}

impl Model {
    fn initial(&self) -> Attribute {
        if self.is_known {
            Attribute::ReadWrite
        } else {
            Attribute::Unmapped
        }
    }

    fn fate(&self, memory: Option<usize>) -> Fate {
        if self.phase != Phase::Ready {
            return Fate::Hold;
        }
        let Some(memory) = memory.map(|m| &self.memories[m]) else {
            return Fate::Answer(ResponseCode::InvalidRequest);
        };
        if memory.space_since == Some(self.session) {
            Fate::Send
        } else if memory.barred_since.is_some() {
            Fate::Hold
        } else {
            Fate::Answer(ResponseCode::Success)
        }
    }

    fn hang_up(&mut self) {
        self.phase = Phase::Nobody;
        self.asked.values_mut().for_each(|(_, sent)| *sent = false);
    }

    fn begin(&mut self) {
        self.hang_up();
        self.phase = Phase::Begun;
        self.session += 1;
        self.is_known = false;
    }

    fn ready(&mut self) -> Code {
        if self.phase != Phase::Begun {
            return Code::Invalid;
        }
        self.phase = Phase::Ready;
        self.is_known = true;
        for memory in &mut self.memories {
            if memory.barred_since != Some(self.session) {
                memory.barred_since = None;
            }
            let is_own = memory.space_since == Some(self.session);
            if !is_own && memory.barred_since.is_none() {
                memory.space_since = None;
                memory.fill(Attribute::ReadWrite);
                memory.forget();
            }
        }
        for (id, (memory, _)) in self.asked.clone() {
            match self.fate(memory) {
                Fate::Send => {
                    self.sent.push(id);
                    self.asked.insert(id, (memory, true));
                }
                Fate::Hold => {}
                Fate::Answer(code) => {
                    self.asked.remove(&id);
                    self.answered.push((id, code));
                }
            }
        }
        Code::Ok
    }

    fn bar(&mut self, memory: usize) -> Code {
        let session = self.session;
        let memory = &mut self.memories[memory];
        if memory.space_since == Some(session) {
            return Code::Exists;
        }
        memory.barred_since = Some(session);
        memory.unmap_all();
        if memory.pages.is_some() && !memory.leases.is_empty() {
            Code::Busy
        } else {
            Code::Ok
        }
    }

    fn create(&mut self, memory: usize) -> Code {
        let session = self.session;
        let memory = &mut self.memories[memory];
        if memory.barred_since == Some(session) || memory.space_since == Some(session) {
            return Code::Exists;
        }
        memory.barred_since = None;
        memory.space_since = Some(session);
        let none = || vec![Attribute::Unmapped; to_usize(PAGES)];
        memory.pages.get_or_insert_with(none);
        memory.unmap_all();
        Code::Ok
    }

    fn destroy(&mut self, memory: usize, farewell: Farewell) {
        let number = memory;
        let memory = &mut self.memories[memory];
        match farewell {
            Farewell::Release => {
                memory.space_since = None;
                if self.phase == Phase::Ready {
                    memory.fill(Attribute::ReadWrite);
                } else {
                    memory.unmap_all();
                }
                memory.forget();
            }
            Farewell::Retire => {
                *memory = Memory::default();
                for (of, _) in self.asked.values_mut() {
                    *of = of.filter(|of| *of != number);
                }
            }
        }
    }

    fn respond(&mut self, ids: &[u64]) -> Code {
        let mut code = Code::Ok;
        for id in ids {
            if matches!(self.asked.get(id), Some((_, true))) {
                self.asked.remove(id);
                self.answered.push((*id, ResponseCode::Success));
            } else {
                code = Code::Invalid;
            }
        }
        code
    }

    fn ask(&mut self, id: u64, memory: usize) {
        match self.fate(Some(memory)) {
            Fate::Send => {
                self.sent.push(id);
                self.asked.insert(id, (Some(memory), true));
            }
            Fate::Hold => {
                self.asked.insert(id, (Some(memory), false));
            }
            Fate::Answer(code) => self.answered.push((id, code)),
        }
    }
}

/// The real core and all that it needs.
struct Real {
    table: Arc<DomainTable>,
    core: FunctionCore,
    engines: Engines,
    files: Vec<GuestFile>,
    /// Windows that devices hold.
    devices: Vec<Option<Arc<RamWindow>>>,
    ids: Vec<DomainId>,
    leases: Vec<(Arc<DmaDomain>, Lease, usize, FileRange)>,
    retired: Vec<Arc<DmaDomain>>,
    sent: Vec<u64>,
    next_id: u64,
}

impl Real {
    fn new() -> Self {
        let table = Arc::new(DomainTable::new(1));
        let limits = Config {
            requests_max: 1000,
            ..limits()
        };
        let file = |_| GuestFile::new_memfd("ram", PAGES * PAGE_BYTES).unwrap();
        Self {
            core: FunctionCore::new(Arc::clone(&table), limits),
            table,
            engines: Engines::default(),
            files: (0..MEMORIES).map(file).collect(),
            devices: vec![None; MEMORIES],
            ids: vec![DomainId(u32::MAX); MEMORIES],
            leases: Vec::new(),
            retired: Vec::new(),
            sent: Vec::new(),
            next_id: 0,
        }
    }

    fn name(&self, memory: usize) -> FileKey {
        self.files[memory].key().unwrap()
    }

    fn event(&mut self, event: &Event<'_>) -> Reply {
        // Encoded and decoded, as over the queue.
        let mut bytes = Vec::new();
        event.encode(&mut bytes);
        let event = Event::decode(&bytes).unwrap();
        self.core.event(&event, &mut self.engines)
    }

    fn open(&mut self, memory: usize) -> bool {
        let opened = self.table.map_whole(self.files[memory].as_fd());
        let is_open = opened.is_ok();
        if let Ok(window) = opened {
            self.devices[memory] = Some(window);
        }
        is_open
    }
}

fn event_of(step: &Step, real: &Real) -> Option<Event<'static>> {
    let id = |memory: &usize| real.ids[*memory];
    let to = |ranges: &Vec<FileRange>| ranges.clone().into();
    Some(match step {
        Step::Begin => Event::Begin,
        Step::Ready => Event::Ready,
        Step::Bar(memory) => Event::Bar {
            name: real.name(*memory),
        },
        Step::Create(memory) => Event::Create {
            name: real.name(*memory),
            page_count: PAGES,
        },
        Step::Destroy(memory, farewell) => Event::Destroy {
            space: id(memory),
            farewell: *farewell,
        },
        Step::Map(memory, access, ranges) => Event::Map {
            space: id(memory),
            access: *access,
            ranges: to(ranges),
        },
        Step::Unmap(memory, ranges) => Event::Unmap {
            space: id(memory),
            ranges: to(ranges),
        },
        Step::Protect(memory, ranges) => Event::Protect {
            space: id(memory),
            ranges: to(ranges),
        },
        Step::Invalidate(memory, ranges) => Event::Invalidate {
            space: id(memory),
            ranges: to(ranges),
        },
        Step::UnmapAll(memory) => Event::UnmapAll { space: id(memory) },
        Step::Standing(memory, pages) => Event::Standing {
            space: id(memory),
            pages: Some(*pages),
        },
        Step::Respond(ids) => {
            let response =
                |id: &u64| PageResponse::to(&request(*id, DomainId(0), 0), ResponseCode::Success);
            let answers = ids.iter().map(|id| Answer::from(&response(id)));
            Event::Respond {
                answers: answers.collect::<Vec<_>>().into(),
            }
        }
        _ => return None,
    })
}

/// The memory whose space an event needs.
fn space_of(step: &Step) -> Option<usize> {
    match step {
        Step::Destroy(memory, _)
        | Step::Map(memory, ..)
        | Step::Unmap(memory, _)
        | Step::Protect(memory, _)
        | Step::Invalidate(memory, _)
        | Step::UnmapAll(memory)
        | Step::Standing(memory, _) => Some(*memory),
        _ => None,
    }
}

/// The model's code for a message.
fn expected(step: &Step, model: &mut Model) -> Code {
    if model.phase == Phase::Nobody && !matches!(step, Step::Begin) {
        return Code::Invalid;
    }
    let session = model.session;
    if let Some(memory) = space_of(step)
        && model.memories[memory].space_since != Some(session)
    {
        return Code::NoSpace;
    }
    match step {
        Step::Begin => model.begin(),
        Step::Ready => return model.ready(),
        Step::Bar(memory) => return model.bar(*memory),
        Step::Create(memory) => return model.create(*memory),
        Step::Destroy(memory, farewell) => model.destroy(*memory, *farewell),
        Step::Map(memory, access, ranges) => {
            for page in ranges.iter().flat_map(|range| range.iter()) {
                let pages = model.memories[*memory].pages.as_mut().unwrap();
                pages[page.index()] = match (access, pages[page.index()]) {
                    (Access::Write, _) | (_, Attribute::ReadWrite) => Attribute::ReadWrite,
                    _ => Attribute::ReadOnly,
                };
            }
        }
        Step::Unmap(memory, ranges) => {
            return model.memories[*memory].restrict(ranges, |_| Attribute::Unmapped);
        }
        Step::Protect(memory, ranges) => {
            return model.memories[*memory].restrict(ranges, |page| match page {
                Attribute::ReadWrite => Attribute::ReadOnly,
                other => other,
            });
        }
        Step::Invalidate(memory, ranges) => {
            let memory = &model.memories[*memory];
            let mut sections = ranges.iter().flat_map(|range| range.sections());
            if sections.any(|section| memory.is_leased(section.0)) {
                return Code::Busy;
            }
        }
        Step::UnmapAll(memory) => model.memories[*memory].unmap_all(),
        Step::Respond(ids) => return model.respond(ids),
        _ => {}
    }
    Code::Ok
}

/// Sends a message to both.
fn tell(step: &Step, event: &Event<'_>, real: &mut Real, model: &mut Model) {
    let before = space_of(step).and_then(|memory| real.table.find(real.name(memory)));
    let reply = real.event(event);
    let code = expected(step, model);
    assert_eq!(reply.status.code, code, "{step:?}");
    match step {
        Step::Create(memory) if code == Code::Ok => {
            real.ids[*memory] = DomainId(u32::try_from(reply.status.value).unwrap());
        }
        Step::Destroy(memory, Farewell::Retire) if code == Code::Ok => {
            real.devices[*memory] = None;
            real.ids[*memory] = DomainId(u32::MAX);
            real.leases.retain_mut(|(.., of, _)| *of != *memory);
            real.retired.extend(before);
        }
        Step::Standing(memory, pages) if code == Code::Ok => {
            let standing = &model.memories[*memory].standing;
            let mask = reply.mask.unwrap();
            let told: Vec<u64> = mask.pages(pages.start.section()).map(|p| p.0).collect();
            let due = standing.range(pages.start.0..pages.end.0).copied();
            assert!(due.eq(told), "{step:?}");
        }
        _ => assert_eq!(reply.mask, None),
    }
}

/// Does an engine's step in both.
fn act(step: &Step, real: &mut Real, model: &mut Model) {
    match step {
        Step::HangUp => {
            real.core.hang_up(&mut real.engines);
            model.hang_up();
        }
        Step::Open(memory) => {
            let initial = model.initial();
            let known = &mut model.memories[*memory];
            let is_barred = known.barred_since.is_some();
            assert_eq!(real.open(*memory), !is_barred);
            if !is_barred {
                known.has_device = true;
                known
                    .pages
                    .get_or_insert_with(|| vec![initial; to_usize(PAGES)]);
            }
        }
        Step::Lease(memory, range, access) => {
            let window = real.devices[*memory].as_ref();
            let Some(domain) = window.map(|w| Arc::clone(w.domain())) else {
                return;
            };
            let lease = domain.attributes().lease(0, *range, *access);
            let known = &mut model.memories[*memory];
            let pages = known.pages.as_ref().unwrap();
            let allows = |page: FilePage| match pages[page.index()] {
                Attribute::ReadWrite => true,
                Attribute::ReadOnly => *access == Access::Read,
                Attribute::Unmapped => false,
            };
            assert_eq!(lease.is_some(), range.iter().all(allows), "{step:?}");
            if let Some(lease) = lease {
                known.leases.push(*range);
                real.leases.push((domain, lease, *memory, *range));
            }
        }
        Step::Release if !real.leases.is_empty() => {
            let (domain, lease, memory, range) = real.leases.remove(0);
            domain.attributes().release(0, lease);
            let leases = &mut model.memories[memory].leases;
            let at = leases.iter().position(|held| *held == range).unwrap();
            leases.remove(at);
        }
        Step::Wire(memory, page) => {
            let Some(domain) = real.devices[*memory].as_deref().map(RamWindow::domain) else {
                return;
            };
            let wired = domain.attributes().wire(page.single());
            let known = &mut model.memories[*memory];
            let is_writable = known.pages.as_ref().unwrap()[page.index()] == Attribute::ReadWrite;
            assert_eq!(wired, is_writable);
            if wired {
                known.standing.insert(page.0);
            }
        }
        Step::Ask(memory) => {
            let Some(domain) = real.devices[*memory].as_deref().map(RamWindow::domain) else {
                return;
            };
            let request = request(real.next_id, domain.id(), 0);
            let source = SourceNo(*memory);
            let sent = real.core.request(source, request, &mut real.engines);
            real.sent.extend(sent.map(|request| request.id.0));
            model.ask(real.next_id, *memory);
            real.next_id += 1;
        }
        _ => {}
    }
}

fn compare(real: &mut Real, model: &mut Model) {
    while let Some(request) = real.core.next_unsent() {
        real.sent.push(request.id.0);
    }
    assert_eq!(real.core.phase(), model.phase);
    assert_eq!(real.sent, model.sent, "requests given to the driver");
    let answered = real.engines.responses.iter();
    let answered: Vec<_> = answered.map(|(_, r)| (r.id.0, r.code)).collect();
    assert_eq!(answered, model.answered);
    assert_eq!(real.core.outstanding(), model.asked.len());
    for (memory, known) in model.memories.iter().enumerate() {
        let domain = real.table.find(real.name(memory));
        assert_eq!(domain.is_some(), known.pages.is_some(), "memory {memory}");
        if let (Some(domain), Some(pages)) = (domain, &known.pages) {
            assert_eq!(attributes(&domain), *pages, "memory {memory}");
            assert_eq!(domain.is_attached(), known.space_since.is_some());
        }
    }
    for retired in &real.retired {
        let bitmap = retired.attributes().bitmap();
        let standing = |page: FilePage| {
            let wired = retired.attributes().wired_in(page.section());
            wired.contains(page)
        };
        let mut pages = (0..PAGES).map(FilePage).filter(|page| !standing(*page));
        assert!(pages.all(|page| bitmap.attribute(page) == Attribute::Unmapped));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn function_agrees_with_a_naive_one_whatever_drivers_and_engines_do(steps in steps()) {
        let (mut real, mut model) = (Real::new(), Model::default());
        for step in &steps {
            match event_of(step, &real) {
                Some(event) => tell(step, &event, &mut real, &mut model),
                None => act(step, &mut real, &mut model),
            }
            compare(&mut real, &mut model);
        }
        for (domain, lease, ..) in real.leases.drain(..) {
            domain.attributes().release(0, lease);
        }
    }
}
