// SPDX-License-Identifier: Apache-2.0
//! The driver's one thread: it connects, sets the device up, and notices when it goes.
//!
//! ```text
//!   connect ──► agree, queues ──► BEGIN, spaces, bars, READY ──► in use ──► hang-up
//!      ▲ wait                                                                 │
//!      └──────────────────────────────────────────────────────────────────────┘
//! ```
//! A device is in use only after every space was declared to it: until then, and from the
//! hang-up on, callers find no device. Setup and changes to the set of spaces exclude each
//! other (the registry's lock), so no space is missed. A space that the device refuses is
//! barred, for its pages are absent, and READY makes all memory that was not named read-write.

use super::{
    Shared,
    session::{Ours, Session},
    space::Created,
};
use crate::frontend::connect::{ConnectError, bounded};
use crate::wire::Event;
use pagetide_vpri::space::IoSpace;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

/// First wait before another try to connect; later waits are longer.
const RETRY_MIN: Duration = Duration::from_millis(10);
/// The longest such wait, so a device that came back is noticed after this time at most.
const RETRY_MAX: Duration = Duration::from_millis(200);

/// The thread's work, until the driver is stopped.
pub(super) fn run(shared: &Arc<Shared>) {
    let mut wait = RETRY_MIN;
    let mut told = String::new();
    let mut number = 0_u32;
    while !shared.is_stopped() {
        number = number.wrapping_add(1).max(1);
        match connect(shared, number).and_then(|session| set_up(shared, session)) {
            Ok(session) => {
                told.clear();
                let began = Instant::now();
                let why = watch(shared, &session);
                take_out(shared, &session, &why);
                // A device that comes and goes is not tried at an ever higher rate.
                if began.elapsed() > RETRY_MAX {
                    wait = RETRY_MIN;
                }
            }
            Err(error) => {
                let why = error.to_string();
                // Log the same failure only once.
                if why != told && !shared.is_stopped() {
                    tracing::info!(socket = %shared.socket.display(), "no DPU: {why}");
                    told.clone_from(&why);
                }
                shared.set_away(why);
            }
        }
        sleep(shared, wait);
        wait = (wait * 2).min(RETRY_MAX);
    }
}

fn connect(shared: &Shared, number: u32) -> Result<Session, ConnectError> {
    let stream = UnixStream::connect(&shared.socket).map_err(|source| ConnectError::Socket {
        path: shared.socket.clone(),
        source,
    })?;
    let closing = stream.try_clone()?;
    let ours = Ours {
        number,
        bell: shared.bell.as_fd(),
        next_id: Arc::clone(&shared.next_request),
        counts: Arc::clone(&shared.counts),
    };
    let is_stopped = || shared.is_stopped();
    bounded(&closing, is_stopped, || Session::open(stream, ours))
}

/// Declares everything to a new device, and puts it in use.
fn set_up(shared: &Shared, session: Session) -> Result<Arc<Session>, ConnectError> {
    let session = Arc::new(session);
    let mut registry = shared.registry();
    session.begin()?;
    registry.refused.clear();
    for space in registry.attached.clone() {
        match space.create(&session) {
            Created::Yes => {}
            Created::Gone => return Err(ConnectError::Lost),
            Created::Refused(error) => {
                tracing::error!(%error, "nothing of a VM is evicted until its RAM file is taken");
                registry.refused.push((space.id(), error.to_string()));
                // Otherwise our own READY would release it.
                session.bar(space.key())?;
            }
        }
    }
    for key in &registry.barred {
        session.bar(*key)?;
    }
    registry.retire_again(&session)?;
    if registry.all_known {
        session.demand(&Event::Ready, "READY")?;
    }
    for space in &registry.attached {
        let code = space.settle(&session);
        tracing::debug!(?code, "a space of a new DPU");
    }
    let generation = session.config().generation;
    tracing::info!(socket = %shared.socket.display(), generation, "connected to the DPU");
    shared.counts.sessions.add();
    shared.put_in_use(Arc::clone(&session));
    drop(registry);
    Ok(session)
}

/// Waits until the device goes, misbehaves, or the driver is stopped; returns why it ended.
fn watch(shared: &Shared, session: &Session) -> String {
    let line = session.line();
    loop {
        let mut polled = [
            PollFd::from_borrowed_fd(line.stream().as_fd(), PollFlags::IN | PollFlags::RDHUP),
            PollFd::new(session.errors(), PollFlags::IN),
            PollFd::new(&shared.stop, PollFlags::IN),
        ];
        if let Err(error) = poll(&mut polled, None)
            && error != rustix::io::Errno::INTR
        {
            return format!("it cannot be watched: {error}");
        }
        let [stream, errors, stop] = polled.map(|it| it.revents());
        if let Some(why) = line.why() {
            return why.to_owned();
        }
        if !stop.is_empty() {
            return "the driver is stopped".to_owned();
        }
        if !errors.is_empty() {
            return "it has given a queue up".to_owned();
        }
        // The device sends nothing here, so readable means that it hangs up.
        if !stream.is_empty() {
            return "it has hung up".to_owned();
        }
    }
}

/// Takes the device out of use, and wakes its waiters.
fn take_out(shared: &Shared, session: &Session, why: &str) {
    shared.current.store(None);
    session.line().ended(why);
    session.events.wake_all();
    shared.set_away(why.to_owned());
    if !shared.is_stopped() {
        tracing::warn!(socket = %shared.socket.display(), "the DPU is gone: {why}");
    }
}

fn sleep(shared: &Shared, wait: Duration) {
    let timeout = Timespec {
        tv_sec: 0,
        tv_nsec: wait.subsec_nanos().into(),
    };
    let mut polled = [PollFd::new(&shared.stop, PollFlags::IN)];
    // Woken early or not, try the socket.
    if let Err(error) = poll(&mut polled, Some(&timeout)) {
        tracing::debug!(%error, "waiting for the DPU");
    }
}

impl Shared {
    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }
}
