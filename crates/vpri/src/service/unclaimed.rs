// SPDX-License-Identifier: Apache-2.0
//! [`Unclaimed`]: page requests for domains of no tenant.
//!
//! | the domain | a request for it |
//! |---|---|
//! | belongs to a VM that is being attached, or is given more RAM | is held until its VM claims it |
//! | has lost its RAM (retired) | is refused |
//! | any other | succeeds: the domain is read-write |
//!
//! # Locks
//! `held` and `retired`, for one look-up each and never both.

use super::{
    duty::Duty,
    pause::{Pause, Waited},
};
use crate::space::IoSpace;
use pagetide_addr::DomainId;
use pagetide_gmem::FaultOutcome;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

/// See the module.
#[derive(Default)]
pub(super) struct Unclaimed {
    /// Requests for domains whose VM is being attached.
    held: Mutex<HashMap<DomainId, Vec<Duty>>>,
    /// Domains whose RAM is unplugged, as long as a device knows them.
    retired: Mutex<HashMap<DomainId, Weak<dyn IoSpace>>>,
    ending: Pause,
}

impl Unclaimed {
    /// From now on, page requests for these domains are held.
    pub(super) fn hold(&self, domains: &[Arc<dyn IoSpace>]) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        for domain in domains {
            held.entry(domain.id()).or_default();
        }
    }

    /// Ends the holding; returns the requests held.
    pub(super) fn take_held(&self, domains: &[Arc<dyn IoSpace>]) -> Vec<Duty> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        domains
            .iter()
            .filter_map(|domain| held.remove(&domain.id()))
            .flatten()
            .collect()
    }

    /// From now on, page requests for `domain` are refused.
    pub(super) fn retire(&self, domain: &Arc<dyn IoSpace>) {
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.retain(|_, known| known.strong_count() > 0);
        retired.insert(domain.id(), Arc::downgrade(domain));
    }

    /// Answers, holds or refuses a request for a domain of no tenant.
    pub(super) fn answer(&self, mut duty: Duty) {
        let domain = duty.request().domain;
        let retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        let is_retired = retired.contains_key(&domain);
        drop(retired);
        if is_retired {
            duty.answer(FaultOutcome::OutOfRange);
            return;
        }
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(waiting) = held.get_mut(&domain) {
            duty.disown();
            waiting.push(duty);
            return;
        }
        drop(held);
        duty.answer(FaultOutcome::Present);
    }

    /// Waits for `time`, unless the service ends.
    pub(super) fn wait(&self, time: Duration) -> Waited {
        self.ending.wait(time)
    }

    /// The service ends: cuts all waits short.
    pub(super) fn end_waits(&self) {
        self.ending.end();
    }
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        let held = held.drain().flat_map(|(_, duties)| duties);
        held.for_each(Duty::abandon);
    }
}
