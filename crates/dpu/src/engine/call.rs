// SPDX-License-Identifier: Apache-2.0
//! [`Calls`]: signalling completions to a front end through its eventfd.
//!
//! Whether the driver wants a call is checked once per completion: with event indices the answer is
//! yes for the completion that passes the driver's index, and no after it. A call that failed then
//! is *owed*. It is made as soon as possible, whatever the driver wants by then: a guest that
//! misses a call waits until its own time-out, and one call too many does no harm.

use pagetide_sys::signal::EventSignal;
use std::{io, time::Duration};

/// How long an otherwise idle engine waits before it retries a failed call. The kernel fails a call
/// when it is short of memory.
pub(super) const OWED_RETRY: Duration = Duration::from_millis(5);

/// An object that can be signalled.
pub(super) trait Signal {
    /// Signals once, without waiting.
    fn signal(&mut self) -> io::Result<()>;
}

impl Signal for EventSignal {
    fn signal(&mut self) -> io::Result<()> {
        Self::signal(self)
    }
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Calls<S = EventSignal> {
    to: Option<S>,
    is_owed: bool,
}

impl<S: Signal> Calls<S> {
    pub fn new(to: Option<S>) -> Self {
        Self { to, is_owed: false }
    }

    /// True if the front end can be called.
    pub fn are_possible(&self) -> bool {
        self.to.is_some()
    }

    /// True if a call failed and is owed.
    pub fn are_owed(&self) -> bool {
        self.is_owed
    }

    /// Uses `to` from now on, and signals it at once: a call may have gone to its predecessor.
    pub fn go_to(&mut self, to: Option<S>) {
        self.to = to;
        self.ring();
    }

    /// Makes a call, or records that it is owed.
    pub fn ring(&mut self) {
        let rung = self.to.as_mut().map_or(Ok(()), Signal::signal);
        if let Err(error) = &rung
            && !self.is_owed
        {
            tracing::error!(%error, "signalling a front end failed; retrying");
        }
        self.is_owed = rung.is_err();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails a number of times, and counts the calls that got through.
    #[derive(Debug, Default)]
    struct Weak {
        failures: u32,
        sent: u32,
    }

    impl Signal for Weak {
        fn signal(&mut self) -> io::Result<()> {
            match self.failures.checked_sub(1) {
                Some(left) => {
                    self.failures = left;
                    Err(io::Error::from(io::ErrorKind::OutOfMemory))
                }
                None => {
                    self.sent += 1;
                    Ok(())
                }
            }
        }
    }

    #[test]
    fn call_that_could_not_be_made_is_owed_until_it_is_made() {
        let failing = Weak {
            failures: 2,
            sent: 0,
        };
        let mut calls = Calls::new(Some(failing));
        assert!(!calls.are_owed());
        calls.ring();
        assert!(calls.are_owed());
        calls.ring();
        assert!(calls.are_owed());
        calls.ring();
        assert!(!calls.are_owed());
        assert_eq!(calls.to.as_ref().unwrap().sent, 1);
    }

    #[test]
    fn new_descriptor_is_called_at_once_and_with_none_nothing_is_owed() {
        let failing = || Weak {
            failures: 1,
            sent: 0,
        };
        let mut calls = Calls::new(Some(failing()));
        calls.ring();
        calls.go_to(Some(Weak::default()));
        assert_eq!(calls.to.as_ref().unwrap().sent, 1);
        assert!(!calls.are_owed());
        calls.go_to(Some(failing()));
        assert!(calls.are_owed());
        calls.go_to(None);
        assert!(!calls.are_owed() && !calls.are_possible());
    }
}
