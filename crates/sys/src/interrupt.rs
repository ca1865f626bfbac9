// SPDX-License-Identifier: Apache-2.0
//! Getting a thread of ours out of a blocking system call.
//!
//! A thread that reads a userfaultfd wakes fastest if it blocks in `read` itself, but then nothing
//! else can end that wait. A signal can: the call returns `EINTR`. Its handler does nothing.
//! `SIGURG` is used because its default action is to be ignored, so a stray one does no harm.
//!
//! A signal that arrives just before the call is lost, so the interrupting thread first stores its
//! request in memory, and repeats the signal until the request is done.
#![expect(
    unsafe_code,
    reason = "installing a signal handler has no safe form, nor has a signal to one thread"
)]

use std::io;

extern "C" fn nothing(_signal: libc::c_int) {}

/// Lets [`interrupt`] work on threads of this process.
///
/// # Errors
/// The error of `sigaction`.
pub fn allow() -> io::Result<()> {
    // SAFETY: all-zero bits are a valid sigaction (no flags, no mask, default handler).
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // Without SA_RESTART: calls must end, not continue.
    action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
    // SAFETY: the structure is complete, and the handler touches nothing, so it may run at any
    // point of any thread.
    let installed =
        unsafe { libc::sigaction(libc::SIGURG, &raw const action, std::ptr::null_mut()) };
    if installed == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Interrupts the system call in which `thread` of this process blocks, if it does. A thread that
/// has ended is no error.
///
/// # Errors
/// The error of `tgkill`.
pub fn interrupt(thread: u32) -> io::Result<()> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: the call takes only numbers. If the number belongs to another thread of ours by now,
    // that thread runs the empty handler.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, own, thread, libc::SIGURG) };
    if sent == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        gone if gone.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    };

    #[test]
    fn a_thread_that_waits_in_a_read_is_interrupted() {
        allow().unwrap();
        let (read, _write) = rustix::pipe::pipe().unwrap();
        let (thread, done) = (
            Arc::new(AtomicU32::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let (number, told) = (Arc::clone(&thread), Arc::clone(&done));
        let reader = std::thread::spawn(move || {
            let own = rustix::thread::gettid().as_raw_nonzero().get();
            number.store(own.unsigned_abs(), Ordering::Release);
            let answer = rustix::io::read(&read, &mut [0; 8]);
            told.store(true, Ordering::Release);
            answer
        });
        while !done.load(Ordering::Acquire) {
            match thread.load(Ordering::Acquire) {
                0 => {}
                number => interrupt(number).unwrap(),
            }
            std::thread::yield_now();
        }
        assert_eq!(reader.join().unwrap(), Err(rustix::io::Errno::INTR));
    }

    #[test]
    fn a_thread_that_is_not_there_is_no_error() {
        interrupt(0x3fff_ffff).unwrap();
    }
}
