// SPDX-License-Identifier: Apache-2.0
//! [`Protector`]: the policies of one VM's devices, and the sections they protect together.
//!
//! # Bound per VM
//! A policy's share is for one device, and the number of devices is not bounded: a guest may have
//! twenty disks, or a device's process may name devices that do not exist. So all of them together
//! have a bound, [`together_max`]. A section beyond the bound is refused: it is not protected, counts
//! as dropped, and its device's policy is not notified; when the policy releases it, nothing happens.
//!
//! *The newest yields*, not another device's oldest. Sections protected already have waited longer
//! and so are nearer to being touched; and a device that protects much cannot displace sections of
//! another, only keep it from growing. A device that comes too late has page faults, as without a
//! policy.

use crate::{section_set::SectionSet, set_times::SetTimes};

use super::{
    Change, Fate, PolicyChoice, PolicyReport, PromotionAge, ProtectedSections, ProtectionPolicy,
    Touch, parameters::Share,
};
use pagetide_addr::{DeviceId, SectionNo};
use std::{collections::BTreeMap, sync::Arc, time::Duration};

/// Share of a VM's sections that its devices may protect together, whatever the policy's share: twice the
/// average of the paper's protector (VPRI 7.3: 4.3 %).
const TOGETHER_MIN: Share = Share::percent(10);
/// This many devices may each protect the policy's whole share: a disk and a network interface. The
/// paper's `lru` of 10 % per device held 12 % of a VM.
const WHOLE_SHARES: u64 = 2;

/// One device: the paper's *protection domain*.
struct Domain {
    policy: Box<dyn ProtectionPolicy>,
    held: SectionSet,
    /// Sections that it was refused to protect, since the start.
    refused: u64,
}

impl Domain {
    fn report(&self) -> PolicyReport {
        let mut report = self.policy.report();
        // The policy does not know about refusals.
        report.protected_sections = self.held.len();
        report.dropped_sections += self.refused;
        report.bytes += self.held.bytes();
        report
    }
}

/// Most sections that all devices of a VM with `vm_sections` sections protect together.
#[must_use]
pub fn together_max(choice: &PolicyChoice, vm_sections: u64) -> u64 {
    let of_one = choice.protected_max().of(vm_sections);
    let together = TOGETHER_MIN.of(vm_sections);
    together
        .max(of_one.saturating_mul(WHOLE_SHARES))
        .min(vm_sections)
}

/// See the module. Used by one thread.
pub struct Protector {
    choice: PolicyChoice,
    /// Shared by all devices, since their evictor is one.
    age: Arc<PromotionAge>,
    /// Where that began.
    started_at: Duration,
    /// The evictor's times, if they are known.
    times: Option<SetTimes>,
    vm_sections: u64,
    domains: BTreeMap<DeviceId, Domain>,
    outcome: Outcome,
    /// By devices that were removed, and under earlier choices.
    dropped_before: u64,
}

/// The result of the policies' decisions.
#[derive(Default)]
struct Outcome {
    protected: Arc<ProtectedSections>,
    /// See [`together_max`].
    protected_max: u64,
    /// Decided just now, not applied yet.
    changes: Vec<Change>,
    /// Sections protected by those; empty between two steps.
    added: Vec<SectionNo>,
}

impl Protector {
    /// A protector of a VM with `vm_sections` sections; none of its devices is known yet.
    #[must_use]
    pub fn new(choice: &PolicyChoice, vm_sections: u64) -> Self {
        Self {
            choice: choice.clone(),
            age: choice.promotion_age(),
            started_at: choice.promotion_start(),
            times: None,
            vm_sections,
            domains: BTreeMap::new(),
            outcome: Outcome {
                protected_max: together_max(choice, vm_sections),
                ..Outcome::default()
            },
            dropped_before: 0,
        }
    }

    /// The evictor has these times. To be called before a device is known.
    pub fn set_times(&mut self, times: SetTimes) {
        self.times = Some(times);
    }

    /// The sections protected now, for the evictor's thread.
    #[must_use]
    pub fn protected(&self) -> &Arc<ProtectedSections> {
        &self.outcome.protected
    }

    /// The policy it follows.
    #[must_use]
    pub fn choice(&self) -> &PolicyChoice {
        &self.choice
    }

    /// Switches to another policy. All that is known of devices is forgotten, and nothing is protected until
    /// they touch it again. What is known of the evictor is kept, unless the new policy begins elsewhere.
    pub fn choose(&mut self, choice: &PolicyChoice) {
        self.release_all();
        self.choice = choice.clone();
        let start = choice.promotion_start();
        if start != self.started_at {
            self.started_at = start;
            self.age = choice.promotion_age();
        }
        self.outcome.protected_max = together_max(choice, self.vm_sections);
    }

    /// `device` has touched a section. Its first touch creates its policy.
    pub fn touched(&mut self, device: DeviceId, touch: Touch) {
        let (choice, times, age) = (&self.choice, self.times.as_ref(), &self.age);
        let sections = self.vm_sections;
        let policy = || match times {
            Some(times) => choice.beside(times).policy(sections, age),
            None => choice.policy(sections, age),
        };
        let domain = self.domains.entry(device).or_insert_with(|| Domain {
            policy: policy(),
            held: SectionSet::default(),
            refused: 0,
        });
        domain.policy.touched(touch, &mut self.outcome.changes);
        self.outcome.apply(domain);
    }

    /// It is `now`. To be called about once a second; cheap when nothing is due.
    pub fn passed(&mut self, now: Duration) {
        self.each(|policy, changes| policy.passed(now, changes));
    }

    /// An event of a section: passed to every device's policy.
    pub fn fate(&mut self, section: SectionNo, fate: Fate, now: Duration) {
        self.each(|policy, changes| policy.fate(section, fate, now, changes));
        if fate == Fate::Gone {
            // A policy that forgot the section has released it; for the others it is released here.
            for domain in self.domains.values_mut() {
                self.outcome.changes.push(Change::Release(section));
                self.outcome.apply(domain);
            }
        }
    }

    /// `device` was removed: its sections are released, and its policy is dropped.
    pub fn device_left(&mut self, device: DeviceId) {
        if let Some(domain) = self.domains.remove(&device) {
            self.leave(domain);
        }
    }

    /// The VM has `vm_sections` sections from now on.
    pub fn resized(&mut self, vm_sections: u64) {
        if self.vm_sections != vm_sections {
            self.vm_sections = vm_sections;
            let protected_max = together_max(&self.choice, vm_sections);
            // The devices give back their surplus one after another. Nothing is refused to the first
            // because of surplus that others have not given back yet.
            self.outcome.protected_max = self.outcome.protected_max.max(protected_max);
            self.each(|policy, changes| policy.resized(vm_sections, changes));
            self.outcome.protected_max = protected_max;
            self.shrink();
        }
    }

    /// The age at which sections are promoted now, by a policy that promotes any.
    #[must_use]
    pub fn promotion_age(&self) -> Duration {
        self.age.get()
    }

    /// See [`ProtectionPolicy::warm_up`].
    pub fn warm_up(&self) {
        for domain in self.domains.values() {
            domain.policy.warm_up();
        }
    }

    /// The state of each device's policy, including the memory used here on its behalf: its own, and its part
    /// of the set that the evictor reads.
    pub fn reports(&self) -> impl Iterator<Item = (DeviceId, PolicyReport)> + '_ {
        let devices = self.domains.len().max(1) as u64;
        let shared_bytes = self.outcome.protected.bytes().div_ceil(devices);
        let report = move |(device, domain): (&DeviceId, &Domain)| {
            let mut report = domain.report();
            report.bytes += shared_bytes;
            (*device, report)
        };
        self.domains.iter().map(report)
    }

    /// Sections that lost protection, or were refused it, because there were too many; since the start,
    /// including devices and policies that no longer exist.
    #[must_use]
    pub fn dropped_sections(&self) -> u64 {
        let now = |domain: &Domain| domain.report().dropped_sections;
        self.dropped_before + self.domains.values().map(now).sum::<u64>()
    }

    fn each(&mut self, mut tell: impl FnMut(&mut dyn ProtectionPolicy, &mut Vec<Change>)) {
        for domain in self.domains.values_mut() {
            tell(domain.policy.as_mut(), &mut self.outcome.changes);
            self.outcome.apply(domain);
        }
    }

    fn release_all(&mut self) {
        for (_, domain) in std::mem::take(&mut self.domains) {
            self.leave(domain);
        }
    }

    fn leave(&mut self, domain: Domain) {
        self.dropped_before += domain.report().dropped_sections;
        for section in domain.held.iter() {
            self.outcome.protected.remove(section);
        }
    }

    /// The VM may be smaller now. Held sections have no age here, so the devices that hold most give
    /// back any of theirs.
    fn shrink(&mut self) {
        loop {
            let surplus = self.outcome.surplus();
            let largest = self.domains.values_mut().max_by_key(|it| it.held.len());
            let Some(domain) = largest.filter(|_| surplus > 0) else {
                return;
            };
            let surplus = usize::try_from(surplus).unwrap_or(usize::MAX);
            let given: Vec<SectionNo> = domain.held.iter().take(surplus).collect();
            for section in given {
                self.outcome.refuse(domain, section);
            }
        }
    }
}

impl Drop for Protector {
    /// The evictor may outlive the protector; then nothing else would release the protected
    /// sections.
    fn drop(&mut self) {
        self.release_all();
    }
}

impl Outcome {
    /// Applies what the policy of `domain` has just decided.
    fn apply(&mut self, domain: &mut Domain) {
        if self.changes.is_empty() {
            return;
        }
        let mut changes = std::mem::take(&mut self.changes);
        for change in changes.drain(..) {
            match change {
                Change::Protect(section) => {
                    if domain.held.insert(section) {
                        self.protected.add(section);
                        self.added.push(section);
                    }
                }
                Change::Release(section) => {
                    if domain.held.remove(section) {
                        self.protected.remove(section);
                    }
                }
            }
        }
        self.changes = changes;
        // Only now: a policy may protect a section first, and then release another for it.
        while self.surplus() > 0
            && let Some(newest) = self.added.pop()
        {
            self.refuse(domain, newest);
        }
        self.added.clear();
    }

    /// Sections protected beyond the bound.
    fn surplus(&self) -> u64 {
        self.protected.len().saturating_sub(self.protected_max)
    }

    /// Refuses to protect `section`, although the policy of `domain` wants it.
    fn refuse(&mut self, domain: &mut Domain, section: SectionNo) {
        if domain.held.remove(section) {
            self.protected.remove(section);
            domain.refused += 1;
        }
    }
}
