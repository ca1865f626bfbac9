// SPDX-License-Identifier: Apache-2.0
//! [`run_inside`]: stops one thread of another process, runs system calls in it, and resumes it.
//!
//! Some operations only a process itself can do, such as creating a userfaultfd for its own address
//! space. So remote system calls are run in one of its threads, for some tens of microseconds:
//!
//! ```text
//!   PTRACE_SEIZE ─► INTERRUPT ─► stopped ─► registers of a call ─► SINGLESTEP ─► stopped after it ─┐
//!                                   │      ▲                                                       │
//!                                   │      └──────────────── next call ────────────────────────────┤
//!                                   ▼                                                              │
//!                    own registers and signal mask again ◄─────────────────────────────────────────┘
//!                                   │
//!                                   └─► DETACH: the kernel restarts the interrupted call itself
//! ```
//!
//! - The thread should be **blocked in a system call**. If none is, a running thread is taken,
//!   unless it is in a restartable sequence (see [`borrow`]). The other threads run on.
//! - An interrupted call leaves `ERESTART…` in `rax` (on x86-64; for AArch64 see `registers/aarch64.rs`). The kernel acts on it when the thread passes
//!   its signal code, and only there. Both stops, by INTERRUPT and by the SIGTRAP of a single step,
//!   are in that code (the one at the end of a traced call, `PTRACE_SYSCALL`, is not). So the kernel
//!   still decides what restarts with which time-out, and what becomes `EINTR` because a handler
//!   ran. (It never restarts `epoll_wait`: such threads are taken last.)
//! - Signals are masked meanwhile, so that no handler runs with the injected registers.
//! - Each stop waits for two schedulers; there is one stop per call and one more. So both threads
//!   are in the real-time class meanwhile (see [`boost`]). A caller for which a short pause matters
//!   more than the result limits the pause ([`PauseLimits`]): beyond the limit everything is undone,
//!   and retried a little later.
//! - seccomp filters would kill the process for a call they do not know.
//!   `PTRACE_O_SUSPEND_SECCOMP` suspends them; where that is not allowed, a process under a filter
//!   is refused.
//! - Calls run with the **target's** rights.
//! - Every wait is bounded. ptrace is tied to a thread, so all of it runs on a dedicated thread.
//!   When that thread ends, the kernel detaches every thread that it has seized and not detached,
//!   stopped or not. So no thread stays stopped by us, whatever fails.
//!
//! [`hold()`] only stops threads, several at a time, and lets them go on.
#![expect(unsafe_code, reason = "ptrace and waitpid have no safe wrapper")]

mod stopped;

pub use stopped::StoppedThread;

mod boost;
mod borrow;
mod error;
mod hold;
mod raw;
mod registers;
mod run;
mod threads;

pub use error::PtraceError;
pub use hold::{Held, HoldLimits, hold};
pub use run::{Pace, PauseLimits, Ran, run_inside, run_inside_within};

#[cfg(test)]
mod tests;
