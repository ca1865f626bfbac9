// SPDX-License-Identifier: Apache-2.0
//! The page fault queue of one connection: requests taken, checked, and answered by RESPOND.
//!
//! # Two sets of numbers
//! A device chooses the ids of requests and the numbers of spaces, and its successor
//! starts both anew. The service must not confuse them, so it sees our numbers: an id
//! that is used once in the driver's life, the number by which the host knows the
//! space, and a bounce buffer number that includes the connection. An answer whose id
//! is not outstanding here belongs to a device that is gone, and is dropped.
//!
//! # Invalid requests
//! An invalid request with a distinct id (one that is not outstanding) is refused
//! with `InvalidRequest`, and counted. A request whose id is still outstanding ends
//! the connection, because an answer would be ambiguous; so do more outstanding
//! requests than the device itself declares.

use super::{
    counts::Counts,
    line::{Gone, Line},
};
use crate::frontend::{
    area::{Area, BASE, BOUNCE_BUFFERS, FAULT_BUFFERS},
    event::{event, ring_event},
    ring::{Descriptor, Ring, RingError, WRITE},
};
use crate::wire::{self, Answer, REQUEST_BYTES, feature};
use pagetide_addr::{
    DomainId, PageRequest, PageResponse, RequestId, RequestKind, ResponseCode, Tier,
};
use std::{
    collections::{HashMap, HashSet},
    io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// Bits of a bounce buffer number that name the slot; the others name the connection.
const SLOT_BITS: u32 = BOUNCE_BUFFERS.trailing_zeros();
/// Length of a request, as in a descriptor.
#[expect(clippy::cast_possible_truncation, reason = "a constant far below 2^32")]
const REQUEST_LEN: u32 = REQUEST_BYTES as u32;

const _: () = assert!(BOUNCE_BUFFERS.is_power_of_two());

/// The next item of the page fault queue for the service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Taken {
    /// Nothing.
    Nothing,
    /// A request, to be answered with [`FaultQueue::answer_to`].
    Request(PageRequest),
    /// A request that is refused: the answer for the device.
    Refused(Answer),
}

/// The terms that were negotiated with the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Number of the connection.
    pub session: u32,
    /// The negotiated features.
    pub features: u64,
    /// Most requests that may be outstanding.
    pub requests_max: u32,
}

#[derive(Debug)]
struct State {
    ring: Ring,
    /// The device's ids by ours.
    outstanding: HashMap<RequestId, RequestId>,
    /// The device's ids.
    theirs: HashSet<RequestId>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct FaultQueue {
    area: Arc<Area>,
    line: Arc<Line>,
    terms: Terms,
    kick: OwnedFd,
    /// Our next id, over all connections.
    next_id: Arc<AtomicU64>,
    state: Mutex<State>,
}

impl FaultQueue {
    /// The queue on `ring`, which is empty; all buffers are then put into it.
    pub(crate) fn new(
        mut ring: Ring,
        area: Arc<Area>,
        line: Arc<Line>,
        terms: Terms,
        next_id: Arc<AtomicU64>,
    ) -> io::Result<Self> {
        (0..FAULT_BUFFERS)
            .try_for_each(|buffer| {
                let descriptor = Descriptor {
                    address: BASE + Area::request_at(buffer),
                    len: REQUEST_LEN,
                    flags: WRITE,
                    next: 0,
                };
                ring.describe(buffer, descriptor)?;
                ring.publish(buffer, REQUEST_LEN)
            })
            .and_then(|()| ring.show())
            .map_err(io::Error::other)?;
        Ok(Self {
            area,
            line,
            terms,
            kick: event()?,
            next_id,
            state: Mutex::new(State {
                ring,
                outstanding: HashMap::new(),
                theirs: HashSet::new(),
            }),
        })
    }

    /// The eventfd that wakes the device.
    pub(crate) fn kick(&self) -> &OwnedFd {
        &self.kick
    }

    /// The next item that the device has sent. `known` returns the host's number of a space; it may
    /// wait, and is called with no lock held. One thread at a time.
    pub(crate) fn next(&self, known: impl Fn(DomainId) -> Option<DomainId>) -> Result<Taken, Gone> {
        let Some((id, bytes)) = self.take()? else {
            return Ok(Taken::Nothing);
        };
        Ok(match self.check(&bytes, known, self.line.counts()) {
            None => Taken::Refused(refusal(id)),
            Some(request) => Taken::Request(self.accept(&mut self.lock(), request)?),
        })
    }

    /// The next request as the device has written it, and its id, which no other request has.
    fn take(&self) -> Result<Option<(RequestId, [u8; REQUEST_BYTES])>, Gone> {
        self.line.check()?;
        let mut state = self.lock();
        let Some(used) = state.ring.take().map_err(|error| self.broken(&error))? else {
            return Ok(None);
        };
        let mut bytes = [0; REQUEST_BYTES];
        let copied = (self.area.memory()).copy_from(Area::request_at(used.head), &mut bytes);
        debug_assert!(copied.is_ok(), "requests lie in the area");
        // From here on, the device may write a new request into the buffer.
        let shown = state.ring.publish(used.head, REQUEST_LEN);
        let shown = shown.and_then(|()| state.ring.show());
        if shown.map_err(|error| self.broken(&error))? {
            ring_event(&self.kick);
        }
        if used.len != REQUEST_LEN {
            let error = format_args!("a page request of {} bytes", used.len).to_string();
            self.line.break_off(&error);
            return Err(Gone);
        }
        let counts = self.line.counts();
        counts.requests.add();
        let id = wire::request_id(&bytes).unwrap_or(RequestId(0));
        if state.theirs.contains(&id) {
            counts.duplicate_requests.add();
            let why = format!("page request {} comes again before its answer", id.0);
            self.line.break_off(&why);
            return Err(Gone);
        }
        Ok(Some((id, bytes)))
    }

    /// The request with the host's number of its space; `None` if it is refused.
    fn check(
        &self,
        bytes: &[u8],
        known: impl Fn(DomainId) -> Option<DomainId>,
        counts: &Counts,
    ) -> Option<PageRequest> {
        let mut request = match wire::decode_request(bytes) {
            Ok(request) => request,
            Err(error) => {
                counts.malformed_requests.add();
                counts.complain(&format_args!("a page request is malformed: {error}"));
                return None;
            }
        };
        let Some(domain) = known(request.domain) else {
            counts.unknown_spaces.add();
            let space = request.domain.0;
            counts.complain(&format_args!(
                "it requests pages of the unknown space {space}"
            ));
            return None;
        };
        request.domain = domain;
        let agreed = match &mut request.kind {
            RequestKind::Overwrite { slot } => {
                let last = u64::from(*slot) + request.pages.len();
                let fits = last <= BOUNCE_BUFFERS;
                *slot |= self.terms.session << SLOT_BITS;
                fits && self.terms.features & feature::OVERWRITE != 0
            }
            RequestKind::Blank | RequestKind::BlankAhead => {
                self.terms.features & feature::BLANK != 0
            }
            RequestKind::Demand | RequestKind::Prefault | RequestKind::AliasFault => true,
        };
        let may_hold = self.terms.features & feature::INJECT != 0;
        if !agreed || (request.hold_us > 0 && !may_hold) {
            counts.malformed_requests.add();
            counts.complain(&"a page request of a kind that was not negotiated");
            return None;
        }
        Some(request)
    }

    /// Records the request under an id of ours.
    fn accept(&self, state: &mut State, mut request: PageRequest) -> Result<PageRequest, Gone> {
        let most = usize::try_from(self.terms.requests_max).unwrap_or(usize::MAX);
        if state.theirs.len() >= most {
            let why = format!("it has more than {most} page requests without an answer");
            self.line.break_off(&why);
            return Err(Gone);
        }
        let ours = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        state.theirs.insert(request.id);
        state.outstanding.insert(ours, request.id);
        request.id = ours;
        Ok(request)
    }

    /// The answer for the device; `None` if the request is not of this connection, or already
    /// answered. The device may reuse the id as soon as it has the answer, so it is removed here.
    pub(crate) fn answer_to(&self, response: &PageResponse) -> Option<Answer> {
        let mut state = self.lock();
        let id = state.outstanding.remove(&response.id)?;
        state.theirs.remove(&id);
        Some(Answer {
            id,
            ..Answer::from(response)
        })
    }

    /// Asks to be woken by the next request; true if one is already there.
    pub(crate) fn arm(&self) -> bool {
        let state = self.lock();
        self.line.check().is_ok() && state.ring.arm().is_ok_and(|is_there| is_there)
    }

    /// Asks not to be woken.
    pub(crate) fn disarm(&self) {
        if let Err(error) = self.lock().ring.disarm() {
            self.broken(&error);
        }
    }

    /// Reads bounce buffers from `slot` on, as a request of this connection names it.
    pub(crate) fn read_bounced(&self, slot: u32, count: u64, into: &mut Vec<u8>) -> bool {
        let own = slot & ((1 << SLOT_BITS) - 1);
        self.owns_slot(slot) && self.area.read_bounced(own, count, into)
    }

    /// True if a request of this connection names the slot.
    pub(crate) fn owns_slot(&self, slot: u32) -> bool {
        let tag = self.terms.session << SLOT_BITS;
        slot & !((1 << SLOT_BITS) - 1) == tag
    }

    fn broken(&self, error: &RingError) -> Gone {
        let why = format!("the page fault queue: {error}");
        self.line.break_off(&why);
        Gone
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The answer to an invalid request.
fn refusal(id: RequestId) -> Answer {
    Answer {
        id,
        code: ResponseCode::InvalidRequest,
        tier: Tier::Unknown,
        installed: 0,
        waited_ns: 0,
        handling_ns: 0,
    }
}
