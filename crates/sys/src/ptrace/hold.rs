// SPDX-License-Identifier: Apache-2.0
//! [`Held`]: threads of another process, stopped for a while.
//!
//! ```text
//!   PTRACE_SEIZE, INTERRUPT each ─► wait for all of them to stop ─► caller works ─► tracer ends
//!                                     bounded                        bounded         all go on
//! ```
//! Nothing in the threads is read or changed. An interrupted system call is restarted by the kernel, as
//! after a stop for a remote call; a vCPU leaves `KVM_RUN` as for a signal.
//!
//! The threads are released by the end of the tracer: the kernel detaches all that it seized, stopped or
//! not. So they go on if this process is killed, too; and since the tracer ends by itself after a
//! time, if the caller hangs.

use super::PtraceError;
use super::raw::{Stop, Waited, interrupt, request, wait_for};
use super::run::favour_this_thread;
use crate::process::ProcessFd;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Times of a hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HoldLimits {
    /// How long the threads have to stop. Those that have not by then (they are in uninterruptible
    /// sleep) stop when they can, or not at all.
    pub stop_wait: Duration,
    /// After this time they go on, whatever the caller does.
    pub hold_max: Duration,
}

/// Threads of another process that are stopped; they go on when this is dropped.
#[derive(Debug)]
pub struct Held {
    /// Threads that have stopped.
    pub stopped: usize,
    /// Threads that were asked to stop and have not.
    pub deaf: usize,
    since: Instant,
    /// When the tracer ended the hold, which may be before the caller does.
    ended: Arc<OnceLock<Instant>>,
    release: Option<Sender<()>>,
    tracer: Option<JoinHandle<()>>,
}

impl Held {
    /// How long the threads have been held: until now, or until the tracer let them go by itself.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        match self.ended.get() {
            Some(ended) => ended.saturating_duration_since(self.since),
            None => self.since.elapsed(),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.release.take());
        if self
            .tracer
            .take()
            .is_some_and(|tracer| tracer.join().is_err())
        {
            debug_assert!(false, "the tracer panicked");
        }
    }
}

/// Stops these threads of `process`. One that has ended is passed over.
///
/// # Errors
/// [`PtraceError`]: tracing is not permitted, or the process has ended. All threads go on then.
pub fn hold(process: &ProcessFd, threads: &[u32], limits: HoldLimits) -> Result<Held, PtraceError> {
    let since = Instant::now();
    let (release, released) = mpsc::channel();
    let (tell, told) = mpsc::channel();
    let (pid, threads) = (process.pid(), threads.to_vec());
    let ended = Arc::new(OnceLock::new());
    let tell_end = Arc::clone(&ended);
    let tracer = std::thread::Builder::new()
        .name("pt-hold".to_owned())
        .spawn(move || {
            favour_this_thread();
            let stopped = stop_all(pid, &threads, limits.stop_wait);
            if tell.send(stopped).is_ok() {
                await_release(&released, limits.hold_max);
                tell_end.get_or_init(Instant::now);
            }
        })
        .map_err(|source| PtraceError::Kernel {
            operation: "starting a thread",
            thread: 0,
            source,
        })?;
    let mut held = Held {
        stopped: 0,
        deaf: 0,
        since,
        ended,
        release: Some(release),
        tracer: Some(tracer),
    };
    let (stopped, deaf) = told.recv().unwrap_or(Err(PtraceError::Gone { pid }))?;
    // Seized by number: they belong to the process if it has not ended since.
    if process.has_ended()? {
        return Err(PtraceError::Gone { pid });
    }
    (held.stopped, held.deaf) = (stopped, deaf);
    Ok(held)
}

fn await_release(released: &Receiver<()>, hold_max: Duration) {
    match released.recv_timeout(hold_max) {
        Ok(()) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
    }
}

/// Stops all that can be stopped in time; returns how many have stopped, and how many have not.
fn stop_all(pid: u32, threads: &[u32], stop_wait: Duration) -> Result<(usize, usize), PtraceError> {
    let mut asked = Vec::with_capacity(threads.len());
    for thread in threads {
        match request(libc::PTRACE_SEIZE, *thread, 0, 0) {
            Ok(()) => {}
            Err(gone) if gone.raw_os_error() == Some(libc::ESRCH) => continue,
            Err(_) => return Err(PtraceError::NotPermitted { pid }),
        }
        match interrupt(*thread) {
            Ok(()) => asked.push(*thread),
            Err(PtraceError::Gone { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    let began = Instant::now();
    let (mut stopped, mut deaf) = (0, 0);
    for thread in asked {
        let left = stop_wait.saturating_sub(began.elapsed());
        match wait_for(thread, Stop::Trap, left)? {
            Waited::Reached { .. } => stopped += 1,
            Waited::TimedOut => deaf += 1,
            Waited::Gone => {}
        }
    }
    Ok((stopped, deaf))
}
