// SPDX-License-Identifier: Apache-2.0
//! Sharing an amount by weight between bounds: weighted max-min fairness.
//!
//! Everyone gets the same amount per unit of weight, the *level*, except where that is less than
//! its lower bound or more than its upper one:
//!
//! ```text
//!   got = clamp(level × weight, lower, upper),   and the sum of all is what there is
//!
//!   level ─ ─ ─┬──┬─ ─ ─ ─┬──┬─ ─
//!              │  │  ┌──┐ │  │        the second wants no more than its upper bound;
//!              │  │  │  │ │  │ ┌──┐   the fourth has a lower bound above its share of the level
//!              └──┘  └──┘ └──┘ └──┘
//! ```
//! Nobody can get more without taking from one that has less per unit of weight. The sum grows with
//! the level, so the level is unique, and a small change of a bound changes every result by no more
//! than that: no jumps.
//!
//! The level is found in a few passes, as CSS flexible boxes are: share evenly; if the lower bounds
//! ask for more than the upper bounds give up, the true level is lower, so who was below its lower
//! bound now stays there; otherwise who was above its upper bound stays there. Each pass settles at
//! least one.

use super::units::{Bytes, Weight};

/// One that gets a share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    pub weight: Weight,
    pub lower: Bytes,
    pub upper: Bytes,
}

/// What each claim gets of `pot`: all upper bounds if those fit, all lower bounds if even those do
/// not, and otherwise the pot, less a byte for each claim at most (rounding).
pub(super) fn share_out(pot: Bytes, claims: &[Claim]) -> Vec<Bytes> {
    if claims.iter().map(|claim| claim.upper).sum::<Bytes>() <= pot {
        return claims.iter().map(|claim| claim.upper).collect();
    }
    let mut got = vec![Bytes::ZERO; claims.len()];
    let mut rest = pot;
    // Those that are not settled, with their even share of the rest.
    let mut open: Vec<(usize, Bytes)> = (0..claims.len()).map(|index| (index, pot)).collect();
    while !open.is_empty() {
        let weight = |index: usize| u64::from(claims[index].weight.get());
        let weights = open.iter().map(|(index, _)| weight(*index)).sum();
        let (mut below, mut above) = (Bytes::ZERO, Bytes::ZERO);
        for (index, share) in &mut open {
            *share = rest.part(weight(*index), weights);
            below += claims[*index].lower.less(*share);
            above += share.less(claims[*index].upper);
        }
        let fits = below == Bytes::ZERO && above == Bytes::ZERO;
        open.retain(|(index, share)| {
            let claim = &claims[*index];
            let settled = if fits {
                *share
            } else if below >= above && *share < claim.lower {
                claim.lower
            } else if below < above && *share > claim.upper {
                claim.upper
            } else {
                return true;
            };
            got[*index] = settled;
            rest = rest.less(settled);
            false
        });
    }
    got
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;

    fn claim(weight: u32, lower: u64, upper: u64) -> Claim {
        Claim {
            weight: Weight::try_from(weight).unwrap(),
            lower: Bytes(lower),
            upper: Bytes(upper),
        }
    }

    /// Hands out one unit at a time to the one that has least per unit of weight.
    fn naive(pot: u64, claims: &[Claim]) -> Vec<u64> {
        let mut got: Vec<u64> = claims.iter().map(|claim| claim.lower.0).collect();
        for _ in got.iter().sum::<u64>()..pot {
            let poorest = (0..got.len())
                .filter(|index| got[*index] < claims[*index].upper.0)
                .min_by(|a, b| {
                    let next = |index: usize, other: usize| {
                        (got[index] + 1) * u64::from(claims[other].weight.get())
                    };
                    next(*a, *b).cmp(&next(*b, *a))
                });
            let Some(poorest) = poorest else { break };
            got[poorest] += 1;
        }
        got
    }

    #[test]
    fn pot_is_shared_by_weight_between_the_bounds() {
        let claims = [
            claim(100, 0, 1000),
            claim(200, 0, 1000),
            claim(100, 0, 50),
            claim(100, 400, 1000),
        ];
        let got = share_out(Bytes(1050), &claims);
        assert_eq!(got, [Bytes(200), Bytes(400), Bytes(50), Bytes(400)]);
    }

    #[test]
    fn upper_bounds_that_fit_and_lower_bounds_that_do_not_are_what_is_given() {
        let claims = [claim(1, 10, 20), claim(1, 30, 40)];
        assert_eq!(share_out(Bytes(60), &claims), [Bytes(20), Bytes(40)]);
        assert_eq!(share_out(Bytes(30), &claims), [Bytes(10), Bytes(30)]);
        assert_eq!(share_out(Bytes(9), &[]), []);
    }

    #[test]
    fn shares_are_those_of_a_naive_hand_out_unit_by_unit() {
        let mut random = SplitMix64::new(7);
        for _ in 0..300 {
            let claims: Vec<Claim> = (0..1 + random.below(8))
                .map(|_| {
                    let lower = random.below(600);
                    let weight = u32::try_from(1 + random.below(9)).unwrap();
                    claim(weight, lower, lower + random.below(900))
                })
                .collect();
            let lower: u64 = claims.iter().map(|claim| claim.lower.0).sum();
            let upper: u64 = claims.iter().map(|claim| claim.upper.0).sum();
            let pot = lower + random.below(1 + upper - lower);
            let (got, naive) = (share_out(Bytes(pot), &claims), naive(pot, &claims));
            let sum: u64 = got.iter().map(|bytes| bytes.0).sum();
            assert!(sum <= pot && pot - sum <= claims.len() as u64);
            for ((claim, got), naive) in claims.iter().zip(&got).zip(naive) {
                assert!(claim.lower <= *got && *got <= claim.upper);
                // Units are whole in both, and rounded at different times.
                assert!(
                    got.0.abs_diff(naive) <= claims.len() as u64,
                    "{got} {naive} of {claims:?}"
                );
            }
        }
    }
}
