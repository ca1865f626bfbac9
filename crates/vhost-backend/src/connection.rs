// SPDX-License-Identifier: Apache-2.0
//! [`Connection`]: reads a front end's messages one by one, and says what became of each.

use crate::{
    backend::Backend,
    record::{ParkError, Record},
    replay::{self, ReplayError},
    session::{Prelude, Session},
};
use pagetide_sys::socket;
use std::{
    io,
    os::unix::net::UnixStream,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use vhost::vhost_user::{BackendReqHandler, Error};

/// A session that another thread may end.
pub struct SharedSession<B>(Arc<Mutex<Session<B>>>);

impl<B> Clone for SharedSession<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B: Backend> SharedSession<B> {
    /// Stops the front end's rings and unmaps its memory; afterwards nothing of the session touches
    /// memory any more, and its messages have no effect. Further calls do nothing.
    pub fn end(&self) {
        self.lock().end();
    }

    /// Ends the session without the front end noticing, for another process to go on with: see [`Record`]. No
    /// message of the connection may be under way.
    ///
    /// # Errors
    /// [`ParkError`]; only in the last case has anything changed.
    pub fn park(&self) -> Result<Record, ParkError> {
        self.lock().park()
    }

    fn lock(&self) -> MutexGuard<'_, Session<B>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What became of a message.
#[derive(Debug)]
#[must_use = "a connection that is over must be ended"]
pub enum Served {
    /// It was obeyed, or none was there.
    Yes,
    /// It was refused, and the front end knows; the connection goes on.
    Refused(Error),
    /// There will be no more messages: the front end has hung up.
    Over,
    /// It was refused, and the front end does not know: the connection must end.
    Broken(Error),
    /// The front end goes on with a session that it had with a predecessor, but has not negotiated
    /// features first. It will send neither its features nor its memory: the connection must end.
    NoHandshake,
}

/// A front end's connection.
pub struct Connection<B: Backend> {
    messages: BackendReqHandler<Mutex<Session<B>>>,
    session: SharedSession<B>,
}

impl<B: Backend> Connection<B> {
    /// A connection over `stream`, which blocks, to `backend`.
    ///
    /// QEMU enables the rings of a network device before it has set any features. That is allowed once
    /// `VHOST_USER_F_PROTOCOL_FEATURES` is *negotiated*, which the reader of messages takes for *set*. So it is
    /// told, by a message of our own, that this one is.
    ///
    /// # Errors
    /// The kernel's, of a socket for that message.
    pub fn new(stream: UnixStream, backend: B) -> io::Result<Self> {
        let (front, back) = UnixStream::pair()?;
        let place = socket::Place::of(&back)?;
        let mut connection = Self::over(back, backend);
        connection.session.lock().prelude = Prelude::UnderWay;
        replay::prelude().send(&front)?;
        let told = connection.messages.handle_request();
        connection.session.lock().prelude = Prelude::Over;
        told.map_err(io::Error::other)?;
        place.put(&stream)?;
        Ok(connection)
    }

    fn over(stream: UnixStream, backend: B) -> Self {
        let session = Arc::new(Mutex::new(Session::new(backend)));
        Self {
            messages: BackendReqHandler::from_stream(stream, Arc::clone(&session)),
            session: SharedSession(session),
        }
    }

    /// A connection over `stream` whose session has come as far as `record` says, in another process.
    ///
    /// # Errors
    /// The back end offers less than the front end has accepted, or does not obey one of the messages that lead
    /// there.
    pub fn resume(stream: UnixStream, backend: B, record: &Record) -> Result<Self, ReplayError> {
        replay::check(record, &backend.offer())?;
        let (front, back) = UnixStream::pair()?;
        let place = socket::Place::of(&back)?;
        let mut connection = Self::over(back, backend);
        for message in replay::messages(record) {
            message.send(&front)?;
            match connection.serve_one() {
                Served::Yes => replay::forget_answer(&front)?,
                Served::Refused(error) | Served::Broken(error) => {
                    connection.session.end();
                    return Err(ReplayError::Refused {
                        message: message.name,
                        reason: error.to_string(),
                    });
                }
                Served::Over | Served::NoHandshake => {
                    connection.session.end();
                    return Err(ReplayError::Refused {
                        message: message.name,
                        reason: "the connection is over".to_owned(),
                    });
                }
            }
        }
        place.put(&stream)?;
        Ok(connection)
    }

    /// Its session.
    #[must_use]
    pub fn session(&self) -> &SharedSession<B> {
        &self.session
    }

    /// Waits for one message and obeys it.
    pub fn serve_one(&mut self) -> Served {
        let handled = self.messages.handle_request();
        // Not under the session's lock: closing may wait for the front end.
        let discarded = self.session.lock().take_discarded();
        drop(discarded);
        match handled {
            Ok(()) | Err(Error::SocketRetry(_)) => Served::Yes,
            Err(Error::Disconnected | Error::SocketBroken(_)) => Served::Over,
            Err(error) if self.session.lock().was_answered() => Served::Refused(error),
            Err(Error::InactiveOperation(_)) if self.session.lock().lacks_handshake() => {
                Served::NoHandshake
            }
            Err(error) => Served::Broken(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Offer, RegionShape, RingSettings, Runs, Stop};
    use pagetide_sys::signal::EventSignal;
    use std::{io::Write, os::fd::BorrowedFd};
    use vhost::vhost_user::{Result, VhostUserProtocolFeatures};

    /// A device without queues.
    struct Nothing;

    impl Backend for Nothing {
        type Memory = ();

        fn offer(&self) -> Offer {
            Offer {
                features: 1 << 30,
                required_features: 0,
                protocol_features: VhostUserProtocolFeatures::CONFIG,
                queue_count: 0,
                queues_told: 0,
                queue_size_max: 1,
                regions_max: 0,
            }
        }

        fn set_features(&mut self, _features: u64) {}

        fn config(&self, _offset: u32, _bytes: u32) -> Option<Vec<u8>> {
            None
        }

        fn map(&mut self, _regions: &[(RegionShape, BorrowedFd<'_>)]) -> Result<()> {
            Ok(())
        }

        fn use_memory(&mut self, (): ()) -> Result<()> {
            Ok(())
        }

        fn start(&mut self, _queue: u16, _ring: &RingSettings) -> Result<Runs> {
            Ok(Runs::No)
        }

        fn stop(&mut self, _queue: u16, _how: Stop) -> Result<u16> {
            Ok(0)
        }

        fn set_call(&mut self, _queue: u16, _call: Option<EventSignal>) -> Result<()> {
            Ok(())
        }
    }

    fn pair() -> (UnixStream, Connection<Nothing>) {
        let (front, back) = UnixStream::pair().unwrap();
        (front, Connection::new(back, Nothing).unwrap())
    }

    /// Sends a request of vhost-user, version 1, with a body.
    fn send(front: &mut UnixStream, request: u32, body: &[u8]) {
        let bytes = u32::try_from(body.len()).unwrap();
        for word in [request, 1, bytes] {
            front.write_all(&word.to_ne_bytes()).unwrap();
        }
        front.write_all(body).unwrap();
    }

    const SET_OWNER: u32 = 3;
    const SET_VRING_NUM: u32 = 8;
    const GET_QUEUE_NUM: u32 = 17;
    const SET_VRING_ENABLE: u32 = 18;

    #[test]
    fn messages_are_obeyed_until_the_front_end_hangs_up() {
        let (mut front, mut connection) = pair();
        send(&mut front, SET_OWNER, &[]);
        assert!(matches!(connection.serve_one(), Served::Yes));
        drop(front);
        assert!(matches!(connection.serve_one(), Served::Over));
    }

    #[test]
    fn refusal_that_nobody_hears_of_breaks_the_connection() {
        let (mut front, mut connection) = pair();
        send(&mut front, SET_VRING_NUM, &[0; 8]);
        assert!(matches!(connection.serve_one(), Served::Broken(_)));
    }

    #[test]
    fn ring_is_enabled_before_any_features_are_set() {
        let (mut front, mut connection) = pair();
        // There is no such queue, which is another matter.
        send(&mut front, SET_VRING_ENABLE, &[0, 0, 0, 0, 1, 0, 0, 0]);
        assert!(matches!(
            connection.serve_one(),
            Served::Broken(Error::InvalidParam)
        ));
        assert_eq!(connection.session.lock().features, 0);
    }

    #[test]
    fn message_that_needs_a_handshake_is_told_from_others() {
        let (mut front, mut connection) = pair();
        send(&mut front, GET_QUEUE_NUM, &[]);
        assert!(matches!(connection.serve_one(), Served::NoHandshake));
    }

    #[test]
    fn no_message_at_all_breaks_the_connection_and_panics_nobody() {
        let (mut front, mut connection) = pair();
        front.write_all(&[0xff; 64]).unwrap();
        assert!(matches!(connection.serve_one(), Served::Broken(_)));
    }
}
