// SPDX-License-Identifier: Apache-2.0
//! What the tier's callers and the tasks of its thread share.
//!
//! # Time bounds
//! The bound of a request begins when the store calls. At its end the duty is told that the tier is slow,
//! but the request itself is waited for: the connection returns replies in order, and a batch that was given
//! up may still arrive and must be deleted afterwards, not before. So what is under way on a connection is
//! bounded by permits ([`READS_AT_A_TIME`], [`WRITES_AT_A_TIME`]), each held until the reply or the end of the
//! connection, and a server that says nothing any more is given up after its patience
//! ([`TimeBounds::patience`]).
//!
//! # Order
//! A connection is published ([`Shared::connected`]) only after its server has been checked and its marker
//! read, so no request meets a server that is refused, and no batch is sent between the loss of data and its
//! discovery.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, watch};

use super::config::{FirstContact, RemoteConfig, TimeBounds, WhenGone};
use super::keys;
use super::link::{Failure, Link};
use super::state::State;
use super::wire::Dialer;
use crate::{Standing, TierError, TierKind};

const KIND: TierKind = TierKind::Remote;
/// Reads on the connection at a time: the product of a round trip of 1 ms and 100,000 pages a second.
const READS_AT_A_TIME: usize = 128;
/// Batches on the connection at a time: one is encoded while the other is under way.
const WRITES_AT_A_TIME: usize = 2;
/// Pause before something is tried again, at first; doubled with each attempt.
pub(super) const BACKOFF_MIN: Duration = Duration::from_millis(20);
/// Longest such pause.
pub(super) const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// How many markers of lost data are looked for: each is asked for in each probe while pages count as lost.
const LOST_MARKERS_MAX: usize = 8;

/// A connection and its number; each reconnect gets the next.
#[derive(Clone)]
pub(super) struct Connected {
    pub(super) number: u64,
    pub(super) link: Link,
}

/// What the tier's callers and tasks share.
pub(super) struct Shared {
    pub(super) dialer: Arc<Dialer>,
    pub(super) tried: Condvar,
    /// Something is to be deleted.
    pub(super) deletions: Notify,
    /// The connection should be probed now.
    pub(super) doubts: Notify,
    pub(super) bounds: TimeBounds,
    pub(super) when_gone: WhenGone,
    token: u128,
    /// The number of the marker; those below it went with data that was lost.
    marker: AtomicU32,
    state: Mutex<State>,
    pub(super) connected: watch::Sender<Option<Connected>>,
    pub(super) reads: Semaphore,
    pub(super) writes: Semaphore,
}

impl Shared {
    pub(super) fn new(config: RemoteConfig, state: State, token: u128) -> Self {
        Self {
            dialer: Arc::new(Dialer::new(config.url, config.bounds)),
            tried: Condvar::new(),
            deletions: Notify::new(),
            doubts: Notify::new(),
            bounds: config.bounds,
            when_gone: config.when_gone,
            token,
            marker: AtomicU32::new(0),
            state: Mutex::new(state),
            connected: watch::Sender::new(None),
            reads: Semaphore::new(READS_AT_A_TIME),
            writes: Semaphore::new(WRITES_AT_A_TIME),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key of the marker.
    pub(super) fn marker(&self) -> String {
        keys::marker(self.token, self.marker.load(Relaxed))
    }

    /// The markers of data that was lost, the last first.
    pub(super) fn lost_markers(&self) -> impl Iterator<Item = String> + use<> {
        let (token, now) = (self.token, self.marker.load(Relaxed));
        let lost = (0..now).rev().take(LOST_MARKERS_MAX);
        lost.map(move |number| keys::marker(token, number))
    }

    /// The marker is lost: the next one has another name, so that this one tells when it is back.
    pub(super) fn next_marker(&self) {
        self.marker.fetch_add(1, Relaxed);
    }

    pub(super) fn gone(&self) -> TierError {
        let refusal = self.state().health().refusal(KIND);
        match refusal {
            Some(gone @ TierError::Gone { .. }) => gone,
            _ => TierError::Gone {
                kind: KIND,
                reason: "the connection ended".to_owned(),
            },
        }
    }

    /// A request was over its bound.
    pub(super) fn slow(&self, bound: Duration) -> TierError {
        let bound_ms = u64::try_from(bound.as_millis()).unwrap_or(u64::MAX);
        let mut state = self.state();
        if state.health().standing == Standing::Working {
            state.stand(Standing::Slow { bound_ms });
            tracing::warn!(
                bound_ms,
                "the remote tier is slow: no batches until it has recovered"
            );
        }
        drop(state);
        self.doubts.notify_one();
        TierError::Slow {
            kind: KIND,
            bound_ms,
        }
    }

    fn full(&self) {
        let mut state = self.state();
        if matches!(
            state.health().standing,
            Standing::Working | Standing::Slow { .. }
        ) {
            state.stand(Standing::Full);
            tracing::warn!("the server of the remote tier is full (its maxmemory)");
        }
    }

    pub(super) fn failed(&self, operation: &'static str, failure: Failure) -> TierError {
        let reason = match failure {
            Failure::Full => {
                self.full();
                return TierError::Full(KIND);
            }
            Failure::Gone(error) => {
                self.doubts.notify_one();
                return TierError::Gone {
                    kind: KIND,
                    reason: self.dialer.describe(&error),
                };
            }
            Failure::Request(error) => self.dialer.describe(&error),
            Failure::Strange(what) => what.to_owned(),
        };
        TierError::Io {
            kind: KIND,
            operation,
            reason,
        }
    }

    pub(super) fn tell_tried(&self, contact: FirstContact) {
        self.state().tried(contact);
        self.tried.notify_all();
    }

    pub(super) fn stand_gone(&self, reason: String) {
        let mut state = self.state();
        if state.stand(Standing::Gone {
            reason: reason.clone(),
        }) || state.first_contact() == FirstContact::UnderWay
        {
            tracing::error!(address = %self.dialer.address(), reason, "the remote tier is gone");
        }
    }

    pub(super) fn stand_working(&self) {
        if self.state().stand(Standing::Working) {
            tracing::info!(address = %self.dialer.address(), "the remote tier works");
        }
    }
}
