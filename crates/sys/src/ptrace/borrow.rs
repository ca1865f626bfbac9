// SPDX-License-Identifier: Apache-2.0
//! Finding a thread to borrow, and stopping it where that does no harm.
//!
//! Best is a thread that is blocked in a system call: it loses nothing. For [`BLOCKED_ONLY`] no
//! other is looked for. Then any thread will do, running ones too, if it stops
//!
//! - in a system call: one that was at work has ended by then, or is restarted; a vCPU leaves
//!   `KVM_RUN` as for a signal; or
//! - in user code, **outside of a restartable sequence** (rseq). The kernel forgets a sequence when
//!   the thread runs code elsewhere, as an injected call does. When the thread then went on
//!   in the sequence, nothing would restart it after it had lost its CPU. The kernel tells a tracer
//!   where the thread's rseq area is (Linux 5.13), and that area names the sequence the thread may
//!   be in. If it names one, or the kernel does not tell, the thread goes on and is tried later.
//!
//! Everything else that a thread in user code may be in the middle of (a lock held, a leaf function
//! in its red zone, vector registers in use) is untouched by a system call that is injected:
//! the same holds for a signal handler, which may run there at any time.
//!
//! A thread that does not stop in time (uninterruptible sleep) is let go as soon as it does.

use super::boost::Boost;
use super::raw::{Seized, detach, get_registers, has_stopped_late, rseq_area, seize};
use super::threads::{Reach, threads};
use super::{PtraceError, USER_CS_64};
use crate::process::ProcessFd;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// How long a thread is looked for before the process is refused. It is longer than storage
/// that is merely slow keeps all threads of a VMM in uninterruptible sleep.
pub(super) const BORROW_WAIT: Duration = Duration::from_secs(5);
/// How long only threads that are blocked in a system call are looked for.
const BLOCKED_ONLY: Duration = Duration::from_millis(5);
/// Threads that have been asked to stop and have not yet, at most. Each costs a wait.
const MOST_DEAF: usize = 4;
/// Between two looks at all threads: at first, and at most. It doubles from look to look, so that
/// a process that is busy is not stopped thousands of times.
const LOOK_SLEEP: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(10));
/// Where the rseq area names the sequence its thread is in.
const RSEQ_CS_OFFSET: u64 = 8;

/// A thread that has stopped.
pub(super) struct Borrowed {
    pub(super) thread: u32,
    pub(super) since: Instant,
    pub(super) registers: libc::user_regs_struct,
    pub(super) boost: Option<Boost>,
}

#[expect(
    clippy::large_enum_variant,
    reason = "one a take-over, taken apart at once: a box would cost more than the copy"
)]
enum Tried {
    Borrowed(Borrowed),
    /// Ended, or stopped where it cannot be used.
    NotThisTime,
    /// It has not stopped.
    Deaf,
}

/// Stops a thread of `process`, whose memory `memory` is.
pub(super) fn borrow(process: &ProcessFd, memory: &File) -> Result<Borrowed, PtraceError> {
    let pid = process.pid();
    let begun = Instant::now();
    let (mut sleep, sleep_max) = LOOK_SLEEP;
    let mut tried = 0;
    let mut deaf = Vec::new();
    loop {
        let mut still_deaf = Vec::new();
        for thread in deaf {
            if !has_stopped_late(thread)? {
                still_deaf.push(thread);
            }
        }
        deaf = still_deaf;
        let reach = if begun.elapsed() < BLOCKED_ONLY {
            Reach::Blocked
        } else {
            Reach::All
        };
        for thread in threads(pid, reach)? {
            if deaf.len() >= MOST_DEAF || begun.elapsed() > BORROW_WAIT {
                break;
            }
            if deaf.contains(&thread) {
                continue;
            }
            tried += 1;
            match try_one(process, memory, thread)? {
                Tried::Borrowed(borrowed) => return Ok(borrowed),
                Tried::NotThisTime => {}
                Tried::Deaf => deaf.push(thread),
            }
        }
        if begun.elapsed() > BORROW_WAIT {
            return Err(PtraceError::NoQuietThread {
                pid,
                tried,
                waited_s: BORROW_WAIT.as_secs(),
            });
        }
        std::thread::sleep(sleep);
        sleep = (sleep * 2).min(sleep_max);
    }
}

fn try_one(process: &ProcessFd, memory: &File, thread: u32) -> Result<Tried, PtraceError> {
    let pid = process.pid();
    // Before it is stopped, so that it is on a CPU at once. Where that is not allowed it is
    // merely slower.
    let boost = Boost::lend(thread);
    let since = match seize(pid, thread)? {
        Seized::Stopped { since } => since,
        Seized::DoesNotStop => return Ok(Tried::Deaf),
        Seized::GoneAway => return Ok(Tried::NotThisTime),
    };
    // Seized by number: it is the process's if that had not ended afterwards.
    if process.has_ended()? {
        detach(thread)?;
        return Err(PtraceError::Gone { pid });
    }
    let registers = get_registers(thread)?;
    if registers.cs != USER_CS_64 {
        detach(thread)?;
        return Err(PtraceError::WrongArchitecture { pid });
    }
    let was_in_call = registers.orig_rax.cast_signed() >= 0;
    if !was_in_call && !is_outside_of_rseq(memory, thread) {
        detach(thread)?;
        return Ok(Tried::NotThisTime);
    }
    Ok(Tried::Borrowed(Borrowed {
        thread,
        since,
        registers,
        // Without it the thread is away longer on a busy host, which has been said.
        boost: boost.ok(),
    }))
}

/// True if the stopped thread is surely in no restartable sequence.
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
