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
//! to give up, and a message that it had read would be lost.

use super::{
    backend::BlkBackend,
    control::{Control, Presence},
};
use crate::shared::Leaving;
use pagetide_sys::socket;
pub use pagetide_sys::socket::{SocketAccess, SocketError};
use pagetide_vhost_backend::{Connection, ParkError, Record, ReplayError, Served, SharedSession};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::{
    convert::Infallible,
    io,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
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
    /// It is still the process that was replaced whose device this is.
    held: Option<Held>,
}

/// How a listener is to end.
struct Orders {
    /// Readable once it is to end.
    end: OwnedFd,
    /// It parks its front end.
    parks: AtomicBool,
}

impl Orders {
    fn new() -> io::Result<Self> {
        Ok(Self {
            end: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            parks: AtomicBool::new(false),
        })
    }

    fn end(&self) {
        if let Err(error) = rustix::io::write(&self.end, &1_u64.to_ne_bytes()) {
            tracing::error!(%error, "a device's listener cannot be stopped");
        }
    }

    fn parks(&self) -> bool {
        self.parks.load(Ordering::Acquire)
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

/// What a listener begins with.
struct Held {
    listener: UnixListener,
    front_end: Option<(Connection<BlkBackend>, UnixStream)>,
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
            held: None,
        };
        endpoint.listen(listener, Tenancy::Nobody).map_err(failed)?;
        Ok(endpoint)
    }

    /// Holds a device that another process has parked; its rings run when this returns.
    ///
    /// # Errors
    /// Its session cannot be led to where it was.
    pub fn hold(
        control: Arc<Control>,
        listener: UnixListener,
        front_end: Option<ParkedFrontEnd>,
    ) -> Result<Self, ReplayError> {
        control.shared.set_leaving(Leaving::No);
        let front_end = front_end.map(|parked| {
            parked.connection.set_nonblocking(false)?;
            let copy = parked.connection.try_clone()?;
            let backend = BlkBackend::new(control.clone());
            let connection = Connection::resume(parked.connection, backend, &parked.record)?;
            control.set_presence(Presence::There);
            Ok::<_, ReplayError>((connection, copy))
        });
        Ok(Self {
            held: Some(Held {
                listener,
                front_end: front_end.transpose()?,
            }),
            orders: Arc::new(Orders::new()?),
            listener: None,
            control,
        })
    }

    /// Lets a held device read messages and accept front ends: this process is not told to give up any more.
    ///
    /// # Errors
    /// No thread can be created.
    pub fn admit(&mut self) -> io::Result<()> {
        let Some(held) = self.held.take() else {
            return Ok(());
        };
        let tenancy = match held.front_end {
            None => Tenancy::Nobody,
            Some((connection, stream)) => {
                Tenancy::Served(begin(&self.control, &self.orders, connection, stream)?)
            }
        };
        self.listen(held.listener, tenancy)
    }

    fn listen(&mut self, listener: UnixListener, tenancy: Tenancy) -> io::Result<()> {
        let (control, orders) = (self.control.clone(), self.orders.clone());
        let thread = std::thread::Builder::new().name(format!("blk-{}", control.slot));
        let thread = thread.spawn(move || listen(&control, listener, &orders, tenancy))?;
        self.listener = Some(thread);
        Ok(())
    }

    /// Begins to park the device: see [`Self::parked`].
    pub fn park(&self) {
        self.orders.parks.store(true, Ordering::Release);
        self.orders.end();
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
        })
    }

    /// State shared by the device's threads.
    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Hangs up on the front end, waits for I/O under way, and stops listening.
    pub fn close(&mut self) {
        if let Some(held) = self.held.take() {
            // The socket is still another process', and so is its front end.
            if let Some((connection, _stream)) = held.front_end {
                connection.session().end();
            }
            return;
        }
        let Some(listener) = self.listener.take() else {
            return;
        };
        self.orders.end();
        if listener.join().is_err() {
            tracing::error!(socket = %self.control.socket.display(), "a device's listener panicked");
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
/// How long a message that is under way when a device is parked may take. One that stops a ring waits for its I/O.
const MESSAGE_WAIT: Duration = Duration::from_secs(1);

/// A front end that is being served.
struct FrontEnd {
    stream: UnixStream,
    session: SharedSession<BlkBackend>,
    /// Carries no message; it disconnects when the thread ends.
    ended: Receiver<Infallible>,
    thread: JoinHandle<()>,
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
        Tenancy::Served(served) if orders.parks() => park(control, served),
        Tenancy::Served(served) => {
            if let Tenancy::Stuck(_) = hang_up(control, served) {
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
/// are recorded nowhere, is hung up on instead: it connects to that process.
fn park(control: &Control, served: FrontEnd) -> Option<ParkedFrontEnd> {
    let socket = control.socket.display();
    if served.ended.recv_timeout(MESSAGE_WAIT) == Err(RecvTimeoutError::Timeout) {
        tracing::warn!(%socket, "a front end is in the middle of a message, and is hung up on");
        hang_up(control, served);
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
            hang_up(control, served);
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
        Tenancy::Served(old) => hang_up(control, old),
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
    control.shared.set_leaving(Leaving::No);
    control.shared.forget_stop();
    control.set_presence(Presence::There);
    let connection = Connection::new(stream, BlkBackend::new(control.clone()));
    begin(control, orders, connection, copy)
}

/// Starts the thread of a connection, of which `copy` is a copy.
fn begin(
    control: &Arc<Control>,
    orders: &Arc<Orders>,
    mut connection: Connection<BlkBackend>,
    copy: UnixStream,
) -> io::Result<FrontEnd> {
    let closing = copy.try_clone()?;
    let session = connection.session().clone();
    let (control, orders) = (control.clone(), orders.clone());
    let (end, ended) = channel();
    let thread = std::thread::Builder::new()
        .name(format!("blk-{}-conn", control.slot))
        .spawn(move || {
            converse(&control, &orders, &mut connection, &closing);
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
    connection: &mut Connection<BlkBackend>,
    closing: &UnixStream,
) {
    let socket = control.socket.display();
    loop {
        if !has_message(orders, closing) {
            // Parked: the session goes on in another process.
            return;
        }
        match connection.serve_one() {
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
                     when the daemon ended; hanging up. Its disk does not work any more: power the VM off and \
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
fn hang_up(control: &Control, served: FrontEnd) -> Tenancy {
    shut_down(&served.stream);
    // First, because its thread may be waiting for a queue to drain, with the session locked.
    control.hurry();
    served.session.end();
    control.set_presence(Presence::Nobody);
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
