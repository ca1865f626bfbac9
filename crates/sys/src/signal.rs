// SPDX-License-Identifier: Apache-2.0
//! [`EventSignal`]: an eventfd of a peer, signalled without ever blocking.
//!
//! # Why not `write`
//! The peer of a vhost-user connection shares the open file of every eventfd that it passes to us.
//! At any time it can leave the counter at its maximum and clear `O_NONBLOCK`. A `write` then
//! sleeps until a read, which the peer need not do. `pwritev2(RWF_NOWAIT)` is not supported on
//! eventfds. A thread that serves several tenants must not be blocked like that.
//!
//! # Solution
//! The kernel's own signal (`eventfd_signal`) adds to the counter, stops at its maximum, and never
//! sleeps. An io_uring signals its *registered* eventfd in this way whenever it posts a completion.
//! So each [`EventSignal`] has a ring of one entry with the peer's eventfd registered, and a signal
//! is one no-op submitted to it. Registering fails for a file that is not an eventfd, so it also
//! checks the peer's descriptor.
#![expect(
    unsafe_code,
    reason = "pushing an entry to a submission queue is unsafe"
)]

use io_uring::{IoUring, opcode};
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

/// Entries of the ring: signals are sent one at a time.
const ENTRIES: u32 = 1;

/// Why an eventfd cannot be signalled.
#[derive(Debug, thiserror::Error)]
pub enum SignalError {
    /// The descriptor is not an eventfd.
    #[error("the descriptor is not an eventfd")]
    NotAnEventfd,
    /// No ring could be created.
    #[error("no io_uring to signal an eventfd with: {0}")]
    Kernel(io::Error),
}

/// The right to signal an eventfd of a peer.
pub struct EventSignal {
    /// Boxed, because it is some hundred bytes and moves between threads.
    ring: Box<IoUring>,
}

impl std::fmt::Debug for EventSignal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventSignal").finish_non_exhaustive()
    }
}

impl EventSignal {
    /// Prepares to signal `event`, which may be closed afterwards.
    ///
    /// # Errors
    /// [`SignalError`].
    pub fn new(event: BorrowedFd<'_>) -> Result<Self, SignalError> {
        let ring = IoUring::builder()
            .dontfork()
            .build(ENTRIES)
            .map_err(SignalError::Kernel)?;
        match ring.submitter().register_eventfd(event.as_raw_fd()) {
            Ok(()) => Ok(Self {
                ring: Box::new(ring),
            }),
            // EBADF: a descriptor opened with O_PATH.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EBADF)) => {
                Err(SignalError::NotAnEventfd)
            }
            Err(error) => Err(SignalError::Kernel(error)),
        }
    }

    /// Adds one to the counter, or leaves it at its maximum. Wakes the waiters of the eventfd in
    /// either case.
    ///
    /// # Errors
    /// The ring's error; the signal was then not sent.
    pub fn signal(&mut self) -> io::Result<()> {
        // Completions left behind by an interrupted call.
        self.forget_completions();
        let entry = opcode::Nop::new().build();
        if self.ring.submission().is_empty() {
            // SAFETY: a no-op names no memory and no descriptor.
            unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        }
        loop {
            // A no-op completes during its submission, so there is nothing to wait for.
            match self.ring.submit() {
                Ok(_) => break,
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
        self.forget_completions();
        Ok(())
    }

    fn forget_completions(&mut self) {
        self.ring.completion().for_each(drop);
    }
}

/// True if `event` is an eventfd.
///
/// # Errors
/// [`SignalError::Kernel`] if this cannot be determined.
pub fn is_eventfd(event: BorrowedFd<'_>) -> Result<bool, SignalError> {
    match EventSignal::new(event) {
        Ok(_) => Ok(true),
        Err(SignalError::NotAnEventfd) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::{
        event::{EventfdFlags, eventfd},
        pipe::pipe,
    };
    use std::os::fd::AsFd;

    /// A blocking `write` to an eventfd with this count sleeps.
    const FULL: u64 = u64::MAX - 1;

    fn count(event: BorrowedFd<'_>) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(event, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn each_signal_adds_one() {
        if crate::emulated::skip() {
            return;
        }
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let mut signal = EventSignal::new(event.as_fd()).unwrap();
        for _ in 0..1000 {
            signal.signal().unwrap();
        }
        assert_eq!(count(event.as_fd()), 1000);
    }

    #[test]
    fn full_blocking_eventfd_holds_nobody_up() {
        if crate::emulated::skip() {
            return;
        }
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let mut signal = EventSignal::new(event.as_fd()).unwrap();
        rustix::io::write(&event, &FULL.to_ne_bytes()).unwrap();
        for _ in 0..3 {
            signal.signal().unwrap();
        }
        assert_eq!(count(event.as_fd()), u64::MAX);
        signal.signal().unwrap();
        assert_eq!(count(event.as_fd()), 1);
    }

    #[test]
    fn eventfd_outlives_the_descriptor_it_was_made_from() {
        if crate::emulated::skip() {
            return;
        }
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let theirs = event.try_clone().unwrap();
        let mut signal = EventSignal::new(theirs.as_fd()).unwrap();
        drop(theirs);
        signal.signal().unwrap();
        assert_eq!(count(event.as_fd()), 1);
    }

    #[test]
    fn other_descriptors_are_told_apart() {
        if crate::emulated::skip() {
            return;
        }
        let (reader, writer) = pipe().unwrap();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let event = eventfd(0, EventfdFlags::SEMAPHORE).unwrap();
        assert!(!is_eventfd(reader.as_fd()).unwrap());
        assert!(!is_eventfd(writer.as_fd()).unwrap());
        assert!(!is_eventfd(file.as_fd()).unwrap());
        assert!(is_eventfd(event.as_fd()).unwrap());
    }
}
