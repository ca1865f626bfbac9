// SPDX-License-Identifier: Apache-2.0
//! The task that deletes what is not needed any more.
//!
//! Deletions have no time bound and no duty. What does not reach the server is tried again; what the server
//! refuses stays there, under names that are never read again.

use std::sync::Arc;

use tokio::task::JoinSet;
use tokio::time::sleep;

use super::link::{Failure, Link};
use super::shared::{BACKOFF_MIN, Connected, Shared};
use super::state::Positions;
use crate::{ExtentName, Standing};

/// Extents of which pages are deleted at a time.
const DELETIONS_AT_A_TIME: usize = 64;

/// Deletes, for ever.
pub(super) async fn delete(shared: Arc<Shared>) {
    let mut watched = shared.connected.subscribe();
    loop {
        let Ok(connected) = watched.wait_for(Option::is_some).await.map(|it| it.clone()) else {
            return;
        };
        let Some(Connected { link, .. }) = connected else {
            continue;
        };
        let deletions = shared.state().take_deletions(DELETIONS_AT_A_TIME);
        if deletions.is_empty() {
            shared.deletions.notified().await;
            continue;
        }
        if delete_some(&shared, &link, deletions).await.is_err() {
            // Gone: the connection is replaced, or is the same after a moment.
            sleep(BACKOFF_MIN).await;
        }
        if shared.state().health().standing == Standing::Full {
            shared.doubts.notify_one();
        }
    }
}

/// Deletes all there is, unless the connection ends meanwhile.
pub(super) async fn delete_rest(shared: &Shared, link: &Link) {
    loop {
        let deletions = shared.state().take_deletions(DELETIONS_AT_A_TIME);
        if deletions.is_empty() || delete_some(shared, link, deletions).await.is_err() {
            return;
        }
    }
}

/// Deletes pages of some extents. What did not reach the server is put back.
async fn delete_some(
    shared: &Shared,
    link: &Link,
    deletions: Vec<(ExtentName, Positions)>,
) -> Result<(), ()> {
    let mut deleting = JoinSet::new();
    for (extent, positions) in deletions {
        let link = link.clone();
        deleting.spawn(async move {
            let result = link.unlink(extent, positions.iter()).await;
            (extent, positions, result)
        });
    }
    let mut failed = Vec::new();
    while let Some(deleted) = deleting.join_next().await {
        match deleted {
            Ok((_, _, Ok(()))) | Err(_) => {}
            Ok((extent, positions, Err(Failure::Gone(_)))) => failed.push((extent, positions)),
            Ok((extent, _, Err(failure))) => {
                let error = shared.failed("deletion", failure);
                tracing::warn!(%error, ?extent, "pages stay on the server, unused");
            }
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    shared.doubts.notify_one();
    shared.state().put_deletions_back(failed);
    Err(())
}
