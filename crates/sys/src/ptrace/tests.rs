// SPDX-License-Identifier: Apache-2.0
//! Tests of [`run_inside`](super::run_inside) on children that are blocked in all sorts of calls.
//!
//! A child is created by `fork` and makes only bare system calls, so that it needs none of the
//! threads it has lost. Its exit status reports what the interrupted call returned.

mod deaf;
mod hold;
#[cfg(target_arch = "x86_64")]
mod rseq;

use super::registers::{CLONES, EPOLLS};
use super::threads::{Rank, rank_of_blocked};
use super::*;
use crate::cpu::{self, Urgency};
use crate::process::ProcessFd;
use crate::uffd::{Userfaultfd, is_userfaultfd};
use pagetide_addr::Hva;
use rustix::io::Errno;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

const TIMED_OUT: i32 = 40;
const WRONG_TIME: i32 = 41;
const INTERRUPTED: i32 = 42;
const OTHER: i32 = 43;
/// The call by which `pause` waits.
#[cfg(target_arch = "x86_64")]
const PAUSE: i64 = libc::SYS_pause;
#[cfg(not(target_arch = "x86_64"))]
const PAUSE: i64 = libc::SYS_ppoll;
/// Long enough for an injection to fall within it, short enough for a test.
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
                // SAFETY: ends this process without running any code of the parent's.
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
        // It is reaped.
        std::mem::forget(self);
        assert!(libc::WIFEXITED(status), "status {status:#x}");
        libc::WEXITSTATUS(status)
    }

    fn kill(self) {
        drop(self);
    }
}

impl Drop for Child {
    /// Also if a test fails: the child would outlive us, with all our descriptors.
    fn drop(&mut self) {
        // SAFETY: signals and reaps our own child, whose pid cannot have been reused.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

fn may_trace() -> bool {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: not root");
        return false;
    }
    !crate::emulated::skip()
}

fn now_ns() -> i64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec * 1_000_000_000 + t.tv_nsec
}

/// Makes a call that ends by time-out, and returns how it ended.
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

/// Queries the child's parent twice, by injected calls.
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

#[cfg(target_arch = "x86_64")]
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
    child.await_call(PAUSE);
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
    child.await_call(PAUSE);
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
    child.await_call(PAUSE);
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
    assert_eq!(rank_of_blocked("running\n"), Rank::Other);
    assert_eq!(rank_of_blocked("-1 0x7ffd 0x7f\n"), Rank::Other);
    let in_call = |number: i64| rank_of_blocked(&format!("{number} 0x0 0x1\n"));
    for clone in CLONES {
        assert_eq!(in_call(*clone), Rank::Never);
    }
    let epoll = EPOLLS[0];
    let ranks: Vec<_> = [
        libc::SYS_ppoll,
        libc::SYS_futex,
        libc::SYS_wait4,
        epoll,
        libc::SYS_ioctl,
    ]
    .into_iter()
    .map(in_call)
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
    // SAFETY: a new mapping that replaces none; it lives until the process ends.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), BYTES, protection, flags, -1, 0) };
    assert_ne!(memory, libc::MAP_FAILED);
    let start = Hva(memory.addr() as u64);
    let last = memory.cast::<u8>().wrapping_add(BYTES - 1);
    let child = Child::new(|| {
        // SAFETY: within the mapping, which the child has inherited from its parent.
        unsafe { memory.cast::<u8>().write_bytes(7, BYTES) };
        // SAFETY: a bare call that sleeps; TIMEOUT lives forever.
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

/// Runs only in user code, with dependent values in many registers, until `stop` is set. Returns 0,
/// or [`OTHER`] if a register has changed.
fn busy(stop: &AtomicI32) -> i32 {
    let mut state = [1_u64, 2, 3, 5, 7, 11, 13, 17];
    let mut rounds = 0_u64;
    while stop.load(Ordering::Relaxed) == 0 {
        for value in &mut state {
            *value = value
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
        }
        rounds += 1;
    }
    let mut again = [1_u64, 2, 3, 5, 7, 11, 13, 17];
    for _ in 0..rounds {
        for value in &mut again {
            *value = value
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
        }
    }
    if again == state { 0 } else { OTHER }
}

/// Words that this process and its children share.
fn shared_words() -> &'static [AtomicI32; 1024] {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping that replaces none; it lives until the process ends.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, flags, -1, 0) };
    assert_ne!(memory, libc::MAP_FAILED);
    // SAFETY: a whole page, zeroed, aligned, mapped forever; only atomics touch it.
    unsafe { &*memory.cast::<[AtomicI32; 1024]>() }
}

#[test]
fn a_process_that_only_computes_is_borrowed_and_computes_right() {
    if !may_trace() {
        return;
    }
    let stop = &shared_words()[0];
    let child = Child::new(|| busy(stop));
    for _ in 0..20 {
        ask_twice(&child);
    }
    stop.store(1, Ordering::Relaxed);
    assert_eq!(child.exit_status(), 0);
}

fn may_be_realtime() -> bool {
    let may = std::thread::spawn(|| cpu::set_urgency(Urgency::Preempting(boost::PRIORITY)));
    let may = may.join().unwrap();
    if let Err(e) = &may {
        eprintln!("SKIPPED: no real-time thread here: {e}");
    }
    may.is_ok()
}

fn policy_of(pid: i32) -> i32 {
    // SAFETY: takes a number.
    unsafe { libc::sched_getscheduler(pid) }
}

#[test]
fn a_borrowed_thread_is_urgent_while_it_is_borrowed_and_its_policy_is_never_touched() {
    if !may_trace() || !may_be_realtime() {
        return;
    }
    let child = Child::new(forever);
    child.await_call(PAUSE);
    let thread = child.pid.cast_unsigned();
    let ran = run_inside(&child.process(), |_| {
        Ok::<_, PtraceError>((boost::is_realtime(thread), policy_of(child.pid)))
    })
    .unwrap();
    assert_eq!(ran.value, (true, libc::SCHED_OTHER));
    assert_eq!(ran.pace, Pace::RealTime);
    assert!(!boost::is_realtime(thread));
    assert_eq!(policy_of(child.pid), libc::SCHED_OTHER);
    child.kill();
}

#[test]
fn priority_lent_by_a_process_that_is_killed_is_gone_with_it() {
    if !may_trace() || !may_be_realtime() {
        return;
    }
    let child = Child::new(forever);
    child.await_call(PAUSE);
    let thread = child.pid.cast_unsigned();
    let word = std::sync::atomic::AtomicU32::new(thread);
    let lender = Child::new(|| {
        if cpu::set_urgency(Urgency::Preempting(boost::PRIORITY)).is_ok() {
            boost::wait_for_lock(&word);
        }
        OTHER
    });
    lender.await_call(libc::SYS_futex);
    assert!(boost::is_realtime(thread));
    lender.kill();
    assert!(!boost::is_realtime(thread));
    child.kill();
}

fn descriptors_of(child: &Child) -> usize {
    let list = std::fs::read_dir(format!("/proc/{}/fd", child.pid));
    list.unwrap().count()
}

#[test]
fn a_pause_that_is_too_long_is_undone_and_tried_again_and_then_told() {
    if !may_trace() {
        return;
    }
    let child = Child::new(forever);
    child.await_call(PAUSE);
    let before = descriptors_of(&child);
    let limits = PauseLimits {
        pause_max: Duration::from_millis(200),
        tries_max: 3,
        backoff: Duration::from_millis(1),
    };
    let slow_tries = AtomicI32::new(0);
    // Slow for `slow` attempts: before its call, which is then refused, or after it, which is then
    // undone.
    let create = |slow: i32, before_call: u64, after_call: u64| {
        slow_tries.store(slow, Ordering::Relaxed);
        let is_slow = || slow_tries.fetch_sub(1, Ordering::Relaxed) > 0;
        run_inside_within(
            &child.process(),
            limits,
            |thread| {
                let is_slow = is_slow();
                let sleep =
                    |ms| std::thread::sleep(Duration::from_millis(if is_slow { ms } else { 0 }));
                sleep(before_call);
                let number = thread.make_userfaultfd()?;
                sleep(after_call);
                Ok::<_, PtraceError>(number)
            },
            |thread, number| thread.close(*number),
        )
    };
    for (before_call, after_call) in [(250, 0), (0, 250)] {
        let made = create(2, before_call, after_call).unwrap();
        assert!(made.pause_us <= 200_000, "{}", made.pause_us);
        assert_eq!(descriptors_of(&child), before + 1);
        run_inside(&child.process(), |thread| thread.close(made.value)).unwrap();
        let refused = create(3, before_call, after_call).unwrap_err();
        let PtraceError::PausesTooLong { pauses_us, .. } = &refused else {
            panic!("{refused}");
        };
        assert_eq!(pauses_us.len(), 3);
        assert!(pauses_us.iter().all(|us| *us > 200_000), "{refused}");
        assert_eq!(descriptors_of(&child), before);
    }
    child.kill();
}

#[test]
fn what_could_not_be_undone_is_told_and_not_tried_again() {
    if !may_trace() {
        return;
    }
    let child = Child::new(forever);
    child.await_call(PAUSE);
    let limits = PauseLimits {
        pause_max: Duration::from_millis(1),
        tries_max: 3,
        backoff: Duration::from_millis(1),
    };
    let tries = AtomicI32::new(0);
    let outcome = run_inside_within(
        &child.process(),
        limits,
        |thread| {
            tries.fetch_add(1, Ordering::Relaxed);
            let number = thread.make_userfaultfd()?;
            std::thread::sleep(Duration::from_millis(5));
            Ok::<_, PtraceError>(number)
        },
        // No such descriptor.
        |thread, _| thread.close(99_999),
    );
    let source = match outcome {
        Err(PtraceError::Call {
            call: "close",
            source,
        }) => source,
        other => panic!("{other:?}"),
    };
    assert_eq!(source, Errno::BADF);
    assert_eq!(tries.load(Ordering::Relaxed), 1);
    child.kill();
}

#[test]
fn pauses_beside_busy_cpus_are_within_the_bound_or_undone() {
    const TAKE_OVERS: usize = 30;
    if !may_trace() {
        return;
    }
    let child = Child::new(forever);
    child.await_call(PAUSE);
    let before = descriptors_of(&child);
    let hogs_stop = shared_words();
    let hogs: Vec<Child> = (0..2 * cpu::online_count().unwrap())
        .map(|_| Child::new(|| busy_quietly(&hogs_stop[0])))
        .collect();
    let limits = PauseLimits {
        pause_max: Duration::from_millis(5),
        tries_max: 5,
        backoff: Duration::from_millis(10),
    };
    let mut pauses_us = Vec::new();
    for _ in 0..TAKE_OVERS {
        let ran = run_inside_within(
            &child.process(),
            limits,
            |thread| thread.make_userfaultfd(),
            |thread, number| thread.close(*number),
        );
        match ran {
            Ok(ran) => {
                assert!(ran.pause_us <= 5_000, "{}", ran.pause_us);
                pauses_us.push(ran.pause_us);
                run_inside(&child.process(), |thread| thread.close(ran.value)).unwrap();
            }
            Err(PtraceError::PausesTooLong { pauses_us, .. }) => {
                assert!(pauses_us.iter().all(|us| *us > 5_000), "{pauses_us:?}");
                eprintln!("undone each time: {pauses_us:?} us");
            }
            Err(error) => panic!("{error}"),
        }
        assert_eq!(descriptors_of(&child), before);
    }
    hogs_stop[0].store(1, Ordering::Relaxed);
    hogs.into_iter()
        .for_each(|hog| assert_eq!(hog.exit_status(), 0));
    pauses_us.sort_unstable();
    eprintln!(
        "pauses beside {} hogs, us: {pauses_us:?}",
        2 * cpu::online_count().unwrap()
    );
    child.kill();
}

fn busy_quietly(stop: &AtomicI32) -> i32 {
    while stop.load(Ordering::Relaxed) == 0 {
        std::hint::spin_loop();
    }
    0
}
