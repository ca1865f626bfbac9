// SPDX-License-Identifier: Apache-2.0
//! `adaptive` where nothing can be learnt: it must not cost page faults.

use pagetide_addr::{Access, DeviceId, SectionNo};
use pagetide_sim::replay::{Actor, ReplayAccess, Service, Start, VmParams, VmReplay};
use std::time::Duration;

const SECTIONS: u64 = 1_000;
const STEP: Duration = Duration::from_millis(250);
const END: Duration = Duration::from_secs(6 * 3_600);

/// A device that touches any section as likely as any other.
fn random_reuse() -> impl Iterator<Item = ReplayAccess> + Send {
    let mut state = 1_u64;
    let mut next = move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % SECTIONS
    };
    let mut at = Duration::ZERO;
    std::iter::from_fn(move || {
        at += STEP;
        (at < END).then(|| ReplayAccess {
            at,
            actor: Actor::Device(DeviceId(1), Service::Block),
            section: SectionNo(next()),
            access: Access::Write,
            bytes: 4_096,
        })
    })
}

fn faults(policy: &str) -> u64 {
    let params = VmParams {
        sections: SECTIONS,
        section_bytes: 2 << 20,
        start: Start::AllPresent,
        policy: policy.parse().expect("a policy"),
        capacity_every: None,
    };
    let accesses: Vec<ReplayAccess> = random_reuse().collect();
    let mut vm = VmReplay::new(params, Box::new(accesses.into_iter())).expect("a small VM");
    vm.set_limit(Some(SECTIONS / 2));
    vm.run_until(END).expect("accesses in order");
    vm.account()
        .devices
        .iter()
        .map(|device| device.faults)
        .sum()
}

#[test]
fn random_reuse_of_twice_the_limit_faults_a_few_per_cent_more_at_most_than_without_a_policy() {
    let (none, adaptive) = (faults("none"), faults("adaptive"));
    assert!(none > 30_000, "{none}");
    assert!(adaptive * 100 <= none * 103, "{adaptive} {none}");
}
