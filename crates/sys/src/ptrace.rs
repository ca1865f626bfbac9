// SPDX-License-Identifier: Apache-2.0
//! [`run_inside`]: stop one thread of another process, run system calls in it, let it go on.
//!
//! Some things only a process can do to itself, such as making a userfaultfd
//! for its own address space. So one of its threads is borrowed for some tens
//! of microseconds:
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
//! - The thread must have been **blocked in a system call**: then it is in no
//!   restartable sequence and holds no half-done state in registers we do not
//!   save. The other threads run on.
//! - An interrupted call leaves `ERESTART…` in `rax`. The kernel acts on it when
//!   the thread passes its signal code, and only there. Both stops, by INTERRUPT
//!   and by the SIGTRAP of a single step, lie in that code (the one at the end of
//!   a traced call, `PTRACE_SYSCALL`, does not): so what restarts with which
//!   time-out, and what becomes `EINTR` because a handler ran, stays the kernel's
//!   decision. (`epoll_wait` is never restarted by it: such threads are taken
//!   last.)
//! - Signals are masked meanwhile, so that no handler runs on borrowed registers.
//! - Each stop is a wait for two schedulers; there is one a call and one more.
//! - seccomp filters would kill the process for a call they do not know;
//!   `PTRACE_O_SUSPEND_SECCOMP` puts them to sleep, and where that is not
//!   allowed a process under a filter is refused.
//! - Calls run with the **target's** rights.
//! - Every wait is bounded. ptrace belongs to a thread, so all of it happens on
//!   one made for the purpose; if that thread ends with the target still
//!   seized, the kernel detaches it.
#![expect(unsafe_code, reason = "ptrace and waitpid have no safe wrapper")]

mod raw;
mod threads;

use crate::process::{ProcessError, ProcessFd};
use crate::uffd::new_request;
use pagetide_addr::Hva;
use raw::{
    Seized, Stop, Waited, detach, get_registers, mask_signals, resume, seize, set_registers,
    set_signal_mask, wait_for,
};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use threads::{blocked_threads, find_syscall_instruction};

#[cfg(not(target_arch = "x86_64"))]
compile_error!("taking a process over knows the registers of x86-64 only");

/// How long an injected call may take. None that we inject blocks; giving up would leave the
/// target with foreign registers, so this is generous.
const CALL_WAIT: Duration = Duration::from_secs(10);
/// Threads that may fail to stop before we give up: their sum bounds the whole attempt.
const MOST_DEAF: usize = 4;
/// How often all threads are looked at for one that is blocked in a system call.
const ROUNDS: u32 = 100;
/// Between two rounds.
const SLEEP_BETWEEN_LOOKS: Duration = Duration::from_micros(50);

/// Code segment of 64-bit user code.
const USER_CS_64: u64 = 0x33;
/// Bytes below the stack pointer that a leaf function may use.
const RED_ZONE_BYTES: u64 = 128;
const SCRATCH_BYTES: u64 = 1024;

/// Why nothing could be run inside a process.
#[derive(Debug, thiserror::Error)]
pub enum PtraceError {
    /// The process is gone.
    #[error("process {pid} ended while it was being taken over")]
    Gone {
        /// Its pid.
        pid: u32,
    },
    /// We may not trace it.
    #[error(
        "tracing process {pid} is not permitted: run as root (or with CAP_SYS_PTRACE), and make \
         sure that no debugger is attached to it and kernel.yama.ptrace_scope is below 3"
    )]
    NotPermitted {
        /// Its pid.
        pid: u32,
    },
    /// No thread could be borrowed.
    #[error(
        "no thread of process {pid} waits in a system call that can be interrupted ({tried} \
         stops tried): try again"
    )]
    NoQuietThread {
        /// Its pid.
        pid: u32,
        /// Threads that were stopped or asked to.
        tried: u32,
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
    /// The process is not one whose registers we know.
    #[error("process {pid} is not a 64-bit x86 process")]
    WrongArchitecture {
        /// Its pid.
        pid: u32,
    },
    /// An injected call did not come back.
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
        /// What was tried.
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
        /// What it said.
        source: Errno,
    },
    /// About its descriptors.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// What came of [`run_inside`].
#[derive(Clone, Copy, Debug)]
pub struct Ran<T> {
    /// What the work returned.
    pub value: T,
    /// How long the thread was away, in microseconds.
    pub pause_us: u64,
    /// The thread that was borrowed.
    pub thread: u32,
}

/// Stops a thread of `process` that is blocked in a system call, calls `work` with it, and lets
/// it go on as if nothing had happened, whatever `work` returns.
///
/// # Errors
/// What `work` returned, or [`PtraceError`] if no thread could be borrowed or given back.
pub fn run_inside<T, E, F>(process: &ProcessFd, work: F) -> Result<Ran<T>, E>
where
    T: Send,
    E: From<PtraceError> + Send,
    F: FnOnce(&mut StoppedThread<'_>) -> Result<T, E> + Send,
{
    std::thread::scope(|scope| {
        let tracer = std::thread::Builder::new()
            .name("pagetide-ptrace".to_owned())
            .spawn_scoped(scope, || {
                favour_this_thread();
                let mut stopped = StoppedThread::of(process)?;
                let outcome = work(&mut stopped);
                let thread = stopped.thread;
                let pause_us = stopped.finish()?;
                outcome.map(|value| Ran {
                    value,
                    pause_us,
                    thread,
                })
            })
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

/// On a busy host each stop waits for this thread to run, and it looks by short sleeps (yielding
/// would keep the target from a CPU that both are on). It is short-lived, so it may come first
/// and sleep exactly. Returns whether it does; without the right to that it is merely slower.
fn favour_this_thread() -> bool {
    const MOST_FAVOURED: i32 = -20;
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1)).is_ok()
        && rustix::process::nice(MOST_FAVOURED).is_ok()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    /// In the kernel's signal code, where a restart is still to be decided.
    Stopped,
    /// Running, or gone.
    Away,
}

/// A thread of another process, stopped; see [`run_inside`].
pub struct StoppedThread<'p> {
    process: &'p ProcessFd,
    thread: u32,
    memory: File,
    syscall_address: u64,
    registers: libc::user_regs_struct,
    signal_mask: u64,
    since: Instant,
    at: At,
    /// ptrace works from one thread only.
    not_send: PhantomData<*const ()>,
}

impl<'p> StoppedThread<'p> {
    fn of(process: &'p ProcessFd) -> Result<Self, PtraceError> {
        let pid = process.pid();
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .map_err(|source| open_failed(pid, source))?;
        let syscall_address = find_syscall_instruction(pid, &memory)?;
        let mut tried = 0;
        let mut deaf = Vec::new();
        for _ in 0..ROUNDS {
            for thread in blocked_threads(pid)? {
                if deaf.contains(&thread) {
                    continue;
                }
                tried += 1;
                match seize(pid, thread)? {
                    Seized::Stopped { since } => {
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
                        if registers.orig_rax.cast_signed() < 0 {
                            // It was in user code after all, perhaps in a restartable sequence.
                            detach(thread)?;
                            continue;
                        }
                        return Ok(Self {
                            process,
                            thread,
                            memory,
                            syscall_address,
                            registers,
                            signal_mask: mask_signals(thread)?,
                            since,
                            at: At::Stopped,
                            not_send: PhantomData,
                        });
                    }
                    // It stays seized until this (tracing) thread ends.
                    Seized::DoesNotStop if deaf.len() < MOST_DEAF => deaf.push(thread),
                    Seized::DoesNotStop => {
                        return Err(PtraceError::NoQuietThread { pid, tried });
                    }
                    Seized::GoneAway => {}
                }
            }
            std::thread::sleep(SLEEP_BETWEEN_LOOKS);
        }
        Err(PtraceError::NoQuietThread { pid, tried })
    }

    /// Runs system call `number` in the thread, with the target's rights. It must not block.
    ///
    /// # Errors
    /// [`PtraceError::Call`] with the call's own error, or [`PtraceError`] if it could not be run.
    fn syscall(
        &mut self,
        call: &'static str,
        number: i64,
        arguments: &[u64],
    ) -> Result<u64, PtraceError> {
        assert!(
            arguments.len() <= 6,
            "a system call has at most six arguments"
        );
        let argument = |i: usize| arguments.get(i).copied().unwrap_or(0);
        let mut registers = self.registers;
        registers.rip = self.syscall_address;
        registers.rax = number.cast_unsigned();
        // -1: "not in a system call", so the kernel does not try to restart the old one now.
        registers.orig_rax = u64::MAX;
        registers.rdi = argument(0);
        registers.rsi = argument(1);
        registers.rdx = argument(2);
        registers.r10 = argument(3);
        registers.r8 = argument(4);
        registers.r9 = argument(5);
        set_registers(self.thread, &registers)?;
        self.at = At::Away;
        resume(libc::PTRACE_SINGLESTEP, self.thread, 0)?;
        match wait_for(self.thread, Stop::Step, CALL_WAIT)? {
            Waited::Reached { .. } => self.at = At::Stopped,
            Waited::TimedOut => {
                return Err(PtraceError::Lost {
                    thread: self.thread,
                });
            }
            Waited::Gone => {
                return Err(PtraceError::Gone {
                    pid: self.process.pid(),
                });
            }
        }
        let answer = get_registers(self.thread)?.rax.cast_signed();
        match i32::try_from(-answer) {
            Ok(error @ 1..4096) => Err(PtraceError::Call {
                call,
                source: Errno::from_raw_os_error(error),
            }),
            _ => Ok(answer.cast_unsigned()),
        }
    }

    /// Like `syscall` for calls that return a descriptor's number.
    ///
    /// # Errors
    /// As there.
    fn syscall_for_descriptor(
        &mut self,
        call: &'static str,
        number: i64,
        arguments: &[u64],
    ) -> Result<i32, PtraceError> {
        let answer = self.syscall(call, number, arguments)?;
        i32::try_from(answer).map_err(|_| PtraceError::Call {
            call,
            source: Errno::BADF,
        })
    }

    /// Makes a userfaultfd for the process's own address space, kernel-mode faults included.
    /// Returns its number there.
    ///
    /// # Errors
    /// [`PtraceError`]; `EPERM` for a process that is not privileged enough.
    pub fn make_userfaultfd(&mut self) -> Result<i32, PtraceError> {
        let (_, flags) = new_request();
        self.syscall_for_descriptor("userfaultfd", libc::SYS_userfaultfd, &[flags])
    }

    /// The same by `/dev/userfaultfd`, which the process has open as descriptor `device` and
    /// which asks for no privilege.
    ///
    /// # Errors
    /// [`PtraceError`].
    pub fn make_userfaultfd_by(&mut self, device: i32) -> Result<i32, PtraceError> {
        let (request, flags) = new_request();
        let arguments = [descriptor(device), request, flags];
        self.syscall_for_descriptor("ioctl(USERFAULTFD_IOC_NEW)", libc::SYS_ioctl, &arguments)
    }

    /// Closes descriptor `number` of the process.
    ///
    /// # Errors
    /// [`PtraceError`].
    pub fn close(&mut self, number: i32) -> Result<(), PtraceError> {
        self.syscall("close", libc::SYS_close, &[descriptor(number)])?;
        Ok(())
    }

    /// Takes the pages of part of a **shared** mapping out of the process's page table; they stay
    /// in their file, and the next access finds them there. Of a private mapping this would lose
    /// content: the caller sees to it that it is none.
    ///
    /// # Errors
    /// [`PtraceError`].
    pub fn drop_translations(&mut self, start: Hva, len_bytes: u64) -> Result<(), PtraceError> {
        let arguments = [start.0, len_bytes, descriptor(libc::MADV_DONTNEED)];
        self.syscall("madvise", libc::SYS_madvise, &arguments)?;
        Ok(())
    }

    /// Gives the process a descriptor for what `fd` is, and returns its number there.
    ///
    /// # Errors
    /// [`PtraceError`]; nothing is left open then.
    pub fn give_descriptor(&mut self, fd: BorrowedFd<'_>) -> Result<i32, PtraceError> {
        let scratch = self.scratch();
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
        let arguments = [descriptor(libc::AF_UNIX), descriptor(kind), 0, scratch];
        self.syscall("socketpair", libc::SYS_socketpair, &arguments)?;
        let mut pair = [0_u8; 8];
        self.read_memory(scratch, &mut pair)?;
        let [a, b, c, d, e, f, g, h] = pair;
        let (sender, receiver) = (
            i32::from_ne_bytes([a, b, c, d]),
            i32::from_ne_bytes([e, f, g, h]),
        );
        let received = self
            .process
            .take_descriptor(sender)
            .map_err(PtraceError::from)
            .and_then(|ours| send_descriptor(&ours, fd).map_err(|e| self.call("sendmsg", e)))
            .and_then(|()| self.receive_descriptor(receiver));
        if receiver == sender + 1 {
            let pair = [descriptor(sender), descriptor(receiver), 0];
            self.syscall("close_range", libc::SYS_close_range, &pair)?;
        } else {
            self.close(sender)?;
            self.close(receiver)?;
        }
        received
    }

    fn receive_descriptor(&mut self, receiver: i32) -> Result<i32, PtraceError> {
        const HEADER_BYTES: u64 = 56;
        const CONTROL_BYTES: u64 = 24;
        let header = self.scratch();
        let vector = header + HEADER_BYTES;
        let control = vector + 16;
        let byte = control + CONTROL_BYTES;
        // struct msghdr: name, its length, iovec, their number, control, its length, flags;
        // then the one struct iovec.
        let words = [0, 0, vector, 1, control, CONTROL_BYTES, 0, byte, 1];
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        self.write_memory(header, &bytes)?;
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        let arguments = [descriptor(receiver), header, descriptor(flags)];
        self.syscall("recvmsg", libc::SYS_recvmsg, &arguments)?;
        // struct cmsghdr: length, level, type, then the descriptor.
        let mut answer = [0_u8; 20];
        self.read_memory(control, &mut answer)?;
        let [.., l0, l1, l2, l3, t0, t1, t2, t3, n0, n1, n2, n3] = answer;
        let kind = (
            i32::from_ne_bytes([l0, l1, l2, l3]),
            i32::from_ne_bytes([t0, t1, t2, t3]),
        );
        if kind != (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // A security module may let the message through without its descriptor.
            return Err(self.call("recvmsg (descriptor refused)", Errno::ACCESS));
        }
        Ok(i32::from_ne_bytes([n0, n1, n2, n3]))
    }

    /// Memory of the thread's stack that nobody uses while it is stopped: 1 KiB.
    fn scratch(&self) -> u64 {
        (self.registers.rsp - RED_ZONE_BYTES - SCRATCH_BYTES) & !63
    }

    fn read_memory(&self, address: u64, into: &mut [u8]) -> Result<(), PtraceError> {
        self.memory
            .read_exact_at(into, address)
            .map_err(|e| kernel("reading its memory", self.thread, e))
    }

    fn write_memory(&self, address: u64, from: &[u8]) -> Result<(), PtraceError> {
        self.memory
            .write_all_at(from, address)
            .map_err(|e| kernel("writing its memory", self.thread, e))
    }

    #[expect(clippy::unused_self, reason = "reads better where it is used")]
    fn call(&self, call: &'static str, source: Errno) -> PtraceError {
        PtraceError::Call { call, source }
    }

    /// Puts everything back and lets the thread go on. Returns how long it was away.
    fn finish(mut self) -> Result<u64, PtraceError> {
        self.put_back()?;
        Ok(u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    fn put_back(&mut self) -> Result<(), PtraceError> {
        if std::mem::replace(&mut self.at, At::Away) == At::Away {
            return Ok(());
        }
        set_registers(self.thread, &self.registers)?;
        set_signal_mask(self.thread, self.signal_mask)?;
        detach(self.thread)
    }
}

impl Drop for StoppedThread<'_> {
    /// After `finish` there is nothing left to do; this is for a `work` that panics.
    fn drop(&mut self) {
        if let Err(e) = self.put_back() {
            debug_assert!(matches!(e, PtraceError::Gone { .. }), "{e}");
        }
    }
}

fn send_descriptor(socket: &std::os::fd::OwnedFd, fd: BorrowedFd<'_>) -> Result<(), Errno> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::NOBUFS);
    }
    let data = [io::IoSlice::new(&[0])];
    rustix::net::sendmsg(socket, &data, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// A small signed argument as a register holds it.
const fn descriptor(number: i32) -> u64 {
    (number as i64).cast_unsigned()
}

fn open_failed(pid: u32, source: io::Error) -> PtraceError {
    match source.kind() {
        io::ErrorKind::NotFound => PtraceError::Gone { pid },
        io::ErrorKind::PermissionDenied => PtraceError::NotPermitted { pid },
        _ if source.raw_os_error() == Some(libc::ESRCH) => PtraceError::Gone { pid },
        _ => kernel("looking into /proc", pid, source),
    }
}

fn kernel(operation: &'static str, thread: u32, source: io::Error) -> PtraceError {
    match source.raw_os_error() {
        Some(libc::ESRCH) => PtraceError::Gone { pid: thread },
        _ => PtraceError::Kernel {
            operation,
            thread,
            source,
        },
    }
}

#[cfg(test)]
mod tests;
