// SPDX-License-Identifier: Apache-2.0
//! Tests of [`run_inside`](super::run_inside) on children that are blocked in all sorts of calls.
//!
//! A child is made by `fork` and does nothing but bare system calls, so that it
//! needs nothing of the threads it has lost. Its exit status tells what the
//! interrupted call returned.

use super::threads::rank_of_blocked;
use super::*;
use crate::uffd::{Userfaultfd, is_userfaultfd};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicI32, Ordering};

const TIMED_OUT: i32 = 40;
const WRONG_TIME: i32 = 41;
const INTERRUPTED: i32 = 42;
const OTHER: i32 = 43;
/// Long enough that an injection lies within, short enough for a test.
const WAIT_NS: i64 = 300_000_000;

struct Child {
    pid: i32,
}

impl Child {
    fn new(body: impl FnOnce() -> i32) -> Self {
        // SAFETY: the child calls only bare system calls and `_exit`, as said above.
        match unsafe { libc::fork() } {
            0 => {
                let status = body();
                // SAFETY: ends this process without running anything of the parent's.
                unsafe { libc::_exit(status) }
            }
            pid => {
                assert!(pid > 0);
                Self { pid }
            }
        }
    }

    fn process(&self) -> ProcessFd {
        ProcessFd::open(self.pid.cast_unsigned()).unwrap()
    }

    /// Waits until the child is blocked in `number`.
    fn await_call(&self, number: i64) {
        loop {
            let line = std::fs::read_to_string(format!("/proc/{}/syscall", self.pid)).unwrap();
            if line.starts_with(&format!("{number} ")) {
                return;
            }
            std::thread::yield_now();
        }
    }

    fn exit_status(self) -> i32 {
        let mut status = 0;
        // SAFETY: waits for our own child and writes one int to a live local.
        let waited = unsafe { libc::waitpid(self.pid, &raw mut status, 0) };
        assert_eq!(waited, self.pid);
        assert!(libc::WIFEXITED(status), "status {status:#x}");
        libc::WEXITSTATUS(status)
    }

    fn kill(self) {
        // SAFETY: signals and reaps our own child, whose pid cannot have been used again.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

fn may_trace() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: not root");
    }
    root
}

fn now_ns() -> i64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec * 1_000_000_000 + t.tv_nsec
}

/// Runs a call that ends by time-out, and tells how it ended.
fn timed(call: impl FnOnce() -> i64, expected: i64) -> i32 {
    let started = now_ns();
    let answer = call();
    let error = io::Error::last_os_error().raw_os_error();
    if answer < 0 && error == Some(libc::EINTR) {
        return INTERRUPTED;
    }
    if answer != expected {
        return OTHER;
    }
    if now_ns() - started < WAIT_NS {
        return WRONG_TIME;
    }
    TIMED_OUT
}

static TIMEOUT: libc::timespec = libc::timespec {
    tv_sec: 0,
    tv_nsec: WAIT_NS,
};

/// Asks the child who its parent is, twice, by injected calls.
fn ask_twice(child: &Child) {
    let ran = run_inside(&child.process(), |thread| {
        let first = thread.syscall("getppid", libc::SYS_getppid, &[])?;
        let second = thread.syscall("getppid", libc::SYS_getppid, &[])?;
        Ok::<_, PtraceError>((first, second))
    })
    .unwrap();
    let own = u64::from(std::process::id());
    assert_eq!(ran.value, (own, own));
    assert_eq!(ran.thread, child.pid.cast_unsigned());
}

fn restarts(number: i64, body: impl FnOnce() -> i32) {
    if !may_trace() {
        return;
    }
    let child = Child::new(body);
    child.await_call(number);
    ask_twice(&child);
    assert_eq!(child.exit_status(), TIMED_OUT);
}

#[test]
fn a_thread_in_nanosleep_sleeps_its_whole_time() {
    restarts(libc::SYS_nanosleep, || {
        // SAFETY: reads one timespec, a live static.
        timed(
            || unsafe { libc::syscall(libc::SYS_nanosleep, &raw const TIMEOUT, 0) },
            0,
        )
    });
}

#[test]
fn a_thread_in_poll_times_out_when_it_should() {
    restarts(libc::SYS_poll, || {
        // SAFETY: no descriptors are given, so nothing is read or written.
        timed(
            || unsafe { libc::syscall(libc::SYS_poll, 0, 0, WAIT_NS / 1_000_000) },
            0,
        )
    });
}

#[test]
fn a_thread_in_ppoll_times_out_when_it_should() {
    restarts(libc::SYS_ppoll, || {
        let mut timeout = TIMEOUT;
        // SAFETY: no descriptors; the timespec is a live local the kernel may update.
        timed(
            || unsafe { libc::syscall(libc::SYS_ppoll, 0, 0, &raw mut timeout, 0, 0) },
            0,
        )
    });
}

#[test]
fn a_thread_in_futex_times_out_when_it_should() {
    restarts(libc::SYS_futex, || {
        let word = 0_u32;
        let answer = timed(
            // SAFETY: the word and the timespec are live; FUTEX_WAIT only reads them.
            || unsafe {
                let timeout = &raw const TIMEOUT;
                libc::syscall(
                    libc::SYS_futex,
                    &raw const word,
                    libc::FUTEX_WAIT,
                    0,
                    timeout,
                )
            },
            -1,
        );
        let error = io::Error::last_os_error().raw_os_error();
        if answer == TIMED_OUT && error != Some(libc::ETIMEDOUT) {
            return OTHER;
        }
        answer
    });
}

#[test]
fn a_thread_in_read_gets_the_byte_that_comes_later() {
    if !may_trace() {
        return;
    }
    let (read_end, write_end) = rustix::pipe::pipe().unwrap();
    let child = Child::new(|| {
        let mut byte = [0_u8];
        match rustix::io::read(&read_end, &mut byte) {
            Ok(1) => i32::from(byte[0]),
            _ => INTERRUPTED,
        }
    });
    child.await_call(libc::SYS_read);
    ask_twice(&child);
    rustix::io::write(&write_end, &[77]).unwrap();
    assert_eq!(child.exit_status(), 77);
}

static HANDLED: AtomicI32 = AtomicI32::new(0);

extern "C" fn handle(_signal: i32) {
    HANDLED.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn a_signal_that_comes_meanwhile_is_handled_and_interrupts_the_call_as_ever() {
    if !may_trace() {
        return;
    }
    let child = Child::new(|| {
        let handler: extern "C" fn(i32) = handle;
        // SAFETY: installs a handler that only adds to an atomic.
        unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
        // SAFETY: no descriptors and no time-out: nothing is read or written.
        let answer = unsafe { libc::syscall(libc::SYS_ppoll, 0, 0, 0, 0, 0) };
        let error = io::Error::last_os_error().raw_os_error();
        if answer < 0 && error == Some(libc::EINTR) && HANDLED.load(Ordering::SeqCst) == 1 {
            return INTERRUPTED;
        }
        OTHER
    });
    child.await_call(libc::SYS_ppoll);
    let pid = child.pid;
    run_inside(&child.process(), |thread| {
        // SAFETY: signals our own child.
        unsafe { libc::kill(pid, libc::SIGUSR1) };
        thread.syscall("getppid", libc::SYS_getppid, &[])
    })
    .unwrap();
    assert_eq!(child.exit_status(), INTERRUPTED);
}

fn forever() -> i32 {
    loop {
        // SAFETY: waits for a signal; touches no memory.
        unsafe { libc::pause() };
    }
}

#[test]
fn a_userfaultfd_made_inside_a_process_can_be_taken_and_closed_there() {
    if !may_trace() {
        return;
    }
    let child = Child::new(forever);
    child.await_call(libc::SYS_pause);
    let process = child.process();
    let ran = run_inside(&process, |thread| thread.make_userfaultfd()).unwrap();
    let taken = process.take_descriptor(ran.value).unwrap();
    assert!(is_userfaultfd(taken.as_fd()));
    run_inside(&process, |thread| thread.close(ran.value)).unwrap();
    assert!(process.take_descriptor(ran.value).is_err());
    child.kill();
}

#[test]
fn a_descriptor_given_to_a_process_makes_a_userfaultfd_there_and_leaves_nothing_else() {
    if !may_trace() {
        return;
    }
    let device = match Userfaultfd::open_device() {
        Ok(device) => device,
        Err(e) => {
            eprintln!("SKIPPED: no /dev/userfaultfd: {e}");
            return;
        }
    };
    let child = Child::new(forever);
    child.await_call(libc::SYS_pause);
    let fds = || {
        std::fs::read_dir(format!("/proc/{}/fd", child.pid))
            .unwrap()
            .count()
    };
    let before = fds();
    let process = child.process();
    let ran = run_inside(&process, |thread| {
        let number = thread.give_descriptor(device.as_fd())?;
        let made = thread.make_userfaultfd_by(number);
        thread.close(number)?;
        made
    })
    .unwrap();
    assert_eq!(fds(), before + 1);
    assert!(is_userfaultfd(
        process.take_descriptor(ran.value).unwrap().as_fd()
    ));
    child.kill();
}

#[test]
fn a_call_that_fails_inside_says_how_and_the_thread_goes_on() {
    if !may_trace() {
        return;
    }
    let (read_end, write_end) = rustix::pipe::pipe().unwrap();
    let child = Child::new(|| {
        let mut byte = [0_u8];
        rustix::io::read(&read_end, &mut byte).map_or(INTERRUPTED, |_| i32::from(byte[0]))
    });
    child.await_call(libc::SYS_read);
    let failed = run_inside(&child.process(), |thread| thread.close(9_999)).unwrap_err();
    assert!(matches!(
        failed,
        PtraceError::Call {
            call: "close",
            source: Errno::BADF
        }
    ));
    rustix::io::write(&write_end, &[5]).unwrap();
    assert_eq!(child.exit_status(), 5);
}

#[test]
fn a_process_stopped_by_a_signal_is_refused_and_stays_stopped() {
    if !may_trace() {
        return;
    }
    let child = Child::new(forever);
    child.await_call(libc::SYS_pause);
    // SAFETY: signals our own child, then waits until it has stopped.
    unsafe {
        libc::kill(child.pid, libc::SIGSTOP);
        libc::waitpid(child.pid, std::ptr::null_mut(), libc::WUNTRACED);
    }
    let refused = run_inside(&child.process(), |thread| {
        thread.syscall("getppid", libc::SYS_getppid, &[])
    })
    .unwrap_err();
    assert!(matches!(
        refused,
        PtraceError::Stopped {
            signal: libc::SIGSTOP,
            ..
        }
    ));
    let state = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.pid)).unwrap();
        stat.rsplit_once(')')
            .unwrap()
            .1
            .trim()
            .chars()
            .next()
            .unwrap()
    };
    while !matches!(state(), 'T') {
        std::thread::yield_now();
    }
    child.kill();
}

#[test]
fn a_process_that_has_ended_is_gone() {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let process = ProcessFd::open(child.id()).unwrap();
    child.wait().unwrap();
    assert!(matches!(
        run_inside(&process, |thread| thread.close(0)),
        Err(PtraceError::Gone { .. })
    ));
}

#[test]
fn threads_blocked_in_restartable_calls_come_before_those_that_are_not() {
    assert_eq!(rank_of_blocked("running\n"), None);
    assert_eq!(rank_of_blocked("-1 0x7ffd 0x7f\n"), None);
    assert_eq!(rank_of_blocked("58 0x0\n"), None);
    let ranks: Vec<_> = ["271 0x1", "202 0x1", "34 0x0", "232 0x4", "16 0xd"]
        .iter()
        .map(|l| rank_of_blocked(l).unwrap())
        .collect();
    assert!(ranks.is_sorted());
}

#[test]
fn translations_dropped_inside_leave_content_in_the_file() {
    if !may_trace() {
        return;
    }
    const PAGES: usize = 256;
    const BYTES: usize = PAGES * 4096;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping, over none that is there; it lives until the process ends.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), BYTES, protection, flags, -1, 0) };
    assert_ne!(memory, libc::MAP_FAILED);
    let start = Hva(memory.addr() as u64);
    let last = memory.cast::<u8>().wrapping_add(BYTES - 1);
    let child = Child::new(|| {
        // SAFETY: within the mapping, which the child has from its parent.
        unsafe { memory.cast::<u8>().write_bytes(7, BYTES) };
        // SAFETY: a bare call that sleeps; TIMEOUT lives for ever.
        let sleep = || unsafe { libc::syscall(libc::SYS_nanosleep, &raw const TIMEOUT, 0) };
        let ended = timed(sleep, 0);
        // SAFETY: as above.
        if unsafe { last.read_volatile() } == 7 {
            ended
        } else {
            OTHER
        }
    });
    child.await_call(libc::SYS_nanosleep);
    let map = crate::pagemap::Pagemap::of_process(child.pid.cast_unsigned()).unwrap();
    let present = || map.count_present(start, PAGES as u64).unwrap();
    assert_eq!(present(), PAGES as u64);
    run_inside(&child.process(), |thread| {
        thread.drop_translations(start, BYTES as u64)
    })
    .unwrap();
    assert_eq!(present(), 0);
    assert_eq!(child.exit_status(), TIMED_OUT);
}
