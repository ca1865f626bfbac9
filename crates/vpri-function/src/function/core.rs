// SPDX-License-Identifier: Apache-2.0
//! [`FunctionCore`]: the device's state, and what each message does to it.
//!
//! It has no queue, no thread and no clock except for one bounded wait. The PA-bitmaps
//! are those of the [`DomainTable`]: engines look pages up while this code changes
//! them.
//!
//! # Sessions
//! ```text
//!            BEGIN              READY
//!   Nobody ─────────► Begun ─────────► Ready
//!     ▲  hang-up        │ ▲   BEGIN     │
//!     └─────────────────┴─┴─────────────┘
//! ```
//! Between BEGIN and READY a driver declares which memory has pages elsewhere: it
//! creates a space for it, or bars it. All memory that is new to the device is
//! unmapped until READY; then memory that got neither becomes read-write. A space of
//! an earlier session stays as it was meanwhile: its mapped pages are present, since
//! without a driver no page is evicted. A space that is released between BEGIN and
//! READY is one that the driver could not recover: it is unmapped memory like any
//! other. A bar keeps it so, and READY makes it read-write.
//!
//! # Rules (VPRI 5.1)
//! - *R1* A space is created with every page unmapped, in the same step. It also ends in one
//!   step: all of it read-write, or all of it unmapped for good (before READY: unmapped
//!   until then).
//! - *R2* A page that is unmapped or protected allows no further DMA from the moment the bit
//!   changes; the message is answered `OK` only when no earlier DMA is under way.
//! - *R3* Engines look up under a lease (see [`pagetide_vpri::lease`]), so a page cannot go between
//!   look-up and DMA.
//!
//! Page requests are sent only while a driver is ready, and only for pages of its
//! spaces. Requests for other memory are answered here: it is read-write, so the
//! device may try again. Requests for barred memory are not answered at all.

mod spaces;

use super::requests::{Duplicate, Requests, SourceNo};
use crate::wire::{Answer, Code, Config, Event, HEADER_BYTES, Opcode, Reply, Status};
use pagetide_addr::{
    Access, DomainId, FileKey, FilePage, FileRange, FileSection, PageRequest, PageResponse,
    RequestKind, ResponseCode,
};
use pagetide_vpri::{
    bitmap::Attribute,
    domain::{DmaDomain, DomainTable},
};
use std::{collections::HashMap, sync::Arc};

/// Offset of an event's count, in bytes.
const COUNT_AT: u32 = 8;

/// The effects of the core's decisions on the outside.
pub trait DeviceSide {
    /// Delivers `response` to the engine whose request came from `source`.
    fn respond(&mut self, source: SourceNo, response: PageResponse);

    /// From now on transfers may use bounce buffers: `slots` pages at `address` of the function's
    /// memory, or none.
    ///
    /// # Errors
    /// The code with which the driver's message is refused.
    fn land(&mut self, area: Option<(u64, u64)>) -> Result<(), Code>;

    /// True if the driver's current bounce area holds `count` slots from `slot` on.
    fn is_bounce(&self, slot: u32, count: u64) -> bool;
}

/// State of the driver's session.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Phase {
    /// There is no driver.
    #[default]
    Nobody,
    /// It declares which memory has pages elsewhere.
    Begun,
    /// It answers page requests.
    Ready,
}

/// Counters since the start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FunctionFigures {
    /// Messages from a driver.
    pub events: u64,
    /// Messages that were malformed, or had impossible values.
    pub invalid_events: u64,
    /// Answers to requests that the driver did not have, among them second answers.
    pub unknown_answers: u64,
    /// Page requests given to a driver.
    pub requests_sent: u64,
    /// Requests sent that an earlier driver had, too.
    pub requests_sent_again: u64,
    /// Page requests answered by the device itself.
    pub requests_answered_here: u64,
}

#[derive(Debug)]
struct Space {
    domain: Arc<DmaDomain>,
    /// The session that has created it.
    session: u64,
}

/// See the module.
#[derive(Debug)]
pub struct FunctionCore {
    domains: Arc<DomainTable>,
    limits: Config,
    phase: Phase,
    /// Counts drivers.
    session: u64,
    spaces: HashMap<DomainId, Space>,
    /// Memory that no device may touch, with the session that barred it.
    barred: HashMap<FileKey, u64>,
    requests: Requests,
    figures: FunctionFigures,
}

impl FunctionCore {
    /// The device before its first driver: new memory is unmapped.
    #[must_use]
    pub fn new(domains: Arc<DomainTable>, limits: Config) -> Self {
        domains.set_initial(Attribute::Unmapped);
        Self {
            domains,
            limits,
            phase: Phase::Nobody,
            session: 0,
            spaces: HashMap::new(),
            barred: HashMap::new(),
            requests: Requests::default(),
            figures: FunctionFigures::default(),
        }
    }

    /// The memory of all devices.
    pub(super) fn domains(&self) -> &Arc<DomainTable> {
        &self.domains
    }

    /// The limits in the configuration space.
    #[must_use]
    pub fn limits(&self) -> &Config {
        &self.limits
    }

    /// State of the driver's session.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Counters since the start.
    #[must_use]
    pub fn figures(&self) -> FunctionFigures {
        self.figures
    }

    /// Number of page requests without an answer.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.requests.len()
    }

    /// True while a further page request may be taken.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.requests.len() < self.limits.requests_max as usize
    }

    /// Handles a message that could not be decoded; `status` gives the reason.
    pub fn refuse(&mut self, status: Status) -> Reply {
        self.figures.events += 1;
        self.figures.invalid_events += 1;
        status.into()
    }

    /// Handles one message. Call in the order of the event queue.
    pub fn event(&mut self, event: &Event<'_>, device: &mut dyn DeviceSide) -> Reply {
        self.figures.events += 1;
        let reply = self.decide(event, device).unwrap_or_else(Reply::from);
        if reply.status.code == Code::Invalid {
            self.figures.invalid_events += 1;
        }
        reply
    }

    fn decide(&mut self, event: &Event<'_>, device: &mut dyn DeviceSide) -> Result<Reply, Status> {
        let limit = self.limits.ranges_max as usize;
        if event.count() > limit {
            return Err(invalid(COUNT_AT));
        }
        if self.phase == Phase::Nobody && event.opcode() != Opcode::Begin {
            return Err(invalid(0));
        }
        let status = match event {
            Event::Create { name, page_count } => self.create(*name, *page_count)?,
            Event::Destroy { space, farewell } => self.destroy(*space, *farewell)?,
            Event::Map {
                space,
                access,
                ranges,
            } => self.map(*space, *access, ranges)?,
            Event::Unmap { space, ranges } => self.unmap(*space, ranges)?,
            Event::Protect { space, ranges } => self.protect(*space, ranges)?,
            Event::Invalidate { space, ranges } => self.invalidate(*space, ranges)?,
            Event::UnmapAll { space } => {
                self.domain(*space)?.attributes().unmap_all();
                Status::OK
            }
            Event::Standing { space, pages } => return self.standing(*space, *pages),
            Event::Touched {
                space,
                pages,
                marks,
            } => return self.touched(*space, *pages, *marks),
            Event::Respond { answers } => self.respond(answers, device)?,
            Event::Begin => {
                self.begin(device);
                Status::OK
            }
            Event::Ready => self.ready(device)?,
            Event::Bar { name } => self.bar(*name)?,
            Event::Bounce { address, slots } => {
                device.land(Some((*address, *slots))).map_err(Status::of)?;
                Status::OK
            }
        };
        Ok(status.into())
    }

    /// The driver has gone. Its unanswered requests go to its successor.
    pub fn hang_up(&mut self, device: &mut dyn DeviceSide) {
        self.phase = Phase::Nobody;
        self.requests.forget_driver();
        land_nowhere(device);
    }

    /// Takes a page request from an engine. `Some` is to be sent to the driver now; otherwise it is
    /// already answered, or waits.
    #[must_use]
    pub fn request(
        &mut self,
        source: SourceNo,
        request: PageRequest,
        device: &mut dyn DeviceSide,
    ) -> Option<PageRequest> {
        let fate = match self.phase {
            Phase::Ready => self.fate(&request, device),
            Phase::Nobody | Phase::Begun => self.fate_without_driver(&request),
        };
        let taken = match fate {
            Fate::Send => self.requests.add_sent(source, request),
            Fate::Hold => self.requests.add_held(source, request),
            Fate::Answer(code) => {
                self.answer_here(source, &request, code, device);
                return None;
            }
        };
        if taken == Err(Duplicate) {
            tracing::error!(id = request.id.0, "an engine has used a request's id twice");
            self.answer_here(source, &request, ResponseCode::ResponseFailure, device);
            return None;
        }
        self.figures.requests_sent += u64::from(fate == Fate::Send);
        (fate == Fate::Send).then_some(request)
    }

    /// The next request that an earlier driver left, or that waited for this one.
    #[must_use]
    pub fn next_unsent(&mut self) -> Option<PageRequest> {
        let request = self.requests.next_unsent()?;
        self.figures.requests_sent += 1;
        self.figures.requests_sent_again += 1;
        Some(request)
    }

    /// True if [`Self::next_unsent`] may return one.
    #[must_use]
    pub fn has_unsent(&self) -> bool {
        self.requests.has_unsent()
    }
}

/// What happens to a page request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Send,
    Hold,
    Answer(ResponseCode),
}

/// Sessions.
impl FunctionCore {
    fn begin(&mut self, device: &mut dyn DeviceSide) {
        self.hang_up(device);
        self.session += 1;
        self.phase = Phase::Begun;
        self.domains.set_initial(Attribute::Unmapped);
    }

    fn ready(&mut self, device: &mut dyn DeviceSide) -> Result<Status, Status> {
        if self.phase != Phase::Begun {
            return Err(invalid(0));
        }
        self.phase = Phase::Ready;
        let session = self.session;
        let domains = &self.domains;
        self.barred.retain(|name, barred_in| {
            let stays = *barred_in == session;
            if !stays {
                domains.lift_bar(*name);
            }
            stays
        });
        let barred = &self.barred;
        self.spaces.retain(|_, space| {
            let stays = space.session == session || barred.contains_key(&space.domain.key());
            if !stays {
                space.domain.detach();
            }
            stays
        });
        // First change new domains, then existing ones: none can be missed in between.
        domains.set_initial(Attribute::ReadWrite);
        for domain in domains.all() {
            let is_free = !barred.contains_key(&domain.key());
            if is_free && !self.spaces.contains_key(&domain.id()) {
                domain.attributes().grant_all();
            }
        }
        for (source, request) in self.requests.unsent() {
            match self.fate(&request, device) {
                Fate::Send => self.requests.send_again(request.id),
                Fate::Hold => {}
                Fate::Answer(code) => {
                    self.requests.drop_request(request.id);
                    self.answer_here(source, &request, code, device);
                }
            }
        }
        Ok(Status::OK)
    }

    fn bar(&mut self, name: FileKey) -> Result<Status, Status> {
        let is_own = |space: &Space| space.domain.key() == name && space.session == self.session;
        if self.spaces.values().any(is_own) {
            return Err(Status::of(Code::Exists));
        }
        let is_new = !self.barred.contains_key(&name);
        if is_new && self.barred.len() >= self.limits.spaces_max as usize {
            return Err(Status::of(Code::Full));
        }
        self.barred.insert(name, self.session);
        self.domains.bar(name);
        let Some(domain) = self.domains.find(name) else {
            return Ok(Status::OK);
        };
        domain.attributes().unmap_all();
        let whole = FileRange::new(FilePage(0), FilePage(pages_of(&domain)));
        let leased = domain.attributes().leased_in(&[whole]);
        if leased.is_empty() {
            Ok(Status::OK)
        } else {
            Ok(status_of(Code::Busy, &leased))
        }
    }
}

/// Page requests.
impl FunctionCore {
    fn respond(
        &mut self,
        answers: &[Answer],
        device: &mut dyn DeviceSide,
    ) -> Result<Status, Status> {
        let mut first_unknown = None;
        for (index, answer) in answers.iter().enumerate() {
            if let Some((source, request)) = self.requests.answer(answer.id) {
                device.respond(source, answer.to_queue(request.queue));
            } else {
                self.figures.unknown_answers += 1;
                first_unknown.get_or_insert(index);
            }
        }
        match first_unknown {
            None => Ok(Status::OK),
            Some(index) => {
                let at = HEADER_BYTES + index * crate::wire::ANSWER_BYTES;
                Err(invalid(offset(at)))
            }
        }
    }

    /// What happens to a request while a driver is ready.
    fn fate(&self, request: &PageRequest, device: &dyn DeviceSide) -> Fate {
        if let RequestKind::Overwrite { slot } = request.kind
            && !device.is_bounce(slot, request.pages.len())
        {
            // Its content lies where this driver does not read it: nothing was installed of it.
            return Fate::Answer(ResponseCode::Success);
        }
        let own = self.spaces.get(&request.domain);
        if own.is_some_and(|space| space.session == self.session) {
            return Fate::Send;
        }
        let domains = self.domains.all();
        match domains.iter().find(|domain| domain.id() == request.domain) {
            Some(domain) if self.barred.contains_key(&domain.key()) => Fate::Hold,
            // Read-write by now: let the device try again. For an overwrite, nothing was installed.
            Some(_) => Fate::Answer(ResponseCode::Success),
            None => Fate::Answer(ResponseCode::InvalidRequest),
        }
    }

    /// What happens to a request before it is known which memory has pages elsewhere. Most wait,
    /// but not those that keep an engine from other work although they can be answered without a
    /// driver.
    fn fate_without_driver(&self, request: &PageRequest) -> Fate {
        match request.kind {
            // No driver has it, so none will install it late: the transfer starts again, and waits
            // like any other.
            RequestKind::Overwrite { .. } => Fate::Answer(ResponseCode::Success),
            // No page is evicted now: a page that may be touched and is a hole was discarded by the
            // guest, and reads as zeros.
            RequestKind::AliasFault if self.may_be_touched(request) => {
                Fate::Answer(ResponseCode::InvalidRequest)
            }
            RequestKind::Demand
            | RequestKind::Prefault
            | RequestKind::Blank
            | RequestKind::BlankAhead
            | RequestKind::AliasFault => Fate::Hold,
        }
    }

    fn may_be_touched(&self, request: &PageRequest) -> bool {
        let domains = self.domains.all();
        let domain = domains.iter().find(|domain| domain.id() == request.domain);
        domain.is_some_and(|domain| {
            let bitmap = domain.attributes().bitmap();
            bitmap.allows(request.pages, Access::Read)
        })
    }

    fn answer_here(
        &mut self,
        source: SourceNo,
        request: &PageRequest,
        code: ResponseCode,
        device: &mut dyn DeviceSide,
    ) {
        self.figures.requests_answered_here += 1;
        device.respond(source, PageResponse::to(request, code));
    }
}

fn land_nowhere(device: &mut dyn DeviceSide) {
    if let Err(code) = device.land(None) {
        tracing::error!(?code, "cannot release the bounce area");
    }
}

fn pages_of(domain: &DmaDomain) -> u64 {
    domain.attributes().bitmap().page_count()
}

const fn invalid(at: u32) -> Status {
    Status {
        code: Code::Invalid,
        detail: at,
        value: 0,
    }
}

fn offset(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

/// The status that names sections that were not done.
fn status_of(code: Code, sections: &[FileSection]) -> Status {
    Status {
        code,
        detail: offset(sections.len()),
        value: sections.first().map_or(0, |section| section.0),
    }
}
