// SPDX-License-Identifier: Apache-2.0
//! Eventfds: how driver and device ring at each other.

use rustix::event::{EventfdFlags, eventfd};
use std::{io, os::fd::OwnedFd};

/// A new eventfd, not rung.
pub fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Adds one to `event`. A full counter counts as rung.
pub fn ring_event(event: &OwnedFd) {
    match rustix::io::write(event, &1_u64.to_ne_bytes()) {
        Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
        Err(error) => tracing::error!(%error, "an eventfd cannot be rung"),
    }
}
