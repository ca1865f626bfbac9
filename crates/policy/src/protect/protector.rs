// SPDX-License-Identifier: Apache-2.0
//! [`Protector`]: the policies of one VM's devices, and what they protect together.
//!
//! # At most so much of a VM
//! A policy's share is one device's, and nobody vouches for the number of devices: a guest has
//! twenty disks, or a device's process names devices that are not there. So there is a bound on what
//! all of them protect together, [`together_max`]. At the bound the section that would be one too many
//! is refused: it is not protected, counts as dropped, and its device's policy is not told; when that
//! releases it, nothing happens.
//!
//! *The newest yields*, not another device's oldest. What is protected already has waited
//! longer and so is nearer to being touched; and a device that protects much cannot drive out what
//! another holds, only keep it from growing. A device that came too late has page faults, as
//! without a policy.

use crate::section_set::SectionSet;

use super::{
    Change, Fate, PolicyChoice, PolicyReport, ProtectedSections, ProtectionPolicy, Touch,
    parameters::Share,
};
use pagetide_addr::{DeviceId, SectionNo};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

/// Most sections that wait to be brought back: 4 GiB, more than can be read before it is too late.
/// Beyond, the oldest wish is forgotten.
const BRING_BACKS_MAX: usize = 2_048;

/// What a VM's devices may protect together of its sections, whatever the policy's share is: twice what the
/// paper's protector held of a VM on average (VPRI 7.3: 4.3 %).
const TOGETHER_MIN: Share = Share::percent(10);
/// So many devices may protect the policy's whole share each: a disk and a network interface. The
/// paper's `lru` of 10 % a device held 12 % of a VM.
const WHOLE_SHARES: u64 = 2;

/// One device: the paper's *protection domain*.
struct Domain {
    policy: Box<dyn ProtectionPolicy>,
    held: SectionSet,
    /// Sections that it was not let protect, since the start.
    refused: u64,
}

impl Domain {
    fn report(&self) -> PolicyReport {
        let mut report = self.policy.report();
        // The policy does not know what was refused.
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
    vm_sections: u64,
    domains: BTreeMap<DeviceId, Domain>,
    outcome: Outcome,
    /// By devices that are no more, and under another choice.
    dropped_before: u64,
}

/// What comes of the policies' decisions.
#[derive(Default)]
struct Outcome {
    protected: Arc<ProtectedSections>,
    /// See [`together_max`].
    protected_max: u64,
    bring_backs: VecDeque<SectionNo>,
    /// Wishes that gave way to newer ones; their policies do not know yet.
    forgotten: Vec<SectionNo>,
    /// Decided just now, not done yet.
    changes: Vec<Change>,
    /// Protected by those; empty between two steps.
    added: Vec<SectionNo>,
}

impl Protector {
    /// A protector of a VM with `vm_sections` sections, none of whose devices has been heard of.
    #[must_use]
    pub fn new(choice: &PolicyChoice, vm_sections: u64) -> Self {
        Self {
            choice: choice.clone(),
            vm_sections,
            domains: BTreeMap::new(),
            outcome: Outcome {
                protected_max: together_max(choice, vm_sections),
                ..Outcome::default()
            },
            dropped_before: 0,
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
        self.outcome.protected_max = together_max(choice, self.vm_sections);
    }

    /// `device` has touched a section. Its first touch makes its policy.
    pub fn touched(&mut self, device: DeviceId, touch: Touch) {
        let domain = self.domains.entry(device).or_insert_with(|| Domain {
            policy: self.choice.policy(self.vm_sections),
            held: SectionSet::default(),
            refused: 0,
        });
        domain.policy.touched(touch, &mut self.outcome.changes);
        self.outcome.apply(domain);
    }

    /// From now on `device` follows `policy`, whatever the others do, until another is chosen for all: what
    /// no [`PolicyChoice`] names can be tried like this.
    pub fn enter(&mut self, device: DeviceId, policy: Box<dyn ProtectionPolicy>) {
        self.device_left(device);
        let domain = Domain {
            policy,
            held: Default::default(),
            refused: 0,
        };
        self.domains.insert(device, domain);
    }

    /// It is `now`. To be called about once a second; cheap when nothing is due.
    pub fn passed(&mut self, now: Duration) {
        self.each(|policy, changes| policy.passed(now, changes));
        for section in std::mem::take(&mut self.outcome.forgotten) {
            self.fate(section, Fate::NotBroughtBack, now);
        }
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
            self.leave(domain);
        }
    }

    /// The VM has `vm_sections` sections from now on.
    pub fn resized(&mut self, vm_sections: u64) {
        if self.vm_sections != vm_sections {
            self.vm_sections = vm_sections;
            let protected_max = together_max(&self.choice, vm_sections);
            // One device after the other gives back what is too much for it now. Nothing is refused to the
            // first on account of what the others have yet to give back.
            self.outcome.protected_max = self.outcome.protected_max.max(protected_max);
            self.each(|policy, changes| policy.resized(vm_sections, changes));
            self.outcome.protected_max = protected_max;
            self.shrink();
        }
    }

    /// Sections that policies want back before a device asks for them, oldest wish first; each wish
    /// is told once.
    pub fn take_bring_backs(&mut self) -> Vec<SectionNo> {
        self.outcome.bring_backs.drain(..).collect()
    }

    /// See [`ProtectionPolicy::warm_up`].
    pub fn warm_up(&self) {
        for domain in self.domains.values() {
            domain.policy.warm_up();
        }
    }

    /// What each device's policy holds, with the memory that is taken here on its behalf: its own, and its part
    /// of what the evictor reads.
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

    /// Sections that left protection, or were refused it, because there were too many; since the start, by
    /// devices and policies that are no more too.
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
        self.outcome.bring_backs.clear();
        self.outcome.forgotten.clear();
    }

    fn leave(&mut self, domain: Domain) {
        self.dropped_before += domain.report().dropped_sections;
        for section in domain.held.iter() {
            self.outcome.protected.remove(section);
        }
    }

    /// The VM may be smaller now. What is held has no age here, so those that hold most give back any.
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
    /// The evictor may live on; nobody would release what is protected.
    fn drop(&mut self) {
        self.release_all();
    }
}

impl Outcome {
    /// Does what the policy of `domain` has just decided.
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
                Change::BringBack(section) => self.wish(section),
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

    fn wish(&mut self, section: SectionNo) {
        if self.bring_backs.len() == BRING_BACKS_MAX
            && let Some(oldest) = self.bring_backs.pop_front()
            && self.forgotten.len() < BRING_BACKS_MAX
        {
            self.forgotten.push(oldest);
        }
        self.bring_backs.push_back(section);
    }

    /// Sections that are protected beyond what may be.
    fn surplus(&self) -> u64 {
        self.protected.len().saturating_sub(self.protected_max)
    }

    /// `section` is not protected, though the policy of `domain` wants it to be.
    fn refuse(&mut self, domain: &mut Domain, section: SectionNo) {
        if domain.held.remove(section) {
            self.protected.remove(section);
            domain.refused += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::{Access, PAGE_BYTES};
    use std::sync::Mutex;

    /// Wishes what is touched back, and keeps book of the wishes that came to nothing.
    struct Wishing(Arc<Mutex<Vec<SectionNo>>>);

    impl ProtectionPolicy for Wishing {
        fn touched(&mut self, touch: Touch, changes: &mut Vec<Change>) {
            changes.push(Change::BringBack(touch.section));
        }

        fn passed(&mut self, _now: Duration, _changes: &mut Vec<Change>) {}

        fn fate(&mut self, section: SectionNo, fate: Fate, _: Duration, _: &mut Vec<Change>) {
            assert_eq!(fate, Fate::NotBroughtBack);
            self.0.lock().unwrap().push(section);
        }

        fn resized(&mut self, _sections: u64, _changes: &mut Vec<Change>) {}

        fn report(&self) -> PolicyReport {
            PolicyReport::default()
        }
    }

    #[test]
    fn wish_that_gives_way_to_newer_ones_is_told_when_time_passes() {
        let mut protector = Protector::new(&PolicyChoice::None, 10_000);
        let in_vain = Arc::default();
        let domain = Domain {
            policy: Box::new(Wishing(Arc::clone(&in_vain))),
            held: SectionSet::default(),
            refused: 0,
        };
        protector.domains.insert(DeviceId(1), domain);
        let wishes = BRING_BACKS_MAX as u64 + 2;
        for section in (0..wishes).map(SectionNo) {
            let touch = Touch {
                section,
                at: Duration::ZERO,
                access: Access::Read,
                bytes: PAGE_BYTES,
            };
            protector.touched(DeviceId(1), touch);
        }
        assert!(in_vain.lock().unwrap().is_empty());
        protector.passed(Duration::ZERO);
        protector.passed(Duration::ZERO);
        assert_eq!(*in_vain.lock().unwrap(), [SectionNo(0), SectionNo(1)]);
        let waiting = protector.take_bring_backs();
        assert!(waiting.into_iter().eq((2..wishes).map(SectionNo)));
    }
}
