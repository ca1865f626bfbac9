// SPDX-License-Identifier: Apache-2.0
//! Eventfds of a front end: checked before they are used.

use pagetide_sys::signal::{EventSignal, SignalError, is_eventfd};
use std::os::fd::{AsFd, BorrowedFd};
use vhost::vhost_user::{Error, Result};

/// The right to signal an eventfd of the front end.
///
/// # Errors
/// If it is not an eventfd, or cannot be duplicated.
pub fn signal_of(event: &impl AsFd) -> Result<EventSignal> {
    EventSignal::new(event.as_fd()).map_err(|error| refused(&error))
}

/// Refuses a descriptor that is not an eventfd: polling or writing other files may block.
pub(crate) fn check_event(event: BorrowedFd<'_>) -> Result<()> {
    match is_eventfd(event) {
        Ok(true) => Ok(()),
        Ok(false) => Err(refused(&SignalError::NotAnEventfd)),
        Err(error) => Err(refused(&error)),
    }
}

fn refused(error: &SignalError) -> Error {
    tracing::warn!(%error, "the front end's kick, call or error descriptor is refused");
    Error::InvalidParam
}
