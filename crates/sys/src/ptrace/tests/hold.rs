// SPDX-License-Identifier: Apache-2.0
//! Tests of [`hold`](super::super::hold()): threads stand still and go on, whoever ends.

use super::*;
use std::time::Instant;

const LIMITS: HoldLimits = HoldLimits {
    stop_wait: Duration::from_secs(5),
    hold_max: Duration::from_secs(60),
};
const PATIENCE: Duration = Duration::from_secs(10);

/// Counts in `words[1]` until told to stop.
fn count(words: &[AtomicI32]) -> i32 {
    while words[0].load(Ordering::Relaxed) == 0 {
        words[1].fetch_add(1, Ordering::Relaxed);
    }
    0
}

fn await_progress(words: &[AtomicI32]) {
    let (before, began) = (words[1].load(Ordering::Relaxed), Instant::now());
    while words[1].load(Ordering::Relaxed) == before {
        assert!(began.elapsed() < PATIENCE, "it stands still");
        std::thread::yield_now();
    }
}

#[test]
fn held_thread_stands_still_until_it_is_released_and_nothing_traces_it_then() {
    if !may_trace() {
        return;
    }
    let words = shared_words();
    let child = Child::new(|| count(words));
    await_progress(words);
    for _ in 0..10 {
        let held = hold(&child.process(), &[child.pid.cast_unsigned()], LIMITS).unwrap();
        assert_eq!((held.stopped, held.deaf), (1, 0));
        let before = words[1].load(Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(words[1].load(Ordering::Relaxed), before, "it goes on");
        assert!(held.elapsed() >= Duration::from_millis(5));
        drop(held);
        await_progress(words);
    }
    // A thread that is traced could not be stopped by another tracer.
    ask_twice(&child);
    words[0].store(1, Ordering::Relaxed);
    assert_eq!(child.exit_status(), 0);
}

#[test]
fn held_threads_go_on_after_the_longest_time_though_nobody_releases_them() {
    if !may_trace() {
        return;
    }
    let words = shared_words();
    let child = Child::new(|| count(words));
    let limits = HoldLimits {
        hold_max: Duration::from_millis(1),
        ..LIMITS
    };
    let held = hold(&child.process(), &[child.pid.cast_unsigned()], limits).unwrap();
    await_progress(words);
    // They have been let go: no more time counts as held.
    let length = held.elapsed();
    await_progress(words);
    assert_eq!(held.elapsed(), length);
    drop(held);
    words[0].store(1, Ordering::Relaxed);
    assert_eq!(child.exit_status(), 0);
}

#[test]
fn call_in_progress_is_restarted_and_threads_that_are_gone_are_passed_over() {
    if !may_trace() {
        return;
    }
    let child = Child::new(|| {
        // SAFETY: reads one timespec, a live static.
        timed(
            || unsafe { libc::syscall(libc::SYS_nanosleep, &raw const TIMEOUT, 0) },
            0,
        )
    });
    child.await_call(libc::SYS_nanosleep);
    let mut gone = std::process::Command::new("true").spawn().unwrap();
    let gone_pid = gone.id();
    assert!(gone.wait().unwrap().success());
    let threads = [gone_pid, child.pid.cast_unsigned()];
    let held = hold(&child.process(), &threads, LIMITS).unwrap();
    assert_eq!((held.stopped, held.deaf), (1, 0));
    drop(held);
    assert_eq!(child.exit_status(), TIMED_OUT);
}

#[test]
fn hold_of_a_process_that_has_ended_or_is_traced_is_refused() {
    if !may_trace() {
        return;
    }
    let mut ended = std::process::Command::new("true").spawn().unwrap();
    let process = ProcessFd::open(ended.id()).unwrap();
    assert!(ended.wait().unwrap().success());
    let refused = hold(&process, &[ended.id()], LIMITS).unwrap_err();
    assert!(matches!(refused, PtraceError::Gone { .. }), "{refused}");

    let words = shared_words();
    let child = Child::new(|| count(words));
    let threads = [child.pid.cast_unsigned()];
    let first = hold(&child.process(), &threads, LIMITS).unwrap();
    let refused = hold(&child.process(), &threads, LIMITS).unwrap_err();
    assert!(
        matches!(refused, PtraceError::NotPermitted { .. }),
        "{refused}"
    );
    drop(first);
    await_progress(words);
    words[0].store(1, Ordering::Relaxed);
    assert_eq!(child.exit_status(), 0);
}

#[test]
fn held_thread_is_passed_over_by_remote_calls_until_it_goes_on() {
    if !may_trace() {
        return;
    }
    let words = shared_words();
    let child = Child::new(|| count(words));
    let limits = HoldLimits {
        hold_max: Duration::from_millis(50),
        ..LIMITS
    };
    let held = hold(&child.process(), &[child.pid.cast_unsigned()], limits).unwrap();
    assert!(threads::is_traced_by_us(
        child.pid.cast_unsigned(),
        child.pid.cast_unsigned()
    ));
    // It is the only one: so this waits for the end of the hold.
    ask_twice(&child);
    drop(held);
    words[0].store(1, Ordering::Relaxed);
    assert_eq!(child.exit_status(), 0);
}
