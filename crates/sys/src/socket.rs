// SPDX-License-Identifier: Apache-2.0
//! A Unix socket for one peer at a time: binding, examining, hanging up.
//!
//! Access is settled before a connection is possible: the socket is bound, gets its owner and its
//! mode, and only then listens. Before that last step every connection is refused, whatever the
//! mode is.

#![expect(
    unsafe_code,
    reason = "a stream is replaced under a number that another owner has"
)]

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use std::{
    io,
    net::Shutdown,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::{
            fs::FileTypeExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

/// Why it is not possible to listen at a path.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another process listens there.
    #[error("socket {0} is in use by another process; choose another path or stop that process")]
    InUse(PathBuf),
    /// The path is taken by something other than a socket.
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

/// Connections that may wait to be accepted; further ones must retry.
const BACKLOG: i32 = 128;
/// Mode of a socket that was given an owner or a group but no mode: those two may connect.
const MODE_OF_OWNED: u32 = 0o660;

/// Who may connect to a socket: its owner, group and mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SocketAccess {
    /// User number; `None` means that of the process that binds it.
    pub owner: Option<u32>,
    /// Group number; `None` means that of the process that binds it.
    pub group: Option<u32>,
    /// Permission bits; `None` means 0660 if an owner or a group is given, else according to the
    /// umask.
    pub mode: Option<u32>,
}

impl SocketAccess {
    fn mode(self) -> Option<Mode> {
        let owned = self.owner.is_some() || self.group.is_some();
        let bits = self.mode.or(owned.then_some(MODE_OF_OWNED));
        bits.map(|bits| Mode::from_raw_mode(bits & 0o777))
    }
}

/// Listens, without blocking, and removes a stale socket on which nothing listens any more.
///
/// # Errors
/// [`SocketError`].
pub fn bind(path: &Path) -> Result<UnixListener, SocketError> {
    bind_for(path, SocketAccess::default())
}

/// The same; at no time can anyone connect but those allowed by `access`.
///
/// # Errors
/// [`SocketError`].
pub fn bind_for(path: &Path, access: SocketAccess) -> Result<UnixListener, SocketError> {
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
            // Left by a killed daemon.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(failed)?;
            }
            Err(error) => return Err(failed(error)),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| failed(error.into()))?;
    if access.mode().is_some() {
        // The file gets the permission bits of the socket (Linux), so it can be recognized below.
        rustix::fs::fchmod(&socket, Mode::empty()).map_err(|error| failed(error.into()))?;
    }
    let address = SocketAddrUnix::new(path).map_err(|error| failed(error.into()))?;
    rustix::net::bind(&socket, &address).map_err(|error| failed(error.into()))?;
    let listening = give_to(path, access)
        .and_then(|()| rustix::net::listen(&socket, BACKLOG).map_err(io::Error::from));
    if let Err(source) = listening {
        std::fs::remove_file(path).map_err(failed)?;
        return Err(failed(source));
    }
    Ok(UnixListener::from(socket))
}

/// Gives the socket file at `path`, on which nothing listens yet, its owner and its mode.
///
/// A process that may write to the folder can put another file in its place meanwhile. So the file
/// is opened first, and must be a socket without any permissions: we have just set none.
fn give_to(path: &Path, access: SocketAccess) -> io::Result<()> {
    let Some(mode) = access.mode() else {
        return Ok(());
    };
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file: OwnedFd = rustix::fs::open(path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    let bits = Mode::from_raw_mode(stat.st_mode);
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket || !bits.is_empty() {
        return Err(io::Error::other(
            "another file was put in its place while it was made: use a folder that others cannot write to",
        ));
    }
    let (owner, group) = (
        access.owner.map(Uid::from_raw),
        access.group.map(Gid::from_raw),
    );
    if owner.is_some() || group.is_some() {
        rustix::fs::chownat(&file, c"", owner, group, AtFlags::EMPTY_PATH).map_err(|error| {
            let error = io::Error::from(error);
            io::Error::new(error.kind(), format!("its owner cannot be set: {error}"))
        })?;
    }
    // chmod(2) takes no descriptor of a file that is not open for I/O, but accepts its name in
    // /proc.
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::chmod(name, mode)?)
}

/// True if the peer has closed the connection, even if data is still to be read.
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

/// Hangs up, even if other copies of the descriptor exist.
///
/// # Errors
/// The kernel's error; it is no error if the peer was faster.
pub fn hang_up(stream: &UnixStream) -> io::Result<()> {
    match stream.shutdown(Shutdown::Both) {
        Err(error) if error.kind() != io::ErrorKind::NotConnected => Err(error),
        _ => Ok(()),
    }
}

/// The number of a stream that somebody else owns by now, and under which another stream can be put: the owner
/// goes on with that one.
#[derive(Debug)]
pub struct Place {
    number: RawFd,
    copy: UnixStream,
}

impl Place {
    /// That of `stream`, which is to be given to its owner next.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of(stream: &UnixStream) -> io::Result<Self> {
        Ok(Self {
            number: stream.as_raw_fd(),
            copy: stream.try_clone()?,
        })
    }

    /// Puts a copy of `other` in the place of the stream.
    ///
    /// # Errors
    /// The stream is closed, or the kernel's.
    pub fn put(self, other: &UnixStream) -> io::Result<()> {
        // SAFETY: the number is only asked which file it names.
        let there = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(self.number) })?;
        let ours = rustix::fs::fstat(&self.copy)?;
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino) {
            return Err(io::Error::other("the stream to be replaced was closed"));
        }
        // SAFETY: the number still names the stream, so it belongs to that stream's owner, for whom another stream
        // is as good; no pointer is involved.
        match unsafe { libc::dup3(other.as_raw_fd(), self.number, libc::O_CLOEXEC) } {
            ..0 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
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
    fn owner_of_a_stream_goes_on_with_the_one_that_is_put_in_its_place() {
        use std::io::{Read, Write};
        let (mut first, owned) = UnixStream::pair().unwrap();
        let (mut second, other) = UnixStream::pair().unwrap();
        let place = Place::of(&owned).unwrap();
        let mut owner = owned;
        first.write_all(b"a").unwrap();
        let mut byte = [0];
        owner.read_exact(&mut byte).unwrap();
        place.put(&other).unwrap();
        drop(other);
        second.write_all(b"b").unwrap();
        owner.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"b");
        assert_eq!(
            first.read(&mut byte).unwrap(),
            0,
            "nobody has its other end"
        );
        let place = Place::of(&owner).unwrap();
        drop(owner);
        assert!(place.put(&first).is_err());
    }

    #[test]
    fn socket_is_made_for_whom_it_is_meant_whatever_the_umask() {
        use std::os::unix::fs::MetadataExt;
        let directory =
            std::env::temp_dir().join(format!("pagetide-socket-mode-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let path = directory.join("s");
        let ours = std::fs::metadata(&directory).unwrap();
        for (mode, group, wanted) in [
            (Some(0o666), None, 0o666),
            (Some(0o600), None, 0o600),
            (None, Some(ours.gid()), 0o660),
        ] {
            let access = SocketAccess {
                owner: None,
                group,
                mode,
            };
            let listener = bind_for(&path, access).unwrap();
            let made = std::fs::symlink_metadata(&path).unwrap();
            assert_eq!(made.mode() & 0o7777, wanted);
            UnixStream::connect(&path).unwrap();
            listener.accept().unwrap();
        }
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn file_put_in_the_place_of_a_socket_is_not_given_away() {
        let path =
            std::env::temp_dir().join(format!("pagetide-socket-given-{}", std::process::id()));
        let access = SocketAccess {
            mode: Some(0o600),
            ..SocketAccess::default()
        };
        std::fs::write(&path, "").unwrap();
        let given = give_to(&path, access);
        assert!(given.unwrap_err().to_string().contains("another file"));
        std::fs::remove_file(&path).unwrap();
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
