// SPDX-License-Identifier: Apache-2.0
//! Errors of running system calls inside a process.

use crate::process::ProcessError;
use rustix::io::Errno;
use std::io;

/// What processes of this machine are called.
const KIND: &str = if cfg!(target_arch = "aarch64") {
    "Arm"
} else {
    "x86"
};

/// Why system calls could not be run inside a process.
#[derive(Debug, thiserror::Error)]
pub enum PtraceError {
    /// The process is gone.
    #[error("process {pid} ended while it was being taken over")]
    Gone {
        /// Its pid.
        pid: u32,
    },
    /// We are not allowed to trace it.
    #[error(
        "tracing process {pid} is not permitted: run as root (or with CAP_SYS_PTRACE), and make \
         sure that no debugger is attached to it and kernel.yama.ptrace_scope is below 3"
    )]
    NotPermitted {
        /// Its pid.
        pid: u32,
    },
    /// No thread could be used.
    #[error(
        "no thread of process {pid} could be borrowed within {waited_s} s ({tried} stops tried): \
         all of them are in uninterruptible sleep (state D in `ps -L -p {pid}`) or in code that \
         must not be interrupted; see to the storage it waits for, then try again"
    )]
    NoQuietThread {
        /// Its pid.
        pid: u32,
        /// Threads that were stopped, or asked to stop.
        tried: u32,
        /// Length of the search.
        waited_s: u64,
    },
    /// The thread's pause exceeded the limit, and it was resumed.
    #[error(
        "a thread of process {pid} was away for {pause_us} us, more than the {pause_max_us} us \
         that are allowed: what was done was undone"
    )]
    PauseTooLong {
        /// Its pid.
        pid: u32,
        /// Length of its pause until then.
        pause_us: u64,
        /// The limit.
        pause_max_us: u64,
    },
    /// This was so at each attempt.
    #[error(
        "process {pid} cannot be taken over without a pause: in {} tries a thread of it was away \
         for {} us, more than the {pause_max_us} us that are allowed, and each time all was undone; \
         the host is overloaded, or real-time priority is not permitted here (CAP_SYS_NICE): try \
         again when there is less load",
        pauses_us.len(),
        list(pauses_us)
    )]
    PausesTooLong {
        /// Its pid.
        pid: u32,
        /// Length of each pause.
        pauses_us: Vec<u64>,
        /// The limit.
        pause_max_us: u64,
    },
    /// The process is stopped by a signal.
    #[error("process {pid} is stopped by signal {signal}: let it go on first (kill -CONT {pid})")]
    Stopped {
        /// Its pid.
        pid: u32,
        /// The signal.
        signal: i32,
    },
    /// A filter would kill the process for our call.
    #[error(
        "process {pid} is under seccomp, which cannot be suspended here ({source}): run with \
         CAP_SYS_ADMIN and outside of any seccomp filter"
    )]
    Seccomp {
        /// Its pid.
        pid: u32,
        /// Why it cannot be suspended.
        source: io::Error,
    },
    /// We do not know the registers of this process.
    #[error("process {pid} is not a 64-bit {KIND} process")]
    WrongArchitecture {
        /// Its pid.
        pid: u32,
    },
    /// An injected call did not return.
    #[error(
        "thread {thread} did not come back from an injected system call; its process may be \
         damaged"
    )]
    Lost {
        /// The thread.
        thread: u32,
    },
    /// The kernel refused.
    #[error("{operation} on thread {thread} failed: {source}")]
    Kernel {
        /// The operation that failed.
        operation: &'static str,
        /// The thread.
        thread: u32,
        /// The kernel's answer.
        source: io::Error,
    },
    /// An injected call failed.
    #[error("{call} inside the process failed: {source}")]
    Call {
        /// The call.
        call: &'static str,
        /// Its error.
        source: Errno,
    },
    /// An error of its descriptors.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

fn list(numbers: &[u64]) -> String {
    let words: Vec<String> = numbers.iter().map(u64::to_string).collect();
    words.join(", ")
}

pub(super) fn open_failed(pid: u32, source: io::Error) -> PtraceError {
    match source.kind() {
        io::ErrorKind::NotFound => PtraceError::Gone { pid },
        io::ErrorKind::PermissionDenied => PtraceError::NotPermitted { pid },
        _ if source.raw_os_error() == Some(libc::ESRCH) => PtraceError::Gone { pid },
        _ => kernel("looking into /proc", pid, source),
    }
}

pub(super) fn kernel(operation: &'static str, thread: u32, source: io::Error) -> PtraceError {
    match source.raw_os_error() {
        Some(libc::ESRCH) => PtraceError::Gone { pid: thread },
        _ => PtraceError::Kernel {
            operation,
            thread,
            source,
        },
    }
}
