// SPDX-License-Identifier: Apache-2.0
//! The janitor: the thread that notices when a VMM ends, and when a VM's fault reader has failed.
//!
//! It waits for the pidfds of all VMMs at once: of VMs that are served, and of VMs that could not be
//! recovered. The end of a VMM is thus noticed even if the VM's other threads have failed, and also if
//! it came before the VM had any: a pidfd stays readable. A VM whose end is noted is no longer waited
//! for.
//!
//! The VM's [`Life`](super::life::Life) decides what to do then.

use super::{Host, roster::Watched, vm::failed};
use crate::control::ControlError;
use pagetide_vmm::process::VmmIdentity;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Weak, mpsc},
    time::Duration,
};

/// Pause after a failed wait, for example for lack of memory.
const WAIT_AGAIN: Duration = Duration::from_secs(1);

/// What else the janitor handles, beside the ends of VMMs.
#[derive(Debug)]
struct ReaderFailed(VmmIdentity, String);

/// Wakes the janitor.
#[derive(Clone, Debug)]
pub(super) struct JanitorBell {
    bell: Arc<OwnedFd>,
    failures: mpsc::Sender<ReaderFailed>,
}

impl JanitorBell {
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

/// The janitor before it has a host.
pub(super) struct Janitor {
    bell: Arc<OwnedFd>,
    failures: mpsc::Receiver<ReaderFailed>,
}

impl Janitor {
    pub(super) fn new() -> Result<(Self, JanitorBell), ControlError> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        let bell = Arc::new(bell);
        let (sender, failures) = mpsc::channel();
        let ringing = JanitorBell {
            bell: Arc::clone(&bell),
            failures: sender,
        };
        Ok((Self { bell, failures }, ringing))
    }

    /// Starts the thread; it ends with the host.
    pub(super) fn start(self, host: &Arc<Host>) -> Result<(), ControlError> {
        let host = Arc::downgrade(host);
        let spawned = std::thread::Builder::new()
            .name("pt-janitor".into())
            .spawn(move || self.run(&host));
        match spawned {
            Ok(_detached) => Ok(()),
            Err(error) => Err(failed(format!("no thread for the janitor: {error}"))),
        }
    }

    fn run(self, host: &Weak<Host>) {
        loop {
            let Some(watched) = host.upgrade().map(|host| host.vms.watched()) else {
                return;
            };
            let ended = self.wait(&watched);
            let Some(host) = host.upgrade() else {
                return;
            };
            for watched in watched.into_iter().zip(ended).filter_map(ended_of) {
                host.vmm_ended(&watched);
            }
            while let Ok(ReaderFailed(vmm, why)) = self.failures.try_recv() {
                host.reader_failed(vmm, &why);
            }
        }
    }

    /// Waits until the bell is rung or a VMM ends; returns the events of each VMM.
    fn wait(&self, watched: &[Watched]) -> Vec<PollFlags> {
        let mut polled = vec![PollFd::from_borrowed_fd(self.bell.as_fd(), PollFlags::IN)];
        let pidfds = watched.iter().map(|one| one.vmm().fd().as_fd());
        polled.extend(pidfds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        if let Err(error) = poll(&mut polled, None) {
            tracing::warn!(%error, "the ends of VMMs cannot be waited for");
            std::thread::sleep(WAIT_AGAIN);
            return Vec::new();
        }
        let mut count = [0; 8];
        if !polled[0].revents().is_empty()
            && let Err(error) = rustix::io::read(&*self.bell, &mut count)
        {
            tracing::debug!(%error, "the janitor was woken for nothing");
        }
        polled[1..].iter().map(PollFd::revents).collect()
    }
}

fn ended_of((watched, told): (Watched, PollFlags)) -> Option<Watched> {
    (!told.is_empty()).then_some(watched)
}
