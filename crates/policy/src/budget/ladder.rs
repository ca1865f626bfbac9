// SPDX-License-Identifier: Apache-2.0
//! What each VM should have: bounds that are filled one after the other, until the memory ends.
//!
//! ```text
//!   rung       up to                                        a VM that refaults    one that is cold
//!   Room       its ceiling                                       │               │
//!   Cold       all that is resident                              │               ░
//!   Cool       … without what is cold                            │               ░
//!   Inactive   … and without what is cool                        │               ░
//!   Need       what it uses, and what its refaults are worth     █               │
//!   Floor      its floor                                         █               █
//! ```
//! A rung is filled for all VMs before the next one begins. So what is cold in any VM is lost before
//! what is cool in another, that before what is used, and nobody's floor is touched for anything
//! above it. The rung at which the memory ends is shared by weight ([`super::fill`]).
//!
//! A VM that is shrunk unasked has a cap, between its need and its ceiling, that bounds its upper
//! rungs. Where eviction is blocked, all that is resident belongs to the lowest rung.

use super::{
    fill::{Claim, share_out},
    units::{Bytes, Weight},
    vm::{Eviction, Vm},
};
use crate::sets::Level;

const RUNGS: usize = 6;

/// Memory for the lowest rung, and for all of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pots {
    /// Floors are a promise and watermarks are not: floors may use what low and high keep free.
    pub floors: Bytes,
    pub all: Bytes,
}

/// Upper bounds of a VM's rungs, which never decrease.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ladder {
    pub weight: Weight,
    pub upper: [Bytes; RUNGS],
}

impl Ladder {
    pub fn of(vm: &Vm) -> Self {
        let (floor, ceiling) = (vm.floor(), vm.ceiling());
        let weight = vm.share.weight;
        if vm.report.eviction == Eviction::Blocked {
            let upper = [floor.max(vm.report.resident); RUNGS];
            return Self { weight, upper };
        }
        let top = ceiling.min(vm.cap).max(floor);
        let mut upper = [
            floor,
            vm.need.min(ceiling),
            vm.resident_without(&[Level::Cold, Level::Cool]).min(top),
            vm.resident_without(&[Level::Cold]).min(top),
            vm.report.resident.min(top),
            top,
        ];
        for rung in 1..RUNGS {
            upper[rung] = upper[rung].max(upper[rung - 1]);
        }
        Self { weight, upper }
    }
}

/// What each VM should have.
pub(super) fn ideal(pots: Pots, ladders: &[Ladder]) -> Vec<Bytes> {
    let mut reached = vec![Bytes::ZERO; ladders.len()];
    for rung in 0..RUNGS {
        let pot = if rung == 0 { pots.floors } else { pots.all };
        let sum: Bytes = ladders.iter().map(|ladder| ladder.upper[rung]).sum();
        if sum <= pot {
            reached = ladders.iter().map(|ladder| ladder.upper[rung]).collect();
            continue;
        }
        let below: Bytes = reached.iter().copied().sum();
        if below >= pot {
            return reached;
        }
        let claims: Vec<Claim> = ladders
            .iter()
            .zip(&reached)
            .map(|(ladder, lower)| Claim {
                weight: ladder.weight,
                lower: *lower,
                upper: ladder.upper[rung],
            })
            .collect();
        return share_out(pot, &claims);
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    fn ladder(weight: u32, upper: [u64; RUNGS]) -> Ladder {
        Ladder {
            weight: Weight::try_from(weight).unwrap(),
            upper: upper.map(Bytes),
        }
    }

    fn pots(floors: u64, all: u64) -> Pots {
        Pots {
            floors: Bytes(floors),
            all: Bytes(all),
        }
    }

    #[test]
    fn colder_memory_of_any_vm_is_lost_before_warmer_memory_of_another() {
        let cold = ladder(900, [10, 20, 30, 40, 400, 500]);
        let busy = ladder(1, [10, 300, 300, 300, 300, 500]);
        let ideal = |all| ideal(pots(1000, all), &[cold, busy]);
        assert_eq!(ideal(1000), [Bytes(500), Bytes(500)]);
        assert_eq!(ideal(700), [Bytes(400), Bytes(300)]);
        assert_eq!(ideal(400), [Bytes(100), Bytes(300)]);
        assert_eq!(ideal(335), [Bytes(35), Bytes(300)]);
        // Only now what is used, and there the weight tells.
        assert_eq!(ideal(300), [Bytes(20), Bytes(280)]);
    }

    #[test]
    fn floors_use_the_memory_of_the_watermarks_and_are_shared_by_weight_if_even_that_is_short() {
        let vms = [ladder(100, [300, 600, 600, 600, 600, 600]); 2];
        assert_eq!(ideal(pots(600, 500), &vms), [Bytes(300), Bytes(300)]);
        assert_eq!(ideal(pots(500, 400), &vms), [Bytes(250), Bytes(250)]);
    }

    /// Rung by rung and unit by unit, each to the VM that has least per unit of weight.
    fn naive(pots: Pots, ladders: &[Ladder]) -> Vec<u64> {
        let mut got = vec![0; ladders.len()];
        for rung in 0..RUNGS {
            let pot = if rung == 0 { pots.floors } else { pots.all };
            while got.iter().sum::<u64>() < pot.0 {
                let poorest = (0..got.len())
                    .filter(|index| got[*index] < ladders[*index].upper[rung].0)
                    .min_by(|a, b| {
                        let next = |index: usize, other: usize| {
                            (got[index] + 1) * u64::from(ladders[other].weight.get())
                        };
                        next(*a, *b).cmp(&next(*b, *a))
                    });
                let Some(poorest) = poorest else { break };
                got[poorest] += 1;
            }
        }
        got
    }

    #[test]
    fn what_each_should_have_is_what_a_naive_hand_out_gives() {
        let mut random = SplitMix64::new(11);
        for _ in 0..1000 {
            let vms: Vec<Ladder> = (0..1 + random.below(6))
                .map(|_| {
                    let mut upper = [0; RUNGS].map(|_| random.below(200));
                    upper.sort_unstable();
                    ladder(u32::try_from(1 + random.below(5)).unwrap(), upper)
                })
                .collect();
            let all = random.below(1000);
            let pots = pots(all + random.below(100), all);
            let (got, naive) = (ideal(pots, &vms), naive(pots, &vms));
            for (got, naive) in got.iter().zip(&naive) {
                assert!(
                    got.0.abs_diff(*naive) <= 2,
                    "{got} {naive} of {pots:?} {vms:?}"
                );
            }
        }
    }
}
