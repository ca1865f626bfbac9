// SPDX-License-Identifier: Apache-2.0
//! For tests: whether an emulator makes our system calls for us (qemu-user).
//!
//! It has no ptrace, nor some other calls, no room for a mapping of a terabyte, and its descriptors and signals are
//! not quite a kernel's. Tests of just these things skip themselves there.
#![expect(unsafe_code, reason = "ptrace has no safe wrapper")]

/// True under an emulator, after saying that the test is skipped.
pub(crate) fn skip() -> bool {
    // SAFETY: asks for a stop of process 1, which is not traced by us: nothing happens to it, and no memory is
    // touched.
    let answer = unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, 1, 0, 0) };
    let error = std::io::Error::last_os_error().raw_os_error();
    let is_emulated = answer < 0 && error == Some(libc::ENOSYS);
    if is_emulated {
        eprintln!("SKIPPED: system calls are emulated here, without ptrace");
    }
    is_emulated
}
