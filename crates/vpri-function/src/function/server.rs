// SPDX-License-Identifier: Apache-2.0
//! [`FunctionServer`]: the function as a vhost-user back end, served by one thread.
//!
//! ```text
//!                  kicks ──┐
//!   connection, listener ──┼──► pt-vpri ──► State (one lock) ◄── assist ── engines
//!     bell of the engines ─┘
//! ```
//! The thread sleeps only after it has armed all its wake-up sources and has checked
//! once more. It never waits for a driver: page requests that a driver does not take
//! stay in the engines' bounded queues. One driver is served at a time; another is
//! turned away until the first has hung up.

use super::{
    backend::FunctionBackend,
    core::{FunctionCore, FunctionFigures, Phase},
    requests::SourceNo,
    rings::Broken,
    state::{PageRequestSources, QueueFigures, SharedState, State},
};
use crate::wire::Config;
use pagetide_sys::socket::{self, SocketError};
use pagetide_vhost_backend::{Connection, Served};
use pagetide_vpri::{
    access_log::AccessLog,
    domain::DomainTable,
    queue::{Doorbell, FaultAssist, HostEnd},
};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    fd::{AsFd, OwnedFd},
    io::{Errno, ReadWriteFlags},
};
use std::{
    io,
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, SystemTime},
};

/// Most spaces of a driver.
const SPACES_MAX: u32 = 4096;
/// Most elements of one event.
const RANGES_MAX: u32 = 1024;
/// How long an event waits for DMA, in microseconds: later events wait behind it.
const LEASE_WAIT_US: u32 = 200;
/// How long a driver may take over one vhost-user message that it has begun. A slower one is
/// disconnected, since its stream is out of step.
const MESSAGE_WAIT: Duration = Duration::from_secs(1);
/// How long records of the access log wait for more, in nanoseconds: well below the 100 ms after which
/// a driver must receive them.
const LOG_WAIT_NS: i64 = 40_000_000;

/// The parts of a function.
#[derive(Debug)]
pub struct FunctionParts {
    /// Where drivers connect.
    pub socket: PathBuf,
    /// The memory of all devices.
    pub domains: Arc<DomainTable>,
    /// Queues of page requests; an engine's is at the engine's number.
    pub hosts: Vec<HostEnd>,
    /// The first this many of them are engines.
    pub engine_count: usize,
    /// The bell of all of these queues.
    pub bell: Arc<Doorbell>,
}

/// Why a function cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum FunctionError {
    /// Its socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// Its thread, or a descriptor that it needs.
    #[error("the VPRI function cannot be started: {0}")]
    Kernel(#[from] io::Error),
}

/// A function that serves drivers until it is dropped.
#[derive(Debug)]
pub struct FunctionServer {
    state: SharedState,
    log: Arc<AccessLog>,
    socket: PathBuf,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl FunctionServer {
    /// Listens, and serves. From now on, memory that devices map is unmapped until a driver is
    /// ready.
    ///
    /// # Errors
    /// [`FunctionError`].
    pub fn start(parts: FunctionParts) -> Result<Self, FunctionError> {
        let requests: usize = parts.hosts.iter().map(HostEnd::capacity).sum();
        let limits = Config {
            spaces_max: SPACES_MAX,
            requests_max: u32::try_from(requests).unwrap_or(u32::MAX).max(1),
            ranges_max: RANGES_MAX,
            lease_wait_us: LEASE_WAIT_US,
            generation: generation(),
        };
        let core = FunctionCore::new(parts.domains, limits);
        let log = Arc::new(AccessLog::new(parts.engine_count));
        let sources = PageRequestSources {
            hosts: parts.hosts,
            engine_count: parts.engine_count,
        };
        let state = SharedState::new(State::new(core, sources, Arc::clone(&log)));
        let listener = socket::bind(&parts.socket)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(eventfd(0, flags).map_err(io::Error::from)?);
        let mut server = Server {
            state: state.clone(),
            listener,
            bell: parts.bell,
            stop: Arc::clone(&stop),
            driver: None,
        };
        let thread = std::thread::Builder::new()
            .name("pt-vpri".into())
            .spawn(move || server.run())?;
        Ok(Self {
            state,
            log,
            socket: parts.socket,
            stop,
            thread: Some(thread),
        })
    }

    /// Lets engines put their own page requests into the page fault queue.
    #[must_use]
    pub fn assist(&self) -> Arc<dyn FaultAssist> {
        Arc::new(Assist(self.state.clone()))
    }

    /// Where engines record their DMA accesses, each with the pen of its number.
    #[must_use]
    pub fn access_log(&self) -> &Arc<AccessLog> {
        &self.log
    }

    /// Its limits.
    #[must_use]
    pub fn limits(&self) -> Config {
        *self.state.lock().core.limits()
    }

    /// State of its driver's session.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.state.lock().core.phase()
    }

    /// Counters since the start.
    #[must_use]
    pub fn figures(&self) -> (FunctionFigures, QueueFigures) {
        let state = self.state.lock();
        (state.core.figures(), state.figures)
    }

    /// Outstanding page requests.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.state.lock().core.outstanding()
    }
}

impl Drop for FunctionServer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        if let Err(error) = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes()) {
            tracing::error!(%error, "cannot stop the VPRI function");
            return;
        }
        if thread.join().is_err() {
            tracing::error!("the thread of the VPRI function panicked");
        }
        if let Err(error) = std::fs::remove_file(&self.socket) {
            tracing::warn!(socket = %self.socket.display(), %error, "socket not removed");
        }
    }
}

/// Changes with each start: it lets a driver distinguish a device that has lost its state from one
/// that was disconnected.
fn generation() -> u32 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let nanos = since.map_or(0, |since| since.subsec_nanos() ^ low_half(since.as_secs()));
    nanos ^ std::process::id().rotate_left(16)
}

fn low_half(number: u64) -> u32 {
    u32::try_from(number & u64::from(u32::MAX)).unwrap_or(0)
}

struct Assist(SharedState);

impl FaultAssist for Assist {
    /// The lock's holder may be waiting for a lease of this very engine. In that case the thread
    /// sends the requests once it is done.
    fn assist(&self, engine: usize) -> bool {
        let Some(mut state) = self.0.try_lock() else {
            return false;
        };
        let own = SourceNo(engine)..SourceNo(engine + 1);
        // The thread will also find a broken ring, and disconnect the driver.
        let sent = state.send_requests(own).is_ok();
        sent && (state.outside.hosts.get(engine)).is_none_or(|host| !host.has_request())
    }
}

/// A connection.
struct Driver {
    connection: Connection<FunctionBackend>,
    stream: UnixStream,
}

struct Server {
    state: SharedState,
    listener: UnixListener,
    bell: Arc<Doorbell>,
    stop: Arc<OwnedFd>,
    driver: Option<Driver>,
}

/// Whether the thread may sleep.
#[derive(Clone, Copy)]
enum Work {
    Left,
    Done,
}

/// Why the thread woke.
#[derive(Default)]
struct Woken {
    by_stop: bool,
    by_listener: bool,
    by_driver: bool,
}

impl Server {
    fn run(&mut self) {
        loop {
            match self.work_and_sleep() {
                Ok(woken) if woken.by_stop => break,
                Ok(woken) => {
                    if woken.by_driver {
                        self.take_message();
                    }
                    if woken.by_listener {
                        self.accept();
                    }
                }
                Err(error) => {
                    tracing::error!(%error, "the VPRI function cannot poll; it serves no further driver");
                    break;
                }
            }
        }
        self.let_go();
    }

    /// Works until there is nothing to do, then sleeps until there is.
    fn work_and_sleep(&mut self) -> io::Result<Woken> {
        let state = self.state.clone();
        let work = {
            let mut state = state.lock();
            let worked = state.work();
            self.bell.arm();
            let more = worked.and_then(|more| Ok(more || state.work()? || state.arm()?));
            match more {
                Ok(false) => Work::Done,
                Ok(true) => Work::Left,
                Err(broken) => {
                    self.give_up(&mut state, &broken);
                    Work::Left
                }
            }
        };
        let woken = self.wait(work);
        self.bell.disarm()?;
        let mut state = state.lock();
        if let Err(broken) = state.disarm() {
            self.give_up(&mut state, &broken);
        }
        woken
    }

    fn wait(&self, work: Work) -> io::Result<Woken> {
        let (kicks, log_is_on) = {
            let state = self.state.lock();
            let running = state.vrings.iter().filter(|vring| vring.ring.is_some());
            let kicks: Vec<_> = running.filter_map(|vring| vring.kick.clone()).collect();
            (kicks, state.log.is_on())
        };
        let mut polled = vec![
            PollFd::new(&*self.stop, PollFlags::IN),
            PollFd::new(&self.listener, PollFlags::IN),
            PollFd::new(&*self.bell, PollFlags::IN),
        ];
        polled.extend(kicks.iter().map(|kick| PollFd::new(&**kick, PollFlags::IN)));
        if let Some(driver) = &self.driver {
            let hang_up = PollFlags::IN | PollFlags::RDHUP;
            polled.push(PollFd::from_borrowed_fd(driver.stream.as_fd(), hang_up));
        }
        let for_ns = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
        let limit = match work {
            Work::Left => Some(for_ns(0)),
            Work::Done if log_is_on => Some(for_ns(LOG_WAIT_NS)),
            Work::Done => None,
        };
        match poll(&mut polled, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is = |index: usize| polled.get(index).is_some_and(|fd| !fd.revents().is_empty());
        for (index, kick) in kicks.iter().enumerate() {
            if is(3 + index) {
                drain(kick);
            }
        }
        Ok(Woken {
            by_stop: is(0),
            by_listener: is(1),
            by_driver: is(3 + kicks.len()),
        })
    }

    fn take_message(&mut self) {
        let Some(driver) = &mut self.driver else {
            return;
        };
        match driver.connection.serve_one() {
            Served::Yes => return,
            Served::Refused(error) => {
                tracing::warn!(%error, "a driver's message was refused");
                return;
            }
            Served::Over => {}
            Served::NoHandshake => {
                tracing::warn!("a driver goes on without a handshake; hanging up");
                self.state.lock().figures.drivers_hung_up_on += 1;
            }
            Served::Broken(error) => {
                tracing::warn!(%error, "a driver's message was refused; hanging up");
                self.state.lock().figures.drivers_hung_up_on += 1;
            }
        }
        self.let_go();
    }

    fn accept(&mut self) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => {
                tracing::warn!(%error, "a driver could not be accepted");
                return;
            }
        };
        if let Some(driver) = &self.driver {
            if !socket::has_hung_up(&driver.stream) {
                tracing::warn!("a second driver was turned away: the function has one already");
                self.state.lock().figures.drivers_turned_away += 1;
                return;
            }
            self.let_go();
        }
        let backend = FunctionBackend(self.state.clone());
        let connected =
            prepared(&stream).and_then(|copy| Ok((Connection::new(stream, backend)?, copy)));
        match connected {
            Ok((connection, copy)) => {
                self.state.lock().figures.drivers += 1;
                self.driver = Some(Driver {
                    connection,
                    stream: copy,
                });
            }
            Err(error) => tracing::warn!(%error, "a driver could not be served"),
        }
    }

    /// The driver's rings are unusable: the driver is notified, and must begin again.
    fn give_up(&self, state: &mut State, broken: &Broken) {
        tracing::warn!(error = %broken, "hanging up on the driver");
        state.figures.drivers_hung_up_on += 1;
        for vring in &mut state.vrings {
            if vring.ring.is_some() {
                vring.complain();
            }
            vring.stop();
        }
        state.hang_up();
        if let Some(driver) = &self.driver
            && let Err(error) = socket::hang_up(&driver.stream)
        {
            tracing::debug!(%error, "hanging up");
        }
    }

    /// The driver is gone, or must go: none of its memory is touched any more.
    fn let_go(&mut self) {
        let Some(driver) = self.driver.take() else {
            return;
        };
        driver.connection.session().end();
        if let Err(error) = socket::hang_up(&driver.stream) {
            tracing::debug!(%error, "hanging up");
        }
    }
}

/// A copy of a connection on which this thread blocks for a bounded time.
fn prepared(stream: &UnixStream) -> io::Result<UnixStream> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(MESSAGE_WAIT))?;
    stream.set_write_timeout(Some(MESSAGE_WAIT))?;
    stream.try_clone()
}

/// Resets an eventfd of the driver that poll has just found readable. The driver may have read it
/// since and may have made it blocking, so this reads without waiting.
fn drain(kick: &OwnedFd) {
    let mut count = [0; 8];
    let into = &mut [std::io::IoSliceMut::new(&mut count)];
    // An offset of -1 means the file's position; an eventfd has none.
    match rustix::io::preadv2(kick, into, u64::MAX, ReadWriteFlags::NOWAIT) {
        Ok(_) | Err(Errno::AGAIN) => {}
        Err(error) => tracing::debug!(%error, "a driver's kick cannot be read"),
    }
}
