// SPDX-License-Identifier: Apache-2.0
//! [`Protector`]: the policies of one VM's devices, and what they protect together.

use super::{Change, Fate, PolicyChoice, PolicyReport, ProtectedSections, ProtectionPolicy, Touch};
use pagetide_addr::{DeviceId, SectionNo};
use rustc_hash::FxHashSet;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

/// Most sections that wait to be brought back: 4 GiB, more than can be read before it is too late.
/// Beyond, the oldest wish is forgotten.
const BRING_BACKS_MAX: usize = 2_048;

/// What a place for a section costs that a device holds: in its own table, and in the one that the evictor
/// reads. A table has a byte and the entry for each place, and eight places for seven entries.
const HELD_BYTES: u64 = ((8 + 1) + (16 + 1)) * 8 / 7;

/// One device: the paper's *protection domain*.
struct Domain {
    policy: Box<dyn ProtectionPolicy>,
    held: FxHashSet<SectionNo>,
}

/// See the module. Used by one thread.
pub struct Protector {
    choice: PolicyChoice,
    vm_sections: u64,
    domains: BTreeMap<DeviceId, Domain>,
    outcome: Outcome,
}

/// What comes of the policies' decisions.
#[derive(Default)]
struct Outcome {
    protected: Arc<ProtectedSections>,
    bring_backs: VecDeque<SectionNo>,
    /// Decided just now, not done yet.
    changes: Vec<Change>,
}

impl Protector {
    /// A protector of a VM with `vm_sections` sections, none of whose devices has been heard of.
    #[must_use]
    pub fn new(choice: &PolicyChoice, vm_sections: u64) -> Self {
        Self {
            choice: choice.clone(),
            vm_sections,
            domains: BTreeMap::new(),
            outcome: Outcome::default(),
        }
    }

    /// What is protected now, to be read by the evictor's thread.
    #[must_use]
    pub fn protected(&self) -> &Arc<ProtectedSections> {
        &self.outcome.protected
    }

    /// The policy it follows.
    #[must_use]
    pub fn choice(&self) -> &PolicyChoice {
        &self.choice
    }

    /// Another policy from now on. What is known is forgotten, and nothing is protected until the
    /// devices touch it again.
    pub fn choose(&mut self, choice: &PolicyChoice) {
        self.release_all();
        self.choice = choice.clone();
    }

    /// `device` has touched a section. Its first touch makes its policy.
    pub fn touched(&mut self, device: DeviceId, touch: Touch) {
        let domain = self.domains.entry(device).or_insert_with(|| Domain {
            policy: self.choice.policy(self.vm_sections),
            held: FxHashSet::default(),
        });
        domain.policy.touched(touch, &mut self.outcome.changes);
        self.outcome.apply(domain);
    }

    /// It is `now`. To be called about once a second; cheap when nothing is due.
    pub fn passed(&mut self, now: Duration) {
        self.each(|policy, changes| policy.passed(now, changes));
    }

    /// Something happened to a section: every device's policy hears of it.
    pub fn fate(&mut self, section: SectionNo, fate: Fate, now: Duration) {
        self.each(|policy, changes| policy.fate(section, fate, now, changes));
        if fate == Fate::Gone {
            // A policy that has forgotten it before has released it; one that has not is told here.
            for domain in self.domains.values_mut() {
                self.outcome.changes.push(Change::Release(section));
                self.outcome.apply(domain);
            }
            self.outcome
                .bring_backs
                .retain(|waiting| *waiting != section);
        }
    }

    /// `device` is no more: what it protected is released, and its policy forgotten.
    pub fn device_left(&mut self, device: DeviceId) {
        if let Some(domain) = self.domains.remove(&device) {
            self.outcome.release_all(domain);
        }
    }

    /// The VM has `vm_sections` sections from now on.
    pub fn resized(&mut self, vm_sections: u64) {
        if self.vm_sections != vm_sections {
            self.vm_sections = vm_sections;
            self.each(|policy, changes| policy.resized(vm_sections, changes));
        }
    }

    /// Sections that policies want back before a device asks for them, oldest wish first; each wish
    /// is told once.
    pub fn take_bring_backs(&mut self) -> Vec<SectionNo> {
        self.outcome.bring_backs.drain(..).collect()
    }

    /// What each device's policy holds, with the memory that is taken here on its behalf.
    #[must_use]
    pub fn reports(&self) -> Vec<(DeviceId, PolicyReport)> {
        let report = |(device, domain): (&DeviceId, &Domain)| {
            let mut report = domain.policy.report();
            report.bytes += HELD_BYTES * domain.held.capacity() as u64;
            (*device, report)
        };
        self.domains.iter().map(report).collect()
    }

    fn each(&mut self, mut tell: impl FnMut(&mut dyn ProtectionPolicy, &mut Vec<Change>)) {
        for domain in self.domains.values_mut() {
            tell(domain.policy.as_mut(), &mut self.outcome.changes);
            self.outcome.apply(domain);
        }
    }

    fn release_all(&mut self) {
        for (_, domain) in std::mem::take(&mut self.domains) {
            self.outcome.release_all(domain);
        }
        self.outcome.bring_backs.clear();
    }
}

impl Drop for Protector {
    /// The evictor may live on; nobody would release what is protected.
    fn drop(&mut self) {
        self.release_all();
    }
}

impl Outcome {
    /// Does what the policy of `domain` has just decided.
    fn apply(&mut self, domain: &mut Domain) {
        for change in self.changes.drain(..) {
            match change {
                Change::Protect(section) => {
                    if domain.held.insert(section) {
                        self.protected.add(section);
                    }
                }
                Change::Release(section) => {
                    if domain.held.remove(&section) {
                        self.protected.remove(section);
                    }
                }
                Change::BringBack(section) => {
                    if self.bring_backs.len() == BRING_BACKS_MAX {
                        self.bring_backs.pop_front();
                    }
                    self.bring_backs.push_back(section);
                }
            }
        }
    }

    fn release_all(&mut self, domain: Domain) {
        for section in domain.held {
            self.protected.remove(section);
        }
    }
}
