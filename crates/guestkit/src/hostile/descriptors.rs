// SPDX-License-Identifier: Apache-2.0
//! Descriptors of every kind, where an eventfd or guest RAM is expected.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{MemfdFlags, Mode, OFlags, fcntl_getfl, fcntl_setfl, memfd_create, open};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

use super::Target;
use super::peer::{Failure, failed};

/// A kind of descriptor that is no eventfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The writing end of a pipe with room.
    Pipe,
    /// The writing end of a full pipe, which blocks.
    FullPipe,
    /// The reading end of a pipe.
    PipeReader,
    /// The writing end of a pipe whose reader is gone: a write raises SIGPIPE.
    BrokenPipe,
    /// A connected socket with room.
    Socket,
    /// A connected socket whose peer reads nothing, full.
    FullSocket,
    /// A connection to the attacked device itself.
    OwnSocket,
    /// An ordinary file.
    File,
    /// A directory.
    Directory,
    /// A name only, `O_PATH`.
    PathOnly,
    /// `/dev/zero`.
    Zero,
    /// `/dev/null`.
    Null,
    /// An epoll.
    Epoll,
    /// A timer.
    Timer,
    /// A process.
    Process,
    /// A memfd.
    Memfd,
    /// A file of `/proc` that a write changes.
    Proc,
}

/// All of them.
pub const KINDS: [Kind; 17] = [
    Kind::Pipe,
    Kind::FullPipe,
    Kind::PipeReader,
    Kind::BrokenPipe,
    Kind::Socket,
    Kind::FullSocket,
    Kind::OwnSocket,
    Kind::File,
    Kind::Directory,
    Kind::PathOnly,
    Kind::Zero,
    Kind::Null,
    Kind::Epoll,
    Kind::Timer,
    Kind::Process,
    Kind::Memfd,
    Kind::Proc,
];

/// A descriptor to send, and one that has to stay open beside it.
#[derive(Debug)]
pub struct Bait {
    /// The descriptor to send.
    pub fd: OwnedFd,
    /// Its other end.
    pub beside: Option<OwnedFd>,
}

impl From<OwnedFd> for Bait {
    fn from(fd: OwnedFd) -> Self {
        Self { fd, beside: None }
    }
}

impl Kind {
    /// Its name in attack names.
    #[must_use]
    pub fn name(self) -> String {
        let mut name = String::new();
        for letter in format!("{self:?}").chars() {
            if letter.is_uppercase() && !name.is_empty() {
                name.push('-');
            }
            name.extend(letter.to_lowercase());
        }
        name
    }

    /// Opens one.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn open(self, target: &Target) -> Result<Bait, Failure> {
        let step = "opening a descriptor to hand over";
        Ok(match self {
            Self::Pipe | Self::FullPipe | Self::PipeReader | Self::BrokenPipe => self.pipe()?,
            Self::Socket | Self::FullSocket => {
                let (ours, theirs) = UnixStream::pair().map_err(failed(step))?;
                if self == Self::FullSocket {
                    fill(ours.as_fd())?;
                }
                Bait {
                    fd: ours.into(),
                    beside: Some(theirs.into()),
                }
            }
            Self::OwnSocket => {
                let stream = UnixStream::connect(&target.socket).map_err(failed(step))?;
                OwnedFd::from(stream).into()
            }
            Self::File => {
                let file = named(&scratch(target))?;
                file.set_len(1 << 20).map_err(failed(step))?;
                OwnedFd::from(file).into()
            }
            Self::Directory => opened("/", OFlags::DIRECTORY | OFlags::RDONLY)?.into(),
            Self::PathOnly => opened("/", OFlags::PATH)?.into(),
            Self::Zero => opened("/dev/zero", OFlags::RDWR)?.into(),
            Self::Null => opened("/dev/null", OFlags::RDWR)?.into(),
            Self::Proc => opened("/proc/self/comm", OFlags::RDWR)?.into(),
            Self::Epoll => epoll::create(epoll::CreateFlags::CLOEXEC)
                .map_err(failed(step))?
                .into(),
            Self::Timer => timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)
                .map_err(failed(step))?
                .into(),
            Self::Process => {
                let process = rustix::process::getpid();
                of_process(process)?.into()
            }
            Self::Memfd => {
                let file = memfd_create("hostile", MemfdFlags::CLOEXEC).map_err(failed(step))?;
                Bait::from(file)
            }
        })
    }

    fn pipe(self) -> Result<Bait, Failure> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(failed("pipe"))?;
        Ok(match self {
            Self::PipeReader => Bait {
                fd: reader,
                beside: Some(writer),
            },
            Self::BrokenPipe => writer.into(),
            Self::FullPipe => {
                fill(writer.as_fd())?;
                Bait {
                    fd: writer,
                    beside: Some(reader),
                }
            }
            _ => Bait {
                fd: writer,
                beside: Some(reader),
            },
        })
    }
}

fn of_process(process: Pid) -> Result<OwnedFd, Failure> {
    pidfd_open(process, PidfdFlags::empty()).map_err(failed("pidfd_open"))
}

fn opened(path: &str, flags: OFlags) -> Result<OwnedFd, Failure> {
    open(path, flags | OFlags::CLOEXEC, Mode::empty()).map_err(failed(path))
}

/// A file name for the attack.
#[must_use]
pub fn scratch(target: &Target) -> PathBuf {
    target.folder.join("hostile-file")
}

/// A file created at `path` and unlinked.
///
/// # Errors
/// The kernel's error.
pub fn named(path: &std::path::Path) -> Result<File, Failure> {
    let step = path.display().to_string();
    let made = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .map_err(failed(&step))?;
    fs::remove_file(path).map_err(failed(&step))?;
    Ok(made)
}

/// Writes until no more fits, and leaves the descriptor blocking.
fn fill(fd: BorrowedFd<'_>) -> Result<(), Failure> {
    let step = "filling a descriptor";
    set_blocking(fd, Blocking::No)?;
    loop {
        match rustix::io::write(fd, &[0; 4096]) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(failed(step)(error)),
        }
    }
    // Single writes of 8 bytes still fit into the rest of a buffer.
    while rustix::io::write(fd, &[0; 8]).is_ok() {}
    set_blocking(fd, Blocking::Yes)
}

/// Whether calls on an open file wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocking {
    /// They do.
    Yes,
    /// They do not.
    No,
}

/// Makes the open file, which all its holders share, blocking or not.
///
/// # Errors
/// The kernel's error.
pub fn set_blocking(fd: BorrowedFd<'_>, blocking: Blocking) -> Result<(), Failure> {
    let step = "fcntl";
    let mut flags = fcntl_getfl(fd).map_err(failed(step))?;
    flags.set(OFlags::NONBLOCK, blocking == Blocking::No);
    fcntl_setfl(fd, flags).map_err(failed(step))
}

/// An eventfd at its maximum: the next writer waits, if it blocks.
///
/// # Errors
/// The kernel's error.
pub fn full_event(blocking: Blocking) -> Result<OwnedFd, Failure> {
    let mut flags = EventfdFlags::CLOEXEC;
    flags.set(EventfdFlags::NONBLOCK, blocking == Blocking::No);
    let event = eventfd(0, flags).map_err(failed("eventfd"))?;
    rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).map_err(failed("eventfd"))?;
    Ok(event)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_descriptors_take_no_more() {
        let target = Target {
            socket: PathBuf::new(),
            folder: std::env::temp_dir(),
        };
        for kind in [Kind::FullPipe, Kind::FullSocket] {
            let bait = kind.open(&target).expect("a descriptor");
            set_blocking(bait.fd.as_fd(), Blocking::No).expect("a flag");
            let wrote = rustix::io::write(&bait.fd, &1_u64.to_ne_bytes());
            assert_eq!(wrote, Err(rustix::io::Errno::AGAIN), "{kind:?}");
        }
        let event = full_event(Blocking::No).expect("an eventfd");
        let wrote = rustix::io::write(&event, &1_u64.to_ne_bytes());
        assert_eq!(wrote, Err(rustix::io::Errno::AGAIN));
        assert_eq!(Kind::FullPipe.name(), "full-pipe");
    }
}
