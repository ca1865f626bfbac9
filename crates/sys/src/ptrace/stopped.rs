// SPDX-License-Identifier: Apache-2.0
//! [`StoppedThread`]: a thread of another process, stopped, and the calls that are made in it.

use super::boost::Boost;
use super::borrow::Borrowed;
use super::error::{PtraceError, kernel, open_failed};
use super::raw::{
    Stop, Waited, descriptor, detach, mask_signals, resume, set_signal_mask, wait_for,
};
use super::registers::{Call, Registers};
use super::threads::find_syscall_instruction;
use crate::process::ProcessFd;
use crate::uffd::new_request;
use pagetide_addr::Hva;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Time limit of an injected call. No call that we inject blocks. Giving up would leave the target
/// with foreign registers, so the limit is generous.
pub(super) const CALL_WAIT: Duration = Duration::from_secs(10);

/// Bytes below the stack pointer that a leaf function may use: as many as on any kind of processor.
pub(super) const RED_ZONE_BYTES: u64 = 128;

pub(super) const SCRATCH_BYTES: u64 = 1024;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    /// In the kernel's signal code, where a restart is still undecided.
    Stopped,
    /// Running, or gone.
    Away,
}

/// A thread of another process, stopped; see [`run_inside`](super::run_inside).
pub struct StoppedThread<'p> {
    pub(super) process: &'p ProcessFd,
    pub(super) thread: u32,
    pub(super) memory: File,
    pub(super) syscall_address: u64,
    pub(super) registers: Registers,
    pub(super) signal_mask: u64,
    pub(super) since: Instant,
    /// The longest allowed pause, if it is limited.
    pub(super) pause_max: Option<Duration>,
    /// A call was refused because the pause had lasted too long.
    pub(super) was_late: bool,
    /// A call failed after that: something may not have been undone.
    pub(super) has_failed_late: bool,
    pub(super) at: At,
    /// Held until the thread has been detached.
    pub(super) boost: Option<Boost>,
    /// ptrace only works from one thread.
    pub(super) not_send: PhantomData<*const ()>,
}

/// Facts about a process that must be known before a thread of it is stopped.
pub(super) struct Target {
    pub(super) memory: File,
    pub(super) syscall_address: u64,
}

impl Target {
    pub(super) fn of(process: &ProcessFd) -> Result<Self, PtraceError> {
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
    pub(super) fn of(
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

    /// Whether the limit of the pause allows another call.
    ///
    /// # Errors
    /// [`PtraceError::PauseTooLong`]: the caller must undo its work and return this error.
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

    /// Like [`Self::syscall_at_any_time`], but within the limit of the pause.
    pub(super) fn syscall(
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
    pub(super) fn syscall_at_any_time(
        &mut self,
        call: &'static str,
        number: i64,
        arguments: &[u64],
    ) -> Result<u64, PtraceError> {
        let answer = self.run_call(call, number, arguments);
        self.has_failed_late |= self.was_late && answer.is_err();
        answer
    }

    pub(super) fn run_call(
        &mut self,
        call: &'static str,
        number: i64,
        arguments: &[u64],
    ) -> Result<u64, PtraceError> {
        assert!(
            arguments.len() <= 6,
            "a system call has at most six arguments"
        );
        let injected = Call {
            instruction: self.syscall_address,
            number,
            arguments: std::array::from_fn(|nth| arguments.get(nth).copied().unwrap_or(0)),
        };
        self.registers.about_to(&injected).put(self.thread)?;
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
        let answer = Registers::of(self.thread)?.answer();
        match i32::try_from(-answer) {
            Ok(error @ 1..4096) => Err(PtraceError::Call {
                call,
                source: Errno::from_raw_os_error(error),
            }),
            _ => Ok(answer.cast_unsigned()),
        }
    }

    /// Like `syscall`, for calls that return a descriptor number.
    ///
    /// # Errors
    /// As for `syscall`.
    pub(super) fn syscall_for_descriptor(
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

    /// Creates a userfaultfd for the process's own address space, including kernel-mode faults.
    /// Returns its number there.
    ///
    /// # Errors
    /// [`PtraceError`]; `EPERM` if the process lacks the privilege.
    pub fn make_userfaultfd(&mut self) -> Result<i32, PtraceError> {
        let (_, flags) = new_request();
        self.syscall_for_descriptor("userfaultfd", libc::SYS_userfaultfd, &[flags])
    }

    /// The same through `/dev/userfaultfd`, which the process has open as descriptor `device` and
    /// which requires no privilege.
    ///
    /// # Errors
    /// [`PtraceError`].
    pub fn make_userfaultfd_by(&mut self, device: i32) -> Result<i32, PtraceError> {
        let (request, flags) = new_request();
        let arguments = [descriptor(device), request, flags];
        self.syscall_for_descriptor("ioctl(USERFAULTFD_IOC_NEW)", libc::SYS_ioctl, &arguments)
    }

    /// Closes descriptor `number` of the process, even after the limit of the pause.
    ///
    /// # Errors
    /// [`PtraceError`].
    pub fn close(&mut self, number: i32) -> Result<(), PtraceError> {
        self.syscall_at_any_time("close", libc::SYS_close, &[descriptor(number)])?;
        Ok(())
    }

    /// Removes the pages of part of a **shared** mapping from the process's page table. They stay
    /// in their file, and the next access maps them again. On a private mapping this would lose
    /// content: the caller must make sure that it is shared.
    ///
    /// # Errors
    /// [`PtraceError`].
    pub fn drop_translations(&mut self, start: Hva, len_bytes: u64) -> Result<(), PtraceError> {
        let arguments = [start.0, len_bytes, descriptor(libc::MADV_DONTNEED)];
        self.syscall("madvise", libc::SYS_madvise, &arguments)?;
        Ok(())
    }

    /// Duplicates `fd` into the process and returns its number there.
    ///
    /// # Errors
    /// [`PtraceError`]; no descriptor is left open then.
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

    pub(super) fn receive_descriptor(&mut self, receiver: i32) -> Result<i32, PtraceError> {
        const HEADER_BYTES: u64 = 56;
        const CONTROL_BYTES: u64 = 24;
        let header = self.scratch();
        let vector = header + HEADER_BYTES;
        let control = vector + 16;
        let byte = control + CONTROL_BYTES;
        // struct msghdr: name, its length, iovec, their number, control, its length, flags; then
        // the one struct iovec.
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
            // A security module may deliver the message without its descriptor.
            return Err(self.call("recvmsg (descriptor refused)", Errno::ACCESS));
        }
        Ok(i32::from_ne_bytes([n0, n1, n2, n3]))
    }

    /// Unused memory of the stopped thread's stack: 1 KiB.
    pub(super) fn scratch(&self) -> u64 {
        (self.registers.stack() - RED_ZONE_BYTES - SCRATCH_BYTES) & !63
    }

    pub(super) fn read_memory(&self, address: u64, into: &mut [u8]) -> Result<(), PtraceError> {
        self.memory
            .read_exact_at(into, address)
            .map_err(|e| kernel("reading its memory", self.thread, e))
    }

    pub(super) fn write_memory(&self, address: u64, from: &[u8]) -> Result<(), PtraceError> {
        self.memory
            .write_all_at(from, address)
            .map_err(|e| kernel("writing its memory", self.thread, e))
    }

    #[expect(clippy::unused_self, reason = "reads better where it is used")]
    pub(super) fn call(&self, call: &'static str, source: Errno) -> PtraceError {
        PtraceError::Call { call, source }
    }

    /// Restores the thread and resumes it. Returns the length of its pause.
    pub(super) fn finish(mut self) -> Result<Duration, PtraceError> {
        self.put_back()?;
        Ok(self.since.elapsed())
    }

    pub(super) fn put_back(&mut self) -> Result<(), PtraceError> {
        if std::mem::replace(&mut self.at, At::Away) == At::Away {
            return Ok(());
        }
        self.registers.put(self.thread)?;
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

pub(super) fn whole_us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

pub(super) fn send_descriptor(
    socket: &std::os::fd::OwnedFd,
    fd: BorrowedFd<'_>,
) -> Result<(), Errno> {
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
