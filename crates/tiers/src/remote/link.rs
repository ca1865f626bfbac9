// SPDX-License-Identifier: Apache-2.0
//! The connections of a tier to its server or cluster, and the four things that are said over them.
//!
//! There are two *lanes*: pages come up by one, everything else goes down by the other. A server answers a
//! connection in order, so over a single one a fault would wait behind the two megabytes of a batch.

use redis::aio::ConnectionLike;
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use redis::{Cmd, ConnectionAddr, IntoConnectionInfo, Pipeline, RedisError, RedisFuture, Value};
use std::sync::Arc;
use tokio::task::JoinSet;

use super::address::{Node, Route};
use super::keys;
use super::wire::{Dialer, NodeConnection};
use crate::batch::SEALED_BYTES_MAX;
use crate::figures::Durability;
use crate::{Batch, ExtentName, Position};

/// Pages of a batch that are sent at a time: reads of other pages are encoded and sent between two of these
/// parts, which take some hundred microseconds each.
const PART_PAGES: usize = 64;
/// How often a cluster's request is repeated after the cluster has changed.
const CLUSTER_RETRIES: u32 = 4;

/// What a server answered that no server should.
const STRANGE: &str = "the server answered with something else than was asked for";

/// One lane.
#[derive(Clone)]
pub(super) enum Lane {
    /// To a server.
    Server(NodeConnection),
    /// To all nodes of a cluster.
    Cluster(ClusterConnection<NodeConnection>),
}

/// Both lanes.
#[derive(Clone)]
pub(super) struct Link {
    /// Pages on their way up.
    up: Lane,
    /// Batches, deletions, questions.
    down: Lane,
}

/// How a request failed.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// The server has no memory for it.
    Full,
    /// The connection ended, or the server says that it cannot serve anybody now.
    Gone(RedisError),
    /// This request failed.
    Request(RedisError),
    /// It answered nonsense.
    Strange(&'static str),
}

impl From<RedisError> for Failure {
    fn from(error: RedisError) -> Self {
        use redis::{ErrorKind, ServerErrorKind};
        let codes = error.clone().into_server_errors();
        let is = |code: &str| {
            codes
                .as_ref()
                .is_some_and(|errors| errors.iter().any(|(_, error)| error.code() == code))
        };
        if is("OOM") {
            return Self::Full;
        }
        match error.kind() {
            ErrorKind::Server(
                ServerErrorKind::BusyLoading
                | ServerErrorKind::MasterDown
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::TryAgain
                | ServerErrorKind::ReadOnly,
            )
            | ErrorKind::Io
            | ErrorKind::Parse
            | ErrorKind::AuthenticationFailed
            | ErrorKind::ClusterConnectionNotFound => Self::Gone(error),
            _ => Self::Request(error),
        }
    }
}

impl Link {
    pub(super) async fn connect(dialer: &Arc<Dialer>) -> Result<Self, RedisError> {
        let login = dialer.login();
        let tcp = |node: &Node| ConnectionAddr::Tcp(node.host.clone(), node.port);
        let address = match &dialer.address().route {
            Route::Server(node) => tcp(node),
            Route::Socket(path) => ConnectionAddr::Unix(path.clone()),
            Route::Cluster(nodes) => {
                let infos = nodes
                    .iter()
                    .map(|node| {
                        Ok(tcp(node)
                            .into_connection_info()?
                            .set_redis_settings(login.clone()))
                    })
                    .collect::<Result<Vec<_>, RedisError>>()?;
                let cluster = ClusterClientBuilder::new(infos)
                    .retries(CLUSTER_RETRIES)
                    .overall_response_timeout(None)
                    .build()?;
                return Ok(Self {
                    up: Lane::Cluster(cluster.get_async_generic_connection().await?),
                    down: Lane::Cluster(cluster.get_async_generic_connection().await?),
                });
            }
        };
        Ok(Self {
            up: Lane::Server(dialer.connect(&address).await?),
            down: Lane::Server(dialer.connect(&address).await?),
        })
    }

    /// Returns once a lane has ended; that of a cluster is replaced by the client crate.
    pub(super) async fn ended(&self) {
        let (Lane::Server(up), Lane::Server(down)) = (&self.up, &self.down) else {
            return std::future::pending().await;
        };
        tokio::select! {
            () = up.ended() => {}
            () = down.ended() => {}
        }
    }

    /// Ends the lanes and with them whatever is under way. Those of a cluster end with their last request, each
    /// of which the client crate gives up in time.
    pub(super) fn close(self) {
        for lane in [self.up, self.down] {
            if let Lane::Server(node) = lane {
                node.close();
            }
        }
    }

    /// What the server keeps if it ends; not known of a cluster, whose nodes may differ.
    pub(super) fn durability(&self) -> Durability {
        match &self.down {
            Lane::Server(node) => node.durability,
            Lane::Cluster(_) => Durability::Unknown,
        }
    }

    /// True if one server has all pages.
    pub(super) fn is_one_server(&self) -> bool {
        matches!(self.down, Lane::Server(_))
    }

    /// The value under a key, if there is one.
    pub(super) async fn get(mut self, key: String) -> Result<Option<Vec<u8>>, Failure> {
        value(
            self.up
                .req_packed_command(redis::cmd("GET").arg(key))
                .await?,
        )
    }

    /// Writes a batch; `Ok` once each of its pages was acknowledged.
    pub(super) async fn set(self, batch: Batch) -> Result<(), Failure> {
        let batch = Arc::new(batch);
        let mut parts = JoinSet::new();
        for start in (0..batch.len()).step_by(PART_PAGES) {
            let (mut lane, batch) = (self.down.clone(), Arc::clone(&batch));
            parts.spawn(async move {
                let mut pipeline = redis::pipe();
                for page in batch.pages().skip(start).take(PART_PAGES) {
                    let key = keys::page(batch.extent(), page.position);
                    pipeline.cmd("SET").arg(key).arg(page.bytes);
                }
                drop(batch);
                acknowledged(&mut lane, &pipeline).await
            });
        }
        let mut outcome = Ok(());
        // All are waited for: what is still under way could otherwise follow the deletion of a failed batch.
        while let Some(part) = parts.join_next().await {
            let part = part.unwrap_or(Err(Failure::Strange("the tier's thread has ended")));
            // A full server is the reason that counts.
            if matches!((&outcome, &part), (Ok(()), _) | (_, Err(Failure::Full))) {
                outcome = part;
            }
        }
        outcome
    }

    /// Writes the marker.
    pub(super) async fn mark(mut self, key: &str) -> Result<(), Failure> {
        let mut pipeline = redis::pipe();
        pipeline.cmd("SET").arg(key).arg(MARK);
        acknowledged(&mut self.down, &pipeline).await
    }

    /// True if the marker is there and as it was written.
    pub(super) async fn has_marker(mut self, key: &str) -> Result<bool, Failure> {
        let reply = self
            .down
            .req_packed_command(redis::cmd("GET").arg(key))
            .await?;
        Ok(value(reply)?.as_deref() == Some(MARK.as_bytes()))
    }

    /// Deletes pages of an extent.
    pub(super) async fn unlink(
        mut self,
        extent: ExtentName,
        positions: impl Iterator<Item = u16>,
    ) -> Result<(), Failure> {
        let mut command = redis::cmd("UNLINK");
        for position in positions {
            command.arg(keys::page(extent, Position(u32::from(position))));
        }
        match self.down.req_packed_command(&command).await? {
            Value::Int(_) => Ok(()),
            _ => Err(Failure::Strange(STRANGE)),
        }
    }

    /// Deletes the marker.
    pub(super) async fn unmark(mut self, key: &str) -> Result<(), Failure> {
        self.down
            .req_packed_command(redis::cmd("UNLINK").arg(key))
            .await?;
        Ok(())
    }
}

/// What the marker's key has.
const MARK: &str = "pagetide";

fn value(reply: Value) -> Result<Option<Vec<u8>>, Failure> {
    match reply {
        Value::Nil => Ok(None),
        Value::BulkString(bytes) if bytes.len() <= SEALED_BYTES_MAX => Ok(Some(bytes)),
        _ => Err(Failure::Strange(STRANGE)),
    }
}

/// Sends a pipeline of `SET`; `Ok` if each was answered with OK.
async fn acknowledged(lane: &mut Lane, pipeline: &Pipeline) -> Result<(), Failure> {
    let replies = lane
        .req_packed_commands(pipeline, 0, pipeline.len())
        .await?;
    if replies.len() != pipeline.len() {
        return Err(Failure::Strange(STRANGE));
    }
    for reply in replies {
        match reply.extract_error()? {
            Value::Okay => {}
            _ => return Err(Failure::Strange(STRANGE)),
        }
    }
    Ok(())
}

impl ConnectionLike for Lane {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        // Errors of the server come as values or as errors, by the path that they took.
        let reply = match self {
            Self::Server(node) => node.req_packed_command(command),
            Self::Cluster(cluster) => cluster.req_packed_command(command),
        };
        Box::pin(async move { reply.await?.extract_error() })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        match self {
            Self::Server(node) => node.req_packed_commands(pipeline, offset, count),
            Self::Cluster(cluster) => cluster.req_packed_commands(pipeline, offset, count),
        }
    }

    fn get_db(&self) -> i64 {
        match self {
            Self::Server(node) => node.get_db(),
            Self::Cluster(cluster) => cluster.get_db(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bytes_of_a_pages_length_are_a_page() {
        assert!(matches!(value(Value::Nil), Ok(None)));
        let page = value(Value::BulkString(vec![7; SEALED_BYTES_MAX]));
        assert!(matches!(page, Ok(Some(bytes)) if bytes.len() == SEALED_BYTES_MAX));
        for reply in [
            Value::BulkString(vec![7; SEALED_BYTES_MAX + 1]),
            Value::Int(1),
            Value::Okay,
            Value::SimpleString("x".to_owned()),
            Value::Array(vec![Value::BulkString(vec![7])]),
            Value::Map(Vec::new()),
        ] {
            assert!(matches!(value(reply), Err(Failure::Strange(_))));
        }
    }

    #[test]
    fn error_of_a_server_says_full_gone_or_failed() {
        let failure = |line: &str| {
            let reply = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
            Failure::from(reply.extract_error().unwrap_err())
        };
        let oom = "OOM command not allowed when used memory > 'maxmemory'.";
        assert!(matches!(failure(oom), Failure::Full));
        for line in ["LOADING x", "CLUSTERDOWN x", "MASTERDOWN x", "READONLY x"] {
            assert!(matches!(failure(line), Failure::Gone(_)), "{line}");
        }
        for line in ["ERR x", "WRONGTYPE x", "MISCONF x", "NOPERM x", ""] {
            assert!(matches!(failure(line), Failure::Request(_)), "{line}");
        }
        let ended = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        assert!(matches!(
            Failure::from(RedisError::from(ended)),
            Failure::Gone(_)
        ));
    }
}
