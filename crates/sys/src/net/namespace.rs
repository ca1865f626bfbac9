// SPDX-License-Identifier: Apache-2.0
//! A network of a thread's own, for tests and benches: its interfaces are nobody else's, and end
//! with it.
#![expect(unsafe_code, reason = "unshare has no safe form")]

use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::io;

/// Gives this thread, and the processes and threads that it starts from now on, a new network
/// namespace, in which there is only a loopback interface that is down.
///
/// # Errors
/// The kernel's: root may do it.
pub fn enter_new() -> io::Result<()> {
    // SAFETY: only the network namespace of this thread changes; descriptors stay shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
    Ok(())
}
