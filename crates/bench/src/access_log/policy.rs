// SPDX-License-Identifier: Apache-2.0
//! Memory and time of policies that track all they may, without a disk.

use crate::harness::figures::to_f64;
use pagetide_addr::{Access, SectionNo};
use pagetide_policy::protect::{
    PolicyChoice, PolicyReport, ProtectionPolicy, Touch, adp::AdpParams,
};
use pagetide_random::SplitMix64;
use std::time::{Duration, Instant};

/// Sections of a VM of 64 GiB, the largest of the paper's.
const VM_SECTIONS: u64 = 32 * 1024;
/// Touches of each of the two rounds over such a VM.
const TOUCHES: u64 = 500_000;

/// A policy that tracks all it may.
pub(super) struct FullPolicy {
    pub(super) report: PolicyReport,
    /// Mean time of one touch.
    pub(super) touch_ns: f64,
}

/// The cost of the protector in a VM of 64 GiB all of which one device touches at random.
pub(super) fn full() -> [(&'static str, FullPolicy); 1] {
    [("adp", PolicyChoice::Adp(AdpParams::default()))].map(|(name, choice)| (name, fill(&choice)))
}

fn fill(choice: &PolicyChoice) -> FullPolicy {
    let mut policy = choice.policy(VM_SECTIONS, &choice.promotion_age());
    let mut changes = Vec::new();
    let (mut random, mut micros) = (SplitMix64::new(1), 0_u64);
    let mut touch_all = |policy: &mut dyn ProtectionPolicy| {
        for _ in 0..TOUCHES {
            micros += 1;
            changes.clear();
            let touch = Touch {
                section: SectionNo(random.below(VM_SECTIONS)),
                at: Duration::from_micros(micros),
                access: Access::Write,
                bytes: 4096,
            };
            policy.touched(touch, &mut changes);
        }
    };
    // Once to fill it.
    touch_all(policy.as_mut());
    let began = Instant::now();
    touch_all(policy.as_mut());
    FullPolicy {
        touch_ns: began.elapsed().as_secs_f64() * 1e9 / to_f64(TOUCHES),
        report: policy.report(),
    }
}
