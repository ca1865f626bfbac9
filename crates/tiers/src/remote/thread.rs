// SPDX-License-Identifier: Apache-2.0
//! The tier's thread: a task for each request, one that keeps the connection, one that deletes.
//!
//! Nothing else runs on it: no thread of the store enters the runtime, and no task of it waits for a lock that
//! is held for long.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::deletions::{delete, delete_rest};
use super::requests::{read, write};
use super::shared::{Connected, Shared};
use super::supervision::supervise;
use crate::{Batch, Place, ReadDone, WriteDone};

/// How long the end of the tier waits for its last deletions.
const FAREWELL_BOUND: Duration = Duration::from_millis(500);
/// The thread's stack. Replies may be nested a hundred deep before the client crate refuses them, and each level
/// takes some kilobytes without optimisation.
const STACK_BYTES: usize = 8 << 20;

/// What callers want of the thread.
pub(super) enum Command {
    Read {
        place: Place,
        done: ReadDone,
        since: std::time::Instant,
    },
    Write {
        batch: Batch,
        done: WriteDone,
        since: std::time::Instant,
    },
}

/// Starts the thread. It ends when the other end of `commands` is dropped.
pub(super) fn start(
    shared: Arc<Shared>,
    commands: mpsc::UnboundedReceiver<Command>,
) -> io::Result<JoinHandle<()>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::Builder::new()
        .name("pt-tier-remote".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            runtime.block_on(run(shared, commands));
            // A file that is being read may never be: nobody waits for it.
            runtime.shutdown_background();
        })
}

async fn run(shared: Arc<Shared>, mut commands: mpsc::UnboundedReceiver<Command>) {
    shared.dialer.adopt();
    // Aborted when this returns, as all tasks are when the runtime ends: their duties then tell that the
    // tier has ended.
    let mut keepers = JoinSet::new();
    keepers.spawn(supervise(Arc::clone(&shared)));
    keepers.spawn(delete(Arc::clone(&shared)));
    while let Some(command) = commands.recv().await {
        let shared = Arc::clone(&shared);
        match command {
            Command::Read { place, done, since } => {
                tokio::spawn(read(shared, place, done, since.into()));
            }
            Command::Write { batch, done, since } => {
                tokio::spawn(write(shared, batch, done, since.into()));
            }
        }
    }
    keepers.shutdown().await;
    if timeout(FAREWELL_BOUND, farewell(&shared)).await.is_err() {
        tracing::debug!("the remote tier ended before its last deletions");
    }
}

/// Deletes what is still to be deleted, and the markers.
async fn farewell(shared: &Shared) {
    let connected = shared.connected.borrow().clone();
    let Some(Connected { link, .. }) = connected else {
        return;
    };
    delete_rest(shared, &link).await;
    for marker in std::iter::once(shared.marker()).chain(shared.lost_markers()) {
        if let Err(failure) = link.clone().unmark(&marker).await {
            tracing::debug!(?failure, "a marker of the remote tier stays");
        }
    }
}
