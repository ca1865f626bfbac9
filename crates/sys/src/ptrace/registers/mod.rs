// SPDX-License-Identifier: Apache-2.0
//! All of a remote system call that depends on the kind of processor: one file each, with the same items.
//!
//! [`Registers`] reads and writes those of a stopped thread and prepares a [`Call`]; the constants name system
//! calls that not every kind has. Another processor is another file here, and its `syscall` instruction.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
use aarch64 as native;
#[cfg(target_arch = "x86_64")]
use x86_64 as native;

pub(super) use native::{CLONES, EPOLLS, POLLS, Registers};

#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
compile_error!("taking a process over knows the registers of x86-64 and AArch64 only");

/// A system call that a thread is to run.
pub(super) struct Call {
    /// Address of a system call instruction in the thread's process.
    pub(super) instruction: u64,
    pub(super) number: i64,
    pub(super) arguments: [u64; 6],
}

/// Where in `code`, which begins at a multiple of any instruction's size, a system call instruction is.
pub(super) fn syscall_instruction(code: &[u8]) -> Option<usize> {
    let wanted = native::SYSCALL_INSTRUCTION;
    (0..code.len())
        .step_by(native::INSTRUCTION_ALIGN)
        .find(|at| code[*at..].starts_with(wanted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_is_found_where_one_can_begin_and_nowhere_else() {
        let mut code = vec![0xff; 64];
        assert_eq!(syscall_instruction(&code), None);
        let wanted = native::SYSCALL_INSTRUCTION;
        let align = native::INSTRUCTION_ALIGN;
        if align > 1 {
            code[align + 1..][..wanted.len()].copy_from_slice(wanted);
            assert_eq!(syscall_instruction(&code), None, "between two");
        }
        code[8 * align..][..wanted.len()].copy_from_slice(wanted);
        assert_eq!(syscall_instruction(&code), Some(8 * align));
        assert_eq!(syscall_instruction(&code[..8 * align + 1]), None, "cut");
    }
}
