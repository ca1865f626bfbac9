// SPDX-License-Identifier: Apache-2.0
//! Which deaths there are to be: a list that follows from a seed.
//!
//! A death has an *act*, which is begun before it; a *victim*; and an instant, as a share of the time that the act is
//! expected to take. So the same seed gives the same acts, victims and shares; how long an act takes, and so the
//! instant in nanoseconds, is the machine's.

use clap::ValueEnum;
use pagetide_random::SplitMix64;

/// What is under way when a process dies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, ValueEnum)]
pub(super) enum Act {
    /// Faults of vCPUs, evictions in the background, requests of disks: what is always under way.
    Running,
    /// A VM is being attached.
    Attaching,
    /// A client has all cold memory evicted.
    Evicting,
    /// Cold memory goes from memory to a slow tier.
    Sinking,
    /// Pages come back from a slow tier.
    SlowFilling,
    /// A VM is being detached.
    Detaching,
    /// A successor recovers what was left by one that was killed just before.
    Recovering,
    /// The daemon is being upgraded.
    Upgrading,
    /// The budget has just become smaller.
    Budgeting,
}

/// Who dies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, ValueEnum)]
pub(super) enum Victim {
    Daemon,
    Dpu,
    Both,
    /// Of an upgrade: the program that is to take over.
    Successor,
}

/// What runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cast {
    /// A daemon with the devices in it.
    Daemon,
    /// A daemon, and a process with its devices.
    WithDpu,
    /// The same, and a stock guest, whose QEMU must not lose its back end in the middle of a handshake.
    Guest,
}

/// One death, or two in a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Death {
    pub act: Act,
    pub victim: Victim,
    /// When, in thousandths of the time that the act is expected to take.
    pub permille: u64,
}

/// An act may be over a little before the death.
const PERMILLE_MAX: u64 = 1_050;

impl Act {
    /// As in figures.
    pub(super) fn name(self) -> String {
        name_of(self)
    }

    /// Those that a cast plays.
    fn of(cast: Cast) -> &'static [Self] {
        match cast {
            Cast::Daemon | Cast::WithDpu => &[
                Self::Running,
                Self::Attaching,
                Self::Evicting,
                Self::Sinking,
                Self::SlowFilling,
                Self::Detaching,
                Self::Recovering,
                Self::Upgrading,
                Self::Budgeting,
            ],
            Cast::Guest => &[
                Self::Running,
                Self::Evicting,
                Self::Sinking,
                Self::SlowFilling,
                Self::Recovering,
                Self::Budgeting,
            ],
        }
    }

    /// Those who may die of it.
    fn victims(self, cast: Cast) -> &'static [Victim] {
        match (self, cast) {
            (Self::Upgrading, _) => &[Victim::Daemon, Victim::Successor, Victim::Both],
            (_, Cast::Daemon) => &[Victim::Daemon],
            // QEMU before 9.1 stays mute for ever if the handshake with a new back end is cut off.
            (Self::Recovering, Cast::Guest) => &[Victim::Daemon],
            (_, Cast::WithDpu | Cast::Guest) => &[Victim::Daemon, Victim::Dpu, Victim::Both],
        }
    }
}

impl Victim {
    /// As in figures.
    pub(super) fn name(self) -> String {
        name_of(self)
    }
}

fn name_of(value: impl ValueEnum) -> String {
    let name = value.to_possible_value();
    name.map_or_else(String::new, |name| name.get_name().replace('-', "_"))
}

impl Death {
    /// Processes that it takes to play it: in the middle of a recovery somebody has died before.
    pub(super) fn kills(self) -> u64 {
        match self.act {
            Act::Recovering => 2,
            _ => 1,
        }
    }
}

/// Deaths of at least `kills` kills. Every act and every victim comes equally often.
pub(super) fn plan(seed: u64, cast: Cast, kills: u64) -> Vec<Death> {
    let mut random = SplitMix64::stream(seed, cast as u64);
    let mut deaths: Vec<Death> = Vec::new();
    let mut planned = 0;
    let mut turn = Vec::new();
    while planned < kills {
        if turn.is_empty() {
            turn = Act::of(cast).to_vec();
            random.shuffle(&mut turn);
        }
        let Some(act) = turn.pop() else { break };
        let victims = act.victims(cast);
        let victim = victims[random.index(victims.len())];
        let death = Death {
            act,
            victim,
            permille: random.below(PERMILLE_MAX),
        };
        planned += death.kills();
        deaths.push(death);
    }
    deaths
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const CASTS: [Cast; 3] = [Cast::Daemon, Cast::WithDpu, Cast::Guest];

    #[test]
    fn same_seed_gives_the_same_deaths_and_another_one_others() {
        for cast in CASTS {
            assert_eq!(plan(5, cast, 200), plan(5, cast, 200));
            assert_ne!(plan(5, cast, 200), plan(6, cast, 200));
        }
        assert_ne!(plan(5, Cast::Daemon, 200), plan(5, Cast::WithDpu, 200));
        assert!(plan(5, Cast::Daemon, 0).is_empty());
    }

    #[test]
    fn each_act_comes_with_each_of_its_victims_and_there_are_enough_kills() {
        for cast in CASTS {
            let deaths = plan(1, cast, 400);
            let kills: u64 = deaths.iter().map(|death| death.kills()).sum();
            assert!((400..=401).contains(&kills));
            let mut found: BTreeMap<(Act, Victim), u64> = BTreeMap::new();
            for death in &deaths {
                *found.entry((death.act, death.victim)).or_default() += 1;
            }
            for act in Act::of(cast) {
                for victim in act.victims(cast) {
                    assert!(found.contains_key(&(*act, *victim)), "{act:?} {victim:?}");
                }
            }
            let expected: usize = Act::of(cast)
                .iter()
                .map(|act| act.victims(cast).len())
                .sum();
            assert_eq!(found.len(), expected);
        }
    }

    #[test]
    fn instants_lie_anywhere_in_an_act() {
        let deaths = plan(3, Cast::WithDpu, 1000);
        for eighth in 0..8 {
            let lies_there = |death: &&Death| death.permille * 8 / PERMILLE_MAX == eighth;
            assert!(deaths.iter().filter(lies_there).count() > 50, "{eighth}");
        }
    }

    #[test]
    fn names_are_those_of_figures() {
        assert_eq!(Act::SlowFilling.name(), "slow_filling");
        assert_eq!(Victim::Dpu.name(), "dpu");
    }
}
