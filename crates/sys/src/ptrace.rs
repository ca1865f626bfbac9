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
//! - The thread was best **blocked in a system call**; where none is, one that runs is taken,
//!   unless it is in a restartable sequence (see [`borrow`]). The other threads run on.
//! - An interrupted call leaves `ERESTART…` in `rax`. The kernel acts on it when
//!   the thread passes its signal code, and only there. Both stops, by INTERRUPT
//!   and by the SIGTRAP of a single step, lie in that code (the one at the end of
//!   a traced call, `PTRACE_SYSCALL`, does not): so what restarts with which
//!   time-out, and what becomes `EINTR` because a handler ran, stays the kernel's
//!   decision. (`epoll_wait` is never restarted by it: such threads are taken
//!   last.)
//! - Signals are masked meanwhile, so that no handler runs on borrowed registers.
//! - Each stop is a wait for two schedulers; there is one a call and one more. So
//!   both threads are of the real-time class meanwhile (see [`boost`]), and whoever needs a short
//!   pause more than a result says how long it may be ([`PauseLimits`]): beyond it
//!   what was done is undone, and tried again a little later.
//! - seccomp filters would kill the process for a call they do not know;
//!   `PTRACE_O_SUSPEND_SECCOMP` puts them to sleep, and where that is not
//!   allowed a process under a filter is refused.
//! - Calls run with the **target's** rights.
//! - Every wait is bounded. ptrace belongs to a thread, so all of it happens on
//!   one made for the purpose, and when that thread ends the kernel lets go of all that it
//!   has seized and not detached, stopped or not. So no thread stays stopped by us, whatever fails.
#![expect(unsafe_code, reason = "ptrace and waitpid have no safe wrapper")]

mod boost;
mod borrow;
mod error;
mod raw;
mod run;
mod threads;

pub use error::PtraceError;
pub use run::{Pace, PauseLimits, Ran, run_inside, run_inside_within};

use crate::process::ProcessFd;
use crate::uffd::new_request;
use boost::Boost;
use borrow::Borrowed;
use pagetide_addr::Hva;
use raw::{
    Stop, Waited, detach, get_registers, mask_signals, resume, set_registers, set_signal_mask,
    wait_for,
};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use threads::find_syscall_instruction;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("taking a process over knows the registers of x86-64 only");

/// How long an injected call may take. None that we inject blocks; giving up would leave the
/// target with foreign registers, so this is generous.
const CALL_WAIT: Duration = Duration::from_secs(10);

/// Code segment of 64-bit user code.
const USER_CS_64: u64 = 0x33;
/// Bytes below the stack pointer that a leaf function may use.
const RED_ZONE_BYTES: u64 = 128;
const SCRATCH_BYTES: u64 = 1024;

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
    /// How long it may be away, if there is a bound.
    pause_max: Option<Duration>,
    /// A call was not made because it has been away for too long.
    was_late: bool,
    /// A call failed after that: something may not be undone.
    has_failed_late: bool,
    at: At,
    /// Held until it has been let go.
    boost: Option<Boost>,
    /// ptrace works from one thread only.
    not_send: PhantomData<*const ()>,
}

/// What must be known of a process before a thread of it is stopped.
struct Target {
    memory: File,
    syscall_address: u64,
}

impl Target {
    fn of(process: &ProcessFd) -> Result<Self, PtraceError> {
        let pid = process.pid();
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .map_err(|source| open_failed(pid, source))?;
        let syscall_address = find_syscall_instruction(pid, &memory)?;
        Ok(Self {
            memory,
            syscall_address,
        })
    }
}

impl<'p> StoppedThread<'p> {
    fn of(
        process: &'p ProcessFd,
        target: Target,
        borrowed: Borrowed,
        pause_max: Option<Duration>,
    ) -> Result<Self, PtraceError> {
        let Target {
            memory,
            syscall_address,
        } = target;
        let Borrowed {
            thread,
            since,
            registers,
            boost,
        } = borrowed;
        Ok(Self {
            process,
            thread,
            memory,
            syscall_address,
            registers,
            signal_mask: mask_signals(thread)?,
            since,
            pause_max,
            was_late: false,
            has_failed_late: false,
            at: At::Stopped,
            boost,
            not_send: PhantomData,
        })
    }

    /// Whether another call may be made within the bound on the pause.
    ///
    /// # Errors
    /// [`PtraceError::PauseTooLong`]: the caller undoes what it has done, and returns that.
    pub fn still_in_time(&mut self) -> Result<(), PtraceError> {
        let away = self.since.elapsed();
        match self.pause_max {
            Some(pause_max) if away > pause_max => {
                self.was_late = true;
                Err(PtraceError::PauseTooLong {
                    pid: self.process.pid(),
                    pause_us: whole_us(away),
                    pause_max_us: whole_us(pause_max),
                })
            }
            _ => Ok(()),
        }
    }

    /// As [`Self::syscall_at_any_time`], within the bound on the pause.
    fn syscall(
        &mut self,
        call: &'static str,
        number: i64,
        arguments: &[u64],
    ) -> Result<u64, PtraceError> {
        self.still_in_time()?;
        self.syscall_at_any_time(call, number, arguments)
    }

    /// Runs system call `number` in the thread, with the target's rights. It must not block.
    ///
    /// # Errors
    /// [`PtraceError::Call`] with the call's own error, or [`PtraceError`] if it could not be run.
    fn syscall_at_any_time(
        &mut self,
        call: &'static str,
        number: i64,
        arguments: &[u64],
    ) -> Result<u64, PtraceError> {
        let answer = self.run_call(call, number, arguments);
        self.has_failed_late |= self.was_late && answer.is_err();
        answer
    }

    fn run_call(
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

    /// Closes descriptor `number` of the process, also after the bound on the pause.
    ///
    /// # Errors
    /// [`PtraceError`].
    pub fn close(&mut self, number: i32) -> Result<(), PtraceError> {
        self.syscall_at_any_time("close", libc::SYS_close, &[descriptor(number)])?;
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
            self.syscall_at_any_time("close_range", libc::SYS_close_range, &pair)?;
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
    fn finish(mut self) -> Result<Duration, PtraceError> {
        self.put_back()?;
        Ok(self.since.elapsed())
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

fn whole_us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
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
