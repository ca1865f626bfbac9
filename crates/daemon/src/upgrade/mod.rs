// SPDX-License-Identifier: Apache-2.0
//! Live upgrade: the daemon is replaced by another program while its VMs and disks run (Taiji 4.4).
//!
//! ```text
//!   pid 100, old program                         pid 200, new program
//!   ─────────────────────────────────────────────────────────────────────────────────────
//!   serves                                       started with a socket as its stdin
//!     │ ── Offer ──────────────────────────────► examines settings, state directory, pools
//!     │ ◄─ Ready ─────────────────────────────── waits
//!   lets API requests end
//!   ends background work
//!   exec of its own program: everything that it had is gone, as after a death,
//!     but for the descriptors that it passes on
//!   holds    (single-threaded, does nothing)
//!     │ ── Go, with the descriptors ───────────► recovers, as after a death, and serves
//!     │ ◄─ Serving ───────────────────────────── waits before it takes new requests
//!     │ ── Commit ─────────────────────────────► is the daemon
//!   ends
//! ```
//!
//! # Why the old program executes itself
//! All state of pages lives outside the process, so a killed daemon is recovered from its pools, and that path is
//! the one that is tried most. An upgrade uses it on both sides. The daemon that has stopped its work keeps
//! nothing in its memory that a successor could make wrong: it replaces itself by its own program, and what it
//! knew is gone. The kernel guarantees that no thread, mapping or ring of it is left when the first instruction of
//! that program runs. So *Go* is only ever sent by a process that cannot touch a page any more.
//!
//! # Why exactly one of the two goes on
//! After *Go* whoever continues runs the ordinary recovery: the successor, or the old program, if the successor
//! ends, refuses, or does not serve in time. The old one decides, once: it sends *Commit* and ends, or it kills the
//! successor, waits until that has ended, and starts as if the successor were a daemon that has died. It does
//! never both. A successor that has served and hears nothing more because the old one has died goes on, since
//! then nobody else does. Whatever a successor does before *Commit* is what a daemon may do that is killed at
//! the next instant; requests, messages and connections that only its memory would know are not taken until then.
//!
//! # What passes
//! The lock of the state directory (a lock of the open file, so it never falls), the listening socket of the API
//! (clients that connect meanwhile wait in its backlog), the settings, and the disks with their connections.
//!
//! A disk's rings stop when what was given to the kernel is done; what was taken and not done stays in the
//! in-flight region, as after a death. Everything that the front end has set goes along as a record, and the
//! successor's back end obeys the messages that lead there. Its rings run before *Commit*, since they leave no
//! trace that is not in the in-flight region and the used ring; messages of front ends, and new front ends,
//! wait until then. A front end that keeps no in-flight region is not handed over: the upgrade is refused.
//! Userfaultfds and pidfds are not passed:
//! the successor takes them from the VMMs by what the pools say, as after a death, so it cannot get wrong ones.
//!
//! # Failure before the daemon has stopped its work
//! The program may not become the daemon, does not start, ends, refuses, or is not ready in time; or a request of
//! the API does not end: then nothing has happened, and the daemon has never ceased to serve.

pub(crate) mod api;
pub(crate) mod command;
pub(crate) mod hold;
mod parts;
mod prepare;
mod report;
pub(crate) mod successor;

pub(crate) use parts::Parts;
pub(crate) use prepare::{Prepared, prepare};
pub use report::{UpgradeReport, UpgradeState};

use crate::control::ControlError;
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::{mpsc, oneshot};

/// Orders that may wait for the one under way; more are refused.
const ORDERS_MAX: usize = 4;

/// The request to upgrade to a program, and where to say whether it has begun.
pub(crate) struct Order {
    pub(crate) program: PathBuf,
    pub(crate) begun: oneshot::Sender<Result<UpgradeReport, ControlError>>,
}

/// Live upgrades of this process: how the last one came out, and the way to ask for one.
#[derive(Clone)]
pub struct Upgrades {
    orders: mpsc::Sender<Order>,
    last: Arc<Mutex<UpgradeReport>>,
    own: Arc<Path>,
}

impl Upgrades {
    /// Of a process whose program lies at `own`, which has come to serve as `last` says; and the orders, for the
    /// thread that carries them out.
    pub(crate) fn new(own: &Path, last: UpgradeReport) -> (Self, mpsc::Receiver<Order>) {
        let (orders, taken) = mpsc::channel(ORDERS_MAX);
        let upgrades = Self {
            orders,
            last: Arc::new(Mutex::new(last)),
            own: own.into(),
        };
        (upgrades, taken)
    }

    /// Where the daemon's own program lies, or lay when it was started.
    pub(crate) fn own(&self) -> &Path {
        &self.own
    }

    /// How the last upgrade came out.
    pub(crate) fn report(&self) -> UpgradeReport {
        self.last().clone()
    }

    /// One is under way, or has come out like this.
    pub(crate) fn set(&self, report: UpgradeReport) {
        *self.last() = report;
    }

    /// Asks for an upgrade; returns once the new program is ready, or why there will be none.
    pub(crate) async fn order(&self, program: PathBuf) -> Result<UpgradeReport, ControlError> {
        let (begun, answer) = oneshot::channel();
        let busy = |_| ControlError::refused("an upgrade is under way already: wait for its end");
        self.orders
            .try_send(Order { program, begun })
            .map_err(busy)?;
        let ending = |_| ControlError::refused("the daemon ends, and is not upgraded any more");
        answer.await.map_err(ending)?
    }

    fn last(&self) -> MutexGuard<'_, UpgradeReport> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the program of this process lies: also where another one lies there by now.
pub(crate) fn own_program() -> PathBuf {
    const DELETED: &str = " (deleted)";
    let path = std::env::current_exe().unwrap_or_else(|error| {
        tracing::warn!(%error, "the path of the own program is unknown");
        PathBuf::from("/proc/self/exe")
    });
    match path.to_str().and_then(|path| path.strip_suffix(DELETED)) {
        Some(before) => PathBuf::from(before),
        None => path,
    }
}
