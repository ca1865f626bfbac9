// SPDX-License-Identifier: Apache-2.0
//! Threads in restartable sequences, written in assembler of x86-64.

use super::{Child, may_trace, shared_words};
use crate::ptrace::{PtraceError, error::kernel, raw, run_inside};
use std::sync::atomic::{AtomicI32, Ordering};

/// This thread's rseq area, if glibc has registered one; a child of `fork` keeps it.
fn own_rseq_area() -> Option<u64> {
    // SAFETY: looks a name up; the name is a C string.
    let offset = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr()) };
    if offset.is_null() {
        return None;
    }
    // SAFETY: that name is of a constant of a pointer's size.
    let offset = unsafe { *offset.cast::<i64>() };
    let base: u64;
    // SAFETY: the first word of a thread's own area is the address of that area.
    unsafe {
        std::arch::asm!("mov {}, qword ptr fs:0", out(reg) base, options(nostack, readonly));
    }
    Some(base.wrapping_add_signed(offset))
}

/// Counts in a restartable sequence for half of the time. The kernel sends it to the abort code
/// whenever it loses its CPU there.
fn half_in_sequence(area: u64, stop: &AtomicI32) -> i32 {
    while stop.load(Ordering::Relaxed) == 0 {
        // SAFETY: writes a descriptor's address into this thread's own rseq area, counts in a
        // register, and clears it again. The abort code follows the signature that glibc has
        // registered (0x53053053). No stack is used.
        unsafe {
            std::arch::asm!(
                ".pushsection .data.rel.ro, \"aw\", @progbits",
                ".balign 32",
                "66:",
                ".long 0, 0",
                ".quad 22f, 33f - 22f, 44f",
                ".popsection",
                "lea {scratch}, [rip + 66b]",
                "mov {count}, 100000",
                "mov qword ptr [{area} + 8], {scratch}",
                "22:",
                "dec {count}",
                "jnz 22b",
                "33:",
                "mov qword ptr [{area} + 8], 0",
                "jmp 77f",
                ".byte 0x0f, 0xb9, 0x3d",
                ".long 0x53053053",
                "44:",
                "77:",
                "mov {count}, 100000",
                "88:",
                "dec {count}",
                "jnz 88b",
                scratch = out(reg) _,
                count = out(reg) _,
                area = in(reg) area,
                options(nostack),
            );
        }
    }
    0
}

#[test]
fn a_thread_in_a_restartable_sequence_is_not_borrowed_before_it_is_out() {
    const STOPS: u32 = 40;
    if !may_trace() {
        return;
    }
    let Some(area) = own_rseq_area() else {
        eprintln!("SKIPPED: this C library has no rseq area");
        return;
    };
    let stop = &shared_words()[0];
    let child = Child::new(|| half_in_sequence(area, stop));
    for _ in 0..STOPS {
        let named = run_inside(&child.process(), |thread| {
            let area = raw::rseq_area(thread.thread)
                .map_err(|e| kernel("PTRACE_GET_RSEQ_CONFIGURATION", thread.thread, e))?;
            let mut named = [0; 8];
            if let Some(area) = area {
                thread.read_memory(area + 8, &mut named)?;
            }
            thread.syscall("getppid", libc::SYS_getppid, &[])?;
            Ok::<_, PtraceError>((area, u64::from_ne_bytes(named)))
        });
        let (known, named) = named.unwrap().value;
        if known != Some(area) {
            eprintln!("SKIPPED: no rseq area is registered here");
            break;
        }
        assert_eq!(named, 0, "borrowed within a sequence");
    }
    stop.store(1, Ordering::Relaxed);
    assert_eq!(child.exit_status(), 0);
}
