// SPDX-License-Identifier: Apache-2.0
//! One connection to the function: set up by vhost-user messages, then used only through its
//! queues.

use super::{
    area::{Area, BOUNCE_BUFFERS},
    counts::Counts,
    events::{EventQueue, event},
    faults::{FaultQueue, Terms},
    line::{Gone, Line},
    log::LogQueue,
    ring::{Notify, Ring, RingPlace},
};
use crate::wire::{
    CONFIG_BYTES, Code, Config, EVENT_QUEUE, Event, FAULT_QUEUE, LOG_QUEUE, QUEUE_COUNT, Status,
    WireError, feature,
};
use pagetide_addr::{DomainId, FileKey};
use std::{
    collections::HashMap,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU64, mpsc},
    time::Duration,
};
use vhost::{
    VhostBackend, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend, VhostUserProtocolFeatures,
        message::{VhostUserConfigFlags, VhostUserHeaderFlag},
    },
};

/// The device keeps to virtio 1.
const VERSION_1: u64 = 1 << 32;
/// Notifications by index.
const EVENT_INDEX: u64 = 1 << 29;
/// The back end speaks vhost-user's protocol features.
const PROTOCOL_FEATURES: u64 = 1 << 30;
/// What a function must have.
const NEEDED: u64 = VERSION_1 | PROTOCOL_FEATURES;
/// What this driver makes use of, if it is there.
const WANTED: u64 = EVENT_INDEX
    | feature::OVERWRITE
    | feature::INJECT
    | feature::TOUCHED
    | feature::ACCESS_LOG
    | feature::LOG_LOSSES;
/// Bytes of the configuration space, as in a message.
#[expect(clippy::cast_possible_truncation, reason = "a constant of 64")]
const CONFIG_LEN: u32 = CONFIG_BYTES as u32;
/// Longest wait for DMA that is accepted from a device: section locks are held meanwhile.
const LEASE_WAIT_MAX: Duration = Duration::from_secs(1);
/// How long a device may take to negotiate and start its queues: it may be busy removing a disk.
const AGREE_PATIENCE: Duration = Duration::from_secs(10);
/// Time between two checks whether it is still wanted.
const AGREE_LOOK: Duration = Duration::from_millis(100);
/// Most outstanding requests that are tracked; a device that declares more gets only these.
const REQUESTS_MAX: u32 = 1 << 16;

/// Why a connection cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No process listens.
    #[error("no process listens at socket {path}: {source}")]
    Socket {
        /// The socket.
        path: std::path::PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A message failed.
    #[error("it does not accept {message}: {source}")]
    Message {
        /// The message.
        message: &'static str,
        /// The error.
        source: vhost::Error,
    },
    /// It lacks a feature.
    #[error("it is no VPRI function: features {offered:#x} lack {missing:#x}")]
    Features {
        /// The offered features.
        offered: u64,
        /// The missing features.
        missing: u64,
    },
    /// It does not report its configuration.
    #[error("it has no configuration space")]
    NoConfig,
    /// Its configuration is that of something else.
    #[error("its configuration space is not that of a VPRI function of this version: {0}")]
    Config(#[from] WireError),
    /// It may wait longer than a host can.
    #[error("it waits up to {0:?} for DMA; the maximum is {LEASE_WAIT_MAX:?}")]
    LeaseWait(Duration),
    /// No answer in time.
    #[error("it does not answer")]
    Silent,
    /// It disconnected, or misbehaved, before it was set up.
    #[error("it disconnected while it was set up")]
    Lost,
    /// It refuses an event that it must accept.
    #[error("it refuses {event}: {code:?}")]
    Refused {
        /// The event.
        event: &'static str,
        /// The status.
        code: Code,
    },
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] io::Error),
}

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

fn failed(message: &'static str) -> impl Fn(vhost::Error) -> ConnectError {
    move |source| ConnectError::Message { message, source }
}

/// Runs `work`, which talks to a back end on another copy of `closing`, for at most
/// [`AGREE_PATIENCE`] or until `is_stopped`. vhost's front end waits for answers without limit:
/// closing the socket ends that wait.
pub(crate) fn bounded<T: Send>(
    closing: &UnixStream,
    is_stopped: impl Fn() -> bool,
    work: impl FnOnce() -> Result<T, ConnectError> + Send,
) -> Result<T, ConnectError> {
    let (done, is_done) = mpsc::channel();
    std::thread::scope(|scope| {
        let working = scope.spawn(move || {
            let worked = work();
            if done.send(()).is_err() {
                tracing::debug!("a back end that was given up has answered after all");
            }
            worked
        });
        let mut left = AGREE_PATIENCE;
        while is_done.recv_timeout(AGREE_LOOK) == Err(mpsc::RecvTimeoutError::Timeout) {
            left = left.saturating_sub(AGREE_LOOK);
            if left.is_zero() || is_stopped() {
                left = Duration::ZERO;
                if let Err(error) = closing.shutdown(std::net::Shutdown::Both) {
                    tracing::debug!(%error, "hanging up on a back end that does not answer");
                }
                break;
            }
        }
        let worked = working.join().map_err(|_| ConnectError::Lost)?;
        if left.is_zero() {
            return Err(ConnectError::Silent);
        }
        worked
    })
}

/// A front end that has negotiated `wanted` with its back end, and the properties of the back end.
pub(crate) fn agree(
    stream: UnixStream,
    wanted: u64,
) -> Result<(Frontend, u64, Config), ConnectError> {
    let mut frontend = Frontend::from_stream(stream, u64::from(QUEUE_COUNT));
    frontend.set_owner().map_err(failed("SET_OWNER"))?;
    let offered = frontend.get_features().map_err(failed("GET_FEATURES"))?;
    let missing = NEEDED & !offered;
    if missing != 0 {
        return Err(ConnectError::Features { offered, missing });
    }
    let features = offered & (NEEDED | wanted);
    frontend
        .set_features(features)
        .map_err(failed("SET_FEATURES"))?;
    let protocol = frontend
        .get_protocol_features()
        .map_err(failed("GET_PROTOCOL_FEATURES"))?;
    let use_of = VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK;
    let agreed = protocol & use_of;
    if !agreed.contains(VhostUserProtocolFeatures::CONFIG) {
        return Err(ConnectError::NoConfig);
    }
    frontend
        .set_protocol_features(agreed)
        .map_err(failed("SET_PROTOCOL_FEATURES"))?;
    if agreed.contains(VhostUserProtocolFeatures::REPLY_ACK) {
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }
    let flags = VhostUserConfigFlags::empty();
    let (_, bytes) = frontend
        .get_config(0, CONFIG_LEN, flags, &[0; CONFIG_BYTES])
        .map_err(failed("GET_CONFIG"))?;
    let config = Config::decode(&bytes)?;
    Ok((frontend, features, config))
}

/// How notifications work under `features`.
pub(crate) const fn notify_of(features: u64) -> Notify {
    if features & EVENT_INDEX == 0 {
        Notify::Flags
    } else {
        Notify::EventIndex
    }
}

/// Hands queue `index`, which lies at `place`, to the device.
pub(crate) fn start_queue(
    frontend: &mut Frontend,
    index: u16,
    place: RingPlace,
    [call, errors, kick]: [BorrowedFd<'_>; 3],
) -> Result<(), ConnectError> {
    let queue = usize::from(index);
    let addresses = VringConfigData {
        queue_max_size: place.size,
        queue_size: place.size,
        flags: 0,
        desc_table_addr: super::area::BASE + place.descriptors,
        used_ring_addr: super::area::BASE + place.used,
        avail_ring_addr: super::area::BASE + place.available,
        log_addr: None,
    };
    let event = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map(pagetide_sys::event::for_vhost);
    frontend
        .set_vring_num(queue, place.size)
        .map_err(failed("SET_VRING_NUM"))?;
    frontend
        .set_vring_base(queue, 0)
        .map_err(failed("SET_VRING_BASE"))?;
    frontend
        .set_vring_addr(queue, &addresses)
        .map_err(failed("SET_VRING_ADDR"))?;
    frontend
        .set_vring_call(queue, &event(call)?)
        .map_err(failed("SET_VRING_CALL"))?;
    frontend
        .set_vring_err(queue, &event(errors)?)
        .map_err(failed("SET_VRING_ERR"))?;
    frontend
        .set_vring_kick(queue, &event(kick)?)
        .map_err(failed("SET_VRING_KICK"))?;
    frontend
        .set_vring_enable(queue, true)
        .map_err(failed("SET_VRING_ENABLE"))
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
        let terms = (terms, ours.next_id);
        let faults = FaultQueue::new(memory(Area::fault_ring()), both, own_line, terms)?;
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
