// SPDX-License-Identifier: Apache-2.0
//! The tasks of reads and writes.
//!
//! ```text
//!   read   connection? ─► permit ─► GET ─► tell          again after the end of the connection, see [`super`]
//!   write  permit ─► connection? ─► SET … ─► tell        never again: the store keeps what was not written
//! ```

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, timeout, timeout_at};

use super::config::WhenGone;
use super::keys;
use super::link::Failure;
use super::shared::{BACKOFF_MAX, BACKOFF_MIN, Connected, Shared};
use super::state::Request;
use crate::{Batch, Place, ReadDone, TierError, TierKind, WriteDone};

const KIND: TierKind = TierKind::Remote;

pub(super) async fn read(shared: Arc<Shared>, place: Place, done: ReadDone, since: Instant) {
    let mut reading = Reading {
        shared: &shared,
        deadline: since + shared.bounds.read,
        backoff: BACKOFF_MIN,
    };
    let mut done = Some(done);
    reading
        .run(place, |result| {
            let mut state = shared.state();
            state.was_read(&result);
            state.ended(Request::Read, since.elapsed());
            drop(state);
            if let Some(done) = done.take() {
                done.tell(result);
            }
        })
        .await;
}

/// A read on its way.
struct Reading<'a> {
    shared: &'a Shared,
    deadline: Instant,
    backoff: Duration,
}

impl<'a> Reading<'a> {
    /// Calls `tell` once, and returns when nothing of the read is under way any more.
    async fn run(&mut self, place: Place, tell: impl FnOnce(Result<Vec<u8>, TierError>)) {
        let shared = self.shared;
        loop {
            let (connected, permit) = match self.begin(place).await {
                Ok(begun) => begun,
                Err(error) => return tell(Err(error)),
            };
            let mut getting = std::pin::pin!(connected.link.clone().get(keys::of(place)));
            match timeout_at(self.deadline, &mut getting).await {
                Ok(Ok(Some(bytes))) => return tell(Ok(bytes)),
                Ok(Ok(None)) => return tell(Err(TierError::NotThere(KIND))),
                Ok(Err(failure @ Failure::Gone(_))) => {
                    let error = shared.failed("read", failure);
                    drop(permit);
                    if !self.another_connection(connected.number).await {
                        return tell(Err(error));
                    }
                }
                Ok(Err(failure)) => return tell(Err(shared.failed("read", failure))),
                Err(_) => {
                    tell(Err(shared.slow(shared.bounds.read)));
                    // Its permit and its part of the credit end with its reply.
                    let late = getting.await;
                    tracing::debug!(failed = late.is_err(), "a late reply of the remote tier");
                    return;
                }
            }
        }
    }

    /// A connection, and the permit to use it.
    async fn begin(&mut self, place: Place) -> Result<(Connected, SemaphorePermit<'a>), TierError> {
        let shared = self.shared;
        let mut watched = shared.connected.subscribe();
        loop {
            if shared.state().is_lost(place.extent) {
                return Err(TierError::NotThere(KIND));
            }
            if watched.borrow_and_update().is_none() {
                let back = watched.wait_for(Option::is_some);
                match shared.when_gone {
                    WhenGone::Wait => {
                        back.await.map_err(|_| shared.gone())?;
                        self.deadline = Instant::now() + shared.bounds.read;
                    }
                    WhenGone::Lost => {
                        let back = timeout_at(self.deadline, back).await;
                        back.map_err(|_| shared.gone())?
                            .map_err(|_| shared.gone())?;
                    }
                }
                continue;
            }
            let permit = timeout_at(self.deadline, shared.reads.acquire()).await;
            let permit = permit.map_err(|_| shared.slow(shared.bounds.read))?;
            let permit = permit.map_err(|_| shared.gone())?;
            // It may have ended meanwhile.
            if let Some(connected) = watched.borrow_and_update().clone() {
                return Ok((connected, permit));
            }
        }
    }

    /// After a failure of connection `number`: waits for another, or for a moment if that one stays. False
    /// if the read should fail instead.
    async fn another_connection(&mut self, number: u64) -> bool {
        let mut watched = self.shared.connected.subscribe();
        let other = watched.wait_for(|connected| {
            connected
                .as_ref()
                .is_none_or(|connected| connected.number != number)
        });
        if timeout(self.backoff, other).await.is_err() {
            self.backoff = BACKOFF_MAX.min(self.backoff * 2);
        }
        match self.shared.when_gone {
            WhenGone::Wait => {
                self.deadline = Instant::now() + self.shared.bounds.read;
                true
            }
            WhenGone::Lost => Instant::now() < self.deadline,
        }
    }
}

pub(super) async fn write(shared: Arc<Shared>, batch: Batch, done: WriteDone, since: Instant) {
    let extent = batch.extent();
    let (pages, bytes) = (batch.len(), batch.bytes().len());
    let deadline = since + shared.bounds.write;
    let tell = |done: WriteDone, result: Result<(), TierError>| {
        shared.state().ended(Request::Write, since.elapsed());
        done.tell(result);
    };
    let permit = match timeout_at(deadline, shared.writes.acquire()).await {
        Ok(Ok(permit)) => permit,
        Ok(Err(_)) => return, // Semaphores of ours are never closed.
        Err(_) => {
            let error = shared.slow(shared.bounds.write);
            shared.state().was_not_written(extent, &error);
            return tell(done, Err(error));
        }
    };
    let connected = shared.connected.borrow().clone();
    let sent = match connected {
        None => Err(shared.gone()),
        Some(connected) => shared.state().send(extent).map(|()| connected),
    };
    let mut setting = match sent {
        Ok(connected) => Box::pin(connected.link.set(batch)),
        Err(error) => {
            shared.state().was_not_written(extent, &error);
            return tell(done, Err(error));
        }
    };
    match timeout_at(deadline, &mut setting).await {
        Ok(Ok(())) => {
            shared.state().was_written(pages, bytes);
            tell(done, Ok(()));
        }
        Ok(Err(failure)) => {
            let error = shared.failed("write", failure);
            shared.state().was_not_written(extent, &error);
            tell(done, Err(error));
        }
        Err(_) => {
            let error = shared.slow(shared.bounds.write);
            tell(done, Err(error.clone()));
            let late = setting.await;
            tracing::debug!(failed = late.is_err(), "a late batch of the remote tier");
            shared.state().was_not_written(extent, &error);
        }
    }
    drop(permit);
    shared.deletions.notify_one();
}
