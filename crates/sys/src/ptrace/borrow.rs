// SPDX-License-Identifier: Apache-2.0
//! Finding a thread for remote system calls, and stopping it where that does no harm.
//!
//! Best is a thread that is blocked in a system call: it loses nothing. For [`BLOCKED_ONLY`], only
//! such threads are considered. After that any thread will do, running ones too, if it stops
//!
//! - in a system call: a call in progress has ended by then, or is restarted; a vCPU leaves
//!   `KVM_RUN` as for a signal; or
//! - in user code, **outside of a restartable sequence** (rseq). The kernel forgets a sequence when
//!   the thread runs code elsewhere, as an injected call does. If the thread then resumed within the
//!   sequence, it would not be restarted after losing its CPU. A tracer can query where the thread's
//!   rseq area is (Linux 5.13), and that area names the sequence the thread may be in. If it names
//!   one, or the query fails, the thread is resumed and tried later.
//!
//! An injected system call does not affect any other state of a thread in user code (a lock held, a
//! leaf function in its red zone, vector registers in use): a signal handler may run there at any
//! time, too.
//!
//! A thread that does not stop in time is in uninterruptible sleep, or at work in the kernel. It is
//! seized and has been asked to stop, and `PTRACE_DETACH` works only for a thread that has stopped.
//! If it were kept, it would stop when it leaves the kernel, and stand still, uncounted, until its
//! tracer polls. So its tracer ends instead: the kernel detaches everything that an ending tracer
//! has seized, and cancels the stop requests, whether the threads have stopped or not. Another
//! tracer continues the [`Search`], with another thread if there is one: threads that did not stop
//! are tried after untried ones, in turns.

use super::PtraceError;
use super::boost::Boost;
use super::raw::{Seized, detach, rseq_area, seize};
use super::registers::Registers;
use super::threads::{Reach, is_traced_by_us, threads, tracer_of};
use crate::process::ProcessFd;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Time limit of the search, after which the process is refused. It is longer than merely slow
/// storage keeps all threads of a VMM in uninterruptible sleep.
pub(super) const BORROW_WAIT: Duration = Duration::from_secs(5);
/// How long only threads that are blocked in a system call are considered.
const BLOCKED_ONLY: Duration = Duration::from_millis(5);
/// Pause between two scans of all threads: at first, and at most. It doubles from scan to scan, so
/// that a busy process is not stopped thousands of times.
const LOOK_SLEEP: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(10));
/// How long the kernel may take to detach the threads of an ended tracer: microseconds, on a
/// machine that is not overloaded. After that, another tracer would get `EPERM`.
const LET_GO_WAIT: Duration = Duration::from_secs(1);
/// Pause between two checks for that.
const LET_GO_SLEEP: Duration = Duration::from_micros(20);
/// Offset in the rseq area of the pointer to the thread's current sequence.
const RSEQ_CS_OFFSET: u64 = 8;

/// A thread that has stopped.
pub(super) struct Borrowed {
    pub(super) thread: u32,
    pub(super) since: Instant,
    pub(super) registers: Registers,
    pub(super) boost: Option<Boost>,
}

#[expect(
    clippy::large_enum_variant,
    reason = "one a take-over, taken apart at once: a box would cost more than the copy"
)]
pub(super) enum Found {
    Borrowed(Borrowed),
    /// It has not stopped. This tracer must end, and only then may the priority loan be ended,
    /// which can take a while.
    Deaf {
        thread: u32,
        boost: Option<Boost>,
    },
}

/// The search for a thread, which continues from tracer to tracer.
pub(super) struct Search {
    begun: Instant,
    /// Threads that were stopped, or asked to stop.
    tried: u32,
    /// For each thread that once did not stop: how often it did not.
    deaf: BTreeMap<u32, u32>,
}

impl Search {
    pub(super) fn begin() -> Self {
        Self {
            begun: Instant::now(),
            tried: 0,
            deaf: BTreeMap::new(),
        }
    }

    /// Stops a thread of `process`, whose memory is `memory`, or finds one that does not stop.
    pub(super) fn next(
        &mut self,
        process: &ProcessFd,
        memory: &File,
    ) -> Result<Found, PtraceError> {
        let pid = process.pid();
        let (mut sleep, sleep_max) = LOOK_SLEEP;
        loop {
            for thread in self.candidates(pid)? {
                if self.is_over() {
                    break;
                }
                self.tried += 1;
                if let Some(found) = try_one(process, memory, thread)? {
                    return Ok(found);
                }
            }
            if self.is_over() {
                return Err(PtraceError::NoQuietThread {
                    pid,
                    tried: self.tried,
                    waited_s: BORROW_WAIT.as_secs(),
                });
            }
            std::thread::sleep(sleep);
            sleep = (sleep * 2).min(sleep_max);
        }
    }

    fn is_over(&self) -> bool {
        self.begun.elapsed() > BORROW_WAIT
    }

    /// Best first; threads that did not stop are last, the least tried of them first.
    fn candidates(&self, pid: u32) -> Result<Vec<u32>, PtraceError> {
        let reach = if self.begun.elapsed() < BLOCKED_ONLY {
            Reach::Blocked
        } else {
            Reach::All
        };
        let mut found = threads(pid, reach)?;
        found.sort_by_key(|thread| self.deaf.get(thread).copied().unwrap_or(0));
        Ok(found)
    }

    /// The tracer of `thread`, which did not stop, has ended: waits until the kernel has detached
    /// the thread.
    pub(super) fn pass_over(&mut self, pid: u32, thread: u32) {
        *self.deaf.entry(thread).or_insert(0) += 1;
        let begun = Instant::now();
        while tracer_of(pid, thread).is_some() && begun.elapsed() < LET_GO_WAIT {
            std::thread::sleep(LET_GO_SLEEP);
        }
    }
}

/// `None` if the thread has ended, or stopped where it cannot be used.
fn try_one(process: &ProcessFd, memory: &File, thread: u32) -> Result<Option<Found>, PtraceError> {
    let pid = process.pid();
    // Before it is stopped, so that it gets a CPU at once. Where that is not allowed, the stop is
    // only slower, and the result says so.
    let boost = Boost::lend(thread).ok();
    let seized = match seize(pid, thread) {
        // One of ours that is held: another one may do.
        Err(PtraceError::NotPermitted { .. } | PtraceError::Seccomp { .. })
            if is_traced_by_us(pid, thread) =>
        {
            return Ok(None);
        }
        seized => seized?,
    };
    let since = match seized {
        Seized::Stopped { since } => since,
        Seized::DoesNotStop => return Ok(Some(Found::Deaf { thread, boost })),
        Seized::GoneAway => return Ok(None),
    };
    // Seized by number: it belongs to the process if the process has not ended since.
    if process.has_ended()? {
        detach(thread)?;
        return Err(PtraceError::Gone { pid });
    }
    let registers = Registers::of(thread)?;
    if !registers.is_native() {
        detach(thread)?;
        return Err(PtraceError::WrongArchitecture { pid });
    }
    if !registers.is_in_call() && !is_outside_of_rseq(memory, thread) {
        detach(thread)?;
        return Ok(None);
    }
    Ok(Some(Found::Borrowed(Borrowed {
        thread,
        since,
        registers,
        boost,
    })))
}

/// True if the stopped thread is certainly in no restartable sequence.
fn is_outside_of_rseq(memory: &File, thread: u32) -> bool {
    match rseq_area(thread) {
        Ok(None) => true,
        Ok(Some(area)) => {
            let mut sequence = [0; 8];
            let read = memory.read_exact_at(&mut sequence, area + RSEQ_CS_OFFSET);
            read.is_ok() && u64::from_ne_bytes(sequence) == 0
        }
        Err(_) => false,
    }
}
