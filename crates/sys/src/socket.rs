// SPDX-License-Identifier: Apache-2.0
//! A Unix socket that one peer at a time connects to: bound, looked at, hung up on.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    io,
    net::Shutdown,
    os::{
        fd::AsFd,
        unix::{
            fs::FileTypeExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

/// Why nobody can listen at a path.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Somebody else listens there.
    #[error("socket {0} is in use by another process; choose another path or stop that process")]
    InUse(PathBuf),
    /// The path is taken by something that is no socket.
    #[error("{0} exists and is not a socket; remove it or choose another path")]
    NotASocket(PathBuf),
    /// The kernel refused.
    #[error("socket {path}: {source}")]
    Kernel {
        /// The path.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// Listens, without blocking, and clears away a socket that nobody listens on any more.
///
/// # Errors
/// [`SocketError`].
pub fn bind(path: &Path) -> Result<UnixListener, SocketError> {
    let failed = |source| SocketError::Kernel {
        path: path.to_owned(),
        source,
    };
    match std::fs::symlink_metadata(path) {
        Ok(there) if !there.file_type().is_socket() => {
            return Err(SocketError::NotASocket(path.to_owned()));
        }
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => return Err(SocketError::InUse(path.to_owned())),
            // Left by a daemon that was killed.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(failed)?;
            }
            Err(error) => return Err(failed(error)),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// True if the peer has closed the connection, whatever of it is still to be read.
#[must_use]
pub fn has_hung_up(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(
        stream.as_fd(),
        PollFlags::RDHUP | PollFlags::HUP,
    )];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut polled, Some(&now)).is_ok_and(|_| !polled[0].revents().is_empty())
}

/// Hangs up, whoever else has a copy of the descriptor.
///
/// # Errors
/// What the kernel says; that the peer was quicker is none.
pub fn hang_up(stream: &UnixStream) -> io::Result<()> {
    match stream.shutdown(Shutdown::Both) {
        Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_left_by_the_dead_is_bound_again_and_one_in_use_or_another_file_is_not() {
        let directory =
            std::env::temp_dir().join(format!("pagetide-socket-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("s");
        let first = bind(&path).unwrap();
        assert!(matches!(bind(&path), Err(SocketError::InUse(_))));
        drop(first);
        let again = bind(&path).unwrap();
        drop(again);
        let file = directory.join("file");
        std::fs::write(&file, "not a socket").unwrap();
        assert!(matches!(bind(&file), Err(SocketError::NotASocket(_))));
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn peer_that_hangs_up_is_noticed_and_one_that_is_silent_is_not_taken_for_gone() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(!has_hung_up(&ours));
        let copy = theirs.try_clone().unwrap();
        hang_up(&theirs).unwrap();
        assert!(has_hung_up(&ours));
        drop((theirs, copy));
        hang_up(&ours).unwrap();
    }
}
