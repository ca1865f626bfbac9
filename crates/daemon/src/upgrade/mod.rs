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
//! (clients that connect meanwhile wait in its backlog), the settings, and the devices with their connections.
//!
//! A disk's rings stop when what was given to the kernel is done; what was taken and not done stays in the
//! in-flight region, as after a death. Everything that the front end has set goes along as a record, and the
//! successor's back end obeys the messages that lead there. Its rings run before *Commit*, since they leave no
//! trace that is not in the in-flight region and the used ring; messages of front ends, and new front ends,
//! wait until then. A disk's front end that keeps no in-flight region is not handed over: the upgrade is refused.
//! Network devices have none; what they leave behind is told in ADR 0046. Userfaultfds and pidfds are not passed:
//! the successor takes them from the VMMs by what the pools say, as after a death, so it cannot get wrong ones.
//!
//! # Failure before the daemon has stopped its work
//! The program may not become the daemon, does not start, ends, refuses, or is not ready in time; or a request of
//! the API does not end, or a disk does not answer: then nothing has happened, and the daemon has never ceased to
//! serve.
//!
//! # Signals
//! SIGTERM, SIGINT and SIGUSR2 are blocked in both programs from beginning to end. What comes during the hand-over
//! stays pending, also over the `exec`. If the old program goes on, it reads them when it serves again; if the new
//! one does, the old one passes them on before it ends.

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
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool,
            Ordering::{AcqRel, Release},
        },
    },
};
use tokio::sync::{mpsc, oneshot};

/// The right to upgrade. Nobody else has it until this is dropped.
pub(crate) struct Turn(Arc<AtomicBool>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.store(false, Release);
    }
}

/// The request to upgrade to a program, and where to say whether it has begun, if anybody wants to know.
pub(crate) struct Order {
    pub(crate) program: PathBuf,
    pub(crate) begun: Option<oneshot::Sender<Result<UpgradeReport, ControlError>>>,
    pub(crate) turn: Turn,
}

/// Live upgrades of this process: how the last one came out, and the way to ask for one.
#[derive(Clone)]
pub struct Upgrades {
    orders: mpsc::Sender<Order>,
    is_taken: Arc<AtomicBool>,
    last: Arc<Mutex<UpgradeReport>>,
    own: Arc<Path>,
}

impl Upgrades {
    /// Of a process whose program lies at `own`, which has come to serve as `last` says; and the orders, for the
    /// thread that carries them out.
    pub(crate) fn new(own: &Path, last: UpgradeReport) -> (Self, mpsc::Receiver<Order>) {
        // Only who has the turn sends one.
        let (orders, taken) = mpsc::channel(1);
        let upgrades = Self {
            orders,
            is_taken: Arc::default(),
            last: Arc::new(Mutex::new(last)),
            own: own.into(),
        };
        (upgrades, taken)
    }

    /// The right to upgrade, unless somebody has it.
    fn turn(&self) -> Option<Turn> {
        let was_taken = self.is_taken.swap(true, AcqRel);
        (!was_taken).then(|| Turn(Arc::clone(&self.is_taken)))
    }

    /// The order that a signal is: to the program that lies where the daemon's own one lies, or lay when it was
    /// started. `None` if an upgrade is under way or has been asked for.
    pub(crate) fn by_signal(&self) -> Option<Order> {
        Some(Order {
            program: self.own.to_path_buf(),
            begun: None,
            turn: self.turn()?,
        })
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
        let busy = || ControlError::refused("an upgrade is under way already: wait for its end");
        let ending = || ControlError::refused("the daemon ends, and is not upgraded any more");
        let turn = self.turn().ok_or_else(busy)?;
        let (begun, answer) = oneshot::channel();
        let order = Order {
            program,
            begun: Some(begun),
            turn,
        };
        self.orders.try_send(order).map_err(|_| ending())?;
        answer.await.map_err(|_| ending())?
    }

    fn last(&self) -> MutexGuard<'_, UpgradeReport> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The daemon ends: nobody carries out orders any more, and whoever has sent one is told so.
pub(crate) fn refuse_all(orders: &mut mpsc::Receiver<Order>) {
    orders.close();
    // One that is dropped is answered.
    while orders.try_recv().is_ok() {}
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_order_is_refused_until_the_first_has_come_to_nothing() {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(async {
            let (upgrades, mut orders) = Upgrades::new(Path::new("/own"), UpgradeReport::none());
            let asking = upgrades.clone();
            let first = tokio::spawn(async move { asking.order("/first".into()).await });
            let order = orders.recv().await.unwrap();
            assert_eq!(order.program, Path::new("/first"));
            let refused = upgrades.order("/second".into()).await.unwrap_err();
            assert!(refused.message.contains("under way"), "{refused}");
            assert!(upgrades.by_signal().is_none());
            let Order { begun, turn, .. } = order;
            let no = Err(ControlError::failed("it is not ready"));
            assert!(begun.unwrap().send(no).is_ok());
            assert!(first.await.unwrap().is_err());
            assert!(upgrades.by_signal().is_none(), "the turn is not over yet");
            drop(turn);
            assert_eq!(upgrades.by_signal().unwrap().program, Path::new("/own"));
        });
    }

    #[test]
    fn order_that_waits_or_comes_when_the_daemon_ends_is_answered() {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(async {
            let (upgrades, mut orders) = Upgrades::new(Path::new("/own"), UpgradeReport::none());
            let asking = upgrades.clone();
            let waits = tokio::spawn(async move { asking.order("/first".into()).await });
            while orders.is_empty() {
                tokio::task::yield_now().await;
            }
            refuse_all(&mut orders);
            for answer in [waits.await.unwrap(), upgrades.order("/second".into()).await] {
                let error = answer.unwrap_err();
                assert!(error.message.contains("the daemon ends"), "{error}");
            }
        });
    }
}
