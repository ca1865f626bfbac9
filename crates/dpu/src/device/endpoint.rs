// SPDX-License-Identifier: Apache-2.0
//! The socket of a device and its two threads.
//!
//! # A front end that blocks its connection thread
//! Only the connection thread closes descriptors that a front end has sent, which may wait for that
//! front end (see [`pagetide_vhost_backend`]), and no thread waits for it without a limit.
//! The listener itself ends the session of a front end that must go. A connection thread that has
//! not ended [`STUCK_AFTER`] later is left alone. Its device accepts no other front end until it
//! ends, so there is at most one such thread per device, and no other device is affected.
//!
//! # Another process goes on
//! A device is *parked* for a process that replaces this one: its connection thread ends between two messages, the
//! session becomes a record, and listening socket and connection stay open. In the other process it is *held*: its
//! session is led to where it was and its rings run, since what they do is recorded outside the process. But no
//! message is read and no front end is accepted before it is *admitted*: until then that process may still be told
//! to give up, and a message that it had read would be lost. Its threads are there already and wait at a [`Gate`],
//! since afterwards nothing may fail.
//!
//! Before that it *rests*: it reads no more messages, and those under way are awaited, of all devices at once and while
//! their rings still run. A message that stops a ring waits for that ring's I/O, which would never be done once the
//! engines are hushed; and a front end that sends half a message would keep all others waiting.
//!
//! A session that cannot be led to where it was because of what its front end has done (it may have cut its memory
//! short) ends, and that front end alone is hung up on: others go on.

use super::{
    backend::DeviceBackend,
    control::{Control, Presence},
    orders::{Orders, Resting},
};
use crate::{net::handed::ParkedNic, shared::Leaving};
use pagetide_sys::socket;
pub use pagetide_sys::socket::{SocketAccess, SocketError};
use pagetide_vhost_backend::{Connection, ParkError, Record, ReplayError, Served, SharedSession};
use rustix::event::{PollFd, PollFlags, poll};
use std::{
    convert::Infallible,
    io,
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

/// A listening device.
pub(crate) struct Endpoint {
    control: Arc<Control>,
    orders: Arc<Orders>,
    listener: Option<JoinHandle<Option<Parked>>>,
    gate: Arc<Gate>,
}

/// Where threads of a device wait until they know whose the device is.
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

/// See [`Gate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GateState {
    /// It may still be that of the process that was replaced.
    Held,
    /// It is ours.
    Admitted,
    /// It is not, and nothing of it is to be touched.
    GivenUp,
}

impl Gate {
    fn new(state: GateState) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
        })
    }

    /// Decides, unless that was done before; returns what it is.
    fn decide(&self, decision: GateState) -> GateState {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if *state == GateState::Held {
            *state = decision;
            self.changed.notify_all();
        }
        *state
    }

    /// Waits for the decision.
    fn wait(&self) -> GateState {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_held = |state: &mut GateState| *state == GateState::Held;
        let decided = self.changed.wait_while(state, is_held);
        *decided.unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device that another process goes on with.
#[derive(Debug)]
pub struct ParkedDevice {
    /// Path of its socket.
    pub socket: PathBuf,
    /// That socket, which listens.
    pub listener: UnixListener,
    /// Its front end, if one was connected.
    pub front_end: Option<ParkedFrontEnd>,
    /// What a network device has besides.
    pub nic: Option<ParkedNic>,
}

/// A front end that another process goes on with.
#[derive(Debug)]
pub struct ParkedFrontEnd {
    /// Its connection, on which no message is under way.
    pub connection: UnixStream,
    /// Everything that it has set.
    pub record: Record,
}

/// What a listener leaves.
struct Parked {
    listener: UnixListener,
    front_end: Option<ParkedFrontEnd>,
}

impl Endpoint {
    /// Listens, and serves front ends that `access` allows until [`Self::close`].
    pub fn open(control: Arc<Control>, access: SocketAccess) -> Result<Self, SocketError> {
        let failed = |source| SocketError::Kernel {
            path: control.socket.clone(),
            source,
        };
        let listener = socket::bind_for(&control.socket, access)?;
        let mut endpoint = Self {
            control: control.clone(),
            orders: Arc::new(Orders::new().map_err(failed)?),
            listener: None,
            gate: Gate::new(GateState::Admitted),
        };
        endpoint.listen(listener, Tenancy::Nobody).map_err(failed)?;
        Ok(endpoint)
    }

    /// Holds a device that another process has parked; its rings run when this returns.
    ///
    /// # Errors
    /// This program cannot go on with the session, whatever its front end does, or there is no descriptor or thread.
    pub fn hold(
        control: Arc<Control>,
        listener: UnixListener,
        front_end: Option<ParkedFrontEnd>,
    ) -> Result<Self, ReplayError> {
        control.shared.set_leaving(Leaving::No);
        let mut endpoint = Self {
            orders: Arc::new(Orders::new()?),
            listener: None,
            gate: Gate::new(GateState::Held),
            control,
        };
        let tenancy = match front_end {
            None => Tenancy::Nobody,
            Some(parked) => endpoint.resume(parked)?,
        };
        let session = match &tenancy {
            Tenancy::Served(served) => Some(served.session.clone()),
            Tenancy::Nobody | Tenancy::Stuck(_) => None,
        };
        if let Err(error) = endpoint.listen(listener, tenancy) {
            session.iter().for_each(SharedSession::end);
            return Err(error.into());
        }
        Ok(endpoint)
    }

    /// Leads a session to where it was.
    fn resume(&self, parked: ParkedFrontEnd) -> Result<Tenancy, ReplayError> {
        let control = &self.control;
        parked.connection.set_nonblocking(false)?;
        let copy = parked.connection.try_clone()?;
        let backend = DeviceBackend::new(control.clone());
        match Connection::resume(parked.connection, backend, &parked.record) {
            Ok(connection) => {
                control.set_presence(Presence::There);
                let session = connection.session().clone();
                let begun = begin(control, &self.orders, &self.gate, connection, copy);
                Ok(Tenancy::Served(begun.inspect_err(|_| session.end())?))
            }
            Err(error @ ReplayError::Refused { .. }) => {
                // The process that was replaced has the connection, too, so it stays until that has ended.
                tracing::warn!(socket = %control.socket.display(), %error, "a front end is hung up on");
                control.shared.kind.front_end_gone();
                Ok(Tenancy::Nobody)
            }
            Err(error) => Err(error),
        }
    }

    /// Lets a held device read messages and accept front ends: this process is not told to give up any more.
    pub fn admit(&self) {
        self.control.shared.kind.admit();
        self.gate.decide(GateState::Admitted);
    }

    fn listen(&mut self, listener: UnixListener, tenancy: Tenancy) -> io::Result<()> {
        let (control, orders, gate) =
            (self.control.clone(), self.orders.clone(), self.gate.clone());
        let name = format!("{}-{}", control.shared.kind.name(), control.slot);
        let thread = std::thread::Builder::new().name(name);
        let thread = thread.spawn(move || match gate.wait() {
            GateState::Admitted => listen(&control, listener, &orders, tenancy),
            GateState::Held | GateState::GivenUp => {
                if let Tenancy::Served(served) = tenancy {
                    served.give_up();
                }
                None
            }
        })?;
        self.listener = Some(thread);
        Ok(())
    }

    /// From now on no message is read, until [`Self::speak`].
    pub fn rest(&self) -> Resting {
        Orders::rest(&self.orders, &self.control)
    }

    /// Messages are read again.
    pub fn speak(&self) {
        self.orders.speak();
    }

    /// Begins to park the device: see [`Self::parked`].
    pub fn park(&self) {
        self.orders.park();
    }

    /// The device for another process, once its front end is parked. Nothing of it works here any more. `None` if its
    /// listener has failed.
    pub fn parked(&mut self) -> Option<ParkedDevice> {
        let Parked {
            listener,
            front_end,
        } = self.listener.take()?.join().ok().flatten()?;
        Some(ParkedDevice {
            socket: self.control.socket.clone(),
            listener,
            front_end,
            nic: None,
        })
    }

    /// State shared by the device's threads.
    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Hangs up on the front end, waits for I/O under way, and stops listening.
    pub fn close(&mut self) {
        let decided = self.gate.decide(GateState::GivenUp);
        let Some(listener) = self.listener.take() else {
            return;
        };
        self.orders.end();
        if listener.join().is_err() {
            tracing::error!(socket = %self.control.socket.display(), "a device's listener panicked");
        }
        if decided == GateState::GivenUp {
            // The socket is still another process', and so is its front end.
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.control.socket) {
            tracing::warn!(socket = %self.control.socket.display(), %error, "socket not removed");
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}

/// How long a connection thread may take to end once its session has ended and its socket is shut
/// down. By then it only has to close descriptors.
const STUCK_AFTER: Duration = Duration::from_secs(2);

/// A front end that is being served.
struct FrontEnd {
    stream: UnixStream,
    session: SharedSession<DeviceBackend>,
    /// Carries no message; it disconnects when the thread ends.
    ended: Receiver<Infallible>,
    thread: JoinHandle<()>,
}

impl FrontEnd {
    /// Ends what this process has of a front end that is another process'.
    fn give_up(self) {
        self.session.end();
        if self.thread.join().is_err() {
            tracing::error!("a connection thread panicked");
        }
    }
}

/// The listener's view of front ends.
enum Tenancy {
    /// No front end.
    Nobody,
    /// A front end is there, or has hung up.
    Served(FrontEnd),
    /// A front end has gone, and its thread is stuck.
    Stuck(JoinHandle<()>),
}

/// Accepts front ends until it is to end; returns what it leaves if that is to be parked.
fn listen(
    control: &Arc<Control>,
    socket: UnixListener,
    orders: &Arc<Orders>,
    begun: Tenancy,
) -> Option<Parked> {
    let mut tenancy = begun;
    loop {
        let mut polled = [
            PollFd::new(&socket, PollFlags::IN),
            PollFd::new(&orders.end, PollFlags::IN),
        ];
        if let Err(error) = poll(&mut polled, None)
            && error != rustix::io::Errno::INTR
        {
            tracing::error!(%error, "a device's listener fails; it accepts no more front ends");
            break;
        }
        if !polled[1].revents().is_empty() {
            break;
        }
        match socket.accept() {
            Ok((stream, _)) => tenancy = admit(control, orders, tenancy, stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => tracing::warn!(%error, "a front end could not be accepted"),
        }
    }
    let front_end = match tenancy {
        Tenancy::Served(served) if orders.parks() => park(control, orders, served),
        Tenancy::Served(served) => {
            if let Tenancy::Stuck(_) = hang_up(control, orders, served) {
                tracing::warn!(socket = %control.socket.display(), "the device ends without its connection thread");
            }
            None
        }
        Tenancy::Nobody | Tenancy::Stuck(_) => None,
    };
    orders.parks().then_some(Parked {
        listener: socket,
        front_end,
    })
}

/// Gives a front end away, for another process. One that is in the middle of a message, or whose requests in flight
/// are recorded nowhere, is hung up on instead: it connects to that process. Its thread is not waited for: it ends with
/// this process, and other devices wait meanwhile.
fn park(control: &Control, orders: &Orders, served: FrontEnd) -> Option<ParkedFrontEnd> {
    let socket = control.socket.display();
    if served.ended.recv_timeout(orders.message_wait()) == Err(RecvTimeoutError::Timeout) {
        tracing::warn!(%socket, "a front end is in the middle of a message, and is hung up on");
        break_off(control, &served);
        return None;
    }
    match served.session.park() {
        Ok(record) => Some(ParkedFrontEnd {
            connection: served.stream,
            record,
        }),
        Err(ParkError::Over) => None,
        Err(error) => {
            tracing::warn!(%socket, %error, "a front end is hung up on");
            break_off(control, &served);
            None
        }
    }
}

/// Serves a new front end, unless the device has one already.
fn admit(
    control: &Arc<Control>,
    orders: &Arc<Orders>,
    old: Tenancy,
    stream: UnixStream,
) -> Tenancy {
    let left = match old {
        Tenancy::Served(old) if !old.thread.is_finished() && !socket::has_hung_up(&old.stream) => {
            tracing::warn!(
                socket = %control.socket.display(),
                "a second front end was turned away: the device has one already"
            );
            return Tenancy::Served(old);
        }
        // Its I/O must have drained before another front end may begin.
        Tenancy::Served(old) => hang_up(control, orders, old),
        left => left,
    };
    if let Tenancy::Stuck(thread) = left
        && !thread.is_finished()
    {
        tracing::warn!(
            socket = %control.socket.display(),
            "a front end was turned away: descriptors of the last one are still being closed"
        );
        return Tenancy::Stuck(thread);
    }
    match serve(control, orders, stream) {
        Ok(served) => Tenancy::Served(served),
        Err(error) => {
            tracing::warn!(%error, "a front end could not be served");
            control.set_presence(Presence::Nobody);
            Tenancy::Nobody
        }
    }
}

fn serve(control: &Arc<Control>, orders: &Arc<Orders>, stream: UnixStream) -> io::Result<FrontEnd> {
    stream.set_nonblocking(false)?;
    let copy = stream.try_clone()?;
    let connection = Connection::new(stream, DeviceBackend::new(control.clone()))?;
    control.shared.set_leaving(Leaving::No);
    control.shared.forget_stop();
    control.set_presence(Presence::There);
    orders.connected();
    let gate = Gate::new(GateState::Admitted);
    begin(control, orders, &gate, connection, copy)
}

/// Starts the thread of a connection, of which `copy` is a copy. It reads messages once the device is admitted.
fn begin(
    control: &Arc<Control>,
    orders: &Arc<Orders>,
    gate: &Arc<Gate>,
    mut connection: Connection<DeviceBackend>,
    copy: UnixStream,
) -> io::Result<FrontEnd> {
    let closing = copy.try_clone()?;
    let session = connection.session().clone();
    let (control, orders, gate) = (control.clone(), orders.clone(), gate.clone());
    let (end, ended) = channel();
    let name = format!("{}-{}-conn", control.shared.kind.name(), control.slot);
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        if gate.wait() == GateState::Admitted {
            converse(&control, &orders, &mut connection, &closing);
        }
        drop(end);
    })?;
    Ok(FrontEnd {
        stream: copy,
        session,
        ended,
        thread,
    })
}

/// Waits for the front end's next message; false if none is to be read any more.
fn has_message(orders: &Orders, stream: &UnixStream) -> bool {
    loop {
        let mut polled = [
            PollFd::new(stream, PollFlags::IN),
            PollFd::new(&orders.end, PollFlags::IN),
        ];
        match poll(&mut polled, None) {
            // Hanging up is for the listener to do.
            Ok(_) if !polled[1].revents().is_empty() && orders.parks() => return false,
            Ok(_) if !polled[0].revents().is_empty() => return true,
            Ok(_) => {
                // The listener hangs up next, which ends the wait for a message.
                return true;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                tracing::error!(%error, "a front end's messages cannot be waited for");
                return true;
            }
        }
    }
}

fn converse(
    control: &Control,
    orders: &Orders,
    connection: &mut Connection<DeviceBackend>,
    closing: &UnixStream,
) {
    let socket = control.socket.display();
    loop {
        if !has_message(orders, closing) {
            // Parked: the session goes on in another process.
            return;
        }
        if !orders.begin_message() {
            return;
        }
        let message = connection.serve_one();
        orders.end_message();
        match message {
            Served::Yes => {}
            Served::Over => break,
            Served::Refused(error) => {
                tracing::warn!(%socket, %error, "the front end's message was refused");
            }
            Served::NoHandshake => {
                // Such a front end sends neither its features nor its memory again, so the device
                // cannot continue.
                tracing::error!(
                    %socket,
                    "the front end goes on without a handshake, as QEMU before 9.1 does if its VM was paused \
                     when the daemon ended; hanging up. Its device does not work any more: power the VM off and \
                     start it again"
                );
                break;
            }
            Served::Broken(error) => {
                tracing::warn!(%socket, %error, "the front end's message was refused; hanging up");
                break;
            }
        }
    }
    // Stop everything before the socket closes: a front end that sees the hang-up may rely on its
    // memory not being touched any more.
    connection.session().end();
    control.set_presence(Presence::Nobody);
    // The listener has a duplicate of the descriptor, so dropping ours would not hang up.
    shut_down(closing);
}

fn shut_down(stream: &UnixStream) {
    if let Err(error) = socket::hang_up(stream) {
        tracing::debug!(%error, "shutting a front end's connection down");
    }
}

/// Ends a session: after it returns, nothing of that session touches memory any more.
fn break_off(control: &Control, served: &FrontEnd) {
    shut_down(&served.stream);
    // First, because its thread may be waiting for a queue to drain, with the session locked.
    control.hurry();
    served.session.end();
    control.set_presence(Presence::Nobody);
}

/// The same, and the thread of the connection ends.
fn hang_up(control: &Control, orders: &Orders, served: FrontEnd) -> Tenancy {
    break_off(control, &served);
    orders.hung_up();
    if served.ended.recv_timeout(STUCK_AFTER) == Err(RecvTimeoutError::Timeout) {
        tracing::error!(
            socket = %control.socket.display(),
            "closing descriptors of a front end that is gone does not finish; the device accepts no other until it does"
        );
        return Tenancy::Stuck(served.thread);
    }
    if served.thread.join().is_err() {
        tracing::error!("a connection thread panicked");
    }
    Tenancy::Nobody
}
