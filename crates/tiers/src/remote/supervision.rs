// SPDX-License-Identifier: Apache-2.0
//! The task that keeps the connection: makes it, checks it, probes it, makes it again.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::config::FirstContact;
use super::link::{Failure, Link};
use super::shared::{BACKOFF_MAX, BACKOFF_MIN, Connected, Shared};
use crate::Standing;
use crate::figures::Durability;
use redis::{ErrorKind, RedisError};

/// How often a server is asked whether it is still there.
const PROBE_EVERY: Duration = Duration::from_secs(1);

/// Keeps the connection, for ever.
pub(super) async fn supervise(shared: Arc<Shared>) {
    let mut backoff = BACKOFF_MIN;
    let mut marked = false;
    for number in 1.. {
        match connect(&shared, &mut marked).await {
            Ok(link) => {
                backoff = BACKOFF_MIN;
                shared.connected.send_replace(Some(Connected {
                    number,
                    link: link.clone(),
                }));
                shared.tell_tried(FirstContact::Made);
                let reason = watch_over(&shared, &link, &mut marked).await;
                shared.connected.send_replace(None);
                link.close();
                shared.stand_gone(reason);
            }
            Err(NoLink { contact, reason }) => {
                shared.stand_gone(reason);
                shared.tell_tried(contact);
            }
        }
        sleep(backoff).await;
        backoff = BACKOFF_MAX.min(backoff * 2);
    }
}

/// Why there is no connection.
struct NoLink {
    contact: FirstContact,
    reason: String,
}

impl NoLink {
    fn silent(reason: &str) -> Self {
        Self {
            contact: FirstContact::NoAnswer,
            reason: reason.to_owned(),
        }
    }

    fn unread(reason: String) -> Self {
        Self {
            contact: FirstContact::Refused,
            reason,
        }
    }

    fn failed(shared: &Shared, error: &RedisError) -> Self {
        let contact = match error.kind() {
            ErrorKind::Client | ErrorKind::AuthenticationFailed => FirstContact::Refused,
            _ => FirstContact::NoAnswer,
        };
        Self {
            contact,
            reason: shared.dialer.describe(error),
        }
    }

    fn not_greeted(shared: &Shared, failure: Failure) -> Self {
        let contact = match failure {
            Failure::Request(_) | Failure::Strange(_) => FirstContact::Refused,
            Failure::Full | Failure::Gone(_) => FirstContact::NoAnswer,
        };
        Self {
            contact,
            reason: shared.failed("marker", failure).to_string(),
        }
    }
}

/// Connects, checks the marker, and says how the tier stands; else why not.
async fn connect(shared: &Shared, marked: &mut bool) -> Result<Link, NoLink> {
    shared.dialer.look_up().await.map_err(NoLink::unread)?;
    let link = match timeout(shared.bounds.connect * 2, Link::connect(&shared.dialer)).await {
        Ok(link) => link.map_err(|error| NoLink::failed(shared, &error))?,
        Err(_) => return Err(NoLink::silent("no connection within its time bound")),
    };
    let greeting = greet(shared, &link, marked);
    match timeout(shared.bounds.connect, greeting).await {
        Ok(greeted) => greeted.map_err(|failure| NoLink::not_greeted(shared, failure))?,
        Err(_) => return Err(NoLink::silent("the server does not answer")),
    }
    let durability = link.durability();
    if shared.state().keeps(durability) {
        warn_of(durability);
    }
    Ok(link)
}

/// Looks for the marker, or writes it at the first connect.
async fn greet(shared: &Shared, link: &Link, marked: &mut bool) -> Result<(), Failure> {
    if *marked {
        if link.clone().has_marker(&shared.marker()).await? {
            look_what_is_back(shared, link).await?;
            shared.stand_working();
            return Ok(());
        }
        *marked = false;
        shared.next_marker();
        if link.is_one_server() {
            shared.state().lost_all();
            tracing::error!(
                "the server of the remote tier has lost its data: pages there are lost"
            );
        } else {
            shared.state().lost_some();
            tracing::error!("a node of the remote tier's cluster has lost its data");
        }
    }
    look_what_is_back(shared, link).await?;
    mark(shared, link, marked).await
}

/// Somebody may have given the server data back that it had lost: its marker of then is there.
async fn look_what_is_back(shared: &Shared, link: &Link) -> Result<(), Failure> {
    if !shared.state().has_lost() {
        return Ok(());
    }
    for marker in shared.lost_markers() {
        if link.clone().has_marker(&marker).await? {
            shared.state().found_again();
            tracing::warn!(
                "the server of the remote tier has data again that it had lost: each page is asked for"
            );
            break;
        }
    }
    Ok(())
}

async fn mark(shared: &Shared, link: &Link, marked: &mut bool) -> Result<(), Failure> {
    match link.clone().mark(&shared.marker()).await {
        Ok(()) => {
            *marked = true;
            shared.stand_working();
            Ok(())
        }
        // It is there, and its pages can be read.
        Err(Failure::Full) => {
            shared.state().stand(Standing::Full);
            Ok(())
        }
        Err(failure) => Err(failure),
    }
}

fn warn_of(durability: Durability) {
    match durability {
        Durability::Always => {}
        Durability::Lagging => tracing::warn!(
            "the remote tier's server writes its log with a delay: if it ends, pages of the last seconds are lost \
             (appendfsync always)"
        ),
        Durability::Nothing => tracing::warn!(
            "the remote tier's server keeps nothing: if it ends, pages there are lost (appendonly yes)"
        ),
        Durability::Unknown => {
            tracing::warn!(
                "it is not known whether the remote tier's server keeps pages if it ends"
            );
        }
    }
}

/// Probes a connection until it has ended; returns why.
async fn watch_over(shared: &Shared, link: &Link, marked: &mut bool) -> String {
    let patience = shared.bounds.patience();
    loop {
        tokio::select! {
            () = link.ended() => return "the connection ended".to_owned(),
            () = sleep(PROBE_EVERY) => {}
            () = shared.doubts.notified() => {}
        }
        let probed = tokio::select! {
            () = link.ended() => return "the connection ended".to_owned(),
            probed = timeout(patience, probe(shared, link, marked)) => probed,
        };
        match probed {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => return shared.failed("probe", failure).to_string(),
            Err(_) => return format!("no answer within {} ms", patience.as_millis()),
        }
    }
}

/// Asks the server whether it is there, whether the marker is, and, if it was full, whether it still is.
async fn probe(shared: &Shared, link: &Link, marked: &mut bool) -> Result<(), Failure> {
    let begin = Instant::now();
    let standing = shared.state().health().standing.clone();
    look_what_is_back(shared, link).await?;
    if standing == Standing::Full || !*marked {
        return mark(shared, link, marked).await;
    }
    let up = link.clone().get(shared.marker()).await?;
    if up.is_none() {
        // While the connection lasted: what was written since is there, so each page is asked for.
        *marked = false;
        shared.next_marker();
        shared.state().lost_some();
        tracing::error!("the remote tier's server was emptied: pages there are lost");
        return mark(shared, link, marked).await;
    }
    let down = link.clone().has_marker(&shared.marker()).await?;
    let in_time = begin.elapsed() <= shared.bounds.read;
    if down && in_time && matches!(standing, Standing::Slow { .. }) {
        shared.stand_working();
    }
    Ok(())
}
