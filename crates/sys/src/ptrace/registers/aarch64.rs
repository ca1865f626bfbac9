// SPDX-License-Identifier: Apache-2.0
//! Registers of AArch64, where the kernel prepares the restart of an interrupted call *before* the stop.
//!
//! Before a tracer sees the stop, the kernel has put the program counter back to the `svc` instruction and `x0` back
//! to the first argument, and has forgotten that the thread was in a call (`do_signal` in the kernel's
//! `arch/arm64/kernel/signal.c`). A tracer that changes the program counter takes the rest of the decision upon
//! itself: the thread, put back, executes `svc` again. That differs from x86-64 in two ways, both for the length of
//! a stop only:
//!
//! - A relative time-out begins anew (`nanosleep`, `poll`, `futex`), since `restart_syscall` is not used. A thread
//!   may sleep longer than it wanted by what it had slept before.
//! - A signal with a handler that arrives within the stop runs its handler, and then the call is restarted, also
//!   one that would have returned `EINTR` (`ppoll`, `pause`, `epoll_pwait`).
//!
//! The `svc` that is used lies in the vDSO, whose calls do not block: so no thread is interrupted at that very
//! instruction, which the kernel would take for its own restart.
//!
//! A single step over `svc` ends in the kernel's signal code, as on x86-64 (`syscall_trace_exit` reports a step
//! with an ordinary `SIGTRAP`). That a thread is in a call cannot be seen, so every thread is held to the rule of
//! one in user code (`borrow.rs`).

use super::super::error::{PtraceError, kernel};
use super::Call;
use std::io;

/// The instruction `svc #0`.
pub(super) const SYSCALL_INSTRUCTION: &[u8] = &[0x01, 0x00, 0x00, 0xd4];
/// Every instruction takes four bytes.
pub(super) const INSTRUCTION_ALIGN: usize = 4;

/// Calls in which a thread waits for descriptors, and is restarted.
pub(in super::super) const POLLS: &[i64] = &[libc::SYS_ppoll];
/// Calls that return `EINTR` instead of being restarted.
pub(in super::super) const EPOLLS: &[i64] = &[libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2];
/// Calls that may wait for a child, and do not stop before it has continued.
pub(in super::super) const CLONES: &[i64] = &[libc::SYS_clone, libc::SYS_clone3];

/// The register set of general registers.
const NT_PRSTATUS: libc::c_int = 1;
/// In `pstate`: 32-bit code runs.
const MODE_32_BIT: u64 = 1 << 4;
/// In `pstate`: how a branch came here. A page with branch protection would refuse an instruction that is no
/// landing place for it.
const BRANCH_TYPE: u64 = 0b11 << 10;

/// The registers of a stopped thread.
#[derive(Clone, Copy)]
pub(in super::super) struct Registers(libc::user_regs_struct);

impl Registers {
    /// Those of `thread` now.
    pub(in super::super) fn of(thread: u32) -> Result<Self, PtraceError> {
        let mut registers = std::mem::MaybeUninit::<libc::user_regs_struct>::zeroed();
        let mut place = libc::iovec {
            iov_base: registers.as_mut_ptr().cast(),
            iov_len: size_of::<libc::user_regs_struct>(),
        };
        // SAFETY: GETREGSET writes at most `iov_len` bytes to `iov_base`, a live local of that size, and the
        // number of them to the iovec, a live local.
        let answer = unsafe {
            libc::ptrace(
                libc::PTRACE_GETREGSET,
                thread.cast_signed(),
                NT_PRSTATUS,
                &raw mut place,
            )
        };
        if answer < 0 {
            return Err(kernel(
                "PTRACE_GETREGSET",
                thread,
                io::Error::last_os_error(),
            ));
        }
        // SAFETY: zeroed to begin with, and the structure holds integers only.
        let mut registers = unsafe { registers.assume_init() };
        if place.iov_len != size_of::<libc::user_regs_struct>() {
            // The smaller set of a 32-bit process, whose state lies elsewhere in it.
            registers.pstate = MODE_32_BIT;
        }
        Ok(Self(registers))
    }

    /// Gives them to `thread`.
    pub(in super::super) fn put(&self, thread: u32) -> Result<(), PtraceError> {
        let place = libc::iovec {
            iov_base: std::ptr::from_ref(&self.0).cast_mut().cast(),
            iov_len: size_of::<libc::user_regs_struct>(),
        };
        // SAFETY: SETREGSET reads `iov_len` bytes from `iov_base`, a live reference to as many.
        let answer = unsafe {
            libc::ptrace(
                libc::PTRACE_SETREGSET,
                thread.cast_signed(),
                NT_PRSTATUS,
                &raw const place,
            )
        };
        if answer < 0 {
            return Err(kernel(
                "PTRACE_SETREGSET",
                thread,
                io::Error::last_os_error(),
            ));
        }
        Ok(())
    }

    /// True if the thread runs 64-bit code.
    pub(in super::super) fn is_native(&self) -> bool {
        self.0.pstate & MODE_32_BIT == 0
    }

    /// True if the thread is certainly in a system call: never known.
    #[expect(clippy::unused_self, reason = "other registers tell it")]
    pub(in super::super) fn is_in_call(&self) -> bool {
        false
    }

    /// The stack pointer.
    pub(in super::super) fn stack(&self) -> u64 {
        self.0.sp
    }

    /// The same, about to run `call`.
    pub(in super::super) fn about_to(&self, call: &Call) -> Self {
        let mut registers = self.0;
        registers.pc = call.instruction;
        registers.pstate &= !BRANCH_TYPE;
        registers.regs[8] = call.number.cast_unsigned();
        registers.regs[..call.arguments.len()].copy_from_slice(&call.arguments);
        Self(registers)
    }

    /// What a call has returned, just after it.
    pub(in super::super) fn answer(&self) -> i64 {
        self.0.regs[0].cast_signed()
    }
}
