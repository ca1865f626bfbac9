// SPDX-License-Identifier: Apache-2.0
//! The Unix socket of the API.
//!
//! Who can open it can take over any VM that the daemon can, so it is made with
//! mode 0600. A socket that a dead daemon left is replaced, but only if nobody
//! answers on it; anything else in its place is left alone.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;

/// Why the API cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A daemon answers there.
    #[error("a daemon already answers on {0}: use it, stop it, or give --api another path")]
    Taken(PathBuf),
    /// Something that is no socket is there.
    #[error("{0} is there and is no socket: move it away, or give --api another path")]
    NoSocket(PathBuf),
    /// The kernel says no.
    #[error("cannot listen on {path}: {source}; check that the folder exists and is writable")]
    Failed {
        /// The socket.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// The listening socket; gone from the file system when dropped, if it is this process' own.
#[derive(Debug)]
pub struct ApiSocket {
    path: PathBuf,
    listener: UnixListener,
    owner: Owner,
}

/// Whose the socket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// This process'.
    This,
    /// It is still that of the process that has handed it over.
    Another,
}

impl ApiSocket {
    /// Listens on `path`, replacing what a dead daemon left there.
    ///
    /// To be called while the process has one thread: it changes the umask for a moment.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let failed = |source| SocketError::Failed {
            path: path.to_owned(),
            source,
        };
        match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
            Ok(there) if !there.file_type().is_socket() => {
                return Err(SocketError::NoSocket(path.to_owned()));
            }
            Ok(_) => match UnixStream::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    std::fs::remove_file(path).map_err(failed)?;
                }
                Err(error) => return Err(failed(error)),
                Ok(_) => return Err(SocketError::Taken(path.to_owned())),
            },
        }
        let before = rustix::process::umask(Mode::RWXG | Mode::RWXO | Mode::XUSR);
        let listener = UnixListener::bind(path);
        rustix::process::umask(before);
        let listener = listener.map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            listener,
            owner: Owner::This,
        })
    }

    /// The socket at `path` that a predecessor listens on, and goes on with unless [`Self::own`] is called.
    #[must_use]
    pub fn adopt(path: &Path, listening: OwnedFd) -> Self {
        Self {
            path: path.to_owned(),
            listener: listening.into(),
            owner: Owner::Another,
        }
    }

    /// It is this process' from now on.
    pub fn own(&mut self) {
        self.owner = Owner::This;
    }

    /// A copy for a successor.
    ///
    /// # Errors
    /// The kernel's.
    pub fn share(&self) -> io::Result<OwnedFd> {
        Ok(self.listener.try_clone()?.into())
    }

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// For the runtime; to be called within it.
    pub fn listener(&self) -> io::Result<tokio::net::UnixListener> {
        tokio::net::UnixListener::from_std(self.listener.try_clone()?)
    }
}

impl Drop for ApiSocket {
    fn drop(&mut self) {
        if self.owner == Owner::Another {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the API socket stays behind");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn socket_is_for_its_owner_only_and_goes_with_the_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let socket = ApiSocket::bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn socket_nobody_answers_on_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        ApiSocket::bind(&path).unwrap();
    }

    #[test]
    fn socket_somebody_answers_on_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let _first = ApiSocket::bind(&path).unwrap();
        assert!(matches!(ApiSocket::bind(&path), Err(SocketError::Taken(_))));
    }

    #[test]
    fn socket_that_was_handed_over_stays_until_it_is_owned() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let first = ApiSocket::bind(&path).unwrap();
        drop(ApiSocket::adopt(&path, first.share().unwrap()));
        assert!(UnixStream::connect(&path).is_ok());
        let mut second = ApiSocket::adopt(&path, first.share().unwrap());
        second.own();
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn file_in_the_way_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        std::fs::write(&path, "mine").unwrap();
        assert!(matches!(
            ApiSocket::bind(&path),
            Err(SocketError::NoSocket(_))
        ));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
    }
}
