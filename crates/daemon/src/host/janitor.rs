// SPDX-License-Identifier: Apache-2.0
//! The janitor: the thread that notices when a VMM ends, and when a VM's fault reader has failed.
//!
//! It waits for the pidfds of all VMMs at once: of VMs that are served, and of VMs that could not be
//! recovered. The end of a VMM is thus noticed even if the VM's other threads have failed, and also if
//! it came before the VM had any: a pidfd stays readable. A VM whose end is noted is no longer waited
//! for.
//!
//! The VM's [`Life`](super::life::Life) decides what to do then.

use super::{
    failure::failed,
    janitor_bell::{ReaderFailed, Rung},
    roster::Watched,
};
use crate::control::ControlError;
use pagetide_vmm::process::VmmIdentity;
use rustix::event::{PollFd, PollFlags, poll};
use std::{
    os::fd::AsFd,
    sync::{Arc, Weak},
    time::Duration,
};

/// Pause after a failed wait, for example for lack of memory.
const WAIT_AGAIN: Duration = Duration::from_secs(1);

/// What the janitor works for.
pub(super) trait Watching: Send + Sync + 'static {
    /// Every VMM whose end must be noticed now.
    fn watched(&self) -> Vec<Watched>;

    /// This VMM has ended.
    fn vmm_ended(&self, watched: &Watched);

    /// Faults of this VMM are no longer served, for this reason.
    fn reader_failed(&self, vmm: VmmIdentity, why: &str);
}

/// The janitor before it works for anybody.
pub(super) struct Janitor(Rung);

impl Janitor {
    /// One that the bell of `rung` wakes.
    pub(super) fn new(rung: Rung) -> Self {
        Self(rung)
    }

    /// Starts the thread; it ends with the host.
    pub(super) fn start(self, host: &Arc<impl Watching>) -> Result<(), ControlError> {
        let host = Arc::downgrade(host);
        let spawned = std::thread::Builder::new()
            .name("pt-janitor".into())
            .spawn(move || self.run(&host));
        match spawned {
            Ok(_detached) => Ok(()),
            Err(error) => Err(failed(format!("no thread for the janitor: {error}"))),
        }
    }

    fn run(self, host: &Weak<impl Watching>) {
        loop {
            let Some(watched) = host.upgrade().map(|host| host.watched()) else {
                return;
            };
            let ended = self.wait(&watched);
            let Some(host) = host.upgrade() else {
                return;
            };
            for watched in watched.into_iter().zip(ended).filter_map(ended_of) {
                host.vmm_ended(&watched);
            }
            while let Some(ReaderFailed(vmm, why)) = self.0.next_failure() {
                host.reader_failed(vmm, &why);
            }
        }
    }

    /// Waits until the bell is rung or a VMM ends; returns the events of each VMM.
    fn wait(&self, watched: &[Watched]) -> Vec<PollFlags> {
        let mut polled = vec![PollFd::from_borrowed_fd(self.0.fd(), PollFlags::IN)];
        let pidfds = watched.iter().map(|one| one.vmm().fd().as_fd());
        polled.extend(pidfds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        if let Err(error) = poll(&mut polled, None) {
            tracing::warn!(%error, "the ends of VMMs cannot be waited for");
            std::thread::sleep(WAIT_AGAIN);
            return Vec::new();
        }
        if !polled[0].revents().is_empty() {
            self.0.clear();
        }
        polled[1..].iter().map(PollFd::revents).collect()
    }
}

fn ended_of((watched, told): (Watched, PollFlags)) -> Option<Watched> {
    (!told.is_empty()).then_some(watched)
}
