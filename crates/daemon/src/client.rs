// SPDX-License-Identifier: Apache-2.0
//! Client of the HTTP API over its Unix socket.
//!
//! One connection per request: a command makes one or two. Requests that change something have no time
//! limit, since a detach takes as long as it takes to fill every page. A healthy daemon answers queries
//! at once: see [`ASK_WAIT`].

use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use pagetide_report::outcome::CommandError;

use crate::control::ControlError;

/// How long a daemon may take to answer a query. It takes milliseconds, and perhaps seconds on a very
/// busy host.
pub const ASK_WAIT: Duration = Duration::from_secs(60);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon listens.
    #[error(
        "no daemon answers on {path}: {source}; start one with `pagetide run`, or name its socket with --api"
    )]
    NoDaemon {
        /// The socket.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The connection broke, as when the daemon died.
    #[error("the daemon on {path} did not answer: {source}; see its log")]
    Broken {
        /// The socket.
        path: PathBuf,
        /// The reason.
        source: hyper::Error,
    },
    /// The daemon accepts the connection but does not answer.
    #[error(
        "the daemon on {path} has not answered within {waited_s} s, though its socket is there: it has just been started \
         and is recovering what its predecessor left (its log says \"ready\" when that is done), or it hangs, or is \
         stopped (SIGSTOP); see its log. VMs run on as long as they touch no evicted page. If it is ready and does not \
         answer, kill it (SIGKILL): a new `pagetide run` recovers its VMs"
    )]
    Silent {
        /// The socket.
        path: PathBuf,
        /// How long the client waited.
        waited_s: u64,
    },
    /// The answer cannot be parsed.
    #[error(
        "the answer of {path} (status {status}) makes no sense: {reason}; is it a pagetide of this version?"
    )]
    Strange {
        /// The socket.
        path: PathBuf,
        /// Its status.
        status: u16,
        /// What is wrong with it.
        reason: String,
    },
    /// The daemon refused the request.
    #[error(transparent)]
    Refused(#[from] ControlError),
}

impl From<ClientError> for CommandError {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Refused(error) => error.into(),
            other => CommandError::failed(other),
        }
    }
}

/// A daemon, by its socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Client {
    socket: PathBuf,
    ask_wait: Duration,
}

impl Client {
    /// A client of the daemon that listens on `socket`.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
            ask_wait: ASK_WAIT,
        }
    }

    /// Uses another timeout than [`ASK_WAIT`].
    #[must_use]
    pub fn with_ask_wait(self, ask_wait: Duration) -> Self {
        Self { ask_wait, ..self }
    }

    /// Sends a request without a body and reads a JSON answer.
    pub async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
    ) -> Result<T, ClientError> {
        let only_asks = method == Method::GET;
        let exchange = self.exchange(method, path, Bytes::new());
        let (status, body) = if only_asks {
            let answer = tokio::time::timeout(self.ask_wait, exchange).await;
            answer.map_err(|_| ClientError::Silent {
                path: self.socket.clone(),
                waited_s: self.ask_wait.as_secs(),
            })??
        } else {
            exchange.await?
        };
        self.read(status, &body)
    }

    /// Asks for a page of text, such as the metrics.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn text(&self, path: &str) -> Result<String, ClientError> {
        let exchange = self.exchange(Method::GET, path, Bytes::new());
        let answer = tokio::time::timeout(self.ask_wait, exchange).await;
        let (status, body) = answer.map_err(|_| ClientError::Silent {
            path: self.socket.clone(),
            waited_s: self.ask_wait.as_secs(),
        })??;
        if !status.is_success() {
            return self.read(status, &body);
        }
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Sends a JSON body and reads a JSON answer.
    pub async fn send<B: Serialize, T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: &B,
    ) -> Result<T, ClientError> {
        let body = serde_json::to_vec(body)
            .map_err(|error| ControlError::wrong_use(format!("cannot be sent as JSON: {error}")))?;
        let (status, body) = self.exchange(method, path, body.into()).await?;
        self.read(status, &body)
    }

    fn read<T: DeserializeOwned>(&self, status: StatusCode, body: &[u8]) -> Result<T, ClientError> {
        let strange = |error: serde_json::Error| ClientError::Strange {
            path: self.socket.clone(),
            status: status.as_u16(),
            reason: error.to_string(),
        };
        if status.is_success() {
            serde_json::from_slice(body).map_err(strange)
        } else {
            let error: ControlError = serde_json::from_slice(body).map_err(strange)?;
            Err(error.into())
        }
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let broken = |source| ClientError::Broken {
            path: self.socket.clone(),
            source,
        };
        let stream =
            UnixStream::connect(&self.socket)
                .await
                .map_err(|source| ClientError::NoDaemon {
                    path: self.socket.clone(),
                    source,
                })?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        // An error that ends the connection early also fails the request, which reports it.
        let connection = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(hyper::header::HOST, "pagetide")
            .header(hyper::header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| ControlError::wrong_use(format!("'{path}' is no path: {error}")))?;
        let response = sender.send_request(request).await.map_err(broken)?;
        let status = response.status();
        let body = response.into_body().collect().await.map_err(broken)?;
        connection.abort();
        Ok((status, body.to_bytes()))
    }
}

/// Path of the VM `name` in the API.
#[must_use]
pub fn vm_path(name: &str) -> String {
    format!("/v1/vms/{}", utf8_percent_encode(name, NON_ALPHANUMERIC))
}

/// Path of the service-level account of a device, or of all devices, in the API.
#[must_use]
pub fn slo_path(device: Option<&str>) -> String {
    match device {
        Some(device) => format!(
            "/v1/slo?device={}",
            utf8_percent_encode(device, NON_ALPHANUMERIC)
        ),
        None => "/v1/slo".to_owned(),
    }
}

/// Path of the injection into `device` in the API.
#[must_use]
pub fn injection_path(device: &str) -> String {
    format!(
        "/v1/injection?device={}",
        utf8_percent_encode(device, NON_ALPHANUMERIC)
    )
}

/// Path of the device on `socket` in the API.
#[must_use]
pub fn device_path(socket: &str) -> String {
    format!(
        "/v1/devices?socket={}",
        utf8_percent_encode(socket, NON_ALPHANUMERIC)
    )
}
