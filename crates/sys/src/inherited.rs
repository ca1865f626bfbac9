// SPDX-License-Identifier: Apache-2.0
//! Descriptors that outlive `exec`: a program that replaces itself keeps them open by number.
//!
//! Everything in this process is opened with the close-on-exec flag. So after an `exec` the descriptors
//! without it are those that [`pass_on`] left for the new program, and each is owned by nobody until
//! [`take`] has taken it, which sets the flag again.

#![expect(
    unsafe_code,
    reason = "descriptors that are known by their numbers alone"
)]

use std::{
    fs::File,
    io,
    os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
    sync::{Mutex, PoisonError},
};

/// Numbers of stdin, stdout and stderr, which the runtime owns.
const STANDARD: RawFd = 2;

/// Two threads must not take one descriptor.
static TAKING: Mutex<()> = Mutex::new(());

/// Leaves `fd` open for the program that replaces this one; returns its number.
///
/// # Errors
/// The kernel's.
pub fn pass_on(fd: OwnedFd) -> io::Result<RawFd> {
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty())?;
    Ok(fd.into_raw_fd())
}

/// Takes a descriptor that the program before this one has passed on.
///
/// # Errors
/// It is not open, or was not passed on.
pub fn take(number: RawFd) -> io::Result<OwnedFd> {
    let not_ours = || io::Error::new(io::ErrorKind::InvalidInput, "it was not passed on");
    if number <= STANDARD {
        return Err(not_ours());
    }
    let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: reading the flags of a number is defined for every number.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    if flags & libc::FD_CLOEXEC != 0 {
        return Err(not_ours());
    }
    // SAFETY: the number is open, and nobody in this process owns it: everything here is opened with the flag
    // close-on-exec, but for the standard descriptors, which are excluded above, and what `pass_on` has consumed.
    // Setting the flag below makes a second `take` fail; the lock makes the two steps one.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
    Ok(fd)
}

/// Takes what this process has as stdin, and leaves `/dev/null` in its place.
///
/// # Errors
/// The kernel's.
pub fn take_stdin() -> io::Result<OwnedFd> {
    use std::os::fd::AsFd;
    let taken = io::stdin().as_fd().try_clone_to_owned()?;
    let nothing = File::open("/dev/null")?;
    // SAFETY: both numbers are open. Stdin belongs to the runtime, which only reads from it, and a read of the file
    // that is there now is as defined as before.
    match unsafe { libc::dup2(nothing.as_raw_fd(), io::stdin().as_raw_fd()) } {
        ..0 => Err(io::Error::last_os_error()),
        _ => Ok(taken),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn descriptor_is_taken_once_and_only_if_it_was_passed_on() {
        let file = File::open("/dev/zero").unwrap();
        let number = file.as_raw_fd();
        assert!(take(number).is_err(), "it is somebody's");
        let copy = file.as_fd().try_clone_to_owned().unwrap();
        let number = pass_on(copy).unwrap();
        let taken = take(number).unwrap();
        assert_eq!(taken.as_raw_fd(), number);
        let flags = rustix::io::fcntl_getfd(&taken).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        assert!(take(number).is_err(), "it was taken");
    }

    #[test]
    fn number_that_is_not_open_or_a_standard_one_is_refused() {
        for number in [-1, 0, 1, 2, 1 << 20] {
            assert!(take(number).is_err(), "{number}");
        }
    }
}
