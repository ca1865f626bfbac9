// SPDX-License-Identifier: Apache-2.0
//! [`KeptSignals`]: signals that wait until they are read, also over `exec`.
//!
//! A signal that is blocked in all threads of a process stays pending in the process. A descriptor
//! (`signalfd`) tells of it, and reading the descriptor takes it. The mask and what is pending outlive
//! `exec`, so a program that replaces itself loses none: the one that comes after reads them. Handlers do
//! not outlive it, and a signal that was given to one is gone.
//!
//! Threads and processes inherit the mask of the thread that creates them. So the signals must be blocked
//! before the threads are created that are to leave them alone.

#![expect(
    unsafe_code,
    reason = "masks of signals are wrapped here; the kernel interface has no safe wrapper"
)]

use rustix::{
    io::{Errno, retry_on_intr},
    process::Signal,
};
use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

/// Bytes of a `signalfd_siginfo`.
const INFO_BYTES: usize = size_of::<libc::signalfd_siginfo>();

/// See the module.
#[derive(Debug)]
pub struct KeptSignals {
    fd: OwnedFd,
}

fn set_of(signals: &[Signal]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` initialises the set that it is given.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: it is initialised, see above.
    let mut set = unsafe { set.assume_init() };
    for signal in signals {
        // SAFETY: the set is initialised; a number that is no signal's is refused, and not put in.
        unsafe { libc::sigaddset(&raw mut set, signal.as_raw()) };
    }
    set
}

/// Blocks `signals` in this thread, and in the threads and processes that it creates from now on.
///
/// # Errors
/// The kernel's.
pub fn block(signals: &[Signal]) -> io::Result<()> {
    let set = set_of(signals);
    // SAFETY: the set is initialised, and the earlier mask is not asked for.
    match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

impl KeptSignals {
    /// Blocks `signals` as [`block`] does, and reads them.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of(signals: &[Signal]) -> io::Result<Self> {
        block(signals)?;
        let set = set_of(signals);
        // SAFETY: the set is initialised, and only read during the call.
        let fd =
            unsafe { libc::signalfd(-1, &raw const set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened it for this call, so nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd })
    }

    /// Takes the next signal, if one is pending.
    ///
    /// # Errors
    /// The kernel's.
    pub fn next(&self) -> io::Result<Option<Signal>> {
        let mut info = [0; INFO_BYTES];
        match retry_on_intr(|| rustix::io::read(&self.fd, &mut info[..])) {
            Ok(INFO_BYTES) => {}
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(Errno::AGAIN) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let [first, second, third, fourth, ..] = info;
        let number = i32::from_ne_bytes([first, second, third, fourth]);
        Ok(Signal::from_named_raw(number))
    }
}

impl AsRawFd for KeptSignals {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pending in this thread alone: other tests of this process notice nothing.
    fn raise(signal: Signal) {
        // SAFETY: the signal is blocked in this thread, so no handler runs.
        assert_eq!(unsafe { libc::raise(signal.as_raw()) }, 0);
    }

    #[test]
    fn signal_waits_until_it_is_read_and_is_read_once() {
        let kept = KeptSignals::of(&[Signal::USR1, Signal::USR2]).unwrap();
        assert_eq!(kept.next().unwrap(), None);
        raise(Signal::USR2);
        raise(Signal::USR2);
        raise(Signal::USR1);
        let mut read = [kept.next().unwrap(), kept.next().unwrap()];
        read.sort_by_key(|signal| signal.map(Signal::as_raw));
        assert_eq!(read, [Some(Signal::USR1), Some(Signal::USR2)]);
        assert_eq!(kept.next().unwrap(), None);
    }

    #[test]
    fn child_inherits_the_mask() {
        block(&[Signal::USR1]).unwrap();
        let status = std::process::Command::new("grep")
            .args(["^SigBlk:", "/proc/self/status"])
            .output()
            .unwrap();
        let line = String::from_utf8(status.stdout).unwrap();
        let mask = line.split_whitespace().nth(1).unwrap();
        let mask = u64::from_str_radix(mask, 16).unwrap();
        assert_ne!(mask & 1 << (Signal::USR1.as_raw() - 1), 0, "{line}");
    }
}
