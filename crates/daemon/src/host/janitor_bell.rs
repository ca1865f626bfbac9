// SPDX-License-Identifier: Apache-2.0
//! [`JanitorBell`]: what wakes the janitor, and tells it of readers that failed.

use super::failure::failed;
use crate::control::ControlError;
use pagetide_vmm::process::VmmIdentity;
use rustix::event::{EventfdFlags, eventfd};
use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, mpsc},
};

/// Faults of this VMM are no longer served, for this reason.
#[derive(Debug)]
pub(super) struct ReaderFailed(pub(super) VmmIdentity, pub(super) String);

/// Wakes the janitor.
#[derive(Clone, Debug)]
pub(super) struct JanitorBell {
    bell: Arc<OwnedFd>,
    failures: mpsc::Sender<ReaderFailed>,
}

/// The janitor's end of the bell.
pub(super) struct Rung {
    bell: Arc<OwnedFd>,
    failures: mpsc::Receiver<ReaderFailed>,
}

impl JanitorBell {
    /// A bell, and the end at which it is heard.
    pub(super) fn new() -> Result<(Self, Rung), ControlError> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        let bell = Arc::new(bell);
        let (sender, failures) = mpsc::channel();
        let heard = Rung {
            bell: Arc::clone(&bell),
            failures,
        };
        let failures = sender;
        Ok((Self { bell, failures }, heard))
    }

    /// The set of VMMs to watch has changed.
    pub(super) fn ring(&self) {
        // An eventfd at its maximum count, after 2^64 rings without a read, is readable too.
        if let Err(error) = rustix::io::write(&*self.bell, &1_u64.to_ne_bytes()) {
            tracing::debug!(%error, "the janitor is woken already");
        }
    }

    /// Faults of this VMM are no longer served, for this reason.
    pub(super) fn reader_failed(&self, vmm: VmmIdentity, why: String) {
        if self.failures.send(ReaderFailed(vmm, why)).is_err() {
            tracing::debug!(pid = vmm.pid, "the daemon is ending already");
        }
        self.ring();
    }
}

impl Rung {
    /// Readable once the bell was rung.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The bell is silent again.
    pub(super) fn clear(&self) {
        let mut count = [0; 8];
        if let Err(error) = rustix::io::read(&*self.bell, &mut count) {
            tracing::debug!(%error, "the janitor was woken for nothing");
        }
    }

    /// The next failed reader, if there is one.
    pub(super) fn next_failure(&self) -> Option<ReaderFailed> {
        self.failures.try_recv().ok()
    }
}
