// SPDX-License-Identifier: Apache-2.0
//! An interrupt line and the thread behind it.
//!
//! Linux handles page request interrupts in a *threaded* handler: the hardware
//! interrupt only wakes a kernel thread, one for each IOMMU. Here the line is an
//! eventfd, so the wake-up stands for the hardware interrupt.

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    fd::OwnedFd,
    io::Errno,
};
use std::io;

/// See the module.
#[derive(Debug)]
pub(super) struct Interrupt(OwnedFd);

impl Interrupt {
    /// A line that is not raised.
    ///
    /// # Errors
    /// When the process has no file descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?))
    }

    /// Raises it.
    pub fn raise(&self) {
        // The counter cannot overflow and the descriptor is ours: a failure is our own bug.
        let written = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
        debug_assert_eq!(written, Ok(8));
    }

    /// How often it was raised since the last call.
    pub fn take(&self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&self.0, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            // EAGAIN: not at all.
            Err(_) => 0,
        }
    }

    /// Sleeps until it is raised, and resets it.
    ///
    /// # Errors
    /// Errors of `poll`.
    pub fn wait(&self) -> io::Result<u64> {
        loop {
            let count = self.take();
            if count > 0 {
                return Ok(count);
            }
            match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
