// SPDX-License-Identifier: Apache-2.0
//! The remote tier: pages in the memory of another host, on a Redis or Valkey server or cluster.
//!
//! ```text
//!   store ── read, write, forget ──► RemoteTier ── commands ──► thread pt-tier-remote
//!                                        │                       ├─ a task for each request
//!                              State, one lock                   ├─ supervise: connect, probe, reconnect
//!                                        │                       └─ delete
//!                                        └─ link: two lanes ──► server (RESP over TCP, TLS or a socket)
//! ```
//! - [`address`]: the URL. `password`: where its password stands. `keys`: the names of pages. `wire`: connections, and how much a server may send.
//!   `server`: what is asked of a server. `link`: what is said to it. `state`: what is stored, lost, to be
//!   deleted. `shared`: what all tasks use. `requests`, `deletions`, `supervision`: the tasks. `thread`: the
//!   thread they run on.
//!
//! # Why a runtime in a thread
//! The client crate (`redis`) multiplexes requests over a connection only in its asynchronous form: replies
//! are matched to requests in order, so reads that arrive together are one write to the socket and one round
//! trip. Its synchronous form would need a thread and a connection for each read under way. So the tier has
//! one thread with a current-thread tokio runtime, which runs nothing else; no thread of the store enters it.
//!
//! # Standing
//! ```text
//!             connected, policy checked, marker written
//!     Gone ───────────────────────────────────────────► Working ◄──────┐
//!      ▲                                                 │   │         │ a probe succeeds
//!      │ the connection ended, a probe had no answer     │   │         │
//!      ├─────────────────────────────────────────────────┘   ├─► Slow ─┤  a request was over its bound
//!      └──────────── also from Slow and Full ◄───────────────┴─► Full ─┘  the server answered OOM
//! ```
//! Only a working tier is sent batches. Reads are sent by every connected one. A server that is refused (it
//! may evict keys, or does not accept the password) is gone with that reason, and tried again later: the
//! operator may correct it. So is one whose password or files for TLS cannot be read: they are read at each attempt.
//!
//! # Acknowledgement
//! A batch is acknowledged when the server has answered `OK` for each of its pages. What that is worth when
//! the server ends is its configuration: with `appendonly yes` and `appendfsync always`, all of it;
//! [`RemoteNotes::durability`] and the log say if it is less.
//!
//! # A server that lost its data
//! At the first connection a *marker* is written, a key with a random name. If it is not there after a
//! reconnect, the server has lost what it was given: reads of pages sent before are answered
//! [`TierError::NotThere`] without asking (see `state`), until the marker is there again, because somebody has
//! given the data back; the one that is written meanwhile has another name. If it disappears while the connection lasts
//! (`FLUSHALL`), or on a cluster, where each node loses its own, every page is asked for, and what is not there
//! is not there. A successor of this daemon writes a marker of its own and asks, too.
//!
//! # What a dead daemon left
//! Before anything else, a successor says what the pool of each VM has here ([`RemoteTier::hold`]). Once it knows
//! the VM's words, what none of them names is deleted ([`SlowTier::recover`]), as is what the dead daemon was
//! writing: the last versions that it reserved and did not enter. Keys of single pages that it was deleting go with
//! the last page of their extent.
//!
//! # Reads while the server is gone
//! [`WhenGone::Wait`] keeps them, as many as the queue takes, until it is back: the time bound then begins
//! anew. [`WhenGone::Lost`] fails them at their time bound; a connection that comes back within it costs no
//! page.
//!
//! # What is hostile
//! The server and the wire. Replies are bounded (`wire`), of the expected type and length or an error
//! (`link`), and repeated to people only cleaned (`server`). Their content is the sealer's business. The
//! worst that a server can do is not to return what it was given.

pub mod address;
mod config;
mod deletions;
mod keys;
mod link;
mod password;
mod requests;
mod server;
mod shared;
mod state;
mod supervision;
mod thread;
mod wire;

use std::fmt;
use std::io;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

pub use crate::figures::Durability;
pub use address::{AddressError, RemoteAddress, RemoteUrl};
pub use config::{FirstContact, RemoteConfig, RemoteNotes, TimeBounds, WhenGone};
pub use password::PasswordError;
pub use wire::{AccessError, TlsError, check_access};

use crate::batch::EXTENT_PAGES_MAX;
use crate::{
    Batch, ExtentName, Health, NotRecovered, Place, ReadDone, Room, SectorNo, SlowTier, TierError,
    TierFigures, TierKind, Version, VmId, WriteDone,
};
use shared::Shared;
use state::{Request, State};
use thread::Command;

/// Most reads that wait or are under way.
const READS_MAX: usize = 4096;
/// Most batches that wait or are under way: 2 MiB each.
const WRITES_MAX: usize = 16;

/// The tier cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The thread or its runtime.
    #[error("the thread of the remote tier cannot be started: {0}")]
    Thread(#[from] io::Error),
    /// No random number for the marker.
    #[error("the kernel gives no random number: {0}")]
    Random(String),
}

/// See the header.
pub struct RemoteTier {
    shared: Arc<Shared>,
    /// Taken at the end, which ends the thread.
    commands: Option<mpsc::UnboundedSender<Command>>,
    thread: Option<JoinHandle<()>>,
}

impl RemoteTier {
    /// Starts the tier. It connects by itself, and again whenever it must; until then it is gone.
    ///
    /// # Errors
    /// [`StartError`]. A server that cannot be reached or is refused is none, nor a password that cannot be read: see
    /// [`Self::first_contact`].
    pub fn start(config: RemoteConfig) -> Result<Self, StartError> {
        let mut token = [0; 16];
        getrandom::fill(&mut token).map_err(|error| StartError::Random(error.to_string()))?;
        let state = State::new(config.limit_bytes, READS_MAX, WRITES_MAX);
        let shared = Arc::new(Shared::new(config, state, u128::from_ne_bytes(token)));
        // Requests are counted before they are sent (`State::admit`), so this holds no more than the two
        // maxima.
        let (commands, received) = mpsc::unbounded_channel();
        let thread = thread::start(Arc::clone(&shared), received)?;
        Ok(Self {
            shared,
            commands: Some(commands),
            thread: Some(thread),
        })
    }

    /// How the first attempt to connect ended, and how the tier stands since; waits for it, at most for `bound`.
    pub fn first_contact(&self, bound: Duration) -> (FirstContact, Health) {
        let state = self.shared.state();
        let (state, _) = self
            .shared
            .tried
            .wait_timeout_while(state, bound, |state| {
                state.first_contact() == FirstContact::UnderWay
            })
            .unwrap_or_else(PoisonError::into_inner);
        (state.first_contact(), state.health().clone())
    }

    /// What an operator should know beside how the tier stands.
    pub fn notes(&self) -> RemoteNotes {
        *self.shared.state().notes()
    }

    /// A VM that a dead predecessor of this daemon served has these extents by its table, and its pool has reserved
    /// all versions up to `last`. They are kept until the VM is recovered or forgotten. Before anything is written.
    pub fn hold(&self, vm: VmId, last: Version, extents: impl IntoIterator<Item = ExtentName>) {
        let extents = extents.into_iter().collect();
        self.shared.state().hold(vm, last, extents);
        self.shared.deletions.notify_one();
    }

    fn send(&self, command: Command) {
        // A command that comes back is dropped, and its duty tells that the tier has ended.
        if let Some(commands) = &self.commands
            && commands.send(command).is_err()
        {
            tracing::debug!("a request came after the end of the remote tier's thread");
        }
    }
}

impl SlowTier for RemoteTier {
    fn kind(&self) -> TierKind {
        TierKind::Remote
    }

    fn granule_bytes(&self) -> usize {
        1
    }

    fn make_room(&self, _: VmId, sealed_bytes: &[usize]) -> Result<Vec<Room>, TierError> {
        let bytes = sealed_bytes.iter().map(|&bytes| bytes as u64).sum();
        if let Some(refusal) = self.shared.state().refusal(bytes) {
            return Err(refusal);
        }
        let room = |pages: &[usize]| Room {
            kind: TierKind::Remote,
            start: SectorNo(0),
            sectors: 0,
            pages: u16::try_from(pages.len()).unwrap_or(u16::MAX),
        };
        Ok(sealed_bytes.chunks(EXTENT_PAGES_MAX).map(room).collect())
    }

    fn give_back(&self, _: VmId, _: Room) {
        // Room is counted when a batch is written.
    }

    fn write(&self, batch: Batch, done: WriteDone) {
        let since = Instant::now();
        let accepted = self.shared.state().accept(&batch);
        match accepted {
            Ok(()) => self.send(Command::Write { batch, done, since }),
            Err(error) => done.tell(Err(error)),
        }
    }

    fn read(&self, place: Place, done: ReadDone) {
        let since = Instant::now();
        let admitted = self.shared.state().admit(Request::Read);
        match admitted {
            Ok(()) => self.send(Command::Read { place, done, since }),
            Err(error) => done.tell(Err(error)),
        }
    }

    fn forget(&self, places: &[Place]) {
        self.shared.state().forget(places);
        self.shared.deletions.notify_one();
    }

    fn recover(&self, vm: VmId, places: &[Place]) -> Result<(), NotRecovered> {
        self.shared.state().recover(vm, places);
        self.shared.deletions.notify_one();
        Ok(())
    }

    fn forget_vm(&self, vm: VmId, extents: &[ExtentName]) {
        self.shared.state().forget_vm(vm, extents);
        self.shared.deletions.notify_one();
    }

    fn health(&self) -> Health {
        self.shared.state().health().clone()
    }

    fn figures(&self) -> TierFigures {
        self.shared.state().figures()
    }
}

impl Drop for RemoteTier {
    fn drop(&mut self) {
        drop(self.commands.take());
        // A duty may own the tier's last reference: then this is the tier's own thread, which ends after it.
        let own = std::thread::current().id();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != own
            && thread.join().is_err()
        {
            tracing::error!("the thread of the remote tier panicked");
        }
    }
}

impl fmt::Debug for RemoteTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteTier")
            .field("address", &self.shared.dialer.address())
            .finish_non_exhaustive()
    }
}
