// SPDX-License-Identifier: Apache-2.0
//! Registers of x86-64, where the kernel restarts an interrupted call *after* the stop.
//!
//! At the stop `rax` has `-ERESTART…` and `orig_rax` the call's number. When the thread leaves its signal code for
//! the last time, the kernel decides by both. So whoever puts them back leaves that decision to the kernel, and an
//! injected call must not look like an interrupted one: it begins with -1 in `orig_rax`.

use super::super::error::{PtraceError, kernel};
use super::Call;
use std::io;

/// The instruction `syscall`.
pub(super) const SYSCALL_INSTRUCTION: &[u8] = &[0x0f, 0x05];
/// Instructions begin anywhere.
pub(super) const INSTRUCTION_ALIGN: usize = 1;

/// Calls in which a thread waits for descriptors, and is restarted.
pub(in super::super) const POLLS: &[i64] = &[libc::SYS_ppoll, libc::SYS_poll];
/// Calls that return `EINTR` instead of being restarted.
pub(in super::super) const EPOLLS: &[i64] = &[
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
];
/// Calls that may wait for a child, and do not stop before it has continued.
pub(in super::super) const CLONES: &[i64] = &[libc::SYS_vfork, libc::SYS_clone, libc::SYS_clone3];

/// Code segment of 64-bit user code.
const USER_CS_64: u64 = 0x33;

/// The registers of a stopped thread.
#[derive(Clone, Copy)]
pub(in super::super) struct Registers(libc::user_regs_struct);

impl Registers {
    /// Those of `thread` now.
    pub(in super::super) fn of(thread: u32) -> Result<Self, PtraceError> {
        let mut registers = std::mem::MaybeUninit::<libc::user_regs_struct>::zeroed();
        // SAFETY: GETREGS writes one user_regs_struct to the given address, a live local of that type.
        let answer = unsafe {
            libc::ptrace(
                libc::PTRACE_GETREGS,
                thread.cast_signed(),
                0,
                registers.as_mut_ptr(),
            )
        };
        if answer < 0 {
            return Err(kernel("PTRACE_GETREGS", thread, io::Error::last_os_error()));
        }
        // SAFETY: zeroed to begin with, and the structure holds integers only.
        Ok(Self(unsafe { registers.assume_init() }))
    }

    /// Gives them to `thread`.
    pub(in super::super) fn put(&self, thread: u32) -> Result<(), PtraceError> {
        // SAFETY: SETREGS reads one user_regs_struct from the given address, a live reference.
        let answer = unsafe {
            libc::ptrace(
                libc::PTRACE_SETREGS,
                thread.cast_signed(),
                0,
                std::ptr::from_ref(&self.0),
            )
        };
        if answer < 0 {
            return Err(kernel("PTRACE_SETREGS", thread, io::Error::last_os_error()));
        }
        Ok(())
    }

    /// True if the thread runs 64-bit code.
    pub(in super::super) fn is_native(&self) -> bool {
        self.0.cs == USER_CS_64
    }

    /// True if the thread is certainly in a system call.
    pub(in super::super) fn is_in_call(&self) -> bool {
        self.0.orig_rax.cast_signed() >= 0
    }

    /// The stack pointer.
    pub(in super::super) fn stack(&self) -> u64 {
        self.0.rsp
    }

    /// The same, about to run `call`.
    pub(in super::super) fn about_to(&self, call: &Call) -> Self {
        let [rdi, rsi, rdx, r10, r8, r9] = call.arguments;
        Self(libc::user_regs_struct {
            rip: call.instruction,
            rax: call.number.cast_unsigned(),
            // -1: "not in a system call", so the kernel does not try to restart the old one now.
            orig_rax: u64::MAX,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            ..self.0
        })
    }

    /// What a call has returned, just after it.
    pub(in super::super) fn answer(&self) -> i64 {
        self.0.rax.cast_signed()
    }
}
