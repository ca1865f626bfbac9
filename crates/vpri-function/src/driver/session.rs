// SPDX-License-Identifier: Apache-2.0
//! One connection to the function: set up by vhost-user messages, then used only through its
//! queues.

use super::{
    counts::Counts,
    events::EventQueue,
    faults::{FaultQueue, Terms},
    line::{Gone, Line},
    log::LogQueue,
};
use crate::frontend::{
    area::{Area, BOUNCE_BUFFERS},
    connect::{ConnectError, EVENT_INDEX, LEASE_WAIT_MAX, agree, failed, notify_of, start_queue},
    event::event,
    ring::Ring,
};
use crate::wire::{Code, Config, EVENT_QUEUE, Event, FAULT_QUEUE, LOG_QUEUE, Status, feature};
use pagetide_addr::{DomainId, FileKey};
use std::{
    collections::HashMap,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
    time::Duration,
};
use vhost::{VhostBackend, vhost_user::Frontend};

/// What this driver makes use of, if it is there.
const WANTED: u64 = EVENT_INDEX
    | feature::OVERWRITE
    | feature::BLANK
    | feature::INJECT
    | feature::TOUCHED
    | feature::ACCESS_LOG
    | feature::LOG_LOSSES;
/// Most outstanding requests that are tracked; a device that declares more gets only these.
const REQUESTS_MAX: u32 = 1 << 16;

/// What all connections of a driver share.
#[derive(Debug)]
pub(crate) struct Ours<'a> {
    /// Number of this connection, not 0.
    pub number: u32,
    /// Woken by page requests.
    pub bell: BorrowedFd<'a>,
    /// Ids of page requests.
    pub next_id: Arc<AtomicU64>,
    /// Counters.
    pub counts: Arc<Counts>,
}

/// See the module.
pub(crate) struct Session {
    number: u32,
    config: Config,
    features: u64,
    line: Arc<Line>,
    /// Rung by the device when it gives a queue up.
    errors: OwnedFd,
    /// Its spaces: the host's numbers by the device's, including spaces that were destroyed since.
    spaces: Mutex<HashMap<DomainId, DomainId>>,
    /// Held from before a CREATE until its space is known, see [`Self::creating`].
    creating: Mutex<()>,
    /// Keeps the socket open, and with it the device's queues.
    _frontend: Frontend,
    pub(crate) events: EventQueue,
    pub(crate) faults: FaultQueue,
    /// Present if the device logs accesses.
    pub(crate) log: Option<LogQueue>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut all = f.debug_struct("Session");
        all.field("number", &self.number);
        all.field("config", &self.config);
        all.field("line", &self.line).finish_non_exhaustive()
    }
}

impl Session {
    /// Talks to the back end on `stream` until its queues run.
    pub(crate) fn open(stream: UnixStream, ours: Ours<'_>) -> Result<Self, ConnectError> {
        let line = Arc::new(Line::new(stream.try_clone()?, ours.counts));
        let (mut frontend, features, config) = agree(stream, WANTED)?;
        let lease_wait = Duration::from_micros(u64::from(config.lease_wait_us));
        if lease_wait > LEASE_WAIT_MAX {
            return Err(ConnectError::LeaseWait(lease_wait));
        }
        let area = Arc::new(Area::new()?);
        let memory = |place| Ring::new(Arc::clone(area.memory()), place, notify_of(features));
        let terms = Terms {
            session: ours.number,
            features,
            requests_max: config.requests_max.min(REQUESTS_MAX),
        };
        let (both, own_line) = (Arc::clone(&area), Arc::clone(&line));
        let events = EventQueue::new(memory(Area::event_ring()), both, own_line, lease_wait)?;
        let (both, own_line) = (Arc::clone(&area), Arc::clone(&line));
        let ring = memory(Area::fault_ring());
        let faults = FaultQueue::new(ring, both, own_line, terms, ours.next_id)?;
        let log = match features & feature::ACCESS_LOG {
            0 => None,
            _ => {
                let (area, line) = (Arc::clone(&area), Arc::clone(&line));
                Some(LogQueue::new(memory(Area::log_ring()), area, line)?)
            }
        };
        let errors = event()?;
        frontend
            .set_mem_table(&[area.region()])
            .map_err(failed("SET_MEM_TABLE"))?;
        let event_fds = [
            events.called().as_fd(),
            errors.as_fd(),
            events.kick().as_fd(),
        ];
        start_queue(&mut frontend, EVENT_QUEUE, Area::event_ring(), event_fds)?;
        let fault_fds = [ours.bell, errors.as_fd(), faults.kick().as_fd()];
        start_queue(&mut frontend, FAULT_QUEUE, Area::fault_ring(), fault_fds)?;
        if let Some(log) = &log {
            let log_fds = [log.call().as_fd(), errors.as_fd(), log.kick().as_fd()];
            start_queue(&mut frontend, LOG_QUEUE, Area::log_ring(), log_fds)?;
        }
        Ok(Self {
            number: ours.number,
            config,
            features,
            line,
            errors,
            spaces: Mutex::default(),
            creating: Mutex::default(),
            _frontend: frontend,
            events,
            faults,
            log,
        })
    }

    /// Its number, never 0.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// The device's configuration.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// True if `feature` was negotiated.
    pub(crate) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Tells whether the connection is still up.
    pub(crate) fn line(&self) -> &Line {
        &self.line
    }

    /// Rung by the device when it gives a queue up.
    pub(crate) fn errors(&self) -> &OwnedFd {
        &self.errors
    }

    /// The process at the other end of the socket.
    pub(crate) fn process(&self) -> Option<u32> {
        let credentials = rustix::net::sockopt::socket_peercred(self.line.stream());
        let credentials = credentials
            .inspect_err(|error| tracing::warn!(%error, "cannot tell the process of the DPU"));
        let pid = credentials.map(|it| it.pid.as_raw_nonzero().get());
        pid.ok().and_then(|pid| u32::try_from(pid).ok())
    }

    /// Sends an event and waits for the device's status.
    pub(crate) fn tell(&self, event: &Event<'_>) -> Result<Status, Gone> {
        self.events.call(event).map(|reply| reply.status)
    }

    /// Like [`Self::tell`] during setup, when the device must obey.
    pub(crate) fn demand(&self, event: &Event<'_>, name: &'static str) -> Result<(), ConnectError> {
        match self.tell(event) {
            Ok(status) if status.code == Code::Ok => Ok(()),
            Ok(status) => Err(ConnectError::Refused {
                event: name,
                code: status.code,
            }),
            Err(Gone) => Err(ConnectError::Lost),
        }
    }

    /// A driver's first event.
    pub(crate) fn begin(&self) -> Result<(), ConnectError> {
        self.demand(&Event::Begin, "BEGIN")?;
        if self.has(feature::OVERWRITE) {
            let bounce = Event::Bounce {
                address: Area::bounce_address(),
                slots: BOUNCE_BUFFERS,
            };
            self.demand(&bounce, "BOUNCE")?;
        }
        Ok(())
    }

    /// Bars devices from the memory `name`. DMA that began before may still be under way.
    pub(crate) fn bar(&self, name: FileKey) -> Result<(), ConnectError> {
        match self.tell(&Event::Bar { name }) {
            Ok(status) if matches!(status.code, Code::Ok | Code::Busy) => Ok(()),
            Ok(status) => Err(ConnectError::Refused {
                event: "BAR",
                code: status.code,
            }),
            Err(Gone) => Err(ConnectError::Lost),
        }
    }

    /// The device's space `remote` is the host's `ours`.
    pub(crate) fn know(&self, remote: DomainId, ours: DomainId) {
        self.spaces().insert(remote, ours);
    }

    /// Hold this from before a CREATE until its space is [known](Self::know): the device may
    /// request pages of the space before we have read its number. A thread that meets an unknown
    /// number waits for this.
    pub(crate) fn creating(&self) -> MutexGuard<'_, ()> {
        self.creating.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The host's number of a space that the device has, or had. May wait for a CREATE that is
    /// under way, so no other lock may be held.
    pub(crate) fn known(&self, remote: DomainId) -> Option<DomainId> {
        let look = || self.spaces().get(&remote).copied();
        look().or_else(|| {
            let _none_under_way = self.creating();
            look()
        })
    }

    /// The host's numbers by the device's.
    pub(crate) fn spaces(&self) -> MutexGuard<'_, HashMap<DomainId, DomainId>> {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
