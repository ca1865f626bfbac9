// SPDX-License-Identifier: Apache-2.0
//! [`EvictionGate`]: why nothing of a VM may be evicted now, and what an operator should know besides.
//!
//! Blockers are found by looking at the VMM, its devices and the daemon's own memory, and hold until the
//! next look. A *suspension* is different: eviction was tried and failed, and is tried again after a
//! while. Both are sentences only at the edge, in a report. A full store does not close the gate: pages of
//! zeros still go.

use super::lock::lock;
use pagetide_swap::store::PutError;
use pagetide_vmm::hazards::EvictionBlocker;
use std::sync::Mutex;

/// Why nothing of a VM may be evicted now.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Blocker {
    /// Something else touches the RAM.
    #[error(transparent)]
    Hazard(#[from] EvictionBlocker),
    /// The devices cannot be kept off absent pages.
    #[error("{0}")]
    Devices(String),
    /// The VMM cannot be inspected.
    #[error("the VM cannot be looked at: {why}")]
    Unknown {
        /// The refusal.
        why: String,
    },
}

/// See the module. One per VM.
#[derive(Default)]
pub(super) struct EvictionGate {
    blockers: Mutex<Vec<Blocker>>,
    suspended: Mutex<Option<String>>,
    /// What was last said of the store.
    full: Mutex<Option<PutError>>,
    warnings: Mutex<Vec<String>>,
}

impl EvictionGate {
    /// True if no blocker is known and eviction is not suspended.
    pub(super) fn is_open(&self) -> bool {
        lock(&self.blockers).is_empty() && lock(&self.suspended).is_none()
    }

    /// The blockers that the last look found.
    pub(super) fn blockers(&self) -> Vec<Blocker> {
        lock(&self.blockers).clone()
    }

    /// Logs that the store has become full, or has room again; true if that is news.
    pub(super) fn store_is(&self, vm: &str, full: Option<PutError>) -> bool {
        let mut known = lock(&self.full);
        if *known == full {
            return false;
        }
        match &full {
            Some(why) => tracing::warn!(vm, "not evicting, but for pages of zeros: {why}"),
            None => tracing::info!(vm, "evicting again: there is room for content"),
        }
        *known = full;
        true
    }

    /// Why eviction is suspended: an error of the kernel, a detach that failed.
    pub(super) fn suspension(&self) -> Option<String> {
        lock(&self.suspended).clone()
    }

    /// Conditions that an operator should know about although they do not block eviction.
    pub(super) fn warnings(&self) -> Vec<String> {
        lock(&self.warnings).clone()
    }

    /// Sets the blockers and logs changes.
    pub(super) fn set_blockers(&self, vm: &str, blockers: Vec<Blocker>) {
        let mut known = lock(&self.blockers);
        if *known != blockers {
            for blocker in &blockers {
                tracing::warn!(vm, "not evicting: {blocker}");
            }
            if blockers.is_empty() {
                tracing::info!(vm, "evicting again: nothing forbids it any more");
            }
            *known = blockers;
        }
    }

    /// Suspends eviction; logged once per reason.
    pub(super) fn suspend(&self, vm: &str, why: String) {
        let mut suspended = lock(&self.suspended);
        if suspended.as_ref() != Some(&why) {
            tracing::warn!(vm, "not evicting for now: {why}");
            *suspended = Some(why);
        }
    }

    /// Ends a suspension.
    pub(super) fn resume(&self) {
        *lock(&self.suspended) = None;
    }

    /// Sets the operator warnings and logs new ones.
    pub(super) fn set_warnings(&self, vm: &str, warnings: Vec<String>) {
        let mut known = lock(&self.warnings);
        for warning in warnings.iter().filter(|warning| !known.contains(warning)) {
            tracing::warn!(vm, "{warning}");
        }
        *known = warnings;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_is_open_while_nothing_blocks_and_nothing_is_suspended() {
        let gate = EvictionGate::default();
        assert!(gate.is_open());
        gate.suspend("a", "the pool is full".to_owned());
        let blocker = Blocker::Devices("the DPU process is gone".to_owned());
        gate.set_blockers("a", vec![blocker.clone()]);
        gate.resume();
        assert!(!gate.is_open());
        assert_eq!(gate.blockers(), [blocker]);
        gate.set_blockers("a", Vec::new());
        gate.set_warnings("a", vec!["RAM is not managed".to_owned()]);
        assert!(gate.is_open() && gate.suspension().is_none());
    }
}
