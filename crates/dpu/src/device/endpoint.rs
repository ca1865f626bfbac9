// SPDX-License-Identifier: Apache-2.0
//! The socket of a device and its two threads.

use super::{Connection, Control, session::Session};
use pagetide_sys::socket;
pub use pagetide_sys::socket::SocketError;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::{
    io,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};
use vhost::vhost_user::{BackendReqHandler, Error as VhostError};

/// A listening device.
pub(crate) struct Endpoint {
    control: Arc<Control>,
    stop: Arc<OwnedFd>,
    listener: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Listens and serves until [`Self::close`].
    pub fn open(control: Arc<Control>) -> Result<Self, SocketError> {
        let failed = |source| SocketError::Kernel {
            path: control.socket.clone(),
            source,
        };
        let listening = socket::bind(&control.socket)?;
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

    /// What the device's threads share.
    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Hangs up on the front end, waits for I/O under way, and listens no more.
    pub fn close(&mut self) {
        let Some(listener) = self.listener.take() else {
            return;
        };
        if let Err(error) = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes()) {
            tracing::error!(%error, "a device's listener cannot be told to stop");
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

/// A connection that is being served.
struct Served {
    stream: UnixStream,
    thread: JoinHandle<()>,
}

fn listen(control: &Arc<Control>, socket: &UnixListener, stop: &OwnedFd) {
    let mut served: Option<Served> = None;
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
            Ok((stream, _)) => served = admit(control, served, stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => tracing::warn!(%error, "a front end could not be accepted"),
        }
    }
    if let Some(served) = served {
        hang_up(served);
    }
}

/// Serves a new front end, unless another is there.
fn admit(control: &Arc<Control>, old: Option<Served>, stream: UnixStream) -> Option<Served> {
    if let Some(old) = old {
        if !old.thread.is_finished() && !socket::has_hung_up(&old.stream) {
            tracing::warn!(
                socket = %control.socket.display(),
                "a second front end was turned away: the device has one already"
            );
            return Some(old);
        }
        // Its I/O must have drained before another may begin.
        hang_up(old);
    }
    match serve(control, stream) {
        Ok(served) => Some(served),
        Err(error) => {
            tracing::warn!(%error, "a front end could not be served");
            None
        }
    }
}

fn serve(control: &Arc<Control>, stream: UnixStream) -> io::Result<Served> {
    stream.set_nonblocking(false)?;
    let (copy, closing) = (stream.try_clone()?, stream.try_clone()?);
    let control = control.clone();
    let thread = std::thread::Builder::new()
        .name(format!("blk-{}-conn", control.slot))
        .spawn(move || converse(&control, stream, &closing))?;
    Ok(Served {
        stream: copy,
        thread,
    })
}

fn converse(control: &Arc<Control>, stream: UnixStream, closing: &UnixStream) {
    control.shared.forget_stop();
    control.set_connection(Connection::There);
    let session = Arc::new(Mutex::new(Session::new(control.clone())));
    let mut messages = BackendReqHandler::from_stream(stream, session.clone());
    loop {
        match messages.handle_request() {
            Ok(()) => {}
            Err(VhostError::SocketRetry(_)) => {}
            Err(VhostError::Disconnected | VhostError::SocketBroken(_)) => break,
            Err(error) if lock(&session).was_answered() => {
                tracing::warn!(socket = %control.socket.display(), %error, "the front end's message was refused");
            }
            Err(VhostError::InactiveOperation(_)) if lock(&session).lacks_handshake() => {
                // Such a front end sends neither its features nor its memory again, so there is nothing to go
                // on with.
                tracing::error!(
                    socket = %control.socket.display(),
                    "the front end goes on without a handshake, as QEMU before 9.1 does if its VM was paused \
                     when the daemon ended; hanging up. Its disk does not work any more: power the VM off and \
                     start it again"
                );
                break;
            }
            Err(error) => {
                tracing::warn!(socket = %control.socket.display(), %error, "the front end's message was refused; hanging up");
                break;
            }
        }
    }
    // First everything is stopped, then the socket closes: a front end that sees the hang-up may
    // be sure that nothing touches its memory any more.
    lock(&session).end();
    control.set_connection(Connection::Nobody);
    // The listener has a copy of the descriptor, so dropping ours would not hang up.
    shut_down(closing);
}

fn lock(session: &Mutex<Session>) -> MutexGuard<'_, Session> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}

fn shut_down(stream: &UnixStream) {
    if let Err(error) = socket::hang_up(stream) {
        tracing::debug!(%error, "shutting a front end's connection down");
    }
}

fn hang_up(served: Served) {
    shut_down(&served.stream);
    if served.thread.join().is_err() {
        tracing::error!("a connection thread panicked");
    }
}
