// SPDX-License-Identifier: Apache-2.0
//! The page fault queue of an engine, and the way its responses come back (VPRI
//! 5.2).
//!
//! ```text
//!   engine                                             host
//!   DeviceEnd::submit ──► page requests (bounded) ──► HostEnd::next
//!   DeviceEnd::next   ◄── page responses           ◄── HostEnd::respond
//!             ▲ doorbell                    doorbell ▲
//! ```
//! One pair of queues serves every device of the engine, as one PFQ serves all
//! virtual functions of a DPU. Exactly one response answers a request. The
//! response queue is as long as the request queue, and an engine never has more
//! requests outstanding than that, so a response always finds room; at the
//! limit the engine stops popping chains and nothing grows. A request that the
//! engine has given up (it waited too long) counts until it is answered, so
//! that its late response finds room, too.
//!
//! A host in another process may be gone for a while; [`HostEnd::set_host`] declares
//! it. The engine's timeouts on its page requests stop meanwhile.
//!
//! A doorbell is an eventfd that is rung only if the other side has declared
//! that it is about to sleep: it arms the bell, checks the queue once more, and
//! sleeps. The producer pushes, then checks the bell. Sequentially consistent
//! fences on both sides keep the two checks from passing one another.

use crate::{bounce::BounceArea, handoff::Handoff, source::FaultSource};
use pagetide_addr::{PageRequest, PageResponse};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd, BorrowedFd, OwnedFd},
};
use std::{
    io,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    },
};

/// The engine has as many page requests outstanding as the queue holds: pop no more chains.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the page fault queue is full ({0} requests outstanding)")]
pub struct QueueFull(pub usize);

/// An eventfd that is written to only when its owner sleeps.
#[derive(Debug)]
pub struct Doorbell {
    event: OwnedFd,
    armed: AtomicBool,
}

impl Doorbell {
    /// A doorbell that is not armed.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            event,
            armed: AtomicBool::new(false),
        })
    }

    /// Declares that the owner is about to sleep. It must check its queues once more afterwards.
    pub fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
        // Pairs with the fence in `ring`.
        fence(Ordering::SeqCst);
    }

    /// Declares that the owner is awake, and consumes pending rings.
    ///
    /// # Errors
    /// None in a correct program.
    pub fn disarm(&self) -> io::Result<()> {
        self.armed.store(false, Ordering::Relaxed);
        match rustix::io::read(&self.event, &mut [0; 8]) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Wakes the owner if it sleeps.
    pub fn ring(&self) {
        // Pairs with the fence in `arm`: our push is visible before we check.
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::Relaxed) {
            self.ring_anyway();
        }
    }

    /// Wakes the owner, or prevents its next sleep.
    pub fn ring_anyway(&self) {
        let written = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        // The descriptor is ours; but another device that has it, too, may have filled the counter,
        // which counts as a ring. Any other failure is our own bug.
        debug_assert!(matches!(written, Ok(8) | Err(rustix::io::Errno::AGAIN)));
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Whether a host is there to answer page requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostPresence {
    /// A host takes requests.
    Here,
    /// No host does: requests wait in the queue until one is there again.
    Away,
}

#[derive(Debug)]
struct Channel {
    requests: Handoff<PageRequest>,
    responses: Handoff<PageResponse>,
    outstanding: AtomicUsize,
    bounce: RwLock<Option<Arc<BounceArea>>>,
    host_away: AtomicBool,
    host_bell: Arc<Doorbell>,
    engine_bell: Arc<Doorbell>,
}

/// The engine's end of its page fault queue.
#[derive(Debug)]
pub struct DeviceEnd(Arc<Channel>);

/// The host's end of an engine's page fault queue.
#[derive(Debug, Clone)]
pub struct HostEnd(Arc<Channel>);

/// Makes the page fault queue of one engine, for at most `capacity` requests outstanding.
/// `engine_bell` wakes the engine, `host_bell` the service (which may have one for all engines).
#[must_use]
pub fn fault_queue(
    capacity: usize,
    engine_bell: Arc<Doorbell>,
    host_bell: Arc<Doorbell>,
) -> (DeviceEnd, HostEnd) {
    let channel = Arc::new(Channel {
        requests: Handoff::new(capacity),
        responses: Handoff::new(capacity),
        outstanding: AtomicUsize::new(0),
        bounce: RwLock::default(),
        host_away: AtomicBool::new(false),
        host_bell,
        engine_bell,
    });
    (DeviceEnd(channel.clone()), HostEnd(channel))
}

impl DeviceEnd {
    /// Puts a request into the queue without waking the host: follow it by [`Self::kick`], or let
    /// the engine serve it itself.
    ///
    /// # Errors
    /// [`QueueFull`]: the request was not taken.
    pub fn submit(&self, request: PageRequest) -> Result<(), QueueFull> {
        let channel = &self.0;
        let limit = channel.requests.capacity();
        // Only this engine submits, so a concurrent change can only lower the count.
        if channel.outstanding.load(Ordering::Acquire) >= limit {
            return Err(QueueFull(limit));
        }
        channel.outstanding.fetch_add(1, Ordering::Relaxed);
        if channel.requests.push(request).is_err() {
            channel.outstanding.fetch_sub(1, Ordering::Relaxed);
            return Err(QueueFull(limit));
        }
        Ok(())
    }

    /// Wakes the host if it sleeps and a request waits.
    pub fn kick(&self) {
        if !self.0.requests.is_empty() {
            self.0.host_bell.ring();
        }
    }

    /// The next response, if one is there.
    #[must_use]
    pub fn next(&self) -> Option<PageResponse> {
        let response = self.0.responses.pop()?;
        self.0.outstanding.fetch_sub(1, Ordering::Release);
        Some(response)
    }

    /// True if a response waits.
    #[must_use]
    pub fn has_response(&self) -> bool {
        !self.0.responses.is_empty()
    }

    /// Requests sent whose responses have not been taken.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.0.outstanding.load(Ordering::Acquire)
    }

    /// Where the engine may direct transfers whose pages are absent; `None` as long as its host takes
    /// no overwrites.
    #[must_use]
    pub fn bounce(&self) -> Option<Arc<BounceArea>> {
        self.0.bounce()
    }

    /// Whether a host is there to answer.
    #[must_use]
    pub fn host(&self) -> HostPresence {
        if self.0.host_away.load(Ordering::Relaxed) {
            HostPresence::Away
        } else {
            HostPresence::Here
        }
    }
}

impl Channel {
    fn bounce(&self) -> Option<Arc<BounceArea>> {
        let bounce = self.bounce.read();
        bounce.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl HostEnd {
    /// Gives the engine bounce buffers, in place of those it may have had, or takes them away.
    /// Overwrites that name a slot of an earlier area may come as long as transfers that began with
    /// that area are outstanding.
    pub fn set_bounce(&self, area: Option<Arc<BounceArea>>) {
        let mut bounce = (self.0.bounce.write()).unwrap_or_else(PoisonError::into_inner);
        *bounce = area;
    }

    /// Most requests that can be outstanding.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.0.requests.capacity()
    }

    /// The next request, if one is there.
    #[must_use]
    pub fn next(&self) -> Option<PageRequest> {
        self.0.requests.pop()
    }

    /// True if a request waits.
    #[must_use]
    pub fn has_request(&self) -> bool {
        !self.0.requests.is_empty()
    }

    /// The bell that the engine rings when it has put a request in.
    #[must_use]
    pub fn bell(&self) -> &Arc<Doorbell> {
        &self.0.host_bell
    }

    /// Answers a request. Each request is answered exactly once.
    ///
    /// # Panics
    /// If more responses are given than requests were taken.
    pub fn respond(&self, response: PageResponse) {
        assert!(
            self.0.responses.push(response).is_ok(),
            "more page responses than requests"
        );
        self.0.engine_bell.ring();
    }

    /// Declares whether a host is there to answer; by default there is one.
    pub fn set_host(&self, presence: HostPresence) {
        let away = presence == HostPresence::Away;
        self.0.host_away.store(away, Ordering::Relaxed);
        // A sleeping engine recomputes how long it may sleep.
        self.0.engine_bell.ring();
    }
}

impl FaultSource for HostEnd {
    fn next(&self) -> Option<PageRequest> {
        HostEnd::next(self)
    }

    /// The engine checks the bell, which its owner arms.
    fn arm(&self) -> bool {
        self.has_request()
    }

    fn respond(&self, response: PageResponse) {
        HostEnd::respond(self, response);
    }

    fn read_bounced(&self, slot: u32, count: u64, into: &mut Vec<u8>) -> bool {
        let area = self.0.bounce();
        area.is_some_and(|area| area.read(slot, count, into))
    }
}

/// Called by an engine that has nothing else to do: it serves its own page requests, which saves
/// both wake-ups. Never waits: a request that cannot be served at once is left to the service.
pub trait FaultAssist: Send + Sync {
    /// Serves waiting requests of this engine; true if none is left waiting.
    fn assist(&self, engine: usize) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::{Access, DeviceId, DomainId, FilePage, QueueId, RequestId, ResponseCode};

    fn request(id: u64) -> PageRequest {
        PageRequest::demand(
            RequestId(id),
            DeviceId(1),
            QueueId(0),
            DomainId(0),
            FilePage(id).single(),
            Access::Read,
        )
    }

    fn pair(capacity: usize) -> (DeviceEnd, HostEnd) {
        let bell = || Arc::new(Doorbell::new().unwrap());
        fault_queue(capacity, bell(), bell())
    }

    #[test]
    fn queue_at_its_limit_refuses_until_a_response_is_taken() {
        let (device, host) = pair(2);
        device.submit(request(1)).unwrap();
        device.submit(request(2)).unwrap();
        assert_eq!(device.submit(request(3)), Err(QueueFull(2)));
        let taken = host.next().unwrap();
        assert_eq!(
            device.submit(request(3)),
            Err(QueueFull(2)),
            "taken by the host is still outstanding"
        );
        host.respond(PageResponse::to(&taken, ResponseCode::Success));
        assert_eq!(device.next().unwrap().id, RequestId(1));
        device.submit(request(3)).unwrap();
        assert_eq!(device.outstanding(), 2);
    }

    #[test]
    fn engine_learns_that_its_host_has_gone_and_come_back() {
        let (device, host) = pair(2);
        assert_eq!(device.host(), HostPresence::Here);
        host.set_host(HostPresence::Away);
        assert_eq!(device.host(), HostPresence::Away);
        host.set_host(HostPresence::Here);
        assert_eq!(device.host(), HostPresence::Here);
    }

    #[test]
    fn doorbell_whose_counter_somebody_has_filled_is_rung_all_the_same() {
        let bell = Doorbell::new().unwrap();
        let most = (u64::MAX - 1).to_ne_bytes();
        assert_eq!(rustix::io::write(&bell, &most), Ok(8));
        bell.ring_anyway();
        bell.disarm().unwrap();
        bell.ring_anyway();
        let mut count = [0; 8];
        assert_eq!(rustix::io::read(&bell, &mut count), Ok(8));
        assert_eq!(u64::from_ne_bytes(count), 1);
    }

    #[test]
    fn doorbell_is_rung_only_when_armed() {
        let bell = Doorbell::new().unwrap();
        bell.ring();
        let mut byte = [0; 8];
        assert_eq!(
            rustix::io::read(&bell, &mut byte),
            Err(rustix::io::Errno::AGAIN)
        );
        bell.arm();
        bell.ring();
        bell.ring();
        assert_eq!(rustix::io::read(&bell, &mut byte), Ok(8));
        assert_eq!(u64::from_ne_bytes(byte), 1);
    }

    #[test]
    fn sleeper_is_always_woken_by_a_request_under_contention() {
        let engine_bell = Arc::new(Doorbell::new().unwrap());
        let host_bell = Arc::new(Doorbell::new().unwrap());
        let (device, host) = fault_queue(4, engine_bell, host_bell.clone());
        let service = std::thread::spawn(move || {
            let mut served = 0;
            while served < 20_000 {
                while let Some(r) = host.next() {
                    host.respond(PageResponse::to(&r, ResponseCode::Success));
                    served += 1;
                }
                host_bell.arm();
                if !host.has_request() && served < 20_000 {
                    let mut polls = [rustix::event::PollFd::new(
                        &host_bell,
                        rustix::event::PollFlags::IN,
                    )];
                    rustix::event::poll(&mut polls, None).unwrap();
                }
                host_bell.disarm().unwrap();
            }
        });
        let mut answered = 0;
        let mut asked = 0;
        while answered < 20_000 {
            if asked < 20_000 && device.submit(request(asked)).is_ok() {
                asked += 1;
                device.kick();
            }
            while device.next().is_some() {
                answered += 1;
            }
        }
        service.join().unwrap();
    }
}
