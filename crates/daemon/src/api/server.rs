// SPDX-License-Identifier: Apache-2.0
//! [`serve`]: connections of the API, none of which can keep another from being answered.
//!
//! A client may send half a request and nothing more, or read no answer. So each thing that a
//! client can make us wait for has a bound:
//!
//! | waiting for | bound | then |
//! |---|---|---|
//! | the head of a request, also between two | [`HEAD_WAIT`] | the connection is closed |
//! | its body | [`BODY_WAIT`] | 408, and the connection is closed |
//! | connections at a time | [`CONNECTIONS_MAX`] | the oldest that is not being worked for is closed |
//!
//! Work itself has no bound here: a detach takes as long as bringing pages back takes. A connection is
//! worked for from the end of its request's body until its answer is ready; then its client
//! is waited for again.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router};
use http_body_util::LengthLimitError;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};

use super::message::{BODY_BYTES_MAX, Failure};
use crate::control::ControlError;

/// How long the head of a request may take, and a connection rest between two requests. Clients are
/// on this host: theirs takes microseconds.
pub const HEAD_WAIT: Duration = Duration::from_secs(10);
/// How long the body of a request may take.
pub const BODY_WAIT: Duration = Duration::from_secs(10);
/// Connections at a time. Each is a descriptor and some KiB.
pub const CONNECTIONS_MAX: usize = 128;
/// Rest after an `accept` that failed for want of descriptors or memory.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// How often it is looked whether a connection is worked for no more, while all are.
const ROOM_LOOK: Duration = Duration::from_millis(50);

/// Serves `router` on `listener` until `stop`, then lets requests under way end.
pub async fn serve(listener: UnixListener, router: Router, stop: impl Future<Output = ()>) {
    let mut stop = pin!(stop);
    let open = Arc::new(Connections::default());
    let (tell_stop, stopped) = watch::channel(());
    let mut tasks = JoinSet::new();
    'serving: loop {
        let stream = tokio::select! {
            () = &mut stop => break 'serving,
            accepted = accept(&listener) => accepted,
            // Those that have ended are forgotten as they end.
            Some(_) = tasks.join_next() => continue,
        };
        // All that there may be are being worked for: the next waits in the backlog until one is not.
        while !open.make_room() {
            tokio::select! {
                () = &mut stop => break 'serving,
                () = open.changed.notified() => {}
                () = tokio::time::sleep(ROOM_LOOK) => {}
                Some(_) = tasks.join_next() => {}
            }
        }
        let number = open.next_number();
        let working = Working::default();
        let router = router
            .clone()
            .layer(Extension(working.clone()))
            .layer(Extension(Peer::of(&stream)));
        let (gone, stopped) = (Arc::clone(&open), stopped.clone());
        let task = tasks.spawn(async move {
            let _listed = Listed(gone, number);
            converse(stream, router, stopped).await;
        });
        open.put(number, task, working);
    }
    drop(listener);
    drop(tell_stop);
    while tasks.join_next().await.is_some() {}
}

/// Which user a connection comes from, as the kernel says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Peer {
    /// `None` where the kernel does not say.
    pub(crate) uid: Option<u32>,
}

impl Peer {
    fn of(stream: &UnixStream) -> Self {
        let uid = stream.peer_cred().map(|peer| peer.uid());
        Self {
            uid: uid
                .inspect_err(|error| tracing::debug!(%error, "a client's user is unknown"))
                .ok(),
        }
    }
}

async fn accept(listener: &UnixListener) -> UnixStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                tracing::warn!(%error, "a client of the API could not be accepted");
                tokio::time::sleep(ACCEPT_REST).await;
            }
        }
    }
}

/// Answers the requests of one connection.
async fn converse(stream: UnixStream, router: Router, mut stopped: watch::Receiver<()>) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WAIT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        // Its sender being gone is the message.
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a client of the API left early, or was too slow");
    }
}

/// Reads the body of a request, within its bounds, before anything is done about it.
pub(super) async fn take_body(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let read = tokio::time::timeout(BODY_WAIT, to_bytes(body, BODY_BYTES_MAX)).await;
    let bytes = match read {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(why)) => return close_after(unreadable(&why)),
        Err(_) => {
            return close_after(Failure::new(
                StatusCode::REQUEST_TIMEOUT,
                ControlError::wrong_use(format!(
                    "the body of the request did not come within {} s",
                    BODY_WAIT.as_secs()
                )),
            ));
        }
    };
    let working = parts.extensions.get::<Working>().cloned();
    let _work = working.map(Work::begin);
    next.run(Request::from_parts(parts, Body::from(bytes)))
        .await
}

fn unreadable(why: &axum::Error) -> Failure {
    let is_too_long =
        std::error::Error::source(why).is_some_and(|why| why.is::<LengthLimitError>());
    let (status, what) = if is_too_long {
        (StatusCode::PAYLOAD_TOO_LARGE, "is too long")
    } else {
        (StatusCode::BAD_REQUEST, "cannot be read")
    };
    let error = ControlError::wrong_use(format!(
        "the body {what} ({why}); at most {BODY_BYTES_MAX} bytes are taken"
    ));
    Failure::new(status, error)
}

/// What is left of the request would be taken for the next one.
fn close_after(failure: Failure) -> Response {
    let mut response = failure.into_response();
    let close = HeaderValue::from_static("close");
    response.headers_mut().insert(header::CONNECTION, close);
    response
}

/// Whether a connection is being worked for.
#[derive(Clone, Default)]
struct Working(Arc<AtomicBool>);

/// Work for a connection; over when dropped.
struct Work(Working);

impl Work {
    fn begin(working: Working) -> Self {
        working.0.store(true, Relaxed);
        Self(working)
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.0.0.store(false, Relaxed);
    }
}

/// The connections there are, oldest first.
#[derive(Default)]
struct Connections {
    list: Mutex<List>,
    changed: Notify,
}

#[derive(Default)]
struct List {
    next_number: u64,
    open: BTreeMap<u64, (AbortHandle, Working)>,
}

impl Connections {
    fn next_number(&self) -> u64 {
        let mut list = self.lock();
        list.next_number += 1;
        list.next_number
    }

    fn put(&self, number: u64, task: AbortHandle, working: Working) {
        // It may have ended already; then it has looked for itself in vain.
        if !task.is_finished() {
            self.lock().open.insert(number, (task, working));
        }
    }

    /// True if there is room for one more, if need be because the oldest that is not worked for was
    /// closed.
    fn make_room(&self) -> bool {
        let mut list = self.lock();
        list.open.retain(|_, (task, _)| !task.is_finished());
        if list.open.len() < CONNECTIONS_MAX {
            return true;
        }
        let idle = |(_, (_, working)): &(&u64, &(AbortHandle, Working))| !working.0.load(Relaxed);
        let Some(number) = list.open.iter().find(idle).map(|(number, _)| *number) else {
            return false;
        };
        let removed = list.open.remove(&number);
        drop(list);
        if let Some((task, _)) = removed {
            task.abort();
            tracing::debug!(
                "the API has too many clients; the oldest that was waited for is closed"
            );
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection's place in the list, until it ends.
struct Listed(Arc<Connections>, u64);

impl Drop for Listed {
    fn drop(&mut self) {
        self.0.lock().open.remove(&self.1);
        self.0.changed.notify_one();
    }
}
