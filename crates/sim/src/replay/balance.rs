// SPDX-License-Identifier: Apache-2.0
//! How much memory is reclaimed from each VM of an overcommitted host (VPRI 7.3: "the reclaim ratio for
//! each VM is dynamically adjusted from 0% to 50%").
//!
//! The paper does not describe the method. Here a VM's *weight* is the number of its sections on the cold
//! side, evicted or not; each fault of the last minute reduces it, since some of them were not so cold. The
//! host's deficit is divided by weight, no VM gives more than its maximum, and each step covers only a
//! quarter of the difference, so that one quiet minute does not cost a VM its memory.

/// One VM's figures, all from the past.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Need {
    /// Its memory, in sections.
    pub sections: u64,
    /// Sections that its limit takes from it now.
    pub taken_sections: u64,
    /// Sections on the cold side, present or not.
    pub cold_sections: u64,
    /// Sections that are absent, and those in the coldest set that no policy protects.
    pub givable_sections: u64,
    /// Faults of CPUs and devices since the last call.
    pub faults: u64,
}

/// Which VMs give the memory that the host lacks. The paper says that the ratios go from 0 to 50 % of a VM
/// and are balanced by pressure (VPRI 3.4, 7.3), and no more; which of these it is decides how old
/// sections are when they are evicted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Division {
    /// All of them, by the weight of what is cold in them. They hardly differ.
    #[default]
    ByNeed,
    /// As few as can: VMs are chosen in the order they were given while what they may give at most fits into what
    /// is wanted. Each of these gives what is in its coldest set; the others divide the rest by need.
    InTurn,
    /// Those that were given first: each gives what is in its coldest set, as long as something is wanted, and those
    /// after them nothing. Where balancing by pressure comes to if only the first have memory that they can spare.
    FirstFirst,
}

/// Cold sections that one fault subtracts.
const SECTIONS_PER_FAULT: u64 = 4;
/// Least weight of a VM, as a share of its size, however hot it is: else no VM might be left to give.
const LEAST_WEIGHT: u64 = 64;
/// Part of the difference to the new shares that one step covers: one in this many.
const STEP: u64 = 4;

impl Need {
    fn weight(&self) -> u64 {
        let doubt = self.faults.saturating_mul(SECTIONS_PER_FAULT);
        self.cold_sections.saturating_sub(doubt) + self.sections / LEAST_WEIGHT + 1
    }

    fn most(&self, most_permille: u64) -> u64 {
        u64::try_from(u128::from(self.sections) * u128::from(most_permille) / 1000)
            .unwrap_or(self.sections)
    }
}

/// Sections to take from each VM so that together they lack `wanted`, none of them more than
/// `most_permille` of its size. If that is impossible, each gives its maximum.
#[must_use]
pub fn balance(needs: &[Need], wanted: u64, most_permille: u64) -> Vec<u64> {
    let mut target = vec![0; needs.len()];
    pour(needs, &mut target, wanted, most_permille);
    let mut taken: Vec<u64> = needs
        .iter()
        .zip(&target)
        .map(|(need, target)| {
            let now = need.taken_sections.min(need.most(most_permille));
            (now * (STEP - 1) + target) / STEP
        })
        .collect();
    let sum: u64 = taken.iter().sum();
    if sum > wanted {
        // The host has gained memory: the whole difference at once.
        return target;
    }
    pour(needs, &mut taken, wanted - sum, most_permille);
    taken
}

/// Like [`balance`], for [`Division::InTurn`]. Which VMs are chosen depends on their sizes alone.
#[must_use]
pub fn in_turn(needs: &[Need], wanted: u64, most_permille: u64) -> Vec<u64> {
    let mut room = wanted;
    let mut taken = vec![0; needs.len()];
    let mut others = Vec::new();
    for (i, need) in needs.iter().enumerate() {
        let most = need.most(most_permille);
        if most <= room {
            room -= most;
            taken[i] = need.givable_sections.min(most);
        } else {
            others.push(i);
        }
    }
    let rest = wanted - taken.iter().sum::<u64>();
    let of_others: Vec<Need> = others.iter().map(|i| needs[*i]).collect();
    let mut parts = vec![0; others.len()];
    pour(&of_others, &mut parts, rest, most_permille);
    for (i, part) in others.into_iter().zip(parts) {
        taken[i] = part;
    }
    // The others are not enough.
    let left = wanted - taken.iter().sum::<u64>();
    pour(needs, &mut taken, left, most_permille);
    taken
}

/// Like [`balance`], for [`Division::FirstFirst`].
#[must_use]
pub fn first_first(needs: &[Need], wanted: u64, most_permille: u64) -> Vec<u64> {
    let mut left = wanted;
    let mut taken = Vec::with_capacity(needs.len());
    for need in needs {
        let gives = need
            .givable_sections
            .min(need.most(most_permille))
            .min(left);
        left -= gives;
        taken.push(gives);
    }
    // What is cold in all of them is not enough.
    pour(needs, &mut taken, left, most_permille);
    taken
}

/// Divides `wanted` among the VMs by weight, in addition to `taken`, as far as there is room.
fn pour(needs: &[Need], taken: &mut [u64], mut wanted: u64, most_permille: u64) {
    while wanted > 0 {
        let room = |need: &Need, taken: u64| need.most(most_permille).saturating_sub(taken);
        let open: Vec<usize> = (0..needs.len())
            .filter(|&i| room(&needs[i], taken[i]) > 0)
            .collect();
        let weights: u128 = open.iter().map(|&i| u128::from(needs[i].weight())).sum();
        if weights == 0 {
            return;
        }
        let asked = wanted;
        for &i in &open {
            // Rounded up, so that each pass makes progress.
            let share = (u128::from(asked) * u128::from(needs[i].weight())).div_ceil(weights);
            let share = u64::try_from(share).unwrap_or(asked);
            let part = share.min(wanted).min(room(&needs[i], taken[i]));
            taken[i] += part;
            wanted -= part;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(sections: u64, taken: u64, cold: u64, faults: u64) -> Need {
        Need {
            sections,
            taken_sections: taken,
            cold_sections: cold,
            givable_sections: cold,
            faults,
        }
    }

    #[test]
    fn colder_vm_gives_more_and_the_sum_is_what_is_wanted() {
        let needs = [need(1000, 0, 900, 0), need(1000, 0, 100, 0)];
        let taken = balance(&needs, 300, 500);
        assert_eq!(taken.iter().sum::<u64>(), 300);
        assert!(taken[0] > 4 * taken[1], "{taken:?}");
    }

    #[test]
    fn faults_take_weight_from_a_vm() {
        let quiet = balance(&[need(1000, 0, 400, 0), need(1000, 0, 400, 0)], 200, 500);
        let faulting = balance(&[need(1000, 0, 400, 60), need(1000, 0, 400, 0)], 200, 500);
        assert_eq!(quiet, [100, 100]);
        assert!(faulting[0] < 90, "{faulting:?}");
    }

    #[test]
    fn nobody_gives_more_than_his_most_and_the_others_give_the_rest() {
        let taken = balance(&[need(100, 0, 100, 0), need(1000, 0, 0, 0)], 300, 500);
        assert!(
            taken[0] <= 50 && taken.iter().sum::<u64>() == 300,
            "{taken:?}"
        );
        assert_eq!(
            balance(&[need(100, 0, 9, 0), need(10, 0, 9, 0)], 300, 500),
            [50, 5]
        );
        assert_eq!(balance(&[], 300, 500), [0; 0]);
    }

    #[test]
    fn in_turn_few_give_all_that_is_cold_and_the_others_the_rest() {
        let needs = [
            need(1000, 0, 300, 0),
            need(1000, 0, 900, 0),
            need(1000, 0, 400, 0),
            need(1000, 0, 400, 0),
        ];
        // No half of a VM fits: all divide it.
        let taken = in_turn(&needs, 200, 500);
        assert!(taken.iter().all(|taken| *taken > 20), "{taken:?}");
        // Two halves fit.
        let taken = in_turn(&needs, 1000, 500);
        assert_eq!(taken, [300, 500, 100, 100]);
        // Nobody has that much cold: the rest is divided.
        let taken = in_turn(&needs, 1900, 500);
        assert_eq!(taken.iter().sum::<u64>(), 1900);
        assert!(taken[0] > 300 && taken[2] > 400, "{taken:?}");
    }

    #[test]
    fn first_give_what_is_cold_and_those_after_them_nothing() {
        let needs = [
            need(1000, 0, 300, 0),
            need(1000, 0, 900, 0),
            need(1000, 0, 400, 0),
        ];
        assert_eq!(first_first(&needs, 600, 500), [300, 300, 0]);
        assert_eq!(first_first(&needs, 1000, 500), [300, 500, 200]);
        // More than is cold, and more than anybody may give.
        let taken = first_first(&needs, 1400, 500);
        assert_eq!(taken.iter().sum::<u64>(), 1400);
        assert_eq!(first_first(&needs, 2000, 500), [500; 3]);
    }

    #[test]
    fn shares_move_a_quarter_of_the_way() {
        let mut taken = vec![200, 0];
        for expected in [175, 156] {
            let needs = [need(1000, taken[0], 400, 0), need(1000, taken[1], 400, 0)];
            taken = balance(&needs, 200, 500);
            assert!(taken[0].abs_diff(expected) <= 1, "{taken:?}");
            assert_eq!(taken.iter().sum::<u64>(), 200);
        }
    }
}
