// SPDX-License-Identifier: Apache-2.0
//! The socket of a device and its two threads.
//!
//! # A front end that blocks its connection thread
//! Only the connection thread closes descriptors that a front end has sent, which may wait for that
//! front end (see [`pagetide_vhost_backend`]), and no thread waits for it without a limit.
//! The listener itself ends the session of a front end that must go. A connection thread that has
//! not ended [`STUCK_AFTER`] later is left alone. Its device accepts no other front end until it
//! ends, so there is at most one such thread per device, and no other device is affected.

use super::{
    backend::BlkBackend,
    control::{Control, Presence},
};
use crate::shared::Leaving;
use pagetide_sys::socket;
pub use pagetide_sys::socket::{SocketAccess, SocketError};
use pagetide_vhost_backend::{Connection, Served, SharedSession};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::{
    convert::Infallible,
    io,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

/// A listening device.
pub(crate) struct Endpoint {
    control: Arc<Control>,
    stop: Arc<OwnedFd>,
    listener: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Listens, and serves front ends that `access` allows until [`Self::close`].
    pub fn open(control: Arc<Control>, access: SocketAccess) -> Result<Self, SocketError> {
        let failed = |source| SocketError::Kernel {
            path: control.socket.clone(),
            source,
        };
        let listening = socket::bind_for(&control.socket, access)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| failed(e.into()))?;
        let stop = Arc::new(stop);
        let (its_control, its_stop) = (control.clone(), stop.clone());
        let listener = std::thread::Builder::new()
            .name(format!("blk-{}", control.slot))
            .spawn(move || listen(&its_control, &listening, &its_stop))
            .map_err(failed)?;
        Ok(Self {
            control,
            stop,
            listener: Some(listener),
        })
    }

    /// State shared by the device's threads.
    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Hangs up on the front end, waits for I/O under way, and stops listening.
    pub fn close(&mut self) {
        let Some(listener) = self.listener.take() else {
            return;
        };
        if let Err(error) = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes()) {
            tracing::error!(%error, "a device's listener cannot be stopped");
            return;
        }
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

fn listen(control: &Arc<Control>, socket: &UnixListener, stop: &OwnedFd) {
    let mut tenancy = Tenancy::Nobody;
    loop {
        let mut polled = [
            PollFd::new(socket, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
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
            Ok((stream, _)) => tenancy = admit(control, tenancy, stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => tracing::warn!(%error, "a front end could not be accepted"),
        }
    }
    if let Tenancy::Served(served) = tenancy
        && let Tenancy::Stuck(_) = hang_up(control, served)
    {
        tracing::warn!(socket = %control.socket.display(), "the device ends without its connection thread");
    }
}

/// Serves a new front end, unless the device has one already.
fn admit(control: &Arc<Control>, old: Tenancy, stream: UnixStream) -> Tenancy {
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
    match serve(control, stream) {
        Ok(served) => Tenancy::Served(served),
        Err(error) => {
            tracing::warn!(%error, "a front end could not be served");
            Tenancy::Nobody
        }
    }
}

fn serve(control: &Arc<Control>, stream: UnixStream) -> io::Result<FrontEnd> {
    stream.set_nonblocking(false)?;
    let (copy, closing) = (stream.try_clone()?, stream.try_clone()?);
    let control = control.clone();
    control.shared.set_leaving(Leaving::No);
    let mut connection = Connection::new(stream, BlkBackend::new(control.clone()));
    let session = connection.session().clone();
    let (end, ended) = channel();
    let thread = std::thread::Builder::new()
        .name(format!("blk-{}-conn", control.slot))
        .spawn(move || {
            converse(&control, &mut connection, &closing);
            drop(end);
        })?;
    Ok(FrontEnd {
        stream: copy,
        session,
        ended,
        thread,
    })
}

fn converse(control: &Control, connection: &mut Connection<BlkBackend>, closing: &UnixStream) {
    control.shared.forget_stop();
    control.set_presence(Presence::There);
    let socket = control.socket.display();
    loop {
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
