// SPDX-License-Identifier: Apache-2.0
//! Connections to servers: how they are made, and how much a server may send.
//!
//! The client crate speaks the protocol over a stream that we make, because two things are ours to decide:
//! whom TLS trusts, and how much is read. A reply announces its own length, and the crate reads as much as
//! is announced; so a hostile server could make us hold any amount of memory.
//!
//! # Credit
//! [`Credit`] counts what a connection may still receive. A request adds the length of the longest reply
//! that it can have, each byte that arrives takes one away, and below zero the connection is closed. Replies
//! are mostly shorter than their grant; what is left over must not add up, so when a request is done the
//! credit is cut to what the requests still under way may receive.
//!
//! # Cluster
//! The crate makes the connections to a cluster's nodes itself, by [`Connect`], which has no argument for
//! anything of ours. So the [`Dialer`] is also kept by the thread ([`Dialer::adopt`]): all tasks of a tier
//! run on its one thread.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster_async::Connect;
use redis::{
    AsyncConnectionConfig, Cmd, ConnectionAddr, ErrorKind, IntoConnectionInfo, Pipeline,
    ProtocolVersion, RedisConnectionInfo, RedisError, RedisFuture, Value,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::address::{AddressError, RemoteAddress, RemoteUrl, TlsFiles};
use super::config::TimeBounds;
use super::server;
use crate::batch::SEALED_BYTES_MAX;
use crate::figures::Durability;

/// What a reply may have beside its value: type, length, line ends.
const REPLY_FRAME_BYTES: i64 = 64;
/// Longest reply to a command that returns no value: a status, a number or the text of an error.
const STATUS_BYTES_MAX: i64 = 512;
/// Longest reply to a question about the server: `INFO` has some kilobytes, the nodes of a cluster of a
/// thousand some hundred.
const ANSWER_BYTES_MAX: i64 = 1 << 20;

/// TLS cannot be used with these files.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be used.
    #[error("{path} cannot be used for TLS: {reason}")]
    File {
        /// Which file.
        path: String,
        /// Why.
        reason: String,
    },
    /// Our certificate and its key do not fit, or the like.
    #[error("TLS cannot be set up: {0}")]
    Setup(#[from] tokio_rustls::rustls::Error),
}

/// What a URL names cannot be read: a password or a file for TLS.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The password.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// A file for TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// A URL with all that it names, as it was read last.
struct Access {
    address: RemoteAddress,
    tls: Option<Arc<ClientConfig>>,
}

impl Access {
    fn read(url: RemoteUrl) -> Result<Self, AccessError> {
        let address = url.address()?;
        let tls = address.tls.as_ref().map(client_config).transpose()?;
        Ok(Self {
            address,
            tls: tls.map(Arc::new),
        })
    }
}

/// Makes connections. What its URL names is read before each attempt to connect: a password that has changed, or a
/// file that was not there, needs no other daemon.
pub(super) struct Dialer {
    url: RemoteUrl,
    /// `None` until it could be read.
    access: Mutex<Option<Arc<Access>>>,
    bounds: TimeBounds,
}

thread_local! {
    /// Of the tier whose thread this is.
    static DIALER: RefCell<Option<Arc<Dialer>>> = const { RefCell::new(None) };
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

impl Dialer {
    pub(super) fn new(url: RemoteUrl, bounds: TimeBounds) -> Self {
        Self {
            url,
            access: Mutex::default(),
            bounds,
        }
    }

    /// Reads anew what the URL names.
    ///
    /// # Errors
    /// Why it cannot be read now, or not within the time bound of a connection.
    pub(super) async fn look_up(&self) -> Result<(), String> {
        let url = self.url.clone();
        // The file system may not answer, and requests have time bounds.
        let reading = tokio::task::spawn_blocking(move || Access::read(url));
        let read = match tokio::time::timeout(self.bounds.connect, reading).await {
            Ok(Ok(read)) => read.map_err(|why| why.to_string())?,
            Ok(Err(gone)) => return Err(format!("what its URL names was not read: {gone}")),
            Err(_) => {
                return Err(
                    "what its URL names cannot be read: no answer within the time bound".to_owned(),
                );
            }
        };
        *self.access.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(read));
        Ok(())
    }

    fn access(&self) -> Option<Arc<Access>> {
        let access = self.access.lock().unwrap_or_else(PoisonError::into_inner);
        access.clone()
    }

    /// Where it is, without the password.
    pub(super) fn address(&self) -> &RemoteAddress {
        self.url.bare()
    }

    /// What an error says, without the password.
    pub(super) fn describe(&self, error: &RedisError) -> String {
        match self.access() {
            Some(access) => server::describe(error, &access.address),
            None => server::describe(error, self.address()),
        }
    }

    /// Makes connections of this thread to a cluster's nodes.
    pub(super) fn adopt(self: &Arc<Self>) {
        DIALER.with(|dialer| *dialer.borrow_mut() = Some(Arc::clone(self)));
    }

    /// User, password and database, as the crate wants them.
    pub(super) fn login(&self) -> RedisConnectionInfo {
        let mut login = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP2)
            .set_skip_set_lib_name()
            .set_db(i64::from(self.address().database));
        if let Some(user) = &self.address().user {
            login = login.set_username(user);
        }
        let access = self.access();
        let password = access
            .as_ref()
            .and_then(|access| access.address.password.as_ref());
        if let Some(password) = password {
            login = login.set_password(password.reveal());
        }
        login
    }

    /// Connects to a server, logs in, and checks that the server keeps what it is given.
    pub(super) async fn connect(&self, to: &ConnectionAddr) -> Result<NodeConnection, RedisError> {
        let connecting = async {
            let stream = self.stream(to).await?;
            let mut node =
                NodeConnection::new(stream, &self.login(), self.bounds.patience()).await?;
            node.durability = server::check(&mut node, self.address().eviction_policy).await?;
            Ok(node)
        };
        match tokio::time::timeout(self.bounds.connect, connecting).await {
            Ok(result) => result,
            Err(_) => Err(RedisError::from(io::Error::new(
                io::ErrorKind::TimedOut,
                format!(
                    "no connection within {} ms",
                    self.bounds.connect.as_millis()
                ),
            ))),
        }
    }

    async fn stream(&self, to: &ConnectionAddr) -> io::Result<Box<dyn Stream>> {
        let (host, port) = match to {
            ConnectionAddr::Unix(path) => {
                return Ok(Box::new(UnixStream::connect(path).await?));
            }
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                (host, *port)
            }
            _ => return Err(io::Error::from(io::ErrorKind::Unsupported)),
        };
        let stream = TcpStream::connect((host.as_str(), port)).await?;
        stream.set_nodelay(true)?;
        if self.address().tls.is_none() {
            return Ok(Box::new(stream));
        }
        let config = self.access().and_then(|access| access.tls.clone());
        let config = config.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))?;
        let name = ServerName::try_from(host.clone()).map_err(io::Error::other)?;
        let connector = TlsConnector::from(config);
        Ok(Box::new(connector.connect(name, stream).await?))
    }
}

/// Whether the password and the files for TLS that a URL names can be used.
///
/// # Errors
/// [`AccessError`]: which one cannot be, and why.
pub fn check_access(url: &RemoteUrl) -> Result<(), AccessError> {
    Access::read(url.clone()).map(drop)
}

fn client_config(files: &TlsFiles) -> Result<ClientConfig, TlsError> {
    let file_error = |path: &std::path::Path, reason: String| TlsError::File {
        path: path.display().to_string(),
        reason,
    };
    let certificates = |path: &std::path::Path| {
        let read = CertificateDer::pem_file_iter(path)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(|error| file_error(path, error.to_string()))?;
        match read.is_empty() {
            true => Err(file_error(path, "there is no certificate in it".to_owned())),
            false => Ok(read),
        }
    };
    let mut roots = RootCertStore::empty();
    for authority in certificates(&files.authorities)? {
        let added = roots.add(authority);
        added.map_err(|error| file_error(&files.authorities, error.to_string()))?;
    }
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    let Some((certificate, key)) = &files.identity else {
        return Ok(config.with_no_client_auth());
    };
    let chain = certificates(certificate)?;
    let key =
        PrivateKeyDer::from_pem_file(key).map_err(|error| file_error(key, error.to_string()))?;
    Ok(config.with_client_auth_cert(chain, key)?)
}

/// What a connection may still receive, see the header.
#[derive(Default, Debug)]
struct Credit {
    bytes: AtomicI64,
    /// Sum of the grants of requests under way.
    outstanding_bytes: AtomicI64,
}

/// One request's part of the credit; ends with its reply.
struct Grant {
    credit: Arc<Credit>,
    bytes: i64,
}

impl Credit {
    fn grant(self: &Arc<Self>, bytes: i64) -> Grant {
        // One thread: no order to keep.
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.outstanding_bytes.fetch_add(bytes, Ordering::Relaxed);
        Grant {
            credit: Arc::clone(self),
            bytes,
        }
    }

    fn take(&self, bytes: usize) -> io::Result<()> {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        if self.bytes.fetch_sub(bytes, Ordering::Relaxed) >= bytes {
            return Ok(());
        }
        // A kind after which the crate gives the connection up.
        Err(io::Error::new(
            io::ErrorKind::ConnectionAborted,
            "the server sent more than any reply to our requests can have",
        ))
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        let credit = &self.credit;
        let before = credit
            .outstanding_bytes
            .fetch_sub(self.bytes, Ordering::Relaxed);
        credit
            .bytes
            .fetch_min(before - self.bytes, Ordering::Relaxed);
    }
}

/// A stream whose incoming bytes are counted.
struct Measured {
    stream: Box<dyn Stream>,
    credit: Arc<Credit>,
}

impl AsyncRead for Measured {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        if let Poll::Ready(Ok(())) = polled {
            self.credit.take(buffer.filled().len() - before)?;
        }
        polled
    }
}

impl AsyncWrite for Measured {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Ends the crate's task of a connection, and with it the connection.
struct Driver(AbortHandle);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A connection to one server. Clones share it; it ends with the last of them.
#[derive(Clone)]
pub(super) struct NodeConnection {
    connection: MultiplexedConnection,
    credit: Arc<Credit>,
    ended: watch::Receiver<bool>,
    /// What the server keeps if it ends, as it said when the connection was made.
    pub(super) durability: Durability,
    driver: Arc<Driver>,
}

impl NodeConnection {
    async fn new(
        stream: Box<dyn Stream>,
        login: &RedisConnectionInfo,
        patience: Duration,
    ) -> Result<Self, RedisError> {
        let credit = Arc::new(Credit::default());
        let measured = Measured {
            stream,
            credit: Arc::clone(&credit),
        };
        // Bounds are those of the tier's requests. Whoever replies even later exceeds its credit.
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(None)
            .set_response_timeout(Some(patience));
        let grant = credit.grant(ANSWER_BYTES_MAX);
        let (connection, driver) =
            MultiplexedConnection::new_with_config(login, measured, config).await?;
        drop(grant);
        let (told, ended) = watch::channel(false);
        let task = tokio::spawn(async move {
            driver.await;
            told.send_replace(true);
        });
        Ok(Self {
            connection,
            credit,
            ended,
            durability: Durability::Unknown,
            driver: Arc::new(Driver(task.abort_handle())),
        })
    }

    /// Ends the connection, and with it every request of any clone.
    pub(super) fn close(&self) {
        self.driver.0.abort();
    }

    /// Returns once the connection has ended.
    pub(super) async fn ended(&self) {
        // An error means that the task has ended without telling.
        if self.ended.clone().wait_for(|ended| *ended).await.is_err() {
            tracing::debug!("a connection of the remote tier ended without a word");
        }
    }
}

impl fmt::Debug for NodeConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeConnection").finish_non_exhaustive()
    }
}

/// The longest reply that a command can have.
fn reply_bytes_max(command: &Cmd) -> i64 {
    match command.args_iter().next() {
        Some(redis::Arg::Simple(b"GET")) => SEALED_BYTES_MAX as i64 + REPLY_FRAME_BYTES,
        Some(redis::Arg::Simple(b"SET" | b"UNLINK" | b"PING")) => STATUS_BYTES_MAX,
        _ => ANSWER_BYTES_MAX,
    }
}

impl ConnectionLike for NodeConnection {
    fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
        let grant = self.credit.grant(reply_bytes_max(command));
        Box::pin(async move {
            let result = self.connection.req_packed_command(command).await;
            drop(grant);
            result
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        let grant = self
            .credit
            .grant(pipeline.cmd_iter().map(reply_bytes_max).sum());
        Box::pin(async move {
            let result = self
                .connection
                .req_packed_commands(pipeline, offset, count)
                .await;
            drop(grant);
            result
        })
    }

    fn get_db(&self) -> i64 {
        self.connection.get_db()
    }
}

impl Connect for NodeConnection {
    fn connect_with_config<'a, T>(info: T, _: AsyncConnectionConfig) -> RedisFuture<'a, Self>
    where
        T: IntoConnectionInfo + Send + 'a,
    {
        Box::pin(async move {
            let info = info.into_connection_info()?;
            let dialer = DIALER.with(|dialer| dialer.borrow().clone());
            match dialer {
                Some(dialer) => dialer.connect(info.addr()).await,
                None => Err(RedisError::from((
                    ErrorKind::Client,
                    "this thread is of no remote tier",
                ))),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_is_what_requests_under_way_may_receive() {
        let credit = Arc::new(Credit::default());
        assert!(credit.take(0).is_ok());
        let first = credit.grant(100);
        let second = credit.grant(100);
        assert!(credit.take(10).is_ok());
        drop(first);
        // 90 bytes were left over and are gone.
        assert_eq!(credit.bytes.load(Ordering::Relaxed), 100);
        assert!(credit.take(100).is_ok());
        assert!(credit.take(1).is_err());
        drop(second);
        assert!(credit.take(1).is_err());
    }

    #[test]
    fn credit_of_short_replies_does_not_add_up() {
        let credit = Arc::new(Credit::default());
        for _ in 0..1000 {
            let grant = credit.grant(STATUS_BYTES_MAX);
            assert!(credit.take(5).is_ok());
            drop(grant);
        }
        assert_eq!(credit.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn longest_reply_is_that_of_the_command() {
        let get = reply_bytes_max(redis::cmd("GET").arg("x"));
        let set = reply_bytes_max(redis::cmd("SET").arg("x").arg("y"));
        let info = reply_bytes_max(redis::cmd("INFO").arg("memory"));
        assert!(set < get && get < info);
        assert!(get > SEALED_BYTES_MAX as i64);
    }
}
