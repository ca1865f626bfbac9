// SPDX-License-Identifier: Apache-2.0
//! [`run_inside`] and [`run_inside_within`]: stop a thread, use it and resume it, on a dedicated
//! tracer thread.

use super::borrow::{Found, Search};
use super::stopped::{StoppedThread, Target, whole_us};
use super::{PtraceError, boost};
use crate::cpu::{self, Urgency};
use crate::process::ProcessFd;
use std::time::Duration;

/// Result of [`run_inside`].
#[derive(Clone, Copy, Debug)]
pub struct Ran<T> {
    /// What the work returned.
    pub value: T,
    /// Length of the thread's pause, in microseconds.
    pub pause_us: u64,
    /// The thread that was used.
    pub thread: u32,
    /// The threads over which the two threads had priority.
    pub pace: Pace,
}

/// The threads over which the tracer and the stopped thread have priority.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pace {
    /// Every ordinary thread of the host.
    RealTime,
    /// None: it is not permitted here.
    Ordinary,
}

/// Limits of a thread's pause, and what to do beyond them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PauseLimits {
    /// Longest pause.
    pub pause_max: Duration,
    /// Most attempts.
    pub tries_max: u32,
    /// Time between the first attempt and the second; it doubles with each.
    pub backoff: Duration,
}

/// Stops a thread of `process`, calls `work` with it, and resumes it as if nothing had happened,
/// whatever `work` returns.
///
/// # Errors
/// The error of `work`, or [`PtraceError`] if no thread could be stopped or resumed.
pub fn run_inside<T, E, F>(process: &ProcessFd, work: F) -> Result<Ran<T>, E>
where
    T: Send,
    E: From<PtraceError> + Send,
    F: FnMut(&mut StoppedThread<'_>) -> Result<T, E> + Send,
{
    let attempt = attempt(process, None, work)?;
    attempt.outcome.map(|value| Ran {
        value,
        pause_us: attempt.pause_us,
        thread: attempt.thread,
        pace: attempt.pace,
    })
}

/// Like [`run_inside`], with a limit on the thread's pause. Beyond the limit no further call is
/// made, `undo` reverts the result of `work`, if there is one, and everything is retried. A `work`
/// that fails has undone its part itself. Closing a descriptor is possible at any time. If
/// something could not be undone, there is no retry.
///
/// # Errors
/// As there, and [`PtraceError::PausesTooLong`]; the error of the undo, if that failed.
pub fn run_inside_within<T, E>(
    process: &ProcessFd,
    limits: PauseLimits,
    work: impl Fn(&mut StoppedThread<'_>) -> Result<T, E> + Send + Sync,
    undo: impl Fn(&mut StoppedThread<'_>, &T) -> Result<(), E> + Send + Sync,
) -> Result<Ran<T>, E>
where
    T: Send + Sync,
    E: From<PtraceError> + Send,
{
    let mut pauses_us = Vec::new();
    let mut backoff = limits.backoff;
    for number in 0..limits.tries_max {
        if number > 0 {
            std::thread::sleep(backoff);
            backoff *= 2;
        }
        let attempt = attempt::<T, E, _>(process, Some(limits.pause_max), |thread| {
            let value = work(thread)?;
            // Better now than with another stop.
            if let Err(late) = thread.still_in_time() {
                undo(thread, &value)?;
                return Err(late.into());
            }
            Ok(value)
        })?;
        match (attempt.outcome, attempt.late) {
            (Ok(value), Late::Not) => {
                return Ok(Ran {
                    value,
                    pause_us: attempt.pause_us,
                    thread: attempt.thread,
                    pace: attempt.pace,
                });
            }
            // Late on its way out: the work is done, and the lateness is not reported.
            (Ok(value), _) => {
                run_inside(process, |thread| undo(thread, &value))?;
            }
            (Err(_), Late::Refused) => {}
            // Undoing failed, or the work failed for a reason of its own.
            (Err(error), _) => return Err(error),
        }
        pauses_us.push(attempt.pause_us);
    }
    Err(PtraceError::PausesTooLong {
        pid: process.pid(),
        pauses_us,
        pause_max_us: whole_us(limits.pause_max),
    }
    .into())
}

/// Whether the pause exceeded its limit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Late {
    Not,
    /// Yes, but all work was done by then.
    AtTheEnd,
    /// Yes, a call was refused for it, and all was undone.
    Refused,
    /// Yes, and undoing failed.
    NotUndone,
}

/// Result of one stop.
struct Attempt<T, E> {
    outcome: Result<T, E>,
    late: Late,
    pause_us: u64,
    thread: u32,
    pace: Pace,
}

/// Result of one tracer.
enum Traced<T, E> {
    Done(Attempt<T, E>),
    /// This thread was asked to stop and did not. The caller ends the priority loan.
    Deaf {
        thread: u32,
        boost: Option<boost::Boost>,
    },
}

/// Stops a thread and calls `work` with it, once.
fn attempt<T, E, F>(
    process: &ProcessFd,
    pause_max: Option<Duration>,
    mut work: F,
) -> Result<Attempt<T, E>, E>
where
    T: Send,
    E: From<PtraceError> + Send,
    F: FnMut(&mut StoppedThread<'_>) -> Result<T, E> + Send,
{
    let mut search = Search::begin();
    loop {
        let traced = on_a_tracer(|| {
            let pace = favour_this_thread();
            let target = Target::of(process)?;
            let borrowed = match search.next(process, &target.memory)? {
                Found::Borrowed(borrowed) => borrowed,
                Found::Deaf { thread, boost } => return Ok(Traced::Deaf { thread, boost }),
            };
            let stopped = StoppedThread::of(process, target, borrowed, pause_max)?;
            use_it(stopped, pace, &mut work).map(Traced::Done)
        });
        match traced? {
            Traced::Done(attempt) => return Ok(attempt),
            Traced::Deaf { thread, boost } => {
                search.pass_over(process.pid(), thread);
                drop(boost);
            }
        }
    }
}

/// Calls `work` with the thread and resumes it.
fn use_it<T, E>(
    mut stopped: StoppedThread<'_>,
    pace: Pace,
    work: &mut impl FnMut(&mut StoppedThread<'_>) -> Result<T, E>,
) -> Result<Attempt<T, E>, PtraceError> {
    let pace = match stopped.boost {
        Some(_) => pace,
        None => Pace::Ordinary,
    };
    let outcome = work(&mut stopped);
    let (thread, pause_max) = (stopped.thread, stopped.pause_max);
    let (was_refused, was_not_undone) = (stopped.was_late, stopped.has_failed_late);
    let pause = stopped.finish()?;
    let late = match pause_max {
        _ if was_not_undone => Late::NotUndone,
        _ if was_refused => Late::Refused,
        Some(most) if pause > most => Late::AtTheEnd,
        _ => Late::Not,
    };
    Ok(Attempt {
        outcome,
        late,
        pause_us: whole_us(pause),
        thread,
        pace,
    })
}

/// Runs `trace` on a dedicated thread. When that thread ends, the kernel detaches whatever it still
/// traces.
fn on_a_tracer<R: Send>(
    trace: impl FnOnce() -> Result<R, PtraceError> + Send,
) -> Result<R, PtraceError> {
    std::thread::scope(|scope| {
        let tracer = std::thread::Builder::new()
            .name("pagetide-ptrace".to_owned())
            .spawn_scoped(scope, trace)
            .map_err(|source| PtraceError::Kernel {
                operation: "starting a thread",
                thread: 0,
                source,
            })?;
        match tracer.join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// On a busy host each stop waits for this thread to run, and it polls with short sleeps (yielding
/// would keep the target from a CPU that both use). It is short-lived, so it may have priority.
/// Without the right to the real-time class it tries niceness -20 and sleeps exactly.
pub(super) fn favour_this_thread() -> Pace {
    if cpu::set_urgency(Urgency::Preempting(boost::PRIORITY)).is_ok() {
        return Pace::RealTime;
    }
    let eager = cpu::set_urgency(Urgency::Eager).is_ok();
    let exact = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1)).is_ok();
    debug_assert!(exact || !eager, "timer slack needs no right");
    Pace::Ordinary
}
